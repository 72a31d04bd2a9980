"""Forks, races, transcripts and instances of the checkpoint contract, over HTTP on each engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.contract import (
    DURATION,
    NOW,
    Json,
    Refused,
    Store,
    artifact,
    checkpoint,
    file,
    fork_body,
    key,
    refused,
    unchanged,
)
from support.server import Server

HOUSEKEEPING = 1.5  # seconds in which it comes at least once
TILDE, EMOJI = "\uff5e", "\U0001f600"  # in this order by UTF-8 bytes, the other way round by UTF-16 units


def source(store: Store) -> None:
    """A thread `src` of three; the second has everything a checkpoint can have."""
    store.grow("src", "s1")
    store.grow(
        "src",
        "s2",
        label="named",
        sourceRunId="run",
        reason="named",
        files=[file("x"), file("y", key("x"))],
        artifacts=[artifact("p")],
        conversation=[{"role": "user", "content": "then \ud800"}],
    )
    store.grow("src", "s3")
    store.save("src", [{"role": "user", "content": "later"}])


def test_a_fork_is_a_root_with_the_checkpoints_conversation(store: Store) -> None:
    source(store)
    before = store.state("src")
    made = store.fork(("src", "s2"), ("dst", "f"), store.acquire("dst"), created=77)
    assert made == {
        "id": "f",
        "threadId": "dst",
        "parentCheckpointId": None,
        "createdAt": 77,
        "reason": "fork-root",
        "files": [file("x"), file("y", key("x"))],
        "artifacts": [artifact("p")],
        "conversation": [{"role": "user", "content": "then \ud800"}],
    }
    assert store.get("f") == made
    assert store.list("dst") == [made]
    assert store.head("dst") == "f"
    assert store.load("dst") == made["conversation"]
    after = store.state("src")
    assert after["src"] == before["src"]


@pytest.mark.parametrize("policy", [{"include": [], "exclude": ["kept"]}, {}, None])
def test_a_fork_has_the_policy_its_files_were_captured_by(store: Store, policy: Any) -> None:
    """A restore of it goes by that: what the policy left out is in no manifest and has to stay in place."""
    store.grow("src", "s1", files=[file("a")], policy=policy, other=1)
    made = store.fork(("src", "s1"), ("dst", "f"), store.acquire("dst"))
    assert made["policy"] == policy
    assert "other" not in made
    assert store.get("f") == made
    again = store.fork(("dst", "f"), ("third", "g"), store.acquire("third"))
    assert again["policy"] == policy


def test_a_fork_adds_its_references(store: Store) -> None:
    source(store)
    assert store.counts() == {key("x"): 1, key("p", "artifacts"): 1}
    lease = store.acquire("dst")
    store.fork(("src", "s2"), ("dst", "f"), lease)
    assert store.counts() == {key("x"): 2, key("p", "artifacts"): 2}
    store.delete_head("dst", "f", lease)
    assert store.counts() == {key("x"): 1, key("p", "artifacts"): 1}


def test_a_lost_fork_is_had_again_with_its_key(store: Store) -> None:
    source(store)
    lease = store.acquire("dst")
    body = fork_body(("src", "s2"), ("dst", "f"), lease)
    first = store.call("forkFromCheckpoint", body, Idempotency_Key="k")
    assert store.call("forkFromCheckpoint", body, Idempotency_Key="k") == first
    assert store.counts() == {key("x"): 2, key("p", "artifacts"): 2}
    store.delete_head("dst", "f", lease)
    refused("CHECKPOINT_NOT_FOUND", lambda: store.call("forkFromCheckpoint", body, Idempotency_Key="k"))


def test_a_kept_answer_is_not_old_by_another_clock(store: Store) -> None:
    """The server's own housekeeping, which comes once a second, does not know what time a request has."""
    source(store)
    body = fork_body(("src", "s2"), ("dst", "f"), store.acquire("dst"))
    first = store.call("forkFromCheckpoint", body, Idempotency_Key="k")
    deadline = time.monotonic() + HOUSEKEEPING
    while time.monotonic() < deadline:
        assert store.call("forkFromCheckpoint", body, Idempotency_Key="k") == first
        time.sleep(0.05)


def test_a_fork_does_not_depend_on_its_source(store: Store) -> None:
    source(store)
    store.fork(("src", "s2"), ("dst", "f"), store.acquire("dst"))
    lease = store.acquire("src")
    assert store.prune("src", 1, lease) == ["s1", "s2"]
    assert store.get("f")["files"] == [file("x"), file("y", key("x"))]
    assert store.counts() == {key("x"): 1, key("p", "artifacts"): 1}


def test_a_fork_of_a_missing_source_changes_nothing(store: Store) -> None:
    source(store)
    lease = store.acquire("dst")
    for name in ("never", "S2"):
        error = unchanged(
            store,
            "FORK_SOURCE_NOT_FOUND",
            lambda name=name: store.fork(("src", name), ("dst", "f"), lease),  # type: ignore[misc]
            "src",
            "dst",
        )
        assert error.status == 404


def test_a_fork_names_the_sources_own_thread(store: Store) -> None:
    source(store)
    lease = store.acquire("dst")
    unchanged(
        store,
        "FORK_SOURCE_THREAD_MISMATCH",
        lambda: store.fork(("elsewhere", "s2"), ("dst", "f"), lease),
        "src",
        "dst",
    )


def test_a_thread_is_not_forked_into_itself(store: Store) -> None:
    source(store)
    lease = store.acquire("src")
    unchanged(
        store, "FORK_SOURCE_THREAD_MISMATCH", lambda: store.fork(("src", "s2"), ("src", "f"), lease), "src"
    )
    # Before the source is looked for.
    refused("FORK_SOURCE_THREAD_MISMATCH", lambda: store.fork(("src", "never"), ("src", "f"), lease))


def test_a_fork_wants_the_destinations_writer(store: Store) -> None:
    source(store)
    none = {"threadId": "dst", "ownerToken": "none", "fence": 1}
    unchanged(store, "WRITER_LOST", lambda: store.fork(("src", "s2"), ("dst", "f"), none), "src", "dst")
    lease = store.acquire("dst")
    wrong = {**lease, "ownerToken": "wrong"}
    unchanged(store, "WRITER_LOST", lambda: store.fork(("src", "s2"), ("dst", "f"), wrong), "src", "dst")
    theirs = store.acquire("src")
    unchanged(store, "WRITER_LOST", lambda: store.fork(("src", "s2"), ("dst", "f"), theirs), "src", "dst")
    store.now = NOW + DURATION
    unchanged(store, "WRITER_LOST", lambda: store.fork(("src", "s2"), ("dst", "f"), lease), "src", "dst")


@pytest.mark.parametrize("messages", [[], [{"role": "user"}]])
def test_a_fork_wants_no_transcript_not_even_an_empty_one(store: Store, messages: Any) -> None:
    source(store)
    store.save("dst", messages)
    lease = store.acquire("dst")
    unchanged(
        store,
        "FORK_DESTINATION_NOT_EMPTY",
        lambda: store.fork(("src", "s2"), ("dst", "f"), lease),
        "src",
        "dst",
    )


def test_a_fork_wants_an_empty_thread_and_a_new_id(store: Store) -> None:
    source(store)
    lease = store.grow("dst", "d", lease=store.acquire("dst"))
    full = lambda: store.fork(("src", "s2"), ("dst", "f"), lease)  # noqa: E731
    unchanged(store, "FORK_DESTINATION_NOT_EMPTY", full, "src", "dst")
    fresh = store.acquire("fresh")
    for taken in ("d", "s1", "s2"):
        unchanged(
            store,
            "FORK_DESTINATION_NOT_EMPTY",
            lambda taken=taken: store.fork(("src", "s2"), ("fresh", taken), fresh),  # type: ignore[misc]
            "src",
            "dst",
            "fresh",
        )


def test_a_fork_wants_a_finite_time(store: Store) -> None:
    source(store)
    lease = store.acquire("dst")
    for created in (None, "x", True):
        refused(
            "INVALID_ENTRY",
            lambda created=created: store.fork(("src", "s2"), ("dst", "f"), lease, created),  # type: ignore[misc]
        )
    # Before the threads are compared.
    mine = store.acquire("src")
    refused("INVALID_ENTRY", lambda: store.fork(("src", "s2"), ("src", "f"), mine, None))


def test_a_sources_lease_does_not_matter(store: Store) -> None:
    source(store)
    store.acquire("src")
    made = store.fork(("src", "s2"), ("dst", "f"), store.acquire("dst"))
    assert store.head("dst") == made["id"] == "f"


def test_two_forks_race_and_one_wins(store: Store) -> None:
    source(store)
    lease = store.acquire("dst")
    found: list[str] = []

    def run(number: int) -> None:
        mine = store.again()
        try:
            mine.fork(("src", "s2"), ("dst", f"f{number}"), lease)
            found.append("won")
        except Refused as exc:
            found.append(exc.code)
        finally:
            mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert sorted(found) == ["FORK_DESTINATION_NOT_EMPTY"] * 3 + ["won"]
    assert len(store.ids("dst")) == 1
    assert store.counts() == {key("x"): 2, key("p", "artifacts"): 2}


def test_appends_race_and_the_chain_is_whole(store: Store) -> None:
    lease = store.acquire()
    found: list[str] = []
    refusals: set[str] = set()

    def run(number: int) -> None:
        mine = store.again()
        for turn in range(5):
            name = f"{number}.{turn}"
            head = mine.head()
            try:
                mine.append(checkpoint(name, parent=head, files=[file("x")]), head, lease)
                found.append(name)
            except Refused as exc:
                refusals.add(exc.code)
        mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert refusals <= {"STALE_HEAD"}
    assert sorted(store.ids()) == sorted(found)
    assert store.counts() == {key("x"): len(found)}
    at, chain = store.head(), []
    while at is not None:
        chain.append(at)
        at = store.get(at)["parentCheckpointId"]
    assert sorted(chain) == sorted(found)


def test_acquires_race_and_one_wins(store: Store) -> None:
    won: list[Json] = []
    lost: list[str] = []

    def run() -> None:
        mine = store.again()
        try:
            won.append(mine.acquire())
        except Refused as exc:
            lost.append(exc.code)
        mine.close()

    threads = [threading.Thread(target=run) for _ in range(5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(won) == 1
    assert lost == ["WRITER_CONFLICT"] * 4


# -- transcripts and instances -------------------------------------------------------------------------


def test_a_transcript_is_replaced_whole(store: Store) -> None:
    assert store.save("t", [{"a": 1}, {"b": 2}]) is None
    assert store.load("t") == [{"a": 1}, {"b": 2}]
    store.save("t", [])
    assert store.load("t") == []
    wrong: list[Any] = [None, {}, "x"]
    for bad in wrong:
        refused("INVALID_ENTRY", lambda bad=bad: store.save("t", bad))  # type: ignore[misc]
    assert store.head() is None


INSTANCE = {
    "key": "k",
    "provider": "some",
    "providerSandboxId": "sb-1",
    "latestSnapshotId": "snap",
    "latestRunId": "run",
    "threadId": "t",
    "updatedAt": 1_700_000_000_123,
}


def test_instances_come_back_whole_and_missing_ones_are_null(store: Store) -> None:
    assert store.call("instances.get", {"key": "k"}) is None
    assert store.call("instances.upsert", {"record": INSTANCE}) is None
    assert store.call("instances.get", {"key": "k"}) == INSTANCE


def test_an_instances_optional_fields_are_absent_never_null(store: Store) -> None:
    short = {k: v for k, v in INSTANCE.items() if not k.startswith("latest")}
    store.call("instances.upsert", {"record": {**short, "latestRunId": None}})
    assert store.call("instances.get", {"key": "k"}) == short


def test_an_upsert_replaces_and_clears(store: Store) -> None:
    store.call("instances.upsert", {"record": INSTANCE})
    other = {
        "key": "k",
        "provider": "p",
        "providerSandboxId": "sb-2",
        "threadId": "u",
        "updatedAt": 0,
        "new": [1],
    }
    store.call("instances.upsert", {"record": other})
    assert store.call("instances.get", {"key": "k"}) == other


def test_instances_are_apart_by_key_and_filesystem(store: Store, contract_server: Server) -> None:
    elsewhere = Store(contract_server)
    for name in ("k", "K", "k\0", EMOJI):
        store.call("instances.upsert", {"record": {**INSTANCE, "key": name}})
    elsewhere.call("instances.upsert", {"record": {**INSTANCE, "provider": "elsewhere"}})
    store.call("instances.delete", {"key": "K"})
    assert store.call("instances.get", {"key": "K"}) is None
    for name in ("k", "k\0", EMOJI):
        assert store.call("instances.get", {"key": name}) == {**INSTANCE, "key": name}
    elsewhere.close()


def test_deleting_a_missing_instance_is_no_error(store: Store) -> None:
    assert store.call("instances.delete", {"key": "never"}) is None
    store.call("instances.upsert", {"record": INSTANCE})
    assert store.call("instances.delete", {"key": "k"}) is None
    assert store.call("instances.delete", {"key": "k"}) is None
    assert store.call("instances.get", {"key": "k"}) is None


@pytest.mark.parametrize("record", [None, "x", [], 5])
def test_an_instance_is_an_object(store: Store, record: Any) -> None:
    refused("INVALID_ENTRY", lambda: store.call("instances.upsert", {"record": record}))


# -- HTTP ----------------------------------------------------------------------------------------------


def test_the_filesystems_own_thread_is_not_for_hosts(store: Store) -> None:
    own = f"fsd:{store.fs.id}"
    ghost = {"threadId": own, "ownerToken": "x", "fence": 1}
    refused("INVALID_ID", lambda: store.acquire(own))
    refused("INVALID_ID", lambda: store.append(checkpoint("a", own), None, ghost))
    refused("INVALID_ID", lambda: store.save(own, []))
    refused("INVALID_ID", lambda: store.fork(("t", "a"), (own, "f"), ghost))
    refused("WRITER_LOST", lambda: store.delete_head(own, "a", ghost))
    assert store.list(own) == []
    store.grow("fsd:another", "a")
