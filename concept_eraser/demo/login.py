"""The login: one account, compared in constant time, and a limit of failed attempts."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Any

WINDOW = 60.0  # seconds in which attempts count
EACH, ALL = 5, 30  # failed attempts allowed in a window: of one address, in total


class Account:
    """One user and password, as a callable for Gradio's `auth`."""

    def __init__(self, user: str, password: str) -> None:
        self._user, self._password = _digest(user.strip()), _digest(password)

    def __call__(self, user: str, password: str) -> bool:
        """Whether both are right. The time does not depend on how many characters are right."""
        same_user = hmac.compare_digest(_digest(user.strip()), self._user)
        same_password = hmac.compare_digest(_digest(password), self._password)
        return same_user & same_password


class Attempts:
    """Login attempts of the last WINDOW seconds. clock: seconds, for tests.

    An attempt counts from its start until it succeeds or is WINDOW seconds old. A refused attempt
    does not count. A block therefore ends, and at most ALL attempts are in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._attempts = clock, list[tuple[float, str]]()

    def begin(self, address: str) -> float:
        """Count an attempt. Returns 0, or the seconds until the next attempt is allowed."""
        now = self._clock()
        self._attempts = [(at, sender) for at, sender in self._attempts if now - at < WINDOW]
        times = [at for at, sender in self._attempts if sender == address]
        if len(times) >= EACH:
            return WINDOW - (now - times[0])
        if len(self._attempts) >= ALL:
            return WINDOW - (now - self._attempts[0][0])
        self._attempts.append((now, address))
        return 0.0

    def forget(self, address: str) -> None:
        """Remove the attempts of an address after a successful login."""
        self._attempts = [(at, sender) for at, sender in self._attempts if sender != address]


def address_of(scope: Mapping[str, Any]) -> str:
    """Return the sender of a request: an IPv4 address, or the network of an IPv6 address.

    One machine has many IPv6 addresses of one network.
    """
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(str(client[0]).partition("%")[0] if client else "")
    except ValueError:
        return str(client[0]) if client else ""
    address = getattr(address, "ipv4_mapped", None) or address
    return (
        str(address)
        if address.version == 4
        else str(ipaddress.ip_network((address, 64), strict=False))
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
