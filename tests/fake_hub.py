"""A local HTTP server that answers as the hub does: user name, new repositories and branches, and
commits of small files.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 34


class Hub:
    """Records the requests (method and path), the tokens, and the files of the commits. `refuse`
    maps a part of a path to the status of the response, and `error_code` is what a response of 404
    names as its reason. With `public` the repository exists and is public.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.files: dict[str, bytes] = {}
        self.new_repositories: list[dict[str, Any]] = []
        self.refuse: dict[str, int] = {}
        self.error_code = "RepoNotFound"
        self.public = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    if self.headers.get("Transfer-Encoding") != "chunked"
                    else self.chunks()
                )

            def chunks(self) -> bytes:
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content

            def answer(self, body: bytes) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                hub.tokens.add(self.headers.get("Authorization"))
                refused = {**hub.refuse, **({"/repos/create": 409} if hub.public else {})}
                status = next((code for part, code in refused.items() if part in self.path), 200)
                if status == 200 and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    status = 401
                refusal = {"error": "refused", "url": f"{hub.url}/me/no-star"}
                content = json.dumps(
                    hub.reply(self.path, body) if status == 200 else refusal
                ).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status == 404:
                    self.send_header("X-Error-Code", hub.error_code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path: str, body: bytes) -> dict[str, Any]:
        if "/preupload/" in path:
            return {
                "files": [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
            }
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.url}/me/no-star/commit/{'0' * 40}",
                "pullRequestUrl": None,
            }
        if path.endswith("/repos/create"):
            self.new_repositories.append(json.loads(body))
            return {"url": f"{self.url}/me/no-star", "name": "me/no-star"}
        return {
            "name": "me",
            "type": "user",
            "auth": {},
            "errors": [],
            "warnings": [],
            "sha": "0" * 40,
            "siblings": [],
            "id": "me/no-star",
            "private": not self.public and any(map(_is_private, self.new_repositories)),
        }


def _is_private(repository: dict[str, Any]) -> bool:
    return bool(repository.get("private", repository.get("visibility") == "private"))
