"""`fsd mount --thread T --restore-head`: the thread's newest checkpoint into a mount that is up, but of which
nobody was told yet.

A process of its own, for the reason `syncer` is one: who waits for the mount must not be the daemon. Reads
what it is to do as JSON on stdin (`Order`), answers a line of JSON: {"ok": {…}} or an error body.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final, NamedTuple

from fsd.client import manifest
from fsd.client.contract import Contract
from fsd.client.http import Http
from fsd.client.identity import Claim, data_identity
from fsd.client.policy import of_record
from fsd.client.restore import Restore
from fsd.host.seam import Host
from fsd.model.errors import CheckpointNotFound, Conflict, FsdError, InternalError

HOW: Final = "go on with what is there without --restore-head, or replace it with --exclusive"
NATIVE: Final = "native"  # the field of a record that is a state of this filesystem, not a manifest


class Order(NamedTuple):
    """What to do. `replace`: the mount is the only writer of its subtree, so what is there may go."""

    token: str
    endpoint: str
    insecure: bool
    thread: str
    place: str
    remote_path: str
    session: int
    replace: bool


def restore(order: Order) -> dict[str, Any]:
    """Restore the head; what was done. `fs_seq`: the mount has to show that commit first."""
    host = Host()
    http = Http(data_identity(Claim(order.token, None, None, order.endpoint, None, order.insecure)), host)
    contract = Contract(http)
    head = contract.call("getHead", {"threadId": order.thread})
    if head is None:
        return {"checkpoint_id": None, "files": 0, "fs_seq": None}
    record = contract.call("get", {"id": head})
    if record is None:
        raise CheckpointNotFound(f"the thread's head {head!a} has no record")
    if record.get(NATIVE):
        return _native(http, order, head)
    work = Restore(manifest.read(record["files"]), of_record(record), contract.fetch, host)
    done = work.run(order.place, replace=order.replace, how=HOW)
    return {"checkpoint_id": head, "files": done.files, "fs_seq": None}


def _native(http: Http, order: Order, head: str) -> dict[str, Any]:
    """A state of the filesystem itself: the server sets the subtree back."""
    there = os.listdir(order.place)
    if there and not order.replace:
        raise Conflict(
            f"{order.place} is not empty ({sorted(there)[0]!r})",
            hint=HOW,
        )
    body = {"checkpoint": head, "own_sessions": [order.session], "force": True}
    if order.remote_path.strip("/"):
        body["path"] = order.remote_path
    done = http.json("POST", f"/v1/file-systems/{http.identity.file_system_id}/restore", body=body)
    return {"checkpoint_id": head, "files": done.get("changes", 0), "fs_seq": done["fs_seq"]}


def main() -> None:
    os.umask(0o022)
    try:
        answer: dict[str, Any] = {"ok": restore(Order(**json.loads(sys.stdin.read())))}
    except FsdError as exc:
        answer = exc.body("")
    except OSError as exc:
        answer = InternalError(f"restoring the head failed: {exc}").body("")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
