"""The page of licences agrees with the direct dependencies and the data files.

No copyleft licence is hidden.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import licences

PAGE = licences.PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"{title}\n", 1)[1].split("\n#", 1)[0]


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("group", licences.groups())
def test_direct_dependencies_stand_in_the_page_with_their_licence(group: str) -> None:
    table = rows(section("## Direct dependencies" if group == "default" else f"### {group}"))
    assert sorted(table) == licences.names(licences.groups()[group])
    whole = rows("\n".join(line for line in PAGE.splitlines() if line.count("|") == 5))
    for name, (licence,) in table.items():
        package = licences.package(name)
        assert licence == whole[name][1]
        if (
            package.version == whole[name][0]
        ):  # the metadata of other versions may have another wording
            assert licence == package.licence
        assert licences.Package(name, "", licence, frozenset()).copyleft == package.copyleft


def test_no_copyleft_in_the_default_install_but_nudenet() -> None:
    assert licences.problems() == []
    default = licences.closure(licences.groups()["default"])
    assert len(default) > 60
    assert not {"torchjd", "quadprog", "qpsolvers", "ecos", "cvxpy"} & default
    assert "quadprog" in licences.closure(licences.groups()["torchjd"])
    strong = {name for name in default if licences.package(name).copyleft in ("strong", "library")}
    assert strong == {"nudenet"}


def test_a_copyleft_dependency_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = licences.groups()
    groups["default"] = [*groups["default"], "torchjd[quadprog-projector]>=0.18"]
    monkeypatch.setattr(licences, "groups", lambda: groups)
    problems = licences.problems()
    assert any(one.startswith("quadprog: GPL") for one in problems)
    assert any(one.startswith("qpsolvers: LGPL") for one in problems)
    monkeypatch.setattr(licences, "REVIEWED", {})
    assert any(one.startswith("nudenet: GNU AFFERO") for one in licences.problems()), (
        "its metadata alone says MIT"
    )


def test_nudenets_files_say_what_the_page_says() -> None:
    from importlib import metadata

    import nudenet

    assert "GNU AFFERO GENERAL PUBLIC LICENSE" in licences.package("nudenet").texts
    assert "MIT" in metadata.metadata("nudenet")["License"]
    model = (Path(nudenet.__file__).parent / "320n.onnx").read_bytes()
    assert b"AGPL-3.0 License (https://ultralytics.com/license)" in model


def test_every_data_file_has_a_line() -> None:
    files = licences.data_files()
    assert len(files) > 200
    assert [file for file in files if licences.line_of(file) is None] == []
    used_lines = {licences.line_of(file) for file in files}
    assert [line[0] for line in licences.DATA if line not in used_lines] == [], (
        "lines that no file needs"
    )
    table = rows(section("## Data files of this repository"))
    assert {line[0]: list(line[1:]) for line in licences.DATA} == table


def test_prompt_sets_say_the_same_of_themselves() -> None:
    for path in sorted((licences.ROOT / "prompts").glob("*.yaml")):
        match = re.match(
            r"# Origin: (?P<origin>.*)\. Licence: (?P<licence>.*)\.$",
            path.read_text().splitlines()[0],
        )
        assert match, f"{path.name} does not begin with its origin and licence"
        _, what, origin, licence = licences.line_of(f"prompts/{path.name}") or ("",) * 4
        if path.name.startswith("i2p_"):
            assert "rows of I2P" in what
            assert match["licence"] in licence
        else:
            assert (match["origin"], match["licence"]) == (origin, licence)


def test_the_demo_loads_nudenet_only_for_images_that_are_not_of_the_bundled_model() -> None:
    code = """if True:
    import sys, torch
    import concept_eraser.demo.page
    from concept_eraser.demo import image_html
    loaded = ["nudenet" in sys.modules]
    for size, judge in ((64, "auto"), (96, "none"), (64, "bundled judge"), (96, "auto")):
        images = torch.zeros(1, size, size, 3, dtype=torch.uint8)
        image_html.judge_images(images, judge, base="tiny-sd")
        loaded.append("nudenet" in sys.modules)
    print(loaded)
    """
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert process.stdout.splitlines()[-1] == "[False, False, False, False, True]", process.stderr[
        -500:
    ]
