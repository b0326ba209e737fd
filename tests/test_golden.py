"""What the golden set calls a difference, and that it has a run of every method."""

from __future__ import annotations

from concept_eraser import registry
from tests import golden


def rows(content: object) -> golden.Values:
    return list(golden.values_of(content))


def test_every_method_has_a_run() -> None:
    runs = {*golden.METHODS, *golden.EDITS, *golden.CLASSIFIER_METHODS}
    assert set(registry.names("method")) <= runs


def test_a_renamed_key_is_no_difference() -> None:
    old, new = {"losses": {"retain": 0.1}, "seconds": 3.0}, {"loss": {"kept": 0.1}, "seconds": 4.0}
    assert golden.difference(rows(old), rows(new)) == ""


def test_the_last_bit_is_a_difference() -> None:
    found = golden.difference(rows({"a": [1, 0.1]}), rows({"a": [1, 0.1 + 2**-56]}))
    assert found == "a[1] was 0x1.999999999999ap-4, is 0x1.999999999999bp-4"


def test_another_order_and_another_number_of_values() -> None:
    assert golden.difference(rows([1, 2]), rows([2, 1])) == "reordered"
    assert golden.difference(rows([1, 2]), rows([1, 2, 3])) == "had 2 values, has 3"


def test_missing_entries_fail_and_new_ones_do_not(capsys) -> None:
    assert golden.compare({"a": rows([1])}, [("b", rows([1])), ("a", rows([1]))]) == 0
    assert golden.compare({"a": rows([1])}, []) == 1
    assert "a is missing" in capsys.readouterr().out


def test_an_entry_that_could_not_be_computed_fails(capsys) -> None:
    """Also where it could not be computed before: equal errors are no equal numbers."""
    values: golden.Values = [(golden.ERROR, "  FileNotFoundError: weights")]
    assert golden.compare({"a": values}, [("a", values)]) == 1
    assert "FileNotFoundError" in capsys.readouterr().out


def test_only_the_tables_of_a_page_count() -> None:
    text = "In 2024\n\n| method | concept rate |\n| --- | --- |\n| MUNBa | 0.2 [-0.1, 1e-3] |\n"
    assert golden.page_values(text) == [("numbers", "0.2 -0.1 1e-3")]
