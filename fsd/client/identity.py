"""Who calls whom: what a token, a region code and an endpoint resolve to, and when a secret may travel.

Nothing here touches the network or the environment; `fsd.cli` reads those and fills `Claim`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fsd.model.errors import NotAuthenticated, UsageError
from fsd.model.token import parse

HTTP = "http"
HTTPS = "https"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the caller was given. `endpoint` overrides the token's region; `file_system_id` only checks."""

    token: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    region: str | None = None
    endpoint: str | None = None
    file_system_id: str | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """A server and the secret to show it. `file_system_id` is empty for the admin key."""

    endpoint: str
    secret: str = field(repr=False)
    file_system_id: str = ""

    @property
    def scheme(self) -> str:
        return urlsplit(self.endpoint).scheme

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.endpoint)
        default = 443 if parts.scheme == HTTPS else 80
        return parts.hostname or "", parts.port or default

    @property
    def prefix(self) -> str:
        """The path an endpoint behind a shared host begins with, without a trailing slash."""
        return urlsplit(self.endpoint).path.rstrip("/")


def data_identity(claim: Claim) -> Identity:
    """The data plane's identity; raises `NotAuthenticated` (no token, a bad one, one of another
    filesystem), `UnknownRegion`, `UsageError` (endpoint)."""
    if not claim.token:
        raise NotAuthenticated(
            "no filesystem token", hint="set FSD_TOKEN to the fs_token that `fsd create` printed"
        )
    token = parse(claim.token)
    if claim.file_system_id and claim.file_system_id != token.file_system_id:
        raise NotAuthenticated(
            f"the token is for {token.file_system_id}, not for {claim.file_system_id}",
            hint="use the token of that filesystem, or leave the filesystem id out",
        )
    endpoint = check_endpoint(claim.endpoint or token.endpoint(claim.region), insecure=claim.insecure)
    return Identity(endpoint, claim.token.strip(), token.file_system_id)


def admin_identity(claim: Claim) -> Identity:
    """The control plane's identity; raises `NotAuthenticated` or `UsageError`."""
    if not claim.endpoint:
        raise UsageError("no server given", hint="set FSD_ENDPOINT or --endpoint to the server's URL")
    if not claim.admin_key or not claim.admin_key.strip():
        raise NotAuthenticated(
            "no admin key", hint="set FSD_ADMIN_KEY, or --admin-key-file to the server's DIR/admin.key"
        )
    key = claim.admin_key.strip()
    if not key.isascii() or not key.isprintable():
        raise NotAuthenticated(
            "the admin key holds characters that no key has", hint="check FSD_ADMIN_KEY or --admin-key-file"
        )
    return Identity(check_endpoint(claim.endpoint, insecure=claim.insecure), key)


def check_endpoint(url: str, *, insecure: bool) -> str:
    """`url` without a trailing slash, if a secret may be sent there; raises `UsageError`.

    Plain http only to this machine, since whoever sees a token owns the filesystem.
    """
    text = url.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise UsageError(f"{url!r} is no URL") from exc
    if parts.scheme not in (HTTP, HTTPS) or not host or port == 0:
        raise UsageError(
            f"{url!r} is no http:// or https:// URL", hint="for example https://fsd.example:8443"
        )
    if parts.username or parts.query or parts.fragment:
        raise UsageError("an endpoint holds no user, query or fragment")
    if not text.isascii() or any(c.isspace() for c in text):
        raise UsageError(f"{url!r} holds characters that no URL has")
    if parts.scheme == HTTP and not insecure and not is_loopback(host):
        raise UsageError(
            f"{text} is plain http: the secret would travel unencrypted",
            hint="use https://, or pass --insecure if the network between is trusted",
        )
    return text


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its form alone (no name is resolved)."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
