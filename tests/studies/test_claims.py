"""Claims of papers beside a leaderboard: verdicts from distant, close and missing counts."""

from __future__ import annotations

import pytest
import yaml

from studies.rendering import claims
from studies.rendering.ranks import Standing
from tests.conftest import ROOT

LABEL = {name: name.upper() for name in ("a", "b", "c", "d")}


def standing(name: str, attacks: int, errors: int = 10) -> Standing:
    columns = {
        "concept_rate": (0, 300),
        "attack_success": (attacks, 100),
        "retain_error": (errors, 300),
    }
    return Standing(name, columns)


LEADERBOARD = {
    "a": standing("A", 2),
    "b": standing("B", 40),
    "c": standing("C", 45, errors=90),
    "d": standing("D", 4),
}


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"method": "a", "column": "attack_success", "better_than": ["b", "c"]}, "holds"),
        (
            {"method": "a", "column": "attack_success"},
            "inconclusive: significant for 2 of 3, the reverse for none",
        ),
        ({"method": "b", "column": "attack_success"}, "does not hold: against A; D"),
        (
            {"method": "b", "column": "attack_success", "better_than": ["c"]},
            "inconclusive: significant for 0 of 1, the reverse for none",
        ),
        ({"method": "c", "column": "retain_error", "worse_than": ["a"]}, "holds"),
        (
            {"method": "a", "column": "retain_error", "worse_than": ["c"]},
            "does not hold: against C",
        ),
        ({"method": "e", "column": "attack_success"}, "-"),
        ({"method": "a", "column": "attack_success", "better_than": ["e"]}, "-"),
    ],
)
def test_a_verdict_goes_by_what_is_significant(claim: dict, words: str) -> None:
    _, row = claims.rows([{"says": "so", **claim}], LEADERBOARD, {}, LABEL)
    assert row[2] == words


def test_seconds_go_by_the_slowest_and_the_fastest_seed() -> None:
    seconds = {"a": [3.0, 4.0], "b": [5.0, claims.NEVER], "d": [3.5, 9.0]}
    statements = [
        {"says": "fast", "method": "a", "column": "seconds", "better_than": ["b"]},
        {"says": "fastest", "method": "a", "column": "seconds"},
    ]
    _, one, all_ = claims.rows(statements, LEADERBOARD, seconds, LABEL)
    assert one == ["fast", "A 4 s; B never", "holds"]
    assert all_[2] == "inconclusive: significant for 1 of 2, the reverse for none"


def test_the_leaderboards_claims_are_of_its_methods_and_columns() -> None:
    leaderboard = yaml.safe_load(
        (ROOT / "studies" / "configs" / "tiny_leaderboard.yaml").read_text()
    )
    for claim in leaderboard["claims"]:
        methods = {claim["method"], *claim.get("better_than", []), *claim.get("worse_than", [])}
        assert methods <= set(leaderboard["methods"]), claim
        assert claim["column"] in ("concept_rate", "attack_success", "retain_error", "seconds"), (
            claim
        )
