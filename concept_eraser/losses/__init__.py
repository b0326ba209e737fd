"""What forget and retain mean: the losses of an objective, one module for each kind of target."""

from concept_eraser.losses.base import Loss, LossSettings, Teacher, find

__all__ = ["Loss", "LossSettings", "Teacher", "find"]
