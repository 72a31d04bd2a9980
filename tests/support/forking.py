"""Forks and merges of a bench, as the service makes them."""

from __future__ import annotations

from typing import Any

from fsd.model.attrs import ROOT_INO
from fsd.service.access import FsRef
from fsd.service.merge import Wish
from support.bench import Bench


def fork(bench: Bench, of: FsRef | None = None, checkpoint: str | None = None) -> FsRef:
    """A fork; the bench stands for it afterwards only if told to."""
    service, origin = bench.service, of or bench.fs
    made = service.db.write(lambda tx: service.forks.create(tx, origin, "f", [("a", "b")], checkpoint))
    return service.filesystems.get(made["file_system_id"])


def merge(bench: Bench, parent: FsRef, child: FsRef, **wish: Any) -> dict[str, Any]:
    service = bench.service
    ready = service.merges.prepare(parent, child, Wish(**wish))
    return service.db.write(lambda tx: service.merges.merge(tx, parent, child, None, Wish(**wish), ready))


def fill(bench: Bench, count: int, size: int = 3) -> dict[bytes, int]:
    """`count` files in the root, committed."""
    mount = bench.mount()
    made = {}
    for at in range(count):
        name = b"f%05d" % at
        made[name] = mount.file(ROOT_INO, name, b"%d" % at * size)
        if at % 500 == 499:
            mount.commit()
    mount.commit()
    return made


def on(bench: Bench, fs: FsRef) -> Bench:
    bench.fs = fs
    return bench
