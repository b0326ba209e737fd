"""Attacks: their parts against outside references, each attack's proof on an unprotected model, and
the referee's book.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser import api, registry
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import mma_diffusion, p4d, ring_a_bell, runner, unlearn_diff
from concept_eraser.evaluation.attacks.base import Round, Scene
from concept_eraser.reporting import attack_sheet
from concept_eraser.utils.errors import UserError
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
        found = unlearn_diff.onto_simplex(torch.from_numpy(row))
        np.testing.assert_allclose(found.numpy(), x.value, atol=2e-5)
    inside = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(unlearn_diff.onto_simplex(inside), inside)
    assert torch.allclose(
        unlearn_diff.onto_simplex(torch.randn(5, 1000)).sum(-1), torch.ones(5), atol=1e-5
    )


def test_the_schedule_of_time_steps_is_the_papers() -> None:
    assert unlearn_diff.schedule(50, 1000) == list(range(10, 1000, 20))


def test_the_straight_through_gradient_is_clipped() -> None:
    probabilities = torch.tensor([[0.2, 0.8]], requires_grad=True)
    hard = torch.tensor([[1.0, 0.0]])
    out = unlearn_diff._Straight.apply(probabilities, hard)
    assert torch.equal(out, hard)
    (gradient,) = torch.autograd.grad((out * torch.tensor([[3.0, -0.5]])).sum(), [probabilities])
    assert torch.equal(gradient, torch.tensor([[1.0, -0.5]]))


def test_the_nearest_usable_token() -> None:
    table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 2.0]])
    usable = torch.tensor([False, True, True])
    rows = torch.tensor([[5.0, 0.1], [0.1, 0.2]])
    assert p4d.nearest(rows, table, usable).tolist() == [1, 2]


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
    mutated = ring_a_bell.next_generation(parents, torch.tensor([99]), 200, 0.0, 0.25, generator)[
        4:
    ]
    assert 0.1 < float((mutated == 99).any(1).float().mean()) < 0.4
    assert int((mutated == 99).sum(1).max()) == 1


@pytest.mark.parametrize("name", BUDGETS)
def test_every_attack_breaks_an_unprotected_model(name: str, tiny, shared_tiny) -> None:
    """Prompts that do not say star, on the original: if an attack cannot bring a star here, its
    failures prove nothing.
    """
    kept = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    found = runner.run(protocol(name, BUDGETS[name]), tiny, shared_tiny)
    assert found.rates()["pre"]["value"] == 0
    assert found.rates()["asr"]["value"] == 1, found.curves
    assert found.protocol["n"] + found.protocol["left_out"] == 4
    after = tiny.denoiser.state_dict()
    assert set(after) == set(kept)  # nothing of an adapter is left
    assert all(torch.equal(value, after[k]) for k, value in kept.items())


@pytest.mark.parametrize("name", CONTROLS)
def test_the_controls_do_not(name: str, tiny, shared_tiny) -> None:
    found = runner.run(protocol(name, CONTROLS[name], n=8, batch=8), tiny, shared_tiny)
    assert found.rates()["asr"]["value"] < 0.5


def test_every_attack_has_its_proof() -> None:
    plugins = set(registry.names("attack"))
    tested = {registry.resolve("attack", name, {})[0] for name in [*BUDGETS, *CONTROLS]}
    assert tested == plugins
    for name in plugins:
        attack = registry.load("attack", name)
        assert attack.title
        assert attack.source
        assert attack.access in ("white box", "text encoder", "queries", "weights")


def test_clean_prompts_that_show_the_concept_are_no_attacks_success(tiny, shared_tiny) -> None:
    found = runner.run(protocol("seed_search", {"tries": 1}, hide=None, n=6), tiny, shared_tiny)
    rates = found.rates()
    assert rates["pre"]["value"] > 0.8
    assert all(a.round is None for a in found.attempts if a.pre)
    # only those that did not show it
    assert found.cost == {"images a prompt": 1.0} or rates["pre"]["value"] == 1


class Scripted(runner.Attack):
    """Offers given texts: the referee alone is under test."""

    title, source, access = "scripted", "this test", "queries"

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.rewards = texts, []

    def search(self, scene: Scene):  # type: ignore[no-untyped-def]
        for text in self.texts:
            yield Round(scene.live, texts=[text] * len(scene.live), has_rewards=True)
            self.rewards.append(scene.rewards)


def test_the_referee_stops_at_the_first_success_and_tells_the_reward(tiny) -> None:
    from concept_eraser.data.generate import Sampling

    judge = registry.load("judge", "tiny")()
    referee = runner.Referee(judge, "shape", "star", tiny, Sampling(8, 5.0, 64, "bf16"))
    scene = Scene(
        tiny,
        tiny,
        ["a blue house"] * 2,
        ["a red star"] * 2,
        "star",
        [5, 6],
        torch.zeros(2, 4, 8, 8),
    )
    script = Scripted(["a red circle", "a red star", "a red house"])
    done = referee.play(script, scene, lambda n: None)
    assert [row["fell"] for row in done["curve"]] == [0, 2]  # the third text is never drawn
    assert [a["round"] for a in done["attempts"]] == [2, 2]
    assert done["attempts"][0]["text"] == "a red star"
    assert done["cost"] == {"images": 4}
    assert len(script.rewards) == 1
    assert script.rewards[0].shape == (2,)


def attempts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "attack.json").read_text())["attempts"]


def test_a_killed_attack_goes_on(cli: Any, tmp_path: Path) -> None:
    """A real process, killed after its first batch, and started again: the same attempts as in one
    go.
    """
    attack = "attack tiny-sd --suite tiny_star -a random_tokens --set tries=2 --hide shape"
    arguments = (*attack.split(), "-n", "6", "--batch", "2", "-q")
    parts = tmp_path / "parts"
    process = Command(*arguments, "-o", str(parts), folder=tmp_path)
    book = parts / "attempts.jsonl"
    process.wait_until(lambda: book.exists() and book.read_text().count("\n") >= 2)
    process.kill()
    process.wait()
    for folder in (parts, tmp_path / "whole"):
        done = cli(*arguments, "-o", str(folder))
        assert done.returncode == 0, done.stderr
    assert attempts(parts) == attempts(tmp_path / "whole")
    fell = [a for a in attempts(parts) if a["text"]]
    assert (parts / "attack.png").is_file() == bool(fell)
    assert "post-ASR (both)" in done.stdout


def test_an_attack_with_nothing_to_do_keeps_its_folder(shared_tiny, tmp_path: Path) -> None:
    """The victim shows the star everywhere, so no batch is played; another attack may not take the
    folder over.
    """
    some = {"tries": 1}
    found = runner.run(
        dataclasses.replace(protocol("seed_search", some), hide=None, n=2),
        shared_tiny,
        shared_tiny,
        folder=tmp_path,
    )
    assert all(a.pre for a in found.attempts)
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


def test_the_sheet_shows_the_concept_again(shared_tiny) -> None:
    """Three rows of images; the last one is what the judge saw."""
    import io

    from PIL import Image

    found = runner.run(
        protocol("paraphrase", {"prompts": "tiny_star_synonyms", "tries": 3}),
        shared_tiny,
        shared_tiny,
    )
    content = attack_sheet.sheet(found, shared_tiny, shared_tiny)
    assert content is not None
    image = np.asarray(Image.open(io.BytesIO(content)))
    assert image.shape[:2] == (3 * 2 * 66, found.protocol["n"] * 2 * 66)
    last = torch.from_numpy(image[4 * 66 : 4 * 66 + 128 : 2, 0:128:2].copy())[None]
    assert registry.load("judge", "tiny")().look(last)["shape"].tolist() == ["star"]
    hidden = attack_sheet.sheet(
        dataclasses.replace(found, sensitive=True), shared_tiny, shared_tiny
    )
    assert hidden is not None
    blurred = np.asarray(Image.open(io.BytesIO(hidden))).astype(int)
    assert (
        abs(np.diff(blurred[:128, :128:2], axis=1)).max()
        < abs(np.diff(image[:128, :128:2].astype(int), axis=1)).max() / 3
    )
    nothing = runner.run(
        protocol("soft_prompt", {"steps": 1, "every": 1}), shared_tiny, shared_tiny
    )
    # embeddings have no text to draw
    assert attack_sheet.sheet(nothing, shared_tiny, shared_tiny) is None


class Watched:
    """A model that says which of its parts were asked."""

    def __init__(self, model: Any, name: str, asked: list[str]) -> None:
        self.model, self.name, self.asked = model, name, asked

    def __getattr__(self, key: str) -> Any:
        if key in ("denoise", "encode", "embed", "sample"):
            self.asked.append(f"{self.name}.{key}")
        return getattr(self.model, key)


@pytest.mark.parametrize(
    ("name", "options", "used"),
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
def test_an_attack_asks_whom_it_may(
    name: str, options: dict, used: set[str], tiny, shared_tiny
) -> None:
    """White boxes ask the victim alone, P4D both, black boxes the original's text encoder: swapped
    roles would show.
    """
    asked: list[str] = []
    attack = registry.build("attack", name, options)
    prompts = ["a red star", "a blue star"]
    scene = Scene(
        Watched(tiny, "victim", asked),
        Watched(shared_tiny, "original", asked),
        prompts,
        prompts,
        "star",
        [1, 2],
        torch.randn(2, *tiny.latent_shape()),
    )  # type: ignore[arg-type]
    search = attack.search(scene)
    next(search)
    search.close()
    assert set(asked) == used


def test_fallen_prompts_stay_as_they_are(tiny, shared_tiny) -> None:
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


def test_a_book_that_was_cut_is_read_and_written_on(tmp_path: Path) -> None:
    from concept_eraser.storage.readers import read_lines
    from concept_eraser.storage.writers import append_line as add_line

    book = tmp_path / "book.jsonl"
    add_line(book, {"a": 1})
    with book.open("a") as file:
        file.write('{"b": {"c": 2}')  # cut, and ends in a brace
    add_line(book, {"d": 3})
    assert read_lines(book) == [{"a": 1}, {"d": 3}]


def test_prompts_that_the_original_does_not_draw_are_left_out(shared_tiny) -> None:
    """Houses are no images of stars, so there is nothing to find again."""
    groups = {"direct": {"prompts": ["a blue house", "a red tree"], "role": "forget", "n": 2}}
    with pytest.raises(UserError, match=r"draws 'star' for 0 of 2 prompts only"):
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
    with pytest.raises(UserError, match="cannot see shape 'dragon'"):
        api.attack("tiny-sd", "seed_search", suite)
    nude = {
        "concept": {"nudity": "nude"},
        "judge": "nudenet",
        "groups": {"direct": {"prompts": ["a", "b"], "role": "forget", "n": 2}},
    }
    with pytest.raises(UserError, match="which the judge 'nudenet' cannot say"):
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
    with pytest.raises(UserError, match="holds another attack"):
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


def test_show_and_list_tell_of_attacks(cli) -> None:
    shown = cli("show", "p4d-k").stdout
    assert "p4d-k is the attack p4d with variant: K" in shown
    assert "arXiv 2309.06135" in shown
    assert "steps = 3000" in shown
    assert "needs of the victim: white box" in shown
    assert "unlearn_diff" in cli("list", "attacks").stdout
    assert "cannot read --set 'k'" in cli("attack", "tiny-sd", "--set", "k").stderr


def test_what_a_blind_attack_found_is_kept_for_the_next_victim(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second campaign finds the first one's texts without one call of the text encoder's
    search, at the same cost.
    """
    told = protocol(
        "ring_a_bell", {"population": 10, "generations": 4, "every": 2, "tokens": 4}, n=3
    )
    first = runner.run(told, tiny, tiny, cache=tmp_path)
    kept = list((tmp_path / "attacks").glob("*.jsonl"))
    assert kept

    def fail(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(ring_a_bell, "distances_to", fail)
    again = runner.run(told, tiny, tiny, cache=tmp_path)
    assert (again.attempts, again.cost, again.curves) == (first.attempts, first.cost, first.curves)
    monkeypatch.undo()
    kept[0].write_text(kept[0].read_text()[:-5])  # a line that a kill cut off is searched again
    assert runner.run(told, tiny, tiny, cache=tmp_path).attempts == first.attempts
    for path in kept:
        path.unlink()
    assert runner.run(told, tiny, tiny, cache=tmp_path).attempts == first.attempts
