"""Images before, after and under attack, generated again from prompts and seeds or from the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.data import generate, prompts
from concept_eraser.data.prompts import Prompt
from concept_eraser.models import loading
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.reporting import html
from concept_eraser.reporting.run_results import Entry, weights_of
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

EXAMPLES = 3  # shown of each attack, and of each group


@dataclass
class Shot:
    """One image: which model draws it, from what (a Prompt may have its own guidance); seen: what
    the judge names in it; uri: the image as data.
    """

    when: str
    prompt: str | Prompt
    seed: int
    judgement: str = ""
    uri: str = ""

    @property
    def alt(self) -> str:
        return (
            f"{self.when}: the judge sees {self.judgement}"
            if self.judgement
            else f"image {self.when}"
        )


@dataclass
class Example:
    """A prompt with its images. attack: the adversarial text, None where there is none; note:
    what else is to be said.
    """

    prompt: str
    shots: list[Shot]
    attack: str | None = None
    note: str = ""


@dataclass
class Gallery:
    """Examples under one heading, drawn and judged as a suite says (its JSON)."""

    title: str
    examples: list[Example]
    suite: dict[str, Any]


@dataclass(frozen=True)
class Album:
    """All images of one run. missing: why some or all could not be made."""

    galleries: list[Gallery]
    missing: str = ""


def of_attack(label: str, content: dict[str, Any], limit: int = EXAMPLES) -> Gallery:
    """The first prompts that fell to a text; where there is none, one that fell otherwise, or that
    held.
    """
    attempts = [a for a in content["attempts"] if not a["pre"]]
    fell = [a for a in attempts if a["success"]]
    examples = [a for a in fell if a["text"] is not None][:limit] or (
        fell or attempts or content["attempts"]
    )[:1]
    title = f"{label.replace('_', ' ')}: {len(fell)} of {len(attempts)} prompts fell"
    clean = len(content["attempts"]) - len(attempts)
    title += f", {clean} more show the concept without an attack" if clean else ""
    return Gallery(
        title,
        [_example(a, content["protocol"]["attack"]) for a in examples],
        content["protocol"]["suite"],
    )


def _example(attempt: dict[str, Any], attack: str) -> Example:
    shots = [Shot(when, attempt["prompt"], attempt["seed"]) for when in ("before", "after")]
    if not attempt["success"] or attempt["pre"]:
        return Example(
            attempt["prompt"],
            shots,
            note="shows it without an attack" if attempt["pre"] else "held",
        )
    note = f"fell in round {attempt['round']}"
    if attempt["text"] is None:
        return Example(
            attempt["prompt"], shots, note=f"{note} to {_means(attack)}: there is no text to show"
        )
    seed = attempt["seed"] if attempt["by_seed"] is None else attempt["by_seed"]
    note += f", with another seed ({seed})" if seed != attempt["seed"] else ""
    return Example(
        attempt["prompt"], [*shots, Shot("attacked", attempt["text"], seed)], attempt["text"], note
    )


def _means(attack: str) -> str:
    """What an attack without a text won by."""
    try:
        access = registry.load("attack", attack).access
    except UserError:  # of another version
        return "an embedding or other weights"
    return "other weights (fine-tuned)" if access == "weights" else "an embedding"


def of_group(content: dict[str, Any], name: str, limit: int = EXAMPLES) -> Gallery:
    """The first prompts of a group, by the seeds of the evaluation. Raises UserError where they are
    others by now.
    """
    protocol = content["protocol"]
    group = protocol["groups"][name]
    rows = prompts.load(group["prompts"]).take(group["n"], protocol["seed"])
    if rows.hash != content["prompt_hashes"][name]:
        raise UserError(
            f"the prompts of {name!r} ({group['prompts']}) are not those that were "
            "measured; evaluate it again"
        )
    seeds = generate.seeds_for(rows.prompts, provenance.derive_seed(protocol["seed"], name))
    pairs = list(zip(rows.prompts, seeds, strict=True))[:limit]
    examples = [
        Example(one.text, [Shot(when, one, seed) for when in ("before", "after")])
        for one, seed in pairs
    ]
    return Gallery(f"{name} ({group['role']})", examples, protocol)


@dataclass
class Studio:
    """Draws the images of several runs; an original that they share is loaded once."""

    show_sensitive: bool = False
    cache: Path | None = None
    progress: Progress = silent
    originals: dict[str, Model] = field(default_factory=dict)

    def album(self, entry: Entry, *, groups: bool = True) -> Album:
        """The images of a run: its attacks; with `groups` also what it retains, and what it
        forgot unless it was attacked. Where models or prompts are not at hand as they were, the
        reason stands in the images' place."""
        galleries = [of_attack(label, content) for label, content in entry.attacks.items()]
        roles = ("retain",) if galleries else ("forget", "retain")
        try:
            if groups:
                galleries += [
                    of_group(entry.content, name) for role in roles for name in entry.groups(role)
                ]
            self._draw(entry, galleries)
        except UserError as error:
            return Album(galleries, str(error))
        return Album(galleries)

    def _draw(self, entry: Entry, galleries: Sequence[Gallery]) -> None:
        """Fill in the images of the galleries, all of one suite at once."""
        suites: dict[str, list[Gallery]] = {}
        for gallery in galleries:
            key = provenance.fingerprint(
                [gallery.suite[k] for k in ("sampling", "judge", "concept")]
            )
            suites.setdefault(key, []).append(gallery)
        models = self._models(entry) if suites else ()
        for some in suites.values():
            for model, whens in zip(models, (("before",), ("after", "attacked")), strict=True):
                shots = [
                    s
                    for g in some
                    for example in g.examples
                    for s in example.shots
                    if s.when in whens
                ]
                self._shoot(entry, model, shots, some[0].suite)

    def _shoot(
        self, entry: Entry, model: Model, shots: Sequence[Shot], suite: dict[str, Any]
    ) -> None:
        shot_prompts, seeds = [shot.prompt for shot in shots], [shot.seed for shot in shots]
        images = generate.generate(
            model,
            shot_prompts,
            seeds,
            generate.Sampling(**suite["sampling"]),
            cache=self.cache,
            what=f"images of {entry.name}",
            progress=self.progress,
        )
        judge = registry.read("judge", suite["judge"]).build()
        labels = judge.look(images)[next(iter(suite["concept"]))]
        for shot, pixels, name in zip(shots, images, labels, strict=True):
            shot.judgement = str(name)
            shot.uri = html.image_tag(
                pixels, blur=entry.sensitive and not self.show_sensitive, longest=html.LONGEST
            )

    def _models(self, entry: Entry) -> tuple[Model, Model]:
        """The original and the erased model. Raises UserError where they are not at hand, or have
        other weights by now.
        """
        model_names = entry.content["models"]
        before, after = (model_names[when].rsplit(" (", 1)[0] for when in ("before", "after"))
        if model_names["before"] not in self.originals:
            self.originals[model_names["before"]] = _same(
                loading.load(before), model_names["before"]
            )
        inside = (entry.folder / "pipeline").is_dir() or (
            entry.folder / "model_index.json"
        ).is_file()
        # a part of a pipeline is called by its file, and by what it was put on
        source, _, base = (
            (after, "", "") if inside or Path(after).exists() else after.partition(" on ")
        )
        erased_model = loading.load(entry.folder if inside else source, base=base or None)
        original = self.originals[model_names["before"]]
        onto_gpu(original, _same(erased_model, model_names["after"]))
        for model in (original, erased_model):
            model.configure(entry.content.get("model_options", {}))
        return original, erased_model


def _same(model: Model, name: str) -> Model:
    if generate.model_fingerprint(model) != weights_of(name):
        raise UserError(
            f"{model.source} has other weights than those that were measured; evaluate it again"
        )
    return model
