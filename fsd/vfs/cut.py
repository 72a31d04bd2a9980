"""A checkpoint made through the mount: the cut, and what happens when everything before it is committed.

The cut is one moment of the volume's thread: operations and contents before it are in the checkpoint, later
ones are not. Every changed file is frozen and gets its operation number right then, so "before" is "numbered
up to `last`". Until the checkpoint is made no commit goes beyond that number; later changes are logged and
wait, as do their fsyncs. The commit that reaches `last` asks for the checkpoint itself, so that both are one
transaction of the server; where there is nothing to commit (or its answer brings none) the server's state is
that of the cut all the same, and a call of its own asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fsd.model.errors import Busy, FsdError, NotDrained, Unavailable, from_body
from fsd.model.names import show
from fsd.model.plain import dataclass, field
from fsd.remote.api import Remote
from fsd.vfs.core import Core
from fsd.vfs.flush import Flusher
from fsd.vfs.queue import Queued
from fsd.vfs.refused import Refusal
from fsd.vfs.types import BULK, FAST, Cache, Want

RETRY: Final = 0.5
CALL_TIMEOUT: Final = 30.0
INLINE_FILES: Final = 16  # so few small files are made at once, and all is one request


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointJob:
    """Ask for the checkpoint of the server's present state. `key` makes a repetition the same request."""

    ask: Mapping[str, Any]
    key: str
    lane: str = FAST

    def run(self, remote: Remote, cache: Cache) -> dict[str, Any]:
        return remote.create_checkpoint(self.ask, self.key, CALL_TIMEOUT)


@dataclass(frozen=True, slots=True, eq=False)
class DropJob:
    """Delete a checkpoint that was made after its cut had been given up: who asked was told there is none."""

    checkpoint: str
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> None:
        remote.delete_checkpoint(self.checkpoint)


@dataclass(slots=True, eq=False)
class Cut:
    """One cut. `want` ends with the server's answer as its result; `reached` when everything up to operation
    `last` is committed. `partial`: changes the server refuses may be missing from it."""

    want: Want
    reached: Want
    last: int
    ask: Mapping[str, Any]
    partial: bool
    key: str
    made: Mapping[str, Any] | None = None
    job: CheckpointJob | None = None
    retry_at: float | None = None
    refused: list[dict[str, str]] = field(default_factory=list)


class Cutter:
    """One mount's cuts, one at a time. Volume thread."""

    def __init__(self, core: Core, flusher: Flusher) -> None:
        self.core = core
        self.flusher = flusher
        self.cut: Cut | None = None

    def begin(self, ask: Mapping[str, Any], *, partial: bool, within: float | None) -> Want:
        """Cut now. The want ends with `NotDrained` after `within` seconds, or when the server refused a
        change that is in the cut and `partial` is not set; its details name those. Raises `Busy` while
        another cut is being committed, `NoSpace`."""
        core = self.core
        self.advance(core.now())
        if self.cut is not None:
            raise Busy("another checkpoint of this mount is being made", hint="try again when it is done")
        inline = len(core.dirty) <= INLINE_FILES
        for ino in list(core.dirty):
            node = core.nodes.by_ino.get(ino)
            if node is not None and not node.gone:
                node.file().hold = False
                self.flusher.freeze(node, inline=inline)
                self.flusher.reserve(node)
        reached = core.commit_want("what is to be in the checkpoint", [], limited=False)
        want = Want("a checkpoint", None if within is None else core.now() + within)
        want.late = NotDrained(f"not everything could be committed within {within} s: no checkpoint was made")
        core.wants.append(want)
        last = core.next_op - 1
        core.queue.held = last
        self.cut = Cut(want, reached, last, ask, partial, core.host.token_bytes(16).hex())
        self.advance(core.now())
        return want

    def stretch(self) -> None:
        """What was in the cut got other numbers (`twins.apart`): what was numbered meanwhile comes along."""
        if self.cut is not None and not self.cut.reached.finished:
            self.cut.last = self.core.queue.held = self.core.next_op - 1

    def asked_with(self, batch: list[Queued]) -> dict[str, Any] | None:
        """What a commit of `batch` asks for beside: the checkpoint, when it reaches the cut."""
        cut, queue = self.cut, self.core.queue
        if cut is None or cut.want.finished or (cut.refused and not cut.partial):
            return None
        following = queue.after(batch)
        if following is not None and following.opno <= cut.last:
            return None
        return {**cut.ask, "partial": cut.partial}

    def note_refused(self, refusals: tuple[Refusal, ...]) -> None:
        """Changes that are in the cut and not on the server."""
        if self.cut is not None:
            self.cut.refused += [{"path": show(one.path), "reason": one.reason} for one in refusals]

    def committed(self, made: Mapping[str, Any] | None) -> None:
        """A commit was answered; `made` is the checkpoint it brought."""
        if made is None:
            return
        if self.cut is None or self.cut.want.finished:
            self._drop(made)
        else:
            self.cut.made = made

    def _drop(self, made: Mapping[str, Any]) -> None:
        if "checkpoint_id" in made:
            self.core.jobs.append(DropJob(str(made["checkpoint_id"])))

    def finish(self, job: CheckpointJob, result: dict[str, Any] | FsdError) -> None:
        """The server answered a call of its own."""
        cut = self.cut
        if cut is None or cut.job is not job or cut.want.finished:
            if not isinstance(result, FsdError):
                self._drop(result)
            return
        cut.job = None
        if isinstance(result, Unavailable):
            self.core.reason = result.message
            cut.retry_at = self.core.now() + RETRY
        elif isinstance(result, FsdError):
            cut.want.end(result)
        else:
            cut.made = result

    def advance(self, now: float) -> None:
        """What follows from what was reached; afterwards the queue is held while a cut is pending, and only
        then. Call after every event."""
        cut = self.cut
        if cut is None:
            return
        if not cut.want.finished and cut.reached.finished:
            self._reached(cut, now)
        if cut.want.finished:
            self.cut = None
            self.core.queue.held = None
            cut.reached.end()  # nobody presses for it any more

    def _reached(self, cut: Cut, now: float) -> None:
        """Everything in the cut is committed, or was given up."""
        if cut.reached.error is not None:
            cut.want.end(cut.reached.error)
        elif cut.made is not None:
            error = from_body(cut.made, 409) if "error" in cut.made else None
            cut.want.result = {**cut.made, "not_flushed": cut.refused}
            cut.want.end(error)
        elif cut.refused and not cut.partial:
            cut.want.end(
                NotDrained(
                    f"the server refused {len(cut.refused)} changes: no checkpoint was made",
                    hint="`fsd recover` tells more; --partial makes the checkpoint without them",
                    details={"status": "not_drained", "not_flushed": cut.refused},
                )
            )
        elif cut.job is None and (cut.retry_at is None or cut.retry_at <= now):
            cut.retry_at = None
            cut.job = CheckpointJob(cut.ask, cut.key)
            self.core.jobs.append(cut.job)
