"""The server process dies or its answers are lost in the middle of appends and creations."""

from __future__ import annotations

import random
import signal
import threading
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from support.proxy import LOSE_REPLY, FaultProxy
from support.server import Server, TestFs
from support.wait import wait_for


def test_kill_in_the_middle_of_appends_keeps_every_acknowledged_entry(server: Server) -> None:
    fs = server.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    acknowledged: dict[tuple[int, int], int] = {}
    stop = threading.Event()

    def work(thread: int) -> None:
        at = 0
        while not stop.is_set():
            at += 1
            body = {
                "entries": [{"type": "t", "thread": thread, "at": at}],
                "idempotency_key": f"{thread}.{at}",
            }
            try:
                got = fs.ask("POST", "/journals/j/entries", body)
            except (OSError, HTTPException):
                return
            assert got.status == 200, got.body
            acknowledged[(thread, at)] = got.json["first_seq"]

    for seed in range(3):
        stop.clear()
        acknowledged.clear()
        rng = random.Random(seed)
        wanted = rng.randrange(30, 120)
        threads = [threading.Thread(target=work, args=(seed * 10 + n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(acknowledged) >= wanted, 30, "acknowledged appends", every=0.002)  # noqa: B023
        server.kill()
        stop.set()
        for thread in threads:
            thread.join(60)
        assert len(acknowledged) >= wanted, "nothing was at stake"
        server.restart()
        entries = _all(fs)
        assert [e["seq"] for e in entries] == list(range(1, len(entries) + 1))
        stored = {(e["thread"], e["at"]): e["seq"] for e in entries}
        assert len(stored) == len(entries)
        assert {k: stored.get(k) for k in acknowledged} == acknowledged
        assert fs.ask("GET", "/journals/j/verify").json["ok"]


def _all(fs: TestFs) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = fs.ask("GET", f"/journals/j/entries?limit=1000&after_seq={len(found)}").json["entries"]
        if not page:
            return found
        found += page


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("journal.append.begin", False),
        ("db.commit", False),
        ("db.committed", True),
        ("journal.append.durable", True),
    ],
)
def test_append_with_a_crash_at_each_durable_step_is_whole_and_retried_once(
    tmp_path: Path, either: str | None, point: str, kept: bool
) -> None:
    server = Server(tmp_path / "s", *(["--database", either] if either else []))
    try:
        server.start()
        fs = server.create()
        fs.ask("POST", "/journals", {"journal_id": "j"})
        _start_that_dies_next(server, point)
        body = {"entries": [{"type": "a", "n": n} for n in range(5)], "idempotency_key": "k"}
        with pytest.raises((OSError, HTTPException)):
            fs.ask("POST", "/journals/j/entries", body)
        assert server.process is not None
        assert server.process.wait(60) == -signal.SIGKILL
        server.env = {}
        server.restart()
        assert len(_all(fs)) == (5 if kept else 0)
        again = fs.ask("POST", "/journals/j/entries", body).json
        assert again["idempotent"] is kept and again["last_seq"] == 5
        assert len(_all(fs)) == 5
        assert fs.ask("GET", "/journals/j/verify").json["ok"]
    finally:
        server.end()


def _start_that_dies_next(server: Server, point: str) -> None:
    """The service's own start writes too: start it anew until one lives, which dies at the next pass."""
    for count in range(1, 20):
        server.end()
        server.env = {"FSD_CRASH": f"{point}:{count}"}
        try:
            server.start()
        except AssertionError:
            continue
        return
    raise AssertionError(f"a start passes {point} more than 20 times")


def test_a_lost_reply_and_a_retry_with_the_key_make_one_entry(shared_fs: TestFs) -> None:
    server = shared_fs.server
    shared_fs.ask("POST", "/journals", {"journal_id": "j"})
    with FaultProxy(server.url) as proxy:
        through = Server(server.data_dir.parent)
        through.port = int(proxy.url.rsplit(":", 1)[1])
        fs = TestFs(through, shared_fs.id, shared_fs.token)
        body = {"entries": [{"type": "a", "step": "x"}], "idempotency_key": "k"}
        proxy.next(LOSE_REPLY)
        with pytest.raises((OSError, HTTPException)):
            fs.ask("POST", "/journals/j/entries", body)
        again = fs.ask("POST", "/journals/j/entries", body).json
        assert again["idempotent"] and again["first_seq"] == 1
        assert len(_all(shared_fs)) == 1

        key = {"Idempotency-Key": "lost-create"}
        proxy.next(LOSE_REPLY)
        fields = {"display_name": "lost reply"}
        with pytest.raises((OSError, HTTPException)):
            through.ask("POST", "/v1/file-systems", fields, token=server.admin_key, headers=key)
        got = through.ask("POST", "/v1/file-systems", fields, token=server.admin_key, headers=key)
        assert got.status == 201
        found = server.admin("GET", "/v1/file-systems?display_name=lost%20reply").json["file_systems"]
        assert [one["file_system_id"] for one in found] == [got.json["file_system_id"]]
        made = TestFs(server, got.json["file_system_id"], got.json["fs_token"])
        assert made.ask("GET", "/journals").status == 200
