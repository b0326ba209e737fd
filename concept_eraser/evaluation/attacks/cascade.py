"""A cascade of attacks: from cheap to strong, each on the prompts that none before has broken.

The result is the worst case over all attacks for each prompt, and the attack that broke it. It
costs less than all attacks on all prompts, because most prompts that break do so early.

Controls (the family "control") also run, but are no attacks. They get every prompt, and the worst
case does not count their successes.

An attack that learns from all prompts of its batch (`learns_from_batch`, or access to the weights)
gets every prompt as well. With fewer prompts it would learn from fewer images, and be weaker than
alone. It costs no more for more prompts, apart from the images that are judged.

A later family of attacks gets the prompts that the earlier ones left, so its share of successes is
one among the harder prompts. With `each_family` every family begins with all prompts. Then its
share is its own worst case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.attacks.base import FAMILIES, Attack
from concept_eraser.evaluation.attacks.runner import Attempt, Campaign, Protocol
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.models.base import Model
from concept_eraser.utils import provenance as environment
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

NAME = "cascade"  # in place of the attack's name in attack.json
CONTROL = "control"
# The cascade that `--cascade default` runs: controls, then attacks from cheap to strong. Attacks
# without text are left out. Most begin with an image of the concept, which a model that never
# learned the concept completes too. Noise search, noise gradient and classifier guidance take long.
DEFAULT = (
    "random_tokens",
    "seed_search",
    "other_sampling",
    "ring_a_bell",
    "mma_diffusion",
    "p4d",
    "unlearn_diff",
    "concept_inversion",
    "soft_prompt",
    "soft_prompt_both",
    "revival",
    "relearning",
)
# they tell two attacks of a cascade apart; everything else must be the same
_OF_THE_ATTACK = ("attack", "options", "lists")


@dataclass(frozen=True)
class Cascade:
    """Attacks with one suite, one group of prompts and the same seeds.

    Attributes:
        protocols: the protocol of each attack, from cheap to strong.
        each_family: whether every family begins with all prompts.

    Raises:
        UserError: there is no attack, an attack occurs twice, or the protocols differ in more than
            their attacks.
    """

    protocols: Sequence[Protocol]
    each_family: bool = False

    def __post_init__(self) -> None:
        names = [str(protocol.attack) for protocol in self.protocols]
        if not any(protocol.build().family != CONTROL for protocol in self.protocols):
            raise UserError(
                "a cascade needs at least one attack that is no control, found "
                f"{', '.join(names) or 'none'}; see `concept-eraser list attacks`"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"a cascade has each attack once, found {', '.join(twice)} several times"
            )
        common = [_common(protocol) for protocol in self.protocols]
        if any(content != common[0] for content in common):
            raise UserError("the attacks of a cascade need the same suite, prompts and seeds")


def _common(protocol: Protocol) -> dict[str, Any]:
    content = protocol.as_dict()
    return {key: value for key, value in content.items() if key not in _OF_THE_ATTACK}


@dataclass(frozen=True)
class CascadeStage:
    """The result of one attack of a cascade.

    Attributes:
        attack: its name.
        family: its family.
        options: its options.
        attacked: the number of prompts that it attacked.
        broken: the number of these that it broke.
        new: the number of these that no attack before had broken; 0 for a control.
        cost: its mean cost for an attacked prompt.
        seconds: its time.
    """

    attack: str
    family: str
    options: dict[str, Any]
    attacked: int
    broken: int
    new: int
    cost: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class CascadeCampaign(Campaign):
    """The result of a cascade. `attempts` and `rates()` are the worst case over all attacks.

    Attributes:
        stages: the result of each attack, in order.
        broken_by: for each attempt the attack that broke it first, None for none.
        families_of_attempts: for each attempt the families that broke it.
        attacked_by: for each attempt the families that attacked it.
        attempts_of_attacks: for each attack its result on each prompt that it attacked, by the
            prompt's position in `attempts`.

    Example:
        >>> import concept_eraser
        >>> campaign = concept_eraser.attack(
        ...     "runs/tiny_star_munba", cascade=["ring_a_bell", "soft_prompt"], n=20
        ... )
        >>> worst_case = campaign.rates()["asr"]
    """

    family: str = "several"
    stages: list[CascadeStage] = field(default_factory=list)
    broken_by: list[str | None] = field(default_factory=list)
    families_of_attempts: list[set[str]] = field(default_factory=list)
    attacked_by: list[set[str]] = field(default_factory=list)
    attempts_of_attacks: dict[str, dict[int, Attempt]] = field(default_factory=dict, repr=False)

    def families(self) -> dict[str, dict[str, Any]]:
        """Return for each family its attacks, and its successes among the prompts that it attacked.

        n: the attacked prompts; broken: those that an attack of the family broke; rate: their share
        with its interval over prompts, None for fewer than two prompts. A prompt that shows the
        concept without an attack is in none of them.
        """
        result: dict[str, dict[str, Any]] = {}
        for family in FAMILIES:
            names = [stage.attack for stage in self.stages if stage.family == family]
            if names:
                n = sum(family in families for families in self.attacked_by)
                broken = sum(family in families for families in self.families_of_attempts)
                rate = asdict(wilson(broken, n)) if n >= 2 else None
                result[family] = {"attacks": names, "n": n, "broken": broken, "rate": rate}
        return result

    def as_dict(self) -> dict[str, Any]:
        content = super().as_dict()
        attempts = [
            {**attempt, "attack": name}
            for attempt, name in zip(content["attempts"], self.broken_by, strict=True)
        ]
        return {
            **content,
            "attempts": attempts,
            "families": self.families(),
            "stages": [asdict(stage) for stage in self.stages],
        }


def run(
    cascade: Cascade,
    victim: Model,
    original: Model,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> CascadeCampaign:
    """Attack a model by one attack after the other.

    Args:
        cascade: the attacks.
        victim: the attacked model.
        original: the model before the erasure.
        folder: the finished batches of each attack are stored in a folder of its own there, and are
            not repeated.
        cache: a folder for generated images, in place of the user's cache.
        progress: called as work advances.

    Raises:
        UserError: as `runner.run`. Whether an attack fits the models and the judge is checked for
            all of them before the first one runs.
    """
    judge = cascade.protocols[0].suite.build_judge()
    for protocol in cascade.protocols:
        runner.require_possible(protocol, judge, victim, original)
    state = _State(cascade.each_family)
    for number, protocol in enumerate(cascade.protocols, 1):
        attack, name = protocol.build(), str(protocol.attack)
        skipped = state.skipped(attack)
        if state.has_begun and len(skipped) == len(state.attempts):
            state.stages.append(
                CascadeStage(
                    name, attack.family, options=_options(protocol), attacked=0, broken=0, new=0
                )
            )
            continue
        place = None if folder is None else folder / f"{number:02d}_{_file_name(name)}"
        campaign = runner.run(
            protocol,
            victim,
            original,
            skip=sorted(skipped),
            folder=place,
            cache=cache,
            progress=progress,
        )
        state.add(protocol, campaign, skipped)
    return state.campaign(cascade)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "_", name)[:80]


def _options(protocol: Protocol) -> dict[str, Any]:
    options: dict[str, Any] = protocol.as_dict()["options"]
    return options


class _State:
    """The results so far. A position is that of a prompt in `Campaign.attempts`."""

    def __init__(self, each_family: bool) -> None:
        self.each_family = each_family
        self.stages: list[CascadeStage] = []
        self.campaigns: list[Campaign] = []
        self.attempts: list[Attempt] = []  # the worst case
        self.broken_by: list[str | None] = []
        self.broken: list[set[str]] = []  # the families that broke each prompt
        self.attacked: list[set[str]] = []  # the families that attacked each prompt
        self.outcomes: list[dict[str, Any]] = []
        self.attempts_of_attacks: dict[str, dict[int, Attempt]] = {}
        self.images: dict[int, Path] = {}

    @property
    def has_begun(self) -> bool:
        return bool(self.campaigns)

    def skipped(self, attack: Attack) -> set[int]:
        """Return the positions of the prompts that an attack does not get."""
        if attack.family == CONTROL or attack.is_shared:
            return self._without_attack()
        return self._without_attack() | {
            position
            for position, families in enumerate(self.broken)
            if (attack.family in families if self.each_family else families - {CONTROL})
        }

    def _without_attack(self) -> set[int]:
        return {position for position, attempt in enumerate(self.attempts) if attempt.pre}

    def add(self, protocol: Protocol, campaign: Campaign, skipped: set[int]) -> None:
        """Add the result of an attack on all prompts except the skipped ones."""
        name, family = str(protocol.attack), protocol.build().family
        if not self.has_begun:
            self.attempts = [
                attempt
                if attempt.pre
                else Attempt(attempt.prompt, attempt.seed, False, False, guidance=attempt.guidance)
                for attempt in campaign.attempts
            ]
            count = len(self.attempts)
            self.broken_by = [None] * count
            self.broken = [set() for _ in range(count)]
            self.attacked = [set() for _ in range(count)]
            self.outcomes += [row for row in campaign.outcomes if row["stage"] != "attack"]
        attacked = [
            position
            for position, attempt in enumerate(campaign.attempts)
            if position not in skipped and not attempt.pre
        ]
        broken = [position for position in attacked if campaign.attempts[position].success]
        new = [
            position
            for position in broken
            if family != CONTROL and self.broken_by[position] is None
        ]
        self.attempts_of_attacks[name] = {i: campaign.attempts[i] for i in attacked}
        for position in attacked:
            self.attacked[position].add(family)
        for position in broken:
            self.broken[position].add(family)
        for position in new:
            self.attempts[position] = campaign.attempts[position]
            self.broken_by[position] = name
            if position in campaign.images:
                self.images[position] = campaign.images[position]
        self.outcomes += [
            {**row, "attack_number": len(self.stages) + 1}
            for row in campaign.outcomes
            if row["stage"] == "attack"
        ]
        self.campaigns.append(campaign)
        self.stages.append(
            CascadeStage(
                attack=name,
                family=family,
                options=_options(protocol),
                attacked=len(attacked),
                broken=len(broken),
                new=len(new),
                cost=campaign.cost,
                seconds=round(campaign.seconds, 1),
            )
        )

    def campaign(self, cascade: Cascade) -> CascadeCampaign:
        """Return the result of the whole cascade."""
        first = self.campaigns[0]
        protocol = {key: value for key, value in first.protocol.items() if key != "lists"}
        curve, fell = [], 0
        for number, stage in enumerate(self.stages, 1):
            fell += stage.new
            point = {"round": number, "fell": fell, "n": len(self.attempts), "loss": None}
            curve.append({**point, "attack": stage.attack})
        open_count = sum(not attempt.pre for attempt in self.attempts)
        totals: dict[str, float] = {}
        for stage in self.stages:
            for unit, value in stage.cost.items():
                totals[unit] = totals.get(unit, 0.0) + value * stage.attacked
        return CascadeCampaign(
            protocol={
                **protocol,
                "attack": NAME,
                "options": {"each_family": cascade.each_family},
                "attacks": [
                    {key: value for key, value in one.as_dict().items() if key in _OF_THE_ATTACK}
                    for one in cascade.protocols
                ],
            },
            models=first.models,
            attempts=self.attempts,
            curves=[curve],
            cost={unit: round(total / max(open_count, 1), 1) for unit, total in totals.items()},
            seconds=sum(campaign.seconds for campaign in self.campaigns),
            environment=environment.describe(),
            sensitive=first.sensitive,
            outcomes=self.outcomes,
            stages=self.stages,
            broken_by=self.broken_by,
            families_of_attempts=self.broken,
            attacked_by=self.attacked,
            attempts_of_attacks=self.attempts_of_attacks,
            images=self.images,
        )
