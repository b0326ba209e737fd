"""NudeNet on a real photograph, and its counts by hand."""

from __future__ import annotations

import importlib.metadata
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


def test_a_face_is_detected_and_a_file_counts_like_its_array(
    astronaut: np.ndarray, tmp_path: Path
) -> None:
    """The values are those of nudenet 3.4 with its bundled model; exchanged channels give
    others.
    """
    detector = Detector(tmp_path / "seen.jsonl")
    detections = detector.detect(astronaut)
    assert [d.label for d in detections] == ["FACE_FEMALE"]
    assert detections[0].score == pytest.approx(0.720, abs=0.01)
    assert detections[0].box == pytest.approx((173, 82, 102, 98), abs=2)
    Image.fromarray(astronaut).save(tmp_path / "a.png")
    entry = detector._net.detect(str(tmp_path / "a.png"))[0]
    assert (entry["class"], entry["score"], tuple(entry["box"])) == (
        detections[0].label,
        pytest.approx(detections[0].score, abs=1e-6),
        detections[0].box,
    )
    swapped_detections = detector.detect(np.ascontiguousarray(astronaut[..., ::-1]))
    assert not swapped_detections or swapped_detections[0].score != pytest.approx(
        detections[0].score, abs=1e-3
    )
    assert detector.detect(np.zeros((64, 64, 3), np.uint8)) == []


def test_an_image_is_judged_once(
    astronaut: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "seen.jsonl"
    first = Detector(memory).detect(astronaut)
    with memory.open("a") as file:
        file.write('{"image": "cut o')  # truncated in the middle of a line
    other = np.zeros((64, 64, 3), np.uint8)
    assert Detector(memory).detect(other) == []  # the row is written after the fragment
    again = Detector(memory)
    assert again.detect(other) == []
    monkeypatch.setattr(Detector, "_net", property(lambda self: pytest.fail("looked again")))
    assert again.detect(astronaut) == first


def test_another_version_of_nudenet_has_a_cache_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = []
    for version in ("3.4.2", "3.5.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        paths.append(Detector()._path)
    assert paths[0] != paths[1]
    assert all(Detector().fingerprint in path.name for path in paths)


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
    """With the preset raw the face counts: one for each image before, none after."""
    metric = registry.load("metric", "nudenet")(preset="raw")
    face, blank = torch.from_numpy(astronaut), torch.zeros(512, 512, 3, dtype=torch.uint8)
    images = {"before": torch.stack([face] * 3), "after": torch.stack([blank] * 3)}
    group = Group("direct", "forget", [], images, {})
    evidence = Evidence(
        {"direct": group}, ("nudity", "nude"), registry.load("judge", "nudenet")(), 0
    )
    results = {r.metric: r for r in metric.measure(evidence)}
    assert (results["nudenet-raw_nude"].before.value, results["nudenet-raw_nude"].after.value) == (
        1,
        0,
    )
    assert results["nudenet-raw_face_female"].difference.value == -1
    assert results["nudenet-raw_all"].after.value == 0
    assert results["nudenet-raw_all"].before.value >= 1
    assert (
        results["nudenet-raw_nude"].p == 0.25
    )  # three images, all changed: 2 of 8 equally likely outcomes are as extreme
    assert results["nudenet-raw_face_female"].settings["unit"] == "instance"
    same = Group(
        "direct", "forget", [], {"before": images["before"], "after": images["before"]}, {}
    )
    unchanged_results = {
        r.metric: r
        for r in metric.measure(Evidence({"direct": same}, ("nudity", "nude"), evidence.judge, 0))
    }
    assert unchanged_results["nudenet-raw_face_female"].difference.value == 0


def test_all_detections_of_an_image_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given detections in place of the network's: one belly before; two feet and a belly after."""
    belly, foot = (
        nudity.Detection(label, 0.9, (0, 0, 4, 4)) for label in ("BELLY_EXPOSED", "FEET_EXPOSED")
    )
    detections = [[belly], [belly, foot, foot]]
    monkeypatch.setattr(
        nudity.Detector, "detect", lambda self, image: detections[int(image[0, 0, 0])]
    )
    images = {
        when: torch.full((2, 8, 8, 3), place, dtype=torch.uint8)
        for place, when in enumerate(("before", "after"))
    }
    group = Group("direct", "forget", [], images, {})
    judge = registry.load("judge", "nudenet")()
    metric = registry.load("metric", "nudenet")()
    results = {
        r.metric: (r.before.value, r.after.value)
        for r in metric.measure(Evidence({"direct": group}, ("nudity", "nude"), judge, 0))
    }
    assert results == {
        "nudenet_nude": (1, 1),
        "nudenet_belly_exposed": (1, 1),
        "nudenet_feet_exposed": (0, 2),  # a class that is detected after the erasure only
        "nudenet_all": (1, 3),
    }


def test_the_judge_labels_a_dressed_person_none(astronaut: np.ndarray) -> None:
    judge = registry.load("judge", "nudenet")()
    assert judge.classify(torch.from_numpy(astronaut)[None])["nudity"].tolist() == ["none"]
    with pytest.raises(UserError, match="leave fid out"):
        judge.features(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


def test_folders_with_good_and_bad_images(astronaut: np.ndarray, tmp_path: Path, cli) -> None:
    """Images with alpha, grey or a palette are read.

    A damaged file and an image of one pixel are named and left out.
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
    result = cli(
        "detect", str(after), "--before", str(before), "--preset", "raw", "-o", "out", "-q"
    )
    assert result.returncode == 0, result.stderr
    assert "left out, after: 2" in result.stderr
    assert "face_female" in result.stdout
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert content["counts"]["before"]["FACE_FEMALE"] == 2
    assert len(content["left_out"]["after"]) == 2
    assert Image.open(tmp_path / "out" / "nudenet.png").size[0] > 300
    command = ("detect", str(after), "--before", str(before), "-o", "out", "-q")
    assert cli(*command, "--preset", "raw").returncode == 0, "the same again"
    for other in (command, ("detect", str(before), "--preset", "raw", "-o", "out", "-q")):
        refusal = cli(*other)
        assert refusal.returncode == 2
        assert "is not replaced; give another folder with --output" in refusal.stderr
    assert (
        json.loads((tmp_path / "out" / "detections.json").read_text())["counts"]
        == (content["counts"])
    )
    (after / "a.png").unlink()
    refusal = cli("detect", str(after), "--before", str(before), "-o", "out", "-q")
    assert (refusal.returncode, "unequal sets" in refusal.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    assert "no images in" in cli("detect", "empty").stderr
