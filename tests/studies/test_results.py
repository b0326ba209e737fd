"""The pages agree with the tables of the studies, and every result has its provenance."""

from __future__ import annotations

import itertools
import json
import lzma
import re
import subprocess
import sys
from statistics import mean
from typing import Any

import pytest
import yaml

from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from concept_eraser.storage.base_model import CONTROLS
from studies import grids, guidance, leaderboard_entries, render_results, result_tables, runs
from studies.rendering import excess_recovery
from studies.rendering.common import LIMITS, provenance
from studies.result_tables import Results, table
from tests.conftest import ROOT

RESULTS = ROOT / "eval" / "results"
STUDIES = [
    path.stem
    for path in (ROOT / "studies" / "configs").glob("*.yaml")
    if ("\nentries:" in path.read_text() or "\nattack:" in path.read_text())
    # their results are evaluations and attacks, not runs
    and path.stem not in excess_recovery.STUDIES
]
# parts of tables whose rows name a seed, and no commit
WITHOUT_ENVIRONMENT = {"papers/bilevel_cleaning", "papers/mini_table", "papers/ngd_tradeoff"}
TABLES = {path.name.split(".")[0]: path for path in sorted(RESULTS.glob("*.jsonl.xz"))}


def test_rendered_files_are_up_to_date() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "studies.render_results", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_a_block_is_rendered_only_between_its_marks() -> None:
    blocks = {"one": lambda: "| 1 |", "two": lambda: pytest.fail("the text has no such marks")}
    text = "a\n<!-- one -->\nold\ntext\n<!-- /one -->\nb <!-- other -->\n"
    expected = "a\n<!-- one -->\n| 1 |\n<!-- /one -->\nb <!-- other -->\n"
    assert render_results.fill_blocks(text, blocks) == expected
    assert render_results.fill_blocks(expected, blocks) == expected
    assert render_results.fill_blocks(text.replace("old\ntext\n", ""), blocks) == expected
    assert render_results.fill_blocks("no marks\n", blocks) == "no marks\n"
    for bad_text in (
        "a\n<!-- one -->\nold\n",
        "a\n<!-- /one -->\n",
        "<!-- /one -->\n<!-- one -->\n",
        text + text,
    ):
        with pytest.raises(SystemExit, match="<!-- one -->"):
            render_results.fill_blocks(bad_text, blocks)


def test_the_readme_has_the_result_of_quickstart() -> None:
    assert render_results.BLOCKS["quickstart"]() in (ROOT / "README.md").read_text()


def test_pages_of_the_denoiser_state_the_limits_of_their_protocol() -> None:
    pages = [*RESULTS.glob("tiny_*.md"), RESULTS / "guidance.md", RESULTS / "robustness.md"]
    assert len(pages) == 13
    for page in pages:
        assert page.read_text().count(LIMITS) == 1, page.name


def p4d_results(study: str) -> list[dict[str, Any]]:
    """Return the stored attacks of a study by P4D's variant K."""
    return [
        content
        for content in table(study).values()
        if isinstance(content.get("protocol"), dict)
        and content["protocol"].get("attack") == "p4d-k"
    ]


def test_the_limits_of_p4d_are_those_of_its_stored_texts() -> None:
    """A text of the published attack begins with a free token, an older one with the prompt."""
    counts = {}
    for path in sorted(RESULTS.glob("*.jsonl.xz")):
        study = path.name.split(".")[0]
        contents = p4d_results(study)
        page = (RESULTS / f"{study}.md").read_text()
        older = sum("family" not in content for content in contents)
        for content in contents:
            for attempt in content["attempts"]:
                if attempt["text"]:
                    begins_with_prompt = attempt["text"].split()[0] == attempt["prompt"].split()[0]
                    assert begins_with_prompt == ("family" not in content), content["environment"]
        sentences = re.findall(r"[^.]*`p4d-k` has one free token fewer[^.]*\.", page)
        if older:
            expected = f"In {older} of {len(contents)} attacks" if older < len(contents) else "The"
            assert [text.strip().startswith(expected) for text in sentences] == [True], study
            counts[study] = (older, len(contents))
        else:
            assert sentences == [], study
    assert counts  # studies whose attacks are older


def test_the_page_of_attacks_names_all_commits_and_no_row_salun_of_other_losses() -> None:
    page = (RESULTS / "tiny_attacks.md").read_text()
    commits = {c["environment"]["commit"][:12] for c in table("tiny_attacks").values()}
    assert len(commits) > 1
    assert f"Commits {', '.join(sorted(commits))}; torch" in page
    for study in ("tiny_attacks", "tiny_edges"):
        text = (RESULTS / f"{study}.md").read_text()
        rows = [line for line in text.splitlines() if line.startswith("| SalUn")]
        names = ("| SalUn, the authors' losses |", "| SalUn, its authors' losses, ")
        assert all(row.startswith(names) for row in rows), study


def sentences_of(study: str) -> str:
    """Return the text on a study's results in one line."""
    return " ".join((ROOT / "studies" / "configs" / f"{study}.md").read_text().split())


def test_the_sentences_on_the_vae_have_the_numbers_of_its_table() -> None:
    """They compare rows, and a row that is measured again changes them."""
    seconds: dict[str, dict[str, float]] = {}
    crossings: dict[str, list[float]] = {}
    for content in Results("vae").values():
        data = content["data"]
        runs_of = {name: row["runs"] for name, row in content["algorithms"].items()}
        reached = {
            name: there
            for name, runs in runs_of.items()
            if (there := [run for run in runs if run["seconds"] is not None])
        }
        seconds[data] = {n: mean(run["seconds"] for run in runs) for n, runs in reached.items()}
        crossings[data] = [mean(run["fid_at_bound"] for run in runs) for runs in reached.values()]
    slower = {data: round(of["UNO"] / of["S"]) for data, of in seconds.items()}
    faster = {data: round(of["S"] / of["H"]) for data, of in seconds.items()}
    with_hat = [of["S"] / of[name] for of in seconds.values() for name in of if "^" in name]
    fid = {data: f"{min(of):.0f} to {max(of):.0f} on {data}" for data, of in crossings.items()}
    text = sentences_of("vae")
    for sentence in (
        f"UNO is {slower['digits']} times slower on digits",
        f"On fonts it is {slower['fonts']} times slower",
        f"H is {faster['digits']} (digits) and {faster['fonts']} times (fonts) faster than surgery",
        f"with a hat are {min(with_hat):.1f} to {max(with_hat):.1f} times faster",
        f"The FID at the crossing is {fid['digits']} and {fid['fonts']}",
    ):
        assert sentence in text, sentence


def test_clean_erasures_from_clip_are_all_named() -> None:
    """At most 2 % of three shapes are left, and 92 % of the labels that no training used."""
    clean = []
    for row in Results("clip")["three"]["rows"]:
        accuracies = [run["accuracy"] for run in row["runs"]]
        left, *others = (
            100 * mean(accuracy[name]["value"] for accuracy in accuracies)
            for name in ("forget", "color", "style")
        )
        if left <= 2 and min(others) >= 92:
            clean.append(row["label"])
    names = {
        "RL (random labels)": "random labels",
        "BS (boundary shrink)": "boundary shrink",
        "NPO+RT": "NPO+RT",
        "MUNBa, its code's optimiser": "MUNBa with its code's optimiser",
    }
    assert clean == list(names)
    (sentence,) = re.findall(r"\*\*Clean at three shapes\*\*: [^.]*", sentences_of("clip"))
    assert [name for name in names.values() if name not in sentence] == []


def test_the_least_gaps_on_half_of_the_painted_shapes_are_named_in_order() -> None:
    gaps = {
        row["label"]: mean(run["gap"] for run in row["runs"])
        for row in Results("classification_painted")["random_50"]["rows"]
        if row.get("grid")
    }
    first, second = sorted(gaps, key=gaps.__getitem__)[:2]
    assert (first, second) == ("NPO+RT", "MUNBa, its code's optimiser")
    assert (
        f"NPO+RT has the least gap ({gaps[first]:.1f} points; the original 24), then MUNBa with "
        f"its code's optimiser ({gaps[second]:.1f})"
    ) in sentences_of("classification_painted")


def test_methods_at_an_edge_are_measured_beyond_it_or_named() -> None:
    measured = yaml.safe_load((ROOT / "studies" / "configs" / "tiny_edges.yaml").read_text())
    text = sentences_of("tiny_edges").partition("Not measured here: ")[2]
    at_an_edge = {
        row["entry"].removeprefix("star_"): row["label"]
        for key, row in table("tiny_leaderboard").items()
        if key.startswith("star_") and row.get("grid") and grids.of_row(row)
    }
    del at_an_edge["finetune"]  # a control, which erases nothing
    names = {name.removesuffix("_published") for name in measured["methods"]}
    others = [label for name, label in at_an_edge.items() if name not in names]
    assert len(others) > 10
    assert [label for label in others if label.split()[0] not in text] == []


def test_every_link_of_a_page_leads_somewhere_and_every_figure_is_on_a_page() -> None:
    all_targets = set()
    for page in RESULTS.glob("*.md"):
        targets = [
            target.split("#")[0]
            for target in re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", page.read_text())
        ]
        missing = [target for target in targets if not (page.parent / target).is_file()]
        assert not missing, page.name
        all_targets |= set(targets)
        assert sum(target.endswith((".svg", ".webp")) for target in targets) <= 2, page.name
    assert {
        path.name for kind in ("svg", "webp", "html") for path in RESULTS.glob(f"*.{kind}")
    } <= all_targets


def test_a_study_has_one_table_and_one_page() -> None:
    files = list(RESULTS.rglob("*"))
    assert all(path.is_file() for path in files)
    assert {path.suffix for path in files} <= {".xz", ".md", ".svg", ".webp", ".json", ".html"}
    assert {path.stem for path in RESULTS.glob("*.md")} == set(TABLES)
    assert len(files) - 2 * len(TABLES) <= 16  # figures, and two other files
    assert sum(path.stat().st_size for path in files) <= 6e6


def test_no_table_names_a_folder_of_a_machine() -> None:
    """A model has the name of its original, and not of the run folder that it was loaded from."""
    for path in TABLES.values():
        text = lzma.decompress(path.read_bytes()).decode()
        assert re.findall(r'"/(?:tmp|home|root|work|Users)/[^"]*', text)[:3] == [], path.name


@pytest.mark.parametrize("study", sorted(STUDIES))
def test_every_result_carries_its_provenance(study: str) -> None:
    for key, content in Results(study).items():
        evaluations = content.get("evaluations") or {"": content["evaluation"]}
        for evaluation in evaluations.values():
            assert evaluation["environment"]["commit"], key
            assert evaluation["environment"]["versions"]["torch"], key
            assert evaluation["protocol_hash"], key
            assert set(evaluation["prompt_hashes"]) == set(evaluation["protocol"]["groups"]), key
            for row in evaluation["results"]:
                assert row["after"]["n"] >= 2, key
                if row["after"]["low"] is not None:
                    low, high = row["after"]["low"], row["after"]["high"]
                    assert low <= row["after"]["value"] <= high, key
        if "@" in content.get("point", {}).get("guard", ""):  # a gate adds the LoRA of a run
            assert recipe.load(content["recipe"]).model == "tiny-sd", key
            continue
        if "guard" in content.get("point", {}):
            assert content["recipe"] == {"model": "tiny-sd"}, f"{key}: a safeguard trains nothing"
            continue
        if content.get("point", {}).get("model") in CONTROLS:
            assert content["recipe"] == {"model": "tiny-sd"}, f"{key}: a control trains nothing"
            assert content["run"]["trained_parameters"] == 0, key
            continue
        assert content["seed"] == content["recipe"]["training"]["seed"], key
        assert recipe.load(content["recipe"]).model == "tiny-sd", key
        assert "took" in content or len(content["run"]["recipe"]) == 16, key


@pytest.mark.parametrize("study", sorted(TABLES))
def test_other_results_say_where_they_come_from(study: str) -> None:
    for key, whole in result_tables.table(study).items():
        part = key.rpartition("/")[0]
        if study in STUDIES and part == "":  # the test above
            continue
        if f"{study}/{part}" in WITHOUT_ENVIRONMENT:
            continue
        content = whole.get("evaluation") or whole.get("campaign") or whole
        assert content["environment"]["commit"], key
        assert content["environment"]["versions"]["torch"], key
        if part == "memory":  # it has no seed: the memory is that of any
            continue
        # an attack's settings are its protocol
        settings = content.get("settings") or content["protocol"]
        assert {"seeds", "seed"} & ({*content} | {*settings}), key


def test_the_provenance_of_a_page_names_every_version() -> None:
    def run(transformers: str, threads: int) -> dict[str, Any]:
        versions = {"torch": "2", "diffusers": "0", "transformers": transformers}
        machine = {"commit": "abc", "versions": versions, "device": "cpu", "threads": threads}
        return {"evaluation": {"environment": machine, "protocol_hash": "f"}}

    runs_by_name = {"one": [run("5.23", 2)], "two": [run("5.24", 1), run("5.23", 1)]}
    assert provenance(runs_by_name) == (
        "Commits abc; torch 2, diffusers 0, transformers 5.23 and 5.24; cpu, 1 and 2 thread(s) a "
        "run; protocols f."
    )


def test_selection_seeds_are_not_reported() -> None:
    for path in (ROOT / "studies" / "configs").glob("*.yaml"):
        study = yaml.safe_load(path.read_text())
        study = leaderboard_entries.expand(study) if "attack" in study else study
        if "victims" in study:  # chooses nothing: its settings are those of other studies
            for victim in study["victims"].values():
                recipe.load(
                    victim["recipe"],
                    [f"{k}={json.dumps(v)}" for k, v in victim.get("set", {}).items()],
                )
            continue
        if "cases" in study:  # a study of the default at its own setting chooses nothing either
            for task, case in itertools.product(study["tasks"], study["cases"]):
                runs.recipe_of(guidance.case(study, task, case), {}, study["seed"])
            continue
        if "concepts" in study:  # a setting is its own, or chosen on a concept that is not reported
            select = study.get("select")
            if select:
                assert select["concept"] not in study["concepts"]
                assert not set(select["seeds"]) & set(study["seeds"])
                assert select["image_seed"] != suites.load(select["suite"]).seed
            continue
        if "runs" in study:  # recipes at their own settings
            for run in study["runs"].values():
                settings = run.get("set", {})
                recipe.load(run["recipe"], [f"{k}={json.dumps(v)}" for k, v in settings.items()])
            continue
        assert not set(study["select"]["seeds"]) & set(study["seeds"])
        if "entries" not in study:  # a study on labelled data: it generates no images
            continue
        names = study["suites"] if "suites" in study else [study["suite"]]
        images = {study.get("image_seed", suites.load(name).seed) for name in names}
        assert study["select"]["image_seed"] not in images, (
            "nothing is chosen by the images that are reported"
        )
        for entry in study["entries"].values():
            if "guard" in entry or "model" in entry:  # nothing is trained
                continue
            for point in study["grids"][entry["grid"]] if entry.get("grid") else [{}]:
                changes = {**entry.get("set", {}), **point}
                recipe.load(
                    entry.get("recipe") or study["recipe"],
                    [f"{k}={json.dumps(v)}" for k, v in changes.items()],
                )


@pytest.mark.slow
def test_a_study_runs_and_continues(no_results, tmp_path, monkeypatch) -> None:
    """Two entries at one step: the grid is scored, the better point reported, a second call trains
    nothing.
    """
    from studies import study

    tiny = {
        "forget.n": 4,
        "retain.n": 4,
        "generation.steps": 2,
        "training.steps": 1,
        "trainable.select": "cross_attention",
    }
    content = {
        "suite": "tiny_star",
        "select": {
            "seeds": [100],
            "n": 4,
            "image_seed": 7101,
            "attack": {"name": "soft_prompt", "n": 4, "seed": 7, "options": {"steps": 1}},
        },
        "seeds": [0],
        "n": 4,
        "grids": {"rates": [{"training.lr": 1e-9}, {"training.lr": 1e-3}]},
        "entries": {"munba": {"recipe": "tiny_star_munba", "set": tiny, "grid": "rates"}},
    }
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys, "argv", ["study", str(path), "--work", str(tmp_path / "work")])
    study.main()
    results, result_file = Results("quick"), result_tables.new_path("quick", "munba_seed0")
    first = results["munba_seed0"]
    assert [len(row["attacked"]) for row in first["grid"]] == [1, 1]
    stamp = result_file.stat().st_mtime
    study.main()
    assert result_file.stat().st_mtime == stamp
    sheet = tmp_path / "work" / "quick" / "munba" / "sheet.webp"
    sheet_bytes = sheet.read_bytes()
    sheet.unlink()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--sheets"])
    study.main()
    assert sheet.read_bytes() == sheet_bytes
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    assert result_file.stat().st_mtime == stamp
    first["evaluation"]["judge"] = "another"
    results["munba_seed0"] = first
    with monkeypatch.context() as patch:
        patch.setattr(
            runs.api,
            "erase",
            lambda *a, **k: (
                pytest.fail("trained again")
                if not (k["output"] / "done.json").exists()
                else runs.api.Run(k["output"], a[0], 0.0)
            ),
        )
        study.main()
    again = results["munba_seed0"]
    assert again["evaluation"]["judge"] != "another"
    for row in again["grid"]:  # as if another point had been the best one
        row["score"] = -1.0 if row["point"] == again["point"] else 1.0
    results["munba_seed0"] = again
    study.main()
    assert results["munba_seed0"]["point"] != again["point"]
