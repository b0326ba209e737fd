"""The demo's link to the documentation: one fixed folder is served, and nothing beside it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.demo import documentation
from concept_eraser.demo.login import Account, Attempts
from concept_eraser.demo.page import INTRO, middleware
from concept_eraser.demo.uploads import Uploads

PAGE = "http://127.0.0.1:7860"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built site in a folder, beside a file that must not be served."""
    folder = tmp_path / "docs" / "_build" / "html"
    (folder / "reference").mkdir(parents=True)
    (folder / "index.html").write_text("the front page")
    (folder / "reference" / "index.html").write_text("the reference")
    (tmp_path / "docs" / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "docs" / "secret.txt")
    monkeypatch.setattr(documentation, "FOLDER", folder)
    return folder


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a client of Gradio's application as `page.serve` builds it."""
    import gradio as gr
    from gradio.routes import App
    from starlette.testclient import TestClient

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "scratch"))

    def make(attempts: Attempts | None = None) -> Any:
        with gr.Blocks() as page:
            gr.HTML(INTRO.format(link=documentation.link()))
        page.auth = Account("me", "right-word") if attempts else None
        page.auth_message = None
        guards = middleware("127.0.0.1", [], Uploads(tmp_path), attempts)
        options = {"middleware": guards, "routes": documentation.routes()}
        return TestClient(App.create_app(page, app_kwargs=options), PAGE, client=("127.0.0.1", 5))

    return make


def test_the_built_site_is_served_and_nothing_beside_it(
    site: Path, client: Callable[..., Any]
) -> None:
    page = client()
    assert documentation.address() == "/documentation/index.html"
    assert page.get("/documentation/index.html").text == "the front page"
    assert page.get("/documentation/reference/").text == "the reference"
    for path in ("../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "link.txt", "missing"):
        answer = page.get(f"/documentation/{path}")
        assert answer.status_code == 404, path
        assert "secret" not in answer.text.replace("secret.txt", "")
    assert page.post("/documentation/index.html").status_code == 405
    foreign = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
    assert page.get("/documentation/index.html", headers=foreign).status_code == 403
    assert "/documentation/index.html" in page.get("/config").text


def test_the_site_needs_the_login(site: Path, client: Callable[..., Any]) -> None:
    page = client(Attempts())
    assert page.get("/documentation/index.html").status_code == 401
    words = {"username": "me", "password": "right-word"}
    assert page.post("/login", data=words).status_code == 200
    assert page.get("/documentation/index.html").text == "the front page"


@pytest.mark.parametrize(
    ("lines", "url"),
    [
        (["Source, https://a.example", "Documentation, https://b.example/"], "https://b.example/"),
        (["Source, https://a.example"], None),
        (["Documentation, javascript:alert(1)"], None),
        ([], None),
    ],
)
def test_without_a_built_site_the_link_is_that_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], url: str | None
) -> None:
    metadata = importlib.metadata.metadata("concept-eraser")
    del metadata["Project-URL"]
    for line in lines:
        metadata["Project-URL"] = line
    monkeypatch.setattr(documentation, "FOLDER", tmp_path / "docs" / "_build" / "html")
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    assert documentation.address() == url
    assert documentation.routes() == []
    assert (f'href="{url}"' in documentation.link()) if url else (documentation.link() == "")


def test_a_wheel_serves_no_folder_of_others(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an installed package may lie the documentation of another one."""
    (tmp_path / "data_files").mkdir()
    monkeypatch.setattr(documentation, "_PACKAGE", tmp_path)
    assert documentation.routes() == []
