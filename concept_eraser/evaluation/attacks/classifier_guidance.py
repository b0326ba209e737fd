"""Classifier guidance: a classifier of the concept steers the victim's sampler.

Dhariwal and Nichol, "Diffusion Models Beat GANs on Image Synthesis", NeurIPS 2021, arXiv
2105.05233: a classifier of noised images changes the predicted noise (`condition_score` in
`guided_diffusion/gaussian_diffusion.py` of openai/guided-diffusion):

    eps <- eps - sqrt(1 - a_t) scale grad log p(concept | x_t)

Lu et al., "When Are Concepts Erased From Diffusion Models?", NeurIPS 2025, arXiv 2505.17013, do so
on erased models, on top of the prompt's guidance, with a classifier of latents and the time step
(`classifier_guidance/create_latent_classifier.py` and `src/probes/noise_based_probe.py` of
kevinlu4588/WhenAreConceptsErased: scales from 25 to 193).

The attacker trains the classifier himself, on noised latents of images by the original model: of
the concept prompts, and of unrelated prompts. Time steps are drawn with their preference for noise
(u to the power of 1/3). Or he gives the weights of one in a file.

With `judge`, a judge's network steers in its place. It reads the image of the predicted clean
latents (Bansal et al., "Universal Guidance for Diffusion Models", ICLR 2024, arXiv 2302.07121; the
gradient of `ddim_with_grad.py` in arpitbansal297/Universal-Guided-Diffusion). This needs the
gradient through the victim. If the same judge decides on the success, an image may please the judge
alone. Then only the comparison with another model says anything.

On the unprotected bundled model the judge leads to the concept for many prompts. A classifier of
the default size does so for few, so there its failure on an erased model means little.

A classifier alone may lead to the concept. classifier_alone.py is the control without any victim. A
model that never learned the concept is the better control.

Differences from Lu et al.: the classifier has three convolutions (theirs has linear layers only,
which learned too little here from 256 images), no dropout, mirrored images, and equally many
positives and negatives. The sampler is deterministic (their probe has eta from 1 to 1.85).
Difference from Bansal et al.: no steps back in time, and no backward guidance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.data import generate
from concept_eraser.data import prompts as prompt_sets
from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.evaluation.attacks.training_images import original_latents, unrelated_prompts
from concept_eraser.evaluation.attacks.trajectory import (
    Text,
    Trajectory,
    condition_for,
    noise_for,
    require_steps,
    sampler_for,
)
from concept_eraser.evaluation.base import Judge
from concept_eraser.models.base import Condition, Model
from concept_eraser.storage.cache import read_chunk, write_chunk
from concept_eraser.storage.readers import read_bytes, read_tensors
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed, fingerprint

WIDTH = 64
BATCH = 64


class LatentClassifier(nn.Module):
    """Noised latents [n, c, h, w], signal and sigma of their time step [n, 2] -> logits [n]."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = shape
        self.inner = nn.Conv2d(channels, WIDTH, 3, padding=1)
        self.inner_level = nn.Linear(2, WIDTH)
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, stride=2)
        self.middle_level = nn.Linear(2, WIDTH)
        self.outer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        places = ((height + 1) // 2) * ((width + 1) // 2)
        self.head = nn.Linear(WIDTH * places, 1)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = F.silu(self.inner(noisy) + self.inner_level(level)[:, :, None, None])
        hidden = F.silu(self.middle(hidden) + self.middle_level(level)[:, :, None, None])
        hidden = F.silu(self.outer(hidden))
        logits: Tensor = self.head(hidden.flatten(1))[:, 0]
        return logits


# latents, step, conditions of the prompts and of the unconditional prediction -> the predicted
# clean latents and noise, and the gradient of log p(concept), each in the shape of the latents
Steering = Callable[
    [Trajectory, Tensor, int, tuple[Condition, Condition]], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class SteeredSampling(Attack):
    """Sampling that the gradient of a classifier of noised latents steers. The base of two attacks.

    Args:
        scales: The factors of the classifier's gradient, in this order.
        tries: The number of images for each scale, each with other noise.
        images: The number of training images of the concept, and as many unrelated ones.
        training_steps: The training steps of the classifier, with 64 noised latents each.
        lr: The learning rate of its training.
        prompts: The prompt set of unrelated images, "" for the suite's retain groups.
        classifier: A safetensors file of a trained classifier, in place of the training.
        steps: The steps of the sampler, 0 for the suite's.
    """

    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    scales: tuple[float, ...] = (10.0, 20.0, 40.0, 80.0)
    tries: int = 1
    images: int = 128
    training_steps: int = 400
    lr: float = 1e-3
    prompts: str = ""
    classifier: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_positive(
            tries=self.tries,
            images=self.images,
            training_steps=self.training_steps,
            lr=self.lr,
        )
        require_steps(self.steps)
        if not self.scales or not all(scale >= 0 for scale in self.scales):
            raise ValueError(f"scales must be at least 0, found {list(self.scales)}")
        if self.prompts and self.classifier:
            raise ValueError("give prompts (to train a classifier) or a classifier file, not both")

    def lists(self) -> dict[str, str]:
        if self.classifier:
            return {self.classifier: fingerprint(read_bytes(Path(self.classifier), 2**30).hex())}
        return {self.prompts: prompt_sets.load(self.prompts).hash} if self.prompts else {}

    def sample(
        self, scene: Scene, steer: Steering, text: Text = "prompt"
    ) -> Generator[Round, None, None]:
        """Yield a round for each scale and try.

        Args:
            scene: The attacked batch.
            steer: Gives the predicted clean latents and noise, and the gradient of log p(concept).
                Latents that are noise alone are not steered: there the change of the clean latents
                would have no bound.
            text: The victim is given the prompt, or the empty prompt.
        """
        sampler = sampler_for(scene, self.steps, text)
        for scale, number in itertools.product(self.scales, range(self.tries)):
            live = scene.live
            condition = condition_for(scene, live, text)
            null = scene.victim.null().repeat(len(live))
            x = noise_for(scene, live, ("classifier guidance", number) if number else ())
            for step in range(sampler.steps):
                clean, noise, gradient = steer(sampler, x, step, (condition, null))
                signal, sigma = sampler.level(x, step)
                if bool((signal > 0).all()):
                    noise = noise - sigma * scale * gradient
                    clean = (x - sigma * noise) / signal
                x = sampler.mix(clean, noise, step + 1)
            yield Round(live, images=sampler.images(x))

    def gradient_of(self, scene: Scene) -> Callable[[Trajectory, Tensor, int], Tensor]:
        """Return the gradient of log p(concept) of a classifier, for noised latents at a step.

        Raises UserError if the classifier in the file does not fit the model's latents.
        """
        classifier = self._classifier(scene)

        def gradient_at(sampler: Trajectory, x: Tensor, step: int) -> Tensor:
            level = torch.stack(level_of(sampler.model, sampler.time(x, step)), 1)
            variable = x.detach().requires_grad_(True)
            with torch.enable_grad():
                log_p = F.logsigmoid(classifier(variable, level))
                (gradient,) = torch.autograd.grad(log_p.sum(), [variable])
            return gradient

        return gradient_at

    def _classifier(self, scene: Scene) -> LatentClassifier:
        """Return the given classifier, the one of the memory, or a newly trained one.

        Raises UserError if the file's weights do not fit the model's latents.
        """
        network = LatentClassifier(scene.victim.latent_shape())
        if self.classifier:
            given = read_tensors(Path(self.classifier))
            own = {name: value.shape for name, value in network.state_dict().items()}
            if {name: value.shape for name, value in given.items()} != own:
                raise UserError(
                    f"{self.classifier} is no classifier of latents of the shape "
                    f"{list(scene.victim.latent_shape())}; train one by leaving it out"
                )
            network.load_state_dict(given)
            return network.to(scene.targets.device).requires_grad_(False)
        texts = list(dict.fromkeys(scene.corpus)) or list(scene.concept_prompts)
        concept = [texts[i % len(texts)] for i in range(self.images)]
        unrelated = unrelated_prompts(scene, self.prompts, self.images)
        facts = [
            generate.model_fingerprint(scene.original),
            concept,
            unrelated,
            scene.root,
            [self.training_steps, self.lr, WIDTH],
            vars(scene.sampling),
            scene.original.drawing(),
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
        positive = original_latents(scene, concept, "classifier: concept", mirrored=True)
        negative = original_latents(scene, unrelated, "classifier: unrelated", mirrored=True)
        latents = torch.cat([positive, negative])
        labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).to(latents)
        generator = torch.Generator().manual_seed(derive_seed(scene.root, "classifier"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(scene.root, "classifier: start"))
            fresh = LatentClassifier(scene.victim.latent_shape())
        network.load_state_dict(fresh.state_dict())
        network.to(latents.device)
        optimizer = torch.optim.AdamW(network.parameters(), self.lr, weight_decay=1e-2)
        for _ in range(self.training_steps):
            rows = torch.randint(len(latents), (BATCH,), generator=generator).to(latents.device)
            share = torch.rand(BATCH, generator=generator) ** (1 / 3)
            t = (share * (scene.original.timesteps - 1)).long().to(latents.device)
            noise = torch.randn((BATCH, *latents.shape[1:]), generator=generator).to(latents)
            noisy = scene.original.corrupt(latents[rows], noise, t)
            level = torch.stack(level_of(scene.original, t), 1)
            loss = F.binary_cross_entropy_with_logits(network(noisy, level), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {name: value.detach().cpu() for name, value in network.state_dict().items()}


@dataclass(frozen=True)
class ClassifierGuidance(SteeredSampling):
    """Steer the victim's sampler by a classifier of noised latents.

    Args:
        scales: The factors of the classifier's gradient, in this order.
        tries: The number of images for each scale, each with other noise.
        images: The number of training images of the concept, and as many unrelated ones.
        training_steps: The training steps of the classifier, with 64 noised latents each.
        lr: The learning rate of its training.
        prompts: The prompt set of unrelated images, "" for the suite's retain groups.
        classifier: A safetensors file of a trained classifier, in place of the training.
        steps: The steps of the sampler, 0 for the suite's.
        text: The victim is given the prompt, or the empty prompt.
        judge: The name of a differentiable judge that steers in place of a classifier.
    """

    title: ClassVar[str] = "Classifier guidance"
    source: ClassVar[str] = "arXiv 2105.05233, 2505.17013"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "white box"

    text: Text = "prompt"
    judge: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge and (self.prompts or self.classifier):
            raise ValueError("a judge replaces the classifier; leave out prompts and classifier")

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        steer = self._by_judge(scene) if self.judge else self._by_classifier(scene)
        yield from self.sample(scene, steer, self.text)

    def _by_classifier(self, scene: Scene) -> Steering:
        """Steer by a classifier of the noised latents."""
        gradient_at = self.gradient_of(scene)

        def steer(
            sampler: Trajectory, x: Tensor, step: int, conditions: tuple[Condition, Condition]
        ) -> tuple[Tensor, Tensor, Tensor]:
            gradient = gradient_at(sampler, x, step)
            with torch.no_grad():
                prediction = sampler.predict(x, step, *conditions)
                return *sampler.split(x, step, prediction), gradient

        return steer

    def _by_judge(self, scene: Scene) -> Steering:
        """Steer by a judge of the predicted clean image.

        Raises UserError if the judge does not know the concept or is not differentiable.
        """
        judge: Judge = registry.build("judge", self.judge, {})
        attributes = [name for name, values in judge.classes.items() if scene.concept in values]
        if not attributes:
            raise UserError(
                f"the judge {self.judge!r} does not know {scene.concept!r}; give another judge"
            )

        def steer(
            sampler: Trajectory, x: Tensor, step: int, conditions: tuple[Condition, Condition]
        ) -> tuple[Tensor, Tensor, Tensor]:
            variable = x.detach().requires_grad_(True)
            prediction = sampler.predict(variable, step, *conditions)
            clean, noise = sampler.split(variable, step, prediction)
            images = sampler.model.decode(clean)
            probability = judge.probability(images, attributes[0], scene.concept)
            log_p = probability.clamp(min=1e-12).log()
            (gradient,) = torch.autograd.grad(log_p.sum(), [variable])
            scene.spend("gradient steps", len(x))
            return clean.detach(), noise.detach(), gradient

        return steer


def level_of(model: Model, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return signal and sigma of time steps, each [n], with x_t = signal x_0 + sigma noise."""
    one = torch.ones(len(t), 1, 1, 1, device=t.device)
    nothing = torch.zeros_like(one)
    return (
        model.corrupt(one, nothing, t)[:, 0, 0, 0],
        model.corrupt(nothing, one, t)[:, 0, 0, 0],
    )


PLUGIN = ClassifierGuidance
