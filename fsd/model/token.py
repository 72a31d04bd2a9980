"""Tokens: `fsd1.` + base64url of a readable part + `.` + 256-bit secret.

The readable part names the filesystem, the token and, for each region code, the endpoint. It is not
trusted by the server, which looks the secret's hash up; it is what makes two values enough in a sandbox.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Protocol

from fsd.model.errors import NotAuthenticated, UnknownRegion
from fsd.model.limits import TOKEN_MAX, TOKEN_REGIONS_MAX
from fsd.model.plain import dataclass

PREFIX = "fsd1"
_FILE_SYSTEM = re.compile(r"fs_[a-z0-9_]{1,64}")
_READABLE = re.compile(r"[A-Za-z0-9_-]+={0,2}")
_SECRET = re.compile(r"^[A-Za-z0-9_-]{43}$")
_TOKEN_IN_TEXT = re.compile(r"fsd1\.[A-Za-z0-9_=-]+(\.[A-Za-z0-9_-]*)?")


class SecretSource(Protocol):
    """Where random bytes come from; `fsd.host` provides the real one."""

    def token_bytes(self, count: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Token:
    """A parsed token. `regions` maps region code to endpoint URL."""

    file_system_id: str
    token_id: str
    regions: dict[str, str]
    secret: str

    def __repr__(self) -> str:
        return f"Token({self.file_system_id}, {self.token_id}, secret=…)"

    def text(self) -> str:
        """The whole token as it is shown once."""
        readable = json.dumps(
            {"fs": self.file_system_id, "id": self.token_id, "r": self.regions},
            separators=(",", ":"),
            sort_keys=True,
        )
        part = base64.urlsafe_b64encode(readable.encode()).decode().rstrip("=")
        return f"{PREFIX}.{part}.{self.secret}"

    def endpoint(self, region: str | None) -> str:
        """The endpoint for `region`; without one, the only one the token knows. Raises `UnknownRegion`."""
        if region is None and len(self.regions) == 1:
            return next(iter(self.regions.values()))
        known = ", ".join(sorted(self.regions))
        if region is None:
            raise UnknownRegion(f"the token knows several regions: {known}", hint="set FSD_REGION_CODE")
        if region not in self.regions:
            raise UnknownRegion(
                f"unknown region code {region!r}; this token knows: {known}",
                hint="set FSD_REGION_CODE to one of them, or FSD_ENDPOINT to a URL",
            )
        return self.regions[region]


def make(source: SecretSource, file_system_id: str, token_id: str, regions: dict[str, str]) -> Token:
    """A new token with a fresh secret."""
    secret = base64.urlsafe_b64encode(source.token_bytes(32)).decode().rstrip("=")
    return Token(file_system_id, token_id, dict(regions), secret)


def secret_hash(secret: str) -> bytes:
    """What the server stores and looks up. 256 random bits need no slow hash."""
    import hashlib  # the server's alone: it brings OpenSSL, 3.6 MiB

    return hashlib.sha256(secret.encode()).digest()


def parse(text: str) -> Token:
    """The token in `text`; raises `NotAuthenticated` saying what is wrong with its form."""
    text = text.strip()
    if not text:
        raise NotAuthenticated("no token", hint="set FSD_TOKEN")
    if len(text) > TOKEN_MAX:
        raise NotAuthenticated("that is no fsd token: too long")
    parts = text.split(".")
    if len(parts) != 3 or parts[0] != PREFIX:
        raise NotAuthenticated("that is no fsd token, or a truncated one (fsd1.….… is the form)")
    if not _SECRET.match(parts[2]):
        raise NotAuthenticated("the token is truncated or damaged: its secret has not 43 characters")
    try:
        if not _READABLE.fullmatch(parts[1]):
            raise ValueError("not base64url")
        readable = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        regions = {str(k): str(v) for k, v in dict(readable["r"]).items()}
        made = Token(str(readable["fs"]), str(readable["id"]), regions, parts[2])
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise NotAuthenticated("the token is truncated or damaged: its first part cannot be read") from exc
    if not _FILE_SYSTEM.fullmatch(made.file_system_id):
        raise NotAuthenticated("the token is truncated or damaged: it names no filesystem")
    if not 1 <= len(made.regions) <= TOKEN_REGIONS_MAX:
        raise NotAuthenticated("the token names no endpoint")
    return made


def redact(text: str) -> str:
    """`text` with the secret of every token in it taken out."""
    return _TOKEN_IN_TEXT.sub("fsd1.…", text)
