"""A real server killed again and again while files are replaced and everything idle is swept at once."""

from __future__ import annotations

import random
import threading
import time
from http.client import HTTPException
from pathlib import Path

import pytest
from support.cli import process
from support.server import Server, TestFs
from support.wait import wait_for

SIZES = (300, 5_000, 80_000, 250_000)
FILES = 12


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


class Writer:
    """Replaces its own files; knows what was answered and what was only asked."""

    def __init__(self, fs: TestFs, name: str, seed: int) -> None:
        self.fs, self.name, self.rng = fs, name, random.Random(seed)
        self.known: dict[str, set[int | None]] = {}  # what a file may hold; None: it is not there
        self.done = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            path = f"/files/{self.name}-{self.rng.randrange(FILES)}"
            # A small pool: what is dropped is soon stored again.
            wanted = None if self.rng.random() < 0.2 else self.rng.randrange(40)
            before = self.known.get(path, {None})
            self.known[path] = before | {wanted}
            try:
                if wanted is None:
                    reply = self.fs.ask("POST", "/actions", {"action": "remove", "path": path[6:]})
                    done = reply.status in (200, 404)
                else:
                    done = self.fs.ask("PUT", path, data_of(wanted)).status == 200
            except (OSError, HTTPException):
                time.sleep(0.05)
                continue
            if done:
                self.known[path] = {wanted}
                self.done += 1

    def check(self) -> int:
        """Every file holds what was answered last, or what was under way then; how many there are."""
        for path, may in self.known.items():
            reply = self.fs.ask("GET", path)
            holds = None if reply.status == 404 else reply.body
            assert reply.status in (200, 404), f"{path}: {reply.body[:200]!r}"
            wanted = [None if number is None else data_of(number) for number in may]
            assert holds in wanted, f"{path} holds something else than was written"
        return len(self.known)


def run(tmp_path: Path, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    server = Server(tmp_path / "s", "--sweep-every", "1s").start()
    try:
        fs = server.create()
        writers = [Writer(fs, f"w{number}", rng.randrange(10**6)) for number in range(2)]
        stop = threading.Event()
        swept = [0]

        def sweep() -> None:
            while not stop.is_set():
                try:
                    body = {"older_than_ms": 0}
                    swept[0] += server.admin("POST", "/v1/sweep", body).json.get("blobs", 0)
                except (OSError, HTTPException, ValueError):
                    time.sleep(0.05)

        def enough() -> bool:
            touched = sum(len(writer.known) for writer in writers)
            return bool(swept[0]) and touched > FILES and all(writer.done for writer in writers)

        threads = [threading.Thread(target=writer.run, args=(stop,)) for writer in writers]
        threads.append(threading.Thread(target=sweep))
        for thread in threads:
            thread.start()
        kills, end = 0, time.monotonic() + seconds
        while time.monotonic() < end or not enough():
            # However slow the machine, something was done before each kill.
            before, wanted = sum(writer.done for writer in writers), rng.randrange(1, 60)
            wait_for(lambda: sum(writer.done for writer in writers) >= before + wanted, 60, "files")  # noqa: B023
            server.kill()
            server.restart()
            kills += 1
        stop.set()
        for thread in threads:
            thread.join(60)
        assert sum(writer.check() for writer in writers) > FILES
        assert kills
        server.stop()
        found = process("audit", "--data-dir", str(server.data_dir), "--read-data")
        assert found.code == 0, found.err
    finally:
        server.end()


def test_killed_while_all_idle_content_is_swept(tmp_path: Path, seed: int) -> None:
    run(tmp_path, 2.5, seed)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_for_minutes(tmp_path: Path, seed: int) -> None:
    run(tmp_path, 90.0, seed)
