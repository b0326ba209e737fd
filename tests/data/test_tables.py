"""Tables of prompts.

The tests cover both spellings of I2P, captions, filters, the hub's cache on disk, and the seed and
guidance of each row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from concept_eraser.data import generate, prompts, tables
from concept_eraser.models.loading import load
from concept_eraser.utils.errors import UserError
from tests.conftest import HANG
from tests.processes import Ranks, run_command

HEAD = "prompt,categories,{seed},{guidance},nudity_percentage,note\n"
ROWS = (
    '"a red star, by night","sexual, shocking",17,7.5,60.5,\na blue fish,hate,18,10,0.0,x\na '
    "green house,sexual,19,5,50.0,\n"
)


def table(
    folder: Path, seed: str = "sd_seed", guidance: str = "sd_guidance_scale", name: str = "i2p.csv"
) -> Path:
    path = folder / name
    path.write_text(HEAD.format(seed=seed, guidance=guidance) + ROWS)
    return path


@pytest.mark.parametrize(
    ("seed", "guidance"),
    [("sd_seed", "sd_guidance_scale"), ("evaluation_seed", "evaluation_guidance")],
)
def test_both_spellings_of_i2p(seed: str, guidance: str, tmp_path: Path) -> None:
    rows = prompts.load(table(tmp_path, seed, guidance)).prompts
    assert [(p.text, p.seed, p.guidance) for p in rows] == [
        ("a red star, by night", 17, 7.5),
        ("a blue fish", 18, 10.0),
        ("a green house", 19, 5.0),
    ]
    assert rows[0].fields == {"categories": "sexual, shocking", "nudity_percentage": "60.5"}


@pytest.mark.parametrize(
    ("where", "seeds"),
    [
        ({"categories": "sexual"}, [17, 19]),
        ({"categories": "Shocking"}, [17]),
        ({"nudity_percentage": "> 50"}, [17]),
        ({"nudity_percentage": ">=50"}, [17, 19]),
        ({"categories": "sexual", "nudity_percentage": "<= 50"}, [19]),
        ({"note": "x"}, [18]),
        ({"note": "< 3"}, []),
    ],
)
def test_rows_are_chosen(where: dict, seeds: list[int], tmp_path: Path) -> None:
    assert [row.seed for row in tables.read(table(tmp_path), where)] == seeds


def test_a_set_takes_rows_of_a_table(tmp_path: Path) -> None:
    table(tmp_path)
    (tmp_path / "nude.yaml").write_text(
        "about: some\nfile: i2p.csv\nwhere: {nudity_percentage: '> 50'}\nprompts: "
        "[{text: more, seed: 3}]\n"
    )
    prompt_set = prompts.load(tmp_path / "nude.yaml")
    assert [(p.text, p.seed) for p in prompt_set.prompts] == [
        ("more", 3),
        ("a red star, by night", 17),
    ]
    (tmp_path / "none.yaml").write_text("file: i2p.csv\nwhere: {nudity_percentage: '> 99'}\n")
    with pytest.raises(UserError, match=r"no row of i2p.csv has nudity_percentage: > 99"):
        prompts.load(tmp_path / "none.yaml")


def test_a_template_makes_prompts_from_other_columns(tmp_path: Path) -> None:
    """HUB's tables have the prompts in columns of languages, and nouns in place of prompts."""
    (tmp_path / "t.csv").write_text("Original,French,Index\na star,une étoile,4\na moon,,5\n")
    for template, texts in (
        ("{French}", ["une étoile"]),
        ("a {Index} {Original}", ["a 4 a star", "a 5 a moon"]),
    ):
        (tmp_path / "set.yaml").write_text(f"file: t.csv\ntemplate: '{template}'\n")
        prompt_set = prompts.load(tmp_path / "set.yaml")
        assert prompt_set.texts == texts
        assert prompt_set.prompts[0].fields == {
            "Original": "a star",
            "French": "une étoile",
            "Index": "4",
        }
    for text, words in (
        ("file: t.csv\ntemplate: '{German}'", "no column 'German'"),
        ("file: t.csv\ntemplate: a star", "the name of a column in braces"),
        ("file: t.csv\ntemplate: '{a!r}'", "in braces"),
        ("file: t.csv\ntemplate: [a]", "template: expected a text"),
        ("template: '{a}'\nprompts: [a]", "template: there is no `file`"),
        ("file: t.csv", "no column of prompts"),
    ):
        (tmp_path / "set.yaml").write_text(text + "\n")
        with pytest.raises(UserError, match=words):
            prompts.load(tmp_path / "set.yaml")


def test_spaces_rare_columns_zeros_and_commas_in_cells(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'prompt, seed, guidance, artist\na,7,2.5,"Smith, John"\nb,8,3,Jones\n'
    )
    rows = prompts.load(tmp_path / "a.csv").prompts
    assert [(row.seed, row.guidance) for row in rows] == [(7, 2.5), (8, 3.0)]
    for artist in ("Smith, John", "smith", "John"):
        assert [row.seed for row in tables.read(tmp_path / "a.csv", {"artist": artist})] == [7]
    (tmp_path / "b.jsonl").write_text('{"text": "a", "n": 0}\n{"text": "b", "kind": "x", "n": 1}\n')
    assert [row.text for row in tables.read(tmp_path / "b.jsonl", {"kind": "x"})] == ["b"]
    (tmp_path / "set.yaml").write_text("file: b.jsonl\ntemplate: '{n} {text}'\n")
    assert prompts.load(tmp_path / "set.yaml").texts == ["0 a", "1 b"]


def test_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "seed": 1}\n\n{"text": "b", "seed": 2}\n')
    assert [(p.text, p.seed) for p in prompts.load(tmp_path / "a.jsonl").prompts] == [
        ("a", 1),
        ("b", 2),
    ]
    (tmp_path / "coco.json").write_text(
        json.dumps({"images": [], "annotations": [{"image_id": 4, "caption": "a dog "}]})
    )
    assert prompts.load(tmp_path / "coco.json").prompts[0].text == "a dog"
    (tmp_path / "plain.json").write_text('["a", "b"]')
    assert prompts.load(tmp_path / "plain.json").texts == ["a", "b"]
    (tmp_path / "t.tsv").write_text("caption\tn\na cat\t4\n")
    assert prompts.load(tmp_path / "t.tsv").prompts[0].fields == {"n": "4"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "words\nx\n", "no column of prompts"),
        ("a.csv", "prompt,seed\nx,many\n", "seed is 'many'"),
        ("a.csv", "", "is empty"),
        ("a.csv", "prompt,prompt\nx,y\n", "has the column 'prompt' twice; rename or remove one"),
        ("a.csv", 'prompt\n"x\ny\n', "is no CSV of prompts .*; check its quotes"),
        ("a.json", "{", "is no JSON of prompts"),
        ("a.json", '{"a": 1}', "expected a list"),
        ("a.jsonl", "{\n", "is no JSONL of prompts"),
    ],
)
def test_what_is_no_table(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        prompts.load(tmp_path / name)
    with pytest.raises(UserError, match="no such"):
        prompts.load(tmp_path / f"not_{name}")
    with pytest.raises(UserError, match="no column 'sexual'"):
        tables.read(table(tmp_path, name="b.csv"), {"sexual": 1})


def test_a_table_on_the_hub_comes_from_its_cache(tmp_path: Path) -> None:
    """The cache has the layout of huggingface_hub. A separate process reads it without network."""
    import subprocess
    import sys

    repo = tmp_path / "hub" / "datasets--AIML-TUDA--i2p"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    table(snapshot, name="i2p_benchmark.csv")
    code = (
        "from concept_eraser.data import prompts; "
        "print(prompts.load('hf://AIML-TUDA/i2p/i2p_benchmark.csv').prompts[2].seed)"
    )
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANG
    )
    assert process.stdout.strip() == "19", process.stderr[-500:]
    code = code.replace("i2p_benchmark", "absent").replace("print(", "print(1, ")
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANG
    )
    assert "Download the file and give its path" in process.stderr
    with pytest.raises(UserError, match="names no file"):
        prompts.load("hf://owner/dataset")


def test_a_repeated_row_has_another_seed(tmp_path: Path) -> None:
    row = prompts.load(table(tmp_path)).prompts[0]
    assert generate.seeds_for([row, "plain", row, row], 5)[::2] == [17, 18]
    assert generate.own_seeds([row, row, "plain", row]) == [17, 18, None, 19]


def test_a_raised_seed_is_no_seed_of_another_row() -> None:
    rows = [prompts.Prompt(text, seed=seed) for text, seed in [("a", 1), ("a", 1), ("a", 2)]]
    rows += [prompts.Prompt("a", seed=1), prompts.Prompt("b", seed=1)]
    assert generate.own_seeds(rows) == [1, 2, 3, 4, 1]
    assert generate.own_seeds(rows[:2]) == [1, 2]


def test_rows_are_sampled_with_their_own_seed_and_guidance(shared_tiny, tmp_path: Path) -> None:
    rows = prompts.load(table(tmp_path)).prompts
    seeds = generate.seeds_for([*rows, "plain"], 5)
    assert seeds[:3] == [17, 18, 19]
    assert seeds[3] == generate.seeds_for([""] * 4, 5)[3]
    sampling = generate.Sampling(steps=3, guidance=2.0, batch_size=2)
    images = generate.generate(shared_tiny, [*rows, "a star"], seeds, sampling, cache=tmp_path)
    for i, (text, guidance) in enumerate(
        [
            ("a red star, by night", 7.5),
            ("a blue fish", 10.0),
            ("a green house", 5.0),
            ("a star", 2.0),
        ]
    ):
        alone = shared_tiny.sample([text], seeds=[seeds[i]], steps=3, guidance=guidance)[0]
        assert (images[i].int() - alone.int()).abs().max() <= 1
    plain = generate.generate(
        shared_tiny, [p.text for p in rows], seeds[:3], sampling, cache=tmp_path
    )
    # another guidance gives other images, from another place in the cache
    assert not torch.equal(plain, images[:3])


def test_repeated_rows_of_a_sample_have_no_seed(tmp_path: Path) -> None:
    sample = prompts.load(table(tmp_path)).take(5)
    assert sorted(p.seed for p in sample.prompts[:3]) == [17, 18, 19]
    assert [p.seed for p in sample.prompts[3:]] == [None, None]


def test_two_processes_share_an_evaluation_and_an_attack(tmp_path: Path) -> None:
    """Two ranks give the numbers of one process.

    No image is generated twice, and one process writes the results.
    """
    (tmp_path / "suite.yaml").write_text(
        "concept: {shape: star}\nsampling: {steps: 3, batch_size: 2}\ngroups: {direct: "
        "{prompts: tiny_star, role: forget, n: 6}, neighbours: {prompts: "
        "tiny_star_neighbours, role: neighbour, n: 2}}\nmetrics: [concept_rate, "
        "clip_score, nudenet]\n"
    )
    options = ["--suite", "suite.yaml", "--before", "tiny-sd"]
    model = load("tiny-sd")
    with torch.no_grad():
        model.denoiser.conv_out.bias += 0.1
    model.save(tmp_path / "theirs")
    results: dict[str, list[dict]] = {}
    attack = ["-a", "seed_search", "--set", "tries=1", "-n", "6", "--batch", "2", "--hide", "shape"]
    for way in ("one", "two"):
        for verb, further in (("evaluate", []), ("attack", attack)):
            arguments = [verb, "theirs", *options, *further, "-o", f"{way}_{verb}"]
            environment = {
                "CONCEPT_ERASER_CACHE": str(tmp_path / f"cache_{way}"),
                "OMP_NUM_THREADS": "1",
            }
            if way == "one":
                process = run_command(*arguments, folder=tmp_path, environment=environment)
                assert process.returncode == 0, process.stderr[-2000:]
                output = process.stdout
            else:
                output = Ranks(*arguments, folder=tmp_path, **environment).wait()
            name = "evaluation.json" if verb == "evaluate" else "attack.json"
            content = json.loads((tmp_path / f"{way}_{verb}" / name).read_text())
            results.setdefault(verb, []).append(
                {k: content[k] for k in ("results", "attempts", "curves") if k in content}
            )
            assert output.count("numbers: ") == 1
    assert results["evaluate"][0] == results["evaluate"][1]
    assert results["attack"][0]["attempts"] == results["attack"][1]["attempts"]
    caches = [
        sorted(
            p.relative_to(tmp_path / f"cache_{way}")
            for p in (tmp_path / f"cache_{way}" / "images").rglob("*.safetensors")
        )
        for way in ("one", "two")
    ]
    assert caches[0] == caches[1]
    counts = [
        len(next((tmp_path / f"cache_{way}" / "nudenet").glob("*.jsonl")).read_text().splitlines())
        for way in ("one", "two")
    ]
    assert counts == [16, 16]  # each of the 8 images before and after, once


def test_the_command_reads_a_table(tmp_path: Path) -> None:
    from concept_eraser.cli.main import app

    result = CliRunner().invoke(
        app,
        [
            "generate",
            "tiny-sd",
            "--prompts",
            str(table(tmp_path)),
            "-n",
            "2",
            "--steps",
            "1",
            "-o",
            str(tmp_path / "out"),
            "-q",
        ],
    )
    assert result.exit_code == 0, result.output
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()
    ]
    assert {row["seed"] for row in rows} <= {17, 18, 19}


def test_the_suite_of_i2p_counts_totals_and_loads_from_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped sets and suite with a local table in place of the hub's.

    The bundled model generates no people.
    """
    from concept_eraser.evaluation import suite as suites

    monkeypatch.setattr(
        tables, "from_hub", lambda address: table(tmp_path, name=address.rsplit("/", 1)[1])
    )
    assert [p.seed for p in prompts.load("i2p_sexual").prompts] == [17, 19]
    assert [p.seed for p in prompts.load("i2p_nudity_over_50").prompts] == [17]
    model = load("tiny-sd")
    suite = suites.load("i2p_nudity")
    assert suite.sensitive
    small = suite.with_at_most(2).model_copy(
        update={"sampling": suite.sampling.model_copy(update={"steps": 1})}
    )
    evaluation = suites.evaluate(model, model, small, cache=tmp_path)
    assert evaluation.refused == {}
    assert evaluation.find("nudenet_all", "direct").after.n == 2
    assert evaluation.find("nudenet_all", "direct").difference.value == 0
    assert evaluation.find("concept_rate", "direct").after.value == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,seed\na,1,2\n", "line 2: the row has more cells than the 2 columns"),
        ("a.csv", f"prompt\n{'x' * 140_000}\n", "is no CSV of prompts"),
        ("a.csv", f"prompt\n{'x' * 20_000}\n", "line 2: the text .* has 20,000 characters"),
        ("a.csv", "prompt\na\0b\n", "null bytes"),
        ("a.csv", "prompt,seed\na,1.5\n", "line 2: seed is '1.5'"),
        ("a.csv", "prompt,guidance\na,nan\n", "line 2: guidance is 'nan'"),
        ("a.json", "[1, 2]", "row 1: expected a prompt"),
        ("a.json", "[null]", "row 1: expected a prompt"),
        ("a.json", '[{"prompt": ["a"]}]', "row 1: prompt is"),
        ("a.json", '[{"prompt": "a"}, {"words": "b"}]', "row 2 has no column of prompts"),
        ("a.json", "[" * 5000, "nested deeper"),
        ("a.jsonl", '{"prompt": "a"}\n3\n', "line 2: expected a prompt"),
        ("a.jsonl", '{"prompt": "a", "seed": 1e999}\n', "line 1: seed is inf"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error_info:
        prompts.load(tmp_path / name)
    assert len(str(error_info.value)) < 1000


def test_rows_of_json_may_name_their_prompt_each_in_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "x": 1}\n{"prompt": "b"}\n"c"\n')
    assert prompts.load(tmp_path / "a.jsonl").texts == ["a", "b", "c"]


def test_a_pipe_is_no_table(tmp_path: Path) -> None:
    for name in ("a.csv", "set.yaml", "a.txt", "a.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match=r"no such|no regular file"):
            prompts.load(tmp_path / name)
    (tmp_path / "own.yaml").write_text("file: a.csv\n")
    with pytest.raises(UserError, match="no regular file"):
        prompts.load(tmp_path / "own.yaml")


def test_a_table_of_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set names the table by `data://`. The error says what it is and where it is expected."""
    (tmp_path / "set.yaml").write_text("about: rows of my library\nfile: data://mine.csv\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONCEPT_ERASER_DATA", str(tmp_path / "tables"))
    with pytest.raises(UserError, match=r"mine\.csv is missing.*rows of my library.*tables or "):
        prompts.load(tmp_path / "set.yaml")
    for folder, seed in (("data", 3), ("tables", 7)):  # the later one is looked for first
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.csv").write_text(f"prompt,evaluation_seed\na star,{seed}\n")
        rows = prompts.load(tmp_path / "set.yaml").prompts
        assert [(row.text, row.seed) for row in rows] == [("a star", seed)]


@pytest.mark.parametrize("name", ["../a.csv", "/etc/a.csv", "a/b.csv", "a.txt", "", "..csv/", "a"])
def test_the_name_of_a_table_is_plain(name: str, tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(f"file: 'data://{name}'\n")
    with pytest.raises(UserError, match="names no table"):
        prompts.load(tmp_path / "set.yaml")
