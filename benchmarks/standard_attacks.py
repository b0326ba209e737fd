"""Compare the seconds of the leaderboard's attacks with those of a former version.

    git worktree add --detach ../former c04d1ec
    python -m benchmarks.standard_attacks --former ../former --state "one of two cores"

Each version attacks a model that never learned the star, in a process of its own with one thread
and an empty cache. The attacks, their budgets and the number of prompts are those of the study
tiny_leaderboard. Ring-A-Bell also attacks a next model, whose UNet differs a little. Its prompts
depend on the text encoder alone, so a version may have stored them.

The numbers are CPU seconds, with the loading of the models. Each repetition runs both versions, in
alternating order. The ratios are medians of the ratios within a repetition, with the smallest and
the largest one. A repetition takes about ten minutes. The command writes standard_attacks.json and
renders the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.arguments import positive
from concept_eraser.models.loading import load
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "standard_attacks.json", HERE / "README.md"
WORKER = HERE / "standard_attacks_worker.py"
STUDY = HERE.parent / "studies" / "configs" / "tiny_leaderboard.yaml"
TASK, VICTIM, RING_A_BELL = "star", "tiny-sd-without-star", "ring_a_bell"
NEXT, ALL, ALL_NEXT = f"{RING_A_BELL}, next model", "all", "all, next model"


def save_victims(folder: Path) -> tuple[str, str]:
    """Write the model and the next one as folders that every version reads."""
    model = load(VICTIM)
    paths = folder / "victim", folder / "next"
    model.save(paths[0])
    with torch.no_grad():
        model.pipeline.unet.conv_out.bias.mul_(0.999)
    model.save(paths[1])
    return str(paths[0]), str(paths[1])


def attacks_of(study: Mapping[str, Any], victims: tuple[str, str]) -> dict[str, tuple[Any, ...]]:
    """Return each measured attack by its label: the victim, the attack's name and its options."""
    attacks = {name: (victims[0], name, options) for name, options in study["attacks"].items()}
    return {**attacks, NEXT: (victims[1], RING_A_BELL, study["attacks"][RING_A_BELL])}


def cpu_seconds(
    tree: Path, protocol: Mapping[str, Any], attacks: Mapping[str, tuple[Any, ...]]
) -> dict[str, float]:
    """Return the CPU seconds of each attack with the version in a folder.

    Raises:
        SystemExit: The attacks failed, with the end of the output.
    """
    work = json.dumps({"protocol": dict(protocol), "attacks": list(attacks.values())})
    with tempfile.TemporaryDirectory() as cache:
        result = subprocess.run(
            [sys.executable, str(WORKER), work],
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": str(tree),
                "OMP_NUM_THREADS": "1",
                "CONCEPT_ERASER_CACHE": cache,
            },
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout[-1000:]}{result.stderr[-2000:]}")
    return dict(zip(attacks, json.loads(result.stdout.splitlines()[-1]), strict=True))


def with_totals(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds with those of all attacks on a first model, and on the next one."""
    total = sum(seconds.values()) - seconds[NEXT]
    following = total - seconds[RING_A_BELL] + seconds[NEXT]
    return {**seconds, ALL: total, ALL_NEXT: following}


def rows_of(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return a row for each attack and for their sums, from the seconds of each repetition."""
    rows = []
    for name in before[0]:
        ratios = [now[name] / then[name] for then, now in zip(before, after, strict=True)]
        rows.append(
            {
                "attack": name,
                "n": len(ratios),
                "former_cpu_seconds": round(statistics.median(one[name] for one in before), 1),
                "cpu_seconds": round(statistics.median(one[name] for one in after), 1),
                "ratio": [
                    round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))
                ],
            }
        )
    return rows


def block(content: Mapping[str, Any]) -> str:
    """Return the table of README.md."""
    lines = [["Attack", "Former, CPU s", "Now, CPU s", "Now / former", "n"]]
    for one in content["rows"]:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*one["ratio"])
        former, now = f"{one['former_cpu_seconds']:.1f}", f"{one['cpu_seconds']:.1f}"
        lines.append([one["attack"], former, now, ratio, str(one["n"])])
    former = f"Former: commit {content['former']}."
    return f"{table(lines)}\n\n{former} Now: {machine_note(content)}"


def commit_of(tree: Path) -> str:
    words = ["git", "-C", str(tree), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--former", type=Path, required=True, help="a checkout of that version")
    parser.add_argument("--attacks", nargs="*", help="only these of the study, by name")
    parser.add_argument("--prompts", type=positive, help="in place of the study's number")
    parser.add_argument("--repetitions", type=positive, default=2)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    study = yaml.safe_load(STUDY.read_text())
    if args.attacks:
        if unknown := [name for name in args.attacks if name not in study["attacks"]]:
            parser.error(f"unknown attack {unknown[0]!r}; there are: {', '.join(study['attacks'])}")
        chosen = {*args.attacks, RING_A_BELL}
        study["attacks"] = {n: one for n, one in study["attacks"].items() if n in chosen}
    protocol = {
        **study["attack"],
        "suite": study["tasks"][TASK]["suite"],
        "before": study.get("model", "tiny-sd"),
        "n": args.prompts or study["attack"]["n"],
    }
    former = args.former.resolve()
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        attacks = attacks_of(study, save_victims(Path(folder)))
        versions = ((former, before), (HERE.parent, after))
        for repetition in range(args.repetitions):
            for tree, place in versions[:: 1 if repetition % 2 == 0 else -1]:
                place.append(with_totals(cpu_seconds(tree, protocol, attacks)))
                print(f"{commit_of(tree)}: {place[-1][ALL]:.0f} s", flush=True)
    content = {
        "environment": provenance.describe(),
        "state": args.state,
        "former": commit_of(former),
        "rows": rows_of(before, after),
    }
    write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    print(block(content))
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"standard-attacks": lambda: block(content)}))


if __name__ == "__main__":
    main()
