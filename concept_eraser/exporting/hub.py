"""Upload of a finished run: the pipeline or LoRA, the model card, and the run's records.

Prompts from attacks are not uploaded. The card has the rates of the attacks. The paths of this
machine are removed from texts. From the weights' folders only visible files of known types are
uploaded. A token goes to the hub's client and is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.exporting import eval_results, model_card
from concept_eraser.exporting.card_snippets import loads_lora, whole_model
from concept_eraser.models import hub, run_base
from concept_eraser.reporting import run_results
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError, first_line, unknown
from concept_eraser.utils.path_redaction import clean, is_place, name_paths

KINDS = ("pipeline", "lora", "both")
# the run's records, which go into concept_eraser/ beside the weights
RECORDS = ("recipe.yaml", "environment.json", "done.json", "evaluation.json")
# file types of models, without pickles
_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")
# keys of configuration files with the source of a model
_PATHS = ("_name_or_path", "name_or_path")
_VOCABULARIES = ("vocab.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Upload:
    """One file: its name in the repository, and its content or the path of that."""

    name: str
    content: bytes | Path

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True)
class HubUpload:
    """An upload, or its plan in a dry run.

    Attributes:
        repository: The repository on the hub.
        uploads: The files.
        card: The model card.
        warnings: The warnings of the card.
        url: The address of the commit. None in a dry run.
        left_out: The files of the weights' folders that are not uploaded, because they are hidden,
            of an unknown type, or named as the card.
    """

    repository: str
    uploads: tuple[Upload, ...]
    card: str
    warnings: tuple[str, ...]
    url: str | None = None
    left_out: tuple[str, ...] = ()


def push_to_hub(
    run: str | Path,
    repository: str,
    *,
    kind: str | None = None,
    private: bool = False,
    revision: str | None = None,
    license: str = "other",
    benchmark: str | None = None,
    token: str | None = None,
    dry_run: bool = False,
) -> HubUpload:
    """Upload a finished run to the hub.

    Args:
        run: the run folder.
        repository: owner/name. It is created if it does not exist.
        kind: "pipeline" (for `from_pretrained`), "lora" (for `load_lora_weights`) or "both"
            (default: "pipeline", or "lora" of a run that holds no pipeline, if diffusers loads it).
            For a classifier, CLIP model or VAE, "pipeline" is the folder of the whole model.
        private: whether a new repository is private. A public one that exists is then refused.
        revision: a branch. It is created if it does not exist.
        license: the licence of the weights, see `card`.
        benchmark: the hub id of a dataset whose eval.yaml has the tasks of the run's numbers. The
            numbers are then also uploaded into `.eval_results`, which the model's page shows.
        token: a token of the hub (default: $HF_TOKEN, or the one of `hf auth login`).
        dry_run: use no network and upload nothing.

    Returns:
        The files, the card, and the address of the commit.

    Raises:
        UserError: the run is unfinished, has a gate or no files for `kind`, a name is wrong, there
            is a `benchmark` but no number, the repository is public in spite of `private`, or the
            hub cannot be reached or refuses.

    Example:
        >>> import concept_eraser
        >>> plan = concept_eraser.push_to_hub("runs/tiny_star_munba", "me/no-star", dry_run=True)
    """
    folder = Path(run)
    if kind is not None and kind not in KINDS:
        raise unknown("kind of upload", kind, KINDS)
    name, commit = hub.split(repository)
    if commit:
        raise UserError(f"{repository} names a revision; give the branch with --revision {commit}")
    recipe, _ = model_card.finished_run(folder)
    if recipe.method.adds_gate:
        raise UserError(
            f"{folder} holds a gate (the method {recipe.method.name}), which no pipeline of "
            "diffusers can load, so there is no model for the hub; share the run folder"
        )
    if kind is None:
        is_lora_alone = run_base.is_rebuilt(folder) and whole_model(folder) is None
        kind = "lora" if is_lora_alone and loads_lora(recipe) else "pipeline"
    card = model_card.card(folder, repository=name, license=license, kind=kind, revision=revision)
    left_out: list[str] = []
    uploads = (
        Upload("README.md", card.encode()),
        *_weights(folder, kind, left_out),
        *_cleaned_files(folder),
        *(_evaluation_results(folder, benchmark, name, revision) if benchmark else ()),
    )
    upload = HubUpload(
        name, uploads, card, tuple(model_card.warnings(folder)), left_out=tuple(left_out)
    )
    return upload if dry_run else _upload(upload, private=private, revision=revision, token=token)


def _weights(folder: Path, kind: str, left_out: list[str]) -> Iterator[Upload]:
    """Yield the files of the whole model and of the LoRA.

    Both go to the top of the repository, where diffusers reads them. `left_out` collects the names
    of files that are not uploaded.
    """
    lora = folder / "lora"
    if kind != "pipeline" and not lora.is_dir():
        raise UserError(
            f"{folder} trained no LoRA, so it has none to upload; --as pipeline, or "
            f"write one with: {shell_command('export', folder, '--to', 'lora')}"
        )
    if kind != "lora":
        model_folder = whole_model(folder)
        if model_folder is None and run_base.is_rebuilt(folder):
            raise UserError(
                f"{folder} holds no pipeline; write it with: "
                f"{shell_command('export', folder, '--to', 'diffusers')}, or upload the LoRA alone "
                "with --as lora"
            )
        if model_folder is None:
            raise UserError(
                f"{folder} has no whole model (pipeline/ or model/); it may have been "
                "removed: erase again"
            )
        yield from _uploadable(model_folder, left_out)
    if kind != "pipeline":
        yield from _uploadable(lora, left_out)


def _require_inside(run: Path, path: Path) -> None:
    """Raise UserError if a link leads out of a run. Its target may be secret."""
    if not path.resolve().is_relative_to(run.resolve()):
        raise UserError(
            f"{path} is a link that leads out of {run}, so it is not uploaded; put the "
            "file itself in its place, or remove the link"
        )


def _uploadable(folder: Path, left_out: list[str]) -> Iterator[Upload]:
    """Yield the files below a folder of a run that may be uploaded.

    Raises UserError for a link that leads out of the run.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        _require_inside(folder.parent, path)
        if not path.is_file():
            continue
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or path.suffix not in _SUFFIXES or name.as_posix() == "README.md":
            left_out.append(f"{folder.name}/{name.as_posix()}")
        else:
            yield _clean(path, name.as_posix())


def _cleaned_files(folder: Path) -> Iterator[Upload]:
    """Yield the run's own records for concept_eraser/, without paths of this machine."""
    other_evaluations = sorted(folder.glob(f"{run_results.EVALUATIONS}/*/evaluation.json"))
    for path in (*(folder / name for name in RECORDS), *other_evaluations):
        if path.is_file():
            _require_inside(folder, path)
            text = (
                model_card.recipe_text(folder) + "\n"
                if path.name == "recipe.yaml"
                else _without_place(path)
            )
            record = f"{eval_results.RECORDS}/{path.relative_to(folder).as_posix()}"
            yield Upload(record, text.encode())


def _evaluation_results(
    folder: Path, benchmark: str, repository: str, revision: str | None
) -> Iterator[Upload]:
    """Yield the numbers of a run in the hub's form."""
    source = f"https://huggingface.co/{repository}/blob/{revision or 'main'}"
    for name, text in eval_results.model_files(folder, benchmark, source=source).items():
        yield Upload(name, text.encode())


def _without_place(path: Path) -> str:
    """Return a JSON record without the command line, and with only the last component of paths."""
    content = read_json(path)
    for place in (content, content.get("environment")):
        if isinstance(place, dict):
            place.pop("command", None)
    return json.dumps(clean(content), indent=1) + "\n"


def _clean(path: Path, name: str) -> Upload:
    """Return the upload of a file, without the paths in a configuration.

    The source of a model is removed. Other paths are cut to their last component.
    """
    if path.suffix != ".json" or path.name in _VOCABULARIES:
        return Upload(name, path)
    try:
        content = read_json(path, (dict, list))
    except UserError:
        return Upload(name, path)
    public_content = name_paths(_without_origin(content))
    return (
        Upload(name, path)
        if public_content == content
        else Upload(name, (json.dumps(public_content, indent=2) + "\n").encode())
    )


def _without_origin(content: Any) -> Any:
    """Remove the keys with the source of a model on this machine. Hub ids are not removed."""
    if isinstance(content, list):
        return [_without_origin(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        k: _without_origin(v)
        for k, v in content.items()
        if k not in _PATHS or not _is_origin(str(v))
    }


def _is_origin(text: str) -> bool:
    return is_place(text) or Path(text).exists() or ("/" in text and not hub.is_id(text))


def _upload(
    push: HubUpload, *, private: bool, revision: str | None, token: str | None
) -> HubUpload:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    if hub.offline():
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --dry-run"
        )
    error = hub.within_patience(lambda _: api.whoami())
    if error is not None:
        raise UserError(_refusal(push.repository, error))
    operations = [
        CommitOperationAdd(
            upload.name,
            upload.content if isinstance(upload.content, bytes) else str(upload.content),
        )
        for upload in push.uploads
    ]
    try:
        api.create_repo(push.repository, private=private, exist_ok=True)
        if private and not api.repo_info(push.repository).private:  # it existed before
            raise UserError(
                f"{push.repository} is public, and --private does not change a repository that "
                "exists, so nothing was uploaded; make it private in its settings on the hub, give "
                "another name, or leave out --private"
            )
        if revision:
            api.create_branch(push.repository, branch=revision, exist_ok=True)
        commit = api.create_commit(
            push.repository,
            operations,
            commit_message="model and card, by concept_eraser",
            revision=revision,
        )
    except UserError:
        raise
    except Exception as hub_error:  # the hub's client raises about twenty types of errors
        raise UserError(_refusal(push.repository, hub_error)) from None
    return HubUpload(
        push.repository,
        push.uploads,
        card=push.card,
        warnings=push.warnings,
        url=commit.commit_url,
        left_out=push.left_out,
    )


def _refusal(repository: str, error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    status = (
        error.response.status_code
        if isinstance(error, HfHubHTTPError) and error.response is not None
        else None
    )
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return (
            "the hub does not accept this token; give one with write access with HF_TOKEN or "
            "--token, or run: hf auth login"
        )
    if status == 403:
        return (
            f"this token may not write to {repository}; give one that may (HF_TOKEN or "
            "--token), or another name"
        )
    if status is not None:
        return f"the hub refused {repository}: {first_line(error)}"
    return (
        "the hub cannot be reached, so nothing was uploaded; try again with a network, or use "
        "--dry-run"
    )
