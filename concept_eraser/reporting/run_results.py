"""The runs of one page: their measurements, read from folders, ordered and checked for one
protocol.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.evaluation import result_schema
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.evaluation.suite import Suite
from concept_eraser.reporting import compare, html
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.migration import migrate_results
from concept_eraser.utils.provenance import fingerprint

# in a run folder, of further suites: <suite>/evaluation.json and report.html
EVALUATIONS = "evaluations"


@dataclass(frozen=True)
class RunFacts:
    """What a run folder tells about the making of a model; all empty for somebody else's
    checkpoint.
    """

    recipe: str = ""
    command: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None


@dataclass(frozen=True)
class Entry:
    """One run. content: its evaluation.json; attacks: attack.json by what to call it; unlike:
    attacks in its folder on other weights than those that were evaluated, which are left out."""

    name: str
    folder: Path
    content: dict[str, Any]
    facts: RunFacts = field(default_factory=RunFacts)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    unlike: list[str] = field(default_factory=list)

    @property
    def concept(self) -> tuple[str, str]:
        """Attribute and value, e.g. ("shape", "star")."""
        concept: dict[str, str] = self.content["protocol"]["concept"]
        return next(iter(concept.items()))

    @property
    def sensitive(self) -> bool:
        return any(map(html.is_sensitive, (self.content, *self.attacks.values())))

    def groups(self, role: str) -> list[str]:
        return [
            name
            for name, group in self.content["protocol"]["groups"].items()
            if group["role"] == role
        ]

    def value(self, metric: str, group: str, when: str = "after") -> Interval | None:
        """A measured number; None where it was not measured."""
        row = next(
            (r for r in self.content["results"] if (r["metric"], r["group"]) == (metric, group)),
            None,
        )
        return None if row is None else interval(row.get(when))

    def shown(self, when: str = "after") -> Interval | None:
        """The concept's share in the forget group in which it is largest."""
        rates = [v for g in self.groups("forget") if (v := self.value("concept_rate", g, when))]
        return max(rates, key=lambda v: v.value, default=None)

    def kept(self, when: str = "after") -> Interval | None:
        """Accuracy of the concept's attribute in the retain group in which it is least."""
        accuracies = [
            v
            for g in self.groups("retain")
            if (v := self.value(f"accuracy_{self.concept[0]}", g, when))
        ]
        return min(accuracies, key=lambda v: v.value, default=None)


def interval(values: Mapping[str, Any] | None) -> Interval | None:
    """An interval from JSON, which knows no nan: bounds that are null are nan."""
    if values is None or values.get("value") is None:
        return None
    low, high = (math.nan if values.get(k) is None else values[k] for k in ("low", "high"))
    return Interval(values["value"], low, high, values["n"])


def weights_of(model: str) -> str:
    """The fingerprint in "source (fingerprint)"."""
    return model.rsplit(" (", 1)[-1].rstrip(")")


def _attacked_model(attack: Mapping[str, Any]) -> str:
    return weights_of(attack.get("models", {}).get("victim", ""))


def names_of(folders: Sequence[Path]) -> list[str]:
    """What to call folders: the shortest ends of their paths that differ. Raises UserError for one
    given twice.
    """
    paths = [folder.resolve() for folder in folders]
    twice = next((path for path, n in Counter(paths).items() if n > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; give each run once")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The evaluation.json of a folder. Raises UserError where there is none, or one of labelled
    data.
    """
    if not (folder / "evaluation.json").is_file():
        raise UserError(
            f"{folder} was not evaluated yet; run `concept-eraser evaluate {folder}` first"
        )
    _, content = compare.read(folder / "evaluation.json")
    if not isinstance(content.get("results"), list):
        raise UserError(
            f"{folder} was measured on labelled data, which has no report of images; "
            f"its numbers: concept-eraser evaluate {folder}"
        )
    result_schema.require(content, result_schema.EVALUATION, folder / "evaluation.json")
    return content


def place_for(run: Path, suite: Suite, name: str) -> Path:
    """Where an evaluation of a run goes: its folder; where that holds another suite's,
    evaluations/<name> in it. The number of images makes no other suite."""
    protocol = _sort_of(suite.model_dump(mode="json"))
    tries = [
        run,
        run / EVALUATIONS / name,
        run / EVALUATIONS / f"{name}-{fingerprint(protocol)[:6]}",
    ]
    return next(
        (place for place in tries[:-1] if _protocol_in(place) in (None, protocol)), tries[-1]
    )


def _protocol_in(folder: Path) -> Any:
    """The protocol of the evaluation in a folder, as `_sort_of` gives it; None where there is none
    that could be read.
    """
    try:
        content = read_record(folder, "evaluation.json")
        return (
            _sort_of(Suite.model_validate(content["protocol"]).model_dump(mode="json"))
            if "protocol" in content
            else None
        )
    except (ValueError, TypeError, AttributeError, KeyError):  # damaged, or of another version
        return {}


def _sort_of(protocol: dict[str, Any]) -> dict[str, Any]:
    groups = {
        name: {k: v for k, v in group.items() if k != "n"}
        for name, group in protocol["groups"].items()
    }
    return {**{k: v for k, v in protocol.items() if k != "about"}, "groups": groups}


def read_attacks(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every attack.json below a folder, with the folder it lies in."""
    for path in sorted(folder.rglob("attack.json")):
        _, content = compare.read(path)
        result_schema.require(content, result_schema.ATTACK, path)
        yield path.parent, content


def concept_of(results: Mapping[str, Any]) -> dict[str, str]:
    """The attribute and value that an evaluation or attack is about; empty where it does not
    say.
    """
    protocol = results.get("protocol") or {}
    return dict((protocol.get("suite") or protocol).get("concept") or {})


def attacks_of(
    folder: Path, victim: str, files: Sequence[Path], concept: Mapping[str, str] | None = None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Attacks on a model by what to call them, and the names of those that lie in its run but
    attacked other weights.

    victim: its fingerprint; given: more folders, from which those on this victim are taken.
    concept: only attacks that looked for it; those that looked for another are named among the
    others. An attack goes by its own name; where there are several of a name, by that of its
    folder.
    """
    inside = list(read_attacks(folder / "attacks"))
    places = {path.resolve(): content for path, content in inside}
    places |= {path.resolve(): content for one in files for path, content in read_attacks(one)}
    ours = {path: content for path, content in places.items() if _attacked_model(content) == victim}
    other_concepts = {
        path: attack_concept
        for path, content in ours.items()
        if concept and (attack_concept := concept_of(content)) and attack_concept != dict(concept)
    }
    ours = {path: content for path, content in ours.items() if path not in other_concepts}
    times = Counter(content["protocol"]["attack"] for content in ours.values())
    attacks: dict[str, dict[str, Any]] = {}
    for path, content in ours.items():
        name = content["protocol"]["attack"]
        name = name if times[name] == 1 else path.name
        attacks[name if name not in attacks else str(path)] = content
    strange = [
        path.name
        for path, _ in inside
        if path.resolve() not in ours and path.resolve() not in other_concepts
    ]
    return attacks, strange + [
        f"{path.name} (which looked for {', '.join(attack_concept.values())})"
        for path, attack_concept in other_concepts.items()
    ]


def read(
    folders: Sequence[Path], facts: Mapping[Path, RunFacts], attacks: Sequence[Path] = ()
) -> list[Entry]:
    """The runs, each with its evaluation and attacks.

    attacks: folders with more attack.json files; each is matched to the run whose weights it
    attacked.

    Raises UserError for a run without evaluation or given twice, for runs or attacks of one name
    that were not measured alike, and for a folder of attacks that holds none on these runs.
    """
    names, entries = names_of(folders), []
    for name, folder in zip(names, folders, strict=True):
        content = read_evaluation(folder)
        attacks_on_run, unlike = attacks_of(
            folder, weights_of(content["models"]["after"]), attacks, concept_of(content)
        )
        entries.append(
            Entry(name, folder, content, facts.get(folder, RunFacts()), attacks_on_run, unlike)
        )
    require_useful(attacks, [entry.content["models"]["after"] for entry in entries])
    contents = {entry.name: entry.content for entry in entries}
    compare.require_alike(contents)
    for metric, group in dict.fromkeys(
        (r["metric"], r["group"]) for c in contents.values() for r in c["results"]
    ):
        compare.require_alike_settings(contents, metric, group)
    for label in labels(entries):
        compare.require_alike(
            {f"{label} on {e.name}": e.attacks[label] for e in entries if label in e.attacks}
        )
    return entries


def require_useful(attacks: Sequence[Path], victims: Sequence[str]) -> None:
    """Raise UserError for a folder of attacks in which no run was attacked."""
    fingerprints = set(map(weights_of, victims))
    for folder in attacks:
        attacked_models = {_attacked_model(content) for _, content in read_attacks(folder)}
        if not attacked_models & fingerprints:
            problem = (
                "holds no attack.json"
                if not attacked_models
                else "holds attacks on other weights only"
            )
            raise UserError(
                f"{folder} {problem}; give the folder of an attack on one of the reported runs"
            )


def labels(entries: Sequence[Entry]) -> list[str]:
    """The attacks of all runs, in the order in which they are met."""
    return list(dict.fromkeys(label for entry in entries for label in entry.attacks))


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run, {} where it is missing. Raises UserError where it holds no mapping."""
    path = folder / name
    content: dict[str, Any] = migrate_results(read_json(path)) if path.is_file() else {}
    return content
