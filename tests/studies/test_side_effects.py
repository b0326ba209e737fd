"""The study of side effects: prompts, resumption, the sequence of pipelines, summaries, figures."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import yaml

from concept_eraser import api
from concept_eraser.concepts.plan import make_plan
from concept_eraser.data import generate, prompts
from concept_eraser.evaluation.statistics import paired_difference, wilson
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies import render_results, side_effects
from studies.rendering import figures
from studies.rendering import side_effects as rendering
from studies.result_tables import Results, new_path
from tests.conftest import ROOT

CONFIG = ROOT / "studies" / "configs" / "side_effects.yaml"
UCE = {"name": "uce", "erase_scale": 1.0, "preserve_scale": 1.0, "lamb": 0.5}
SHORT = {
    "training.steps": 1,
    "training.batch_size": 1,
    "forget.n": 2,
    "retain.n": 2,
    "generation.steps": 1,
}


@pytest.fixture
def run_study(
    tmp_path: Path, no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Results]:
    """Run a small study: two concepts, two images of each value, one training step."""
    study = {
        "seed": 0,
        "image_seed": 8101,
        "images": 2,
        "judge": "tiny2",
        "sampling": {"steps": 1, "guidance": 1.0, "batch_size": 64, "precision": "fp32"},
        "methods": {
            "default": {"label": "default", "set": SHORT},
            "uce": {"label": "UCE", "method": UCE, "set": {"retain.prompts": ["a red circle"]}},
        },
        "concepts": ["star", "blue"],
        "sequence": ["star", "blue"],
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(study))

    def run(*arguments: str) -> Results:
        words = ["side_effects", str(path), "--work", str(tmp_path / "work"), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        side_effects.main()
        return Results("small")

    return run


def original(groups: dict[str, list[tuple[str, str, str]]], without: list[str]) -> dict[str, Any]:
    """The result of an untouched model whose labels are all right."""
    rows = {
        value: [dict(zip(("shape", "color", "style"), scene, strict=True)) for scene in scenes]
        for value, scenes in groups.items()
    }
    predicted = {
        value: {name: [row[name] for row in group] for name in ("shape", "color", "style")}
        for value, group in rows.items()
    }
    return {
        "part": "sequence" if without else "matrix",
        "prompts": rows,
        "without": without,
        "predicted": predicted,
        "weights": {"end": "original"},
        "settings": {
            "seed": 0,
            "image_seed": 1,
            "sampling": {},
            "judge": "tiny2",
            "prompts_hash": "a",
        },
        "environment": provenance.describe(),
    }


def with_labels(
    result: dict[str, Any], labels: dict[tuple[str, str], dict[int, str]], **content: Any
) -> dict[str, Any]:
    """The result of another model: some labels differ, by value, attribute and image."""
    predicted = {
        value: {
            name: [labels.get((value, name), {}).get(i, label) for i, label in enumerate(column)]
            for name, column in columns.items()
        }
        for value, columns in result["predicted"].items()
    }
    kept = {key: result[key] for key in ("part", "settings", "environment")}
    return {**kept, "method": "default", "seconds": 1.0, **content, "predicted": predicted}


def world(n: int, without: list[str]) -> dict[str, Any]:
    """The result of an untouched model on drawn prompts of all values."""
    names = ("shape", "color", "style")
    groups = {
        value: [
            tuple(prompt.fields[name] for name in names)
            for prompt in side_effects.draw_prompts(value, n, seed=0, without=without)
        ]
        for value in side_effects.VALUES
    }
    return original(groups, without)  # type: ignore[arg-type]


def test_no_prompt_is_one_of_a_training_and_combinations_are_balanced() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    trained: set[str] = set()
    for concept in ("star", "orange", "dotted"):
        settings = make_plan([concept]).settings
        for objective in ("forget", "retain"):
            trained |= set(prompts.load(settings[objective]["prompts"]).texts)
    for value, others in (("star", ("color", "style")), ("blue", ("shape", "style"))):
        rows = side_effects.draw_prompts(value, study["images"], study["image_seed"])
        assert len(rows) == study["images"]
        assert not trained & {row.text for row in rows}
        assert all(row.fields[side_effects.VALUES[value]] == value for row in rows)
        counts = Counter(tuple(row.fields[name] for name in others) for row in rows)
        assert len(counts) == {"star": 32, "blue": 40}[value]
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(
            row.fields.get("background", "") in (*side_effects.BACKGROUNDS, "") for row in rows
        )
        again = side_effects.draw_prompts(value, study["images"], study["image_seed"])
        assert [row.text for row in again] == [row.text for row in rows]
    without = side_effects.draw_prompts("star", 20, seed=0, without=study["sequence"])
    stated = {row.fields[name] for row in without for name in ("color", "style")}
    assert not stated & set(study["sequence"])
    assert all(row.fields["shape"] == "star" for row in without)


def test_the_configuration_erases_every_value_and_its_sequence_is_possible() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    assert study["concepts"] == list(side_effects.VALUES)
    assert len(study["sequence"]) == 12
    side_effects.require_sequence(study)
    for sequence, words in (
        (["star", "lighthouse"], "no 'lighthouse'"),
        (["star", "star"], "once"),
        (["striped", "dotted", "outlined"], "leaves 1 values of style"),
        (["circle", "star"], "'circle' is the anchor concept of 'star'"),
    ):
        with pytest.raises(ValueError, match=words):
            side_effects.require_sequence({"sequence": sequence})


def test_the_matrix_has_the_settings_of_erase_and_continues_after_a_kill(
    run_study: Callable[..., Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The second concept's measurement is interrupted. The next call measures only that one, and
    trains nothing again.
    """
    names, trained = ["original_matrix", "matrix_default_blue", "matrix_default_star"], []
    generate_images, erase = generate.generate, api.erase

    def generate_twice(*arguments: Any, **settings: Any) -> Any:
        if settings["cache"].name == "matrix_default_blue":
            raise KeyboardInterrupt
        return generate_images(*arguments, **settings)

    arguments = ("--parts", "matrix", "--methods", "default")
    with monkeypatch.context() as patch:
        patch.setattr(side_effects.generate, "generate", generate_twice)
        with pytest.raises(KeyboardInterrupt):
            run_study(*arguments)
    assert set(Results("small")) == {names[0], names[2]}
    times = {name: new_path("small", name).stat().st_mtime_ns for name in set(Results("small"))}

    def note_training(*arguments: Any, **settings: Any) -> api.Run:
        run = erase(*arguments, **settings)
        trained.append((settings["output"].name, run.model is not None))
        return run

    with monkeypatch.context() as patch:
        patch.setattr(api, "erase", note_training)
        results = run_study(*arguments)
    assert trained == [("default_blue", False)]
    assert set(results) == set(names)
    assert times == {name: new_path("small", name).stat().st_mtime_ns for name in times}
    weights = [results[name]["weights"]["end"] for name in names]
    assert len(set(weights)) == 3
    assert {
        len(column)
        for group in results[names[1]]["predicted"].values()
        for column in group.values()
    } == {2}
    # the same recipe as `erase star`: otherwise the folder would hold another run
    overrides = [f"{key}={value}" for key, value in SHORT.items()]
    folder = tmp_path / "work" / "matrix" / "default_star"
    assert not (folder / "pipeline").exists()
    assert erase("star", overrides=overrides, output=folder, resume=True).model is None
    with pytest.raises(UserError, match="another run"):
        erase("star", output=folder, resume=True)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--cells"])
    capsys.readouterr()
    side_effects.main()
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    cells = {(row["erased"], row["measured"]) for row in rows}
    # a prompt that states the erased concept does not count, and one image has no interval
    single = {
        (erased, value)
        for erased in ("star", "blue")
        for value, prompts_of_value in results["original_matrix"]["prompts"].items()
        if value != erased and any(erased in prompt.values() for prompt in prompts_of_value)
    }
    assert cells == set(itertools.product(("star", "blue"), side_effects.VALUES)) - single
    assert {row["n"] for row in rows} == {"2"}


def test_a_sequence_begins_with_the_last_pipeline(
    run_study: Callable[..., Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first image of the second run's model, before its edit, is that of the first run's model.
    A lost work folder is made again.
    """
    begun: list[torch.Tensor] = []
    load_part = api.loading.load_part
    prompt, settings = ["an icon of a flat red star"], {"steps": 2, "guidance": 5.0}

    def load(source: Any, target: str, **options: Any) -> Any:
        model = load_part(source, target, **options)
        begun.append(model.sample(prompt, seeds=[0], **settings))
        return model

    monkeypatch.setattr(api.loading, "load_part", load)
    results = run_study("--parts", "sequence", "--methods", "uce")
    first, second = (results[f"sequence_uce_{name}"] for name in ("01_star", "02_blue"))
    assert first["weights"]["start"] == results["original_sequence"]["weights"]["end"]
    assert second["weights"]["start"] == first["weights"]["end"] != second["weights"]["end"]
    (folder,) = (tmp_path / "work" / "sequence" / "uce").glob("01_star_*")
    image = api.load(folder).sample(prompt, seeds=[0], **settings)
    assert torch.equal(begun[1], image)
    assert not torch.equal(begun[0], image)
    assert second["settings"]["recipe"]["model"] == side_effects.LAST
    assert str(tmp_path) not in str(second)
    assert [run["concept"] for run in rendering.sequence(results, "uce")] == ["star", "blue"]
    del results["sequence_uce_02_blue"]
    (tmp_path / "work").rename(tmp_path / "lost")
    monkeypatch.setattr(side_effects.Bench, "predict", lambda *arguments: {})
    again = run_study("--parts", "sequence", "--methods", "uce")["sequence_uce_02_blue"]
    assert again["weights"] == second["weights"]


def test_one_run_erases_the_concepts_of_the_sequence_at_once(
    run_study: Callable[..., Results],
) -> None:
    """It has an objective for each concept, and the sequence's prompts. Finished ones stay."""
    results = run_study("--parts", "at_once", "--methods", "uce")
    assert set(results) == {"original_sequence", "at_once_uce"}
    stored = results["at_once_uce"]
    recipe = stored["settings"]["recipe"]
    prompts = [objective["prompts"] for objective in recipe["forget"]]
    assert ["star" in str(one) for one in prompts] == [True, False]
    assert ["blue" in str(one) for one in prompts] == [False, True]
    original_settings = results["original_sequence"]["settings"]
    assert stored["settings"]["prompts_hash"] == original_settings["prompts_hash"]
    assert rendering.sequence(results, "uce") == [], "it is no run of the sequence"
    assert run_study("--parts", "at_once", "--methods", "uce")["at_once_uce"] == stored


def test_the_arithmetic_of_the_matrix() -> None:
    """Red is measured without red stars. The interval is that of the pairs."""
    scenes = {
        "star": [
            ("star", color, style) for color in ("red", "blue") for style in ("flat", "dotted")
        ],
        "red": [(shape, "red", "flat") for shape in ("star", "circle", "moon", "fish", "tree")],
    }
    untouched = original(scenes, [])
    untouched["predicted"]["red"]["color"][4] = "brown"  # wrong before
    labels = {
        ("star", "shape"): {0: "circle", 1: "circle", 2: "circle"},
        ("star", "color"): {3: "none"},
        # a red star (image 0) does not count; the moon is lost
        ("red", "color"): {0: "blue", 2: "orange"},
    }
    erased = with_labels(untouched, labels, concept="star")
    red, star = (rendering.cell(untouched, erased, value) for value in ("red", "star"))
    assert red is not None
    assert star is not None
    before, after = np.array([1, 1, 1, 0], bool), np.array([1, 0, 1, 0], bool)
    assert (red.before, red.after) == (wilson(3, 4), wilson(2, 4))
    assert red.change == paired_difference(before, after)
    assert red.change.value == -0.25
    assert (star.before.value, star.after.value, star.change.n) == (1.0, 0.25, 4)
    assert star.p == pytest.approx(2 * 0.5**3)  # three of three pairs are lost
    kept = rendering.composition(untouched, erased)
    assert list(kept) == ["color", "style"]
    assert kept["color"] == (
        wilson(4, 4),
        wilson(3, 4),
        paired_difference(np.ones(4, bool), np.array([1, 1, 1, 0], bool)),
    )
    assert kept["style"][1] == wilson(4, 4)
    blue = rendering.composition(untouched, erased, with_value="blue")["color"][1]
    assert blue == wilson(1, 2)
    assert rendering.lowest(untouched, erased, "color") == ("blue", wilson(1, 2))
    other = {**erased, "settings": {**erased["settings"], "prompts_hash": "b"}}
    with pytest.raises(ValueError, match="prompts_hash"):
        rendering.cell(untouched, other, "red")


def test_the_numbers_of_unlearn_canvas() -> None:
    """One of ten stars remains. The heart is drawn as a circle. A dotted fish loses its style.

    A red heart is a heart twice: in its own group and in that of its colour, which does not count.
    """
    untouched = world(20, [])
    labels = {
        ("star", "shape"): dict.fromkeys(range(18), "circle"),
        ("heart", "shape"): dict.fromkeys(range(20), "circle"),
        ("red", "shape"): dict.fromkeys(range(20), "none"),
        ("dotted", "style"): dict.fromkeys(range(20), "flat"),
    }
    erased = with_labels(untouched, labels, concept="star")
    ua, ira, cra = rendering.canvas_numbers(untouched, erased)
    dotted = [row["shape"] != "star" for row in untouched["prompts"]["dotted"]]
    others = sum(
        row["shape"] != "star"
        for style in ("flat", "outlined", "striped")
        for row in untouched["prompts"][style]
    )
    assert (ua, ira) == (pytest.approx(0.9), pytest.approx(8 / 9))
    assert cra == pytest.approx(others / (others + sum(dotted)))
    style = with_labels(
        untouched, {("dotted", "style"): dict.fromkeys(range(5), "flat")}, concept="dotted"
    )
    assert rendering.canvas_numbers(untouched, style) == (0.25, 1.0, 1.0)
    with pytest.raises(KeyError):
        rendering.canvas_numbers(untouched, {**style, "concept": "red"})


def test_holms_correction_leaves_out_the_erased_concept() -> None:
    """40 of 40 lost images are significant among 22 cells, six of 40 are not."""
    untouched = world(40, [])
    labels = {
        ("star", "shape"): dict.fromkeys(range(40), "circle"),
        ("heart", "shape"): dict.fromkeys(range(40), "circle"),
        ("tree", "shape"): dict.fromkeys(range(6), "circle"),
    }
    erased = with_labels(untouched, labels, concept="star")
    cells = rendering.matrix(
        {"original_matrix": untouched, "matrix_default_star": erased}, "default"
    )
    assert len(cells) == len(side_effects.VALUES)
    assert [cell.measured for cell in rendering.significant(cells)] == ["heart"]


def test_the_arithmetic_of_a_sequence() -> None:
    """The star returns after the third run. A gap ends the sequence. Another start is refused."""
    names = ["star", "heart", "blue", "moon"]
    untouched = world(20, names)
    assert untouched["predicted"]["circle"]["color"].count("blue") == 0
    gone = dict.fromkeys(range(20), "circle")
    steps = [
        {("star", "shape"): gone},
        {("star", "shape"): gone, ("heart", "shape"): dict.fromkeys(range(15), "circle")},
        {("heart", "shape"): gone, ("blue", "color"): {}, ("square", "shape"): {0: "none"}},
    ]
    results = {"original_sequence": untouched}
    for number, labels in enumerate(steps, 1):
        ends = {"start": f"model {number - 1}", "end": f"model {number}"}
        concept = names[number - 1]
        results[f"run_{number}"] = with_labels(
            untouched, labels, concept=concept, number=number, weights=ends
        )
    runs = rendering.sequence(results, "default")
    rates = rendering.concept_rates(untouched, runs)
    assert [[rate.value for rate in row] for row in rates] == [[0], [0, 0.25], [1, 0, 1]]
    assert rates[1][1] == wilson(5, 20)
    ((concept, number, change),) = rendering.returns(untouched, runs)
    assert (concept, number, change.value) == ("star", 3, 1.0)
    others = rendering.never_erased(untouched, runs[2])
    assert {name: len(column) for name, column in others.items()} == {
        "shape": 7 * 20,
        "color": 7 * 20,
        "style": 4 * 20,
    }
    assert others["shape"].sum() == 7 * 20 - 1
    assert others["color"].all()
    assert others["style"].all()
    assert (
        len(rendering.sequence({k: v for k, v in results.items() if k != "run_2"}, "default")) == 1
    )
    results["run_3"] = {**results["run_3"], "weights": {"start": "another", "end": "model 3"}}
    with pytest.raises(ValueError, match="run 3"):
        rendering.sequence(results, "default")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
def test_the_palette_needs_no_difference_of_red_and_green(share: float) -> None:
    """Losses and gains differ in blue against the mean of red and green."""
    palette = matplotlib.colormaps[rendering.DIVERGING]
    loss, gain = (palette(place)[:3] for place in (share, 1 - share))
    assert loss[2] < (loss[0] + loss[1]) / 2
    assert gain[2] > (gain[0] + gain[1]) / 2


def test_the_page_and_its_figures(no_results: Path) -> None:
    """There is no page without results. The figures name every value and have every number."""
    assert not any(path.name == "side_effects.md" for path in render_results.pages())
    assert not rendering.figures()
    study = yaml.safe_load(CONFIG.read_text())
    results, untouched = Results("side_effects"), world(40, [])
    results["original_matrix"] = untouched
    for erased in ("star", "blue"):
        name = side_effects.VALUES[erased]
        labels = {
            (erased, name): dict.fromkeys(range(40), "none"),
            ("heart", "shape"): dict.fromkeys(range(40), "star"),
        }
        results[f"matrix_default_{erased}"] = with_labels(untouched, labels, concept=erased)
    in_turn = world(20, study["sequence"])
    results["original_sequence"] = in_turn
    for number, concept in enumerate(study["sequence"][:3], 1):
        results[f"sequence_default_{number:02d}_{concept}"] = with_labels(
            in_turn,
            {(concept, side_effects.VALUES[concept]): dict.fromkeys(range(15), "none")},
            concept=concept,
            number=number,
            weights={"start": f"model {number - 1}", "end": f"model {number}"},
        )
    results["at_once_uce"] = with_labels(
        in_turn, {("star", "shape"): dict.fromkeys(range(20), "none")}, method="uce"
    )
    page = rendering.page()
    assert "| UCE | 1 | 91.7 [" in page, "of twelve concepts one is erased, with 20 images of each"
    assert "| default | star | heart | 40 | 100.0 [91.2, 100.0] | 0.0 [0.0, 8.8] | -100.0 [" in page
    assert "| default | star | color | 40 | 100.0 [91.2, 100.0] | 100.0 [91.2, 100.0] |" in page
    assert "| 1 | star | 1 | 25.0 [11.2, 46.9] |" in page
    assert "| not erased | one shape | 10 | 0.0 (all alike) |" in page
    assert "| default | one shape |" not in page, "a single concept has no interval"
    # after run 2 the star is back: its images of run 2 show it
    assert "star after run 2: +75.0 [" in page
    drawn = {path.name: figure for path, figure in rendering.figures().items()}
    assert set(drawn) == {"side_effects.matrix.svg", "side_effects.sequence.svg"}
    assert all(f"]({name})" in page for name in drawn)
    heat_map = drawn["side_effects.matrix.svg"].draw()
    axes = heat_map.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(side_effects.VALUES)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["star", "blue"]
    numbers = [text.get_text() for text in axes.texts]
    assert len(numbers) == 2 * len(side_effects.VALUES)
    assert Counter(numbers) == {"0": 40, "-100": 4}
    framed = [text for text in axes.texts if text.get_bbox_patch() is not None]
    assert len(framed) == 2  # the heart, twice: the erased concepts themselves have no frame
    sequence = drawn["side_effects.sequence.svg"].draw().axes[0]
    assert [label.get_text() for label in sequence.get_yticklabels()] == study["sequence"][:3]
    assert [text.get_text() for text in sequence.texts] == ["25", "100", "100", "25", "100", "25"]
    before = figures.digest(drawn["side_effects.matrix.svg"])
    results["matrix_default_star"] = with_labels(untouched, {}, concept="star")
    assert figures.digest(next(iter(rendering.figures().values()))) != before
