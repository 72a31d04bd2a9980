"""Endpoints: where a server is, and when a secret may travel there. One form for every transport.

Text alone; no name is resolved.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from fsd.model.errors import UsageError

_URL: Final = re.compile(
    r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Z0-9._-]+)(?::([0-9]{1,5}))?(/[!\x22$->@-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_HINT: Final = "the form is https://HOST[:PORT]; http:// for a server on this machine"


class Endpoint(NamedTuple):
    """`base` is the path before `/v1`, without a trailing slash."""

    tls: bool
    host: str
    port: int
    base: str

    @property
    def authority(self) -> str:
        """Host and port as a URL and the `Host` header write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.base}"


def parse_endpoint(url: str, *, insecure: bool = False) -> Endpoint:
    """The endpoint in `url`. Raises `UsageError`, also for plain HTTP to another machine unless `insecure`:
    whoever sees a token on its way owns the filesystem."""
    match = _URL.fullmatch(url.strip())
    if match is None:
        raise UsageError(f"not an endpoint: {url!r}", hint=_HINT)
    scheme, host, port, path = match.groups()
    host = host.strip("[]")
    tls = scheme.lower() == "https"
    number = int(port) if port else (443 if tls else 80)
    if not 0 < number < 65536:
        raise UsageError(f"not an endpoint: {url!r}: no such port", hint=_HINT)
    if not tls and not insecure and not is_loopback(host):
        raise UsageError(
            f"refusing to send a secret over plain HTTP to {host}",
            hint="use https://, or --insecure if the network in between is trusted",
        )
    return Endpoint(tls, host, number, (path or "").rstrip("/"))


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its form alone. Other names below localhost may be asked of a DNS
    server, which can say what it likes."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
