"""The hub: ids with a revision, the cache on disk, no network, and uploads to a local server."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.models import hub, single_file
from concept_eraser.models.loading import load, load_part
from concept_eraser.models.module import build
from concept_eraser.utils import resources
from tests.conftest import short
from tests.fake_hub import TOKEN, Hub

FOLDER = resources.tiny_weights() / "tiny-sd"
MAIN, OLD = "0" * 40, "1" * 40
NOBODY = "http://127.0.0.1:9"  # no server listens there


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "no_star"
    concept_eraser.erase(
        short(
            model="tiny-sd",
            training__steps=2,
            trainable={"select": "cross_attention_kv", "lora": {"rank": 2}},
        ),
        output=folder,
        save="pipeline",
    )
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A cache in the layout of the hub's client: main, and a branch with another scheduler."""
    base = tmp_path / "hub" / "models--someone--tiny"
    (base / "refs").mkdir(parents=True)
    for name, commit in (("main", MAIN), ("old", OLD)):
        shutil.copytree(FOLDER, base / "snapshots" / commit)
        (base / "refs" / name).write_text(commit)
    index = base / "snapshots" / OLD / "scheduler" / "scheduler_config.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "num_train_timesteps": 500}))
    return tmp_path / "hub"


@pytest.fixture
def world(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the hub's address and cache, which its client reads from the environment at
    its import.
    """
    from huggingface_hub import constants

    def be(endpoint: str = NOBODY, *, offline: bool = False, token: str | None = None) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", token or "")

    return be


@pytest.mark.parametrize("offline", [True, False])
def test_a_revision_comes_from_the_cache(offline: bool, world) -> None:
    """By branch and by commit; offline by a setting, and because the hub does not answer."""
    world(offline=offline)
    for name, steps in (
        ("someone/tiny", 1000),
        ("someone/tiny@old", 500),
        (f"someone/tiny@{OLD}", 500),
    ):
        model = load(name)
        assert (model.source, model.timesteps) == (name, steps)


def test_without_network_it_fails_fast_in_one_sentence(world) -> None:
    """A hub that refuses, one that never answers, and a revision that the cache lacks."""
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
    for name, endpoint, message in (
        (
            "nobody/nothing",
            NOBODY,
            (
                "the hub cannot be reached, and the cache on this machine does not hold it; "
                "give a local folder, or set HF_HOME"
            ),
        ),
        (
            "nobody/nothing",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            "the hub cannot be reached",
        ),
        ("someone/tiny@new", NOBODY, "does not hold its revision 'new'"),
    ):
        world(endpoint)
        start = time.time()
        with pytest.raises(UserError, match=message) as error:
            load(name)
        assert "\n" not in str(error.value)
        assert time.time() - start < hub.PATIENCE + 2, "on a busy machine"
    silent.close()


def test_a_table_of_a_silent_hub_is_an_error_at_once(world) -> None:
    """The hub's client alone tries five times, for half a minute."""
    from concept_eraser.data import tables

    silent = socket.create_server(("127.0.0.1", 0))
    for endpoint in (NOBODY, f"http://127.0.0.1:{silent.getsockname()[1]}"):
        world(endpoint)
        start = time.time()
        with pytest.raises(
            UserError,
            match=r"did not give 'hf://nobody/nothing/x.csv'.*Download the file and give its path",
        ):
            tables.from_hub("hf://nobody/nothing/x.csv")
        assert time.time() - start < hub.PATIENCE + 2, "on a busy machine"
    silent.close()


def test_the_answer_of_the_hub_is_reported(world) -> None:
    """A wrong token, and no such repository (the hub answers 401 without a token, 404 with one)."""
    server = Hub()
    world(server.url)
    with pytest.raises(UserError, match="token") as error:
        load("someone/tiny", token="hf_wrong")
    assert "hf_wrong" not in str(error.value)
    server.refuse["/api/models/"] = 404
    with pytest.raises(
        UserError, match="cannot load someone/tiny: the hub has no someone/tiny, or hides it"
    ):
        load("someone/tiny", token=TOKEN)
    assert f"Bearer {TOKEN}" in server.tokens


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("GatedRepo", "its owner asks for agreement first; accept the terms on its page"),
        ("RevisionNotFound", "someone/tiny has no revision 'new'"),
    ],
)
def test_the_reason_of_the_hub_is_reported(code: str, message: str, world) -> None:
    server = Hub()
    world(server.url)
    server.refuse["/api/models/"], server.error_code = 404, code
    with pytest.raises(UserError, match=f"cannot load someone/tiny@new: {message}"):
        load("someone/tiny@new", token=TOKEN)


@pytest.mark.parametrize("name", ["owner/name", "owner/name@main", "o.w/n-a_me@refs/pr/1"])
def test_ids(name: str) -> None:
    assert hub.is_id(name)
    assert hub.split(name)[0] == name.partition("@")[0]


@pytest.mark.parametrize("name", ["name", "a/b/c", "/a/b", "a/b@", "a/b@x y", "./a"])
def test_no_ids(name: str) -> None:
    assert not hub.is_id(name)
    with pytest.raises(UserError, match="is no hub id"):
        hub.split(name)


def test_a_single_file_beside_a_hub_id_of_its_architecture(
    hub_cache: Path, tmp_path: Path, shared_tiny, world
) -> None:
    """Only the configuration is needed, and it comes from the cache."""
    single_file.write(shared_tiny, tmp_path / "tiny.safetensors")
    for weights in (hub_cache / "models--someone--tiny" / "snapshots" / MAIN).rglob(
        "*.safetensors"
    ):
        weights.unlink()
    world()
    assert load(tmp_path / "tiny.safetensors", base="someone/tiny").family == "sd"


def test_a_dry_run_shows_files_and_card_and_sends_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    push = concept_eraser.push_to_hub(run, "me/no-star", kind="both", dry_run=True)
    names = [one.name for one in push.uploads]
    assert {
        "README.md",
        "model_index.json",
        "unet/diffusion_pytorch_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "concept_eraser/recipe.yaml",
        "concept_eraser/environment.json",
    } <= set(names)
    assert len(names) == len(set(names))
    assert not any("attack" in name or "log" in name or name.endswith(".ckpt") for name in names)
    assert push.url is None
    assert push.warnings == ("This erasure was not evaluated.", "This erasure was not attacked.")
    lora = concept_eraser.push_to_hub(run, "me/no-star", kind="lora", dry_run=True)
    assert "model_index.json" not in [one.name for one in lora.uploads]
    result = CliRunner().invoke(
        app, ["push", str(run), "me/no-star", "--as", "both", "--dry-run", "--private"]
    )
    assert result.exit_code == 0, result.output
    for message in (
        "warning: This erasure was not evaluated. The card says so.",
        "would upload to me/no-star (private):",
        "unet/diffusion_pytorch_model.safetensors",
        "nothing was sent",
        "# no-star",
    ):
        assert message in result.output
    size = (run / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert f"{size:,} bytes" in result.output


@pytest.mark.parametrize("kind", [None, "pipeline", "lora", "both"])
def test_the_cards_code_loads_what_is_uploaded(run: Path, kind: str | None) -> None:
    """A repository without a LoRA has no code that loads one, and is not tagged as one."""
    push = concept_eraser.push_to_hub(run, "me/no-star", kind=kind, dry_run=True)
    names = {one.name for one in push.uploads}
    has_lora = "pytorch_lora_weights.safetensors" in names
    assert ('load_lora_weights("me/no-star"' in push.card) is has_lora
    loads = 'from_pretrained("me/no-star", torch_dtype=torch.'
    assert (loads in push.card) is ("model_index.json" in names)
    assert ("lora" in ModelCard(push.card).data.tags) is has_lora


def test_nothing_that_names_this_machine_is_uploaded(run: Path, tmp_path: Path) -> None:
    run_copy = tmp_path / "run"
    shutil.copytree(run, run_copy)
    config = run_copy / "pipeline" / "unet" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "_name_or_path": str(tmp_path / "base")})
    )
    for one in concept_eraser.push_to_hub(
        run_copy, "me/no-star", kind="both", dry_run=True
    ).uploads:
        content = one.content if isinstance(one.content, bytes) else one.content.read_bytes()
        assert str(tmp_path).encode() not in content, one.name
        assert str(run.parent).encode() not in content, one.name
    assert str(tmp_path) in config.read_text(), "the run's own file stays as it was"


def test_relative_paths_and_what_is_no_part_of_a_model_stay_here(run: Path, tmp_path: Path) -> None:
    run_copy = tmp_path / "run"
    shutil.copytree(run, run_copy)
    index, tokenizer = (
        run_copy / "pipeline" / "model_index.json",
        run_copy / "pipeline" / "tokenizer" / "tokenizer_config.json",
    )
    for path, location in (
        (index, "../../elsewhere77/base"),
        (run_copy / "pipeline" / "vae" / "config.json", "runs/elsewhere77/vae"),
        (tokenizer, "/home/elsewhere77/words"),
    ):
        path.write_text(
            json.dumps(
                {
                    **json.loads(path.read_text()),
                    "_name_or_path": location,
                    "name_or_path": location,
                }
            )
        )
    config = run_copy / "pipeline" / "unet" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "_name_or_path": "someone/tiny"})
    )
    hidden_files = [
        run_copy / "pipeline" / ".env",
        run_copy / "pipeline" / ".git" / "config.json",
        run_copy / "lora" / ".netrc",
        run_copy / "pipeline" / "unet" / "notes.pdf",
        run_copy / "pipeline" / "README.md",
    ]
    for path in hidden_files:
        path.parent.mkdir(exist_ok=True)
        path.write_text("elsewhere77")
    push = concept_eraser.push_to_hub(run_copy, "me/no-star", kind="both", dry_run=True)
    contents = {
        one.name: one.content if isinstance(one.content, bytes) else one.content.read_bytes()
        for one in push.uploads
    }
    assert not [name for name, content in contents.items() if b"elsewhere77" in content]
    assert len(contents) == len(push.uploads)
    assert json.loads(contents["unet/config.json"])["_name_or_path"] == "someone/tiny", (
        "an id of the hub is no path"
    )
    assert json.loads(contents["model_index.json"])["_class_name"] == "StableDiffusionPipeline"
    assert sorted(push.left_out) == [
        "lora/.netrc",
        "pipeline/.env",
        "pipeline/.git/config.json",
        "pipeline/README.md",
        "pipeline/unet/notes.pdf",
    ]
    result = CliRunner().invoke(app, ["push", str(run_copy), "me/no-star", "--dry-run"])
    assert (
        "left out, because they are hidden or not of a file type of models: pipeline/.env"
        in result.output
    )


def test_an_incomplete_cache_is_reported_with_the_hub_id(hub_cache: Path, world) -> None:
    """The state of the cache after an interrupted download."""
    snapshot = hub_cache / "models--someone--tiny" / "snapshots" / MAIN
    for path, message in (
        (snapshot / "unet" / "diffusion_pytorch_model.safetensors", "unet holds no weights"),
        (snapshot / "vae", "it has no vae/ folder"),
        (snapshot / "model_index.json", "it has no model_index.json"),
    ):
        backup = path.rename(hub_cache / "kept")
        world()
        with pytest.raises(
            UserError, match=r"cannot load someone/tiny: the download of it .* is incomplete"
        ) as error:
            load("someone/tiny")
        backup.rename(path)
        assert message in str(error.value)
        assert f"remove {hub_cache / 'models--someone--tiny'} and" in str(error.value)
        assert "run once with a network" in str(error.value)
        assert "snapshots" not in str(error.value)


def upload_to_cache(folder: Path, cache: Path) -> str:
    """Put the files of an upload into the cache, and return the code of its model card."""
    push = concept_eraser.push_to_hub(folder, "me/mine", dry_run=True)
    base = cache / "models--me--mine"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(MAIN)
    for one in push.uploads:
        place = base / "snapshots" / MAIN / one.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(
            one.content if isinstance(one.content, bytes) else one.content.read_bytes()
        )
    return push.card.split("## How to use it")[1].split("```python\n")[1].split("```")[0]


def classifier(source: str, folder: Path) -> dict[str, torch.Tensor]:
    """A run on a classifier, and its weights."""
    settings = {
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
        "retain": "rest",
    }
    training = {"steps": 1, "batch_size": 4, "device": "cpu"}
    return (
        concept_eraser.erase(model=source, output=folder, training=training, **settings)
        .load()
        .module.state_dict()
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["architecture", "function", "clip", "vae"])
def test_the_cards_code_loads_what_was_uploaded(
    kind: str, tmp_path: Path, world, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    world(offline=True)
    run = tmp_path / "run"
    if kind in ("architecture", "function"):
        build("mlp", "classifier", inputs=64, hidden=8).save(tmp_path / "net")
        (tmp_path / "cardnet.py").write_text(
            "from torch import nn\n\ndef make():\n    return nn.Linear(64, 10)\n"
        )
        expected = classifier("net" if kind == "architecture" else "cardnet:make", run)
    else:
        (run / "model").mkdir(parents=True)
        recipe = {
            "model": "tiny-sd",
            "target": kind,
            "forget": {"data": "digits", "classes": ["3"], "loss": "ascent"},
            "retain": {"data": "digits", "loss": "data"},
            "method": {"name": "munba"},
            "trainable": {"select": "all"},
        }
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (run / "done.json").write_text(json.dumps({"seconds": 1.0}))
        if kind == "vae":
            diffusers.AutoencoderKL.from_pretrained(FOLDER / "vae").save_pretrained(run / "model")
        else:
            load_part("tiny-sd", "clip").save(run / "model")
        expected = load_part(run, kind).module.state_dict()  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {}
    exec(upload_to_cache(run, hub_cache), namespace)
    assert not namespace["model"].training
    state = namespace["model"].state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert ("tokenizer" in namespace) == (kind == "clip")


def test_the_card_of_weights_alone_says_so(tmp_path: Path) -> None:
    """A network in memory has no recorded source; the card says which class it was."""
    run = tmp_path / "run"
    concept_eraser.erase(
        model=torch.nn.Linear(64, 10),
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        training={"steps": 1, "batch_size": 4, "device": "cpu"},
        output=run,
    )
    text = concept_eraser.card(run, repository="me/mine")
    assert "it was a `torch.nn.modules.linear.Linear`" in text
    assert 'load_file(hf_hub_download("me/mine", "model.safetensors"))' in text
    # a classifier has no concept rate
    assert "**Not measured.** The results on the forgotten and on the retained data are" in text
    assert "* Not measured: the results on the forgotten and on the retained data." in text
    assert "concept rate" not in text


def test_what_is_not_pushed(run: Path, tmp_path: Path) -> None:
    incomplete = tmp_path / "unfinished"
    incomplete.mkdir()
    (incomplete / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    whole = tmp_path / "whole"
    shutil.copytree(run, whole, ignore=shutil.ignore_patterns("lora", "pipeline"))
    for arguments, message in (
        ((incomplete, "me/x"), "is not finished"),
        ((tmp_path, "me/x"), "is no run folder"),
        ((run, "no-star"), "is no hub id; expected owner/name"),
        ((run, "me/x@old"), "give the branch with --revision old"),
        ((whole, "me/x"), "has no whole model"),
    ):
        with pytest.raises(UserError, match=message):
            concept_eraser.push_to_hub(*arguments, dry_run=True)
    with pytest.raises(UserError, match="trained no LoRA"):
        concept_eraser.push_to_hub(whole, "me/x", kind="lora", dry_run=True)
    with pytest.raises(UserError, match="unknown kind of upload 'lor'; did you mean 'lora'"):
        concept_eraser.push_to_hub(run, "me/x", kind="lor", dry_run=True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        concept_eraser.push_to_hub(run, "me/x")


def test_an_upload_arrives_and_generates_the_runs_image(run: Path, tmp_path: Path, world) -> None:
    """The command uploads over HTTP; the server receives a pipeline and a LoRA for
    plain diffusers.
    """
    server = Hub()
    world(server.url, token=TOKEN)
    result = CliRunner().invoke(
        app, ["push", str(run), "me/no-star", "--as", "both", "--private", "--revision", "draft"]
    )
    assert result.exit_code == 0, result.exception
    assert f"uploaded: {server.url}/me/no-star/commit/" in result.output
    assert TOKEN not in result.output
    assert server.new_repositories[0]["name"] == "no-star"
    assert server.new_repositories[0].get(
        "private", server.new_repositories[0].get("visibility") == "private"
    )
    assert any("/branch/draft" in request for request in server.requests)
    assert any("/commit/draft" in request for request in server.requests)
    for name, content in server.files.items():
        place = tmp_path / "there" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    settings = {"seeds": [5], "steps": 2, "guidance": 3.0}
    uploaded_image = load(tmp_path / "there").sample(["a red star"], **settings)
    assert torch.equal(uploaded_image, load(run / "pipeline").sample(["a red star"], **settings))
    expected = load(run).sample(["a red star"], **settings)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        FOLDER, safety_checker=None, feature_extractor=None
    )
    pipe.load_lora_weights(str(tmp_path / "there"))
    assert (load(pipe).sample(["a red star"], **settings).int() - expected.int()).abs().max() <= 1
    assert not any(TOKEN.encode() in content for content in server.files.values())
    assert not any(TOKEN in p.read_text() for p in run.rglob("*.json"))


def test_nothing_private_goes_to_a_public_repository(run: Path, world) -> None:
    """The hub answers 409 for a repository that exists, and does not change it."""
    server = Hub()
    server.public = True
    world(server.url)
    with pytest.raises(UserError, match=r"me/no-star is public.* so nothing was uploaded; make it"):
        concept_eraser.push_to_hub(run, "me/no-star", private=True, revision="draft", token=TOKEN)
    assert not server.files
    assert not any("/commit/" in one or "/branch/" in one for one in server.requests)
    concept_eraser.push_to_hub(run, "me/no-star", kind="lora", token=TOKEN)
    assert server.files, "without --private it is uploaded"


def test_what_the_hub_refuses_is_an_error_in_one_sentence(run: Path, world) -> None:
    server = Hub()
    world(server.url)
    with pytest.raises(UserError, match="the hub does not accept this token") as error:
        concept_eraser.push_to_hub(run, "me/no-star", token="hf_wrong")
    assert "hf_wrong" not in str(error.value)
    server.refuse["/commit/"] = 403
    with pytest.raises(UserError, match="this token may not write to me/no-star"):
        concept_eraser.push_to_hub(run, "me/no-star", token=TOKEN)
    world(NOBODY)
    with pytest.raises(UserError, match="the hub cannot be reached, so nothing was uploaded"):
        concept_eraser.push_to_hub(run, "me/no-star", token=TOKEN)
