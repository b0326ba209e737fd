"""The files of the repository beside the code: workflows, issue forms, citation and version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from concept_eraser.utils import provenance

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PAPERS = {"2411.15537": "munba", "2506.04712": "uno"}
MAJOR = re.compile(r"[\w-]+/[\w.-]+@(?:release/)?v\d+")


def _read(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in _read(path)["jobs"].values() for step in job["steps"]]


def _make_targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([\w-]+)", text))


def test_the_files_are_there() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "release.yml"]
    names = ["bug.yml", "config.yml", "feature.yml", "method_request.yml"]
    assert [path.name for path in FORMS] == names


@pytest.mark.parametrize(
    ("name", "targets"),
    [("ci", {"check", "test"}), ("docs", {"docs"}), ("release", {"test"})],
)
def test_workflows_call_targets_of_the_makefile(name: str, targets: set[str]) -> None:
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    called = _make_targets("\n".join(step.get("run", "") for step in _steps(path)))
    assert called == targets
    makefile = (ROOT / "Makefile").read_text()
    for target in called:
        assert re.search(rf"^{target}:", makefile, flags=re.M), f"make {target} does not exist"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_complete(path: Path) -> None:
    """Each has triggers and least permissions; its actions have major versions."""
    content = _read(path)
    assert content[True]  # YAML 1.1 reads the key `on` as true
    assert content["permissions"] == {"contents": "read"}
    for step in _steps(path):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert MAJOR.fullmatch(step["uses"]), step["uses"]
    versions = [step["with"]["python-version"] for step in _steps(path) if _is_python(step)]
    assert set(versions) == {"3.11"}


def _is_python(step: dict[str, Any]) -> bool:
    return step.get("uses", "").startswith("actions/setup-python")


def test_the_pages_are_what_make_docs_writes() -> None:
    path = ROOT / ".github" / "workflows" / "docs.yml"
    (upload,) = (step for step in _steps(path) if "upload-pages-artifact" in step.get("uses", ""))
    recipe = (ROOT / "Makefile").read_text().split("\ndocs:", 1)[1].split("\n\n", 1)[0]
    assert upload["with"]["path"] in recipe


@pytest.mark.parametrize("tag", ["v" + PROJECT["version"], "v0.0.0"])
def test_a_release_needs_the_tag_of_its_version(tag: str) -> None:
    """The step of the workflow is run as it stands."""
    steps = _steps(ROOT / ".github" / "workflows" / "release.yml")
    (script,) = (step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", ""))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
    )
    assert (process.returncode == 0) == (tag != "v0.0.0"), process.stderr
    assert process.returncode == 0 or PROJECT["version"] in process.stderr


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"])
def test_issue_forms_are_valid(path: Path) -> None:
    content = _read(path)
    assert content["name"]
    assert content["description"]
    fields = content["body"]
    identifiers = [field["id"] for field in fields if field["type"] != "markdown"]
    assert len(identifiers) == len(set(identifiers)) >= 3
    for field in fields:
        assert field["type"] in {"markdown", "input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"].get("label") or field["type"] == "markdown"
        if field["type"] in {"dropdown", "checkboxes"}:
            assert len(field["attributes"]["options"]) >= 1


def test_the_template_of_pull_requests_names_targets_that_exist() -> None:
    template = (ROOT / ".github" / "pull_request_template.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert _make_targets(template) >= {"check", "test"}
    assert all(f"\n{target}:" in makefile for target in _make_targets(template))


def test_the_help_of_make_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony
    text = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert set(phony[1].split()) - {"help"} == _make_targets(text)


def test_clean_keeps_results_that_wait_and_trained_models(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    result = tmp_path / "runs" / "results" / "study" / "key.json"
    for path in (result, tmp_path / "docs" / "_build" / "index.html"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    subprocess.run(["make", "-s", "clean"], cwd=tmp_path, check=True)
    assert result.is_file()
    assert not (tmp_path / "docs" / "_build").exists()


def test_the_source_distribution_has_everything() -> None:
    """The suite imports the benchmarks, and the site shows SECURITY.md."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    tops = {line.partition("/")[0] for line in files.splitlines()}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = {name.lstrip("/") for name in build["targets"]["sdist"]["include"]}
    assert tops - included == {".gitignore", "pyproject.toml"}, "hatchling adds these itself"
    assert included <= tops


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert provenance.version() == version, "install the checkout again, as make does"
    assert CITATION["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text()
    latest = re.search(r"^## (\S+) \((\S+)\)$", changelog, flags=re.M)
    assert latest
    assert latest.groups() == (version, str(CITATION["date-released"]))


def test_the_citation_is_complete() -> None:
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["license"] == PROJECT["license"]
    assert [author["name"] for author in CITATION["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert CITATION["repository-code"] == PROJECT["urls"]["Source"]


def test_the_citation_has_the_papers_titles_as_the_methods_have_them() -> None:
    references = {reference["url"][-10:]: reference for reference in CITATION["references"]}
    assert references.keys() == PAPERS.keys()
    for number, method in PAPERS.items():
        text = (ROOT / "concept_eraser" / "methods" / f"{method}.py").read_text()
        first_line = text.splitlines()[0]
        assert references[number]["title"] in first_line
        assert number in first_line
        names = [author["family-names"] for author in references[number]["authors"]]
        assert all(name in first_line for name in names)


def test_addresses_of_the_project() -> None:
    """All are in one repository, and what they name exists."""
    urls = PROJECT["urls"]
    assert list(urls) == ["Documentation", "Source", "Issues", "Changelog"]
    source = urls["Source"]
    assert urls["Issues"] == f"{source}/issues"
    assert urls["Changelog"].startswith(source)
    assert (ROOT / urls["Changelog"].rsplit("/", 1)[1]).is_file()
    link = _read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["contact_links"][0]["url"]
    assert link.startswith(source)
