"""The golden set: numbers of small runs, recorded once and compared after every change.

    python -m tests.golden record FILE [--part PART]... [--only TEXT]
    python -m tests.golden compare FILE [--part PART]... [--only TEXT]

A change that claims to change no number passes `compare` with a file that was recorded before it.
The parts are methods, options, targets, measurements, pages and quickstart. Without `--part` all
but quickstart are computed. `--only` computes the entries whose names contain a text. `record`
replaces these entries of FILE and leaves the others.

Runs use one thread, the CPU and an empty cache, so that a record is the same bit for bit. Values
are compared in order and without their names: a renamed key is no difference. The same values in
another order are reported as reordered and do not fail the comparison.

The first section of this file holds all names that a refactoring may change.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# --- names that may change ------------------------------------------------------------------------

LOG, DONE = "log.jsonl", "done.json"
WEIGHTS = ("weights.safetensors", "lora/pytorch_lora_weights.safetensors")  # a run has one of them
NOT_RECORDED = {  # keys of logs and results whose values depend on the machine or the clock
    "seconds",
    "cpu_seconds",
    "memory_mb",
    "environment",
}
EVALUATION_RESULTS = ("results",)  # the keys of an evaluation that hold measured numbers
ATTACK_RESULTS = ("rates", "cost", "attempts", "curves")
PAGES = "eval/results"
PAGES_ARE_CURRENT = ["-m", "studies.render_results", "--check"]
QUICKSTART = "tiny_star_munba_lora"
FP32 = ["generation.precision=fp32"]  # many times faster than bf16 on a CPU that emulates bf16

DENOISER: dict[str, Any] = {
    "model": "tiny-sd",
    "forget": {"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}, "n": 4},
    "retain": {"prompts": "tiny_rest", "loss": "distill", "n": 4},
    "method": "munba",
    "trainable": {"select": "cross_attention"},
    "training": {"steps": 10, "batch_size": 2, "lr": 5e-4, "device": "cpu"},
    "generation": {"steps": 2, "batch_size": 4},
}
IMAGES = {"forget": {"loss": "data"}, "retain": {"loss": "data"}}
ATTACK = {"attack": {"n": 4}}
RELEARN = {"relearn": {"prompts": ["a drawing of a red star"], "loss": "data", "n": 4}}
HISTOGRAM = {"histogram": {"concept": {"shape": "star"}}}

ASCENT = {"forget": {"loss": "ascent"}, "retain": {"loss": "data"}}
SHORT = {"training": {"steps": 3}}
# Methods on the denoiser of tiny-sd: name -> what is added to DENOISER.
METHODS: dict[str, dict[str, Any]] = {
    "adversarial": {"method": {"name": "adversarial", "inner_steps": 1, "inner_lr": 100}, **ATTACK},
    "bome": {"method": {"name": "bome", "inner_steps": 1, "inner_lr": 100}, **ATTACK},
    "erasediff": {"method": "erasediff", **IMAGES},
    "forum": {
        "method": {"name": "forum", "inner_steps": 1, "inner_lr": 100, "outer_lr": 1.0},
        **ATTACK,
    },
    "minmax_ngd": {"method": "minmax_ngd", **IMAGES},
    "race": {"method": {"name": "race", "inner_steps": 1}, **ATTACK},
    "stereo": {
        "method": {"name": "stereo", "rounds": 1, "erase_steps": 1, "inner_steps": 1},
        "forget": {"loss": "stereo", "anchor": {"shape": "circle"}, "eta": 2.0},
        **ATTACK,
    },
    "meta_unlearning": {"method": "meta_unlearning", **RELEARN},
    "resalign": {"method": {"name": "resalign", "inner_steps": 1, "terms": 2}, **RELEARN},
    "moco": {"method": {"name": "moco", "inner_steps": 1, "inner_lr": 100}, **ATTACK},
    "moml": {"method": {"name": "moml", "inner_steps": 1, "inner_lr": 100}, **ATTACK},
    "munba": {"method": "munba"},
    "ngdiff": {"method": "ngdiff", **ASCENT},
    "scrub": {"method": {"name": "scrub", "retain_steps": 4}},
    "surgery": {"method": "surgery", **ASCENT},
    "torchjd": {"method": "torchjd"},
    "uno": {"method": "uno", **IMAGES},
    "weighted": {"method": {"name": "weighted", "forget": 0.5}},
}
# Other rules and options of these methods, for three steps.
VARIANTS: dict[str, dict[str, Any]] = {
    "munba-printed": {"method": "munba-printed"},
    "sa": {"method": "sa", **ASCENT},
    "pcgrad": {"method": "pcgrad"},
    "torchjd MGDA": {"method": {"name": "torchjd", "rule": "MGDA"}},
    "uno exact": {"method": {"name": "uno", "hvp": "exact"}, **IMAGES},
    "uno-s": {"method": "uno-s", **IMAGES},
    "uno-hat": {"method": "uno-hat", **IMAGES, **HISTOGRAM},
    "s-hat": {"method": "s-hat", **IMAGES, **HISTOGRAM},
    "h": {"method": "h", **IMAGES, **HISTOGRAM},
    "finetune": {"method": "finetune", "retain": {"loss": "data"}},
    "ga": {"method": "ga", "forget": {"loss": "ascent"}},
    "a-d": {"method": "a-d", **ASCENT},
}
# Closed forms and a gate, which take no settings of training or of images.
EDIT: dict[str, Any] = {
    "model": "tiny-sd",
    "forget": {"prompts": "tiny_star", "anchor": {"shape": "circle"}},
    "retain": {"prompts": "tiny_rest"},
    "trainable": {"select": "cross_attention_kv"},
}
EDITS: dict[str, Any] = {name: name for name in ("rece", "speed", "uce", "mace-cfr")}
EDITS["oce"] = {"name": "oce", "erase_scale": 100.0, "rank": 8}
EDITS["cpe"] = {"name": "cpe", "stages": 2, "steps": 5, "adversary_steps": 5, "lr": 1e-3}
# Edits of a classifier and methods that depend on labelled data.
CLASSIFIER: dict[str, Any] = {
    "target": "classifier",
    "forget": {"data": "digits", "classes": [3]},
    "retain": {"data": "rest"},
    "training": {"steps": 10, "batch_size": 16, "lr": 1e-3, "device": "cpu"},
}
CLASSIFIER_METHODS: dict[str, dict[str, Any]] = {
    "amnesiac": {"method": {"name": "amnesiac", "k": 5}},
    "certified_removal": {"method": "certified_removal", "training": {"weight_decay": 0.01}},
    "deltagrad": {"method": {"name": "deltagrad", "k": 5}},
    "influence": {"method": {"name": "influence", "samples": 20}},
    "mini_unlearning": {"method": {"name": "mini_unlearning", "k": 5}},
    "rewind": {"method": {"name": "rewind", "k": 5}},
    "natural_gradient": {"method": {"name": "natural_gradient", "damping": 0.1}},
    "ssd": {"method": {"name": "ssd", "alpha": 3}},
    "scrub": {"method": "scrub", "forget": {"loss": "diverge"}, "retain": {"loss": "data"}},
    "munba": {"method": "munba", "forget": {"loss": "relabel"}},
    "torchjd": {"method": "torchjd", "forget": {"loss": "relabel"}},
}

SQUARE = {
    "prompts": ["a drawing of a red square", "a drawing of a blue square"],
    "loss": "anchor",
    "anchor": "a circle",
    "n": 2,
}
TWO_CONCEPTS = {"forget": [DENOISER["forget"], SQUARE]}
# Losses, memory and schedule settings of the denoiser.
OPTIONS: dict[str, dict[str, Any]] = {
    "loss ascent": {"forget": {"loss": "ascent"}},
    "loss data": {"forget": {"loss": "data"}},
    "loss distill": {"forget": {"loss": "distill"}},
    "loss esd": {"forget": {"loss": "esd", "eta": 0.5}},
    "loss esd to the anchor": {"forget": {"loss": "esd", "neutral": "anchor"}},
    "loss npo": {"forget": {"loss": "npo", "beta": 100}},
    "loss relabel": {"forget": {"loss": "relabel"}},
    "loss resteer": {"forget": {"loss": "resteer"}},
    "loss slider": {"forget": {"loss": "slider", "mixture": {"": 1, "a red circle": 2, "a": -2}}},
    "loss balance": {
        "forget": {
            "loss": "balance",
            "images": "free",
            "trajectory": {"steps": 4, "early": 1, "late": 1},
        }
    },
    "noised anchor": {"forget": {"noised": "anchor"}},
    "teacher current": {"forget": {"teacher": "current"}},
    "empty prompts": {"forget": {"empty_prompts": 0.5}},
    "no images": {"forget": {"images": "free"}, "retain": {"images": "free"}},
    "replace": {"replace": {**DENOISER["retain"], "prompts": ["a red circle", "a blue circle"]}},
    "two concepts": TWO_CONCEPTS,
    "two concepts in turn": {**TWO_CONCEPTS, "concepts": "rotate"},
    "elastic": {"retain": {"loss": "data", "elastic": {"weight": 10, "n": 4}}},
    "lora": {"trainable": {"select": "all", "lora": {"rank": 2, "conv": True}}},
    "all weights": {"trainable": {"select": "all"}},
    "saliency": {"trainable": {"saliency": 0.5}},
    "reinitialise": {"trainable": {"reinitialise": 0.1}},
    "negate": {
        "forget": {"loss": "data"},
        "retain": None,
        "method": {"name": "weighted", "retain": 0},
        "trainable": {"lora": 2, "negate": 2.0},
    },
    "finish uce": {"finish": {"name": "uce"}},
    "micro-batches": {"training": {"micro_batches": 2}},
    "checkpointing": {"training": {"checkpointing": True}},
    "offload": {"training": {"offload": True}},
    "bf16": {
        "training": {"precision": "bf16", "frozen": "bf16"},
        "generation": {"precision": "bf16"},
    },
    "adamw": {"training": {"optimizer": "adamw", "weight_decay": 0.1, "warmup": 2}},
    "sgd": {"training": {"optimizer": "sgd", "lr": 0.1, "decay": "linear"}},
    "adafactor": {"training": {"optimizer": "adafactor"}},
}
TEXT_ENCODER = {"target": "text_encoder", "trainable": {"select": "all"}, **SHORT}
PAINTED = {"data": "painted", "options": {"n": 40}, "classes": ["star"]}
# Other targets: the text encoder is added to DENOISER, the others stand alone.
TARGETS: dict[str, dict[str, Any]] = {
    "text_encoder": TEXT_ENCODER,
    "text_encoder lora": {**TEXT_ENCODER, "trainable": {"select": "all", "lora": 2}},
    "text_encoder esd": {**TEXT_ENCODER, "forget": {"loss": "esd"}},
    "text_encoder relabel": {**TEXT_ENCODER, "forget": {"loss": "relabel"}},
    "text_encoder attack": {**TEXT_ENCODER, **METHODS["adversarial"]},
}
LABELLED_TARGETS: dict[str, dict[str, Any]] = {
    "clip": {
        "model": "tiny-sd",
        "target": "clip",
        "templates": ["a picture of a {}"],
        "forget": {**PAINTED, "loss": "relabel"},
        "retain": {"data": "rest", "loss": "data"},
        "method": "munba",
        "trainable": {"select": "text_attention"},
        "training": {"steps": 3, "batch_size": 4, "lr": 1e-3, "device": "cpu"},
    },
    "clip influence": {
        "model": "tiny-sd",
        "target": "clip",
        "forget": PAINTED,
        "retain": "rest",
        "method": {"name": "influence", "samples": 10},
        "trainable": {"select": "text_attention"},
        "training": {"batch_size": 16, "device": "cpu"},
    },
    "vae": {
        "model": "tiny-sd",
        "target": "vae",
        "forget": {**PAINTED, "loss": "anchor", "kl": 1e-6},
        "retain": {"data": "rest", "loss": "distill"},
        "training": {"steps": 3, "batch_size": 2, "lr": 1e-3, "device": "cpu"},
    },
}
LABELLED_LOSSES = ("anchor", "ascent", "boundary", "data", "distill", "diverge", "expand", "npo")
SUITE: dict[str, Any] = {
    "concept": {"shape": "star"},
    "judge": "tiny",
    "seed": 7001,
    "sampling": {"steps": 4, "guidance": 5.0, "batch_size": 8, "precision": "fp32"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 6},
        "neighbours": {"prompts": "tiny_star_neighbours", "role": "neighbour", "n": 6},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 6},
    },
    "metrics": ["concept_rate", "accuracy", "fid", "clip_score", "unlearn_canvas"],
}
# Attacks on a run of SHORT steps: name -> options.
ATTACKS: dict[str, dict[str, Any]] = {
    "unlearn_diff": {"iterations": 3, "times": 5},
    "p4d": {"steps": 3, "every": 1},
    "random_tokens": {"tries": 3},
    "relearning": {"images": 2, "steps": 2, "every": 1},
    "ring_a_bell": {"population": 10, "generations": 2, "every": 1},
    "soft_prompt": {"steps": 2, "every": 1},
    "completion": {"strengths": [0.5]},
    "ddim_inversion": {"steps": 2},
    "null_text_inversion": {"steps": 2, "iterations": 1},
    "soft_prompt_both": {"steps": 2, "every": 1},
    "revival": {"images": 2, "steps": 2, "every": 1, "batch": 2},
}

Values = list[tuple[str, Any]]  # the path of each value in what was recorded, and the value
Entry = tuple[str, Callable[[], Values]]

# --- values ---------------------------------------------------------------------------------------


def values_of(content: Any, path: str = "", *, texts: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each number in nested JSON, and of each text if `texts`.

    A float is given in hexadecimal, so that equal means equal bit for bit.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in NOT_RECORDED:
                yield from values_of(value, f"{path}.{key}".lstrip("."), texts=texts)
    elif isinstance(content, list | tuple):
        for place, value in enumerate(content):
            yield from values_of(value, f"{path}[{place}]", texts=texts)
    elif isinstance(content, float):
        yield path, content.hex()
    elif content is None or isinstance(content, int) or texts:
        yield path, content


def weights_hash(path: Path) -> str:
    """Return a SHA-256 of the tensors in a safetensors file, in the order of their names."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    tensors = load_file(path)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return f"sha256 {digest.hexdigest()}"


def run_values(folder: Path) -> Values:
    """Return the hash of a run's weights, the numbers of its first ten steps and of its end."""
    path = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(WEIGHTS)}")
    values: Values = [("weights", weights_hash(path))]
    if (folder / LOG).exists():
        rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
        values += values_of(rows[:10], "log")
    values += values_of(json.loads((folder / DONE).read_text()), "done")
    return values


def page_values(text: str) -> Values:
    """Return the numbers in the tables of a page, as they are printed."""
    rows = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    cells = [number for row in rows for number in re.findall(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?", row)]
    return [("numbers", " ".join(cells))]


# --- parts ----------------------------------------------------------------------------------------


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with changed sections. A mapping is added to the section of the base."""
    content = dict(base)
    for change in changes:
        for key, value in change.items():
            mappings = isinstance(value, dict) and isinstance(content.get(key), dict)
            content[key] = {**content[key], **value} if mappings else value
    return {key: value for key, value in content.items() if value is not None}


def erased(content: dict[str, Any], folder: Path, model: Any = None) -> Values:
    """Run a recipe and return its numbers. The run folder is removed."""
    import concept_eraser

    try:
        concept_eraser.erase(content, model=model, output=folder)
        return run_values(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def classifier(history: Path | None = None) -> Any:
    """Return a linear classifier of digits after 20 steps of SGD, the last five in `history`."""
    import torch

    from concept_eraser import registry
    from concept_eraser.methods.history import History

    data = registry.build("dataset", "digits", {}).load("train")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    record = History(tuple(net.parameters()), 5, history).record if history else None
    for step in range(20):
        rows = list(range(step * 50, step * 50 + 50))
        if record:
            record(rows, 0.1)
        loss = torch.nn.functional.cross_entropy(net(data.inputs(rows)), data.labels[rows])
        net.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            parameter.data -= 0.1 * parameter.grad
    return net.eval()


def methods(folder: Path) -> Iterator[Entry]:
    """Ten steps of every method, on the denoiser of tiny-sd or on a classifier of digits."""
    contents = {name: merged(DENOISER, change) for name, change in METHODS.items()}
    contents |= {name: merged(DENOISER, SHORT, change) for name, change in VARIANTS.items()}
    contents |= {name: merged(EDIT, {"method": spec}) for name, spec in EDITS.items()}
    for name, content in contents.items():
        yield name, lambda name=name, content=content: erased(content, folder / name)
    for name, change in CLASSIFIER_METHODS.items():
        yield f"classifier {name}", lambda name=name, change=change: on_digits(change, folder, name)


def on_digits(change: dict[str, Any], folder: Path, name: str) -> Values:
    """Run a recipe on a classifier of digits and return its numbers."""
    history = folder / "history" / name if "k" in change.get("method", {}) else None
    content = merged(CLASSIFIER, change)
    if history:
        history.mkdir(parents=True)
        content = merged(content, {"method": {"history": str(history)}})
    return erased(content, folder / f"classifier {name}", classifier(history))


def options(folder: Path) -> Iterator[Entry]:
    """Three steps with each loss and each setting of the denoiser's training."""
    for name, change in OPTIONS.items():
        content = merged(DENOISER, SHORT, change)
        yield name, lambda name=name, content=content: erased(content, folder / name)


def targets(folder: Path) -> Iterator[Entry]:
    """Three steps of a text encoder, a CLIP model, a VAE and a classifier."""
    for name, change in TARGETS.items():
        content = merged(DENOISER, change)
        yield name, lambda name=name, content=content: erased(content, folder / name)
    for name, content in LABELLED_TARGETS.items():
        yield name, lambda name=name, content=content: erased(content, folder / name)
    for loss in LABELLED_LOSSES:
        anchor = {"anchor": "8"} if loss == "anchor" else {}
        change = {"forget": {"loss": loss, **anchor}, "method": "munba", **SHORT}
        name = f"loss {loss}"
        yield f"classifier {name}", lambda c=change, name=name: on_digits(c, folder, name)


def measurements(folder: Path) -> Iterator[Entry]:
    """An evaluation of a run, one of labelled data, and the attacks, each on few images."""
    import concept_eraser

    measure_labelled = getattr(concept_eraser, "measure", concept_eraser.evaluate)
    run = folder / "run"
    content = merged(DENOISER, SHORT, {"training": {"lr": 5e-3}})

    def erase() -> str:
        if not run.exists():
            concept_eraser.erase(content, output=run)
        return str(run)

    def evaluation() -> Values:
        results = concept_eraser.evaluate(erase(), SUITE).as_dict()
        return list(values_of([results[key] for key in EVALUATION_RESULTS]))

    def labelled(name: str) -> Values:
        concept_eraser.erase(LABELLED_TARGETS[name], output=folder / name)
        measured = measure_labelled(folder / name)
        results = measured if isinstance(measured, dict) else measured.as_dict()
        return list(values_of([results[key] for key in EVALUATION_RESULTS]))

    def attack(name: str) -> Values:
        results = concept_eraser.attack(
            erase(), name, SUITE, n=3, batch=2, hide="shape", options=ATTACKS[name]
        ).as_dict()
        return list(values_of([results[key] for key in ATTACK_RESULTS], texts=True))

    yield "run", lambda: run_values(Path(erase()))
    yield "evaluate", evaluation
    for name in ("clip", "vae"):
        yield f"evaluate {name}", lambda name=name: labelled(name)
    for name in ATTACKS:
        yield f"attack {name}", lambda name=name: attack(name)


def pages(folder: Path) -> Iterator[Entry]:
    """The tables of the committed results pages, and whether their data still renders to them."""

    def current() -> Values:
        command = [sys.executable, *PAGES_ARE_CURRENT]
        return [("rendered", subprocess.run(command, cwd=ROOT, check=False).returncode)]

    yield "are current", current
    for path in sorted((ROOT / PAGES).glob("*.md")):
        yield path.stem, lambda path=path: page_values(path.read_text())


def quickstart(folder: Path) -> Iterator[Entry]:
    """The recipe of `concept-eraser quickstart`, whole, but for the precision of its images."""

    def run() -> Values:
        import concept_eraser

        concept_eraser.erase(QUICKSTART, overrides=FP32, output=folder / "run", save="changed")
        return run_values(folder / "run")

    yield QUICKSTART, run


PARTS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    "methods": methods,
    "options": options,
    "targets": targets,
    "measurements": measurements,
    "pages": pages,
    "quickstart": quickstart,
}

ERROR = "error"  # the path in place of the values of an entry that could not be computed

# --- records --------------------------------------------------------------------------------------


def computed(parts: list[str], only: str) -> Iterator[tuple[str, Values]]:
    """Compute the entries of some parts whose names contain `only`, and yield name and values."""
    import torch

    import concept_eraser

    torch.set_num_threads(1)
    print(f"package: {Path(concept_eraser.__file__).parent}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CONCEPT_ERASER_CACHE"] = str(Path(scratch) / "cache")
        for part in parts:
            for entry, compute in PARTS[part](Path(scratch) / part):
                name = f"{part}: {entry}"
                if only not in name:
                    continue
                began = time.monotonic()
                try:
                    values, error = compute(), ""
                except Exception as raised:  # the other entries are still worth their time
                    error = f"  {type(raised).__name__}: {raised}"
                    values = [(ERROR, error)]
                print(f"{time.monotonic() - began:6.1f} s  {name}{error}", flush=True)
                yield name, values


def machine() -> dict[str, str]:
    """Return what a record depends on beside the code."""
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": cpu, "python": sys.version.split()[0]}


def difference(old: Values, new: Values) -> str:
    """Return "" for equal values, else the first that differs.

    The result is "reordered" for the same values in another order.
    """
    before, after = ([value for _, value in rows] for rows in (old, new))
    if before == after:
        return ""
    if sorted(map(str, before)) == sorted(map(str, after)):
        return "reordered"
    for (path, one), (_, other) in zip(old, new, strict=False):
        if one != other:
            return f"{path} was {str(one)[:80]}, is {str(other)[:80]}"
    return f"had {len(before)} values, has {len(after)}"


def is_error(values: Values) -> bool:
    """Whether an entry could not be computed."""
    return any(path == ERROR for path, _ in values)


def compare(old: dict[str, Values], new: Iterable[tuple[str, Values]]) -> int:
    """Print every entry that differs. Return how many of `old` do or are missing."""
    failed, missing = 0, dict(old)
    for name, values in new:
        text = difference(missing.pop(name), values) if name in old else "is new"
        if is_error(values):  # equal errors are no equal numbers
            text = values[0][1].strip()
        failed += text not in ("", "reordered", "is new")
        if text:
            print(f"    {text}", flush=True)
    for name in missing:
        print(f"{name} is missing")
    failed += len(missing)
    print(f"{len(old)} entries, {failed} different")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Record or compare the golden set.")
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--only", default="", help="entries whose names contain this text")
    arguments = parser.parse_args()
    parts = arguments.part or [name for name in PARTS if name != "quickstart"]
    new = computed(parts, arguments.only)
    if arguments.action == "compare":
        recorded = json.loads(arguments.file.read_text())
        if recorded["machine"] != machine():
            print(f"recorded on {recorded['machine']}, compared with {machine()}")
        names = [k for k in recorded["entries"] if k.partition(":")[0] in parts]
        return int(
            compare({k: recorded["entries"][k] for k in names if arguments.only in k}, new) > 0
        )
    entries = json.loads(arguments.file.read_text())["entries"] if arguments.file.exists() else {}
    failed = 0
    for name, values in new:
        failed += is_error(values)
        entries[name] = values
        content = {"machine": machine(), "entries": entries}
        arguments.file.write_text(json.dumps(content, indent=1) + "\n")
    if failed:
        print(f"{failed} entries could not be computed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
