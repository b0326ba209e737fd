"""Recipes from the configurations of LECO and of sliders (leco_files.py).

Each entry becomes a forget objective on latents that are sampled in training (`images: free`):

* `esd` where `positive` is `target`, and `unconditional` is `neutral`: both targets are
  neutral - g (target - neutral)
* `anchor` where the target is the prediction for one other prompt, such as `positive` for an
  enhancement with g = 1
* `slider`, a sum of predictions, for every other target
* a target that is the original's own prediction for `target` is retained by `distill`

Entries for one prompt become one objective, whose target is the mean of theirs by `weight`. Its
gradient is the mean of theirs, since

    sum_i w_i ||e - m_i||^2 = W ||e - m||^2 + constant,    W = sum_i w_i,   m = sum_i w_i m_i / W.

LECO trains one entry in each step, at random; here the objectives take turns (`concepts: rotate`).
The retain objective is in every step. Its `scale` gives its prompts the share of LECO's steps:

    scale = sum of their weights x (number of prompts / number of entries) / number of turns.

Differences: LECO's code applies `training_method` to the names of whole attention blocks, so that
`selfattn` and `xattn` select no layer there, and `noxattn` selects all. Here they select the layers
that their description says, as in rohitgandikota/sliders, trainscripts/textsliders/lora.py, lines
168-218. There the class `Attention` is in the place of LECO's `Transformer2DModel` (lines 15-18).
So the feed-forward layers and the projections around the attention are not trained. Both programs
have the same files. Here they mean LECO's layers, except for the methods that only sliders have.
losses/denoiser.py has the differences of x_t.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.recipes import leco_files, overrides
from concept_eraser.recipes.leco_files import LecoConfig, LecoEntry, LecoFile, LecoNetwork
from concept_eraser.utils.errors import UserError, mistakes_message, names_text, quote

SAMPLER_STEPS = 20  # of x_t without images (erasers/denoiser.py)
_SINGLE_FILES = (".ckpt", ".safetensors")
# families whose images have any size, and families without a UNet, which LECO does not know
_SIZED = ("sdxl", "sd3", "flux", "pixart", "sana", "zimage", "qwenimage", "flux2")
_TRANSFORMERS = ("sd3", "flux", "dit", "pixart", "sana", "zimage", "qwenimage", "flux2")

# of regular expressions for names of a UNet's tensors
_ANYWHERE = r"^(down_blocks|mid_block|up_blocks)\."
_INSIDE_ATTENTION = r"(?=.*\battentions\.)"
_WITHOUT_CROSS_ATTENTION = r"(?!.*\.attn2\.)"


@dataclass(frozen=True)
class LecoRecipe:
    """A recipe, and what of the file is done in another way or not at all.

    Attributes:
        content: The keys of the recipe.
        warnings: One sentence for each key or group of keys, with the reason.
        name: A name for the run.
    """

    content: dict[str, Any]
    warnings: tuple[str, ...]
    name: str


@dataclass
class _Draft:
    """A recipe in the making.

    changes: The user's overrides, which the recipe will get. mistakes: What cannot be done.
    """

    changes: Mapping[str, Any]
    content: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    @property
    def family(self) -> str | None:
        """The family of the model; None if its name does not tell."""
        from concept_eraser.recipes.defaults import family_of

        model = self.changes.get("model", self.content.get("model", "tiny-sd"))
        return family_of(model) if isinstance(model, str) else None

    def is_set(self, path: str) -> bool:
        """Whether an override sets a key, or the section that it is in."""
        place: Any = self.changes
        for name in path.split("."):
            if not isinstance(place, Mapping):
                return True
            if name not in place:
                return False
            place = place[name]
        return True


def load(path: str | Path, changes: Sequence[str] = ()) -> LecoRecipe:
    """Return the recipe of a file of LECO, of sliders or of sd-scripts' LECO.

    Args:
        path: A `prompts.yaml`, `config.yaml` or `prompts.toml`.
        changes: Overrides that the recipe will get (`key.path=value`). What they set is not
            refused. With a retain set the recipe has the default method.

    Returns:
        The recipe, without the overrides, and the warnings.

    Raises:
        UserError: The file is none of these, or asks for what cannot be done. All mistakes are
            reported at once.
    """
    settings: dict[str, Any] = {}
    for change in changes:
        overrides.apply(settings, change)
    return to_recipe(leco_files.read(Path(path)), settings)


def to_recipe(file: LecoFile, changes: Mapping[str, Any] | None = None) -> LecoRecipe:
    """Return the recipe of a file that was read.

    changes: The user's settings, as a mapping of a recipe. Raises UserError as `load`.
    """
    draft = _Draft(changes or {})
    config = file.config
    _model(draft, config, file.entries)
    _objectives(draft, file.entries)
    _network(draft, config.network if config else LecoNetwork(), file.entries)
    _training(draft, config, file.entries)
    _others(draft, config)
    if draft.mistakes:
        raise UserError(mistakes_message(draft.mistakes, str(file.path)))
    return LecoRecipe(draft.content, tuple(draft.warnings), _name(file))


def _name(file: LecoFile) -> str:
    saving = file.config.save if file.config else None
    name = saving.name if saving else file.path.stem
    return re.sub(r"[^\w-]+", "_", name)[:80].strip("_") or "leco"


def _model(draft: _Draft, config: LecoConfig | None, entries: Sequence[LecoEntry]) -> None:
    model = config.pretrained_model if config else None
    if model is None:
        if not draft.is_set("model"):
            draft.warnings.append("the file names no model: the bundled one is used; give --model")
    elif not draft.is_set("model"):
        if model.name_or_path.lower().endswith(_SINGLE_FILES):
            draft.mistakes.append(
                f"pretrained_model.name_or_path: {quote(model.name_or_path)} is a single file, "
                "which needs a folder of its architecture; give --model FILE --base FOLDER"
            )
        draft.content["model"] = model.name_or_path
    if model and (flags := [key for key in ("v2", "v_pred") if getattr(model, key)]):
        draft.warnings.append(
            f"pretrained_model.{' and '.join(flags)}: not used, since the model's own files say it"
        )
    if model and model.clip_skip is not None:
        draft.warnings.append(
            "pretrained_model.clip_skip: not used (nor by LECO's code); the pipeline's own layer "
            "of the text encoder is"
        )
    _size(draft, entries)


def _size(draft: _Draft, entries: Sequence[LecoEntry]) -> None:
    """Map the resolution, where the family has images of any size."""
    if any(entry.dynamic_resolution for entry in entries):
        draft.warnings.append("dynamic_resolution: not done, all latents have one size")
    if any(entry.dynamic_crops for entry in entries):
        draft.warnings.append("dynamic_crops: not done, SDXL is told that images are not cropped")
    if not any("resolution" in entry.model_fields_set for entry in entries):
        return
    sizes = {str(entry.resolution): entry.resolution for entry in entries}
    size = next(iter(sizes.values()))
    if draft.is_set("model_options.size"):
        return
    is_sized = draft.family in _SIZED
    if is_sized and len(sizes) == 1 and isinstance(size, int):
        draft.content["model_options"] = {"size": size}
    elif is_sized:
        draft.warnings.append(
            f"resolution: {names_text(sizes, 8)}: not used, since all latents are squares of one "
            "size, that of the pipeline; model_options.size=N gives another"
        )
    else:
        draft.warnings.append(
            f"resolution: {names_text(sizes, 8)}: not used, the latents have the model's own size"
        )


def _objectives(draft: _Draft, entries: Sequence[LecoEntry]) -> None:
    """Add the objectives, one for each prompt that is trained."""
    trained = _of_one_direction(draft, entries)
    if not trained:
        return
    groups: dict[str, list[LecoEntry]] = {}
    for entry in trained:
        groups.setdefault(leco_files.plain(entry.target), []).append(entry)
    targets = {prompt: mean_mixture(group) for prompt, group in groups.items()}
    retained = [prompt for prompt, target in targets.items() if set(target) == {prompt}]
    forgotten = [prompt for prompt in groups if prompt not in retained]
    if len(trained) > len(groups):
        draft.warnings.append(
            f"{len(trained)} entries train {len(groups)} different prompts: entries for one "
            "prompt are one objective, whose target is the mean of theirs"
        )
    if not forgotten:
        draft.mistakes.append(
            "every entry trains its prompt towards the original's own prediction for it, so "
            "nothing is erased"
        )
        return
    objectives = [objective(prompt, targets[prompt]) for prompt in forgotten]
    for prompt, one in zip(forgotten, objectives, strict=True):
        scale = sum(entry.weight for entry in groups[prompt]) * len(groups) / len(trained)
        if abs(scale - 1) > 1e-9:
            one["scale"] = scale
    draft.content["forget"] = objectives if len(objectives) > 1 else objectives[0]
    if len(objectives) > 1:
        draft.content["concepts"] = "rotate"
    turns = 1 if draft.changes.get("concepts") == "together" else len(objectives)
    weights = [sum(entry.weight for entry in groups[prompt]) for prompt in retained]
    if max(weights, default=0.0) > min(weights, default=0.0):
        draft.warnings.append(
            "weight: the prompts to preserve are one objective, so each has their mean weight"
        )
    _retain(draft, retained, scale=sum(weights) * len(groups) / len(trained) / turns)


def _retain(draft: _Draft, prompts: Sequence[str], scale: float) -> None:
    """Add the retain objective and the method."""
    if draft.is_set("retain"):
        if prompts:
            draft.mistakes.append(
                f"the file preserves prompts ({names_text(map(quote, prompts), 4)}), and a retain "
                "set is given too; leave out one of the two"
            )
        draft.content["retain"] = {"loss": "distill"}
    elif prompts:
        draft.content["retain"] = {
            "prompts": _prompts(prompts),
            "loss": "distill",
            "images": "free",
            "n": len(prompts),
        }
        if abs(scale - 1) > 1e-9:
            draft.content["retain"]["scale"] = scale
        draft.content["method"] = {"name": "weighted"}
    else:
        draft.content["method"] = {"name": "weighted", "retain": 0.0}


def _of_one_direction(draft: _Draft, entries: Sequence[LecoEntry]) -> list[LecoEntry]:
    """Return the entries that train a positive strength of the LoRA.

    Those of negative strength are left out if they are the mirror images of others.
    """
    forward = [entry for entry in entries if entry.multiplier > 0]
    mirrored = {_mirror(entry) for entry in forward}
    others = [entry for entry in entries if entry.multiplier < 0]
    if any(_direction(entry) not in mirrored for entry in others):
        draft.mistakes.append(
            "multiplier: a negative one trains the LoRA at a negative strength, which our training "
            "does not do; write the entry for the positive strength (erase for enhance)"
        )
    elif others:
        draft.warnings.append(
            f"multiplier: {len(others)} entries train the opposite direction at negative strength "
            "and are left out; our LoRA is trained at strength 1 only, so measure it at -1"
        )
    return forward


def _direction(entry: LecoEntry, sign: float = 1.0) -> tuple[Any, ...]:
    """Return what identifies the training of an entry: prompt, neutral prompt, step, strength."""
    step = dict(entry.mixture)
    step[entry.start] -= 1.0
    factors = {text: sign * factor for text, factor in step.items() if factor}
    target = leco_files.plain(entry.target)
    return target, entry.start, frozenset(factors.items()), entry.multiplier


def _mirror(entry: LecoEntry) -> tuple[Any, ...]:
    *rest, multiplier = _direction(entry, -1.0)
    return (*rest, -multiplier)


def mean_mixture(entries: Sequence[LecoEntry]) -> dict[str, float]:
    """Return the mean of the entries' targets by weight, without prompts of factor 0."""
    total = sum(entry.weight for entry in entries)
    mean: dict[str, float] = {}
    for entry in entries:
        for text, factor in entry.mixture.items():
            mean[text] = mean.get(text, 0.0) + factor * (entry.weight / total)
    largest = max(abs(factor) for factor in mean.values())
    return {text: factor for text, factor in mean.items() if abs(factor) > 1e-9 * largest}


def objective(prompt: str, target: Mapping[str, float]) -> dict[str, Any]:
    """Return the objective that trains a prompt towards a sum of predictions.

    Args:
        prompt: The prompt.
        target: The factors of the original's predictions, by their prompts. Their sum is 1.

    Returns:
        The keys of the objective, with the loss `esd`, `anchor` or `slider`.
    """
    keys: dict[str, Any] = {"prompts": _prompts([prompt])}
    others = [text for text in target if text != prompt]
    eta = -target.get(prompt, 0.0)
    if len(others) == 1 and eta >= 0:  # the factor of the other one is 1 + eta
        other = others[0]
        if other == "":
            keys |= {"loss": "esd", "eta": eta}
        elif eta == 0:
            keys |= {"loss": "anchor", "anchor": _literal(other)}
        else:
            keys |= {"loss": "esd", "eta": eta, "neutral": "anchor", "anchor": _literal(other)}
    else:
        keys |= {
            "loss": "slider",
            "mixture": {_literal(text): factor for text, factor in target.items()},
        }
    return {**keys, "images": "free", "n": 1}


def _prompts(prompts: Sequence[str]) -> list[str] | dict[str, Any]:
    """Return the set of some prompts. Only a mapping can hold the empty one."""
    if all(prompts):
        return list(prompts)
    return {"prompts": [prompt or {"text": ""} for prompt in prompts]}


def _literal(text: str) -> str:
    """Return a text as a template that gives it."""
    return text.replace("{", "{{").replace("}", "}}")


def _network(draft: _Draft, network: LecoNetwork, entries: Sequence[LecoEntry]) -> None:
    """Add the LoRA and the layers that it is on."""
    if draft.is_set("trainable.lora") and draft.is_set("trainable.select"):
        return
    if network.training_method == "noxattn-hspace-last" and network.type == "lierla":
        draft.mistakes.append(
            "network.training_method: noxattn-hspace-last is a convolution of a resnet, which "
            "network.type: lierla does not train; write type: c3lier"
        )
    strengths = {abs(entry.multiplier) for entry in entries}
    if len(strengths) > 1:
        draft.mistakes.append(
            f"multiplier: one LoRA is trained at one strength, found {names_text(strengths)}; "
            "write the same number everywhere"
        )
    strength = max(strengths, default=1.0)
    if strength != 1:
        draft.warnings.append(
            f"multiplier: {strength:g} goes into alpha, so strength 1 of this LoRA is strength "
            f"{strength:g} of the one that the other program writes"
        )
    method, family = network.training_method, draft.family
    select = selection(network.type, method)
    if family in _TRANSFORMERS:
        select = "blocks" if method == "full" else select
        if select.startswith("re:") and not draft.is_set("trainable.select"):
            draft.mistakes.append(
                f"network.training_method: {method} is for a UNet, found the family {family}; give "
                "--select, e.g. blocks or self_attention"
            )
    alpha = network.alpha or float(network.rank)
    draft.content["trainable"] = {
        "select": select,
        "lora": {"rank": network.rank, "alpha": alpha * strength, "conv": True},
    }


def selection(network: str, method: str) -> str:
    """Return the selection for LECO's `network.type` and `training_method`.

    `lierla` is a LoRA on the layers inside of attention blocks, `c3lier` on all layers of blocks.
    Sliders have the attention itself instead of its block, see the module's docstring.
    """
    resnets = r"resnets\.|" if network == "c3lier" else ""
    named = {
        "selfattn": "self_attention",
        "xattn": "cross_attention",
        "xattn-strict": r"re:\.attn2\.to_[qkv]\.",
        "noxattn-hspace": rf"re:^mid_block\.({resnets}.*\.attn1\.)",
        "noxattn-hspace-last": r"re:^mid_block\.resnets\.1\.conv2\.",
    }
    if method in named:
        return named[method]
    if method == "full" and network == "c3lier":
        return "blocks"
    layers = _INSIDE_ATTENTION if network == "lierla" else ""
    return f"re:{_ANYWHERE}{layers}{'' if method == 'full' else _WITHOUT_CROSS_ATTENTION}"


def _training(draft: _Draft, config: LecoConfig | None, entries: Sequence[LecoEntry]) -> None:
    train = config.train if config else leco_files.LecoTraining()
    if config is None:
        own = {
            "trainable.lora": "rank 4, alpha 1",
            "training.steps": f"{train.iterations} steps",
            "training.lr": f"learning rate {train.lr:g}",
            "training.optimizer": "AdamW",
        }
        if used := [text for path, text in own.items() if not draft.is_set(path)]:
            draft.warnings.append(
                f"the file has no training settings, so LECO's own are used: {', '.join(used)}"
            )
    sizes = sorted({entry.batch_size for entry in entries})
    if len(sizes) > 1:
        draft.warnings.append(
            f"batch_size: the largest of {names_text(sizes, 8)} is used for all entries"
        )
    training: dict[str, Any] = {
        "steps": train.iterations,
        "batch_size": sizes[-1],
        "lr": train.lr,
        "precision": {"32": "fp32"}.get(train.precision[-2:], "bf16"),
    }
    draft.content["training"] = training
    if train.precision in ("fp16", "float16"):
        draft.warnings.append("train.precision: fp16 is not offered, bf16 is used")
    _optimizer(draft, train, training)
    _schedule(draft, train, training)
    if train.batch_size is not None:
        draft.warnings.append("train.batch_size: not used (nor by LECO's code); each entry has one")
    if train.noise_scheduler != "ddim":
        draft.warnings.append(
            f"train.noise_scheduler: {train.noise_scheduler}: not used, the latents are sampled "
            "by DDIM, or by Euler's method for flows"
        )
    if "max_denoising_steps" in train.model_fields_set:
        draft.warnings.append(
            f"train.max_denoising_steps: {train.max_denoising_steps}: not used, the latents are "
            f"sampled in {SAMPLER_STEPS} steps"
        )


def _optimizer(draft: _Draft, train: leco_files.LecoTraining, training: dict[str, Any]) -> None:
    """Map the optimizer. `adam8bit` is `adamw8bit` without weight decay, which is the same."""
    known: dict[str, dict[str, Any]] = {
        "adam": {"optimizer": "adam"},
        "adamw": {"optimizer": "adamw", "weight_decay": 0.01},  # torch's own weight decay
        "adam8bit": {"optimizer": "adamw8bit"},
    }
    name = train.optimizer.lower()
    if draft.is_set("training.optimizer"):
        if train.optimizer_args.strip():
            draft.warnings.append("train.optimizer_args: not used with another optimizer")
        return
    if name not in known:
        draft.mistakes.append(
            f"train.optimizer: {quote(train.optimizer)} is not offered; give training.optimizer "
            f"and training.lr of your own, e.g. training.optimizer=adamw --lr 1e-4 (known here: "
            f"{', '.join(known)})"
        )
        return
    training |= known[name]
    for word in train.optimizer_args.split():
        key, _, text = word.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if value is None or key not in ("betas", "weight_decay"):
            draft.mistakes.append(
                f"train.optimizer_args: expected betas=(A,B) or weight_decay=A without spaces, "
                f"found {quote(word)}"
            )
        elif key == "weight_decay" and name == "adam8bit" and value:
            draft.mistakes.append(
                "train.optimizer_args: weight_decay of adam8bit is not offered; write optimizer: "
                "adam or leave it out"
            )
        else:
            training[key] = list(value) if isinstance(value, tuple) else value


def _schedule(draft: _Draft, train: leco_files.LecoTraining, training: dict[str, Any]) -> None:
    """Map the schedule of the learning rate (p1atdev/LECO, train_util.py, get_lr_scheduler)."""
    name, hundredth = train.lr_scheduler, train.iterations // 100
    if name == "constant" or draft.is_set("training.decay"):
        return
    if name == "cosine":
        training["decay"] = "cosine"
        draft.warnings.append(
            "train.lr_scheduler: cosine decreases to 0 here, and to a hundredth of lr in LECO"
        )
    elif name == "linear":
        training["warmup"] = hundredth
        draft.warnings.append(
            f"train.lr_scheduler: linear is a warm-up of {hundredth} steps here, from near 0; "
            "LECO means one from half of lr, but its code gives torch a name that it refuses"
        )
    elif name == "step" and hundredth:
        milestones = list(range(hundredth, train.iterations, hundredth))
        training |= {"decay": "step", "milestones": milestones, "decay_factor": 0.999}
    else:
        draft.mistakes.append(
            f"train.lr_scheduler: {quote(name)} cannot be expressed here; give training.decay, "
            "e.g. training.decay=cosine (known here: constant, cosine, linear, step)"
        )


def _others(draft: _Draft, config: LecoConfig | None) -> None:
    if config is None:
        return
    saving = config.save
    if saving and "path" in saving.model_fields_set:
        draft.warnings.append("save.path: not used, the run folder is chosen by --output")
    if saving and "per_steps" in saving.model_fields_set:
        draft.content["training"]["save_every"] = saving.per_steps
        draft.warnings.append(
            f"save.per_steps: every {saving.per_steps} steps a state for --resume is written, but "
            "no LoRA"
        )
    if saving and "precision" in saving.model_fields_set and saving.precision[-2:] != "32":
        dtype = "fp16" if saving.precision in ("fp16", "float16") else "bf16"
        draft.warnings.append(
            f"save.precision: the run's LoRA has fp32; export it with --to kohya --dtype {dtype}"
        )
    if config.logging.use_wandb:
        draft.content["training"]["tracker"] = ["wandb"]
    if config.logging.verbose:
        draft.warnings.append("logging.verbose: not used, the numbers are in log.jsonl")
    if config.other.use_xformers:
        draft.warnings.append("other.use_xformers: not used, PyTorch's own fused attention is")
