"""Chains, counts, leases, pruning and the order of checks of the checkpoint contract, over HTTP."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.contract import (
    DURATION,
    NOW,
    RENEW,
    Store,
    artifact,
    checkpoint,
    file,
    key,
    refused,
    unchanged,
    writer,
)
from support.server import Server

TILDE, EMOJI = "\uff5e", "\U0001f600"  # in this order by UTF-8 bytes, the other way round by UTF-16 units


# -- reading and appending -----------------------------------------------------------------------------


def test_an_unknown_thread_has_no_head_and_no_checkpoints(store: Store) -> None:
    assert store.head("never") is None
    assert store.list("never") == []
    assert store.get("never") is None
    assert store.counts() == {}
    assert store.load("never") == []


def test_a_root_and_a_child_make_a_chain(store: Store) -> None:
    lease = store.acquire()
    assert store.append(checkpoint("a"), None, lease) == {"headId": "a"}
    child = checkpoint("b", parent="a", files=[file("x"), {"path": "d", "kind": "dir"}], label="v1")
    assert store.append(child, "a", lease) == {"headId": "b"}
    assert store.head() == "b"
    assert store.get("b") == child
    assert store.ids() == ["a", "b"]


def test_an_absent_parent_is_read_back_as_null(store: Store) -> None:
    record = checkpoint("a")
    del record["parentCheckpointId"]
    store.append(record, None, store.acquire())
    assert store.get("a") == {**record, "parentCheckpointId": None}


def test_optional_fields_are_absent_never_null(store: Store) -> None:
    store.append(checkpoint("a", label=None, sourceRunId=None), None, store.acquire())
    assert {"label", "sourceRunId"}.isdisjoint(store.get("a"))


def test_append_compares_and_swaps_the_head(store: Store) -> None:
    lease = store.acquire()
    unchanged(store, "STALE_HEAD", lambda: store.append(checkpoint("a", parent="x"), "x", lease))
    store.append(checkpoint("a"), None, lease)
    unchanged(store, "STALE_HEAD", lambda: store.append(checkpoint("b"), None, lease))
    unchanged(store, "PARENT_MISMATCH", lambda: store.append(checkpoint("b"), "a", lease))
    unchanged(store, "PARENT_MISMATCH", lambda: store.append(checkpoint("b", parent="z"), "a", lease))
    unchanged(store, "STALE_HEAD", lambda: store.append(checkpoint("b", parent="a"), "z", lease))
    store.append(checkpoint("b", parent="a"), "a", lease)


def test_a_stale_head_is_told_with_the_head(store: Store) -> None:
    lease = store.grow("t", EMOJI, lease=store.acquire())
    error = refused("STALE_HEAD", lambda: store.append(checkpoint("b", parent="a"), "a", lease))
    assert error.status == 409
    assert error.error["details"] == {"headId": EMOJI}


def test_an_id_is_used_once(store: Store) -> None:
    lease = store.acquire()
    store.append(checkpoint("a"), None, lease)
    # Before the head is looked at: again the same is no stale head.
    unchanged(store, "DUPLICATE_ID", lambda: store.append(checkpoint("a"), None, lease))
    unchanged(store, "DUPLICATE_ID", lambda: store.append(checkpoint("a", parent="a"), "a", lease))


def test_an_id_is_unique_over_all_threads(store: Store) -> None:
    store.grow("one", "same")
    lease = store.acquire("two")
    unchanged(
        store, "DUPLICATE_ID", lambda: store.append(checkpoint("same", "two"), None, lease), "one", "two"
    )


def test_two_filesystems_know_nothing_of_each_other(store: Store, contract_server: Server) -> None:
    other = Store(contract_server)
    store.grow("t", "a", files=[file("x")])
    assert other.get("a") is None
    assert other.counts() == {}
    other.grow("t", "a")
    assert store.get("a")["files"] == [file("x")]
    other.close()


def test_threads_have_their_own_heads(store: Store) -> None:
    store.grow("one", "a", "b")
    store.grow("two", "c")
    assert (store.head("one"), store.head("two")) == ("b", "c")
    assert (store.ids("one"), store.ids("two")) == (["a", "b"], ["c"])


def test_the_list_is_by_time_and_then_id(store: Store) -> None:
    lease = store.acquire()
    head = None
    for name, created in (("c", 30), ("b", 10), ("a", 10), ("d", -1.5), ("e", 1e300)):
        store.append(checkpoint(name, parent=head, createdAt=created), head, lease)
        head = name
    assert store.ids() == ["d", "a", "b", "c", "e"]


def test_ids_and_keys_are_in_order_of_utf8_bytes(store: Store) -> None:
    names = [EMOJI, TILDE, "ä", "z", "Z", "a", "a\0b", "ab", "A"]
    store.grow("t", *names)
    assert (
        store.ids() == sorted(names, key=str.encode) == ["A", "Z", "a", "a\0b", "ab", "z", "ä", TILDE, EMOJI]
    )
    store.grow("u", "keys", files=[file(n) for n in "fedcba"], artifacts=[artifact(n) for n in "xyz"])
    assert len(store.counts()) == 9  # whose order `counts` checks
    assert next(iter(store.counts())).startswith("sandbox-artifacts/")


def test_utf16_order_is_not_ours(store: Store) -> None:
    """By UTF-16 units the emoji would come first."""
    store.grow("t", EMOJI, TILDE)
    assert store.ids() == [TILDE, EMOJI]


def test_a_checkpoint_never_changes(store: Store) -> None:
    lease = store.acquire()
    record = checkpoint("a", files=[file("x")])
    store.append(record, None, lease)
    read = store.get("a")
    read["files"].append("mine")
    store.append(checkpoint("b", parent="a"), "a", lease)
    store.save("t", [{"role": "user"}])
    assert store.get("a") == record


# -- counts --------------------------------------------------------------------------------------------


def test_a_checkpoint_counts_a_key_once(store: Store) -> None:
    lease = store.acquire()
    shared = [file("a", key("k")), file("b", key("k")), {"path": "d", "kind": "dir"}]
    store.append(checkpoint("one", files=shared), None, lease)
    assert store.counts() == {key("k"): 1}
    store.append(checkpoint("two", parent="one", files=shared), "one", lease)
    assert store.counts() == {key("k"): 2}
    store.delete_head("t", "two", lease)
    assert store.counts() == {key("k"): 1}
    store.delete_head("t", "one", lease)
    assert store.counts() == {}


def test_artifacts_are_counted(store: Store) -> None:
    pictures = [artifact("p"), artifact("q", key("p", "artifacts"))]
    lease = store.grow("t", "a", lease=store.acquire(), artifacts=pictures)
    assert store.counts() == {key("p", "artifacts"): 1}
    store.delete_head("t", "a", lease)
    assert store.counts() == {}


def test_symlinks_and_directories_count_nothing(store: Store) -> None:
    store.grow(
        "t", "a", files=[{"path": "l", "kind": "symlink", "target": "x"}, {"path": "d", "kind": "dir"}]
    )
    assert store.counts() == {}


def test_counts_span_threads(store: Store) -> None:
    store.grow("one", "a", files=[file("x")])
    store.grow("two", "b", files=[file("x"), file("y")])
    assert store.counts() == {key("x"): 2, key("y"): 1}


# -- leases --------------------------------------------------------------------------------------------


def test_one_lease_a_thread_and_nobody_waits(store: Store) -> None:
    lease = store.acquire()
    assert lease["threadId"] == "t"
    assert lease["expiresAt"] == NOW + DURATION
    assert lease["renewAfterMs"] == RENEW
    error = unchanged(store, "WRITER_CONFLICT", lambda: store.acquire())
    assert error.status == 409
    store.acquire("another")
    # The refusal neither burnt a fence nor touched the lease.
    store.append(checkpoint("a"), None, lease)
    store.release(writer(lease))
    assert store.acquire()["fence"] == lease["fence"] + 1


def test_a_new_lease_has_a_new_token_and_a_higher_fence(store: Store) -> None:
    leases = []
    for _ in range(3):
        leases.append(store.acquire())
        store.release(writer(leases[-1]))
    assert len({lease["ownerToken"] for lease in leases}) == 3
    assert [lease["fence"] for lease in leases] == [1, 2, 3]


def test_a_fence_does_not_start_again_after_a_release_or_an_empty_thread(store: Store) -> None:
    lease = store.grow("t", "a", lease=store.acquire())
    store.delete_head("t", "a", lease)
    store.release(writer(lease))
    store.now = NOW + 10 * DURATION
    again = store.acquire()
    assert again["fence"] > lease["fence"]
    store.now += DURATION  # expired, not released
    assert store.acquire()["fence"] > again["fence"]


def test_renewing_extends_from_now(store: Store) -> None:
    lease = store.acquire()
    store.now = NOW + 60
    assert store.renew(lease) == {"expiresAt": NOW + 60 + DURATION}
    store.now = NOW + 60 + DURATION - 1
    store.append(checkpoint("a"), None, lease)
    store.now += 1
    unchanged(store, "WRITER_LOST", lambda: store.append(checkpoint("b", parent="a"), "a", lease))


def test_an_expired_lease_cannot_be_renewed_even_if_nobody_took_it(store: Store) -> None:
    lease = store.acquire()
    store.now = NOW + DURATION
    refused("WRITER_LOST", lambda: store.renew(lease))


def test_at_exactly_its_end_a_lease_is_over_on_both_sides(store: Store) -> None:
    lease = store.acquire()
    store.now = lease["expiresAt"] - 1
    refused("WRITER_CONFLICT", lambda: store.acquire())
    store.append(checkpoint("a"), None, lease)
    store.now = lease["expiresAt"]
    refused("WRITER_LOST", lambda: store.append(checkpoint("b", parent="a"), "a", lease))
    assert store.acquire()["fence"] == lease["fence"] + 1


def test_a_stale_lease_does_not_release_the_next_one(store: Store) -> None:
    old = store.acquire()
    store.now = NOW + DURATION
    new = store.acquire()
    assert store.release(writer(old)) is None
    store.append(checkpoint("a"), None, new)
    refused("WRITER_LOST", lambda: store.renew(old))


def test_a_stale_lease_writes_nothing(store: Store) -> None:
    store.grow("source", "s", lease=store.acquire("source"))
    old = store.grow("t", "a", lease=store.acquire())
    empty = store.acquire("empty")
    store.now = NOW + DURATION
    store.acquire()
    store.acquire("empty")
    for call in (
        lambda: store.append(checkpoint("b", parent="a"), "a", old),
        lambda: store.delete_head("t", "a", old),
        lambda: store.prune("t", 1, old),
        lambda: store.renew(old),
        lambda: store.fork(("source", "s"), ("empty", "f"), empty),
    ):
        unchanged(store, "WRITER_LOST", call, "t", "empty", "source")


def test_the_owner_token_counts_not_the_fence_alone(store: Store) -> None:
    lease = store.grow("t", "a", lease=store.acquire())
    thief = {**lease, "ownerToken": "0" * len(lease["ownerToken"])}
    for call in (
        lambda: store.append(checkpoint("b", parent="a"), "a", thief),
        lambda: store.delete_head("t", "a", thief),
        lambda: store.prune("t", 1, thief),
        lambda: store.renew(thief),
    ):
        unchanged(store, "WRITER_LOST", call)
    store.release(writer(thief))
    store.append(checkpoint("b", parent="a"), "a", lease)


@pytest.mark.parametrize("fence", [0, 2, None, "1", True, 1.5, 2**70, {}])
def test_the_fence_counts_not_the_token_alone(store: Store, fence: Any) -> None:
    lease = store.acquire()
    unchanged(store, "WRITER_LOST", lambda: store.append(checkpoint("a"), None, {**lease, "fence": fence}))


@pytest.mark.parametrize("token", ["", None, 5, "\ud800", "ä", []])
def test_a_token_that_is_none_is_lost(store: Store, token: Any) -> None:
    lease = store.acquire()
    unchanged(
        store, "WRITER_LOST", lambda: store.append(checkpoint("a"), None, {**lease, "ownerToken": token})
    )


def test_a_fence_written_as_a_float_is_the_same(store: Store) -> None:
    lease = store.acquire()
    store.append(checkpoint("a"), None, {**lease, "fence": float(lease["fence"])})


def test_after_a_release_there_is_no_empty_token_to_guess(store: Store) -> None:
    lease = store.acquire()
    store.release(writer(lease))
    for token in ("", lease["ownerToken"]):
        ghost = {**lease, "ownerToken": token}
        unchanged(store, "WRITER_LOST", lambda g=ghost: store.append(checkpoint("a"), None, g))  # type: ignore[misc]


def test_a_writer_is_of_one_thread(store: Store) -> None:
    lease = store.acquire("other")
    mine = store.grow("t", "a", lease=store.acquire())
    store.release(writer(mine))
    for call in (
        lambda: store.append(checkpoint("b", parent="a"), "a", lease),
        lambda: store.delete_head("t", "a", lease),
        lambda: store.prune("t", 1, lease),
    ):
        unchanged(store, "WRITER_LOST", call)


def test_no_writer_at_all_is_a_client_error(store: Store) -> None:
    body = {"checkpoint": checkpoint("a"), "expectedHeadId": None}
    wrong: list[dict[str, Any]] = [{}, {"writer": None}, {"writer": "x"}, {"writer": []}, {"writer": {}}]
    for bad in wrong:
        assert refused("INVALID_ID", lambda bad=bad: store.call("append", {**body, **bad})).status == 422  # type: ignore[misc]
        assert refused("INVALID_ID", lambda bad=bad: store.call("renew", bad)).status == 422  # type: ignore[misc]


@pytest.mark.parametrize("bad", [None, {}, "x", {"threadId": "never"}, {"threadId": ""}, {"threadId": "t"}])
def test_release_never_fails(store: Store, bad: Any) -> None:
    lease = store.acquire()
    assert store.release(bad) is None
    assert store.call("release", {}) is None
    store.append(checkpoint("a"), None, lease)
    store.now = NOW + 5 * DURATION
    assert store.release(writer(lease)) is None
    assert store.release(writer(lease)) is None


def test_a_lost_acquire_is_had_again_with_its_key(store: Store) -> None:
    first = store.acquire(Idempotency_Key="run-1")
    assert store.acquire(Idempotency_Key="run-1") == first
    refused("WRITER_CONFLICT", lambda: store.acquire(Idempotency_Key="run-2"))
    store.append(checkpoint("a"), None, first)


def test_a_lost_append_is_had_again_with_its_key(store: Store) -> None:
    lease = store.acquire()
    body = {"checkpoint": checkpoint("a"), "expectedHeadId": None, "writer": writer(lease)}
    assert store.call("append", body, Idempotency_Key="k") == {"headId": "a"}
    store.now = NOW + 3 * DURATION  # also when its lease is over
    assert store.call("append", body, Idempotency_Key="k") == {"headId": "a"}
    other = {**body, "checkpoint": checkpoint("b")}
    reply = store.raw("append", json.dumps(other).encode(), Idempotency_Key="k")
    assert (reply.status, reply.code) == (409, "idempotency_mismatch")


def test_lease_times_are_given_with_the_filesystem(contract_server: Server) -> None:
    store = Store(contract_server, contract_server.create())
    assert store.acquire()["expiresAt"] == NOW + 120_000
    assert store.acquire("u")["renewAfterMs"] == 45_000
    store.close()
    fine = Store(contract_server, lease_duration_ms=0.75, renew_after_ms=0.5)
    assert fine.acquire()["expiresAt"] == NOW + 0.75
    fine.close()
    for terms in (
        {"lease_duration_ms": 0},
        {"lease_duration_ms": -5},
        {"lease_duration_ms": "100"},
        {"lease_duration_ms": True},
        {"renew_after_ms": 0},
        {"lease_duration_ms": 100, "renew_after_ms": 100},
        {"lease_duration_ms": 100},  # the hint's default is longer
        {"lease_duration_ms": 1e15},
    ):
        reply = contract_server.admin("POST", "/v1/file-systems", terms)
        assert reply.status == 400, terms
        assert "_ms" in reply.json["error"]["message"]


def test_without_the_header_the_clock_is_the_servers(store: Store) -> None:
    store.now = None
    before = time.time() * 1000
    lease = store.acquire()
    assert before - 1000 < lease["expiresAt"] - DURATION < time.time() * 1000 + 1000


# -- order of checks -----------------------------------------------------------------------------------


def test_ids_are_checked_before_entries(store: Store) -> None:
    lease = store.acquire()
    refused("INVALID_ID", lambda: store.append(checkpoint("", files=None, createdAt=None), None, lease))


def test_entries_are_checked_before_the_writer(store: Store) -> None:
    lost = {"threadId": "t", "ownerToken": "x", "fence": 1}
    refused("INVALID_ENTRY", lambda: store.append(checkpoint("a", files=None), None, lost))
    refused("INVALID_ENTRY", lambda: store.append(checkpoint("a", createdAt=None), None, lost))
    elsewhere = store.acquire("other")
    refused("INVALID_ENTRY", lambda: store.append(checkpoint("a", artifacts=5), None, elsewhere))


def test_the_writer_is_checked_before_the_id(store: Store) -> None:
    store.grow("t", "a")
    lost = {"threadId": "t", "ownerToken": "x", "fence": 1}
    refused("WRITER_LOST", lambda: store.append(checkpoint("a"), None, lost))


def test_the_expected_head_must_be_given(store: Store) -> None:
    lease = store.acquire()
    body = {"checkpoint": checkpoint("a"), "writer": writer(lease)}
    refused("INVALID_ID", lambda: store.call("append", body))


# -- removing ------------------------------------------------------------------------------------------


def test_only_the_head_is_deleted_and_its_parent_follows(store: Store) -> None:
    lease = store.grow("t", "a", "b", "c", lease=store.acquire(), files=[file("x")])
    for name in ("a", "b", "never"):
        unchanged(store, "NOT_HEAD", lambda name=name: store.delete_head("t", name, lease))  # type: ignore[misc]
    store.grow("other", "o")
    unchanged(store, "NOT_HEAD", lambda: store.delete_head("t", "o", lease), "t", "other")
    assert store.delete_head("t", "c", lease) is None
    assert store.head() == "b"
    assert store.get("c") is None
    store.append(checkpoint("c", parent="b", label="again"), "b", lease)
    assert store.get("c")["label"] == "again"
    for name in ("c", "b", "a"):
        store.delete_head("t", name, lease)
    assert store.state("t") == {"counts": {}, "t": ([], None, [])}
    unchanged(store, "NOT_HEAD", lambda: store.delete_head("t", "a", lease))
    store.append(checkpoint("a"), None, lease)


def test_delete_head_wants_a_writer(store: Store) -> None:
    lease = store.grow("t", "a", lease=store.acquire())
    store.release(writer(lease))
    unchanged(store, "WRITER_LOST", lambda: store.delete_head("t", "a", lease))
    # Before it is looked whether it is the head.
    unchanged(store, "WRITER_LOST", lambda: store.delete_head("t", "never", lease))


def test_pruning_keeps_the_newest_of_the_chain(store: Store) -> None:
    lease = store.acquire()
    head = None
    for at, name in enumerate("abcde"):
        # Times say nothing: each is older than its parent.
        record = checkpoint(name, parent=head, createdAt=100 - at, files=[file(name), file("all")])
        store.append(record, head, lease)
        head = name
    assert store.prune("t", 9, lease) == []
    assert store.prune("t", 2, lease) == ["a", "b", "c"]
    assert store.ids() == ["e", "d"]
    assert store.head() == "e"
    assert store.get("d")["parentCheckpointId"] == "c"
    assert store.counts() == {key("d"): 1, key("e"): 1, key("all"): 2}
    assert store.prune("t", 2, lease) == []
    # The walk ends where an earlier one has cut.
    store.append(checkpoint("f", parent="e"), "e", lease)
    assert store.prune("t", 2, lease) == ["d"]
    assert store.prune("t", 1.0, lease) == ["e"]


def test_pruning_an_empty_thread_removes_nothing(store: Store) -> None:
    assert store.prune("t", 1, store.acquire()) == []


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None, "1", 2**53, 1e400])
def test_keep_is_a_number_of_one_or_more(store: Store, keep: Any) -> None:
    lease = store.grow("t", "a", "b", lease=store.acquire())
    body = {"threadId": "t", "keep": keep, "writer": writer(lease)}
    reply = store.raw("deleteCheckpoints", json.dumps(body).replace("Infinity", "1e400").encode())
    assert (reply.status, reply.code) == (422, "SANDBOX_SNAPSHOT_INVALID_ENTRY")
    assert store.ids() == ["a", "b"]


def test_keep_is_checked_before_the_writer(store: Store) -> None:
    lease = store.acquire()
    store.release(writer(lease))
    refused("INVALID_ENTRY", lambda: store.prune("t", 0, lease))
    refused("WRITER_LOST", lambda: store.prune("t", 1, lease))


def test_a_head_whose_parent_was_pruned_leaves_an_empty_thread(store: Store) -> None:
    lease = store.grow("t", "a", "b", "c", lease=store.acquire())
    store.prune("t", 1, lease)
    store.delete_head("t", "c", lease)
    assert store.head() is None
    store.append(checkpoint("root"), None, lease)
    assert store.ids() == ["root"]


def test_a_pruned_id_used_again_is_not_the_old_parent(store: Store) -> None:
    """The id of a removed parent comes back as a child, and in another thread: no chain leads there."""
    lease = store.grow("t", "a", "b", "c", lease=store.acquire())
    store.prune("t", 1, lease)
    store.append(checkpoint("b", parent="c"), "c", lease)
    assert store.prune("t", 9, lease) == []
    assert store.prune("t", 1, lease) == ["c"]
    store.append(checkpoint("d", parent="b"), "b", lease)
    assert store.prune("t", 1, lease) == ["b"]
    store.grow("other", "b")
    store.delete_head("t", "d", lease)
    assert store.head() is None
    assert store.head("other") == "b"


# -- forks ---------------------------------------------------------------------------------------------
