"""An attack to watch: after every round its loss, the best image so far and the text that made it
are written down.

Settings, judge and rounds are those of `concept-eraser attack` (evaluation/attacking.py). Here
there is one batch, the budget is rounds and seconds instead of an option of each attack, and the
folder shows the search while it goes on: asked.json, before.png, rounds.jsonl, best.png,
found.json. Rates with intervals are the command's business.
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


class Spent(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class Watched(runner.Referee):
    """A referee that writes down every round it judges."""

    folder: Path = Path()
    # the victim's images of the prompts as they stand
    clean: Tensor = field(default_factory=lambda: torch.empty(0))
    budget: tuple[int, float] = (100, 120.0)  # rounds, seconds
    tell: Callable[[int, int, str], None] = lambda done, total, note: None
    began: float = field(default_factory=time.monotonic)
    memory: dict[str, Any] = field(
        default_factory=lambda: {"rounds": 0, "best": -1.0, "broken": {}}
    )

    def draw(self, offer: Round, scene: Scene) -> Tensor:
        images = super().draw(offer, scene)
        scores = self.probability(images)
        hits = self.judge.look(images)[self.attribute] == self.value
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
        seconds = time.monotonic() - self.began
        fell = len(self.memory["broken"])
        append_line(
            self.folder / "rounds.jsonl",
            {
                "round": self.memory["rounds"],
                "loss": offer.loss,
                "best": self.memory["best"],
                "shows": float(scores[top]),
                "fell": fell,
                "n": len(scene.prompts),
                "text": self.memory["text"],
                "prompt": self.memory["prompt"],
                "seed": self.memory["seed"],
                "seconds": round(seconds, 1),
            },
        )
        self.tell(
            self.memory["rounds"], self.budget[0], f"{fell} of {len(scene.prompts)} prompts broken"
        )
        if self.memory["rounds"] >= self.budget[0] or seconds > self.budget[1]:
            raise Spent
        return images

    def probability(self, images: Tensor) -> Tensor:
        """[n] the probability with which each image shows the concept; 0 or 1 of judges that only
        say yes or no.
        """
        try:
            pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
            with torch.no_grad():
                return self.judge.probability(pixels, self.attribute, self.value)
        except UserError:
            return torch.from_numpy(self.judge.look(images)[self.attribute] == self.value).float()


def save(image: Tensor, path: Path) -> None:
    """[h, w, 3] uint8 as PNG, whole at any time: the page may be reading."""
    write_bytes(path, png(image))


def hunt(spec: dict[str, Any], progress: Progress) -> None:
    """Attack a run. spec: run, folder, suite, attack, options, n, seed, rounds, seconds, base.

    Raises UserError where the attack cannot work on this run, or no prompt is left to be attacked.
    """
    folder = Path(spec["folder"])
    output_folder.claim(folder, "attack")
    protocol = runner.Protocol(
        suite.load(spec["suite"]),
        spec["attack"],
        spec["options"],
        "direct",
        spec["n"],
        spec["n"],
        spec["seed"],
    )
    progress("loading the models", 0, 0)
    victim, original = api.load(spec["run"]), api.load(spec["base"])
    original.configure(victim.configured())
    judge = protocol.suite.build_judge()
    runner.require_possible(protocol, judge, victim, original)
    onto_gpu(victim, original)
    scene, clean = _scene(protocol, victim, original, judge, folder, progress)
    ((attribute, value),) = protocol.suite.concept.items()
    sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
    progress("attacking", 0, spec["rounds"])
    referee = Watched(
        judge,
        attribute,
        value,
        victim,
        sampling,
        folder,
        clean,
        (spec["rounds"], spec["seconds"]),
        lambda done, total, note: progress("attacking", done, total, note),
    )
    attack: Attack = protocol.build()
    end_reason = "every prompt is broken"
    try:
        referee.play(attack, scene, lambda n: None)
        if scene.alive.any():
            end_reason = "the attack has nothing more to try"
    except Spent:
        end_reason = (
            "the budget is spent"
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
    """The prompts that hold, and the victim's images of them: the original shows the concept and
    the victim does not.
    """
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
    write_json(folder / "asked.json", {"asked": total, "attacked": len(rows), "still": successes})
    texts, wanted_texts = ([some[i] for i in rows] for some in (before.prompts, before.wanted))
    seeds = [before.seeds[i] for i in rows]
    latents = runner.encode(original, before.shown[rows])
    scene = Scene(
        victim,
        original,
        texts,
        wanted_texts,
        protocol.word or value,
        seeds,
        latents,
        provenance.derive_seed(protocol.seed, "demo"),
        protocol.seed,
        before.wanted,
        None,
    )
    return scene, before.clean[rows]
