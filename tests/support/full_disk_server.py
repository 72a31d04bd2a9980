"""What `fsd serve` does on a full disk. Run inside `unshare -m` by test_server_full_disk.

`full_disk_server.py DIR` mounts 64 MiB of memory on DIR, starts a server there and asserts its way through;
one word a stage is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.full_disk import fill
from support.server import Reply, Server


def refused(got: Reply) -> None:
    assert got.status == 507 and got.code == "no_space", (got.status, got.body)
    error = got.json["error"]
    assert error["retryable"] and error["hint"] and "full" in error["message"]


def main() -> None:
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True, timeout=10)
    server = Server(disk / "server")
    try:
        scene(server, disk / "filler")
    finally:
        server.end()


def scene(server: Server, filler: Path) -> None:
    server.start()
    fs = server.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    kept = os.urandom(2 << 20)
    assert fs.ask("PUT", "/files/kept", kept).status == 200
    fill(filler)
    refused(fs.ask("PUT", "/files/big", os.urandom(4 << 20)))
    assert fs.ask("GET", "/stat/big").status == 404
    print("full")

    count = 0
    while True:  # the database has some space of its own left
        got = fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a", "x": "y" * 60_000}] * 8})
        if got.status != 200:
            refused(got)
            break
        count += 8
        assert count < 5000
    refused(fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a", "x": "y" * 60_000}] * 8}))
    assert len(fs.ask("GET", "/journals/j/entries?limit=8").json["entries"]) == 8
    assert fs.ask("GET", "/journals/j/verify").json["entries"] == count
    assert fs.ask("GET", "/files/kept").body == kept
    assert server.ask("GET", "/healthz").status == 200
    print("starved")

    filler.unlink()
    got = fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]})
    assert got.status == 200 and got.json["first_seq"] == count + 1, got.body
    assert fs.ask("PUT", "/files/big", kept).status == 200
    assert server.stop() == 0
    server.restart()
    assert fs.ask("GET", "/journals/j/verify").json["entries"] == count + 1
    assert fs.ask("GET", "/files/big").body == kept
    print("again")


if __name__ == "__main__":
    main()
