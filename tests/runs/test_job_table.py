"""Tables of erasures: their columns, the workers' shares, real commands, the summary."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import Interrupted, UserError
from concept_eraser.cli.main import app
from concept_eraser.runs import job_table
from concept_eraser.runs.job_table import Share, TableJob
from tests.conftest import short
from tests.processes import run_command


def table(folder: Path, text: str) -> Path:
    path = folder / "concepts.csv"
    path.write_text(text)
    return path


def test_a_row_is_a_command(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "concept,name,recipe,kind,anchor,model,training.seed\n"
        "Van Gogh,,,style,,,1\n"
        '"star; moon;",both,,,"a circle",other,\n'
        ",,recipes/mine.yaml,,,,\n"
        "Dr. Who;梵高,,,,,,\n",
    )
    assert job_table.read(path, "./sd") == [
        TableJob("van_gogh", ("Van Gogh", "training.seed=1", "--kind", "style", "--model", "./sd")),
        TableJob("both", ("star", "moon", "--anchor", "a circle", "--model", "other")),
        TableJob("mine", ("recipes/mine.yaml", "--model", "./sd")),
        TableJob("dr_who_梵高", ("Dr. Who", "梵高", "--model", "./sd")),
    ]
    assert job_table.read(path)[2].words == ("recipes/mine.yaml",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the columns none"),
        ("concept\n", "has no rows"),
        ("concepts\nstar\n", "found the columns concepts; expected name, concept"),
        ("concept,kindd\nstar,object\n", "For 'kindd', did you mean 'kind'"),
        ("concept,recipe\nstar,x.yaml\n", "line 2: found concept and recipe"),
        ("concept,name\n,star\n", "line 2: found neither a concept nor a recipe"),
        ("concept\nstar\nstar\n", "line 3: the name 'star' is in an earlier row"),
        ("concept,name\nstar,../star\n", "found the name '../star'"),
        ("concept,name\nstar,status\n", "found the name 'status'"),
        ("concept,kind,kind\nstar,object,style\n", "has the column 'kind' twice; remove one"),
        ('concept,name\n"star,a\nmoon,b\n', "is no CSV table .*; check its quotes"),
        ("concept\n--overwrite\n", "found the concept '--overwrite'; expected a name that"),
        ("concept,name\n;,a\n", "found the concept ';'"),
        ("concept\nstar,moon\n", "line 2: the row has more cells than the 1 columns"),
    ],
)
def test_a_wrong_table_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_table.read(table(tmp_path, text))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_row_has_one_worker(count: int) -> None:
    jobs = [TableJob(str(number), ()) for number in range(5)]
    shares = [Share(index, count).of(jobs) for index in range(count)]
    assert sorted(job.name for share in shares for job in share) == ["0", "1", "2", "3", "4"]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["1", "2/2", "-1/2", "a/b", "0/0", "0/", "1/2/3"])
def test_a_wrong_share_is_an_error(text: str) -> None:
    assert job_table.read_share("1/2") == Share(1, 2)
    with pytest.raises(UserError, match="expected INDEX/COUNT"):
        job_table.read_share(text)


def test_rows_run_fail_and_are_not_repeated(tmp_path: Path) -> None:
    """A row that fails does not stop the next one. Two workers repeat no finished row.

    The commands are real ones, each in a process of its own.
    """
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(short(training__steps=1)))
    path = table(tmp_path, "recipe,name,training.steps\nmine.yaml,wrong,none\nmine.yaml,mine,1\n")
    first = run_command("batch", str(path), "-o", "batch", folder=tmp_path)
    assert first.returncode == 2
    assert "wrong: failed" in first.stdout
    assert "mine: finished after" in first.stdout
    assert "not finished: wrong; batch/status has what each printed" in first.stderr
    assert (tmp_path / "batch" / "mine" / "weights.safetensors").is_file()
    weights = (tmp_path / "batch" / "mine" / "weights.safetensors").stat().st_mtime_ns

    rows = list(csv.DictReader((tmp_path / "batch" / "summary.csv").open()))
    assert [(row["name"], row["state"]) for row in rows] == [
        ("wrong", "failed"),
        ("mine", "finished"),
    ]
    assert "training.steps" in rows[0]["message"]

    table(tmp_path, "recipe,name,training.steps\nmine.yaml,mine,1\n")
    again = run_command("batch", str(path), "-o", "batch", "--workers", "2", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "batch" / "mine" / "weights.safetensors").stat().st_mtime_ns == weights


def test_a_changed_row_is_not_taken_for_the_finished_one(tmp_path: Path) -> None:
    job = TableJob("star", ("star",))
    (tmp_path / "status").mkdir()
    record = {"words": ["moon"], "code": 0, "seconds": 1.0}
    (tmp_path / "status" / "star.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="the row 'star' differs from the one that was erased"):
        job_table.state(job, tmp_path)
    (tmp_path / "status" / "star.json").write_text(json.dumps({**record, "words": ["star"]}))
    assert job_table.state(job, tmp_path) == "not finished", "the run folder is missing"
    (tmp_path / "star").mkdir()
    (tmp_path / "star" / "done.json").write_text("{}")
    assert job_table.state(job, tmp_path) == "finished"


def test_an_edited_file_of_a_finished_row_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has a recipe, a model, an anchor and a prompt file; then it has a concept."""
    monkeypatch.chdir(tmp_path)
    Path("rest.txt").write_text("a red circle\na blue moon\n")
    recipe = yaml.safe_dump(short(training__steps=1, trainable__lora=2))
    Path("mine.yaml").write_text(recipe)
    path = table(
        tmp_path,
        "recipe,model,anchor,retain.prompts\nmine.yaml,tiny-sd,shape=moon,rest.txt\n",
    )
    overrides = ["model=tiny-sd", "forget.anchor={shape: moon}", "retain.prompts=rest.txt"]
    job_table.prepare(Path("batch"))
    concept_eraser.erase("mine.yaml", overrides=overrides, output="batch/mine")
    (job,) = job_table.read(path)
    Path("batch/status").mkdir()
    status = {"words": job.words, "code": 0, "seconds": 1.0}
    Path("batch/status/mine.json").write_text(json.dumps(status))
    job_table.require_unchanged([job], Path("batch"))

    Path("rest.txt").write_text("a red circle\na green moon\n")
    message = r"the row 'mine' was erased before rest\.txt \(retain\) was edited; restore the file"
    with pytest.raises(UserError, match=message):
        job_table.require_unchanged([job], Path("batch"))
    Path("rest.txt").write_text("a red circle\na blue moon\n")
    Path("mine.yaml").write_text(recipe.replace("steps: 1\n", "steps: 2\n"))
    with pytest.raises(UserError, match=r"mine\.yaml was edited \(it differs in .*steps"):
        job_table.require_unchanged([job], Path("batch"))
    Path("mine.yaml").write_text(recipe)

    path = table(tmp_path, "concept,name,retain.prompts\nstar,mine,rest.txt\n")
    (job,) = job_table.read(path)
    Path("batch/status/mine.json").write_text(json.dumps({**status, "words": job.words}))
    Path("rest.txt").write_text("a red circle\na green moon\n")
    for command in ([], ["--workers", "2"], ["--worker", "0/1"]):
        result = CliRunner().invoke(app, ["batch", str(path), "-o", "batch", *command])
        assert "rest.txt (retain) was edited" in str(result.exception), result.output


def test_a_row_that_was_not_evaluated_is_evaluated_by_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of a row is replaced by one that prints its arguments, or kills itself.

    It writes an evaluation at its second call that should. At the first it prints why it did not.
    """
    row, recipe = TableJob("a", ("star",)), TableJob("b", ("x.yaml",), overrides=())
    for job in (row, recipe):
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / "done.json").write_text("{}")
    (tmp_path / "status").mkdir()
    script = tmp_path / "erase.sh"
    called, output = tmp_path / "called", tmp_path / "a" / "evaluation.json"
    script.write_text(
        f"""#!/bin/sh
case "$*" in
    *kill*) kill -9 $$;;
    *--no-evaluate*) ;;
    *) if [ -e {called} ]; then echo {{}} > {output}; else
        touch {called}; echo "not evaluated: the judge is missing"; fi;;
esac
echo "$*"
"""
    )
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    lines: list[str] = []
    job_table.run([row, recipe], tmp_path, report=lines.append, options=["--no-evaluate"])
    assert "--no-evaluate" in (tmp_path / "status" / "a.txt").read_text()
    assert [job_table.state(job, tmp_path) for job in (row, recipe)] == ["finished"] * 2
    for options, is_finished in (
        (["--no-evaluate"], True),
        ([], False),
        ([], False),
        ([], True),
    ):
        notes = [line for line in lines if "not evaluated" in line]
        assert all(line.endswith("; not evaluated: the judge is missing") for line in notes)
        lines.clear()
        job_table.run([row, recipe], tmp_path, report=lines.append, options=options)
        assert (lines[0] == "a: finished before") == is_finished
        assert lines[-1] == "b: finished before"
    assert "--no-evaluate" not in (tmp_path / "status" / "a.txt").read_text()
    assert called.exists()

    killed = TableJob("c", ("kill",))
    assert job_table.run([killed], tmp_path, report=lines.append) == {"c": "failed"}
    assert "the process was ended by the signal 9; often there is not enough memory" in lines[-1]


def test_an_interruption_ends_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(job_table, "_run_one", lambda job, *_: (calls.append(job), (130, 1.0))[1])
    jobs = [TableJob("a", ("a",)), TableJob("b", ("b",))]
    with pytest.raises(Interrupted, match="stopped in a; the same command continues there"):
        job_table.run(jobs, tmp_path, report=lambda line: None)
    assert calls == jobs[:1]


def test_the_summary_has_a_row_for_each_evaluation(tmp_path: Path) -> None:
    def evaluation(concept: str, after: float) -> str:
        rows = [
            {"metric": "concept_rate", "group": "direct", "before": {"value": 1.0}},
            {"metric": "accuracy_shape", "group": "retained", "before": {"value": 0.9}},
        ]
        results = [{**row, "after": {"value": after}} for row in rows]
        return json.dumps({"protocol": {"concept": {"shape": concept}}, "results": results})

    for place, concept, after in (("", "star", 0.25), ("evaluations/moon", "moon", 0.5)):
        (tmp_path / "both" / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "both" / place / "evaluation.json").write_text(evaluation(concept, after))
    path = job_table.write_summary([TableJob("both", ("star", "moon"))], tmp_path)
    rows = list(csv.DictReader(path.open()))
    assert [(r["concept"], r["concept rate after"]) for r in rows] == [
        ("star", "0.2500"),
        ("moon", "0.5000"),
    ]
    assert rows[0]["retain accuracy before"] == "0.9000"


def test_one_part_and_all_parts_are_not_erased_together(tmp_path: Path) -> None:
    words = ["batch", str(table(tmp_path, "concept\nstar\n")), "-o", str(tmp_path / "batch")]
    result = CliRunner().invoke(app, [*words, "--worker", "0/2", "--workers", "2"])
    assert "--worker for one part of the table, or --workers for all" in str(result.exception)
    assert not (tmp_path / "batch").exists()


def test_a_summary_alone_erases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "_run_one", lambda *_: pytest.fail("it erases"))
    path, output = table(tmp_path, "concept\nstar\nmoon\n"), tmp_path / "batch"
    moon = job_table.read(path)[1]
    arguments = ["batch", str(path), "-o", str(output), "--summary"]
    for expected in ("not finished", "finished"):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        rows = list(csv.DictReader((output / job_table.SUMMARY).open()))
        assert [(row["name"], row["state"]) for row in rows] == [
            ("star", "not finished"),
            ("moon", expected),
        ]
        assert not (output / "star").exists()
        for file, content in (
            (output / job_table.STATUS / "moon.json", {"words": moon.words, "code": 0}),
            (output / "moon" / "done.json", {}),
        ):
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content))


def test_the_summary_has_a_row_for_labelled_data(tmp_path: Path) -> None:
    """Results of labelled data are a mapping, and have no concept rate."""
    (tmp_path / "digits").mkdir()
    content = {"results": {"after": {"accuracy": {}}}, "target": "classifier"}
    (tmp_path / "digits" / "evaluation.json").write_text(json.dumps(content))
    path = job_table.write_summary([TableJob("digits", ("digits",))], tmp_path)
    (row,) = csv.DictReader(path.open())
    assert "digits" in row.values()


def test_local_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert job_table.environments(2) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    devices = [one["CUDA_VISIBLE_DEVICES"] for one in job_table.environments(3)]
    assert devices == ["4", "7", "4"]
