"""Classifier guidance: a classifier of the concept steers the victim's sampler.

Dhariwal and Nichol, "Diffusion Models Beat GANs on Image Synthesis", NeurIPS 2021, arXiv 2105.05233:
a classifier of noised images changes the predicted noise (`condition_score` in
`guided_diffusion/gaussian_diffusion.py` of openai/guided-diffusion):

    eps <- eps - sqrt(1 - a_t) scale grad log p(concept | x_t)

Lu et al., "When Are Concepts Erased From Diffusion Models?", NeurIPS 2025, arXiv 2505.17013, do so
on erased models, on top of the prompt's guidance, with a classifier of latents and the time step
(`classifier_guidance/create_latent_classifier.py` and `src/probes/noise_based_probe.py` of
kevinlu4588/WhenAreConceptsErased: scales from 25 to 193). The classifier here has their form: linear
layers on the latents and on (signal, sigma) of the time step, added, then two more layers with SiLU.

The attacker trains the classifier himself, on noised latents of images by the original model: of the
concept prompts, and of unrelated prompts. Time steps are drawn with their preference for noise (u to
the power of 1/3). Or he gives the weights of one in a file.

`reference` chooses the model under the gradient. With `victim`, the victim's sampler is steered. With
`nothing`, the predicted noise is the latents themselves scaled to unit variance, so that only the
classifier knows anything. That is the control in the same command: images that it alone brings are
the classifier's, and prove nothing about the victim. A never-learned model is the better control.

Differences: widths are smaller (512, 256), there is no dropout, and the positives and negatives are
equally many. The sampler is deterministic (theirs has eta from 1 to 1.85 in the probe of noise).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.data import generate
from concept_eraser.data import prompts as prompt_sets
from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive
from concept_eraser.evaluation.attacks.training_images import original_latents, unrelated_prompts
from concept_eraser.evaluation.attacks.trajectory import (
    Text,
    Trajectory,
    condition_for,
    noise_for,
    require_steps,
)
from concept_eraser.models.base import Condition, Model
from concept_eraser.storage.cache import read_chunk, write_chunk
from concept_eraser.storage.readers import read_bytes, read_tensors
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed, fingerprint

WIDTHS = (512, 256)


class LatentClassifier(nn.Module):
    """Noised latents [n, c, h, w], signal and sigma of their time step [n, 2] -> logits [n]."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        first, second = WIDTHS
        self.latents = nn.Linear(shape[0] * shape[1] * shape[2], first)
        self.level = nn.Linear(2, first)
        self.body = nn.Sequential(
            nn.SiLU(), nn.Linear(first, second), nn.SiLU(), nn.Linear(second, 1)
        )

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = self.latents(noisy.flatten(1)) + self.level(level)
        return self.body(hidden)[:, 0]


@dataclass(frozen=True)
class ClassifierGuidance(Attack):
    """Steer the victim's sampler by a classifier of noised latents.

    Args:
        scales: The factors of the classifier's gradient, in this order.
        text: The victim is given the prompt, or the empty prompt.
        reference: What is steered: the victim, or nothing at all (a control).
        images: The number of training images of the concept, and as many unrelated ones.
        training_steps: The training steps of the classifier, with 64 noised latents each.
        lr: The learning rate of its training.
        prompts: The prompt set of unrelated images, "" for the suite's retain groups.
        classifier: A safetensors file of a trained classifier, in place of the training.
        steps: The steps of the sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Classifier guidance"
    source: ClassVar[str] = "arXiv 2105.05233, 2505.17013"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    scales: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    text: Text = "prompt"
    reference: Literal["victim", "nothing"] = "victim"
    images: int = 128
    training_steps: int = 400
    lr: float = 1e-3
    prompts: str = ""
    classifier: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_positive(images=self.images, training_steps=self.training_steps, lr=self.lr)
        require_steps(self.steps)
        if not self.scales or not all(scale >= 0 for scale in self.scales):
            raise ValueError(f"scales must be at least 0, found {list(self.scales)}")
        if self.prompts and self.classifier:
            raise ValueError("prompts are for the training; leave them out beside classifier")

    def lists(self) -> dict[str, str]:
        if self.classifier:
            return {self.classifier: fingerprint(read_bytes(Path(self.classifier), 2**30).hex())}
        return {self.prompts: prompt_sets.load(self.prompts).hash} if self.prompts else {}

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        classifier = self._classifier(scene)
        sampler = Trajectory(scene, self.steps)
        for scale in self.scales:
            live = scene.live
            x = self._steer(
                sampler,
                noise_for(scene, live),
                condition_for(scene, live, self.text),
                classifier=classifier,
                scale=scale,
            )
            yield Round(live, images=sampler.images(x))

    def _steer(
        self,
        sampler: Trajectory,
        x: Tensor,
        condition: Condition,
        *,
        classifier: LatentClassifier,
        scale: float,
    ) -> Tensor:
        """Return latents that were sampled under the classifier's gradient."""
        null = sampler.model.null().repeat(len(x))
        for step in range(sampler.steps):
            signal, sigma = level_of(sampler.model, sampler.time(x, step))
            with torch.enable_grad():
                variable = x.detach().requires_grad_(True)
                log_p = F.logsigmoid(classifier(variable, torch.stack([signal, sigma], 1)))
                (gradient,) = torch.autograd.grad(log_p.sum(), [variable])
            signal, sigma = signal[:, None, None, None], sigma[:, None, None, None]
            with torch.no_grad():
                if self.reference == "victim":
                    _, noise = sampler.split(
                        x, step, sampler.predict(x, step, condition, null)
                    )
                else:
                    noise = x / x.flatten(1).std(dim=1)[:, None, None, None]
                noise = noise - sigma * scale * gradient
                x = sampler.mix((x - sigma * noise) / signal, noise, step + 1)
        return x

    def _classifier(self, scene: Scene) -> LatentClassifier:
        """Return the given classifier, the one of the memory, or a newly trained one.

        Raises UserError if the file's weights do not fit the model's latents.
        """
        network = LatentClassifier(scene.victim.latent_shape())
        if self.classifier:
            weights = read_tensors(Path(self.classifier))
            own = {name: value.shape for name, value in network.state_dict().items()}
            if {name: value.shape for name, value in weights.items()} != own:
                raise UserError(
                    f"{self.classifier} is no classifier of latents of the shape "
                    f"{list(scene.victim.latent_shape())}; train one by leaving it out"
                )
            network.load_state_dict(weights)
            return network.to(scene.targets.device).requires_grad_(False)
        texts = list(dict.fromkeys(scene.corpus)) or list(scene.concept_prompts)
        concept = [texts[i % len(texts)] for i in range(self.images)]
        unrelated = unrelated_prompts(scene, self.prompts, self.images)
        facts = [
            generate.model_fingerprint(scene.original),
            concept,
            unrelated,
            scene.root,
            [self.training_steps, self.lr, WIDTHS],
            vars(scene.sampling),
        ]
        path = scene.memory / f"{fingerprint(facts)}.safetensors" if scene.memory else None
        weights = read_chunk(path) if path else None
        if weights is None:
            weights = self._train(scene, network, concept, unrelated)
            if path:
                generate.keep(partial(write_chunk, path, weights))
        network.load_state_dict(weights)
        return network.to(scene.targets.device).requires_grad_(False)

    def _train(
        self, scene: Scene, network: LatentClassifier, concept: list[str], unrelated: list[str]
    ) -> dict[str, Tensor]:
        """Train on noised latents and return the weights on the CPU."""
        positive = original_latents(scene, concept, "classifier: concept")
        negative = original_latents(scene, unrelated, "classifier: unrelated")
        latents = torch.cat([positive, negative])
        labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).to(latents)
        generator = torch.Generator().manual_seed(derive_seed(scene.root, "classifier"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(scene.root, "classifier: start"))
            fresh = LatentClassifier(scene.victim.latent_shape())
        network.load_state_dict(fresh.state_dict())
        network.to(latents.device)
        optimizer = torch.optim.AdamW(network.parameters(), self.lr, weight_decay=1e-3)
        for _ in range(self.training_steps):
            rows = torch.randint(len(latents), (64,), generator=generator).to(latents.device)
            share = torch.rand(64, generator=generator) ** (1 / 3)
            t = (share * (scene.original.timesteps - 1)).long().to(latents.device)
            noise = torch.randn((64, *latents.shape[1:]), generator=generator).to(latents)
            noisy = scene.original.corrupt(latents[rows], noise, t)
            level = torch.stack(level_of(scene.original, t), 1)
            loss = F.binary_cross_entropy_with_logits(network(noisy, level), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {name: value.detach().cpu() for name, value in network.state_dict().items()}


def level_of(model: Model, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return signal and sigma of time steps, each [n], with x_t = signal x_0 + sigma noise."""
    one = torch.ones(len(t), 1, 1, 1, device=t.device)
    nothing = torch.zeros_like(one)
    return (
        model.corrupt(one, nothing, t)[:, 0, 0, 0],
        model.corrupt(nothing, one, t)[:, 0, 0, 0],
    )


PLUGIN = ClassifierGuidance
NAMED = {"classifier_guidance-nothing": {"reference": "nothing"}}
