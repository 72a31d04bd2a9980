"""Ids of checkpoints as people type them: whole, or only their beginning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from fsd.cli.context import Context
from fsd.model.errors import NotFound, UsageError

if TYPE_CHECKING:
    from fsd.client.native import Checkpoints

_OURS: Final = re.compile(r"cp_[a-z2-7]{20}")
_NO_IDS: Final = ("seq:", "journal:")  # other names of states
_SHORT_MIN: Final = 8  # characters
_SHOWN: Final = 5


def whole_id(context: Context, given: str) -> str:
    """The id of the one checkpoint that is called `given` or whose id begins with it; `given` itself where it
    names a state otherwise, or is too short to be looked for. Raises `NotFound`, and `UsageError` with the
    ids where it could be several.

    Only what is no whole id of ours costs requests: whether it is the id of a host's checkpoint, which comes
    first, and then the list. The HTTP API itself knows whole ids alone.
    """
    if len(given) < _SHORT_MIN or given.startswith(_NO_IDS) or _OURS.fullmatch(given):
        return given
    # Imported where it is needed: a mount's supervisor would keep the HTTP client and OpenSSL for its life.
    from fsd.client.http import Http
    from fsd.client.native import Checkpoints

    api = Checkpoints(Http(context.data(), context.host))
    try:
        return str(api.show(given)["checkpoint_id"])
    except NotFound:
        found = _beginning(api, given)
        if not found:
            raise
    if len(found) > 1:
        more = ", …" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{given} is the beginning of {len(found)} ids of checkpoints: {', '.join(found[:_SHOWN])}{more}",
            hint="give more of the one that is meant",
            details={"checkpoints": found[:100]},
        )
    return found[0]


def _beginning(api: Checkpoints, given: str) -> list[str]:
    """All ids that begin with `given`, newest first."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = api.page(cursor=cursor)
        ids = (str(one["checkpoint_id"]) for one in page["checkpoints"])
        found += (name for name in ids if name.startswith(given))
        cursor = page["next_cursor"]
        if cursor is None:
            return found
