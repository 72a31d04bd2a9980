"""The way out through a forward proxy: which one the environment names, and a tunnel through it (RFC 9110,
CONNECT).

This is the one place below the commands that reads the environment, as the TLS library does for
`SSL_CERT_FILE`: the names are everybody's, and whoever makes a connection, mount, command or library, means
the same by them. `urllib.request` would know the names too, at 3 MiB of a daemon's memory, but no network in
`NO_PROXY`.

Only `https://` endpoints go through one. Plain HTTP is for this machine, or a network somebody vouched for
(`--insecure`); a proxy would be one more place to read the token. Through a tunnel it sees nothing.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from fsd.model.endpoint import Endpoint
from fsd.model.errors import Unavailable, UsageError
from fsd.model.limits import KIB
from fsd.model.plain import dataclass, field
from fsd.remote.failures import unavailable

# In the order in which they count, as for other programs: lower case first.
NAMES: Final = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
PORT: Final = 80  # where a URL names none
_HEAD_MAX: Final = 16 * KIB
_TOLD: Final = 200  # characters of what it says
_URL: Final = re.compile(
    r"(?:([a-z][a-z0-9+.-]*)://)?(?:([^@/?#\s]*)@)?(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?/?", re.I
)
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: ([^\r\n]*))?\r\n")
_AROUND: Final = "or name the server in NO_PROXY to go past the proxy"


class ProxyRefused(Exception):
    """The proxy said no, and says so again if asked again (the cause of an `Unavailable`)."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy. `name` is the variable it comes from, `credentials` what it is shown (`Basic …`)."""

    host: str
    port: int
    name: str
    credentials: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """For people, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"the proxy http://{host}:{self.port} ({self.name})"


def proxy_for(endpoint: Endpoint, environ: Mapping[str, str] | None = None) -> Proxy | None:
    """The proxy that connections to `endpoint` go through; None: straight. Raises `UsageError` for one that
    cannot be used: going straight then would be going where somebody does not want it."""
    known = os.environ if environ is None else environ
    name = next((name for name in NAMES if known.get(name, "").strip()), None)
    if (
        name is None
        or not endpoint.tls
        or _excepted(endpoint, known.get("no_proxy") or known.get("NO_PROXY"))
    ):
        return None
    match = _URL.fullmatch(known[name].strip())
    if match is None:
        raise UsageError(
            f"{name} is no proxy's URL", hint=f"the form is http://[USER:PASSWORD@]HOST:PORT; {_AROUND}"
        )
    scheme, user, host, port = match.groups()
    if (scheme or "http").lower() != "http":
        raise UsageError(
            f"{name} names a proxy of the kind {scheme.lower()}://; only http:// ones can be used",
            hint=f"name one in HTTPS_PROXY, {_AROUND}",
        )
    number = int(port) if port else PORT
    if not 0 < number < 65536:
        raise UsageError(
            f"{name} names a port that cannot be", hint="the form is http://[USER:PASSWORD@]HOST:PORT"
        )
    return Proxy(host.strip("[]"), number, name, _credentials(user) if user else "")


def _credentials(user: str) -> str:
    """What `USER:PASSWORD` of a URL is shown as (RFC 7617): the bytes that were written, in any encoding."""
    known = unquote_to_bytes(user.encode("utf-8", "surrogateescape"))
    return "Basic " + base64.b64encode(known if b":" in known else known + b":").decode()


def _excepted(endpoint: Endpoint, exceptions: str | None) -> bool:
    """Whether NO_PROXY names the endpoint's host: `*`, a host or a domain and what is below it, with or
    without a leading dot and a port, an address, or a network of them (10.0.0.0/8)."""
    host = endpoint.host.lower().rstrip(".")
    for word in re.split(r"[\s,]+", (exceptions or "").lower()):
        if word == "*":
            return True
        bare, port = word, ""
        if word.count(":") == 1 or "]:" in word:
            bare, _, port = word.rpartition(":")
        bare = bare.strip("[]").removeprefix("*").strip(".")
        if not bare or (port and port != str(endpoint.port)):
            continue
        if host == bare or host.endswith(f".{bare}") or _within(host, bare):
            return True
    return False


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def within(
    monotonic: Callable[[], float], seconds: float, more: Callable[[], float] | None = None
) -> Callable[[], float]:
    """What is left of `seconds` from now on, for all steps of connecting together, and no more than `more`
    says; raises `TimeoutError` when they are over."""
    end = monotonic() + seconds

    def left() -> float:
        found = end - monotonic() if more is None else min(more(), end - monotonic())
        if found <= 0:
            raise TimeoutError
        return found

    return left


def open_tunnel(sock: socket.socket, proxy: Proxy, authority: str, left: Callable[[], float]) -> None:
    """Have `proxy`, which `sock` is connected to, lead on to `authority` ("host:port"). `left` says how many
    seconds there are, or raises. Raises `Unavailable`; its cause is `ProxyRefused` where asking again is no
    use."""
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
    if proxy.credentials:
        lines.append(f"Proxy-Authorization: {proxy.credentials}")
    try:
        sock.settimeout(left())
        sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        answer = _answer(sock, left)
    except OSError as exc:
        raise unavailable(proxy.shown, exc) from exc
    match = _STATUS.match(answer)
    if match is None:
        raise Unavailable(f"what {proxy.shown} answers is no HTTP", hint=f"check {proxy.name}, {_AROUND}")
    status = int(match[1])
    if status // 100 != 2:
        raise _refusal(proxy, authority, status, (match[2] or b"").decode("latin-1"))
    if not answer.endswith(b"\r\n\r\n"):
        raise Unavailable(f"{proxy.shown} spoke before the server was asked anything")


def _answer(sock: socket.socket, left: Callable[[], float]) -> bytes:
    """Up to the end of the head and what came with it."""
    found = b""
    while b"\r\n\r\n" not in found and len(found) < _HEAD_MAX:
        sock.settimeout(left())
        got = sock.recv(_HEAD_MAX)
        if not got:
            raise ConnectionResetError("the proxy closed the connection")
        found += got
    return found


def _refusal(proxy: Proxy, authority: str, status: int, reason: str) -> Unavailable:
    hint = f"does it let connections to {authority} through? {_AROUND.capitalize()}"
    if status == 407:
        hint = f"give what it asks for: {proxy.name}=http://USER:PASSWORD@HOST:PORT"
    error = Unavailable(
        f"{proxy.shown} refuses to connect to {authority}: {status} {reason[:_TOLD]}".rstrip(), hint=hint
    )
    if status < 500:
        error.__cause__ = ProxyRefused(str(status))
    return error
