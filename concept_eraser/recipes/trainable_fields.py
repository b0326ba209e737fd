"""The section `trainable` of a recipe: selection, LoRA, mask."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from concept_eraser.recipes.strict import Strict
from concept_eraser.utils.limits import (
    FACTOR,
    PORTION,
    RANK,
)


class LoraSpec(Strict):
    """Low-rank matrices in place of the weights: W + alpha / rank x up down."""

    rank: int = Field(4, ge=1, le=RANK, description="the rank of the change of each layer")
    alpha: float = Field(
        4,
        gt=0,
        le=FACTOR,
        description="the change is scaled by alpha / rank; default: the rank, so the scale is 1",
    )
    conv: bool = Field(False, description="convolutions too, not only linear layers")

    @model_validator(mode="before")
    @classmethod
    def _alpha_is_the_rank(cls, value: Any) -> Any:
        """Expand `lora: 8`, which stands for a rank.

        The alpha is written out, so that a run folder does not depend on the default.
        """
        settings = value if isinstance(value, dict) else {"rank": value}
        return (
            {"alpha": settings["rank"], **settings}
            if isinstance(settings.get("rank"), int | float)
            else settings
        )


class TrainableSpec(Strict):
    """The trainable parameters."""

    select: str = Field(
        "all", description="see `concept-eraser list selections`, or re:<regular expression>"
    )
    batchnorm: Literal["frozen", "train"] = Field(
        "frozen",
        description=(
            "classifier, vae: keep the running statistics (default), or use and update the batch's"
        ),
    )

    lora: LoraSpec | None = Field(
        None,
        description=(
            "denoiser, text_encoder: train a LoRA of the selected linear layers instead of "
            "their weights"
        ),
    )
    saliency: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "train only this share of the selected weights: those with the largest "
            "|gradient| of the training loss on the forget set (SalUn: 0.5); of a LoRA the share "
            "of its up matrices"
        ),
    )
    project: float | None = Field(
        None,
        gt=0,
        le=1,
        description=(
            "train linear layers and convolutions only in directions that the inputs of the retain "
            "objective do not use: this share of their singular values' sum is left out, and all "
            "other parameters are held (PGU: 0.95)"
        ),
    )
    negate: float | None = Field(
        None,
        gt=0,
        le=PORTION,
        description=(
            "after training on the concept, reverse the change: W becomes W - this x "
            "(trained W - W) (task arithmetic)"
        ),
    )
    reinitialise: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "before training, reinitialise this share of the selected weights: those with the "
            "largest |gradient x weight| of the training loss on the forget set (Scissorhands: "
            "0.1 or 0.9)"
        ),
    )

    start_token: Literal["frozen"] | None = Field(
        None,
        description=(
            "denoiser with cross-attention: frozen passes no gradient through the keys and values "
            "of a prompt's start token, which all prompts share (concept ablation)"
        ),
    )

    @field_validator("lora", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        """Expand the short forms: `none` and `false` for no LoRA, `true` for the defaults."""
        return None if value is False or value == "none" else {} if value is True else value

    @field_validator("select")
    @classmethod
    def _known_selection(cls, value: str) -> str:
        from concept_eraser.recipes.selections import problem

        wrong = problem(value)
        if wrong:
            raise ValueError(wrong)
        return value
