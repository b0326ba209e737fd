"""Hostile model folders: each is an error of one sentence before diffusers or transformers reads
it, and no code of the folder runs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.models import folder_check, loading, single_file
from concept_eraser.models.loading import load, load_part
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from tests.families import NAMES, build

FOLDER = resources.tiny_weights() / "tiny-sd"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Change = Callable[[Path], Any]


def edit_json(name: str, **entries: Any) -> Change:
    """A change of a JSON file: entries are set."""

    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**content, **entries}))

    return change


def index(**entries: Any) -> Change:
    return edit_json("model_index.json", **entries)


def config(part: str, **entries: Any) -> Change:
    return edit_json(f"{part}/config.json", **entries)


def words(**entries: Any) -> Change:
    return edit_json("tokenizer/tokenizer_config.json", **entries)


def file(name: str, content: str | bytes = "") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def code(name: str, *more: Change) -> Change:
    """The payload as a file of the folder, and changes that name it."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(folder.parent / "importable" / "payload.py", folder / name)
        for one in more:
            one(folder)

    return change


def replace_by_link(name: str, to: str) -> Change:
    """Move a part of the folder, and put a link in its place."""

    def change(folder: Path) -> None:
        path = folder / name
        if to == "outside":
            shutil.move(path, folder.parent / "outside")
        elif path.exists():
            path.unlink()
        path.symlink_to(folder.parent / "outside" if to == "outside" else to)

    return change


def pipe(folder: Path) -> None:
    (folder / "unet" / "config.json").unlink()
    os.mkfifo(folder / "unet" / "config.json")


def huge(folder: Path) -> None:
    os.truncate(folder / "text_encoder" / "config.json", 65 * 2**20)


def huge_vocabulary(folder: Path) -> None:
    os.truncate(folder / "tokenizer" / "tokenizer.json", 65 * 2**20)


def rename_to_pickle(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(
        folder / "unet" / "diffusion_pytorch_model.bin"
    )


def shards(file: str) -> Change:
    return edit_json(
        "unet/diffusion_pytorch_model.safetensors.index.json", weight_map={"conv_in.bias": file}
    )


DEEP: Any = 1
for _ in range(60):
    DEEP = {"text_config": DEEP}

HOSTILE: dict[str, tuple[Change, str]] = {
    # model_index.json
    "index of a list": (file("model_index.json", "[]"), "expected a mapping, found list"),
    "index of null": (file("model_index.json", "null"), "expected a mapping, found NoneType"),
    "index of no JSON": (file("model_index.json", "import os"), "it is no JSON"),
    "index of bytes": (file("model_index.json", b"\xff\xfe\x00"), "no text in UTF-8"),
    "index too deep": (index(x=DEEP), "nested deeper"),
    "pipeline class from a file": (
        code("payload.py", index(_class_name=["payload", "Payload"])),
        "its _class_name is",
    ),
    "pipeline class of a number": (index(_class_name=3), "its _class_name is 3"),
    "custom pipeline": (
        code("payload.py", index(custom_pipeline="payload")),
        "custom_pipeline.*names Python code",
    ),
    "custom pipelines": (
        index(custom_pipelines={"t": {"impl": "payload.Payload"}}),
        "custom_pipelines.*names Python code",
    ),
    "trust asked for": (index(trust_remote_code=True), "trust_remote_code.*asks for Python code"),
    "part from a file": (
        code("unet/payload.py", index(unet=["payload", "Payload"])),
        "of the library 'payload'",
    ),
    "part from an importable module": (
        index(unet=["payload", "Payload"]),
        "of the library 'payload'",
    ),
    "part of the standard library": (index(unet=["os", "system"]), "of the library 'os'"),
    "part of a submodule": (index(unet=["diffusers.utils", "Payload"]), "both plain names"),
    "class of a path": (
        index(unet=["diffusers", "models.UNet2DConditionModel"]),
        "both plain names",
    ),
    "class that is not there": (index(unet=["diffusers", "Payload"]), "no part that is loaded"),
    "pipeline inside a pipeline": (
        index(unet=["diffusers", "DiffusionPipeline"]),
        "no part that is loaded",
    ),
    "loader of anything": (
        index(text_encoder=["transformers", "AutoModel"]),
        "no part that is loaded",
    ),
    "function for a class": (
        index(text_encoder=["transformers", "pipeline"]),
        "no part that is loaded",
    ),
    "private name": (index(unet=["diffusers", "__loader__"]), "no part that is loaded"),
    "half a part": (index(unet=["diffusers", None]), r"or \[null, null\]"),
    "three entries": (
        index(unet=["diffusers", "UNet2DConditionModel", {"repo": "a/b"}]),
        r"or \[null, null\]",
    ),
    "part of mappings": (index(unet=[{}, {}]), r"or \[null, null\]"),
    "part that climbs": (
        index(**{"../outside": ["diffusers", "UNet2DConditionModel"]}),
        "cannot be the name of a part",
    ),
    "part that is a mapping": (index(unet={"library": "payload"}), "is a mapping"),
    # files of code
    "module at the root": (code("pipeline.py"), "is code beside"),
    "module of a part": (code("unet/modeling.py"), "is code beside"),
    "module below a part": (code("text_encoder/more/payload.py"), "is code beside"),
    "capitals": (code("tokenizer/Payload.PY"), "is code beside"),
    "bytecode": (file("vae/payload.pyc"), "is code beside"),
    "compiled": (file("vae/payload.so"), "is code beside"),
    "compiled with a version": (file("scheduler/libpayload.so.1"), "is code beside"),
    "template": (file("tokenizer/chat_template.jinja", "{{ cycler.__init__ }}"), "is code beside"),
    "wheel": (file("payload-1.0-py3-none-any.whl"), "is code beside"),
    # configurations
    "code of a denoiser": (
        config("unet", auto_map={"AutoModel": "payload.Payload"}),
        "auto_map.*names Python code",
    ),
    "code of the hub": (
        config("text_encoder", auto_map={"AutoModel": "a/b--payload.P"}),
        "auto_map.*names Python code",
    ),
    "code of a tokenizer": (
        words(auto_map={"AutoTokenizer": ["payload.P", None]}),
        "auto_map.*names Python code",
    ),
    "trust in a tokenizer": (words(trust_remote_code=True), "asks for Python code"),
    "kernel of the hub": (
        config("text_encoder", _attn_implementation="a/kernel"),
        "may name code of the hub",
    ),
    "kernel of a subconfiguration": (
        config("text_encoder", t={"attn_implementation": {"": "a/b@c:d"}}),
        "may name code of the hub",
    ),
    "kernels": (config("text_encoder", use_kernels=True), "asks for compiled code"),
    "quantizer": (
        config("unet", quantization_config={"quant_method": "gptq"}),
        "asks for a quantizer",
    ),
    "weights elsewhere": (
        config("text_encoder", transformers_weights="../../x.bin"),
        "names other weights",
    ),
    "class of a configuration": (
        edit_json("scheduler/scheduler_config.json", _class_name=["payload", "P"]),
        "_class_name",
    ),
    "commit that climbs": (config("text_encoder", _commit_hash="../../x"), "is no commit"),
    "backbone": (config("text_encoder", use_pretrained_backbone=True), "fetches another model"),
    "configuration of a list": (file("vae/config.json", "[]"), "expected a mapping, found list"),
    "configuration of bytes": (file("vae/config.json", b"\xff\xfe"), "no text in UTF-8"),
    "configuration too large": (huge, "at most 67.1 MB"),
    "vocabulary too large": (huge_vocabulary, "at most 67.1 MB"),
    "absolute vocabulary": (words(vocab_file="/etc/passwd"), "a path out of the model's folder"),
    "vocabulary that climbs": (
        edit_json("tokenizer/special_tokens_map.json", vocab_file="../../x"),
        "a path out of",
    ),
    "vocabulary of Windows": (words(tokenizer_file="C:\\x"), "a path out of the model's folder"),
    "tokenizer files that climb": (
        words(fast_tokenizer_files=["tokenizer.1/../../x.json"]),
        "a path out of",
    ),
    "arguments": (words(init_inputs=["/etc/passwd"]), "names other files"),
    "tokenizer of another class": (
        words(tokenizer_class="BertJapaneseTokenizer"),
        "names the tokenizer",
    ),
    "template in a tokenizer": (words(chat_template="{{ 1 }}"), "is a program in Jinja"),
    "adapter of another model": (
        edit_json("text_encoder/adapter_config.json", base_model_name_or_path="a/b"),
        "adapter_config.json belongs to an adapter",
    ),
    "weights of an adapter": (
        file("text_encoder/adapter_model.safetensors"),
        "adapter_model.safetensors belongs to an adapter",
    ),
    # weights
    "shard that climbs": (shards("../../x.safetensors"), "the name of a file beside it"),
    "absolute shard": (shards("/x.safetensors"), "the name of a file beside it"),
    "shard of another kind": (shards("x.py"), "the name of a file beside it"),
    "shards of a list": (
        edit_json("vae/x.safetensors.index.json", weight_map=["x"]),
        "expected a mapping of tensors",
    ),
    "pickle": (rename_to_pickle, "is a pickle"),
    # links and devices
    "link of a part": (replace_by_link("unet", "outside"), "leads out of the model's folder"),
    "link of a file": (
        replace_by_link("vae/config.json", "outside"),
        "leads out of the model's folder",
    ),
    "link of the index": (
        replace_by_link("model_index.json", "outside"),
        "leads out of the model.s folder",
    ),
    "link to nothing": (replace_by_link("vae/config.json", "nowhere"), "cannot read"),
    "link in a circle": (replace_by_link("vae/config.json", "config.json"), "cannot read"),
    "pipe": (pipe, "no regular file"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled pipeline. A module `payload`, which creates the file `canary` when it
    runs, can be imported by name.
    """
    (tmp_path / "importable").mkdir()
    payload = (
        f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\nclass Payload: ...\n"
    )
    (tmp_path / "importable" / "payload.py").write_text(payload)
    monkeypatch.syspath_prepend(tmp_path / "importable")
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    model_folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    monkeypatch.chdir(model_folder)
    return model_folder


def refuse_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a library was given the folder")

    monkeypatch.setattr(loading, "_load_family", never)


def test_the_canary_works(folder: Path) -> None:
    importlib.import_module("payload")
    assert (folder.parent / "canary").exists()


def test_there_are_enough_hostile_folders() -> None:
    assert len(HOSTILE) >= 32


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_before_a_library_reads_it(
    name: str, folder: Path, monkeypatch
) -> None:
    change, match = HOSTILE[name]
    change(folder)
    refuse_libraries(monkeypatch)
    with pytest.raises(UserError, match=match) as error:
        load(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert not (folder.parent / "canary").exists()
    assert "payload" not in sys.modules


def test_too_many_files(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(folder_check, "FILES", 3)
    with pytest.raises(UserError, match="more than 3 files"):
        load(folder)


def test_the_untouched_folder_loads(folder: Path) -> None:
    assert load(folder).family == "sd"


@pytest.mark.parametrize("name", NAMES)
def test_every_family_loads(name: str, tmp_path: Path) -> None:
    build(name, tmp_path / name)
    assert load(tmp_path / name).family == name.split("-")[0]


HARMLESS: dict[str, Change] = {
    "the safety checker as Stable Diffusion 1 names it": index(
        safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
        feature_extractor=["transformers", "CLIPFeatureExtractor"],
    ),
    "where a configuration once lay": config("unet", _name_or_path="/home/somebody/../model"),
    "where a tokenizer once lay": words(
        name_or_path="/home/somebody/x",
        special_tokens_map_file="./special_tokens_map.json",
        tokenizer_class="CLIPTokenizer",
    ),
    "attention of transformers": config("text_encoder", _attn_implementation="sdpa"),
    "a token that reads like a key": file(
        "tokenizer/added_tokens.json", json.dumps({"auto_map": 1234})
    ),
    "a page": file("README.md", "text"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_real_checkpoints_hold_is_allowed(name: str, folder: Path) -> None:
    HARMLESS[name](folder)
    folder_check.check_pipeline(folder)
    assert load(folder).family == "sd"


def snapshot(cache: Path) -> Path:
    """The bundled pipeline as in the hub's cache: links to the blobs of its repository."""
    repository = cache / "models--someone--tiny"
    snapshot_folder = repository / "snapshots" / COMMIT
    (repository / "blobs").mkdir(parents=True)
    for number, source in enumerate(sorted(path for path in FOLDER.rglob("*") if path.is_file())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copyfile(source, blob)
        link = snapshot_folder / source.relative_to(FOLDER)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot_folder


def test_a_snapshot_of_the_hub_loads_and_may_not_lead_elsewhere(tmp_path: Path) -> None:
    snapshot_folder = snapshot(tmp_path)
    assert load(snapshot_folder).family == "sd"
    assert load_part(snapshot_folder / "vae", "vae").family == "module"
    shutil.move(tmp_path / "models--someone--tiny" / "blobs", tmp_path / "blobs")
    (tmp_path / "models--someone--tiny" / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(UserError, match="leads out of the model's folder"):
        load(snapshot_folder)


def test_a_link_to_a_whole_model_is_the_users_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert load(tmp_path / "link").family == "sd"


@pytest.mark.parametrize("target", ["vae", "clip", "classifier"])
def test_folders_of_one_part_are_checked(
    target: str, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    import diffusers
    import transformers

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a library was given the folder")

    part = tmp_path / target
    if target == "classifier":
        loading.Module(__import__("torch").nn.Linear(2, 2), target, "x").save(part)
    else:
        shutil.copytree(folder / "vae" if target == "vae" else FOLDER.parent / "clip", part)
    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", never)
    monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", never)
    code("modeling.py", edit_json("config.json", auto_map={"AutoModel": "modeling.Payload"}))(
        part.parent / target
    )
    with pytest.raises(UserError, match=r"auto_map.*names Python code"):
        load_part(part, target)
    (part / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"expected a mapping|holds no model of concept_eraser"):
        load_part(part, target)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "damage", [{"architecture": ["mlp"]}, {"architecture": "mlp", "options": [1]}]
)
def test_a_damaged_configuration_of_ours_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    loading.Module(__import__("torch").nn.Linear(2, 2), "classifier", "x").save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(damage))
    with pytest.raises(UserError, match="is damaged"):
        load_part(tmp_path / "model", "classifier")


def test_a_part_to_put_on_a_base_is_checked(folder: Path, tmp_path: Path) -> None:
    part = Path(shutil.copytree(folder / "unet", tmp_path / "unet"))
    assert load(part, base="tiny-sd").family == "sd"
    (part / "config.json").write_text(json.dumps({"_class_name": ["modeling", "Payload"]}))
    with pytest.raises(UserError, match="_class_name"):
        load(part, base="tiny-sd")
    (part / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a mapping"):
        load(part, base="tiny-sd")


def test_the_configuration_of_a_single_file_is_checked(folder: Path, tmp_path: Path) -> None:
    single_file.write(load("tiny-sd"), tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors", base=folder).family == "sd"
    index(unet=["payload", "Payload"])(folder)
    with pytest.raises(UserError, match="of the library 'payload'"):
        load(tmp_path / "model.safetensors", base=folder)
    assert not (tmp_path / "canary").exists()


def test_values_of_wrong_types_end_in_one_sentence(folder: Path) -> None:
    """The check does not know the types of the settings of each class; the loader raises an error
    of one sentence.
    """
    config("unet", block_out_channels={"a": 1})(folder)
    with pytest.raises(UserError, match="cannot load") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_the_index_of_the_hub_is_checked_before_diffusers_downloads(
    folder: Path, monkeypatch
) -> None:
    import diffusers
    import huggingface_hub

    from concept_eraser.models import hub

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("diffusers was given the repository")

    index(_class_name=["payload", "Payload"])(folder)
    monkeypatch.setattr(hub, "why_not", lambda *_: None)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda _, name, **__: str(folder / name)
    )
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", never)
    with pytest.raises(UserError, match="its _class_name is"):
        load("someone/tiny")
