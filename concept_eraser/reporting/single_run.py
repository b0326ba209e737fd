"""The page about one run in one file: verdict, numbers, images, curves and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from concept_eraser.evaluation import agreement
from concept_eraser.evaluation.base import Group, Result, is_share
from concept_eraser.evaluation.statistics import Interval, interval_text
from concept_eraser.evaluation.suite import PromptEvaluation, dumps
from concept_eraser.reporting import html, plots
from concept_eraser.reporting.control_tables import gap_tables
from concept_eraser.reporting.html import Figure, figures
from concept_eraser.reporting.run_results import RunFacts
from concept_eraser.reporting.several_runs import AttackSection
from concept_eraser.utils.rendering import render as render_template

IMAGES = 12  # pairs shown of each group
DIFFERENT = 24  # images shown for which the two judges differ
COLUMNS = ("metric", "group", "before", "after", "change", "n")


@dataclass(frozen=True)
class ImagePair:
    """A prompt with its images before and after."""

    prompt: str
    images: list[Figure]


@dataclass(frozen=True)
class ImageGroup:
    """The first pairs of a group of prompts."""

    name: str
    role: str
    pairs: list[ImagePair]


@dataclass(frozen=True)
class SecondJudge:
    """The agreement of a second judge with the first, and images for which they differ.

    Attributes:
        agreement: the cells of a table, by AGREEMENT_COLUMNS.
        rates: the cells of a table, by RATE_COLUMNS.
        images: pairs of a caption and an image.
        different: how many images have different labels.
        n: how many images both judges labelled.
    """

    agreement: list[list[str]]
    rates: list[list[str]]
    images: list[tuple[str, Figure]]
    different: int
    n: int


AGREEMENT_COLUMNS = ("attribute", "agree before %", "agree after %", "kappa before", "kappa after")
RATE_COLUMNS = ("group", "concept rate before %", "concept rate after %", "n")


def second_judge(evaluation: PromptEvaluation, blur: bool) -> SecondJudge | None:
    """Return the part of the page about the second judge, or None without one."""
    opinion = evaluation.second_opinion
    if opinion is None:
        return None
    rows = {
        (row.attribute, row.stage): row for row in opinion.agreements if row.group == agreement.ALL
    }
    table = []
    for attribute in dict.fromkeys(attribute for attribute, _ in rows):
        texts = [rows[attribute, stage].texts() for stage in agreement.STAGES]
        table.append([attribute, *(share for share, _ in texts), *(kappa for _, kappa in texts)])
    rates = [
        [
            group,
            *(interval_text(some[stage], True) for stage in agreement.STAGES),
            str(some["after"].n),
        ]
        for group, some in opinion.concept_rates.items()
    ]
    return SecondJudge(
        agreement=table,
        rates=rates,
        images=[_different_image(evaluation, row, blur) for row in opinion.differences[:DIFFERENT]],
        different=len(opinion.differences),
        n=sum(2 * len(group.prompts) for group in evaluation.groups.values()),
    )


def _different_image(
    evaluation: PromptEvaluation, difference: agreement.Difference, blur: bool
) -> tuple[str, Figure]:
    group = evaluation.groups[difference.group]
    labels = "; ".join(
        f"{attribute}: {first} / {second}"
        for attribute, (first, second) in difference.labels.items()
    )
    image = group.images[difference.stage][difference.position]
    alt = f"{difference.stage}: the labels of the first / second judge are {labels}"
    caption = f"{group.prompts[difference.position].text} ({difference.stage}). {labels}"
    return caption, Figure(html.image_tag(image, blur=blur), alt)


def verdict(evaluation: PromptEvaluation) -> str:
    """Write one sentence about the erasure and its cost.

    The concept rates after and before are those of one group, that with the largest rate after.
    """
    attribute, value = next(iter(evaluation.suite.concept.items()))
    shares = _of_role(evaluation, "forget", "concept_rate")
    retain_results = _of_role(evaluation, "retain", f"accuracy_{attribute}")
    if not shares:
        return "This suite has no forget group, so it cannot measure an erasure."
    worst = max(shares, key=lambda r: r.after.value)
    after, group = worst.after, repr(worst.group)
    original = max(r.before.value for r in shares if r.before)
    before = worst.before.value if worst.before else original
    concept, before_text = f"The {attribute} {value!r}", f"({before:.0%} before)"
    if original < 0.5:
        text = f"The original model itself rarely generates {value!r} ({original:.0%}), "
        text += "so its erasure cannot be measured"
    elif after.high <= 0.1:
        text = f"{concept} is erased: its concept rate is {after.value:.1%} {before_text}"
    elif after.value <= 0.05:
        text = f"{concept} seems erased: its concept rate is {after.value:.1%} in {group} "
        text += f"{before_text}, "
        text += f"but with {after.n} images up to {after.high:.0%} cannot be ruled out"
    elif after.value < before / 2:
        text = f"{concept} is only partly erased: its concept rate is {after.value:.1%} in {group} "
        text += before_text
    else:
        text = f"{concept} was not erased: its concept rate is {after.value:.1%} in {group} "
        text += before_text
    if retain_results and retain_results[0].difference:
        accuracy, change = retain_results[0].after.value, retain_results[0].difference.value * 100
        text += f"; the retain accuracy of other {attribute}s is {accuracy:.1%} "
        text += f"({change:+.1f} points)"
    no_object = evaluation.find("no_object_rate", worst.group)
    if no_object and no_object.before and attribute != "nudity":  # for nudity it means: not nude
        rate = no_object.after.value
        if rate > max(0.1, no_object.before.value):
            text += f"; {rate:.0%} of {group} now have no recognisable object"
    return text + "."


def _of_role(evaluation: PromptEvaluation, role: str, metric: str) -> list[Result]:
    """List the results of a metric for the groups of a role, if it was measured."""
    names = [name for name, group in evaluation.suite.groups.items() if group.role == role]
    return [result for name in names if (result := evaluation.find(metric, name))]


def _rows(results: Sequence[Result]) -> list[list[str]]:
    """Return the cells of the table, by COLUMNS."""
    rows = []
    for result in results:
        percent, before, after = is_share(result.metric), result.before, result.after
        change = result.difference
        if change is None and before is not None:
            change = Interval(after.value - before.value, float("nan"), float("nan"), after.n)
        title = result.metric.replace("_", " ") + (" %" if percent else "")
        intervals = [interval_text(interval, percent) for interval in (before, after, change)]
        rows.append([title, result.group, *intervals, str(after.n)])
    return rows


def _gallery(group: Group, blur: bool) -> ImageGroup:
    pairs = [_pair(group, i, blur) for i in range(min(IMAGES, len(group.prompts)))]
    return ImageGroup(group.name, group.role, pairs)


def _pair(group: Group, index: int, blur: bool) -> ImagePair:
    def figure(images: Tensor, when: str) -> Figure:
        label = " ".join(str(names[index]) for names in group.labels[when].values())
        alt = f"{when}: the judge's label is {label}"
        return Figure(html.image_tag(images[index], blur=blur), alt)

    images = [figure(group.images[when], when) for when in ("before", "after")]
    return ImagePair(group.prompts[index].text, images)


def _training(facts: RunFacts) -> list[Figure]:
    """Plot the curves and histograms of a run with a log."""
    if not facts.log:
        return []
    curves = "losses and cosine of the gradients against training steps"
    conflict = "histograms of cosine and norm ratio of the two gradients"
    return [
        *figures(plots.curves(facts.log), curves),
        *figures(plots.conflict(facts.log), conflict),
    ]


def render(
    evaluation: PromptEvaluation,
    facts: RunFacts,
    attacks: AttackSection | None = None,
    *,
    show_sensitive: bool = False,
) -> str:
    """Render the page as HTML.

    Args:
        evaluation: the numbers and images.
        facts: the facts about the training.
        attacks: the attacks on it.
        show_sensitive: do not blur the images of a sensitive suite.

    Returns:
        The text of the file.
    """
    content = evaluation.as_dict()
    gap = content.get("control", {})
    hiding = html.blur_note(html.is_sensitive(content), show_sensitive)
    return render_template(
        "single_run.html",
        generator=html.generator(),
        title=f"Erasing {next(iter(evaluation.suite.concept.values()))}",
        verdict=verdict(evaluation),
        protocol_hash=content["protocol_hash"],
        columns=COLUMNS,
        overall=_rows([r for r in evaluation.results if ":" not in r.group]),
        detail=_rows([r for r in evaluation.results if ":" in r.group]),
        refused=evaluation.refused,
        gap=gap_tables(gap) if gap else [],
        controls=gap.get("models", []),
        gap_refused=gap.get("refused", {}),
        hiding=hiding,
        galleries=[_gallery(group, bool(hiding)) for group in evaluation.groups.values()],
        second_judge=second_judge(evaluation, bool(hiding)),
        agreement_columns=AGREEMENT_COLUMNS,
        rate_columns=RATE_COLUMNS,
        attacks=attacks,
        training=_training(facts),
        models=evaluation.models,
        repeat=[
            ("Command", facts.command or content["environment"]["command"]),
            ("Recipe", facts.recipe),
            ("Protocol", dumps(content["protocol"])),
            ("Environment", dumps(content["environment"])),
        ],
    )
