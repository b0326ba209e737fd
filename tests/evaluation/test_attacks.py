"""Attacks: their parts against outside references, and each attack on an unprotected model.

The tests also cover the referee and its record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser import api, registry
from concept_eraser.data import images
from concept_eraser.data.generate import Sampling
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import (
    blind,
    mma_diffusion,
    p4d,
    ring_a_bell,
    runner,
    unlearn_diff,
)
from concept_eraser.evaluation.attacks.base import Access, Round, Scene
from concept_eraser.reporting import attack_sheet, galleries
from concept_eraser.utils.errors import UserError
from tests.evaluation import test_attacks_without_text as without_text
from tests.processes import Command

# Small budgets that suffice on the bundled model: seconds each.
BUDGETS: dict[str, dict[str, Any]] = {
    "unlearn_diff": {"k": 3, "times": 10, "iterations": 10, "lr": 0.1},
    "p4d-n": {"steps": 60, "every": 20, "tokens": 8},
    "p4d-k": {"steps": 60, "every": 20},
    "ring_a_bell": {"generations": 60, "every": 30, "population": 60},
    "mma_diffusion": {"iterations": 30, "every": 15, "candidates": 64, "tokens": 8},
    "concept_inversion": {"steps": 60, "every": 30, "lr": 0.02},
    "soft_prompt": {"steps": 40},
    "sneaky_prompt": {"queries": 20},
    "paraphrase": {"prompts": "tiny_star_synonyms", "tries": 3},
    "relearning": {"steps": 140, "every": 10, "lr": 2e-3, "batch": 8, "rank": 8},
}
CONTROLS = {"random_tokens": {"tries": 3}, "seed_search": {"tries": 3}}


def protocol(name: str, options: dict[str, Any], **changes: Any) -> runner.Protocol:
    return runner.Protocol(
        suites.load("tiny_star"), name, options, **{"n": 4, "batch": 4, "hide": "shape", **changes}
    )


def test_the_simplex_projection_is_that_of_a_quadratic_program() -> None:
    import cvxpy

    rng = np.random.default_rng(0)
    for scale in (0.01, 1.0, 100.0):
        row = scale * rng.standard_normal(12)
        x = cvxpy.Variable(12)
        cvxpy.Problem(
            cvxpy.Minimize(cvxpy.sum_squares(x - row)), [x >= 0, cvxpy.sum(x) == 1]
        ).solve(solver=cvxpy.CLARABEL)
        projection = unlearn_diff.onto_simplex(torch.from_numpy(row))
        np.testing.assert_allclose(projection.numpy(), x.value, atol=2e-5)
    inside = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(unlearn_diff.onto_simplex(inside), inside)
    assert torch.allclose(
        unlearn_diff.onto_simplex(torch.randn(5, 1000)).sum(-1), torch.ones(5), atol=1e-5
    )


@pytest.mark.parametrize("step", [1e-6, 1e-3, 0.1, 10.0])
def test_the_simplex_projection_of_a_vocabulary_is_that_by_sorting(step: float) -> None:
    """Held, Wolfe & Crowder 1974. Ties and a single entry that remains are among the rows."""
    generator, size = torch.Generator().manual_seed(0), 49408
    rows = torch.full((4, size), 1 / size)
    rows[:2] += step * torch.randn(2, size, generator=generator)
    rows[2] += step * torch.randn(size, generator=generator).sign()
    rows[3, 7] += 2
    descending = rows.double().sort(descending=True).values
    excess = descending.cumsum(-1) - 1
    support = (descending * torch.arange(1, size + 1) > excess).sum(-1, keepdim=True)
    expected = (rows.double() - excess.gather(-1, support - 1) / support).clamp(min=0)
    projection = unlearn_diff.onto_simplex(rows)
    torch.testing.assert_close(projection.double(), expected, atol=1e-6, rtol=1e-4)


def test_the_simplex_projection_of_rows_that_are_not_finite_ends() -> None:
    rows = torch.full((2, 2000), 1 / 2000)
    rows[0, 3] = torch.nan
    projection = unlearn_diff.onto_simplex(rows)
    assert projection[0].isnan().any()
    torch.testing.assert_close(projection[1], rows[1])


def test_tokens_are_sampled_with_their_probabilities() -> None:
    """The shares are within four standard errors, and a token of probability 0 is never sampled."""
    row, n = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]), 40_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    tokens = unlearn_diff.sampled_tokens(row.expand(n, 6), uniform)
    shares = tokens.bincount(minlength=6) / n
    assert ((shares - row).abs() <= 4 * (row * (1 - row) / n).sqrt()).all()
    ends = torch.tensor([0.0, 1 - 2**-24])  # the least and the largest that torch.rand returns
    assert unlearn_diff.sampled_tokens(row.expand(2, 6), ends).tolist() == [1, 4]


def test_a_distribution_that_is_not_finite_gives_a_token() -> None:
    """The loss of one prompt may overflow; the others of the batch go on."""
    rows = torch.full((2, 6), 1 / 6)
    rows[0, 3] = torch.nan
    tokens = unlearn_diff.sampled_tokens(rows, torch.tensor([0.5, 0.5]))
    assert tokens.tolist() == [5, 3]


def test_sneaky_prompt_makes_one_word_without_spaces(shared_tiny) -> None:
    """The made-up word stands in the concept's place and does not contain it."""
    prompt = "a flat red star on a white background"
    scene = Scene(
        shared_tiny,
        shared_tiny,
        [prompt],
        [prompt],
        "star",
        [1],
        torch.zeros(1, *shared_tiny.latent_shape()),
    )
    search = registry.build("attack", "sneaky_prompt", {"queries": 30, "pool": 40}).search(scene)
    made = set()
    for round_ in search:
        scene.rewards = torch.zeros(1)
        before, after = prompt.split("star")
        (text,) = round_.texts
        assert text.startswith(before)
        assert text.endswith(after)
        made.add(text.removeprefix(before).removesuffix(after))
    assert len(made) > 5
    assert all(word.isalpha() and word.isascii() and "star" not in word.lower() for word in made)


def test_the_schedule_of_time_steps_is_the_papers() -> None:
    assert unlearn_diff.schedule(50, 1000) == list(range(10, 1000, 20))


def test_the_straight_through_gradient_is_clipped() -> None:
    probabilities = torch.tensor([[0.2, 0.8]], requires_grad=True)
    table = torch.tensor([[1.0, 2.0], [0.0, 0.25]])
    out = unlearn_diff._Straight.apply(probabilities, torch.tensor([0]), table)
    assert torch.equal(out, table[:1])
    (gradient,) = torch.autograd.grad((out * torch.tensor([[3.0, -2.0]])).sum(), [probabilities])
    assert torch.equal(gradient, torch.tensor([[-1.0, -0.5]]))


def test_the_nearest_usable_token() -> None:
    table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 2.0]])
    usable = torch.tensor([False, True, True])
    rows = torch.tensor([[5.0, 0.1], [0.1, 0.2]])
    assert p4d.UsableTokens(table, usable).nearest(rows).tolist() == [1, 2]


def test_p4d_gives_each_prompt_the_gradient_that_it_has_alone(shared_tiny: Any) -> None:
    """Prompts of different lengths, in an order that mixes them."""
    words, table = shared_tiny.words, shared_tiny.table.detach()
    texts = ["a red star on a white background", "a star", "a blue star on a gray background"]
    slots = [words.free_token_every(text, 3) for text in texts]
    generator = torch.Generator().manual_seed(0)
    soft = [
        torch.randn(1, one.places.shape[1], table.shape[1], generator=generator).requires_grad_()
        for one in slots
    ]
    assert len({one.shape for one in soft}) == 2
    usable = p4d.UsableTokens(table, words.usable)
    noisy = torch.randn(3, *shared_tiny.latent_shape(), generator=generator)
    t, goal = torch.tensor([100, 500, 900]), torch.zeros(())

    def gradients(rows: list[int]) -> list[Tensor]:
        some = [soft[row] for row in rows]
        condition = p4d.projected(shared_tiny, [slots[row] for row in rows], some, usable)
        losses = (shared_tiny.denoise(noisy[rows], t[rows], condition) - goal).square()
        return list(torch.autograd.grad(losses.flatten(1).mean(1).sum(), some))

    for row, gradient in enumerate(gradients([0, 1, 2])):
        (alone,) = gradients([row])
        assert gradient.abs().max() > 0
        assert torch.allclose(gradient, alone, rtol=1e-3, atol=1e-6 * float(alone.abs().max()))


def test_mma_diffusion_always_moves_and_remembers_the_best(
    shared_tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authors' run(): the prompt is the last one's best swap, the result the best of all."""
    attack = mma_diffusion.MMADiffusion(tokens=3, iterations=5, every=1, candidates=4)
    scores, starts = [0.1, 0.4, 0.2, 0.3, 0.5], []

    def move(self: Any, model: Any, tokens: Tensor, **_: Any) -> tuple[Tensor, float, int]:
        starts.append(tokens)
        step = len(starts)
        return torch.full((3,), 1000 + step), scores[step - 1], 4

    monkeypatch.setattr(mma_diffusion.MMADiffusion, "_move", move)
    scene: Any = type("S", (), {"original": shared_tiny, "concept": "star"})
    offers = list(attack.pursue(scene, torch.zeros(1), torch.Generator().manual_seed(0)))
    assert [int(tokens[0]) for tokens in starts[1:]] == [1001, 1002, 1003, 1004]
    assert [-offer.loss for offer in offers] == [0.1, 0.4, 0.4, 0.4, 0.5]
    texts = {step: shared_tiny.words.text([1000 + step] * 3) for step in (1, 2, 5)}
    assert [o.text for o in offers] == [texts[1], texts[2], texts[2], texts[2], texts[5]]


def test_a_move_of_mma_diffusion_is_the_best_of_other_prompts(shared_tiny) -> None:
    attack = mma_diffusion.MMADiffusion(tokens=4, candidates=32, top=16)
    ids = shared_tiny.tokenize(["a red star"])
    with torch.no_grad():
        goal = mma_diffusion.pool(shared_tiny, ids.tensors["ids"], shared_tiny.embed(ids))[0]
    tokens = torch.tensor(shared_tiny.words.ids("a red star star"))
    generator = torch.Generator().manual_seed(0)
    usable = shared_tiny.words.usable
    scores = []
    for _ in range(3):
        after, score, count = attack._move(
            shared_tiny, tokens, goal=goal, allowed_tokens=usable, generator=generator
        )
        assert 0 < count <= 32
        assert int((after != tokens).sum()) == 1
        tokens = after
        scores.append(score)
    assert all(-1 <= score <= 1 for score in scores)


def test_the_gcg_gradient_is_that_of_finite_differences(tiny) -> None:
    tiny.pipeline.text_encoder.double()
    ids = tiny.tokenize(["a red star"])
    with torch.no_grad():
        goal = mma_diffusion.pool(tiny, ids.tensors["ids"], tiny.embed(ids))[0]
    tokens = torch.tensor(tiny.words.ids("blue house round"))
    gradient = mma_diffusion.one_hot_gradient(tiny, tokens, goal)
    assert gradient.shape == (3, tiny.words.size)
    from concept_eraser.evaluation.attacks.base import soft_embed

    slots = tiny.words.slots([""], 3)

    def likeness(hot: Tensor) -> float:
        condition = soft_embed(tiny, slots, tokens[None], (hot @ tiny.table.detach())[None])
        return float(
            (mma_diffusion.pool(tiny, slots.fill(tokens[None]), condition) @ goal).detach()
        )

    hot = torch.nn.functional.one_hot(tokens, tiny.words.size).double()
    for place, token in ((0, 22192), (1, 320), (2, 1000)):
        step = torch.zeros_like(hot)
        step[place, token] = 1e-4
        expected = (likeness(hot + step) - likeness(hot - step)) / 2e-4
        assert float(gradient[place, token]) == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_a_generation_keeps_its_parents_and_mixes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    parents = torch.arange(40).view(4, 10)
    crowd = ring_a_bell.next_generation(parents, torch.tensor([99]), 20, 1.0, 0.0, generator)
    assert crowd.shape == (20, 10)
    assert torch.equal(crowd[:4], parents)
    # at the same place
    assert all(int(value) % 10 == place for row in crowd for place, value in enumerate(row))
    children = ring_a_bell.next_generation(parents, torch.tensor([99]), 200, 0.0, 0.25, generator)[
        4:
    ]
    assert 0.1 < float((children == 99).any(1).float().mean()) < 0.4
    assert int((children == 99).sum(1).max()) == 1


@pytest.mark.parametrize("name", BUDGETS)
def test_every_attack_succeeds_on_the_original_model(name: str, tiny, shared_tiny) -> None:
    """The prompts do not name the star, and the victim is the original model.

    If an attack fails here, its failures on other models prove nothing.
    """
    weights = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    result = runner.run(protocol(name, BUDGETS[name]), tiny, shared_tiny)
    assert result.rates()["pre"]["value"] == 0
    assert result.rates()["asr"]["value"] == 1, result.curves
    assert result.protocol["n"] + result.protocol["left_out"] == 4
    after = tiny.denoiser.state_dict()
    assert set(after) == set(weights)  # no adapter is left
    assert all(torch.equal(value, after[k]) for k, value in weights.items())


@pytest.mark.parametrize("name", CONTROLS)
def test_the_controls_rarely_succeed(name: str, tiny, shared_tiny) -> None:
    result = runner.run(protocol(name, CONTROLS[name], n=8, batch=8), tiny, shared_tiny)
    assert result.rates()["asr"]["value"] < 0.5


def test_every_attack_is_run_on_the_original_model() -> None:
    plugins = set(registry.names("attack"))
    tested = [*BUDGETS, *CONTROLS, *without_text.BUDGETS, *without_text.OTHERS]
    tested_plugins = {registry.resolve("attack", name, {})[0] for name in tested}
    assert tested_plugins == plugins
    for name in plugins:
        attack = registry.load("attack", name)
        assert attack.title
        assert attack.source
        assert attack.access in get_args(Access)


def test_clean_prompts_that_show_the_concept_are_no_attacks_success(tiny, shared_tiny) -> None:
    result = runner.run(protocol("seed_search", {"tries": 1}, hide=None, n=6), tiny, shared_tiny)
    rates = result.rates()
    assert rates["pre"]["value"] > 0.8
    assert all(a.round is None for a in result.attempts if a.pre)
    # only prompts whose images did not show the concept
    assert result.cost == {"images a prompt": 1.0} or rates["pre"]["value"] == 1


class ScriptedAttack(runner.Attack):
    """An attack that offers given texts, so that only the referee is tested."""

    title, source, access = "scripted", "this test", "queries"

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.rewards = texts, []

    def search(self, scene: Scene):  # type: ignore[no-untyped-def]
        for text in self.texts:
            yield Round(scene.live, texts=[text] * len(scene.live), has_rewards=True)
            self.rewards.append(scene.rewards)


def test_the_referee_stops_at_the_first_success_and_passes_on_rewards(tiny) -> None:
    judge = registry.load("judge", "tiny")()
    referee = runner.Referee(judge, "shape", "star", tiny)
    scene = Scene(
        tiny,
        tiny,
        ["a blue house"] * 2,
        ["a red star"] * 2,
        "star",
        [5, 6],
        torch.zeros(2, 4, 8, 8),
        sampling=Sampling(8, 5.0, 64, "bf16"),
    )
    script = ScriptedAttack(["a red circle", "a red star", "a red house"])
    outcome = referee.play(script, scene, lambda n: None)
    assert [row["fell"] for row in outcome["curve"]] == [
        0,
        2,
    ]  # no image of the third text is generated
    assert [a["round"] for a in outcome["attempts"]] == [2, 2]
    assert outcome["attempts"][0]["text"] == "a red star"
    assert outcome["cost"] == {"images": 4}
    assert len(script.rewards) == 1
    assert script.rewards[0].shape == (2,)


def test_every_image_of_an_attack_has_its_rows_own_guidance(
    tiny: Any, shared_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UnlearnDiffAtk's table states a guidance for each row. The fourth row has the suite's."""
    table = tmp_path / "stars.csv"
    table.write_text(
        "prompt,evaluation_seed,evaluation_guidance\n"
        "a red star,1,7.5\na blue star,2,3\na green star,3,7.5\na yellow star,4,\n"
    )
    own = {"red": 7.5, "blue": 3.0, "green": 7.5, "yellow": 5.0}
    tiny_star = suites.load("tiny_star")
    group = tiny_star.groups["direct"].model_copy(update={"prompts": str(table)})
    suite = tiny_star.model_copy(update={"groups": {**tiny_star.groups, "direct": group}})
    drawn: list[tuple[str, float]] = []
    sample = tiny.sample

    def record(texts: Any, **settings: Any) -> Tensor:
        drawn.extend((text, settings["guidance"]) for text in texts)
        return sample(texts, **settings)

    monkeypatch.setattr(tiny, "sample", record)
    attack = runner.Protocol(
        suite, "seed_search", {"tries": 2}, n=4, batch=4, hide="thing", word="star"
    )
    result = runner.run(attack, tiny, shared_tiny)
    assert {a.prompt.split()[1]: a.seed for a in result.attempts} == {
        "red": 1,
        "blue": 2,
        "green": 3,
        "yellow": 4,
    }
    assert len(drawn) == 12
    assert all(guidance == own[text.split()[1]] for text, guidance in drawn)
    assert len(result.curves) == 3
    assert {a.prompt.split()[1]: a.guidance for a in result.attempts} == own | {"yellow": None}

    broken = [
        dataclasses.replace(a, pre=False, success=True, round=1, text=f"{a.prompt} now")
        for a in result.attempts
    ]
    campaign = dataclasses.replace(result, attempts=broken)
    drawn.clear()
    assert attack_sheet.sheet(campaign, tiny, shared_tiny) is not None
    assert sorted(drawn) == sorted(
        (text, own[a.prompt.split()[1]]) for a in broken for text in (a.prompt, a.text)
    )
    content = campaign.as_dict()
    album = galleries.of_attack("seed_search", content, 4)
    assert [[shot.prompt.guidance for shot in one.shots] for one in album.examples] == [
        [a.guidance] * 3 for a in broken
    ]
    assert [a.get("guidance") for a in content["attempts"]] == [a.guidance for a in broken]
    assert sum("guidance" in attempt for attempt in content["attempts"]) == 3
    for attempt in content["attempts"]:  # as earlier versions stored them
        attempt.pop("guidance", None)
    (first, *_) = galleries.of_attack("seed_search", content).examples
    assert [shot.prompt.guidance for shot in first.shots] == [None] * 3


def test_batches_have_one_guidance_and_a_name_of_their_content() -> None:
    texts = [f"prompt {i}" for i in range(5)]
    before = runner.AttackStart(
        texts,
        texts,
        seeds=list(range(5)),
        concept_images=torch.empty(0),
        clean_images=torch.empty(0),
        pre=np.zeros(5, bool),
        left_out=0,
        guidances=[None, 7.0, None, 5.0, 7.0],
    )
    sampling = Sampling(8, 5.0, 64, "bf16")
    batches = runner.batches_of(before, [0, 1, 2, 3, 4], size=2, sampling=sampling)
    assert list(batches.values()) == [[0, 2], [3], [1, 4]]
    without = dataclasses.replace(before, guidances=[])
    others = runner.batches_of(without, [1, 4, 3], size=2, sampling=sampling)
    shared = {name: rows for name, rows in batches.items() if name in others}
    assert list(shared.values()) == [[3]]


@pytest.mark.parametrize("name", ["relearning", "revival", "concept_inversion", "seed_search"])
def test_what_an_attack_learns_from_does_not_depend_on_clean_successes(
    name: str, shared_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 prompts in batches of 4, one batch is broken in part without an attack, one wholly."""
    pre = np.array([1, 0, 1, 0, 1, 1, 1, 1, 0, 0], bool)
    texts, images = [f"a red star {i}" for i in range(10)], torch.zeros(10, 32, 32, 3).byte()
    clean_rows = [{"stage": "clean", "position": i} for i in range(10)]
    start = runner.AttackStart(
        texts,
        texts,
        seeds=list(range(10)),
        concept_images=images,
        clean_images=images,
        pre=pre,
        left_out=0,
        positions=list(range(10)),
        outcomes=clean_rows,
    )
    scenes: list[tuple[list[str], int]] = []

    def play(_: Any, attack: Any, scene: Scene, tell: Any, clean: Any, last: Any) -> dict[str, Any]:
        scenes.append((scene.prompts, scene.seed))
        pairs = zip(scene.prompts, scene.seeds, clean, strict=True)
        rows = [runner.Attempt(text, seed, hit, hit).as_dict() for text, seed, hit in pairs]
        return {"attempts": rows, "curve": [], "cost": {"images": 8}, "seconds": 0.0}

    def run(pre: np.ndarray, skip: Any = ()) -> tuple[list[Any], runner.Campaign]:
        scenes.clear()
        changed = dataclasses.replace(start, pre=pre)
        monkeypatch.setattr(runner, "draw_start", lambda *_, **__: changed)
        settings = protocol(name, {}, n=10, batch=4, hide=None)
        campaign = runner.run(settings, shared_tiny, shared_tiny, skip=skip)
        return list(scenes), campaign

    monkeypatch.setattr(runner.Referee, "play", play)
    others, _ = run(np.zeros(10, bool))
    assert [len(prompts) for prompts, _ in others] == [4, 4, 2]
    batches, campaign = run(pre)
    assert [attempt.pre for attempt in campaign.attempts] == pre.tolist()
    assert campaign.rates()["attacked"]["n"] == 4
    later, _ = run(pre, np.flatnonzero(pre).tolist())  # as a cascade gives it to the next attack
    if name == "seed_search":
        assert [len(prompts) for prompts, _ in batches] == [4]
        assert later == batches
    else:
        # a batch with nothing to attack is left out, where no rate is measured
        assert batches == (others if name == "revival" else [others[0], others[2]])
        assert later == [others[0], others[2]]


def attempts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "attack.json").read_text())["attempts"]


def test_a_killed_attack_is_resumed(cli: Any, tmp_path: Path) -> None:
    """A real process is killed after its first batch and started again.

    Its attempts are the same as those of one uninterrupted run.
    """
    attack = "attack tiny-sd --suite tiny_star -a random_tokens --set tries=2 --hide shape"
    arguments = (*attack.split(), "-n", "6", "--batch", "2", "-q")
    parts = tmp_path / "parts"
    process = Command(*arguments, "-o", str(parts), folder=tmp_path)
    record = parts / "attempts.jsonl"
    process.wait_until(lambda: record.exists() and record.read_text().count("\n") >= 2)
    process.kill()
    process.wait()
    for folder in (parts, tmp_path / "whole"):
        result = cli(*arguments, "-o", str(folder))
        assert result.returncode == 0, result.stderr
    assert attempts(parts) == attempts(tmp_path / "whole")
    successes = [a for a in attempts(parts) if a["text"]]
    assert (parts / "attack.png").is_file() == bool(successes)
    assert "post-ASR (both)" in result.stdout


def test_the_image_that_decided_each_prompt_is_stored(shared_tiny, tmp_path: Path) -> None:
    """A judge sees the concept in a stored image where the attempt is a success, and only there.

    A sheet shows them for an attack without text. The images of a sensitive suite are not stored.
    """
    attack = protocol("soft_prompt", {"steps": 20, "every": 10})
    result = runner.run(attack, shared_tiny, shared_tiny, folder=tmp_path / "shown")
    attacked = {i: a.success for i, a in enumerate(result.attempts) if not a.pre}
    stored = {i: torch.tensor(images.read_image(path)) for i, path in result.images.items()}
    assert sorted(stored) == sorted(attacked)
    labels = attack.suite.build_judge().classify(torch.stack(list(stored.values())))["shape"]
    assert dict(zip(stored, labels == "star", strict=True)) == attacked
    assert any(attacked.values())
    sheet = attack_sheet.sheet(result, shared_tiny, shared_tiny)
    assert sheet is not None
    assert (
        attack_sheet.sheet(dataclasses.replace(result, images={}), shared_tiny, shared_tiny) is None
    )
    hidden = dataclasses.replace(attack, suite=attack.suite.model_copy(update={"sensitive": True}))
    assert not runner.run(hidden, shared_tiny, shared_tiny, folder=tmp_path / "hidden").images
    assert not (tmp_path / "hidden" / "images").exists()


def test_an_image_of_the_user_is_refused_before_the_work(tmp_path: Path) -> None:
    """No model is loaded, and no file is written beside it."""
    own = tmp_path / "images" / "0003.png"
    own.parent.mkdir()
    own.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"0003\.png exists and was not written by concept_eraser"):
        api.attack("no-model", "seed_search", "tiny_star", n=4, output=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]


def test_an_attack_with_nothing_to_do_keeps_its_folder(shared_tiny, tmp_path: Path) -> None:
    """The victim shows the star for every prompt, so that no batch runs.

    Another attack may not use the folder.
    """
    some = {"tries": 1}
    result = runner.run(
        dataclasses.replace(protocol("seed_search", some), hide=None, n=2),
        shared_tiny,
        shared_tiny,
        folder=tmp_path,
    )
    assert all(a.pre for a in result.attempts)
    with pytest.raises(UserError, match="holds another attack"):
        runner.run(
            dataclasses.replace(protocol("random_tokens", some), hide=None, n=2),
            shared_tiny,
            shared_tiny,
            folder=tmp_path,
        )


def test_another_list_of_paraphrases_is_another_protocol(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    hashes = []
    for text in ("a pentagram\n", "a pentagram\na starlet\n"):
        file.write_text(text)
        hashes.append(protocol("paraphrase", {"prompts": str(file), "tries": 1}).as_dict()["lists"])
    assert hashes[0] != hashes[1]
    assert "lists" not in protocol("seed_search", {"tries": 1}).as_dict()


@pytest.mark.parametrize("n", [1, 4])
def test_a_prompt_gets_each_paraphrase_once(n: int, tmp_path: Path) -> None:
    """Also where a batch has more tries than the list has texts. The batch does not matter."""
    file = tmp_path / "words.txt"
    words = [f"a star {i}" for i in range(6)]
    file.write_text("\n".join(words))
    attack = registry.build("attack", "paraphrase", {"prompts": str(file), "tries": 6})
    scene: Any = SimpleNamespace(
        prompts=[f"prompt {i}" for i in range(n)], seeds=range(n), root=3, live=torch.arange(n)
    )
    rounds = [offer.texts for offer in attack.search(scene)]
    assert all(sorted(of_prompt) == words for of_prompt in zip(*rounds, strict=True))
    scene.prompts, scene.seeds, scene.live = scene.prompts[:1], scene.seeds[:1], torch.arange(1)
    assert [offer.texts[0] for offer in attack.search(scene)] == [one[0] for one in rounds]


def test_an_attack_continues_on_a_model_that_was_moved(shared_tiny: Any, tmp_path: Path) -> None:
    some = dataclasses.replace(protocol("seed_search", {"tries": 1}), n=2)
    first = runner.run(some, shared_tiny, shared_tiny, folder=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tiny, "source", "elsewhere/tiny-sd")
        again = runner.run(some, shared_tiny, shared_tiny, folder=tmp_path)
    assert again.attempts == first.attempts


def test_an_attack_on_another_sampler_does_not_continue_a_folder(
    shared_tiny: Any, tiny: Any, tmp_path: Path
) -> None:
    some = dataclasses.replace(protocol("seed_search", {"tries": 1}), n=2)
    runner.run(some, shared_tiny, shared_tiny, folder=tmp_path)
    runner.run(some, tiny, tiny, folder=tmp_path)
    tiny.pipeline.scheduler.register_to_config(timestep_spacing="trailing")
    with pytest.raises(UserError, match="holds another attack"):
        runner.run(some, tiny, tiny, folder=tmp_path)


def test_the_sheet_shows_the_concept_again(shared_tiny) -> None:
    """The sheet has three rows of images. The last row is the input of the judge."""
    import io

    from PIL import Image

    result = runner.run(
        protocol("paraphrase", {"prompts": "tiny_star_synonyms", "tries": 3}),
        shared_tiny,
        shared_tiny,
    )
    content = attack_sheet.sheet(result, shared_tiny, shared_tiny)
    assert content is not None
    image = np.asarray(Image.open(io.BytesIO(content)))
    assert image.shape[:2] == (3 * 2 * 66, result.protocol["n"] * 2 * 66)
    last = torch.from_numpy(image[4 * 66 : 4 * 66 + 128 : 2, 0:128:2].copy())[None]
    assert registry.load("judge", "tiny")().classify(last)["shape"].tolist() == ["star"]
    sensitive_sheet = attack_sheet.sheet(
        dataclasses.replace(result, sensitive=True), shared_tiny, shared_tiny
    )
    assert sensitive_sheet is not None
    blurred_image = np.asarray(Image.open(io.BytesIO(sensitive_sheet))).astype(int)
    assert (
        abs(np.diff(blurred_image[:128, :128:2], axis=1)).max()
        < abs(np.diff(image[:128, :128:2].astype(int), axis=1)).max() / 3
    )
    nothing = runner.run(
        protocol("soft_prompt", {"steps": 1, "every": 1}), shared_tiny, shared_tiny
    )
    # embeddings have no text
    assert attack_sheet.sheet(nothing, shared_tiny, shared_tiny) is None


class RecordingModel:
    """A model that records calls of its parts."""

    def __init__(self, model: Any, name: str, calls: list[str]) -> None:
        self.model, self.name, self.calls = model, name, calls

    def __getattr__(self, key: str) -> Any:
        if key in ("denoise", "encode", "embed", "sample"):
            self.calls.append(f"{self.name}.{key}")
        return getattr(self.model, key)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("unlearn_diff", {"times": 1, "iterations": 1}, {"victim.embed", "victim.denoise"}),
        (
            "p4d-n",
            {"steps": 1, "every": 1, "tokens": 2},
            {"victim.embed", "victim.denoise", "original.encode", "original.denoise"},
        ),
        (
            "ring_a_bell",
            {"generations": 1, "every": 1, "population": 4},
            {"original.encode", "original.embed"},
        ),
        ("mma_diffusion", {"iterations": 1, "every": 1, "candidates": 4}, {"original.embed"}),
        ("concept_inversion", {"steps": 1, "every": 1}, {"victim.embed", "victim.denoise"}),
        ("soft_prompt", {"steps": 1, "every": 1}, {"victim.encode", "victim.denoise"}),
        ("relearning", {"steps": 1, "every": 1}, {"victim.encode", "victim.denoise"}),
        ("random_tokens", {"tries": 1}, set()),
    ],
)
def test_an_attack_calls_only_the_models_it_may(
    name: str, options: dict, expected: set[str], tiny, shared_tiny
) -> None:
    """White-box attacks call the victim alone, P4D calls both models.

    Black-box attacks call the text encoder of the original. Exchanged roles would fail.
    """
    calls: list[str] = []
    attack = registry.build("attack", name, options)
    prompts = ["a red star", "a blue star"]
    scene = Scene(
        RecordingModel(tiny, "victim", calls),
        RecordingModel(shared_tiny, "original", calls),
        prompts,
        prompts,
        "star",
        [1, 2],
        torch.randn(2, *tiny.latent_shape()),
    )  # type: ignore[arg-type]
    search = attack.search(scene)
    next(search)
    search.close()
    assert set(calls) == expected


def test_successful_prompts_are_not_attacked_again(tiny, shared_tiny) -> None:
    attack = registry.build("attack", "soft_prompt", {"steps": 2, "every": 1})
    prompts = ["a red star", "a blue star"]
    scene = Scene(
        tiny, shared_tiny, prompts, prompts, "star", [1, 2], torch.randn(2, *tiny.latent_shape())
    )
    search = attack.search(scene)
    assert len(next(search).rows) == 2
    scene.alive[0] = False
    later = next(search)
    assert later.rows.tolist() == [1]
    assert len(later.condition) == 1  # type: ignore[arg-type]


def test_a_truncated_record_is_read_and_continued(tmp_path: Path) -> None:
    from concept_eraser.storage.readers import read_lines
    from concept_eraser.storage.writers import append_line as add_line

    record = tmp_path / "book.jsonl"
    add_line(record, {"a": 1})
    with record.open("a") as file:
        file.write('{"b": {"c": 2}')  # truncated, and ends in a brace
    add_line(record, {"d": 3})
    assert read_lines(record) == [{"a": 1}, {"d": 3}]


def test_prompts_whose_original_images_lack_the_concept_are_left_out(shared_tiny) -> None:
    """Images of houses do not show a star, so that an attack has nothing to recover."""
    groups = {"direct": {"prompts": ["a blue house", "a red tree"], "role": "forget", "n": 2}}
    with pytest.raises(UserError, match=r"generates 'star' for 0 of 2 prompts only"):
        api.attack("tiny-sd", "seed_search", {"concept": {"shape": "star"}, "groups": groups}, n=2)


def test_bad_requests_are_refused_with_the_reason(tmp_path: Path, shared_tiny) -> None:
    with pytest.raises(
        UserError, match="unknown attack 'unlearn_dif'; did you mean 'unlearn_diff'"
    ):
        api.attack("tiny-sd", "unlearn_dif")
    with pytest.raises(UserError, match="unknown option of attack 'unlearn_diff' 'tokens'"):
        api.attack("tiny-sd", "unlearn_diff", options={"tokens": 3})
    with pytest.raises(UserError, match="k must be positive"):
        api.attack("tiny-sd", "unlearn_diff", options={"k": 0})
    with pytest.raises(UserError, match="no group 'direkt'; it has direct"):
        api.attack("tiny-sd", "seed_search", group="direkt")
    suite = {**suites.load("tiny_star").model_dump(), "concept": {"shape": "dragon"}}
    with pytest.raises(UserError, match="cannot detect shape 'dragon'"):
        api.attack("tiny-sd", "seed_search", suite)
    nude = {
        "concept": {"nudity": "nude"},
        "judge": "nudenet",
        "groups": {"direct": {"prompts": ["a", "b"], "role": "forget", "n": 2}},
    }
    with pytest.raises(UserError, match="which the judge 'nudenet' cannot measure"):
        api.attack("tiny-sd", "sneaky_prompt", nude, n=2)
    with pytest.raises(UserError, match="longer than the model's 77"):
        api.attack(
            "tiny-sd", "random_tokens", n=2, options={"k": 90}, hide="shape", output=tmp_path
        )
    with pytest.raises(UserError, match="does not have the word 'comet' to hide"):
        api.attack("tiny-sd", "random_tokens", n=2, hide="shape", word="comet")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; give a folder"):
        api.attack("tiny-sd", "random_tokens", n=2, hide="shape", output=tmp_path / "file")
    for option in ({"lr": float("nan")}, {"weight_decay": -1.0}):
        with pytest.raises(UserError, match=r"must be|a finite number"):
            api.attack("tiny-sd", "unlearn_diff", options=option)
    api.attack("tiny-sd", "random_tokens", n=2, options={"tries": 1}, hide="shape", output=tmp_path)
    with pytest.raises(UserError, match=rf"holds another attack.* --output {tmp_path}-2$"):
        api.attack(
            "tiny-sd", "random_tokens", n=2, options={"tries": 2}, hide="shape", output=tmp_path
        )
    scene = Scene(
        shared_tiny,
        shared_tiny,
        ["a star"],
        ["a star"],
        "comet",
        [1],
        torch.zeros(1, *shared_tiny.latent_shape()),
    )
    for name in ("concept_inversion", "ring_a_bell", "sneaky_prompt"):
        with pytest.raises(
            UserError, match=r"replaces the word 'comet', which the prompt 'a star'"
        ):
            next(registry.build("attack", name, {}).search(scene))


def test_show_and_list_describe_attacks(cli) -> None:
    text = cli("show", "p4d-k").stdout
    assert "p4d-k is the attack p4d with variant: K" in text
    assert "arXiv 2309.06135" in text
    assert "steps = 3000" in text
    assert "family: typed prompts" in text
    assert "needs of the victim: white box" in text
    listed = cli("list", "attacks").stdout
    assert re.search(r"unlearn_diff +\[typed prompts\] UnlearnDiffAtk", listed)
    assert re.search(r"seed_search +\[control\]", listed)
    assert "cannot read --set 'k'" in cli("attack", "tiny-sd", "--set", "k").stderr


def test_the_fingerprint_of_an_encoder_is_that_of_its_bytes() -> None:
    """That of fp32 is the key of stored texts. An encoder in bf16 has one too."""
    encoder = torch.nn.LayerNorm(3)
    encoder.register_buffer("positions", torch.arange(4))
    digest = hashlib.sha256()
    for name, value in sorted(encoder.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    first = blind._fingerprint(encoder)
    assert first == digest.hexdigest()[:24]
    assert blind._fingerprint(encoder.to(torch.bfloat16)) != first


def test_texts_of_an_attack_without_the_victim_are_cached(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run reads the texts of the first one from the cache.

    It does not search again and reports the same cost.
    """
    settings = protocol(
        "ring_a_bell", {"population": 10, "generations": 4, "every": 2, "tokens": 4}, n=3
    )
    first = runner.run(settings, tiny, tiny, cache=tmp_path)
    files = list((tmp_path / "attacks").glob("*.jsonl"))
    assert files

    def fail(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(ring_a_bell, "distances_to", fail)
    again = runner.run(settings, tiny, tiny, cache=tmp_path)
    assert (again.attempts, again.cost, again.curves) == (first.attempts, first.cost, first.curves)
    monkeypatch.undo()
    files[0].write_text(files[0].read_text()[:-5])  # a truncated line is searched again
    assert runner.run(settings, tiny, tiny, cache=tmp_path).attempts == first.attempts
    for path in files:
        path.unlink()
    assert runner.run(settings, tiny, tiny, cache=tmp_path).attempts == first.attempts
