"""Pipelines by hub id, `owner/name` or `owner/name@revision` (a branch, tag or commit).

They come from the hub, else from its cache. One short request decides whether the hub answers, so
that a machine without network reports it at once instead of trying each file. If the hub does not
answer, the cache on disk is used. A token comes from the caller, from $HF_TOKEN or from `hf auth
login`. It is passed on and never stored.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from concept_eraser.models.folder_check import INDEX, check_index
from concept_eraser.utils.errors import UserError, first_line, quote

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
PATIENCE = 2.5  # seconds; $HF_HUB_ETAG_TIMEOUT if it is set
ADVICE = "give a local folder, or set HF_HOME to a cache that holds it"


def is_id(name: str) -> bool:
    # FILE.safetensors@BASE: see loading.on_base
    return _ID.fullmatch(name) is not None and ".safetensors" not in name


def split(name: str) -> tuple[str, str | None]:
    """Split `owner/name@revision` into (owner/name, revision or None)."""
    match = _ID.fullmatch(name)
    if match is None:
        raise UserError(f"{quote(name)} is no hub id; expected owner/name or owner/name@revision")
    return match[1], match[2]


def offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def go_offline() -> None:
    """Forbid requests to the hub, in this process from now on and in those that it starts.

    The client reads the variable at its import only, which may have been before.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def why_not(name: str, token: str | None = None) -> str | None:
    """Return None if the hub answers and shows the repository, else "".

    It is "" if the hub cannot be reached, or must not be asked. Raises UserError if the hub answers
    that there is no such repository or revision, or that this token has no access.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = split(name)
    if offline():
        return ""
    error = within_patience(
        lambda patience: HfApi(token=token).model_info(
            repository, revision=revision, timeout=patience
        )
    )
    if isinstance(error, GatedRepoError):
        raise UserError(
            f"cannot load {name}: its owner asks for agreement first; accept the terms "
            "on its page, and give a token (HF_TOKEN, or hf auth login)"
        ) from None
    if isinstance(error, RevisionNotFoundError):
        raise UserError(f"cannot load {name}: {repository} has no revision {revision!r}") from None
    if isinstance(error, RepositoryNotFoundError):
        raise UserError(
            f"cannot load {name}: the hub has no {repository}, or hides it; if it is "
            "private, give a token (HF_TOKEN, or hf auth login)"
        ) from None
    if (
        isinstance(error, HfHubHTTPError)
        and error.response is not None
        and error.response.status_code in (401, 403)
    ):
        raise UserError(
            f"cannot load {name}: the hub refuses the token; check HF_TOKEN, or run hf auth login"
        ) from None
    return "" if error is not None else None


def is_silent_about_dataset(repository: str) -> bool:
    """Whether the hub does not answer a question about a data set, or must not be asked.

    An answer that there is none is an answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if offline():
        return True
    error = within_patience(lambda patience: HfApi().dataset_info(repository, timeout=patience))
    return error is not None and not isinstance(error, HfHubHTTPError)


def within_patience(ask: Callable[[float], Any]) -> BaseException | None:
    """Make a request to the hub. Returns None if it answers in time, else the error.

    ask: the request; its argument is the time limit in seconds.
    """
    errors: list[BaseException | None] = []
    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE)

    def run() -> None:
        try:
            ask(patience)
            errors.append(None)
        except Exception as error:
            errors.append(error)

    # a name server that does not answer has no timeout
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    return errors[0] if errors else TimeoutError("no answer in time")


def folder_of(
    name: str,
    *,
    token: str | None = None,
    allow_pickle: bool = False,
    weights: bool = True,
    left_out: Mapping[str, Any] | None = None,
) -> Path:
    """Return the folder in the hub's cache that holds a pipeline, after downloading missing files.

    weights: also those, not the configuration alone. left_out: components that are not needed.
    Raises UserError if neither the hub nor the cache has it.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, revision = split(name)
    silent = why_not(name, token) is not None
    options: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": silent}
    try:
        if not weights:
            return Path(
                snapshot_download(
                    repository, allow_patterns=["*.json", "*.txt", "*.model"], **options
                )
            )
        if silent:
            return Path(snapshot_download(repository, **options))
        # before diffusers reads it: the index determines what diffusers downloads and imports
        check_index(Path(hf_hub_download(repository, INDEX, revision=revision, token=token)))
        # imported late: it takes seconds, and a missing hub is reported at once
        from diffusers import DiffusionPipeline

        return Path(
            DiffusionPipeline.download(
                repository,
                use_safetensors=None if allow_pickle else True,
                **options,
                **(left_out or {}),
            )
        )
    except UserError:
        raise
    except Exception as error:  # the hub's client and diffusers raise about twenty types of errors
        raise UserError(f"cannot load {name}: {_reason(silent, revision, error)}") from None


def half_filled(name: str, folder: Path, problem: str) -> str:
    """Return the error for a pipeline in the cache that lacks files.

    folder: its snapshot. problem: the problem there.
    """
    short_problem = problem.replace(f"{folder}/", "").replace(str(folder), "it")
    repository = folder.parents[1] if folder.parent.name == "snapshots" else folder
    return (
        f"cannot load {name}: the download of it in the cache on this machine is incomplete "
        f"({short_problem}); run once with a network, or remove {repository} and load it again"
    )


def _reason(silent: bool, revision: str | None, error: Exception) -> str:
    if not silent:
        return f"the hub did not give it: {first_line(error)}"
    cause = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
    what = f"its revision {revision!r}" if revision else "it"
    return (
        f"there is no such folder, {cause}, and the cache on this machine does not hold "
        f"{what}; {ADVICE}"
    )
