"""Commits: the one way a filesystem's `seq` moves (invariant 4, *one way*).

A commit of a mount session goes, in one transaction: lock the filesystem's row; ticket; operations the server
has seen already are matched one by one; blobs that came along are stored and those named must be there; the
rules decide every operation on a `View`; rows, blob counts, change row, applied row, session row and the
filesystem's row are written. A direct command (`apply_direct`) takes the same way without a session: its
operations are built on the locked state, and one that is not simply applied undoes all.

The transaction may run again (see `Database.write`), so nothing outside it changes before it is durable.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgpack

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model import blocks
from fsd.model.attrs import make_ino
from fsd.model.blocks import Part, Parts
from fsd.model.errors import (
    Conflict,
    FsdError,
    PosixError,
    SessionForked,
    TooLarge,
    Unavailable,
    UsageError,
)
from fsd.model.limits import APPLIED_KEEP, COMMIT_FOLDS_MAX, COMMIT_OPS_MAX, INO_COUNTER_BITS
from fsd.model.ops import CONTENT, CREATE, REFUSED, REMOVALS, Op, Outcome
from fsd.model.plain import dataclass
from fsd.service import redirect_rows, rows
from fsd.service.access import FsRef, Grant, check_copied, hold_tree, locked
from fsd.service.conflicts import note
from fsd.service.decide import apply
from fsd.service.feed import Feed, compare_past
from fsd.service.packs import Packs, Prepared
from fsd.service.redirect_rows import DbRedirects
from fsd.service.redirects import Redirects
from fsd.service.rules import NeedFull, Refuse, Rules
from fsd.service.rules_content import NeedFold, check
from fsd.service.sessions import LIVES, TICKET, SessionRow, Sessions, pending_text
from fsd.service.upload import assemble
from fsd.service.view import View
from fsd.service.writers import Guard, guard_of, writers_of
from fsd.wire.frame import Blob, make_blob, open_blob
from fsd.wire.messages import Commit, CommitAnswer, packb, read_answer

T = TypeVar("T")
# Makes a checkpoint of the filesystem's present state in the transaction; its record, as a client gets it.
# Whatever it raises, it raises before it has written anything.
MakeCheckpoint: TypeAlias = Callable[[Tx, FsRef, Grant, dict[str, Any]], dict[str, Any]]
Later: TypeAlias = Callable[[Callable[[], object]], object]
Named: TypeAlias = dict[int, dict[bytes, int]]  # operation → blob → end of the bytes it names of it
NEVER_MADE: Final = "the creation of what it is about was refused"
OPNO_MAX: Final = 2**62  # the next number fits a database column too
_DIGEST: Final = 8
_APPLIED: Final = struct.Struct(f">Q{_DIGEST}s")


class WhenCopied(Protocol):
    """How `Forks.when_copied` is called."""

    def __call__(self, fs: FsRef, call: Callable[[], T]) -> T: ...


class FsState(NamedTuple):
    """The locked filesystem row."""

    seq: int
    pinned: int


class Numbers:
    """Inode numbers the server makes itself, under a session number of its own. Any thread.

    They begin anywhere in the lower quarter: a service that was set back to an older copy of its data has
    the same session number again, and a revision (`ino:version`) that somebody saw before must not mean
    another file. (Mounts show what they have seen: `check_past`.)"""

    def __init__(self, session: int, host: Host) -> None:
        self._session = session
        first = int.from_bytes(host.token_bytes(8), "big") >> (64 - INO_COUNTER_BITS + 2)
        self._counter = itertools.count(first + 1)  # next() is atomic

    def new_ino(self) -> int:
        return make_ino(self._session, next(self._counter))


@dataclass(frozen=True, slots=True)
class _Work:
    """A commit made ready outside the transaction. `named`: the blobs each content operation names, and up
    to which of their bytes; `refused`: operations that are wrong in themselves; `digests`: one for each
    operation."""

    commit: Commit
    ops: list[Op]
    named: Named
    refused: dict[int, Outcome]
    digests: dict[int, bytes]
    prepared: Prepared | None


class Commits:
    """Any thread. Blocks until durable."""

    def __init__(
        self, db: Database, packs: Packs, sessions: Sessions, feed: Feed, numbers: Numbers, host: Host
    ) -> None:
        self._db, self._packs, self._sessions, self._feed = db, packs, sessions, feed
        self._numbers, self._host = numbers, host
        # What to do about a filesystem that is a fork and not copied yet: see `Forks.when_copied`.
        self.when_copied: WhenCopied = lambda fs, call: call()
        self.make_checkpoint: MakeCheckpoint | None = None

    def commit(self, fs: FsRef, commit: Commit, who: Grant, later: Later | None = None) -> CommitAnswer:
        """Apply a session's commit; see `CommitAnswer`. `later` takes the call that wakes the feed's readers,
        for who has somebody to answer first; None: it is made here. Raises `SessionForked`, `SessionUnknown`,
        `UsageError`, `DamagedBody` (a blob's bytes), `NotFound`, `NotAuthenticated` (the token was revoked
        meanwhile), and what the database raises."""
        work = self._work(fs, commit)
        folding = _Folding(self._packs, fs, commit.blobs)
        frees = bool(work.ops) and all(op.kind in REMOVALS for op in work.ops)

        def run(tx: Tx) -> tuple[CommitAnswer, bool]:
            return self._commit(tx, fs, work, folding, who)

        with self._packs.landing(fs.name, work.prepared):
            while True:
                try:
                    answer, moved = self.when_copied(fs, lambda: self._db.write(run, frees=frees))
                    break
                except NeedFold as need:
                    folding.fold(need.parts)
        if moved:
            wake = partial(self._feed.wake, fs.id, answer.seq, 0 if answer.outcomes else commit.session)
            if later is None:
                wake()
            else:
                later(wake)
        return answer

    def _work(self, fs: FsRef, commit: Commit) -> _Work:
        ops = commit.ops
        if len(ops) > COMMIT_OPS_MAX:
            raise TooLarge(f"{len(ops)} operations in one commit, at most {COMMIT_OPS_MAX}")
        if ops and not 1 <= ops[0].opno <= ops[-1].opno < OPNO_MAX:
            raise UsageError("operations are numbered from 1, within 62 bits")
        named, refused = examine(ops)
        pack = msgpack.Packer(use_bin_type=True).pack
        digests = {op.opno: hashlib.blake2b(pack(op), digest_size=_DIGEST).digest() for op in ops}
        prepared = self._packs.prepare(fs.id, fs.name, commit.blobs) if commit.blobs else None
        return _Work(commit, ops, named, refused, digests, prepared)

    def _commit(
        self, tx: Tx, fs: FsRef, work: _Work, folding: _Folding, who: Grant
    ) -> tuple[CommitAnswer, bool]:
        commit = work.commit
        state, session, at = self._begin(tx, fs, commit, who)
        if session.prev_ticket and (commit.ticket, commit.digest) == (
            session.prev_ticket,
            session.prev_digest,
        ):
            return read_answer(session.prev_answer), False
        compare_past(fs, state.seq, commit.known, at)
        seen = [op for op in work.ops if op.opno < session.next_op]
        seen, told, told_seq = _match(tx, session, seen, work.digests)
        if commit.ticket != session.ticket and not seen:
            raise forked()
        if seen:
            # A copy of an older request, or a log whose tail was lost: so much of what it asks is done. The
            # rest comes in a commit of its own, so that `seq` is true for what it is told about: taken for
            # newer than it is, a base would hide what others changed since, or what a copy of this session
            # changed in that very commit: hence one less.
            return CommitAnswer(told_seq - 1, session.ticket, seen[-1].opno + 1, told, (), 0), False
        rest = work.ops
        folding.insert(tx, self._packs)
        missing, refused = self._missing(tx, fs, rest, work)
        if missing:
            return (
                CommitAnswer(state.seq, session.ticket, session.next_op, (), tuple(missing), 0),
                False,
            )
        rules = self._rules(tx, fs, state, session, folding)
        now = self._host.wall_ns()
        guard = guard_of(tx, fs.id, rules.view, session.writers, session.id, commit.fence, now)
        outcomes, done, need_full = _apply(rules, rest, {**work.refused, **refused}, guard)
        made_at = self._write(tx, fs, state, rules, session.id)
        moved = made_at is not None
        next_op = done[-1].opno + 1 if done else session.next_op
        seq = state.seq + 1 if moved else state.seq
        if rules.put_beside:
            note(
                tx,
                fs.id,
                rules.view,
                rules.put_beside,
                session=session.id,
                host=session.mount,
                seq=seq,
                now=now,
            )
        ticket = self._host.token_bytes(TICKET)
        made = None if need_full else self._checkpoint(tx, fs, commit, outcomes, who)
        # An older client does not read `at`.
        at = made_at or 0 if commit.known is not None else 0
        answer = CommitAnswer(seq, ticket, next_op, told + tuple(outcomes), (), need_full, made, at)
        self._note(tx, session, work, done, outcomes, answer)
        return answer, moved

    def _begin(self, tx: Tx, fs: FsRef, commit: Commit, who: Grant) -> tuple[FsState, SessionRow, int | None]:
        """Lock the filesystem and see whether `who` may commit: its state, the session, and when the newest
        commit that the mount has seen was made."""
        held = locked(tx, fs)
        known = commit.known.seq if commit.known else 0
        session, at = self._sessions.load(tx, fs, commit.session, who, known)
        check_copied(fs, held)
        return FsState(held.seq, held.pinned), session, at

    def _checkpoint(
        self, tx: Tx, fs: FsRef, commit: Commit, outcomes: list[Outcome], who: Grant
    ) -> dict[str, Any] | None:
        """The checkpoint the commit asks for; why not, where that is its own fault; None: not now."""
        if commit.checkpoint is None or self.make_checkpoint is None:
            return None
        ask = dict(commit.checkpoint)
        if not ask.pop("partial", False) and any(one.status == REFUSED for one in outcomes):
            return None
        try:
            return self.make_checkpoint(tx, fs, who, ask)
        except FsdError as exc:
            return exc.body("")

    def _missing(
        self, tx: Tx, fs: FsRef, rest: list[Op], work: _Work
    ) -> tuple[list[bytes], dict[int, Outcome]]:
        """Store what came along; which named blobs are not there, and operations that want more of one than
        there is."""
        lengths = {} if work.prepared is None else self._packs.insert(tx, work.prepared)
        named = {op.opno: work.named[op.opno] for op in rest if op.opno in work.named}
        wanted: set[bytes] = set().union(*named.values()) if named else set()
        if others := wanted - lengths.keys():
            lengths |= self._packs.lengths(tx, fs.id, others)
        return sorted(wanted - lengths.keys()), beyond(named, lengths)

    def _rules(self, tx: Tx, fs: FsRef, state: FsState, session: SessionRow, folding: _Folding) -> Rules:
        return Rules(
            View(rows.DbSource(tx, fs.id), state.seq + 1, self._numbers.new_ino, tx),
            me=session.id,
            mount=session.mount,
            home=tuple(part for part in session.remote_path.encode("utf-8", "replace").split(b"/") if part),
            redirects=Redirects(DbRedirects(tx, session.id) if session.redirected else None),
            folds=folding.folds,
        )

    def _write(self, tx: Tx, fs: FsRef, state: FsState, rules: Rules, session: int) -> int | None:
        """Write what the rules changed as one commit; its time, None: there was nothing."""
        seq = state.seq + 1
        written = rows.write(tx, rules.view, fs.id, seq, state.pinned)
        redirect_rows.store(tx, rules.me, rules.redirects)
        if not written.anything:
            return None
        self._packs.adjust(tx, fs.id, written.refs)
        at = self._feed.append(tx, fs.id, seq, session, written.changed_inos, written.changed_names)
        tx.execute(
            "UPDATE fs SET seq=?, storage_bytes=storage_bytes+?, file_count=file_count+? WHERE id=?",
            (seq, written.storage_bytes, written.inodes, fs.id),
        )
        return at

    def _note(
        self,
        tx: Tx,
        session: SessionRow,
        work: _Work,
        done: list[Op],
        outcomes: list[Outcome],
        answer: CommitAnswer,
    ) -> None:
        """Remember what a repeat must be answered."""
        now = self._host.wall_ns()
        tx.execute(
            "UPDATE session SET next_op=?, ticket=?, prev_ticket=?, prev_digest=?, prev_answer=?, "
            f"last_seen=?, last_commit=?, pending=?, ended={LIVES} WHERE id=?",
            (
                answer.next_op,
                answer.ticket,
                work.commit.ticket,
                work.commit.digest,
                answer.encode(),
                now,
                now,
                pending_text(work.commit.pending),
                session.id,
            ),
        )
        if not done:
            return
        digests = b"".join(_APPLIED.pack(op.opno, work.digests[op.opno]) for op in done)
        tx.execute(
            "INSERT INTO applied (session, last_op, first_op, seq, digests, outcomes) VALUES (?,?,?,?,?,?)",
            (session.id, done[-1].opno, done[0].opno, answer.seq, digests, packb(outcomes)),
        )
        if answer.next_op > APPLIED_KEEP:
            tx.execute(
                "DELETE FROM applied WHERE session=? AND last_op<?",
                (session.id, answer.next_op - APPLIED_KEEP),
            )

    # Direct commands.

    def apply_direct(
        self,
        fs: FsRef,
        build: Callable[[View], Sequence[Op]],
        blobs: Sequence[Blob] = (),
        after: Callable[[View], T] | None = None,
    ) -> tuple[int, T | None]:
        """One transaction without a session: `build` reads the locked state and says what to do (it may raise
        to do nothing); `after` sees the changed view, in the same transaction, and makes the result. Returns
        the filesystem's seq and that. `blobs` are stored with it; others must have been stored before.

        Both functions may run again and on another thread. Raises what they raise, `PosixError` for an
        operation the rules do not simply apply, `Unavailable` when a named blob is not stored any more.
        """
        prepared = self._packs.prepare(fs.id, fs.name, blobs) if blobs else None

        def run(tx: Tx) -> tuple[int, T | None, bool]:
            state = lock(tx, fs)
            view = self._direct_view(tx, fs, state)
            ops = list(build(view))
            self._apply_all(tx, fs, view, ops, prepared)
            # Before the rows are written, so that `after` may also write: it sees the view, not the rows.
            result = None if after is None else after(view)
            moved = self._write(tx, fs, state, Rules(view, me=0, mount="server"), 0) is not None
            return state.seq + 1 if moved else state.seq, result, moved

        with self._packs.landing(fs.name, prepared):
            seq, result, moved = self.when_copied(fs, lambda: self._db.write(run))
        if moved:
            self._feed.wake(fs.id, seq)
        return seq, result

    def direct(
        self, tx: Tx, fs: FsRef, ops: Sequence[Op], prepared: Prepared | None = None
    ) -> tuple[int, bool]:
        """As `apply_direct`, inside a transaction of the caller's, which built `ops` in it under the
        filesystem's lock: the rows are written when this returns. The filesystem's seq, and whether it
        moved: then the caller wakes the feed once the transaction is durable."""
        state = lock(tx, fs)
        view = self._direct_view(tx, fs, state)
        self._apply_all(tx, fs, view, ops, prepared)
        moved = self._write(tx, fs, state, Rules(view, me=0, mount="server"), 0) is not None
        return state.seq + 1 if moved else state.seq, moved

    def write_view(self, tx: Tx, fs: FsRef, view: View) -> tuple[int, bool]:
        """As `direct`, for a change that its caller made on `view`, under the filesystem's lock and for the
        next seq; the blobs it names are stored."""
        state = lock(tx, fs)
        assert view.seq == state.seq + 1, "the view is of the locked state"
        moved = self._write(tx, fs, state, Rules(view, me=0, mount="server"), 0) is not None
        return state.seq + 1 if moved else state.seq, moved

    def new_ino(self) -> int:
        """A number for an inode a direct command makes."""
        return self._numbers.new_ino()

    def _direct_view(self, tx: Tx, fs: FsRef, state: FsState) -> View:
        return View(rows.DbSource(tx, fs.id), state.seq + 1, self._numbers.new_ino, tx)

    def _apply_all(self, tx: Tx, fs: FsRef, view: View, ops: Sequence[Op], prepared: Prepared | None) -> None:
        """Apply every operation or raise."""
        rules = Rules(view, me=0, mount="server")
        guard = guard_of(tx, fs.id, view, writers_of(tx, fs.id), 0, 0, self._host.wall_ns())
        lengths = {} if prepared is None else self._packs.insert(tx, prepared)
        named, refused = examine(ops)
        wanted: set[bytes] = set().union(*named.values()) if named else set()
        if others := wanted - lengths.keys():
            lengths |= self._packs.lengths(tx, fs.id, others)
        if wanted - lengths.keys():
            raise Unavailable("content uploaded for this is not stored any more", hint="try again")
        refused.update(beyond(named, lengths))
        rules.view.prefetch(ops, {})
        if guard is not None:
            guard.prefetch(rules, ops)
        for op in ops:
            if guard is not None:
                guard.check(rules, op)
            try:
                outcome = refused.get(op.opno) or apply(rules, op)
            except NeedFull as exc:
                raise Conflict("the file was changed meanwhile") from exc
            if outcome is not None:
                raise PosixError(outcome.errno, outcome.reason)


class _Folding:
    """Blocks that appends have cut into too many parts, made whole again between two tries of a commit."""

    def __init__(self, packs: Packs, fs: FsRef, own: Sequence[Blob]) -> None:
        self._packs, self._fs = packs, fs
        self._own = {blob.hash: blob for blob in own}
        self._prepared: list[Prepared] = []
        self.folds: dict[Parts, Parts] | None = {}

    def fold(self, parts: Parts) -> None:
        """Make one blob of what `parts` show, and remember it. Past the bound: no appends any more."""
        if self.folds is None or len(self.folds) >= COMMIT_FOLDS_MAX:
            self.folds = None
            return
        found = self._packs.read(self._fs.id, [one for one in blocks.hashes(parts) if one not in self._own])
        opened: dict[bytes, bytes] = {}
        for digest in blocks.hashes(parts):
            blob = self._own.get(digest) or found.get(digest)
            if blob is None:
                raise Unavailable("content of a file is not stored", hint="`fsd audit` says what is lost")
            opened[digest] = open_blob(blob)
        data = assemble(parts, 0, max(part.off + part.length for part in parts), opened)
        whole = make_blob(data)
        self._prepared.append(self._packs.prepare(self._fs.id, self._fs.name, [whole]))
        self.folds[parts] = (Part(0, len(data), 0, whole.hash),)

    def insert(self, tx: Tx, packs: Packs) -> None:
        for prepared in self._prepared:
            packs.insert(tx, prepared)


def lock(tx: Tx, fs: FsRef) -> FsState:
    """`access.hold_tree`, with names."""
    return FsState(*hold_tree(tx, fs))


def beyond(named: Named, lengths: dict[bytes, int]) -> dict[int, Outcome]:
    """Outcomes of operations that name bytes behind the end of a blob: those are stored nowhere. Blobs that
    are not in `lengths` are the caller's."""
    reason = "it names bytes behind the end of a blob"
    return {
        opno: Outcome(opno, REFUSED, errno.EINVAL, 0, 0, b"", reason)
        for opno, ends in named.items()
        if any(end > lengths.get(digest, end) for digest, end in ends.items())
    }


def examine(ops: Sequence[Op]) -> tuple[Named, dict[int, Outcome]]:
    """What each content operation names; and outcomes of those that are wrong in themselves. Raises
    `UsageError` for parts that cannot be read."""
    named: Named = {}
    refused: dict[int, Outcome] = {}
    for op in ops:
        if op.kind != CONTENT:
            continue
        try:
            parts = check(op)  # type: ignore[arg-type]
        except Refuse as no:
            refused[op.opno] = Outcome(op.opno, REFUSED, no.errno, 0, 0, b"", no.reason)
            continue
        ends: dict[bytes, int] = {}
        for one in parts:
            for part in one:
                end = part.boff + part.length
                if end > ends.get(part.hash, 0):
                    ends[part.hash] = end
        named[op.opno] = ends
    return named, refused


def forked() -> SessionForked:
    return SessionForked(
        "another copy of this mount has committed in this session",
        hint="the mount takes a new session and sends its operations again",
    )


def _match(
    tx: Tx, session: SessionRow, seen: list[Op], digests: dict[int, bytes]
) -> tuple[list[Op], tuple[Outcome, ...], int]:
    """Of `seen`, those that were applied before, up to the first that differs; their outcomes, and the oldest
    seq they were applied at. `SessionForked` when it is the first of all.

    A copy of the session is told what it has in common with the other, and only then that it is a copy: what
    both hold is then not made a second time under the copy's new session.
    """
    if not seen:
        return [], (), 0
    known: dict[int, bytes] = {}
    outcomes: dict[int, Outcome] = {}
    found = tx.all(
        "SELECT digests, outcomes, seq FROM applied "
        "WHERE session=? AND last_op>=? AND first_op<=? ORDER BY last_op",
        (session.id, seen[0].opno, seen[-1].opno),
    )
    for raw, told, _ in found:
        known.update(_APPLIED.iter_unpack(raw))
        for row in msgpack.unpackb(told, use_list=False):
            outcomes[row[0]] = Outcome._make(row)
    same = list(itertools.takewhile(lambda op: known.get(op.opno) == digests[op.opno], seen))
    if not same:
        raise forked()
    told = tuple(outcomes[op.opno] for op in same if op.opno in outcomes)
    return same, told, min(row[2] for row in found)


def _apply(
    rules: Rules, ops: list[Op], refused: dict[int, Outcome], guard: Guard | None
) -> tuple[list[Outcome], list[Op], int]:
    """Apply in order: outcomes to tell, operations done, and where a full block list is needed (or 0)."""
    rules.redirects.prefetch(ops, every_name=guard is not None)
    rules.view.prefetch(ops, rules.redirects.known)
    if guard is not None:
        guard.prefetch(rules, ops)
    outcomes: list[Outcome] = []
    for at, op in enumerate(ops):
        held = None if guard is None else guard.forbids(rules, op)
        try:
            if held is not None:
                outcome: Outcome | None = Outcome(op.opno, REFUSED, errno.EROFS, 0, 0, b"", str(held))
            elif rules.never_made(op):
                outcome = Outcome(op.opno, REFUSED, errno.ENOENT, 0, 0, b"", NEVER_MADE)
            else:
                outcome = refused.get(op.opno) or apply(rules, op)
        except NeedFull as need:
            return outcomes, ops[:at], need.opno
        if outcome is not None:
            outcomes.append(outcome)
            if outcome.status == REFUSED and op.kind == CREATE and rules.view.node(op.ino) is None:
                rules.redirects.not_made(op.ino)
    return outcomes, ops, 0
