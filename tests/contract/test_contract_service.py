"""The service behind the checkpoint contract on both engines, without HTTP: what a host cannot see."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from support.bench import Bench
from support.contract import artifact, checkpoint, file, key, key_for, writer

from fsd.client.policy import Policy
from fsd.client.policy import of_record as policy_of
from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import (
    CheckpointError,
    CheckpointInvalidId,
    CheckpointNotFound,
    ForkSourceThreadMismatch,
    IntegrityError,
    NotFound,
    TooLarge,
)
from fsd.model.limits import BLOCK, SWEEP_NAMES
from fsd.service import names, records, repair
from fsd.service.access import ADMIN_GRANT
from fsd.service.audit import audit
from fsd.service.contract_check import FILES, check_files, name_of
from fsd.service.native import Ask
from fsd.wire.frame import make_blob

Json = dict[str, Any]


class Host:
    """The contract's methods on a bench's filesystem."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.service, self.fs = bench, bench.service, bench.fs

    def run(self, part: str, method: str, body: Json) -> Any:
        effect = getattr(getattr(self.service, part), method)(self.fs, ADMIN_GRANT, body)
        return json.loads(self.service.db.write(effect))

    def acquire(self, thread: str = "t") -> Json:
        lease: Json = self.run("threads", "acquire", {"threadId": thread})
        return lease

    def append(self, record: Json, expected: str | None, lease: Json) -> Any:
        body = {"checkpoint": record, "expectedHeadId": expected, "writer": writer(lease)}
        return self.run("manifests", "append", body)

    def get(self, name: str) -> Any:
        return json.loads(self.service.threads.get(self.fs, {"id": name}, portable=False))

    def list(self, thread: str, *, render: bool = False) -> list[Any]:
        body = {"threadId": thread}
        found = self.service.threads.records(self.fs, body, render=render, portable=False)
        return [json.loads(text) for text in found]

    def counts(self) -> dict[str, int]:
        rows = map(json.loads, self.service.threads.references(self.fs))
        return {row["key"]: row["references"] for row in rows}

    def put(self, data: bytes) -> str:
        incoming = self.service.names.begin(self.fs, key_for(data))
        incoming.add([data])
        self.service.names.put(self.fs, ADMIN_GRANT, incoming)
        return key_for(data)

    def blob(self, name: str) -> bytes:
        reading = self.service.names.open(self.fs, name)
        assert reading is not None
        return b"".join(iter(reading.next_piece, b""))

    def parts(self, name: str) -> bytes:
        """The stored blocks of a name."""
        sql = "SELECT parts FROM blob_name WHERE fs=? AND name=?"
        row = self.service.db.read(lambda tx: tx.one(sql, (self.fs.id, name_of(name))))
        assert row is not None
        found: bytes = row[0]
        return found

    def fork(self, source: tuple[str, str], target: tuple[str, str]) -> Any:
        body = {
            "sourceThreadId": source[0],
            "sourceCheckpointId": source[1],
            "destinationThreadId": target[0],
            "destinationCheckpointId": target[1],
            "createdAt": 7,
            "writer": writer(self.acquire(target[0])),
        }
        forked = self.service.manifests.fork(self.fs, ADMIN_GRANT, body)
        assert json.loads(self.service.db.write(forked.effect)) == {"checkpoint": target[1]}
        return json.loads(forked.record)

    def sql(self, text: str, *params: object) -> None:
        self.service.db.write(lambda tx: tx.execute(text, params))


@pytest.fixture
def host(bench: Bench) -> Host:
    return Host(bench)


def native(host: Host, label: str | None = None) -> str:
    """Keep the present state; its id."""
    made = host.service.db.write(
        lambda tx: host.service.checkpoints.make(tx, host.fs, None, Ask(label=label))
    )
    name: str = made["checkpoint_id"]
    return name


def test_a_native_checkpoint_is_listed_short_and_read_whole(host: Host) -> None:
    mount = host.bench.mount()
    small, large = b"small", bytes(range(256)) * 8000
    below = mount.mkdir(ROOT_INO, b"a")
    mount.file(below, b"small", small)
    mount.file(below, b"large", large)
    mount.commit()
    name = native(host, "first")
    own = records.own_thread(host.fs)
    (short,) = host.list(own)
    assert short["files"] == []
    assert short["label"] == "first"
    assert short["native"]["entries"] == 3
    whole = host.get(name)
    assert {entry["path"]: entry["blobKey"] for entry in whole["files"]} == {
        "a/large": key_for(large),
        "a/small": key_for(small),
    }
    check_files(whole["files"])
    assert host.list(own, render=True) == [whole]
    assert host.counts() == {}
    assert host.blob(key_for(large)) == large


def test_a_native_checkpoint_is_forked_into_a_hosts_thread(host: Host) -> None:
    """Rendered and counted there, and independent of the tree from then on."""
    mount = host.bench.mount()
    data = bytes(range(256)) * 5000
    mount.file(mount.mkdir(ROOT_INO, b"d"), b"f", data)
    mount.commit()
    name = native(host)
    made = host.fork((records.own_thread(host.fs), name), ("t", "copy"))
    assert made["threadId"] == "t"
    assert [entry["path"] for entry in made["files"]] == ["d/f"]
    assert "native" not in made
    (listed,), _ = host.service.db.read(lambda tx: host.service.checkpoints.page(tx, host.fs, "t", None, 10))
    assert listed["entries"] == 1, "the directory is one of the state, not of the manifest"
    # It was captured whole: a restore of the copy leaves out and protects nothing.
    assert policy_of(made) == policy_of(host.get(name)) == Policy(exclude=())
    assert host.counts() == {key_for(data): 1}
    assert host.get("copy") == made
    assert json.loads(host.service.threads.load_thread(host.fs, {"threadId": "t"})) == []
    with pytest.raises(ForkSourceThreadMismatch):
        host.fork(("elsewhere", name), ("u", "copy2"))
    with pytest.raises(CheckpointInvalidId):
        host.fork(("t", "copy"), (records.own_thread(host.fs), "x"))


def test_a_sweep_of_more_than_one_step_takes_all_but_the_counted(host: Host) -> None:
    data = b"the blob they all share"
    digest = make_blob(data).hash
    host.put(data)
    many = SWEEP_NAMES * 2 + 5
    names = sorted(name_of(key(f"many {number}")) for number in range(many))
    parts = host.parts(key_for(data))

    def fill(tx: Tx) -> None:
        tx.many(
            "INSERT INTO blob_name (fs, name, size, parts, fresh) VALUES (?,?,?,?,1)",
            [(host.fs.id, name, len(data), parts) for name in names],
        )
        host.service.packs.adjust(tx, host.fs.id, {digest: many})

    host.service.db.write(fill)
    kept = [f"many {number}" for number in range(0, many, 100)]
    host.append(checkpoint("a", files=[file(mark) for mark in kept]), None, host.acquire())
    swept = host.service.names.sweep(host.fs, ADMIN_GRANT, {"olderThanMs": 3_600_000})
    assert len(swept) == many - len(kept)
    assert swept == sorted(swept)
    left, _ = host.service.names.page(host.fs, "", "", many)
    assert {stat.key for stat in left} == {key(mark) for mark in kept} | {key_for(data)}


def test_a_damaged_blob_is_told_before_its_end(host: Host) -> None:
    data = bytes(range(256)) * 20_000
    name = host.put(data)
    wrong = host.put(b"x" * BLOCK + bytes(range(256)) * 15_904)
    right, other = host.parts(name), host.parts(wrong)
    swap = "UPDATE blob_name SET parts=? WHERE fs=? AND name=?"
    host.sql(swap, other, host.fs.id, name_of(name))
    with pytest.raises(IntegrityError, match="damaged"):
        host.blob(name)
    host.sql(swap, b"\xc1", host.fs.id, name_of(name))
    with pytest.raises(IntegrityError, match="blocks"):
        host.blob(name)
    host.sql(swap, right, host.fs.id, name_of(name))
    assert host.blob(name) == data


def test_pruning_leaves_what_is_off_the_chain(host: Host) -> None:
    """No call makes such a record today; the contract knows them."""
    lease, head = host.acquire(), None
    for name in ("a", "b", "c"):
        host.append(checkpoint(name, parent=head, files=[file(name)]), head, lease)
        head = name
    host.sql("UPDATE thread SET head=? WHERE fs=?", records.key_of("a"), host.fs.id)
    host.append(checkpoint("d", parent="a", files=[file("d")]), "a", lease)
    body = {"threadId": "t", "keep": 1, "writer": writer(lease)}
    assert host.run("manifests", "delete_checkpoints", body) == {"deleted": ["a"]}
    assert [record["id"] for record in host.list("t")] == ["b", "c", "d"]
    assert host.counts() == {key(name): 1 for name in ("b", "c", "d")}


def test_a_blob_has_a_bound(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "CONTRACT_BLOB_MAX", 10)
    assert host.put(b"x" * 10)
    incoming = host.service.names.begin(host.fs, key_for(b"x" * 11))
    incoming.add([b"x" * 6])
    with pytest.raises(TooLarge):
        incoming.add([b"x" * 3, b"x" * 2])


def test_a_blob_deleted_while_it_is_read_is_no_damage(host: Host) -> None:
    data = hashlib.sha256(b"").digest() * (BLOCK // 32) * 6
    name = host.put(data)
    reading = host.service.names.open(host.fs, name)
    assert reading is not None
    host.service.names.delete(host.fs, ADMIN_GRANT, name)
    host.sql("DELETE FROM blob WHERE fs=?", host.fs.id)  # as the sweep of blobs will
    with pytest.raises(NotFound, match="deleted"):
        reading.next_piece()


def test_what_a_checkpoint_names_and_is_not_stored_can_be_listed(host: Host) -> None:
    there = host.put(b"there")
    files = [file("a", there), file("b", key("b")), file("c", key("b"))]
    host.append(checkpoint("a", files=files, artifacts=[artifact("p")]), None, host.acquire())

    missing = host.service.names.missing(host.fs, {"id": "a"})
    assert missing == sorted([key("b"), key("p", "artifacts")])
    with pytest.raises(CheckpointNotFound):
        host.service.names.missing(host.fs, {"id": "b"})


def test_a_deleted_filesystem_leaves_no_row(host: Host) -> None:
    host.put(b"x")
    host.append(checkpoint("a", files=[file("f")]), None, host.acquire())
    host.run("threads", "save_thread", {"threadId": "t", "messages": []})
    host.run("instances", "upsert", {"record": {"key": "k"}})
    native(host)
    fs, service = host.fs, host.service
    host.bench.new_fs()
    service.db.write(lambda tx: service.filesystems.delete(tx, fs.name))
    while service.filesystems.collect():
        continue
    for table in (
        "thread",
        "checkpoint",
        "named",
        "blob_name",
        "transcript",
        "instance",
        "lease_terms",
        "pin",
    ):
        rows = service.db.read(lambda tx, t=table: tx.all(f"SELECT 1 FROM {t} WHERE fs=?", (fs.id,)))  # type: ignore[misc]
        assert rows == [], table
    with pytest.raises(CheckpointError):
        host.run("threads", "renew", {"writer": None})
    with pytest.raises(NotFound):
        host.acquire("again")


DAMAGE = {
    "a head that is none": ("UPDATE thread SET head=? WHERE fs=?", b"\0" * 32, "thread"),
    "a count too many": (
        "INSERT INTO named (fs, name, checkpoint) SELECT fs, ?, num FROM checkpoint WHERE fs=?",
        b"\1" * 33,
        "counted",
    ),
    "a count too few": ("DELETE FROM named WHERE name>? AND fs=?", b"", "counted"),
    "entries that are not there": ("UPDATE checkpoint SET entries=? WHERE fs=?", 9, "record"),
    "another parent": ("UPDATE checkpoint SET parent=? WHERE fs=?", b"\0" * 32, "record"),
    "a record that cannot be read": ("UPDATE checkpoint SET body=? WHERE fs=?", b"\0", "record"),
    "a thread that is none": ("DELETE FROM thread WHERE key>? AND fs=?", b"", "thread"),
    "a name of other blocks": ("UPDATE blob_name SET parts=? WHERE fs=?", b"\x90", "blob before name"),
    "a name that cannot be read": ("UPDATE blob_name SET parts=? WHERE fs=?", b"\xc1", "blob before name"),
    "a longer name": ("UPDATE blob_name SET size=? WHERE fs=?", 5 * BLOCK, "blob before name"),
    "a name gone by itself": ("DELETE FROM blob_name WHERE name>? AND fs=?", b"", "counted"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_the_audit_finds(service: Bench, damage: str) -> None:
    service.new_fs()
    host = Host(service)
    host.put(b"content")
    host.append(checkpoint("a", files=[file("f")], artifacts=[artifact("p")]), None, host.acquire())
    assert audit(service.service.db, host.fs) == []
    text, value, rule = DAMAGE[damage]
    host.sql(text, value, host.fs.id)
    found = audit(service.service.db, host.fs)
    service.new_fs()  # which the module's end audits
    assert rule in {one.rule for one in found}, found


def test_a_repair_makes_the_counts_follow_the_records(service: Bench) -> None:
    service.new_fs()
    host, db, store = Host(service), service.service.db, service.service.store
    lease = host.acquire()
    host.append(checkpoint("a", files=[file("f"), file("g")], artifacts=[artifact("p")]), None, lease)
    host.append(checkpoint("b", parent="a", files=[file("f")]), "a", lease)
    right = host.counts()
    host.sql("DELETE FROM named WHERE fs=? AND name=?", host.fs.id, name_of(key("f")))
    host.sql(
        "INSERT INTO named (fs, name, checkpoint) SELECT fs, ?, num FROM checkpoint WHERE fs=?",
        b"\1" * 33,
        host.fs.id,
    )
    host.sql("INSERT INTO named (fs, name, checkpoint) VALUES (?,?,?)", host.fs.id, b"\1" * 33, 10**9)
    host.sql("UPDATE checkpoint SET entries=3 WHERE fs=? AND entries=2", host.fs.id)
    planned = repair.plan(db, store, host.fs)
    assert [step.rule for step in planned.steps] == ["record", *["counted"] * 3]
    assert audit(db, host.fs) != []
    assert repair.execute(db, store, host.fs, planned.plan).left == []
    assert host.counts() == right


def test_keys_are_33_bytes_that_sort_as_their_text() -> None:
    texts = [key(str(n), kind) for n in range(50) for kind in ("files", "artifacts")]
    assert [name_of(text) for text in sorted(texts)] == sorted(name_of(text) for text in texts)
    assert name_of(FILES + "ab" * 32) == b"\1" + b"\xab" * 32
