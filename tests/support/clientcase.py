"""What tests of single histories of the client's state machine share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsd.model.errors import NoSpace
from fsd.vfs.commit import CommitJob
from fsd.vfs.types import Job
from support.bench import Bench
from support.client import Client, Clock, server_tree


@pytest.fixture(name="client")
def client_fixture(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    made.net.faulty = False
    made.open()
    yield made
    made.volume.close()
    made.bench.close()


def other(client: Client, name: str = "other") -> Client:
    """Another mount of the same filesystem."""
    place = client.options.state_dir.with_name(name)
    made = Client(place, client.bench, client.clock, client.rng, name)
    made.net.faulty = False
    made.open()
    return made


def age(client: Client) -> None:
    """Flush by age, as far as jobs go that nobody runs."""
    client.clock.seconds += client.options.flush_age + 0.1
    client.volume.tick(client.clock.seconds)


def take(client: Client, kind: type[Job]) -> Job:
    """The next job of a kind, made but not run; the others wait."""
    client.waiting.extend(client.volume.jobs())
    found = next(job for job in client.waiting if isinstance(job, kind))
    client.waiting.remove(found)
    return found


def finish(client: Client, job: Job) -> None:
    client.volume.finish(job, client.run(job))


def settled(client: Client) -> None:
    """Everything is committed and nothing is held."""
    client.until(client.volume.barrier())
    core = client.volume.core
    assert client.volume.pending().clean
    assert (core.dirty, core.flights, core.dead_jobs) == ({}, {}, 0)
    assert core.needed() == core.log.tail, "something still holds the log"


def files(client: Client) -> dict[str, bytes]:
    return {path: what[1] for path, what in server_tree(client.bench).items() if what[0] == "file"}


def busy(client: Client) -> Job:
    """A commit is out and not answered."""
    root = client.volume.root_ino
    client.call(lambda v: v.mkdir(root, b"before", 0o755, 0, 0))
    client.volume.barrier()
    return take(client, CommitJob)


@contextmanager
def full_disk(client: Client) -> Iterator[None]:
    """No record finds room in the log."""
    log = client.volume.core.log

    def full(*args: object, **more: object) -> int:
        raise NoSpace("the test's disk is full")

    write, log._write = log._write, full  # type: ignore[method-assign]
    try:
        yield
    finally:
        log._write = write  # type: ignore[method-assign]
