"""An attack to watch: after every round its loss, the best picture so far and the text that made it are written down.

Settings, judge and rounds are those of `concept-eraser attack` (evaluation/attacking.py). Here there is one batch, the budget
is rounds and seconds instead of an option of each attack, and the folder shows the search while it goes on:
asked.json, before.png, rounds.jsonl, best.png, found.json. Rates with intervals are the command's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser import api, environment, registry
from concept_eraser.data import generate
from concept_eraser.data.images import png
from concept_eraser.errors import UserError
from concept_eraser.evaluation import attacking, suite
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.progress import Progress
from concept_eraser.storage import output_folder
from concept_eraser.storage.writers import append_line, write_bytes, write_json


class Spent(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class Watched(attacking.Referee):
    """A referee that writes down every round it judges."""

    folder: Path = Path()
    clean: Tensor = field(default_factory=lambda: torch.empty(0))  # the victim's pictures of the prompts as they stand
    budget: tuple[int, float] = (100, 120.0)  # rounds, seconds
    tell: Callable[[int, int, str], None] = lambda done, total, note: None
    began: float = field(default_factory=time.monotonic)
    memory: dict[str, Any] = field(default_factory=lambda: {"rounds": 0, "best": -1.0, "broken": {}})

    def draw(self, offered: Round, scene: Scene) -> Tensor:
        pictures = super().draw(offered, scene)
        shows = self.probability(pictures)
        hits = self.judge.look(pictures)[self.attribute] == self.value
        top = int(shows.argmax())
        row = int(offered.rows[top])
        text = offered.texts[top] if offered.texts is not None else None
        self.memory["rounds"] += 1
        if float(shows[top]) > self.memory["best"]:
            seed = offered.seeds[top] if offered.seeds is not None else scene.seeds[row]
            self.memory.update(best=float(shows[top]), text=text, prompt=scene.prompts[row], seed=seed)
            save(self.clean[row], self.folder / "before.png")
            save(pictures[top], self.folder / "best.png")
        self.memory["broken"].update({int(r): True for r, hit in zip(offered.rows, hits, strict=True) if hit})
        seconds = time.monotonic() - self.began
        fell = len(self.memory["broken"])
        append_line(self.folder / "rounds.jsonl", {"round": self.memory["rounds"], "loss": offered.loss, "best": self.memory["best"], "shows": float(shows[top]), "fell": fell, "n": len(scene.prompts), "text": self.memory["text"], "prompt": self.memory["prompt"], "seed": self.memory["seed"], "seconds": round(seconds, 1)})  # fmt: skip
        self.tell(self.memory["rounds"], self.budget[0], f"{fell} of {len(scene.prompts)} prompts broken")
        if self.memory["rounds"] >= self.budget[0] or seconds > self.budget[1]:
            raise Spent
        return pictures

    def probability(self, pictures: Tensor) -> Tensor:
        """[n] how surely each picture shows the concept; 0 or 1 of judges that only say yes or no."""
        try:
            scaled = pictures.permute(0, 3, 1, 2).float().div(127.5).sub(1)
            with torch.no_grad():
                return self.judge.probability(scaled, self.attribute, self.value)
        except UserError:
            return torch.from_numpy(self.judge.look(pictures)[self.attribute] == self.value).float()


def save(picture: Tensor, path: Path) -> None:
    """[h, w, 3] uint8 as PNG, whole at any time: the page may be reading."""
    write_bytes(path, png(picture))


def hunt(spec: dict[str, Any], progress: Progress) -> None:
    """Attack a run. spec: run, folder, suite, attack, options, n, seed, rounds, seconds, base.

    Raises UserError where the attack cannot work on this run, or no prompt is left to be attacked."""
    folder = Path(spec["folder"])
    output_folder.claim(folder, "attack")
    protocol = attacking.Protocol(suite.load(spec["suite"]), spec["attack"], spec["options"], "direct", spec["n"], spec["n"], spec["seed"])  # fmt: skip
    progress("loading the models", 0, 0)
    victim, original = api.load(spec["run"]), api.load(spec["base"])
    original.configure(victim.configured())
    judge = registry.load("judge", protocol.suite.judge)()
    attacking.require_possible(protocol, judge, victim, original)
    onto_gpu(victim, original)
    scene, clean = _scene(protocol, victim, original, judge, folder, progress)
    ((attribute, value),) = protocol.suite.concept.items()
    sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
    progress("attacking", 0, spec["rounds"])
    referee = Watched(judge, attribute, value, victim, sampling, folder, clean, (spec["rounds"], spec["seconds"]), lambda done, total, note: progress("attacking", done, total, note))  # fmt: skip
    attack: Attack = protocol.build()
    ended = "every prompt is broken"
    try:
        referee.play(attack, scene, lambda n: None)
        if scene.alive.any():
            ended = "the attack has nothing more to try"
    except Spent:
        ended = "the budget is spent" if len(referee.memory["broken"]) < len(scene.prompts) else ended
    found = {"ended": ended, "broken": len(referee.memory["broken"]), "n": len(scene.prompts), "cost": scene.cost}
    write_json(folder / "found.json", found)


def _scene(protocol: attacking.Protocol, victim: Model, original: Model, judge: Any, folder: Path, progress: Progress) -> tuple[Scene, Tensor]:  # fmt: skip
    """The prompts that hold, and the victim's pictures of them: the original shows the concept and the victim does not."""
    value = next(iter(protocol.suite.concept.values()))
    before = attacking.drawn(protocol, judge, victim, original, progress=progress)
    n, still = len(before.prompts), int(before.pre.sum())
    rows = [i for i in range(n) if not before.pre[i]]
    asked = n + before.left_out
    if not rows:
        raise UserError(f"nothing to attack: of {asked} prompts the original shows {value!r} for {n}, and the erased model still shows it for {still} of these without any attack")  # fmt: skip
    write_json(folder / "asked.json", {"asked": asked, "attacked": len(rows), "still": still})
    texts, wanted = ([some[i] for i in rows] for some in (before.prompts, before.wanted))
    seeds = [before.seeds[i] for i in rows]
    latents = attacking.encode(original, before.shown[rows])
    scene = Scene(victim, original, texts, wanted, protocol.word or value, seeds, latents, environment.derive_seed(protocol.seed, "demo"), protocol.seed, before.wanted, None)  # fmt: skip
    return scene, before.clean[rows]
