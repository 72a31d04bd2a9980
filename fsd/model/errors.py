"""The one error tree. Each class carries what every boundary needs to translate it once.

`code` is stable and documented (JSON `error.code`), `errno` is what the mount answers, `status` the HTTP
status, `exit_code` the command line's. `hint` says what to do. The cause is kept by `raise … from`.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, ClassVar


class FsdError(Exception):
    """Base of every error fsd raises on purpose."""

    code: ClassVar[str] = "internal"
    errno: int = _errno.EIO
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(
        self, message: str, *, hint: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details = details or {}
        self.request_id: str | None = None

    def body(self, request_id: str) -> dict[str, Any]:
        """The JSON body of this error, the same on every route."""
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "request_id": request_id,
        }
        if self.details:
            error["details"] = self.details
        return {"error": error}


class InternalError(FsdError):
    """A defect or an unexpected failure of the other side."""

    retryable = True
    default_hint = "try again; if it stays, report it with the request id"


class UsageError(FsdError):
    """The call itself is wrong; nothing was done."""

    code = "invalid_argument"
    errno = _errno.EINVAL
    status = 400
    exit_code = 2


class UnknownRegion(UsageError):
    """The region code is none of those the token knows."""

    code = "unknown_region"


class TooLarge(UsageError):
    """A body, a name or a value over its limit."""

    code = "too_large"
    errno = _errno.EFBIG
    status = 413


class NotAuthenticated(FsdError):
    """No token, a wrong, expired, disabled or truncated one."""

    code = "not_authenticated"
    errno = _errno.EACCES
    status = 401
    exit_code = 3
    default_hint = "check FSD_TOKEN; create a new token with `fsd token create` where the admin key is"


class NotPermitted(FsdError):
    """The token is good, but not for this."""

    code = "not_permitted"
    errno = _errno.EACCES
    status = 403
    exit_code = 4


class NotFound(FsdError):
    """The named thing does not exist (or must not be known to exist)."""

    code = "not_found"
    errno = _errno.ENOENT
    status = 404
    exit_code = 5


class Conflict(FsdError):
    """Somebody else was first; nothing was done."""

    code = "conflict"
    errno = _errno.EEXIST
    status = 409


class IdempotencyMismatch(Conflict):
    """The same idempotency key with other content."""

    code = "idempotency_mismatch"


class SessionForked(Conflict):
    """This session's operations come from two processes: a copy of the machine was started."""

    code = "session_forked"
    errno = _errno.ESTALE


class SessionUnknown(NotFound):
    """The server does not know this mount session (another server, or it was deleted)."""

    code = "session_unknown"
    errno = _errno.ESTALE


class PosixError(FsdError):
    """A filesystem rule said no. Carries its own errno; `fs_<name>` is the code on the wire."""

    code = "fs_error"
    status = 409

    def __init__(self, number: int, message: str, *, hint: str = "") -> None:
        name = _errno.errorcode.get(number, str(number))
        super().__init__(f"{message}: {name}", hint=hint, details={"errno": name})
        self.errno = number


class QuotaExceeded(FsdError):
    """The filesystem's quota is used up."""

    code = "quota_exceeded"
    errno = _errno.EDQUOT
    status = 409


class NoSpace(FsdError):
    """A disk is full: the server's, or the one under the state directory (the message names it)."""

    code = "no_space"
    errno = _errno.ENOSPC
    status = 507
    retryable = True


class DiskFailed(NoSpace):
    """The disk under the state directory takes nothing more: it fails, or was made read-only. What waits for
    room on a full one waits for this one too; whoever changes something is told at once."""

    code = "disk_failed"
    errno = _errno.EIO

    @staticmethod
    def way_out(root: str) -> str:
        """What can be done about what a state directory below `root` holds, while it can be read."""
        return (
            "what it holds can be sent from a copy, made before this machine is restarted: "
            f"`cp -a {root} NEW`, then `fsd recover MOUNTPOINT --state-dir NEW`"
        )


class Unavailable(FsdError):
    """The server is down, unreachable, slow, or answered something that is no answer."""

    code = "unavailable"
    errno = _errno.EIO
    status = 503
    retryable = True
    default_hint = "check the network and that the server runs, then try again"


class ForkCopying(Unavailable):
    """A fork is still an alias of its origin: it can be read, and written once it is copied."""

    code = "fork_copying"
    default_hint = "try again in a moment; `fsd describe` tells how far it is"


class IntegrityError(FsdError):
    """Stored bytes do not have the hash they are named by, or a format is broken."""

    code = "integrity"
    errno = _errno.EIO
    status = 500


class DamagedBody(FsdError):
    """A request's body was cut or changed on the way: what it says of itself is not what arrived. The sender
    still has it, and sends it again."""

    code = "damaged_body"
    status = 400
    retryable = True
    default_hint = "send it again"


class FormatTooNew(FsdError):
    """Data written by a newer version."""

    code = "format_too_new"
    default_hint = "use the newer fsd that wrote it"


class NotDrained(FsdError):
    """Something is left that only this machine holds."""

    code = "not_drained"
    status = 409
    exit_code = 6
    default_hint = (
        "keep this machine: the next `fsd mount` of the same place, or `fsd recover`, sends it or says what "
        "else can be done"
    )


class Busy(FsdError):
    """In use: a mount, a state directory, a data directory, a lease."""

    code = "busy"
    errno = _errno.EBUSY
    status = 409
    exit_code = 7


class LeaseHeld(Busy):
    """Somebody else holds the lease that this needs. The message names the holder; `details.holder` too."""

    code = "lease_held"
    errno = _errno.EROFS
    default_hint = "wait until it is released or has expired, or stop the holder"


class LeaseLost(FsdError):
    """The lease this was done under has expired and somebody else took it."""

    code = "lease_lost"
    status = 409
    exit_code = 6
    default_hint = (
        "nothing is lost: `fsd recover` with --as-conflicts sends it by the rules for all, with --export DIR "
        "it takes it out"
    )


class HistoryChanged(FsdError):
    """The service has gone back to an older copy of its data: it does not have what this client has seen,
    and may use the same numbers for something else. Nothing made on what it knew may be sent there."""

    code = "history_changed"
    errno = _errno.ESTALE
    status = 409
    exit_code = 6
    default_hint = (
        "what was not sent is kept: unmount; `fsd recover` with --export DIR takes it out, with --discard it "
        "drops it; then mount again"
    )


class LockLost(FsdError):
    """A lock of `fsd lock` went to somebody else, or perhaps did, while its command ran."""

    code = "lock_lost"


class Unsupported(FsdError):
    """Known, but not possible here; the message says why."""

    code = "unsupported"
    errno = _errno.EOPNOTSUPP
    status = 501
    exit_code = 2


class CheckpointError(FsdError):
    """Base of what the checkpoint contract refuses; its codes are the contract's own."""

    code = "SANDBOX_SNAPSHOT_ERROR"
    errno = _errno.EINVAL
    status = 409


class CheckpointInvalidId(CheckpointError):
    """An id is no string, empty, or not well-formed Unicode; or not one for the caller to use."""

    code = "SANDBOX_SNAPSHOT_INVALID_ID"
    status = 422
    exit_code = 2


class CheckpointInvalidEntry(CheckpointError):
    """A file, an artifact, a time or `keep` breaks the rules of manifests."""

    code = "SANDBOX_SNAPSHOT_INVALID_ENTRY"
    status = 422
    exit_code = 2


class WriterLost(CheckpointError):
    """The writer's lease is over, released, replaced, or of another thread."""

    code = "SANDBOX_SNAPSHOT_WRITER_LOST"
    errno = _errno.ESTALE
    default_hint = "acquire the thread's writer again, and read its head before writing"


class WriterConflict(CheckpointError):
    """Somebody else holds the thread's lease."""

    code = "SANDBOX_SNAPSHOT_WRITER_CONFLICT"
    errno = _errno.EBUSY
    exit_code = 7
    default_hint = "try again when the run or the capture that holds it has ended"


class CheckpointDuplicateId(CheckpointError):
    """The id names a checkpoint already, in this thread or another."""

    code = "SANDBOX_SNAPSHOT_DUPLICATE_ID"
    errno = _errno.EEXIST


class StaleHead(CheckpointError):
    """The thread's head is not the expected one."""

    code = "SANDBOX_SNAPSHOT_STALE_HEAD"
    errno = _errno.ESTALE


class ParentMismatch(CheckpointError):
    """The checkpoint's parent is not the expected head."""

    code = "SANDBOX_SNAPSHOT_PARENT_MISMATCH"


class NotHead(CheckpointError):
    """Only a thread's head can be removed alone."""

    code = "SANDBOX_SNAPSHOT_NOT_HEAD"


class ForkSourceNotFound(CheckpointError):
    """The checkpoint to fork from does not exist."""

    code = "SANDBOX_SNAPSHOT_FORK_SOURCE_NOT_FOUND"
    errno = _errno.ENOENT
    status = 404
    exit_code = 5


class ForkSourceThreadMismatch(CheckpointError):
    """The checkpoint to fork from is in another thread, or the thread would be forked into itself."""

    code = "SANDBOX_SNAPSHOT_FORK_SOURCE_THREAD_MISMATCH"


class ForkDestinationNotEmpty(CheckpointError):
    """The thread to fork into has checkpoints or a transcript, or the new id is taken."""

    code = "SANDBOX_SNAPSHOT_FORK_DESTINATION_NOT_EMPTY"
    errno = _errno.EEXIST


class CheckpointNotFound(CheckpointError):
    """A head's record is missing."""

    code = "SANDBOX_SNAPSHOT_CHECKPOINT_NOT_FOUND"
    errno = _errno.ENOENT
    status = 404
    exit_code = 5


class MissingBlob(CheckpointError):
    """A checkpoint names a blob that is not stored under its name."""

    code = "SANDBOX_SNAPSHOT_MISSING_BLOB"
    errno = _errno.ENOENT
    status = 404


class InvalidBlob(CheckpointError):
    """The bytes of a blob do not hash to its name."""

    code = "SANDBOX_SNAPSHOT_INVALID_BLOB"
    status = 422


class UnsupportedEntry(CheckpointError):
    """A capture or restore met what a manifest cannot hold: a device, a socket, a link that leaves."""

    code = "SANDBOX_SNAPSHOT_UNSUPPORTED_ENTRY"
    status = 422
    default_hint = "leave it out with --exclude, or remove it"


class InvalidPath(CheckpointError):
    """A path that no manifest may hold, or that a restore must not touch."""

    code = "SANDBOX_SNAPSHOT_INVALID_PATH"
    status = 422


class InvalidWorkspace(CheckpointError):
    """The local directory is none, cannot be read, or changes faster than it can be read."""

    code = "SANDBOX_SNAPSHOT_INVALID_WORKSPACE"
    status = 422


class InvalidRange(CheckpointError):
    """A number is outside of its range (JavaScript's RangeError)."""

    code = "INVALID_RANGE"
    status = 422
    exit_code = 2


def _all_classes(base: type[FsdError]) -> dict[str, type[FsdError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found.update(_all_classes(sub))
    return found


def hint_between(status: int) -> str:
    """What to do where something between client and server answered with `status`."""
    if status == TooLarge.status:
        return "something between takes no body of this size: raise its limit (nginx: client_max_body_size 0)"
    return "something between may have answered; check the endpoint, and that `fsd serve` runs there"


def from_body(body: object, status: int) -> FsdError:
    """The error a server's JSON body stands for. A body that is none becomes `Unavailable`.

    `status` is the HTTP status it came with.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        said = f"the server answered {status} without an fsd error body"
        if status == TooLarge.status:  # a mount shows the message alone
            said = f"something between answered {status}: it takes no body of this size"
        return Unavailable(said, hint=hint_between(status))
    known = _all_classes(FsdError)
    cls = known.get(error["code"], FsdError)
    message = str(error.get("message", ""))
    details = error.get("details")
    details = details if isinstance(details, dict) else {}
    if error["code"] not in known:  # a newer server's: an error without a class
        details = {**details, "code": error["code"]}
    made: FsdError
    if cls is PosixError:
        number = getattr(_errno, str(details.get("errno")), _errno.EIO)
        made = PosixError(number, message.rsplit(": ", 1)[0], hint=str(error.get("hint", "")))
    else:
        made = cls(message, hint=str(error.get("hint", "")), details=details)
    made.request_id = str(error.get("request_id", "")) or None
    return made
