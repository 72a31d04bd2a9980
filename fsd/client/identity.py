"""Who calls whom: what a token, a region code and an endpoint resolve to, and when a secret may travel.

Nothing here touches the network or the environment; `fsd.cli` reads those and fills `Claim`.
"""

from __future__ import annotations

from fsd.model.endpoint import Endpoint, parse_endpoint
from fsd.model.errors import NotAuthenticated, UsageError
from fsd.model.plain import dataclass, field
from fsd.model.token import parse


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
    def server(self) -> Endpoint:
        """The endpoint taken apart."""
        return parse_endpoint(self.endpoint, insecure=True)  # it was judged where it was given


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
        if claim.token and not claim.admin_key:
            raise NotAuthenticated(
                "this needs the server's admin key; a filesystem's token is not enough",
                hint="set FSD_ENDPOINT and FSD_ADMIN_KEY, or --admin-key-file to the server's DIR/admin.key",
            )
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
    """`url` without a trailing slash, if a secret may be sent there; raises `UsageError`."""
    text = url.strip().rstrip("/")
    parse_endpoint(text, insecure=insecure)
    return text
