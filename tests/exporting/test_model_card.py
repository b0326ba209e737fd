"""The model card agrees with the run's files.

It has each number with its interval, names what was not measured, and has no path of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import diffusers
import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.exporting import card_snippets, eval_results
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils import path_redaction
from tests import families
from tests.conftest import short


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation and an attack, of few images."""
    run = tmp_path_factory.mktemp("card") / "no_star"
    concept_eraser.erase(
        short(
            model="tiny-sd",
            training__steps=2,
            trainable={"select": "cross_attention_kv", "lora": {"rank": 2}},
        ),
        output=run,
    )
    concept_eraser.evaluate(run, n=4, output=run)
    concept_eraser.attack(
        run, "seed_search", n=4, options={"tries": 2}, output=run / "attacks" / "seed_search"
    )
    return run


@pytest.fixture
def bare(evaluated_run: Path, tmp_path: Path) -> Path:
    """The same run, neither evaluated nor attacked."""
    run = tmp_path / "bare"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("evaluation.json", "attacks"))
    return run


def test_the_card_has_every_number_of_the_evaluation(evaluated_run: Path) -> None:
    text = concept_eraser.card(evaluated_run, repository="me/no-star")
    evaluation = json.loads((evaluated_run / "evaluation.json").read_text())
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for row in evaluation["results"]:
        line = next(
            one
            for one in lines
            if one.startswith(f"| {row['metric']}")
            and f"| {row['group']} |" in one
            and f"{row['after']['value']:.3f}" in one
        )
        assert f"| {row['after']['n']} |" in line
        if row["after"]["low"] is not None:
            assert (
                f"{row['after']['value']:.3f} [{row['after']['low']:.3f}, "
                f"{row['after']['high']:.3f}]"
            ) in line
    assert evaluation["protocol_hash"] in text
    attack = json.loads((evaluated_run / "attacks" / "seed_search" / "attack.json").read_text())
    rate = attack["rates"]["asr"]
    assert "| seed_search | control |" in text
    assert (
        f"| {rate['value']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}] | {rate['n']} | "
        f"`{attack['protocol_hash']}` |"
    ) in text
    assert "No attack was run. The controls (seed_search) are no attacks." in text
    assert "fid: fid_judge, retained: FID needs more images" in text, (
        "what was refused, with the reason"
    )
    assert "Some numbers are from only" in text
    hashes = json.loads((evaluated_run / "environment.json").read_text())["prompts"]
    assert (
        f"| forget | `tiny_star` | {hashes['forget']['rows']} | 8 | "
        f"`{hashes['forget']['hash']}` | anchor | shape: circle |"
    ) in text
    assert "arXiv 2411.15537" in text
    assert 'load_lora_weights("me/no-star"' in text
    assert "not evaluated" not in text
    attack = json.loads((evaluated_run / "attacks" / "seed_search" / "attack.json").read_text())
    texts = {attempt["prompt"] for attempt in attack["attempts"]}
    assert texts
    assert not [one for one in texts if one in text], "no prompt that an attack found"


def test_the_limits_name_attacks_and_no_control(evaluated_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "attacked"
    shutil.copytree(evaluated_run, run)
    control = run / "attacks" / "seed_search" / "attack.json"
    content = json.loads(control.read_text())
    for path, family, rate in (
        (control, "control", 0.95),
        (run / "attacks" / "unlearn_diff" / "attack.json", "typed prompts", 0.1),
    ):
        rates = {**content["rates"], "asr": {**content["rates"]["asr"], "value": rate}}
        protocol = {**content["protocol"], "attack": path.parent.name}
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps({**content, "family": family, "rates": rates, "protocol": protocol})
        )
    text = concept_eraser.card(run)
    assert "Under the attack unlearn_diff, the concept returns for 10% of the prompts" in text
    assert "Under the attack seed_search" not in text
    assert "No attack was run" not in text


def test_the_card_states_what_was_not_measured(bare: Path) -> None:
    text = concept_eraser.card(bare)
    for sentence in (
        "> **This erasure was not evaluated.**",
        "> **This erasure was not attacked.**",
        "concept-eraser evaluate runs/bare",
        "concept-eraser attack runs/bare",
        "Not measured: the concept rate and the retain accuracy",
    ):
        assert sentence in text
    assert text.count("**Not measured.**") == 2


def test_a_command_of_the_card_can_be_pasted(bare: Path) -> None:
    renamed = bare.rename(bare.with_name("no star"))
    assert "concept-eraser evaluate 'runs/no star'\n" in concept_eraser.card(renamed)
    assert "concept-eraser attack 'runs/no star' -a unl" in concept_eraser.card(renamed)


def test_a_name_with_characters_of_markdown_is_shown_as_it_is(bare: Path) -> None:
    content = yaml.safe_load((bare / "recipe.yaml").read_text())
    content["forget"]["prompts"] = {"about": "a <b>|`x`|*y*", "prompts": ["a star", "stars"]}
    content["forget"]["anchor"] = "<i>"
    (bare / "recipe.yaml").write_text(yaml.safe_dump(content))
    text = concept_eraser.card(bare)
    assert r"after erasing **a \<b>\|\`x\`\|\*y\*** with" in text
    row = next(line for line in text.splitlines() if line.startswith("| forget |"))
    assert row.startswith(r"| forget | `a <b>\|'x'\|*y*` |")
    assert row.endswith(r"| \<i> |")


def test_the_header_is_one_the_hub_reads(evaluated_run: Path, tmp_path: Path) -> None:
    data = ModelCard(concept_eraser.card(evaluated_run)).data.to_dict()
    assert data["license"] == "other"
    assert (data["library_name"], data["pipeline_tag"]) == ("diffusers", "text-to-image")
    assert {"munba", "lora", "concept-erasure"} <= set(data["tags"])
    assert "base_model" not in data
    assert "fill it in above" in concept_eraser.card(evaluated_run)
    text_with_licence = concept_eraser.card(evaluated_run, license="openrail++")
    assert "fill it in" not in text_with_licence
    assert ModelCard(text_with_licence).data.license == "openrail++"
    run = tmp_path / "hub"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("pipeline"))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "model": "someone/their-model@v1.0"})
    )
    text = concept_eraser.card(run)
    assert ModelCard(text).data.base_model == "someone/their-model"
    assert (
        'from_pretrained("someone/their-model", revision="v1.0", torch_dtype=torch.float32)' in text
    )


def test_no_path_of_this_machine(evaluated_run: Path, tmp_path: Path) -> None:
    """The base model, the prompts and the command have none."""
    run, base = tmp_path / "local", tmp_path / "secret_place" / "base"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("pipeline"))
    shutil.copytree(Path(concept_eraser.__file__).parent / "tiny" / "weights" / "tiny-sd", base)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (tmp_path / "secret_place" / "mine.txt").write_text("a red star\na blue star\n")
    recipe["forget"]["prompts"] = str(tmp_path / "secret_place" / "mine.txt")
    (run / "recipe.yaml").write_text(
        f"# concept-eraser erase {run}/recipe.yaml\n"
        + yaml.safe_dump({**recipe, "model": str(base)})
    )
    text = concept_eraser.card(run)
    assert "secret_place" not in text
    assert str(tmp_path) not in text
    assert "`base` (a local copy)" in text
    assert "`mine.txt`" in text


def test_no_path_in_recipe_or_suite(evaluated_run: Path, tmp_path: Path) -> None:
    """Paths may be quoted, wrapped by YAML, relative with `..`, or part of the user's suite.

    The recipe in the card stays valid.
    """
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("pipeline"))
    (tmp_path / "secret place").mkdir()
    mine = tmp_path / "secret place" / ("mine and others " * 8 + "'quoted': yes #1.txt")
    mine.write_text("a red star\n")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["forget"]["prompts"], recipe["retain"]["images"] = str(mine), "~/secret/images"
    recipe["forget"]["anchor"] = "a circle and/or a cross"
    (run / "recipe.yaml").write_text(
        "# x\n" + yaml.safe_dump({**recipe, "model": "../../secret/base"})
    )
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["protocol"]["groups"]["direct"]["prompts"] = str(
        tmp_path / "secret place" / "suite.txt"
    )
    evaluation["refused"] = {"fid": f"no such file: {tmp_path}/secret/fid.npz"}
    evaluation["models"]["before"] = "../../secret/base (0123)"
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    text = concept_eraser.card(run)
    assert "secret" not in text
    assert str(tmp_path) not in text
    for sentence in ("`base` (a local copy)", "suite.txt (forget)", "no such file: fid.npz"):
        assert sentence in text
    card_recipe = yaml.safe_load(text.rsplit("```yaml\n", 1)[1].split("```")[0])
    assert card_recipe["forget"] == {**recipe["forget"], "prompts": mine.name}
    assert card_recipe == {
        **recipe,
        "model": "base",
        "forget": card_recipe["forget"],
        "retain": {**recipe["retain"], "images": "images"},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/base", "base"),
        ("../../base", "base"),
        ("../..", "local"),
        ("~/models/base (0a1b)", "base (0a1b)"),
        (r"C:\Users\me\base", "base"),
        ("/a/b/x.safetensors on ../base (0a1b)", "x.safetensors on base (0a1b)"),
        ("owner/name@v1", "owner/name@v1"),
        ("runs/mine", "runs/mine"),
        ("package.module:function", "package.module:function"),
        ("/imagine a star", "/imagine a star"),
        (
            "a photo of a cat and/or a dog, https://a.org/b/c",
            "a photo of a cat and/or a dog, https://a.org/b/c",
        ),
        ("cannot read /a/c/d.npz, found 2", "cannot read d.npz, found 2"),
        (r"put it into C:\Users\jane\.cache\x.pt", "put it into x.pt"),
        (r"no file 'C:\\Users\\jane doe\\my refs\\x.pt'; check", "no file 'x.pt'; check"),
        (r"one of C:\a\b.pt and C:\c\d.pt", "one of b.pt and d.pt"),
        ("folder C:/Users/jane/ref (abc123)", "folder ref (abc123)"),
        ("folder C:/Users/jane doe/ref (abc123)", "folder ref (abc123)"),
        (r"no file \\server\jane\x.pt; check", "no file x.pt; check"),
        ("no file /home/jane doe/ref.png; check", "no file ref.png; check"),
        ("a photo of a cat: / or \\ is a slash", "a photo of a cat: / or \\ is a slash"),
        ("1.5 / 2", "1.5 / 2"),
        ("", ""),
        ("/", "/"),
    ],
)
def test_places(text: str, expected: str) -> None:
    assert path_redaction.shorten(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/places/jane doe", "local"),
        ("/places/jane doe (0a1b)", "local (0a1b)"),
        ("no folder /places/jane doe.", "no folder local."),
        ("no file /places/jane doe/ref.png; check", "no file ref.png; check"),
        ("no file /places/jane doe/a/b/ref.png; check", "no file ref.png; check"),
        ("see file:///places/jane doe/ref.png", "see file://ref.png"),
        ("no file /data/places/jane doe/ref.png", "no file jane doe/ref.png"),
    ],
)
def test_the_home_folder_may_have_spaces(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/places/jane doe"))
    assert path_redaction.shorten(text) == expected


def test_no_place_names_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane doe"))
    for text in (
        r"put it into C:\Users\jane\.cache\x.pt",
        "folder C:/Users/jane/ref (abc123)",
        "no file /home/jane doe/secret project/ref.png; check",
    ):
        shortened = path_redaction.shorten(text)
        assert "jane" not in shortened
        assert "Users" not in shortened


def test_a_working_folder_with_spaces_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of jane" / "work").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "of jane" / "work")
    text = f"no file {tmp_path}/of jane/work/runs/ref.png; check"
    assert path_redaction.shorten(text) == "no file ref.png; check"


def test_an_attack_on_other_weights_is_left_out(evaluated_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "other"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("pipeline"))
    path = run / "attacks" / "seed_search" / "attack.json"
    content = json.loads(path.read_text())
    content["models"]["victim"] = "somebody (0123456789)"
    path.write_text(json.dumps(content))
    text = concept_eraser.card(run)
    assert "attacked other weights than those evaluated: seed_search" in text
    assert "| seed_search |" not in text
    assert "not attacked" in text


def test_the_card_shows_the_numbers_against_a_control(evaluated_run: Path, tmp_path: Path) -> None:
    plain = concept_eraser.card(evaluated_run)
    assert "never learned" not in plain
    run = tmp_path / "no_star"
    shutil.copytree(evaluated_run, run)
    path = run / "attacks" / "seed_search" / "attack.json"
    content = json.loads(path.read_text())
    rate, low = {"value": 0.5, "low": 0.2, "high": 0.8, "n": 4}, {"value": 0.0, "n": 4}
    difference = {"value": 0.5, "low": -0.1, "high": 0.9, "n": 4}
    excess = {"victim": rate, "control": low, "difference": difference, "p": 0.5}
    savings = {
        "budget": 50,
        "n": 4,
        "mean": {"value": 0.375, "low": 0.25, "high": 0.5, "n": 2},
        "broken_on_both": 2,
        "broken_on_victim_only": 1,
        "broken_on_control_only": 0,
        "broken_on_neither": 1,
    }
    control = {
        "model": f"{tmp_path}/controls/never (abc)",
        "record": {},
        "rates": content["rates"],
        "excess": {"asr": excess},
        "families": {"embeddings": excess},
        "savings": {"relearning": savings},
    }
    path.write_text(json.dumps({**content, "control": {"models": [control]}}))
    path = run / "evaluation.json"
    content = json.loads(path.read_text())
    row = {
        "group": "direct",
        "role": "forget",
        "erased": rate,
        "original": rate,
        "between_controls": None,
        "relative_to_original": {"value": 0.25, "low": 0.125, "high": 0.5, "n": 4},
        "relative_to_controls": None,
    }
    gap = {"models": ["x (1)"], "records": [{}], "predictions": [row], "results": []}
    path.write_text(json.dumps({**content, "control": {**gap, "distances": [], "refused": {}}}))
    text = concept_eraser.card(run)
    assert str(tmp_path) not in text
    numbers = "0.500 [0.200, 0.800] | 0.000 | 0.500 [-0.100, 0.900] | 4"
    assert f"| all attempts | {numbers} | 0.375 [0.250, 0.500] (n = 2, censored: 2) |" in text
    assert f"| embeddings | {numbers} | - |" in text
    assert "| direct (forget) | 0.250 [0.125, 0.500] | - | 4 |" in text
    without = [line for line in text.splitlines() if line not in plain.splitlines()]
    assert len(without) < 20  # nothing else changed


def test_the_card_repeats_the_evaluation_against_a_control(evaluated_run: Path) -> None:
    stored = (evaluated_run / "evaluation.json").read_bytes()
    plain = concept_eraser.card(evaluated_run)
    text = concept_eraser.card(evaluated_run, control="tiny-sd-without-star")
    added = [line for line in text.splitlines() if line not in plain.splitlines()]
    assert any("a model that never learned the concept" in line for line in added)
    rows = [line for line in added if line.startswith("| direct (forget) | ")]
    assert len(rows) == 1
    assert rows[0].endswith(" | - | 4 |")  # one control, so none between two
    assert len(added) < 12  # nothing else changed
    assert (evaluated_run / "evaluation.json").read_bytes() == stored
    with pytest.raises(UserError, match="was trained on images of shape=star"):
        concept_eraser.card(evaluated_run, control="tiny-sd-without-heart")


def test_edited_prompts_are_not_measured_beside_the_stored_numbers(
    bare: Path, tmp_path: Path
) -> None:
    file = tmp_path / "green.txt"
    file.write_text("a green star\n")
    suite = {
        "concept": {"shape": "star"},
        "sampling": {"steps": 1},
        "groups": {"direct": {"prompts": str(file), "role": "forget", "n": 2}},
        "metrics": ["concept_rate"],
    }
    concept_eraser.evaluate(bare, suite, output=bare)
    page = concept_eraser.report(bare)
    page.unlink()
    file.write_text("a red star\n")
    with pytest.raises(UserError, match=r"'direct' .*green\.txt.* have changed since"):
        concept_eraser.report(bare)
    assert not page.exists()
    with pytest.raises(UserError, match=r"'direct' .* have changed since .*; evaluate"):
        concept_eraser.card(bare, control="tiny-sd-without-star")


def test_a_run_on_labelled_data(tmp_path: Path) -> None:
    run = tmp_path / "class"
    run.mkdir()
    recipe = {
        "model": "concept_eraser.models.architectures:x",
        "target": "classifier",
        "forget": {"data": "digits", "classes": ["3"], "loss": "ascent"},
        "retain": {"data": "digits", "loss": "data"},
        "method": {"name": "munba"},
        "trainable": {"select": "all"},
    }
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (run / "done.json").write_text(json.dumps({"seconds": 1.0}))
    after = {
        "accuracy": {"forget": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 100}},
        "table": {"mia": 0.25},
    }
    (run / "evaluation.json").write_text(
        json.dumps(
            {
                "results": {
                    "before": {
                        "accuracy": {"forget": {"value": 1.0, "low": 0.9, "high": 1.0, "n": 100}}
                    },
                    "after": after,
                }
            }
        )
    )
    text = concept_eraser.card(run)
    assert (
        "| accuracy | forget | - | 1.000 [0.900, 1.000] | 0.500 [0.400, 0.600] | - | 100 |" in text
    )
    assert "| table | mia | - | - | 0.250 | - | - |" in text
    assert ModelCard(text).data.pipeline_tag == "image-classification"
    assert "after erasing **digits (3)** with munba" in text
    assert "| forget | `digits (3)` | - | all | - | ascent | - |" in text
    assert not any(word in text for word in ("## Attacks", "concept-eraser attack", "paired"))
    assert "## Limits" not in text
    with pytest.raises(UserError, match="has no prompts to attack"):
        concept_eraser.attack(run, "random_tokens")


def test_the_code_of_a_branch_loads_that_branch(evaluated_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run)
    (run / "pipeline").mkdir()
    plan = {
        revision: concept_eraser.push_to_hub(
            run, "me/x", kind="both", revision=revision, dry_run=True
        ).card
        for revision in (None, "v1")
    }
    assert 'DiffusionPipeline.from_pretrained("me/x", revision="v1", torch_dtype=' in plan["v1"]
    assert 'pipe.load_lora_weights("me/x", revision="v1", adapter_name="erase")' in plan["v1"]
    assert "revision=" not in str(plan[None])


@pytest.mark.parametrize(
    ("files", "calls"),
    [
        (
            {"config.json": '{"architecture": "resnet"}'},
            ['load_part(snapshot_download("me/x", revision="v1"), "classifier").module'],
        ),
        (
            {"config.json": '{"architectures": ["CLIPModel"]}', "tokenizer_config.json": "{}"},
            [
                'CLIPModel.from_pretrained("me/x", revision="v1")',
                'AutoTokenizer.from_pretrained("me/x", revision="v1")',
            ],
        ),
        (
            {"a.safetensors": ""},
            ['load_file(hf_hub_download("me/x", "a.safetensors", revision="v1"))'],
        ),
    ],
)
def test_the_code_of_a_branch_of_a_model_without_prompts(
    tmp_path: Path, files: dict[str, str], calls: list[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    recipe = recipes.load("cifar10_class_munba")
    text = card_snippets.use(recipe, tmp_path, "me/x", revision="v1")
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    assert all(call in text for call in calls)
    assert "revision" not in card_snippets.use(recipe, tmp_path, "me/x")


def test_a_closed_form_is_not_described_as_training(tmp_path: Path) -> None:
    run = concept_eraser.erase("tiny_star_uce", output=tmp_path / "run").folder
    text = concept_eraser.card(run)
    assert "edited in closed form" in text
    assert not any(word in text for word in ("| lr |", "(loss", "| 400 |", "Trained:"))


def test_the_command(evaluated_run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["card", str(evaluated_run)])
    assert result.exit_code == 0, result.output
    assert result.output == concept_eraser.card(evaluated_run)
    place = tmp_path / "README.md"
    assert (
        CliRunner()
        .invoke(app, ["card", str(evaluated_run), "-o", str(place), "--repo", "me/x"])
        .exit_code
        == 0
    )
    assert "me/x" in place.read_text()
    assert "exists already" in str(
        CliRunner().invoke(app, ["card", str(evaluated_run), "-o", str(place)]).exception
    )
    os.truncate(place, 0)
    unfinished = tmp_path / "my run"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text((evaluated_run / "recipe.yaml").read_text())
    again = f"concept-eraser erase '{unfinished}/recipe.yaml' --output '{unfinished}' --resume"
    for call in (concept_eraser.card, concept_eraser.load):
        with pytest.raises(UserError, match="is not finished") as error:
            call(unfinished)
        assert str(error.value).endswith(f"; continue with: {again}")
    with pytest.raises(UserError, match="is no run folder"):
        concept_eraser.card(tmp_path / "nowhere")


def test_an_attack_under_a_safeguard_is_no_statement_about_the_weights(
    evaluated_run: Path, bare: Path, tmp_path: Path
) -> None:
    run = tmp_path / "no_star"
    shutil.copytree(evaluated_run, run)
    command = ["attack", str(run), "-a", "random_tokens", "--set", "tries=1", "-n", "2"]
    result = CliRunner().invoke(app, [*command, "--guard", "negative:a star"])
    assert result.exit_code == 0, result.output
    assert "concept-eraser report" not in result.output
    folder = run / "attacks" / "random_tokens-negative"
    attack = json.loads((folder / "attack.json").read_text())
    assert attack["models"]["victim"].startswith(f"{run} under negative:a star (")
    shutil.copytree(folder, bare / "attacks" / folder.name)
    name = "random_tokens-negative (under the safeguard negative:a star)"
    for one in (run, bare):
        text = concept_eraser.card(one)
        assert attack["protocol_hash"] not in text
        assert "Left out, because they were under a safeguard, or measured" in text
        assert f"than those evaluated: {name}." in text
    assert "This erasure was not attacked." in text
    assert eval_results.hub_files(run, "me/x") == eval_results.hub_files(evaluated_run, "me/x")
    page = concept_eraser.report([run], tmp_path / "page.html").read_text()
    assert "random_tokens" not in page.replace(name, "")
    assert f"or under another safeguard, or searched for another concept: {name} in" in page
    with pytest.raises(UserError, match="on other weights only, or under another safeguard"):
        concept_eraser.report([run], tmp_path / "page.html", attacks=[folder])


def test_the_code_of_the_card_generates_an_image(evaluated_run: Path, tmp_path: Path) -> None:
    """The bundled model is stored in fp16, where the libraries' own precisions do not fit."""
    run = tmp_path / "no_star"
    shutil.copytree(evaluated_run, run)
    place = concept_eraser.export(run, "diffusers").path
    text = concept_eraser.card(run, repository="me/no-star")
    codes = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    code, lora = (next(c for c in codes if word in c) for word in ("images[0]", "load_lora"))
    assert "torch_dtype=torch.float16" in lora
    names: dict[str, object] = {}
    few = '"a prompt", num_inference_steps=1'
    code = code.replace('"me/no-star"', json.dumps(str(place))).replace('"a prompt"', few)
    exec(code, names)
    assert getattr(names["image"], "size", None) == (64, 64)


def test_a_lora_that_diffusers_does_not_load_is_not_uploaded_by_default(tmp_path: Path) -> None:
    """PixArt's pipeline has no `load_lora_weights`."""
    assert not hasattr(diffusers.PixArtAlphaPipeline, "load_lora_weights")
    recipe = short(
        model=str(families.build("pixart", tmp_path / "pixart")),
        model_options=families.options("pixart"),
        forget__anchor="a blue house",
        forget__prompts=["a red star"],
        retain__prompts=["a house"],
        trainable={"select": "cross_attention", "lora": 2},
        training__steps=1,
    )
    run = concept_eraser.erase(recipe, output=tmp_path / "run").folder
    with pytest.raises(UserError, match=r"holds no pipeline; .* --to diffusers.* --as lora"):
        concept_eraser.push_to_hub(run, "me/x", dry_run=True)
    lora = concept_eraser.push_to_hub(run, "me/x", kind="lora", dry_run=True)
    assert "pytorch_lora_weights.safetensors" in {upload.name for upload in lora.uploads}
    assert "library_name" not in lora.card
    for card in (lora.card, concept_eraser.card(run)):
        assert "load_lora_weights" not in card
        assert 'model = concept_eraser.load("runs/run")' in card
    concept_eraser.export(run, "diffusers")
    for kind in (None, "both"):
        card = concept_eraser.push_to_hub(run, "me/x", kind=kind, dry_run=True).card
        assert "load_lora_weights" not in card
        assert "library_name: diffusers" in card
        assert 'DiffusionPipeline.from_pretrained("me/x"' in card
