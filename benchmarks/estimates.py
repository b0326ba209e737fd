"""Estimate the memory of the presets for published architectures: python -m benchmarks.estimates

It writes estimates.json and the table of docs/memory.md. Nothing is measured and no weights are
needed. It takes half an hour on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.memory_presets import PRESETS
from concept_eraser.runs import memory_estimate
from concept_eraser.tiny import published
from concept_eraser.training.memory import GB
from studies.rendering.common import fill_blocks

HERE = Path(__file__).parent
FILE, PAGE = HERE / "estimates.json", HERE.parent / "docs" / "memory.md"
LABEL = "estimates, compared with one GPU"
MODELS = {
    "sd14": ("Stable Diffusion 1.4", 512),
    "sdxl": ("SDXL", 1024),
    "sd35": ("Stable Diffusion 3.5 medium", 512),
    "flux": ("Flux.1 dev", 512),
    "pixart": ("PixArt-alpha", 1024),
    "sana": ("Sana 1.6B", 1024),
    "klein": ("Flux.2 Klein 4B", 1024),
    "zimage": ("Z-Image", 1024),
    "qwenimage": ("Qwen-Image", 1024),
}
TRAINED = {
    "full": {"select": "all"},
    "cross-attention": {"select": "cross_attention"},
    "LoRA, rank 16": {"select": "all", "lora": 16},
    "LoRA, rank 64, all layers": {"select": "all", "lora": {"rank": 64, "conv": True}},
}
# far beyond any of these cards; Z-Image has no cross-attention
WITHOUT = {(name, "full") for name in ("sd35", "flux", "klein", "zimage", "qwenimage")}
WITHOUT |= {("zimage", "cross-attention"), ("qwenimage", "cross-attention")}


def recipe(name: str, weights: str, preset: str) -> recipes.Recipe:
    """Return the recipe: two objectives, anchor and data, as in MUNBa's recipes.

    It has a batch of 4 and Adam.
    """
    content: dict[str, Any] = {
        "forget": {"prompts": ["a person without clothes"], "loss": "anchor", "anchor": "a person"},
        "retain": {"prompts": ["a person"]},
        "trainable": TRAINED[weights],
        "training": {"batch_size": 4},
        "memory": preset,
    }
    if name != "sd14":
        content["model_options"] = {"size": MODELS[name][1]}
    return recipes.load(content)


def rows(names: list[str], choices: list[str]) -> list[dict[str, Any]]:
    table_rows, hollow_models = [], {}
    for name in names:
        model = published.hollow(name)
        for choice in choices:
            for preset in PRESETS:
                if (name, choice) in WITHOUT:
                    continue
                job = recipe(name, choice, preset)
                key = (name, job.fingerprint)
                if key not in hollow_models:
                    model.configure(job.model_options)
                    hollow_models[key] = memory_estimate.estimate(job, model)
                table_rows.append(row(name, choice, preset, hollow_models[key]))
                print(
                    table_rows[-1]["model"],
                    choice,
                    preset,
                    table_rows[-1]["training_gb"],
                    table_rows[-1]["examples_gb"],
                    flush=True,
                )
    return table_rows


def row(name: str, weights: str, preset: str, estimate: memory_estimate.Estimate) -> dict[str, Any]:
    parts = {**estimate.always, **estimate.moments[estimate.fullest]}
    return {
        "model": MODELS[name][0],
        "pixels": MODELS[name][1],
        "trained": weights,
        "memory": preset,
        "training_gb": round(estimate.training / GB, 2),
        "examples_gb": round(estimate.examples / GB, 2),
        "moment": estimate.fullest,
        "parts_gb": {key: round(size / GB, 3) for key, size in parts.items() if size},
        "making_gb": {key: round(size / GB, 3) for key, size in estimate.making.items() if size},
    }


def table(content: dict[str, Any]) -> str:
    """Return the table: one row for each model and selection, one column for each preset.

    The cells are training / making the examples, in GB, bold if both fit.
    """
    lines = [
        "| Model | Trained | " + " | ".join(PRESETS) + " |",
        "|---|---|" + "---|" * len(PRESETS),
    ]
    for model, pixels in MODELS.values():
        for choice in TRAINED:
            cells = []
            for preset in PRESETS:
                matching_rows = [
                    r
                    for r in content["rows"]
                    if (r["model"], r["trained"], r["memory"]) == (model, choice, preset)
                ]
                cells += [_cell(r) for r in matching_rows]
            if cells:
                lines.append(f"| {model}, {pixels} px | {choice} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(r: dict[str, Any]) -> str:
    text = f"{r['training_gb']:.1f} / {r['examples_gb']:.1f}"
    return (
        f"**{text}**"
        if max(r["training_gb"], r["examples_gb"]) <= int(r["memory"].removesuffix("gb"))
        else text
    )


def render(page: str, content: dict[str, Any]) -> str:
    return fill_blocks(page, {"estimates": lambda: table(content)})


def _recorded_rows() -> list[dict[str, Any]]:
    return list(json.loads(FILE.read_text())["rows"]) if FILE.exists() else []


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["trained"], row["memory"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=list(TRAINED))
    parser.add_argument("--render", action="store_true", help="only the table, from estimates.json")
    arguments = parser.parse_args()
    if not arguments.render:
        import torch

        new_rows = rows(arguments.models, arguments.trained)
        keys = {_key(row) for row in new_rows}
        other_rows = [row for row in _recorded_rows() if _key(row) not in keys]
        content = {
            "label": LABEL,
            "torch": torch.__version__.partition("+")[0],
            "rows": [*other_rows, *new_rows],
        }
        FILE.write_text(json.dumps(content, indent=1) + "\n")
    content = json.loads(FILE.read_text())
    if PAGE.exists():
        PAGE.write_text(render(PAGE.read_text(), content))


if __name__ == "__main__":
    main()
