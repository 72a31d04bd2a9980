"""Renames whose target a conflict has put into another directory: none puts a directory into itself."""

from __future__ import annotations

import errno

from support.bench import Bench

from fsd.model.attrs import ROOT_INO
from fsd.model.ops import CONFLICT, REFUSED, RENAME_EXCHANGE
from fsd.service import pins
from fsd.service.restore import Wish
from fsd.service.retained import At


def test_a_directory_is_not_exchanged_with_what_a_conflict_put_below_it(bench: Bench) -> None:
    """/x/in/f and /y/f are one file, and its conflict copy goes beside the first of its names: what the
    session calls /y/f lies in /x then, and an exchange of the two would take /x out of the tree."""
    mount, other = bench.mount("A"), bench.mount("B")
    x = mount.mkdir(ROOT_INO, b"x")
    inner, y = mount.mkdir(x, b"in"), mount.mkdir(ROOT_INO, b"y")
    file = mount.file(inner, b"f", b"first")
    mount.link(file, y, b"f")
    assert not mount.commit()
    seq = mount.seq
    other.write(file, b"theirs", seq)
    assert not other.commit()
    mount.write(file, b"mine", seq)
    mount.rename(ROOT_INO, b"x", x, y, b"f", file, seq, RENAME_EXCHANGE)
    told = mount.commit()
    assert [(one.status, one.errno) for one in told] == [(CONFLICT, errno.EEXIST), (REFUSED, errno.EINVAL)]
    copy = told[0].name.decode()
    assert bench.tree() == {
        "x": None,
        "x/in": None,
        "x/in/f": b"theirs",
        f"x/in/{copy}": b"mine",
        "y": None,
        "y/f": b"theirs",
    }


def test_a_directory_does_not_replace_one_that_a_conflict_left_below_it(bench: Bench) -> None:
    """The session's /y/d stayed at /x/in/d, since /y was gone. A restore has brought /y back, and somebody
    has made another /y/d: the session's rename of /x over its own would put /x into /x/in."""
    service, mount, other = bench.service, bench.mount("A"), bench.mount("B")
    x, y = mount.mkdir(ROOT_INO, b"x"), mount.mkdir(ROOT_INO, b"y")
    inner = mount.mkdir(x, b"in")
    d = mount.mkdir(inner, b"d")
    assert not mount.commit()
    _, seq = service.db.write(lambda tx: pins.pin(tx, bench.fs, "mount", "m"))
    other.rmdir(ROOT_INO, b"y", y)
    assert not other.commit()
    mount.rename(inner, b"d", d, y, b"d")
    assert [(one.status, one.errno) for one in mount.commit()] == [(CONFLICT, errno.ENOENT)]
    service.db.write(lambda tx: service.restores.restore(tx, bench.fs, None, Wish(At(seq=seq), force=True)))
    other.mkdir(y, b"d")
    assert not other.commit()
    mount.rename(ROOT_INO, b"x", x, y, b"d", d)
    assert [(one.status, one.errno) for one in mount.commit()] == [(REFUSED, errno.EINVAL)]
    assert bench.tree() == {"x": None, "x/in": None, "x/in/d": None, "y": None, "y/d": None}
