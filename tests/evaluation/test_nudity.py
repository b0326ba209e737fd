"""NudeNet on a real photograph, and its counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from concept_eraser import registry
from concept_eraser.evaluation import nudity
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.evaluation.nudity import Detection, Detector
from concept_eraser.utils.errors import UserError


@pytest.fixture(scope="module")
def astronaut() -> np.ndarray:
    """NASA's portrait of Eileen Collins (public domain), as scikit-image ships it."""
    from skimage import data

    return data.astronaut()


def test_a_face_is_found_and_a_file_counts_like_its_array(
    astronaut: np.ndarray, tmp_path: Path
) -> None:
    """The values are those of nudenet 3.4 with its bundled model; turned channels would give
    others.
    """
    detector = Detector(tmp_path / "seen.jsonl")
    found = detector.look(astronaut)
    assert [d.label for d in found] == ["FACE_FEMALE"]
    assert found[0].score == pytest.approx(0.720, abs=0.01)
    assert found[0].box == pytest.approx((173, 82, 102, 98), abs=2)
    Image.fromarray(astronaut).save(tmp_path / "a.png")
    told = detector._net.detect(str(tmp_path / "a.png"))[0]
    assert (told["class"], told["score"], tuple(told["box"])) == (
        found[0].label,
        pytest.approx(found[0].score, abs=1e-6),
        found[0].box,
    )
    turned = detector.look(np.ascontiguousarray(astronaut[..., ::-1]))
    assert not turned or turned[0].score != pytest.approx(found[0].score, abs=1e-3)
    assert detector.look(np.zeros((64, 64, 3), np.uint8)) == []


def test_a_image_is_looked_at_once(
    astronaut: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "seen.jsonl"
    first = Detector(memory).look(astronaut)
    with memory.open("a") as file:
        file.write('{"image": "cut o')  # killed in the middle of a line
    other = np.zeros((64, 64, 3), np.uint8)
    assert Detector(memory).look(other) == []  # written behind the fragment
    again = Detector(memory)
    assert again.look(other) == []
    monkeypatch.setattr(Detector, "_net", property(lambda self: pytest.fail("looked again")))
    assert again.look(astronaut) == first


def hand() -> list[list[Detection]]:
    box = (0, 0, 9, 9)
    return [
        [
            Detection("FEET_EXPOSED", 0.61, box),
            Detection("FEET_EXPOSED", 0.95, box),
            Detection("FACE_FEMALE", 0.9, box),
        ],
        [Detection("ANUS_EXPOSED", 0.6, box), Detection("BELLY_EXPOSED", 0.599, box)],
        [
            Detection("FEMALE_BREAST_EXPOSED", 0.5, box),
            Detection("FEMALE_BREAST_COVERED", 0.9, box),
        ],
        [Detection("ARMPITS_EXPOSED", 0.49, box)],
        [],
    ]


@pytest.mark.parametrize(
    ("name", "total", "nude"),
    [
        ("mace", {"FEET_EXPOSED": 2}, [True, False, False, False, False]),
        ("erasediff", {"FEET_EXPOSED": 2, "ANUS_EXPOSED": 1}, [True, True, False, False, False]),
        ("rece", {"FEET_EXPOSED": 1, "ANUS_EXPOSED": 1}, [True, True, False, False, False]),
        (
            "uda",
            {"FEET_EXPOSED": 1, "ANUS_EXPOSED": 1, "BELLY_EXPOSED": 1, "FEMALE_BREAST_EXPOSED": 1},
            [True, True, True, False, False],
        ),
        ("strict", {"ANUS_EXPOSED": 1}, [False, True, False, False, False]),
        (
            "raw",
            {
                "FEET_EXPOSED": 2,
                "FACE_FEMALE": 1,
                "ANUS_EXPOSED": 1,
                "BELLY_EXPOSED": 1,
                "FEMALE_BREAST_EXPOSED": 1,
                "FEMALE_BREAST_COVERED": 1,
                "ARMPITS_EXPOSED": 1,
            },
            [True, True, True, True, False],
        ),
    ],
)
def test_presets_count_as_by_hand(name: str, total: dict[str, int], nude: list[bool]) -> None:
    rule = nudity.preset(name)
    assert {k: v for k, v in rule.count(hand()).items() if v} == total
    assert rule.nude(hand()).tolist() == nude


def test_labels_are_the_detectors() -> None:
    import nudenet.nudenet as module

    assert set(nudity.LABELS) == set(vars(module)["__labels"])
    assert len(nudity.preset("mace").classes) == 8
    assert len(nudity.preset("uda").classes) == 9
    with pytest.raises(UserError, match="unknown NudeNet preset 'mase'; did you mean 'mace'"):
        nudity.preset("mase")


def test_the_metric_counts_before_and_after(
    astronaut: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under raw the face counts: one an image before, none after; noise shows no erasure of
    anything.
    """
    metric = registry.load("metric", "nudenet")(preset="raw")
    face, blank = torch.from_numpy(astronaut), torch.zeros(512, 512, 3, dtype=torch.uint8)
    images = {"before": torch.stack([face] * 3), "after": torch.stack([blank] * 3)}
    group = Group("direct", "forget", [], images, {})
    evidence = Evidence(
        {"direct": group}, ("nudity", "nude"), registry.load("judge", "nudenet")(), 0
    )
    found = {r.metric: r for r in metric.measure(evidence)}
    assert (found["nudenet-raw_nude"].before.value, found["nudenet-raw_nude"].after.value) == (1, 0)
    assert found["nudenet-raw_face_female"].difference.value == -1
    assert found["nudenet-raw_all"].after.value == 0
    assert found["nudenet-raw_all"].before.value >= 1
    assert (
        found["nudenet-raw_nude"].p == 0.25
    )  # three images, all changed: 2 of 8 equally likely outcomes are as extreme
    assert found["nudenet-raw_face_female"].settings["unit"] == "instance"
    same = Group(
        "direct", "forget", [], {"before": images["before"], "after": images["before"]}, {}
    )
    untouched = {
        r.metric: r
        for r in metric.measure(Evidence({"direct": same}, ("nudity", "nude"), evidence.judge, 0))
    }
    assert untouched["nudenet-raw_face_female"].difference.value == 0


def test_the_judge_says_none_of_a_dressed_person(astronaut: np.ndarray) -> None:
    judge = registry.load("judge", "nudenet")()
    assert judge.look(torch.from_numpy(astronaut)[None])["nudity"].tolist() == ["none"]
    with pytest.raises(UserError, match="leave fid out"):
        judge.features(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


def test_folders_with_good_and_bad_images(astronaut: np.ndarray, tmp_path: Path, cli) -> None:
    """Alpha, grey and palette images are read; a damaged file and a single pixel are named and
    left out.
    """
    after, before = tmp_path / "after", tmp_path / "before"
    for folder in (after, before):
        folder.mkdir()
    image = Image.fromarray(astronaut)
    image.save(before / "a.png")
    image.convert("RGBA").save(before / "b.png")
    image.convert("L").save(after / "a.png")
    image.convert("P").save(after / "b.png")
    Image.new("RGB", (1, 1)).save(after / "dot.png")
    (after / "broken.jpg").write_bytes(b"no image")
    done = cli("detect", str(after), "--before", str(before), "--preset", "raw", "-o", "out", "-q")
    assert done.returncode == 0, done.stderr
    assert "left out, after: 2" in done.stderr
    assert "face_female" in done.stdout
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert content["counts"]["before"]["FACE_FEMALE"] == 2
    assert len(content["left_out"]["after"]) == 2
    assert Image.open(tmp_path / "out" / "nudenet.png").size[0] > 300
    (after / "a.png").unlink()
    refused = cli("detect", str(after), "--before", str(before), "-o", "out", "-q")
    assert (refused.returncode, "unequal sets" in refused.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    assert "no images in" in cli("detect", "empty").stderr
