"""The fuzzed readers: for each, a strategy of examples and a function that reads one.

`run(example, folder)` passes the example to its reader, with an empty folder for its files. It
raises an error for a defect only. A defect is any error except UserError, a message of more than
4,000 characters, more than 5 seconds of processor time, or a file that was written, changed or
removed.

tests/storage/test_readers_property.py runs some hundred examples of each.
"""

from __future__ import annotations

import datetime
import gzip
import io
import json
import lzma
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st
from PIL import Image

from concept_eraser import registry
from concept_eraser.data import images, labelled, prompts
from concept_eraser.data.datasets import celeba, mnist
from concept_eraser.evaluation import suite
from concept_eraser.evaluation.judges import face, image_classifier
from concept_eraser.recipes import leco, recipe, selections
from concept_eraser.storage import readers
from concept_eraser.targets.labelled_data import read_indices
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

SECONDS = 5.0
CHARACTERS = 4_000


@dataclass(frozen=True)
class Target:
    """A reader under test.

    strategy: the examples; run: passes one to the reader, and raises an error for a defect.
    """

    strategy: st.SearchStrategy[Any]
    run: Callable[[Any, Path], None]


class Defect(AssertionError):
    """A reader broke a rule of `check_reader`."""


def check_reader(read: Callable[[], Any], folder: Path, seconds: float = SECONDS) -> None:
    """Call a reader; raise Defect if it breaks a rule, and pass on every error except UserError."""
    before, start = _state(folder), _seconds()
    try:
        read()
    except UserError as error:
        if len(str(error)) > CHARACTERS:
            raise Defect(
                f"a message of {len(str(error))} characters: {str(error)[:200]}"
            ) from error
    if (duration := _seconds() - start) > seconds:
        raise Defect(f"took {duration:.1f} s")
    if (after := _state(folder)) != before:
        raise Defect(f"the folder has changed: {sorted(set(after) ^ set(before))}")


def _seconds() -> float:
    """Processor time of this process and its children, without other processes of the machine."""
    return sum(os.times()[:4])


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file in a folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        files[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
    return files


# Values of every kind in YAML and JSON, and values that are hard to read.
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "",
            " ",
            "\0",
            "rest",
            "none",
            "null",
            "..",
            "/",
            "../../etc/passwd",
            "/etc/passwd",
            "/dev/zero",
            "hf://a/b",
            "hf://a/b/../c.csv",
            "a" * 300,
            "a" * 300 + ".yaml",
            "x" * 20_000,
            "{",
            "}",
            "{}",
            "{0}",
            "{a.b}",
            "{a[0]}",
            "{a!r}",
            "{a:>1000000000}",
            "{{a}}",
            "{shape} {color}",
            "{templates}",
            "> 50",
            "> x",
            "== 1e999",
            "²",
            "9" * 5_000,
            "1e400",
            "nan",
            "-inf",
            "re:(a+)+$",
            "re:(",
            "tiny_star",
            "tiny-sd",
            "munba",
            "anchor",
            "shape=circle",
            "\u2028",
            "\ud800",
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from(
        [
            0,
            -1,
            1,
            2**31,
            2**32,
            2**63,
            2**64,
            10**30,
            10**400,
            1e308,
            0.5,
            float("inf"),
            float("nan"),
        ]
    ),
)
OTHERS = st.sampled_from(
    [
        None,
        True,
        False,
        datetime.date(2020, 1, 1),
        datetime.datetime(2020, 1, 1),
        b"\0\xff",
        {"a", "b"},
    ]
)
SCALARS = st.one_of(TEXTS, NUMBERS, OTHERS)
KEYS = st.one_of(TEXTS, st.sampled_from([0, 1, None, True, 1.5, datetime.date(2020, 1, 1)]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
PLAIN = st.recursive(  # of JSON
    st.one_of(TEXTS, NUMBERS, st.sampled_from([None, True, False])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
NASTY_YAML = st.sampled_from(
    [
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nprompts: *c\n",
        b"a: &a [*a]\n",
        b"prompts: !!set {a, b}\n",
        b"prompts: !!binary aGVsbG8=\n",
        b"prompts: !!python/object/apply:os.system [echo]\n",
        b"prompts: !mine {a: b}\n",
        b"? [a, b]\n: c\n",
        b"? {a: b}\n: c\n",
        b"<<: {prompts: [a]}\n<<: [1]\n",
        b"prompts: 2020-13-45\n",
        b"prompts: 0x" + b"f" * 9000 + b"\n",
        b"prompts: " + b"9" * 9000 + b"\n",
        b"prompts: 1:2:3:4\n",
        b"[" * 2000,
        b"{a: " * 2000,
        b"- " * 3000,
        b"--- a\n--- b\n",
        b"%YAML 9.9\n--- a\n",
        b"\xff\xfe",
        b"\xef\xbb\xbfprompts: [a]\n",
        b"\0",
        b"a: b: c",
        b"\t",
        b"&a",
        b"*a",
        b"prompts: ['\\ud800', \"\\ud800\"]\n",
        b"",
    ]
)


def bytes_like(*valid: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and valid files with parts replaced, removed or inserted."""

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        content = draw(st.sampled_from(valid))
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, max(0, len(content))))
            length = draw(st.sampled_from([0, 1, 2, 4, 8, 50]))
            piece = draw(
                st.one_of(
                    st.binary(max_size=8),
                    st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"]),
                )
            )
            content = content[:place] + piece + content[place + length :]
        return content

    return st.one_of(st.binary(max_size=300), mutate())


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same kind as another, so that some mutations stay valid."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([0, 1, 2, 7, 1000, 2**32 - 1, 2**32, 10**12, -1])
    if isinstance(value, float):
        return st.sampled_from([0.0, 0.5, 1.0, 7.5, 1e3, 1e-30, 1e30, float("inf"), float("nan")])
    return TEXTS


@st.composite
def mutations(
    draw: st.DrawFn, base: Callable[[], Any], values: st.SearchStrategy[Any] = VALUES
) -> Any:
    """A valid content with some values replaced, some keys inserted and some removed."""
    content = json.loads(json.dumps(base()))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = content
        while True:
            steps = list(place) if isinstance(place, dict) else list(range(len(place)))
            inner = [step for step in steps if isinstance(place[step], dict | list) and place[step]]
            if not inner or draw(st.integers(0, 2)) == 0:
                break
            place = place[draw(st.sampled_from(inner))]
        if steps and draw(st.integers(0, 4)):
            step = draw(st.sampled_from(steps))
            place[step] = draw(st.one_of(values, alike(place[step]), alike(place[step])))
        elif isinstance(place, dict):
            place[draw(KEYS if values is VALUES else TEXTS)] = draw(values)
        elif steps:
            place.pop(draw(st.sampled_from(steps)))
    return content


def yaml_bytes(content: Any) -> bytes:
    """YAML of anything that `VALUES` gives."""
    return yaml.safe_dump(content, allow_unicode=False).encode()


def json_bytes(content: Any) -> bytes:
    """JSON, with NaN and Infinity as Python writes them."""
    return json.dumps(content).encode()


def file_target(
    name: str, strategy: st.SearchStrategy[bytes], read: Callable[[Path], Any], **others: bytes
) -> Target:
    """A target that writes the example to a file and reads it; others: files beside it."""

    def run(example: bytes, folder: Path) -> None:
        for beside, content in others.items():
            (folder / beside.replace("__", ".")).write_bytes(content)
        (folder / name).write_bytes(example)
        check_reader(lambda: read(folder / name), folder)

    return Target(strategy, run)


# Recipes, overrides, suites


@cache
def _yaml_of(kind: str, name: str) -> Any:
    return yaml.safe_load(resources.find(kind, name).read_text())


def _recipe() -> Any:
    objectives = {
        "prompts": "tiny_star",
        "loss": "anchor",
        "anchor": {"shape": "circle"},
        "timesteps": [0, 1000],
        "scale": 1.0,
        "n": 8,
        "images": "generate",
        "eta": 1.0,
        "empty_prompts": 0.1,
    }
    return {
        "model": "tiny-sd",
        "model_options": {"size": 512},
        "forget": [objectives, {"prompts": "tiny_moon", "loss": "esd", "eta": 1.0}],
        "concepts": "together",
        "retain": {"prompts": ["a house", "a moon"], "loss": "data"},
        "method": {"name": "munba", "xi": 1e-6, "every": 1},
        "finish": {"name": "uce", "lamb": 0.5},
        "trainable": {"select": "all", "lora": {"rank": 4, "alpha": 4.0}},
        "training": {
            "steps": 4,
            "batch_size": 4,
            "lr": 1e-4,
            "weight_decay": 0.0,
            "seed": 0,
            "tracker": "none",
        },
        "generation": {"steps": 2, "guidance": 5.0, "batch_size": 8, "seed": 0},
        "memory": "8gb",
    }


def _labelled_recipe() -> Any:
    objective = {
        "data": "digits",
        "options": {"flat": True},
        "classes": [3, "4"],
        "share": 0.5,
        "indices": [1, 2],
        "loss": "relabel",
        "l1": 0.1,
    }
    return {
        "target": "classifier",
        "model": "x",
        "forget": objective,
        "retain": "rest",
        "method": {"name": "scrub", "rounds": 2},
    }


def _small_recipe() -> Any:
    return _yaml_of("pipelines", "tiny_star_munba")


RECIPES = st.one_of(
    mutations(_recipe).map(yaml_bytes),
    mutations(_labelled_recipe).map(yaml_bytes),
    mutations(_small_recipe).map(yaml_bytes),
    bytes_like(resources.find("pipelines", "tiny_star_munba").read_bytes()),
    NASTY_YAML,
)


def _leco_config() -> Any:
    return {
        "prompts_file": "./here/prompts.yaml",
        "pretrained_model": {"name_or_path": "tiny-sd", "v2": False, "clip_skip": 1},
        "network": {"type": "lierla", "rank": 4, "alpha": 1.0, "training_method": "full"},
        "train": {
            "precision": "bfloat16",
            "iterations": 500,
            "lr": 1e-4,
            "optimizer": "AdamW",
            "optimizer_args": "betas=(0.9,0.99) weight_decay=0.1",
            "lr_scheduler": "constant",
        },
        "save": {"name": "a/b", "per_steps": 200, "precision": "float16"},
    }


def _leco_prompts() -> Any:
    entry = {
        "target": "a star",
        "positive": "a red star",
        "unconditional": "",
        "neutral": "{x}",
        "action": "enhance",
        "guidance_scale": 2.0,
        "resolution": [512, 768],
        "batch_size": 2,
        "multiplier": 1.0,
        "weight": 2.0,
    }
    return [entry, {"target": "a moon"}, {**entry, "action": "erase", "multiplier": -1.0}]


def _slider() -> Any:
    target = {"target_class": "", "positive": "old", "negative": "young", "multiplier": 2.0}
    return {
        "guidance_scale": 2.0,
        "neutrals": ["", "a photo"],
        "prompt_file": "neutrals.txt",
        "targets": [target],
    }


LECO = st.one_of(
    mutations(_leco_config).map(yaml_bytes),
    mutations(_leco_prompts).map(yaml_bytes),
    mutations(_slider).map(yaml_bytes),
    NASTY_YAML,
)
LECO_TOML = bytes_like(
    b'weight = 2\n[[prompts]]\ntarget = "a"\nresolution = [512, 768]\n[[prompts]]\ntarget = "b"\n',
    b'neutrals = ["", "x"]\n[[targets]]\ntarget_class = ""\npositive = "old"\n',
    b"a = [" * 900,
    b"a = 2020-13-45T99:99:99\n" + b"b = " + b"9" * 5000,
)


def _read_leco(path: Path) -> None:
    recipe.load(leco.load(path).content)


def _paths(content: Any, prefix: str = "") -> list[str]:
    if isinstance(content, list):
        content = dict(enumerate(content, 1))
    if not isinstance(content, dict):
        return [prefix]
    return [
        prefix,
        *(
            path
            for key, inner in content.items()
            for path in _paths(inner, f"{prefix}.{key}".strip("."))
        ),
    ]


def _yaml_line(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    )


OVERRIDES = st.lists(
    st.one_of(
        st.builds(
            "{}={}".format,
            st.sampled_from(_paths(_recipe())),
            st.one_of(VALUES.map(_yaml_line), TEXTS),
        ),
        st.builds("{}={}".format, TEXTS, TEXTS),
        TEXTS,
    ),
    min_size=1,
    max_size=3,
)


def _run_overrides(example: list[str], folder: Path) -> None:
    check_reader(lambda: recipe.load("tiny_star_munba", example), folder)


def _suite() -> Any:
    return {
        "about": "x",
        "concept": {"shape": "star"},
        "judge": "tiny",
        "seed": 1,
        "sensitive": False,
        "sampling": {"steps": 2, "guidance": 5.0, "batch_size": 4, "precision": "fp32"},
        "groups": {
            "direct": {"prompts": "tiny_star", "role": "forget", "n": 4},
            "more": {"prompts": ["a"], "role": "retain"},
        },
        "metrics": [
            "concept_rate",
            {"name": "nudenet", "preset": "mace"},
            {"name": "fid", "features": "judge"},
        ],
    }


SUITES = st.one_of(
    mutations(_suite).map(yaml_bytes),
    bytes_like(resources.find("eval", "tiny").read_bytes()),
    NASTY_YAML,
)


OPTIONS = [
    (kind, name, option)
    for kind in ("method", "attack", "metric", "dataset")
    for name in registry.names(kind)
    for option in [*registry.options(registry.load(kind, name)), "strange"]
]


def _run_option(example: tuple[tuple[str, str, str], Any], folder: Path) -> None:
    (kind, name, option), value = example
    check_reader(lambda: registry.build(kind, name, {option: value}), folder)


# Prompt sets


def _prompt_set() -> Any:
    return {
        "about": "x",
        "prompts": ["a house", {"text": "a moon", "seed": 3, "guidance": 7.5, "shape": "moon"}],
        "expand": {
            "templates": ["a(n) {color} {shape}", "{{{shape}}}"],
            "color": ["red", ["crimson", "red"]],
            "shape": "star",
        },
        "include": ["tiny_moon"],
        "without": ["crimson", "a moon"],
        "file": "table.csv",
        "where": {"categories": "sexual", "share": "> 50"},
        "template": "{prompt}, {share}",
    }


TABLE = b'prompt,categories,seed,guidance,share\n"a, b","sexual, x",17,7.5,60\nc,sexual,18.0,,70\n'
JSON_TABLE = json.dumps(
    {"annotations": [{"caption": "a", "seed": 1, "guidance": 2.0, "n": [1, 2]}, "b"]}
).encode()
JSON_LINES = b'{"text": "a", "seed": 1}\n\n{"prompt": "b", "guidance": 2.5}\n"c"\n'
BILLIONS = {
    "expand": {
        "templates": ["{" + "} {".join("abcdefgh") + "}"],
        **{letter: list(range(50)) for letter in "abcdefgh"},
    }
}
PROMPT_SETS = st.one_of(
    mutations(_prompt_set).map(yaml_bytes),
    bytes_like(resources.find("prompts", "tiny_star").read_bytes()),
    NASTY_YAML,
    st.just(yaml_bytes(BILLIONS)),
)


def _read_prompts(path: Path) -> None:
    for row in prompts.load(str(path)).prompts[:3]:
        row.anchor_prompt("a {{x}}")


CELLS = st.one_of(
    TEXTS,
    NUMBERS.map(
        lambda number: format(number, "g") if isinstance(number, float) else str(number)[:4000]
    ),
)


def _rows(separator: str) -> st.SearchStrategy[bytes]:
    heads = st.lists(
        st.sampled_from(["prompt", "text", "seed", "guidance", "class", "", "prompt"]),
        min_size=1,
        max_size=4,
    )
    rows = st.lists(st.lists(CELLS, max_size=5), max_size=4)
    return st.builds(
        lambda head, body: "\n".join(separator.join(row) for row in [head, *body]).encode(
            errors="surrogatepass"
        ),
        heads,
        rows,
    )


LINES = (
    st.lists(st.one_of(PLAIN.map(json.dumps), TEXTS), max_size=5)
    .map("\n".join)
    .map(lambda text: text.encode(errors="surrogatepass"))
)
ANCHORS = st.one_of(
    TEXTS,
    st.dictionaries(st.sampled_from(["shape", "color", "none"]), TEXTS, min_size=1),
    st.lists(st.sampled_from("{}!:.[]ab 0\\"), max_size=12).map("".join),
)


def _run_anchor(example: Any, folder: Path) -> None:
    row = prompts.Prompt(
        "a red star",
        {"shape": "star", "color": "red"},
        {"shape": "star", "color": "red"},
        "a {color} {shape}",
    )
    check_reader(lambda: row.anchor_prompt(example), folder)


# Selections of parameters

NAMES = [
    f"down_blocks.{i}.attentions.{j}.transformer_blocks.0.attn{k}.to_{what}.weight"
    for i in range(4)
    for j in range(2)
    for k in (1, 2)
    for what in ("q", "k", "v", "out.0")
]
EXPRESSIONS = st.one_of(
    st.lists(
        st.sampled_from(
            [
                "(",
                ")",
                "a",
                ".",
                "+",
                "*",
                "?",
                "|",
                "{9}",
                "{1,}",
                "[",
                "]",
                "^",
                "$",
                "\\w",
                "\\",
                "(?:",
                "(?=",
                "(?i)",
                "!",
            ]
        ),
        max_size=10,
    ).map("".join),
    st.sampled_from(
        [
            "(a+)+$",
            r"([\w.]+)+!",
            "(?:(?:(?:a{1000}){1000}){1000}){1000}",
            r"(\w+)\1+\1+!",
            "x{99999999999}",
            "(" * 240,
            "(?i)[\0-\U0010ffff]" * 20,
            "attn2",
        ]
    ),
    st.text(max_size=20),
)


def _run_expression(example: str, folder: Path) -> None:
    check_reader(lambda: selections.select(NAMES, f"re:{example}"), folder)


# Images and labelled data


@cache
def image(kind: str) -> bytes:
    """A small valid image file."""
    file = io.BytesIO()
    pixels = (np.arange(12 * 9 * 3).reshape(9, 12, 3) % 256).astype(np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def _huge_image() -> bytes:
    """A PNG whose header states more pixels than any image has."""
    import zlib

    content = image("PNG")
    header = b"IHDR" + struct.pack(">II", 2**30, 2**30) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


IMAGES = st.one_of(
    bytes_like(*(image(kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"))),
    st.just(_huge_image()),
    st.just(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) =\n"),
)


def _read_image(path: Path) -> None:
    images.read_folder(path.parent, (16, 16), caption="a")
    list(images.read_images(path.parent, []))


METADATA = st.one_of(
    LINES,
    bytes_like(b'{"file_name": "a.png", "text": "a house"}\n'),
    mutations(lambda: {"file_name": "a.png", "text": "x"}, PLAIN).map(json_bytes),
)


def npz(**arrays: bytes) -> bytes:
    """An archive with these files, each named like an array."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(array: Any, allow_pickle: bool = False) -> bytes:
    """An array as numpy writes it; allow_pickle: also an array of objects, which can execute
    code.
    """
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=allow_pickle)
    return file.getvalue()


def header(shape: str, kind: str) -> bytes:
    """The header of an array that states a shape, followed by ten bytes only."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return (
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + b"\0" * 10
    )


ARRAYS = st.one_of(
    st.sampled_from(
        [
            npy(np.zeros((4, 3))),
            npy(np.zeros((4, 2, 2), np.uint8)),
            npy([0, 1, 0, 1]),
            npy([0, 0.5, 1, 1]),
            npy([0, -1, 2, 1]),
            npy([2**62] * 4),
            npy([float("nan")] * 4),
            npy(np.full((4, 3), np.inf)),
            npy([["a", "b"]] * 4),
            npy(np.zeros((4, 3), complex)),
            npy(np.zeros((0, 3))),
            npy(7),
            npy([True] * 4),
            npy(np.array([{}, []] * 2, object), allow_pickle=True),
            npy(np.zeros(4, "datetime64[s]")),
        ]
    ),
    st.builds(
        header,
        st.sampled_from(
            ["(1000000000000,)", "(4,)", "(-1, 2)", "(2, 2, 'a')", "()", "x", "(" * 300]
        ),
        st.sampled_from(["<f4", "|O", "<U9", "q", "|V2000000000", "x"]),
    ),
    bytes_like(npy(np.zeros((4, 3)))),
)
NPZ = st.one_of(
    st.builds(lambda x, y: npz(x=x, y=y), ARRAYS, ARRAYS),
    bytes_like(npz(x=npy(np.zeros((4, 3))), y=npy([0, 1, 0, 1]))),
    st.builds(lambda x: npz(x=x), ARRAYS),
)


@cache
def _tensors() -> bytes:
    import torch
    from safetensors.torch import save

    return save({"a": torch.zeros(2, 3), "b": torch.ones(4)}, {"format": "pt"})


IDX = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 4) + bytes(24)
FACE = {
    "network": "resnet18",
    "size": 160,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "threshold": 0.5,
}
PREPARATION = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 256},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "crop_pct": 0.875,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TARGETS: dict[str, Target] = {
    "recipe": file_target("recipe.yaml", RECIPES, lambda path: recipe.load(str(path))),
    "overrides": Target(OVERRIDES, _run_overrides),
    "leco yaml": file_target(
        "config.yaml", LECO, _read_leco, prompts__yaml=b"- target: a\n", neutrals__txt=b"a\n"
    ),
    "leco toml": file_target("prompts.toml", LECO_TOML, _read_leco),
    "suite": file_target("suite.yaml", SUITES, lambda path: suite.load(str(path))),
    "plug-in options": Target(st.tuples(st.sampled_from(OPTIONS), VALUES), _run_option),
    "prompts yaml": file_target("set.yaml", PROMPT_SETS, _read_prompts, table__csv=TABLE),
    "prompts txt": file_target(
        "set.txt", st.one_of(LINES, bytes_like(b"# x\na star\n\n a moon \n")), _read_prompts
    ),
    "prompts csv": file_target("set.csv", st.one_of(_rows(","), bytes_like(TABLE)), _read_prompts),
    "prompts tsv": file_target(
        "set.tsv", st.one_of(_rows("\t"), bytes_like(TABLE.replace(b",", b"\t"))), _read_prompts
    ),
    "prompts json": file_target(
        "set.json",
        st.one_of(
            mutations(lambda: json.loads(JSON_TABLE), PLAIN).map(json_bytes),
            bytes_like(JSON_TABLE),
            PLAIN.map(json_bytes),
        ),
        _read_prompts,
    ),
    "prompts jsonl": file_target(
        "set.jsonl", st.one_of(LINES, bytes_like(JSON_LINES)), _read_prompts
    ),
    "anchor": Target(ANCHORS, _run_anchor),
    "selection": Target(EXPRESSIONS, _run_expression),
    "read_yaml": file_target(
        "x.yaml",
        st.one_of(NASTY_YAML, VALUES.map(yaml_bytes), bytes_like(b"a: [1, {b: c}]\n")),
        readers.read_yaml,
    ),
    "read_json": file_target(
        "x.json",
        st.one_of(
            PLAIN.map(json_bytes),
            bytes_like(b'{"a": [1, {"b": null}]}'),
            st.sampled_from([b"[" * 9000, b"9" * 9000, b'{"a": 1e999}']),
        ),
        readers.read_json,
    ),
    "read_lines": file_target(
        "x.jsonl",
        st.one_of(LINES, bytes_like(JSON_LINES), st.just(b"[" * 9000)),
        readers.read_lines,
    ),
    "read_compressed_lines": file_target(
        "x.jsonl.xz",
        st.one_of(
            LINES.map(lzma.compress), bytes_like(lzma.compress(b'{"a": 1}\n{"b": [2]}\n')), LINES
        ),
        readers.read_compressed_lines,
    ),
    "read_tensors": file_target("x.safetensors", bytes_like(_tensors()), readers.read_tensors),
    "read_tensor_header": file_target(
        "x.safetensors", bytes_like(_tensors()), readers.read_tensor_header
    ),
    "images": file_target("a.png", IMAGES, _read_image),
    "captions": file_target(
        "a.txt",
        st.one_of(LINES, st.binary(max_size=50)),
        lambda path: images.read_folder(path.parent, (8, 8)),
        a__png=image("PNG"),
    ),
    "metadata": file_target(
        "metadata.jsonl",
        METADATA,
        lambda path: images.read_folder(path.parent, (8, 8), caption="a"),
        a__png=image("PNG"),
    ),
    "npz": file_target("data.npz", NPZ, lambda path: labelled.open_data(str(path)).inputs([0])),
    "idx": file_target("a-idx3-ubyte", bytes_like(IDX), lambda path: mnist.read_idx(path, 3)),
    "idx.gz": file_target(
        "a-idx3-ubyte.gz",
        bytes_like(gzip.compress(IDX)),
        lambda path: mnist.read_idx(path, 3),
    ),
    "celeba attributes": file_target(
        "list_attr_celeba.txt",
        bytes_like(b"2\nSmiling Male \na.jpg  1 -1\nb.jpg -1  1\n"),
        lambda path: celeba.attribute_values(path, "Male"),
    ),
    "celeba partition": file_target(
        "list_eval_partition.txt", bytes_like(b"a.jpg 0\nb.jpg 2\n"), celeba.partition
    ),
    "face.json": file_target(
        "face.json", mutations(lambda: FACE, PLAIN).map(json_bytes), face.read_settings
    ),
    "preprocessor_config.json": file_target(
        "preprocessor_config.json",
        mutations(lambda: PREPARATION, PLAIN).map(json_bytes),
        lambda path: image_classifier.preparation(path.parent),
    ),
    "indices": file_target(
        "rows.txt", st.one_of(LINES, bytes_like(b"1\n2 # two\n30\n")), read_indices
    ),
}
