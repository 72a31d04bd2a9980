"""Thinning out and what a restore replaced: no rule takes the way back while it is likely to be wanted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.contract import Json, Store

HOUR = 3_600_000


def ask(store: Store, method: str, path: str, body: Json | bytes | None = None) -> Any:
    raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    reply = store.ask(method, f"/v1/file-systems/{store.fs.id}{path}", raw)
    assert reply.status < 300, reply.body
    return reply.json


def test_what_a_restore_replaced_stays_an_hour_whatever_the_rule(store: Store) -> None:
    ask(store, "PUT", "/files/a", b"one")
    first = ask(store, "POST", "/checkpoints", {"reason": "automatic"})["checkpoint_id"]
    ask(store, "PUT", "/files/a", b"two")
    undo = ask(store, "POST", "/restore", {"checkpoint": first})["undo_checkpoint_id"]
    assert store.now is not None
    store.now += HOUR - 1
    newest = ask(store, "POST", "/checkpoints", {"reason": "automatic"})["checkpoint_id"]
    pruned = ask(store, "POST", "/checkpoints/prune", {"keep": "last=1"})
    assert (pruned["deleted"], pruned["kept"], pruned["not_considered"]) == ([first], 1, 1)
    kept = store.ask("GET", f"/v1/file-systems/{store.fs.id}/files/a?checkpoint={undo}")
    assert kept.body == b"two"
    store.now += 1
    pruned = ask(store, "POST", "/checkpoints/prune", {"keep": "last=1"})
    assert (pruned["deleted"], pruned["kept"], pruned["not_considered"]) == ([undo], 1, 0)
    assert [one["checkpoint_id"] for one in ask(store, "GET", "/checkpoints")["checkpoints"]] == [newest]


def test_a_number_is_about_all_but_what_undoes_the_last_hour(store: Store) -> None:
    ask(store, "PUT", "/files/a", b"one")
    made = [ask(store, "POST", "/checkpoints", {"label": f"v{n}"})["checkpoint_id"] for n in range(12)]
    ask(store, "PUT", "/files/a", b"two")
    undo = ask(store, "POST", "/restore", {"checkpoint": made[0]})["undo_checkpoint_id"]
    pruned = ask(store, "POST", "/checkpoints/prune", {"keep": "10", "asked_for": True})
    assert (pruned["deleted"], pruned["kept"], pruned["not_considered"]) == (made[:2], 10, 1)
    left = [one["checkpoint_id"] for one in ask(store, "GET", "/checkpoints")["checkpoints"]]
    assert left == [undo, *made[:1:-1]]


def test_who_asks_for_all_gets_all(store: Store) -> None:
    ask(store, "PUT", "/files/a", b"one")
    first = ask(store, "POST", "/checkpoints", {"label": "release"})["checkpoint_id"]
    ask(store, "PUT", "/files/a", b"two")
    undo = ask(store, "POST", "/restore", {"checkpoint": first})["undo_checkpoint_id"]
    newest = ask(store, "POST", "/checkpoints", {})["checkpoint_id"]
    raw = b'{"keep":"1","named":true}'
    assert ask(store, "POST", "/checkpoints/prune", raw)["deleted"] == [first, undo]
    assert [one["checkpoint_id"] for one in ask(store, "GET", "/checkpoints")["checkpoints"]] == [newest]


def test_two_that_thin_out_at_once_are_not_in_each_others_way(store: Store) -> None:
    names = [ask(store, "POST", "/checkpoints", {"reason": "automatic"})["checkpoint_id"] for _ in range(60)]

    def thin(_: int) -> list[str]:
        own, gone = store.again(), []
        more = True
        while more:
            answer = ask(own, "POST", "/checkpoints/prune", {"keep": "2"})
            gone += answer["deleted"]
            more = answer["more"]
        own.close()
        return gone

    with ThreadPoolExecutor(4) as pool:
        gone = [name for some in pool.map(thin, range(4)) for name in some]
    assert sorted(gone) == sorted(names[:-2]), "each was deleted by one of them"


def test_many_go_in_few_requests(store: Store) -> None:
    """The list is read once a request: fifty a request would read it as often as there are fifties."""
    made = [ask(store, "POST", "/checkpoints", {"reason": "automatic"})["checkpoint_id"] for _ in range(120)]
    gone: list[str] = []
    requests, more = 0, True
    while more:
        answer = ask(store, "POST", "/checkpoints/prune", {"keep": "2"})
        requests, gone, more = requests + 1, gone + answer["deleted"], answer["more"]
    assert gone == made[:-2] and answer["kept"] == 2
    assert requests < 3
