"""The recipes of the papers: each is valid and trains two steps on a tiny pipeline of its family,
and the prompt sets fit together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import concept_eraser
from concept_eraser import registry
from concept_eraser.data import prompts
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from studies import result_tables
from tests import families

FOLDER = resources.folder("pipelines")
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".yml"))
MODELS = {
    "sd14": "CompVis/stable-diffusion-v1-4",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "flux": "black-forest-labs/FLUX.1-dev",
}
PAPERS = [path.stem for path in FILES if path.stem.split("_")[0] in MODELS]
CLASSES = [
    "tench",
    "english_springer",
    "cassette_player",
    "chain_saw",
    "church",
    "french_horn",
    "garbage_truck",
    "gas_pump",
    "golf_ball",
    "parachute",
]
CONCEPTS = ["nudity", "violence", "vangogh", "celebrity", "character"]
EDITS = [
    name
    for name in PAPERS
    if hasattr(registry.load("method", recipe.load(name).method.name), "edit")
]
FEW = [
    "model_options={}",
    "training.steps=2",
    "training.batch_size=2",
    "training.micro_batches=1",
    "training.device=cpu",
    "forget.n=2",
    "generation.steps=1",
    "generation.batch_size=2",
]


def comments(name: str) -> list[str]:
    return [
        line for line in (FOLDER / f"{name}.yaml").read_text().splitlines() if line.startswith("#")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_its_objectives_fit(path: Path) -> None:
    job = recipe.load(str(path))
    sets = {
        name: prompts.load(objective.prompts)
        for name, objective in job.objective_specs.items()
        if objective.prompts
    }
    for name in sets:
        if name.startswith("forget") and "retain" in sets:
            prompts.require_disjoint(sets[name], sets["retain"])
    for name, rows in sets.items():
        anchor = job.objective_specs[name].anchor
        anchored_texts = {row.anchor_prompt(anchor) for row in rows.prompts} if anchor else set()
        assert not set(rows.texts) & anchored_texts


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_it_names_the_definition_that_it_follows_and_its_differences(path: Path) -> None:
    """Each recipe does, also the controls."""
    opening = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    assert sum(line.startswith("# follows ") for line in opening) == 1
    assert any("differs from " in line for line in opening)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_it_denies_no_setting_that_it_has(path: Path) -> None:
    training = yaml.safe_load(path.read_text()).get("training") or {}
    keys = {"momentum": "momentum", "weight decay": "weight_decay", "clipping": "clip"}
    for line in comments(path.stem):
        if line.startswith("# differs from "):
            denied = [words for words, key in keys.items() if words in line and key in training]
            assert denied == []


PLACE = re.compile(
    r"\bEqs?\. \d|\bsection \d|\bAlgorithm \d|\.py\b|no (?:single )?paper|not read here"
)


def test_it_names_a_place_of_the_definition() -> None:
    """An equation, a section, a file of the authors, or that there is no paper or none was read."""
    lines = {
        path.stem: next(line for line in comments(path.stem) if line.startswith("# follows "))
        for path in FILES
    }
    assert [name for name, line in lines.items() if not PLACE.search(line)] == []
    assert not PLACE.search("# follows MUNBa")


@pytest.mark.parametrize("name", ["salun", "erasediff", "advunlearn"])
def test_it_tells_how_many_configurations_were_compared(name: str) -> None:
    """Stored results have the recipe's losses, or it says none has. Untuned is a single setting."""
    job = recipe.load(f"tiny_star_{name}")
    results = [
        {**row["recipe"], "grid": row.get("grid", [])}
        for study in ("tiny_leaderboard", "tiny_attacks", "tiny_edges")
        for row in result_tables.table(study).values()
        if row.get("recipe") and row["recipe"].get("method", {}).get("name") == job.method.name
    ]
    assert results  # of other losses
    stored = [
        other
        for other in results
        if all(
            other[part]["loss"] == getattr(job, part).loss
            and other[part]["teacher"] == getattr(job, part).teacher
            and other[part].get("noised") == getattr(job, part).noised
            for part in ("forget", "retain")
            if part in other
        )
        and other["target"] == job.target
        and other["trainable"].get("saliency") == job.trainable.saliency
    ]
    text = " ".join(line[2:] for line in comments(f"tiny_star_{name}"))
    claims = "one configuration" in text and re.search(r"no result with it is stored", text)
    assert bool(claims) == (not stored), f"{len(stored)} stored results have these losses"
    settings = {json.dumps([row["trainable"], row["training"]["lr"]]) for row in stored}
    settings |= {json.dumps(tried["point"]) for row in stored for tried in row["grid"]}
    training = (FOLDER / f"tiny_star_{name}.yaml").read_text().split("training:")[1]
    assert ("tuned: no" in training.splitlines()[0]) == (len(settings) < 2)


def test_the_papers_jobs_are_there() -> None:
    assert len(FILES) >= 55
    methods = ("munba", "uno", "esd", "salun", "advunlearn", "forum")
    assert {f"sd14_nudity_{method}" for method in methods} <= set(PAPERS)
    assert {f"sd14_imagenette_{name}_munba" for name in CLASSES} <= set(PAPERS)
    for start in ("sd14_vangogh_", "sdxl_", "sd3_", "flux_"):
        assert sum(name.startswith(start) for name in PAPERS) >= 2, start


@pytest.mark.parametrize("name", PAPERS)
def test_it_names_its_model_and_claims_nothing(name: str) -> None:
    assert recipe.load(name).model == MODELS[name.split("_")[0]]
    assert any("not measured here" in line for line in comments(name))
    suite = recipe.load(name).forget.prompts
    has_suite = suite in resources.names("eval")
    assert any(
        (f"suite {suite}" if has_suite else "no suite: no judge") in line for line in comments(name)
    )


@pytest.mark.parametrize(
    "name", [name for name in PAPERS if any("prompts='" in line for line in comments(name))]
)
def test_the_papers_own_prompts_are_an_override(name: str) -> None:
    """The overrides in a comment, split as by a shell, give a valid recipe."""
    import shlex

    line = next(line for line in comments(name) if "prompts='" in line)
    changes = shlex.split(line[line.index("forget.prompts=") :])
    job = recipe.load(name, changes)
    assert isinstance(job.forget.prompts, list)
    if isinstance(job.forget.anchor, str):
        prompts.load(job.forget.prompts).prompts[0].anchor_prompt(job.forget.anchor)
    else:
        assert job.forget.anchor is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The tiny pipeline of a model: the bundled one, or one of its family with random weights."""
    root, folders = tmp_path_factory.mktemp("families"), {"sd14": "tiny-sd"}

    def of(model: str) -> str:
        if model not in folders:
            folders[model] = str(families.build(model, root / model))
        return folders[model]

    return of


@pytest.mark.parametrize(
    "name",
    [
        "sd14_nudity_forum",
        "sd14_vangogh_munba",
        "sdxl_celebrity_munba",
        "sd3_violence_munba",
        "flux_vangogh_esd",
    ],
)
def test_a_run_records_its_prompts(name: str, folder: Callable[[str], str], tmp_path: Path) -> None:
    """tests/runs/test_dry_run.py runs two steps of every recipe; here one of each family and kind
    writes a run folder.
    """
    family = name.split("_")[0]
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    changes = [*FEW, f"model={folder(family)}"]
    changes += [f"model_options={families.options(family)}"] if families.options(family) else []
    changes += [
        f"{objective}.n=2" for objective in ("retain", "replace", "attack") if objective in content
    ]
    changes += ["method.inner_steps=1"] if "inner_steps" in content["method"] else []
    run = concept_eraser.erase(name, overrides=changes, output=tmp_path / "run")
    steps = [yaml.safe_load(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert (run.folder / "weights.safetensors").is_file() != ("lora" in content["trainable"])
    prompt_facts = json.loads((run.folder / "environment.json").read_text())["prompts"]
    forget_set = prompts.load(content["forget"]["prompts"])
    assert prompt_facts["forget"] == {
        "id": forget_set.name,
        "rows": len(forget_set),
        "hash": forget_set.hash,
    }
    if content["forget"]["prompts"] not in resources.names("eval"):
        with pytest.raises(UserError, match="no suite has the name of"):
            concept_eraser.evaluate(run.folder)
    assert (run.folder / "lora").is_dir() == ("lora" in content["trainable"])


@pytest.mark.parametrize("name", EDITS)
def test_it_edits_in_one_call(name: str, tmp_path: Path) -> None:
    """Also with the overrides in its comments."""
    import shlex

    offers = [
        line[line.index(start) :]
        for line in comments(name)
        for start in ("forget.prompts=", "method=")
        if f" {start}" in line
    ]
    assert offers
    for i, line in enumerate(["", *offers]):
        run = concept_eraser.erase(
            name, overrides=[*shlex.split(line), "model=tiny-sd"], output=tmp_path / str(i)
        )
        figures = json.loads((run.folder / "done.json").read_text())["edit"]
        # the bundled text encoder does not know these words, so a small change is enough
        assert figures["moved"] > 0.01
        assert (run.folder / "weights.safetensors").is_file()


def test_every_concept_has_its_sets() -> None:
    """Synonyms never name the concept as the forget set does, and the retain sets are disjoint from
    it.
    """
    for name in [*CONCEPTS, *(f"imagenette_{c}" for c in CLASSES)]:
        rest = (
            name.replace("imagenette_", "imagenette_not_")
            if name.startswith("imagenette")
            else f"{name}_retain"
        )
        forget, synonyms = prompts.load(name), prompts.load(f"{name}_synonyms")
        stays = [prompts.load(rest), prompts.load(f"{name}_neighbours")]
        if name in CONCEPTS:  # Imagenette's anchor is the next class
            stays.append(prompts.load(f"{name}_anchor"))
        for one in (forget, synonyms, *stays):
            assert len(one) == len(set(one.texts)) >= 100, one.name
        for retain_set in stays:
            prompts.require_disjoint(forget, retain_set)
            prompts.require_disjoint(synonyms, retain_set)
        prompts.require_disjoint(*stays[:2])
        words = {
            word
            for p in forget.prompts
            for key, word in p.words.items()
            if key in ("state", "act", "artist", "name", "class")
        }
        assert words
        assert not [text for text in synonyms.texts if any(word in text for word in words)], name


def test_the_suite_of_nudity_measures_and_blurs(shared_tiny: Any, tmp_path: Path) -> None:
    """The bundled model generates no people, so NudeNet detects nobody in any group."""
    suite = suites.load("nudity")
    assert suite.sensitive
    small = suite.with_at_most(2).model_copy(
        update={"sampling": suite.sampling.model_copy(update={"steps": 1})}
    )
    evaluation = suites.evaluate(shared_tiny, shared_tiny, small, cache=tmp_path)
    assert evaluation.refused == {}
    assert [evaluation.find("concept_rate", group).after.value for group in suite.groups] == [
        0,
        0,
        0,
        0,
    ]
    assert set(evaluation.as_dict()["prompt_hashes"]) == {
        "direct",
        "synonyms",
        "neighbours",
        "retained",
    }
