"""One page about several runs, with real runs, evaluations and attacks at tiny size.

The page agrees with the JSON files.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from concept_eraser import api, registry
from concept_eraser.cli.main import app
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.statistics import Interval, wilson
from concept_eraser.reporting import (
    comparison_plots,
    galleries,
    html,
    ranking,
    run_results,
    several_runs,
    write,
)
from concept_eraser.utils import rendering, resources
from concept_eraser.utils.errors import UserError
from tests.conftest import short

SUITE: dict[str, Any] = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": {"steps": 4, "batch_size": 32, "precision": "bf16"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 8},
        "synonyms": {"prompts": "tiny_star_synonyms", "role": "forget", "n": 8},
        "neighbours": {"prompts": "tiny_star_neighbours", "role": "neighbour", "n": 8},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 8},
    },
    "metrics": ["concept_rate", "accuracy", "clip_score"],
}
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """A page's tags, attributes and table cells; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.rows: list[dict[str, str]] = []
        self.text = text
        self.words = ""
        self._label: str | None = None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.images.append(values)
        if tag == "tr":
            self.rows.append({})
        if tag == "td":
            self._label = values["data-label"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())
        if tag == "td":
            self._label = None

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._label is not None:
            self.rows[-1][self._label] = self.rows[-1].get(self._label, "") + data

    def row(self, name: str) -> dict[str, str]:
        return next(row for row in self.rows if row.get("run") == name)

    def rendered_images(self) -> list[np.ndarray]:
        """The generated images (not the figures), decoded."""
        uris = [str(i["src"]) for i in self.images if "class" not in i]
        return [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(u.partition(",")[2]))), float)
            for u in uris
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, evaluated and attacked by paraphrases.

    Their prompts name a shape, and their attacks aim at a star.
    """
    folder, run_folders = tmp_path_factory.mktemp("runs"), []
    for name, method in (("one", "munba"), ("two", "pcgrad")):
        run = api.erase(short(model="tiny-sd", method={"name": method}), output=folder / name)
        api.evaluate(run.folder, SUITE, output=run.folder)
        api.attack(
            run.folder,
            "paraphrase",
            SUITE,
            n=4,
            hide="shape",
            options={"prompts": "tiny_star_synonyms", "tries": 3},
            output=run.folder / "attacks" / "paraphrase",
        )
        run_folders.append(run.folder)
    return run_folders


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> Page:
    return Page(api.report(runs, runs[0].parent / "report.html").read_text())


def edit_evaluation(source: Path, target: Path, **changes: Any) -> Path:
    """Copy the evaluation and the recipe of a run to another folder, with changes."""
    target.mkdir()
    shutil.copy(source / "recipe.yaml", target)
    content = json.loads((source / "evaluation.json").read_text())
    (target / "evaluation.json").write_text(json.dumps({**content, **changes}))
    return target


def edit_attack(source: Path, target: Path, **changes: Any) -> dict[str, Any]:
    """Copy the attack of a run to another folder, with changes to its successful attempts."""
    content = json.loads((source / "attacks" / "paraphrase" / "attack.json").read_text())
    successes = [
        attempt for attempt in content["attempts"] if attempt["success"] and not attempt["pre"]
    ]
    assert successes, "no paraphrase succeeded, so that this test proves nothing"
    for attempt in successes:
        attempt |= changes
    target.mkdir()
    (target / "attack.json").write_text(json.dumps(content))
    return content


def test_the_table_says_what_the_json_says(runs: list[Path], page: Page) -> None:
    labels = {
        ("concept_rate", "direct"): "star, direct %",
        ("concept_rate", "synonyms"): "star, synonyms %",
        ("accuracy_shape", "neighbours"): "shape, neighbours %",
        ("accuracy_shape", "retained"): "shape, retained %",
        ("clip_score", "retained"): "CLIP score, retained",
    }

    def text(one: dict[str, Any], percent: bool) -> str:
        scale, form = (100, ".1f") if percent else (1, ".3f")
        return (
            f"{one['value'] * scale:{form}} [{one['low'] * scale:{form}}, "
            f"{one['high'] * scale:{form}}]"
        )

    costs = [row for row in page.rows if row.get("attack") == "paraphrase"]
    assert [row["family"] for row in costs] == ["typed prompts"] * len(runs)
    for run in runs:
        content = json.loads((run / "evaluation.json").read_text())
        results = {(r["metric"], r["group"]): r for r in content["results"]}
        for key, label in labels.items():
            assert page.row(run.name)[label] == text(results[key]["after"], label.endswith("%")), (
                label
            )
            assert page.row("before: tiny-sd")[label] == text(
                results[key]["before"], label.endswith("%")
            ), label
        asr = json.loads((run / "attacks" / "paraphrase" / "attack.json").read_text())["rates"][
            "asr"
        ]
        assert page.row(run.name)["attack paraphrase %"] == text(asr, True)
        assert (
            page.row(run.name)["training, s"]
            == f"{json.loads((run / 'done.json').read_text())['seconds']:.0f}"
        )
        assert content["protocol_hash"] in page.words
        assert content["environment"]["command"] in page.words


def test_the_page_is_one_self_contained_file(page: Page) -> None:
    for outside in ("http://", "https://", "<script", "<link", "url(", "@import"):
        assert outside not in page.text
    assert 'name="viewport"' in page.text
    assert "prefers-color-scheme:dark" in page.text
    assert len(page.images) > 10
    for image in page.images:
        assert image["alt"]
        assert str(image["src"]).startswith("data:image/")
    assert "Erasure and preservation" in page.words
    assert sum("class" in image for image in page.images) == 1 + 1 + 2 * 2, (
        "plane, curve, conflict and losses of both"
    )


def test_images_are_the_measured_ones(runs: list[Path], page: Page) -> None:
    """The page has the original's image of the first retain prompt, with the seed of the
    evaluation.
    """
    from concept_eraser.data import generate
    from concept_eraser.utils import provenance

    rows = suites.group_prompts(suites.load(SUITE), "retained")
    seeds = generate.seeds_for(rows.texts, provenance.derive_seed(SUITE["seed"], "retained"))
    expected = (
        api.load("tiny-sd")
        .sample(rows.texts[:1], seeds=seeds[:1], steps=4, guidance=5.0)
        .numpy()[0]
    )
    distances = [float(np.abs(image - expected).mean()) for image in page.rendered_images()]
    assert min(distances) < 4  # bf16 against fp32


def test_the_attacked_image_stands_beside_its_prompt(runs: list[Path], page: Page) -> None:
    content = json.loads((runs[0] / "attacks" / "paraphrase" / "attack.json").read_text())
    attempt = next(a for a in content["attempts"] if a["success"] and not a["pre"])
    assert f"attacked: {attempt['text']}" in page.words
    assert f"prompt: {attempt['prompt']}" in page.words
    assert any(str(image["alt"]) == "attacked: the judge's label is star" for image in page.images)


def test_adversarial_prompts_are_escaped(runs: list[Path], tmp_path: Path) -> None:
    edit_attack(runs[0], tmp_path / "evil", text='"><script>alert(1)</script> a star')
    text = api.report(runs[:1], tmp_path / "page.html", attacks=[tmp_path / "evil"]).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert 'a star"><script>' not in Page(text).text


def test_a_success_without_a_text_is_described(runs: list[Path], tmp_path: Path) -> None:
    content = edit_attack(runs[0], tmp_path / "weights", text=None)
    assert content.pop("family") == "typed prompts"
    for name, stored, meaning in (
        ("relearning", {}, "other weights (fine-tuned)"),
        ("soft_prompt", {}, "an embedding"),
        ("of_tomorrow", {}, "an embedding or other weights"),
        ("of_tomorrow", {"family": "without text"}, "another way of sampling"),
    ):
        content = {**content, **stored}
        content["protocol"]["attack"] = name
        (tmp_path / "weights" / "attack.json").write_text(json.dumps(content))
        (entry,) = run_results.read(runs[:1], {}, [tmp_path / "weights"])
        album = galleries.Album([galleries.of_attack(name, entry.attacks[name])])
        section = several_runs.AttackSection(curves=[], costs=[], unlike=[], albums=[album])
        text = rendering.render("attacks.html", attacks=section)
        assert f"by {meaning}: there is no text to show" in Page(text).words


def test_a_page_without_models_says_why_and_keeps_its_numbers(
    runs: list[Path], tmp_path: Path
) -> None:
    models = json.loads((runs[0] / "evaluation.json").read_text())["models"]
    missing_run = edit_evaluation(
        runs[0],
        tmp_path / "gone",
        models={**models, "after": f"nowhere/at/all ({models['after'][-25:-1]})"},
    )
    other = edit_evaluation(
        runs[0],
        tmp_path / "other",
        models={**models, "after": f"tiny-sd ({models['after'][-25:-1]})"},
    )
    text = api.report([missing_run, other], tmp_path / "page.html").read_text()
    assert "Images could not be made: unknown model &#39;nowhere/at/all&#39;" in text
    assert "tiny-sd has other weights than those that were measured" in text
    assert Page(text).row("gone")["star, direct %"]


def test_an_evaluation_without_hashes_of_its_prompts_has_images() -> None:
    """The key is optional. A hash that is recorded is compared."""
    content: dict[str, Any] = {"protocol": suites.load(SUITE).model_dump(mode="json")}
    (example, *_) = galleries.of_group(content, "retained").examples
    rows = suites.group_prompts(suites.load(SUITE), "retained")
    assert example.prompt == rows.texts[0]
    content["prompt_hashes"] = {"retained": rows.hash}
    assert galleries.of_group(content, "retained").examples[0] == example
    content["prompt_hashes"] = {"retained": "another"}
    with pytest.raises(UserError, match=r"the prompts of 'retained' .* have changed"):
        galleries.of_group(content, "retained")


def test_images_of_a_guarded_evaluation_are_guarded(tiny_fp32: Path, tmp_path: Path) -> None:
    """In a folder of its own, and in one that holds the model."""
    guard, suite = "negative:a star on a hill", {**SUITE, "metrics": ["concept_rate"]}
    content = api.evaluate(
        str(tiny_fp32), suites.load(suite).with_at_most(2), guard=guard, output=tmp_path / "guarded"
    ).as_dict()
    assert f" under {guard} (" in content["models"]["after"]
    uris = []
    for folder, recorded in ((tmp_path / "guarded", guard), (tiny_fp32, guard), (tiny_fp32, "")):
        models = dict(content["models"])
        if not recorded:
            models["after"] = models["after"].replace(f" under {guard}", "")
        entry = run_results.Entry(folder.name, folder, {**content, "models": models})
        album = galleries.ImageRenderer().album(entry)
        assert album.missing == ""
        uris.append([shot.uri for gallery in album.galleries for shot in _shots(gallery)])
    assert uris[0] == uris[1]
    before, after = uris[0][::2], uris[0][1::2]
    assert before == uris[2][::2] == uris[2][1::2], "without the safeguard both models are one"
    assert all(one != other for one, other in zip(before, after, strict=True))


def _shots(gallery: galleries.Gallery) -> list[galleries.ExampleImage]:
    return [shot for example in gallery.examples for shot in example.shots]


def detail(rendered_image: np.ndarray) -> float:
    """Energy of all structures finer than 1/10 of the image, under a window that removes its
    borders.
    """
    window = np.hanning(rendered_image.shape[0])
    spectrum = (
        np.abs(
            np.fft.fft2(
                (rendered_image - rendered_image.mean((0, 1))).mean(-1) * np.outer(window, window)
            )
        )
        ** 2
    )
    far = np.abs(np.fft.fftfreq(rendered_image.shape[0])) * rendered_image.shape[0]
    return float(spectrum[np.maximum.outer(far, far) > 10].sum())


def test_sensitive_images_are_blurred_in_the_file(runs: list[Path], tmp_path: Path) -> None:
    secret = suites.load({**SUITE, "sensitive": True}).with_at_most(2)
    folder = edit_evaluation(runs[0], tmp_path / "run")
    evaluation = api.evaluate(runs[0], secret)
    evaluation.save(folder / "evaluation.json", overwrite=True)
    more = [runs[0] / "attacks"]
    pair = [
        Page(
            api.report(
                [folder], tmp_path / "page.html", attacks=more, show_sensitive=show
            ).read_text()
        )
        for show in (False, True)
    ]
    single = [
        Page(
            api.report(
                evaluation, tmp_path / "report.html", run=runs[0], show_sensitive=show
            ).read_text()
        )
        for show in (False, True)
    ]
    for blurred_page, clear_page in (pair, single):
        assert len(blurred_page.rendered_images()) == len(clear_page.rendered_images()) >= 6
        for one, other in zip(
            blurred_page.rendered_images(), clear_page.rendered_images(), strict=True
        ):
            assert one.shape == other.shape
            assert detail(one) < 0.02 * detail(other)
        assert "--show-sensitive" in blurred_page.words
        assert "--show-sensitive" not in clear_page.words


def test_the_images_before_and_after_are_blurred_too(runs: list[Path], tmp_path: Path) -> None:
    suite = suites.load(SUITE).with_at_most(2)
    secret = suites.load({**SUITE, "sensitive": True}).with_at_most(2)
    clear, blurred = (
        np.asarray(
            Image.open(
                write.save_before_after(
                    api.evaluate(runs[0], one), tmp_path / f"{one.sensitive}.png", pairs=2
                )
            ),
            float,
        )
        for one in (suite, secret)
    )
    size = blurred.shape[1] // 2  # of an image and its margin, at twice the size
    for top in (0, size):
        for left in (0, size):
            square = np.s_[top : top + size - 4 : 2, left : left + size - 4 : 2]
            assert detail(blurred[square]) < 0.02 * detail(clear[square])


@pytest.mark.parametrize(
    "change",
    [
        {"concept": {"nudity": "nude"}},
        {"judge": "nudenet"},
        {"metrics": [{"name": "nudenet", "preset": "rece"}]},
    ],
)
def test_what_is_about_nudity_is_sensitive_by_itself(change: dict[str, Any]) -> None:
    assert not html.is_sensitive({"protocol": SUITE | {"judge": "tiny"}})
    assert html.is_sensitive({"protocol": SUITE | {"judge": "tiny"} | change})
    assert html.is_sensitive(
        {"protocol": {"attack": "p4d", "suite": SUITE | {"judge": "tiny"} | change}}
    )


def test_sensitive_is_no_part_of_the_protocol() -> None:
    plain, secret = suites.load(SUITE), suites.load({**SUITE, "sensitive": True})
    assert secret.with_at_most(4).sensitive
    assert plain.model_dump(mode="json") == secret.model_dump(mode="json")
    contents = [
        suites.PromptEvaluation(s, {}, [], {}, {}, "judge", {}).as_dict() for s in (plain, secret)
    ]
    assert contents[0]["protocol_hash"] == contents[1]["protocol_hash"]
    assert "sensitive" not in contents[0]
    assert contents[1]["sensitive"] is True


def point(name: str, erasure: float, preservation: float) -> ranking.Point:
    return ranking.Point(
        name,
        Interval(erasure, erasure, erasure, 9),
        Interval(preservation, preservation, preservation, 9),
    )


def test_dominated_points() -> None:
    points = [
        point("a", 0.9, 0.5),
        point("b", 0.5, 0.9),
        point("c", 0.5, 0.5),
        point("d", 0.9, 0.5),
    ]
    assert ranking.dominated_points(points) == {"c"}, "equal points do not beat each other"
    assert ranking.dominated_points([*points, point("e", 0.9, 0.9)]) == {"a", "b", "c", "d"}
    rendered_image = Image.open(io.BytesIO(comparison_plots.pareto(points, point("before", 0, 1))))
    assert min(rendered_image.size) > 300


def test_no_run_is_best_where_intervals_overlap() -> None:
    intervals = {"a": wilson(1, 100), "b": wilson(3, 100), "c": wilson(60, 100)}
    assert ranking.leaders(intervals, "lower") == ["a", "b"]
    assert ranking.leaders(intervals, "higher") == ["c"]
    assert ranking._rank("erases most", intervals, "lower", "share").startswith(
        "No run erases most: the best intervals"
    )
    assert ranking._rank("preserves most", intervals, "higher", "share").startswith(
        "c preserves most: share 60.0 ["
    )


def test_a_curve_ends_in_the_success_rate(runs: list[Path]) -> None:
    content = json.loads((runs[0] / "attacks" / "paraphrase" / "attack.json").read_text())
    curve = comparison_plots.success_rates(content)
    assert curve[-1] == pytest.approx(content["rates"]["asr"]["value"])
    assert curve[0] == pytest.approx(content["rates"]["pre"]["value"])
    rows = [
        [{"round": 1, "fell": 1}, {"round": 2, "fell": 2}],
        [{"round": 1, "fell": 0}, {"round": 3, "fell": 1}],
    ]
    by_hand = {"attempts": [{"pre": True}] + [{"pre": False}] * 4, "curves": rows}
    assert comparison_plots.success_rates(by_hand) == [0.2, 0.4, 0.6, 0.8], (
        "a batch that ended stays where it was"
    )


def test_the_worst_attack_is_no_control() -> None:
    def entry(name: str, **rates: float) -> run_results.Entry:
        attacks = {
            attack: {
                "family": registry.family(attack),
                "rates": {"asr": {"value": rate, "low": rate, "high": rate, "n": 20}},
            }
            for attack, rate in rates.items()
        }
        content = {"protocol": {"concept": {"shape": "star"}, "groups": {}}, "results": []}
        return run_results.Entry(name, Path(name), content, attacks=attacks)

    attacked = entry("attacked", classifier_alone=0.95, unlearn_diff=0.1, soft_prompt=0.05)
    alone = entry("alone", classifier_alone=0.95)
    assert ranking.summary([attacked, alone, entry("bare")]) == [
        "Attack success rates for 'star': 10.0 [10.0, 10.0] % for attacked (unlearn diff, worst of "
        "2). No attack was run on alone, only controls."
    ]
    assert ranking.summary([alone]) == ["No attack was run on alone, only controls."]


def test_nudenet_counts_come_back_from_their_means() -> None:
    def entry(name: str, before: float, after: float) -> run_results.Entry:
        row = {
            "metric": "nudenet_feet_exposed",
            "group": "direct",
            "before": {"value": before, "n": 8},
            "after": {"value": after, "n": 8},
            "settings": {"preset": "rece"},
        }
        rate = {
            "metric": "nudenet_nude",
            "group": "direct",
            "before": {"value": 1, "n": 8},
            "after": {"value": 0, "n": 8},
            "settings": {},
        }
        return run_results.Entry(
            name, Path(name), {"results": [rate] + ([row] if before or after else [])}
        )

    both = [entry("a", 0.625, 0.125), entry("b", 0, 0)]
    assert comparison_plots.nudenet_counts(both, "direct") == {
        "before": {"feet_exposed": 5},
        "a": {"feet_exposed": 1},
        "b": {"feet_exposed": 0},
    }
    assert comparison_plots.nudenet(both, "direct")
    assert comparison_plots.nudenet(both[1:], "direct") is None


def test_every_preset_of_nudenet_has_a_column() -> None:
    def row(metric: str, value: float) -> dict[str, Any]:
        interval = {"value": value, "low": value, "high": value, "n": 142}
        return {"metric": metric, "group": "direct", "before": interval, "after": interval}

    suite = suites.load("unlearn_diff_nudity").model_dump(mode="json")
    results = [row("nudenet-uda_nude", 0.5), row("nudenet-uda_feet_exposed", 0.1)]
    entry = run_results.Entry("a", Path("a"), {"protocol": suite, "results": results})
    (column,) = ranking.columns([entry])
    assert column.title == "NudeNet (uda), direct"
    assert column.cell(entry).value == 0.5
    entry.content["results"].append(row("nudenet_nude", 0.25))
    assert [one.title for one in ranking.columns([entry])] == [column.title, "NudeNet, direct"]


def test_names_are_the_ends_of_paths_that_differ(tmp_path: Path) -> None:
    assert run_results.names_of([Path("x/a"), Path("x/b")]) == ["a", "b"]
    assert run_results.names_of([Path("esd/run"), Path("munba/run")]) == ["esd/run", "munba/run"]
    with pytest.raises(UserError, match="given twice"):
        run_results.names_of([tmp_path, tmp_path / "." / ""])


def test_unlike_runs_are_refused(runs: list[Path], tmp_path: Path) -> None:
    content = json.loads((runs[1] / "evaluation.json").read_text())
    other = edit_evaluation(
        runs[1],
        tmp_path / "other",
        protocol={**content["protocol"], "seed": 4},
        protocol_hash="another",
    )
    with pytest.raises(UserError, match=r"not measured alike.*differ in protocol\.seed"):
        api.report([runs[0], other], tmp_path / "page.html")
    unlike = edit_attack(runs[1], tmp_path / "attack")
    unlike["protocol"]["options"] |= {"tries": 9}
    (tmp_path / "attack" / "attack.json").write_text(
        json.dumps({**unlike, "protocol_hash": "another"})
    )
    alone = edit_evaluation(runs[1], tmp_path / "alone")
    with pytest.raises(
        UserError, match=r"paraphrase on one and paraphrase on alone .*protocol\.options\.tries"
    ):
        api.report([runs[0], alone], tmp_path / "page.html", attacks=[tmp_path / "attack"])
    assert not (tmp_path / "page.html").exists()


def test_attacks_on_other_weights_are_left_out_and_named(runs: list[Path], tmp_path: Path) -> None:
    folder = edit_evaluation(runs[0], tmp_path / "run")
    shutil.copytree(runs[1] / "attacks", folder / "attacks")
    (entry,) = run_results.read([folder], {})
    assert not entry.attacks
    assert entry.unlike == ["paraphrase"]
    section = several_runs.attack_section([entry], galleries.ImageRenderer())
    assert section.unlike == [f"paraphrase in {folder}"]
    assert (
        f"paraphrase in {folder}" in Page(rendering.render("attacks.html", attacks=section)).words
    )
    with pytest.raises(UserError, match="attacks on other weights only"):
        api.report([folder], tmp_path / "page.html", attacks=[runs[1] / "attacks"])
    with pytest.raises(UserError, match=r"holds no attack\.json"):
        api.report([folder], tmp_path / "page.html", attacks=[tmp_path / "nowhere"])


def test_the_report_of_one_run_shows_its_attacks(runs: list[Path]) -> None:
    result = CliRunner().invoke(app, ["report", str(runs[0]), "-q"], catch_exceptions=False)
    assert result.exit_code == 0
    page = Page((runs[0] / "report.html").read_text())
    assert "paraphrase: " in page.words
    assert "attacked: " in page.words
    assert "https://" not in page.text


def test_bad_input_is_a_clear_error(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    labelled_run = tmp_path / "labelled"
    labelled_run.mkdir()
    shutil.copy(resources.find("pipelines", "digits_three_munba"), labelled_run / "recipe.yaml")
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for arguments, message in (
        ([runs[0], tmp_path / "bare"], "was not evaluated yet"),
        ([runs[0], labelled_run], "is a run on labelled data"),
        ([labelled_run], "is a run on labelled data"),
        ([runs[0], runs[0]], "given twice"),
        ([*runs, "-o", notes], "is no report of concept_eraser"),
        ([*runs, "-o", tmp_path], "is a folder"),
        ([*runs, "--suite", "tiny_star"], "--suite goes with one run"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments), "-q"])
        assert isinstance(result.exception, UserError), result.output
        assert re.search(message, str(result.exception))
    assert notes.read_text() == "mine"


def test_the_command_writes_over_its_own_page(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "both.html").write_text(f"<!doctype html>{html.generator()}an older one")
    result = CliRunner().invoke(
        app,
        ["report", *map(str, runs), "-q", "-o", str(tmp_path / "both.html")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "Erasing star: 2 runs" in Page((tmp_path / "both.html").read_text()).words
