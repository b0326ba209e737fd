"""An attack that writes its loss, the best image and its text to files after every round.

Settings, judge and rounds are those of `concept-eraser attack` (evaluation/attacks/runner.py). Here
there is one batch. The budget is rounds and seconds, not an option of each attack. During the
search the folder holds asked.json, before.png, rounds.jsonl, best.png and found.json. The command
gives rates with intervals, this job does not.

With controls the same attack runs on them too: on the same prompts and seeds, and with the rounds
that the victim had. Their files lie in the folders control, control_2, ... inside. found.json then
has the rates and the excess recovery with intervals, as an attack.json has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser import api
from concept_eraser.data import generate
from concept_eraser.data.images import png
from concept_eraser.demo.controls import load_fitting
from concept_eraser.evaluation import suite
from concept_eraser.evaluation.attacks import controlled, runner
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.evaluation.attacks.runner import AttackStart, Attempt, Campaign
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.storage import output_folder
from concept_eraser.storage.writers import append_line, write_bytes, write_json
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress


@dataclass(frozen=True)
class Budget:
    """The budget of an attack.

    Attributes:
        rounds: The largest number of rounds.
        seconds: No new round begins after this time.
        least: The number of rounds that are played however long they take.
    """

    rounds: int
    seconds: float
    least: int = 0

    def is_used_up(self, rounds: int, seconds: float) -> bool:
        return rounds >= self.rounds or (seconds > self.seconds and rounds >= self.least)

    def of_control(self, played: PlayedAttack) -> Budget:
        """Return the budget of the same attack on a control.

        A control has at least the rounds that the victim had. It has no more than these if they
        used up the victim's budget, which may be its time.
        """
        rounds = played.rounds if played.is_budget_used_up else self.rounds
        return replace(self, rounds=rounds, least=played.rounds)


@dataclass(frozen=True)
class RecordingReferee(runner.Referee):
    """A referee that writes every round to the folder."""

    folder: Path = Path()
    # the victim's images of the unchanged prompts
    clean: Tensor = field(default_factory=lambda: torch.empty(0))
    budget: Budget = field(default_factory=lambda: Budget(100, 120.0))
    tell: Callable[[int, int, str], None] = lambda count, total, note: None
    start_time: float = field(default_factory=time.monotonic)
    memory: dict[str, Any] = field(
        default_factory=lambda: {"rounds": 0, "best": -1.0, "broken": {}, "used_up": False}
    )

    def _rounds(self, search: Iterator[Round], *values: Any, **settings: Any) -> None:
        super()._rounds(self._within_budget(search), *values, **settings)

    def _within_budget(self, search: Iterator[Round]) -> Iterator[Round]:
        """Yield the rounds of a search until the budget is used up."""
        for offer in search:
            yield offer
            seconds = time.monotonic() - self.start_time
            if self.budget.is_used_up(self.memory["rounds"], seconds):
                self.memory["used_up"] = True
                return

    def draw(self, offer: Round, scene: Scene) -> Tensor:
        images = super().draw(offer, scene)
        scores = self.probability(images)
        hits = self.judge.classify(images)[self.attribute] == self.value
        top = int(scores.argmax())
        row = int(offer.rows[top])
        text = offer.texts[top] if offer.texts is not None else None
        self.memory["rounds"] += 1
        if float(scores[top]) > self.memory["best"]:
            seed = offer.seeds[top] if offer.seeds is not None else scene.seeds[row]
            self.memory.update(
                best=float(scores[top]), text=text, prompt=scene.prompts[row], seed=seed
            )
            save(self.clean[row], self.folder / "before.png")
            save(images[top], self.folder / "best.png")
        self.memory["broken"].update(
            {int(r): True for r, hit in zip(offer.rows, hits, strict=True) if hit}
        )
        seconds = time.monotonic() - self.start_time
        successes = len(self.memory["broken"])
        append_line(
            self.folder / "rounds.jsonl",
            {
                "round": self.memory["rounds"],
                "loss": offer.loss,
                "best": self.memory["best"],
                "shows": float(scores[top]),
                "fell": successes,
                "n": len(scene.prompts),
                "text": self.memory["text"],
                "prompt": self.memory["prompt"],
                "seed": self.memory["seed"],
                "seconds": round(seconds, 1),
            },
        )
        self.tell(
            self.memory["rounds"],
            self.budget.rounds,
            f"{successes} of {len(scene.prompts)} prompts succeeded",
        )
        return images

    def probability(self, images: Tensor) -> Tensor:
        """Return the probability [n] that each image shows the concept.

        It is 0 or 1 for a judge without probabilities.
        """
        try:
            pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
            with torch.no_grad():
                return self.judge.probability(pixels, self.attribute, self.value)
        except UserError:
            return torch.from_numpy(
                self.judge.classify(images)[self.attribute] == self.value
            ).float()


def save(image: Tensor, path: Path) -> None:
    """Write an image [h, w, 3] uint8 as PNG, atomically, because the page may read it meanwhile."""
    write_bytes(path, png(image))


@dataclass(frozen=True)
class PlayedAttack:
    """An attack that has ended.

    Attributes:
        attempts: The result of each prompt, also of those that show the concept without an attack.
        curve: The number of successful prompts after each round.
        cost: The cost by what was counted, such as images and gradients.
        guidance: The guidance of the prompts.
        rounds: The number of rounds.
        seconds: The time of the attack.
        is_budget_used_up: Whether the budget ended the attack.
    """

    attempts: list[Attempt]
    curve: list[dict[str, Any]]
    cost: dict[str, int]
    guidance: float
    rounds: int
    seconds: float
    is_budget_used_up: bool

    def summary(self) -> dict[str, Any]:
        """Return why the attack ended, the successes among the attacked prompts, and the cost."""
        attacked = [attempt for attempt in self.attempts if not attempt.pre]
        broken = sum(attempt.success for attempt in attacked)
        end_reason = "every prompt succeeded"
        if broken < len(attacked):
            end_reason = (
                "the budget is used up"
                if self.is_budget_used_up
                else "the attack ended before its budget"
            )
        return {"ended": end_reason, "broken": broken, "n": len(attacked), "cost": self.cost}


@dataclass(frozen=True)
class DemoAttack:
    """The attack of a job, the same for the victim and for the controls."""

    protocol: runner.Protocol
    original: Model
    judge: Any
    progress: Progress

    def play(
        self,
        model: Model,
        folder: Path,
        *,
        budget: Budget,
        guidance: float | None = None,
        what: str = "attacking",
    ) -> PlayedAttack:
        """Attack a model. Its prompts have one guidance, since they are attacked at once.

        Args:
            model: The attacked model.
            folder: The folder of its files.
            budget: The rounds and seconds.
            guidance: The guidance of the prompts (default: the one of most prompts).
            what: The work, for the progress.

        Raises:
            UserError: The original shows the concept for no prompt. Or the model shows it for all
                of them, where no guidance is given.
        """
        ((attribute, value),) = self.protocol.suite.concept.items()
        sampling = generate.Sampling(**self.protocol.suite.sampling.model_dump())
        before = runner.draw_start(
            self.protocol, self.judge, model, self.original, progress=self.progress
        )
        guidances = [before.sampling_of(i, sampling).guidance for i in range(len(before.prompts))]
        attacked = [i for i, pre in enumerate(before.pre) if not pre]
        if guidance is None:
            self._require_prompts(before, attacked)
            some = runner.batches_of(before, attacked, size=len(attacked), sampling=sampling)
            guidance = guidances[max(some.values(), key=len)[0]]
        rows = [i for i, own in enumerate(guidances) if own == guidance]
        attacked = [i for i in attacked if i in rows]
        write_json(
            folder / "asked.json",
            {
                "asked": len(before.prompts) + before.left_out,
                "attacked": len(attacked),
                "still": int(before.pre.sum()),
            },
        )
        attempts = {
            i: Attempt(
                before.prompts[i], before.seeds[i], True, True, guidance=before.own_guidance(i)
            )
            for i in rows
            if i not in attacked
        }
        batch: dict[str, Any] = {"attempts": [], "curve": [], "cost": {}, "seconds": 0.0}
        memory: dict[str, Any] = {"rounds": 0, "used_up": False}
        if attacked:
            scene = self._scene(model, before, attacked)
            attack: Attack = self.protocol.build()
            self.progress(what, 0, budget.rounds)
            referee = RecordingReferee(
                self.judge,
                attribute,
                value=value,
                victim=model,
                folder=folder,
                clean=before.clean_images[attacked],
                budget=budget,
                tell=lambda count, total, note: self.progress(what, count, total, note),
            )
            batch, memory = referee.play(attack, scene, lambda n: None), referee.memory
        pairs = zip(attacked, batch["attempts"], strict=True)
        attempts |= {
            i: replace(Attempt(**attempt), guidance=before.own_guidance(i)) for i, attempt in pairs
        }
        return PlayedAttack(
            [attempts[i] for i in rows],
            curve=batch["curve"],
            cost=batch["cost"],
            guidance=guidance,
            rounds=memory["rounds"],
            seconds=batch["seconds"],
            is_budget_used_up=memory["used_up"],
        )

    def campaign(self, model: Model, played: PlayedAttack) -> Campaign:
        """Return the results of an attack on a model as those of `concept-eraser attack`."""
        models = {"victim": model, "original": self.original}
        n = sum(not attempt.pre for attempt in played.attempts)
        return Campaign(
            protocol=self.protocol.as_dict(),
            models={
                name: f"{one.source} ({generate.model_fingerprint(one)})"
                for name, one in models.items()
            },
            attempts=played.attempts,
            curves=[played.curve],
            cost={f"{unit} a prompt": round(count / n, 1) for unit, count in played.cost.items()},
            seconds=played.seconds,
            environment=provenance.describe(),
        )

    def _require_prompts(self, before: AttackStart, attacked: Sequence[int]) -> None:
        if not attacked:
            (value,) = self.protocol.suite.concept.values()
            n = len(before.prompts)
            raise UserError(
                f"nothing to attack: of {n + before.left_out} prompts the original shows "
                f"{value!r} for {n}, and the erased model still shows it for "
                f"{int(before.pre.sum())} of these without any attack"
            )

    def _scene(self, model: Model, before: AttackStart, rows: Sequence[int]) -> Scene:
        """Return the prompts to attack. For these the original shows the concept."""
        protocol = self.protocol
        (value,) = protocol.suite.concept.values()
        texts, concept_texts = (
            [column[i] for i in rows] for column in (before.prompts, before.concept_prompts)
        )
        sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
        return Scene(
            model,
            self.original,
            prompts=texts,
            concept_prompts=concept_texts,
            concept=protocol.word or value,
            seeds=[before.seeds[i] for i in rows],
            targets=runner.encode(self.original, before.concept_images[rows]),
            seed=provenance.derive_seed(protocol.seed, "demo"),
            root=protocol.seed,
            corpus=before.concept_prompts,
            memory=None,
            sampling=before.sampling_of(rows[0], sampling),
            others=runner.retain_prompts(protocol.suite),
        )


def run_attack(spec: dict[str, Any], progress: Progress) -> None:
    """Attack a run, and its controls.

    spec: run, folder, suite, attack, options, n, seed, rounds, seconds, base, and maybe controls.

    A control that cannot be compared with the run is left out. found.json states the reason. Raises
    UserError if the attack cannot work on this run, or there is no prompt to attack.
    """
    folder = Path(spec["folder"])
    output_folder.claim(folder, "attack")
    protocol = runner.Protocol(
        suite=suite.load(spec["suite"]),
        attack=spec["attack"],
        options=spec["options"],
        group="direct",
        n=spec["n"],
        batch=spec["n"],
        seed=spec["seed"],
    )
    progress("loading the models", 0, 0)
    victim, original = api.load(spec["run"]), api.load(spec["base"])
    original.configure(victim.configured())
    judge = protocol.suite.build_judge()
    runner.require_possible(protocol, judge, victim, original)
    fitting, left_out = load_fitting(
        spec.get("controls", ()),
        original,
        concept=protocol.suite.concept,
        texts=protocol.prompts().texts,
        require=lambda model: runner.require_possible(protocol, judge, model, original),
    )
    controls = list(fitting.values())
    onto_gpu(victim, original, *(control.model for control in controls))
    attack, budget = (
        DemoAttack(protocol, original, judge, progress),
        Budget(spec["rounds"], spec["seconds"]),
    )
    played = attack.play(victim, folder, budget=budget)
    write_json(folder / "found.json", played.summary())
    if not controls and not left_out:
        return
    campaign = attack.campaign(victim, played)
    comparisons = []
    for number, control in enumerate(controls, 1):
        name = controlled.FOLDER if number == 1 else f"{controlled.FOLDER}_{number}"
        on_control = attack.play(
            control.model,
            folder / name,
            budget=budget.of_control(played),
            guidance=played.guidance,
            what=f"attacking control {number} of {len(controls)}",
        )
        other = attack.campaign(control.model, on_control)
        comparison = controlled.compare(protocol, campaign, other, control.record)
        # relearning savings need the attack's own number of steps as the budget
        comparisons.append(replace(comparison, savings={}))
    content = replace(campaign, controls=comparisons).as_dict()
    against_controls = {"control": content["control"]} if comparisons else {}
    summary = {"protocol": {"attack": spec["attack"]}, "left_out": left_out}
    write_json(folder / "found.json", played.summary() | summary | against_controls)
