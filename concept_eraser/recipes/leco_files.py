"""Readers of the configurations of LECO and of sliders: prompts and training settings.

Three programs have these files. What they mean was read in their code:

* `prompts.yaml`, a list of entries, and `config.yaml`, which names it: p1atdev/LECO a93cb46,
  prompt_util.py, lines 41-69, and config_util.py, lines 14-78. rohitgandikota/sliders a465294 has
  the same keys (trainscripts/textsliders/) and three more training methods
* `prompts.toml` with `[[prompts]]`, the same entries with `multiplier` and `weight`, or with
  `[[targets]]` of sliders: kohya-ss/sd-scripts 063ef10, library/leco_train_util.py, lines 83-321.
  An earlier commit (4ea6032, docs/train_leco.md) has the second form as YAML. Both are read

An entry trains the prediction for `target` towards

    neutral -+ guidance_scale (positive - unconditional),     - erases, + enhances

with the original model's predictions for these prompts. A slider's target stands for such entries
in both directions: towards `positive` at the LoRA's strength `multiplier`, towards `negative` at
-`multiplier`.

A file may come from a stranger, so the files that it names lie in its folder, or in the working
folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from concept_eraser.recipes import error_messages
from concept_eraser.recipes.strict import Strict
from concept_eraser.storage.readers import read_text, read_toml, read_yaml
from concept_eraser.utils.errors import UserError, mistakes_message, quote, unknown_message
from concept_eraser.utils.limits import (
    BATCH,
    CONCEPTS,
    FACTOR,
    LEARNING_RATE,
    MODEL_OPTION,
    RANK,
    SAMPLER_STEPS,
    TRAINING_STEPS,
)

Factor = Annotated[float, Field(ge=-FACTOR, le=FACTOR)]
Side = Annotated[int, Field(ge=1, le=MODEL_OPTION)]
Resolution = Side | Annotated[list[Side], Field(min_length=2, max_length=2)]
LecoPrecision = Literal["fp32", "fp16", "bf16", "float32", "float16", "bfloat16"]
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class LecoSettings(Strict):
    """The keys that entries and targets of sliders share."""

    guidance_scale: Factor = 1.0
    resolution: Resolution = 512
    dynamic_resolution: bool = False
    batch_size: Annotated[int, Field(ge=1, le=BATCH)] = 1
    dynamic_crops: bool = False
    multiplier: Factor = 1.0
    weight: Annotated[float, Field(gt=0, le=FACTOR)] = 1.0

    @field_validator("multiplier")
    @classmethod
    def _some_strength(cls, value: float) -> float:
        if value == 0:
            raise ValueError("at strength 0 a LoRA changes nothing; give another number")
        return value


class LecoEntry(LecoSettings):
    """One entry of LECO's prompts: four prompts and how they make a target.

    A prompt that is not given is LECO's own default: `positive` is `target`, `unconditional` the
    empty prompt, and `neutral` is `unconditional`.
    """

    target: str
    positive: str | None = None
    unconditional: str | None = None
    neutral: str | None = None
    action: Literal["erase", "enhance"] = "erase"

    @property
    def start(self) -> str:
        """The neutral prompt, from which the target begins."""
        return plain((self.unconditional or "") if self.neutral is None else self.neutral)

    @property
    def mixture(self) -> dict[str, float]:
        """Return the target: the factor of the prediction for each prompt. Their sum is 1."""
        step = self.guidance_scale if self.action == "enhance" else -self.guidance_scale
        positive = plain(self.target if self.positive is None else self.positive)
        factors = {self.start: 1.0}
        for text, factor in ((positive, step), (plain(self.unconditional or ""), -step)):
            factors[text] = factors.get(text, 0.0) + factor
        return factors


class SliderTarget(LecoSettings):
    """A target of a slider: a prompt, and the two ends that it is moved between."""

    target_class: str = ""
    positive: str = ""
    negative: str = ""
    neutral: str = ""
    neutrals: list[str] = Field([])
    neutral_prompt_file: str | None = None
    prompt_file: str | None = None
    resolutions: Resolution | list[Resolution] | None = None

    def entries(self, neutrals: Sequence[str]) -> list[LecoEntry]:
        """Return the entries of both directions, for each neutral prompt."""
        shared = {
            name: getattr(self, name)
            for name in LecoSettings.model_fields
            if name in self.model_fields_set and name != "multiplier"
        }
        if self.resolutions is not None:
            shared["resolution"] = 512  # sizes are not used; this marks that the key was given
        if self.positive.strip():
            end, other, action, opposite = self.positive, self.negative, "enhance", "erase"
        else:
            end, other, action, opposite = self.negative, "", "erase", "enhance"
        return [
            LecoEntry(
                target=self.target_class,
                positive=end,
                unconditional=other,
                neutral=neutral,
                action=one,
                multiplier=multiplier,
                **shared,
            )
            for neutral in neutrals
            for one, multiplier in ((action, self.multiplier), (opposite, -self.multiplier))
        ]


class LecoModel(Strict):
    """LECO's section `pretrained_model`."""

    name_or_path: str
    v2: bool = False
    v_pred: bool = False
    clip_skip: int | None = None


class LecoNetwork(Strict):
    """LECO's section `network`, with the training methods of rohitgandikota/sliders."""

    type: Literal["lierla", "c3lier"] = "lierla"
    rank: Annotated[int, Field(ge=1, le=RANK)] = 4
    alpha: Annotated[float, Field(ge=0, le=FACTOR)] = 1.0  # 0 stands for the rank
    training_method: Literal[
        "full",
        "noxattn",
        "innoxattn",
        "selfattn",
        "xattn",
        "xattn-strict",
        "noxattn-hspace",
        "noxattn-hspace-last",
    ] = "full"


class LecoTraining(Strict):
    """LECO's section `train`."""

    precision: LecoPrecision = "bfloat16"
    noise_scheduler: Literal["ddim", "ddpm", "lms", "euler_a"] = "ddim"
    iterations: Annotated[int, Field(ge=1, le=TRAINING_STEPS)] = 500
    batch_size: int | None = None  # in one of LECO's examples; its code does not read it
    lr: Annotated[float, Field(gt=0, le=LEARNING_RATE)] = 1e-4
    optimizer: str = "adamw"
    optimizer_args: str = ""
    lr_scheduler: str = "constant"
    max_denoising_steps: Annotated[int, Field(ge=1, le=SAMPLER_STEPS)] = 50


class LecoSaving(Strict):
    """LECO's section `save`."""

    name: str = "untitled"
    path: str = "./output"
    per_steps: Annotated[int, Field(ge=1, le=TRAINING_STEPS)] = 200
    precision: LecoPrecision = "float32"


class LecoLogging(Strict):
    """LECO's section `logging`."""

    use_wandb: bool = False
    verbose: bool = False


class LecoOther(Strict):
    """LECO's section `other`."""

    use_xformers: bool = False


class LecoConfig(Strict):
    """LECO's `config.yaml`. A section that is not given has its defaults."""

    prompts_file: str
    pretrained_model: LecoModel
    network: LecoNetwork = LecoNetwork()
    train: LecoTraining = LecoTraining()
    save: LecoSaving | None = None
    logging: LecoLogging = LecoLogging()
    other: LecoOther = LecoOther()


@dataclass(frozen=True)
class LecoFile:
    """What a file says, with the file that it names.

    Attributes:
        path: The file that was given.
        entries: The entries, those of sliders written out.
        config: The training settings; None for a file of prompts.
    """

    path: Path
    entries: tuple[LecoEntry, ...]
    config: LecoConfig | None


def plain(text: str) -> str:
    """Return a prompt without spaces at its ends and with single ones inside it."""
    return " ".join(text.split())


def read(path: Path) -> LecoFile:
    """Read a file of LECO, of sliders or of sd-scripts' LECO.

    Args:
        path: A `prompts.yaml`, `config.yaml` or `prompts.toml`.

    Raises:
        UserError: The file, or one that it names, is none of these. All mistakes of a file are
            reported at once.
    """
    content = _content(path)
    if not (isinstance(content, dict) and "prompts_file" in content):
        return LecoFile(path, tuple(_entries(content, path)), None)
    config = _require(LecoConfig, content, path)
    prompts = _beside(path, config.prompts_file, "prompts_file")
    return LecoFile(path, tuple(_entries(_content(prompts), prompts)), config)


def _content(path: Path) -> Any:
    return read_toml(path) if path.suffix.lower() == ".toml" else read_yaml(path)


def _beside(path: Path, name: str, key: str) -> Path:
    """Return a file that a file names: in its folder, or in the working folder.

    LECO reads the path from the working folder, and its examples name the folder too.
    """
    folder = path.parent
    for root, place in ((Path(), Path(name)), (folder, Path(name)), (folder, Path(name).name)):
        try:
            file = (root / place).resolve()
            if file.is_file() and file.is_relative_to(root.resolve()):
                return root / place
        except (OSError, ValueError):  # a name that no file can have
            continue
    raise UserError(
        f"{path}: {key} names {quote(name)}, which is neither in the folder of this file nor in "
        "the working folder; put it there"
    )


def _entries(content: Any, path: Path) -> list[LecoEntry]:
    """Return the entries of a file of prompts, in any of its forms."""
    if isinstance(content, list):
        return _each(content, {}, path, "entry")
    if not isinstance(content, dict):
        raise UserError(f"{path}: {_NO_PROMPTS}, found {quote(content)}")
    if "prompts" in content:
        defaults = {key: value for key, value in content.items() if key != "prompts"}
        return _each(content["prompts"], defaults, path, "prompts")
    section = content
    if "slider" in content:
        _require_known({key: None for key in content if key != "slider"}, ["slider"], path)
        section = content["slider"]
    if not isinstance(section, dict) or not {"targets", "target", "target_class"} & set(section):
        raise UserError(f"{path}: {_NO_PROMPTS}")
    if "targets" not in section:
        return _each([section], {}, path, "slider")
    defaults = {key: value for key, value in section.items() if key != "targets"}
    return _each(section["targets"], defaults, path, "targets")


_NO_PROMPTS = (
    "expected LECO's prompts (a list of entries with `target`), its config.yaml (with "
    "`prompts_file`), or [[prompts]] or [[targets]] of sd-scripts; options of its command line are "
    "not read, give --lora, --steps and --lr"
)
_NEUTRAL_LISTS = ("neutrals", "neutral_prompt_file", "prompt_file")
_OF_NEUTRAL = ("neutral", *_NEUTRAL_LISTS)


def _each(items: Any, defaults: Mapping[str, Any], path: Path, what: str) -> list[LecoEntry]:
    """Return the entries of a list. Its items take the defaults for keys that they lack.

    Raises UserError with all mistakes, also for a default that no item can have.
    """
    if not isinstance(items, list) or not items or not all(isinstance(i, dict) for i in items):
        raise UserError(f"{path}: {what}: expected a list of mappings, found {quote(items)}")
    if len(items) > CONCEPTS:
        raise UserError(f"{path}: {len(items):,} entries; at most {CONCEPTS:,} are read")
    kinds = {"target_class" in item for item in items}
    known = {
        name
        for is_slider in kinds
        for name in (SliderTarget if is_slider else LecoEntry).model_fields
    }
    _require_known(defaults, known, path)
    entries: list[LecoEntry] = []
    mistakes: list[str] = []
    for number, item in enumerate(items, 1):
        place = f"{what} {number}"
        if "target_class" not in item:
            entry = _checked(LecoEntry, _merged(LecoEntry, item, defaults), mistakes, place)
            entries += [entry] if entry else []
            continue
        lists = [key for key in _NEUTRAL_LISTS if item.get(key)]
        if len(lists) > 1:
            mistakes.append(
                f"{place}: sd-scripts reads only the first of {' and '.join(lists)} in a target; "
                "leave out the others"
            )
            continue
        slider = _checked(SliderTarget, _merged(SliderTarget, item, defaults), mistakes, place)
        if slider is None:
            continue
        if not (slider.positive.strip() or slider.negative.strip()):
            mistakes.append(f"{place}: a slider needs `positive` or `negative`")
            continue
        entries += slider.entries(_neutrals(slider, path))
    if mistakes:
        raise UserError(mistakes_message(mistakes, str(path)))
    return entries


def _merged(
    model: type[BaseModel], item: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an item with the defaults. One with a neutral prompt takes none of the defaults'."""
    own = any(key in item for key in _OF_NEUTRAL)
    inherited = {
        key: value
        for key, value in defaults.items()
        if key in model.model_fields and not (own and key in _OF_NEUTRAL)
    }
    return {**inherited, **item}


def _neutrals(slider: SliderTarget, path: Path) -> list[str]:
    prompts = list(slider.neutrals)
    for key in ("neutral_prompt_file", "prompt_file"):
        if name := getattr(slider, key):
            lines = read_text(_beside(path, name, key)).splitlines()
            prompts += [line.strip() for line in lines if line.strip()]
    if len(prompts) > CONCEPTS:
        raise UserError(f"{path}: {len(prompts):,} neutral prompts; at most {CONCEPTS:,} are read")
    return prompts or [slider.neutral]


def _require_known(content: Mapping[str, Any], names: Sequence[str] | set[str], path: Path) -> None:
    wrong = [unknown_message("key", str(key), names) for key in content if key not in names]
    if wrong:
        raise UserError(mistakes_message(wrong, str(path)))


def _require(model: type[AnyModel], content: Any, path: Path) -> AnyModel:
    mistakes: list[str] = []
    value = _checked(model, content, mistakes, "")
    if value is None:
        raise UserError(mistakes_message(mistakes, str(path)))
    return value


def _checked(
    model: type[AnyModel], content: Mapping[str, Any], mistakes: list[str], place: str
) -> AnyModel | None:
    """Return the content as a model. A key without a value counts as not given."""
    try:
        return model.model_validate(_given(content))
    except ValidationError as error:
        prefix = f"{place}: " if place else ""
        mistakes += [
            prefix + error_messages.explain(model, item)
            for item in error.errors(include_url=False, include_context=False)
        ]
        return None


def _given(content: Any) -> Any:
    """Return a mapping without keys that have no value, at any depth."""
    if not isinstance(content, Mapping):
        return content
    return {key: _given(value) for key, value in content.items() if value is not None}
