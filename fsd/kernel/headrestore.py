"""`fsd mount --thread T --restore-head`: the thread's newest checkpoint into a mount that is up, but of which
nobody was told yet.

A process of its own, for the reason `syncer` is one: who waits for the mount must not be the daemon. Reads
what it is to do as JSON on stdin (`Order`), answers lines of JSON: {"say": text}, and at last {"ok": {…}} or
an error body.

Of several that are started together one restores: under a lock on the server, from before it looks whether
anything is there until what it made is committed. Who comes next finds that. Of a restore that ended on the
way something is left that tells it: the directory in which contents are verified is made before anything is
put into its place and goes last, and a mount's changes are committed in their order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from fsd.client import manifest
from fsd.client.contract import Contract
from fsd.client.files import json_name
from fsd.client.http import Http
from fsd.client.identity import Claim, data_identity
from fsd.client.leases import Holder, Leases, LockOptions, hold
from fsd.client.policy import of_record
from fsd.client.restore import STAGING, Restore
from fsd.host.seam import Host
from fsd.kernel.control_client import Progress, request
from fsd.model.errors import CheckpointNotFound, Conflict, FsdError, InternalError, NotDrained

HOW: Final = "--if-empty goes on with what is there, as without --restore-head; --exclusive replaces it"
BROKEN: Final = "replace it with --exclusive, or remove what is there"
NATIVE: Final = "native"  # the field of a record that is a state of this filesystem, not a manifest
LOCK: Final = b"/.fsd-restore-head"  # and the subtree's path
TTL: Final = 30.0  # so long others wait for a sandbox that is lost while it restores
SHOWN_WITHIN: Final = 30.0  # the change feed tells of a commit
SAY_AGAIN: Final = 10.0
GIVE_UP: Final = 10.0
SILENCE: Final = 30.0  # a daemon at work says something every second


class Order(NamedTuple):
    """What to do. `replace`: the mount is the only writer of its subtree, and what is there goes; `if_empty`:
    what is there stays, and is no error. `control` is the daemon's socket."""

    token: str
    endpoint: str
    insecure: bool
    thread: str
    place: str
    remote_path: str
    session: int
    control: str
    replace: bool
    if_empty: bool


class Stop:
    """SIGTERM ends this process by an exception, so that what was fetched goes before it; where that is
    already being put into its place (`waits`), when that is done."""

    def __init__(self) -> None:
        self.waits = self._asked = False
        signal.signal(signal.SIGTERM, self._arrived)

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._asked = True
        if not self.waits:
            raise SystemExit(1)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Within it `waits` may be set; a stop that waited comes at its end."""
        yield
        self.waits = False
        if self._asked:
            raise SystemExit(1)


class Work:
    """One restore. What was done: {"checkpoint_id", "files"}, or {"there": what keeps from it}."""

    def __init__(self, order: Order, stop: Stop) -> None:
        self.order, self.host, self._stop = order, Host(), stop
        self.top = order.remote_path.encode("utf-8", "surrogateescape")
        self._told = self.host.monotonic()
        claim = Claim(order.token, None, None, order.endpoint, None, order.insecure)
        self.http = Http(data_identity(claim), self.host)
        self.contract = Contract(self.http)

    def run(self) -> dict[str, Any]:
        self._hold()
        try:
            done = self._under_lock()
        except Conflict:
            self.guard.release(say)  # nothing was done
            raise
        except (FsdError, OSError):
            self._give_up()
            raise
        self.guard.release(say)
        return done

    def _under_lock(self) -> dict[str, Any]:
        if not self.order.replace:
            self._show(self._newest())
            self._no_part()
        done = self._unless_there()
        if done.get("checkpoint_id"):
            self._send(None)
            self.guard.check()
        return done

    def _give_up(self) -> None:
        """What was made, and taken away again, is sent: others then find what there is. Where that cannot be
        done at once, they find it when the lock has expired."""
        try:
            self._send(GIVE_UP)
        except FsdError as exc:
            say(f"others wait {TTL:g} s for what is not sent: {exc.message}")
        else:
            self.guard.release(say)

    def _hold(self) -> None:
        options = LockOptions(
            path=LOCK + self.top.rstrip(b"/"),
            command=("--restore-head", self.order.thread),
            env={},
            host=socket.gethostname(),
            timeout=None,
            ttl=TTL,
            who="restoring the head",
        )
        self.guard: Holder = hold(Leases(self.http), options, say)

    def _newest(self) -> int:
        found: int = self.http.json("GET", f"/v1/file-systems/{self.http.identity.file_system_id}")["seq"]
        return found

    def _show(self, seq: int) -> None:
        """Until the mount shows that commit."""
        self._ask("wait", {"seq": seq, "timeout": SHOWN_WITHIN})

    def _send(self, within: float | None) -> None:
        """Until all that was written through the mount is committed."""
        answer = self._ask("drain", {"timeout": within}, self._sending)
        if answer["status"] == "not_drained":
            raise NotDrained(f"what was restored could not be sent: {answer['reason']}")

    def _sending(self, news: dict[str, Any]) -> None:
        if self.host.monotonic() - self._told >= SAY_AGAIN:
            self._told = self.host.monotonic()
            say(f"restoring the head: {news.get('text', '')}")

    def _ask(self, verb: str, args: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        return request(Path(self.order.control), verb, args, timeout=SILENCE, progress=progress)

    def _no_part(self) -> None:
        """What a restore left that did not end is nothing to go on with."""
        for name in os.listdir(self.order.place):
            if name.startswith(STAGING):
                raise Conflict(
                    f"{self.order.place} holds a part of a checkpoint: a restore did not end ({name})",
                    hint=BROKEN,
                )

    def _unless_there(self) -> dict[str, Any]:
        try:
            return self._head()
        except Conflict as exc:  # something is there, and nothing was done
            if not self.order.if_empty:
                raise
            return {"there": exc.message}

    def _head(self) -> dict[str, Any]:
        head = self.contract.call("getHead", {"threadId": self.order.thread})
        if head is None:
            return {"checkpoint_id": None, "files": 0}
        if self.order.thread == f"fsd:{self.http.identity.file_system_id}":
            return self._native(head)  # whatever its names, and however many: no manifest is asked for
        record = self.contract.call("get", {"id": head})
        if record is None:
            raise CheckpointNotFound(f"the thread's head {head!a} has no record")
        if record.get(NATIVE):
            return self._native(head)
        work = Restore(manifest.read(record["files"]), of_record(record), self.contract.fetch, self.host)
        with self._stop.later():
            done = work.run(
                self.order.place, replace=self.order.replace, how=HOW, marked=True, verified=self._verified
            )
        return {"checkpoint_id": head, "files": done.files}

    def _verified(self) -> None:
        """Who was paused for longer than the lock lasts puts nothing beside what another made meanwhile. All
        is here, and from now on a stop waits until it is in its place: a part would be in everybody's way."""
        self.guard.check()
        self._stop.waits = True

    def _native(self, head: str) -> dict[str, Any]:
        """A state of the filesystem itself: the server sets the subtree back, unless something is there."""
        body: dict[str, Any] = {"checkpoint": head, "own_sessions": [self.order.session], "force": True}
        if not self.order.replace:
            body["empty"] = True
        if self.top.strip(b"/"):
            body["path"] = json_name(self.top)
        route = f"/v1/file-systems/{self.http.identity.file_system_id}/restore"
        try:
            done = self.http.json("POST", route, body=body)
        except Conflict as exc:
            raise Conflict(exc.message, hint=HOW) from exc
        self._show(done["fs_seq"])
        return {"checkpoint_id": head, "files": done.get("changes", 0)}


def say(text: str) -> None:
    print(json.dumps({"say": text}), flush=True)


def main() -> None:
    os.umask(0o022)
    stop = Stop()
    try:
        answer: dict[str, Any] = {"ok": Work(Order(**json.loads(sys.stdin.read())), stop).run()}
    except FsdError as exc:
        answer = exc.body("")
    except OSError as exc:
        answer = InternalError(f"restoring the head failed: {exc}").body("")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
