"""Blobs of the checkpoint contract and their sweep, over HTTP on each engine."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from typing import Any

import pytest
from support.contract import (
    NOW,
    Store,
    artifact,
    checkpoint,
    file,
    key_for,
)
from support.server import Server

MIB = 1024 * 1024


@pytest.mark.parametrize("size", [0, 1, 4096, MIB, MIB + 1, 5 * MIB + 17])
def test_bytes_come_back(store: Store, size: int) -> None:
    data = random.Random(size).randbytes(size)
    key = store.put(data)
    assert store.blob(key) == data
    reply = store.ask("HEAD", f"/v1/blobs/{key}")
    assert reply.status == 200
    assert reply.headers["content-length"] == str(size)
    assert store.blobs() == [{"key": key, "size": size, "uploadedAt": NOW}]


def test_holes_and_repeats_come_back(store: Store) -> None:
    data = bytes(3 * MIB) + b"x" * MIB + bytes(MIB // 2) + b"x" * MIB + bytes(17)
    assert store.blob(store.put(data)) == data


def test_the_same_bytes_are_two_blobs_in_two_name_spaces(store: Store) -> None:
    one, two = store.put(b"same", "files"), store.put(b"same", "artifacts")
    assert [blob["key"] for blob in store.blobs()] == [two, one]
    store.ask("DELETE", f"/v1/blobs/{one}")
    assert store.blob(one) is None
    assert store.blob(two) == b"same"


def test_bytes_that_are_not_the_keys_are_refused(store: Store) -> None:
    reply = store.ask("PUT", f"/v1/blobs/{key_for(b'right')}", b"wrong")
    assert (reply.status, reply.code) == (422, "SANDBOX_SNAPSHOT_INVALID_BLOB")
    assert store.blobs() == []
    assert store.blob(key_for(b"right")) is None


@pytest.mark.parametrize(
    "key",
    [
        "other/key",
        "sandbox-files/sha256/abc",
        key_for(b"x").upper().replace("SANDBOX-FILES/SHA256", "sandbox-files/sha256"),
        key_for(b"x") + "0",
        key_for(b"x") + "%0a",
        "sandbox-other/sha256/" + "a" * 64,
        "%ff",
    ],
)
def test_other_keys_are_none(store: Store, key: str) -> None:
    assert store.ask("PUT", f"/v1/blobs/{key}", b"x").status == 422
    assert store.ask("DELETE", f"/v1/blobs/{key}").status == 422
    store.close()
    assert store.ask("GET", f"/v1/blobs/{key}").status == 404
    assert store.ask("HEAD", f"/v1/blobs/{key}").status == 404


def test_a_second_put_is_no_error_and_says_so(store: Store) -> None:
    key = key_for(b"x")
    assert store.ask("PUT", f"/v1/blobs/{key}", b"x").status == 201
    assert store.ask("PUT", f"/v1/blobs/{key}", b"x").status == 200
    assert len(store.blobs()) == 1


def test_a_counted_blob_is_not_deleted(store: Store) -> None:
    mine, picture = store.put(b"mine"), store.put(b"picture", "artifacts")
    lease = store.grow(
        "t", "a", lease=store.acquire(), files=[file("f", mine)], artifacts=[artifact("p", picture)]
    )
    for key in (mine, picture):
        reply = store.ask("DELETE", f"/v1/blobs/{key}")
        assert (reply.status, reply.code) == (409, "conflict")
        assert store.has(key)
    store.delete_head("t", "a", lease)
    for _ in range(2):  # gone already is no error
        assert store.ask("DELETE", f"/v1/blobs/{mine}").json == {"result": None}
    assert store.blob(mine) is None


def test_lists_are_by_prefix_and_page(store: Store) -> None:
    keys = sorted(store.put(bytes([n]), kind) for n in range(8) for kind in ("files", "artifacts"))
    assert [blob["key"] for blob in store.blobs()] == keys
    files = [key for key in keys if "-files/" in key]
    for prefix, wanted in (
        ("sandbox-", keys),
        ("sandbox-files/", files),
        ("sandbox-f", files),
        (files[3][:25], [key for key in files if key.startswith(files[3][:25])]),
        (files[3][:22], [key for key in files if key.startswith(files[3][:22])]),
        (files[3], [files[3]]),
        (files[3] + "0", []),
        ("other", []),
        ("sandbox-files/sha256/G", []),
    ):
        assert [blob["key"] for blob in store.blobs(prefix)] == wanted, prefix
    # From a key that is gone the list goes on behind it.
    gone = key_for(b"never")
    page = store.ask("GET", f"/v1/blobs?cursor={gone}").json
    assert [blob["key"] for blob in page["blobs"]] == [key for key in keys if key > gone]
    assert store.ask("GET", "/v1/blobs?cursor=x").status == 422


def test_filesystems_do_not_share_blobs(store: Store, contract_server: Server) -> None:
    other = Store(contract_server)
    key = store.put(b"x")
    assert other.blob(key) is None
    assert other.blobs() == []
    other.close()


def test_blobs_and_the_tree_do_not_hurt_each_other(store: Store) -> None:
    """The same bytes as a file: either can go."""
    data = random.Random(7).randbytes(2 * MIB + 5)
    assert store.fs.ask("PUT", "/files/f", data).status == 200
    key = store.put(data)
    store.now = NOW + 1
    assert store.sweep(0) == [key]
    assert store.fs.ask("GET", "/files/f").body == data
    key = store.put(data)
    assert store.fs.ask("POST", "/actions", {"action": "remove", "path": "/f"}).status == 200
    assert store.blob(key) == data


# -- sweep ---------------------------------------------------------------------------------------------


def test_the_sweep_takes_what_is_old_and_uncounted(store: Store) -> None:
    counted, picture = store.put(b"counted"), store.put(b"picture", "artifacts")
    old = sorted([store.put(b"old"), store.put(b"old", "artifacts")])
    store.grow("t", "a", files=[file("f", counted)], artifacts=[artifact("p", picture)])
    store.now = NOW + 500
    young = store.put(b"young")
    store.now = NOW + 1000
    assert store.sweep(600) == old
    assert [blob["key"] for blob in store.blobs()] == sorted([counted, picture, young])
    assert store.sweep(600) == []
    for key in old:
        assert store.blob(key) is None


def test_the_sweep_is_strict_about_age(store: Store) -> None:
    key = store.put(b"x")
    store.now = NOW + 100
    assert store.sweep(100) == []
    assert store.sweep(99.5) == [key]


def test_pruning_first_frees_what_only_those_used(store: Store) -> None:
    lease = store.acquire()
    keys = []
    head = None
    for name in ("a", "b", "c"):
        keys.append(store.put(name.encode()))
        store.append(checkpoint(name, parent=head, files=[file("f", keys[-1])]), head, lease)
        head = name
    store.now = NOW + 50
    assert store.sweep(0) == []
    store.prune("t", 1, lease)
    assert store.sweep(0) == sorted(keys[:2])
    assert store.blob(keys[2]) == b"c"


def test_reuse_makes_a_blob_young(store: Store) -> None:
    """Who is told that it is there will not upload it: neither a HEAD nor a PUT leaves it old."""
    asked, sent, read = store.put(b"asked"), store.put(b"sent"), store.put(b"read")
    store.now = NOW + 1000
    assert store.has(asked)
    store.put(b"sent")
    assert store.blob(read) == b"read"
    store.now = NOW + 1100
    assert store.sweep(500) == [read]
    assert {blob["key"]: blob["uploadedAt"] for blob in store.blobs()} == {
        asked: NOW + 1000,
        sent: NOW + 1000,
    }


@pytest.mark.parametrize("older", [-1, -0.001, None, "1", True, {}, 1e400])
def test_a_range_is_a_finite_number(store: Store, older: Any) -> None:
    key = store.put(b"x")
    store.now = NOW + 10**6
    raw = json.dumps({"olderThanMs": older}).replace("Infinity", "1e400").encode()
    reply = store.raw("sweep", raw)
    assert (reply.status, reply.code) == (422, "INVALID_RANGE")
    assert store.has(key)


def test_without_a_range_a_day_is_kept(store: Store) -> None:
    key = store.put(b"x")
    store.now = NOW + 24 * 3600 * 1000
    assert store.call("sweep", {}) == {"deleted": []}
    store.now += 1
    assert store.call("sweep", {}) == {"deleted": [key]}


def test_any_long_time_is_a_range(store: Store) -> None:
    store.put(b"x")
    assert store.sweep(1e300) == []


def test_a_sweep_is_had_again_with_its_key(store: Store) -> None:
    key = store.put(b"x")
    store.now = NOW + 10
    body = {"olderThanMs": 0}
    assert store.call("sweep", body, Idempotency_Key="s") == {"deleted": [key]}
    later = store.put(b"y")
    store.now += 10
    assert store.call("sweep", body, Idempotency_Key="s") == {"deleted": [key]}
    assert store.has(later), "the same request is one sweep"


def test_a_sweep_leaves_what_is_counted_in_the_middle(store: Store) -> None:
    keys = sorted(store.put(b"%d" % n) for n in range(7))
    lease = store.grow("t", "a", lease=store.acquire(), files=[file("f", keys[3])])
    store.now = NOW + 10
    assert store.sweep(0) == keys[:3] + keys[4:]
    store.delete_head("t", "a", lease)
    assert store.sweep(0) == [keys[3]]


def test_a_sweep_and_a_capture_race_and_nothing_counted_is_lost(store: Store, seed: int) -> None:
    """A capture asks, uploads only what is absent, and appends last, while sweeps of everything older run.
    The clock of the capture is 100 ms behind the sweeps', which spare 500."""
    rng = random.Random(seed)
    contents = [b"%d" % number for number in range(30)]
    for data in contents:
        store.put(data)
    store.now = NOW + 900
    lease = store.acquire()
    done = threading.Event()
    swept: list[str] = []
    sweeping = threading.Event()

    def sweep() -> None:
        mine = store.again()
        mine.now = NOW + 1000
        while not done.is_set():
            swept.extend(mine.sweep(500))
            sweeping.set()
        mine.close()

    sweeper = threading.Thread(target=sweep)
    captured: list[str] = []
    try:
        for turn in range(5):
            wanted = rng.sample(contents, 6)
            for number, data in enumerate(wanted):
                if not store.has(key_for(data)):
                    store.put(data)
                if turn == 0 and number == 2:
                    sweeper.start()
                    sweeping.wait(60)
            record = checkpoint(f"c{turn}", parent=f"c{turn - 1}" if turn else None)
            record["files"] = [file(f"f{n}", key_for(data)) for n, data in enumerate(wanted)]
            store.append(record, f"c{turn - 1}" if turn else None, lease)
            captured += [key_for(data) for data in wanted]
    finally:
        done.set()
        sweeper.join(60)
    assert swept, "a sweep ran and took something"
    assert set(store.counts()) == set(captured)
    for key in captured:
        there = store.blob(key)
        assert there is not None, f"{key} is counted and gone"
        assert key.endswith(hashlib.sha256(there).hexdigest())


def test_puts_deletes_and_sweeps_race_and_the_counts_hold(store: Store) -> None:
    """Four at once on three names; the audit at the end of the run recomputes every count."""
    contents = [random.Random(number).randbytes(70_000) for number in range(3)]
    failed: list[BaseException] = []

    def run(number: int) -> None:
        mine = store.again()
        rng = random.Random(number)
        try:
            for turn in range(12):
                mine.now = NOW + turn * 10
                data = rng.choice(contents)
                match rng.randrange(4):
                    case 0 | 1:
                        mine.put(data)
                    case 2:
                        mine.ask("DELETE", f"/v1/blobs/{key_for(data)}")
                    case _:
                        mine.sweep(5)
        except BaseException as exc:
            failed.append(exc)
            raise
        finally:
            mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failed
    for data in contents:
        store.put(data)
        assert store.blob(key_for(data)) == data


def test_bytes_that_are_fewer_name_nothing(store: Store) -> None:
    data = random.Random(3).randbytes(3 * MIB)
    key = key_for(data)
    reply = store.ask("PUT", f"/v1/blobs/{key}", data[:-1])
    assert reply.status == 422
    assert not store.has(key)
    assert store.blobs() == []
