"""What a run writes of its weights (`save`), and that every command reads each kind of run."""

from __future__ import annotations

import copy
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError, api
from concept_eraser.cli import dry_run
from concept_eraser.cli.main import app
from concept_eraser.models import loading
from concept_eraser.models.base import Model
from concept_eraser.models.run_base import RunBase
from concept_eraser.models.stored_parts import weight_files
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import disk_estimate
from concept_eraser.storage import manifest, writers
from concept_eraser.storage.digests import file_digest
from concept_eraser.storage.readers import read_tensor_types
from concept_eraser.utils import resources
from tests.conftest import LABELLED, short

TINY = resources.tiny_weights() / "tiny-sd"
KINDS = ("lora", "changed", "pipeline")


def lora_recipe(**changes: Any) -> dict[str, Any]:
    trainable = {"select": "cross_attention_kv", "lora": {"rank": 2, "alpha": 4}}
    few = {"forget__n": 2, "retain__n": 2, "training__steps": 1, "training__lr": 0.05}
    return short(**{"trainable": trainable, **few, **changes})


def same(one: Model, other: Model) -> bool:
    return all(
        torch.equal(value, other.parts[part].state_dict()[name])
        for part, module in one.parts.items()
        for name, value in module.state_dict().items()
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fp16 in a folder of its own."""
    return Path(shutil.copytree(TINY, tmp_path_factory.mktemp("checkpoint") / "tiny"))


@pytest.fixture(scope="module")
def runs(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One LoRA run for each kind."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        kind: concept_eraser.erase(
            lora_recipe(model=str(original)),
            save=None if kind == "lora" else kind,
            output=folder / kind,
        )
        for kind in KINDS
    }


@pytest.fixture
def lora_run(runs: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the run with its LoRA alone, which a test may change."""
    return Path(shutil.copytree(runs["lora"].folder, tmp_path / "run"))


@pytest.fixture
def no_original(original: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the original, which is moved for the length of a test."""
    place = original.with_name("moved")
    original.rename(place)
    yield place
    place.rename(original)


def test_a_lora_run_writes_the_lora_alone(runs: dict[str, Any]) -> None:
    folders = {kind: run.folder for kind, run in runs.items()}
    content = {
        kind: {
            name
            for name in ("lora", "weights.safetensors", "pipeline", "base.json")
            if (folder / name).exists()
        }
        for kind, folder in folders.items()
    }
    assert content == {
        "lora": {"lora", "base.json"},
        "changed": {"lora", "weights.safetensors", "base.json"},
        "pipeline": {"lora", "weights.safetensors", "pipeline"},
    }
    assert size_of(folders["lora"]) < size_of(folders["pipeline"]) / 20
    assert len({run.recipe.fingerprint for run in runs.values()}) == 1, "the same job"
    assert {state.state for state in manifest.verify(folders["lora"])} == {"intact"}


def test_each_kind_of_run_is_the_trained_model_bit_for_bit(runs: dict[str, Any]) -> None:
    expected = runs["lora"].load()
    for run in runs.values():
        assert same(run.load(), expected)
        loaded_model = api.load(run.folder)
        assert same(loaded_model, expected)
        assert loaded_model.source == str(run.folder)
    assert not same(api.load("tiny-sd"), expected)


def test_the_pipeline_has_the_precision_of_the_checkpoint(
    runs: dict[str, Any], original: Path
) -> None:
    """The trained part is rounded to fp16, and the others are copies of their files."""
    folder = runs["pipeline"].folder / "pipeline"
    for part in ("vae", "text_encoder"):
        for path in (original / part).iterdir():
            assert file_digest(folder / part / path.name) == file_digest(path)
    file = weight_files(folder / "unet")[0]
    assert set(read_tensor_types(file).values()) == {"F16"}
    done = json.loads((runs["pipeline"].folder / "done.json").read_text())
    assert 0 < done["rounding"] < 0.1
    assert "rounding" not in json.loads((runs["lora"].folder / "done.json").read_text())
    trained = runs["pipeline"].load().denoiser.state_dict()
    for name, value in load_file(file).items():
        assert torch.equal(value, trained[name].half())


def test_the_original_of_a_lora_run_is_read_once(
    runs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring and exporting need the original and the erased model, which is its copy."""
    names = []
    read = loading._from_folder

    def count(path: Path, name: str, *rest: Any) -> Any:
        names.append(name)
        return read(path, name, *rest)

    monkeypatch.setattr(loading, "_from_folder", count)
    original, erased = api._pair(runs["lora"].folder, None, False, None)
    assert len(names) == 1
    assert erased.denoiser is not original.denoiser
    alone = loading.load(runs["lora"].folder)
    for part, module in erased.parts.items():
        for name, value in module.state_dict().items():
            assert torch.equal(value, alone.parts[part].state_dict()[name])
    assert not all(
        torch.equal(value, erased.denoiser.state_dict()[name])
        for name, value in original.denoiser.state_dict().items()
    )
    names.clear()
    concept_eraser.export(runs["lora"].folder, "tensors", output=tmp_path / "t.safetensors")
    assert len(names) == 1


def test_a_lora_run_is_exported_without_the_weights_of_its_original(
    runs: dict[str, Any], original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is that of the comparison with the original, byte for byte."""
    folder = runs["lora"].folder
    options = {"strength": 0.5, "rank": 1, "max_error": 0.9}
    expected = concept_eraser.export(
        folder, "kohya", before=str(original), output=tmp_path / "expected.safetensors", **options
    )
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_from_folder", lambda *_: pytest.fail("weights are loaded"))
        result = concept_eraser.export(
            folder, "kohya", output=tmp_path / "expected" / "expected.safetensors", **options
        )
        outline = loading.outline(str(original))
    assert result.path.read_bytes() == expected.path.read_bytes()
    assert (result.rank, result.error) == (expected.rank, expected.error)
    assert {value.device.type for value in outline.denoiser.state_dict().values()} == {"meta"}
    assert loading.outline("no such model") is None


@pytest.mark.parametrize("kind", ["lora", "changed"])
def test_an_erased_model_beside_its_original_takes_the_bytes_of_its_change(
    kind: str, runs: dict[str, Any], original: Path
) -> None:
    model = loading.load(original)
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    erased = loading.beside(runs[kind].folder, model)
    assert same(erased, runs[kind].load())
    assert erased.words.tokenizer is model.words.tokenizer, "a copy would decode in another way"
    storages = [
        {
            value.data_ptr(): value.nbytes
            for part in one.parts.values()
            for value in part.parameters()
        }
        for one in (model, erased)
    ]
    own_bytes = sum(size for place, size in storages[1].items() if place not in storages[0])
    changed = load_file(runs["changed"].folder / "weights.safetensors")
    assert own_bytes == sum(value.nbytes for value in changed.values())
    for name, value in model.denoiser.state_dict().items():
        assert torch.equal(value, before[name]), "the original does not change"
    assert loading.beside(runs[kind].folder, erased) is None, "another original"


def test_every_command_takes_a_lora_run(runs: dict[str, Any], tmp_path: Path) -> None:
    """Measuring, attacking, exporting and publishing a LoRA run are those of its pipeline."""
    folders = {
        kind: Path(shutil.copytree(runs[kind].folder, tmp_path / kind))
        for kind in ("lora", "pipeline")
    }
    suite = {
        "judge": "tiny",
        "concept": {"shape": "star"},
        "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 2}},
        "metrics": ["concept_rate"],
        "sampling": {"steps": 8},
    }
    rates = [
        concept_eraser.evaluate(folder, suite, output=folder).find("concept_rate", "direct")
        for folder in folders.values()
    ]
    assert rates[0].after == rates[1].after
    campaigns = [
        concept_eraser.attack(
            folder,
            "random_tokens",
            suite=suite,
            n=2,
            hide="shape",
            options={"tries": 1},
            output=folder / "a",
        )
        for folder in folders.values()
    ]
    assert campaigns[0].rates()["asr"] == campaigns[1].rates()["asr"]
    assert not all(attempt.pre for attempt in campaigns[0].attempts), "there is a search"
    lora = folders["lora"]
    assert concept_eraser.report(lora, tmp_path / "page.html").is_file()
    exports = [concept_eraser.export(folder, "diffusers").path for folder in folders.values()]
    for part in ("unet", "vae", "text_encoder"):
        places = [*exports, folders["pipeline"] / "pipeline"]
        assert len({file_digest(weight_files(place / part)[0]) for place in places}) == 1
    for kind in ("lora", "kohya", "tensors", "single-file"):
        files = [concept_eraser.export(folder, kind).path for folder in folders.values()]
        assert load_file(files[0]).keys() == load_file(files[1]).keys()
        for name, value in load_file(files[0]).items():
            assert torch.equal(value, load_file(files[1])[name])
    merged = concept_eraser.merge(lora, output=tmp_path / "merged")
    assert same(loading.load(merged.path), loading.load(exports[0]))
    for words, message in (
        (("generate", str(lora), "-p", "a red star", "-n", "1", "--steps", "1"), "1 images"),
        (("verify", str(lora)), "files are as"),
        (("card", str(lora)), "load_lora_weights"),
        (("push", str(lora), "me/x", "--as", "both", "--dry-run"), "unet/diffusion_pytorch_model"),
    ):
        extra = ("-o", str(tmp_path / "images")) if words[0] == "generate" else ()
        result = CliRunner().invoke(app, [*words, *extra])
        assert result.exit_code == 0, result.output
        assert message in result.output
    again = concept_eraser.erase(lora_recipe(model=str(lora)), output=tmp_path / "again")
    assert same(api.load(again.folder), again.load()), "a run that began with such a run"
    assert api.load(again.folder).source == str(again.folder)


def test_a_lora_run_is_uploaded_as_its_lora(lora_run: Path) -> None:
    plan = concept_eraser.push_to_hub(lora_run, "me/no-star", dry_run=True)
    names = {upload.name for upload in plan.uploads}
    assert "pytorch_lora_weights.safetensors" in names
    assert "model_index.json" not in names
    assert "The whole pipeline" not in plan.card
    with pytest.raises(UserError, match=r"export .* --to diffusers"):
        concept_eraser.push_to_hub(lora_run, "me/no-star", kind="pipeline", dry_run=True)


def test_a_missing_original_is_named(
    runs: dict[str, Any], original: Path, no_original: Path
) -> None:
    run = runs["lora"]
    with pytest.raises(UserError, match=r"holds only its change of .*--before") as caught:
        api.load(run.folder)
    assert str(original) in str(caught.value)
    assert same(api.load(run.folder, base=no_original), run.load())
    in_memory = loading.load(no_original)
    assert same(api.load(run.folder, base=in_memory), run.load())
    assert same(in_memory, loading.load(no_original)), "the caller's own does not change"
    pipeline_run = runs["pipeline"]
    assert same(api.load(pipeline_run.folder), run.load()), "a pipeline needs no original"


def test_another_original_is_refused(lora_run: Path, runs: dict[str, Any], tmp_path: Path) -> None:
    """One weight decides, in a part that was not trained, too; another precision does not."""
    other = Path(shutil.copytree(TINY, tmp_path / "other"))
    content = json.loads((lora_run / "base.json").read_text())
    (lora_run / "base.json").write_text(json.dumps({**content, "model": str(other)}))
    with pytest.raises(UserError, match="is not what concept_eraser wrote"):
        api.load(lora_run)
    assert CliRunner().invoke(app, ["verify", str(lora_run), "--accept"]).exit_code == 0
    assert same(api.load(lora_run), runs["lora"].load())
    file = weight_files(other / "vae")[0]
    tensors = load_file(file)
    save_file({name: value.float() for name, value in tensors.items()}, file, {"format": "pt"})
    assert same(api.load(lora_run), runs["lora"].load())
    name = next(iter(tensors))
    tensors[name].flatten()[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"other weights in vae.*--before"):
        api.load(lora_run)


def test_two_runs_that_name_each_other_are_refused(lora_run: Path) -> None:
    content = json.loads((lora_run / "base.json").read_text())
    writers.write_json(lora_run / "base.json", {**content, "model": str(lora_run)})
    with pytest.raises(UserError, match="each made from another"):
        api.load(lora_run)
    writers.write_json(lora_run / "base.json", {"model": 3})
    with pytest.raises(UserError, match="is damaged"):
        api.load(lora_run)


def test_a_finished_run_without_its_pipeline_says_how_to_write_it(runs: dict[str, Any]) -> None:
    run = runs["lora"]
    again = concept_eraser.erase(str(run.folder / "recipe.yaml"), output=run.folder)
    assert again.model is None
    with pytest.raises(UserError, match=r"export .* --to diffusers"):
        concept_eraser.erase(str(run.folder / "recipe.yaml"), save="pipeline", output=run.folder)
    with pytest.raises(UserError, match=r"export .* --to tensors"):
        concept_eraser.erase(str(run.folder / "recipe.yaml"), save="changed", output=run.folder)


def test_a_model_in_memory_gets_its_pipeline(tiny: Any, tmp_path: Path) -> None:
    """The run folder cannot name it, unless the caller asks for the LoRA alone."""
    content = lora_recipe()
    del content["model"]
    run = concept_eraser.erase(**content, model=tiny, output=tmp_path / "run")
    assert (run.folder / "pipeline").is_dir()
    recipe = recipes.load(lora_recipe())
    assert recipe.weights_to_save() == "lora"
    assert recipe.weights_to_save(has_name=False) == "pipeline"
    assert recipes.load(lora_recipe(save="lora")).weights_to_save(has_name=False) == "lora"
    assert recipes.load(short()).weights_to_save() == "pipeline"


def test_a_second_run_in_memory_has_the_first_as_its_original(tmp_path: Path) -> None:
    first = concept_eraser.erase(lora_recipe(), output=tmp_path / "first")
    model = first.load()
    assert model.source == str(first.folder)
    content = lora_recipe(save="lora")
    del content["model"]
    second = concept_eraser.erase(**content, model=model, output=tmp_path / "second")
    assert second.recipe.model == str(first.folder)
    assert same(api.load(second.recipe.model), api.load(first.folder))
    assert same(api.load(second.folder), model)
    assert model.source == str(second.folder)
    model = api.load(second.folder, guard="negative:a star")
    run = concept_eraser.erase(lora_recipe(), model=model, output=tmp_path / "third")
    assert model.source == f"{run.folder} under negative:a star"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save": "lora"}, "needs a LoRA"),
        ({"save": "all"}, "lora.*changed.*pipeline"),
        ({"save": "lora", "trainable": {"lora": 2}, "finish": "uce"}, "no LoRA to write"),
        ({**LABELLED, "save": "lora"}, "leaves out the pipeline.*found target 'classifier'"),
        ({**LABELLED, "save": "changed"}, "leaves out the pipeline.*found target 'classifier'"),
    ],
)
def test_a_recipe_saves_what_it_makes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipes.load(short(**copy.deepcopy(changes)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_of_the_disk_space_is_close(
    kind: str, runs: dict[str, Any], original: Path
) -> None:
    """Large files are within 2 % of the estimate; all others are less than its rest."""
    run = runs[kind]
    estimate = disk_estimate.estimate(run.recipe, loading.load(original), kind)
    names = {name for name in estimate.files if name != "other files"}
    assert (
        names
        == {
            "lora": {"lora/"},
            "changed": {"lora/", "weights.safetensors"},
            "pipeline": {"lora/", "weights.safetensors", "pipeline/"},
        }[kind]
    )
    for name in names:
        place = run.folder / name
        files = list(place.rglob("*.safetensors")) if place.is_dir() else [place]
        size = sum(path.stat().st_size for path in files)
        header = 60_000  # names and shapes of the tensors
        assert abs(size - estimate.files[name]) <= 0.02 * size + header
    assert size_of(run.folder) <= estimate.bytes
    assert estimate.states > 0


def test_too_little_space_is_an_error_before_the_work(
    shared_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk_estimate.shutil, "disk_usage", lambda _: usage(0, 0, 6_000_000))
    content = lora_recipe(save="pipeline")
    with pytest.raises(UserError) as caught:
        concept_eraser.erase(content, output=tmp_path / "new" / "run")
    message = str(caught.value)
    for part in ("on the disk", "6.0 MB are free", str(tmp_path), "--output", "--save lora"):
        assert part in message
    assert not (tmp_path / "new" / "run" / "recipe.yaml").exists()
    report = "\n".join(dry_run._disk(recipes.load(content), shared_tiny, tmp_path, False))
    for part in ("disk (an estimate): ", "6.0 MB are free", "pipeline/", "not enough disk space"):
        assert part in report
    assert "for 4 images in the cache" in report
    states = disk_estimate.DiskEstimate({"a": 5_000_000}, 2_000_000)
    (tmp_path / "state.ckpt").write_bytes(bytes(1_500_000))
    recipe = recipes.load(lora_recipe())
    disk_estimate.require_space(states, tmp_path, recipe, "lora")  # its state is replaced
    with pytest.raises(UserError, match=r"7.0 MB on the disk"):
        disk_estimate.require_space(states, tmp_path / "other", recipe, "lora")


def test_the_record_of_an_original_names_its_parts(shared_tiny: Any) -> None:
    record = RunBase.of(shared_tiny, "tiny-sd")
    assert record.parts.keys() == {"denoiser", "text_encoder", "vae"}
    assert record.differences(shared_tiny) == []
    assert len(set(record.parts.values())) == 3
