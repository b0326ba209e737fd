"""Configurations of LECO and of sliders: reading, the recipe, and the target at one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.models.loading import load
from concept_eraser.models.lora import can_adapt
from concept_eraser.recipes import leco, leco_files, selections
from concept_eraser.recipes import recipe as recipes
from concept_eraser.targets.build import build_eraser
from concept_eraser.targets.context import Context
from concept_eraser.utils.errors import UserError
from tests.small_model import small_sd

# The keys of p1atdev/LECO's config.yaml and prompts.yaml, each with a value of its own
CONFIG: dict[str, Any] = {
    "prompts_file": "./somewhere/prompts.yaml",
    "pretrained_model": {"name_or_path": "./sd", "v2": True, "v_pred": True, "clip_skip": 2},
    "network": {"type": "lierla", "rank": 8, "alpha": 2.0, "training_method": "full"},
    "train": {
        "precision": "float16",
        "noise_scheduler": "euler_a",
        "iterations": 300,
        "batch_size": 2,
        "lr": "1e-4",  # as YAML reads 1e-4
        "optimizer": "AdamW",
        "optimizer_args": "betas=(0.9,0.99) weight_decay=0.1",
        "lr_scheduler": "cosine",
        "max_denoising_steps": 50,
    },
    "save": {"name": "van gogh/1", "path": "./output", "per_steps": 100, "precision": "bfloat16"},
    "logging": {"use_wandb": True, "verbose": True},
    "other": {"use_xformers": True},
}
PROMPTS = [
    {
        "target": "van gogh",
        "positive": "van gogh",
        "unconditional": "",
        "neutral": None,
        "action": "erase",
        "guidance_scale": 1.5,
        "resolution": 512,
        "dynamic_resolution": True,
        "batch_size": 2,
        "dynamic_crops": True,
    }
]
PERSON = {
    "target": "person",
    "positive": "person, very old",
    "unconditional": "person, very young",
    "neutral": "person",
    "action": "enhance",
    "guidance_scale": 4,
}
OLD = {"person": 1.0, "person, very old": 4.0, "person, very young": -4.0}
DATA_FREE = {"images": "free", "n": 1}


def write(folder: Path, content: Any, name: str = "prompts.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def forgotten(path: Path) -> Any:
    return leco.load(path).content["forget"]


def test_each_key_is_mapped_or_named(tmp_path: Path) -> None:
    write(tmp_path, PROMPTS)
    result = leco.load(write(tmp_path, CONFIG, "config.yaml"))
    assert result.name == "van_gogh_1"
    assert result.content == {
        "model": "./sd",
        "forget": {"prompts": ["van gogh"], "loss": "esd", "eta": 1.5, **DATA_FREE},
        "method": {"name": "weighted", "retain": 0.0},
        "trainable": {
            "select": r"re:^(down_blocks|mid_block|up_blocks)\.(?=.*\battentions\.)",
            "lora": {"rank": 8, "alpha": 2.0, "conv": True},
        },
        "training": {
            "steps": 300,
            "batch_size": 2,
            "lr": 1e-4,
            "precision": "bf16",
            "optimizer": "adamw",
            "betas": [0.9, 0.99],
            "weight_decay": 0.1,
            "decay": "cosine",
            "save_every": 100,
            "tracker": ["wandb"],
        },
    }
    named = [warning.partition(": ")[0] for warning in result.warnings]
    assert sorted(named) == [
        "dynamic_crops",
        "dynamic_resolution",
        "logging.verbose",
        "other.use_xformers",
        "pretrained_model.clip_skip",
        "pretrained_model.v2 and v_pred",
        "resolution",
        "save.path",
        "save.per_steps",
        "save.precision",
        "train.batch_size",
        "train.lr_scheduler",
        "train.max_denoising_steps",
        "train.noise_scheduler",
        "train.precision",
    ]
    recipe = recipes.load(result.content)
    assert recipe.trainable.lora is not None
    assert recipe.trainable.lora.alpha == 2.0


OBJECTIVES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"target": "a"}, {"loss": "esd", "eta": 1.0}),
    ({"target": "a", "neutral": ""}, {"loss": "esd", "eta": 1.0}),
    (
        {"target": "a", "unconditional": "b", "neutral": "b", "guidance_scale": 2},
        {"loss": "esd", "eta": 2.0, "neutral": "anchor", "anchor": "b"},
    ),
    ({"target": "a", "positive": "a  {c} "}, {"loss": "slider", "mixture": {"": 2, "a {{c}}": -1}}),
    ({"target": "a", "positive": "c", "action": "enhance"}, {"loss": "anchor", "anchor": "c"}),
    ({"target": "a", "guidance_scale": 0}, {"loss": "esd", "eta": 0.0}),
    (
        {"target": "a", "action": "enhance", "guidance_scale": 3},
        {"loss": "slider", "mixture": {"": -2, "a": 3}},
    ),
    (PERSON, {"loss": "slider", "mixture": OLD}),
    (
        {"target": "", "positive": "blurry", "action": "enhance"},
        {"prompts": {"prompts": [{"text": ""}]}, "loss": "anchor", "anchor": "blurry"},
    ),
]


@pytest.mark.parametrize(("entry", "expected"), OBJECTIVES)
def test_a_target_is_the_nearest_loss(
    entry: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    own = {"prompts": [entry["target"]], **DATA_FREE}
    path = write(tmp_path, [entry])
    assert forgotten(path) == {**own, **expected}
    recipes.load(leco.load(path).content)


def test_the_forms_of_sd_scripts(tmp_path: Path) -> None:
    """[[prompts]] and [[targets]], their defaults, neutral prompts, and the YAML of before."""
    prompts = write(
        tmp_path,
        'guidance_scale = 2.0\nweight = 0.5\n[[prompts]]\ntarget = "a"\n'
        '[[prompts]]\ntarget = "b"\nguidance_scale = 3.0\nweight = 1.5\n'
        '[[prompts]]\ntarget = "c"\nguidance_scale = 0.0\nneutral = "c"\n',
        "prompts.toml",
    )
    content = leco.load(prompts).content
    assert content["forget"] == [
        {"prompts": ["a"], "loss": "esd", "eta": 2.0, **DATA_FREE, "scale": 0.5},
        {"prompts": ["b"], "loss": "esd", "eta": 3.0, **DATA_FREE, "scale": 1.5},
    ]
    retain = {"prompts": ["c"], "loss": "distill", **DATA_FREE, "scale": 0.25}
    assert content["retain"] == retain
    assert content["method"] == {"name": "weighted"}
    assert content["concepts"] == "rotate"
    recipes.load(content)

    ends = 'positive = "person, very old"\nnegative = "person, very young"\n'
    head = 'guidance_scale = 4.0\nneutral = "person"\n'
    target = f'[[targets]]\ntarget_class = "person"\n{ends}'
    slider = write(tmp_path, head + target + "multiplier = 2.0\n", "slider.toml")
    both = leco.load(slider)
    expected = {"prompts": ["person"], "loss": "slider", "mixture": OLD, **DATA_FREE}
    assert both.content["forget"] == expected
    assert both.content["trainable"]["lora"]["alpha"] == 2.0
    assert any("1 entries train the opposite direction" in one for one in both.warnings)
    assert (
        forgotten(write(tmp_path, f"[slider]\n{head}[[slider.{target[2:]}", "in.toml")) == expected
    )
    as_yaml = {
        "guidance_scale": 4,
        "targets": [{"target_class": "person", "positive": "person, very old"}],
    }
    as_yaml["targets"][0] |= {"negative": "person, very young", "neutral": "person"}
    assert forgotten(write(tmp_path, as_yaml, "slider.yaml")) == expected

    write(tmp_path, "studio photo\n\n cinematic\n", "neutrals.txt")
    names = 'neutrals = [""]\nneutral_prompt_file = "neutrals.txt"\n'
    several = write(
        tmp_path, names + '[[targets]]\ntarget_class = "x"\nnegative = "bad"\n', "n.toml"
    )
    assert forgotten(several)["mixture"] == pytest.approx(
        {"": 4 / 3, "studio photo": 1 / 3, "cinematic": 1 / 3, "bad": -1.0}
    )


def preserved(prompt: str, weight: float) -> dict[str, Any]:
    return {
        "target": prompt,
        "positive": prompt,
        "unconditional": prompt,
        "neutral": prompt,
        "weight": weight,
    }


@pytest.mark.parametrize(
    ("entries", "retained"),
    [
        ([{"target": "a"}, preserved("x", 1.0)], 1.0),
        ([*({"target": name} for name in "abc"), preserved("x", 5.0)], 5 / 3),
        (
            [
                {"target": "a", "weight": 2.0},
                {"target": "a", "weight": 0.5, "guidance_scale": 2.0},
                {"target": "b"},
                preserved("x", 3.0),
                preserved("y", 3.0),
            ],
            2.4,
        ),
    ],
)
def test_each_prompt_has_lecos_share_of_the_gradient(
    entries: list[dict[str, Any]], retained: float, tmp_path: Path
) -> None:
    """LECO draws one entry. Here each step has one forget prompt and the retain objective."""
    path = write(tmp_path, entries)
    content = leco.load(path).content
    assert content["retain"].get("scale", 1.0) == pytest.approx(retained)
    forget = content["forget"] if isinstance(content["forget"], list) else [content["forget"]]
    means = {one["prompts"][0]: one.get("scale", 1.0) / len(forget) for one in forget}
    kept = content["retain"]["prompts"]
    means |= {prompt: content["retain"].get("scale", 1.0) / len(kept) for prompt in kept}
    expected: dict[str, float] = {}
    for one in entries:
        expected[one["target"]] = expected.get(one["target"], 0.0) + one.get("weight", 1.0)
    shares = {prompt: mean / sum(means.values()) for prompt, mean in means.items()}
    total = sum(expected.values())
    assert shares == pytest.approx({prompt: one / total for prompt, one in expected.items()})
    recipes.load(content)
    together = leco.load(path, ["concepts=together"]).content["retain"].get("scale", 1.0)
    assert together == pytest.approx(retained * len(forget)), "all forget prompts are in each step"


def test_prompts_to_preserve_have_their_mean_weight(tmp_path: Path) -> None:
    result = leco.load(write(tmp_path, [{"target": "a"}, preserved("x", 1.0), preserved("y", 3.0)]))
    assert result.content["retain"]["scale"] == 4.0
    assert any(line.startswith("weight: the prompts to preserve") for line in result.warnings)


ONE = {"target": "a"}
ERRORS: list[tuple[Any, str]] = [
    ("", "expected LECO's prompts"),
    ([], "entry: expected a list of mappings"),
    ({"pretrained_model_name_or_path": "x"}, r"options of its command line are not read"),
    ([{"positive": "a"}], "entry 1: target: required"),
    ([ONE, {**ONE, "guidance": 2}], "entry 2: guidance: unknown key .*'guidance_scale'"),
    ([{**ONE, "action": "swap"}], "entry 1: action: input should be 'erase' or 'enhance'"),
    ([{**ONE, "multiplier": 0}], "at strength 0 a LoRA changes nothing"),
    ([{**ONE, "multiplier": -1}], "multiplier: a negative one trains the LoRA at a negative"),
    ([ONE, {"target": "b", "multiplier": 2}], "one LoRA is trained at one strength, found"),
    ([{**ONE, "guidance_scale": 0, "neutral": "a"}], "so nothing is erased"),
    ({"targets": [{"target_class": "a"}]}, "a slider needs `positive` or `negative`"),
    (
        {
            "targets": [
                {"target_class": "a", "positive": "b", "neutrals": ["c"], "prompt_file": "n.txt"}
            ]
        },
        "targets 1: sd-scripts reads only the first of neutrals and prompt_file in a target; leave",
    ),
    ({"guidance": 1, "prompts": [ONE]}, "unknown key 'guidance'"),
    (
        {"targets": [{"target_class": "a", "positive": "b", "prompt_file": "/etc/passwd"}]},
        "prompt_file names '/etc/passwd', which is neither in the folder",
    ),
]


@pytest.mark.parametrize(("content", "message"), ERRORS)
def test_what_cannot_be_read_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        leco.load(write(tmp_path, content))


def test_training_settings_that_cannot_be_expressed(tmp_path: Path) -> None:
    """All are reported at once. What the user sets is not refused."""
    write(tmp_path, PROMPTS)
    train = {"optimizer": "Prodigy", "lr_scheduler": "cosine_with_restarts", "iterations": 10}
    model = {"name_or_path": "sd.ckpt"}
    network = {"training_method": "noxattn-hspace-last"}
    content = {**CONFIG, "train": train, "pretrained_model": model, "network": network}
    path = write(tmp_path, content, "config.yaml")
    with pytest.raises(UserError) as error:
        leco.load(path)
    assert [line.split(": ")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "pretrained_model.name_or_path",
        "network.training_method",
        "train.optimizer",
        "train.lr_scheduler",
    ]
    changes = ["model=./sd", "training.optimizer=adam", "training.decay=linear"]
    changes += ["trainable.lora=4", "trainable.select=all", "retain.prompts=tiny_rest"]
    result = leco.load(path, changes)
    assert "method" not in result.content
    recipe = recipes.load({**result.content, "model": "tiny-sd"}, changes[1:])
    assert (recipe.training.optimizer, recipe.training.decay) == ("adam", "linear")
    assert (recipe.method.name, recipe.retain and recipe.retain.loss) == ("munba", "distill")
    with pytest.raises(UserError, match=r"prompts_file names './gone.yaml'"):
        leco.load(write(tmp_path, {**CONFIG, "prompts_file": "./gone.yaml"}, "config.yaml"))
    for scheduler, expected in (
        ("constant", {}),
        ("linear", {"warmup": 2}),
        ("step", {"decay": "step", "milestones": [*range(2, 200, 2)], "decay_factor": 0.999}),
    ):
        train = {"optimizer": "adam8bit", "lr_scheduler": scheduler, "iterations": 200}
        path = write(tmp_path, {**CONFIG, "train": train, "save": None}, "config.yaml")
        training = leco.load(path).content["training"]
        assert training["optimizer"] == "adamw8bit"
        assert "weight_decay" not in training
        keys = ("warmup", "decay", "milestones", "decay_factor")
        assert {key: training[key] for key in keys if key in training} == expected


def test_other_families(tmp_path: Path) -> None:
    """SDXL has images of any size. A transformer has no layers of LECO's names."""
    write(tmp_path, [{"target": "a", "resolution": 768}])
    for family, method, select in (
        ("StableDiffusionXLPipeline", "xattn", "cross_attention"),
        ("FluxPipeline", "full", "blocks"),
    ):
        model = tmp_path / family
        model.mkdir()
        write(model, f'{{"_class_name": "{family}"}}', "model_index.json")
        content = {"prompts_file": "prompts.yaml", "pretrained_model": {"name_or_path": str(model)}}
        path = write(tmp_path, {**content, "network": {"training_method": method}}, "config.yaml")
        recipe = leco.load(path).content
        assert recipe["model_options"] == {"size": 768}
        assert recipe["trainable"]["select"] == select
    path = write(tmp_path, {**content, "network": {"training_method": "noxattn"}}, "config.yaml")
    with pytest.raises(UserError, match="noxattn is for a UNet, found the family flux"):
        leco.load(path)
    assert leco.load(path, ["trainable.select=blocks"]).content["model"] == str(model)


CONVOLUTIONS = ["ResnetBlock2D", "Downsample2D", "Upsample2D"]
CLASSES = {
    "lierla": ["Transformer2DModel"],
    "c3lier": ["Transformer2DModel", *CONVOLUTIONS],
}
SLIDER_CLASSES = {"lierla": ["Attention"], "c3lier": ["Attention", *CONVOLUTIONS]}
OF_SLIDERS = ("xattn-strict", "noxattn-hspace", "noxattn-hspace-last")
RULES = {
    "full": lambda name: True,
    "noxattn": lambda name: "attn2" not in name,
    "innoxattn": lambda name: "attn2" not in name,
    "selfattn": lambda name: "attn1" in name,
    "xattn": lambda name: "attn2" in name,
    "xattn-strict": lambda name: "attn2" in name and "out" not in name.split("attn2")[1],
    "noxattn-hspace": lambda name: "attn2" not in name and "mid_block" in name,
    "noxattn-hspace-last": lambda name: name == "mid_block.resnets.1.conv2",
}


@pytest.mark.parametrize("network", CLASSES)
def test_the_layers_are_those_of_lecos_classes(network: str, shared_small: Any) -> None:
    """LECO names classes of diffusers, whose linear layers and convolutions get a LoRA.

    Three methods are those of sliders, with their classes.
    """
    unet = shared_small.denoiser
    tensors = [name for name, _ in unet.named_parameters()]

    def layers_in(classes: Sequence[str]) -> set[str]:
        return {
            f"{name}.{child}"
            for name, module in unet.named_modules()
            if type(module).__name__ in classes
            for child, layer in module.named_modules()
            if can_adapt(layer, conv=True)
        }

    for method, is_trained in RULES.items():
        if (network, method) == ("lierla", "noxattn-hspace-last"):
            continue
        chosen = selections.select(tensors, leco.selection(network, method))
        layers = {name.rpartition(".")[0] for name in chosen}
        found = {name for name in layers if can_adapt(unet.get_submodule(name), conv=True)}
        classes = SLIDER_CLASSES if method in OF_SLIDERS else CLASSES
        inside = layers_in(classes[network])
        assert found == {name for name in inside if is_trained(name)}, method
        assert found


class Leco:
    """LECO's loss, from the pipeline alone: neutral -+ guidance_scale (positive - unconditional).

    student: the UNet in training. Its original and the text encoder are those of `pipeline`.
    """

    def __init__(self, pipeline: Any, student: Any, noisy: Tensor, t: Tensor) -> None:
        self.pipeline, self.student, self.noisy, self.t = pipeline, student, noisy, t

    def predict(self, unet: Any, prompt: str) -> Tensor:
        with torch.no_grad():
            states, _ = self.pipeline.encode_prompt(prompt, "cpu", 1, False)
        states = states.repeat(len(self.noisy), 1, 1)
        return unet(self.noisy, self.t, encoder_hidden_states=states).sample

    def loss(self, entry: Mapping[str, Any]) -> Tensor:
        with torch.no_grad():
            positive, neutral, unconditional = (
                self.predict(self.pipeline.unet, entry[key])
                for key in ("positive", "neutral", "unconditional")
            )
        offset = entry["guidance_scale"] * (positive - unconditional)
        target = neutral - offset if entry["action"] == "erase" else neutral + offset
        return torch.nn.functional.mse_loss(self.predict(self.student, entry["target"]), target)


def entry(*prompts: str, action: str, scale: float, weight: float = 1.0) -> dict[str, Any]:
    keys = ("target", "positive", "unconditional", "neutral")
    named = dict(zip(keys, prompts, strict=True))
    return {**named, "action": action, "guidance_scale": scale, "weight": weight}


CASES: dict[str, list[dict[str, Any]]] = {
    "esd": [entry("a red star", "a red star", "", "", action="erase", scale=2.0)],
    "esd to a prompt": [entry("star", "star", "a moon", "a moon", action="erase", scale=0.5)],
    "anchor": [entry("a star", "a blue house", "", "", action="enhance", scale=1.0)],
    "four prompts": [entry("x", "a star", "a moon", "a house", action="erase", scale=3.0)],
    "enhance": [entry("a tree", "a tree", "", "", action="enhance", scale=4.0)],
    "several for one prompt": [
        entry("heart", "a red heart", "a heart", "heart", action="enhance", scale=2.0),
        entry("heart", "a moon", "", "", action="erase", scale=1.0, weight=3.0),
    ],
}


def test_the_target_is_that_of_leco_at_one_batch(tmp_path: Path, shared_small: Any) -> None:
    """Loss and gradient of each objective, against the formula written out above."""
    entries = [one for case in CASES.values() for one in case]
    content = leco.load(write(tmp_path, entries)).content
    content |= {"model": small_sd(), "concepts": "together"}
    content["training"] |= {"precision": "fp32", "device": "cpu"}
    job = recipes.load(content)
    eraser: Any = build_eraser(Context(job, load(small_sd())))
    torch.manual_seed(0)
    with torch.no_grad():
        for factor in eraser.trainable().values():
            factor.add_(0.05 * torch.randn_like(factor))
    weights = list(eraser.trainable().values())
    names = ["forget", *(f"forget.{number}" for number in range(2, len(CASES) + 1))]
    for name, (case, of_case) in zip(names, CASES.items(), strict=True):
        draw = eraser.draw(name, [3, 4])
        reference = Leco(shared_small.pipeline, eraser.model.denoiser, draw.noisy, draw.t)
        total = sum(one["weight"] for one in of_case)
        expected: Any = sum(one["weight"] / total * reference.loss(one) for one in of_case)
        loss = eraser.loss(name, draw) / eraser.objective_by_name[name].scale
        if len(of_case) == 1:
            assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5), case
        wrong = [{**one, "action": "enhance"} for one in of_case if one["action"] == "erase"]
        if wrong and len(of_case) == 1:  # a control: the other sign is another loss
            assert float(reference.loss(wrong[0]).detach()) != pytest.approx(
                float(expected.detach()), rel=1e-3
            )
        slopes = torch.autograd.grad(loss, weights)
        for slope, other in zip(slopes, torch.autograd.grad(expected, weights), strict=True):
            torch.testing.assert_close(
                slope, other, rtol=1e-3, atol=1e-4 * float(other.abs().max())
            )
    scales = [spec.scale for spec in job.forgotten]
    assert scales == pytest.approx([6 / 7] * 5 + [4 * 6 / 7])


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["erase", *words])


def test_the_command_trains_a_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"target": "star", "batch_size": 1}, {**PERSON, "batch_size": 1}])
    train = {"iterations": 2, "precision": "fp32"}
    network = {"training_method": "xattn", "rank": 2, "alpha": 1.0}
    content = {"prompts_file": "prompts.yaml", "pretrained_model": {"name_or_path": small_sd()}}
    write(tmp_path, {**content, "network": network, "train": train}, "config.yaml")
    result = run("--leco", "config.yaml", "-o", "run", "--quiet", "training.device=cpu")
    assert result.exit_code == 0, result.output
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert [one["loss"] for one in saved["forget"]] == ["esd", "slider"]
    assert saved["forget"][1]["mixture"] == OLD
    up = [
        v
        for k, v in load_file(tmp_path / "run/lora/pytorch_lora_weights.safetensors").items()
        if "lora_B" in k
    ]
    assert up
    assert all(value.any() for value in up)
    both = run("--leco", "config.yaml", "--forget", "tiny_star")
    assert "cannot be used with --forget" in str(both.exception or both.output)


def test_readers_of_both_programs_agree(tmp_path: Path) -> None:
    """The same entry as YAML and as TOML."""
    text = '[[prompts]]\ntarget = "a"\npositive = "b"\naction = "enhance"\n'
    one = {"target": "a", "positive": "b", "action": "enhance"}
    files = write(tmp_path, text, "p.toml"), write(tmp_path, [one])
    read: Sequence[leco_files.LecoFile] = [leco_files.read(path) for path in files]
    assert read[0].entries == read[1].entries


def test_the_warning_about_training_names_what_is_used(tmp_path: Path) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(yaml.safe_dump(PROMPTS))
    for changes, used in (
        ([], "rank 4, alpha 1, 500 steps, learning rate 0.0001, AdamW"),
        (["training.steps=9", "training.lr=1e-3"], "rank 4, alpha 1, AdamW"),
    ):
        (warning,) = (w for w in leco.load(file, changes).warnings if "LECO's own" in w)
        assert warning.endswith(f"LECO's own are used: {used}")
