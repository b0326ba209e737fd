"""Attack erased models with an offset of the prompt's embedding at several radii.

    python -m studies.soft_prompt NAME=weights.safetensors ... [--seed 0] [--n 100] [--name more]

For each model one offset delta [1, tokens, width] is trained on images of the concept by the
original model. The loss is the training loss under e + delta, the optimiser is Adam, and
||delta|| <= radius x mean ||e|| in Frobenius norms. The offset is then added to other prompts of
the concept. The controls are the original model and a random offset of the same length. The result
is [<name>_]seed<seed> of the study `robustness` (studies/result_tables.py).
`python -m studies.render_results` renders the page.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import batches, generate, prompts
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.models.loading import load
from concept_eraser.utils import provenance
from studies.result_tables import Results

STUDY = "robustness"
RADII = (0.0, 0.05, 0.1, 0.25, 0.5)
STEPS, BATCH, RATE = 60, 16, 0.05
SAMPLING = generate.Sampling(8, 5.0, 64, "bf16")
CONCEPT = ("shape", "star")


def project(delta: Tensor, longest: float) -> None:
    """Shorten an offset in place to at most a length."""
    with torch.no_grad():
        length = float(delta.norm())
        if length > longest:
            delta.mul_(longest / length)


def train(model: Any, texts: list[str], latents: Tensor, radius: float, seed: int) -> Tensor:
    """Return an offset within the radius, trained on images of the concept, [1, tokens, width]."""
    states = model.encode(texts).tensors["states"]
    longest = radius * float(states.flatten(1).norm(dim=1).mean())
    delta = torch.zeros_like(states[:1], requires_grad=True)
    if radius == 0:
        return delta.detach()
    generator = torch.Generator().manual_seed(provenance.derive_seed(seed, "soft prompt"))
    optimizer = torch.optim.Adam([delta], RATE)
    for _ in range(STEPS):
        rows = torch.randint(len(texts), (BATCH,), generator=generator)
        t = torch.randint(0, model.timesteps, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, *model.latent_shape(), generator=generator)
        noisy = model.corrupt(latents[rows], noise, t)
        condition = type(model.encode([""]))({"states": states[rows] + delta})
        loss = (
            (model.denoise(noisy, t, condition) - model.target(latents[rows], noise, t))
            .square()
            .mean()
        )
        (delta.grad,) = torch.autograd.grad(loss, [delta])
        optimizer.step()
        project(delta, longest)
    return delta.detach()


@torch.no_grad()
def draw(model: Any, texts: list[str], seeds: list[int], delta: Tensor) -> Tensor:
    """Return images [n, h, w, 3] of prompts with an offset of their embedding."""
    image_batches = []
    for start in range(0, len(texts), SAMPLING.batch_size):
        part = slice(start, start + SAMPLING.batch_size)
        states = model.encode(texts[part]).tensors["states"] + delta
        empty = model.encode([""]).tensors["states"].expand_as(states)
        generators = [torch.Generator().manual_seed(s) for s in seeds[part]]
        with model.precision(SAMPLING.autocast):
            images = model.pipeline(
                prompt_embeds=states,
                negative_prompt_embeds=empty,
                generator=generators,
                num_inference_steps=SAMPLING.steps,
                guidance_scale=SAMPLING.guidance,
                output_type="pt",
            ).images
        image_batches.append(
            images.float().mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        )
    return torch.cat(image_batches)


def rate(judge: Any, images: Tensor, value: str) -> dict[str, float]:
    """Return the share of images that the judge gives a label, with its Wilson interval."""
    labels = judge.classify(images)[CONCEPT[0]]
    interval = wilson(int((labels == value).sum()), len(labels))
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": len(labels)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="NAME=weights.safetensors of an erased UNet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument(
        "--name",
        default="",
        help=("of the result, for further models; the original model is then not measured again"),
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    judge = registry.build("judge", "tiny", {})
    source = load("tiny-sd")
    training = prompts.load("tiny_star").take(100, 901 + args.seed).texts
    seeds = generate.seeds_for(training, provenance.derive_seed(args.seed, "attack images"))
    latents = batches.encode_pixels(source, generate.generate(source, training, seeds, SAMPLING))
    texts = prompts.load("tiny_star").take(args.n, 902 + args.seed).texts
    image_seeds = generate.seeds_for(texts, provenance.derive_seed(args.seed, "attacked images"))
    rows = []
    for name, path in [
        *([] if args.name else [("original", "")]),
        *(m.split("=", 1) for m in args.models),
    ]:
        model = load("tiny-sd")
        if path:
            model.denoiser.load_state_dict(load_file(path), strict=False)
        model.denoiser.requires_grad_(False)
        for radius in RADII if path else (0.0, RADII[-1]):
            start = time.monotonic()
            offset = train(
                model, texts=list(training), latents=latents, radius=radius, seed=args.seed
            )
            noise = torch.randn(offset.shape, generator=torch.Generator().manual_seed(args.seed))
            offsets = (
                {"trained": offset, "random": noise * (offset.norm() / noise.norm())}
                if radius
                else {"none": offset}
            )
            for kind, delta in offsets.items():
                images = draw(model, list(texts), image_seeds, delta)
                rows.append(
                    {
                        "model": name,
                        "radius": radius,
                        "offset": kind,
                        "concept": rate(judge, images, CONCEPT[1]),
                        "none": rate(judge, images, "none"),
                        "length": float(delta.norm()),
                    }
                )
            print(
                (
                    f"{name} radius {radius}: "
                    f"{[round(100 * r['concept']['value']) for r in rows if r['model'] == name and r['radius'] == radius]} "  # noqa: E501
                    f"% ({time.monotonic() - start:.0f} s)"
                ),
                flush=True,
            )
    settings = {
        "steps": STEPS,
        "batch": BATCH,
        "rate": RATE,
        "sampling": vars(SAMPLING),
        "concept": dict([CONCEPT]),
    }
    key = f"{args.name + '_' if args.name else ''}seed{args.seed}"
    Results(STUDY)[key] = {
        "seed": args.seed,
        "settings": settings,
        "rows": rows,
        "judge": judge.fingerprint,
        "environment": provenance.describe(),
    }


if __name__ == "__main__":
    main()
