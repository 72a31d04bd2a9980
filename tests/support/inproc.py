"""The server in the same process: `InProcess` is a `Remote` over a real `Service`, with faults on demand.

Everything that travels is encoded and decoded as on the wire, so that a test meets the same types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsd.meta.database import Tx
from fsd.model.errors import Unavailable
from fsd.remote.answers import read_answers
from fsd.remote.api import PreviousSession, SessionInfo, SessionStart
from fsd.service.access import ADMIN_GRANT, FsRef
from fsd.service.barriers import BarrierAnswer
from fsd.service.leases import Exclusive
from fsd.service.open import Service
from fsd.service.sessions import SessionInfo as ServerInfo
from fsd.wire import messages
from fsd.wire.frame import Blob
from fsd.wire.messages import (
    NO_MARK,
    Commit,
    CommitAnswer,
    FeedPage,
    Mark,
    commit_pieces,
    packb,
    read_answer,
    read_commit,
    read_feed,
)


def no_fault(route: str) -> str:
    return "pass"


class InProcess:
    """`fault(route)` is asked before each call: "pass", "refuse" (nothing reaches the server), "lose" (the
    server acts, the reply is lost), "double" (it acts twice, the second reply comes back)."""

    def __init__(self, service: Service, fs: FsRef, fault: Callable[[str], str] = no_fault) -> None:
        self.service = service
        self.fs = fs
        self.fault = fault
        self.calls: list[str] = []
        self.made: dict[str, dict[str, Any]] = {}

    def _call(self, route: str, fn: Callable[[], Any]) -> Any:
        self.calls.append(route)
        how = self.fault(route)
        if how == "refuse":
            raise Unavailable(f"{route}: refused by the test")
        answer = fn()
        if how == "double":
            answer = fn()
        if how == "lose":
            raise Unavailable(f"{route}: reply lost by the test")
        return answer

    def start_session(self, info: SessionInfo) -> SessionStart:
        given = ServerInfo(
            info.mount_id, info.host, info.path, info.remote_path, info.read_only, info.version
        )
        fence = [0]

        def begin(tx: Tx) -> Any:
            made, want = (
                self.service.sessions.begin(tx, self.fs, given, ADMIN_GRANT, info.known),
                info.exclusive,
            )
            fence[0] = 0
            if want is not None:
                asked = Exclusive(want.ino, info.remote_path.encode(), want.ttl, want.before)
                lease = self.service.leases.take(tx, self.fs, made.session, info.host, info.path, asked)
                fence[0] = lease.fence
            return made

        made = self._call("session", lambda: self.service.db.write(begin))
        before = made.previous
        previous = None
        if before is not None:
            pending = before["pending_at_last_report"]
            previous = PreviousSession(
                before["ended"],
                before["last_commit_at"],
                (pending["operations"], pending["files"], pending["bytes"]),
            )
        return SessionStart(made.session, made.ticket, made.seq, previous, "test", 1 << 20, fence[0])

    def renew_lease(self, session: int, fence: int, ttl: float) -> int:
        def act() -> int:
            return self.service.leases.renew(self.fs, session, fence, ttl, ADMIN_GRANT).fence

        found: int = self._call("renew", act)
        return found

    def count_conflicts(self, top: bytes, timeout: float) -> int:
        found: int = self._call("conflicts", lambda: self.service.conflicts.count(self.fs, top))
        return found

    def release_lease(self, fence: int) -> None:
        self._call("release", lambda: self.service.leases.release(self.fs, fence, ADMIN_GRANT))

    def end_session(self, session: int, ended: str, pending: tuple[int, int, int]) -> None:
        self._call("end", lambda: self.service.sessions.end(self.fs, session, ended, pending))

    def report(self, session: int, pending: tuple[int, int, int]) -> None:
        self._call("report", lambda: self.service.sessions.report(self.fs, session, pending))

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        body = b"".join(commit_pieces(commit))

        def act() -> CommitAnswer:
            answer = self.service.commits.commit(self.fs, read_commit(body), ADMIN_GRANT)
            return read_answer(answer.encode())

        return self._call("commit", act)

    def create_checkpoint(self, ask: Mapping[str, Any], key: str, timeout: float) -> dict[str, Any]:
        """Without the idempotency of the HTTP route: what was made under `key` is given again."""

        def act() -> dict[str, Any]:
            make = self.service.commits.make_checkpoint
            assert make is not None, "the service makes no checkpoints"
            if key not in self.made:
                self.made[key] = self.service.db.write(lambda tx: make(tx, self.fs, ADMIN_GRANT, dict(ask)))
            return self.made[key]

        return self._call("checkpoint", act)

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        def act() -> None:
            delete = self.service.checkpoints.delete
            self.service.db.write(lambda tx: delete(tx, self.fs, ADMIN_GRANT, checkpoint_id))

        self._call("delete", act)

    def upload(self, blobs: list[Blob], timeout: float) -> None:
        self._call("upload", lambda: self.service.packs.store(self.fs.id, self.fs.name, blobs))

    def ask(self, questions: Sequence[tuple[Any, ...]], timeout: float) -> tuple[int, list[Any]]:
        def act() -> tuple[int, list[Any]]:
            asked = messages.unpackb(packb(list(questions)), "questions")
            seq, answers = self.service.namespace.ask(self.fs, asked)
            return read_answers(questions, packb({"seq": seq, "answers": answers}))

        return self._call("ask", act)

    def keep(self, hashes: Sequence[bytes], timeout: float) -> list[bytes]:
        return self._call("keep", lambda: self.service.packs.keep(self.fs, set(hashes)))  # type: ignore[no-any-return]

    def blobs(self, hashes: Sequence[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        def act() -> tuple[list[Blob], list[bytes]]:
            found = self.service.packs.read(self.fs.id, list(hashes))
            return list(found.values()), [h for h in hashes if h not in found]

        return self._call("blobs", act)

    def answer_barrier(
        self,
        session: int,
        ask: int,
        *,
        included: bool,
        seq: int,
        pending: tuple[int, int, int],
        reason: str,
    ) -> None:
        answer = BarrierAnswer(included, seq, pending, reason)
        self._call("barrier", lambda: self.service.barriers.answer(self.fs, session, ask, answer))

    def changes(
        self,
        after: int,
        session: int,
        wait: float,
        root: int = 0,
        asked: int | None = None,
        known: Mark = NO_MARK,
    ) -> FeedPage:
        def act() -> FeedPage:
            return read_feed(self.service.feed.page(self.fs, after, wait, root, known).encode())

        return self._call("changes", act)


class NoCache:
    """A cache that holds nothing, or what it was given (`keep`)."""

    def __init__(self, *, keep: bool = False) -> None:
        self.held: dict[bytes, bytes] | None = {} if keep else None

    def get(self, digest: bytes) -> bytes | None:
        return None if self.held is None else self.held.get(digest)

    def put(self, digest: bytes, data: bytes) -> None:
        if self.held is not None:
            self.held[digest] = data
