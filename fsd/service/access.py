"""Who asks, and for which filesystem: what every call of the service gets passed.

Both are made by `tokens.Tokens` (data plane) or by the server's admin check (control plane) and are trusted
from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

ADMIN: Final = "admin"


@dataclass(frozen=True, slots=True)
class FsRef:
    """A filesystem that exists and may be used: `id` is the key of its rows, `name` its public `fs_…` id."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request was authenticated by. `label` is what a person called the token, for evidence."""

    token_id: str
    label: str
    kind: Literal["owner", "admin"]


ADMIN_GRANT: Final = Grant(ADMIN, ADMIN, "admin")
