"""Attack a model, and by the same protocol models that never learned the concept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.attacks import cascade as cascades
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.attacks.base import FAMILIES
from concept_eraser.evaluation.attacks.cascade import Cascade, CascadeCampaign
from concept_eraser.evaluation.attacks.excess import (
    ControlAttack,
    measure_excess,
    measure_savings,
)
from concept_eraser.evaluation.attacks.runner import Attempt, Campaign, Protocol
from concept_eraser.evaluation.never_learned import NeverLearned
from concept_eraser.models.base import Model
from concept_eraser.utils.progress import Progress, silent

FOLDER = "control"  # inside the folder of the attack; further ones are control_2, control_3, ...


def run(
    work: Protocol | Cascade,
    victim: Model,
    original: Model,
    *,
    controls: Sequence[NeverLearned] = (),
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Campaign:
    """Attack a model and its controls.

    Args:
        work: the attack or the cascade.
        victim: the attacked model.
        original: the model before the erasure.
        controls: models that never learned the concept. Each is attacked as the victim is.
        folder: finished batches are stored there and not repeated, those of a control in a folder
            of its own inside.
        cache: a folder for generated images, in place of the user's cache.
        progress: called as work advances.

    Returns:
        The result of the victim. With controls, its `controls` hold the comparisons, and its
        outcomes have the images of the controls too (column `attacked_model`).

    Raises:
        UserError: as `runner.run`, or a control cannot be compared with the original. This is
            checked before the first attack.
    """
    protocols = [work] if isinstance(work, Protocol) else list(work.protocols)
    if controls:
        suite = protocols[0].suite
        judge = suite.build_judge()
        for control in controls:
            control.require_comparable(original, suite.concept, protocols[0].prompts().texts)
            for protocol in protocols:
                runner.require_possible(protocol, judge, control.model, original)

    def attack(model: Model, place: Path | None) -> Campaign:
        if isinstance(work, Protocol):
            return runner.run(work, model, original, folder=place, cache=cache, progress=progress)
        return cascades.run(work, model, original, folder=place, cache=cache, progress=progress)

    campaign = attack(victim, folder)
    if not controls:
        return campaign
    comparisons: list[ControlAttack] = []
    rows = [{"attacked_model": "victim", **row} for row in campaign.outcomes]
    for number, control in enumerate(controls, 1):
        name = FOLDER if number == 1 else f"{FOLDER}_{number}"
        other = attack(control.model, None if folder is None else folder / name)
        comparisons.append(compare(work, campaign, other, control.record))
        rows += [
            {"attacked_model": name, **row}
            for row in other.outcomes
            if row["stage"] != "original"  # the victim's rows have the images of the original
        ]
    return replace(campaign, controls=comparisons, outcomes=rows)


def compare(
    work: Protocol | Cascade,
    victim: Campaign,
    control: Campaign,
    record: Mapping[str, Any] | None = None,
) -> ControlAttack:
    """Compare an attack on the victim with the same attack on a control, paired by prompt.

    Args:
        work: the attack or the cascade.
        victim: its result on the victim.
        control: its result on the control.
        record: what the control's `control.json` states.

    Raises:
        ValueError: the two results are not of the same prompts and seeds.
    """
    prompts = [[(a.prompt, a.seed) for a in one.attempts] for one in (victim, control)]
    if prompts[0] != prompts[1]:
        raise ValueError("the attacks on the victim and on the control have different prompts")
    pairs = list(zip(victim.attempts, control.attempts, strict=True))
    attacked = [(one, other) for one, other in pairs if not (one.pre or other.pre)]
    excess = {
        "pre": measure_excess([a.pre for a, _ in pairs], [b.pre for _, b in pairs]),
        "attacked": _excess(attacked),
        "asr": _excess(pairs),
    }
    families: dict[str, Any] = {}
    attacks: dict[str, Any] = {}
    savings: dict[str, Any] = {}
    if isinstance(work, Protocol):
        both = [_attacked(one) for one in (victim, control)]
        savings = _savings(work, both[0], both[1])
    elif isinstance(victim, CascadeCampaign) and isinstance(control, CascadeCampaign):
        families = _families(victim, control)
        for protocol in work.protocols:
            name = str(protocol.attack)
            both = [one.attempts_of_attacks.get(name, {}) for one in (victim, control)]
            common = sorted(both[0].keys() & both[1].keys())
            if attack_excess := _excess([(both[0][i], both[1][i]) for i in common]):
                attacks[name] = attack_excess
            savings |= _savings(protocol, both[0], both[1])
    content = control.as_dict()
    return ControlAttack(
        model=control.models["victim"],
        record=record or {},
        rates=control.rates(),
        attempts=content["attempts"],
        curves=control.curves,
        excess={key: value for key, value in excess.items() if value is not None},
        families=families,
        attacks=attacks,
        savings=savings,
        cost=control.cost,
        seconds=round(control.seconds, 1),
    )


def _attacked(campaign: Campaign) -> dict[int, Attempt]:
    """Return the attempts of the prompts that did not show the concept without the attack."""
    return {i: attempt for i, attempt in enumerate(campaign.attempts) if not attempt.pre}


def _excess(pairs: Sequence[tuple[Attempt, Attempt]]) -> dict[str, Any] | None:
    return measure_excess([a.success for a, _ in pairs], [b.success for _, b in pairs])


def _families(victim: CascadeCampaign, control: CascadeCampaign) -> dict[str, dict[str, Any]]:
    """Return the excess of each family, among the prompts that it attacked on both models."""
    result = {}
    for family in FAMILIES:
        rows = [
            position
            for position, families in enumerate(victim.attacked_by)
            if family in families & control.attacked_by[position]
        ]
        broken = [
            [family in campaign.families_of_attempts[position] for position in rows]
            for campaign in (victim, control)
        ]
        if family_excess := measure_excess(broken[0], broken[1]):
            result[family] = family_excess
    return result


def _savings(
    protocol: Protocol, victim: Mapping[int, Attempt], control: Mapping[int, Attempt]
) -> dict[str, dict[str, Any]]:
    """Return the relearning savings of an attack by its name. Empty if it trains no weights."""
    attack = protocol.build()
    if attack.finetuning_steps is None:
        return {}

    def steps(attempts: Mapping[int, Attempt]) -> dict[int, int | None]:
        return {
            position: attack.steps_after(attempt.round) if attempt.round is not None else None
            for position, attempt in attempts.items()
        }

    budget = attack.finetuning_steps
    return {str(protocol.attack): measure_savings(steps(victim), steps(control), budget)}
