"""The results of the runs of one page, read from their folders and checked for one protocol."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.evaluation import result_schema
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.evaluation.suite import Suite, group_prompts
from concept_eraser.models.safeguards import Guard, safeguard_in
from concept_eraser.reporting import compare, html
from concept_eraser.runs import suite_matching
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.migration import migrate_results
from concept_eraser.utils.path_redaction import FILE_ON
from concept_eraser.utils.provenance import fingerprint

# the folder in a run folder for further suites: <suite>/evaluation.json and report.html
EVALUATIONS = "evaluations"


@dataclass(frozen=True)
class RunFacts:
    """The facts about the training in a run folder. They are empty for other checkpoints."""

    recipe: str = ""
    command: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None


@dataclass(frozen=True)
class Entry:
    """One run.

    Attributes:
        name: The name on the page.
        folder: The run folder.
        content: Its evaluation.json.
        facts: The facts about its training.
        attacks: The contents of attack.json, by label.
        unlike: The attacks in its folder that are left out. They attacked other weights than those
            of the evaluation, or the same under another safeguard, or searched for another concept.
    """

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
        """Return a measured number, or None."""
        row = next(
            (r for r in self.content["results"] if (r["metric"], r["group"]) == (metric, group)),
            None,
        )
        return None if row is None else interval(row.get(when))

    def worst_concept_rate(self, when: str = "after") -> Interval | None:
        """Return the largest concept rate of the forget groups."""
        rates = [v for g in self.groups("forget") if (v := self.value("concept_rate", g, when))]
        return max(rates, key=lambda v: v.value, default=None)

    def worst_retain_accuracy(self, when: str = "after") -> Interval | None:
        """Return the lowest accuracy of the concept's attribute of the retain groups."""
        accuracies = [
            v
            for g in self.groups("retain")
            if (v := self.value(f"accuracy_{self.concept[0]}", g, when))
        ]
        return min(accuracies, key=lambda v: v.value, default=None)


def interval(values: Mapping[str, Any] | None) -> Interval | None:
    """Read an interval from JSON. JSON has no nan, so a bound that is null becomes nan."""
    if values is None or values.get("value") is None:
        return None
    low, high = (math.nan if values.get(k) is None else values[k] for k in ("low", "high"))
    return Interval(values["value"], low, high, values["n"])


def weights_of(model: str) -> str:
    """Return the fingerprint in "source (fingerprint)"."""
    return model.rsplit(" (", 1)[-1].rstrip(")")


def sampled_model(model: str) -> str:
    """Return the fingerprint in "source (fingerprint)", followed by the safeguard if there is one.

    Numbers are of one model only if both agree.
    """
    return " ".join(filter(None, (weights_of(model), safeguard_in(model))))


def victim_of(attack: Mapping[str, Any]) -> str:
    """Return the attacked model as "source (fingerprint)", or "" if it is not stated."""
    return str(attack.get("models", {}).get("victim", ""))


def attack_name(folder: Path, attack: Mapping[str, Any]) -> str:
    """Return the name of the folder of an attack, with the safeguard that it was run under."""
    guard = safeguard_in(victim_of(attack))
    return f"{folder.name} (under the safeguard {guard})" if guard else folder.name


def names_of(folders: Sequence[Path]) -> list[str]:
    """Name folders by the shortest distinct endings of their paths.

    Raises UserError if a folder is given twice.
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


def suite_option(folder: Path) -> list[str]:
    """Return the words that name a suite in a command on a run, see `suite_matching`."""
    return suite_matching.suite_option(folder)


def evaluation_command(folder: Path) -> str:
    """Return the command that evaluates a run, with `--suite SUITE` where it needs one."""
    return shell_command("evaluate", folder, *suite_option(folder))


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Read the evaluation.json of a folder.

    Raises UserError if there is none, or if it is about labelled data.
    """
    if not (folder / "evaluation.json").is_file():
        raise UserError(f"{folder} was not evaluated yet; run `{evaluation_command(folder)}` first")
    _, content = compare.read(folder / "evaluation.json")
    result_schema.require(content, result_schema.EVALUATION, folder / "evaluation.json")
    return content


def place_for(run: Path, suite: Suite, name: str) -> Path:
    """Return the folder for an evaluation of a run.

    It is the run folder. If that holds the evaluation of another suite, it is evaluations/<name>
    inside. Suites that differ only in the number of images count as one. A suite with a prompt file
    that was edited since counts as another.
    """
    protocol = _comparable_protocol(suite.model_dump(mode="json"))
    candidates = [
        run,
        run / EVALUATIONS / name,
        run / EVALUATIONS / f"{name}-{fingerprint(protocol)[:6]}",
    ]
    return next(
        (place for place in candidates[:-1] if _is_free(place, suite, protocol)), candidates[-1]
    )


def _is_free(folder: Path, suite: Suite, protocol: Any) -> bool:
    """Whether a folder has no evaluation, or one by this suite with the present prompts."""
    other = _protocol_in(folder)
    if other != protocol:
        return other is None
    return not _has_other_prompts(read_record(folder, "evaluation.json"), suite)


def require_same(
    folder: Path, suite: Suite, *, before: str, after: str, guard: str | None = None
) -> None:
    """Check that a folder holds no evaluation but one of the same models by the same suite.

    Suites that differ only in the number of images count as one.

    Args:
        folder: The folder for a new evaluation.
        suite: The suite of the new evaluation.
        before: The name of the original model.
        after: The name of the model to measure.
        guard: The safeguard while sampling.

    Raises:
        UserError: The folder holds the evaluation of other models, by another suite, or of prompts
            that were edited since.
    """
    if (found := _earlier_evaluation(folder)) is None:
        return
    recorded, models = found
    protocol = _comparable_protocol(suite.model_dump(mode="json"))
    if (
        _protocol_in(folder) != protocol
        or _has_other_prompts(recorded, suite)
        or not _is_named(models.get("before"), before, None)
        or not _is_named(models.get("after"), after, guard)
    ):
        raise _other_evaluation(folder / "evaluation.json")


def require_same_original(folder: Path, before: str) -> None:
    """Check that a folder holds no evaluation that compares with another original model.

    Args:
        folder: The folder for a new evaluation of the same run.
        before: The name of the original model.

    Raises:
        UserError: It holds one.
    """
    if (found := _earlier_evaluation(folder)) is None:
        return
    path, recorded = folder / "evaluation.json", str(found[1].get("before"))
    if not _is_named(recorded, before, None):
        raise UserError(
            f"{path} compares the run with {recorded.rsplit(' (', 1)[0]}, not with {before}, and "
            "is not replaced; give another folder with --output"
        )


def require_same_models(
    folder: Path,
    suite: Suite,
    models: Mapping[str, str],
    *,
    inside: bool = False,
    objects: Collection[str] = (),
) -> None:
    """Check the evaluation in a folder as `require_same`, with the models that are loaded.

    A model is the same by its name, or by its weights where it has another name by now. A model in
    memory is the same by its weights only.

    Args:
        folder: The folder for a new evaluation.
        suite: The suite of the new evaluation.
        models: "before" and "after", each as "source (fingerprint of its weights)".
        inside: The folder is, or lies in, the run folder of the measured model. Then the weights
            may have changed.
        objects: Which of the models are objects in memory, so that their names say nothing.

    Raises:
        UserError: The folder holds the evaluation of other models, by another suite, or of prompts
            that were edited since.
    """
    if (found := _earlier_evaluation(folder)) is None:
        return
    recorded, earlier = found
    protocol = suite.model_dump(mode="json")
    is_suite = recorded.get("protocol") == protocol or (
        _protocol_in(folder) == _comparable_protocol(protocol)
    )
    if (
        not is_suite
        or _has_other_prompts(recorded, suite)
        or not all(
            _is_same_model(
                str(earlier.get(when)),
                model,
                by_name=when not in objects,
                any_weights=inside and when == "after",
            )
            for when, model in models.items()
        )
    ):
        raise _other_evaluation(folder / "evaluation.json")


def require_same_recipe(folder: Path, fingerprint: str) -> None:
    """Check that a folder holds no evaluation but that of a run of this recipe on labelled data.

    Args:
        folder: The folder for a new evaluation.
        fingerprint: The fingerprint of the run's recipe.

    Raises:
        UserError: The folder holds the evaluation of another run.
    """
    path = folder / "evaluation.json"
    if path.is_file() and read_record(folder, path.name).get("recipe") != fingerprint:
        raise UserError(
            f"{path} is of another run, and is not replaced; give another folder with --output"
        )


def _earlier_evaluation(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the evaluation in a folder and the models that it names, or None."""
    if not (folder / "evaluation.json").is_file():
        return None
    recorded = read_record(folder, "evaluation.json")
    models = recorded.get("models")
    return recorded, models if isinstance(models, dict) else {}


def _other_evaluation(path: Path) -> UserError:
    return UserError(
        f"{path} is of other models, of another suite or of prompts that were edited since, and is "
        "not replaced; give another folder with --output"
    )


def _is_same_model(recorded: str, model: str, *, by_name: bool, any_weights: bool) -> bool:
    """Whether two "source (fingerprint)" are the same model under the same safeguard.

    by_name: models of one name are the same. any_weights: compare the safeguards only.
    """
    guard = safeguard_in(model)
    if any_weights:
        return safeguard_in(recorded) == guard
    source = model.rsplit(" (", 1)[0].removesuffix(f" under {guard}")
    return sampled_model(recorded) == sampled_model(model) or (
        by_name and _is_named(recorded, source, guard or None)
    )


def require_same_prompts(content: Mapping[str, Any], suite: Suite) -> None:
    """Check that the prompts of a suite are those of an evaluation by it.

    Args:
        content: The evaluation.json.
        suite: The suite of its protocol, with any numbers of images.

    Raises:
        UserError: A prompt set has changed since.
    """
    if (name := next(_edited_groups(content, suite), None)) is not None:
        raise edited_prompts(name, suite.groups[name].prompts)


def edited_prompts(name: str, source: object) -> UserError:
    """Return the error about the prompts of a group that have changed since an evaluation."""
    place = f" ({source})" if isinstance(source, str) else ""
    return UserError(
        f"the prompts of {name!r}{place} have changed since they were measured; evaluate it again"
    )


def _has_other_prompts(content: Mapping[str, Any], suite: Suite) -> bool:
    """Whether an evaluation by this suite, with any n, was of other prompts: a file was edited."""
    return next(_edited_groups(content, suite), None) is not None


def _edited_groups(content: Mapping[str, Any], suite: Suite) -> Iterator[str]:
    """Yield the groups of a suite that had other prompts in an evaluation by it, with any n."""
    hashes, groups = content.get("prompt_hashes"), content["protocol"]["groups"]
    if not isinstance(hashes, dict):
        return  # an early version did not record them
    counted = {
        name: group.model_copy(update={"n": groups[name]["n"]})
        for name, group in suite.groups.items()
    }
    suite = suite.model_copy(update={"groups": counted})
    yield from (name for name in counted if group_prompts(suite, name).hash != hashes.get(name))


def _is_named(recorded: Any, name: str, guard: str | None) -> bool:
    """Whether "source (fingerprint)" is of the model of that name under that safeguard."""
    file, at, _ = name.partition(FILE_ON)
    wanted = str(Path(file + FILE_ON[:-1] if at else name).resolve())
    recorded_guard = safeguard_in(str(recorded))
    source = str(recorded).rsplit(" (", 1)[0]
    if recorded_guard:
        source = source.removesuffix(f" under {recorded_guard}")
    own_source = str(Path(source).resolve())
    is_source = own_source == wanted or own_source.startswith(f"{wanted} on ")  # a part on its base
    return is_source and recorded_guard == (str(Guard.read(guard)) if guard else "")


def _protocol_in(folder: Path) -> Any:
    """Return the protocol of the evaluation in a folder, as `_comparable_protocol` leaves it.

    Returns None if there is no evaluation, and {} if it cannot be read.
    """
    try:
        content = read_record(folder, "evaluation.json")
        return (
            _comparable_protocol(Suite.model_validate(content["protocol"]).model_dump(mode="json"))
            if "protocol" in content
            else None
        )
    except (ValueError, TypeError, AttributeError, KeyError):  # damaged, or of another version
        return {}


def _comparable_protocol(protocol: dict[str, Any]) -> dict[str, Any]:
    """Remove the description and the numbers of images from a protocol."""
    groups = {
        name: {k: v for k, v in group.items() if k != "n"}
        for name, group in protocol["groups"].items()
    }
    return {**{k: v for k, v in protocol.items() if k != "about"}, "groups": groups}


def read_attacks(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every attack.json below a folder, with its own folder."""
    for path in sorted(folder.rglob("attack.json")):
        _, content = compare.read(path)
        result_schema.require(content, result_schema.ATTACK, path)
        yield path.parent, content


def family_of(attack: Mapping[str, Any]) -> str:
    """Return the family of an attack's result: the stored one, or that of the attack's name.

    It is "other" for a name of another version or package.
    """
    if "family" in attack:
        return str(attack["family"])
    try:
        return str(registry.load("attack", attack["protocol"]["attack"]).family)
    except UserError:
        return "other"


def attacks_and_controls(
    attacks: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Divide the contents of attack.json, by label, into attacks and controls.

    A control says what an attack's budget finds without the attack, so it is no attack.
    """
    controls = {label: one for label, one in attacks.items() if family_of(one) == "control"}
    return {label: one for label, one in attacks.items() if label not in controls}, controls


def concept_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the attribute and value of an evaluation's or attack's concept, or {}."""
    protocol = results.get("protocol") or {}
    return dict((protocol.get("suite") or protocol).get("concept") or {})


def attacks_of(
    folder: Path, victim: str, files: Sequence[Path], concept: Mapping[str, str] | None = None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Collect the attacks on a model.

    An attack is labelled by its own name. Several attacks of one name are labelled by the names of
    their folders.

    Args:
        folder: The run folder, whose attacks/ is read.
        victim: The model, see `sampled_model`.
        files: More folders, from which the attacks on this model are taken.
        concept: Leave out attacks on other concepts.

    Returns:
        The attacks by label, and the names of those left out: attacks in the run folder on other
        weights or under another safeguard, and attacks on another concept.
    """
    inside = list(read_attacks(folder / "attacks"))
    places = {path.resolve(): content for path, content in inside}
    places |= {path.resolve(): content for more in files for path, content in read_attacks(more)}
    ours = {
        path: content
        for path, content in places.items()
        if sampled_model(victim_of(content)) == victim
    }
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
    other_weights = [
        attack_name(path, content)
        for path, content in inside
        if path.resolve() not in ours and path.resolve() not in other_concepts
    ]
    return attacks, other_weights + [
        f"{path.name} (for the concept {', '.join(attack_concept.values())})"
        for path, attack_concept in other_concepts.items()
    ]


def read(
    folders: Sequence[Path], facts: Mapping[Path, RunFacts], attacks: Sequence[Path] = ()
) -> list[Entry]:
    """Read several runs, each with its evaluation and attacks.

    Args:
        folders: The run folders.
        facts: The facts about the training, by folder.
        attacks: Folders with more attack.json files. Each is matched to the run whose weights it
            attacked.

    Raises:
        UserError: A run has no evaluation or is given twice, runs or attacks of one name have
            different protocols, or a folder of attacks has none on these runs.
    """
    names, entries = names_of(folders), []
    for name, folder in zip(names, folders, strict=True):
        content = read_evaluation(folder)
        attacks_on_run, unlike = attacks_of(
            folder, sampled_model(content["models"]["after"]), attacks, concept_of(content)
        )
        entries.append(
            Entry(
                name,
                folder,
                content=content,
                facts=facts.get(folder, RunFacts()),
                attacks=attacks_on_run,
                unlike=unlike,
            )
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
    """Raise UserError for a folder without an attack on one of the victims."""
    reported_models = set(map(sampled_model, victims))
    for folder in attacks:
        attacked_models = {sampled_model(victim_of(content)) for _, content in read_attacks(folder)}
        if not attacked_models & reported_models:
            problem = (
                "holds no attack.json"
                if not attacked_models
                else "holds attacks on other weights only, or under another safeguard"
            )
            raise UserError(
                f"{folder} {problem}; give the folder of an attack on one of the reported runs"
            )


def labels(entries: Sequence[Entry]) -> list[str]:
    """List the labels of the attacks of all runs, in the order of their first appearance."""
    return list(dict.fromkeys(label for entry in entries for label in entry.attacks))


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a run, or {} if it is missing. Raises UserError if it is no mapping."""
    path = folder / name
    content: dict[str, Any] = migrate_results(read_json(path)) if path.is_file() else {}
    return content
