"""`erase --forget ... --anchor ...`: its default settings, and that flags and overrides win over
them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.concepts.plan import make_plan
from concept_eraser.models import base
from concept_eraser.recipes import defaults, recipe
from concept_eraser.storage import base_model
from concept_eraser.targets import cross_attention_edit
from concept_eraser.utils import resources

# the package has a function of that name
module = importlib.import_module("concept_eraser.cli.erase")
FLAGS = ("--forget", "tiny_star", "--anchor", "shape=circle", "--retain", "tiny_rest")


@pytest.fixture
def resolve_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., recipe.Recipe]:
    """A function from a command line to its recipe; nothing runs.

    The measured recipes train in fp32, as the default does on a CPU without bf16 instructions.
    """
    monkeypatch.setattr(base, "trains_faster_in_bf16", lambda: False)
    recipes: list[recipe.Recipe] = []
    monkeypatch.setattr(
        module,
        "run",
        lambda start, overrides, *_, **__: recipes.append(recipe.load(start, overrides)),
    )

    def of(*arguments: str) -> recipe.Recipe:
        result = CliRunner().invoke(app, ["erase", *arguments])
        assert result.exit_code == 0, result.output
        return recipes[-1]

    return of


def test_the_default_is_the_recipe_that_is_measured(resolve_recipe) -> None:
    mine, reference = (
        resolve_recipe(*FLAGS).resolved(),
        recipe.load("tiny_star_munba_lora").resolved(),
    )
    assert mine == reference


def test_all_weights_then_the_closed_form_is_one_word_away(resolve_recipe) -> None:
    mine, reference = (
        resolve_recipe(*FLAGS, "--select", "all").resolved(),
        recipe.load("tiny_star_munba_uce").resolved(),
    )
    assert mine == reference
    assert resolve_recipe(*FLAGS, "trainable.lora=null").resolved() == reference


def test_a_lora_where_it_is_measured_and_with_its_settings(resolve_recipe) -> None:
    default = {"rank": 64, "alpha": 64.0, "conv": True}
    for more, expected in {
        (): default,
        ("--lora", "16"): {"rank": 16, "alpha": 16.0, "conv": True},
        ("trainable.lora=16",): {"rank": 16, "alpha": 16.0, "conv": True},
        ("trainable.lora.conv=false",): {**default, "conv": False},
        ("trainable.lora.alpha=1",): {**default, "alpha": 1.0},
        ("finish=uce",): default,
        ("forget.images=free",): default,
        ("--select", "cross_attention", "--lora", "4"): {"rank": 4, "alpha": 4.0, "conv": False},
        ("--select", "all", "--lora", "64"): default,
        ("--select", "blocks", "--lora", "64"): default,
        ("--select", "blocks"): None,
        ("trainable={select: all, lora: {rank: 64, conv: true}}",): default,
        ("trainable.lora=true",): default,
        ("trainable.batchnorm=frozen",): default,
        ("trainable.lora=none",): None,
        ("trainable.lora=false",): None,
        ("retain.elastic={weight: 1.0}",): None,
        ("trainable.reinitialise=0.1",): None,
        ("--select", "cross_attention"): None,
        ("--method", "weighted"): None,
        ("--loss", "esd"): None,
        ("trainable.saliency=0.5",): None,
        ("target=text_encoder",): None,
    }.items():
        assert resolve_recipe(*FLAGS, *more).resolved()["trainable"].get("lora") == expected, more


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), None),
        (("--lora", "4"), None),
        (("--select", "all"), "uce"),
        (("--select", "cross_attention"), "uce"),
        (("--select", "all_but_cross_attention"), None),
        (("--loss", "esd"), None),
        (("--method", "weighted"), None),
        (("method=ga",), None),
        (("trainable.saliency=0.5",), None),
        (("finish.lamb=0.1",), "uce"),
        (("finish=none",), None),
        (("finish=rece",), "rece"),
        (("finish=null",), None),
    ],
)
def test_the_closed_form_follows_where_it_can(
    more: tuple[str, ...], expected: str | None, resolve_recipe
) -> None:
    finish = resolve_recipe(*FLAGS, *more).finish
    assert (finish and finish.name) == expected


def test_a_flag_wins_over_a_default(resolve_recipe) -> None:
    job = resolve_recipe(*FLAGS, "--lr", "3e-5", "--steps", "7", "retain.loss=data")
    assert (job.training.lr, job.training.steps, job.retain.loss) == (3e-5, 7, "data")  # type: ignore[union-attr]


def test_the_unconditional_prediction_is_preserved_where_it_is_measured(resolve_recipe) -> None:
    """With the anchor loss and MUNBa. A text encoder has no such setting, and other methods have no
    such default.
    """
    cases = {
        (): 0.25,
        ("--loss", "anchor"): 0.25,
        ("forget.empty_prompts=0.1",): 0.1,
        ("finish=none",): 0.25,
        ("--loss", "relabel"): 0.0,
        ("--method", "weighted"): 0.0,
        ("target=text_encoder",): 0.0,
        ("--select", "cross_attention"): 0.0,
        ("--select", "all"): 0.25,
        ("--lora", "4"): 0.25,
        ("trainable.lora.conv=false",): 0.0,
        ("--select", "all", "--lora", "4"): 0.25,
        ("--select", "cross_attention", "--lora", "4"): 0.0,
        ("--select", "blocks", "--lora", "4"): 0.25,
        ("--select", "blocks"): 0.0,
        ("forget.images=free",): 0.0,
        ("forget.teacher=current",): 0.0,
        ("model=black-forest-labs/FLUX.1-dev",): 0.0,
    }
    for more, share in cases.items():
        assert [
            objective.empty_prompts for objective in resolve_recipe(*FLAGS, *more).forgotten
        ] == [share], more


def test_settings_of_one_concept_are_for_that_one(resolve_recipe) -> None:
    two = (
        "--forget",
        "tiny_star",
        "--anchor",
        "shape=circle",
        "--forget",
        "tiny_moon",
        "--anchor",
        "shape=cross",
        "--retain",
        "tiny_five_rest",
    )
    for more, losses, shares in (
        (("forget.2.loss=esd",), ["anchor", "esd"], [0.25, 0.0]),
        (("forget.1.empty_prompts=0",), ["anchor", "anchor"], [0.0, 0.25]),
        (("forget.empty_prompts=0.1",), ["anchor", "anchor"], [0.1, 0.1]),
    ):
        objectives = resolve_recipe(*two, *more).forgotten
        assert (
            [objective.loss for objective in objectives],
            [objective.empty_prompts for objective in objectives],
        ) == (
            losses,
            shares,
        ), more


def test_without_an_anchor_it_is_esd(resolve_recipe) -> None:
    job = resolve_recipe("--forget", "tiny_star", "--retain", "tiny_rest")
    assert (job.forgotten[0].loss, job.finish) == ("esd", None)


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "--forget",
            "tiny_star",
            "forget=[{prompts: tiny_star, anchor: {shape: circle}}, {prompts: tiny_moon}]",
        ),
        (
            "--forget",
            "tiny_star",
            "--forget",
            "tiny_moon",
            "--anchor",
            "a circle",
            "forget.2.loss=esd",
        ),
    ],
)
def test_where_only_some_concepts_show_an_anchor_all_weights_are_trained(
    arguments: tuple[str, ...], resolve_recipe
) -> None:
    job = resolve_recipe(*arguments, "--retain", "tiny_five_rest")
    assert (job.trainable.select, job.trainable.lora, job.finish) == ("all", None, None)


def test_several_concepts_have_the_default_each(resolve_recipe) -> None:
    job = resolve_recipe(
        "--forget",
        "tiny_star",
        "--anchor",
        "shape=circle",
        "--forget",
        "tiny_moon",
        "--anchor",
        "shape=cross",
        "--retain",
        "tiny_five_rest",
    )
    assert [(objective.loss, objective.empty_prompts) for objective in job.forgotten] == [
        ("anchor", 0.25),
        ("anchor", 0.25),
    ]
    assert job.trainable.lora.rank == 64  # type: ignore[union-attr]


def test_a_models_family_is_read_from_its_folder(tmp_path: Path) -> None:
    for name, family in (
        ("StableDiffusionXLPipeline", "sdxl"),
        ("FluxPipeline", "flux"),
        ("Another", None),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert defaults.family_of(str(tmp_path)) == family
        assert defaults.family_of(f"some.safetensors@{tmp_path}") == family
    assert defaults.family_of("tiny-sd") == "sd"
    assert defaults.family_of("CompVis/stable-diffusion-v1-4") == "sd"
    assert defaults.family_of("nobody/knows") is None
    assert (resources.tiny_weights() / "tiny-sd" / "model_index.json").is_file()


def test_an_edit_gets_only_settings_that_it_uses(resolve_recipe) -> None:
    job = resolve_recipe(*FLAGS, "--method", "uce")
    cross_attention_edit.refuse_ignored(job)
    assert job.trainable.select == "cross_attention_kv"


@pytest.mark.parametrize(
    "flags",
    [
        ("--forget", "tiny_star", "--anchor", "shape=circle", "retain.prompts=tiny_rest"),
        ("--forget", "tiny_star", "forget.anchor.shape=circle", "retain=tiny_rest"),
        (
            "--forget",
            "tiny_star",
            "forget.anchor={shape: circle}",
            "retain=tiny_rest",
            "model=tiny-sd",
        ),
    ],
)
def test_equivalent_flags_and_overrides_give_one_recipe(
    flags: tuple[str, ...], resolve_recipe
) -> None:
    assert resolve_recipe(*flags).resolved() == resolve_recipe(*FLAGS).resolved()


def test_a_model_given_as_an_override_is_not_the_bundled_one(
    resolve_recipe, tmp_path: Path
) -> None:
    for way in (("--model", str(tmp_path)), (f"model={tmp_path}",)):
        assert resolve_recipe(*FLAGS, *way).training.lr == 1e-4
        assert resolve_recipe(*FLAGS, *way, "--select", "all").training.lr == 1e-5


def test_a_run_that_began_with_the_bundled_model_has_its_settings(
    resolve_recipe, tmp_path: Path
) -> None:
    """A second concept is erased from the result of the first one."""
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for folder, model in ((first, "tiny-sd"), (second, first), (other, tmp_path / "sd15")):
        folder.mkdir()
        (folder / "recipe.yaml").write_text(f"model: {model}\n")
    own = resolve_recipe(*FLAGS)
    for folder in (first, second):
        recipe = resolve_recipe(*FLAGS, "--model", str(folder))
        assert recipe.training == own.training
        assert recipe.generation == own.generation
    assert resolve_recipe(*FLAGS, "--model", str(other)).training.lr == 1e-4
    (first / "recipe.yaml").write_text(f"model: {second}\n")  # a circle ends
    assert not base_model.is_bundled(str(second))


def test_controls_and_the_folder_of_the_bundled_model_have_its_settings(
    resolve_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = resolve_recipe(*FLAGS)
    folder = resources.tiny_weights() / "tiny-sd"
    monkeypatch.chdir(folder.parent)
    for model in ("tiny-sd-without-star", str(folder), "./tiny-sd", "lora.safetensors@tiny-sd"):
        assert base_model.is_bundled(model)
        recipe = resolve_recipe(*FLAGS, "--model", model)
        assert recipe.training == own.training
        assert (recipe.generation, recipe.finish) == (own.generation, own.finish)
        plan = make_plan(["fish"], model=model)
        assert plan.concepts[0].suite["judge"] == make_plan(["fish"]).concepts[0].suite["judge"]
    assert not base_model.is_bundled("lora.safetensors@me/mine")


def test_a_model_in_the_hubs_cache_has_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--mine" / "refs").mkdir()
    (tmp_path / "models--me--mine" / "refs" / "main").write_text("abc")
    (snapshot / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline"})
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert defaults.family_of("me/mine") == "sd"


@pytest.mark.parametrize("wrong", ["retain=[a", "forget={x", "method={name: uce"])
def test_a_value_that_is_no_yaml_is_an_error(wrong: str) -> None:
    with pytest.raises(UserError, match="its value is no valid YAML"):
        defaults.complete(["forget=tiny_star", wrong])


def test_a_damaged_index_names_no_family(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "model_index.json").write_text(text)
        assert defaults.family_of(str(tmp_path)) is None


def test_rates_for_the_bundled_model_are_not_taken_for_others() -> None:
    overrides = [
        "model=runwayml/some",
        "forget=tiny_star",
        "forget.anchor=a circle",
        "retain=tiny_rest",
    ]
    all_overrides = defaults.complete(overrides)
    assert f"training.lr={defaults.LORA_OTHERS}" in all_overrides
    assert not any(one.startswith("generation") for one in all_overrides)


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_bundled_model_is_trained_in_bf16_where_that_is_faster(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only by the default method. The user's setting comes later, so that it has precedence."""
    monkeypatch.setattr(base, "trains_faster_in_bf16", lambda: is_faster)
    flags = ["forget=tiny_star", "forget.anchor.shape=circle", "retain=tiny_rest"]
    bf16, fp32 = "training.precision=bf16", "training.precision=fp32"
    assert (bf16 in defaults.complete(flags)) == is_faster
    assert bf16 not in defaults.complete([*flags, "method=uno"])
    assert bf16 not in defaults.complete(["model=runwayml/some", *flags])
    overrides = defaults.complete([*flags, fp32])
    assert recipe.load({}, overrides).training.precision == "fp32"


@pytest.mark.parametrize(
    ("recipe_", "changes", "name"),
    [
        ("pipelines/tiny_star.yaml", [], "tiny_star"),
        ("pipelines/tiny_star.yaml", ["training.seed=1"], "tiny_star-abcdefgh"),
        ("runs/first/recipe.yaml", [], "first"),  # the same run continues
        # another recipe gets another folder
        ("runs/first/recipe.yaml", ["training.seed=1"], "first-abcdefgh"),
        ("recipe.yaml", [], "here"),  # from inside its folder
        ({}, ["forget.prompts=tiny_star"], "abcdefgh"),
    ],
)
def test_a_run_has_a_folder_of_its_own(
    recipe_: str | dict,
    changes: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job = type("Resolved", (), {"fingerprint": "abcdefghijkl"})
    assert module._default_name(recipe_, changes, job) == name


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (FLAGS, 2e-3),
        ((*FLAGS, "--select", "all"), 8e-4),
        ((*FLAGS, "--select", "cross_attention", "--lora", "4"), 2e-3),
        ((*FLAGS, "--model", "nobody/some", "--select", "cross_attention", "--lora", "4"), 1e-4),
        ((*FLAGS, "--model", "nobody/some", "--method", "weighted"), 1e-5),
        ((*FLAGS[:2], *FLAGS[4:], "--lora", "4"), 1e-4),
        ((*FLAGS[:2], *FLAGS[4:]), 1e-4),  # no anchor: ESD's loss
        ((*FLAGS, "--method", "weighted"), 1e-4),  # not MUNBa
        ((*FLAGS, "--lr", "3e-5"), 3e-5),
    ],
)
def test_the_measured_rate_is_that_of_the_measured_recipe_alone(
    resolve_recipe, flags: tuple[str, ...], rate: float
) -> None:
    assert resolve_recipe(*flags).training.lr == rate
