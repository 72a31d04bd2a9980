"""Control plane, idempotency keys and journals on both engines, without HTTP; two replicas on PostgreSQL."""

from __future__ import annotations

import base64
import json
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.postgres import PostgresServer, database_of
from support.server import Server
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.errors import Conflict, IdempotencyMismatch, NotAuthenticated, NotFound, UsageError
from fsd.model.limits import BLOCK, IDEMPOTENCY_KEEP, PACK_INLINE_MAX, READ_BLOCKS, TOKEN_RECALL
from fsd.model.ops import CREATE, Create
from fsd.model.times import NS
from fsd.server.app import _heads
from fsd.service import evidence, filesystems
from fsd.service.access import ACTIVE, DISABLED, FsRef, Grant, hold
from fsd.service.entries import Envelope, check_entries
from fsd.service.evidence import Search
from fsd.service.idempotency import Answer, Call
from fsd.service.journals import Append
from fsd.service.open import Service, ServiceOptions, open_service
from fsd.service.paths import Put
from fsd.service.retained import state_of
from fsd.service.sessions import SessionInfo
from fsd.service.tokens import token_key
from fsd.service.tree import resolve
from fsd.service.upload import Reading, Uploading
from fsd.wire.frame import Blob, make_blob
from fsd.wire.messages import make_commit
from fsd.wire.strictjson import dumps, loads

WHO = Grant("admin", "worker", "admin")
ENVELOPE = Envelope("agent", "t", "agent:w", (("k", "v"),))


def _cursor(observed: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps([observed, "j", 1]).encode()).decode()


class Clock:
    """A wall clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_800_000_000 * 10**9

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = open_service(
        ServiceOptions(tmp_path, database=database_of(request)), replace(Host(), wall_ns=clock)
    )
    made.tokens.announce({"r1": "http://127.0.0.1:1", "r2": "http://127.0.0.1:2"}, b"master key")
    yield made
    made.close()


def create(service: Service, name: str = "x") -> tuple[FsRef, str]:
    """A filesystem and its token."""
    made = service.db.write(lambda tx: service.filesystems.create(tx, name, [("a", "b")]))
    return service.filesystems.get(made["file_system_id"]), service.tokens.unseal(made)["fs_token"]


def new_journal(service: Service, fs: FsRef, name: str = "j") -> None:
    service.db.write(lambda tx: service.journals.create(tx, fs, name, ENVELOPE, WHO))


def append(service: Service, fs: FsRef, text: str, key: str = "", name: str = "j") -> dict[str, Any]:
    entries = check_entries(loads(text, "entries", exact=True))
    return service.journals.append(fs, name, Append(entries, key, None, False), WHO)


def test_filesystem_and_tokens_from_birth_to_end(service: Service, clock: Clock) -> None:
    fs, token = create(service)
    found, grant = service.tokens.authenticate(token, fs.name)
    assert found == fs and grant.kind == "owner"
    with pytest.raises(NotFound):
        service.tokens.authenticate(token, "fs_" + "b" * 20)
    made = service.db.write(lambda tx: service.tokens.create(tx, fs, "short", 60))
    short = service.tokens.unseal(made)["fs_token"]
    assert service.tokens.authenticate(short, fs.name)[1].label == "short"
    clock.now += 60 * 10**9
    with pytest.raises(NotAuthenticated, match="expired"):
        service.tokens.authenticate(short, fs.name)
    assert len(service.tokens.list(fs, include_expired=False, offset=0, limit=9)["tokens"]) == 1
    new_journal(service, fs)
    append(service, fs, '[{"type":"a"}]', "k")
    kept, _ = create(service, "kept")
    service.db.write(lambda tx: service.filesystems.delete(tx, fs.name))
    with pytest.raises(NotFound):
        service.tokens.authenticate(token, fs.name)
    for _ in range(100):
        if not service.filesystems.collect():
            break
    else:
        raise AssertionError("a deleted filesystem is never gone")
    for table in ("fs", "inode", "token"):
        assert service.db.read(lambda tx, t=table: tx.one(f"SELECT count(*) FROM {t}")) == (1,)  # type: ignore[misc]
    for table in ("journal", "journal_entry", "journal_append"):
        assert service.db.read(lambda tx, t=table: tx.one(f"SELECT count(*) FROM {t}")) == (0,)  # type: ignore[misc]
    assert service.filesystems.check(kept)["status"] == "ok"


def gone(service: Service, fs: FsRef) -> None:
    """Delete the filesystem and remove all that can be removed of it."""
    service.db.write(lambda tx: service.filesystems.delete(tx, fs.name))
    for _ in range(100):
        if not service.filesystems.collect():
            return
    raise AssertionError("a deleted filesystem is never gone")


def noise(number: int) -> Blob:
    """A blob too large for an inline pack."""
    return make_blob(random.Random(number).randbytes(PACK_INLINE_MAX + 1))


def test_requests_that_a_deletion_overtook_leave_nothing(service: Service) -> None:
    """Their token was good when they began; the rest of them runs when everything is gone already."""
    fs, _ = create(service)
    service.packs.store(fs.id, fs.name, [noise(1)])
    began = service.sessions.start(fs, SessionInfo("m", "h", "/m", "/", False, "1"))
    gone(service, fs)
    commit = make_commit(began.session, began.ticket, [], (0, 0, 0), [noise(2)])
    late: list[Callable[[], object]] = [
        lambda: service.packs.store(fs.id, fs.name, [noise(3)]),
        lambda: service.packs.store(fs.id, fs.name, [make_blob(b"small")]),
        lambda: service.commits.commit(fs, commit, WHO),
        lambda: service.sessions.start(fs, SessionInfo("m", "h", "/m", "/", False, "1")),
        lambda: service.db.write(lambda tx: service.tokens.create(tx, fs, "late", None)),
        lambda: new_journal(service, fs),
        lambda: service.feed.read(fs, 0),
        lambda: service.namespace.ask(fs, (("attrs", (1,)),)),
    ]
    for request in late:
        with pytest.raises(NotFound):
            request()
    assert list(service.store.list("packs/")) == []
    for table in ("fs", "pack", "blob", "session", "token", "journal"):
        left = service.db.read(lambda tx, t=table: tx.all(f"SELECT * FROM {t}"))  # type: ignore[misc]
        assert not [row for row in left if table != "session" or row[1] == fs.id], table


def test_a_file_read_while_its_filesystem_goes_is_not_found(service: Service) -> None:
    fs, _ = create(service)
    uploading = Uploading(service.packs, fs)
    uploading.add([random.Random(1).randbytes(6 * BLOCK)])
    put, content = Put((b"f",)), uploading.finish()
    service.db.write(lambda tx: service.paths.execute(tx, fs, service.paths.put(tx, fs, put, content, None)))

    def opened(tx: Tx) -> Reading:
        attr = resolve(tx, fs.id, (b"f",)).need()
        return Reading.open(tx, service.db, service.packs, fs, state_of(tx, fs), attr, 0, attr.size)

    reading = service.db.read(opened)
    assert len(reading.next_piece()) == READ_BLOCKS * BLOCK
    gone(service, fs)
    with pytest.raises(NotFound):
        reading.next_piece()


def test_packs_that_a_fork_reads_outlive_their_filesystem(service: Service) -> None:
    parent, _ = create(service)
    fork, _ = create(service)
    kept, lost = noise(1), noise(2)
    service.packs.store(parent.id, parent.name, [kept])
    service.packs.store(parent.id, parent.name, [lost])
    copy = (
        "INSERT INTO blob (fs, hash, pack, off, raw_len, stored_len, codec, refs, fresh) "
        "SELECT CAST(? AS BIGINT), hash, pack, off, raw_len, stored_len, codec, 0, fresh FROM blob "
        "WHERE hash=?"
    )
    service.db.write(lambda tx: tx.execute(copy, (fork.id, kept.hash)))
    gone(service, parent)
    assert service.packs.read(fork.id, [kept.hash]) == {kept.hash: kept}
    assert len(list(service.store.list("packs/"))) == 1
    gone(service, create(service)[0])  # what is kept does not stand before others
    assert service.filesystems.list(display_name=None, label=None, after="", limit=9)["file_systems"]
    with pytest.raises(NotFound):
        service.filesystems.get(parent.name)


@pytest.mark.parametrize("how", ["disabled", "deleted"])
def test_nothing_is_durable_after_a_revocation(service: Service, how: str) -> None:
    """The requests were authenticated before it and waited for their turn since."""
    fs, token = create(service)
    _, who = service.tokens.authenticate(token, fs.name)
    new_journal(service, fs)
    info = SessionInfo("m", "h", "/m", "/", False, "1")
    began = service.sessions.start(fs, info, who)
    made = Create(1, CREATE, ROOT_INO, b"f", make_ino(began.session, 1), 0o100644, 0, 0, 0, None, 1)
    commit = make_commit(began.session, began.ticket, [made], (0, 0, 0), [])
    entries = check_entries(loads('[{"type":"a"}]', "entries", exact=True))
    if how == "disabled":
        service.db.write(lambda tx: service.tokens.set_status(tx, fs, who.token_id, DISABLED))
    else:
        service.db.write(lambda tx: service.tokens.delete(tx, fs, who.token_id))
    late: list[Callable[[], object]] = [
        lambda: service.commits.commit(fs, commit, who),
        lambda: service.commits.commit(fs, commit._replace(session=commit.session + 1), who),
        lambda: service.journals.append(fs, "j", Append(entries, "", None, False), who),
        lambda: service.db.write(lambda tx: service.journals.create(tx, fs, "k", ENVELOPE, who)),
        lambda: service.sessions.start(fs, info, who),
        lambda: service.db.write(lambda tx: hold(tx, fs, who)),
    ]
    for request in late:
        with pytest.raises(NotAuthenticated):
            request()
    assert service.feed.head(fs) == 0 and service.journals.head_seq(fs, "j") == 0
    assert len(service.sessions.list(fs, 9)) == 1


def test_a_token_of_another_admin_key_is_not_shown_wrong(service: Service) -> None:
    """Its answer was kept under an idempotency key; another replica is asked for it again."""
    made = service.db.write(lambda tx: service.filesystems.create(tx, "x", []))
    token = service.tokens.unseal(made)["fs_token"]
    service.tokens.announce({"r1": "http://127.0.0.1:1"}, b"the key of another replica")
    with pytest.raises(Conflict, match="another admin key"):
        service.tokens.unseal(made)
    service.tokens.announce({"r1": "http://127.0.0.1:1"}, b"master key")
    assert service.tokens.unseal(made)["fs_token"].rpartition(".")[2] == token.rpartition(".")[2]


def test_heads_of_everything_waited_for(service: Service) -> None:
    one, _ = create(service)
    two, _ = create(service)
    new_journal(service, two)
    append(service, two, '[{"type":"a"}]')
    subjects: list[Hashable] = [
        ("fs", one.id),
        ("fs", 10**9),
        ("journal", two.id, "j"),
        ("journal", two.id, "x"),
    ]
    assert _heads(service, subjects) == dict(zip(subjects, (0, -1, 2, -1)))
    many: list[Hashable] = [("fs", n) for n in range(1500)] + [("journal", n, "j") for n in range(1500)]
    assert len(_heads(service, many)) == 3000


@pytest.mark.parametrize(
    "cursor", ["x", "é", "WzEsMl0=", *(_cursor(c) for c in (2**63, -(2**63), 1.5, "x", None, float("inf")))]
)
def test_cursors_that_are_none(service: Service, cursor: str) -> None:
    fs, _ = create(service)
    with pytest.raises(UsageError, match="cursor"):
        evidence.search(service.db, fs, Search(), cursor, 10)


def test_filters_look_at_a_bounded_number_of_rows(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with nothing on it says where to go on; following it finds everything once."""
    for module, page in ((evidence, "JOURNAL_PAGE_MAX"), (filesystems, "LIST_PAGE_MAX")):
        monkeypatch.setattr(module, page, 2)
        monkeypatch.setattr(module, "LIST_SCAN_MAX", 4)
    monkeypatch.setattr(evidence, "_WALK", 2)
    fs, _ = create(service)
    rare = replace(ENVELOPE, kind="rare")
    for number in range(11):
        envelope = rare if number in (5, 9, 10) else ENVELOPE
        service.db.write(
            lambda tx, n=number, e=envelope: service.journals.create(tx, fs, f"j{n:02d}", e, WHO)  # type: ignore[misc]
        )
        append(service, fs, '[{"type":"a"}]', name=f"j{number:02d}")
        create(service, "many" if number == 9 else "x")

    def journals(cursor: str) -> tuple[list[str], str | None]:
        got = evidence.list_journals(service.db, fs, "rare", (), cursor, 10)
        return [one["journal_id"] for one in got["journals"]], got["next_cursor"]

    def entries(cursor: str) -> tuple[list[str], str | None]:
        got, following = evidence.search(service.db, fs, Search(kind="rare"), cursor, 10)
        return [json.loads(one)["journal_id"] for one in got], following

    def systems(cursor: str) -> tuple[list[str], str | None]:
        got = service.filesystems.list(display_name="many", label=None, after=cursor, limit=10)
        return [one["display_name"] for one in got["file_systems"]], got["next_cursor"]

    for pages, wanted in (
        (journals, ["j05", "j09", "j10"]),
        (entries, ["j05", "j09", "j10"]),
        (systems, ["many"]),
    ):
        found: list[str] = []
        cursor: str | None = ""
        asked = 0
        while cursor is not None:
            some, cursor = pages(cursor)
            found += some
            asked += 1
        assert sorted(found) == wanted and asked >= 3


def test_one_effect_a_key_also_when_many_come_at_once(service: Service) -> None:
    call = Call("scope", "k", b"d" * 32)

    def effect(tx: Tx) -> Answer:
        made = service.filesystems.create(tx, "raced", [])
        return Answer(201, json.dumps(made["file_system_id"]).encode())

    start = threading.Barrier(8)

    def work(_: int) -> Answer:
        start.wait(60)
        return service.db.write(lambda tx: service.idempotency.run(tx, call, effect))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(8)))
    assert len({answer.body for answer in answers}) == 1
    assert sorted(answer.replayed for answer in answers) == [False] + [True] * 7
    found = service.filesystems.list(display_name="raced", label=None, after="", limit=10)
    assert len(found["file_systems"]) == 1
    with pytest.raises(IdempotencyMismatch):
        service.db.write(lambda tx: service.idempotency.run(tx, replace(call, digest=b"e" * 32), effect))


def test_an_effect_that_fails_is_not_remembered_and_keys_expire(service: Service, clock: Clock) -> None:
    call = Call("scope", "k", b"d" * 32)

    def fail(tx: Tx) -> Answer:
        tx.execute("INSERT INTO counter (name, value) VALUES ('x', 1)")
        raise Conflict("no")

    with pytest.raises(Conflict):
        service.db.write(lambda tx: service.idempotency.run(tx, call, fail))
    assert service.db.read(lambda tx: tx.one("SELECT 1 FROM counter WHERE name='x'")) is None
    good = service.db.write(lambda tx: service.idempotency.run(tx, call, lambda tx: Answer(200, b"1")))
    assert not good.replayed
    clock.now += int(IDEMPOTENCY_KEEP * 10**9) + 1
    late = service.db.write(lambda tx: service.idempotency.run(tx, call, lambda tx: Answer(200, b"2")))
    assert late == Answer(200, b"2")
    assert service.idempotency.sweep() == 0
    clock.now += int(IDEMPOTENCY_KEEP * 10**9) + 1
    assert service.idempotency.sweep() == 1


def test_journal_keeps_text_order_and_chain(service: Service, clock: Clock) -> None:
    fs, _ = create(service)
    new_journal(service, fs)
    text = '[{"type":"a","n":1.10,"s":"\\u0000☃","status":"x\\u0000y","subjects":["f:1"]},{"type":"b"}]'
    first = append(service, fs, text, "k1")
    assert append(service, fs, text, "k1") == {**first, "idempotent": True}
    clock.now += 10**9
    append(service, fs, '[{"type":"b","actor":"human:me"}]')
    texts, following = service.journals.read(fs, "j", 0, 10)
    assert following == 3 and '"n":1.10' in texts[0]
    given = loads(text, "text", exact=True)[0]
    assert {k: v for k, v in loads(texts[0], "e", exact=True).items() if k in given} == given
    assert dumps(loads(texts[0], "e", exact=True)) == texts[0]
    result = evidence.verify(service.db, fs, "j", first["head_hash"])
    assert result["ok"] and result["entries"] == 3

    def found(**wanted: Any) -> list[int]:
        texts, cursor = evidence.search(service.db, fs, Search(**wanted), "", 10)
        assert cursor is None
        return [json.loads(one)["entry"]["seq"] for one in texts]

    assert found() == [1, 2, 3] and found(type="b") == [2, 3]
    assert found(status="x\0y") == found(subjects=("f:1",)) == [1]
    assert found(actor="human:me") == found(since=clock.now) == [3]
    assert found(until=clock.now, labels=(("k", "v"),)) == [1, 2] and found(labels=(("k", "w"),)) == []
    listed = evidence.list_journals(service.db, fs, "agent", (("k", "v"),), "", 10)
    assert [one["journal_id"] for one in listed["journals"]] == ["j"]


def test_journal_names_are_paged_by_code_point(service: Service) -> None:
    fs, _ = create(service)
    names = ["a", "B", "a-b", "a.b", "a_b", "Z", "0", "ab"]
    for name in names:
        new_journal(service, fs, name)
    seen, after = [], ""
    while True:
        page = evidence.list_journals(service.db, fs, None, (), after, 3)
        seen += [one["journal_id"] for one in page["journals"]]
        if page["next_cursor"] is None:
            break
        after = page["next_cursor"]
    assert seen == sorted(names)


def test_concurrent_appends_from_two_services(service: Service, tmp_path: Path) -> None:
    fs, _ = create(service)
    new_journal(service, fs)
    answers: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for at in range(10):
            made = append(service, fs, f'[{{"type":"t","w":{thread},"at":{at}}},{{"type":"u"}}]')
            answers.append((made["first_seq"], made["last_seq"]))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sorted(answers) == [(n, n + 1) for n in range(1, 121, 2)]
    assert evidence.verify(service.db, fs, "j", None)["entries"] == 120


def test_two_replicas_answer_each_others_long_polls_and_revocations(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    url = postgres_server.fresh()
    key = tmp_path / "key"
    key.write_text("one-key-for-both-replicas\n")
    key.chmod(0o600)
    blobs = str(tmp_path / "blobs")
    one, two = (
        Server(tmp_path / name, "--database", url, "--blobs", blobs, "--admin-key-file", str(key))
        for name in ("one", "two")
    )
    try:
        one.start()
        two.start()
        admin = {"token": key.read_text().strip()}
        created = one.ask("POST", "/v1/file-systems", {}, **admin)
        assert created.status == 201, (created.body, one.log.read_text())
        made = created.json
        base, token = f"/v1/file-systems/{made['file_system_id']}", made["fs_token"]
        journal = one.ask("POST", base + "/journals", {"journal_id": "j"}, token=token)
        assert journal.status == 201, (journal.body, one.log.read_text())
        got: list[Any] = []
        poll = threading.Thread(
            target=lambda: got.append(two.ask("GET", base + "/journals/j/entries?wait=25", token=token))
        )
        feed = threading.Thread(
            target=lambda: got.append(two.ask("GET", base + "/changes?after=0&wait=25", token=token))
        )
        for thread in (poll, feed):
            thread.start()
        wait_for(
            lambda: "fsd_long_polls_waiting 2" in two.ask("GET", "/metrics").body.decode(), 30, "the polls"
        )
        assert one.ask("PUT", base + "/files/x", b"data", token=token).status in (200, 201)
        body = {"entries": [{"type": "a"}]}
        assert one.ask("POST", base + "/journals/j/entries", body, token=token).status == 200
        for thread in (poll, feed):
            thread.join(20)
        assert len(got) == 2 and all(one.status == 200 for one in got)
        assert two.ask("GET", base + "/files/x", token=token).body == b"data"
        tokens = two.ask("GET", base + "/tokens", **admin).json["tokens"]
        two.ask("POST", f"{base}/tokens/{tokens[0]['token_id']}/disable", {}, **admin)
        assert one.ask("GET", base + "/journals", token=token).status == 401
    finally:
        one.end()
        two.end()


def test_a_token_is_remembered_for_what_looks_at_it_itself(
    service: Service, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit need not look its token up twice. The second look is its transaction's; what nobody else looks
    at, the path's filesystem and the time, holds at once."""
    since = [1_000.0]
    monkeypatch.setattr(service.tokens, "_host", replace(Host(), wall_ns=clock, monotonic=lambda: since[0]))
    fs, _ = create(service)
    made = service.db.write(lambda tx: service.tokens.create(tx, fs, "short", 60))
    token, tokens = service.tokens.unseal(made)["fs_token"], service.tokens
    assert tokens.remembered(token_key(token), fs.name) is None
    assert tokens.recall(token, fs.name) == tokens.authenticate(token, fs.name)
    assert tokens.remembered(token_key(token), fs.name) == tokens.authenticate(token, fs.name)
    with pytest.raises(NotFound):
        tokens.recall(token, "fs_" + "b" * 20)
    service.db.write(lambda tx: tokens.set_status(tx, fs, made["token_id"], DISABLED))
    _, who = tokens.recall(token, fs.name)
    with pytest.raises(NotAuthenticated, match="disabled"):
        service.db.write(lambda tx: hold(tx, fs, who))
    since[0] += TOKEN_RECALL
    with pytest.raises(NotAuthenticated, match="disabled"):
        tokens.recall(token, fs.name)
    service.db.write(lambda tx: tokens.set_status(tx, fs, made["token_id"], ACTIVE))
    assert tokens.recall(token, None)[0] == fs
    clock.now += 60 * NS
    with pytest.raises(NotAuthenticated, match="expired"):
        tokens.recall(token, fs.name)


def test_no_more_tokens_are_remembered_than_the_bound(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsd.service.tokens.TOKENS_RECALLED_MAX", 2)
    for _ in range(5):
        fs, token = create(service)
        assert service.tokens.recall(token, fs.name)[0] == fs
        assert len(service.tokens._recalled) <= 2
