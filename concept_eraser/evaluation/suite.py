"""Evaluation suites: prompt groups, sampler, judge and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import generate, prompts
from concept_eraser.evaluation import agreement, outcomes
from concept_eraser.evaluation.base import Evaluation, Evidence, Group, Judge, Metric, Result
from concept_eraser.evaluation.never_learned import RetrainingGap
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.registry import Plugin
from concept_eraser.storage.readers import read_yaml
from concept_eraser.storage.writers import finite, write_text
from concept_eraser.utils import limits, resources
from concept_eraser.utils import provenance as environment
from concept_eraser.utils.errors import UserError, mistakes_message, quote
from concept_eraser.utils.plugin_fields import JudgeField, MetricField
from concept_eraser.utils.progress import Progress, silent


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, str_max_length=limits.TEXT)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        limits.require_no_switch(cls.model_fields[str(info.field_name)].annotation, value)
        return value


class SuiteGroup(_Strict):
    """Prompts that are measured together."""

    prompts: str | list[str] | dict[str, Any] = Field(
        description="a prompt set by name or path, a list of prompts, or the content of a set"
    )
    role: Literal["forget", "neighbour", "retain"] = Field(
        description="forget: the concept is to be gone; neighbour, retain: to be preserved"
    )
    n: int = Field(100, ge=2, le=limits.IMAGES, description="images, one for each prompt and seed")


class SuiteSampling(_Strict):
    """The sampler of the measured images."""

    steps: int = Field(25, ge=1, le=limits.SAMPLER_STEPS, description="steps of the sampler")
    guidance: float = Field(
        5.0, ge=0, le=limits.GUIDANCE, description="classifier-free guidance scale"
    )
    batch_size: int = Field(64, ge=1, le=limits.BATCH, description="images generated at once")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast")


class Suite(_Strict):
    """One evaluation protocol. Its fingerprint is stored with every number."""

    about: str = Field("", description="one line for `concept-eraser list suites`")
    concept: dict[str, str] = Field(description="attribute: value, e.g. {shape: star}")
    judge: JudgeField = Field("tiny", description="a name, or {name: NAME, OPTION: VALUE}")
    seed: int = Field(0, ge=0, le=limits.SEED, description="seed of the prompts and the images")
    sampling: SuiteSampling = Field(SuiteSampling(), description="the sampler of the images")
    groups: dict[Annotated[str, Field(max_length=limits.FIELD)], SuiteGroup] = Field(
        min_length=1, max_length=limits.GROUPS, description="groups of prompts, by name"
    )
    metrics: list[MetricField] = Field(
        ["concept_rate", "accuracy", "fid", "clip_score"],
        max_length=limits.METRICS,
        description="names, or {name: nudenet, preset: rece}",
    )
    second_judge: JudgeField | None = Field(
        None,
        exclude=True,
        description="a judge that labels the same images, as `judge`; its agreement with the "
        "first one is reported; no metric uses it, so it is no part of the protocol",
    )
    sensitive: bool = Field(
        False, exclude=True, description="blur its images in reports; no part of the protocol"
    )

    def build_judge(self) -> Judge:
        """Return the judge. Raises UserError if it is unknown."""
        judge: Judge = registry.read("judge", self.judge).build()
        return judge

    def build_second_judge(self) -> Judge | None:
        """Return the second judge, or None if there is none. Raises UserError if it is unknown."""
        if self.second_judge is None:
            return None
        judge: Judge = registry.read("judge", self.second_judge).build()
        return judge

    @property
    def has_sensitive_images(self) -> bool:
        """Whether its images are blurred, and those of an attack not stored."""
        return self.sensitive or shows_nudity(self.model_dump(mode="json"))

    def using(
        self,
        judge: Any = None,
        metrics: Sequence[Any] | None = None,
        second_judge: Any = None,
    ) -> Suite:
        """Return the suite with other judges or other metrics, by name or as objects.

        Raises UserError as `load`.
        """
        changes = {
            "judge": judge,
            "metrics": None if metrics is None else list(metrics),
            "second_judge": second_judge,
        }
        changes = {key: value for key, value in changes.items() if value is not None}
        unchanged = {"sensitive": self.sensitive, "second_judge": self.second_judge}
        return load({**self.model_dump(), **unchanged, **changes}) if changes else self

    def describe_second_judge(self) -> Any:
        """Return the second judge for JSON: a name, or a mapping with its options, or None."""
        judge = self.second_judge
        return judge.describe() if isinstance(judge, Plugin) else judge

    def with_at_most(self, n: int | None) -> Suite:
        """Return the suite with at most `n` images in each group.

        Raises UserError for fewer than two images.
        """
        if n is None:
            return self
        if n < 2:
            raise UserError(f"n: expected at least 2 images of each group, found {quote(n)}")
        groups = {
            name: group.model_copy(update={"n": min(n, group.n)})
            for name, group in self.groups.items()
        }
        return self.model_copy(update={"groups": groups})


def load(source: str | Path | Mapping[str, Any] | Suite) -> Suite:
    """A suite by name or path, or from a mapping; raises UserError with every mistake."""
    if isinstance(source, Suite):
        return source
    if isinstance(source, Mapping):
        content, where = dict(source), "the suite"
    else:
        path = resources.find("eval", str(source))
        where = path.name
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise UserError(
                f"{path}: expected a mapping with `concept` and `groups`, found {quote(content)}"
            )
    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        raise UserError(mistakes_message(map(_mistake, error.errors()), where)) from None
    if len(suite.concept) != 1:
        raise UserError(
            f"{where}: concept names one attribute and its value, e.g. {{shape: star}}; "
            f"found {quote(suite.concept)}"
        )
    prefixes = [metric(entry).result_prefix() for entry in suite.metrics]
    twice = [prefix for i, prefix in enumerate(prefixes) if prefix in prefixes[:i]]
    if twice:
        raise UserError(
            f"{where}: two of its metrics give numbers of one name ({twice[0]}); measure "
            "them by two suites"
        )
    return suite


def _mistake(item: Any) -> str:
    """Return one line for one of pydantic's errors: the key, what is wrong, the value there."""
    key, value = ".".join(str(part)[:60] for part in item["loc"]), item["input"]
    finding = (
        ""
        if isinstance(value, dict) or item["type"] in ("value_error", "missing")
        else f", found {quote(value)}"
    )
    return f"{key}: {item['msg'].removeprefix('Value error, ')}{finding}"


def metric(entry: str | Mapping[str, Any] | Plugin) -> Metric:
    """Build a metric from an entry of a suite.

    Args:
        entry: Its name, a mapping with `name` and its options, or an object.

    Raises:
        UserError: It is none of these, or the name or an option is unknown.
    """
    try:
        plugin: Metric = registry.read("metric", entry).build()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
    return plugin


@dataclass(frozen=True)
class PromptEvaluation(Evaluation):
    """The numbers of a text-to-image model on the prompts of a suite.

    Attributes:
        suite: the protocol.
        models: "before" and "after", each as "source (fingerprint of its weights)".
        results: every number with its interval and the paired difference.
        groups: the images of each group of prompts, and what the judge detects in them.
        environment: versions, commit, device and command line.
        judge: the fingerprint of the judge's weights.
        refused: the metrics that could not be measured, with the reason.
        options: the options of the models' family.
        outcomes: one row for each image, see `concept_eraser/evaluation/outcomes.py`.
        second_opinion: the labels of the suite's second judge and their agreement with the first's,
            or None without a second judge.
        control: how far the erased model is from models that never learned the concept; None
            without such models.

    Example:
        >>> import concept_eraser
        >>> evaluation = concept_eraser.evaluate("runs/tiny_star_munba", "tiny_star", n=100)
        >>> images = evaluation.groups["direct"].images["after"]
    """

    suite: Suite
    models: dict[str, str]
    results: list[Result]
    groups: dict[str, Group]
    environment: dict[str, Any]
    judge: str
    refused: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list, repr=False)
    second_opinion: agreement.SecondOpinion | None = field(default=None, repr=False)
    control: RetrainingGap | None = None

    def as_dict(self) -> dict[str, Any]:
        protocol = self.suite.model_dump(mode="json")
        hashes = {name: group_prompts(self.suite, name).hash for name in self.suite.groups}
        second = self.second_opinion
        return {
            "protocol": protocol,
            "protocol_hash": environment.fingerprint([protocol, hashes, self.judge]),
            "judge": self.judge,
            "prompt_hashes": hashes,
            "models": self.models,
            "environment": self.environment,
            "results": [result.as_dict() for result in self.results],
            "refused": self.refused,
            **(
                {"second_judge": {"name": self.suite.describe_second_judge(), **second.as_dict()}}
                if second
                else {}
            ),
            **({"model_options": self.options} if self.options else {}),
            **({"sensitive": True} if self.suite.sensitive else {}),
            **({"control": self.control.as_dict()} if self.control is not None else {}),
        }

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        write_text(path, dumps(self.as_dict()), overwrite=overwrite)

    def save_outcomes(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the outcomes of the images as CSV under xz. Arguments and errors as `save`."""
        outcomes.write(path, self.outcomes, overwrite=overwrite)


def shows_nudity(suite: Mapping[str, Any]) -> bool:
    """Whether the attribute, the judge or a metric of a suite, as JSON, is about nudity."""
    plugins = [suite["judge"], *suite.get("metrics", ())]
    names = [plugin if isinstance(plugin, str) else plugin.get("name") for plugin in plugins]
    return "nudity" in suite["concept"] or "nudenet" in names


def dumps(content: Any) -> str:
    """Return JSON with nan as null."""
    return json.dumps(finite(content), indent=1) + "\n"


def group_prompts(suite: Suite, name: str) -> prompts.PromptSet:
    """Return the prompts of a group: a seeded draw from its set."""
    group = suite.groups[name]
    return prompts.load(group.prompts).take(group.n, suite.seed)


def group_seeds(suite: Suite, name: str, rows: Sequence[prompts.Prompt]) -> list[int]:
    """Return the seed of each image of a group, from the group's prompts."""
    return generate.seeds_for(rows, environment.derive_seed(suite.seed, name))


def generate_group(
    model: Model,
    suite: Suite,
    name: str,
    when: str,
    *,
    cache: Path | None = None,
    weights: str | None = None,
    progress: Progress = silent,
) -> Tensor:
    """Generate the images of a group by a model, [n, h, w, 3] uint8, or read them from the cache.

    when: "before" or "after", for the progress only. weights: see `generate.request_images`.
    """
    rows = group_prompts(suite, name)
    return generate.generate(
        model,
        rows.prompts,
        group_seeds(suite, name, rows.prompts),
        generate.Sampling(**suite.sampling.model_dump()),
        cache=cache,
        weights=weights,
        what=f"{name}, {when}",
        progress=progress,
    )


def describe_models(models: Mapping[str, Model]) -> dict[str, str]:
    """Return each model as "source (fingerprint of its weights)", as evaluations have it."""
    return {
        name: f"{model.source} ({generate.model_fingerprint(model)})"
        for name, model in models.items()
    }


def evaluate(
    before: Model,
    after: Model,
    suite: Suite,
    *,
    cache: Path | None = None,
    progress: Progress = silent,
) -> PromptEvaluation:
    """Generate every group's images with both models, then judge and measure them.

    Both models use the same prompts and seeds. The metrics use the labels of the first judge.
    """
    judge = suite.build_judge()
    attribute, value = next(iter(suite.concept.items()))
    if value not in judge.classes.get(attribute, ()):
        classes = "; ".join(f"{k}: {', '.join(v)}" for k, v in judge.classes.items())
        raise UserError(
            f"the judge {suite.judge!r} cannot detect {attribute} {value!r}; it knows {classes}"
        )
    second_judge = suite.build_second_judge()
    if second_judge is not None:
        agreement.require_second(judge, second_judge, (attribute, value))
    onto_gpu(before, after)
    pair = {"before": before, "after": after}
    weights = {when: generate.model_fingerprint(model) for when, model in pair.items()}
    groups = {}
    for name in suite.groups:
        images = {
            when: generate_group(
                model, suite, name, when, cache=cache, weights=weights[when], progress=progress
            )
            for when, model in pair.items()
        }
        groups[name] = _judge_images(
            judge, name, suite=suite, rows=group_prompts(suite, name), images=images
        )
    evidence = Evidence(groups, (attribute, value), judge, suite.seed)
    second = (
        None
        if second_judge is None
        else agreement.compare_judges(groups, judge, second_judge, evidence.concept)
    )
    results: list[Result] = []
    reasons: dict[str, str] = {}
    for entry in suite.metrics:
        try:
            results += metric(entry).measure(evidence)
        except UserError as error:  # too few images for one number must not prevent the others
            results += getattr(error, "results", ())  # a metric may be refused in part
            reasons[
                " ".join(map(str, entry.values())) if isinstance(entry, dict) else str(entry)
            ] = str(error)
    models = {when: f"{model.source} ({weights[when]})" for when, model in pair.items()}
    rows: list[dict[str, Any]] = []
    for name, group in groups.items():
        rows += outcomes.rows_of_group(
            group,
            judge,
            evidence.concept,
            seeds=group_seeds(suite, name, group.prompts),
            models=weights,
            results=results,
        )
    if second is not None and second_judge is not None:
        agreement.add_second_judge(rows, second_judge, evidence.concept, second)
    return PromptEvaluation(
        suite,
        models,
        results=results,
        groups=groups,
        environment=environment.describe(),
        judge=judge.fingerprint,
        refused=reasons,
        options=after.configured(),
        outcomes=rows,
        second_opinion=second,
    )


def _judge_images(
    judge: Judge, name: str, suite: Suite, rows: prompts.PromptSet, images: dict[str, Tensor]
) -> Group:
    labels = {when: judge.classify(some) for when, some in images.items()}
    return Group(name, suite.groups[name].role, prompts=rows.prompts, images=images, labels=labels)
