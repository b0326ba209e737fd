"""Erase a concept from your own Stable Diffusion checkpoint, as a LoRA.

    python examples/erase_checkpoint.py "Van Gogh" --kind style --model ./sd15 --memory 8gb

Without arguments the script erases "star" from the bundled model, so that it runs anywhere.
`concept-eraser erase "Van Gogh" --model ./sd15 --dry-run` estimates memory and time first.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import concept_eraser

KINDS = ["object", "style", "person", "character", "content"]
PRESETS = ["8gb", "12gb", "16gb", "24gb", "32gb", "48gb"]
QUICK = ["training.steps=2", "training.batch_size=4", "forget.n=8", "retain.n=8"]


def read_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("concept", nargs="?", default="star", help="what to erase")
    parser.add_argument("--kind", choices=KINDS, help="kind of the concept (default: guessed)")
    parser.add_argument("--anchor", help="what is generated instead (default: of the kind)")
    parser.add_argument("--model", default="tiny-sd", help="diffusers folder or hub id")
    parser.add_argument("--memory", choices=PRESETS, help="settings for a GPU with this memory")
    parser.add_argument("--rank", type=int, default=64, help="rank of the LoRA")
    parser.add_argument("--steps", type=int, help="training steps (default: of the model)")
    parser.add_argument("--output", type=Path, help="run folder (default: runs/CONCEPT)")
    parser.add_argument("--quick", action="store_true", help="two steps: does the script run?")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    run = concept_eraser.erase(
        arguments.concept,
        kind=arguments.kind,
        anchor=arguments.anchor,
        model=arguments.model,
        memory=arguments.memory,
        images=4 if arguments.quick else None,
        trainable={"lora": {"rank": arguments.rank, "conv": True}},
        training={"steps": arguments.steps} if arguments.steps else None,
        overrides=QUICK if arguments.quick else [],
        output=arguments.output,
        notify=print,
    )

    kohya = concept_eraser.export(run.folder, "kohya")
    print(f"diffusers:        pipe.load_lora_weights('{run.folder / 'lora'}')")
    print(f"A1111 or ComfyUI: {kohya.path}, a LoRA of rank {kohya.rank}")
    print(f"evaluate it:      concept-eraser evaluate {run.folder}")


if __name__ == "__main__":
    main()
