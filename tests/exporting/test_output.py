"""A folder that plain diffusers loads, and a wheel that works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

import concept_eraser
from tests.conftest import ROOT, short

PLAIN = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "concept_eraser":
            raise ImportError("this process cannot import concept_eraser")
sys.meta_path.insert(0, Wall())
try:
    import concept_eraser
    raise SystemExit("the wall has a hole")
except ImportError:
    pass
import numpy, torch
from diffusers import StableDiffusionPipeline
pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1])
image = pipe(
    "a red star",
    generator=torch.Generator().manual_seed(3),
    num_inference_steps=4,
    guidance_scale=5.0,
    output_type="np",
).images
numpy.save(sys.argv[2], (image * 255).round().astype("uint8"))
"""


def test_plain_diffusers_loads_the_result(tiny_fp32: Path, tmp_path: Path) -> None:
    run = concept_eraser.erase(short(model=str(tiny_fp32)), output=tmp_path / "run")
    expected = (
        concept_eraser.load(run.folder)
        .sample(["a red star"], seeds=[3], steps=4, guidance=5.0)
        .numpy()
    )
    out = tmp_path / "image.npy"
    process = subprocess.run(
        [sys.executable, "-c", PLAIN, str(run.folder / "pipeline"), str(out)],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert np.array_equal(np.load(out), expected)
    assert not list((run.folder / "pipeline").rglob("*.bin")), "safetensors only"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    process = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel_programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with our wheel in it.

    The dependencies are those of this environment.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    packages = next((folder / "env" / "lib").glob("python*/site-packages"))
    # third-party packages only: the editable install of the checkout lies in .pth files, which a
    # .pth does not follow
    (packages / "dependencies.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    return folder / "env" / "bin"


def test_the_wheel_works_outside_the_checkout(wheel_programs: Path, tmp_path: Path) -> None:
    location = subprocess.run(
        [wheel_programs / "python", "-c", "import concept_eraser; print(concept_eraser.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert str(wheel_programs.parent) in location.stdout, (
        "the wheel, not the checkout, is what is tested"
    )
    listing = subprocess.run(
        [wheel_programs / "concept-eraser", "list"], capture_output=True, text=True, cwd=tmp_path
    )
    assert listing.returncode == 0, listing.stderr
    for name in ("munba", "tiny-sd", "tiny_star_munba", "tiny_star_synonyms", "cross_attention"):
        assert name in listing.stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(short(training__steps=2)))
    erasure = subprocess.run(
        [wheel_programs / "concept-eraser", "erase", str(recipe), "-o", "run", "-q"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert erasure.returncode == 0, erasure.stderr[-3000:]
    assert (tmp_path / "run" / "pipeline" / "model_index.json").is_file()


def test_the_wheel_holds_data_and_licence_and_is_small(wheel: Path) -> None:
    """It has recipes, prompt sets, suites, weights and pages of results, and no image of a
    study.
    """
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    data = "concept_eraser/data_files"
    patterns = (
        "pipelines/*.yaml",
        "prompts/*.yaml",
        "eval/*.yaml",
        "eval/results/*.md",
        "eval/results/*.xz",
    )
    expected = {
        f"{data}/{path.relative_to(ROOT)}" for pattern in patterns for path in ROOT.glob(pattern)
    }
    expected |= {"concept_eraser/py.typed", "concept_eraser/tiny/weights/tiny-sd/model_index.json"}
    assert len(expected) > 150
    assert expected <= sizes.keys()
    results = {Path(name).suffix for name in sizes if name.startswith(f"{data}/eval/results/")}
    assert not results & {".png", ".jpg", ".webp", ".svg", ".html"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in sizes)
    weights = sum(size for name, size in sizes.items() if "/tiny/weights/" in name)
    assert weights <= 25 * 2**20
    assert wheel.stat().st_size <= 25 * 10**6


def test_the_wheel_has_the_results_of_the_demo(wheel_programs: Path, tmp_path: Path) -> None:
    code = (
        "from concept_eraser.demo import results; names = results.studies(); "
        "print(names, results.studies_in_plot(), [results.table(name) for name in names])"
    )
    checkout = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = []
    for python, environment in ((wheel_programs / "python", None), (sys.executable, checkout)):
        command = [python, "-c", code]
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(process.stdout)
    assert outputs[0] == outputs[1]
    assert "tiny_star" in outputs[0]
