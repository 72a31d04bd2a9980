"""An audit beside a server that runs: what is deleted meanwhile goes piece by piece, which is no finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.bench import Bench
from support.postgres import database_of

from fsd.cli.do_audit import _look, _repair
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import NotFound
from fsd.service import repair
from fsd.service.access import FsRef
from fsd.service.audit import audit


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def fork(bench: Bench) -> FsRef:
    """A fork that reads the rows of its origin, which has a file."""
    m = bench.mount()
    m.file(ROOT_INO, b"f", b"data")
    m.commit()
    service = bench.service
    made = service.db.write(lambda tx: service.forks.create(tx, bench.fs, "", []))
    return service.filesystems.get(made["file_system_id"])


def delete(bench: Bench, fs: FsRef) -> None:
    bench.service.db.write(lambda tx: bench.service.filesystems.delete(tx, fs.name))


def asked(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"file_system_id": None, "read_data": True, "plan": None, "yes": True} | given)


def test_a_fork_that_let_its_origin_go(bench: Bench) -> None:
    gone, service = fork(bench), bench.service
    assert audit(service.db, gone) == []
    planned = repair.plan(service.db, service.store, gone)
    delete(bench, gone)
    with pytest.raises(NotFound):
        audit(service.db, gone)
    with pytest.raises(NotFound):
        repair.plan(service.db, service.store, gone)
    with pytest.raises(NotFound):
        repair.execute(service.db, service.store, gone, planned.plan)


def test_one_whose_rows_go(bench: Bench) -> None:
    """After each part of what goes."""
    there, gone, service = bench.fs, fork(bench), bench.service
    service.forks.finish(gone)
    delete(bench, gone)
    parts = 0
    while service.filesystems.collect():
        parts += 1
        found = _look(asked(), service.db, service.store, [there, gone], []).value
        assert (found["file_systems"], found["findings"]) == (1, [])
        mended = _repair(None, asked(), service.db, service.store, [gone, there]).value  # type: ignore[arg-type]
        assert (mended["file_systems"], mended["steps"], mended["findings"]) == (1, [], [])
    assert parts > 5
    with pytest.raises(NotFound):
        _look(asked(file_system_id=gone.name), service.db, service.store, [gone], [])


def test_a_repair_of_one_that_goes_between_plan_and_deed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, gone, service = bench.fs, fork(bench), bench.service
    service.forks.finish(gone)
    for fs in (there, gone):
        service.db.write(lambda tx, n=fs.id: tx.execute("UPDATE fs SET file_count=7 WHERE id=?", (n,)))  # type: ignore[misc]
    execute = repair.execute

    def late(db: Any, store: Any, fs: FsRef, planned: str) -> repair.Repair:
        if fs == gone:
            delete(bench, gone)
        return execute(db, store, fs, planned)

    monkeypatch.setattr(repair, "execute", late)
    mended = _repair(None, asked(), service.db, service.store, [there, gone]).value  # type: ignore[arg-type]
    assert [step["file_system_id"] for step in mended["steps"]] == [there.name]
    assert (mended["ok"], mended["file_systems"]) == (True, 1)
    assert audit(service.db, there) == []
