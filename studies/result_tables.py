"""The results of a study, as a mapping from a key to a measurement.

    python -m studies.result_tables tiny_star [--remove munba_seed0,munba_seed1]

lists the keys of a study's results, or removes some. Each study has one table,
eval/results/<study>.jsonl.xz: JSON Lines under xz, one line a result, with its key beside its
content:

    pandas.read_json("eval/results/tiny_star.jsonl.xz", lines=True)

A study that runs writes each new result to a file of its own, runs/results/<study>/<key>.json. Such
a file replaces the row of its key. `python -m studies.render_results` moves the files into the
table. A result in either place counts as made, so an interrupted study continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.suite import dumps
from concept_eraser.storage import writers
from concept_eraser.storage.readers import read_compressed_lines

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "studies" / "configs"
TABLES = ROOT / "eval" / "results"
NEW_RESULTS = ROOT / "runs" / "results"
Content = dict[str, Any]


class Results(MutableMapping[str, Content]):
    """The results of a study, or of a folder of its keys.

    The key `attacks/munba_seed0` of the study `tiny_star` is the key `munba_seed0` of
    `Results("tiny_star/attacks")`. Iteration gives the keys of this folder in order, without those
    of folders below. The contents of rows are shared: do not change them in place.

    Args:
        name: The study, and the folder where there is one: `tiny_star`,
        `tiny_leaderboard/time/attacks`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.study, _, folder = name.partition("/")
        self._prefix = f"{folder}/" if folder else ""

    def folder(self, name: str) -> Results:
        """The results in a folder below this one."""
        return Results(f"{self.name}/{name}")

    def __getitem__(self, key: str) -> Content:
        path = new_path(self.study, self._prefix + key)
        content = (
            json.loads(path.read_text())
            if path.exists()
            else table(self.study).get(self._prefix + key)
        )
        if content is None:  # also a result that was removed
            raise KeyError(f"{self.name}/{key}")
        return content

    def __setitem__(self, key: str, content: Content) -> None:
        writers.write_text(new_path(self.study, self._prefix + key), dumps(content), overwrite=True)

    def __delitem__(self, key: str) -> None:
        self[key]  # raises KeyError where there is none
        writers.write_text(new_path(self.study, self._prefix + key), dumps(None), overwrite=True)

    def __iter__(self) -> Iterator[str]:
        keys = {*table(self.study), *new_keys(self.study)}
        inside = sorted(
            key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)
        )
        return (key for key in inside if "/" not in key and key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def table_path(study: str) -> Path:
    return TABLES / f"{study}.jsonl.xz"


def figure_path(study: str, name: str) -> Path:
    """Where a figure of a study's page lies. `name` has the suffix of its format: munba.webp,
    plots.svg.
    """
    return TABLES / f"{study}.{name}"


def new_path(study: str, key: str) -> Path:
    return NEW_RESULTS / study / f"{key}.json"


def new_keys(study: str) -> list[str]:
    """The keys of the results that are not in the table yet."""
    folder = NEW_RESULTS / study
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.json")
    )


def table(study: str) -> dict[str, Content]:
    """The rows of a study's table by key; {} where there is no table."""
    path = table_path(study)
    if not path.exists():
        return {}
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=32)
def _read(path: Path, modification_time: int, size: int) -> dict[str, Content]:
    """The rows of a table, read again only where the file changed."""
    return {row.pop("key"): row for row in read_compressed_lines(path)}


def pack(study: str) -> None:
    """Move the new results of a study into its table. Equal results give equal bytes.

    A result that a running study replaces meanwhile stays a file, for the next call.
    """
    new = {key: new_path(study, key).read_text() for key in new_keys(study)}
    if not new:
        return
    rows = {**table(study), **{key: json.loads(text) for key, text in new.items()}}
    lines = [
        json.dumps({"key": key, **rows[key]}) + "\n"
        for key in sorted(rows)
        if rows[key] is not None
    ]
    content = lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    writers.write_bytes(table_path(study), content, overwrite=True)
    for key, text in new.items():
        path = new_path(study, key)
        if path.read_text() == text:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study",
        help="its name, with a folder where there is one: tiny_star, tiny_leaderboard/attacks",
    )
    parser.add_argument("--remove", default="", help="the keys to remove")
    args = parser.parse_args()
    results = Results(args.study)
    for key in args.remove.split(",") if args.remove else ():
        if key not in results:
            parser.error(
                f"--remove: {args.study} has no result {key!r}; without --remove its "
                "keys are listed"
            )
        del results[key]
    if not args.remove:
        print("\n".join(results))


if __name__ == "__main__":
    main()
