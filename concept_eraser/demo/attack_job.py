"""An attack that writes its loss, the best image and its text to files after every round.

Settings, judge and rounds are those of `concept-eraser attack` (evaluation/attacks/runner.py). Here
there is one batch. The budget is rounds and seconds, not an option of each attack. During the
search the folder holds asked.json, before.png, rounds.jsonl, best.png and found.json. The command
gives rates with intervals, this job does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser import api
from concept_eraser.data import generate
from concept_eraser.data.images import png
from concept_eraser.evaluation import suite
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.storage import output_folder
from concept_eraser.storage.writers import append_line, write_bytes, write_json
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress


class BudgetUsedUp(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class RecordingReferee(runner.Referee):
    """A referee that writes every round to the folder."""

    folder: Path = Path()
    # the victim's images of the unchanged prompts
    clean: Tensor = field(default_factory=lambda: torch.empty(0))
    budget: tuple[int, float] = (100, 120.0)  # rounds, seconds
    tell: Callable[[int, int, str], None] = lambda count, total, note: None
    start_time: float = field(default_factory=time.monotonic)
    memory: dict[str, Any] = field(
        default_factory=lambda: {"rounds": 0, "best": -1.0, "broken": {}}
    )

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
            self.budget[0],
            f"{successes} of {len(scene.prompts)} prompts succeeded",
        )
        if self.memory["rounds"] >= self.budget[0] or seconds > self.budget[1]:
            raise BudgetUsedUp
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


def run_attack(spec: dict[str, Any], progress: Progress) -> None:
    """Attack a run. spec: run, folder, suite, attack, options, n, seed, rounds, seconds, base.

    Raises UserError if the attack cannot work on this run, or there is no prompt to attack.
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
    onto_gpu(victim, original)
    scene, clean = _scene(
        protocol, victim, original=original, judge=judge, folder=folder, progress=progress
    )
    ((attribute, value),) = protocol.suite.concept.items()
    progress("attacking", 0, spec["rounds"])
    referee = RecordingReferee(
        judge,
        attribute,
        value=value,
        victim=victim,
        folder=folder,
        clean=clean,
        budget=(spec["rounds"], spec["seconds"]),
        tell=lambda count, total, note: progress("attacking", count, total, note),
    )
    attack: Attack = protocol.build()
    end_reason = "every prompt succeeded"
    try:
        referee.play(attack, scene, lambda n: None)
        if scene.alive.any():
            end_reason = "the attack ended before its budget"
    except BudgetUsedUp:
        end_reason = (
            "the budget is used up"
            if len(referee.memory["broken"]) < len(scene.prompts)
            else end_reason
        )
    summary = {
        "ended": end_reason,
        "broken": len(referee.memory["broken"]),
        "n": len(scene.prompts),
        "cost": scene.cost,
    }
    write_json(folder / "found.json", summary)


def _scene(
    protocol: runner.Protocol,
    victim: Model,
    original: Model,
    judge: Any,
    folder: Path,
    progress: Progress,
) -> tuple[Scene, Tensor]:
    """Return the prompts to attack, and the victim's images of them.

    For these prompts the original shows the concept and the victim does not. They have one
    guidance, since they are attacked at once: the one of most prompts.
    """
    sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
    value = next(iter(protocol.suite.concept.values()))
    before = runner.draw_start(protocol, judge, victim, original, progress=progress)
    n, successes = len(before.prompts), int(before.pre.sum())
    rows = [i for i in range(n) if not before.pre[i]]
    total = n + before.left_out
    if not rows:
        raise UserError(
            f"nothing to attack: of {total} prompts the original shows {value!r} for "
            f"{n}, and the erased model still shows it for {successes} of these without any "
            "attack"
        )
    rows = max(runner.batches_of(before, rows, size=len(rows), sampling=sampling).values(), key=len)
    write_json(folder / "asked.json", {"asked": total, "attacked": len(rows), "still": successes})
    texts, concept_texts = (
        [column[i] for i in rows] for column in (before.prompts, before.concept_prompts)
    )
    seeds = [before.seeds[i] for i in rows]
    latents = runner.encode(original, before.concept_images[rows])
    scene = Scene(
        victim,
        original,
        prompts=texts,
        concept_prompts=concept_texts,
        concept=protocol.word or value,
        seeds=seeds,
        targets=latents,
        seed=provenance.derive_seed(protocol.seed, "demo"),
        root=protocol.seed,
        corpus=before.concept_prompts,
        memory=None,
        sampling=before.sampling_of(rows[0], sampling),
        others=runner.retain_prompts(protocol.suite),
    )
    return scene, before.clean_images[rows]
