"""Take the path of a user on an architecture at full size: erase, generate, export, load elsewhere.

    make full-size                                     Stable Diffusion 1.4's architecture
    python -m benchmarks.full_size --family sdxl       another one
    python -m benchmarks.full_size --family tiny       the bundled model, to test this script

The weights are random, so the images show nothing. Seconds, memory and files are those of a real
checkpoint. Each step is a process of its own, the command that a user types. Its peak memory is the
largest resident set of the process. That of a process which only loads the libraries stands beside
it, because the estimate of a dry run does not count it.

Every finished step is written to the JSON file at once, and is not repeated by the next call.
`--steps` names some of them. `python -m studies.render_results` renders the table.

The steps "profile: ..." repeat a job under `benchmarks.profile_phases`, which finds the three
largest costs of each phase. `--pixels 256` gives Stable Diffusion 1.4 a smaller image.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import profile_phases
from concept_eraser.storage.writers import write_text
from concept_eraser.tiny import published
from concept_eraser.utils import provenance

OUTPUT = Path(__file__).parent / "full_size.json"
PIXELS = {"sd14": 512, "sdxl": 512, "tiny": 64}
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
# Adam's state of all weights needs more than 24 GB of memory in all. Adafactor's fits.
JOBS = {
    "LoRA on all layers": [],
    "cross-attention": ["--select", "cross_attention"],
    "all weights, Adafactor": ["--select", "all", "training.optimizer=adafactor"],
}


@dataclass(frozen=True)
class Place:
    """The files of one call.

    Attributes:
        family: The architecture: sd14, sdxl or tiny.
        folder: Where models and runs lie.
        pixels: The width and height of the images.
    """

    family: str
    folder: Path
    pixels: int

    @property
    def model(self) -> str:
        if self.family == "tiny":
            return "tiny-sd"
        small = "" if self.pixels == PIXELS[self.family] else f"_{self.pixels}"
        return str(self.folder / f"{self.family}{small}")

    def run(self, job: str) -> Path:
        return self.folder / f"run_{re.sub('[^a-z]+', '_', job.lower())}"


# A process begins with the largest resident set of the one that forked it. So a small one does.
LAUNCHER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
open(sys.argv[1], "w").write(str(peak))
sys.exit(code)
"""


def measure(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a process to its end. Returns seconds, peak memory in MB, and what it printed.

    Raises SystemExit with the end of its output where it fails.
    """
    peak = folder / "peak.txt"
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, str(peak), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        raise SystemExit(
            f"{' '.join(words)} ended with {result.returncode}:\n{result.stdout[-2000:]}"
        )
    return {
        "seconds": round(time.monotonic() - start, 1),
        "memory_mb": round(int(peak.read_text()) / 1024),
        "text": result.stdout,
    }


def size(path: Path) -> float:
    """Return the megabytes of a file or a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return round(sum(one.stat().st_size for one in files) / 1e6, 1)


def make_checkpoint(place: Place) -> dict[str, Any]:
    """Save the architecture with random weights, in fp16 as published checkpoints are."""
    start = time.monotonic()
    if place.family != "tiny":
        torch.manual_seed(0)
        pipeline = published.MADE[place.family][1]().to(torch.float16)
        if place.family == "sd14":
            pipeline.unet.register_to_config(sample_size=place.pixels // pipeline.vae_scale_factor)
        pipeline.save_pretrained(place.model)
    return {"seconds": round(time.monotonic() - start, 1)}


def estimates(text: str) -> dict[str, float]:
    """Return what a dry run estimates, in MB: memory without CUDA's own, and the run folder."""
    memory = re.search(r"memory \(an estimate, not measured\): ([\d.]+) GB", text)
    device = re.search(r"CUDA itself \(assumed\) ([\d.]+)", text)
    disk = re.search(r"disk \(an estimate\): ([\d.]+) (MB|GB)", text)
    if memory is None or disk is None:
        raise SystemExit(f"the dry run printed no estimate:\n{text[-2000:]}")
    gigabytes = float(memory[1]) - (float(device[1]) if device else 0.0)
    return {
        "memory_estimate_mb": round(1024 * gigabytes),
        "disk_estimate_mb": float(disk[1]) * {"MB": 1, "GB": 1000}[disk[2]],
    }


def dry_run(place: Place, job: str) -> dict[str, Any]:
    words = [*COMMAND, "erase", *_settings(place, job), "--dry-run", "--no-two-steps"]
    result = measure(words, place.folder)
    return {**result, **estimates(result["text"])}


def erase(place: Place, job: str) -> dict[str, Any]:
    words = [*COMMAND, "erase", *_settings(place, job), "-o", str(place.run(job))]
    result = measure([*words, "--resume"], place.folder)
    log_lines = (place.run(job) / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["seconds"] for line in log_lines]
    return {**result, "step_seconds": steps, "disk_mb": size(place.run(job))}


def profile(place: Place, job: str) -> dict[str, Any]:
    """Run a job under torch's profiler."""
    file, run = place.folder / "phases.json", f"{place.run(job)}_profiled"
    erasing = ["erase", *_settings(place, job), "-o", run, "--overwrite", "--quiet"]
    words = [sys.executable, "-m", "benchmarks.profile_phases", str(file), *erasing]
    result = measure(words, place.folder)
    return {**result, "phases": json.loads(file.read_text())}


def _settings(place: Place, job: str) -> list[str]:
    pixels = [f"model_options.size={place.pixels}"] if place.family == "sdxl" else []
    forget, retain = (place.folder / f"{name}.txt" for name in PROMPTS)
    prompts = ["--forget", str(forget), "--anchor", "a field", "--retain", str(retain)]
    return ["--model", place.model, *prompts, *JOBS[job], *FEW, *pixels]


def generate(place: Place) -> dict[str, Any]:
    prompts = ["--prompt", "a church", "--prompt", "a golf ball", "--steps", "2", "-n", "1"]
    output = ["--overwrite", "-o", str(place.folder / "images")]
    run = str(place.run("LoRA on all layers"))
    return measure([*COMMAND, "generate", run, *prompts, *output], place.folder)


def export(place: Place, kind: str) -> dict[str, Any]:
    path = place.folder / {"kohya": "kohya.safetensors", "single-file": "single.safetensors"}[kind]
    words = [*COMMAND, "export", str(place.run("LoRA on all layers")), "--to", kind]
    result = measure([*words, "-o", str(path)], place.folder)
    return {**result, "disk_mb": size(path)}


COMPARE = """
import sys, json, torch, diffusers
import concept_eraser
model, run, kohya, single, pixels = sys.argv[1:6]
def image(pipe):
    pipe.set_progress_bar_config(disable=True)
    pixels_ = {"height": int(pixels), "width": int(pixels)}
    return torch.from_numpy((pipe("a church", num_inference_steps=2, guidance_scale=5.0,
        generator=torch.Generator().manual_seed(5), output_type="np", **pixels_).images[0] * 255
        ).round()).int()
def plain():
    return diffusers.DiffusionPipeline.from_pretrained(model, safety_checker=None,
        torch_dtype=torch.float32)
def largest(one, other):
    return int((one - other).abs().max())
images = {}
pipe = plain(); images["original"] = image(pipe)
pipe.load_lora_weights(run + "/lora"); images["lora"] = image(pipe)
pipe = plain(); pipe.load_lora_weights(kohya); images["kohya"] = image(pipe)
del pipe
single_pipe = type(plain()).from_single_file(single, config=model, torch_dtype=torch.float32)
images["single-file"] = image(single_pipe)
print(json.dumps({"differences": {name: largest(images[name], images["lora"]) for name in images}}))
"""


def compare(place: Place) -> dict[str, Any]:
    """Load LoRA, kohya file and single file in plain diffusers, and compare an image of each.

    The differences are in levels of 255, from the image with the run's own LoRA.
    """
    from concept_eraser.utils import resources

    is_tiny = place.family == "tiny"
    model = str(resources.tiny_weights() / "tiny-sd") if is_tiny else place.model
    run = str(place.run("LoRA on all layers"))
    files = [str(place.folder / "kohya.safetensors"), str(place.folder / "single.safetensors")]
    words = [sys.executable, "-c", COMPARE, model, run, *files, str(place.pixels)]
    result = measure(words, place.folder)
    return {**result, **json.loads(result["text"].splitlines()[-1])}


def steps(place: Place) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the steps by name, in their order."""
    lora = "LoRA on all layers"
    return {
        "libraries alone": partial(measure, [sys.executable, "-c", LIBRARIES], place.folder),
        "make the checkpoint": partial(make_checkpoint, place),
        **{f"dry run: {job}": partial(dry_run, place, job) for job in JOBS},
        f"erase: {lora}": partial(erase, place, lora),
        "generate two images": partial(generate, place),
        "export to kohya": partial(export, place, "kohya"),
        "export to single file": partial(export, place, "single-file"),
        "load in plain diffusers": partial(compare, place),
        "erase: cross-attention": partial(erase, place, "cross-attention"),
        "erase: all weights, Adafactor": partial(erase, place, "all weights, Adafactor"),
        **{f"profile: {job}": partial(profile, place, job) for job in JOBS},
    }


def run(place: Place, output: Path, names: Collection[str]) -> None:
    """Make the steps that the JSON file does not have yet."""
    content = json.loads(output.read_text()) if output.exists() else {"rows": []}
    here = provenance.describe()
    content.setdefault("environment", here)  # of the first rows; each row has its own commit
    place.folder.mkdir(parents=True, exist_ok=True)
    for name, prompt in PROMPTS.items():
        (place.folder / f"{name}.txt").write_text(f"{prompt}\n")
    for name, step in steps(place).items():
        known = {(row["family"], row["pixels"], row["step"]) for row in content["rows"]}
        if name not in names or (place.family, place.pixels, name) in known:
            continue
        print(f"{place.family}: {name}", flush=True)
        result = step()
        result.pop("text", None)
        row = {"family": place.family, "pixels": place.pixels, "step": name, **result}
        row["commit"] = here["commit"]
        content["rows"].append(row)
        write_text(output, json.dumps(content, indent=1) + "\n", overwrite=True)
        print(f"  {row['seconds']} s", flush=True)
        if "phases" in row:
            print("\n".join(profile_phases.lines(row["phases"])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="sd14", choices=PIXELS)
    parser.add_argument("--pixels", type=int, help="width and height of the images of sd14, sdxl")
    parser.add_argument("--steps", default="", help="only these, joined by commas")
    parser.add_argument("--work", type=Path, default=Path("runs/full-size"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    place = Place(args.family, args.work.resolve(), args.pixels or PIXELS[args.family])
    names = [name for name in args.steps.split(",") if name] or list(steps(place))
    if unknown := [name for name in names if name not in steps(place)]:
        parser.error(f"unknown step {unknown[0]!r}; there are: {', '.join(steps(place))}")
    run(place, args.output, names)


if __name__ == "__main__":
    main()
