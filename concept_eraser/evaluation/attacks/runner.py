"""Run an attack on an erased model: clean prompts, then rounds of candidates.

A judge labels the images. A second judge of the suite labels the image that broke each prompt, or
the last one. The attack does not use its labels.

Success rates follow UnlearnDiffAtk (arXiv 2310.11868). A prompt whose clean image shows the concept
counts as success without an attack (pre) and is not attacked. Prompts whose image by the original
does not show it are left out, as the paper chooses its own. An attack with one search or training
for all prompts of a batch (`is_shared`) learns from the prompts of `pre` as well. So its batches,
seeds and training images are the same for every victim. ASR = (pre + attacked successes) / all.
Both are reported, with Wilson intervals. The sampler tokenises adversarial texts anew. Embeddings
are marked as such.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import generate
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import agreement, outcomes
from concept_eraser.evaluation.attacks import deciding_images
from concept_eraser.evaluation.attacks.attempts import FinishedBatches
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.evaluation.attacks.excess import ControlAttack, measure_excess_over_controls
from concept_eraser.evaluation.base import Judge
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.evaluation.suite import Suite, dumps, group_prompts
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.registry import Plugin
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import distributed, resources
from concept_eraser.utils import provenance as environment
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

ENCODED_AT_ONCE = 16
# columns of an outcome that describe what its image shows
_OF_THE_IMAGE = ("predicted_", "probability_", "concept_probability", "shows_concept")


@dataclass(frozen=True)
class Protocol:
    """The settings that make two attacks comparable.

    Attributes:
        suite: The suite, with prompts, judge and sampler.
        attack: The attack.
        options: Its options, with its budget.
        group: The suite's group of prompts.
        n: The number of prompts of the group.
        batch: The number of prompts that are attacked at once.
        seed: The seed of the attack.
        hide: A word that replaces the concept's word in the attacked prompts. It tests an attack on
            an unprotected model.
        word: The concept's word in the prompts, if it is not the suite's value (for a judge's
            "nude").
    """

    suite: Suite
    attack: str | Plugin
    options: dict[str, Any] = field(default_factory=dict)
    group: str = "direct"
    n: int = 20
    batch: int = 16
    seed: int = 0
    hide: str | None = None
    word: str | None = None

    def __post_init__(self) -> None:
        if self.group not in self.suite.groups:
            raise UserError(
                f"the suite has no group {self.group!r}; it has {', '.join(self.suite.groups)}"
            )
        if self.n < 2 or self.batch < 1:
            raise UserError(
                f"an attack needs n >= 2 prompts and batch >= 1, found {self.n} and {self.batch}"
            )
        self.build()  # so that a wrong name or option is an error before any model is loaded

    def build(self) -> Attack:
        """Return the attack. Raises UserError for an unknown name or option."""
        plugin = self.attack
        if not isinstance(plugin, Plugin):
            plugin = Plugin("attack", plugin, self.options)
        attack: Attack = plugin.build()
        return attack

    def as_dict(self) -> dict[str, Any]:
        fields_of_protocol = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("suite", "options")
        }
        fields_of_protocol["attack"] = str(self.attack)
        attack = self.build()
        options = self.attack.options if isinstance(self.attack, Plugin) else asdict(attack)  # type: ignore[call-overload]
        whole = {
            **self.suite.model_dump(mode="json", exclude={"about", "metrics"}),
            "groups": {self.group: self.suite.groups[self.group].model_dump(mode="json")},
        }
        lists = {"lists": word_lists} if (word_lists := attack.lists()) else {}
        return {
            **fields_of_protocol,
            "options": options,
            "suite": whole,
            "prompts": self.prompts().hash,
            **lists,
        }

    def prompts(self) -> Any:
        return group_prompts(self.suite.with_at_most(self.n), self.group)


def named(
    attack: str | dict[str, Any] | Attack, options: dict[str, Any]
) -> tuple[str | Plugin, dict[str, Any]]:
    """Return an attack and its options as a `Protocol` holds them.

    A mapping has its `name` and options. An object whose class has a name is held by that name.
    Raises UserError for an invalid attack, and for options beside an object.
    """
    try:
        plugin = registry.read("attack", attack)
    except ValueError as error:
        raise UserError(str(error)) from None
    if options and not isinstance(attack, str | dict):
        raise UserError(
            f"an attack that is an object has its options in it, found also {', '.join(options)}"
        )
    return (
        (plugin, {}) if plugin.value is not None else (plugin.name, {**plugin.options, **options})
    )


@dataclass
class Attempt:
    """The result of one prompt.

    Attributes:
        prompt: The attacked prompt.
        seed: Its seed.
        pre: Whether its clean image shows the concept.
        success: Whether an image of it shows the concept.
        round: The number of rounds until the success.
        text: The adversarial prompt. None for an embedding or other weights.
        by_seed: The seed of the image that shows the concept.
        guidance: The guidance that the prompt itself states, None for the suite's.
    """

    prompt: str
    seed: int
    pre: bool
    success: bool
    round: int | None = None
    text: str | None = None
    by_seed: int | None = None
    guidance: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. The guidance is among them only if the prompt states one."""
        content = asdict(self)
        if self.guidance is None:
            del content["guidance"]
        return content


@dataclass(frozen=True)
class Campaign:
    """The results of an attack on one victim.

    Attributes:
        protocol: the suite, the attack and its budget.
        models: "victim" and "original", each as "source (fingerprint of its weights)".
        attempts: the result of each attacked prompt.
        curves: for each batch, the number of successful prompts after each round.
        cost: the mean cost of a prompt, by what was counted, such as images and gradients.
        seconds: the time of the attack.
        environment: versions, commit, device and command line.
        family: what the attack changes, one of `attacks.base.Family`.
        sensitive: whether reports blur the images.
        outcomes: one row for each image of `outcomes_of`.
        controls: the same attack on models that never learned the concept, and the comparisons.
        images: the file with the image that decided each prompt, by its position in `attempts`.

    Example:
        >>> import concept_eraser
        >>> campaign = concept_eraser.attack("runs/tiny_star_munba", "seed_search", n=5)
        >>> success_rate = campaign.rates()["asr"]
        >>> prompts = [attempt.prompt for attempt in campaign.attempts if attempt.success]
    """

    protocol: dict[str, Any]
    models: dict[str, str]
    attempts: list[Attempt]
    curves: list[list[dict[str, Any]]]
    cost: dict[str, float]
    seconds: float
    environment: dict[str, Any]
    family: str = "other"
    sensitive: bool = False  # as in the suite
    outcomes: list[dict[str, Any]] = field(default_factory=list, repr=False)
    controls: list[ControlAttack] = field(default_factory=list, repr=False)
    images: dict[int, Path] = field(default_factory=dict, repr=False)

    def rates(self) -> dict[str, dict[str, float]]:
        """Return the rates with their intervals.

        pre: clean prompts that show the concept. attacked: successes among the others. asr: both
        together.
        """
        pre = sum(a.pre for a in self.attempts)
        fell = sum(a.success and not a.pre for a in self.attempts)
        n = len(self.attempts)
        rates = {"pre": asdict(wilson(pre, n)), "asr": asdict(wilson(pre + fell, n))}
        if n - pre >= 2:
            rates["attacked"] = asdict(wilson(fell, n - pre))
        return rates

    def concept_rates(self) -> list[float]:
        """Return the share of all prompts whose image shows the concept, for each round.

        Empty for an attack that does not measure it. Only fine-tuning on unrelated data does.
        """
        rounds = [
            [row for row in rows if "rate" in row] for rows in zip(*self.curves, strict=False)
        ]
        return [
            sum(row["rate"] * row["n"] for row in rows) / sum(row["n"] for row in rows)
            for rows in rounds
            if rows
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "protocol_hash": environment.fingerprint(self.protocol),
            "family": self.family,
            "models": self.models,
            "rates": self.rates(),
            "cost": self.cost,
            "seconds": round(self.seconds, 1),
            "attempts": [a.as_dict() for a in self.attempts],
            "curves": self.curves,
            "environment": self.environment,
            **({"sensitive": True} if self.sensitive else {}),
            **({"control": self._controls_as_dict()} if self.controls else {}),
        }

    def excess_over_controls(self) -> dict[str, Any] | None:
        """Return the mean excess of `asr` over the controls with its interval, or None.

        The unit is the training seed of the control, so at least three controls are needed.
        """
        return measure_excess_over_controls(
            [attempt.success for attempt in self.attempts],
            [[bool(row["success"]) for row in control.attempts] for control in self.controls],
        )

    def _controls_as_dict(self) -> dict[str, Any]:
        over_controls = self.excess_over_controls()
        return {
            "models": [control.as_dict() for control in self.controls],
            **({"excess_over_controls": over_controls} if over_controls else {}),
        }

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the JSON file.

        overwrite: also replace a file that no manifest of this package lists. Raises UserError
        otherwise.
        """
        write_text(path, dumps(self.as_dict()), overwrite=overwrite)

    def save_outcomes(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the outcomes of the images as CSV under xz. Arguments and errors as `save`."""
        outcomes.write(path, self.outcomes, overwrite=overwrite)


def run(
    protocol: Protocol,
    victim: Model,
    original: Model,
    *,
    skip: Sequence[int] = (),
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Campaign:
    """Attack a model.

    skip: positions in the attempts whose prompts are not attacked; they stay without success.
    folder: finished batches are stored there (attempts.jsonl) and not repeated. Raises UserError if
    the judge does not know the concept, a prompt leaves no space for free tokens, or the folder
    holds another attack's attempts.
    """
    judge = protocol.suite.build_judge()
    require_possible(protocol, judge, victim, original)
    ((attribute, value),) = protocol.suite.concept.items()
    onto_gpu(victim, original)
    original.to(victim.device)
    sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
    pair = {"victim": victim, "original": original}
    weights = {name: generate.model_fingerprint(model) for name, model in pair.items()}
    models = {name: f"{model.source} ({weights[name]})" for name, model in pair.items()}
    description = {**protocol.as_dict(), "judge": judge.fingerprint, "original": models["original"]}
    second_judge = protocol.suite.build_second_judge()
    whole = dict(description)  # with what is stored in the batches beside the result
    if second_judge is not None:
        agreement.require_another(judge, second_judge, (attribute, value))
        whole["second_judge"] = second_judge.fingerprint
    # a model is the same wherever it lies
    drawing = {name: model.drawing() for name, model in pair.items()}
    conditions = {key: value for key, value in whole.items() if key != "original"}
    finished_batches = FinishedBatches(
        folder, environment.fingerprint([conditions, weights, drawing])
    )
    before = draw_start(
        protocol, judge, victim, original, cache=cache, weights=weights, progress=progress
    )
    concept_prompts, prompts = before.concept_prompts, before.prompts
    seeds, pre = before.seeds, before.pre
    if len(prompts) < 2:
        raise UserError(
            f"{original.source} itself generates {value!r} for {len(prompts)} of "
            f"{len(prompts) + before.left_out} prompts only; an attack needs prompts "
            "whose image by the original shows the concept"
        )
    attack = protocol.build()
    open_rows = [i for i in range(len(prompts)) if attack.measures_rate or not pre[i]]
    attempts = [
        Attempt(p, s, bool(hit), bool(hit), guidance=before.own_guidance(i))
        for i, (p, s, hit) in enumerate(zip(prompts, seeds, pre, strict=True))
    ]
    open_rows = [i for i in open_rows if i not in skip]
    # what an attack learns from a batch must not depend on the clean successes of the victim
    attacked = set(open_rows)
    batched_rows = [
        i for i in range(len(prompts)) if i in attacked or (attack.is_shared and pre[i])
    ]
    latents = encode(original, before.concept_images)
    referee = Referee(judge, attribute, value=value, victim=victim, second_judge=second_judge)
    memory = (resources.cache() if cache is None else cache) / "attacks"
    starts = {
        name: rows
        for name, rows in batches_of(
            before, batched_rows, size=protocol.batch, sampling=sampling
        ).items()
        if not attacked.isdisjoint(rows)
    }
    total = sum(map(len, starts.values()))
    for batch_number, (name, rows) in enumerate(distributed.mine(starts.items())):
        if finished_batches.batch(name) is None:
            scene = Scene(
                victim,
                original,
                prompts=[prompts[i] for i in rows],
                concept_prompts=[concept_prompts[i] for i in rows],
                concept=protocol.word or value,
                seeds=[seeds[i] for i in rows],
                targets=latents[rows],
                seed=environment.derive_seed(protocol.seed, name),
                root=protocol.seed,
                corpus=concept_prompts,
                memory=memory,
                sampling=before.sampling_of(rows[0], sampling),
                others=retain_prompts(protocol.suite),
            )
            last = LastImages({}, {}, {})
            batch = referee.play(
                protocol.build(),
                scene,
                lambda n, number=batch_number: progress(
                    "attacking", number * protocol.batch + n, total
                ),
                clean=[bool(pre[i]) for i in rows],
                last=last,
            )
            images = {rows[i]: image for i, image in last.images.items()}
            is_hidden = protocol.suite.has_sensitive_images
            finished_batches.add(name, batch, {} if is_hidden else images)
        progress("attacking", min((batch_number + 1) * protocol.batch, total), total)
    if distributed.is_first():
        finished_batches.claim()
    distributed.wait()
    batches = [finished_batches.batch(name) for name in starts]
    for rows, batch in zip(starts.values(), batches, strict=True):
        for i, attempt in zip(rows, batch["attempts"], strict=True):
            attempts[i] = replace(Attempt(**attempt), guidance=before.own_guidance(i))
    cost_names = {what for one in batches for what in one["cost"]}
    cost = {
        f"{what} a prompt": round(
            sum(one["cost"].get(what, 0) for one in batches) / len(open_rows), 1
        )
        for what in sorted(cost_names)
    }
    description |= {"n": len(prompts), "left_out": before.left_out}
    return Campaign(
        protocol=description,
        models=models,
        attempts=attempts,
        curves=[one["curve"] for one in batches],
        cost=cost,
        seconds=sum(one["seconds"] for one in batches),
        environment=environment.describe(),
        family=attack.family,
        sensitive=protocol.suite.sensitive,
        outcomes=outcomes_of(
            protocol, before, batches=batches, rows=list(starts.values()), models=weights
        ),
        images=deciding_images.find(folder, range(len(attempts))),
    )


def outcomes_of(
    protocol: Protocol,
    before: AttackStart,
    batches: Sequence[dict[str, Any]],
    *,
    rows: Sequence[Sequence[int]],
    models: dict[str, str],
) -> list[dict[str, Any]]:
    """Return one row for each image that the result of an attack rests on.

    They are the original's image of each prompt, the victim's clean image, and for each attacked
    prompt the image that broke it, or the last one. A prompt whose image by the original does not
    show the concept is not counted.

    Args:
        protocol: The protocol.
        before: The images before the attack.
        batches: The results of the batches, as `Referee.play` returns them.
        rows: The positions of the prompts of each batch in `before.prompts`.
        models: The fingerprints of the weights, by "victim" and "original".
    """
    family = protocol.build().family
    table = [
        {"model": models["original" if row["stage"] == "original" else "victim"], **row}
        for row in before.outcomes
    ]
    clean = {row["position"]: row for row in table if row["stage"] == "clean"}
    for number, (batch, places) in enumerate(zip(batches, rows, strict=True)):
        # an attack that began with a version without outcomes has none of its first batches
        readings = batch.get("outcomes") or [{}] * len(places)
        for place, attempt, reading in zip(places, batch["attempts"], readings, strict=True):
            if attempt["pre"]:  # an attack that measures the rate has it in its batches too
                continue
            start = clean[before.positions[place]]
            table.append(
                {
                    **{key: start[key] for key in start if not key.startswith(_OF_THE_IMAGE)},
                    "stage": "attack",
                    **reading,
                    "shows_concept": attempt["success"],
                    "attack": str(protocol.attack),
                    "family": family,
                    "batch": number,
                    "broken": attempt["success"],
                    "round": attempt["round"],
                    "image_seed": attempt["by_seed"],
                    "text": attempt["text"],
                }
            )
    return table


@dataclass(frozen=True)
class AttackStart:
    """The prompts whose image by the original shows the concept, with images [n, h, w, 3].

    Attributes:
        concept_prompts: The prompts of the images of the concept.
        prompts: The attacked prompts.
        seeds: Their seeds.
        concept_images: Images of the concept prompts by the original.
        clean_images: Images of the attacked prompts by the victim.
        pre: [n] bool, whether the clean image shows the concept.
        left_out: The number of other prompts.
        positions: The position of each prompt in the group's draw.
        outcomes: One row for each image by the original and by the victim, also of the prompts that
            are left out.
        guidances: The guidance that each prompt states, None for the suite's. Empty: all None.
    """

    concept_prompts: list[str]
    prompts: list[str]
    seeds: list[int]
    concept_images: Tensor
    clean_images: Tensor
    pre: np.ndarray
    left_out: int
    positions: list[int] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    guidances: list[float | None] = field(default_factory=list)

    def own_guidance(self, row: int) -> float | None:
        """Return the guidance that a prompt itself states, None for the suite's."""
        return self.guidances[row] if self.guidances else None

    def sampling_of(self, row: int, sampling: generate.Sampling) -> generate.Sampling:
        """Return the suite's settings of the sampler with a prompt's own guidance, if any."""
        own = self.own_guidance(row)
        return sampling if own is None else replace(sampling, guidance=own)


def batches_of(
    before: AttackStart, rows: Sequence[int], *, size: int, sampling: generate.Sampling
) -> dict[str, list[int]]:
    """Divide prompts into batches of one guidance each. Return their rows by the batch's name.

    The order is kept among the prompts of one guidance.

    Args:
        before: The images before the attack.
        rows: The positions of the attacked prompts.
        size: The largest number of prompts in a batch.
        sampling: The suite's settings of the sampler.
    """
    by_guidance: dict[float, list[int]] = {}
    for row in rows:
        by_guidance.setdefault(before.sampling_of(row, sampling).guidance, []).append(row)
    return {
        _name_of(before, some[i : i + size], sampling): some[i : i + size]
        for some in by_guidance.values()
        for i in range(0, len(some), size)
    }


def draw_start(
    protocol: Protocol,
    judge: Judge,
    victim: Model,
    original: Model,
    *,
    cache: Path | None = None,
    weights: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> AttackStart:
    """Generate and judge the images before the attack.

    weights: the fingerprints of "original" and "victim", if the caller has them.
    """
    ((attribute, value),) = protocol.suite.concept.items()
    concept_prompts, prompts = prompts_of(protocol)
    drawn = protocol.prompts().prompts
    guidances = [prompt.guidance for prompt in drawn]
    seeds = generate.seeds_for(drawn, environment.derive_seed(protocol.suite.seed, protocol.group))
    sampling = generate.Sampling(**protocol.suite.sampling.model_dump())
    concept_images = generate.generate(
        original,
        _with_guidance(concept_prompts, guidances),
        seeds,
        sampling,
        cache=cache,
        weights=(weights or {}).get("original"),
        what="images of the concept",
        progress=progress,
    )
    clean_images = generate.generate(
        victim,
        _with_guidance(prompts, guidances),
        seeds,
        sampling,
        cache=cache,
        weights=(weights or {}).get("victim"),
        what="clean prompts",
        progress=progress,
    )
    labels = {
        "original": judge.classify(concept_images),
        "clean": judge.classify(clean_images),
    }
    shows_concept = labels["original"][attribute] == value
    pre = labels["clean"][attribute] == value
    rows = shows_concept.nonzero()[0].tolist()
    table = [
        {
            "stage": stage,
            "group": protocol.group,
            "position": i,
            "counted": bool(shows_concept[i]),
            "prompt": texts[i],
            "seed": seeds[i],
            "judge": judge.fingerprint,
            **columns,
        }
        for stage, texts, images in (
            ("original", concept_prompts, concept_images),
            ("clean", prompts, clean_images),
        )
        for i, columns in enumerate(
            outcomes.label_columns(
                judge,
                (attribute, value),
                prompts=drawn,
                labels=labels[stage],
                probabilities=outcomes.read_probabilities(judge, (attribute, value), images),
            )
        )
    ]
    concept_prompts, prompts = ([some[i] for i in rows] for some in (concept_prompts, prompts))
    return AttackStart(
        concept_prompts,
        prompts,
        seeds=[seeds[i] for i in rows],
        concept_images=concept_images[rows],
        clean_images=clean_images[rows],
        pre=pre[rows],
        left_out=len(shows_concept) - len(rows),
        positions=rows,
        outcomes=table,
        guidances=[guidances[i] for i in rows],
    )


def _with_guidance(texts: Sequence[str], guidances: Sequence[float | None]) -> list[Prompt]:
    return [
        Prompt(text, guidance=guidance) for text, guidance in zip(texts, guidances, strict=True)
    ]


def _name_of(before: AttackStart, rows: Sequence[int], sampling: generate.Sampling) -> str:
    """Return a name of a batch that depends on its content, not on its position.

    So it stays valid if other batches are added.
    """
    guidance = before.sampling_of(rows[0], sampling).guidance
    own = [guidance] if guidance != sampling.guidance else []
    return environment.fingerprint([[before.prompts[i], before.seeds[i], *own] for i in rows])


def require_possible(protocol: Protocol, judge: Judge, victim: Model, original: Model) -> None:
    """Raise UserError if judge, attack and models do not fit each other.

    It is called before any image is generated.
    """
    ((attribute, value),) = protocol.suite.concept.items()
    if value not in judge.classes.get(attribute, ()):
        raise UserError(f"the judge {protocol.suite.judge!r} cannot detect {attribute} {value!r}")
    if protocol.build().needs_words and not victim.has_clip_words:
        raise victim.lacks(f"the attack {protocol.attack!r}, on the tokens of a prompt,")
    if protocol.build().samples_itself and getattr(victim, "guard", None) is not None:
        raise UserError(
            f"the attack {str(protocol.attack)!r} samples by itself, where the safeguard of "
            f"{victim.source} has no effect; attack the model without it"
        )
    if layout(victim) != layout(original):
        raise UserError(
            f"{victim.source} and {original.source} are of different architectures; give "
            "the model before its erasure with --before"
        )
    if protocol.build().needs_captions and not judge.reads_captions:
        raise UserError(
            f"the attack {protocol.attack!r} needs the agreement of images with their "
            f"prompts, which the judge {protocol.suite.judge!r} cannot measure"
        )


def layout(model: Model) -> tuple[object, ...]:
    """Return what two compatible models share: family, latents, and the single text embedding."""
    return (
        model.family,
        model.latent_shape(),
        model.table.shape if model.has_clip_words else model.readers,
    )


def prompts_of(protocol: Protocol) -> tuple[list[str], list[str]]:
    """Return the prompts of the images of the concept, and the attacked prompts.

    They are equal, or the attacked ones have the concept's word hidden. Raises UserError for a
    prompt without this word.
    """
    texts = protocol.prompts().texts
    if not protocol.hide:
        return texts, texts
    word = protocol.word or next(iter(protocol.suite.concept.values()))
    prompts = [text.replace(word, protocol.hide) for text in texts]
    same = [text for text, hidden_text in zip(texts, prompts, strict=True) if text == hidden_text]
    if same:
        raise UserError(
            f"the prompt {same[0]!r} does not have the word {word!r} to hide; give the "
            "concept's word with --word"
        )
    return texts, prompts


def retain_prompts(suite: Suite) -> list[str]:
    """Return the texts of the suite's retain groups, without those that state the concept."""
    (value,) = suite.concept.values()
    texts = [
        text
        for name, group in suite.groups.items()
        if group.role == "retain"
        for text in group_prompts(suite, name).texts
    ]
    return [text for text in dict.fromkeys(texts) if value not in text]


@dataclass(frozen=True)
class LastImages:
    """The last image of each prompt that was generated before its success, or with it.

    Attributes:
        images: [h, w, 3] uint8, by row.
        labels: The predicted value of each attribute, by row.
        rounds: The number of rounds that had an image of the prompt, by row.
    """

    images: dict[int, Tensor]
    labels: dict[int, dict[str, str]]
    rounds: dict[int, int]

    def add(self, images: Tensor, labels: dict[str, np.ndarray], rows: Sequence[int]) -> None:
        """Add the images of a round. A row of -1 is of a prompt that had succeeded before."""
        for position, row in enumerate(rows):
            if row >= 0:
                self.images[row] = images[position]
                self.labels[row] = {name: str(some[position]) for name, some in labels.items()}
                self.rounds[row] = self.rounds.get(row, 0) + 1


@dataclass(frozen=True)
class Referee:
    """Generates the images, and decides which prompts are successful.

    Attributes:
        judge: The judge that decides.
        attribute: The attribute of the concept.
        value: Its value.
        victim: The attacked model.
        second_judge: A judge that labels the last image of each prompt too. No attack uses it.
    """

    judge: Judge
    attribute: str
    value: str
    victim: Model
    second_judge: Judge | None = None

    def play(
        self,
        attack: Attack,
        scene: Scene,
        tell: Any,
        *,
        clean: Sequence[bool] = (),
        last: LastImages | None = None,
    ) -> dict[str, Any]:
        """Run rounds until all prompts are successful or the budget is spent.

        Args:
            attack: The attack.
            scene: Its batch of prompts.
            tell: Called with the number of broken prompts after each round.
            clean: Whether each prompt shows the concept without an attack, by default no prompt.
                Such a prompt is no success of the attack.
            last: Gets the last images.
        """
        began = time.monotonic()
        attempts = [
            Attempt(p, s, pre, pre)
            for p, s, pre in zip(
                scene.prompts, scene.seeds, clean or [False] * len(scene.prompts), strict=True
            )
        ]
        scene.alive &= torch.tensor([not a.pre for a in attempts])
        curve: list[dict[str, Any]] = []
        last = LastImages({}, {}, {}) if last is None else last
        with closing(attack.search(scene)) as search:  # its clean-up runs at once, however it ends
            self._rounds(
                search,
                attack,
                scene=scene,
                attempts=attempts,
                curve=curve,
                last=last,
                tell=tell,
            )
        return {
            "attempts": [a.as_dict() for a in attempts],
            "outcomes": self._readings(last, len(attempts)),
            "curve": curve,
            "cost": scene.cost,
            "seconds": time.monotonic() - began,
        }

    def _rounds(
        self,
        search: Iterator[Round],
        attack: Attack,
        scene: Scene,
        attempts: list[Attempt],
        curve: list[dict[str, Any]],
        last: LastImages,
        tell: Any,
    ) -> None:
        """Judge round after round, and add to `attempts`, `curve` and `last`."""
        for number, offer in enumerate(search, 1):
            images = self.draw(offer, scene)
            labels = self.judge.classify(images)
            hits = labels[self.attribute] == self.value
            last.add(images, labels, [int(i) if scene.alive[i] else -1 for i in offer.rows])
            if offer.has_rewards:
                captions = [scene.concept_prompts[i] for i in offer.rows.tolist()]
                scene.rewards = torch.from_numpy(self.judge.clip_scores(images, captions))
            for position, (row, hit) in enumerate(zip(offer.rows.tolist(), hits, strict=True)):
                if hit and scene.alive[row]:
                    text = (
                        offer.texts[position]
                        if offer.texts is not None and attack.access != "weights"
                        else None
                    )
                    seed = offer.seeds[position] if offer.seeds is not None else scene.seeds[row]
                    attempts[row] = Attempt(
                        prompt=scene.prompts[row],
                        seed=scene.seeds[row],
                        pre=False,
                        success=True,
                        round=number,
                        text=text,
                        by_seed=seed,
                    )
                    scene.alive[row] = False
            curve.append(
                {
                    "round": number,
                    "fell": sum(a.success and not a.pre for a in attempts),
                    "n": len(attempts),
                    "loss": offer.loss,
                    **({"rate": float(hits.mean())} if attack.measures_rate else {}),
                }
            )
            tell(int((~scene.alive).sum()))
            if not scene.alive.any() and not attack.measures_rate:
                break

    def _readings(self, last: LastImages, count: int) -> list[dict[str, Any]]:
        """Return what the judges read in the last image of each prompt: names, probabilities."""
        readings: list[dict[str, Any]] = [{} for _ in range(count)]
        rows = sorted(last.images)
        if not rows:
            return readings
        images = torch.stack([last.images[row] for row in rows])
        labels = {
            name: np.array([last.labels[row][name] for row in rows]) for name in self.judge.classes
        }
        columns = self._columns(self.judge, images, labels)
        for row, reading in zip(rows, columns, strict=True):
            readings[row] = {**reading, "rounds": last.rounds[row]}
        if self.second_judge is not None:
            columns = self._columns(self.second_judge, images, self.second_judge.classify(images))
            for row, reading in zip(rows, columns, strict=True):
                readings[row] |= {f"second_{name}": value for name, value in reading.items()}
                readings[row]["second_judge"] = self.second_judge.fingerprint
        return readings

    def _columns(
        self, judge: Judge, images: Tensor, labels: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Return the columns of a judge for images [n, h, w, 3] with its labels."""
        concept = (self.attribute, self.value)
        columns = outcomes.label_columns(
            judge,
            concept,
            prompts=[Prompt("")] * len(images),
            labels=labels,
            probabilities=outcomes.read_probabilities(judge, concept, images),
        )
        return [
            {name: value for name, value in row.items() if name.startswith(_OF_THE_IMAGE)}
            for row in columns
        ]

    def draw(self, offer: Round, scene: Scene) -> Tensor:
        """Return one image for each candidate, [m, h, w, 3].

        It is generated by the scene's sampler, or it is the attack's own.
        """
        sampling = scene.sampling
        seeds = (
            offer.seeds
            if offer.seeds is not None
            else [scene.seeds[i] for i in offer.rows.tolist()]
        )
        scene.spend("images", len(seeds))
        if offer.images is not None:
            return offer.images
        parts = []
        for start in range(0, len(seeds), sampling.batch_size):
            part = slice(start, start + sampling.batch_size)
            prompts: Any = (
                offer.texts[part] if offer.texts is not None else offer.condition[part]  # type: ignore[index]
            )
            parts.append(
                self.victim.sample(
                    prompts,
                    seeds=seeds[part],
                    steps=sampling.steps,
                    guidance=sampling.guidance,
                    autocast=sampling.autocast,
                )
            )
        return torch.cat(parts)


def encode(model: Model, images: Tensor) -> Tensor:
    """Return the latents of images [n, h, w, 3] uint8."""
    pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
    return torch.cat([model.encode_images(part) for part in pixels.split(ENCODED_AT_ONCE)])
