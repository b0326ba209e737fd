"""Classifiers, CLIP models and VAEs: sides that are labelled examples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser import limits, registry
from concept_eraser.data import labelled
from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers import classifier, vae
from concept_eraser.errors import UserError, shown
from concept_eraser.models.base import Loaded
from concept_eraser.models.clip import Clip
from concept_eraser.models.module import open_folder
from concept_eraser.sections import Histogram, Side
from concept_eraser.storage.readers import read_text
from concept_eraser.targets.base import Request
from concept_eraser.training.parameters import select


def build(request: Request) -> classifier.Classifier | vae.Vae:
    """The eraser of a recipe with target classifier, clip or vae. Raises UserError where model and data do not fit."""
    recipe = request.recipe
    chosen = rows(request)
    module = _module(request, chosen["forget"][0])
    names = select([name for name, _ in module.named_parameters()], recipe.trainable.select)
    norm, size = recipe.trainable.batchnorm, recipe.training.batch_size
    if recipe.target == "vae":
        return vae.Vae(module, _vae_sides(request, chosen), names, batchnorm=norm, batch_size=size)
    sides = {}
    for name, (data, where) in chosen.items():
        side: Side = getattr(recipe, name)
        anchor = _anchor(side, data) if isinstance(side.anchor, str) else None
        sides[name] = classifier.Side(
            data, where, side.loss, side.scale, anchor, side.teacher, side.l1, side.distill, side.beta
        )
    return classifier.Classifier(module, sides, names, batchnorm=norm, batch_size=size)


def _anchor(side: Side, data: Labelled) -> int:
    """The class to say instead, by name; by number also one of which these data have no example."""
    name = str(side.anchor)
    return int(name) if name.isdigit() and name not in data.names else data.class_index(name)


def rows(request: Request) -> dict[str, tuple[Labelled, Tensor]]:
    """For each player the data and the positions in it, in the players' order; forget and retain apart."""
    recipe, found = request.recipe, {}
    forget = _open(request, "forget")
    found["forget"] = (forget, choose_side(recipe.forgotten[0], forget, recipe.generation.seed))
    for name in ("retain", "replace"):
        side: Side | None = getattr(recipe, name)
        if side is None:
            continue
        if side.data == "rest":
            found[name] = (forget, labelled.rest_of(forget, found["forget"][1]))
            continue
        data = _open(request, name)
        found[name] = (data, choose_side(side, data, recipe.generation.seed))
        if name == "retain" and labelled.same_examples(data, forget):
            labelled.require_apart(found["forget"][1], found[name][1], data.about)
    if recipe.target != "vae":
        found = _one_meaning(found, always=recipe.target == "clip")
    return {name: found[name] for name in recipe.players if name in found}


def _one_meaning(found: dict[str, tuple[Labelled, Tensor]], *, always: bool) -> dict[str, tuple[Labelled, Tensor]]:
    """Labels of all sides as positions in the longest list of names, so that an output means one class. Lists without a
    name in common are left alone, unless `always`: they may be other words for the same outputs."""
    names = max((data.names for data, _ in found.values()), key=len)
    return {k: (data.aligned(names) if always or set(data.names) & set(names) else data, rows) for k, (data, rows) in found.items()}  # fmt: skip


def _open(request: Request, name: str, split: str = "train") -> Labelled:
    side: Side = getattr(request.recipe, name)
    if name in request.objects:
        return labelled.open_data(request.objects[name], split)
    return open_named(side.data, side.options, split)


def open_named(source: str | None, options: dict[str, Any], split: str) -> Labelled:
    """A data set of datasets/ by name, or one on disk (a folder of images takes the option `size`)."""
    if source in registry.names("dataset"):
        return registry.build("dataset", str(source), options).load(split)
    if set(options) - {"size"}:
        raise UserError(f"data {source!r} is no named set; a folder of images takes the option size only, found {', '.join(options)}")  # fmt: skip
    try:
        return labelled.open_data(source, split, limits.whole(options.get("size", 64), 1, limits.SIDE))
    except ValueError as error:
        raise UserError(f"{error}. Named sets: {', '.join(registry.names('dataset'))}") from None


def choose_side(side: Side, data: Labelled, seed: int) -> Tensor:
    """The positions in the data that a side means; see `labelled.choose`."""
    listed = side.indices
    if isinstance(listed, str):
        listed = read_indices(Path(listed))
    return labelled.choose(data, classes=side.classes, share=side.share, indices=listed, seed=seed)


def asked(side: Side) -> tuple[list[str], int]:
    """The classes that a side names, and the last position (-1: it gives none)."""
    listed = read_indices(Path(side.indices)) if isinstance(side.indices, str) else side.indices or []
    return [str(name) for name in side.classes or []], max(listed, default=-1)


def read_indices(path: Path) -> list[int]:
    """Positions from a text file, one a line. Raises UserError, naming the line that is none."""
    if not os.path.exists(path):
        raise UserError(f"no such file of indices: {path}; check the path")
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        text = line.split("#")[0].strip()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= limits.POSITION):
            raise UserError(
                f"{path}, line {number}: expected a position (an integer from 0 to {limits.POSITION:,}), found {shown(text, 40)}"
            )
        if text:
            found.append(int(text))
    if not found:
        raise UserError(f"{path} lists no position")
    return found


def _module(request: Request, data: Labelled) -> nn.Module:
    model, target = request.model, request.recipe.target
    if target == "clip":
        if not isinstance(model, Clip):
            raise UserError(f"{model.source} is no CLIP model")
        return model.zero_shot(data.names, request.recipe.templates)
    if target not in model.parts:
        raise UserError(f"{model.source} has no part {target!r}; it has {', '.join(model.parts)}")
    return model.parts[target]


def _vae_sides(request: Request, chosen: dict[str, tuple[Labelled, Tensor]]) -> dict[str, vae.Side]:
    recipe, sides = request.recipe, {}
    for name, (data, where) in chosen.items():
        side: Side = getattr(recipe, name)
        sides[name] = vae.Side(data, where, side.loss, side.scale, side.kl, side.teacher)
    if recipe.histogram is not None:
        data, where = chosen.get("retain", chosen["forget"])
        shows = judged(request, recipe.histogram, data)
        sides["histogram"] = vae.Side(data, where, "histogram", shows=shows, alpha=recipe.histogram.alpha)
    return {name: sides[name] for name in recipe.players}


def judged(request: Request, histogram: Histogram, data: Labelled) -> Callable[[Tensor], Tensor]:
    """A classifier's probability that pictures show a class of the data, differentiable."""
    net = request.objects.get("judge")
    if net is None:
        net = open_folder(Path(histogram.judge), "classifier").module
    net = next(iter(net.parts.values())) if isinstance(net, Loaded) else net
    if not isinstance(net, nn.Module):
        raise UserError(f"a judge is a classifier (a torch module with logits), found a {type(net).__name__}")
    net = net.to(request.model.device).eval().requires_grad_(False)
    number = data.class_index(next(iter(histogram.concept.values())))
    shape = data.inputs([0]).shape[1:]
    with torch.no_grad():
        try:
            found = net(data.inputs([0]).to(request.model.device))
        except RuntimeError as error:
            raise UserError(f"the judge cannot take an example of {data.about} ({str(error).splitlines()[0][:150]})") from error  # fmt: skip
    if found.ndim != 2 or found.shape[1] != len(data.names):
        raise UserError(f"the judge must return logits of the {len(data.names)} classes of {data.about}, found {list(found.shape)}")  # fmt: skip
    return lambda pictures: net(pictures.reshape(-1, *shape)).softmax(1)[:, number]
