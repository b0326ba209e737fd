"""Checks of every request before Gradio handles it: its address, its sender and its size.

A browser sends requests to this server for any site that its user visits. Two checks distinguish
these from the page's own requests:

* The Host header is an address or a name of this server. A site whose name was pointed at this
  machine (DNS rebinding) sends its own name there.
* The Origin header is the page itself, and Sec-Fetch-Site is not a foreign site. Another site can
  then neither upload, nor start a job, nor read an answer. Only a link to the page may come from
  elsewhere.

`RequestGuard` is ASGI middleware and independent of Gradio. It therefore covers every route of
Gradio, including those of later versions.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from concept_eraser.demo import documentation
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
BODY = 2**20  # largest size in bytes of a request that is not an upload
IMAGES = 40  # largest number of files of one upload, counted roughly while it arrives
PART = b"content-disposition"  # a header of every file of an upload, in any case of letters
# largest number of open requests (every page holds two): in total, of one address
OPEN, OPEN_EACH = 400, 200
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Routes of Gradio that the page does not use. They write files, fetch addresses, read much data
# into memory or run code.
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
# Routes that Gradio does not protect by the login, although only the page itself needs them.
BEHIND_LOGIN = (
    documentation.ROUTE,
    *(API + name for name in ("heartbeat/", "cancel", "reset", "token")),
)


class Refusal(Exception):
    """The refusal of a request.

    Attributes:
        status: The HTTP status.
        sentence: The message.
        wait: The seconds after which the request may be repeated. 0 if it may not.
    """

    def __init__(self, status: int, sentence: str, wait: float = 0) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.wait = status, sentence, wait


class RequestGuard:
    """The middleware that checks every request.

    Args:
        app: The application behind it.
        host: The address on which the server listens.
        names: Further hosts, with or without a port.
        uploads: The quota of uploaded images.
        attempts: The counter of login attempts. None if the page has no password.
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
        # these stand for all addresses, so there is no single name to accept
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
            _require_open_route(scope, self.attempts is not None)
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
        """Pass a request with a checked sender to the application, with a limit of its size."""
        if scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        if path == UPLOAD:
            await self._upload(scope, receive, send)
            return
        body = await _read_body(scope, receive)
        if path == "/login" and self.attempts is not None:
            await self._login(scope, _replay_body(body, receive), send, address)
            return
        _require_no_address(body)
        await self.app(scope, _replay_body(body, receive), send)

    def _require_host(self, scope: Scope) -> tuple[str, int | None]:
        """Return the host that a request names. Raises Refusal if it is not this server."""
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
        # a proxy in front of the page has the default port, or the port of its --allow-host
        for name, fixed_port in self.names:
            if host[0] == name and host[1] in ((fixed_port,) if fixed_port else (port, None)):
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
        """Receive an upload within the quota. Raises Refusal beyond it.

        The rest of a body that exceeds its announced length is cut off.
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
                    "the quota of uploaded images on this server is used up; they are removed "
                    "after a while, try again later"
                ),
                wait,
            )
        received, images, answered, over, end = 0, 0, False, False, b""

        async def count_received() -> Message:
            nonlocal received, images, over, end
            message = await receive()
            received += len(message.get("body", b""))
            piece = end + message.get("body", b"").lower()
            images += piece.count(PART)
            end = piece[-len(PART) + 1 :]  # the header may lie across two messages
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
        """Check a login attempt. It is counted first, so that parallel attempts count as well."""
        assert self.attempts is not None
        wait = self.attempts.begin(address)
        if wait:
            raise Refusal(429, f"too many wrong passwords; try again in {wait:.0f} seconds", wait)

        async def send_and_clear(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.attempts.forget(address)  # type: ignore[union-attr]
            await send(message)

        await self.app(scope, receive, send_and_clear)


def _require_own_page(scope: Scope, host: tuple[str, int | None]) -> None:
    """Raise Refusal if the headers of the browser say that another site sent a request."""
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


def _require_open_route(scope: Scope, account: bool) -> None:
    """Raise Refusal for routes that the page does not use.

    With a password (`account`), also for routes that need a login.
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
    """Raise Refusal if a request names an internet address as a file. Gradio would fetch it."""
    try:
        level = [json.loads(body)]
    except (ValueError, RecursionError):
        return  # not JSON; the routes refuse it themselves
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                path = value.get("path")
                if isinstance(path, str) and "://" in path:
                    raise Refusal(403, "upload the file; the demo fetches no file from an address")
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the body of a request that is not an upload. Raises Refusal if it is too large."""
    if (length := _length(scope) or 0) > BODY:
        raise Refusal(413, _too_large(length, BODY))
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the sender has disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY:
            raise Refusal(413, _too_large(size, BODY))
        if not message.get("more_body"):
            return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the application a body that was already read."""
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
    """Return the size that a request announces, or None."""
    headers = _headers(scope, b"content-length")
    if not headers:
        return None
    if len(headers) > 1 or not headers[0].isdecimal() or len(headers[0]) > 18:
        raise Refusal(400, "the size of the request is not a number")
    return int(headers[0])


def _headers(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _authority(origin: str) -> tuple[str, int | None]:
    return split_host(origin.partition("://")[2])


def split_host(text: str) -> tuple[str, int | None]:
    """Split a Host header into name and port.

    An invalid header gives ("", None), which equals no host.
    """
    try:
        parts = urlsplit(f"//{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return "", None
    if not name or parts.netloc != text or parts.username is not None or parts.netloc.endswith(":"):
        return "", None
    return plain_address(name), port


def plain_address(name: str) -> str:
    """Normalise a host: lower case, no last dot, addresses in their shortest form."""
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
    """Answer with a status and a message.

    A websocket is closed before it is open, which servers answer with 403.
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
