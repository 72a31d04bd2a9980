"""Random calls of the checkpoint contract against a model in plain Python: every answer, the code of every
refusal, and after each step all that can be read. Few ids and a clock that jumps, so that they collide."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.contract import artifact, checkpoint, file, key_for
from support.postgres import database_of

from fsd.host.seam import Host
from fsd.model.errors import CheckpointError, Conflict
from fsd.service.access import ADMIN_GRANT
from fsd.service.audit import audit
from fsd.service.open import Service, ServiceOptions, open_service
from fsd.service.threads import check_terms, store_terms

DURATION = 100
IDS = ["a", "b", "c", "d", "e", "é", "\uff5e", "\U0001f600"]
THREADS = ["t", "u", "v", "w"]
CONTENTS = [b"one", b"two", b"three"]
CALLS = [
    *("acquire", "acquire", "acquire", "renew", "release"),
    *("append", "append", "append", "append", "append", "append"),
    *("delete_head", "prune", "fork", "fork", "save"),
    *("put", "put", "touch", "sweep", "delete", "wait", "wait"),
]
Json = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms * 1_000_000


@dataclass
class Kept:
    """A checkpoint of the model; its parent is the very one, not an id."""

    record: Json
    parent: Kept | None
    gone: bool = False

    @property
    def keys(self) -> set[str]:
        made = {entry["blobKey"] for entry in self.record["files"]}
        return made | {one["blobKey"] for one in self.record["artifacts"]}


@dataclass
class Thread:
    head: Kept | None = None
    fence: int = 0
    lease: Json | None = None
    expires: int = 0
    messages: list[Any] | None = None


class Refusal(Exception):
    """What the model refuses: the code without its prefix."""


@dataclass
class Model:
    clock: Clock
    threads: dict[str, Thread] = field(default_factory=lambda: {name: Thread() for name in THREADS})
    kept: list[Kept] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def find(self, name: str) -> Kept | None:
        return next((one for one in self.kept if one.record["id"] == name), None)

    def own(self, thread: str, writer: Json) -> Thread:
        mine = self.threads[writer["threadId"]]
        if writer["threadId"] != thread or mine.lease is None or mine.expires <= self.clock.ms:
            raise Refusal("WRITER_LOST")
        if any(mine.lease[name] != writer[name] for name in ("ownerToken", "fence")):
            raise Refusal("WRITER_LOST")
        return mine

    def chain(self, mine: Thread) -> list[Kept]:
        made, at = [], mine.head
        while at is not None and not at.gone:
            made.append(at)
            at = at.parent
        return made

    def drop(self, some: list[Kept]) -> None:
        for one in some:
            one.gone = True
            self.kept.remove(one)

    # Each answers as the service does, or raises.

    def acquire(self, thread: str, made: Callable[[], Json]) -> Json:
        mine = self.threads[thread]
        if mine.lease is not None and mine.expires > self.clock.ms:
            raise Refusal("WRITER_CONFLICT")
        lease = made()
        mine.fence += 1
        assert lease["fence"] == mine.fence
        assert lease["expiresAt"] == self.clock.ms + DURATION
        mine.lease, mine.expires = lease, self.clock.ms + DURATION
        return lease

    def renew(self, writer: Json) -> Json:
        mine = self.own(writer["threadId"], writer)
        mine.expires = self.clock.ms + DURATION
        return {"expiresAt": mine.expires}

    def release(self, writer: Json) -> None:
        mine = self.threads[writer["threadId"]]
        if mine.lease is not None and mine.lease["ownerToken"] == writer["ownerToken"]:
            mine.lease = None

    def append(self, record: Json, expected: str | None, writer: Json) -> Json:
        mine = self.own(record["threadId"], writer)
        if self.find(record["id"]):
            raise Refusal("DUPLICATE_ID")
        head = None if mine.head is None else mine.head.record["id"]
        if head != expected:
            raise Refusal("STALE_HEAD")
        if record["parentCheckpointId"] != expected:
            raise Refusal("PARENT_MISMATCH")
        mine.head = Kept(record, mine.head)
        self.kept.append(mine.head)
        return {"headId": record["id"]}

    def delete_head(self, thread: str, name: str, writer: Json) -> None:
        mine = self.own(thread, writer)
        if mine.head is None or mine.head.record["id"] != name:
            raise Refusal("NOT_HEAD")
        old, parent = mine.head, mine.head.parent
        mine.head = None if parent is None or parent.gone else parent
        self.drop([old])

    def prune(self, thread: str, keep: int, writer: Json) -> Json:
        doomed = self.chain(self.own(thread, writer))[keep:]
        self.drop(doomed)
        return {"deleted": [one.record["id"] for one in reversed(doomed)]}

    def fork(self, source: tuple[str, str], target: tuple[str, str], writer: Json) -> Json:
        if source[0] == target[0]:
            raise Refusal("FORK_SOURCE_THREAD_MISMATCH")
        there = self.find(source[1])
        if there is None:
            raise Refusal("FORK_SOURCE_NOT_FOUND")
        if there.record["threadId"] != source[0]:
            raise Refusal("FORK_SOURCE_THREAD_MISMATCH")
        mine = self.own(target[0], writer)
        used = any(one.record["threadId"] == target[0] for one in self.kept)
        if used or mine.messages is not None or self.find(target[1]):
            raise Refusal("FORK_DESTINATION_NOT_EMPTY")
        kept = ("files", "conversation", "artifacts")
        record = {
            **{name: there.record[name] for name in kept},
            "id": target[1],
            "threadId": target[0],
            "parentCheckpointId": None,
            "createdAt": 7,
            "reason": "fork-root",
        }
        mine.head = Kept(record, None)
        self.kept.append(mine.head)
        mine.messages = record["conversation"]
        return record

    def counts(self) -> dict[str, int]:
        made: dict[str, int] = {}
        for one in self.kept:
            for name in one.keys:
                made[name] = made.get(name, 0) + 1
        return made

    def sweep(self, older: int) -> list[str]:
        counted = self.counts()
        gone = [n for n, at in self.names.items() if n not in counted and self.clock.ms - at > older]
        for name in gone:
            del self.names[name]
        return sorted(gone)

    def delete(self, name: str) -> None:
        if name in self.counts():
            raise Refusal("conflict")
        self.names.pop(name, None)


class World:
    """The service and the model, step by step."""

    def __init__(self, service: Service, clock: Clock, seed: int) -> None:
        self.service, self.clock, self.rng = service, clock, random.Random(seed)
        made = service.db.write(lambda tx: service.filesystems.create(tx, "random", []))
        self.fs = service.filesystems.get(made["file_system_id"])
        terms = check_terms(DURATION, 25)
        assert terms is not None
        service.db.write(lambda tx: store_terms(tx, self.fs, terms))
        self.model = Model(clock)
        self.writers = [{"threadId": name, "ownerToken": "none", "fence": 1} for name in THREADS]
        self.done: dict[str, int] = {}

    def run(self, part: str, method: str, body: Json) -> Any:
        effect = getattr(getattr(self.service, part), method)(self.fs, ADMIN_GRANT, body)
        return json.loads(self.service.db.write(effect))

    def step(self) -> None:
        name = self.rng.choice(CALLS)
        outcome = getattr(self, f"do_{name}")()
        self.done[f"{name} {outcome}"] = self.done.get(f"{name} {outcome}", 0) + 1
        self.compare()

    def both(self, wanted: Callable[[], Any], call: Callable[[], Any]) -> str:
        """Both answer the same, or refuse with the same code."""
        try:
            expected: Any = wanted()
        except Refusal as no:
            code = str(no)
        else:
            assert call() == expected
            return "done"
        with pytest.raises((CheckpointError, Conflict)) as caught:
            call()
        assert caught.value.code.removeprefix("SANDBOX_SNAPSHOT_") == code
        return code

    def writer(self, thread: str) -> Json:
        """Mostly the thread's newest; now and then an old one or another's."""
        mine = [one for one in self.writers if one["threadId"] == thread]
        return mine[-1] if self.rng.random() < 0.85 else self.rng.choice(self.writers)

    def do_wait(self) -> None:
        self.clock.ms += self.rng.choice([1, 5, 20, 100])

    def do_acquire(self, thread: str = "") -> str:
        thread = thread or self.rng.choice(THREADS)
        body = {"threadId": thread}
        try:
            lease = self.model.acquire(thread, lambda: self.run("threads", "acquire", body))
        except Refusal:
            with pytest.raises(CheckpointError, match="another writer"):
                self.run("threads", "acquire", body)
            return "refused"
        self.writers.append({name: lease[name] for name in ("threadId", "ownerToken", "fence")})
        return "done"

    def do_renew(self) -> str:
        writer = self.writer(self.rng.choice(THREADS))
        return self.both(
            lambda: self.model.renew(writer), lambda: self.run("threads", "renew", {"writer": writer})
        )

    def do_release(self) -> str:
        writer = self.writer(self.rng.choice(THREADS))
        return self.both(
            lambda: self.model.release(writer), lambda: self.run("threads", "release", {"writer": writer})
        )

    def do_append(self) -> str:
        thread, rng = self.rng.choice(THREADS), self.rng
        head = self.model.threads[thread].head
        expected = None if head is None else head.record["id"]
        if rng.random() < 0.1:
            expected = rng.choice([None, *IDS])
        parent = expected if rng.random() < 0.8 else rng.choice([None, *IDS])
        files = [file(f"f{at}", key_for(data)) for at, data in enumerate(rng.choices(CONTENTS, k=2))]
        record = checkpoint(
            rng.choice(IDS),
            thread,
            parent,
            createdAt=rng.choice([1, 2.5, 3]),
            files=files[: rng.randrange(3)],
            artifacts=[artifact("p")] if rng.random() < 0.3 else [],
        )
        writer = self.writer(thread)
        body = {"checkpoint": record, "expectedHeadId": expected, "writer": writer}
        return self.both(
            lambda: self.model.append(record, expected, writer),
            lambda: self.run("manifests", "append", body),
        )

    def do_delete_head(self) -> str:
        thread = self.rng.choice(THREADS)
        head = self.model.threads[thread].head
        name = head.record["id"] if head is not None and self.rng.random() < 0.8 else self.rng.choice(IDS)
        writer = self.writer(thread)
        body = {"threadId": thread, "checkpointId": name, "writer": writer}
        return self.both(
            lambda: self.model.delete_head(thread, name, writer),
            lambda: self.run("manifests", "delete_head", body),
        )

    def do_prune(self) -> str:
        thread, keep = self.rng.choice(THREADS), self.rng.randrange(1, 4)
        writer = self.writer(thread)
        body = {"threadId": thread, "keep": keep, "writer": writer}
        return self.both(
            lambda: self.model.prune(thread, keep, writer),
            lambda: self.run("manifests", "delete_checkpoints", body),
        )

    def do_fork(self) -> str:
        rng = self.rng
        there = rng.choice(self.model.kept) if self.model.kept else None
        source = (rng.choice(THREADS), rng.choice(IDS))
        if there is not None and rng.random() < 0.8:
            source = (there.record["threadId"], there.record["id"])
        empty = [n for n, one in self.model.threads.items() if one.head is None and one.messages is None]
        target = (rng.choice(empty if empty and rng.random() < 0.8 else THREADS), rng.choice(IDS))
        if rng.random() < 0.5:
            self.do_acquire(target[0])
        writer = self.writer(target[0])
        body = {
            "sourceThreadId": source[0],
            "sourceCheckpointId": source[1],
            "destinationThreadId": target[0],
            "destinationCheckpointId": target[1],
            "createdAt": 7,
            "writer": writer,
        }

        def call() -> Any:
            forked = self.service.manifests.fork(self.fs, ADMIN_GRANT, body)
            self.service.db.write(forked.effect)
            return json.loads(forked.record)

        return self.both(lambda: self.model.fork(source, target, writer), call)

    def do_save(self) -> str:
        if self.rng.random() < 0.85:
            return "left"  # else every thread soon has a transcript, and no fork finds an empty one
        thread, messages = self.rng.choice(THREADS), [self.rng.randrange(9)]
        self.model.threads[thread].messages = messages
        self.run("threads", "save_thread", {"threadId": thread, "messages": messages})
        return "done"

    def do_put(self) -> None:
        data = self.rng.choice(CONTENTS)
        incoming = self.service.names.begin(self.fs, key_for(data))
        incoming.add([data])
        _, new = self.service.names.put(self.fs, ADMIN_GRANT, incoming)
        assert new == (key_for(data) not in self.model.names)
        self.model.names[key_for(data)] = self.clock.ms

    def do_touch(self) -> None:
        name = key_for(self.rng.choice(CONTENTS))
        found = self.service.names.touch(self.fs, ADMIN_GRANT, name)
        assert (found is not None) == (name in self.model.names)
        if found is not None:
            self.model.names[name] = self.clock.ms

    def do_sweep(self) -> str:
        older = self.rng.choice([0, 20, 60])
        expected = self.model.sweep(older)
        assert self.service.names.sweep(self.fs, ADMIN_GRANT, {"olderThanMs": older}) == expected
        return "some" if expected else "none"

    def do_delete(self) -> str:
        name = key_for(self.rng.choice(CONTENTS))
        return self.both(
            lambda: self.model.delete(name), lambda: self.service.names.delete(self.fs, ADMIN_GRANT, name)
        )

    def compare(self) -> None:
        """All that can be read."""
        model, threads = self.model, self.service.threads
        for name, thread in model.threads.items():
            mine = [one.record for one in model.kept if one.record["threadId"] == name]
            mine.sort(key=lambda record: (record["createdAt"], record["id"].encode()))
            body = {"threadId": name}
            listed = threads.records(self.fs, body, render=False, portable=False)
            assert [json.loads(text) for text in listed] == mine
            head = None if thread.head is None else thread.head.record["id"]
            assert json.loads(threads.get_head(self.fs, body)) == head
            assert json.loads(threads.load_thread(self.fs, body)) == (thread.messages or [])
        rows = [json.loads(text) for text in threads.references(self.fs)]
        assert {row["key"]: row["references"] for row in rows} == model.counts()
        stats, _ = self.service.names.page(self.fs, "", "", 100)
        assert {stat.key: stat.uploaded // 1_000_000 for stat in stats} == model.names


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Service, Clock]]:
    clock = Clock()
    service = open_service(
        ServiceOptions(tmp_path, database=database_of(request)), replace(Host(), wall_ns=clock)
    )
    service.tokens.announce({"local": "http://127.0.0.1:1"}, b"k" * 32)
    yield service, clock
    service.close()


def test_random_calls_answer_as_the_model_does(opened: tuple[Service, Clock], seed: int, turn: int) -> None:
    service, clock = opened
    done: dict[str, int] = {}
    for number in range(6):  # filesystems, since no thread is ever empty again
        world = World(service, clock, seed * 1000 + turn * 10 + number)
        for _ in range(180):
            world.step()
        assert audit(service.db, world.fs) == []
        for name, count in world.done.items():
            done[name] = done.get(name, 0) + count
    wanted = {"append done", "append WRITER_LOST", "append DUPLICATE_ID", "delete_head done", "fork done"}
    assert not wanted - done.keys(), f"never happened: {wanted - done.keys()}"
