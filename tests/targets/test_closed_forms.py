"""Closed-form edits of the bundled pipeline: the pairs of tokens, the errors, and the concept rate
of the star.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.data import prompts
from concept_eraser.data.generate import model_fingerprint
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from concept_eraser.targets.cross_attention_edit import (
    SELECTION,
    layers,
    pair_tokens,
    projection_request,
)
from tests import families

START, END = 90, 91
RECIPES = ["tiny_star_uce", "tiny_star_rece"]


def edit_recipe(**changes: Any) -> dict[str, Any]:
    few = {
        "forget": {"prompts": ["a red star"], "anchor": "a red circle"},
        "retain": {"prompts": ["a red heart", "a blue house"]},
    }
    return {
        "model": "tiny-sd",
        **few,
        "method": "uce",
        "trainable": "cross_attention_kv",
        **changes,
    }


def sentence(*words: int, length: int = 10) -> list[int]:
    return [START, *words, *[END] * (length - 1 - len(words))]


def token_pairs(words: list[int], anchor: list[int], how: Any) -> list[tuple[int, int]]:
    return list(zip(*pair_tokens(sentence(*words), sentence(*anchor), END, how), strict=True))


def test_all_tokens_meet_place_by_place_where_one_word_differs() -> None:
    assert token_pairs([1, 2, 3], [1, 7, 3], "all") == [(i, i) for i in range(10)]


def test_words_that_differ_meet_from_the_end_and_the_others_stay_aligned() -> None:
    """a [five pointed star] on ... with a [circle] on ...: all three words meet the circle, then
    the sentences continue with equal words.
    """
    pairs = token_pairs([1, 2, 3, 4, 5], [1, 7, 5], "all")
    assert pairs == [(0, 0), (1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 4), (7, 5), (8, 6), (9, 7)]
    assert token_pairs([1, 7, 5], [1, 2, 3, 4, 5], "all") == [
        (0, 0),
        (1, 1),
        (2, 4),
        (3, 5),
        (4, 6),
        (5, 7),
        (6, 8),
        (7, 9),
    ]


def test_a_concept_without_a_word_of_the_anchors_meets_what_stands_behind_it() -> None:
    assert token_pairs([1, 2], [1], "all") == [
        (0, 0),
        (1, 1),
        (2, 2),
        *((i, i - 1) for i in range(3, 10)),
    ]
    assert token_pairs([2], [], "all") == [(0, 0), (1, 1), *((i, i - 1) for i in range(2, 10))]


def test_the_papers_tokens() -> None:
    assert token_pairs([1, 2, 3], [7], "last") == [(3, 1)]
    assert token_pairs([1, 2], [], "last") == [(2, 0)], (
        "of the empty prompt the start token, as in UCE's code"
    )
    assert token_pairs([1, 2, 3], [7], "from_last") == [(3 + i, 1 + i) for i in range(7)]
    assert token_pairs([1, 2, 3], [1, 7, 8, 3], "context") == [
        (0, 0),
        (1, 1),
        (3, 4),
        (4, 5),
        (5, 6),
        (6, 7),
        (7, 8),
        (8, 9),
    ]


@pytest.mark.parametrize("how", ["all", "context", "from_last", "last"])
def test_the_tokens_of_real_prompts(how: Any, shared_tiny) -> None:
    """Decoded, equal words meet equal words; star meets circle, or no token."""
    texts = ["a flat red star on a white background", "a flat red circle on a white background"]
    ids = shared_tiny.tokenize(texts).tensors["ids"].tolist()
    words = [[shared_tiny.pipeline.tokenizer.decode([i]).strip() for i in row] for row in ids]
    concept_places, anchor_places = pair_tokens(*ids, shared_tiny.words.end, how)
    pairs = [(words[0][i], words[1][j]) for i, j in zip(concept_places, anchor_places, strict=True)]
    assert {(a, b) for a, b in pairs if a != b} == ({("star", "circle")} if how == "all" else set())
    assert len(pairs) == {"all": 77, "context": 76, "from_last": 69, "last": 1}[how]


def share(model: Any, group: str, shape: str | None = None) -> float:
    """The share of 8 images in which the judge detects that shape, or the shape of each prompt."""
    judge, rows = registry.build("judge", "tiny", {}), prompts.load(group).take(8, 3).prompts
    samples = model.sample([row.text for row in rows], seeds=list(range(8)), steps=8, guidance=5.0)
    images = samples.permute(0, 3, 1, 2).float() / 127.5 - 1
    probabilities = [
        float(judge.probability(images[i : i + 1], "shape", shape or row.fields["shape"]))
        for i, row in enumerate(rows)
    ]
    return sum(p > 0.5 for p in probabilities) / len(probabilities)


def test_the_original_generates_stars(shared_tiny) -> None:
    """A control: without it the next test would prove nothing."""
    assert share(shared_tiny, "tiny_star", "star") > 0.8


@pytest.mark.parametrize("name", RECIPES)
def test_the_star_is_erased_and_the_retain_set_is_preserved(
    name: str, tmp_path: Path, tiny
) -> None:
    """The recipe without changes, judged by its images."""
    run = concept_eraser.erase(name, model=tiny, output=tmp_path)
    assert share(tiny, "tiny_star", "star") < 0.2
    assert share(tiny, "tiny_rest") > 0.8
    figures = json.loads((run.folder / "done.json").read_text())["edit"]
    assert figures["drift"] < 0.3 < 1 - figures["left"]


def test_the_null_space_changes_retained_images_less(tiny, shared_tiny) -> None:
    """SPEED's recipe, and the same least-squares problem without constraints."""
    rows = prompts.load("tiny_rest").take(8, 3).prompts
    loaded = recipe.load("tiny_star_speed")
    parameters = {name: tiny.denoiser.get_parameter(name) for name in layers(tiny, SELECTION)}
    request = projection_request(tiny, loaded, loaded.method.options["tokens"], parameters)
    method = registry.build("method", "speed", loaded.method.options)
    free = replace(method, threshold=1e9, augmentations=0, invariants=False)

    def images(model: Any) -> torch.Tensor:
        return model.sample(
            [row.text for row in rows], seeds=list(range(8)), steps=6, guidance=5.0
        ).float()

    original, differences, figures = images(shared_tiny), [], []
    for one in (free, method):
        weights = {name: weight.clone() for name, weight in request.layers.items()}
        figures.append(one.edit(replace(request, layers=weights)))
        tiny.denoiser.load_state_dict(weights, strict=False)
        differences.append(float((images(tiny) - original).square().mean()))
    assert 0 < differences[1] < 0.5 * differences[0]
    assert figures[1]["drift"] < figures[0]["drift"]
    assert figures[1]["free"] < 1 == figures[0]["free"]
    assert share(tiny, "tiny_star", "star") < 0.2
    assert share(tiny, "tiny_rest") > 0.8


def test_the_invariants_of_the_null_space_are_those_of_the_empty_prompt(
    tmp_path: Path, tiny, shared_tiny
) -> None:
    """The start token of the empty prompt has the same keys and values as before, its last token
    nearly the same.
    """
    concept_eraser.erase(edit_recipe(method="speed"), model=tiny, output=tmp_path)
    name = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight"
    old, new = (model.denoiser.get_parameter(name).detach() for model in (shared_tiny, tiny))
    empty, star = shared_tiny.encode(["", "a red star"]).tensors["states"]
    changes, lengths = (empty @ (new - old).T).norm(dim=1), (empty @ old.T).norm(dim=1)
    assert float(changes[0]) < 1e-5 * float(lengths[0])
    assert float(changes[-1]) < 0.1 * float(lengths[-1])
    assert float((star[3] @ (new - old).T).norm()) > 0.2 * float((star[3] @ old.T).norm())


def test_a_rotation_of_the_values_erases_the_star(tmp_path: Path, tiny, shared_tiny) -> None:
    """OCE's recipe without changes. Lengths and angles of all values stay, and keys do."""
    run = concept_eraser.erase("tiny_star_oce", model=tiny, output=tmp_path)
    assert share(tiny, "tiny_star", "star") < 0.2
    assert share(tiny, "tiny_rest") > 0.8
    assert json.loads((run.folder / "done.json").read_text())["edit"]["overlap"] < 0
    before, moved = shared_tiny.denoiser.state_dict(), []
    for name, new in tiny.denoiser.state_dict().items():
        if not torch.equal(new, before[name]):
            moved.append(name)
            products = before[name].double().T @ before[name].double()
            torch.testing.assert_close(new.double().T @ new.double(), products, rtol=0, atol=1e-5)
            assert float((new - before[name]).norm()) > 0.1 * float(new.norm())
    assert moved == [name for name in before if name.endswith(".attn2.to_v.weight")]


def test_a_gate_erases_the_star_and_leaves_other_images(tmp_path: Path, tiny, shared_tiny) -> None:
    """CPE's recipe with two stages. The weights stay, and other prompts give nearly the same."""
    change = ["method.stages=2"]
    run = concept_eraser.erase("tiny_star_cpe", overrides=change, model=tiny, output=tmp_path)
    assert share(tiny, "tiny_star", "star") < 0.2
    assert share(tiny, "tiny_rest") > 0.8
    done = json.loads((run.folder / "done.json").read_text())
    assert done["edit"]["drift"] < 0.02 < 0.2 < done["edit"]["left"] < 0.8
    errors = []
    for group in ("tiny_star", "tiny_rest"):
        texts = [row.text for row in prompts.load(group).take(8, 3).prompts]
        before, after = (
            model.sample(texts, seeds=list(range(8)), steps=6, guidance=5.0).float()
            for model in (shared_tiny, tiny)
        )
        errors.append(float((after - before).square().mean()))
    assert errors[1] < 0.1 * errors[0]
    state = tiny.denoiser.state_dict()
    for name, value in shared_tiny.denoiser.state_dict().items():
        assert torch.equal(state[name], value)
    attack = {"name": "seed_search", "suite": "tiny_star", "n": 2, "options": {"tries": 1}}
    campaign = concept_eraser.attack(run.folder, **attack)
    assert model_fingerprint(tiny) in json.dumps(campaign.as_dict())


def test_only_keys_and_values_move_and_the_folder_holds_them(
    tmp_path: Path, tiny, shared_tiny
) -> None:
    run = concept_eraser.erase(edit_recipe(), model=tiny, output=tmp_path / "run")
    before = shared_tiny.denoiser.state_dict()
    names = {
        name
        for name, value in tiny.denoiser.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert names == {
        name for name in before if name.endswith((".attn2.to_k.weight", ".attn2.to_v.weight"))
    }
    weights = load_file(run.folder / "weights.safetensors")
    assert set(weights) == names
    assert all(
        torch.equal(value, tiny.denoiser.state_dict()[name]) for name, value in weights.items()
    )
    assert not (run.folder / "log.jsonl").exists()
    again = concept_eraser.load(run.folder).denoiser.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_each_layer_is_the_least_squares_solution_of_the_prompts(
    tmp_path: Path, tiny, shared_tiny
) -> None:
    """All steps from prompts to weights against torch's lstsq. The empty prompt is preserved beside
    the retain prompts.
    """
    concept_eraser.erase(edit_recipe(), model=tiny, output=tmp_path)
    states = (
        shared_tiny.encode(["a red star", "a red circle", "", "a red heart", "a blue house"])
        .tensors["states"]
        .double()
    )
    c, a, p = states[0], states[1], states[2:].flatten(0, 1)
    name = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight"
    old, new = (
        model.denoiser.get_parameter(name).detach().double() for model in (shared_tiny, tiny)
    )
    ridge = 0.5**0.5 * torch.eye(old.shape[1]).double()
    expected = torch.linalg.lstsq(
        torch.cat([c, p, ridge]), torch.cat([a @ old.T, p @ old.T, ridge @ old.T])
    ).solution.T
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-6)
    assert float((new - old).abs().max()) > 0.01


def test_several_concepts_at_once(tmp_path: Path) -> None:
    """Two concepts, one list: the same weights as both prompts in one objective with the same
    anchor.
    """
    anchor = "a red circle"
    two_objectives = edit_recipe(
        forget=[
            {"prompts": ["a red star"], "anchor": anchor},
            {"prompts": ["a red cross"], "anchor": anchor},
        ]
    )
    one_objective = edit_recipe(forget={"prompts": ["a red star", "a red cross"], "anchor": anchor})
    one = concept_eraser.erase(two_objectives, output=tmp_path / "one").load().denoiser.state_dict()
    other = (
        concept_eraser.erase(one_objective, output=tmp_path / "other").load().denoiser.state_dict()
    )
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-6)


def test_without_a_retain_set_and_without_an_anchor(tmp_path: Path, tiny, shared_tiny) -> None:
    """UCE's own setting for nudity: the concept's name alone becomes the empty prompt, which is
    preserved.
    """
    content = edit_recipe(
        forget={"prompts": ["star"]}, method={"name": "uce", "tokens": "from_last"}
    )
    del content["retain"]
    concept_eraser.erase(content, model=tiny, output=tmp_path)
    name = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight"
    old, new = (model.denoiser.get_parameter(name).detach() for model in (shared_tiny, tiny))
    star, empty = shared_tiny.encode(["star", ""]).tensors["states"]
    assert float((star[1] @ new.T - empty[0] @ old.T).norm()) < 0.2 * float(
        (star[1] @ old.T - empty[0] @ old.T).norm()
    )
    assert float((empty @ (new - old).T).norm()) < 0.1 * float((empty @ old.T).norm())


def test_a_lora_of_the_edit_has_the_edit(tmp_path: Path) -> None:
    run = concept_eraser.erase(edit_recipe(), output=tmp_path / "run")
    export = concept_eraser.export(run.folder, "lora", rank=64)
    assert export.error is not None
    assert export.error < 0.01


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux", "dit"])
def test_families(name: str, tmp_path: Path) -> None:
    """SDXL has such layers; the others are an error with the reason, before any file is written."""
    folder = families.build(name, tmp_path / name)
    content = edit_recipe(model=str(folder), model_options=families.options(name))
    if name == "dit":
        content |= {
            "forget": {"prompts": ["goldie"], "anchor": "281"},
            "retain": {"prompts": ["cock"]},
        }
    if name != "sdxl":
        with pytest.raises(
            UserError,
            match=rf"\({name}\) has no cross-attention .* works on Stable Diffusion 1, 2 and XL",
        ):
            concept_eraser.erase(content, output=tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return
    run = concept_eraser.erase(content, output=tmp_path / "run")
    weights = load_file(run.folder / "weights.safetensors")
    before = concept_eraser.load(folder).denoiser.state_dict()
    assert all(not torch.equal(value, before[key]) for key, value in weights.items())
    assert {key.rsplit(".attn2.")[1] for key in weights} == {"to_k.weight", "to_v.weight"}


UNUSED_SETTINGS = {
    "forget.loss, forget.n": {
        "forget": {"prompts": ["a star"], "loss": "ascent", "n": 9, "anchor": "a circle"}
    },
    "retain.scale": {"retain": {"prompts": ["a heart"], "scale": 2.0}},
    "retain.anchor": {"retain": {"prompts": ["a heart"], "anchor": "a circle"}},
    "training.steps, training.lr": {"training": {"steps": 3, "lr": 1e-3}},
    "generation.steps": {"generation": {"steps": 3}},
    "trainable.saliency": {"trainable": {"select": "cross_attention_kv", "saliency": 0.5}},
    "trainable.lora": {"trainable": {"select": "cross_attention_kv", "lora": 2}},
    "trainable.negate": {
        "trainable": {"select": "cross_attention_kv", "negate": 1.0},
        "retain": None,
    },
    "watch": {"watch": {"suite": "tiny_star"}},
}


@pytest.mark.parametrize("setting", UNUSED_SETTINGS)
def test_settings_that_an_edit_does_not_use_are_errors(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"does not use .*{setting}"):
        concept_eraser.erase(edit_recipe(**UNUSED_SETTINGS[setting]), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"trainable": "cross_attention"},
            r"covers .*attn2.to_q.weight, but .*; use cross_attention_kv",
        ),
        ({"trainable": "re:attn1.to_k"}, r"covers .*attn1.to_k.weight"),
        (
            {"forget": {"prompts": ["a star"], "anchor": "a star"}},
            "anchor of 'a star' is that prompt itself",
        ),
        (
            {"target": "text_encoder"},
            "works on denoiser only, since it edits the layers of a denoiser that read a text",
        ),
        (
            {"replace": {"prompts": ["a heart"]}},
            "needs the objective forget, may have retain, and has no use for others",
        ),
        ({"retain": {"prompts": ["a red star"]}}, "a red star"),
        ({"method": {"name": "uce", "lamb": 0.0, "tokens": "last"}}, "undetermined .* larger lamb"),
        ({"method": {"name": "oce", "tokens": "all"}}, "nothing to erase; .* smaller rank"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    changes: dict, words: str, tmp_path: Path, tiny, shared_tiny
) -> None:
    with pytest.raises(UserError, match=words):
        concept_eraser.erase(edit_recipe(**changes), model=tiny, output=tmp_path / "run")
    before = shared_tiny.denoiser.state_dict()
    assert all(
        torch.equal(value, before[name]) for name, value in tiny.denoiser.state_dict().items()
    )


def test_no_image_is_generated(tmp_path: Path, monkeypatch) -> None:
    """The edit uses the text encoder only: it runs even if the sampler cannot."""
    from concept_eraser.models.families.sd import StableDiffusion

    monkeypatch.setattr(StableDiffusion, "sample", None)
    monkeypatch.setattr(StableDiffusion, "denoise", None)
    assert concept_eraser.erase(edit_recipe(), output=tmp_path).seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "tiny_star_speed", "tiny_star_oce", "tiny_star_cpe"])
def test_the_suite_agrees(name: str, tmp_path: Path) -> None:
    run = concept_eraser.erase(name, output=tmp_path / "run")
    evaluation = concept_eraser.evaluate(run.folder, suites.load("tiny_star").with_at_most(48))
    assert evaluation.find("concept_rate", "direct").after.value < 0.1
    assert recipe.load(name).fingerprint == run.recipe.fingerprint
