"""`erase --dry-run`: every recipe runs two steps offline, on its own model and data or on
replacements.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.cli.main import app
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import a_few, only
from concept_eraser.models import module
from concept_eraser.recipes import recipe
from concept_eraser.runs import disk_estimate, dry_run, memory_estimate
from concept_eraser.storage import manifest
from concept_eraser.utils import resources
from concept_eraser.utils.devices import find_gpu

NAMES = sorted(
    path.stem
    for path in resources.folder("pipelines").rglob("*")
    if path.suffix in (".yaml", ".yml")
)
AWAY = {
    "celeba_hq_munba",
    "cifar10_class_munba",
    "imagenette_class_munba",
    "pets_clip_munba",
    "svhn_class_munba",
}
# an edit of a classifier, which noise alone does not determine
FLAT = ["forget.loss=data", "method.damping=0.1"]


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_every_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, or the edit, on a few examples per objective and on replacements for models and
    data that are not on this machine.
    """
    monkeypatch.chdir(tmp_path)
    plan = dry_run.load(recipe.load(name))
    # a model on this machine runs at the recipe's own batch size, which is slow
    if not plan.reasons:
        plan = replace(plan, reasons=("as if",))
    assert dry_run.run(plan) > 0
    assert any("random images" in reason for reason in plan.reasons) == (name in AWAY)
    assert not list(tmp_path.iterdir())


def test_a_missing_model_is_replaced_and_its_weights_are_counted() -> None:
    result = CliRunner().invoke(
        app,
        [
            "erase",
            "sd14_nudity_munba",
            "--memory",
            "8gb",
            "--select",
            "cross_attention",
            "--dry-run",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "CompVis/stable-diffusion-v1-4 is not on this machine" in result.output
    assert "two steps of this recipe ran on the replacements" in result.output
    assert "of 859,520,964 weights" in result.output
    assert "memory (an estimate, not measured): " in result.output
    assert "checkpointing: true" in result.output
    assert ("  on a CPU up to half more" in result.output) is (find_gpu() is None)


def test_a_model_on_this_machine_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("concept_eraser").level
    few = ["training.batch_size=2", "generation.batch_size=2", "training.device=cpu"]
    result = CliRunner().invoke(app, ["erase", "tiny_star_munba", *few, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "for 100 steps + about" in result.output
    assert "the C library's heap" not in result.output, "it does not matter at this size"
    assert "for generating 800 images" in result.output
    assert not list(tmp_path.iterdir())
    assert logging.getLogger("concept_eraser").level == level, (
        "later warnings of the process are not muted"
    )
    assert (
        "time: not measured"
        in CliRunner()
        .invoke(app, ["erase", "tiny_star_munba", "--dry-run", "--no-two-steps"])
        .output
    )


def test_a_dry_run_has_no_steps_without_the_attack() -> None:
    """The first steps of a warm-up have no attack, so they say nothing about its seconds."""
    job = recipe.load("tiny_star_advunlearn")
    assert job.attack is not None
    assert job.attack.warmup > 2
    short = dry_run.shorten(dry_run.load(job))
    assert short.attack is not None
    assert short.attack.warmup == 0


def test_a_dry_run_reaches_a_milestone() -> None:
    """Milestones that all lie after its last step would be an error."""
    schedule = ["training.decay=step", "training.milestones=[50, 80]"]
    short = dry_run.shorten(dry_run.load(recipe.load("tiny_star_munba", schedule)))
    assert short.training.milestones == [1]
    assert short.training.steps == 2


def test_without_steps_no_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimates of a folder are those of the loaded model. Its files are checked as before."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(resources.tiny_weights() / "tiny-sd", folder)
    job = recipe.load("tiny_star_munba_lora", [f"model={folder}"])
    read_plan, unread_plan = dry_run.load(job), dry_run.load(job, two_steps=False)
    assert {p.device.type for p in unread_plan.model.denoiser.parameters()} == {"meta"}
    for saved in ("lora", "pipeline"):
        memory, disk = (
            [estimates.estimate(job, plan.model, saved=saved) for plan in (read_plan, unread_plan)]
            for estimates in (memory_estimate, disk_estimate)
        )
        assert memory[0] == memory[1]
        assert disk[0] == disk[1]

    small_plan = dry_run.load(job, two_steps=None)  # two steps take seconds here
    assert {p.device.type for p in small_plan.model.denoiser.parameters()} == {"cpu"}
    monkeypatch.setattr(dry_run, "SMALL", 0)
    monkeypatch.setattr(dry_run, "find_gpu", lambda: None)
    large_plan = dry_run.load(job, two_steps=None)
    assert {p.device.type for p in large_plan.model.denoiser.parameters()} == {"meta"}

    config = folder / "unet" / "config.json"
    manifest.write(
        folder, manifest.Manifest("model", {"unet/config.json": manifest.FileRecord.of(config)})
    )
    written = config.read_text()
    config.write_text(f"{written} ")
    with pytest.raises(UserError, match="is not what concept_eraser wrote"):
        dry_run.load(job, two_steps=False)
    (folder / manifest.MARK).unlink()
    config.write_text(written)

    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors.pop("conv_in.weight")
    save_file(tensors, weights)
    with pytest.raises(UserError, match=r"lacks weights: conv_in\.weight"):
        dry_run.load(job, two_steps=False)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged or truncated"):
        dry_run.load(job, two_steps=False)


def test_a_broken_recipe_is_found() -> None:
    job = recipe.load("sd14_nudity_munba", ["trainable.select=re:nothing_of_that_name"])
    plan = dry_run.load(job)
    with pytest.raises(UserError, match="matches none"):
        dry_run.run(plan)


@pytest.mark.parametrize("name", ["tiny_star_free", "sdxl_vangogh_esd"])
def test_data_free_objectives_are_estimated(name: str) -> None:
    result = CliRunner().invoke(app, ["erase", name, "--dry-run", "--no-two-steps"])
    assert result.exit_code == 0, result.output
    assert "memory (an estimate" in result.output


def test_a_dry_run_needs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concept_eraser.utils.distributed.alone", lambda: False)
    assert "run it without" in str(
        CliRunner().invoke(app, ["erase", "tiny_star_munba", "--dry-run"]).exception
    )


def test_a_setting_that_an_edit_does_not_use_is_an_error_without_two_steps() -> None:
    result = CliRunner().invoke(
        app, ["erase", "tiny_star_uce", "training.lr=1", "--dry-run", "--no-two-steps"]
    )
    assert "does not use training.lr" in str(result.exception)


def test_an_unknown_model_has_no_replacement() -> None:
    with pytest.raises(UserError, match="cannot load nobody/nothing"):
        dry_run.load(recipe.load("sd14_nudity_munba", ["model=nobody/nothing"]))


def test_a_damaged_model_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such classifier"):
        dry_run.load(recipe.load("digits_three_munba", [f"model={tmp_path}"]))


def test_missing_data_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random images replace the data, and the output says so; nothing is downloaded. A run raises
    the error of the data set.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "torchvision.datasets.CIFAR10.download", lambda self: pytest.fail("a dry run downloads")
    )
    result = CliRunner().invoke(
        app, ["erase", "cifar10_class_munba", "forget.options.download=true", "--dry-run"]
    )
    assert result.exit_code == 0, result.output
    assert (
        "CIFAR-10 is not on this machine (looked in data; a run downloads it); 20 random "
        "images of its shape stand in"
    ) in result.output
    assert "give no estimate of the time" in result.output
    assert "examples of" not in result.output
    assert "CPU threads" not in result.output
    (tmp_path / "net").mkdir()
    module.build("resnet18", "classifier", classes=10, width=2).save(tmp_path / "net")
    result_with_model = CliRunner().invoke(
        app, ["erase", "cifar10_class_munba", "model=net", "--dry-run"]
    )
    assert "trains 11,420 of 11,420 weights" in result_with_model.output, (
        "the model is here, and only the data are not"
    )
    assert "give no estimate of the time" in result_with_model.output
    assert "linear layer" not in result_with_model.output
    with pytest.raises(UserError, match=r"CIFAR-10 is not at .*give options"):
        concept_eraser.erase("cifar10_class_munba", model=tmp_path / "net", output=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cifar10_class_munba", ["forget.classes=[airplan]"], "did you mean 'airplane'"),
        ("svhn_class_munba", ["forget.classes=[10]"], "SVHN has classes 0 to 9, found 10"),
        ("imagenette_class_munba", ["forget.classes=[tenche]"], "did you mean 'tench'"),
        (
            "pets_clip_munba",
            ["forget.loss=anchor", "forget.anchor=Beagel"],
            "did you mean 'Beagle'",
        ),
        ("pets_clip_munba", ["templates=[a pet]"], "a template needs {}"),
        (
            "cifar10_class_munba",
            ["forget.classes=null", "forget.indices=[3, 50000]"],
            "has examples 0 to 49999",
        ),
        ("cifar10_class_munba", ["forget.indices=[50000]"], "not among them: 50000"),
        (
            "cifar10_class_munba",
            ["retain={data: cifar10}"],
            "both to be forgotten and to be retained",
        ),
        ("cifar10_class_munba", ["forget.options.rot=data"], "did you mean 'root'"),
        ("cifar10_class_munba", ["trainable.select=re:head"], "matches none"),
    ],
)
def test_mistakes_are_found_without_the_data(
    name: str, changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        dry_run.run(dry_run.load(recipe.load(name, changes)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # no airplanes, since the labels of the replacement repeat in order
        ("cifar10_class_munba", ["forget.indices=[3, 49999]"]),
        (
            "cifar10_class_munba",
            [
                "forget={data: cifar10, indices: [3], loss: relabel}",
                "retain={data: cifar10, classes: [cat]}",
            ],
        ),
        ("svhn_class_munba", ["forget.classes=null", "forget.share=0.1"]),
        ("celeba_hq_munba", ["forget.classes=[Anna, 400]"]),  # the user's own folders
        ("celeba_hq_munba", ["forget.classes=null", "forget.indices=[20000]"]),
        ("cifar10_class_munba", ["method=natural_gradient", *FLAT]),
    ],
)
def test_what_the_data_may_allow_is_no_mistake(
    name: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run.run(dry_run.load(recipe.load(name, changes))) > 0


def test_an_edit_runs_and_is_undone() -> None:
    plan = dry_run.load(recipe.load("tiny_star_uce"))
    before = {
        name: value.clone() for name, value in plan.model.parts["denoiser"].state_dict().items()
    }
    assert dry_run.describe(plan).startswith("time (the edit ran on ")
    assert all(
        torch.equal(value, before[name])
        for name, value in plan.model.parts["denoiser"].state_dict().items()
    )
    assert dry_run.image_count(plan.recipe) == 0


def test_numbers_that_an_edit_cannot_take_are_no_mistake_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that fails on random images is a message. On real data it is an error, as wrong
    settings of the recipe always are.
    """
    monkeypatch.chdir(tmp_path)
    plan = dry_run.load(recipe.load("cifar10_class_munba", ["method=ssd", "forget.loss=data"]))
    assert "says little of the true ones: alpha 10 selects no weight" in dry_run.describe(plan)
    with pytest.raises(UserError, match="alpha 10 selects no weight"):
        dry_run.describe(replace(plan, reasons=()))
    with pytest.raises(UserError, match=r"does not use forget\.loss"):
        dry_run.describe(dry_run.load(recipe.load("cifar10_class_munba", ["method=ssd"])))


def test_an_edit_of_many_examples_runs_only_on_request() -> None:
    many = Labelled(
        torch.zeros(10**6, dtype=torch.long), ("a",), lambda rows: torch.zeros(len(rows), 2), "many"
    )
    linear = module.Module(torch.nn.Linear(10, 100), "classifier", "a test")
    job = recipe.load("digits_three_munba", ["method=ssd", "forget.loss=data"])
    assert not dry_run.worth_trying(dry_run.DryRunPlan(job, linear, {"forget": many}))
    assert dry_run.worth_trying(dry_run.DryRunPlan(job, linear, {"forget": only(many, range(100))}))


def test_replacements_are_deterministic_and_have_the_facts_of_the_data_set() -> None:
    """The class lists are those of torchvision where it has them. Every data set that may be
    missing describes its images.
    """
    for name in registry.names("dataset"):
        plugin = registry.build("dataset", name, {})
        assert hasattr(plugin, "known_facts") == hasattr(plugin, "root"), name
    pets = registry.build("dataset", "oxford_pets", {"size": 32}).known_facts()
    data = pets.examples("pets")
    assert (len(data), len(set(data.names)), data.names[0], data.names[-1]) == (
        3680,
        37,
        "Abyssinian",
        "Yorkshire Terrier",
    )
    assert data.inputs([5, 9]).shape == (2, 3, 32, 32)
    assert torch.equal(data.inputs([5, 9])[1], only(data, [4, 9]).inputs([1])[0])
    assert data.inputs([0]).min() >= -1
    assert data.inputs([0]).std() > 0.5
    assert registry.build("dataset", "imagenette", {}).known_facts().names[1] == "English springer"
    assert a_few(data, torch.tensor([0, 37, 74, 1]), 2) == [0, 1, 37]


def test_images_of_a_text_encoders_objectives_are_those_of_the_denoiser() -> None:
    counts = {"forget.n": 30, "retain.n": 50, "attack.n": 7}
    changes = [f"{key}={value}" for key, value in counts.items()]
    assert dry_run.image_count(recipe.load("tiny_star_advunlearn", changes)) == 30 + 50 + 7
    assert dry_run.image_count(recipe.load("tiny_star_advunlearn_short", changes)) == 30 + 7
    assert dry_run.image_count(recipe.load("tiny_star_text_encoder", changes[:2])) == 0
    npo = recipe.load("tiny_star_text_encoder", [*changes[:2], "forget.loss=npo"])
    assert dry_run.image_count(npo) == 30


def test_the_memory_of_an_attack_on_a_text_encoder_counts_the_denoisers_pass() -> None:
    """The loss of the attack goes through the denoiser whatever the forget loss is, and needs
    images.
    """
    quiet = recipe.load("tiny_star_text_encoder", ["method=weighted"])
    loud = recipe.load("tiny_star_text_encoder", ["method=adversarial", "attack={}"])
    through = recipe.load(
        "tiny_star_text_encoder", ["method=weighted", "forget.loss=data", "training.batch_size=32"]
    )
    one, two, three = (
        memory_estimate.estimate(r, concept_eraser.load("tiny-sd"), gpu=False).training
        for r in (quiet, loud, through)
    )
    assert two > three > 1.5 * one
