"""What papers say against a leaderboard: verdicts from counts that are far apart, close, and
missing.
"""

from __future__ import annotations

import pytest
import yaml

from studies.rendering import claims, ranks
from studies.rendering.ranks import Standing
from tests.conftest import ROOT

LABEL = {name: name.upper() for name in ("a", "b", "c", "d")}


def standing(name: str, attacks: int, lost: int = 10) -> Standing:
    return Standing(name, {"share": (0, 300), "attacks": (attacks, 100), "lost": (lost, 300)})


BOARD = {
    "a": standing("A", 2),
    "b": standing("B", 40),
    "c": standing("C", 45, lost=90),
    "d": standing("D", 4),
}


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"method": "a", "column": "attacks", "better_than": ["b", "c"]}, "holds"),
        (
            {"method": "a", "column": "attacks"},
            "undecided: significant for 2 of 3, the reverse for none",
        ),
        ({"method": "b", "column": "attacks"}, "does not hold: against A; D"),
        (
            {"method": "b", "column": "attacks", "better_than": ["c"]},
            "undecided: significant for 0 of 1, the reverse for none",
        ),
        ({"method": "c", "column": "lost", "worse_than": ["a"]}, "holds"),
        ({"method": "a", "column": "lost", "worse_than": ["c"]}, "does not hold: against C"),
        (
            {"method": "a", "column": "attacks", "no_worse": True},
            "holds: none is significantly better, 2 of 3 significantly worse",
        ),
        ({"method": "c", "column": "attacks", "no_worse": True}, "does not hold: against A; D"),
        ({"method": "e", "column": "attacks"}, "-"),
        ({"method": "a", "column": "attacks", "better_than": ["e"]}, "-"),
    ],
)
def test_a_verdict_goes_by_what_is_sure(claim: dict, words: str) -> None:
    _, row = claims.rows([{"says": "so", **claim}], BOARD, {}, LABEL)
    assert row[2] == words


def test_over_several_tasks_the_means_decide() -> None:
    """What another wins on one task and loses on the next is not significantly better."""
    other = {
        "a": standing("A", 2),
        "b": standing("B", 40),
        "c": standing("C", 45, lost=90),
        "d": standing("D", 95),
    }
    drawn = ranks.together([list(BOARD.values()), list(other.values())])
    said = [
        {"says": "best", "method": "d", "column": "attacks", "no_worse": True},
        {"says": "all", "method": "a", "column": "attacks", "no_worse": True},
        {"says": "fast", "method": "a", "column": "seconds", "no_worse": True},
        {"says": "so", "method": "a", "column": "attacks"},
    ]
    _, *found = claims.whole(said, BOARD, drawn)
    assert [row[0] for row in found] == ["best", "all"], "no seconds, and only claims against all"
    assert found[0][2].startswith("does not hold: against A; B;"), (
        "D wins the first task, and 45 against 50 is undecided"
    )
    assert found[1][1].startswith("A 2.")
    assert found[1][2].startswith(
        "holds: none is significantly better, 3 of 3 significantly worse; likeliest to be better: "
    )
    (_, missing) = claims.whole(
        [{"says": "best", "method": "e", "column": "attacks", "no_worse": True}], BOARD, drawn
    )
    assert missing == ["best", "not measured yet", "-"]


def test_seconds_go_by_the_slowest_and_the_fastest_seed() -> None:
    seconds = {"a": [3.0, 4.0], "b": [5.0, claims.NEVER], "d": [3.5, 9.0]}
    said = [
        {"says": "fast", "method": "a", "column": "seconds", "better_than": ["b"]},
        {"says": "fastest", "method": "a", "column": "seconds"},
    ]
    _, one, all_ = claims.rows(said, BOARD, seconds, LABEL)
    assert one == ["fast", "A 4 s; B never", "holds"]
    assert all_[2] == "undecided: significant for 1 of 2, the reverse for none"


def test_the_leaderboards_claims_are_of_its_methods_and_columns() -> None:
    leaderboard = yaml.safe_load(
        (ROOT / "studies" / "configs" / "tiny_leaderboard.yaml").read_text()
    )
    for claim in leaderboard["claims"]:
        named = {claim["method"], *claim.get("better_than", []), *claim.get("worse_than", [])}
        assert named <= set(leaderboard["methods"]), claim
        assert claim["column"] in ("share", "attacks", "lost", "seconds"), claim
