"""What leaves the house: a folder that plain diffusers loads, and a wheel that works outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import venv
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
image = pipe("a red star", generator=torch.Generator().manual_seed(3), num_inference_steps=4, guidance_scale=5.0, output_type="np").images
numpy.save(sys.argv[2], (image * 255).round().astype("uint8"))
"""


def test_plain_diffusers_loads_the_result(tmp_path: Path) -> None:
    run = concept_eraser.erase(short(), output=tmp_path / "run")
    expected = concept_eraser.load(run.folder).sample(["a red star"], seeds=[3], steps=4, guidance=5.0).numpy()
    out = tmp_path / "image.npy"
    found = subprocess.run([sys.executable, "-c", PLAIN, str(run.folder / "pipeline"), str(out)], capture_output=True, text=True)  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert np.array_equal(np.load(out), expected)
    assert not list((run.folder / "pipeline").rglob("*.bin")), "safetensors only"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with our wheel in it; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)], capture_output=True, text=True)  # fmt: skip
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    wheel = next(folder.glob("*.whl"))
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    packages = next((folder / "env" / "lib").glob("python*/site-packages"))
    # third-party packages only: the editable install of the checkout lies in .pth files, which a .pth does not follow
    (packages / "dependencies.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    return folder / "env" / "bin"


def test_the_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = subprocess.run([installed / "python", "-c", "import concept_eraser; print(concept_eraser.__file__)"], capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    assert str(installed.parent) in where.stdout, "the wheel, not the checkout, is what is tested"
    listed = subprocess.run([installed / "concept-eraser", "list"], capture_output=True, text=True, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    for name in ("munba", "tiny-sd", "tiny_star_munba", "tiny_star_synonyms", "cross_attention"):
        assert name in listed.stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(short(training__steps=2)))
    erased = subprocess.run([installed / "concept-eraser", "erase", str(recipe), "-o", "run", "-q"], capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    assert erased.returncode == 0, erased.stderr[-3000:]
    assert (tmp_path / "run" / "pipeline" / "model_index.json").is_file()


def test_the_wheel_holds_data_and_licence_and_is_small(installed: Path) -> None:
    package = next((installed.parent / "lib").glob("python*/site-packages")) / "concept_eraser"
    for part in ("data_files/pipelines", "data_files/prompts", "data_files/eval", "tiny/weights/tiny-sd", "py.typed"):
        assert (package / part).exists(), part
    assert list(package.parent.glob("concept_eraser-*.dist-info/licenses/LICENSE"))
    world = sum(p.stat().st_size for p in (package / "tiny" / "weights").rglob("*") if p.is_file())
    assert world <= 25 * 2**20
