"""An extended attribute that is set to what it is: as on ext4 nothing changes, no time and no record."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from support.client import Client
from support.moreops import GROUP_OBJ, MASK, NO_ID, OTHER, USER, USER_OBJ

from fsd.model import acl


def made(*entries: tuple[int, int, int]) -> bytes:
    return acl.encode(tuple(acl.AclEntry(*entry) for entry in entries))


def allows(user: int, perm: int) -> bytes:
    """An ACL for mode 0775 with an entry for one more user."""
    rest = ((GROUP_OBJ, 5, NO_ID), (MASK, 7, NO_ID), (OTHER, 5, NO_ID))
    return made((USER_OBJ, 7, NO_ID), (USER, perm, user), *rest)


class Seen(NamedTuple):
    mode: int
    mtime: int
    ctime: int


def attr(client: Client, ino: int) -> Seen:
    found = client.call(lambda v: v.getattr(ino))
    return Seen(found.mode, found.mtime, found.ctime)


VALUES = {
    b"user.a": (b"one", b"two"),
    b"user.empty": (b"", b"x"),
    b"trusted.large": (bytes(30_000), bytes(30_001)),
    b"security.capability": (b"\1" * 20, b"\2" * 20),
    acl.ACCESS: (allows(1000, 6), allows(1000, 7)),
    acl.DEFAULT: (allows(1000, 6), allows(1001, 6)),
}


@pytest.mark.parametrize("name", VALUES, ids=lambda name: name.decode())
@pytest.mark.parametrize("committed", [False, True])
def test_the_same_value_again_changes_nothing(client: Client, name: bytes, committed: bool) -> None:
    root = client.volume.root_ino
    ino = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
    first, second = VALUES[name]
    begun = attr(client, ino).ctime
    client.call(lambda v: v.setxattr(ino, name, first))
    set_at = attr(client, ino)
    assert set_at.ctime > begun
    if committed:
        client.until(client.volume.barrier())
    records = client.volume.core.next_op
    client.call(lambda v: v.setxattr(ino, name, first))
    assert attr(client, ino) == set_at
    assert client.volume.core.next_op == records
    client.call(lambda v: v.setxattr(ino, name, second))
    assert attr(client, ino).ctime > set_at.ctime
    assert client.call(lambda v: v.getxattr(ino, name)) == second


def test_an_acl_set_again_after_its_mode_changed_is_another(client: Client) -> None:
    root = client.volume.root_ino
    ino = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
    client.call(lambda v: v.setxattr(ino, acl.ACCESS, allows(1000, 6)))
    client.call(lambda v: v.setattr(ino, mode=0o700))
    before = attr(client, ino)
    client.call(lambda v: v.setxattr(ino, acl.ACCESS, allows(1000, 6)))
    after = attr(client, ino)
    assert after.ctime > before.ctime and after.mode & 0o777 == 0o775
    # As it is read now, and not as it was stored.
    client.call(lambda v: v.setattr(ino, mode=0o750))
    shown = client.call(lambda v: v.getxattr(ino, acl.ACCESS))
    assert shown != allows(1000, 6)
    before = attr(client, ino)
    client.call(lambda v: v.setxattr(ino, acl.ACCESS, shown))
    assert attr(client, ino) == before
