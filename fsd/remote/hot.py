"""`HttpRemote`: the `Remote` over HTTP, a connection for each calling thread."""

from __future__ import annotations

import base64
import binascii
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from fsd.host.seam import Host
from fsd.model.endpoint import parse_endpoint
from fsd.model.errors import FsdError, Unavailable, UsageError, from_body
from fsd.model.limits import (
    BLOBS_GET_BYTES,
    BLOBS_GET_MAX,
    BLOCK,
    COMMIT_HEADER_MAX,
    CONNECT_TIMEOUT,
    CONTROL_TIMEOUT,
    FEED_ANSWER_MAX,
    FEED_SLACK,
    FEED_SLACK_MAX,
    FEED_WAIT_MAX,
    JSON_BODY_MAX,
    KIB,
    NS_ANSWER_MAX,
    PATIENCE_OF_TOOK,
    SENT_AT_ONCE_MAX,
    SESSION_BITS,
    UPLOAD_BLOBS_MAX,
    UPLOAD_MAX,
)
from fsd.model.plain import dataclass, field
from fsd.model.token import Token, redact
from fsd.remote.answers import check_questions, read_answers
from fsd.remote.api import Health, PreviousSession, SessionInfo, SessionStart
from fsd.remote.patience import Patience
from fsd.remote.proxy import proxy_for
from fsd.remote.resolve import Resolver
from fsd.remote.sent import SentCommit
from fsd.remote.transport import Answer, Connection, Cut
from fsd.wire.frame import Blob, FrameReader, pack_pieces, unpack
from fsd.wire.messages import (
    MEDIA_TYPE,
    NO_MARK,
    Commit,
    CommitAnswer,
    FeedPage,
    Mark,
    commit_pieces,
    packb,
    read_answer,
    read_feed,
    unpackb,
)

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_JSON = "application/json"
_HEAD_ROOM = 64 * KIB  # beside the blob bytes of a frame: its table, or a small answer


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Which filesystem on which server. `endpoint` is already chosen among the token's regions.
    `ca_file` replaces the system's certificates. Times in seconds."""

    endpoint: str
    token: Token = field(repr=False)
    insecure: bool = False
    ca_file: Path | None = None
    state: str = ""  # which retained state questions are about, as in a query string; empty: the live one
    connect_timeout: float = CONNECT_TIMEOUT
    control_timeout: float = CONTROL_TIMEOUT


class HttpRemote:
    """The server over HTTP. Any thread; each has its own connection, kept while the thread lives.

    Every request may arrive twice without harm (see `fsd.remote.api`), so a kept connection that the server
    closed meanwhile is replaced and the request sent again, once, unseen by the caller. All other retries
    are the caller's.
    """

    def __init__(self, options: RemoteOptions, host: Host) -> None:
        """Raises `UsageError` for a bad endpoint or proxy. Connects to nothing yet."""
        self._options, self._host = options, host
        self._endpoint = parse_endpoint(options.endpoint, insecure=options.insecure)
        self._proxy = proxy_for(self._endpoint)
        reached = self._proxy or self._endpoint
        self._resolver = Resolver(reached.host, reached.port)
        self._context: ssl.SSLContext | None = None
        if self._endpoint.tls:
            import ssl  # not for plain http: 5 ms of a mount's start

            self._context = ssl.create_default_context(cafile=options.ca_file)
        self._root = f"{self._endpoint.base}/v1/file-systems/{options.token.file_system_id}"
        self._common = (
            f"Host: {self._endpoint.authority}\r\n"
            f"Authorization: Bearer {options.token.text()}\r\n"
            "Accept-Encoding: identity\r\n"
        )
        self._local = threading.local()
        self._lock = threading.Lock()
        self._commits: Connection | None = None  # of whichever thread sends one: it is warm for the next
        self._committing = threading.Lock()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False
        self._starting: tuple[SessionInfo, str] | None = None
        self._state = options.state
        self._health = Health(reachable=False, rtt_ms=None)
        self._patience: defaultdict[str, Patience] = defaultdict(lambda: Patience(self._took()))  # by kind

    @property
    def endpoint(self) -> str:
        """The server's address for people."""
        return self._endpoint.shown

    def health(self) -> Health:
        """How the last call went; for `status`."""
        return self._health

    def _took(self) -> float:
        """Seconds the newest answer took that was not to be waited for."""
        return (self._health.rtt_ms or 0.0) / 1e3

    def close(self) -> None:
        """End every connection; calls under way in other threads end with `Unavailable`, later ones too."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.abort()

    # Sessions: small JSON calls.

    def start_session(self, info: SessionInfo) -> SessionStart:
        # For people: a path of any bytes is shown as far as JSON can.
        body: dict[str, Any] = {
            "mount_id": info.mount_id,
            "host": _shown(info.host),
            "path": _shown(info.path),
            "remote_path": info.remote_path,
            "read_only": info.read_only,
            "version": info.version,
        }
        if info.exclusive is not None:
            asked: dict[str, Any] = {"ino": info.exclusive.ino, "ttl_s": info.exclusive.ttl}
            if info.exclusive.before is not None:
                session, ticket, next_op = info.exclusive.before
                asked["before"] = [session, base64.b64encode(ticket).decode(), next_op]
            body["exclusive"] = asked
        if info.known is not None:
            body["known"] = list(info.known)
        # The key stays until an answer came: a start whose answer was lost is the same start again.
        if self._starting is None or self._starting[0] != info:
            self._starting = (info, self._host.token_bytes(16).hex())
        key = self._starting[1]
        try:
            made = self._started(body, key)
        except FsdError as exc:
            if not exc.retryable:
                self._starting = None
            raise
        self._starting = None
        try:
            previous = made["previous"]
            return SessionStart(
                session=_whole(made["session"], 1, 2**SESSION_BITS - 1),
                ticket=base64.b64decode(made["ticket"], validate=True),
                seq=_whole(made["seq"]),
                previous=None if previous is None else _previous(previous),
                server_version=str(made["server_version"]),
                block_size=_whole(made["block_size"]),
                fence=_whole(made.get("fence", 0)),
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as exc:
            raise Unavailable("the answer to a session's start cannot be read") from exc

    def _started(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        """An older server refuses `known` instead of comparing it: it is asked without. There is none who
        could compare then, as with the commits sent to it."""
        try:
            return self._json("POST", "/sessions", body, key)
        except UsageError as exc:
            if "known" not in body or "unknown field 'known'" not in exc.message:
                raise
        without = {name: value for name, value in body.items() if name != "known"}
        return self._json("POST", "/sessions", without, f"{key}-older")

    def end_session(self, session: int, ended: str, pending: tuple[int, int, int]) -> None:
        # One session ends one way with one rest: the key makes a repetition the same request.
        key = f"end-{session}-{ended}-{'-'.join(map(str, pending))}"
        self._json("POST", f"/sessions/{session}/end", {"ended": ended, "pending": list(pending)}, key)

    def report(self, session: int, pending: tuple[int, int, int]) -> None:
        key = self._host.token_bytes(16).hex()
        self._json("POST", f"/sessions/{session}/report", {"pending": list(pending)}, key)

    def create_checkpoint(self, ask: Mapping[str, Any], key: str, timeout: float) -> dict[str, Any]:
        return self._json("POST", "/checkpoints", dict(ask), key, timeout)

    def renew_lease(self, session: int, fence: int, ttl: float) -> int:
        key = self._host.token_bytes(16).hex()
        made = self._json("POST", f"/leases/{fence}/renew", {"ttl_s": ttl, "session": session}, key)
        try:
            return _whole(made["fence"])
        except (KeyError, TypeError) as exc:
            raise Unavailable("the answer to a lease's renewal cannot be read") from exc

    def release_lease(self, fence: int) -> None:
        self._json("POST", f"/leases/{fence}/release", {}, f"release-{fence}")

    def count_conflicts(self, top: bytes, timeout: float) -> int:
        path = f"/conflicts/{quote(top.strip(b'/'))}?count=1"
        raw = self._call("GET", path, [], timeout, _HEAD_ROOM)
        try:
            return _whole(json.loads(raw)["count"])
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise Unavailable("the answer about conflicts is no answer") from exc

    def keep_state(self, session: int) -> int:
        """Have the server keep the state questions are about while the session asks for it now and then; its
        seq. From now on it is asked about by that, so that its checkpoint may go. Raises `NotFound`."""
        key = self._host.token_bytes(16).hex()
        made = self._json("POST", f"/sessions/{session}/state?{self._state}", {}, key)
        try:
            seq = _whole(made["fs_seq"])
        except (KeyError, TypeError) as exc:
            raise Unavailable("the answer about a state cannot be read") from exc
        self._state = f"fs_seq={seq}"
        return seq

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        path = f"/checkpoints/{quote(checkpoint_id, safe='')}"
        self._json("DELETE", path, None, f"delete-{checkpoint_id}")

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
        body = {"ask": ask, "included": included, "fs_seq": seq, "pending": list(pending), "reason": reason}
        self._json("POST", f"/sessions/{session}/barrier", body, f"barrier-{session}-{ask}")

    def newest_checkpoint(self) -> dict[str, Any] | None:
        """The filesystem's newest checkpoint, without its files."""
        found = self._json("GET", "/checkpoints?limit=1", None, "")
        rows = found.get("checkpoints")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise Unavailable("the answer about checkpoints cannot be read")
        return rows[0] if rows else None

    def prune(self, keep: str, *, dry_run: bool = False) -> bool:
        """Thin the automatic checkpoints by the rule `keep`, a step of it; whether there is more to do."""
        body = {"keep": keep, **({"dry_run": True} if dry_run else {})}
        more = self._json("POST", "/checkpoints/prune", body, self._host.token_bytes(16).hex()).get("more")
        if type(more) is not bool:
            raise Unavailable("the answer to a prune cannot be read")
        return more

    # The hot routes.

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        pieces = commit_pieces(commit)
        free = self._committing.acquire(blocking=False)
        try:
            on = self._for_commits() if free else self._connection()
            raw = self._call("POST", "/commits", pieces, timeout, COMMIT_HEADER_MAX, on=on)
        finally:
            if free:
                self._committing.release()
        return self._decoded(read_answer, raw)

    def begin_commit(self, commit: Commit, timeout: float) -> SentCommit | None:
        """Send a small commit without waiting; None where that cannot be done now: then `commit` it. Only one
        is under way at a time."""
        pieces = commit_pieces(commit)
        length = sum(map(len, pieces))
        if length > SENT_AT_ONCE_MAX or not self._committing.acquire(blocking=False):
            return None
        connection = self._for_commits()
        call_id, head = self._head("POST", "/commits", length, MEDIA_TYPE, "")
        patience = self._patience["commits"]
        began = self._host.monotonic()
        if not connection.begin(head, pieces, timeout, COMMIT_HEADER_MAX, patience.within(length)):
            self._committing.release()
            return None

        def read(answer: Answer) -> CommitAnswer:
            self._check_owner(connection, answer, call_id)
            return self._decoded(read_answer, bytes(self._body(answer, began, patience)))

        def failed() -> None:
            self._health = Health(reachable=False, rtt_ms=self._health.rtt_ms)
            if connection.silent:
                patience.silent()

        return SentCommit(connection, read, failed, self._committing.release)

    def upload(self, blobs: list[Blob], timeout: float) -> None:
        for group in _groups(blobs):
            raw = self._call("POST", "/packs", pack_pieces({}, group), timeout, _HEAD_ROOM)
            try:
                stored = unpackb(raw, "the answer to an upload")["stored"]
            except (UsageError, KeyError, TypeError, IndexError) as exc:
                raise Unavailable("the answer to an upload is no answer") from exc
            if type(stored) is not int:
                raise Unavailable("the answer to an upload does not say what was stored")

    def ask(self, questions: Sequence[tuple[Any, ...]], timeout: float) -> tuple[int, list[Any]]:
        check_questions(questions)
        path = f"/ns?{self._state}" if self._state else "/ns"
        raw = self._call("POST", path, [packb(list(questions))], timeout, NS_ANSWER_MAX)
        return self._decoded(lambda body: read_answers(questions, body), raw)

    def blobs(self, hashes: Sequence[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        """See `Remote`. Asks again while an answer was cut at its size bound; `timeout` covers all."""
        left = list(dict.fromkeys(hashes))
        end = self._host.monotonic() + timeout
        found: list[Blob] = []
        absent: list[bytes] = []
        while left:
            asked = left[:BLOBS_GET_MAX]
            remaining = end - self._host.monotonic()
            if remaining <= 0:
                raise Unavailable(f"no complete answer within {timeout:g} s")
            got, gone = self._blobs_once(asked, remaining)
            answered = {blob.hash for blob in got} | set(gone)
            if not answered or not answered <= set(asked):
                raise Unavailable("the answer to a request for content answers something else")
            found += got
            absent += gone
            left = [one for one in left if one not in answered]
        return found, absent

    def keep(self, hashes: Sequence[bytes], timeout: float) -> list[bytes]:
        absent: list[bytes] = []
        for at in range(0, len(hashes), BLOBS_GET_MAX):
            asked = hashes[at : at + BLOBS_GET_MAX]
            raw = self._call("POST", "/blobs?keep=1", [packb(asked)], timeout, _HEAD_ROOM)
            try:
                header, _ = unpack(raw, blobs_max=0, bytes_max=0)
                absent += _asked_for(header["absent"], asked)
            except (UsageError, KeyError, TypeError) as exc:
                raise Unavailable("the answer about content to keep is no answer") from exc
        return absent

    def changes(
        self,
        after: int,
        session: int,
        wait: float,
        root: int = 0,
        asked: int | None = None,
        known: Mark = NO_MARK,
    ) -> FeedPage:
        wait = min(wait, FEED_WAIT_MAX)
        path = f"/changes?after={after}&session={session}&wait={wait:g}&root={root}"
        path += f"&known={known.seq}&known_at={known.at}"
        path += "" if asked is None else f"&asked={asked}"
        # A server that is slow is slow here too, as the first page is waited for before a mount is ready.
        slack = min(max(FEED_SLACK, PATIENCE_OF_TOOK * self._took()), FEED_SLACK_MAX)
        raw = self._call("GET", path, [], wait + slack, FEED_ANSWER_MAX, timed=False)
        return self._decoded(read_feed, raw)

    def _blobs_once(self, asked: list[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        # One blob may stand above the bound alone; the table of 256 is small.
        bound = BLOBS_GET_BYTES + BLOCK
        reader = FrameReader(blobs_max=BLOBS_GET_MAX, bytes_max=bound, header_max=_HEAD_ROOM)
        try:
            answer = self._answer(
                "POST", "/blobs", [packb(asked)], timeout, bound + _HEAD_ROOM, cut=reader.next
            )
            if answer.pieces:
                header, got = reader.frame(answer.pieces)
            else:
                header, got = unpack(
                    answer.body, blobs_max=BLOBS_GET_MAX, bytes_max=bound, header_max=_HEAD_ROOM, views=True
                )
            gone = _asked_for(header["absent"], asked)
        except (UsageError, KeyError, TypeError) as exc:
            raise Unavailable("the answer to a request for content is no answer") from exc
        return got, gone

    # One request.

    def _decoded(self, read: Callable[[bytes], T], raw: bytes) -> T:
        """`read(raw)`; a body that is no answer means that something else answered than the server."""
        try:
            return read(raw)
        except Unavailable:
            self._health = Health(reachable=False, rtt_ms=self._health.rtt_ms)
            raise

    def _json(
        self, method: str, path: str, body: object, key: str, timeout: float | None = None
    ) -> dict[str, Any]:
        raw = self._call(
            method,
            path,
            [] if body is None else [json.dumps(body).encode()],
            timeout or self._options.control_timeout,
            JSON_BODY_MAX,
            media=_JSON,
            key=key,
        )
        try:
            made = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            raise Unavailable("the server's answer is no JSON (cut or changed on the way)") from exc
        if not isinstance(made, dict):
            raise Unavailable("the server's answer is no JSON object")
        return made

    def _call(
        self,
        method: str,
        path: str,
        pieces: Sequence[bytes | memoryview],
        timeout: float,
        body_max: int,
        *,
        media: str = MEDIA_TYPE,
        key: str = "",
        timed: bool = True,
        on: Connection | None = None,
    ) -> bytes:
        """As `_answer`, its body as bytes: of a large one a copy."""
        return bytes(
            self._answer(
                method, path, pieces, timeout, body_max, media=media, key=key, timed=timed, on=on
            ).body
        )

    def _answer(
        self,
        method: str,
        path: str,
        pieces: Sequence[bytes | memoryview],
        timeout: float,
        body_max: int,
        *,
        media: str = MEDIA_TYPE,
        key: str = "",
        timed: bool = True,
        on: Connection | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """A 200 or 201; raises what the server said, or `Unavailable`."""
        length = sum(map(len, pieces))
        call_id, head = self._head(method, path, length if pieces else None, media, key)
        connection = on or self._connection()
        # A poll of the feed is silent on purpose.
        patience = self._patience[path.split("/", 2)[1]] if timed else None
        wait = patience.within(length) if patience is not None else None
        began = self._host.monotonic()
        try:
            answer = connection.exchange(head, pieces, timeout, body_max, wait, cut)
            self._check_owner(connection, answer, call_id)
        except Unavailable:
            self._health = Health(reachable=False, rtt_ms=self._health.rtt_ms)
            if patience is not None and connection.silent:
                patience.silent()
            raise
        self._body(answer, began, patience)
        return answer

    def _head(self, method: str, path: str, length: int | None, media: str, key: str) -> tuple[str, bytes]:
        """The call's own id and the request's head; `length` None: it has no body."""
        call_id = self._host.token_bytes(8).hex()
        head = (
            f"{method} {self._root}{path} HTTP/1.1\r\n{self._common}X-Fsd-Call: {call_id}\r\n"
            + (f"Content-Type: {media}\r\nContent-Length: {length}\r\n" if length is not None else "")
            + (f"Idempotency-Key: {key}\r\n" if key else "")
            + "\r\n"
        )
        return call_id, head.encode("ascii")

    def _body(self, answer: Answer, began: float, patience: Patience | None) -> bytes | bytearray:
        """Of an answer that came for a request of `began`; raises what the server said."""
        seconds = self._host.monotonic() - began
        if patience is not None:
            patience.answered(seconds)
        took = seconds * 1e3 if patience is not None else self._health.rtt_ms
        if answer.status not in (200, 201):
            raise self._refusal(answer, took)
        self._health = Health(reachable=True, rtt_ms=took)
        return answer.body

    def _check_owner(self, connection: Connection, answer: Answer, call_id: str) -> None:
        """The server gives `X-Fsd-Call` back; an answer with another one belongs to another request."""
        echoed = answer.headers.get("x-fsd-call")
        if echoed is not None and echoed != call_id:
            connection.close()
            raise Unavailable("the answer belongs to another request (a reply came twice)")

    def _refusal(self, answer: Answer, took: float | None) -> FsdError:
        """What the server said. Raised by the caller: a frame that an error comes through and that has a name
        for it is a circle, which keeps what was sent until the collector comes, which is seldom."""
        try:
            body = json.loads(answer.body)
        except (ValueError, RecursionError):
            body = None  # an HTML page of something in between; from_body tells what came
        error = from_body(body, answer.status)
        if isinstance(error, Unavailable) and not (isinstance(body, dict) and "error" in body):
            error.message = f"{self.endpoint}: {error.message}"  # something in between answered
        error.message = redact(error.message)
        error.args = (error.message,)
        error.request_id = error.request_id or answer.headers.get("x-request-id")
        self._health = Health(reachable=not isinstance(error, Unavailable), rtt_ms=took)
        return error

    def _connection(self) -> Connection:
        """The calling thread's."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._made()
        return connection

    def _for_commits(self) -> Connection:
        """Whoever holds `_committing`."""
        if self._commits is None:
            self._commits = self._made()
        return self._commits

    def _made(self) -> Connection:
        made = Connection(
            self._endpoint,
            self._resolver,
            self._context,
            self._host.monotonic,
            self._options.connect_timeout,
            self._proxy,
        )
        with self._lock:
            if self._closed:
                made.abort()
            self._connections.add(made)
        return made


def _whole(value: Any, least: int = 0, most: int = 2**62) -> int:
    if type(value) is not int or not least <= value <= most:
        raise TypeError("a whole number expected")
    return value


def _asked_for(rows: Any, asked: Sequence[bytes]) -> list[bytes]:
    """Hashes in an answer, all of which were in the question; raises `TypeError`."""
    if type(rows) is not tuple or len(rows) > len(asked) or not all(type(one) is bytes for one in rows):
        raise TypeError("hashes expected")
    if not set(asked).issuperset(rows):
        raise TypeError("hashes that were not asked for")
    return list(rows)


def _shown(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _previous(row: dict[str, Any]) -> PreviousSession:
    pending = row["pending_at_last_report"]
    if isinstance(pending, dict):
        pending = [pending["operations"], pending["files"], pending["bytes"]]
    counts = [_whole(one) for one in pending] if pending is not None else [0, 0, 0]
    at = row["last_commit_at"]
    return PreviousSession(
        str(row["ended"]), None if at is None else str(at), (counts[0], counts[1], counts[2])
    )


def _groups(blobs: list[Blob]) -> list[list[Blob]]:
    """`blobs` cut into uploads within UPLOAD_MAX bytes and UPLOAD_BLOBS_MAX blobs."""
    groups: list[list[Blob]] = []
    size = 0
    for blob in blobs:
        if not groups or size + len(blob.stored) > UPLOAD_MAX or len(groups[-1]) >= UPLOAD_BLOBS_MAX:
            groups.append([])
            size = 0
        groups[-1].append(blob)
        size += len(blob.stored)
    return groups
