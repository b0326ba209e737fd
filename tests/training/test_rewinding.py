"""Rewinding (SCRUB+R): the chosen round against hand-computed errors of runs that end there."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from concept_eraser import api, registry
from concept_eraser.cli.main import app
from concept_eraser.data.labelled import Labelled
from concept_eraser.methods.scrub import Scrub
from concept_eraser.methods.weighted import Weighted
from concept_eraser.models.module import build
from concept_eraser.recipes import recipe
from concept_eraser.training import checkpoint
from concept_eraser.training.rewinding import Rewinding, WrongPredictions, nearest, round_ends
from concept_eraser.utils.errors import Interrupted, UserError

ENDS = (8, 16, 24, 30, 36)  # of the rounds below: 3 of 2 + 6 steps, then 2 of 6


@pytest.fixture(scope="module")
def digits() -> dict[str, Labelled]:
    plugin = registry.build("dataset", "digits", {})
    return {split: plugin.load(split) for split in ("train", "test")}


def trained(digits: dict[str, Labelled], *, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = build("mlp", "classifier", inputs=64, hidden=64, norm=norm).module.requires_grad_(True)
    inputs = digits["train"].inputs(range(len(digits["train"])))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), digits["train"].labels).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def network(digits: dict[str, Labelled]) -> nn.Module:
    return trained(digits)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "target": "classifier",
        "forget": {"data": "digits", "share": 0.1, "loss": "diverge"},
        "retain": {"data": "rest", "loss": "data", "distill": 0.5},
        "method": {"name": "scrub", "forget_steps": 2, "retain_steps": 6, "rounds": 3},
        "training": training(),
        **changes,
    }


def training(**changes: Any) -> dict[str, Any]:
    usual = {"steps": 36, "batch_size": 64, "lr": 0.3, "optimizer": "sgd", "device": "cpu"}
    return {**usual, **changes}


def erase(net: nn.Module, folder: Path, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    module = copy.deepcopy(net)
    api.erase(model=module, output=folder, **settings(**changes))
    return module, json.loads((folder / "done.json").read_text())


def error(net: nn.Module, data: Labelled, rows: list[int]) -> Fraction:
    with torch.no_grad():
        predicted = net(data.inputs(rows)).argmax(1)
    return Fraction(int((predicted != data.labels[rows]).sum()), len(rows))


def forgotten(digits: dict[str, Labelled]) -> list[int]:
    """The tenth of the examples that `share` draws, by its definition."""
    order = torch.randperm(len(digits["train"]), generator=torch.Generator().manual_seed(0))
    return sorted(order[: round(0.1 * len(digits["train"]))].tolist())


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- the chosen round -----------------------------------------------------------------------------


def test_the_result_is_the_round_that_hand_computed_errors_choose(
    network: nn.Module, digits: dict[str, Labelled], tmp_path: Path
) -> None:
    ended = [
        erase(network, tmp_path / str(step), training=training(steps=step))[0] for step in ENDS
    ]
    errors = [error(net, digits["train"], forgotten(digits)) for net in ended]
    unseen = error(ended[-1], digits["test"], list(range(len(digits["test"]))))
    distances = [abs(one - unseen) for one in errors]
    place = distances.index(min(distances))
    assert 0 < place < len(ENDS) - 1  # another rule, such as the last or the first, would fail
    net, done = erase(network, tmp_path / "rewound", rewinding="digits")
    assert equal(net, ended[place])
    assert done["rewinding"] == {
        "round": place + 1,
        "rounds": 5,
        "step": ENDS[place],
        "forget_error": float(errors[place]),
        "unseen_error": float(unseen),
        "unseen_examples": len(digits["test"]),
    }
    rows = map(json.loads, (tmp_path / "rewound" / "log.jsonl").read_text().splitlines())
    logged = {row["step"]: row["forget_error"] for row in rows if "forget_error" in row}
    assert logged == dict(zip(ENDS, map(float, errors), strict=True))
    written = load_file(tmp_path / "rewound" / "weights.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in net.state_dict().items())


def test_unseen_examples_of_other_classes_do_not_count(
    network: nn.Module, digits: dict[str, Labelled], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"forget": {"data": "digits", "classes": [3], "loss": "diverge"}}
    last, _ = erase(network, tmp_path / "last", **changes)
    _, done = erase(network, tmp_path / "rewound", rewinding={"data": "digits"}, **changes)
    threes = (digits["test"].labels == 3).nonzero()[:, 0].tolist()
    assert done["rewinding"]["unseen_examples"] == len(threes)
    assert done["rewinding"]["unseen_error"] == float(error(last, digits["test"], threes))


def test_a_set_in_memory_and_its_positions(
    network: nn.Module, digits: dict[str, Labelled], tmp_path: Path
) -> None:
    test_set = digits["test"]
    arrays = (test_set.inputs(range(len(test_set))), test_set.labels)
    rows = list(range(0, len(test_set), 2))
    by_name, done = erase(network, tmp_path / "a", rewinding={"data": "digits", "indices": rows})
    in_memory, same = erase(network, tmp_path / "b", rewinding={"data": arrays, "indices": rows})
    assert equal(by_name, in_memory)
    assert done["rewinding"] == same["rewinding"]
    assert done["rewinding"]["unseen_examples"] == len(rows)


def test_running_statistics_are_those_of_the_round(
    digits: dict[str, Labelled], tmp_path: Path
) -> None:
    net, train = trained(digits, norm=True), {"batchnorm": "train"}
    rewound, done = erase(net, tmp_path / "a", trainable=train, rewinding="digits")
    assert done["rewinding"]["step"] < 36
    ended, _ = erase(
        net, tmp_path / "b", trainable=train, training=training(steps=done["rewinding"]["step"])
    )
    assert any("running" in name for name in rewound.state_dict())
    assert equal(rewound, ended)


def test_any_method_can_be_rewound_to_a_number_of_steps(network: nn.Module, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "forget": {"data": "digits", "share": 0.1, "loss": "ascent", "scale": 0.1},
        "method": "weighted",
    }
    net, done = erase(network, tmp_path / "a", rewinding={"data": "digits", "every": 10}, **changes)
    assert done["rewinding"]["rounds"] == 4  # after 10, 20, 30 and 36 steps
    steps = done["rewinding"]["step"]
    ended, _ = erase(network, tmp_path / "b", training=training(steps=steps), **changes)
    assert equal(net, ended)


@pytest.mark.parametrize("stop", [9, 24, 36])  # in a round, at its end, and before the choice
def test_a_resumed_run_chooses_the_same_round(
    network: nn.Module, tmp_path: Path, stop: int
) -> None:
    def interrupt(step: int, seconds: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    whole, done = erase(network, tmp_path / "whole", rewinding="digits")
    parts = copy.deepcopy(network)
    keywords = settings(rewinding="digits")
    with pytest.raises(Interrupted):
        api.erase(model=parts, output=tmp_path / "parts", on_step=interrupt, **keywords)
    api.erase(model=parts, output=tmp_path / "parts", resume=True, **keywords)
    assert equal(whole, parts)
    resumed = json.loads((tmp_path / "parts" / "done.json").read_text())
    assert resumed["rewinding"] == done["rewinding"]


# --- the states -----------------------------------------------------------------------------------


def test_of_rounds_with_the_same_error_one_state_is_stored_and_the_first_is_chosen() -> None:
    weight, wrong = torch.zeros(2), iter([5, 3, 5, 3, 7])
    rewinding = Rewinding(
        {"w": weight},
        lambda step: step % 2 == 0,
        forget=WrongPredictions(10, lambda: next(wrong)),
        unseen=WrongPredictions(20, lambda: 11),  # 0.55, nearest to 0.5
    )
    for step in range(1, 11):
        weight.fill_(step)
        log = rewinding.after_step(step)
        assert (log == {}) == (step % 2 == 1)
    assert [len(one.values) for one in rewinding.rounds] == [1, 1, 0, 0, 1]
    rewinding.rewind()
    assert weight.tolist() == [2.0, 2.0]
    assert rewinding.summary["round"] == 1


def test_a_choice_that_was_cut_off_is_made_again() -> None:
    weight, wrong, unseen = torch.zeros(2), iter([1, 4, 6]), iter([1, 6])  # of 10 each

    def started() -> Rewinding:
        return Rewinding(
            {"w": weight},
            lambda step: True,
            forget=WrongPredictions(10, lambda: next(wrong)),
            unseen=WrongPredictions(10, lambda: next(unseen)),
        )

    rewinding = started()
    for step in range(3):
        weight.fill_(step)
        rewinding.after_step(step)
    rewinding.rewind()
    again = started()
    again.load_state_dict(rewinding.state_dict())
    weight.fill_(9.0)  # the weights are not those of the last round any more
    again.rewind()
    assert weight.tolist() == [0.0, 0.0]
    assert again.summary == rewinding.summary


def test_a_state_on_disk_has_one_copy_for_each_round(network: nn.Module, tmp_path: Path) -> None:
    def interrupt(step: int, seconds: float) -> None:
        if step == 30:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        api.erase(
            model=copy.deepcopy(network),
            output=tmp_path,
            on_step=interrupt,
            **settings(rewinding="digits"),
        )
    rounds = checkpoint.load(tmp_path / "state.ckpt")["rewinding"]["rounds"]
    assert [one["step"] for one in rounds] == [8, 16, 24, 30]
    distinct = {one["wrong"] for one in rounds}
    assert sum(bool(one["values"]) for one in rounds) == len(distinct) > 1


def test_the_nearest_round_is_that_of_exact_fractions() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        n, m = generator.integers(1, 40, 2).tolist()
        wrong = generator.integers(0, n + 1, 6).tolist()
        unseen = int(generator.integers(0, m + 1))
        distances = [abs(Fraction(one, n) - Fraction(unseen, m)) for one in wrong]
        place = nearest(wrong, n, unseen_wrong=unseen, unseen_examples=m)
        assert place == distances.index(min(distances))


def test_where_rounds_end() -> None:
    scrub = Scrub(forget_steps=2, retain_steps=6, rounds=3)
    ends = round_ends(scrub, None, 38)  # 36 ends a pass, 38 ends the training
    assert [step for step in range(39) if ends(step)] == [*ENDS, 38]
    plain = round_ends(Weighted(), 15, 40)
    assert [step for step in range(1, 41) if plain(step)] == [15, 30, 40]
    assert not any(map(Weighted().ends_round, range(9)))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewinding": {}}, r"rewinding\.data: required, not given"),
        ({"rewinding": "rest"}, r"rewinding\.data: rest are examples that the model was trained"),
        ({"rewinding": {"data": "digits", "every": 0}}, r"rewinding\.every"),
        (
            {"rewinding": "digits", "method": "munba"},
            r"'munba' has no rounds of its own; give rewinding\.every",
        ),
        (
            {"rewinding": {"data": "digits", "every": 5}, "method": "influence"},
            "'influence' trains nothing; leave rewinding out",
        ),
        (
            {"rewinding": "digits", "training": training(ema=0.9)},
            r"rewinding cannot be combined with training\.ema",
        ),
        (
            {
                "rewinding": {"data": "digits", "every": 5},
                "forget": {"data": "digits", "classes": [3]},
                "retain": None,
                "method": {"name": "weighted", "retain": 0.0},
                "trainable": {"negate": 1.0},
            },
            r"rewinding cannot be combined with trainable\.negate",
        ),
        (
            {
                "rewinding": "digits",
                "target": "vae",
                "forget": {"data": "digits", "classes": [1]},
                "retain": "rest",
            },
            "needs target: classifier or clip; found target: vae",
        ),
    ],
)
def test_a_recipe_that_cannot_be_rewound(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load({key: value for key, value in settings(**changes).items() if value is not None})


def test_unseen_examples_that_do_not_fit(
    network: nn.Module, digits: dict[str, Labelled], tmp_path: Path
) -> None:
    before = copy.deepcopy(network)
    no_threes = (digits["test"].labels != 3).nonzero()[:, 0].tolist()
    wrong_shape = (torch.zeros(10, 63), torch.arange(10))
    cases: tuple[tuple[Any, str], ...] = (
        ("no/such/set", "no such data"),
        (
            {"data": "digits", "split": "train"},
            r"1437 examples of digits are forgotten or retained",
        ),
        ({"data": "digits", "indices": no_threes}, "has no example of the forgotten class 3"),
        ({"data": wrong_shape}, "rewinding: the model cannot take an example"),
    )
    for number, (rewinding, message) in enumerate(cases):
        with pytest.raises(UserError, match=message):
            erase(network, tmp_path / str(number), rewinding=rewinding)
        assert not (tmp_path / str(number) / "recipe.yaml").exists()  # before the folder is claimed
    assert equal(before, network)


def test_without_rewinding_nothing_is_written_down(network: nn.Module, tmp_path: Path) -> None:
    """The fingerprints of older run folders stay the same."""
    plain, rewound = recipe.load(settings()), recipe.load(settings(rewinding="digits"))
    assert "rewinding" not in plain.resolved()
    assert rewound.resolved()["rewinding"] == {"data": "digits", "options": {}, "split": "test"}
    assert recipe.load(rewound.resolved()).fingerprint == rewound.fingerprint != plain.fingerprint
    _, done = erase(network, tmp_path)
    assert "rewinding" not in done
    assert "forget_error" not in (tmp_path / "log.jsonl").read_text()


def test_a_dry_run_reads_the_unseen_examples(tmp_path: Path) -> None:
    build("mlp", "classifier", inputs=64, hidden=8, norm=False).save(tmp_path / "start")
    content = settings(rewinding={"data": "digits", "split": "train"})
    content["model"] = str(tmp_path / "start")
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    words = ["erase", str(tmp_path / "recipe.yaml"), "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert "forgotten or retained" in str(result.exception)
    result = CliRunner().invoke(app, [*words, "rewinding.split=test"])
    assert result.exit_code == 0, result.output
