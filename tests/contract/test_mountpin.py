"""States that mounts show are kept while the mounts ask for them, on both engines."""

from __future__ import annotations

import pytest
from support.bench import Bench, Mount

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import ForkCopying, NotFound, SessionUnknown
from fsd.model.limits import MOUNT_PIN
from fsd.model.times import NS
from fsd.service import expire, mountpin
from fsd.service.native import Ask
from fsd.service.retained import At

NOW = 10**18


def keep(bench: Bench, session: int, at: At, now: int = NOW) -> mountpin.Kept:
    return bench.service.db.write(lambda tx: mountpin.keep(tx, bench.fs, session, at, now))


def pins(bench: Bench) -> list[tuple[int, int]]:
    """(seq, expires) of the mounts' pins."""
    return bench.service.db.read(
        lambda tx: tx.all(
            "SELECT seq, expires FROM pin WHERE fs=? AND kind='mount' ORDER BY id", (bench.fs.id,)
        )
    )


def content_at(bench: Bench, seq: int) -> int:
    _, ((entries, _),) = bench.service.namespace.ask(bench.fs, [("list", ROOT_INO, b"", 10)], At(seq=seq))
    return int(entries[0].attr.size)


def checkpoint(bench: Bench) -> str:
    made = bench.service.db.write(lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask()))
    return str(made["checkpoint_id"])


def changed(bench: Bench) -> tuple[Mount, str]:
    """A filesystem whose state before the last commit is a checkpoint."""
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", b"one")
    m.commit()
    name = checkpoint(bench)
    m.write(ino, b"longer", 1)
    m.commit()
    return m, name


def test_a_state_of_a_fork_is_kept_once_it_is_copied(bench: Bench) -> None:
    changed(bench)
    service, origin = bench.service, bench.fs
    made = service.db.write(lambda tx: service.forks.create(tx, origin, "f", []))
    bench.fs = service.filesystems.get(made["file_system_id"])
    name, session = checkpoint(bench), bench.mount().session
    with pytest.raises(ForkCopying) as told:
        keep(bench, session, At(checkpoint=name))
    assert told.value.retryable
    assert pins(bench) == []
    kept = service.forks.when_copied(bench.fs, lambda: keep(bench, session, At(checkpoint=name)))
    assert pins(bench) == [(kept.seq, NOW + int(MOUNT_PIN * NS))]
    assert content_at(bench, kept.seq) == len(b"longer")


def test_a_state_outlives_its_checkpoint_as_long_as_it_is_asked_for(bench: Bench) -> None:
    m, name = changed(bench)
    kept = keep(bench, m.session, At(checkpoint=name))
    assert pins(bench) == [(kept.seq, NOW + int(MOUNT_PIN * NS))]
    later = NOW + NS
    assert keep(bench, m.session, At(seq=kept.seq), later).expires == later + int(MOUNT_PIN * NS)
    assert pins(bench) == [(kept.seq, later + int(MOUNT_PIN * NS))], "one pin for one mount"
    bench.service.db.write(lambda tx: bench.service.checkpoints.delete(tx, bench.fs, None, name))
    assert content_at(bench, kept.seq) == 3
    bench.audit()
    again = keep(bench, m.session, At(seq=kept.seq), later)
    expire.expired_pins(bench.service.db, bench.service.packs, bench.fs, again.expires - 1)
    assert content_at(bench, kept.seq) == 3
    expire.expired_pins(bench.service.db, bench.service.packs, bench.fs, again.expires + 1)
    with pytest.raises(NotFound):
        content_at(bench, kept.seq)
    with pytest.raises(NotFound):
        keep(bench, m.session, At(seq=kept.seq))
    assert pins(bench) == []


def test_each_mount_has_its_own(bench: Bench) -> None:
    m, name = changed(bench)
    other = bench.mount("hostB")
    first, second = (
        keep(bench, m.session, At(checkpoint=name)),
        keep(bench, other.session, At(checkpoint=name)),
    )
    assert first.seq == second.seq
    assert len(pins(bench)) == 2


def test_what_cannot_be_kept_is_told(bench: Bench) -> None:
    m, _ = changed(bench)
    with pytest.raises(NotFound):
        keep(bench, m.session, At(checkpoint="cp_none"))
    with pytest.raises(SessionUnknown):
        keep(bench, 2**30, At(seq=m.seq))
    assert pins(bench) == []
    # The head, which nothing pinned yet: later commits leave it readable.
    kept = keep(bench, m.session, At(seq=m.seq))
    entries = bench.entries()
    m.unlink(ROOT_INO, b"f", entries[b"f"].attr.ino, 2**40)
    m.commit()
    assert content_at(bench, kept.seq) == 6
