"""The server's housekeeping, and how many forks a deletion takes along."""

from __future__ import annotations

import asyncio

import pytest
from support.bench import Bench
from support.wait import wait_for

from fsd.model.errors import Busy, Unavailable
from fsd.server.app import make_app
from fsd.server.serve import housekeeping
from fsd.service import forks as forks_module
from fsd.service.access import FsRef


def fork_of(bench: Bench, origin: FsRef) -> FsRef:
    service = bench.service
    made = service.db.write(lambda tx: service.forks.create(tx, origin, "fork", []))
    return service.filesystems.get(made["file_system_id"])


def test_a_job_that_fails_holds_up_none_of_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted filesystem whose objects cannot be listed: forks are copied all the same."""

    def away() -> int:
        raise Unavailable("the store is away")

    bench.mount().mkdir(1, b"d")
    fork = fork_of(bench, bench.fs)
    monkeypatch.setattr(bench.service.filesystems, "collect", away)
    context = make_app(bench.service, bench.host, "k" * 32, test_clock=False).context

    def copied() -> bool:
        return bool(bench.service.filesystems.describe(fork.name)["copied"])

    async def until_copied() -> None:
        task = asyncio.create_task(housekeeping(context, expire=True))
        await asyncio.to_thread(wait_for, copied, 60)
        task.cancel()

    try:
        asyncio.run(until_copied())
    finally:
        for workers in (context.pool, context.polls, context.sweeps):
            workers.shutdown()


def test_a_deletion_leaves_no_fork_without_its_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more forks than one transaction takes along, those beyond would have been left behind."""
    monkeypatch.setattr(forks_module, "FORK_CHAIN_MAX", 2)
    service, origin = bench.service, bench.fs
    made = [fork_of(bench, origin) for _ in range(3)]
    with pytest.raises(Busy, match="more than 2 forks"):
        service.db.write(lambda tx: service.filesystems.delete(tx, origin.name, cascade=True))
    for fork in made:
        assert service.filesystems.describe(fork.name)["copied"] is False
    service.forks.finish(made[0])
    gone = service.db.write(lambda tx: service.filesystems.delete(tx, origin.name, cascade=True))
    assert sorted(gone["forks_deleted"]) == sorted(one.name for one in made[1:])
    bench.fs = made[0]
