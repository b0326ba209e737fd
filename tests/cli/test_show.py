"""`show` prints what a reader needs of every method.

These are title, source, options with defaults, theorems and differences from the paper.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from concept_eraser import registry
from concept_eraser.cli import info
from concept_eraser.cli.main import app
from concept_eraser.utils.errors import UserError


@pytest.mark.parametrize("name", [*registry.names("method"), *registry.named("method")])
def test_every_method_shows_itself(name: str) -> None:
    result = CliRunner().invoke(app, ["show", name])
    assert result.exit_code == 0, result.output
    method = registry.load("method", name)
    assert method.title in result.output
    assert method.source in result.output
    assert "theorems tested:" in result.output
    for option in registry.options(method):
        assert f"  {option} = " in result.output
        assert f"{option}" in (method.__doc__ or ""), (
            f"the option {option} of {name} is not explained"
        )
    plugin, settings = registry.resolve("method", name, {})
    for option, value in settings.items():
        assert f"  {option} = {value!r}" in result.output, f"{name} is {plugin} with {option}"


@pytest.mark.parametrize("name", registry.names("method"))
def test_every_method_names_its_paper_and_what_differs(name: str) -> None:
    import sys

    text = sys.modules[registry.load("method", name).__module__].__doc__ or ""
    assert "arXiv" in text
    assert any(
        word in text.lower() for word in ("difference", "left out", "not written again", "settings")
    ), name


def test_every_name_of_a_list_can_be_shown() -> None:
    kinds = {
        "judges": "judge",
        "metrics": "metric",
        "features": "feature",
        "datasets": "dataset",
        "architectures": "architecture",
    }
    texts = {
        (kind, name): CliRunner().invoke(app, ["show", name, "--kind", kind]).output
        for kind, plugin_kind in kinds.items()
        for name in registry.names(plugin_kind)
    }
    for (kind, _), text in texts.items():
        assert text.startswith(f"the {kinds[kind]} ")
        assert "MISSING" not in text
    assert "folder = (required)    (str)" in texts["judges", "face"]
    assert texts["datasets", "digits"] == CliRunner().invoke(app, ["show", "digits"]).output
    assert "judge: tiny" in CliRunner().invoke(app, ["show", "tiny"]).output  # the suite
    with pytest.raises(UserError, match="unknown judge 'munba'"):
        info.show("munba", "judges")
    with pytest.raises(UserError, match="unknown kind 'judge'"):
        info.show("tiny", "judge")


def test_list_names_the_settings_too() -> None:
    result = CliRunner().invoke(app, ["list", "methods"])
    assert "= uno with alternate: True" in result.output
    assert "natural_gradient" in result.output
    assert "gaussian_mechanism" not in result.output


def test_every_default_says_where_it_comes_from(cli) -> None:
    for name in registry.names("method"):
        method = registry.load("method", name)
        assert set(method.defaults) == set(registry.options(method)), name
    text = cli("show", "forum").stdout
    assert "momentum = 0.75    (float)    from: the paper: beta_k = (k + 1)^(-3/4)" in text
    assert "rule = 'ascent'" in (alias_text := cli("show", "sa").stdout)
    assert "from: the name" in alias_text
    assert "theorems tested: none" in cli("show", "uno-hat").stdout


def test_list_has_a_line_about_each_selection_preset_and_family() -> None:
    from concept_eraser.models.loading import FAMILIES
    from concept_eraser.recipes.selections import DESCRIPTIONS, SELECTIONS

    selections, presets, models = (
        CliRunner().invoke(app, ["list", kind]).output.splitlines()
        for kind in ("selections", "presets", "models")
    )
    assert tuple(DESCRIPTIONS) == SELECTIONS
    assert all(len(line.split()) > 1 for line in selections)
    assert "at most 1 example and 1 image at once" in presets[0]
    assert "at most 2 examples and 2 images at once" in presets[2]
    *_, families = models[-1].partition(": ")
    assert families.split(", ") == sorted(dict.fromkeys(FAMILIES.values()))


@pytest.mark.parametrize("kind", ["method", "metric", "judge", "attack", "dataset", "feature"])
def test_the_line_about_each_plugin_is_a_whole_sentence(kind: str) -> None:
    for name in registry.builtin(kind):
        assert registry.summary(kind, name).endswith((".", ")")), name
