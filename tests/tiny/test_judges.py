"""The second judge and the second CLIP: their images, networks, training and records."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from concept_eraser.tiny import build, half_erased, painter
from concept_eraser.tiny.clip2 import UNKNOWN, SecondClipNet, caption_words, tokenize
from concept_eraser.tiny.judge2 import CLASSES, Block, load_judge2
from concept_eraser.tiny.stages import STAGES, Stage
from concept_eraser.tiny.stages.judge2 import draw_batch
from concept_eraser.utils.errors import UserError


def contrast(image: np.ndarray) -> float:
    """The mean distance of the pixels from the colour of the corner, where no ink is."""
    return float(np.abs(image - image[0, 0]).mean())


@pytest.mark.parametrize("kind", ["wiped", "faded"])
def test_less_of_a_drawing_is_left_where_the_label_is_none(kind: str) -> None:
    """Whole drawings keep all labels, and no half-erased one has a label of another drawing."""
    scene = painter.PaintedScene("star", "red", "flat", "white")
    rng = np.random.default_rng(0)
    contrasts: dict[int, list[float]] = {0: [], half_erased.NONE[0]: [], half_erased.IGNORED: []}
    for _ in range(120):
        image, labels = half_erased.KINDS[kind](scene, rng)
        contrasts[labels[0]].append(contrast(image))
        for label, value, none in zip(labels, scene.labels(), half_erased.NONE, strict=True):
            assert label in (value, none, half_erased.IGNORED)
        assert labels[3] == scene.labels()[3]
    assert min(map(len, contrasts.values())) >= 10
    middle = np.median(contrasts[half_erased.IGNORED])
    assert np.median(contrasts[half_erased.NONE[0]]) < middle < np.median(contrasts[0])


def test_noise_takes_every_label_and_bending_only_the_shape() -> None:
    scene = painter.PaintedScene("star", "red", "dotted", "sky")
    rng = np.random.default_rng(1)
    labels = {half_erased.dissolve(scene, rng)[1] for _ in range(80)}
    assert {scene.labels(), half_erased.NONE} <= labels
    assert half_erased.bend(scene, rng)[1] == (half_erased.NONE[0], *scene.labels()[1:])


def test_every_head_learns_none_and_no_held_out_drawing_is_drawn(monkeypatch) -> None:
    painted: list[painter.PaintedScene] = []
    draw = painter.random_scene

    def record(rng: np.random.Generator, *, held_out: bool | None = None) -> painter.PaintedScene:
        scene = draw(rng, held_out=held_out)
        if held_out is not None:
            painted.append(scene)
        return scene

    monkeypatch.setattr(painter, "random_scene", record)
    monkeypatch.setattr(half_erased, "random_scene", record)
    images, labels = draw_batch(96, np.random.default_rng(0))
    assert images.shape == (96, 3, 64, 64)
    assert len(painted) == 72  # the others are garbage, which shows no combination
    assert not any(map(painter.is_held_out, painted))
    for i, (name, classes) in enumerate(CLASSES.items()):
        assert (labels[name] == half_erased.NONE[i]).any(), name
        assert labels[name].max() == len(classes) - 1


def test_a_block_equals_torchs_transformer_layer() -> None:
    torch.manual_seed(0)
    block = Block(16, 4)
    layer = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    ours = block.state_dict()
    names = {
        "self_attn.in_proj_": "qkv.",
        "self_attn.out_proj.": "out.",
        "linear1.": "mlp.0.",
        "linear2.": "mlp.2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    theirs = {
        name + kind: ours[own + kind] for name, own in names.items() for kind in ("weight", "bias")
    }
    layer.load_state_dict(theirs)
    x = torch.randn(2, 5, 16)
    assert torch.allclose(block(x), layer(x), atol=1e-5)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    masked = layer(x, src_key_padding_mask=~mask)
    assert torch.allclose(block(x, mask[:, None, None, :])[1, :3], masked[1, :3], atol=1e-5)
    assert not torch.allclose(block(x)[1, :3], masked[1, :3], atol=1e-3)


def test_the_text_tower_reads_captions_and_one_row_for_all_other_tokens(shared_tiny) -> None:
    tokenizer = shared_tiny.pipeline.tokenizer
    tokens = {token for words in caption_words() for token in tokenizer(words).input_ids}
    torch.manual_seed(0)
    clip = SecondClipNet(sorted(tokens)).eval()
    rng = np.random.default_rng(0)
    captions = [painter.caption(painter.random_scene(rng), rng).text for _ in range(300)]
    ids, mask = tokenize(tokenizer, captions)
    assert (clip.rows_of(ids)[mask] != UNKNOWN).all()
    assert len(set(clip.rows_of(torch.tensor(sorted(tokens))).tolist())) == len(tokens)
    strange, _ = tokenize(tokenizer, ["zebra"])
    assert clip.rows_of(strange)[0, 1] == UNKNOWN
    alone = clip.embed_ids(*tokenize(tokenizer, captions[:1]))
    together = clip.embed_ids(ids, mask)
    assert torch.allclose(alone[0], together[0], atol=1e-5)  # padding has no influence
    assert len(torch.unique((together @ together[0]).round(decimals=4))) > 100


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["judge2", "clip2"])
def test_a_stopped_training_ends_with_the_same_weights(name: str, tmp_path: Path, monkeypatch):
    """The training is stopped once, resumed by the command, and published with its record."""
    monkeypatch.setattr(f"concept_eraser.tiny.stages.{name}.BATCH", 16)

    def stop(line: str) -> None:
        if f"{name}: step" in line:
            raise Stop

    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    STAGES[name](Stage(tmp_path / "whole", 0, lambda line: None, shrink=1e-3, save_every=1))
    with pytest.raises(Stop):
        STAGES[name](Stage(tmp_path / "stopped", 0, stop, shrink=1e-3, save_every=1))
    assert not (tmp_path / "stopped" / name).exists()
    args = argparse.Namespace(
        work=tmp_path / "stopped", output=tmp_path / "out", seed=0, threads=1, shrink=1e-3
    )
    build._train_only((name,), args)
    files = [tmp_path / folder / name / "model.safetensors" for folder in ("whole", "out")]
    weights = [file.read_bytes() for file in files]
    assert weights[0] == weights[1]
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert record["sha256"] == hashlib.sha256(weights[1]).hexdigest()
    assert record["command"].startswith(f"python -m concept_eraser.tiny.build --only {name}")
    assert record["seed"] >= 1000  # not the seed of the first judge and the first CLIP
    assert record["steps"] == 4
    assert str(tmp_path) not in json.dumps(record)
    if name == "judge2":
        judge = load_judge2(tmp_path / "out" / name)
        assert judge.temperatures.tolist() == pytest.approx(record["temperatures"])
        assert {"accuracy_color", "none_noise_background", "kept_wiped_shape"} <= set(record)
    else:
        assert {"zero_shot_shape", "synonyms_right", "match_mean"} <= set(record)
    with pytest.raises(UserError, match=r"other settings \(seed\); give another --work"):
        build._train_only((name,), argparse.Namespace(**{**vars(args), "seed": 1}))
    assert json.loads((tmp_path / "out" / f"{name}.json").read_text()) == record


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, output=None, seed=0, threads=1, shrink=1e-3)
    with pytest.raises(SystemExit, match="unknown part 'judge3'"):
        build._train_only(("judge3",), args)


def test_a_part_of_unknown_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge2.json").write_text("{}")
    args = argparse.Namespace(work=tmp_path, output=None, seed=0, threads=1, shrink=1e-3)
    with pytest.raises(UserError, match="the part judge2 with unknown settings"):
        build._train_only(("judge2",), args)
