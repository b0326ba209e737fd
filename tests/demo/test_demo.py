"""The demo without a browser.

The tests cover limits, names, strength, the queue with real processes, attacks, images and links.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from concept_eraser import api
from concept_eraser.demo import (
    attack,
    attack_job,
    compare,
    erase,
    figures,
    image_html,
    jobs,
    labelled,
    polling,
    presets,
    results,
    safety,
)
from concept_eraser.demo.context import Desk, job_list, minutes
from concept_eraser.demo.state import ImageSettings, Library, _apply_change
from concept_eraser.evaluation.attacks import excess
from concept_eraser.evaluation.nudity import Detection
from concept_eraser.models.base import moments, to_pixels
from concept_eraser.recipes import recipe
from concept_eraser.reporting import control_tables
from concept_eraser.utils.errors import Interrupted, UserError
from tests.conftest import short
from tests.processes import DemoWorker

SETTINGS = [ImageSettings("a red star", seed, 2, 5.0) for seed in (0, 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with one short run that erases the star."""
    folder = tmp_path_factory.mktemp("demo") / "runs"
    api.erase(short(model="tiny-sd", training__lr=1e-2, training__steps=8), output=folder / "star")
    return folder


@pytest.fixture(autouse=True)
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of jobs, so that they start with the libraries.

    The tests in a browser start them as the page does.
    """
    monkeypatch.setattr(jobs, "_start_worker", DemoWorker)


@pytest.fixture
def desk(runs: Path) -> Iterator[Desk]:
    new_desk = Desk(Library(runs))
    yield new_desk
    new_desk.jobs.close()


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Desk]:
    new_desk = Desk(Library(tmp_path / "runs"))
    yield new_desk
    new_desk.jobs.close()


def wait(desk: Desk, job: Any, *states: str, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while job.state not in states:
        assert time.monotonic() < until, f"{job} did not become {states}"
        time.sleep(0.05)


def test_strength_is_the_original_at_0_and_the_run_at_1_bit_for_bit(desk: Desk, runs: Path) -> None:
    library, whole = desk.library, api.load(runs / "star")
    before, after = library.draw(None, SETTINGS), library.draw("star", SETTINGS)
    base = library.model("tiny-sd")
    weights = {k: v.clone() for k, v in base.denoiser.state_dict().items()}
    half = library.draw("star", SETTINGS, 0.5)
    assert torch.equal(
        before, api.load("tiny-sd").sample(["a red star"] * 2, seeds=[0, 1], steps=2, guidance=5.0)
    )
    assert torch.equal(after, whole.sample(["a red star"] * 2, seeds=[0, 1], steps=2, guidance=5.0))
    assert torch.equal(library.draw("star", SETTINGS, 0.0), before)
    assert not torch.equal(half, before)
    assert not torch.equal(half, after)
    # the base model has its original weights
    assert all(torch.equal(v, weights[k]) for k, v in base.denoiser.state_dict().items())


def test_images_are_remembered_and_a_dropped_run_frees_its_memory(desk: Desk) -> None:
    library = desk.library
    library.draw("star", SETTINGS)
    calls: list[int] = []
    library.draw("star", SETTINGS, tell=lambda count, total: calls.append(count))
    assert calls == []
    assert library.memory_use()["runs"] == 1
    library.drop("star")
    assert library.memory_use() == {"bases": 1, "runs": 0, "images": 0}
    assert "star" not in library.finished_runs()
    with pytest.raises(UserError, match="unknown finished run 'star'"):
        library.draw("star", SETTINGS)


def test_generation_can_be_stopped(desk: Desk) -> None:
    def stop(count: int, total: int) -> None:
        desk.library.stop()

    with pytest.raises(Interrupted):
        desk.library.draw(None, [ImageSettings("a tree", 5, 4, 5.0)], tell=stop)
    assert desk.library.draw(None, [ImageSettings("a tree", 5, 2, 5.0)]).shape == (1, 64, 64, 3)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc",
        "/etc/passwd",
        "..",
        "star/../..",
        "",
        ".",
        "a/b",
        "a\x00b",
        "x" * 65,
        None,
        7,
        "-rf",
    ],
)
def test_no_name_leads_out_of_the_runs_folder(desk: Desk, name: Any) -> None:
    with pytest.raises(UserError):
        safety.new_folder(desk.runs, name)
    with pytest.raises(UserError):
        desk.library.folder(name)
    for call in (
        lambda: desk.library.load_change(name),
        lambda: erase.resume(desk, name),
        lambda: results.measure(desk, name, 10),
        lambda: results.table(name),
        lambda: results.pareto(desk, name),
        lambda: labelled.pair(desk, name),
    ):
        with pytest.raises(UserError):
            call()
    with pytest.raises(UserError):
        attack.start(desk, name, "seed_search", 2, 2, 10, 0)


def test_a_link_out_of_the_runs_folder_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "door").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out"):
        safety.new_folder(tmp_path / "runs", "door")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "x" * 301}, "301 characters"),
        ({"prompt": " "}, "empty"),
        ({"prompt": None}, "empty"),
        ({"steps": 51}, "1 to 50"),
        ({"steps": 1.5}, "whole number"),
        ({"steps": "many"}, "expected a number"),
        ({"guidance": float("nan")}, "0 to 20"),
        ({"seeds": 9}, "1 to 8"),
        ({"first": -1}, "found -1"),
        ({"strength": 2}, "0 to 1"),
        ({"judge": "me"}, "unknown judge"),
        ({"runs": ("a", "b", "c", "d", "e")}, "at most 4"),
    ],
)
def test_limits_are_sentences(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare.ComparisonSettings(**change).check()


def test_a_stop_between_two_columns_ends_the_comparison(desk: Desk) -> None:
    texts: list[str] = []

    def stop(share: float, text: str) -> None:
        texts.append(text)
        if text.endswith("step 3 of 3"):
            desk.library.stop()

    settings = compare.ComparisonSettings("a tree", ("star",), steps=3, seeds=1)
    with pytest.raises(Interrupted):
        compare.draw(desk, settings, stop)
    assert {text.partition(":")[0] for text in texts} == {"generating before"}
    assert "generating" not in compare.draw(desk, settings)  # the next one goes on


def test_the_summary_is_of_the_concepts_of_the_runs_in_the_columns(
    runs: Path, tmp_path: Path
) -> None:
    """A red circle counts beside a run that erased the circle, and not in another's ladder."""
    shutil.copytree(runs / "star", tmp_path / "star")
    shutil.copytree(runs / "star", tmp_path / "circle")
    path = tmp_path / "circle" / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    forget = tmp_path / "forget.yaml"
    forget.write_text(presets.prompt_set("shape", ["circle"]))
    content["forget"] |= {"prompts": str(forget), "anchor": {"shape": "moon"}}
    path.write_text(yaml.safe_dump(content))
    desk = Desk(Library(tmp_path))
    try:
        settings = compare.ComparisonSettings("a red circle", ("star", "circle"), steps=6, seeds=1)
        both, ladder = (compare.draw(desk, settings, ladder=ladder) for ladder in (False, True))
    finally:
        desk.jobs.close()
    assert "Shows star or circle: <b>before</b> 1 of 1" in both
    assert "Shows the concept: <b>before</b> 0 of 1" in ladder


def test_a_menu_keeps_the_choice_of_the_user(empty: Desk) -> None:
    import gradio as gr

    form = {"steps": 400, "images": 4}
    for name in ("a", "b", "c"):
        job = erase.start(empty, erase.Form(**form, name=name))
    state = polling.changes(gr, empty, {}, [])[6]
    other = erase.start(empty, erase.Form(**form, name="d"))  # of another session
    number = str(job.number)
    assert polling.changes(gr, empty, state, [], chosen_job=number)[8].value == number
    empty.jobs.cancel(job.number)
    assert polling.changes(gr, empty, state, [], chosen_job=number)[8].value == "1"
    assert other.active


def test_a_link_brings_the_settings_back_and_bad_ones_keep_their_default() -> None:
    settings = compare.ComparisonSettings(
        "a blue <b>star</b> & moon", ("star",), 0.5, 7, 3.5, 2, 11, "none"
    )
    assert (
        compare.ComparisonSettings.read(dict(parse_qsl(settings.query())), ["star", "other"])
        == settings
    )
    for runs in ((), ("star",)):  # also of no run, i.e. of the original alone
        query = dict(parse_qsl(compare.ComparisonSettings(runs=runs).query(), True))
        assert compare.ComparisonSettings.read(query, ["star"]).runs == runs
    bad = {
        "prompt": "y" * 999,
        "steps": "1000",
        "guidance": "a",
        "runs": "../x,star",
        "judge": "$(id)",
        "more": "?",
    }
    assert compare.ComparisonSettings.read(bad, ["star"]) == compare.ComparisonSettings(
        runs=("star",)
    )


def test_every_run_that_is_listed_can_be_compared_and_linked(runs: Path, tmp_path: Path) -> None:
    names = [f"{letter * (safety.NAME - 4)},%2C" for letter in "abcd"]
    for name in (*names, "e" * (safety.NAME + 1)):
        shutil.copytree(
            runs / "star", tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors")
        )
    library = Library(tmp_path)
    assert sorted(library.finished_runs()) == names
    settings = compare.ComparisonSettings(runs=tuple(names), steps=1, seeds=1)
    assert settings.check().runs == settings.runs
    query = dict(parse_qsl(settings.query()))
    assert compare.ComparisonSettings.read(query, names).runs == settings.runs


def test_compare_shows_both_models_and_escapes_the_prompt(desk: Desk) -> None:
    settings = compare.ComparisonSettings(
        "a red star <script>alert(1)</script>", ("star",), steps=2, seeds=2
    )
    html = compare.draw(desk, settings)
    assert html.count("<figure") == 4
    assert "<script" not in html
    assert "Shows the concept" in html
    assert 'alt="before, seed 0:' in html
    assert all(
        f"star at {s:g}" in compare.draw(desk, settings, ladder=True) for s in compare.LADDER
    )
    assert "before" in compare.draw(
        desk, compare.ComparisonSettings("a red star", (), steps=2, seeds=1)
    )


def test_presets_are_prompts_of_the_runs_kind(desk: Desk) -> None:
    assert "star" in compare.preset(desk, "forget", ["star"], "")
    first = compare.preset(desk, "synonym", ["star"], "")
    assert compare.preset(desk, "synonym", ["star"], first) != first
    assert any(word in first for word in ("pentagram", "five"))
    assert any(
        word in compare.preset(desk, "neighbour", ["star"], "") for word in ("cross", "tree")
    )
    assert "star" not in compare.preset(desk, "retain", ["star"], "")


def test_an_image_carries_its_settings() -> None:
    file = image_html.png(np.zeros((4, 4, 3), np.uint8), {"prompt": "ein grüner Stern", "seed": 3})
    image = Image.open(io.BytesIO(file))
    assert json.loads(image.text["concept_eraser"]) == {"prompt": "ein grüner Stern", "seed": 3}  # type: ignore[attr-defined]
    column = image_html.ImageColumn(
        "a/b", np.zeros((1, 4, 4, 3), np.uint8), [image_html.Judgement()], [{"seed": 3}]
    )
    assert zipfile.ZipFile(io.BytesIO(image_html._zip([column]))).namelist() == ["0-a-b/3.png"]


def test_images_that_nudenet_labels_nude_are_blurred_and_boxed() -> None:
    judgement = image_html.nudity_judgement(
        [
            Detection("FEMALE_BREAST_EXPOSED", 0.8, (1, 2, 3, 4)),
            Detection("FACE_FEMALE", 0.9, (0, 0, 2, 2)),
        ]
    )
    assert judgement.sensitive
    assert not image_html.nudity_judgement([Detection("FACE_FEMALE", 0.9, (0, 0, 2, 2))]).sensitive
    column = image_html.ImageColumn(
        "x", np.zeros((1, 8, 8, 3), np.uint8), [judgement], [{"seed": 0}]
    )
    html = image_html.comparison([column], ["0"])
    assert "ce-veiled" in html
    assert html.count("ce-box") >= 3  # two boxes and the switch


def test_the_slider_never_shows_a_sensitive_image() -> None:
    plain, sensitive = image_html.Judgement("a"), image_html.Judgement("b", sensitive=True)
    for before, after in ((sensitive, plain), (plain, sensitive)):
        columns = [
            image_html.ImageColumn(
                title,
                np.zeros((2, 8, 8, 3), np.uint8),
                [judgement, plain],
                [{"seed": 0}, {"seed": 1}],
                before=title == "before",
            )
            for title, judgement in (("before", before), ("run", after))
        ]
        html = image_html.comparison(columns, ["0", "1"])
        assert "ce-slider" in html
        assert "cePick(this,0,1,1)" in html
        assert "cePick(this,0,1,0)" not in html


def test_nudenet_judges_images_of_any_size() -> None:
    images = torch.zeros(1, 96, 80, 3, dtype=torch.uint8)
    (judgement,) = image_html.judge_images(images, "NudeNet", base="tiny-sd")
    assert not judgement.sensitive


@pytest.mark.parametrize(
    ("base", "judge"),
    [
        ("tiny-sd", "bundled judge"),
        ("tiny-sd-without-star", "bundled judge"),
        ("another/small-model", "NudeNet"),
    ],
)
def test_auto_asks_nudenet_about_small_images_of_other_models(
    monkeypatch: pytest.MonkeyPatch, base: str, judge: str
) -> None:
    nude = [Detection("FEMALE_BREAST_EXPOSED", 0.8, (1, 2, 3, 4))]

    class Detector:
        def detect_all(self, images: Any) -> list[list[Detection]]:
            return [nude for _ in images]

    monkeypatch.setattr(image_html, "_detector", Detector)
    images = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    (judgement,) = image_html.judge_images(images, "auto", base=base)
    assert judgement.sensitive == bool(judgement.boxes) == (judge == "NudeNet")


@pytest.mark.parametrize("judge", ["none", "bundled judge"])
def test_images_of_a_sensitive_run_are_blurred_with_any_captions(
    runs: Path, tmp_path: Path, judge: str
) -> None:
    for name in ("star", "plain"):
        shutil.copytree(runs / "star", tmp_path / name)
    own_suite = {
        "concept": {"shape": "star"},
        "groups": {"direct": {"prompts": ["a star"], "role": "forget", "n": 2}},
        "sensitive": True,
    }
    (tmp_path / "star" / "suite.yaml").write_text(yaml.safe_dump(own_suite))
    desk = Desk(Library(tmp_path))
    try:
        both, plain = (
            compare.draw(
                desk, compare.ComparisonSettings("a star", names, steps=1, seeds=1, judge=judge)
            )
            for names in (("plain", "star"), ("plain",))
        )
    finally:
        desk.jobs.close()
    assert both.count("<figure") == both.count("ce-veiled") == 3
    assert "ce-slider" not in both
    assert "ce-veiled" not in plain


def test_the_images_of_an_attack_on_a_sensitive_suite_are_blurred(tmp_path: Path) -> None:
    file = image_html.png(np.zeros((64, 64, 3), np.uint8), {})
    for suite, sensitive in (("tiny_star", False), ("violence", True), ("nudity", True)):
        spec = {"base": "tiny-sd", "suite": suite}
        job = jobs.DemoJob(1, "attack", "an attack", spec, tmp_path)
        assert attack._judgement(job, file).sensitive == sensitive


def test_the_suite_of_a_run_decides_whether_its_images_are_blurred(tmp_path: Path) -> None:
    for name, sensitive in (("sd14_nudity_esd", True), ("tiny_star_munba", False)):
        assert presets.is_run_sensitive(recipe.load(name), tmp_path) == sensitive
    assert not presets.is_run_sensitive(None, tmp_path)
    assert presets.is_suite_sensitive({"concept": "not a suite"})


@pytest.mark.parametrize("method", presets.METHODS)
@pytest.mark.parametrize("concept", ["shape: heart", "color: blue", "style: dotted"])
def test_every_offered_method_makes_a_valid_recipe(
    tmp_path: Path, method: str, concept: str
) -> None:
    attribute, _, value = concept.partition(": ")
    paths = tmp_path / "forget.yaml", tmp_path / "retain.yaml"
    others = [v for v in presets.WORLD[attribute] if v != value]
    for path, values in zip(paths, ([value], others), strict=True):
        path.write_text(presets.prompt_set(attribute, values))
    anchor = {attribute: presets.other_values(concept)[0]}
    content = presets.content(
        method,
        model="tiny-sd",
        forget=str(paths[0]),
        retain=str(paths[1]),
        anchor=anchor,
        steps=5,
        images=8,
        seed=1,
        lr=None,
    )
    new_recipe = recipe.load(content)
    assert presets.concept_of(new_recipe) == (attribute, value)
    assert presets.offers(new_recipe)["forget"]
    if new_recipe.retain is not None:
        assert attack.presets.suite_of(new_recipe)["concept"] == {attribute: value}  # type: ignore[index]


def test_the_prompts_of_an_edited_file_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(("a red star", "a blue star"), 1):
        for name in ("forget.txt", "retain.txt"):
            Path(name).write_text(f"{text} of {name}\n")
            os.utime(name, (number, number))
        job = recipe.load(
            short(
                forget__prompts="forget.txt", forget__anchor="a moon", retain__prompts="retain.txt"
            )
        )
        offers = presets.offers(job)
        assert offers["forget"] == [f"{text} of forget.txt"]
        assert offers["retain"] == [f"{text} of retain.txt"]


def test_a_form_is_refused_whole(empty: Desk) -> None:
    for change, message in (
        ({"name": "../x"}, "cannot be the name"),
        ({"steps": 10**9}, "1 to 2000"),
        ({"concept": "shape: gun"}, "unknown concept"),
        ({"anchor": "star"}, "unknown anchor"),
        ({"model": "/etc"}, "unknown model"),
        ({"method": "x"}, "unknown method"),
        ({"forget": "a man"}, "for both objectives"),
        ({"forget": "a\n" * 201, "retain": "b"}, "201 prompts"),
        ({"lr": -1}, "learning rate"),
    ):
        with pytest.raises(UserError, match=message):
            erase.start(empty, erase.Form(**change))
    assert not empty.runs.exists() or not any(empty.runs.iterdir())
    assert not empty.jobs.all()


def test_an_erasure_is_queued_cancelled_resumed_and_compared(empty: Desk) -> None:
    form = {
        "steps": 400,
        "images": 4,
        "name": "heart",
        "concept": "shape: heart",
        "anchor": "moon",
    }
    job = erase.start(empty, erase.Form(**form))
    second = erase.start(empty, erase.Form(**{**form, "name": "other"}))
    third = erase.start(
        empty,
        erase.Form(**{**form, "name": "third", "forget": "a cat\nthe cat", "retain": "a dog"}),
    )
    assert [empty.jobs.position(j) for j in (job, second, third)] == [0, 1, 2]
    assert "position 2" in job_list(empty)
    empty.jobs.cancel(second.number)
    assert second.state == "cancelled"
    assert not (empty.runs / "other").exists()  # it did not start and left no files
    empty.jobs.cancel(third.number)
    log = empty.runs / "heart" / "log.jsonl"
    until = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert job.state in ("waiting", "running"), job
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "<svg" in erase.progress_html(empty, job)
    assert "erasing heart" in job_list(empty)
    empty.jobs.cancel(job.number)
    wait(empty, job, "cancelled")
    step_count = len(log.read_text().splitlines())
    assert empty.library.unfinished_runs() == ["heart"]
    assert (empty.runs / "heart" / "state.ckpt").is_file()
    assert "--resume" in erase.progress_html(empty, job)
    again = erase.resume(empty, "heart")
    with pytest.raises(UserError, match="exists already"):
        erase.resume(empty, "heart")
    while again.state != "running" or not again.count or again.what != "erasing":
        assert again.state in ("waiting", "running"), again
        time.sleep(0.05)
    assert again.count > step_count - 1  # it continued and did not start over
    empty.jobs.close()  # the effect of Ctrl-C in the terminal
    assert again.state == "cancelled"
    assert again.process is None


def test_the_page_shows_the_progress_of_an_attack(desk: Desk) -> None:
    job = attack.start(desk, "star", "random_tokens", 4, 2, 60, 0)
    wait(desk, job, "done", "failed")
    assert job.state == "done", job.error
    rows = [json.loads(line) for line in (job.folder / "rounds.jsonl").read_text().splitlines()]
    assert 1 <= len(rows) <= 2
    assert "best so far" in attack.progress_html(desk, job)


def saved(model: Any, folder: Path) -> str:
    """Save a whole model in fp32, so that nothing is rounded, and return its folder."""
    model.pipeline.save_pretrained(folder)
    return str(folder)


def test_compare_has_a_column_of_a_control_at_the_same_seeds(runs: Path) -> None:
    control = "tiny-sd-without-star"
    desk, plain = Desk(Library(runs, controls=[control])), Desk(Library(runs))
    settings = compare.ComparisonSettings("a red star", ("star",), steps=2, seeds=2)
    try:
        html, without = compare.draw(desk, settings), compare.draw(plain, settings)
        ladder = compare.draw(desk, settings, ladder=True)
        images = desk.library.draw(None, SETTINGS, control=control)
        requests, _ = compare.column_requests(desk, settings, ladder=False)
    finally:
        desk.jobs.close()
        plain.jobs.close()
    assert [request.title for request in requests] == ["before", "star", "never learned star"]
    model = api.load(control)
    expected = model.sample(["a red star"] * 2, seeds=[0, 1], steps=2, guidance=5.0)
    assert torch.equal(images, expected)
    shown = sum(label == "star" for label in image_html._judge().classify(expected)["shape"])
    assert f"<b>never learned star</b> {shown} of 2" in html
    for image, seed in zip(expected, (0, 1), strict=True):
        facts = {"model": control, "base": "tiny-sd", "strength": 0, "seed": seed}
        facts |= {"steps": 2, "guidance": 5.0, "prompt": "a red star"}
        assert image_html.uri(image_html.png(image.numpy(), facts)) in html
    assert "cePick(this,0,2,1)" in html  # the control has a button for the slider
    assert '<span class="ce-right">star</span>' in html  # the slider begins with the run
    assert "never learned star" in ladder
    assert ladder.count('role="columnheader" class="ce-head"') == 2 + len(compare.LADDER)
    assert "never" not in without
    assert without.count("<figure") == html.count("<figure") - 2 == 4
    assert (
        settings.query()
        == compare.ComparisonSettings.read(dict(parse_qsl(settings.query())), ["star"]).query()
    )


def test_a_control_that_was_trained_on_the_concept_has_no_column(runs: Path) -> None:
    desk = Desk(Library(runs, controls=["tiny-sd-without-heart"]))
    try:
        run, none = (
            compare.draw(desk, compare.ComparisonSettings("a", names, steps=1, seeds=1))
            for names in (("star",), ())
        )
        desk.library.controls = ("tiny-sd-without-heart", "tiny-sd-without-star")
        both = compare.draw(desk, compare.ComparisonSettings("a", ("star",), steps=1, seeds=1))
    finally:
        desk.jobs.close()
    assert "was trained on images of shape=star" in run
    assert "never learned heart" not in run
    assert "never learned heart" in none  # without a run no concept is erased
    assert "never learned star" in both
    assert "never learned heart" not in both
    assert "was trained on" not in both


def test_a_control_that_fits_no_original_is_an_error_at_the_start(
    runs: Path, tmp_path: Path, cli: Any
) -> None:
    from tests import families

    other = families.build("sdxl", tmp_path / "sdxl")
    with pytest.raises(UserError, match=r"differs from tiny-sd in the family \(sdxl, not sd\)"):
        Library(runs, controls=[str(other)])
    model: Any = api.load("tiny-sd")
    with torch.no_grad():
        next(model.parts["text_encoder"].parameters()).add_(1)
    with pytest.raises(UserError, match="differs from tiny-sd in the text encoder"):
        Library(runs, controls=["tiny-sd-without-star", saved(model, tmp_path / "encoder")])
    result = cli("demo", "--no-browser", "--control", "nothing/here")
    assert result.returncode == 2
    assert "nothing/here" in result.stderr
    assert "the page is at" not in result.stdout


def test_models_in_memory_are_bounded_with_controls(runs: Path, tmp_path: Path) -> None:
    controls = [f"tiny-sd-without-{value}" for value in ("star", "heart", "purple")]
    library = Library(runs, controls=controls)
    first = [library.draw(None, SETTINGS, control=control) for control in controls]
    assert library.memory_use()["bases"] == 3
    library._images.clear()
    again = [library.draw(None, SETTINGS, control=control) for control in controls]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_the_attack_on_a_control_is_the_same_attack(runs: Path, tmp_path: Path) -> None:
    """On a copy of the run it has the same attempts. The original needs no attack at all."""
    shutil.copytree(runs / "star", tmp_path / "runs" / "star")
    copy = saved(api.load(runs / "star"), tmp_path / "copy")
    controls = [copy, "tiny-sd", "tiny-sd-without-heart"]
    desk = Desk(Library(tmp_path / "runs", controls=controls))
    try:
        job = attack.start(desk, "star", "soft_prompt", 4, 3, 600, 0)
        wait(desk, job, "done", "failed")
        html = attack.progress_html(desk, job)
    finally:
        desk.jobs.close()
    assert job.state == "done", job.error
    content = json.loads((job.folder / "found.json").read_text())
    (reason,) = content["left_out"]
    assert "trained on images of shape=star" in reason
    assert "trained on images of shape=star" in html
    same, original = content["control"]["models"]
    rounds = [(job.folder / name / "rounds.jsonl").read_text() for name in ("", "control")]
    assert _without_seconds(rounds[0]) == _without_seconds(rounds[1])
    assert sum(row["success"] for row in same["attempts"]) == content["broken"]
    assert 0 < content["broken"] < content["n"]  # else any two attacks would do
    assert same["excess"]["asr"]["difference"]["value"] == 0
    assert all(row["pre"] for row in original["attempts"])
    assert not (job.folder / "control_2" / "rounds.jsonl").exists()
    broken = [row["success"] for row in same["attempts"]]
    assert original["excess"]["asr"] == excess.measure_excess(broken, [True] * len(broken))
    assert "savings" not in same
    table = control_tables.excess_rows(content)
    assert all(cell in html for row in table for cell in row)
    assert "best on the never-learned model" in html
    assert results._control_text(tmp_path / "runs" / "star") == "soft_prompt +0.0"


def _without_seconds(lines: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_measure_has_the_gap_to_retraining(runs: Path, tmp_path: Path) -> None:
    """A control of another concept is left out. If no control fits, the page says why."""
    shutil.copytree(runs / "star", tmp_path / "runs" / "star")
    evaluations, notes = [], []
    for controls in (["tiny-sd-without-heart", "tiny-sd-without-star"], ["tiny-sd-without-heart"]):
        desk = Desk(Library(tmp_path / "runs", controls=controls))
        try:
            job = results.measure(desk, "star", 2)
            wait(desk, job, "done", "failed")
        finally:
            desk.jobs.close()
        assert job.state == "done", job.error
        evaluations.append(json.loads((job.folder / "evaluation.json").read_text()))
        notes.append(job.note)
    (model,) = evaluations[0]["control"]["models"]
    assert "without-star" in model
    assert "shape=star" not in notes[0]
    assert "control" not in evaluations[1]
    assert "was trained on images of shape=star" in notes[1]


def test_an_attack_without_controls_has_the_files_of_before(desk: Desk) -> None:
    job = attack.start(desk, "star", "random_tokens", 4, 1, 60, 0)
    wait(desk, job, "done", "failed")
    assert "controls" not in job.spec
    content = json.loads((job.folder / "found.json").read_text())
    assert set(content) == {"ended", "broken", "n", "cost"}
    assert "never-learned" not in attack.progress_html(desk, job)


def test_a_control_has_the_rounds_of_the_victim() -> None:
    def played(rounds: int, *, is_budget_used_up: bool) -> attack_job.PlayedAttack:
        return attack_job.PlayedAttack(
            [],
            curve=[],
            cost={},
            guidance=5.0,
            rounds=rounds,
            seconds=0.0,
            is_budget_used_up=is_budget_used_up,
        )

    budget = attack_job.Budget(rounds=10, seconds=5.0)
    assert [budget.is_used_up(*some) for some in ((9, 5.0), (10, 0.0), (1, 5.1))] == [
        False,
        True,
        True,
    ]
    late = budget.of_control(played(3, is_budget_used_up=True))  # its time ended after 3 rounds
    assert not late.is_used_up(2, 99.0)
    assert late.is_used_up(3, 0.0)
    early = budget.of_control(played(3, is_budget_used_up=False))  # every prompt succeeded
    assert not early.is_used_up(2, 99.0)
    assert not early.is_used_up(9, 5.0)
    assert early.is_used_up(3, 5.1)


def test_a_job_that_fails_says_why_and_the_queue_goes_on(desk: Desk) -> None:
    bad = desk.jobs.add(
        "erase",
        "nonsense",
        {"kind": "erase", "recipe": {"model": "tiny-sd"}, "folder": str(desk.runs / "bad")},
        desk.runs / "bad",
    )
    worse = desk.jobs.add("erase", "worse", {"kind": "nothing"}, desk.runs / "worse")
    wait(desk, worse, "failed")
    assert "forget: required" in bad.error
    assert "forget: required" in erase.progress_html(desk, bad)
    assert "KeyError" in worse.error
    assert not (desk.runs / "bad").exists()


def test_the_queue_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concept_eraser.demo.jobs.WAITING", 1)

    def crowd() -> None:
        for i in range(5):
            desk.jobs.add("erase", "x", {"kind": "nothing"}, desk.runs / f"q{i}")

    with pytest.raises(UserError, match="waiting already"):
        crowd()


def test_a_folder_of_a_job_that_never_started_is_removed_once(empty: Desk) -> None:
    """Also by the end of the server, and not by a second click on Cancel."""
    erase.start(empty, erase.Form(steps=400, images=4, name="first"))
    waiting = erase.start(empty, erase.Form(name="waiting"))
    empty.jobs.cancel(waiting.number)
    seconds = waiting.seconds
    erase.start(empty, erase.Form(name="waiting"))
    empty.jobs.cancel(waiting.number)
    assert (empty.runs / "waiting").is_dir()
    assert waiting.seconds == seconds  # it no longer waits
    empty.jobs.close()
    assert not (empty.runs / "waiting").exists()


def test_an_error_after_a_job_does_not_end_the_queue(tmp_path: Path) -> None:
    def fail(job: jobs.DemoJob) -> None:
        raise PermissionError(job.folder)

    queue = jobs.Jobs(fail)
    try:
        for name in ("a", "b"):
            job = queue.add("erase", name, {"kind": "nothing"}, tmp_path / name)
            until = time.monotonic() + 120
            while job.state != "failed":
                assert time.monotonic() < until, job
                time.sleep(0.05)
    finally:
        queue.close()


def test_an_offered_run_leaves_no_folder_where_the_queue_is_full(
    empty: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concept_eraser.demo.jobs.WAITING", 0)
    for _ in range(2):
        with pytest.raises(UserError, match="the queue is full"):
            labelled.make(empty, "star-vae")
    assert not (empty.runs / "star-vae").exists()


def test_durations_have_less_than_60_seconds() -> None:
    assert [minutes(s) for s in (99.4, 99.7, 119.7)] == ["99 s", "1 min 40 s", "2 min 0 s"]


def test_a_run_with_the_name_of_the_bundled_model_is_not_erased_from(empty: Desk) -> None:
    for name in ("tiny-sd", "next"):
        job = erase.start(empty, erase.Form(name=name, steps=400, images=4))
        assert job.spec["recipe"]["model"] == "tiny-sd"


def test_results_are_those_of_the_repository(desk: Desk) -> None:
    assert "tiny_star" in results.studies_in_plot()
    assert "MUNBa" in results.table("tiny_star")
    assert "![" not in results.table("tiny_star")
    assert "MUNBa (anchor: circle)" in results.pareto(desk, "tiny_star")
    assert "star" in results.runs_table(desk)


def test_the_retain_accuracy_is_that_of_the_concepts_attribute() -> None:
    rates = {"concept_rate": 0.1, "accuracy_shape": 0.5, "accuracy_color": 0.75}
    rows = [
        {"metric": metric, "group": group, "after": {"value": value}}
        for metric, value in rates.items()
        for group in ("direct", "retained")
    ]
    content = {"protocol": {"concept": {"color": "blue"}}, "results": rows}
    assert results._shares(content) == (10.0, 75.0)
    assert results._shares({**content, "protocol": {"concept": {"style": "flat"}}}) is None
    for damaged in ({}, {"protocol": 3}, {"protocol": {"concept": {}}}):
        assert results._shares({"results": rows, **damaged}) is None


def test_the_table_of_runs_has_a_column_for_controls_where_there_are_any(
    desk: Desk, tmp_path: Path
) -> None:
    assert "never-learned" not in results.runs_table(desk)
    attack = {
        "protocol": {"attack": "soft_prompt"},
        "control": {"models": [{"excess": {"asr": {"difference": {"value": 0.25}}}}]},
    }
    row = {"role": "forget", "relative_to_original": {"value": 0.5}}
    files = {
        "attacks/a/attack.json": attack,
        "evaluation.json": {"control": {"predictions": [row]}},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    assert results._control_text(tmp_path) == "gap 0.50, soft_prompt +25.0"
    for damaged in ({"control": 3}, {"control": {"predictions": [3]}}, {"control": {"models": []}}):
        assert results._against_control(damaged) == ""


def test_curves_have_a_text_for_screen_readers() -> None:
    html = figures.curves(
        "Loss <x>", {"a": [(1, 0.5), (2, float("nan")), (3, 0.001)]}, "step", log=True
    )
    assert 'aria-label="Loss &lt;x&gt;. a: 2 values, the last 0.001"' in html
    assert "nothing yet" in figures.curves("Loss", {"a": []}, "step")
    assert figures.scatter("t", [("bad", 50, 50), ("good", 1, 99)], "x", "y").count("ce-best") == 1


def test_images_before_and_after_of_a_clip_and_a_vae(tmp_path: Path) -> None:
    runs, image = tmp_path / "runs", tmp_path / "p.png"
    Image.fromarray(np.full((30, 40, 3), 200, np.uint8)).save(image)
    for name, content in labelled.OFFERED_RUNS.items():
        small = {
            **content,
            "forget": {**content["forget"], "options": {"n": 40}},
            "training": {"steps": 1, "batch_size": 2},
        }
        api.erase(small, output=runs / name)
    desk = Desk(Library(runs))
    try:
        assert set(desk.library.finished_runs(labelled.TARGETS)) == set(labelled.OFFERED_RUNS)
        assert desk.library.finished_runs() == []
        clip, vae = (labelled.show(desk, name, []) for name in labelled.OFFERED_RUNS)
        assert clip.count("(forgotten)") == 4 * 2
        assert clip.count("ce-prob") == 8 * 2 * labelled.SHOWN_CLASSES
        assert vae.count("dB</td>") == 8 * 2
        assert "your image" in labelled.show(desk, "star-vae", [str(image)])
        models = labelled.pair(desk, "star-vae")
        inputs = labelled.as_inputs([str(image)], models.inputs)  # brighter than the middle
        assert (labelled.as_images(inputs, models.inputs) == 200).all()
        with torch.no_grad():
            output = to_pixels(models.before.decode(moments(models.before.encode(inputs))[0]))
        error = float((output.reshape(inputs.shape) - inputs).square().mean())
        assert f"{10 * np.log10(4 / error):.1f} dB</td>" in labelled.show(
            desk, "star-vae", [str(image)]
        )
        with pytest.raises(UserError, match="cannot be read as an image"):
            labelled.show(desk, "star-vae", [str(runs / "star-vae" / "recipe.yaml")])
        with pytest.raises(UserError, match="at most 8"):
            labelled.show(desk, "star-vae", [str(image)] * 9)
    finally:
        desk.jobs.close()


def test_only_examples_of_the_retain_set_are_called_retained(tmp_path: Path) -> None:
    content = labelled.OFFERED_RUNS["star-vae"]
    alone = {key: value for key, value in content.items() if key != "retain"} | {
        "method": {"name": "weighted", "retain": 0},
        "forget": {**content["forget"], "options": {"n": 40}},
        "training": {"steps": 1, "batch_size": 2},
    }
    api.erase(alone, output=tmp_path / "alone")
    desk = Desk(Library(tmp_path))
    try:
        html = labelled.show(desk, "alone", [])
    finally:
        desk.jobs.close()
    assert "(retained)" not in html
    assert html.count("</th><td>") == html.count("star (forgotten)</th>") > 0


def test_two_runs_of_one_name_get_different_names(tmp_path: Path) -> None:
    for parent in ("one", "two"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "recipe.yaml").write_text("model: tiny-sd\n")
    folders = [str(tmp_path / parent / "run") for parent in ("one", "two", "one")]
    assert list(Library(tmp_path / "none", folders).folders()) == ["one/run", "two/run"]


def test_model_options_select_the_base_of_a_family(runs: Path, tmp_path: Path) -> None:
    """SDXL with size 8 and without: two bases in one comparison."""
    from tests import families

    base = families.build("sdxl", tmp_path / "sdxl")
    library = Library(tmp_path / "none")
    settings = [ImageSettings("a", 0, 1, 1.0)]
    small, plain = (
        library.draw(None, settings, base=str(base), options=options)
        for options in ((("size", 8.0),), ())
    )
    assert small.shape[1:3] == (8, 8)
    assert plain.shape[1:3] == (16, 16)


def test_a_tied_tensor_has_the_strength_once_and_its_original_back(tmp_path: Path) -> None:
    """T5's table of words has two names in the change of a whole pipeline."""
    from tests import families

    base = families.build("flux", tmp_path / "flux")
    erased: Any = api.load(base)
    with torch.no_grad():
        erased.parts["text_encoder_2"].shared.weight += 1
    erased.pipeline.save_pretrained(tmp_path / "erased")
    library = Library(tmp_path / "none", [str(tmp_path / "erased")], before=str(base))
    change = library.load_change("erased")
    assert len(change.parts["text_encoder_2"]) == 2
    model = library.model(str(base))
    table = model.parts["text_encoder_2"].shared.weight
    original = table.clone()
    with _apply_change(model, change, 0.5):
        torch.testing.assert_close(table, original + 0.5)
    assert torch.equal(table, original)


def test_a_foreign_checkpoint_needs_its_base(runs: Path, tmp_path: Path) -> None:
    model: Any = api.load(runs / "star")
    place = tmp_path / "pipeline"
    model.pipeline.save_pretrained(place)  # in fp32, so that nothing is rounded
    with pytest.raises(UserError, match="--before"):
        Library(runs, [str(place)])
    library = Library(runs, [str(place)], before="tiny-sd")
    assert torch.equal(library.draw("pipeline", SETTINGS), Library(runs).draw("star", SETTINGS))
    assert library.finished_runs()[0] == "pipeline"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_foreign_checkpoint_is_read_again_after_a_change(
    runs: Path, tmp_path: Path, is_file: bool
) -> None:
    folders = {}
    for name, model in (("erased", api.load(runs / "star")), ("original", api.load("tiny-sd"))):
        folders[name] = Path(saved(model, tmp_path / name))
    weights = Path("unet") / "diffusion_pytorch_model.safetensors"
    place = tmp_path / "theirs.safetensors" if is_file else tmp_path / "theirs"
    file = place if is_file else place / weights
    if is_file:
        shutil.copy(folders["erased"] / weights, file)
    else:
        shutil.copytree(folders["erased"], place)
    library = Library(tmp_path / "none", [str(place)], before="tiny-sd")
    (name,) = library.finished_runs()
    original, erased = library.draw(None, SETTINGS), library.draw(name, SETTINGS)
    assert not torch.equal(erased, original)
    change = library.load_change(name)
    assert library.load_change(name) is change
    shutil.copy(folders["original"] / weights, file)
    assert torch.equal(library.draw(name, SETTINGS), original)
