"""SPM's gate: a LoRA that is added while sampling, with a strength for each prompt.

It is the facilitated transport of SPM (Lyu et al., arXiv 2312.16145). The paper's equation was not
read here. The definition is that of the authors' code, Con6924/SPM at commit 3dd762e:
infer_spm.py, lines 28-51 (the score) and 109-143 (the strength), and src/models/spm.py, lines 57-76
(the layer). evaluate_task.py has the same.

S(p) are the states of the text encoder for the prompt p, with those of start, end and padding, as
one vector. T(p) are its tokens without special ones. c_1, c_2, ... are the concept's texts. The
score of p is

    m = max over j of max(cos(S(p), S(c_j)), |T(p) and T(c_j)| / |T(c_j)|)

The code multiplies all tensors of the LoRA's file by m, down and up alike. So the layer is

    W x + m^2 (alpha / rank) up(down(x))

for both predictions of classifier-free guidance. There is no threshold. The first term of m is
large for every prompt, since start and padding have nearly the same states in all of them.

* spm-gate         both terms: `clipcos_tokenuni`, the code's default.
* spm-gate-clip    the first term alone, its `clipcos`.
* spm-gate-tokens  the second term alone, its `tokenuni`. A prompt without a token of the concept
  gives exactly the original's image.

With m = 1 the image is exactly that of the run, since the sum W + (alpha / rank) up down then takes
the place of W.

A safeguard's text is TEXTS@PLACE, such as `star@runs/star`. TEXTS are c_1, c_2, ... with commas
between them, as in the header of the authors' files, where they are the concept's names. They are
not taken from the recipe: its prompts are whole sentences, whose tokens other prompts share.
PLACE is the folder of a run on this model that trained a LoRA of the denoiser. It can also be a
LoRA file, or a folder with one, for any model that it fits.

Differences from the code: one LoRA (code: the sum of the tensors of several, each times its m); m
is kept between 0 and 1, which a cosine can leave; a factor on m (`facilitate_factor`, 1 in its
commands) is left out. SDXL, for which the code has a training only, is not supported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from concept_eraser.models import lora_files, run_base
from concept_eraser.models.lora import Factors
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.utils.errors import UserError, names_text, quote

# the LoRAs that were read for a model, by the safeguard's text
_READ: WeakKeyDictionary[Any, dict[str, Factors]] = WeakKeyDictionary()


def split(text: str) -> tuple[list[str], Path]:
    """Return the concept's texts and the place of the LoRA in TEXTS@PLACE.

    Raises UserError for another form.
    """
    texts, _, place = text.partition("@")
    concepts = [part.strip() for part in texts.split(",") if part.strip()]
    if not concepts or not place.strip():
        raise UserError(
            f"the gate needs the concept and a LoRA, found {quote(text)}; write CONCEPT@RUN, e.g. "
            "'spm-gate:star@runs/star', with commas between several texts of the concept"
        )
    return concepts, Path(place.strip())


def factors_of(model: Any, text: str) -> Factors:
    """Return the LoRA of a safeguard. It is read once for each model.

    Raises UserError if there is no LoRA of the denoiser that fits the model, or if it belongs to a
    run on a model with other weights.
    """
    read = _READ.setdefault(model, {})
    if text not in read:
        concepts, place = split(text)
        for concept, tokens in zip(concepts, _tokens(model, concepts), strict=True):
            if not tokens:
                raise UserError(f"the concept's text {quote(concept)} has no tokens; write a name")
        read[text] = _factors_at(model, place)
    return read[text]


def digest(model: Any, text: str) -> str:
    """Return a hash of the LoRA of a safeguard, for the cache of images."""
    factors = factors_of(model, text)
    result = hashlib.sha256(f"{factors.alpha / factors.rank}".encode())
    for name, pair in sorted(factors.layers.items()):
        result.update(name.encode())
        for matrix in pair:
            result.update(matrix.contiguous().flatten().view(torch.uint8).numpy().data)
    return result.hexdigest()[:24]


def _factors_at(model: Any, place: Path) -> Factors:
    file = _file_at(model, place)
    require_intact(file)
    header, _ = read_tensor_header(file)
    tensors = read_tensors(file)
    parts = lora_files.read(model, tensors, header, str(file))
    if [one.part for one in parts] != ["denoiser"]:
        raise UserError(
            f"the gate scales a LoRA of the denoiser alone, and {file} has one of "
            f"{names_text(sorted(one.part for one in parts)) or 'no layer'}"
        )
    return parts[0]


def _file_at(model: Any, place: Path) -> Path:
    """Return the LoRA file of a run on this model, or the one that a path names.

    Raises UserError if there is none, or if the run was on a model with other weights.
    """
    try:
        if place.is_file():
            return place
        if (place / lora_files.FILE).is_file():
            return place / lora_files.FILE
        is_folder = place.is_dir()
    except OSError as error:  # a name that the system does not allow
        raise UserError(
            f"cannot read the LoRA {quote(str(place))}: {str(error.strerror).lower()}; check the "
            "name"
        ) from None
    if not is_folder:
        raise UserError(f"there is no run or LoRA {quote(str(place))}; check the path")
    folder = place / lora_files.FOLDER
    if not (folder / lora_files.FILE).is_file():
        raise UserError(
            f"{place} holds no LoRA; give a run that trained one (trainable.lora), or a LoRA file"
        )
    record = run_base.read(place)
    if record is None or not run_base.is_lora_alone(place):
        raise UserError(
            f"{place} holds more than its LoRA, so the gate may give another image than the run; "
            f"give the LoRA itself if it is the whole change: {folder}"
        )
    if differences := record.differences(model):
        raise UserError(
            f"{place} was trained on {quote(record.model)}, and {model.source} has other weights "
            f"in {names_text(differences)}; give that model, which is the one without the "
            f"erasure, or put the LoRA itself on this one: {folder}"
        )
    return folder / lora_files.FILE


def _tokens(model: Any, texts: Sequence[str]) -> list[set[int]]:
    """Return the tokens of each text without special ones, as far as the encoder reads them."""
    special = set(model.words.tokenizer.all_special_ids)
    return [set(ids) - special for ids in model.tokenize(texts).tensors["ids"].tolist()]


def similarity(states: Tensor, concepts: Tensor) -> Tensor:
    """Return the largest cosine of each prompt with a text of the concept [n].

    Args:
        states: The states of the prompts [n, tokens, width].
        concepts: The states of the concept's texts [texts, tokens, width].
    """
    cosines = F.cosine_similarity(states.flatten(1)[:, None], concepts.flatten(1)[None], dim=-1)
    return cosines.amax(1)


def token_share(prompts: Sequence[set[int]], concepts: Sequence[set[int]]) -> Tensor:
    """Return the largest share of a concept's tokens that each prompt has [n].

    Args:
        prompts: The tokens of each prompt.
        concepts: The tokens of each text of the concept, at least one in each.
    """
    return torch.tensor([max(len(p & c) / len(c) for c in concepts) for p in prompts])


def scores(
    model: Any, concepts: Sequence[str], prompts: Sequence[str], *, clip: bool, tokens: bool
) -> Tensor:
    """Return m of each prompt, from 0 to 1, on the model's device [n].

    Args:
        model: A model with one CLIP text encoder.
        concepts: The concept's texts.
        prompts: The prompts.
        clip: Whether m has the cosine of the states.
        tokens: Whether m has the share of the tokens.
    """
    result = torch.zeros(len(prompts), device=model.device)
    if clip:
        both = model.encode([*prompts, *concepts]).tensors["states"].float()
        result = torch.maximum(result, similarity(both[: len(prompts)], both[len(prompts) :]))
    if tokens:
        shares = token_share(_tokens(model, prompts), _tokens(model, concepts))
        result = torch.maximum(result, shares.to(result))
    return result.clamp(0, 1)


@contextmanager
def gated(
    model: Any, text: str, prompts: Any, *, clip: bool = True, tokens: bool = True
) -> Iterator[None]:
    """Sample images of these prompts under SPM's gate inside the context.

    Raises UserError if the prompts are states instead of texts.
    """
    if not isinstance(prompts, Sequence):
        raise UserError("the safeguard 'spm-gate' reads the words of a prompt; sample from texts")
    factors, (concepts, _) = factors_of(model, text), split(text)
    with torch.no_grad():
        strengths = scores(model, concepts, prompts, clip=clip, tokens=tokens).square()
    handles = []
    try:
        for name in factors.layers if strengths.any() else ():
            layer = model.denoiser.get_submodule(name)
            # a LoRA in training holds the layer, and adds to the layer's output with the gate
            layer = getattr(layer, "base_layer", layer)
            hook = _layer_hook(factors, name, layer.weight, strengths)
            handles.append(layer.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_hook(
    factors: Factors, name: str, weight: Tensor, strengths: Tensor
) -> Callable[..., Tensor]:
    """Return the hook that adds a LoRA to a layer's output, with a strength for each prompt.

    If a strength is 1, it holds the layer's weight with the whole change.

    Args:
        factors: The LoRA.
        name: The layer's name in it.
        weight: The layer's weight.
        strengths: m^2 of each prompt [n].
    """
    down, up = (matrix.to(strengths.device) for matrix in factors.layers[name])
    down = down.reshape(len(down), *weight.shape[1:])
    scaled_up = up.reshape(len(up), len(down), *[1] * (weight.dim() - 2))
    scaled_up = scaled_up * (factors.alpha / factors.rank)
    # once, and not in each step: on a GPU the CPU waits for the answer
    some_whole, some_less = bool((strengths == 1).any()), bool((strengths < 1).any())
    whole_weight = weight
    if some_whole:  # the same sum as in the run, bit for bit, which autocast would round
        with torch.autocast(factors.layers[name][0].device.type, enabled=False):
            whole_weight = weight + factors.change(name).to(weight)

    def add(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        x = inputs[0]
        n_times, rest = divmod(len(x), len(strengths))
        if rest:
            raise UserError(
                f"the gate cannot tell the prompts of {len(x)} rows of the layer {name} apart; "
                f"{len(strengths)} images are sampled"
            )
        rows = strengths.repeat(n_times)
        is_whole = rows == 1
        if some_less:
            between = _apply(layer, x, down.to(x), None)
            added = (
                F.conv2d(between, scaled_up.to(between))
                if isinstance(layer, nn.Conv2d)
                else F.linear(between, scaled_up.to(between))
            )
            weights = torch.where(is_whole, 0.0, rows).view(-1, *[1] * (added.dim() - 1))
            output = output + (weights * added).to(output.dtype)
        if some_whole:
            output = output.clone()
            output[is_whole] = _apply(layer, x[is_whole], whole_weight, layer.bias)
        return output

    return add


def _apply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer or a convolution with another weight."""
    if isinstance(layer, nn.Conv2d):
        result: Tensor = layer._conv_forward(x, weight, bias)
        return result
    return F.linear(x, weight, bias)
