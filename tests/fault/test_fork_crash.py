"""The server killed while a fork is made, copied, written and merged: each step wholly or not at all, and
what was begun goes on after the start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from support.contract import audit_stopped
from support.server import Server, TestFs

FILES = 12


def paths(fs: TestFs) -> dict[str, int]:
    got = fs.ask("GET", "/list/?recursive=1")
    assert got.status == 200, got.body
    return {one["path"]: one["size_bytes"] for one in got.json["entries"]}


class Story:
    """A fork, a file in it, a merge: each step again until it was answered."""

    def __init__(self, server: Server, database: str | None) -> None:
        self.server, self.database = server, database
        self.origin = server.create()
        for at in range(FILES):
            assert self.origin.ask("PUT", f"/files/d/f{at}?parents=1", b"x" * at).status == 200
        self.before = paths(self.origin)
        self.fork: TestFs | None = None
        self.merged: dict[str, Any] | None = None

    def run(self) -> None:
        """Raises what a dead server makes of a request."""
        if self.fork is None:
            made = self.origin.ask("POST", "/forks", {}, headers={"Idempotency-Key": "f"})
            assert made.status == 201, made.body
            self.fork = TestFs(self.server, made.json["file_system_id"], made.json["fs_token"])
        assert {**paths(self.fork), "/new": 3} == {**self.before, "/new": 3}
        put = self.fork.ask("PUT", "/files/new", b"new", headers={"Idempotency-Key": "p"})
        assert put.status == 200, put.body
        merge = self.origin.ask("POST", "/merges", {"fork": self.fork.id}, headers={"Idempotency-Key": "m"})
        assert merge.status == 200, merge.body
        self.merged = merge.json


@pytest.fixture
def story(tmp_path: Path, either: str | None) -> Iterator[Story]:
    server = Server(tmp_path / "server", *(["--database", either] if either else []))
    try:
        yield Story(server.start(), either)
    finally:
        server.end()


def killed_at(story: Story, point: str) -> bool:
    """Run with a crash at `point`, then to the end; whether it was killed on the way."""
    server = story.server
    server.stop()
    server.env = {"FSD_CRASH": point}
    dead = False
    try:
        server.restart()
        story.run()
    except (OSError, HTTPException, AssertionError):
        assert server.process is not None
        dead = server.process.wait(60) == -signal.SIGKILL
    server.end()
    server.env = {}
    server.restart()
    story.run()
    assert story.fork is not None and story.merged is not None
    assert story.merged["status"] == "merged" and story.merged["applied"] == 1
    expected = {**story.before, "/new": 3}
    assert paths(story.origin) == paths(story.fork) == expected
    forks = story.origin.ask("GET", "/forks").json["forks"]
    assert [one["file_system_id"] for one in forks] == [story.fork.id], "made once"
    assert forks[0]["copied"] and forks[0]["usage"]["file_count"] == FILES + 3
    checkpoints = story.origin.ask("GET", "/checkpoints").json["checkpoints"]
    assert [one["reason"] for one in checkpoints] == ["merge-undo"], "merged once"
    server.stop()
    assert audit_stopped(server, story.database) == []
    return dead


@pytest.mark.parametrize("point", ["fork.chunk:2", "merge.written:1"])
def test_killed_on_the_way(story: Story, point: str) -> None:
    assert killed_at(story, point)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", range(1, 16))
@pytest.mark.parametrize("point", ["db.commit", "db.committed", "fork.chunk", "merge.kept"])
def test_killed_anywhere(story: Story, point: str, count: int) -> None:
    assert killed_at(story, f"{point}:{count}") or count > 1, "there is no such point on the way"
