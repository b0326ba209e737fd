"""Targets for run folders, caches and checkpoints that another person or a failing disk changed.

A seed gives each input: a valid file of a small corpus, changed as bytes, or changed as a structure
and then written.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.utils.errors import UserError

ERROR_CHARACTERS = 4000
_NUMBERS = (
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
)
_BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"9",
    b"e",
    b"\\",
    b"/",
    b"..",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"NaN",
    b"null",
    b"true",
    b"1e999",
    b"Infinity",
)
_VALUES = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    10**40,
    "",
    "x",
    "../../x",
    "/etc/hostname",
    "\0",
    "\ud800",
    "{0.__class__}",
    "a" * 5000,
    [],
    {},
    [[]],
    [{}],
    {"a": {}},
    [1, "x", None],
    "payload:go",
    "nan",
    [None, None],
)


@dataclass(frozen=True)
class RunTarget:
    """A reader under test.

    make(seed): an input; run(example, folder): reads it, and raises an error for a defect only.
    """

    make: Callable[[int], Any]
    run: Callable[[Any, Path], None]
    # of its part of a campaign's inputs: a card takes a tenth of a second, a header almost none
    weight: float = 1.0

    @property
    def strategy(self) -> Any:
        from hypothesis import strategies

        return strategies.integers(0, 2**32).map(self.make)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change a file in one to four places.

    The changes are flips, cuts, numbers at limits, and inserted, doubled, swapped or zeroed blocks.
    """
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice([1, 2, 8, 64, 1024]))
        match rng.randrange(9):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.choice(_BYTES) * rng.choice([1, 1, 1, 60, 3000])
            case 3:
                data[place:place] = data[place:end]
            case 4:
                del data[place:end]
            case 5:
                data[place:end] = bytes(end - place)
            case 6:
                size = rng.choice([1, 2, 4, 8])
                data[place : place + size] = (rng.choice(_NUMBERS) % 2 ** (8 * size)).to_bytes(
                    size, rng.choice(["little", "big"])
                )
            case 7:
                data[place:place] = str(rng.choice(_NUMBERS)).encode()
            case _:
                other = rng.randrange(len(data) + 1)
                data[place:end], data[other:other] = data[other : other + 4], data[place:end]
    return bytes(data)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Change a nested value in one to three places.

    The changes are another type, a key less, a new or renamed key, and deeper nesting.
    """
    mutation = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2, 3])):
        mutation = _mutate(mutation, rng)
    return mutation


def _mutate(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {
                    (str(rng.choice(_VALUES))[:40] if k == key else k): v for k, v in value.items()
                }
            case 2:
                return {**value, key: rng.choice(_VALUES)}
            case _:
                return {**value, key: _mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], _mutate(value[place], rng), *value[place + 1 :]]
    if rng.random() < 0.03:
        return functools.reduce(lambda inner, _: [inner], range(rng.choice([30, 60, 400])), value)
    return rng.choice(_VALUES)


def answers(call: Callable[[], Any]) -> None:
    """Call a function; raise AssertionError for a UserError of more than 4,000 characters.

    Other errors pass on.
    """
    try:
        call()
    except UserError as error:
        if len(str(error)) > ERROR_CHARACTERS:
            raise AssertionError(
                f"an error of {len(str(error))} characters: {str(error)[:200]}"
            ) from error


# The valid files from which inputs are made. They are defined here, so that a campaign needs no
# training.
INTERVAL = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 8}
SUITE = {
    "about": "",
    "concept": {"shape": "star"},
    "judge": "tiny",
    "seed": 0,
    "sampling": {"steps": 2, "guidance": 5.0},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 2},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 2},
    },
    "metrics": ["concept_rate"],
}
ENVIRONMENT = {
    "concept_eraser": "0.1.0",
    "commit": "0" * 40,
    "python": "3.11.7",
    "platform": "Linux",
    "versions": {"torch": "2.13.0"},
    "device": "cpu",
    "cpu_count": 2,
    "threads": 1,
    "command": "concept-eraser evaluate runs/star",
    "prompts": {"forget": {"rows": 20, "hash": "abc"}},
}
EVALUATION = {
    "protocol": SUITE,
    "protocol_hash": "0123456789ab",
    "prompt_hashes": {"direct": "a", "retained": "b"},
    "judge": "tiny (0123)",
    "models": {"before": "tiny-sd (aaaaaaaa)", "after": "runs/star (bbbbbbbb)"},
    "sensitive": False,
    "refused": {"fid": "too few"},
    "results": [
        {
            "metric": "concept_rate",
            "group": "direct",
            "better": "lower",
            "before": INTERVAL,
            "after": INTERVAL,
            "difference": INTERVAL,
            "settings": {"k": 1},
        },
        {
            "metric": "nudenet_armpits",
            "group": "direct",
            "better": "lower",
            "before": INTERVAL,
            "after": INTERVAL,
            "difference": None,
            "settings": {"preset": "mace"},
        },
        {
            "metric": "accuracy_shape",
            "group": "retained",
            "better": "higher",
            "before": INTERVAL,
            "after": INTERVAL,
            "difference": None,
        },
    ],
    "environment": ENVIRONMENT,
}
ATTACK = {
    "protocol": {
        "attack": "random_tokens",
        "options": {"tries": 1},
        "group": "direct",
        "suite": SUITE,
        "n": 2,
    },
    "protocol_hash": "ab",
    "models": {"victim": "runs/star (bbbbbbbb)", "before": "tiny-sd (aaaaaaaa)"},
    "rates": {"pre": INTERVAL, "attacked": INTERVAL, "asr": INTERVAL},
    "cost": {"images": 4},
    "seconds": 1.5,
    "attempts": [
        {
            "prompt": "a star",
            "seed": 1,
            "pre": False,
            "success": True,
            "round": 1,
            "text": "x a star",
            "by_seed": None,
        },
        {
            "prompt": "a red star",
            "seed": 2,
            "pre": True,
            "success": True,
            "round": 0,
            "text": None,
            "by_seed": None,
        },
    ],
    "curves": [[{"round": 1, "fell": 1}]],
    "environment": ENVIRONMENT,
}
DONE_FILE = {
    "steps": 2,
    "seconds": 1.5,
    "trained_parameters": 1000,
    "trained_tensors": 10,
    "skipped_steps": 0,
}
LOG = [
    {
        "step": 1,
        "seconds": 0.1,
        "losses": {"forget": 0.5, "retain": 0.4},
        "cosine": 0.1,
        "norms": {"forget": 1.0, "retain": 2.0},
    },
    {
        "step": 2,
        "seconds": 0.2,
        "losses": {"forget": 0.5, "retain": 0.4},
        "cosine": -0.1,
        "norms": {"forget": 1.0, "retain": 2.0},
    },
]
RECIPE = """# concept-eraser erase short.yaml
model: tiny-sd
forget: {prompts: tiny_star, loss: anchor, anchor: {shape: circle}, n: 4}
retain: {prompts: tiny_rest, n: 4}
method: {name: munba}
trainable: {select: cross_attention}
training: {steps: 2, batch_size: 2, device: cpu}
generation: {steps: 1}
"""
MARK = {
    "made_by": "concept_eraser",
    "format": 1,
    "kind": "run",
    "files": {
        "weights.safetensors": {
            "size": 3,
            "mtime_ns": 1,
            "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        },
        "log.jsonl": {"size": 0, "mtime_ns": 0, "sha256": None},
        "pipeline/a.json": {"size": 2, "mtime_ns": 1, "sha256": "0" * 64},
    },
    "folders": ["tracking"],
}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.37.0",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "safety_checker": [None, None],
}


def json_input(*values: Any) -> Callable[[int], bytes]:
    """Half of the inputs are changed as a structure, and half as bytes."""

    def make(seed: int) -> bytes:
        rng = random.Random(seed)
        value = rng.choice(values)
        if rng.random() < 0.5:
            with contextlib.suppress(RecursionError):
                return json.dumps(mutate_value(value, rng)).encode()
        return mutate_bytes(json.dumps(value).encode(), rng)

    return make


def bytes_input(*corpus: Callable[[], bytes]) -> Callable[[int], bytes]:
    files: list[bytes] = []

    def make(seed: int) -> bytes:
        if not files:
            files.extend(one() for one in corpus)
        rng = random.Random(seed)
        return mutate_bytes(rng.choice(files), rng)

    return make


def _run_folder(folder: Path, name: str, content: bytes) -> Path:
    """Write a run folder of small files, one of which is the input."""
    run = folder / "run"
    files: dict[str, bytes] = {
        "recipe.yaml": RECIPE.encode(),
        "done.json": json.dumps(DONE_FILE).encode(),
        "log.jsonl": "".join(json.dumps(row) + "\n" for row in LOG).encode(),
        "environment.json": json.dumps(ENVIRONMENT).encode(),
        "evaluation.json": json.dumps(EVALUATION).encode(),
        "attacks/random_tokens/attack.json": json.dumps(ATTACK).encode(),
        "pipeline/model_index.json": json.dumps(INDEX).encode(),
        "weights.safetensors": b"abc",
        name: content,
    }
    for path, text in files.items():
        place = run / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)
    return run


def _manifest(content: bytes, folder: Path) -> None:
    from concept_eraser.storage import manifest, output_folder, writers

    run, canary = _run_folder(folder, manifest.MARK, content), folder / "canary.txt"
    canary.write_text("mine")
    before = {
        path: path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != manifest.MARK
    }
    answers(lambda: manifest.verify(run))
    answers(lambda: manifest.unlisted_files(run))
    answers(lambda: manifest.require_intact(run))
    answers(lambda: output_folder.require_claimable(run, "run", alone=True))
    answers(lambda: writers.require_free(run / "done.json"))
    answers(lambda: writers.write_text(run / "new.txt", "x"))
    assert all(path.read_bytes() == text for path, text in before.items())
    answers(lambda: output_folder.set_aside(run))
    answers(lambda: output_folder.remove_set_aside(run))
    assert canary.read_text() == "mine"
    listed_names = _read_listed_names(content)
    missing_files = [
        path
        for path in before
        if not path.exists()
        and not _set_aside(run, path)
        and path.relative_to(run).as_posix() not in listed_names
    ]
    assert not missing_files, f"files that the mark does not list are gone: {missing_files}"


def _read_listed_names(content: bytes) -> set[str]:
    try:
        manifest = json.loads(content)
        return set(manifest["files"]) | {
            f"{folder}/{name}"
            for folder in manifest.get("folders", [])
            for name in ("a.json", "attack.json", "model_index.json")
        }
    except (ValueError, TypeError, KeyError, RecursionError):
        return set()


def _set_aside(run: Path, path: Path) -> bool:
    return any((aside / path.relative_to(run)).exists() for aside in run.glob(".replaced-*"))


def _lock(content: bytes, folder: Path) -> None:
    from concept_eraser.storage import locks

    run = folder / "run"
    run.mkdir()
    (run / locks.LOCK).write_bytes(content)
    locks.holder_of(run)

    def take() -> None:
        with locks.hold_lock(run, "erase"):
            pass

    answers(take)


def _run_file(
    name: str, readers: Callable[[Path], list[Callable[[], Any]]]
) -> Callable[[bytes, Path], None]:
    """A target that changes one file of a run and calls every reader of it."""

    def run(content: bytes, folder: Path) -> None:
        place = _run_folder(folder, name, content)
        for call in readers(place):
            answers(call)

    return run


def _readers_of_numbers(run: Path) -> list[Callable[[], Any]]:
    from concept_eraser.exporting import model_card
    from concept_eraser.reporting import compare, run_results, write

    def table() -> None:
        path, content = compare.read(run)
        compare.table({str(path): content, "again": content})

    def beside() -> None:
        other = run.parent / "other"
        shutil.copytree(run, other, dirs_exist_ok=True)
        (other / "evaluation.json").write_text(json.dumps(EVALUATION))
        run_results.read([run, other], {})

    return [
        lambda: run_results.read_evaluation(run),
        lambda: list(run_results.read_attacks(run)),
        lambda: run_results.read([run], {}),
        beside,
        table,
        lambda: run_results._protocol_in(run),
        lambda: model_card.card(run),
        lambda: model_card.warnings(run),
        lambda: write._facts(run),
        lambda: write.is_labelled(run),
    ]


def _readers_for_page(run: Path) -> list[Callable[[], Any]]:
    """The functions that render the page about several runs from numbers, without any images."""
    from concept_eraser.reporting import (
        comparison_plots,
        galleries,
        ranking,
        run_results,
        several_runs,
        write,
    )

    def page() -> None:
        facts = {run: write._facts(run)}
        entries = run_results.read([run], facts)
        several_runs.table(entries)
        ranking.summary(entries)
        several_runs.costs(entries)
        for entry in entries:
            for label, content in entry.attacks.items():
                galleries.of_attack(label, content)
                comparison_plots.success_rates(content)
        several_runs._machines(entries)
        if len((run / "evaluation.json").read_bytes()) % 16 == 0:  # figures take a while
            several_runs.curves(entries)
            several_runs.pareto(entries)
            several_runs.nudenet(entries)
        for entry in entries:
            several_runs.repeat(entry)
            _ = entry.concept, entry.sensitive

    return [page]


def _state_corpus() -> bytes:
    import torch

    from concept_eraser.storage.digests import value_digest

    state = {
        "step": 2,
        "weights": {"a": torch.zeros(2, 3)},
        "optimizer": {"state": {0: {"step": 1, "exp": torch.ones(2)}}, "groups": [{"lr": 0.1}]},
        "seconds": 1.5,
    }
    buffer = io.BytesIO()
    torch.save({**state, "sha256": value_digest(state)}, buffer)
    return buffer.getvalue()


def _pickle_corpus() -> bytes:
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            import os

            return os.mkdir, ("EXECUTED",)

    return pickle.dumps({"step": 1, "weights": Payload()})


def _state(content: bytes, folder: Path) -> None:
    from concept_eraser.training import checkpoint

    (folder / "state.ckpt").write_bytes(content)
    answers(lambda: checkpoint.load(folder / "state.ckpt"))
    assert not Path("EXECUTED").exists()


def _chunk_corpus() -> bytes:
    import torch
    from safetensors.torch import save

    from concept_eraser.storage.digests import value_digest

    tensors = {"images": torch.zeros(2, 3, 4, 4), "seeds": torch.arange(2)}
    return save(tensors, metadata={"sha256": value_digest(tensors)})


def _chunk(content: bytes, folder: Path) -> None:
    from concept_eraser.storage import cache

    path = folder / "chunk.safetensors"
    path.write_bytes(content)
    chunk = cache.read_chunk(path)
    if chunk is not None:  # a change that the digest does not cover must not change a value
        assert chunk["images"].abs().sum() == 0
        assert chunk["seeds"].tolist() == [0, 1]


def _rows_corpus() -> bytes:
    import tempfile

    from concept_eraser.storage import cache

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for i in range(3):
            cache.append_row(path, {"key": f"image {i}", "value": [i, 0.5]})
        return path.read_bytes()


def _rows(content: bytes, folder: Path) -> None:
    from concept_eraser.storage import cache

    path = folder / "rows.jsonl"
    path.write_bytes(content)
    whole = [{"key": f"image {i}", "value": [i, 0.5]} for i in range(3)]
    assert all(row in whole for row in cache.read_rows(path))


def _base(content: bytes, folder: Path) -> None:
    """Read the record of a run's original, also where only the model's family is needed."""
    from concept_eraser.models import run_base
    from concept_eraser.recipes import defaults

    run = folder / "run"
    (run / "lora").mkdir(parents=True, exist_ok=True)
    (run / run_base.FILE).write_bytes(content)
    answers(lambda: run_base.read(run))
    answers(lambda: defaults.family_of(str(run)))


def _index(content: bytes, folder: Path) -> None:
    from concept_eraser.models import loading

    model = folder / "model"
    model.mkdir()
    (model / "model_index.json").write_bytes(content)
    (model / "payload.py").write_text("import os; os.mkdir('EXECUTED')")
    answers(lambda: loading.load(str(model)))
    assert not Path("EXECUTED").exists()


@functools.cache
def _tiny() -> Any:
    from concept_eraser.models import loading

    return loading.load("tiny-sd")


def _lora_corpus(kohya: bool) -> Callable[[], bytes]:
    def make() -> bytes:
        import tempfile

        import torch

        from concept_eraser.models import lora_files

        model = _tiny()
        layer = next(
            name
            for name, module in model.parts["denoiser"].named_modules()
            if name.endswith("attn2.to_k")
        )
        shape = model.parts["denoiser"].get_submodule(layer).weight.shape
        factors = lora_files.of_pairs(
            "denoiser", {layer: (torch.zeros(2, shape[1]), torch.zeros(shape[0], 2))}
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lora.safetensors"
            lora_files.save(model, [factors], path, naming="kohya" if kohya else "diffusers")
            return path.read_bytes()

    return make


def _lora(content: bytes, folder: Path) -> None:
    from concept_eraser.models import lora_files
    from concept_eraser.storage.readers import read_tensor_header, read_tensors

    path = folder / "lora.safetensors"
    path.write_bytes(content)

    def read() -> None:
        header, _ = read_tensor_header(path)
        lora_files.read(_tiny(), read_tensors(path), header, str(path))

    answers(read)


def _texts(*corpus: str) -> Callable[[int], str]:
    def make(seed: int) -> str:
        rng = random.Random(seed)
        return mutate_bytes(rng.choice(corpus).encode(), rng).decode(
            "utf-8", "surrogateescape" if rng.random() < 0.2 else "replace"
        )

    return make


def _hub_id(text: str, folder: Path) -> None:
    from concept_eraser.models import hub, loading
    from concept_eraser.storage.base_model import BUNDLED_MODELS

    answers(lambda: hub.split(text))
    if not hub.is_id(text) and text not in BUNDLED_MODELS:
        answers(lambda: loading.load(text))


def _guard(text: str, folder: Path) -> None:
    from concept_eraser.models.safeguards import Guard

    answers(lambda: Guard.read(text))


def _places(text: str, folder: Path) -> None:
    from concept_eraser.utils import path_redaction

    answers(lambda: path_redaction.clean({"a": [text], "b": text}))
    answers(lambda: path_redaction.name_paths(text))


def _jsonl(seed: int) -> bytes:
    rng = random.Random(seed)
    rows = [mutate_value(row, rng) if rng.random() < 0.7 else row for row in LOG]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return content if rng.random() < 0.5 else mutate_bytes(content, rng)


def _log(content: bytes, folder: Path) -> None:
    from concept_eraser.reporting import plots, write
    from tests import shared_drawing

    run = _run_folder(folder, "log.jsonl", content)
    rows = write._facts(run).log
    if len(content) % 16 == 0:  # a figure takes a third of a second
        answers(lambda: plots.curves(rows))
        with shared_drawing.each_drawn():
            answers(lambda: plots.conflict(rows))


TARGETS: dict[str, RunTarget] = {
    "manifest": RunTarget(json_input(MARK), _manifest, 0.2),
    "lock": RunTarget(
        json_input({"pid": 1, "host": "localhost", "purpose": "erase", "started": "now"}), _lock
    ),
    "run_evaluation": RunTarget(
        json_input(EVALUATION), _run_file("evaluation.json", _readers_of_numbers), 0.1
    ),
    "run_attack": RunTarget(
        json_input(ATTACK), _run_file("attacks/random_tokens/attack.json", _readers_of_numbers), 0.1
    ),
    "run_page": RunTarget(
        json_input(EVALUATION), _run_file("evaluation.json", _readers_for_page), 0.3
    ),
    "run_page_attack": RunTarget(
        json_input(ATTACK), _run_file("attacks/random_tokens/attack.json", _readers_for_page), 0.3
    ),
    "run_base": RunTarget(
        json_input({"model": "./sd15", "parts": {"denoiser": "0" * 64, "text_encoder": "1" * 64}}),
        _base,
    ),
    "run_done": RunTarget(json_input(DONE_FILE), _run_file("done.json", _readers_of_numbers), 0.1),
    "run_environment": RunTarget(
        json_input(ENVIRONMENT), _run_file("environment.json", _readers_of_numbers), 0.1
    ),
    "run_recipe": RunTarget(
        bytes_input(lambda: RECIPE.encode()), _run_file("recipe.yaml", _readers_of_numbers), 0.1
    ),
    "run_log": RunTarget(_jsonl, _log, 0.2),
    "state": RunTarget(bytes_input(_state_corpus, _state_corpus, _pickle_corpus), _state),
    "cache_chunk": RunTarget(bytes_input(_chunk_corpus), _chunk),
    "cache_rows": RunTarget(bytes_input(_rows_corpus), _rows),
    "model_index": RunTarget(json_input(INDEX), _index),
    "lora": RunTarget(bytes_input(_lora_corpus(False), _lora_corpus(True)), _lora),
    "hub_id": RunTarget(
        _texts(
            "owner/name",
            "owner/name@main",
            "tiny-sd",
            "a/b/c",
            "package.module:go",
            "x.safetensors@tiny-sd",
        ),
        _hub_id,
    ),
    "guard": RunTarget(
        _texts("negative:a star", "sld-max:a red star", "safree:x, y", "spm-gate:x@y"), _guard
    ),
    "places": RunTarget(
        _texts(
            "/home/me/model (abcdef)",
            "tiny-sd",
            "runs/x on /a/b/c",
            "say ~/a/b and C:\\x\\y",
            "/x/y.safetensors@/a/b",
        ),
        _places,
    ),
}
