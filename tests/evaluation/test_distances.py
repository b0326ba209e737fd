"""FID, KID, CLIP score and LPIPS against other implementations, and the folders of the command.

The weights of Inception, CLIP and LPIPS are not available here. Where a test needs such a file, it
writes random weights under the real name. The code that searches, reads and runs the file is the
real one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from concept_eraser import UserError, registry
from concept_eraser.data.images import read_image
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import statistics
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.base import Evidence, Group, Judge, Refused, Result
from concept_eraser.evaluation.features.base import Memory, image_hash
from concept_eraser.evaluation.features.clip import ClipFeatures
from concept_eraser.evaluation.features.inception import PYTORCH, TORCHSCRIPT, Inception
from concept_eraser.evaluation.features.judge import JudgeFeatures
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.metrics.fid import FID, distance_settings
from concept_eraser.reporting import compare
from concept_eraser.tiny import painter
from concept_eraser.utils import provenance


def paint(n: int, seed: int) -> Tensor:
    return torch.from_numpy(painter.paint_batch(n, np.random.default_rng(seed))[1])


@pytest.fixture(scope="module")
def rendered_images() -> dict[str, Tensor]:
    """Painted images: two sets, the first set with a fifth of noise, and noise.

    Each has the shape [220, 64, 64, 3].
    """
    one, rng = paint(220, 1), np.random.default_rng(3)
    noise = torch.from_numpy(rng.integers(0, 256, one.shape, dtype=np.uint8))
    return {
        "one": one,
        "other": paint(220, 2),
        "worse": (0.8 * one + 0.2 * noise).byte(),
        "noise": noise,
    }


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for weights; no other place has any."""
    (tmp_path / "weights").mkdir()
    monkeypatch.setenv("CONCEPT_ERASER_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("CONCEPT_ERASER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "weights"


def evidence(before: Tensor, after: Tensor, role: str = "retain") -> Evidence:
    prompts = [Prompt("a red star", {"shape": "star"})] * len(before)
    group = Group("rest", role, prompts, {"before": before, "after": after}, {})  # type: ignore[arg-type]
    return Evidence({"rest": group}, ("shape", "circle"), TinyJudge(), 0)


# --- the formulas ---------------------------------------------------------------------------------


class JudgeNet(nn.Module):
    """The network of the tiny judge in the interface of torchmetrics.

    It maps uint8 [n, 3, 64, 64] to [n, 192].
    """

    num_features = 192

    def forward(self, x: Tensor) -> Tensor:
        return TinyJudge().net.features(x.float().div(127.5).sub(1))


def test_fid_against_torchmetrics(rendered_images: dict[str, Tensor]) -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    theirs = FrechetInceptionDistance(feature=JudgeNet(), reset_real_features=False).set_dtype(
        torch.float64
    )
    theirs.update(rendered_images["one"].permute(0, 3, 1, 2), real=True)
    real = TinyJudge().features(rendered_images["one"])
    for name in ("worse", "noise"):
        theirs.update(rendered_images[name].permute(0, 3, 1, 2), real=False)
        ours = statistics.frechet_of_features(TinyJudge().features(rendered_images[name]), real)
        assert ours == pytest.approx(float(theirs.compute()), rel=1e-3), name
        theirs.reset()


def test_kid_against_torchmetrics_clean_fid_and_scikit_learn(
    rendered_images: dict[str, Tensor],
) -> None:
    from cleanfid.fid import kernel_distance as theirs
    from sklearn.metrics.pairwise import polynomial_kernel
    from torchmetrics.image.kid import KernelInceptionDistance

    a, b = (
        TinyJudge().features(rendered_images["worse"]),
        TinyJudge().features(rendered_images["one"]),
    )
    ours = statistics.kernel_distance(a, b)
    metric = KernelInceptionDistance(feature=JudgeNet(), subsets=1, subset_size=len(a))
    metric.update(rendered_images["one"].permute(0, 3, 1, 2), real=True)
    metric.update(rendered_images["worse"].permute(0, 3, 1, 2), real=False)
    assert ours.value == pytest.approx(float(metric.compute()[0]), rel=1e-3)
    assert ours.value == pytest.approx(theirs(a, b), rel=1e-4)
    k = {
        key: polynomial_kernel(x, y, degree=3)
        for key, (x, y) in {"aa": (a, a), "bb": (b, b), "ab": (a, b)}.items()
    }
    off, n = 1 - np.eye(len(a)), len(a)
    by_hand = ((k["aa"] + k["bb"]) * off).sum() / (n * (n - 1)) - 2 * k["ab"].mean()
    assert ours.value == pytest.approx(by_hand, rel=1e-4)


def test_kid_draws_the_subsets_that_clean_fid_draws() -> None:
    from cleanfid.fid import kernel_distance as theirs

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(90, 8)), rng.normal(size=(130, 8)) + 0.3
    np.random.seed(7)
    expected = theirs(a, b, num_subsets=20, max_subset_size=40)
    interval = statistics.kernel_distance(a, b, seed=7, subsets=20, size=40)
    assert interval.value == pytest.approx(expected, rel=1e-9)
    assert statistics.kernel_distance(a, b, seed=8, subsets=20, size=40).value != pytest.approx(
        expected, rel=1e-4
    )


def test_kids_interval_covers_the_truth_and_narrows() -> None:
    """The interval covers the true distance in most of 60 repetitions with 80 rows.

    The kernel is a polynomial, so that its mean over many rows is the true distance.
    """
    rng = np.random.default_rng(1)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(n, 32)), 1.3 * rng.normal(size=(n, 32)) + 0.4

    truth = np.mean([statistics._polynomial_mmd(*draw(2000)) for _ in range(10)])
    intervals = [statistics.kernel_distance(*draw(80), seed=i, subsets=40) for i in range(60)]
    assert sum(k.low <= truth <= k.high for k in intervals) >= 53
    spread, stated_error = (
        np.std([k.value for k in intervals]),
        np.mean([k.high - k.low for k in intervals]) / 3.92,
    )
    assert 0.8 * spread < stated_error < 2 * spread, "an interval of any width would cover"
    many = draw(800)
    more, small = (statistics.kernel_distance(*many, subsets=40, size=size) for size in (1000, 80))
    assert more.high - more.low < 0.6 * np.mean([k.high - k.low for k in intervals])
    assert (small.high - small.low) / (more.high - more.low) < 2, (
        "small subsets scatter more, but the value is as certain"
    )


def test_wilson_against_statsmodels() -> None:
    from statsmodels.stats.proportion import proportion_confint

    for hits, n in ((0, 20), (1, 20), (37, 100), (499, 500), (8, 8)):
        low, high = proportion_confint(hits, n, method="wilson")
        interval = statistics.wilson(hits, n)
        assert (interval.low, interval.high) == (
            pytest.approx(low, abs=1e-9),
            pytest.approx(high, abs=1e-9),
        )


def test_distances_refuse_bad_inputs() -> None:
    with pytest.raises(UserError, match="at least 4 images in each set, found 3 and 9"):
        statistics.kernel_distance(np.ones((3, 2)), np.ones((9, 2)))
    with pytest.raises(UserError, match="2 and 3 features per image"):
        statistics.kernel_distance(np.ones((5, 2)), np.ones((5, 3)))


# --- the metric fid -------------------------------------------------------------------------------


def test_noise_is_far_and_the_same_images_are_near(
    rendered_images: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    results: dict[str, dict[str, Result]] = {}
    with caplog.at_level(logging.WARNING):
        for name in rendered_images:
            measurement = FID(reference="before").measure(
                evidence(rendered_images["one"], rendered_images[name])
            )
            results[name] = {r.metric: r for r in measurement}
    fid = {name: rows["fid_judge"].after.value for name, rows in results.items()}
    assert abs(fid["one"]) < 1e-6
    assert 0 < fid["other"] < fid["worse"] < fid["noise"]
    kid = {name: rows["kid_judge"].after for name, rows in results.items()}
    assert -0.02 * kid["noise"].value < kid["one"].value < 0, (
        "the estimate is unbiased, so that a set and itself give a value below zero"
    )
    assert kid["one"].high < kid["worse"].low < kid["worse"].high < kid["noise"].low
    settings = results["noise"]["kid_judge"].settings
    assert (settings["backend"], settings["dim"], settings["n"], settings["n_reference"]) == (
        "judge",
        192,
        220,
        220,
    )
    fingerprint = provenance.fingerprint(
        [image_hash(np.asarray(p)) for p in rendered_images["one"]]
    )
    assert (
        settings["reference"]
        == f"the original model's images of the same prompts and seeds ({fingerprint})"
    )
    (other, _) = FID(reference="before").measure(
        evidence(rendered_images["other"], rendered_images["noise"])
    )
    assert other.settings["reference"] != settings["reference"], (
        "another original is another reference"
    )
    assert "220 images, fewer than 2,000" in settings["warning"]
    assert not caplog.text, "a judge's numbers are compared within one suite, at one size"
    with caplog.at_level(logging.WARNING):
        distance_settings("inception", JudgeFeatures(TinyJudge()), 220, 5000, "real images")
    assert "fid_inception: 220 images, fewer than 2,000" in caplog.text
    assert results["noise"]["fid_judge"].before is None


def test_the_judges_fid_follows_its_definition(rendered_images: dict[str, Tensor]) -> None:
    """The definition of the numbers in eval/results."""
    images_evidence, judge = evidence(rendered_images["one"], rendered_images["worse"]), TinyJudge()
    results = {r.metric: r for r in FID().measure(images_evidence)}
    reference = judge.reference_features(images_evidence.groups["rest"].prompts, 0)
    for when, name in (("before", "one"), ("after", "worse")):
        expected = statistics.frechet_of_features(judge.features(rendered_images[name]), reference)
        assert getattr(results["fid_judge"], when).value == expected
    assert results["fid_judge"].settings["reference"] == "painted images of the same prompts"

    class Photographer(TinyJudge):
        references = Judge.references

    own = replace(images_evidence, judge=Photographer())
    (first, *_) = registry.build("metric", "fid", {}).measure(own)
    assert first.settings["reference"] == "the judge's images of the same prompts"
    assert (
        FID().measure(evidence(rendered_images["one"], rendered_images["one"], "neighbour")) == []
    )


def test_a_folder_of_real_images_as_the_reference(
    rendered_images: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "real" / "deeper").mkdir(parents=True)
    for i, rendered_image in enumerate(rendered_images["other"]):
        Image.fromarray(rendered_image.numpy()).save(
            tmp_path / "real" / ("deeper" if i % 2 else "") / f"{i}.png"
        )
    (tmp_path / "real" / "torn.png").write_bytes(b"no image")
    images_evidence = evidence(rendered_images["other"], rendered_images["noise"])
    results = {r.metric: r for r in FID(reference=str(tmp_path / "real")).measure(images_evidence)}
    assert abs(results["fid_judge"].before.value) < 1e-3 < results["fid_judge"].after.value  # type: ignore[union-attr]
    settings = results["kid_judge"].settings
    assert settings["reference"].startswith("folder real (")
    assert settings["n_reference"] == 220
    with pytest.raises(UserError, match="no images in nowhere: there is no such folder"):
        FID(reference="nowhere").measure(images_evidence)


def test_kid_is_reported_where_fid_has_too_few_images(
    rendered_images: dict[str, Tensor], shared_tiny: Any
) -> None:
    few = {name: some[:20] for name, some in rendered_images.items()}
    with pytest.raises(
        Refused, match="fid_judge, rest: FID needs more images than feature dimensions"
    ) as refusal:
        FID().measure(evidence(few["one"], few["noise"]))
    assert [r.metric for r in refusal.value.results] == ["kid_judge"]
    suite = suites.load(
        {
            "concept": {"shape": "star"},
            "sampling": {"steps": 2},
            "groups": {"rest": {"prompts": "tiny_rest", "role": "retain", "n": 6}},
            "metrics": [
                "fid",
                {"name": "fid", "features": "torchmetrics64"},
                {"name": "lpips", "net": "vgg"},
                {"name": "clip_score", "model": "ViT-B-32"},
            ],
        }
    )
    evaluation = suites.evaluate(shared_tiny, shared_tiny, suite)
    assert [r.metric for r in evaluation.results] == ["kid_judge"], (
        "the numbers that can be had are kept"
    )
    assert set(evaluation.refused) == {
        "fid",
        "fid torchmetrics64",
        "lpips vgg",
        "clip_score ViT-B-32",
    }


def test_a_noise_model_is_farther_than_the_original(shared_tiny: Any) -> None:
    from concept_eraser.models.loading import load

    noise_model = load("tiny-sd")
    with torch.no_grad():
        for parameter in noise_model.denoiser.parameters():
            parameter.normal_(0, 0.05)
    content = {
        "concept": {"shape": "star"},
        "sampling": {"steps": 6},
        "groups": {"rest": {"prompts": "tiny_rest", "role": "retain", "n": 12}},
    }
    one, other = (
        suites.load({**content, "metrics": [metric]})
        for metric in ("fid", {"name": "fid", "reference": "before"})
    )
    (first,) = suites.evaluate(shared_tiny, noise_model, one).results
    (second,) = suites.evaluate(shared_tiny, noise_model, other).results
    assert first.before.high < first.after.low  # type: ignore[union-attr]
    assert second.after.low > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "incepton"}, "unknown feature 'incepton'; did you mean 'inception'"),
        (
            {"features": "inception", "mode": "clear"},
            "unknown mode of clean-fid 'clear'; did you mean 'clean'",
        ),
        ({"mode": "clean"}, "unknown option of feature 'judge' 'mode'"),
        ({"features": "clip", "mode": "clean"}, "unknown option of feature 'clip' 'mode'"),
    ],
)
def test_bad_options_are_reported_before_images_are_generated(
    options: dict[str, str], words: str
) -> None:
    suite = {
        "concept": {"shape": "star"},
        "groups": {"rest": {"prompts": "tiny_rest", "role": "retain"}},
        "metrics": [{"name": "fid", **options}],
    }
    with pytest.raises(UserError, match=words):
        suites.load(suite)


# --- features -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """A small random network in place of Inception.

    It maps [n, 3, 299, 299] in [-1, 1] to [n, width, 1, 1].
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 9, stride=9)
        self.wide = nn.Conv2d(16, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.conv(x))
        return self.wide(
            torch.cat([features.mean((2, 3), keepdim=True), features.amax((2, 3), keepdim=True)], 1)
        )


class StandIn(nn.Module):
    """The interface of NVIDIA's TorchScript file: `layers`, and a forward that resizes its
    input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = Layers(width)

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        x = nn.functional.interpolate(x, size=[299, 299], mode="nearest")
        return self.layers((x - 128) / 128)


def stand_in(folder: Path, width: int) -> None:
    torch.manual_seed(0)
    torch.jit.script(StandIn(width).eval()).save(str(folder / TORCHSCRIPT))


@pytest.mark.filterwarnings("ignore")
def test_inception_features_are_clean_fids(
    weights: Path, rendered_images: dict[str, Tensor], tmp_path: Path
) -> None:
    """The file has random weights, since the true one is not available.

    Both implementations read the same file.
    """
    from cleanfid.fid import get_folder_features
    from cleanfid.inception_torchscript import InceptionV3W

    stand_in(weights, 2048)
    sizes = [(64, 64), (64, 64), (40, 90), (320, 310)]
    (tmp_path / "set").mkdir()
    for i, size in enumerate(sizes):
        Image.fromarray(rendered_images["one"][i].numpy()).resize(size).save(
            tmp_path / "set" / f"{i}.png"
        )
    arrays = [np.asarray(Image.open(tmp_path / "set" / f"{i}.png")) for i in range(len(sizes))]
    for mode in ("clean", "legacy_tensorflow"):
        net = InceptionV3W(str(weights), download=False, resize_inside=mode == "legacy_tensorflow")
        theirs = get_folder_features(
            str(tmp_path / "set"),
            net,
            num_workers=0,
            batch_size=1,
            device=torch.device("cpu"),
            mode=mode,
            verbose=False,
        )
        ours = Inception(mode).extract(arrays)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=mode)
    clean, other = Inception("clean").settings, Inception("legacy_tensorflow").settings
    assert clean == {
        "backend": "clean-fid",
        "model": TORCHSCRIPT,
        "resize": "clean",
        "input_size": "299x299",
        "weights": clean["weights"],
        "dim": 2048,
    }
    assert clean != other


def test_fid_on_a_stand_in_for_inception(weights: Path, rendered_images: dict[str, Tensor]) -> None:
    """The file has 8 random features, and the code reads it as it reads the true one."""
    stand_in(weights, 8)
    few = {name: some[:24] for name, some in rendered_images.items()}
    metric = registry.build(
        "metric", "fid", {"features": "inception", "mode": "clean", "reference": "before"}
    )
    results = {
        name: {r.metric: r for r in metric.measure(evidence(few["one"], few[name]))}
        for name in ("one", "noise")
    }
    assert set(results["one"]) == {"fid_inception", "kid_inception"}
    assert (
        abs(results["one"]["fid_inception"].after.value)
        < 1e-6
        < results["noise"]["fid_inception"].after.value
    )
    assert results["noise"]["fid_inception"].settings["resize"] == "clean"
    painted_results = registry.build("metric", "fid", {"features": "inception"}).measure(
        evidence(few["one"], few["noise"])
    )
    assert painted_results[0].before.value < painted_results[0].after.value


def test_missing_and_damaged_weights_are_reported(
    weights: Path, rendered_images: dict[str, Tensor]
) -> None:
    images_evidence = evidence(rendered_images["one"][:4], rendered_images["one"][:4])
    if not (Path("/tmp") / TORCHSCRIPT).exists():
        with pytest.raises(
            UserError,
            match=(
                rf"{TORCHSCRIPT} is missing, and nothing is downloaded: put it into "
                rf"{weights} .*`features: judge`"
            ),
        ):
            FID("inception").measure(images_evidence)
    with pytest.raises(UserError, match=PYTORCH):
        FID("inception", mode="legacy_pytorch").measure(images_evidence)
    with pytest.raises(
        UserError,
        match=(
            r"needs the package torch-fidelity|"
            r"weights-inception-2015-12-05-6726825d\.pth is missing"
        ),
    ):
        FID("torchmetrics64").measure(images_evidence)
    (weights / TORCHSCRIPT).write_bytes(b"torn")
    with pytest.raises(UserError, match=f"cannot be read as {TORCHSCRIPT}"):
        FID("inception").measure(images_evidence)
    with pytest.raises(
        UserError, match=r"'laion2b_s34b_b79k' of ViT-B-32 are not on this machine.*openai"
    ):
        ClipFeatures("ViT-B-32", "laion2b_s34b_b79k").settings  # noqa: B018
    with pytest.raises(UserError, match="unknown open_clip model 'ViT-B-33'"):
        ClipFeatures("ViT-B-33").settings  # noqa: B018
    with pytest.raises(UserError, match="is no CLIP model"):
        ClipFeatures(f"local-dir:{weights}").settings  # noqa: B018
    (weights / "vit.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read as weights of ViT-S-32"):
        ClipFeatures("ViT-S-32", str(weights / "vit.safetensors")).settings  # noqa: B018


@dataclass(frozen=True)
class Counting(JudgeFeatures):
    """Judge features that record the number of images in each batch."""

    counts: tuple[list[int], ...] = ()

    def embed(self, batch: Tensor) -> Tensor:
        self.counts[0].append(len(batch))
        return super().embed(batch)


def test_an_image_is_embedded_once_and_a_truncated_cache_is_repaired(
    weights: Path, rendered_images: dict[str, Tensor]
) -> None:
    counts: list[int] = []
    arrays = [rendered_image.numpy() for rendered_image in rendered_images["one"][:5]]
    first = Counting(counts=(counts,)).extract([*arrays, arrays[0]])
    assert sum(counts) == 1 + 5, "one image gives the width, and each image is embedded once"
    np.testing.assert_array_equal(first[5], first[0])
    np.testing.assert_allclose(
        first[:5], TinyJudge().features(rendered_images["one"][:5]), rtol=1e-4, atol=1e-5
    )
    path = next((weights.parent / "cache" / "features").iterdir())
    path.write_bytes(path.read_bytes()[:-100])  # truncated inside the last record
    again = Counting(counts=(counts,)).extract([*arrays, rendered_images["other"][0].numpy()])
    assert sum(counts) == 6 + 1 + 2, "the truncated one and the new one"
    np.testing.assert_allclose(again[:5], first[:5], rtol=1e-4, atol=1e-5)
    assert len(Memory(path, 192).rows) == 6
    with pytest.raises(UserError, match=r"at least 2x2; found \(1, 1, 3\)"):
        image_hash(np.zeros((1, 1, 3), np.uint8))
    with pytest.raises(UserError, match="no images to take features of"):
        JudgeFeatures().extract([])


@pytest.fixture
def small_clip(tmp_path: Path) -> Path:
    """A small CLIP of open_clip's own classes with random weights, since true weights are not
    available.
    """
    import open_clip
    from safetensors.torch import save_file

    config = {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32,
            "layers": 1,
            "width": 64,
            "head_width": 32,
            "patch_size": 16,
        },
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 32,
            "heads": 2,
            "layers": 1,
        },
    }
    folder = tmp_path / "clip"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(
        json.dumps(
            {
                "model_cfg": config,
                "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.2]},
            }
        )
    )
    torch.manual_seed(0)
    save_file(
        {k: v.contiguous() for k, v in open_clip.CLIP(**config).state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


def test_clip_features_and_score_are_open_clips(
    weights: Path, small_clip: Path, rendered_images: dict[str, Tensor]
) -> None:
    import open_clip

    name, some = f"local-dir:{small_clip}", rendered_images["one"][:12]
    net, _, prepare = open_clip.create_model_and_transforms(name)
    net.eval()
    images = torch.stack([prepare(Image.fromarray(p.numpy())) for p in some])
    with torch.no_grad():
        expected = net.encode_image(images)
        np.testing.assert_allclose(
            ClipFeatures(name).extract(some), expected.numpy(), rtol=1e-4, atol=1e-5
        )
        text = net.encode_text(open_clip.get_tokenizer(name)(["a red star"] * 12))
    cosines = torch.cosine_similarity(expected, text).numpy()
    images_evidence = evidence(some, rendered_images["noise"][:12], "neighbour")
    for scale, values in (
        ("cosine", cosines),
        ("x100", 100 * cosines),
        ("x2.5", 2.5 * cosines.clip(min=0)),
    ):
        metric = registry.build("metric", "clip_score", {"model": name, "scale": scale})
        (result,) = metric.measure(images_evidence)
        assert result.metric == "clip_score_open_clip"
        assert result.before.value == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-6)
        assert (result.settings["model"], result.settings["scale"]) == (
            "clip, open_clip_model.safetensors",
            scale,
        )
        assert (result.settings["input_size"], result.settings["dim"]) == ("32x32", 16)
    (judge_result,) = registry.build("metric", "clip_score", {}).measure(images_evidence)
    assert (judge_result.metric, judge_result.settings) == (
        "clip_score",
        {"model": "tiny CLIP", "scale": "cosine"},
    )
    fid = FID("clip", model=name, reference="before")
    near, far = (
        fid.measure(evidence(rendered_images["one"][:40], rendered_images[k][:40]))
        for k in ("one", "noise")
    )
    assert [r.metric for r in far] == ["fid_clip", "kid_clip"]
    assert abs(near[0].after.value) < 1e-5 < far[0].after.value


def test_clip_weights_by_name_have_their_own_preprocessing(
    weights: Path,
    small_clip: Path,
    rendered_images: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name in open_clip also sets the activation and the normalisation.

    A file of weights alone does not.
    """
    import open_clip

    config = json.loads((small_clip / "open_clip_config.json").read_text())["model_cfg"]
    entry = {
        "url": "https://nowhere/weights-by-name.safetensors",
        "mean": (0.1, 0.2, 0.3),
        "std": (0.3, 0.3, 0.3),
        "quick_gelu": True,
    }
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", config)
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small", {"by_name": entry})
    file = weights / "weights-by-name.safetensors"
    file.write_bytes((small_clip / "open_clip_model.safetensors").read_bytes())
    net, _, prepare = open_clip.create_model_and_transforms(
        "small",
        pretrained=str(file),
        force_quick_gelu=True,
        image_mean=entry["mean"],
        image_std=entry["std"],
    )
    with torch.no_grad():
        expected = net.eval().encode_image(
            torch.stack([prepare(Image.fromarray(p.numpy())) for p in rendered_images["one"][:4]])
        )
    by_name, by_file = ClipFeatures("small", "by_name"), ClipFeatures("small", str(file))
    np.testing.assert_allclose(
        by_name.extract(rendered_images["one"][:4]), expected.numpy(), rtol=1e-4, atol=1e-5
    )
    assert np.abs(by_file.extract(rendered_images["one"][:4]) - expected.numpy()).max() > 1e-3
    assert by_name.settings["model"] == "small, by_name" != by_file.settings["model"]
    assert by_name.fingerprint == by_file.fingerprint
    assert set(by_name.protocol) == {"model", "resize", "input_size"}, "stored results have these"


def test_a_folder_with_another_configuration_has_other_clip_features(
    weights: Path, small_clip: Path, rendered_images: dict[str, Tensor]
) -> None:
    """The features of the earlier configuration are in the cache, and are not those of the new."""
    name, some = f"local-dir:{small_clip}", rendered_images["one"][:4]
    earlier = ClipFeatures(name)
    features, file = earlier.extract(some), small_clip / "open_clip_config.json"
    content = json.loads(file.read_text())

    def difference() -> float:
        file.write_text(json.dumps(content))
        later = ClipFeatures(name)
        assert later.settings != earlier.settings
        return float(np.abs(later.extract(some) - features).max())

    content["preprocess_cfg"]["mean"] = [0.1, 0.1, 0.1]
    assert difference() > 1e-3
    content["preprocess_cfg"]["mean"] = [0.4, 0.5, 0.6]
    content["model_cfg"]["quick_gelu"] = True
    assert difference() > 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "x10"}, "unknown scale"),
        ({"weights": "openai"}, "need the `model` they belong to"),
    ],
)
def test_clip_score_refuses(options: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        registry.build("metric", "clip_score", options)


def test_lpips_against_torchmetrics(weights: Path, rendered_images: dict[str, Tensor]) -> None:
    """The ImageNet weights of SqueezeNet are random numbers under the real name.

    The linear layers are the true ones.
    """
    from torchmetrics.functional.image import learned_perceptual_image_patch_similarity as theirs
    from torchvision.models import squeezenet1_1

    metric = registry.build("metric", "lpips", {"net": "squeeze"})
    one, worse = rendered_images["one"][:20], rendered_images["worse"][:20]
    with pytest.raises(
        UserError,
        match=r"needs the ImageNet weights squeezenet1_1-b8a52dc0\.pth, and nothing is downloaded",
    ):
        metric.measure(evidence(one, worse))
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    hub.mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(squeezenet1_1().state_dict(), hub / "squeezenet1_1-b8a52dc0.pth")
    (result,) = metric.measure(evidence(one, worse))
    inputs = [p.permute(0, 3, 1, 2).float() / 255 for p in (one, worse)]
    expected = theirs(*inputs, net_type="squeeze", normalize=True)
    assert result.after.value == pytest.approx(float(expected), rel=1e-4)
    assert result.after.low < result.after.value < result.after.high
    (same,) = metric.measure(evidence(one, one, "neighbour"))
    (far,) = metric.measure(evidence(one, rendered_images["noise"][:20]))
    assert same.after.value == 0 < result.after.value < far.after.value
    assert (result.settings["backend"], result.settings["model"], result.before) == (
        "torchmetrics",
        "squeeze",
        None,
    )
    with pytest.raises(UserError, match="unknown net of LPIPS 'alexnet'"):
        registry.build("metric", "lpips", {"net": "alexnet"})


# --- comparison and command -----------------------------------------------------------------------


def test_unlike_settings_are_not_put_side_by_side() -> None:
    def content(**settings: Any) -> dict[str, Any]:
        after = {"value": 1.0, "low": None, "high": None, "n": 100}
        rows = [
            {"metric": "fid_inception", "group": "rest", "after": after, "settings": settings},
            {"metric": "ua", "group": "rest", "after": after},
        ]
        return {"protocol": {}, "protocol_hash": "p", "results": rows}

    same = {"a": content(resize="clean", n=100), "b": content(resize="clean", n=100)}
    assert compare.table(same)[0] == ["fid_inception, rest", "1", "1"]
    with pytest.raises(
        UserError,
        match=r"fid_inception \(rest\) of a and of c .* resize: 'clean' and 'legacy_pytorch'",
    ):
        compare.table({**same, "c": content(resize="legacy_pytorch", n=100)})
    with pytest.raises(UserError, match="n: 100 and None"):
        compare.table({**same, "c": content(resize="clean")})


def save(folder: Path, rendered_images: Tensor) -> None:
    folder.mkdir()
    for i, rendered_image in enumerate(rendered_images):
        Image.fromarray(rendered_image.numpy()).save(folder / f"{i:03}.png")


def test_the_command_on_folders_with_bad_images(
    cli, tmp_path: Path, rendered_images: dict[str, Tensor]
) -> None:
    after, real = tmp_path / "after", tmp_path / "real"
    save(after, rendered_images["worse"][:200])
    save(real, rendered_images["one"][:199])
    see_through = np.dstack([rendered_images["one"][199].numpy(), np.zeros((64, 64), np.uint8)])
    Image.fromarray(see_through).save(real / "alpha.png")
    assert (read_image(real / "alpha.png") == 255).all(), "on white"
    Image.new("RGB", (1, 1)).save(after / "dot.png")
    (after / "broken.jpg").write_bytes(b"no image")
    process = cli("distance", "after", "real", "--features", "judge", "-o", "numbers")
    assert process.returncode == 0, process.stderr
    assert "left out of after: 2" in process.stderr
    assert "broken.jpg is no image that can be read" in process.stderr
    assert "dot.png has 1 x 1 pixels" in process.stderr
    assert "looking at after: 202/202" in process.stderr
    content = json.loads((tmp_path / "numbers" / "distance.json").read_text())
    results = {row["metric"]: row for row in content["results"]}
    judge = TinyJudge()
    white = torch.full_like(rendered_images["one"][:1], 255)
    features = (
        judge.features(rendered_images["worse"][:200]),
        judge.features(torch.cat([rendered_images["one"][:199], white])),
    )
    assert results["fid_judge"]["after"]["value"] == pytest.approx(
        statistics.frechet_of_features(*features), rel=1e-3
    )
    kid = statistics.kernel_distance(*features)
    assert results["kid_judge"]["after"]["value"] == pytest.approx(kid.value, rel=1e-3)
    assert (
        content["folders"]["after"]["images"],
        len(content["folders"]["after"]["left_out"]),
    ) == (200, 2)
    assert content["environment"]["versions"]["torch"]
    assert results["fid_judge"]["settings"]["dim"] == 192
    again = cli("distance", "after", "real", "--features", "judge", "-o", "numbers", "-q")
    assert again.returncode == 0, again.stderr
    for other in (("real", "after"), ("after", "real", "--seed", "1")):
        refusal = cli("distance", *other, "--features", "judge", "-o", "numbers", "-q")
        assert refusal.returncode == 2
        assert "is not replaced; give another folder with --output" in refusal.stderr
    assert (
        json.loads((tmp_path / "numbers" / "distance.json").read_text())["results"]
        == (content["results"])
    )
    refusal = cli("compare", "numbers", "numbers/distance.json")
    assert "given twice" in refusal.stderr, "compare reads distances too"


def test_the_command_refuses(cli, tmp_path: Path, rendered_images: dict[str, Tensor]) -> None:
    save(tmp_path / "few", rendered_images["one"][:6])
    (tmp_path / "none").mkdir()
    empty = cli("distance", "few", "none", "--features", "judge")
    assert (empty.returncode, "no images in none" in empty.stderr) == (2, True)
    few = cli("distance", "few", "few", "--features", "judge", "-q")
    assert few.returncode == 2
    assert (
        "no fid_judge: FID needs more images than feature dimensions, found 6 images and 192"
        in few.stderr
    )
    assert "kid_judge" in few.stdout
    assert set(json.loads((tmp_path / "distance" / "distance.json").read_text())["refused"]) == {
        "fid_judge"
    }
    assert "Traceback" not in few.stderr
