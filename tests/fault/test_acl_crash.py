"""An ACL and the mode it shares are several operations: wherever a crash or a commit's end falls between
them, nobody may do more than before or after."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.client import Client

from fsd.model import acl
from fsd.model.acl import GROUP, GROUP_OWNER, MASK, NOBODY, OTHERS, OWNER, USER, AclEntry
from fsd.model.attrs import ROOT_INO
from fsd.model.ops import Create, Op, Setattr, Setxattr
from fsd.vfs.volume import Volume

BOB, TEAM = 1000, 50
State = tuple[int, bytes | None]


def some_acl(rng: random.Random) -> bytes:
    perm = lambda: rng.choice((0, 4, 5, 6, 7))  # noqa: E731
    entries = [AclEntry(OWNER, perm(), NOBODY), AclEntry(GROUP_OWNER, perm(), NOBODY)]
    entries.append(AclEntry(OTHERS, perm(), NOBODY))
    if rng.random() < 0.7:
        entries += [
            AclEntry(USER, perm(), BOB),
            AclEntry(GROUP, perm(), TEAM),
            AclEntry(MASK, perm(), NOBODY),
        ]
    return acl.encode(tuple(sorted(entries)))


def rights(state: State) -> dict[str, int]:
    """What each kind of user may do."""
    mode, stored = state
    others, group = mode & 7, mode >> 3 & 7
    found = {"group": group, "bob": others, "team": others, "others": others}
    shown = None if stored is None else acl.shown(stored, mode)
    if shown is not None:
        perms = {entry.tag: entry.perm for entry in acl.decode(shown)}
        mask = perms.get(MASK, 7)
        found |= {"group": perms[GROUP_OWNER] & mask, "bob": perms.get(USER, others) & mask}
        found["team"] = perms.get(GROUP, others) & mask
    return found


def after(state: State, op: Op) -> State:
    mode, stored = state
    if isinstance(op, Create):
        return op.mode, None
    if isinstance(op, Setattr) and op.mode is not None:
        return mode & ~0o7777 | op.mode, stored
    if isinstance(op, Setxattr) and op.name == acl.ACCESS:
        return mode, op.value
    return state


@pytest.fixture
def mount(client: Client) -> Client:
    client.volume.core.options = client.options = replace(client.options, acl=True)
    return client


def ops_of(client: Client, ino: int, call: Callable[[Volume], object]) -> list[Op]:
    """The operations on an inode that `call` queues."""
    before = {queued.opno for queued in client.volume.core.queue}
    client.call(call)
    return [
        q.op
        for q in client.volume.core.queue
        if q.op is not None and q.opno not in before and q.op.ino == ino
    ]


def shown(client: Client, ino: int) -> tuple[int, bytes | None]:
    node = client.call(lambda v: v.getattr(ino))
    return node.mode, (node.xattrs or {}).get(acl.ACCESS)


@pytest.mark.parametrize("number", range(3))
def test_no_prefix_allows_more(mount: Client, number: int) -> None:
    rng = random.Random(number)
    node, fh = mount.call(lambda v: v.create(ROOT_INO, b"f", 0o640, 0, 0, os.O_RDWR))
    mount.call(lambda v: v.release(fh))
    state: State = (node.mode, None)
    several = 0
    for _ in range(80):
        value = some_acl(rng)
        ops = ops_of(mount, node.ino, lambda v, value=value: v.setxattr(node.ino, acl.ACCESS, value))
        steps = [state]
        for op in ops:
            steps.append(after(steps[-1], op))
        assert steps[-1] == shown(mount, node.ino)
        first, last = rights(steps[0]), rights(steps[-1])
        for step in steps:
            assert all(rights(step)[who] & ~(first[who] | last[who]) == 0 for who in first)
        several += len(ops) > 1
        state = steps[-1]
    assert several > 20


def test_what_is_made_under_a_default_acl_begins_with_no_more(mount: Client) -> None:
    rng = random.Random(5)
    extended = 0
    for number in range(60):
        top = mount.call(lambda v, n=number: v.mkdir(ROOT_INO, b"d%d" % n, 0o777, 0, 0))
        default = some_acl(rng)
        mount.call(lambda v: v.setxattr(top.ino, acl.DEFAULT, default))  # noqa: B023
        queue = mount.volume.core.queue
        before = {queued.opno for queued in queue}
        made = mount.call(lambda v: v.mknod(top.ino, b"f", stat.S_IFREG | 0o666, 0, 0, 0, 0o077))  # noqa: B023
        ops = [q.op for q in queue if q.op is not None and q.opno not in before and q.op.ino == made.ino]
        steps = [after((0, None), ops[0])]
        for op in ops[1:]:
            steps.append(after(steps[-1], op))
        last = rights(steps[-1])
        for step in steps:
            assert all(rights(step)[who] & ~last[who] == 0 for who in last)
        assert steps[-1] == shown(mount, made.ino)
        extended += steps[-1][1] is not None
    assert extended > 20


def test_acls_outlive_a_killed_daemon(mount: Client) -> None:
    rng = random.Random(9)
    node, fh = mount.call(lambda v: v.create(ROOT_INO, b"f", 0o640, 0, 0, os.O_RDWR))
    mount.call(lambda v: v.release(fh))
    ino = node.ino
    for _ in range(6):
        value = some_acl(rng)
        mount.call(lambda v, ino=ino, value=value: v.setxattr(ino, acl.ACCESS, value))
        wanted = shown(mount, ino)
        mount.kill()
        mount.open()
        found = mount.call(lambda v: v.lookup(ROOT_INO, b"f"))
        assert found is not None
        ino = found.ino
        assert shown(mount, ino) == wanted
