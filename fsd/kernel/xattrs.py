"""Which extended attributes there are."""

from __future__ import annotations

import errno
from typing import Final

from pyfuse3 import FUSEError

from fsd.model.acl import NAMES

_CLASSES: Final = (b"user", b"trusted", b"security")


def check_class(name: bytes, *, acl: bool) -> None:
    """Those of other classes are told as a disk tells them; without `acl` so are those of ACLs."""
    kind, dot, rest = name.partition(b".")
    if acl and name in NAMES:
        return
    if not dot or kind not in _CLASSES:
        raise FUSEError(errno.EOPNOTSUPP)
    if not rest:
        raise FUSEError(errno.EINVAL)
