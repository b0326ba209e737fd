"""All keys of a recipe. Each section is a separate class; recipe.py checks them together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from concept_eraser.recipes.method_fields import MethodSpec
from concept_eraser.recipes.objective_fields import (
    LOSS_NAMES,
    OBJECTIVES,
    PROMPTED,
    AttackSpec,
    Forget,
    HistogramSpec,
    ObjectiveSpec,
    as_list,
    concept_objective,
)
from concept_eraser.recipes.strict import Strict
from concept_eraser.recipes.trainable_fields import TrainableSpec
from concept_eraser.recipes.training_fields import (
    GenerationSpec,
    RewindingSpec,
    TrainingSpec,
    WatchSpec,
)
from concept_eraser.utils.limits import (
    MODEL_OPTION,
)


class RecipeFields(Strict):
    """The keys of a recipe, and the names of its objectives."""

    model: str = Field(
        "tiny-sd",
        description=(
            "tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a "
            "VAE the folder of a saved one"
        ),
    )
    model_options: dict[str, Annotated[float, Field(ge=0, le=MODEL_OPTION)]] = Field(
        {},
        description=(
            "options of the model's family: size of the images (sdxl, sd3, flux), guidance "
            "input during training (flux)"
        ),
    )
    target: Literal["denoiser", "text_encoder", "clip", "vae", "classifier"] = Field(
        "denoiser", description="the part that is trained"
    )
    templates: list[str] = Field(
        ["a photo of a {}"],
        description="target clip: prompts of the classes; {} stands for the name",
    )
    forget: Forget = Field(
        description="what to forget: one objective, or a list with one for each concept"
    )
    concepts: Literal["together", "rotate"] = Field(
        "together",
        description="several concepts: one objective for each, or one concept per step in turn",
    )
    retain: ObjectiveSpec | None = Field(None, description="what to preserve")
    replace: ObjectiveSpec | None = Field(
        None,
        description=(
            "what the forgotten prompts generate instead, as a separate objective (UNO with its "
            "anchor term)"
        ),
    )
    relearn: ObjectiveSpec | None = Field(
        None,
        description=(
            "what a later fine-tuning would learn, the objective that meta_unlearning and resalign "
            "harden the model against"
        ),
    )
    attack: AttackSpec | None = Field(
        None,
        description=(
            "the lower-level problem of forum, adversarial, race, stereo, bome, moml and moco"
        ),
    )
    histogram: HistogramSpec | None = Field(None, description="for uno-hat, uno-s-hat, s-hat and h")
    watch: WatchSpec | None = Field(
        None, description="measure the concept rate during the training"
    )
    rewinding: RewindingSpec | None = Field(
        None,
        description=(
            "target classifier, clip: after the training, return to the round whose error on the "
            "forget set is nearest to the last round's error on unseen examples of its classes "
            "(SCRUB+R); a name or path stands for its data"
        ),
    )
    method: MethodSpec = Field(
        MethodSpec(), description="the rule that combines the gradients, or an edit"
    )
    finish: MethodSpec | None = Field(
        None,
        description=(
            "after the training, a closed form on the same prompts and anchors: uce, rece, "
            "speed or mace-cfr; a LoRA is merged before it, and whole weights are written"
        ),
    )
    trainable: TrainableSpec = Field(TrainableSpec(), description="the trainable parameters")
    training: TrainingSpec = Field(
        TrainingSpec(),
        description="length, optimizer and precision of the training",
        validate_default=True,  # a method may ask for an optimizer
    )
    generation: GenerationSpec = Field(
        GenerationSpec(), description="the sampler of the training images"
    )
    save: Literal["lora", "changed", "pipeline"] | None = Field(
        None,
        description=(
            "what the run folder holds of the weights. lora: the LoRA alone. changed: the changed "
            "tensors, and the LoRA. pipeline: the whole model too. Default: lora if the run trains "
            "a LoRA, else pipeline. A run on a model in memory, or with pickled weights allowed, "
            "writes the pipeline"
        ),
    )

    def weights_to_save(self, *, has_name: bool = True) -> Literal["lora", "changed", "pipeline"]:
        """Return what a run writes of its weights.

        has_name: the original can be loaded again by its name. Without this, the default is the
            whole pipeline, since a LoRA alone could not be put on its original. A gate is
            written alone in any case: no pipeline could hold it.
        """
        if self.save is not None:
            return self.save
        if self.method.adds_gate:
            return "changed"
        writes_lora = self.trainable.lora is not None and self.finish is None
        return "lora" if writes_lora and has_name else "pipeline"

    @property
    def forgotten(self) -> list[ObjectiveSpec]:
        """The concepts to forget, usually one."""
        return as_list(self.forget)

    @property
    def objective_specs(self) -> dict[str, ObjectiveSpec]:
        """The objectives with prompts or data, by name: retain, forget, forget.2, ..., replace."""
        sections = {name: getattr(self, name, None) for name in self.all_objectives}
        sections |= {concept_objective(i): concept for i, concept in enumerate(self.forgotten)}
        return {name: spec for name, spec in sections.items() if isinstance(spec, ObjectiveSpec)}

    @property
    def all_objectives(self) -> tuple[str, ...]:
        """All objectives in the order of the methods, also the concepts whose turn it is not."""
        return self.objectives_with(len(self.forgotten))

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives of one step, in the order of the methods.

        Concepts that take turns are one objective, `forget`.
        """
        return self.all_objectives if self.concepts == "together" else self.objectives_with(1)

    def objectives_with(self, concepts: int) -> tuple[str, ...]:
        """Return the objectives in the order of the methods, with this number of concepts."""
        present = [name for name in OBJECTIVES if getattr(self, name) is not None]
        return tuple(
            one
            for name in present
            for one in (map(concept_objective, range(concepts)) if name == "forget" else [name])
        )

    @property
    def unused_settings(self) -> set[str]:
        """The settings of an objective that this target does not use."""
        of_prompts = {
            "eta",
            "images",
            "noised",
            "n",
            "timesteps",
            "neutral",
            "mixture",
            "tokens",
            "trajectory",
            "elastic",
            "empty_prompts",
        }
        numbers = {"vae": {"l1", "distill"}, "classifier": {"kl"}, "clip": {"kl"}}.get(
            self.target, {"kl", "l1", "distill"}
        )
        numbers |= set() if "npo" in LOSS_NAMES[self.target] else {"beta"}
        if self.target == "text_encoder":
            numbers |= {"neutral", "mixture", "tokens", "trajectory", "elastic", "empty_prompts"}
        return {"options", *numbers} if self.target in PROMPTED else of_prompts | numbers
