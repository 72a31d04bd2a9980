"""A file's versions over the retained states: under the names it had, and what is told where it has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.postgres import database_of

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import NotFound
from fsd.service.access import ADMIN_GRANT
from fsd.service.history import Found, Resume, history, newest_with
from fsd.service.native import Ask
from fsd.service.restore import Wish
from fsd.service.retained import At


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def keep(bench: Bench) -> str:
    made = bench.service.db.write(lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask()))
    return str(made["checkpoint_id"])


def parts(path: str) -> tuple[bytes, ...]:
    return tuple(part.encode() for part in path.split("/") if part)


def ask(bench: Bench, path: str, before: Resume | None = None, limit: int = 100, **more: bool) -> Found:
    fs = bench.fs
    return bench.service.db.read(lambda tx: history(tx, fs, parts(path), before, limit, **more))


def told(found: Sequence[dict[str, Any]]) -> list[tuple[str, int | None]]:
    """Path and size of each version, newest first."""
    return [
        ("/".join(part.decode() for part in one["path"]), None if one["node"] is None else one["node"].size)
        for one in found
    ]


def written(mount: Mount, ino: int, data: bytes) -> None:
    mount.write(ino, data, mount.seq)
    mount.commit()


def test_a_renamed_file_has_its_history(bench: Bench) -> None:
    """Over a rename of its own, a rename of its directory, and changes of content between them."""
    mount = bench.mount()
    top = mount.mkdir(ROOT_INO, b"draft")
    ino = mount.file(top, b"a", b"1")
    mount.commit()
    first = keep(bench)
    written(mount, ino, b"22")
    keep(bench)
    mount.rename(top, b"a", ino, top, b"b")
    mount.commit()
    keep(bench)
    keep(bench)
    mount.rename(ROOT_INO, b"draft", top, ROOT_INO, b"final")
    mount.commit()
    written(mount, ino, b"333")
    wanted = [("final/b", 3), ("draft/b", 2), ("draft/a", 2), ("draft/a", 1)]
    found = ask(bench, "final/b")
    assert told(found.versions) == wanted
    assert [one["live"] for one in found.versions] == [True, False, False, False]
    keep(bench)  # of what is there now: it is that checkpoint's version and the live one
    assert [one["live"] for one in ask(bench, "final/b").versions] == [True, False, False, False]
    assert found.versions[-1]["newest"]["checkpoint_id"] == first
    assert found.following is None and found.moved_to is None
    # The same page by page: where it goes on, it goes on under the name it had there.
    seen, before = [], None
    while True:
        some = ask(bench, "final/b", before, 1)
        seen += told(some.versions)
        if (before := some.following) is None:
            break
    assert seen == wanted
    assert told(ask(bench, "final/b", follow=False).versions) == [("final/b", 3), ("final/b", None)]
    # The directory has a history too; and of the old names is told where what they meant is now.
    assert [path for path, _ in told(ask(bench, "final").versions)] == ["final", "draft"]
    gone = ask(bench, "draft/a")
    assert told(gone.versions)[0] == ("draft/a", None) and gone.moved_to == parts("final/b")
    assert ask(bench, "draft/a", follow=False).moved_to is None


def test_a_name_comes_before_an_inode(bench: Bench) -> None:
    """Written beside and renamed over, as editors do; and one file moved over another."""
    mount = bench.mount()
    old = mount.file(ROOT_INO, b"plan", b"1")
    other = mount.file(ROOT_INO, b"draft", b"22")
    mount.commit()
    keep(bench)
    fresh = mount.file(ROOT_INO, b".plan.swp", b"333")
    mount.rename(ROOT_INO, b".plan.swp", fresh, ROOT_INO, b"plan", old, mount.seq)
    mount.commit()
    keep(bench)
    mount.rename(ROOT_INO, b"draft", other, ROOT_INO, b"plan", fresh, mount.seq)
    mount.commit()
    assert told(ask(bench, "plan").versions) == [("plan", 2), ("plan", 3), ("plan", 1)]
    assert ask(bench, "draft").moved_to == parts("plan")


def test_of_several_names_the_nearest_is_followed(bench: Bench) -> None:
    mount = bench.mount()
    far = mount.mkdir(ROOT_INO, b"a")
    near = mount.mkdir(ROOT_INO, b"z")
    ino = mount.file(far, b"f", b"1")
    mount.link(ino, near, b"g")
    mount.commit()
    keep(bench)
    mount.rename(near, b"g", ino, near, b"h")
    mount.commit()
    assert told(ask(bench, "z/h").versions) == [("z/h", 1), ("z/g", 1)]
    mount.rename(near, b"h", ino, ROOT_INO, b"f")
    mount.commit()
    assert told(ask(bench, "f").versions) == [("f", 1), ("a/f", 1)], "the name that is the same"


def test_what_was_removed_under_a_name_no_state_has(bench: Bench) -> None:
    """It is found under the name it had before, also by an undelete, which brings it back there."""
    mount = bench.mount()
    ino = mount.file(ROOT_INO, b"early", b"1")
    mount.commit()
    keep(bench)
    mount.rename(ROOT_INO, b"early", ino, ROOT_INO, b"late")
    mount.commit()
    mount.unlink(ROOT_INO, b"late", ino, mount.seq)
    mount.commit()
    found = ask(bench, "late")
    assert told(found.versions) == [("late", None), ("early", 1)]
    fs, db = bench.fs, bench.service.db
    seq, path = db.read(lambda tx: newest_with(tx, fs, parts("late")))
    assert path == parts("early")
    wish = Wish(At(seq=seq), path, force=True, absent=True)
    db.write(lambda tx: bench.service.restores.restore(tx, fs, ADMIN_GRANT, wish))
    assert bench.tree() == {"early": b"1"}
    with pytest.raises(NotFound, match="no retained state has /never"):
        db.read(lambda tx: newest_with(tx, fs, parts("never")))
    assert told(ask(bench, "never/there").versions) == [("never/there", None)]
    # A later file of the name is what the name means.
    mount.file(ROOT_INO, b"late", b"22")
    mount.commit()
    keep(bench)
    assert told(ask(bench, "late").versions) == [("late", 2), ("late", None)]


def test_over_restores(bench: Bench) -> None:
    """A whole tree that goes back has the inodes it had; a path that comes back is another file."""
    mount = bench.mount()
    ino = mount.file(ROOT_INO, b"a", b"1")
    mount.commit()
    first = keep(bench)
    mount.rename(ROOT_INO, b"a", ino, ROOT_INO, b"b")
    mount.commit()
    written(mount, ino, b"22")
    fs, service = bench.fs, bench.service
    service.db.write(
        lambda tx: service.restores.restore(tx, fs, ADMIN_GRANT, Wish(At(checkpoint=first), force=True))
    )
    # Newest first: as it is now, what the restore kept, and the checkpoint.
    assert told(ask(bench, "a").versions) == [("a", 1), ("b", 2), ("a", 1)]
    later = bench.mount("later")
    later.unlink(ROOT_INO, b"a", bench.find("a").ino, 2**40)
    later.commit()
    back = Wish(At(checkpoint=first), parts("a"), force=True)
    service.db.write(lambda tx: service.restores.restore(tx, fs, ADMIN_GRANT, back))
    assert told(ask(bench, "a").versions) == [("a", 1), ("a", None), ("a", 1)]
