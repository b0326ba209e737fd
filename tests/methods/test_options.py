"""Options: the bounds of each hold at the bound itself, and where a default is a paper's, it is the
paper's value.
"""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

import pytest

from concept_eraser import registry
from concept_eraser.methods import mini_unlearning, munba, uce
from concept_eraser.methods.base import Method

PLUGINS = {name: registry.load("method", name) for name in registry.names("method")}
TINY = 1e-9
# the range of each option: from, to; "(0" excludes 0
BOUNDS: dict[str, dict[str, tuple[str, float | None]]] = {
    "adversarial": {
        "inner_steps": ("0", None),
        "inner_lr": ("(0", None),
        "retain": ("0", None),
        "forget": ("0", None),
    },
    "amnesiac": {"k": ("0", None)},
    "bome": {
        "eta": ("(0", None),
        "inner_steps": ("1", None),
        "inner_lr": ("(0", None),
        "outer_lr": ("(0", None),
        "retain": ("0", None),
        "forget": ("0", None),
    },
    "certified_removal": {
        "sigma": ("0", None),
        "iterations": ("1", None),
        "tolerance": ("(0", None),
    },
    "cpe": {
        **dict.fromkeys(("guidance", "retain_scale", "adversary_scale", "noise"), ("0", None)),
        **dict.fromkeys(("lr", "first_lr", "adversary_lr"), ("(0", None)),
        **dict.fromkeys(("gate_rank", "rank", "stages", "steps", "first_steps"), ("1", None)),
        **dict.fromkeys(("adversaries", "adversary_steps", "mixtures"), ("1", None)),
        "warmup": ("0", None),
    },
    "deltagrad": {
        "k": ("0", None),
        "period": ("1", None),
        "burn_in": ("0", None),
        "pairs": ("1", None),
    },
    "erasediff": {"eta": ("(0", None), "inner_steps": ("1", None), "inner_lr": ("(0", None)},
    "forum": {
        "rho_e": ("0", None),
        "inner_steps": ("1", None),
        "inner_lr": ("(0", None),
        "outer_lr": ("(0", None),
        "floor": ("0", 0.5),
        "momentum": ("0", 1.0),
    },
    "influence": {"damping": ("(0", None), "samples": ("1", None)},
    "meta_unlearning": {
        "inner_steps": ("0", None),
        "inner_lr": ("(0", None),
        "forget": ("0", None),
        "retain": ("0", None),
        "relearn": ("0", None),
        "destroy": ("0", None),
    },
    "mini_unlearning": {"k": ("1", None), "estimate": ("0", None)},
    "minmax_ngd": {
        "forget_steps": ("0", None),
        "retain_steps": ("1", None),
        "period": ("1", None),
        "pull": ("0", None),
        "average": ("(0", 1.0),
        "memory": ("(0", 1.0),
        "smoothing": ("(0", None),
    },
    "moco": {
        "beta": ("(0", 1.0),
        "beta_decay": ("0", None),
        "gamma": ("(0", None),
        "gamma_decay": ("0", None),
        "rho": ("0", None),
        "inner_steps": ("1", None),
        "inner_lr": ("(0", None),
        "size": ("(0", None),
    },
    "moml": {"inner_steps": ("1", None), "inner_lr": ("(0", None), "size": ("(0", None)},
    "munba": {"every": ("1", None), "noise": ("(0", None)},
    "natural_gradient": {
        "damping": ("0", None),
        "kl": ("0", None),
        "sigma": ("0", None),
        "iterations": ("1", None),
        "tolerance": ("(0", None),
    },
    "oce": {
        "erase_scale": ("(0", None),
        "preserve_scale": ("0", None),
        "lamb": ("0", None),
        "rank": ("0", None),
    },
    "race": {
        "inner_steps": ("0", None),
        "inner_lr": ("(0", None),
        "box": ("(0", None),
        "retain": ("0", None),
        "forget": ("0", None),
    },
    "rece": {
        "epochs": ("0", None),
        "reg": ("(0", None),
        "erase_scale": ("(0", None),
        "preserve_scale": ("0", None),
        "lamb": ("0", None),
    },
    "resalign": {
        "inner_steps": ("0", None),
        "inner_lr": ("(0", None),
        "lam": ("0", 1.0),
        "retain": ("0", None),
        "terms": ("1", None),
        "size": ("(0", None),
    },
    "scrub": {"forget_steps": ("1", None), "retain_steps": ("1", None), "rounds": ("1", None)},
    "speed": {
        "threshold": ("(0", None),
        "retain_scale": ("(0", None),
        "augmentations": ("0", None),
    },
    "ssd": {"alpha": ("(0", None), "lamb": ("(0", None), "batch": ("1", None)},
    "stereo": {
        "rounds": ("1", None),
        "erase_steps": ("1", None),
        "inner_steps": ("1", None),
        "inner_lr": ("(0", None),
        "retain": ("0", None),
        "forget": ("0", None),
    },
    "uce": {"erase_scale": ("(0", None), "preserve_scale": ("0", None), "lamb": ("0", None)},
    "uno": {
        "strength": ("0", None),
        "ratio": ("(0", None),
        "size": ("(0", None),
        "histogram": ("0", None),
    },
    "weighted": {"retain": ("0", None), "forget": ("0", None)},
}
CASES = [
    (name, option, *bounds)
    for name, options in BOUNDS.items()
    for option, bounds in options.items()
]


@pytest.mark.parametrize(("name", "option", "low", "high"), CASES)
def test_the_bounds_hold_at_the_bound(name: str, option: str, low: str, high: float | None) -> None:
    plugin = PLUGINS[name]
    whole = isinstance(next(f.default for f in fields(plugin) if f.name == option), int)
    bound = float(low.strip("("))
    inside = [TINY, 0.3] if low.startswith("(") else [bound]
    outside = [0.0, -TINY, -1.0] if low.startswith("(") else [bound - 1] if whole else [-TINY, -1.0]
    if high is not None:
        inside, outside = [*inside, high], [*outside, high + TINY, high + 1]
    for value in inside:
        method = plugin(**{option: int(value) if whole else value})
        assert getattr(method, option) == value
    for value in outside:
        with pytest.raises(ValueError, match=r"must|expected"):
            plugin(**{option: int(value) if whole else value})


def test_every_option_that_is_a_number_is_finite() -> None:
    for name, plugin in PLUGINS.items():
        for option in fields(plugin):
            if option.init and isinstance(option.default, float):
                for value in (float("nan"), float("inf")):
                    with pytest.raises(ValueError, match=f"{option.name} must be a finite number"):
                        plugin(**{option.name: value})
                assert name


def test_every_option_with_choices_takes_them_and_no_other() -> None:
    count = 0
    for plugin in PLUGINS.values():
        hints = typing.get_type_hints(plugin)
        for option in fields(plugin):
            choices = (
                typing.get_args(hints[option.name])
                if typing.get_origin(hints[option.name]) is typing.Literal
                else ()
            )
            if not option.init or not choices:
                continue
            count += 1
            for choice in choices:
                assert getattr(plugin(**{option.name: choice}), option.name) == choice
            with pytest.raises(ValueError, match=f"{option.name} must be {choices[0]!r}"):
                plugin(**{option.name: "another"})
    assert count >= 10


def test_a_number_or_a_word() -> None:
    """UNO's strength is either; neither another word nor a number that is not finite."""
    uno = PLUGINS["uno"]
    assert [uno(strength=value).strength for value in ("auto", 2.0, 0)] == ["auto", 2.0, 0]
    with pytest.raises(ValueError, match=r"strength must be 'auto', found 'much'"):
        uno(strength="much")
    with pytest.raises(ValueError, match="strength must be a finite number"):
        uno(strength=float("inf"))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5])
def test_the_clamp_of_munba_lies_between_zero_and_one(value: float) -> None:
    assert PLUGINS["munba"](xi=TINY).xi == TINY
    assert PLUGINS["munba"](xi=1 - TINY).xi == 1 - TINY
    with pytest.raises(ValueError, match=r"xi must lie in \(0, 1\)"):
        PLUGINS["munba"](xi=value)


# arXiv 2401.09257 (Table 5, T and eta of the multi-task runs, beta_k), its code; 2401.05779's code;
# 2406.16986, section 4;
# 2407.12383, section 4 and its code; 2308.07707; 2308.14761's code; 2407.08169, Algorithm 1;
# 2605.28902's trainscripts/object.sh;
# 1703.04730; 2411.15537; 2209.08709's code; 2102.07121; 2210.12624's code;
# 2010.10981; 2006.14755's README; 1911.03030
PAPER_DEFAULTS: dict[str, dict[str, Any]] = {
    "forum": {
        "rho_e": 0.5 / 2,
        "inner_steps": 5,
        "inner_lr": 0.1,
        "normalize": True,
        "warm": True,
        "momentum": 3 / 4,
        "move_inner": True,
    },
    "erasediff": {"inner_steps": 2, "barrier": "norm"},
    "amnesiac": {"k": 0},
    "deltagrad": {"k": 0, "period": 5, "burn_in": 10, "pairs": 2},
    "certified_removal": {"sigma": 0.0},
    "bome": {"eta": 0.5, "barrier": "norm", "inner_steps": 10},
    "moml": {"normalize": False},
    "moco": {
        "beta": 0.5,
        "beta_decay": 0.5,
        "gamma": 0.1,
        "gamma_decay": 0.5,
        "rho": 0.0,
        "simplex": "projection",
        "normalize": False,
    },
    "meta_unlearning": {
        "inner_lr": 1e-5,
        "inner_optimizer": "adam",
        "forget": 1.0,
        "retain": 0.1,
        "relearn": 0.1,
        "destroy": 0.01,
    },
    "resalign": {
        "inner_steps": 5,
        "inner_lr": 1e-4,
        "inner_optimizer": "gradient",
        "lam": 0.8,
        "retain": 1.6,
        "terms": 5,
    },
    "mini_unlearning": {"k": 10, "rewind": False},
    "cpe": {
        "guidance": 0.5,
        "retain_scale": 1e4,
        "adversary_scale": 1.0,
        "gate_rank": 16,
        "rank": 1,
        "stages": 10,
        "steps": 450,
        "lr": 3e-5,
        "first_steps": 4,
        "first_lr": 10.0,
        "adversaries": 16,
        "adversary_steps": 450,
        "adversary_lr": 0.01,
        "pool": "newest",
        "mixtures": 16,
        "noise": 0.001,
        "warmup": 5,
    },
    "oce": {
        "erase_scale": 2000.0,
        "preserve_scale": 10.0,
        "lamb": 10.0,
        "rank": 0,
        "tokens": "last",
    },
    "race": {"inner_steps": 10, "inner_lr": 0.1 / 4, "box": 0.1, "retain": 0.0, "forget": 1.0},
    "rece": {
        "epochs": 3,
        "reg": 0.1,
        "erase_scale": 1.0,
        "preserve_scale": 0.1,
        "lamb": 0.1,
        "tokens": "all",
    },
    "speed": {
        "threshold": 0.1,
        "retain_scale": 1.0,
        "augmentations": 10,
        "filter": True,
        "invariants": True,
        "seed": 0,
        "tokens": "last",
    },
    "stereo": {
        "rounds": 4,
        "erase_steps": 200,
        "inner_steps": 3000,
        "inner_lr": 5e-3,
        "retain": 0.0,
        "forget": 1.0,
    },
    "ssd": {"alpha": 10.0, "lamb": 1.0, "batch": 1},
    "uce": {"erase_scale": 1.0, "preserve_scale": 1.0, "lamb": 0.5},
    "natural_gradient": {"damping": 0.0, "fisher_on": "retain", "objective": "retain_mean"},
    "influence": {"strength": 1.0},
    "munba": {"every": 1},
    "uno": {
        "rule": "uno",
        "alternate": False,
        "strength": 1000.0,
        "reduction": "sum",
        "histogram": 0.0,
    },
    "weighted": {"retain": 1.0, "forget": 1.0, "alternate": False},
}


@pytest.mark.parametrize("name", PAPER_DEFAULTS)
def test_the_defaults_of_the_papers(name: str) -> None:
    method = PLUGINS[name]()
    assert {option: getattr(method, option) for option in PAPER_DEFAULTS[name]} == PAPER_DEFAULTS[
        name
    ]


def test_settings_with_names_differ_in_what_they_say() -> None:
    for module, name, option, value in (
        (mini_unlearning, "rewind", "rewind", True),
        (uce, "mace-cfr", "tokens", "context"),
        (munba, "munba-printed", "formula", "printed"),
    ):
        assert module.NAMED[name] == {option: value}
        assert getattr(module.PLUGIN(), option) != value


def test_limits_and_seeds_are_zero_by_default() -> None:
    """Defaults that switch something off: no damping, no KL limit, no floor, no pull, no estimate,
    sigma chosen.
    """
    natural, forum = PLUGINS["natural_gradient"](), PLUGINS["forum"]()
    assert (natural.kl, natural.sigma, natural.damping, forum.floor) == (0, 0, 0, 0)
    assert (PLUGINS["minmax_ngd"]().pull, PLUGINS["mini_unlearning"]().estimate) == (0, 0)
    assert (PLUGINS["influence"]().seed, PLUGINS["ssd"]().seed) == (0, 0)


def test_which_methods_need_single_precision_and_an_attack() -> None:
    """FORUM's q~, UNO's and MOML's Hessian products are differences of gradients: fp32."""
    methods = {name: plugin for name, plugin in PLUGINS.items() if issubclass(plugin, Method)}
    assert {name for name, plugin in methods.items() if plugin.needs_fp32} == {
        "bome",
        "forum",
        "moco",
        "moml",
        "resalign",
        "uno",
    }
    assert {name for name, plugin in methods.items() if plugin.needs_attack} == {
        "adversarial",
        "bome",
        "forum",
        "moco",
        "moml",
        "race",
        "stereo",
    }
    assert {name for name, plugin in methods.items() if plugin.needs_relearning} == {
        "meta_unlearning",
        "resalign",
    }
    edits = {name: plugin for name, plugin in PLUGINS.items() if name not in methods}
    assert all(plugin.needs_fp32 and not plugin.needs_attack for plugin in edits.values())
    assert {name for name, plugin in edits.items() if not plugin.needs_retain} == {
        "oce",
        "rece",
        "speed",
        "uce",
    }


def test_state_is_not_part_of_what_a_method_is() -> None:
    """Two methods with the same options are equal whatever their state is, and the state is no
    option.
    """
    for name, plugin in PLUGINS.items():
        if "_state" not in {option.name for option in fields(plugin)}:
            continue
        one, other = plugin(), plugin()
        one._state["something"] = 1
        assert one == other, name
        with pytest.raises(TypeError, match="_state"):
            plugin(_state={})
