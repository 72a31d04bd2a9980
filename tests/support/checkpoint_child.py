"""A service that is killed at a crash point while it makes (`make`; `thread`: one of a host's
thread), restores or deletes checkpoints.

    python -m support.checkpoint_child DIRECTORY ACTION POINT [DATABASE]

First a tree, a checkpoint of it, and the tree changed. Then ACTION, with the crash armed.
Prints one JSON line before it: the filesystem and the checkpoint's id.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsd.host.seam import Crasher, Host
from fsd.model.attrs import ROOT_INO
from fsd.service.access import ADMIN_GRANT
from fsd.service.contract_check import check_writer
from fsd.service.inthread import Place
from fsd.service.native import Ask
from fsd.service.restore import Wish
from fsd.service.retained import At
from fsd.service.text import new_id
from support.bench import Bench

FIRST: dict[str, object] = {f"f{number}": b"one %d" % number for number in range(40)}
SECOND: dict[str, object] = {
    **{f"f{number}": b"two %d" % number for number in range(20)},
    **{f"f{number}": b"one %d" % number for number in range(30, 40)},
    "new": b"n",
}


def prepare(bench: Bench) -> str:
    """The checkpoint's id."""
    m = bench.mount()
    inos = {
        name: m.file(ROOT_INO, name.encode(), data) for name, data in FIRST.items() if isinstance(data, bytes)
    }
    m.commit()
    made = bench.service.db.write(
        lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask(label="first"))
    )
    for number in range(20):
        m.write(inos[f"f{number}"], b"two %d" % number, m.seq)
    for number in range(20, 30):
        m.unlink(ROOT_INO, b"f%d" % number, inos[f"f{number}"], m.seq)
    m.file(ROOT_INO, b"new", b"n")
    m.commit()
    bench.service.sessions.end(bench.fs, m.session, "clean", (0, 0, 0))
    name: str = made["checkpoint_id"]
    return name


def act(bench: Bench, action: str, name: str) -> None:
    service, fs = bench.service, bench.fs
    if action == "make":
        service.db.write(lambda tx: service.checkpoints.make(tx, fs, None, Ask(label="second")))
    elif action == "thread":
        thread = new_id(bench.host, "host-")  # who was killed still has the lease on the one before
        take = service.threads.acquire(fs, ADMIN_GRANT, {"threadId": thread})
        lease = json.loads(service.db.write(take))
        writer = check_writer({name: lease[name] for name in ("threadId", "ownerToken", "fence")})
        place, ask = Place(thread, writer, None, None), Ask(label="second")
        service.in_thread.make(fs, ADMIN_GRANT, ask, place, lambda tx, make: make(tx))
    elif action == "delete":
        service.db.write(lambda tx: service.checkpoints.delete(tx, fs, None, name))
    else:
        path = (b"f1",) if action == "restore path" else ()
        service.db.write(lambda tx: service.restores.restore(tx, fs, None, Wish(At(checkpoint=name), path)))


def main() -> None:
    directory, action, point = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    crasher = Crasher(point, 10**9)
    bench = Bench(directory, Host(crash_point=crasher), sys.argv[4] if len(sys.argv) > 4 else None)
    name = prepare(bench)
    print(json.dumps({"fs": [bench.fs.id, bench.fs.name], "checkpoint": name}))
    sys.stdout.flush()
    crasher.seen, crasher.count = 0, 1
    act(bench, action, name)
    print(json.dumps("done"))


if __name__ == "__main__":
    main()
