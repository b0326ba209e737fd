"""Compare an iteration of an attack with the bare passes that it needs.

    python -m benchmarks.attack_steps --state "one of two cores, the other one busy"

An attack runs with few iterations and with more, and one judged image at the end of both. The
difference of their CPU seconds is that of the iterations alone. The bare passes have the prompts
that the attack has, which are those of `--batch` that need an attack:

* a forward pass of the UNet, and a backward pass to the embeddings, with frozen weights
* for attacks on tokens, the same of the text encoder
* for P4D, a forward pass of the original's UNet

Each repetition runs all of them in turn. The ratios are medians of the ratios within a repetition.
It takes a few minutes on one core, writes attack_steps.json and renders the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import positive
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.attacks.base import soft_embed
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.loading import load
from concept_eraser.models.vocabulary import Slots
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "attack_steps.json", HERE / "README.md"
VICTIM, ORIGINAL, SUITE = "tiny-sd-without-star", "tiny-sd", "tiny_star"
FEW, MORE = 4, 12  # iterations


@dataclass(frozen=True)
class Measured:
    """An attack, and the bare passes of one of its iterations.

    Attributes:
        options: Its options for a number of iterations and a batch, with one judged image at the
            end.
        passes: The names of the bare passes.
    """

    options: Callable[[int, int], dict[str, Any]]
    passes: tuple[str, ...]


ATTACKS: Mapping[str, Measured] = {
    "soft_prompt": Measured(lambda n, batch: {"steps": n, "every": n}, ("UNet",)),
    "concept_inversion": Measured(
        lambda n, batch: {"steps": n, "every": n, "batch": batch}, ("UNet", "text encoder")
    ),
    "unlearn_diff": Measured(
        lambda n, batch: {"times": 1, "iterations": n}, ("UNet", "text encoder")
    ),
    "p4d": Measured(
        lambda n, batch: {"steps": n, "every": n}, ("UNet", "text encoder", "original")
    ),
}


def bare_passes(victim: Model, original: Model, batch: int) -> dict[str, Callable[[], object]]:
    """Return the bare passes of a batch, by name."""
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(batch, *victim.latent_shape(), generator=generator)
    t = torch.randint(0, victim.timesteps, (batch,), generator=generator)
    condition = victim.encode(["a red star on a white background"] * batch)
    slots = victim.words.free_token_every("a red star on a white background", 3)
    together = Slots(slots.ids.repeat(batch, 1), slots.places.repeat(batch, 1))
    tokens = victim.words.usable.nonzero()[: together.places.shape[1], 0].repeat(batch, 1)

    def unet() -> Tensor:
        states = condition.tensors["states"].clone().requires_grad_()
        loss = victim.denoise(noisy, t, Condition({"states": states})).square().mean()
        return torch.autograd.grad(loss, states)[0]

    def text_encoder() -> Tensor:
        rows = victim.table.detach()[tokens].clone().requires_grad_()
        loss = soft_embed(victim, together, tokens, rows).tensors["states"].square().mean()
        return torch.autograd.grad(loss, rows)[0]

    @torch.no_grad()
    def forward() -> Tensor:
        return original.denoise(noisy, t, condition)

    return {"UNet": unet, "text encoder": text_encoder, "original": forward}


def seconds_of(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def repeat(run: Callable[[], object]) -> None:
    for _ in range(MORE):
        run()


def count_attacked(suite: suites.Suite, victim: Model, original: Model, n: int) -> int:
    """Return how many of n prompts an attack has in its batch.

    It leaves out those that the original does not show, and those that need no attack.
    """
    protocol = runner.Protocol(suite, "soft_prompt", n=n, batch=n)
    start = runner.draw_start(protocol, suite.build_judge(), victim, original)
    return int((~start.pre).sum())


def measure(names: list[str], batch: int, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each attack: CPU seconds of an iteration and of its bare passes."""
    victim, original, suite = load(VICTIM), load(ORIGINAL), suites.load(SUITE)
    for model in (victim, original):
        for part in model.parts.values():
            part.requires_grad_(False)
    attacked = count_attacked(suite, victim, original, batch)
    passes = bare_passes(victim, original, attacked)
    bare: dict[str, list[float]] = {name: [] for name in passes}
    taken: dict[str, list[float]] = {name: [] for name in names}

    def attack(name: str, iterations: int) -> None:
        options = ATTACKS[name].options(iterations, attacked)
        runner.run(runner.Protocol(suite, name, options, n=batch, batch=batch), victim, original)

    for repetition in range(1 + repetitions):  # the first one fills caches
        for name, run in passes.items():
            spent = seconds_of(partial(repeat, run))
            if repetition:
                bare[name].append(spent / MORE)
        for name in names:
            few, more = (seconds_of(partial(attack, name, n)) for n in (FEW, MORE))
            if repetition:
                taken[name].append((more - few) / (MORE - FEW))
    return [row(name, attacked, taken[name], bare) for name in names]


def row(
    name: str, batch: int, taken: list[float], bare: Mapping[str, list[float]]
) -> dict[str, Any]:
    needed = [sum(some) for some in zip(*(bare[one] for one in ATTACKS[name].passes), strict=True)]
    ratios = [a / b for a, b in zip(taken, needed, strict=True)]
    return {
        "attack": name,
        "batch": batch,
        "n": len(taken),
        "commit": provenance.commit(),
        "passes": list(ATTACKS[name].passes),
        "cpu_seconds": round(statistics.median(taken), 4),
        "bare_cpu_seconds": round(statistics.median(needed), 4),
        "ratio": [round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))],
    }


def block(content: dict[str, Any]) -> str:
    """Return the table of README.md."""
    lines = [["Attack", "Batch", "Bare passes", "Bare, CPU s", "Iteration / bare passes", "n"]]
    for one in content["rows"]:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*one["ratio"])
        passes, bare = ", ".join(one["passes"]), f"{one['bare_cpu_seconds']:.3f}"
        lines.append([one["attack"], str(one["batch"]), passes, bare, ratio, str(one["n"])])
    return f"{table(lines)}\n\ntiny-sd, {machine_note(content)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--repetitions", type=positive, default=5)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    rows = measure(args.attacks, args.batch, args.repetitions)
    content = {"environment": provenance.describe(), "state": args.state, "rows": rows}
    write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    print(block(content))
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"attack-steps": lambda: block(content)}))


if __name__ == "__main__":
    main()
