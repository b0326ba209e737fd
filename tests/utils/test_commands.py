"""Commands that a user can paste into a shell."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path

import pytest

from concept_eraser.cli.next_step import loading_call, permissions, with_next_step
from concept_eraser.storage import writers
from concept_eraser.utils.commands import erase_command, shell_command
from concept_eraser.utils.errors import Interrupted, UserError

FOLDER = Path("it's my/runs & more")


def test_a_shell_reads_the_same_words() -> None:
    words = ["erase", FOLDER, "forget={prompts: x}", "$HOME", "a*b", "runs/star", "owner/name"]
    command = shell_command(*map(str, words))
    assert shlex.split(command) == ["concept-eraser", *map(str, words)]
    assert command.endswith(" runs/star owner/name"), "quotes only where they are needed"
    assert shlex.split(erase_command(FOLDER, "--resume")) == [
        *("concept-eraser", "erase", str(FOLDER / "recipe.yaml")),
        *("--output", str(FOLDER), "--resume"),
    ]


def test_the_call_of_diffusers_is_python() -> None:
    assert f"({str(FOLDER)!r}, " in loading_call(FOLDER)
    compile(loading_call(FOLDER), "call", "eval")


def test_an_interrupted_run_continues_with_what_it_was_permitted() -> None:
    options = permissions(allow_pickle=True, allow_code=True)
    with pytest.raises(Interrupted) as error, with_next_step(FOLDER, options):
        raise Interrupted("stopped")
    command = str(error.value).partition("continue with: ")[2]
    assert command == erase_command(FOLDER, "--allow-pickle", "--allow-code", "--resume")


def test_only_a_run_on_a_full_disk_names_the_option_of_erase(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"Free some space, then repeat the command$"):
        writers.write_file(tmp_path / "a", fail)
    with pytest.raises(UserError, match=r"repeat the command$"), with_next_step(tmp_path):
        writers.write_file(tmp_path / "a", fail)
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(UserError) as error, with_next_step(tmp_path):
        writers.write_file(tmp_path / "a", fail)
    assert str(error.value).endswith(f"\ncontinue with: {erase_command(tmp_path, '--resume')}")
