"""The difference of two states goes by path, also where directories were replaced."""

from __future__ import annotations

from support.bench import Bench

from fsd.model.attrs import ROOT_INO
from fsd.model.limits import BLOCK
from fsd.service.difference import Difference
from fsd.service.native import Ask


def told(bench: Bench, first: int, last: int) -> list[tuple[str, str, bool]]:
    changes = bench.service.db.read(lambda tx: Difference(tx, bench.fs.id, first, last).changes())
    return [(one.path.decode(), one.kind, one.content) for one in changes]


def kept(bench: Bench, seq: int) -> int:
    """A checkpoint of now, which is `seq`."""
    bench.service.db.write(lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask()))
    return seq


def test_a_directory_built_anew_tells_of_what_is_different_in_it(bench: Bench) -> None:
    mount = bench.mount()
    old = mount.mkdir(ROOT_INO, b"build")
    gone = {name: mount.file(old, name, b"one") for name in (b"equal", b"other", b"less", b"kind")}
    linked = mount.file(old, b"linked", b"kept")
    mount.link(linked, old, b"second")
    mount.commit()
    first = kept(bench, mount.seq)
    new = mount.mkdir(ROOT_INO, b"build.new")
    mount.file(new, b"equal", b"one")
    mount.file(new, b"other", b"two")
    mount.file(new, b"more", b"new")
    mount.mkdir(new, b"kind")
    mount.link(linked, new, b"linked")
    mount.commit()
    for name, ino in gone.items():
        mount.unlink(old, name, ino, mount.seq)
    for name in (b"linked", b"second"):
        mount.unlink(old, name, linked, mount.seq)
    mount.rmdir(ROOT_INO, b"build", old)
    mount.rename(ROOT_INO, b"build.new", new, ROOT_INO, b"build")
    mount.commit()
    last = kept(bench, mount.seq)
    assert told(bench, first, last) == [
        ("/build/kind", "replaced", True),
        ("/build/less", "removed", False),
        ("/build/more", "added", False),
        ("/build/other", "modified", True),
        ("/build/second", "removed", False),
    ]
    assert told(bench, last, first) == [
        ("/build/kind", "replaced", True),
        ("/build/less", "added", False),
        ("/build/more", "removed", False),
        ("/build/other", "modified", True),
        ("/build/second", "added", False),
    ]
    mount.write(linked, b"then", mount.seq)
    mount.commit()
    assert ("/build/linked", "modified", True) in told(bench, first, mount.seq)


def test_a_link_where_a_renamed_directory_had_one_is_told(bench: Bench) -> None:
    mount = bench.mount()
    old = mount.mkdir(ROOT_INO, b"there")
    linked = mount.file(old, b"linked", b"kept")
    mount.commit()
    first = kept(bench, mount.seq)
    mount.rename(ROOT_INO, b"there", old, ROOT_INO, b"away")
    new = mount.mkdir(ROOT_INO, b"there")
    mount.link(linked, new, b"linked")
    mount.commit()
    last = kept(bench, mount.seq)
    assert told(bench, first, last) == [  # the rename has /there/linked → /away/linked
        ("/away", "renamed", False),
        ("/there", "added", False),
        ("/there/linked", "added", False),
    ]
    assert told(bench, last, first) == [
        ("/there", "removed", False),
        ("/there", "renamed", False),
        ("/there/linked", "removed", False),
    ]


def test_the_same_bytes_after_a_block_was_cut_short_count_as_changed(bench: Bench) -> None:
    mount = bench.mount()
    whole, half = b"x" * (BLOCK + 100), b"x" * (BLOCK + 50)
    ino = mount.file(ROOT_INO, b"file", whole)
    mount.commit()
    mount.write(ino, half, mount.seq, full=False)
    mount.commit()
    first = kept(bench, mount.seq)
    mount.write(ino, half, mount.seq)
    mount.commit()
    second = kept(bench, mount.seq)
    assert told(bench, first, second) == [("/file", "modified", True)]
    mount.write(ino, half, mount.seq)
    mount.commit()
    assert told(bench, second, mount.seq) == []
