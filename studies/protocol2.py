"""The prompt sets and suites of protocol 2: split into train, select and test.

    python -m studies.protocol2 [--check]

The command writes prompts/protocol2_*.yaml and eval/protocol2_*.yaml. `--check` writes nothing. It
fails if a file differs from what the command would write.

* A run trains on the sets `protocol2_CONCEPT` (forget) and `protocol2_CONCEPT_retain`.
* Settings are chosen by the suite `protocol2_CONCEPT`.
* The suite `protocol2_CONCEPT_test` is measured once, for the report.

The three splits share no template, no combination of the two attributes that vary beside the
concept, and no synonym of the concept. They share the backgrounds, and the concept's own name. A
single synonym is in the test split. "striped" has none.

Shapes are split too. Training uses five of them, and the select suites measure two more as
`held_out`. The test suites measure the last three as `unseen`: no retain set has them. The value
most similar to an erased colour or style is in no retain set either. The test suites measure it as
`neighbours`, for colours beside brown. The select suites measure pink as `held_out_values`.

No select or test suite has a prompt of protocol 1: the templates are new.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from concept_eraser.tiny import painter

ROOT = Path(__file__).parent.parent
SPLITS = ("train", "select", "test")
# Decisions are made on the first three concepts, and reported for the others.
DEVELOPMENT = {"star": "shape", "blue": "color", "dotted": "style"}
REPORTED = {"heart": "shape", "purple": "color", "striped": "style"}
CONCEPTS = {**DEVELOPMENT, **REPORTED}

VALUES = {"shape": painter.SHAPES, "color": painter.COLORS, "style": painter.STYLES}
SYNONYMS = {**painter.SYNONYMS, **painter.COLOR_SYNONYMS, **painter.STYLE_WORDS}
PREFIXES = {
    "train": ("", "a picture of ", "a drawing of "),
    "select": ("an image of ",),
    "test": ("a photo of ", "an icon of "),
}
# the splits of the residues of `combination_split`: two, one and one of four combinations
RESIDUES = ("train", "train", "select", "test")
SHAPES = {
    "train": ("star", "circle", "square", "triangle", "heart"),
    "select": ("house", "tree"),
    "test": ("cross", "moon", "fish"),
}
COLORS = {"select": ("pink",), "test": ("brown",)}
# similar values, of which one is erased and the other in no retain set
NEIGHBOURS = {
    "blue": ("purple",),
    "purple": ("blue",),
    "dotted": ("striped",),
    "striped": ("dotted",),
}
SEED = 8001
# images of a group by its role; FID needs more images than the judge has features (192)
IMAGES = {"forget": 96, "neighbour": 200, "retain": 300}


@dataclass(frozen=True)
class Split:
    """The part of a concept's world that one split has.

    Attributes:
        templates: the templates.
        synonyms: other names of the concept.
        values: the values of the concept's attribute, without the concept.
    """

    templates: tuple[str, ...]
    synonyms: tuple[str, ...]
    values: tuple[str, ...]


def combination_split(first: int, second: int) -> str:
    """Return the split of a combination, by the positions of its two values.

    A Latin square: among four neighbouring values of one attribute, each value of the other has two
    combinations for training, one to select and one to test.
    """
    return RESIDUES[(first + second) % len(RESIDUES)]


def split_of(concept: str, split: str) -> Split:
    """Return what a split has of a concept's templates, synonyms and values."""
    templates = tuple(
        f"{prefix}a(n) {{style}} {{color}} {{shape}}{background}"
        for prefix in PREFIXES[split]
        for background in (" {background}", "")
    )
    names = [name for name in SYNONYMS[concept] if name != concept]
    # a single synonym is for the report
    chosen = names[:1] if len(names) > 1 else []
    synonyms = {"train": [], "select": chosen, "test": names[len(chosen) :]}[split]
    return Split(templates, tuple(synonyms), _values(concept, split))


def _values(concept: str, split: str) -> tuple[str, ...]:
    """Return the values of the concept's attribute that a split adds, without the concept."""
    attribute, neighbours = CONCEPTS[concept], NEIGHBOURS.get(concept, ())
    if attribute == "shape":
        return tuple(shape for shape in SHAPES[split] if shape != concept)
    if attribute == "style":
        trained = tuple(s for s in painter.STYLES if s != concept and s not in neighbours)
        return {"train": trained, "select": (), "test": neighbours}[split]
    held_out = {"select": COLORS["select"], "test": (*neighbours, *COLORS["test"])}
    others = {concept, *held_out["select"], *held_out["test"]}
    trained = tuple(color for color in painter.COLORS if color not in others)
    return {"train": trained, **held_out}[split]


def products(
    concept: str, split: str, values: Sequence[Any], shapes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the expansions of a split: templates, and blocks of its combinations.

    Args:
        concept: the concept.
        split: the split.
        values: the values of the concept's attribute; [word, value] for a synonym.
        shapes: the shapes, for a concept that is no shape. Shapes that training has not seen have
            all combinations, which are new with them.
    """
    attribute = CONCEPTS[concept]
    first, second = (name for name in ("shape", "color", "style") if name != attribute)
    backgrounds = [
        [phrase, name] for name, phrases in painter.BACKGROUND_PHRASES.items() for phrase in phrases
    ]
    new = {*SHAPES["select"], *SHAPES["test"]}
    blocks = []
    for column, other in enumerate(VALUES[second]):
        row_values = [
            value
            for row, value in enumerate(VALUES[first])
            if (first != "shape" or value in shapes)
            and (value in new or combination_split(row, column) == split)
        ]
        if row_values:
            blocks.append(
                {
                    "templates": list(split_of(concept, split).templates),
                    attribute: list(values),
                    first: row_values,
                    second: [other],
                    "background": backgrounds,
                }
            )
    return blocks


def training_sets(concept: str) -> dict[str, dict[str, Any]]:
    """Return the forget set and the retain set of a concept's training, by name."""
    split = split_of(concept, "train")
    return {
        f"protocol2_{concept}": {
            "about": f"protocol 2, training: {concept} of the bundled data set, by its own name",
            "expand": products(concept, "train", [concept], SHAPES["train"]),
        },
        f"protocol2_{concept}_retain": {
            "about": f"protocol 2, training: what is to be preserved without {concept}",
            "expand": products(concept, "train", split.values, SHAPES["train"]),
        },
    }


def groups(concept: str, split: str) -> dict[str, dict[str, Any]]:
    """Return the groups of a suite: of the split "select" or "test"."""
    part, trained = split_of(concept, split), split_of(concept, "train")
    is_shape = CONCEPTS[concept] == "shape"
    seen = SHAPES["train"]
    contents: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "direct": ("forget", products(concept, split, [concept], seen))
    }
    if part.synonyms:
        words = [[word, concept] for word in part.synonyms]
        contents["synonyms"] = ("forget", products(concept, split, words, seen))
    contents["retained"] = ("retain", products(concept, split, trained.values, seen))
    name = {"select": "held_out", "test": "unseen"}[split]
    if is_shape:
        contents[name] = ("retain", products(concept, split, part.values))
    else:
        contents[name] = ("retain", products(concept, split, trained.values, SHAPES[split]))
        if part.values:
            key = {"select": "held_out_values", "test": "neighbours"}[split]
            role = {"select": "retain", "test": "neighbour"}[split]
            contents[key] = (role, products(concept, split, part.values, seen))
    return {
        name: {"prompts": {"expand": expansion}, "role": role, "n": IMAGES[role]}
        for name, (role, expansion) in contents.items()
    }


def suite(concept: str, split: str) -> dict[str, Any]:
    """Return the suite of a concept: of the split "select" or "test"."""
    purpose = {
        "select": "to choose settings; report the other suite",
        "test": "to report; choose nothing by it",
    }[split]
    return {
        "about": f"protocol 2, {concept}, {split} split: {purpose}",
        "concept": {CONCEPTS[concept]: concept},
        "judge": "tiny",
        "seed": SEED,
        "sampling": {"steps": 8, "guidance": 5.0, "batch_size": 64, "precision": "bf16"},
        "groups": groups(concept, split),
        "metrics": ["concept_rate", "accuracy", "fid", "clip_score"],
    }


def files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of every file of the protocol."""
    for concept in CONCEPTS:
        for name, content in training_sets(concept).items():
            yield ROOT / "prompts" / f"{name}.yaml", _text(content, "")
        for split, ending in (("select", ""), ("test", "_test")):
            name = f"protocol2_{concept}{ending}"
            first = f"# concept-eraser evaluate RUN --suite {name}\n"
            yield ROOT / "eval" / f"{name}.yaml", _text(suite(concept, split), first)


class _Plain(yaml.SafeDumper):
    """Writes equal lists out, without references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(content: Mapping[str, Any], first: str) -> str:
    header = first or "# Origin: written for concept_eraser. Licence: Apache-2.0.\n"
    header += "# Made by `python -m studies.protocol2`.\n"
    body = yaml.dump(
        dict(content), Dumper=_Plain, sort_keys=False, default_flow_style=None, width=400
    )
    return header + body


def main() -> None:
    """Write the files, or check them."""
    stale = []
    for path, text in files():
        if not path.is_file() or path.read_text() != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(text)
    if "--check" in sys.argv and stale:
        sys.exit(f"not what `python -m studies.protocol2` writes: {', '.join(stale)}")


if __name__ == "__main__":
    main()
