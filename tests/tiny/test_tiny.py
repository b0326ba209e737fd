"""The bundled data set and model: the recorded quality, and a sample of it measured again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from concept_eraser.tiny import assemble, painter
from concept_eraser.tiny.judge import load_judge
from concept_eraser.tiny.trainer import Trainer
from concept_eraser.utils import resources

RECORD = json.loads((resources.tiny_weights() / "tiny.json").read_text())


def test_painting_is_reproducible_and_captions_describe_it() -> None:
    one, two = (painter.paint_batch(20, np.random.default_rng(7)) for _ in range(2))
    assert one[0] == two[0]
    assert (one[1] == two[1]).all()
    rng = np.random.default_rng(0)
    for scene in one[0]:
        words = painter.caption(scene, rng, full=True)
        assert any(noun in words.text for noun in (scene.shape, *painter.SYNONYMS[scene.shape]))
        assert words.stated_attributes == scene.labels()
    assert "an orange" in painter.article("orange star") + ""


def test_held_out_combinations_are_a_tenth_and_never_painted_for_training() -> None:
    scenes = [
        painter.PaintedScene(s, c, y, b)
        for s in painter.SHAPES
        for c in painter.COLORS
        for y in painter.STYLES
        for b in painter.BACKGROUNDS
    ]
    held_out_scenes = [scene for scene in scenes if painter.is_held_out(scene)]
    assert len(scenes) == 1280
    assert 0.08 < len(held_out_scenes) / len(scenes) < 0.12
    assert set(Counter(s.shape for s in held_out_scenes)) == set(painter.SHAPES)
    training_scenes, _ = painter.paint_batch(500, np.random.default_rng(0), held_out=False)
    assert not any(painter.is_held_out(scene) for scene in training_scenes)


def test_recorded_quality() -> None:
    """The numbers that the bundled weights must reach, as `tiny.build` measured them."""
    score, judge, clip = RECORD["pipeline"], RECORD["parts"]["judge"], RECORD["parts"]["clip"]
    assert score["shape_by_own_name"] >= 0.97
    assert score["accuracy"]["color"] >= 0.97
    assert min(score["by_shape"].values()) >= 0.94
    assert min(score["by_synonym"].values()) >= 0.90
    assert score["seconds_for_16_images_fp32"] <= 10
    assert judge["accuracy_shape"] >= 0.995
    assert judge["calibration_error"] < 0.02
    assert clip["zero_shot_shape"] >= 0.9
    assert clip["synonyms_right"] == clip["synonyms"]
    assert RECORD["megabytes"] <= 25
    assert RECORD["training_seconds"] < 2 * 3600
    assert RECORD["command"].startswith("python -m concept_eraser.tiny.build")
    assert RECORD["environment"]["versions"]["torch"]


def test_a_sample_agrees_with_the_recorded_quality(shared_tiny) -> None:
    """The accuracy on 50 images of held-out prompts agrees with the record."""
    rows = [
        row
        for row in assemble.held_out_prompts(np.random.default_rng(5), 5)
        if row[0] == row[1].shape
    ]
    images = shared_tiny.sample(
        [r[2] for r in rows],
        seeds=list(range(len(rows))),
        steps=20,
        guidance=5.0,
        autocast=torch.bfloat16,
    )
    logits = load_judge(resources.tiny_weights() / "judge")(
        images.permute(0, 3, 1, 2).float() / 127.5 - 1
    )
    labels = torch.tensor([scene.labels() for _, scene, _ in rows])
    for i, name in enumerate(("shape", "color")):
        right = (logits[name].argmax(1) == labels[:, i]).float().mean()
        assert right > 0.92, name  # the recorded accuracy is 0.97; the seeds are fixed


def test_the_tokenizer_has_the_real_vocabulary(shared_tiny) -> None:
    import open_clip

    tokenizer = shared_tiny.pipeline.tokenizer
    assert len(tokenizer) == 49408
    text = "a crimson five-pointed star, don't!"
    theirs = open_clip.SimpleTokenizer()(text)[0].tolist()
    assert tokenizer(text).input_ids == theirs[: theirs.index(49407) + 1]


def test_the_small_clip_is_whole_and_scores_matches_higher(shared_tiny) -> None:
    from concept_eraser.evaluation.judges.tiny import TinyJudge

    rng = np.random.default_rng(3)
    scenes, images = painter.paint_batch(64, rng)
    captions = [painter.caption(scene, rng, full=True).text for scene in scenes]
    judge = TinyJudge()
    match = judge.clip_scores(torch.from_numpy(images), captions)
    random = judge.clip_scores(torch.from_numpy(images), captions[1:] + captions[:1])
    assert (match > random).mean() > 0.95
    tower = judge._clip[0].text_model.state_dict()
    pipeline = shared_tiny.pipeline.text_encoder.state_dict()
    assert all(torch.equal(tower[k.removeprefix("text_model.")], v) for k, v in pipeline.items())


def test_a_build_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The trainer stops after a checkpoint and resumes in a new object, bit for bit."""

    def fresh(folder: Path, steps: int) -> tuple[torch.nn.Module, Trainer]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        )
        trainer = Trainer(
            "net",
            net,
            torch.optim.AdamW(net.parameters(), lr=1e-2),
            steps,
            0,
            folder,
            ema_decay=0.9,
            save_every=5,
        )
        return net, trainer

    def loss(net):
        return lambda step, rng: (
            net(torch.from_numpy(rng.normal(size=(16, 4)).astype(np.float32))).square().mean()
        )

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, trainer = fresh(tmp_path / "a", 20)
    trainer.run(loss(whole), lambda line: None)

    class Stop(Exception):
        pass

    def until(net, last):
        inner = loss(net)

        def loss_until(step, rng):
            if step == last:
                raise Stop
            return inner(step, rng)

        return loss_until

    first, trainer = fresh(tmp_path / "b", 20)
    with pytest.raises(Stop):
        trainer.run(until(first, 13), lambda line: None)
    second, trainer = fresh(tmp_path / "b", 20)
    lines: list[str] = []
    trainer.run(loss(second), lines.append)
    assert "resuming at step 10" in lines[0]
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.slow
def test_the_whole_build_runs_from_one_command(tmp_path: Path) -> None:
    """The build runs a hundredth of its steps, is killed once, and is then assembled and scored."""
    command = [
        sys.executable,
        "-m",
        "concept_eraser.tiny.build",
        "--work",
        str(tmp_path / "work"),
        "--output",
        str(tmp_path / "out"),
        "--shrink",
        "0.01",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout or []:
        if line.startswith("[") and "unet: step" in line:
            break
    process.kill()
    process.wait()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads((tmp_path / "out" / "tiny.json").read_text())["pipeline"]["n"] > 1000
    from concept_eraser.models.loading import load

    assert load(str(tmp_path / "out" / "tiny-sd")).latent_shape() == (4, 16, 16)
