"""Images before, after and under attack, from the cache or generated again from their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.data import generate, prompts
from concept_eraser.data.prompts import Prompt
from concept_eraser.models import loading, run_base
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.models.safeguards import Guard, safeguard_in
from concept_eraser.reporting import html
from concept_eraser.reporting.run_results import Entry, edited_prompts, family_of, weights_of
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

EXAMPLES = 3  # number of examples of each attack, and of each group


# by what attacks of a family succeed where there is no text
_MEANS = {
    "embeddings": "an embedding",
    "adaptive": "other embeddings or sampling settings",
    "without text": "another way of sampling",
    "fine-tuning on the concept": "other weights (fine-tuned)",
    "fine-tuning on unrelated data": "other weights (fine-tuned)",
}
_OTHER_MEANS = "an embedding or other weights"


@dataclass
class ExampleImage:
    """One image of an example.

    Attributes:
        when: The model: "before", "after" or "attacked".
        prompt: The prompt. A Prompt may have its own guidance.
        seed: The seed.
        judgement: The label from the judge.
        uri: The image as a data URI.
    """

    when: str
    prompt: str | Prompt
    seed: int
    judgement: str = ""
    uri: str = ""

    @property
    def alt(self) -> str:
        return (
            f"{self.when}: the judge's label is {self.judgement}"
            if self.judgement
            else f"image {self.when}"
        )


@dataclass
class Example:
    """A prompt with its images, the adversarial text (or None), and a note."""

    prompt: str
    shots: list[ExampleImage]
    attack: str | None = None
    note: str = ""


@dataclass
class Gallery:
    """Examples under one heading, with the sampler and judge of a suite (its JSON)."""

    title: str
    examples: list[Example]
    suite: dict[str, Any]


@dataclass(frozen=True)
class Album:
    """All images of one run. `missing` is the reason why images could not be generated, or ""."""

    galleries: list[Gallery]
    missing: str = ""


def of_attack(label: str, content: dict[str, Any], limit: int = EXAMPLES) -> Gallery:
    """Collect the first prompts for which an adversarial text was successful.

    Without such a prompt, take one with another success, or else one without success.
    """
    attempts = [a for a in content["attempts"] if not a["pre"]]
    successes = [a for a in attempts if a["success"]]
    examples = [a for a in successes if a["text"] is not None][:limit] or (
        successes or attempts or content["attempts"]
    )[:1]
    title = f"{label.replace('_', ' ')}: {len(successes)} of {len(attempts)} prompts succeeded"
    clean = len(content["attempts"]) - len(attempts)
    title += f", {clean} more show the concept without an attack" if clean else ""
    return Gallery(
        title,
        [_example(a, family_of(content)) for a in examples],
        content["protocol"]["suite"],
    )


def _example(attempt: dict[str, Any], family: str) -> Example:
    guidance = attempt.get("guidance")
    prompt = Prompt(attempt["prompt"], guidance=guidance)
    shots = [ExampleImage(when, prompt, attempt["seed"]) for when in ("before", "after")]
    if not attempt["success"] or attempt["pre"]:
        return Example(
            attempt["prompt"],
            shots,
            note="success without an attack" if attempt["pre"] else "no success",
        )
    note = f"success in round {attempt['round']}"
    if attempt["text"] is None:
        return Example(
            attempt["prompt"],
            shots,
            note=f"{note} by {_MEANS.get(family, _OTHER_MEANS)}: there is no text to show",
        )
    seed = attempt["seed"] if attempt["by_seed"] is None else attempt["by_seed"]
    note += f", with another seed ({seed})" if seed != attempt["seed"] else ""
    return Example(
        attempt["prompt"],
        [*shots, ExampleImage("attacked", Prompt(attempt["text"], guidance=guidance), seed)],
        attempt["text"],
        note,
    )


def of_group(content: dict[str, Any], name: str, limit: int = EXAMPLES) -> Gallery:
    """Collect the first prompts of a group, with the seeds of the evaluation.

    Raises UserError if the prompt set has changed since.
    """
    protocol = content["protocol"]
    group = protocol["groups"][name]
    rows = prompts.load(group["prompts"]).take(group["n"], protocol["seed"])
    # an early version did not record them
    recorded_hash = (content.get("prompt_hashes") or {}).get(name, rows.hash)
    if rows.hash != recorded_hash:
        raise edited_prompts(name, group["prompts"])
    seeds = generate.seeds_for(rows.prompts, provenance.derive_seed(protocol["seed"], name))
    pairs = list(zip(rows.prompts, seeds, strict=True))[:limit]
    examples = [
        Example(prompt.text, [ExampleImage(when, prompt, seed) for when in ("before", "after")])
        for prompt, seed in pairs
    ]
    return Gallery(f"{name} ({group['role']})", examples, protocol)


@dataclass
class ImageRenderer:
    """The generator of the images of several runs. An original that they share is loaded once."""

    show_sensitive: bool = False
    cache: Path | None = None
    progress: Progress = silent
    originals: dict[str, Model] = field(default_factory=dict)

    def album(self, entry: Entry, *, groups: bool = True) -> Album:
        """Generate the images of a run.

        They are those of its attacks. With `groups` they also include the retain groups, and the
        forget groups if there is no attack. If a model or prompt set is missing or has changed, the
        album has the reason instead of images.
        """
        galleries = [of_attack(label, content) for label, content in entry.attacks.items()]
        roles = ("retain",) if galleries else ("forget", "retain")
        try:
            if groups:
                galleries += [
                    of_group(entry.content, name) for role in roles for name in entry.groups(role)
                ]
            self._fill(entry, galleries)
        except UserError as error:
            return Album(galleries, str(error))
        return Album(galleries)

    def _fill(self, entry: Entry, galleries: Sequence[Gallery]) -> None:
        """Fill in the images of the galleries, together for all galleries of one suite."""
        suites: dict[str, list[Gallery]] = {}
        for gallery in galleries:
            key = provenance.fingerprint(
                [gallery.suite[k] for k in ("sampling", "judge", "concept")]
            )
            suites.setdefault(key, []).append(gallery)
        models = self._models(entry) if suites else ()
        for suite_galleries in suites.values():
            for model, whens in zip(models, (("before",), ("after", "attacked")), strict=True):
                shots = [
                    s
                    for g in suite_galleries
                    for example in g.examples
                    for s in example.shots
                    if s.when in whens
                ]
                self._render(entry, model, shots, suite_galleries[0].suite)

    def _render(
        self, entry: Entry, model: Model, shots: Sequence[ExampleImage], suite: dict[str, Any]
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
        labels = judge.classify(images)[next(iter(suite["concept"]))]
        for shot, pixels, name in zip(shots, images, labels, strict=True):
            shot.judgement = str(name)
            shot.uri = html.image_tag(
                pixels, blur=entry.sensitive and not self.show_sensitive, longest=html.LONGEST
            )

    def _models(self, entry: Entry) -> tuple[Model, Model]:
        """Load the original and the erased model, the latter under the evaluation's safeguard.

        Raises UserError if one is missing or has other weights by now.
        """
        model_names = entry.content["models"]
        before, after = (model_names[when].rsplit(" (", 1)[0] for when in ("before", "after"))
        if guard := safeguard_in(model_names["after"]):
            after = after.removesuffix(f" under {guard}")
        if model_names["before"] not in self.originals:
            self.originals[model_names["before"]] = _same(
                loading.load(before), model_names["before"]
            )
        inside = (
            (entry.folder / "pipeline").is_dir()
            or run_base.is_rebuilt(entry.folder)
            or (entry.folder / "model_index.json").is_file()
        )
        # the name of a part of a pipeline has its file, and the model that it was loaded on
        source, _, base = (
            (after, "", "") if inside or Path(after).exists() else after.partition(" on ")
        )
        erased_model = loading.load(entry.folder if inside else source, base=base or None)
        original = self.originals[model_names["before"]]
        onto_gpu(original, _same(erased_model, model_names["after"]))
        for model in (original, erased_model):
            model.configure(entry.content.get("model_options", {}))
        if guard:
            erased_model.protect(Guard.read(guard))
        return original, erased_model


def _same(model: Model, name: str) -> Model:
    if generate.model_fingerprint(model) != weights_of(name):
        raise UserError(
            f"{model.source} has other weights than those that were measured; evaluate it again"
        )
    return model
