"""One operation of a commit, decided: the rule of its kind, and its refusal as an outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fsd.model import ops
from fsd.model.ops import REFUSED, Op, Outcome
from fsd.service.rules import Refuse, Rules
from fsd.service.rules_attrs import setattr_, setxattr
from fsd.service.rules_content import content
from fsd.service.rules_names import create, link, rmdir, unlink
from fsd.service.rules_rename import rename

_RULES: Final[dict[int, Callable[[Rules, Any], Outcome | None]]] = {
    ops.CREATE: create,
    ops.LINK: link,
    ops.UNLINK: unlink,
    ops.RMDIR: rmdir,
    ops.RENAME: rename,
    ops.SETATTR: setattr_,
    ops.SETXATTR: setxattr,
    ops.CONTENT: content,
}


def apply(rules: Rules, op: Op) -> Outcome | None:
    """Apply one operation: None when it was simply applied, else what to tell. Raises `NeedFull`, and
    `NeedFold` (rules_content), with the view as it was before the operation."""
    try:
        return _RULES[op.kind](rules, op)
    except Refuse as no:
        at = no.at
        where = (0, 0, b"") if at is None else (at.ino, at.parent, at.name)
        return Outcome(op.opno, REFUSED, no.errno, *where, no.reason)
