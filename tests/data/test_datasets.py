"""Named data sets.

The bundled sets have the content that they state. The sets of torchvision are read from copies in
their on-disk format.
"""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from concept_eraser import api, registry
from concept_eraser.data.labelled import choose
from concept_eraser.models.families.clip import Clip
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError
from studies import train_classifier


def image(path: Path, tone: int, size: tuple[int, int] = (90, 70)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (tone, tone, tone)).save(path)


def test_the_split_of_digits_is_fixed() -> None:
    train, test = (
        registry.build("dataset", "digits", {}).load(split) for split in ("train", "test")
    )
    assert (len(train), len(test)) == (1437, 360)
    assert train.inputs([0]).shape == (1, 64)
    assert 0 <= float(train.inputs(range(50)).min()) <= float(train.inputs(range(50)).max()) <= 1
    assert registry.build("dataset", "digits", {"flat": False}).load("test").inputs([0]).shape == (
        1,
        1,
        8,
        8,
    )


def test_fonts_are_seeded_cached_and_legible() -> None:
    """A small classifier learns them in seconds, so the images show digits."""
    from sklearn.neural_network import MLPClassifier

    plugin = registry.build("dataset", "fonts", {"n": 1800})
    train, test = plugin.load("train"), plugin.load("test")
    assert (len(train), len(test)) == (1800, 300)
    again = plugin.load("train")
    assert (again.inputs(range(9)) == train.inputs(range(9))).all()
    classifier = MLPClassifier((100,), max_iter=60, random_state=0).fit(
        train.inputs(range(1800)).numpy(), train.labels.numpy()
    )
    assert classifier.score(test.inputs(range(300)).numpy(), test.labels.numpy()) > 0.8
    with pytest.raises(UserError, match="n must be at least 60"):
        registry.build("dataset", "fonts", {"n": 10})


def test_the_judge_labels_painted_scenes_correctly(shared_tiny) -> None:
    judge = registry.load("judge", "tiny")()
    data = registry.build("dataset", "painted", {"n": 100}).load("train")
    images = data.inputs(range(100)).permute(0, 2, 3, 1).add(1).mul(127.5).round().byte()
    shapes = judge.classify(images)["shape"]
    assert np.mean(shapes == np.array(data.names)[data.labels.numpy()]) > 0.95
    assert registry.build("dataset", "painted", {"n": 20, "size": 32}).load("test").inputs(
        [0]
    ).shape == (1, 3, 32, 32)


def train_and_erase(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[Path, Path]:
    """Train a small classifier with the study's command, and run two steps of the recipe on it.

    Args:
        name: The data set, which is that of a recipe of MUNBa's Tables 1 and 9.
        root: The folder of its files.
        monkeypatch: Sets the command line.
        options: Further options of the data set.

    Returns:
        The folders of the classifier and of the run.
    """
    data = {"root": root, **options}
    classifier = root / "classifier"
    command = ["train_classifier", name, "--set", *(f"{k}={v}" for k, v in data.items())]
    command += ["--options", "width=2", "--epochs", "1", "-o", str(classifier)]
    monkeypatch.setattr("sys.argv", command)
    train_classifier.main()
    recipe = "celeba_hq_munba" if name == "celeba_hq" else f"{name}_class_munba"
    changes = [f"forget.options.{key}={value}" for key, value in data.items()]
    changes += ["training.steps=2", "training.batch_size=2", "training.device=cpu"]
    run = api.erase(recipe, model=classifier, overrides=changes, output=root / "run")
    return classifier, run.folder


def test_cifar10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision.datasets import CIFAR10

    # the checksums are those of the real files
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        content = {
            "data": np.full((4, 3072), 255 * (i % 2), dtype=np.uint8),
            "labels": [0, 1, 2, 3],
        }
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": ["airplane", "car", "bird", "cat"]})
    )
    train = registry.build("dataset", "cifar10", {"root": str(tmp_path)}).load("train")
    assert (len(train), train.names[2]) == (20, "bird")
    assert train.inputs([0, 4]).amin((1, 2, 3)).tolist() == [-1.0, 1.0]
    assert train.inputs([0]).shape == (1, 3, 32, 32)
    classifier, run = train_and_erase("cifar10", tmp_path, monkeypatch)
    assert (run / "model" / "model.safetensors").is_file()
    assert "of 4 test examples are right" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_classifier.main()
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert classifier.is_dir()


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import SVHN

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    for split in ("train", "test"):
        pixels, digits = np.zeros((32, 32, 3, 5), dtype=np.uint8), [[1], [2], [10], [3], [10]]
        savemat(tmp_path / f"{split}_32x32.mat", {"X": pixels, "y": np.array(digits)})
    train = registry.build("dataset", "svhn", {"root": str(tmp_path)}).load("train")
    assert train.labels.tolist() == [1, 2, 0, 3, 0]  # the file says 10 for the digit 0
    assert train.inputs([1]).shape == (1, 3, 32, 32)
    _, run = train_and_erase("svhn", tmp_path, monkeypatch)
    assert (run / "model" / "model.safetensors").is_file()


def tiny_open_clip() -> Clip:
    """A CLIP model of open_clip with random weights, for images of 32 pixels."""
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(
        layers=1, width=32, head_width=16, patch_size=16, image_size=32
    )
    text = open_clip.CLIPTextCfg(context_length=77, vocab_size=49408, width=32, heads=2, layers=1)
    return Clip.from_object(open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def test_oxford_pets(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    for name, tone in (("Abyssinian_1", 0), ("beagle_2", 255)):
        image(base / "images" / f"{name}.jpg", tone)
    (base / "annotations" / "trainval.txt").write_text("Abyssinian_1 1 1 1\nbeagle_2 2 2 1\n")
    pets = registry.build("dataset", "oxford_pets", {"root": str(tmp_path), "size": 32}).load(
        "train"
    )
    assert pets.names == ("Abyssinian", "Beagle")
    assert pets.inputs([0, 1]).shape == (2, 3, 32, 32)
    changes = [f"forget.options={{root: {tmp_path}, size: 32}}"]
    changes += ["training.steps=2", "training.batch_size=2", "training.device=cpu"]
    run = api.erase(
        "pets_clip_munba", model=tiny_open_clip(), overrides=changes, output=tmp_path / "run"
    )
    assert (run.folder / "weights.safetensors").is_file()


def test_imagenette(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for folder in ("n01440764", "n02102040"):
            image(tmp_path / "imagenette2-160" / split / folder / "a.JPEG", 128)
    plugin = registry.build("dataset", "imagenette", {"root": str(tmp_path), "size": 32})
    assert plugin.load("train").names[:2] == ("tench", "English springer")
    assert plugin.load("test").inputs([1]).shape == (1, 3, 32, 32)


def imagenet_files(root: Path, images: dict[str, int]) -> None:
    """Write the 1,000 folders of the validation images, with grey images in some of them."""
    for i in range(1000):
        (root / "val" / f"n{1440764 + i:08}").mkdir(parents=True)
    for synset, tone in images.items():
        image(root / "val" / synset / "ILSVRC2012_val_1.JPEG", tone)


def test_imagenet(tmp_path: Path) -> None:
    imagenet_files(tmp_path, {"n01440764": 0, "n01441763": 255})
    plugin = registry.build("dataset", "imagenet", {"root": str(tmp_path), "size": 32})
    data = plugin.load("test")
    # the first and the last class, as torchvision's judge numbers them too
    assert [data.names[int(i)] for i in data.labels] == ["tench", "toilet paper"]
    assert data.inputs([0, 1]).amax((1, 2, 3)).tolist() == pytest.approx([-1.0, 1.0], abs=0.02)
    assert plugin.known_facts().shape == tuple(data.inputs([0]).shape[1:])
    assert len(plugin.known_facts().names) == 1000
    folder = tmp_path / "val" / "n01441763"
    folder.rename(folder.with_name("toilet paper"))
    with pytest.raises(UserError, match=r"found 1,000, 'toilet paper' among them"):
        plugin.load("test")
    folder.with_name("toilet paper").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"expected 1,000 folders .* found 999; with fewer"):
        plugin.load("test")


def test_the_names_of_imagenet_have_torchvisions_order() -> None:
    """Both lists number the classes by synset. open_clip's names are other synonyms of most."""
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    from concept_eraser.data.datasets.imagenet import class_names

    pairs = list(zip(class_names(), _IMAGENET_CATEGORIES, strict=True))
    assert sum(one.lower() == two.lower() for one, two in pairs) > 600
    assert pairs[497][0].startswith("church")


def test_celeba_hq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people = sorted(str(1000 + 3 * i) for i in range(307))
    for split in ("train", "test"):
        for person in people:
            image(tmp_path / split / person / "0.jpg", 30, (16, 16))
    data = registry.build("dataset", "celeba_hq", {"root": str(tmp_path), "size": 16}).load("test")
    assert data.names == tuple(people)
    assert data.inputs([0]).shape == (1, 3, 16, 16)
    # the recipe forgets every tenth of the sorted folders
    _, run = train_and_erase("celeba_hq", tmp_path, monkeypatch, size=16)
    forgotten = choose(data, classes=recipes.load_run(run).forget.classes)
    assert [people[int(i)] for i in forgotten] == people[::10]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "name",
    ["cifar10", "svhn", "oxford_pets", "imagenette", "imagenet", "celeba_hq", "mnist", "celeba"],
)
def test_missing_files_are_one_clear_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not at .*nowhere.*root"):
        registry.build("dataset", name, {"root": str(tmp_path / "nowhere")}).load("train")


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the format of MNIST's files."""
    header = bytes([0, 0, 8, array.ndim])
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_files(tmp_path: Path) -> Path:
    """Four files of MNIST's format; those of the training split are compressed."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, n in (("train", 6), ("t10k", 3)):
        images, labels = rng.integers(0, 256, (n, 28, 28)), np.arange(n) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx(array)
            packed = gzip.compress(content) if name == "train" else content
            suffix = ".gz" if name == "train" else ""
            (folder / f"{name}-{kind}-ubyte{suffix}").write_bytes(packed)
    return folder


def test_mnist(mnist_files: Path, tmp_path: Path) -> None:
    plugin = registry.build("dataset", "mnist", {"root": str(tmp_path)})
    train, test = plugin.load("train"), plugin.load("test")
    assert (len(train), len(test), train.names) == (6, 3, tuple("0123456789"))
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    values = np.random.default_rng(0).integers(0, 256, (6, 28, 28))
    assert np.allclose(train.inputs([5]).numpy(), values[5].reshape(1, 784) / 255)
    square = registry.build("dataset", "mnist", {"root": str(mnist_files), "flat": False})
    assert square.load("test").inputs([0, 1]).shape == (2, 1, 28, 28)
    assert plugin.known_facts().shape == tuple(train.inputs([0]).shape[1:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08\x03" + b"\0" * 4, "is no idx file of bytes in 3 dimensions"),
        (idx(np.zeros((3, 28, 28)))[:-1], "it is damaged, copy it again"),
        (idx(np.zeros((2, 28, 28))), "2 images and 3 labels"),
        (idx(np.zeros((3, 20, 20))), "expected images of 28x28"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "it is damaged, copy it again"),
    ],
)
def test_damaged_files_of_mnist(content: bytes, message: str, mnist_files: Path) -> None:
    (mnist_files / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError, match=message):
        registry.build("dataset", "mnist", {"root": str(mnist_files)}).load("test")


def test_a_damaged_archive_of_mnist(mnist_files: Path) -> None:
    (mnist_files / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="is damaged"):
        registry.build("dataset", "mnist", {"root": str(mnist_files)}).load("train")


@pytest.fixture
def celeba_files(tmp_path: Path) -> Path:
    """Four faces of two attributes in CelebA's files."""
    tones = {"000001.jpg": 0, "000002.jpg": 255, "000003.jpg": 128, "000004.jpg": 30}
    for name, tone in tones.items():
        image(tmp_path / "img_align_celeba" / name, tone, (178, 218))
    (tmp_path / "list_attr_celeba.txt").write_text(
        "4\nSmiling Male \n000001.jpg  1 -1\n000002.jpg -1  1\n000003.jpg  1  1\n000004.jpg -1 -1\n"
    )
    (tmp_path / "list_eval_partition.txt").write_text(
        "000001.jpg 0\n000002.jpg 0\n000003.jpg 2\n000004.jpg 1\n"
    )
    return tmp_path


def test_celeba(celeba_files: Path) -> None:
    plugin = registry.build("dataset", "celeba", {"root": str(celeba_files), "size": 32})
    train, test = plugin.load("train"), plugin.load("test")
    assert (train.names, train.labels.tolist()) == (("not Male", "Male"), [0, 1])
    assert test.labels.tolist() == [1]
    assert train.inputs([0, 1]).shape == (2, 3, 32, 32)
    assert train.inputs([0, 1]).is_contiguous()
    assert train.inputs([0, 1]).amax((1, 2, 3)).tolist() == pytest.approx([-1.0, 1.0], abs=0.02)
    options = {"root": str(celeba_files), "attribute": "Smiling"}
    smiling = registry.build("dataset", "celeba", options).load("train")
    assert smiling.labels.tolist() == [1, 0]
    assert smiling.inputs([0]).min() == pytest.approx(-1.0, abs=0.02)
    assert plugin.known_facts().names == train.names


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("list_attr_celeba.txt", "1\nSmiling\na.jpg 1\n", "unknown attribute"),
        ("list_attr_celeba.txt", "1\nMale\n000001.jpg 2\n", "line 3: expected a name and 1"),
        ("list_attr_celeba.txt", "1\nMale\n000001.jpg 1\n", r"no attributes of 000002\.jpg"),
        ("list_eval_partition.txt", "000001.jpg 7\n", "line 1: expected the name of an image"),
        ("list_eval_partition.txt", "../a.jpg 0\n", "line 1: expected the name of an image"),
        ("list_eval_partition.txt", "000001.jpg 2\n", "names no image of the split 'train'"),
    ],
)
def test_damaged_lists_of_celeba(name: str, text: str, message: str, celeba_files: Path) -> None:
    (celeba_files / name).write_text(text)
    with pytest.raises(UserError, match=message):
        registry.build("dataset", "celeba", {"root": str(celeba_files)}).load("train")
