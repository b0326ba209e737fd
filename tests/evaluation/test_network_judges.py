"""Judges whose networks come from files: real small networks, trained or random, written here."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights, get_model

from concept_eraser import registry
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.judges import base, face, image_classifier
from concept_eraser.evaluation.nudity import Detection, Detector
from concept_eraser.utils.errors import UserError

COLOURS = ("red", "green", "blue")


def coloured(labels: list[int], size: int = 40, seed: int = 0) -> Tensor:
    """Images [n, size, size, 3] uint8, each mostly of one colour."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (len(labels), size, size, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[..., label] += 160
    return torch.from_numpy(images)


def images_of(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 48, 40, 3), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return get_model("resnet18", weights=None).eval()


def imagenet(path: Path | str, **options: Any) -> Any:
    options = {"architecture": "resnet18", "version": "IMAGENET1K_V1", **options}
    return registry.build("judge", "imagenet", {**options, "weights": str(path)})


@pytest.fixture(scope="module")
def imagenet_file(resnet: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imagenet") / "resnet.safetensors"
    save_file(resnet.state_dict(), path)
    return path


def test_imagenet_follows_torchvisions_own_transforms(
    resnet: nn.Module, imagenet_file: Path
) -> None:
    judge, images = imagenet(imagenet_file), images_of(3)
    weights = ResNet18_Weights.IMAGENET1K_V1
    prepared = torch.stack([weights.transforms()(image.permute(2, 0, 1)) for image in images])
    with torch.no_grad():
        logits = resnet(prepared)
    own = judge._net(judge._prepare(next(base.batches(images))))
    # torchvision rounds the resized pixels to bytes
    assert torch.allclose(own, logits, atol=0.05 * float(logits.std()))
    names = np.array(weights.meta["categories"])
    assert list(judge.classify(images)["class"]) == list(names[own.argmax(1).numpy()])
    assert judge.features(images).shape == (3, 512)
    assert judge.fingerprint.startswith("imagenet-resnet18-IMAGENET1K_V1-")


def test_imagenet_knows_imagenettes_classes_by_the_names_of_the_prompts() -> None:
    from concept_eraser.data import prompts

    names = registry.build("judge", "imagenet", {}).classes["class"]
    assert len(names) == len(set(names)) == 1000
    prompted = {p.fields["class"] for p in prompts.load("imagenette_not_tench").prompts}
    assert len(prompted) == 9
    assert {*prompted, "tench"} <= set(names)


def test_the_probability_of_a_class_has_a_gradient(imagenet_file: Path) -> None:
    judge = imagenet(imagenet_file)
    images = images_of(2).permute(0, 3, 1, 2).float().div(127.5).sub(1).requires_grad_()
    values = judge.probability(images, "class", "church")
    assert values.shape == (2,)
    assert bool(((values > 0) & (values < 1)).all())
    (gradient,) = torch.autograd.grad(values.sum(), images)
    assert float(gradient.abs().max()) > 0
    with pytest.raises(UserError, match="cannot detect class 'steeple'"):
        judge.probability(images, "class", "steeple")


def test_a_missing_file_is_named_with_its_origin() -> None:
    judge = registry.build("judge", "imagenet", {})
    with pytest.raises(UserError, match=r"resnet50-11ad3fa6\.pth from https://download\.pytorch"):
        judge.classify(images_of(1))
    with pytest.raises(UserError, match="CONCEPT_ERASER_WEIGHTS"):
        registry.build("judge", "image_classifier", {"folder": "artists"}).classify(images_of(1))
    with pytest.raises(UserError, match="write_references"):
        registry.build("judge", "face", {"folder": "faces"}).classify(images_of(1))
    with pytest.raises(UserError, match=r"ml-research/Q16"):
        registry.build("judge", "q16", {}).classify(images_of(1))


def test_a_version_that_torchvision_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="no version IMAGENET1K_V2 of resnet18"):
        registry.build("judge", "imagenet", {"architecture": "resnet18"})


def test_a_pickle_is_read_if_it_is_the_published_file_or_allowed(
    resnet: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digits in torchvision's file names are the beginning of the file's SHA-256."""
    own = tmp_path / "own.pth"
    torch.save(resnet.state_dict(), own)
    with pytest.raises(UserError, match="is a pickle"):
        imagenet(own).classify(images_of(1))
    wrong = tmp_path / "resnet18-00000000.pth"
    wrong.write_bytes(own.read_bytes())
    with pytest.raises(UserError, match="not the published file of its name"):
        imagenet(wrong).classify(images_of(1))
    digits = hashlib.sha256(own.read_bytes()).hexdigest()[:8]
    monkeypatch.setenv("CONCEPT_ERASER_WEIGHTS", str(tmp_path))
    own.rename(tmp_path / f"resnet18-{digits}.pth")
    label = imagenet(f"resnet18-{digits}.pth").classify(images_of(1))
    assert label == imagenet(wrong, allow_pickle=True).classify(images_of(1))


class Runs:
    """An object whose unpickling runs a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


def test_code_in_a_pickle_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"fc.weight": Runs()}))
    with pytest.raises(UserError, match="cannot be read as plain tensors") as error:
        imagenet(path, allow_pickle=True).classify(images_of(1))
    assert "weights_only" not in str(error.value)
    assert "this ran" not in capsys.readouterr().out


def test_weights_of_another_network_are_refused(tmp_path: Path, imagenet_file: Path) -> None:
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"do not fit the network ResNet, e\.g\."):
        imagenet(tmp_path / "a.safetensors").classify(images_of(1))
    with pytest.raises(UserError, match="do not fit the network ResNet"):
        imagenet(imagenet_file, architecture="resnet34").classify(images_of(1))


def test_the_judges_read_no_captions(imagenet_file: Path) -> None:
    judge = imagenet(imagenet_file)
    with pytest.raises(UserError, match="the judge imagenet reads no captions"):
        judge.clip_scores(images_of(1), ["a"])
    with pytest.raises(UserError, match="reference: before"):
        judge.reference_features([], 0)


@pytest.fixture(scope="module")
def artists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT of transformers, trained to tell three colours apart."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        id2label=dict(enumerate(COLOURS)),
        label2id={name: i for i, name in enumerate(COLOURS)},
    )
    network = ViTForImageClassification(config)
    folder = tmp_path_factory.mktemp("classifier")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    preset = image_classifier.preparation(folder)
    labels = [i % 3 for i in range(48)]
    (inputs,) = [
        base.resize_and_crop(coloured(labels).permute(0, 3, 1, 2).float().div(255), **preset)
    ]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(40):
        loss = network(pixel_values=inputs, labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.save_pretrained(folder)
    return folder


def test_a_classifier_of_transformers(artists: Path) -> None:
    options = {"folder": str(artists), "attribute": "artist", "names": {"red": "van gogh"}}
    judge = registry.build("judge", "image_classifier", options)
    assert judge.classes == {"artist": ("van gogh", "green", "blue")}
    images = coloured([2, 0, 1, 0], seed=1)
    expected = ["blue", "van gogh", "green", "van gogh"]
    assert list(judge.classify(images)["artist"]) == expected
    pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
    values = judge.probability(pixels, "artist", "van gogh")
    assert (values > 0.5).tolist() == [False, True, False, True]
    assert judge.features(images).shape == (4, 3)


def test_the_classifiers_images_are_prepared_as_transformers_does(artists: Path) -> None:
    from transformers import AutoImageProcessor

    images = coloured([0, 1], size=50)
    expected = AutoImageProcessor.from_pretrained(artists)(
        images=[Image.fromarray(image.numpy()) for image in images], return_tensors="pt"
    )["pixel_values"]
    own = base.resize_and_crop(next(base.batches(images)), **image_classifier.preparation(artists))
    assert float((own - expected).abs().max()) < 0.05


@pytest.mark.parametrize(
    "content",
    [
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 32},  # a square
        {"image_processor_type": "ViTImageProcessorFast", "do_normalize": False},
        # as microsoft/resnet-50: the shorter side, and a crop
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 32, "crop_pct": 0.875},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 28},
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 40}, "resample": 2},
    ],
)
def test_images_are_prepared_as_by_every_processor_of_transformers(
    content: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    images = torch.randint(0, 256, (2, 60, 47, 3), dtype=torch.uint8)
    expected = AutoImageProcessor.from_pretrained(tmp_path)(
        images=[Image.fromarray(image.numpy()) for image in images], return_tensors="pt"
    )["pixel_values"]
    preset = image_classifier.preparation(tmp_path)
    own = base.resize_and_crop(next(base.batches(images)), **preset)
    assert own.shape == expected.shape
    # transformers rounds to bytes; another size or filter differs by more than 0.1
    assert float((own - expected).abs().mean()) < 0.02


@pytest.mark.parametrize(
    "content",
    [
        {"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},  # of no class
        {"image_processor_type": "ViTImageProcessor", "resample": 0},  # nearest
        {"image_processor_type": "ViTImageProcessor", "do_resize": False},
        {"image_processor_type": "ViTImageProcessor", "rescale_factor": 1 / 127.5},
        {"image_processor_type": "PoolFormerImageProcessor"},
        {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 32, "width": 24}},
    ],
)
def test_images_that_would_be_prepared_otherwise_are_refused(
    content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="expected image_processor_type"):
        image_classifier.preparation(tmp_path)


def test_another_preparation_is_another_judge(artists: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artists, copy)
    one, other = (
        registry.build("judge", "image_classifier", {"folder": str(folder)})
        for folder in (artists, copy)
    )
    assert one.fingerprint == other.fingerprint
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "resample": 3}))
    changed = registry.build("judge", "image_classifier", {"folder": str(copy)})
    assert changed.fingerprint != one.fingerprint


def test_other_names_or_answers_are_another_judge(artists: Path) -> None:
    def fingerprint(**options: Any) -> str:
        judge = registry.build("judge", "image_classifier", {"folder": str(artists), **options})
        return str(judge.fingerprint)

    names = {"red": "crimson"}
    settings: list[dict[str, Any]] = [
        {},
        {"names": names},
        {"names": {"red": "ruby"}},
        {"names": names, "top": 2},
        {"names": names, "top": 3},
    ]
    assert len({fingerprint(**options) for options in settings}) == len(settings)
    assert fingerprint(names=names) == fingerprint(names=names)


def test_a_class_among_the_first_answers_counts(artists: Path) -> None:
    """As UnlearnDiffAtk counts styles: the concept among the first three answers."""
    options = {"folder": str(artists), "names": {"red": "red"}, "top": 3}
    judge = registry.build("judge", "image_classifier", options)
    assert set(judge.classify(coloured([1, 2]))["style"]) == {"red"}
    with pytest.raises(UserError, match="needs `names`"):
        registry.build("judge", "image_classifier", {"folder": str(artists), "top": 3})


def test_several_names_among_the_first_answers_are_refused(artists: Path) -> None:
    """The first of them would hide the concept that is among the first answers too."""
    several = {"folder": str(artists), "names": {"red": "van gogh", "blue": "monet"}}
    with pytest.raises(UserError, match="the concept alone, found monet, van gogh"):
        registry.build("judge", "image_classifier", {**several, "top": 2})
    assert registry.build("judge", "image_classifier", several).top == 1
    one = {"red": "van gogh", "blue": "van gogh"}
    judge = registry.build("judge", "image_classifier", {**several, "names": one, "top": 2})
    assert set(judge.classify(coloured([0, 1, 2]))["style"]) == {"van gogh"}


def test_a_classifier_that_is_incomplete_is_refused(artists: Path, tmp_path: Path) -> None:
    def judge(folder: Path, **options: Any) -> Any:
        return registry.build("judge", "image_classifier", {"folder": str(folder), **options})

    with pytest.raises(UserError, match=r"unknown class of .* 'crimson'"):
        _ = judge(artists, names={"crimson": "red"}).classes
    with pytest.raises(UserError, match="names: expected a mapping"):
        judge(artists, names=["red"])
    with pytest.raises(UserError, match=r"it has no config\.json"):
        judge(tmp_path).classify(images_of(1))
    config = json.loads((artists / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no weights in safetensors"):
        judge(tmp_path).classify(images_of(1))
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="would be random"):
        judge(tmp_path).classify(images_of(1))
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "a.B"}}))
    with pytest.raises(UserError, match="names Python code"):
        judge(tmp_path).classify(images_of(1))


SETTINGS = {
    "network": "resnet18",
    "size": 32,
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "threshold": 0.9,
}


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """A ResNet-18 with random weights that embeds images as 8 numbers, and photos of two people."""
    torch.manual_seed(1)
    folder = tmp_path / "faces"
    folder.mkdir()
    network = get_model("resnet18", weights=None, num_classes=8).eval()
    save_file(network.state_dict(), folder / "model.safetensors")
    (folder / "face.json").write_text(json.dumps(SETTINGS))
    for label, name in ((0, "Ann"), (1, "Bob")):
        (tmp_path / "people" / name).mkdir(parents=True)
        for i, image in enumerate(coloured([label] * 2, seed=label)):
            Image.fromarray(image.numpy()).save(tmp_path / "people" / name / f"{i}.png")
    return folder


def test_faces_are_compared_with_the_references(
    faces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = face.write_references(faces, faces.parent / "people", crop=False)
    assert numbers == {"Ann": 2, "Bob": 2}
    judge = registry.build("judge", "face", {"folder": str(faces), "crop": False})
    assert judge.classes == {"name": ("Ann", "Bob", "unknown", "none")}
    fingerprint = judge.fingerprint
    photos = torch.cat([coloured([0] * 2, seed=0), coloured([1] * 2, seed=1)])
    assert list(judge.classify(photos)["name"]) == ["Ann", "Ann", "Bob", "Bob"]
    (faces / "face.json").write_text(json.dumps({**SETTINGS, "threshold": 1.0}))
    strict = registry.build("judge", "face", {"folder": str(faces), "crop": False})
    assert set(strict.classify(coloured([2] * 2, seed=5))["name"]) == {"unknown"}
    assert strict.fingerprint != fingerprint
    # a face is what NudeNet detects: here the right half of the second image
    box = (20, 0, 20, 40)
    answers = iter([[], [Detection("FACE_MALE", 0.9, box), Detection("FACE_MALE", 0.1, box)]])
    monkeypatch.setattr(Detector, "detect", lambda self, image: next(answers))
    (faces / "face.json").write_text(json.dumps(SETTINGS))
    cropped = registry.build("judge", "face", {"folder": str(faces)})
    image = coloured([1] * 2, seed=1)
    assert cropped.classify(image)["name"][0] == "none"
    # a square with a margin of a fifth on each side, within the image of 40x40
    assert face.cut_out(image[1].numpy(), box).shape == (40, 38, 3)
    assert face.cut_out(image[1].numpy(), (20, 10, 10, 10)).shape == (14, 14, 3)


def test_a_face_network_of_transformers(faces: Path) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(2)
    network = ViTModel(
        ViTConfig(
            image_size=32,
            patch_size=16,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    )
    (faces / "model.safetensors").unlink()
    network.save_pretrained(faces)
    (faces / "face.json").write_text(json.dumps({**SETTINGS, "network": "transformers"}))
    face.write_references(faces, faces.parent / "people", crop=False)
    judge = registry.build("judge", "face", {"folder": str(faces), "crop": False})
    assert judge.classify(coloured([0], seed=0))["name"][0] == "Ann"
    assert judge._references["Ann"].shape == (2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "vgg16"}, "unknown network of a face.json 'vgg16'"),
        ({"size": 2}, "expected a number from 8"),
        ({"mean": [0.5]}, "mean has three numbers"),
        ({"std": [0, 1, 1]}, r"expected a number from 0\.001"),
        ({"threshold": 2}, "expected a number from -1 to 1"),
        ({"extra": 1}, "expected the keys network, size, mean, std, threshold"),
    ],
)
def test_a_wrong_face_json(change: dict[str, Any], message: str, faces: Path) -> None:
    (faces / "face.json").write_text(json.dumps({**SETTINGS, **change}))
    with pytest.raises(UserError, match=message):
        face.read_settings(faces / "face.json")


def test_wrong_references(faces: Path, tmp_path: Path) -> None:
    def judge() -> Any:
        return registry.build("judge", "face", {"folder": str(faces), "crop": False})

    with pytest.raises(UserError, match=r"has no references\.safetensors"):
        _ = judge().classes
    for tensors, message in (
        ({"none": torch.ones(1, 8)}, "none of them called unknown or none"),
        ({"Ann": torch.ones(8)}, r"\[photos, width\]"),
        ({"Ann": torch.full((1, 8), torch.nan)}, "expected finite numbers"),
        ({"Ann": torch.ones(1, 8), "Bob": torch.ones(1, 4)}, "differ in width"),
        ({"Ann": torch.ones(1, 4)}, "written by another network"),
    ):
        save_file(tensors, faces / "references.safetensors")
        with pytest.raises(UserError, match=message):
            judge().classify(images_of(1))
    (tmp_path / "nobody").mkdir()
    with pytest.raises(UserError, match="expected one subfolder of photos for each person"):
        face.write_references(faces, tmp_path / "nobody")


def test_nudenet_detects_the_face_of_a_photo(faces: Path, tmp_path: Path) -> None:
    """A photograph of E. Collins by NASA, in the wheel of scikit-image (public domain)."""
    from skimage.data import astronaut

    photo = astronaut()[:256, :384]
    people = tmp_path / "photos"
    (people / "Eileen").mkdir(parents=True)
    Image.fromarray(photo).save(people / "Eileen" / "a.png")
    assert face.write_references(faces, people) == {"Eileen": 1}
    judge = registry.build("judge", "face", {"folder": str(faces)})
    blank = np.full_like(photo, 128)
    labels = judge.classify(torch.from_numpy(np.stack([photo, blank])))["name"]
    assert list(labels) == ["Eileen", "none"]
    (people / "Nobody").mkdir()
    Image.fromarray(blank).save(people / "Nobody" / "a.png")
    with pytest.raises(UserError, match="no photo shows a face"):
        face.write_references(faces, people)


def q16(folder: Path, prompts: Path) -> Any:
    options = {"prompts": str(prompts), "model": f"local-dir:{folder}"}
    return registry.build("judge", "q16", options)


def test_q16_compares_with_two_vectors(clip_folder: Path, tmp_path: Path) -> None:
    path, images = tmp_path / "q16.safetensors", images_of(4)
    save_file({"prompts": torch.ones(2, 16)}, path)
    features = torch.from_numpy(q16(clip_folder, path).features(images))
    # the vectors are the embeddings of two of the images
    save_file({"prompts": 3 * features[[0, 3]]}, path)
    judge = q16(clip_folder, path)
    labels = judge.classify(images)["content"]
    assert (labels[0], labels[3]) == ("appropriate", "inappropriate")
    cosines = torch.cosine_similarity(features[:, None], features[[0, 3]][None], dim=2)
    assert (labels == "inappropriate").tolist() == (cosines[:, 1] > cosines[:, 0]).tolist()
    assert judge.classes == {"content": ("appropriate", "inappropriate")}
    assert judge.clip_scores(images, ["a"] * 4).shape == (4,)
    settings = judge.caption_settings()
    assert settings["model"].startswith(clip_folder.name)
    assert settings["weights"] in judge.fingerprint


def test_q16_of_another_architecture_is_another_judge(clip_folder: Path, tmp_path: Path) -> None:
    """The weights are the same, and images are prepared otherwise."""
    path, copy = tmp_path / "q16.safetensors", tmp_path / "copy" / clip_folder.name
    save_file({"prompts": torch.ones(2, 16)}, path)
    shutil.copytree(clip_folder, copy)
    assert q16(copy, path).fingerprint == q16(clip_folder, path).fingerprint
    config = copy / "open_clip_config.json"
    content = json.loads(config.read_text())
    content["preprocess_cfg"] = {**content.get("preprocess_cfg", {}), "mean": [0.1, 0.2, 0.3]}
    config.write_text(json.dumps(content))
    assert q16(copy, path).fingerprint != q16(clip_folder, path).fingerprint


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2, 16)}, r"expected one tensor `prompts` of shape \[2, width\]"),
        ({"prompts": torch.ones(3, 16)}, r"expected one tensor `prompts` of shape \[2, width\]"),
        ({"prompts": torch.zeros(2, 16)}, "a vector is zero"),
        ({"prompts": torch.ones(2, 8)}, "its vectors have 8 numbers"),
    ],
)
def test_wrong_vectors_of_q16(
    tensors: dict[str, Tensor], message: str, clip_folder: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "q16.safetensors")
    with pytest.raises(UserError, match=message):
        q16(clip_folder, tmp_path / "q16.safetensors").classify(images_of(1))


def test_a_suite_names_a_judge_with_its_options(artists: Path) -> None:
    content = {
        "concept": {"artist": "van gogh"},
        "judge": {
            "name": "image_classifier",
            "folder": str(artists),
            "attribute": "artist",
            "names": {"red": "van gogh"},
        },
        "groups": {"direct": {"prompts": ["a"], "role": "forget", "n": 2}},
    }
    suite = suites.load(content)
    assert suite.build_judge().classes["artist"][0] == "van gogh"
    assert suites.load(suite.model_dump(mode="json")).build_judge() == suite.build_judge()
