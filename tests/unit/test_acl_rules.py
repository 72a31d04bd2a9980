"""POSIX ACLs without a filesystem: their form, the mode in them, and what is inherited."""

from __future__ import annotations

import itertools

import pytest

from fsd.model import acl
from fsd.model.acl import GROUP, GROUP_OWNER, MASK, NOBODY, OTHERS, OWNER, USER, AclEntry


def made(owner: int, group: int, others: int, *named: tuple[int, int, int], mask: int | None = None) -> bytes:
    entries = [AclEntry(OWNER, owner, NOBODY), AclEntry(GROUP_OWNER, group, NOBODY)]
    entries += [AclEntry(tag, perm, number) for tag, perm, number in named]
    if mask is not None:
        entries.append(AclEntry(MASK, mask, NOBODY))
    entries.append(AclEntry(OTHERS, others, NOBODY))
    return acl.encode(tuple(sorted(entries, key=lambda one: (one.tag, one.number))))


FULL = made(7, 5, 4, (USER, 6, 1000), (USER, 7, 1001), (GROUP, 3, 50), mask=6)


def test_what_is_written_is_read() -> None:
    assert acl.encode(acl.decode(FULL)) == FULL
    assert acl.mode_of(acl.decode(FULL)) == 0o764
    assert acl.safe_mode(acl.decode(FULL)) == 0o700
    assert acl.safe_mode(acl.decode(made(7, 5, 4))) == 0o754
    assert acl.text(FULL) == (
        "user::rwx,user:1000:rw-,user:1001:rwx,group::r-x,group:50:-wx,mask::rw-,other::r--"
    )
    assert acl.is_mode(acl.decode(made(7, 5, 4)))
    assert not acl.is_mode(acl.decode(FULL))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\2\0\0",
        b"\1\0\0\0" + FULL[4:],
        FULL[:-1],
        FULL[:-8],
        FULL + FULL[4:12],
        made(7, 5, 4, (USER, 6, 1000)),
        made(7, 5, 4, (USER, 6, 1000), (USER, 4, 1000), mask=7),
        made(8, 5, 4),
        made(7, 5, 4, (0x40, 6, 1000), mask=7),
        acl.encode(acl.decode(FULL)[::-1]),
        FULL[:4] + FULL[12:],
    ],
)
def test_what_linux_refuses_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"ACL|order|kind|twice"):
        acl.decode(value)
    assert acl.shown(value, 0o644) is None
    assert acl.inherit(value, 0o644) is None


def test_a_shown_acl_has_its_classes_from_the_mode() -> None:
    told = acl.shown(FULL, 0o100421)
    assert told is not None
    assert acl.text(told) == (
        "user::r--,user:1000:rw-,user:1001:rwx,group::r-x,group:50:-wx,mask::-w-,other::--x"
    )
    plain = acl.shown(made(7, 7, 7), 0o100421)
    assert plain == made(4, 2, 1)


def test_an_inherited_mode_is_never_more_than_was_asked_for_and_safe_never_more_than_the_acl() -> None:
    bits = (0, 2, 5, 7)
    checked = 0
    for owner, group, others, mask in itertools.product(bits, repeat=4):
        for named in ((), ((USER, 7, 1000),)):
            default = made(owner, group, others, *named, mask=mask if named else None)
            for mode in (0o100666, 0o40777, 0o100640, 0o102755, 0o100000):
                found = acl.inherit(default, mode)
                assert found is not None
                assert found.mode & ~mode == 0
                assert found.safe & ~found.mode == 0
                if found.access is None:
                    assert found.safe == found.mode
                    assert not named
                    continue
                # Before the ACL is there nobody but the owner may do anything.
                assert found.safe & 0o777 == found.mode & 0o700
                assert acl.shown(found.access, found.mode) == found.access
                checked += 1
    assert checked > 500
