"""A program that forks (`multiprocessing` does by default) with a filesystem of the Python library open."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import trio
from support.server import Server

from fsd.client import connect, connect_async

LATE = 60  # seconds; a child that hangs is ended


@pytest.fixture
def token(trusted: Server) -> str:
    return trusted.create().token


def child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(LATE)
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@dataclass
class TwoPieces:
    """A body whose second piece comes when `go` is told."""

    told: int
    go: int
    length: int | None = 2
    repeatable: bool = False

    def pieces(self) -> Iterator[bytes]:
        yield b"a"
        os.write(self.told, b"first piece sent")
        os.read(self.go, 1)
        yield b"b"


def test_parent_and_child_share_no_connection(token: str) -> None:
    """The parent asks for something while its child sends a file: on one connection the request would be the
    rest of that file."""
    with connect(token, timeout=LATE) as fs:
        fs.write("/before", b"a connection to be used again")
        read, told = os.pipe()
        wait, go = os.pipe()
        route = f"/v1/file-systems/{fs.id}/files/child"
        pid = child(lambda: void(fs.http.send("PUT", route, TwoPieces(told, wait), headers={})))
        assert select.select([read], [], [], LATE)[0]
        fs.write("/parent", b"parent")
        os.write(go, b"!")
        assert ended_well(pid)
        assert (fs.read("/child"), fs.read("/parent")) == (b"ab", b"parent")
        for one in (read, told, wait, go):
            os.close(one)


def void(_: object) -> None:
    return


@pytest.mark.parametrize("library", ["asyncio", "trio"])
def test_a_child_has_threads_of_its_own(library: str, token: str) -> None:
    """Those of the parent's calls are not there in the child, and would be waited for."""
    fs = connect_async(token)

    async def scene() -> None:
        await fs.write(f"/{os.getpid()}", b"x")

    def run() -> None:
        trio.run(scene) if library == "trio" else asyncio.run(scene())

    run()
    pid = child(run)
    assert ended_well(pid)
    run()
    fs.close()
    with connect(token) as found:
        assert {one["name"] for one in found.list("/")} == {str(os.getpid()), str(pid)}


def test_what_is_closed_is_closed_in_a_child(token: str) -> None:
    fs = connect_async(token)
    fs.close()

    async def scene() -> None:
        with pytest.raises(RuntimeError, match="after shutdown"):
            await fs.stat("/")

    assert ended_well(child(lambda: asyncio.run(scene())))
