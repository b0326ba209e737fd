"""Plug-ins by file name, their options, and values coerced by annotation."""

from __future__ import annotations

import gc
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from concept_eraser import registry
from concept_eraser.concepts.plan import is_concept
from concept_eraser.utils import provenance, resources
from concept_eraser.utils.errors import UserError


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_plugin_loads_and_has_a_summary(kind: str) -> None:
    for name in registry.names(kind):
        assert len(registry.summary(kind, name)) > 20
        if kind != "loss":  # losses come from a table, not from modules
            assert registry.load(kind, name).__module__.endswith(name)
    assert registry.names(kind)


def test_threads_read_the_plugins_at_once() -> None:
    """Clients of the demo ask for plug-ins in threads of their own.

    The collector's callback changes the thread within a parse, where Python 3.11 fails if another
    thread parses too.
    """
    thresholds = gc.get_threshold()

    def change_thread(phase: str, info: dict[str, Any]) -> None:
        time.sleep(0)

    def count(kind: str) -> int:
        return len(registry._modules.__wrapped__(kind))

    gc.callbacks.append(change_thread)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(count, ["attack"] * 16))
    finally:
        gc.callbacks.remove(change_thread)
        gc.set_threshold(*thresholds)
    assert set(counts) == {len(registry.builtin("attack"))}


def test_unknown_names_suggest() -> None:
    with pytest.raises(UserError, match="unknown method 'munbaa'; did you mean 'munba'"):
        registry.load("method", "munbaa")
    with pytest.raises(UserError, match="kind of plug-in"):
        registry.names("methodz")


def test_methods_tell_title_source_and_options() -> None:
    for name in registry.names("method"):
        method = registry.load("method", name)
        assert method.title
        assert method.source
        for option, (_, default) in registry.options(method).items():
            assert default is not None, option
        assert registry.build("method", name, {}) == method()


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e-5", float, 1e-5),
        (3, float, 3.0),
        ("7", int, 7),
        (True, bool, True),
        ("false", bool, False),
        ("a", Literal["a", "b"], "a"),
        (None, Optional[int], None),
        ("4", Optional[int], 4),
    ],
)
def test_coercion(value, annotation, expected) -> None:
    result = registry.coerce(value, annotation)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("x", float),
        (1.5, int),
        (True, int),
        ("maybe", bool),
        ("c", Literal["a"]),
        ("x", Optional[int]),
    ],
)
def test_coercion_refuses(value, annotation) -> None:
    with pytest.raises(ValueError, match=r"expected|unknown"):
        registry.coerce(value, annotation)


def test_derived_seeds_are_stable_and_distinct() -> None:
    """Golden value: python -c "from concept_eraser.utils.provenance import derive_seed;
    print(derive_seed(0, 1, 'forget', 2))".
    """
    assert provenance.derive_seed(0, 1, "forget", 2) == 4077051895207150257
    seeds = {
        provenance.derive_seed(0, step, objective, e)
        for step in range(20)
        for objective in ("forget", "retain")
        for e in range(8)
    }
    assert len(seeds) == 320
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_recorded_command_names_no_folder_of_the_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "/somewhere/bin/study.py",
        "eval/x.yaml",
        "--work",
        str(tmp_path / "runs" / "a"),
        "plain=/elsewhere/w.safetensors",
    ]
    assert provenance.command(arguments) == "study.py eval/x.yaml --work runs/a plain=w.safetensors"


def test_a_recorded_command_can_be_pasted_into_a_shell() -> None:
    arguments = ["concept-eraser", "erase", "Van Gogh", "forget.anchor={shape: circle}", "$HOME"]
    assert shlex.split(provenance.command(arguments)) == arguments


def test_resources_name_what_is_missing(tmp_path) -> None:
    with pytest.raises(UserError, match="unknown recipe 'nothing'"):
        resources.find("pipelines", "nothing")
    with pytest.raises(UserError, match="no such recipe file"):
        resources.find("pipelines", str(tmp_path / "x.yaml"))
    with pytest.raises(UserError, match=r"no such prompt set file: .*; check the path$"):
        resources.find("prompts", str(tmp_path / "x"))


def test_the_folder_of_a_run_and_a_concept_with_a_slash_are_no_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("AC/DC", "runs/star"):
        with pytest.raises(UserError, match="a text with '/' is read as a path; check the path"):
            resources.find("pipelines", text)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "my_star"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    assert not is_concept("runs/my_star")
    with pytest.raises(
        UserError, match=r"give runs/my_star/recipe\.yaml, with --output runs/my_st"
    ):
        resources.find("pipelines", "runs/my_star")
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(UserError, match="my_star is the folder of a run, not a recipe"):
        is_concept("my_star")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("munba", {"formula": "prnted"}, "formula must be 'exact' or 'printed', found 'prnted'"),
        (
            "natural_gradient",
            {"objective": "retain-mean"},
            "objective must be 'retain_mean' or 'fixed_n'",
        ),
        ("natural_gradient", {"damping": float("nan")}, "damping must be a finite number"),
        ("natural_gradient", {"tolerance": -1.0}, "tolerance > 0"),
        ("ssd", {"alpha": 0.0}, "alpha and lamb must be > 0"),
        ("ssd", {"lamb": float("inf")}, "lamb must be a finite number"),
        ("scrub", {"rounds": 0}, "rounds must be >= 1"),
        ("mini_unlearning", {"hvp": "auto"}, "hvp must be"),
        ("uno", {"strength": "atuo"}, "strength must be 'auto'"),
        ("erasediff", {"barrier": "nrm"}, "barrier must be 'norm' or 'gap' or 'constant'"),
        ("uno", {"ratio": float("inf")}, "ratio must be a finite number"),
    ],
)
def test_options_are_checked_in_python_too(name: str, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        registry.load("method", name)(**options)
