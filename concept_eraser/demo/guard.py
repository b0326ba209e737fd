"""What a request must be before Gradio sees it: addressed to this page, sent by this page, and of a
bounded size.

A browser sends requests to this server for any site that its user visits. Two checks tell these
from the page's own:

* The Host header is an address or a name of this server. A site whose name was pointed at this
  machine (DNS rebinding) sends its own name there.
* The Origin header is the page itself, and Sec-Fetch-Site is not a foreign site. Another site can
  then neither upload, nor start a job, nor read an answer. Only a link to the page may come from
  elsewhere.

`RequestGuard` is ASGI and knows no library, so that every route of Gradio, and every one that it
may add, passes it.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from concept_eraser.demo.login import Attempts, address_of
from concept_eraser.demo.uploads import Uploads
from concept_eraser.utils.errors import quote

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

API = "/gradio_api/"
UPLOAD = API + "upload"
BODY = 2**20  # bytes of a request that is no upload
IMAGES = 40  # files of one upload, counted roughly while it arrives
# requests that are open at once (every page holds two): of all, of one address
OPEN, OPEN_EACH = 400, 200
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Routes of Gradio that the page does not use: they write files, fetch addresses, read much into
# memory or run code.
CLOSED = (
    "/monitoring",
    *(
        API + name
        for name in (
            "proxy=",
            "component_server",
            "process_recording",
            "deep_link",
            "vibe-",
            "undo-vibe-",
        )
    ),
    *(
        API + name
        for name in ("run-history", "dev/", "stream/", "custom_component", "file=http", "file/")
    ),
)
# Routes of Gradio that ask for no login, though only somebody who is logged in needs them.
BEHIND_LOGIN = tuple(API + name for name in ("heartbeat/", "cancel", "reset", "token"))


class Refusal(Exception):
    """A request that is answered with a status and one sentence. wait: seconds after which it may
    be tried again.
    """

    def __init__(self, status: int, sentence: str, wait: float = 0) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.wait = status, sentence, wait


class RequestGuard:
    """The middleware. host: where the server listens; names: further hosts, with or without a port.

    attempts: the login attempts to be counted; None where the page asks for no password. uploads:
    the quota.
    """

    def __init__(
        self,
        app: App,
        host: str,
        names: Sequence[str],
        uploads: Uploads,
        attempts: Attempts | None = None,
    ) -> None:
        self.app, self.uploads, self.attempts = app, uploads, attempts
        # every address is no address
        self.host = "" if host in ("0.0.0.0", "::") else plain_address(host)
        self.names = [split_host(name) for name in names]
        self.open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the server's own start and end
            await self.app(scope, receive, send)
            return
        address = address_of(scope)
        try:
            host = self._require_host(scope)
            _require_own_page(scope, host)
            _require_known(scope, self.attempts is not None)
            if self.open.total() >= OPEN or self.open[address] >= OPEN_EACH:
                raise Refusal(
                    429, "too many requests are open at once; close some pages and try again", 5
                )
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send)
            return
        self.open[address] += 1
        try:
            await self._serve(scope, receive, send, address)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send)
        finally:
            self.open[address] -= 1
            if not self.open[address]:
                del self.open[address]

    async def _serve(self, scope: Scope, receive: Receive, send: Send, address: str) -> None:
        """Hand on a request whose sender is known, its body bounded."""
        if scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        if path == UPLOAD:
            await self._upload(scope, receive, send)
            return
        body = await _read(scope, receive)
        if path == "/login" and self.attempts is not None:
            await self._login(scope, _again(body, receive), send, address)
            return
        _require_no_address(body)
        await self.app(scope, _again(body, receive), send)

    def _require_host(self, scope: Scope) -> tuple[str, int | None]:
        """The host that a request names. Raises Refusal where it is not this server."""
        headers = _headers(scope, b"host")
        host = split_host(headers[0]) if len(headers) == 1 else ("", None)
        server = scope.get("server") or ("", None)
        server_address, port = plain_address(str(server[0])), server[1]
        own_hosts = {
            server_address,
            self.host,
            *(LOOPBACK if _is_loopback(server_address) else ()),
        } - {""}
        if host[0] in own_hosts and (host[1] or _default_port(scope)) == port:
            return host
        # a proxy in front of the page has the usual port, or one that is given
        for name, fixed in self.names:
            if host[0] == name and host[1] in ((fixed,) if fixed else (port, None)):
                return host
        raise Refusal(
            403,
            (
                "this page is not served as "
                f"{quote(', '.join(headers) or 'a host without a name', 80)}; open it by its "
                "address, or start it with --allow-host NAME"
            ),
        )

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An upload within the quota. Raises Refusal beyond it; what exceeds its own announcement
        is cut off.
        """
        length = _length(scope)
        if (length or 0) > self.uploads.request:
            raise Refusal(413, _too_large(length or 0, self.uploads.request))
        size = self.uploads.request if length is None else length
        wait = self.uploads.reserve(size)
        if wait is not None:
            raise Refusal(
                429,
                (
                    "the uploaded images take all the room that they may take on this "
                    "server; they are removed after a while, try again later"
                ),
                wait,
            )
        received, images, answered, over = 0, 0, False, False

        async def count_received() -> Message:
            nonlocal received, images, over
            message = await receive()
            received += len(message.get("body", b""))
            images += message.get("body", b"").count(b'filename="')
            if received > size or images > IMAGES:
                over = True
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Message) -> None:
            nonlocal answered
            if not over:
                answered = True
                await send(message)

        try:
            await self.app(scope, count_received, answer)
        except Exception:
            if not over:
                raise
        finally:
            self.uploads.release(size)
        if over and not answered:
            raise Refusal(
                413,
                _too_large(received, size)
                if received > size
                else f"the request has more than {IMAGES} files",
            )

    async def _login(self, scope: Scope, receive: Receive, send: Send, address: str) -> None:
        """A login attempt, counted before it is looked at, so that many at once are counted too."""
        assert self.attempts is not None
        wait = self.attempts.begin(address)
        if wait:
            raise Refusal(429, f"too many wrong passwords; try again in {wait:.0f} seconds", wait)

        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.attempts.forget(address)  # type: ignore[union-attr]
            await send(message)

        await self.app(scope, receive, heard)


def _require_own_page(scope: Scope, host: tuple[str, int | None]) -> None:
    """Raise Refusal where a browser says that another site sent a request."""
    origins, sites = _headers(scope, b"origin"), _headers(scope, b"sec-fetch-site")
    for origin in origins:
        if origin.partition("://")[0] not in ("http", "https") or _authority(origin) != host:
            raise Refusal(
                403,
                (
                    f"this request was sent by another page ({quote(origin, 80)}); the demo "
                    "answers its own page only"
                ),
            )
    if set(sites) <= {"same-origin", "none"}:
        return
    link = (_headers(scope, b"sec-fetch-mode"), _headers(scope, b"sec-fetch-dest")) == (
        ["navigate"],
        ["document"],
    )
    if not (link and scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/"):
        raise Refusal(
            403, "this request was sent by another site; the demo answers its own page only"
        )


def _require_known(scope: Scope, account: bool) -> None:
    """Raise Refusal for what the page does not use, and, with a password, for what needs a login.
    account: it has one.
    """
    path = scope["path"]
    if path.startswith(CLOSED):
        raise Refusal(404, "the demo does not offer this")
    if account and path.startswith(BEHIND_LOGIN) and not _is_logged_in(scope):
        raise Refusal(401, "log in first")


def _is_logged_in(scope: Scope) -> bool:
    """Whether a request carries a token that Gradio gave out at a login."""
    app = scope.get("app")
    tokens, identity = getattr(app, "tokens", {}), getattr(app, "cookie_id", "")
    names = (f"access-token-{identity}", f"access-token-unsecure-{identity}")
    pairs = (
        pair.strip().partition("=")
        for line in _headers(scope, b"cookie")
        for pair in line.split(";")
    )
    return any(name in names and value.strip('"') in tokens for name, _, value in pairs)


def _require_no_address(body: bytes) -> None:
    """Raise Refusal where a request gives an address of the internet in place of a file: Gradio
    would fetch it.
    """
    try:
        level = [json.loads(body)]
    except (ValueError, RecursionError):
        return  # no JSON, which the routes refuse themselves
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                path = value.get("path")
                if isinstance(path, str) and "://" in path:
                    raise Refusal(
                        403, "a file is uploaded to the demo; it fetches none from an address"
                    )
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below


async def _read(scope: Scope, receive: Receive) -> bytes:
    """The body of a request that is no upload. Raises Refusal where it is too large."""
    if (length := _length(scope) or 0) > BODY:
        raise Refusal(413, _too_large(length, BODY))
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the sender has gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY:
            raise Refusal(413, _too_large(size, BODY))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, to be read by the application."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _too_large(size: int, limit: int) -> str:
    return (
        f"the request has {size / 2**20:.1f} MB or more; at most {limit / 2**20:.1f} MB are taken"
    )


def _length(scope: Scope) -> int | None:
    """The size that a request announces; None where it announces none."""
    headers = _headers(scope, b"content-length")
    if not headers:
        return None
    if len(headers) > 1 or not headers[0].isdecimal() or len(headers[0]) > 18:
        raise Refusal(400, "the size of the request is no number")
    return int(headers[0])


def _headers(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _authority(origin: str) -> tuple[str, int | None]:
    return split_host(origin.partition("://")[2])


def split_host(text: str) -> tuple[str, int | None]:
    """Name and port of a Host header; ("", None) for what is none, so that it equals no host."""
    try:
        parts = urlsplit(f"//{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return "", None
    if not name or parts.netloc != text or parts.username is not None or parts.netloc.endswith(":"):
        return "", None
    return plain_address(name), port


def plain_address(name: str) -> str:
    """A host in one spelling: small letters, no last dot, addresses as they are written
    shortest.
    """
    plain = name.lower().strip("[]").removesuffix(".")
    try:
        address = ipaddress.ip_address(plain.partition("%")[0])
    except ValueError:
        return plain
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _default_port(scope: Mapping[str, Any]) -> int:
    return 443 if scope.get("scheme") in ("https", "wss") else 80


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a status and a sentence; a websocket is closed before it is open, which servers
    answer with 403.
    """
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.sentence[:100]})
        return
    body = f"{refusal.sentence}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refusal.wait:
        headers.append((b"retry-after", str(max(1, round(refusal.wait))).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
