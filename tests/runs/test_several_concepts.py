"""Several concepts in one recipe: its mistakes, the objectives of each step, the weights of MUNBa
for many objectives, and whole runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import Interrupted, UserError, registry
from concept_eraser.cli.main import app
from concept_eraser.erasers.base import Part
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from concept_eraser.runs import suite_matching
from concept_eraser.targets.build import build_eraser
from concept_eraser.targets.context import Context
from concept_eraser.training import log as logs
from concept_eraser.training import saliency
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.utils import resources
from studies.result_tables import Results
from tests.conftest import short

FIVE = {"star": "circle", "heart": "triangle", "moon": "cross", "house": "square", "fish": "tree"}
NAMES = ("forget", "forget.2", "forget.3", "forget.4", "forget.5")


def objectives(*shapes: str) -> list[dict[str, Any]]:
    return [
        {"prompts": f"tiny_{shape}", "loss": "anchor", "anchor": {"shape": FIVE[shape]}, "n": 4}
        for shape in shapes
    ]


def many(*shapes: str, **changes: Any) -> dict[str, Any]:
    content = short(retain__prompts="tiny_five_rest", forget=objectives(*shapes or FIVE), **changes)
    return content | {"concepts": content.get("concepts", "together")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# recipes


def test_objectives_are_named_in_the_order_of_the_list() -> None:
    job = recipe.load(many())
    assert job.objectives == job.all_objectives == ("retain", *NAMES)
    assert [objective.prompts for objective in job.forgotten] == [f"tiny_{shape}" for shape in FIVE]
    turns = recipe.load(many(concepts="rotate", training__steps=5))
    assert turns.objectives == ("retain", "forget")
    assert turns.all_objectives == ("retain", *NAMES)
    assert turns.fingerprint != job.fingerprint
    again = recipe.load(yaml.safe_load(recipe.dump(turns, "command")))
    assert again.fingerprint == turns.fingerprint


def test_a_recipe_of_one_concept_has_its_old_form() -> None:
    """Fingerprints of one concept have no keys of lists: recorded results still belong to their
    recipes.
    """
    plain = recipe.load(short())
    assert "concepts" not in plain.resolved()
    job_of_list = recipe.load(short() | {"forget": [short()["forget"]]})
    assert job_of_list.fingerprint == plain.fingerprint, "a list of one is that one"
    results = Results("tiny_star")
    assert len(results) == 33
    for key in (key for key in results if key.endswith("_seed0")):
        content = results[key]["recipe"]
        full_content = recipe.load(content).resolved()
        assert full_content["forget"] == content["forget"]
        assert full_content.keys() == content.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concepts": "rotat"}, "'together' or 'rotate'"),
        ({"method__name": "uno"}, "concepts: rotate, which suits"),
        ({"method__name": "minmax_ngd"}, "concepts: rotate, which suits"),
        ({"method__formula": "printed"}, "two objectives only"),
        ({"concepts": "rotate", "training__steps": 4}, "need training.steps >= 5"),
        (
            {"concepts": "rotate", "training__steps": 5, "method": {"name": "munba", "every": 2}},
            "leave every at 1",
        ),
        ({"target": "clip"}, "classes: "),
        ({"replace": {"prompts": "tiny_star"}}, "concept-eraser merge"),
        ({"attack": {}}, "concept-eraser merge"),
        (
            {"forget": [*objectives("star", "moon"), {"prompts": "tiny_star"}]},
            "concepts 1 and 3 have the same prompts",
        ),
        ({"forget": ["tiny_star", "tiny_moon"]}, "names of prompt sets"),
        (
            {"forget": [*objectives("star"), {"prompts": "tiny_moon", "losss": "data"}]},
            "forget.2.losss: unknown key 'losss'; did you mean 'loss'",
        ),
        (
            {"forget": [*objectives("star"), {"prompts": "tiny_moonn"}]},
            "forget.2.prompts: .*did you mean 'tiny_moon'",
        ),
        ({"forget": objectives("star"), "concepts": "rotate"}, "several concepts in turn"),
        (
            {"method__name": "ga", "forget": [*objectives("star"), {"prompts": "tiny_moon"}]},
            "ascends the loss of the forget set",
        ),
    ],
)
def test_each_mistake_in_a_list_is_an_error(changes: dict, message: str) -> None:
    content = many(**{k: v for k, v in changes.items() if k not in ("forget", "replace", "attack")})
    with pytest.raises(UserError, match=message):
        recipe.load(
            content | {k: v for k, v in changes.items() if k in ("forget", "replace", "attack")}
        )


def test_a_suite_that_retains_an_erased_shape_is_refused(tmp_path: Path) -> None:
    """Otherwise success on the second concept would count as damage to the retain set."""
    (tmp_path / "recipe.yaml").write_text(recipe.dump(recipe.load(many("star", "moon")), "none"))
    with pytest.raises(UserError, match="as retained, but it is in the forget set"):
        suite_matching.require_kept(suite_matching.recipe_of(tmp_path), suites.load("tiny_star"))
    suite_matching.require_kept(suite_matching.recipe_of(tmp_path), suites.load("tiny_five_moon"))
    with pytest.raises(UserError, match=r"e\.g\. .*tiny_five_moon") as error:
        suite_matching.suite_of(tmp_path)
    assert "tiny_star" not in str(error.value).split("e.g.")[1].replace("tiny_five_star", "")


def test_every_two_objective_method_works_in_turn() -> None:
    for name in ("uno", "minmax_ngd", "pcgrad", "a-d", "munba-printed", "ngdiff", "torchjd"):
        content = many(concepts="rotate", training__steps=5) | {"method": {"name": name}}
        if name == "a-d":
            content["forget"] = [objective | {"loss": "ascent"} for objective in content["forget"]]
        assert recipe.load(content).objectives == ("retain", "forget")


def test_changes_go_to_every_concept_or_to_a_numbered_one() -> None:
    job = recipe.load(
        many("star", "moon"), ["forget.n=7", "forget.2.scale=3.0", "forget.2.anchor.shape=tree"]
    )
    assert [objective.n for objective in job.forgotten] == [7, 7]
    assert [objective.scale for objective in job.forgotten] == [1.0, 3.0]
    assert [objective.anchor for objective in job.forgotten] == [
        {"shape": "circle"},
        {"shape": "tree"},
    ]
    for wrong in ("forget.0.n=7", "forget.3.n=7", "forget.2=7"):
        with pytest.raises(UserError, match="numbered 1 to 2"):
            recipe.load(many("star", "moon"), [wrong])


def test_flags_pair_concepts_with_anchors() -> None:
    def dry(*flags: str) -> Any:
        return CliRunner().invoke(app, ["erase", *flags, "--retain", "tiny_five_rest", "--dry-run"])

    two = ("--forget", "tiny_star", "--forget", "tiny_moon")
    result = dry(*two, "--anchor", "shape=circle", "--anchor", "shape=cross", "concepts=rotate")
    assert result.exit_code == 0, result.output
    assert "anchor: 'a flat red circle" in result.output
    assert "anchor: 'a flat red cross" in result.output
    content = yaml.safe_load(result.output.split("\nforget: ")[0])
    assert [objective["loss"] for objective in content["forget"]] == ["anchor", "anchor"]
    assert "found 3 anchors for 2" in str(dry(*two, *["--anchor", "x"] * 3).exception)
    assert "several --forget" in str(dry("tiny_star_munba", *two).exception)


def test_the_shipped_recipe_and_its_suites_have_the_same_concepts() -> None:
    job = recipe.load("tiny_five_munba")
    assert [objective.prompts for objective in job.forgotten] == [f"tiny_{shape}" for shape in FIVE]
    for objective, shape in zip(job.forgotten, FIVE, strict=True):
        suite = suites.load(f"tiny_five_{shape}")
        assert suite.concept == {"shape": shape}
        assert suite.groups["direct"].prompts == objective.prompts
        assert suite.groups["retained"].prompts == job.retain.prompts  # type: ignore[union-attr]
        synonyms = suites.group_prompts(suite, "synonyms")
        assert {prompt.fields["shape"] for prompt in synonyms.prompts} == {shape}


# concepts in turn


class _Turns(Part):
    def __init__(self, count: int) -> None:
        super().__init__(torch.nn.Linear(1, 1), ["weight"], ["retain", *NAMES[:count]], rotate=True)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_turns_are_fair_and_do_not_fall_in_with_a_method_that_counts_steps(count: int) -> None:
    part = _Turns(count)
    assert part.objectives == ("retain", "forget")
    order = [part.turn(step)["concept"] for step in range(12000)]
    for start in range(0, len(order), count):
        assert sorted(order[start : start + count]) == list(NAMES[:count]), "once a round"
    for period in (2, 3, 4, 5):
        for phase in range(period):
            counts = [order[phase::period].count(name) for name in NAMES[:count]]
            assert max(counts) - min(counts) <= 0.2 * max(counts), (period, phase, counts)


def build(model: Any, content: dict[str, Any]) -> Any:
    return build_eraser(Context(recipe.load(content), model))


def test_a_turn_uses_its_own_concept(tiny) -> None:
    """A draw of `forget` has the prompts, anchors and loss of the concept of that step."""
    contents = [many("star", "moon", "fish", concepts=mode) for mode in ("rotate", "together")]
    for content in contents:
        content["forget"][1]["scale"], content["forget"][2]["loss"] = 3.0, "ascent"
    eraser, expected = (build(tiny, content) for content in contents)
    for step in range(6):
        name = eraser.turn(step)["concept"]
        draw, own = eraser.draw("forget", [step, 99]), expected.draw(name, [step, 99])
        for key, value in own.condition.tensors.items():
            assert torch.equal(draw.condition.tensors[key], value)
        assert torch.equal(draw.noisy, own.noisy)
        assert torch.equal(eraser.loss("forget", draw), expected.loss(name, own))
    assert len({eraser.turn(step)["concept"] for step in range(3)}) == 3


def test_the_mask_is_that_of_all_concepts_and_of_both_modes(tiny) -> None:
    changes = {"training__batch_size": 2}
    together, turns = (
        build(tiny, many("star", "moon", concepts=mode, **changes))
        for mode in ("together", "rotate")
    )
    turns.turn(1)  # not that of the mask

    def sensitivity_of(eraser: Any) -> list[torch.Tensor]:
        return saliency.sensitivity(
            eraser, eraser.trainable(), seed=0, batch_size=2, reduce=lambda x: x
        )

    both = sensitivity_of(together)
    assert all(torch.equal(a, b) for a, b in zip(both, sensitivity_of(turns), strict=True))
    alone = [
        sensitivity_of(build(tiny, short(retain__prompts="tiny_five_rest") | {"forget": objective}))
        for objective in objectives("star", "moon")
    ]
    for total, star, moon in zip(both, *alone, strict=True):
        torch.testing.assert_close(total, star + moon)


# whole runs


def test_a_step_of_munba_satisfies_its_definition(tiny, tmp_path: Path) -> None:
    """a_i (G^T G a)_i = 1 for retain and each concept, with G from single gradients; SGD moves by
    lr G a.
    """
    content = many("star", "moon", "fish", training__steps=1)
    eraser = build(tiny, content)
    before = {name: value.detach().clone() for name, value in eraser.trainable().items()}
    schedule = Schedule(steps=1, batch_size=4, lr=0.5, optimizer="sgd")
    engine = Engine(
        eraser, registry.build("method", "munba", {}), schedule, tmp_path, Accelerator(cpu=True)
    )
    grads = []
    for objective in ("retain", *NAMES[:3]):
        (draw,) = engine._draws(objective, 0)
        grads.append(
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        eraser.loss(objective, draw), list(eraser.trainable().values())
                    )
                ]
            )
        )
    engine.run()
    row = logs.read(tmp_path / "log.jsonl")[0]
    step_weights = torch.tensor(
        [row["weights"][objective] for objective in ("retain", *NAMES[:3])], dtype=torch.float64
    )
    jacobian = torch.stack(grads).double()
    torch.testing.assert_close(
        step_weights * (jacobian @ jacobian.T @ step_weights),
        torch.ones(4, dtype=torch.float64),
        rtol=1e-4,
        atol=1e-4,
    )
    step = torch.cat(
        [(before[name] - value.detach()).flatten() for name, value in eraser.trainable().items()]
    )
    torch.testing.assert_close(step.double(), 0.5 * step_weights @ jacobian, rtol=1e-3, atol=1e-7)


def test_concepts_in_turn_resume_bit_for_bit(tmp_path: Path, monkeypatch) -> None:
    content = many(concepts="rotate", training__steps=7, training__save_every=2) | {
        "method": {"name": "torchjd"}
    }
    whole = concept_eraser.erase(content, output=tmp_path / "whole").folder
    rows = logs.read(whole / "log.jsonl")
    assert [row["concept"] for row in rows] == [
        _Turns(5).turn(step)["concept"] for step in range(7)
    ]
    assert all(row["losses"].keys() == {"retain", "forget"} for row in rows)

    def stop(step: int, seconds: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        concept_eraser.erase(content, output=tmp_path / "cut", on_step=stop)
    assert len(logs.read(tmp_path / "cut" / "log.jsonl")) == 3
    again = concept_eraser.erase(content, output=tmp_path / "cut", resume=True).folder
    assert same(weights(whole), weights(again))
    assert [row["concept"] for row in logs.read(again / "log.jsonl")] == [
        row["concept"] for row in rows
    ]


@pytest.mark.parametrize("mode", ["together", "rotate"])
def test_micro_batches_do_not_change_the_draws(mode: str, tmp_path: Path) -> None:
    """4 x 1 and 1 x 4 are one step (up to the rounding of sums)."""
    recipes = [
        many(
            "star",
            "moon",
            concepts=mode,
            training__steps=2,
            training__batch_size=size,
            training__micro_batches=4 // size,
        )
        for size in (4, 1)
    ]
    one, four = (
        weights(concept_eraser.erase(content, output=tmp_path / str(i)).folder)
        for i, content in enumerate(recipes)
    )
    for name, value in one.items():
        torch.testing.assert_close(value, four[name], rtol=1e-3, atol=1e-5)


def test_five_concepts_end_to_end(tiny_fp32: Path, tmp_path: Path) -> None:
    """Plain diffusers loads the run; the run records the prompts of each objective, and names the
    suites for it.
    """
    from diffusers import StableDiffusionPipeline

    run = concept_eraser.erase(
        many(training__steps=2, model=str(tiny_fp32)), output=tmp_path / "run"
    )
    pipe = StableDiffusionPipeline.from_pretrained(run.folder / "pipeline")
    assert same(
        weights(run.folder),
        {k: v for k, v in pipe.unet.state_dict().items() if k in weights(run.folder)},
    )
    row = logs.read(run.folder / "log.jsonl")[0]
    assert row["weights"].keys() == {"retain", *NAMES}
    contributions = [
        row["norms"][objective] * row["weights"][objective] for objective in row["weights"]
    ]
    assert all(value > 0 for value in contributions)
    prompt_facts = json.loads((run.folder / "environment.json").read_text())["prompts"]
    assert {name: prompt_facts[name]["id"] for name in NAMES} == {
        n: f"tiny_{s}" for n, s in zip(NAMES, FIVE, strict=True)
    }
    with pytest.raises(
        UserError, match=r"erased 5 concepts, and a suite measures one.*tiny_five_star"
    ):
        concept_eraser.evaluate(run.folder)
    evaluation = concept_eraser.evaluate(run.folder, "tiny_five_moon", n=2)
    assert evaluation.find("concept_rate", "direct") is not None
    assert resources.find("eval", "tiny_five_moon").exists()


def test_text_encoders_take_several_concepts_too(shared_small: Any, tmp_path: Path) -> None:
    for mode in ("together", "rotate"):
        content = many(
            "star",
            "moon",
            concepts=mode,
            target="text_encoder",
            trainable__select="all",
            training__steps=2,
        )
        run = concept_eraser.erase(content, output=tmp_path / mode)
        rows = logs.read(run.folder / "log.jsonl")
        forgotten = {"forget", "forget.2"} if mode == "together" else {"forget"}
        assert [set(row["losses"]) for row in rows] == [{"retain", *forgotten}] * 2
        before = shared_small.parts["text_encoder"].state_dict()
        tensors = weights(run.folder)
        assert tensors
        assert all(torch.isfinite(value).all() for value in tensors.values())
        assert any(not torch.equal(value, before[name]) for name, value in tensors.items())


def test_what_is_retained_is_apart_from_every_concept(tmp_path: Path) -> None:
    content = many("star", "moon")
    content["retain"]["prompts"] = "tiny_rest"  # which has moons
    with pytest.raises(UserError, match="'tiny_moon' and the retain set 'tiny_rest'"):
        concept_eraser.erase(content, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_page_offers_prompts_of_every_concept() -> None:
    from concept_eraser.demo import presets

    job = recipe.load(many("star", "moon"))
    offers = presets.offers(job)
    assert all(
        any(shape in text.split() for text in offers["forget"]) for shape in ("star", "moon")
    )
    assert presets.concept_of(job) is None
    assert presets.forgotten_text(job) == "2 concepts"
    with pytest.raises(UserError, match="one suite per concept"):
        presets.suite_of(job)
