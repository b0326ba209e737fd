"""Packages of the extras: the commands that work without them, and the errors of those that need
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from concept_eraser.utils.errors import UserError
from concept_eraser.utils.extras import import_from_extra
from tests.conftest import HANG, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("curvlinops-for-pytorch", "scikit-learn", "statsmodels", "torchjd")
SMALL = (
    "training.batch_size=2",
    "generation.precision=fp32",
    "trainable.select=cross_attention",
    "trainable.lora.rank=2",
)
COMMANDS = {
    "list": ["list"],
    "quickstart": ["erase", "tiny_star_munba_lora", *SMALL, "--dry-run"],
    "curvature": ["erase", "natural_gradient.yaml", "--dry-run"],
    "labelled": ["erase", "digits_three_munba", "--dry-run"],
    "torchjd": ["erase", "tiny_star_munba", "method.name=torchjd", "--dry-run"],
}
NATURAL_GRADIENT = """
model: nobody/a-classifier
target: classifier
forget: {data: painted, options: {n: 40}, classes: [star]}
retain: {data: rest}
method: {name: natural_gradient, damping: 0.1, solver: kfac}
"""
RUN = """
import contextlib, io, json, sys
import concept_eraser
assert "torch" not in sys.modules
from concept_eraser.cli.main import main

results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["concept-eraser", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            results[name] = (stop.code or 0, errors.getvalue())
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit codes and messages of commands in a process that has no package of the extras."""
    folder = tmp_path_factory.mktemp("extras")
    (folder / "natural_gradient.yaml").write_text(NATURAL_GRADIENT)
    packages = folder / "packages"
    packages.mkdir()
    absent = {file.parts[0] for name in OPTIONAL for file in metadata.files(name) or []}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in absent:
            (packages / path.name).symlink_to(path)
    process = subprocess.run(
        [sys.executable, "-S", "-c", RUN, json.dumps(COMMANDS)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=HANG,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", ["list", "quickstart"])
def test_commands_without_the_extras(command: str, results: dict[str, tuple[int, str]]) -> None:
    code, errors = results[command]
    assert code == 0, errors


@pytest.mark.parametrize("extra", ["curvature", "labelled", "torchjd"])
def test_a_feature_names_its_extra(extra: str, results: dict[str, tuple[int, str]]) -> None:
    code, errors = results[extra]
    assert code == 2, errors
    assert f'pip install "concept-eraser[{extra}]"' in errors


def test_a_membership_attack_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from concept_eraser.evaluation.labelled.classification import Outputs, membership

    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    outputs = Outputs(np.array([[0.7, 0.3], [0.4, 0.6]]), np.array([0, 1]))
    with pytest.raises(UserError, match=r'pip install "concept-eraser\[labelled\]"'):
        membership(outputs, outputs, outputs)


def test_the_error_is_one_sentence_with_the_cause() -> None:
    with (
        pytest.raises(UserError) as error,
        import_from_extra("curvature", "this test", hint="Then"),
    ):
        import no_such_package  # noqa: F401
    text = (
        "this test needs a package that cannot be imported here (No module named "
        "'no_such_package'); install it with: pip install \"concept-eraser[curvature]\". Then"
    )
    assert str(error.value) == text


def test_the_extras_and_the_required_packages() -> None:
    extras = PROJECT["optional-dependencies"]
    required_packages = {name.partition(">")[0] for name in PROJECT["dependencies"]}
    for extra, package in [
        ("curvature", "curvlinops-for-pytorch"),
        ("labelled", "scikit-learn"),
        ("statistics", "statsmodels"),
        ("torchjd", "torchjd[quadprog-projector]"),
    ]:
        assert [row.partition(">")[0] for row in extras[extra]] == [package]
        assert package not in required_packages
        assert any(row.startswith(package.partition("[")[0]) for row in extras["dev"])
    assert extras["all"] == [
        "concept-eraser[curvature,labelled,memory,statistics,torchjd,trackers]"
    ]
    assert required_packages >= {
        "accelerate",
        "clean-fid",
        "diffusers",
        "gradio",
        "nudenet",
        "open-clip-torch",
        "torch",
        "transformers",
    }
