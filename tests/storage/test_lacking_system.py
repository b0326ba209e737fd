"""The package on a system without POSIX calls, such as Windows. Their names are removed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, math, os, pkgutil, sys
from pathlib import Path
from diffusers import StableDiffusionPipeline  # the libraries find their own ways
from transformers import CLIPTextModel
import accelerate, peft

LACKING = ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "copy_file_range", "fchmod",
           "pread", "pwrite", "sched_getaffinity")
for name in LACKING:
    if hasattr(os, name):
        delattr(os, name)
sys.modules["fcntl"] = sys.modules["resource"] = None

import concept_eraser
for module in pkgutil.walk_packages(concept_eraser.__path__, "concept_eraser."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from concept_eraser.storage import cache, locks, output_folder, readers, writers
from concept_eraser.training import log
from concept_eraser.utils.errors import UserError

folder = Path("run")
for i in range(2):
    with locks.hold_lock(folder, "erase"):
        output_folder.claim(folder, "run")
        writers.write_text(folder / "a.yaml", f"a: {i}")
        writers.append_line(folder / "log.jsonl", {"step": i})
        assert locks.holder_of(folder)["pid"] == os.getpid()
        try:
            locks.hold_lock(folder, "erase").__enter__()
        except UserError as error:
            assert "is in use by process" in str(error)
        else:
            raise AssertionError("two hold the lock")
    cache.append_row(Path("rows"), {"row": i})
assert not (folder / locks.LOCK).exists()
assert readers.read_yaml(folder / "a.yaml") == {"a": 1}
assert readers.read_lines(folder / "log.jsonl") == [{"step": 0}, {"step": 1}]
assert cache.read_rows(Path("rows")) == [{"row": 0}, {"row": 1}]
log.Path = lambda name: Path("nowhere")  # no /proc
log.gpu_module = lambda: None
assert math.isnan(log.peak_memory())
print("done")
"""


def test_the_package_is_imported_and_writes_its_files(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("done\n")
