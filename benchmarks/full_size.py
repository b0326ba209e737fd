"""Take the path of a user on an architecture at full size: erase, evaluate, export, load elsewhere.

    make full-size                                     Stable Diffusion 1.4's architecture
    python -m benchmarks.full_size --family sdxl       SDXL in bf16; --memory 14 limits each step
    python -m benchmarks.full_size --family tiny       the bundled model, to test this script

The weights are random, so the images show nothing. Seconds, memory and files are those of a real
checkpoint. Each step is a process of its own, the command that a user types. Its peak memory is the
largest resident set of the process. That of a process which only loads the libraries stands beside
it, because the estimate of a dry run does not count it. Its CPU seconds are those of all its
threads, which other busy processes change little.

Every finished step is written to the JSON file at once, and is not repeated by the next call. One
that needed too much memory is. With `--again` the others are repeated too. That is
needed where the models and runs of an earlier call were removed.
`--steps` names some of them. `python -m studies.render_results` renders the table.

The step "evaluate" measures the LoRA with a suite of 4 images of each model. Its judge is a ResNet
with random weights. Its images are generated anew, in a cache of its own.

The jobs that end with the size of a card have that memory preset.

The steps "erase without a heap: ..." repeat a job without a preset with
MALLOC_MMAP_THRESHOLD_=1048576. glibc then gives each tensor of more than 1 MB pages of its own,
which the system gets back at once. So the process has the memory that the estimate counts, without
the holes of a heap.

The steps "profile: ..." repeat such a job under `benchmarks.profile_phases`, which finds the three
largest costs of each phase. `--pixels 256` gives Stable Diffusion 1.4 a smaller image.

SDXL has no single file, and its jobs are smaller: see JOBS. `--memory` ends a step that asks for
more, in GB, and its row says so. `--clean` removes models and runs afterwards, and nothing else in
the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
import yaml
from safetensors.torch import save_file
from torchvision.models import get_model

from benchmarks import profile_phases
from concept_eraser.storage.writers import write_text
from concept_eraser.tiny import families, published
from concept_eraser.utils import provenance

OUTPUT = Path(__file__).parent / "full_size.json"
PIXELS = {"sd14": 512, "sdxl": 256, "tiny": 64, "tiny-sdxl": 16}
COMMAND = [sys.executable, "-m", "concept_eraser"]
LIBRARIES = "import diffusers, transformers, peft, accelerate, concept_eraser.api"
FEW = [
    "forget.n=2",
    "retain.n=2",
    "generation.steps=2",
    "training.steps=2",
    "training.batch_size=1",
]
PROMPTS = {"forget": "a church", "retain": "a golf ball"}  # a prompt set of one prompt each
EXPORTS = {"kohya": "kohya.safetensors", "single-file": "single.safetensors"}
OUTCOME, EVALUATION = "outcome.txt", "full_size_evaluation"  # a file and a folder of all families
BF16 = ["training.precision=bf16", "training.frozen=bf16", "generation.precision=bf16"]
CROSS_ATTENTION = ["--select", "cross_attention"]
# Adam's state of all weights needs more than 24 GB of memory in all. Adafactor's fits.
ALL_WEIGHTS = ["--select", "all", "training.optimizer=adafactor"]
SD_JOBS = {
    "default LoRA": [],
    "LoRA of rank 16, batch of 4": ["--lora", "16", "training.batch_size=4"],
    "cross-attention": CROSS_ATTENTION,
    "all weights, Adafactor": ALL_WEIGHTS,
    "default LoRA, 8gb": ["--memory", "8gb"],
    "cross-attention, 8gb": [*CROSS_ATTENTION, "--memory", "8gb"],
    "all weights, Adafactor, 24gb": [*ALL_WEIGHTS, "--memory", "24gb"],
}
SDXL_JOBS = {
    "LoRA of rank 4": ["--lora", "4", *BF16],
    "keys and values, Adafactor": [
        *("--select", "cross_attention_kv", "training.optimizer=adafactor", "finish=none"),
        *("--save", "changed"),
        *BF16,
    ],
}
# by family; the first one is a LoRA, which is exported
JOBS = {"sd14": SD_JOBS, "tiny": SD_JOBS, "sdxl": SDXL_JOBS, "tiny-sdxl": SDXL_JOBS}


@dataclass(frozen=True)
class Place:
    """The files of one call.

    Attributes:
        family: The architecture, one of PIXELS.
        folder: Where models and runs lie.
        pixels: The width and height of the images.
        memory: The largest memory of a step in GB, or None.
    """

    family: str
    folder: Path
    pixels: int
    memory: float | None = None

    @property
    def jobs(self) -> dict[str, list[str]]:
        return JOBS[self.family]

    @property
    def jobs_without_preset(self) -> list[str]:
        return [job for job, words in self.jobs.items() if "--memory" not in words]

    @property
    def lora(self) -> str:
        """The job that is exported."""
        return next(iter(self.jobs))

    @property
    def is_sdxl(self) -> bool:
        return self.family.endswith("sdxl")

    @property
    def model(self) -> str:
        if self.family == "tiny":
            return "tiny-sd"
        return str(self.folder / f"{self.family}{self._small}")

    @property
    def _small(self) -> str:
        return "" if self.pixels == PIXELS[self.family] else f"_{self.pixels}"

    def run(self, job: str) -> Path:
        name = re.sub("[^a-z0-9]+", "_", job.lower())
        return self.folder / f"run_{self.family}{self._small}_{name}"

    def clean(self) -> None:
        """Remove the files of this family's steps, and the folder if it is empty then."""
        names = (OUTCOME, "phases.json", "images", EVALUATION, *EXPORTS.values())
        runs = self.folder.glob(f"{self.run('').name}*")
        prompts = (self.folder / f"{name}.txt" for name in PROMPTS)
        model = [] if self.family == "tiny" else [Path(self.model)]
        for path in [*runs, *prompts, *model, *(self.folder / name for name in names)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


# A process begins with the largest resident set of the one that forked it. So a small one does.
# The limit is that of private memory; pages of mapped files do not count.
LAUNCHER = """
import resource, subprocess, sys
if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
code = subprocess.call(sys.argv[3:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
open(sys.argv[1], "w").write(f"{used.ru_maxrss} {used.ru_utime + used.ru_stime}")
sys.exit(code)
"""


HEAPLESS = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # read by glibc


class BeyondLimit(Exception):
    """A step asked for more memory than its limit."""


def measure(
    words: list[str], place: Place, settings: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Run a process to its end. Returns seconds, CPU seconds, peak memory in MB, and its output.

    settings: Variables of its environment, besides those of this one.

    Raises:
        BeyondLimit: It asked for more memory than allowed.
        SystemExit: It failed, with the end of its output.
    """
    outcome, limit = place.folder / OUTCOME, str(int((place.memory or 0) * 2**30))
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, str(outcome), limit, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **settings},
    )
    if result.returncode != 0:
        if place.memory and re.search("allocate memory|MemoryError|bad_alloc", result.stdout):
            raise BeyondLimit
        raise SystemExit(
            f"{' '.join(words)} ended with {result.returncode}:\n{result.stdout[-2000:]}"
        )
    peak, cpu_seconds = outcome.read_text().split()
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(float(cpu_seconds), 1),
        "memory_mb": round(int(peak) / 1024),
        "text": result.stdout,
    }


def size(path: Path) -> float:
    """Return the megabytes of a file or a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return round(sum(one.stat().st_size for one in files) / 1e6, 1)


def make_checkpoint(place: Place) -> dict[str, Any]:
    """Save the architecture with random weights, in half precision as published checkpoints are.

    SDXL is made and saved in bf16, the others in fp16.
    """
    start = time.monotonic()
    if place.family == "tiny-sdxl":
        families.build("sdxl", Path(place.model))
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            place.model, torch_dtype=torch.bfloat16
        )
        pipeline.save_pretrained(place.model)
    elif place.family != "tiny":
        torch.manual_seed(0)
        dtype = torch.bfloat16 if place.is_sdxl else torch.float16
        with _default_dtype(torch.bfloat16 if place.is_sdxl else torch.float32):
            pipeline = published.MADE[place.family][1]()
        pipeline = pipeline.to(dtype)
        pipeline.unet.register_to_config(sample_size=place.pixels // pipeline.vae_scale_factor)
        pipeline.save_pretrained(place.model, max_shard_size="1GB")
    return {"seconds": round(time.monotonic() - start, 1)}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in a precision, so that a large model is never there in fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def estimates(text: str) -> dict[str, float]:
    """Return what a dry run estimates, in MB: memory without CUDA's own, and the run folder.

    The memory is the largest one: of the training, of the examples, or while the model is written.
    """
    memory = re.search(r"memory \(an estimate, not measured\): (.*)", text)
    device = re.search(r"CUDA itself \(assumed\) ([\d.]+)", text)
    disk = re.search(r"disk \(an estimate\): ([\d.]+) (MB|GB)", text)
    if memory is None or disk is None:
        raise SystemExit(f"the dry run printed no estimate:\n{text[-2000:]}")
    # the model's memory at the end has no part of CUDA if it is on the CPU by then
    cuda = float(device[1]) if device else 0.0
    sizes = re.findall(r"([\d.]+) GB( of the CPU)?", memory[1])
    gigabytes = max(float(size) - (0.0 if on_cpu else cuda) for size, on_cpu in sizes)
    return {
        "memory_estimate_mb": round(1024 * gigabytes),
        "disk_estimate_mb": float(disk[1]) * {"MB": 1, "GB": 1000}[disk[2]],
    }


def dry_run(place: Place, job: str) -> dict[str, Any]:
    words = [*COMMAND, "erase", *_settings(place, job), "--dry-run", "--no-two-steps"]
    result = measure(words, place)
    return {**result, **estimates(result["text"])}


def erase(place: Place, job: str, *, heapless: bool = False) -> dict[str, Any]:
    run = place.run(f"{job} heapless" if heapless else job)
    words = [*COMMAND, "erase", *_settings(place, job), "-o", str(run)]
    result = measure([*words, "--resume"], place, HEAPLESS if heapless else {})
    log_lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = {f"step_{key}": [row[key] for row in log_lines] for key in ("seconds", "cpu_seconds")}
    return {**result, **steps, "disk_mb": size(run)}


def profile(place: Place, job: str) -> dict[str, Any]:
    """Run a job under torch's profiler."""
    file, run = place.folder / "phases.json", f"{place.run(job)}_profiled"
    erasing = ["erase", *_settings(place, job), "-o", run, "--overwrite", "--quiet"]
    words = [sys.executable, "-m", "benchmarks.profile_phases", str(file), *erasing]
    result = measure(words, place)
    return {**result, "phases": json.loads(file.read_text())}


def _settings(place: Place, job: str) -> list[str]:
    forget, retain = (place.folder / f"{name}.txt" for name in PROMPTS)
    prompts = ["--forget", str(forget), "--anchor", "a field", "--retain", str(retain)]
    return ["--model", place.model, *prompts, *FEW, *place.jobs[job]]


def generate(place: Place) -> dict[str, Any]:
    prompts = ["--prompt", "a church", "--prompt", "a golf ball", "--steps", "2", "-n", "1"]
    output = ["--overwrite", "-o", str(place.folder / "images")]
    run = str(place.run(place.lora))
    return measure([*COMMAND, "generate", run, *prompts, *output], place)


def evaluate(place: Place) -> dict[str, Any]:
    """Measure the LoRA with a small suite, whose judge has random weights."""
    folder = place.folder / EVALUATION
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    judge, suite = folder / "judge.safetensors", folder / "suite.yaml"
    torch.manual_seed(0)
    save_file(get_model("resnet18", weights=None).state_dict(), judge)
    groups = {role: {"prompts": [prompt], "role": role, "n": 2} for role, prompt in PROMPTS.items()}
    content = {
        "concept": {"class": "church"},
        "judge": {
            "name": "imagenet",
            "architecture": "resnet18",
            "version": "IMAGENET1K_V1",
            "weights": str(judge),
        },
        "sampling": {"steps": 2, "guidance": 5.0, "batch_size": 1},
        "groups": groups,
        "metrics": ["concept_rate"],
    }
    suite.write_text(yaml.safe_dump(content))
    words = [*COMMAND, "evaluate", str(place.run(place.lora)), "--suite", str(suite)]
    return measure(words, place, {"CONCEPT_ERASER_CACHE": str(folder / "cache")})


def export(place: Place, kind: str) -> dict[str, Any]:
    path = place.folder / EXPORTS[kind]
    words = [*COMMAND, "export", str(place.run(place.lora)), "--to", kind]
    result = measure([*words, "-o", str(path)], place)
    return {**result, "disk_mb": size(path)}


# one pipeline after the other, so that only one is in memory; without a single file that part is
# left out
COMPARE = """
import sys, json, torch, diffusers
import concept_eraser
model, run, kohya, single, pixels, dtype = sys.argv[1:7]
dtype = getattr(torch, dtype)
def image(pipe):
    pipe.set_progress_bar_config(disable=True)
    pixels_ = {"height": int(pixels), "width": int(pixels)}
    return torch.from_numpy((pipe("a church", num_inference_steps=2, guidance_scale=5.0,
        generator=torch.Generator().manual_seed(5), output_type="np", **pixels_).images[0] * 255
        ).round()).int()
def plain():
    return diffusers.DiffusionPipeline.from_pretrained(model, safety_checker=None,
        torch_dtype=dtype)
def largest(one, other):
    return int((one - other).abs().max())
images = {}
pipe = plain(); images["original"] = image(pipe); kind = type(pipe)
for name, file in {"lora": run + "/lora", "kohya": kohya}.items():
    pipe.load_lora_weights(file)
    images[name] = image(pipe)
    pipe.unload_lora_weights()
del pipe
if single:
    single_pipe = kind.from_single_file(single, config=model, torch_dtype=dtype)
    images["single-file"] = image(single_pipe)
print(json.dumps({"differences": {name: largest(images[name], images["lora"]) for name in images}}))
"""


def compare(place: Place) -> dict[str, Any]:
    """Load LoRA, kohya file and single file in plain diffusers, and compare an image of each.

    The differences are in levels of 255, from the image with the run's own LoRA. SDXL is loaded in
    bf16 and has no single file.
    """
    from concept_eraser.utils import resources

    is_tiny = place.family == "tiny"
    model = str(resources.tiny_weights() / "tiny-sd") if is_tiny else place.model
    run, kohya = str(place.run(place.lora)), str(place.folder / EXPORTS["kohya"])
    single = "" if place.is_sdxl else str(place.folder / EXPORTS["single-file"])
    dtype = "bfloat16" if place.is_sdxl else "float32"
    words = [sys.executable, "-c", COMPARE, model, run, kohya, single, str(place.pixels), dtype]
    result = measure(words, place)
    return {**result, **json.loads(result["text"].splitlines()[-1])}


def steps(place: Place) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the steps by name, in their order."""
    single_file = {"export to single file": partial(export, place, "single-file")}
    return {
        "libraries alone": partial(measure, [sys.executable, "-c", LIBRARIES], place),
        "make the checkpoint": partial(make_checkpoint, place),
        **{f"dry run: {job}": partial(dry_run, place, job) for job in place.jobs},
        f"erase: {place.lora}": partial(erase, place, place.lora),
        "generate two images": partial(generate, place),
        "evaluate": partial(evaluate, place),
        "export to kohya": partial(export, place, "kohya"),
        **({} if place.is_sdxl else single_file),
        "load in plain diffusers": partial(compare, place),
        **{f"erase: {job}": partial(erase, place, job) for job in list(place.jobs)[1:]},
        **{
            f"erase without a heap: {job}": partial(erase, place, job, heapless=True)
            for job in place.jobs_without_preset
        },
        **{f"profile: {job}": partial(profile, place, job) for job in place.jobs_without_preset},
    }


def run(place: Place, output: Path, names: Collection[str], *, again: bool = False) -> None:
    """Make the steps that the JSON file does not have yet, or with `again` all of them."""
    content = json.loads(output.read_text()) if output.exists() else {"rows": []}
    here = provenance.describe()
    content.setdefault("environment", here)  # of the first rows; each row has its own commit
    place.folder.mkdir(parents=True, exist_ok=True)
    for name, prompt in PROMPTS.items():
        (place.folder / f"{name}.txt").write_text(f"{prompt}\n")
    for name, step in steps(place).items():
        key = (place.family, place.pixels, name)
        present = next((row for row in content["rows"] if _key(row) == key), None)
        is_finished = present is not None and "beyond_gb" not in present
        if name not in names or (is_finished and not again):
            continue
        print(f"{place.family}: {name}", flush=True)
        result = _limited(step, place)
        result.pop("text", None)
        row = {"family": place.family, "pixels": place.pixels, "step": name, **result}
        row["commit"] = here["commit"]
        content["rows"] = [*(one for one in content["rows"] if one is not present), row]
        write_text(output, json.dumps(content, indent=1) + "\n", overwrite=True)
        print(f"  {row['seconds']} s", flush=True)
        if "phases" in row:
            print("\n".join(profile_phases.lines(row["phases"])), flush=True)


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["family"], row["pixels"], row["step"]


def _limited(step: Callable[[], dict[str, Any]], place: Place) -> dict[str, Any]:
    """Return the result of a step. One that asks for too much memory has the limit in its row."""
    start = time.monotonic()
    try:
        return step()
    except BeyondLimit:
        return {"seconds": round(time.monotonic() - start, 1), "beyond_gb": place.memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="sd14", choices=PIXELS)
    parser.add_argument("--pixels", type=int, help="width and height of the images of sd14, sdxl")
    parser.add_argument("--steps", nargs="*", default=[], help="only these, each in quotes")
    parser.add_argument("--work", type=Path, default=Path("runs/full-size"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--memory", type=float, help="GB of private memory that a step may take")
    parser.add_argument("--again", action="store_true", help="also repeat finished steps")
    parser.add_argument("--clean", action="store_true", help="remove models and runs afterwards")
    args = parser.parse_args()
    pixels = args.pixels or PIXELS[args.family]
    place = Place(args.family, args.work.resolve(), pixels, memory=args.memory)
    names = args.steps or list(steps(place))
    if unknown := [name for name in names if name not in steps(place)]:
        parser.error(f"unknown step {unknown[0]!r}; there are: {', '.join(steps(place))}")
    run(place, args.output, names, again=args.again)
    if args.clean:
        place.clean()


if __name__ == "__main__":
    main()
