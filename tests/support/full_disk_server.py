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

from fsd.cli.do_recover import NoCache
from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.token import parse
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.vfs.drive import Driver
from fsd.vfs.open import open_volume
from fsd.vfs.types import VolumeOptions
from fsd.vfs.volume import Volume
from support.full_disk import fill
from support.server import Reply, Server, TestFs
from support.wait import wait_for


def refused(got: Reply) -> None:
    assert got.status == 507 and got.code == "no_space", (got.status, got.body)
    error = got.json["error"]
    assert error["retryable"] and error["hint"] and "full" in error["message"]


def stored(server: Server) -> list[Path]:
    """The objects."""
    return sorted(one for one in (server.data_dir / "blobs").rglob("*") if one.is_file())


def opened(fs: TestFs, state: Path) -> tuple[Volume, Driver]:
    """What a mount is beneath the kernel, and what runs it."""
    options = VolumeOptions(state, "m", "host", "/m", fs.id)
    remote = HttpRemote(RemoteOptions(fs.server.url, parse(fs.token)), Host())
    volume = open_volume(options, Host(), remote, NoCache())
    return volume, Driver(volume, remote, NoCache())


def main() -> None:
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True, timeout=10)
    server = Server(disk.with_name(f"{disk.name}-out"))  # its output is not on the full disk
    server.data_dir = disk / "data"
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
    other = server.create()  # no journal of it keeps what is removed
    for name in ("gone", "pinned"):
        assert other.ask("PUT", f"/files/{name}", os.urandom(2 << 20)).status == 200
    assert other.ask("PUT", "/files/mounted", b"x").status == 200
    for number in range(60):
        assert other.ask("PUT", f"/files/d/{number}?parents=1", b"x").status == 200
    checkpoint = other.ask("POST", "/checkpoints", {}).json["checkpoint_id"]
    assert other.ask("POST", "/actions", {"action": "remove", "path": "/pinned"}).status == 200
    volume, driver = opened(other, filler.parent.parent / "state")
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

    # What makes room is done all the same, many times over; nothing else gets at what it used.
    for number in range(60):
        got = other.ask("POST", "/actions", {"action": "remove", "path": f"/d/{number}"})
        assert got.status == 200, got.body
    refused(fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]}))
    refused(fs.ask("POST", "/actions", {"action": "mkdir", "path": "/new"}))
    before = stored(server)
    for size in (4 << 20, 1 << 20, 200_000):  # as mounts that try again do: none of it stays on the disk
        refused(fs.ask("PUT", "/files/big", os.urandom(size)))
    assert stored(server) == before
    assert other.ask("POST", "/actions", {"action": "remove", "path": "/gone"}).status == 200
    assert other.ask("DELETE", f"/checkpoints/{checkpoint}").status == 200
    mounted = driver.call(lambda: volume.lookup(ROOT_INO, b"mounted"))
    assert mounted is not None
    driver.call(lambda: volume.unlink(ROOT_INO, b"mounted"))
    driver.until(volume.barrier())
    assert other.ask("GET", "/stat/mounted").status == 404

    freed: list[int] = []

    def swept() -> bool:
        got = server.ask("POST", "/v1/sweep", {"older_than_ms": 0}, token=server.admin_key)
        assert got.status == 200, got.body
        freed.append(got.json["object_bytes"])
        return sum(freed) >= 2 * (2 << 20)

    wait_for(swept, 20, "the objects of what was removed to go")
    assert fs.ask("GET", "/files/kept").body == kept
    print("removed")

    # A server that is started on the full disk goes on with it, and so do mounts.
    session = other.ask("POST", "/sessions", {"mount_id": "before"}).json["session"]
    rest = filler.with_name("rest")
    fill(rest)
    assert server.stop() == 0
    server.restart()
    assert other.ask("POST", "/sessions", {"mount_id": "new"}).status == 201
    assert other.ask("GET", f"/changes?after=0&session={session}").status == 200
    assert other.ask("POST", f"/sessions/{session}/report", {"pending": [0, 0, 0]}).status == 200
    assert other.ask("POST", "/actions", {"action": "mkdir", "path": "/more"}).status == 507
    assert other.ask("POST", "/actions", {"action": "remove", "path": "/d"}).status == 200
    rest.unlink()
    print("restarted")

    filler.unlink()
    got = fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]})
    assert got.status == 200 and got.json["first_seq"] == count + 1, got.body
    assert fs.ask("PUT", "/files/big", kept).status == 200
    volume.close()
    assert server.stop() == 0
    server.restart()
    assert fs.ask("GET", "/journals/j/verify").json["entries"] == count + 1
    assert fs.ask("GET", "/files/big").body == kept
    said = server.log.read_text()
    assert "no_space" in said and "Traceback" not in said, said
    print("again")


if __name__ == "__main__":
    main()
