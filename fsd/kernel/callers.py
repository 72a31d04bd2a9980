"""Who made a request, with the groups that count, and whether it sets anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import pyfuse3
from pyfuse3 import SetattrFields

from fsd.kernel.requests import EVERY_GROUP, may_keep_bits


class Context(Protocol):
    """As much of pyfuse3's context as is looked at here."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def pid(self) -> int: ...


class Caller(NamedTuple):
    """The same where pyfuse3 makes none."""

    uid: int
    gid: int
    pid: int


def groups_of(ctx: Context) -> Collection[int]:
    """All groups of the caller. It waits for our answer, so it is there to be asked about."""
    return {ctx.gid, *pyfuse3.get_sup_groups(ctx.pid)}


def as_owner(ctx: Context) -> Collection[int]:
    """The groups whose set-group-ID bit stays where the caller changes an owner."""
    return EVERY_GROUP if may_keep_bits(ctx.pid, ctx.uid) else groups_of(ctx)


def sets_nothing(fields: SetattrFields) -> bool:
    """Whether it is the request of a chown(-1, -1), or the one before a change that takes bits away."""
    owner = fields.update_uid or fields.update_gid
    times = fields.update_atime or fields.update_mtime
    return not (owner or times or fields.update_mode or fields.update_size)
