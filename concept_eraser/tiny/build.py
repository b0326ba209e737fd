"""Retrain the bundled model and judge from one seed: `python -m concept_eraser.tiny.build`.

Four parts are trained from scratch (judge, vae, clip, unet; see `stages`). They are assembled into
a diffusers pipeline folder in half precision, scored, and written with a JSON of the settings and
scores. The independent parts are trained in parallel, one core each. Every part saves its state,
and an interrupted build continues where it stopped.

With --only judge2 or --only clip2, a second judge or a second CLIP is trained, of another
architecture and seed. No part of the pipeline uses them. They are written to the bundled weights,
each with a JSON of its settings, scores and hash.

With --without or --unet-only, the UNet alone is trained anew, on the frozen text encoder, VAE and
tokenizer of the bundled pipeline. The result is a control: a model that never learned a concept,
or a second training of the full model. The text encoder and the VAE still know the concept, as
CLIP does in Stable Diffusion.

    python -m concept_eraser.tiny.build --without shape=heart --threads 1
    python -m concept_eraser.tiny.build --without color=purple,blue --without style=striped
    python -m concept_eraser.tiny.build --unet-only --seed 1 --device cuda
    python -m concept_eraser.tiny.build --only judge2,clip2 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# Mapping and unmapping large activations at every step takes more time than the arithmetic, so keep
# them in the heap.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
_TOGETHER = (
    ("vae", "judge"),
    ("clip",),
)  # two chains with one core each; the unet then has both cores


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m concept_eraser.tiny.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ATTRIBUTE=VALUE",
        help="train the UNet alone, without images of these values, such as shape=heart or "
        "color=purple,blue; may be repeated",
    )
    parser.add_argument(
        "--unet-only",
        action="store_true",
        help="train the UNet alone with nothing left out, for another seed of the full model",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        help="checkpoints and raw weights (default: runs/tiny-build; for a control "
        "runs/tiny-controls/work/NAME)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="where the finished world goes (default: the bundled weights; for a control "
        "runs/tiny-controls/NAME, where NAME is such as without-heart-seed0)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 2, help="default: all cores"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where a control is trained; the full build uses the CPU",
    )
    parser.add_argument(
        "--only",
        default="",
        help="train just these parts, e.g. vae,judge, and assemble nothing; judge2 and clip2 are "
        "written to --output",
    )
    parser.add_argument(
        "--shrink",
        type=float,
        default=1.0,
        help="train every part for this share of its steps (tests)",
    )
    return parser.parse_args()


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def train(names: tuple[str, ...], args: argparse.Namespace) -> None:
    """Train some parts in this process, each only if its scores do not exist yet.

    Raises UserError if the work folder holds a part of another seed or length, or of unknown ones.
    """
    import torch

    from concept_eraser.tiny.stages import STAGES, Stage
    from concept_eraser.tiny.stages.base import require_same_settings
    from concept_eraser.utils.errors import UserError

    torch.set_num_threads(args.threads)
    stage = Stage(args.work, args.seed, _say, args.shrink)
    settings = {"seed": args.seed, "shrink": args.shrink}
    for name in names:
        stored = args.work / f"{name}.settings.json"
        if (args.work / f"{name}.json").exists() and not stored.exists():
            raise UserError(
                f"{args.work} holds the part {name} with unknown settings; give another --work "
                "folder, or remove this one"
            )
        require_same_settings(stored, settings)
    for name in names:
        marker = args.work / f"{name}.json"
        if marker.exists():
            continue
        scores = STAGES[name](stage)
        marker.write_text(json.dumps({"threads": args.threads, **scores}, indent=1) + "\n")
        _say(
            f"{name}: "
            + ", ".join(f"{k} {v:.4g}" for k, v in scores.items() if isinstance(v, int | float))
        )


def _train_only(names: tuple[str, ...], args: argparse.Namespace) -> None:
    """Train some parts, and publish the second judge and the second CLIP.

    Raises UserError as `train` does.
    """
    from concept_eraser.tiny import independent
    from concept_eraser.tiny.stages import STAGES
    from concept_eraser.utils import resources

    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SystemExit(f"--only: unknown part {unknown[0]!r}; use some of {', '.join(STAGES)}")
    train(names, args)
    weights = args.output or resources.tiny_weights()
    for name in names:
        if name in independent.PARTS:
            weights.mkdir(parents=True, exist_ok=True)
            independent.publish(args.work, weights, name, seed=args.seed, threads=args.threads)
            _say(f"{name}: written to {weights}")


def _side_by_side(args: argparse.Namespace) -> None:
    """Train independent chains of parts in one process each. The cores are shared evenly."""
    threads = max(1, args.threads // len(_TOGETHER))
    common = [
        "--work",
        str(args.work),
        "--seed",
        str(args.seed),
        "--shrink",
        str(args.shrink),
        "--threads",
        str(threads),
    ]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "concept_eraser.tiny.build", "--only", ",".join(chain), *common]
        )
        for chain in _TOGETHER
    ]
    try:
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(
                "a part failed to train; its error stands above. Run the same command "
                "again to continue."
            )
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()


def train_control(args: argparse.Namespace) -> None:
    """Train the UNet alone and write a pipeline. Exits with a message on wrong settings."""
    import torch

    from concept_eraser.tiny.control import Control
    from concept_eraser.tiny.exclusion import Exclusion
    from concept_eraser.utils.errors import UserError

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU here; leave out --device to train on the CPU")
    torch.set_num_threads(args.threads)
    controls = Path("runs/tiny-controls")
    try:
        exclusion = Exclusion.read(args.without)
        name = f"{exclusion.folder_name()}-seed{args.seed}"
        control = Control(
            exclusion,
            args.seed,
            work=args.work or controls / "work" / name,
            output=args.output or controls / name,
            shrink=args.shrink,
            device=args.device,
        )
        control.train(threads=args.threads, say=_say)
    except UserError as error:
        raise SystemExit(str(error)) from None


def main() -> None:
    from concept_eraser.utils.errors import UserError

    args = _parse()
    if (args.without or args.unet_only) and args.only:
        raise SystemExit("--only trains parts of the full build; leave it out with --without")
    # both are read at start-up only, by the C library and by OpenMP
    environment = {**_MALLOC, "OMP_NUM_THREADS": str(args.threads)}
    if not all(os.environ.get(k) == v for k, v in environment.items()):
        os.environ.update(environment)
        os.execv(sys.executable, [sys.executable, "-m", "concept_eraser.tiny.build", *sys.argv[1:]])
    if args.device != "cpu" and not (args.without or args.unet_only):
        raise SystemExit("error: --device is for --without and --unet-only")
    try:
        if args.without or args.unet_only:
            train_control(args)
            return
        args.work = args.work or Path("runs/tiny-build")
        args.work.mkdir(parents=True, exist_ok=True)
        if args.only:
            _train_only(tuple(args.only.split(",")), args)
            return
        _side_by_side(args)
        train(("unet",), args)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; run the same command again to continue") from None
    from concept_eraser.tiny.assemble import assemble

    assemble(args.work, args.output, seed=args.seed, threads=args.threads, say=_say)


if __name__ == "__main__":
    main()
