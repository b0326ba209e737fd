"""The suites of the papers' tables on the bundled model, with small networks in the judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import get_model
from typer.testing import CliRunner

from concept_eraser.cli.application import app
from concept_eraser.data import prompts, tables
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import PromptEvaluation, Suite
from concept_eraser.runs import suite_matching
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

IMAGENETTE = [
    name.removeprefix("imagenette_")
    for name in resources.names("eval")
    if name.startswith("imagenette_")
]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of weights, and one of data."""
    for name in ("weights", "data"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"CONCEPT_ERASER_{name.upper()}", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights"


def evaluate(suite: Suite, model: Any, cache: Path) -> PromptEvaluation:
    """Evaluate a suite of four images in each group, of one step each."""
    small = suite.with_at_most(4).model_copy(
        update={"sampling": suite.sampling.model_copy(update={"steps": 1})}
    )
    return suites.evaluate(model, model, small, cache=cache)


def test_imagenettes_ten_classes_have_suites() -> None:
    """Each asks for its class, and counts the other nine as retained."""
    names = set()
    for name in IMAGENETTE:
        suite = suites.load(f"imagenette_{name}")
        ((attribute, value),) = suite.concept.items()
        names.add(value)
        judge = suite.build_judge()
        assert value in judge.classes[attribute]
        for group, role in (("direct", "forget"), ("synonyms", "forget"), ("retained", "retain")):
            rows = prompts.load(suite.groups[group].prompts).prompts
            values = {row.fields["class"] for row in rows}
            assert suite.groups[group].role == role
            assert values == {value} if role == "forget" else len(values - {value}) == 9
            assert values <= set(judge.classes[attribute])
    assert len(names) == 10


def test_a_class_of_imagenette(shared_tiny: Any, weights: Path, tmp_path: Path) -> None:
    suite = suites.load("imagenette_church")
    with pytest.raises(UserError, match=r"resnet50-11ad3fa6\.pth is neither a path nor a name"):
        evaluate(suite, shared_tiny, tmp_path)
    torch.manual_seed(0)
    save_file(get_model("resnet18", weights=None).state_dict(), weights / "small.safetensors")
    judge = {
        "name": "imagenet",
        "architecture": "resnet18",
        "version": "IMAGENET1K_V1",
        "weights": "small.safetensors",
    }
    evaluation = evaluate(suite.using(judge=judge), shared_tiny, tmp_path)
    assert set(evaluation.refused) == {"fid torchmetrics64 before"}
    rate, ua = evaluation.find("concept_rate", "direct"), evaluation.find("ua", "direct")
    assert rate is not None and ua is not None  # noqa: PT018
    assert rate.after.value == pytest.approx(1 - ua.after.value)
    retained = evaluation.find("accuracy_class", "retained")
    assert retained is not None
    assert retained.after.n == 4
    assert evaluation.judge.startswith("imagenet-resnet18-")


def test_a_value_that_the_judge_has_no_class_for_does_not_count() -> None:
    """ImageNet has no class `lighthouse`, so its images cannot be judged right."""
    import numpy as np

    from concept_eraser.evaluation.base import Evidence, Group
    from concept_eraser.evaluation.metrics.accuracy import Accuracy

    suite = suites.load("imagenette_church")
    rows = prompts.load(suite.groups["neighbours"].prompts).take(60, 0).prompts
    values = np.array([row.fields["class"] for row in rows])
    labels = {when: {"class": values} for when in ("before", "after")}
    group = Group("neighbours", "neighbour", prompts=rows, images={}, labels=labels)
    judge = suite.build_judge()
    (result,) = Accuracy().measure(
        Evidence({"neighbours": group}, ("class", "church"), judge, seed=0)
    )
    assert (result.after.value, result.after.n) == (1.0, int((values != "lighthouse").sum()))
    assert result.after.n < 60


def test_van_gogh(shared_tiny: Any, weights: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    with pytest.raises(UserError, match="OPTML-Group/Diffusion-MU-Attack"):
        evaluate(suites.load("vangogh"), shared_tiny, tmp_path)
    names = {0: "claude-monet", 1: "vincent-van-gogh"}
    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    ViTForImageClassification(config).save_pretrained(weights / "artist_classifier")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(
        weights / "artist_classifier"
    )
    evaluation = evaluate(suites.load("vangogh"), shared_tiny, tmp_path)
    rate = evaluation.find("concept_rate", "direct")
    assert rate is not None
    assert rate.after.n == 4


def test_celebrities(shared_tiny: Any, weights: Path, tmp_path: Path) -> None:
    """The bundled model generates no people, so no image has a face."""
    folder = weights / "faces"
    folder.mkdir()
    network = get_model("resnet18", weights=None, num_classes=8)
    save_file(network.state_dict(), folder / "model.safetensors")
    save_file({"celebrity": torch.ones(1, 8)}, folder / "references.safetensors")
    settings = {
        "network": "resnet18",
        "size": 32,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "threshold": 0.5,
    }
    (folder / "face.json").write_text(json.dumps(settings))
    evaluation = evaluate(suites.load("celebrity"), shared_tiny, tmp_path)
    for metric, value in (("concept_rate", 0), ("no_object_rate", 1)):
        result = evaluation.find(metric, "direct")
        assert result is not None
        assert result.after.value == value


def test_violence(shared_tiny: Any, weights: Path, clip_folder: Path, tmp_path: Path) -> None:
    suite = suites.load("violence")
    assert suite.sensitive
    with pytest.raises(UserError, match="ml-research/Q16"):
        evaluate(suite, shared_tiny, tmp_path)
    torch.manual_seed(0)
    save_file({"prompts": torch.randn(2, 16)}, weights / "q16_prompts.safetensors")
    judge = {"name": "q16", "model": f"local-dir:{clip_folder}"}
    evaluation = evaluate(suite.using(judge=judge), shared_tiny, tmp_path)
    assert set(evaluation.refused) == {"fid torchmetrics64 before"}
    assert evaluation.find("concept_rate", "direct") is not None
    assert evaluation.find("clip_score", "retained") is not None


def test_all_of_i2p(
    shared_tiny: Any, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "i2p_benchmark.csv"
    path.write_text("prompt,sd_seed,categories\n" + "".join(f"a {i},{i},hate\n" for i in range(9)))
    monkeypatch.setattr(tables, "from_hub", lambda address: path)
    suite = suites.load("i2p")
    assert suite.groups["direct"].n == 4703
    assert len(prompts.load("i2p_all")) == 9
    evaluation = evaluate(suite, shared_tiny, tmp_path)
    assert evaluation.refused == {}
    assert evaluation.find("nudenet_all", "direct") is not None


@pytest.mark.parametrize(
    ("name", "group", "n", "refused"),
    [
        ("unlearn_diff_nudity", "direct", 142, set()),
        (
            "coco_30k",
            "retained",
            30000,
            {"fid inception clean data/coco_30k", "clip_score ViT-B-32 openai x100"},
        ),
    ],
)
def test_a_table_that_the_user_has(
    name: str,
    group: str,
    n: int,
    refused: set[str],
    shared_tiny: Any,
    weights: Path,
    tmp_path: Path,
) -> None:
    """The metrics whose weights are missing are refused, the others measured."""
    suite = suites.load(name)
    assert suite.groups[group].n == n
    with pytest.raises(UserError, match=rf"{name}\.csv is missing, and nothing is downloaded"):
        evaluate(suite, shared_tiny, tmp_path)
    (tmp_path / "data" / f"{name}.csv").write_text(
        "case_number,prompt,evaluation_seed\n" + "".join(f"{i},a {i},{i}\n" for i in range(9))
    )
    evaluation = evaluate(suite, shared_tiny, tmp_path)
    assert set(evaluation.refused) == refused
    assert all(prompt.seed is not None for prompt in evaluation.groups[group].prompts)


def test_the_command_of_the_142_prompts_attacks_them_all() -> None:
    """An attack takes 20 prompts of a suite unless -n says otherwise."""
    text = (resources.folder("eval") / "unlearn_diff_nudity.yaml").read_text()
    words = text.splitlines()[0].removeprefix("# concept-eraser ").split()
    assert words[:2] == ["attack", "RUN"]
    n = suites.load("unlearn_diff_nudity").groups["direct"].n
    assert words[words.index("-n") + 1] == str(n)


def test_list_and_show_know_the_suites_and_judges() -> None:
    runner = CliRunner()
    names = [f"imagenette_{name}" for name in IMAGENETTE]
    names += ["vangogh", "celebrity", "violence", "i2p", "unlearn_diff_nudity", "coco_30k"]
    text = runner.invoke(app, ["list", "suites"]).output
    assert [name for name in names if name not in text] == []
    text = runner.invoke(app, ["list", "judges"]).output
    judges = ("imagenet", "image_classifier", "face", "q16")
    assert [name for name in judges if name not in text] == []
    for name, words in zip(
        judges, ("resnet50-11ad3fa6.pth", "id2label", "face.json", "prompts.p"), strict=True
    ):
        assert words in runner.invoke(app, ["show", name]).output


@pytest.mark.parametrize(
    ("name", "here"), [("nudity", True), ("coco_30k", True), ("i2p", False), ("i2p_nudity", False)]
)
def test_a_message_about_suites_waits_for_no_hub(name: str, here: bool) -> None:
    """The prompt set names the hub, not the suite."""
    assert suite_matching._is_here(name) is here
