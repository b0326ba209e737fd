"""Take training steps with the package vision-unlearning, in its own environment.

benchmarks/peers.py starts this file with the Python of that environment and a folder. It cannot
import concept_eraser there, whose libraries are newer. It builds what the package's `train` builds
and then calls the package's own step, `UnlearnerLoraDirect._train_one_batch`. So neither data sets
nor a GPU are needed. The optimizer and the LoRA are the package's, with the learning rate of the
comparison, without warm-up.

Each line of the input is a command. Each answer is a line that begins with RESULT:

    step 3,1,7           one step on these examples -> cpu_seconds
    memory 3,1,7 STEPS   some steps -> resident_mb, what they add to the resident set
    save FILE            the changes of the UNet's weights by the LoRA
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LR = 5e-4  # as in benchmarks/peers.py


def answer(**content: Any) -> None:
    print("RESULT " + json.dumps(content), flush=True)


def build(folder: Path) -> Any:
    """Return the package's unlearner with the parts of the pipeline in a folder."""
    from accelerate import Accelerator
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from transformers import CLIPTextModel

    lora = importlib.import_module("vision_unlearning.unlearner.lora")
    weighting = importlib.import_module("vision_unlearning.utils.gradient_weighting")
    unlearner = lora.UnlearnerLoraDirect(
        model_name_or_path=str(folder),
        dataset_forget_name="forget",
        dataset_retain_name="retain",
        gradient_weighting_method=weighting.GradientWeightingMethodMunba(),
        gradient_accumulation_steps=1,
        learning_rate=LR,
    )
    unlearner._accelerator = Accelerator(cpu=True)
    unlearner._noise_scheduler = DDPMScheduler.from_pretrained(folder / "scheduler")
    unlearner._text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
    unlearner._vae = AutoencoderKL.from_pretrained(folder / "vae")
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    for part in (unet, unlearner._vae, unlearner._text_encoder):
        part.requires_grad_(False)
    predict(folder, unet, unlearner._text_encoder)
    unet.add_adapter(unlearner._get_lora_config())
    unlearner._lora_layers = filter(lambda p: p.requires_grad, unet.parameters())
    optimizer = torch.optim.AdamW(
        unlearner._lora_layers,
        lr=unlearner.learning_rate,
        betas=(unlearner.adam_beta1, unlearner.adam_beta2),
        weight_decay=unlearner.adam_weight_decay,
        eps=unlearner.adam_epsilon,
    )
    schedule = get_scheduler("constant", optimizer=optimizer)
    unlearner._unet, unlearner._optimizer, unlearner._lr_scheduler = unlearner._accelerator.prepare(
        unet, optimizer, schedule
    )
    unlearner._unet.train()
    return unlearner


@torch.no_grad()
def predict(folder: Path, unet: Any, text_encoder: Any) -> None:
    """Write a prediction, by which benchmarks/peers.py knows that it is the same pipeline."""
    tokens = load_file(folder / "examples.safetensors")["forget.tokens"][:2]
    inputs = load_file(folder / "inputs.safetensors")
    states = text_encoder(tokens, return_dict=False)[0]
    prediction = unet(inputs["noisy"], inputs["t"], states, return_dict=False)[0]
    save_file({"prediction": prediction.contiguous()}, folder / "prediction.safetensors")


def step(unlearner: Any, examples: dict[str, torch.Tensor], rows: str) -> float:
    """Take a step. Returns its CPU seconds."""
    index = torch.tensor([int(row) for row in rows.split(",")])
    forget, retain = (
        {
            "pixel_values": examples[f"{name}.pixels"][index],
            "input_ids": examples[f"{name}.tokens"][index],
        }
        for name in ("forget", "retain")
    )
    began = time.process_time()
    unlearner._train_one_batch(forget, retain)
    return time.process_time() - began


def changes(unet: Any) -> dict[str, torch.Tensor]:
    """Return what the LoRA adds to each weight."""
    return {
        f"{name}.weight": layer.get_delta_weight("default").detach().contiguous()
        for name, layer in unet.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def resident(key: str) -> float:
    """Return a number of /proc/self/status in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", status)[0]) / 2**10


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    unlearner, examples = build(folder), load_file(folder / "examples.safetensors")
    names = ("vision-unlearning", "torch", "diffusers", "transformers", "peft")
    answer(versions={name: importlib.metadata.version(name) for name in names})
    for line in sys.stdin:
        command, *words = line.split()
        if command == "step":
            answer(cpu_seconds=step(unlearner, examples, words[0]))
        elif command == "memory":
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = resident("VmHWM")
            for _ in range(int(words[1])):
                step(unlearner, examples, words[0])
            answer(resident_mb=round(resident("VmHWM") - before, 1))
        elif command == "save":
            save_file(changes(unlearner._accelerator.unwrap_model(unlearner._unet)), words[0])
            answer()


if __name__ == "__main__":
    main()
