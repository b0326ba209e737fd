"""Plug-ins from outside: an installed package's entry points, and objects that are passed in
Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.cli.main import app
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks.base import Attack, Round
from concept_eraser.evaluation.attacks.random_tokens import RandomTokens
from concept_eraser.evaluation.base import Metric
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.metrics.concept_rate import share_result
from concept_eraser.exporting.model_card import card
from concept_eraser.losses import Loss
from concept_eraser.methods.base import GramMethod
from concept_eraser.methods.checks import LawError, check_laws
from concept_eraser.methods.munba import Munba
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import suite_matching
from concept_eraser.training import log as logs
from tests.conftest import short

if TYPE_CHECKING:
    from collections.abc import Sequence as OnlyForTypeCheckers

PACKAGE = Path(__file__).parent.parent / "plugin_package"
PLUGINS = {
    "method": "unit_sum",
    "loss": "huber",
    "judge": "cautious",
    "metric": "brightness",
    "attack": "plain_words",
}
SUITE = {
    "concept": {"shape": "star"},
    "sampling": {"steps": 4, "batch_size": 32, "precision": "bf16"},
    "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 6}},
    "metrics": ["concept_rate"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the sample package is installed, without a network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "sample_plugins.py"):
        shutil.copy(PACKAGE / name, source / name)
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, str(source)], check=True, timeout=300
    )
    return target


@pytest.fixture
def sample_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sample package is installed for the length of a test."""
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("sample_plugins", None)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


# --- an installed package -------------------------------------------------------------------------


@pytest.mark.usefixtures("sample_package")
@pytest.mark.parametrize(("kind", "name"), PLUGINS.items())
def test_an_installed_plugin_is_listed_and_shown(kind: str, name: str) -> None:
    assert name in registry.names(kind)
    plugin = registry.load(kind, name)
    first = (plugin.__doc__ or "").split("\n")[0]
    family = "[typed prompts] " if kind == "attack" else ""
    assert f"{name} {family}{first} (from sample-plugins 1.2)" in invoke(
        "list", registry.plural(kind)
    )
    output = invoke("show", name)
    assert f"the {kind} " in output
    assert first in output
    for option in registry.options(plugin):
        assert f"{option} = " in output


def test_without_the_package_its_names_are_unknown() -> None:
    for kind, name in PLUGINS.items():
        assert name not in registry.names(kind)
        with pytest.raises(UserError, match=f"unknown {kind} '{name}'"):
            registry.load(kind, name)


def test_a_list_imports_neither_torch_nor_the_package(site: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
from typer.testing import CliRunner
from concept_eraser.cli.main import app
output = CliRunner().invoke(app, ["list"]).output
assert "unit_sum" in output and "huber" in output, output
assert not {{"torch", "sample_plugins"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.usefixtures("sample_package")
def test_a_built_in_name_wins_and_both_are_named(caplog: pytest.LogCaptureFixture) -> None:
    registry._installed_plugins.cache_clear()
    assert registry.load("method", "munba") is Munba
    (record,) = [one for one in caplog.records if "munba" in one.getMessage()]
    expected = (
        "the method 'munba' of the package sample-plugins 1.2 is not used: the built-in "
        "method 'munba' has the same name"
    )
    assert record.getMessage() == expected
    assert record.levelname == "ERROR"


def test_two_packages_with_one_name_are_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in site.iterdir():
        if path.is_dir() and path.suffix == ".dist-info":
            copy = tmp_path / "other_plugins-3.0.dist-info"
            shutil.copytree(path, copy)
            text = (copy / "METADATA").read_text()
            (copy / "METADATA").write_text(
                text.replace("sample-plugins", "other-plugins").replace("1.2", "3.0")
            )
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"in several packages: .*other-plugins 3.0.*; uninstall all but one"
    ):
        registry.load("method", "unit_sum")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "no_such_module:Thing",
            r"of the package broken 1.0 cannot be imported \(ModuleNotFoundError",
        ),
        (
            "json:JSONDecoder",
            "is json:JSONDecoder, which is no class derived from concept_eraser.methods.base",
        ),
    ],
)
def test_a_broken_entry_point_names_its_package(
    value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[concept_eraser.methods]\nbroken = {value}\nos:system = os:system\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "broken" in registry.names("method")
    assert "(from broken 1.0)" in registry.summary("method", "broken")
    with pytest.raises(UserError, match=words):
        registry.load("method", "broken")
    assert not [name for name in registry.names("method") if ":" in name]


def test_a_package_in_the_working_folder_is_not_installed(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`python -m` searches the working folder, where somebody else's files may include
    a package.
    """
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(site)
    assert "unit_sum" not in registry.names("method")
    assert "lies in the working folder" in caplog.text
    monkeypatch.chdir("/")
    assert "unit_sum" in registry.names("method")


@pytest.mark.usefixtures("sample_package")
def test_a_recipe_names_an_installed_method_and_loss(tmp_path: Path) -> None:
    content = short(training__steps=2, method={"name": "unit_sum", "scale": 0.5})
    content["forget"] |= {"loss": {"name": "huber", "delta": 0.1}}
    content["retain"] |= {"loss": "huber"}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    run = concept_eraser.erase(str(path), output=tmp_path / "run")
    content_of_run = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    assert content_of_run["method"] == {"name": "unit_sum", "scale": 0.5}
    assert content_of_run["forget"]["loss"] == {"name": "huber", "delta": 0.1}
    assert content_of_run["retain"]["loss"] == "huber"
    assert recipes.load(str(run.folder / "recipe.yaml")).fingerprint == run.recipe.fingerprint
    rows = logs.read(run.folder / "log.jsonl")
    assert len(rows) == 2
    again = concept_eraser.erase(
        str(path), output=tmp_path / "again", overrides=["forget.loss=huber"]
    )
    other = logs.read(again.folder / "log.jsonl")
    assert rows[0]["losses"]["retain"] == other[0]["losses"]["retain"]
    assert rows[0]["losses"]["forget"] != other[0]["losses"]["forget"]  # delta has an effect


@pytest.mark.usefixtures("sample_package")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "sample_plugins:UnitSum"}, "unknown method 'sample_plugins:UnitSum'"),
        (
            {"method": {"name": "unit_sum", "scal": 1}},
            "unknown option of method 'unit_sum' 'scal'; did you mean 'scale'",
        ),
        ({"forget__loss": "sample_plugins:Huber"}, "unknown loss 'sample_plugins:Huber'"),
        ({"forget__loss": {"name": "huber", "delta": "much"}}, "delta: expected a finite number"),
        ({"forget__loss": {"name": "esd", "eta": 2}}, "the loss 'esd' has no options of its own"),
        ({"forget__loss": "huber", "forget__images": "free"}, "the loss 'huber' needs images"),
        (
            {"forget__loss": "huber", "target": "text_encoder"},
            "unknown loss of target 'text_encoder' 'huber'",
        ),
        (
            {"forget__loss": "huber", "forget__empty_prompts": 0.5},
            "empty_prompts needs a loss that preserves",
        ),
    ],
)
def test_mistakes_with_installed_plugins_are_named(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        recipes.load(short(**changes))


@pytest.mark.usefixtures("sample_package")
def test_evaluate_and_attack_by_installed_plugins(shared_tiny: Any, tmp_path: Path) -> None:
    suite = {
        **SUITE,
        "judge": {"name": "cautious", "threshold": 1.1},
        "metrics": ["brightness", "concept_rate"],
    }
    result = concept_eraser.evaluate(
        "tiny-sd", suite, before="tiny-sd", output=tmp_path / "evaluation"
    )
    assert not result.refused
    assert result.find("brightness", "direct").after.value > 0
    assert result.find("concept_rate", "direct").after.value == 0  # never that sure
    assert result.as_dict()["protocol"]["judge"] == {"name": "cautious", "threshold": 1.1}
    assert suites.load(result.as_dict()["protocol"]).build_judge() == registry.build(
        "judge", "cautious", {"threshold": 1.1}
    )
    campaign = concept_eraser.attack(
        "tiny-sd", "plain_words", SUITE, hide="circle", n=4, options={"tries": 1}, before="tiny-sd"
    )
    assert campaign.protocol["attack"] == "plain_words"
    assert campaign.family == registry.family("plain_words") == "typed prompts"
    assert campaign.protocol["options"] == {"tries": 1}
    assert any(one.success and not one.pre for one in campaign.attempts)


def test_the_law_helper_serves_the_package(site: Path, tmp_path: Path) -> None:
    """The package's own test runs in a process without the settings of this suite."""
    shutil.copy(
        PACKAGE / "check_laws_of_sample.py", tmp_path / "test_laws.py"
    )  # away from this suite's settings
    command = [sys.executable, "-m", "pytest", str(tmp_path)]
    root = str(Path(concept_eraser.__file__).parent.parent)
    environment = {"PYTHONPATH": f"{site}:{root}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "1 passed" in process.stdout, process.stdout + process.stderr


# --- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(GramMethod):
    """The gradients' mean, times `factor`."""

    title: ClassVar[str] = "Half"
    source: ClassVar[str] = "a test"
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation"})

    factor: float = 1.0

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        return torch.full((len(gram),), 0.5 * self.factor, dtype=torch.float64), {}


@dataclass(frozen=True)
class Absolute(Loss):
    """The mean absolute error to the teacher."""

    power: float = 1.0

    def compute(self, model: Any, draw: Any, settings: Any) -> Tensor:
        difference = model.predict(draw) - model.predict(draw, teacher=settings.teacher)
        return (difference.float() + 0.01).abs().pow(self.power).mean()


class Everything(TinyJudge):
    """A judge that detects a star in every image."""

    fingerprint = "everything"

    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        return {
            name: np.full(len(images), "star" if name == "shape" else values[0])
            for name, values in self.classes.items()
        }


@dataclass(frozen=True)
class Constant(Metric):
    """A share that is always the same."""

    def measure(self, evidence: Any) -> Any:
        values = np.ones(4, bool)
        return [share_result("constant", "direct", values, values, "neither")]


@dataclass(frozen=True)
class SuffixedPrompts(Attack):
    """The prompts that name the concept, followed by `word`."""

    title: ClassVar[str] = "SuffixedPrompts"
    source: ClassVar[str] = "a test"
    access: ClassVar[Any] = "queries"

    word: str = ""

    def search(self, scene: Any) -> Any:
        yield Round(
            scene.live,
            texts=[f"{scene.concept_prompts[i]} {self.word}" for i in scene.live.tolist()],
        )


def test_erase_with_objects(tmp_path: Path) -> None:
    content = short(training__steps=2, method=Half(factor=2.0))
    content["forget"] |= {"loss": Absolute(power=2.0)}
    run = concept_eraser.erase(**content, output=tmp_path / "run")
    assert len(logs.read(run.folder / "log.jsonl")) == 2
    text = (run.folder / "recipe.yaml").read_text()
    content_of_run = yaml.safe_load(text)
    assert content_of_run["method"] == {"name": f"a Half in memory ({__name__})", "factor": 2.0}
    assert content_of_run["forget"]["loss"] == {
        "name": f"a Absolute in memory ({__name__})",
        "power": 2.0,
    }
    # the recipe can be read, but not run by the name of its method
    recipe = recipes.load(str(run.folder / "recipe.yaml"))
    assert recipe.fingerprint == run.recipe.fingerprint
    assert suite_matching.suite_of(str(run.folder)) == "tiny_star"
    assert "a Half in memory" in card(run.folder)
    with pytest.raises(
        UserError,
        match=(
            r"the method was a Half in memory .*, which cannot be loaded by its name; "
            r"pass an object"
        ),
    ):
        concept_eraser.erase(str(run.folder / "recipe.yaml"), output=tmp_path / "other")
    with pytest.raises(UserError, match="finished run on an object in memory"):
        concept_eraser.erase(**content, output=tmp_path / "run")
    with pytest.raises(UserError, match=r"holds another run \(differs in method"):
        concept_eraser.erase(**{**content, "method": Half(factor=3.0)}, output=tmp_path / "run")


def test_a_recorded_loss_cannot_be_loaded(tmp_path: Path) -> None:
    content = short(training__steps=1)
    content["forget"] |= {"loss": f"a Absolute in memory ({__name__})"}
    with pytest.raises(
        UserError, match=r"the loss was a Absolute in memory .*, which cannot be loaded by its name"
    ):
        concept_eraser.erase(content, output=tmp_path / "run")


def test_an_object_does_what_its_name_does(tmp_path: Path) -> None:
    """An object of a class with a name is recorded by that name, and trains alike."""
    by_name = concept_eraser.erase(
        short(method={"name": "munba", "every": 2}, training__steps=2), output=tmp_path / "one"
    )
    method = Munba(every=2)
    by_object = concept_eraser.erase(
        short(method=method, training__steps=2), output=tmp_path / "two"
    )
    assert by_name.recipe.fingerprint == by_object.recipe.fingerprint
    assert not by_object.recipe.has_objects
    first, second = (logs.read(run.folder / "log.jsonl") for run in (by_name, by_object))
    assert [row["losses"] for row in first] == [row["losses"] for row in second]
    assert not method.state_dict()  # a run leaves no state in the object
    (name,) = {registry.read("method", replace(method)).name, registry.read("method", "munba").name}
    assert name == "munba"


def test_a_recipe_object_keeps_its_objects() -> None:
    """A recipe is dumped, changed and validated again by dry runs and by `erase(recipe)`."""
    recipe = recipes.load(short(method=Half(), forget__loss=Absolute(power=2.0)))
    again = recipes.load(recipe.model_dump(exclude_none=True), ["training.steps=7"])
    assert again.has_objects
    assert again.method.build() == Half()
    assert again.forget.loss.build() == Absolute(power=2.0)
    assert again.training.steps == 7
    assert "in memory" in recipe.model_dump_json()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": Half}, "method: expected an object, found the class Half; give Half(...)"),
        (
            {"method": 3},
            (
                "method: a method is a name, or an object derived from "
                "concept_eraser.methods.base.Method"
            ),
        ),
        (
            {"method": Absolute()},
            "derived from concept_eraser.methods.base.Method or concept_eraser.methods.base.Edit",
        ),
        (
            {"forget__loss": Half()},
            (
                "forget.loss: a loss is a name, or an object derived from "
                "concept_eraser.losses.base.Loss"
            ),
        ),
        (
            {"forget__loss": Absolute(), "target": "text_encoder"},
            "unknown loss of target 'text_encoder' 'a Absolute in memory",
        ),
    ],
)
def test_what_is_no_plugin_is_refused(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        recipes.load(short(**changes))


@dataclass(frozen=True)
class Named(Constant):
    """Its option hides the key of the plug-in."""

    name: str = "x"


@dataclass(frozen=True)
class Undefined(Constant):
    """An annotation that only a type checker knows."""

    weights: OnlyForTypeCheckers = ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Named(), "the class Named has an option `name`"),
        (Undefined(), "the class Undefined has an annotation with 'OnlyForTypeCheckers'"),
    ],
)
def test_a_class_whose_options_cannot_be_read_is_refused(
    value: Metric, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=words):
        registry.read("metric", value)
    with pytest.raises(UserError, match=words):
        suites.load({**SUITE, "metrics": [value]})
    monkeypatch.setattr(registry, "load", lambda kind, name: type(value))
    (mistake,) = registry.problems("metric", "accuracy", {})
    assert words in mistake


def test_evaluate_with_objects(shared_tiny: Any, tmp_path: Path) -> None:
    result = concept_eraser.evaluate(
        "tiny-sd",
        SUITE,
        before="tiny-sd",
        judge=Everything(),
        metrics=["concept_rate", Constant()],
        output=tmp_path,
    )
    assert result.find("concept_rate", "direct").after.value == 1
    assert result.find("constant", "direct").after.value == 1
    protocol = result.as_dict()["protocol"]
    assert protocol["judge"] == f"a Everything in memory ({__name__})"
    assert protocol["metrics"] == ["concept_rate", f"a Constant in memory ({__name__})"]
    assert result.judge == "everything"
    inside = concept_eraser.evaluate(
        "tiny-sd", {**SUITE, "judge": Everything(), "metrics": [Constant()]}, before="tiny-sd"
    )
    assert [one.metric for one in inside.results] == ["constant"]
    with pytest.raises(
        UserError, match=r"the judge was a Everything in memory .*, which cannot be loaded"
    ):
        suites.evaluate(
            shared_tiny, shared_tiny, suites.load({**SUITE, "judge": protocol["judge"]})
        )


def test_attack_with_objects(tmp_path: Path) -> None:
    campaign = concept_eraser.attack(
        "tiny-sd",
        SuffixedPrompts(word="now"),
        SUITE,
        hide="circle",
        n=4,
        before="tiny-sd",
        output=tmp_path,
    )
    assert campaign.protocol["attack"] == f"a SuffixedPrompts in memory ({__name__})"
    assert campaign.protocol["options"] == {"word": "now"}
    assert any(one.success and one.text and one.text.endswith("now") for one in campaign.attempts)
    with pytest.raises(UserError, match="another attack"):
        concept_eraser.attack(
            "tiny-sd",
            SuffixedPrompts(word="then"),
            SUITE,
            hide="circle",
            n=4,
            before="tiny-sd",
            output=tmp_path,
        )
    other = concept_eraser.attack(
        "tiny-sd", RandomTokens(k=2, tries=1), SUITE, n=2, before="tiny-sd"
    )
    assert other.protocol["attack"] == "random_tokens"
    assert other.protocol["options"] == {"k": 2, "where": "prefix", "tries": 1}
    with pytest.raises(
        UserError, match="an attack that is an object has its options in it, found also tries"
    ):
        concept_eraser.attack(
            "tiny-sd", SuffixedPrompts(), SUITE, options={"tries": 1}, before="tiny-sd"
        )


def test_a_histogram_by_a_judge_that_is_passed(tmp_path: Path) -> None:
    content = short(training__steps=1, training__batch_size=2, method="uno-hat")
    content["histogram"] = {"concept": {"shape": "star"}, "judge": Everything()}
    run = concept_eraser.erase(content, output=tmp_path / "run")
    assert run.recipe.histogram.judge == f"a Everything in memory ({__name__})"
    assert "histogram" in logs.read(run.folder / "log.jsonl")[0]["losses"]


# --- the laws -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims(Half):
    """The same mean, which declares a law that it breaks."""

    theorems: ClassVar[frozenset[str]] = frozenset({"scale_invariance"})


@dataclass(frozen=True)
class Unknown(Half):
    """The same mean with an unknown law."""

    theorems: ClassVar[frozenset[str]] = frozenset({"beauty"})


def test_the_law_helper_finds_what_does_not_hold() -> None:
    assert set(check_laws(Half())) == {"permutation", "zero_step", "shapes"}
    with pytest.raises(LawError, match="Claims, scale_invariance: Tensor-likes are not close"):
        check_laws(Claims())
    with pytest.raises(LawError, match="Unknown declares beauty; known laws: pareto_descent"):
        check_laws(Unknown())
    with pytest.raises(TypeError, match="expected a Method, found Absolute"):
        check_laws(Absolute())  # type: ignore[arg-type]


def test_the_law_helper_needs_no_pytest() -> None:
    code = "import sys, concept_eraser.methods.checks; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
