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
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True, timeout=50)
    server = Server(disk.with_name(f"{disk.name}-out"))  # its output is not on the full disk
    server.data_dir = disk / "data"
    try:
        Scene(server, disk / "filler").play()
    finally:
        server.end()


class Scene:
    """A server's disk is full: what goes on, stage by stage, each told on stdout."""

    def __init__(self, server: Server, filler: Path) -> None:
        self.server, self.filler = server, filler

    def play(self) -> None:
        for stage in (self.full, self.starved, self.removed, self.restarted, self.again):
            stage()
            print(stage.__name__)

    def full(self) -> None:
        """Others fill the disk: a large file is refused."""
        self.server.start()
        self.fs = self.server.create()
        self.fs.ask("POST", "/journals", {"journal_id": "j"})
        self.kept = os.urandom(2 << 20)
        assert self.fs.ask("PUT", "/files/kept", self.kept).status == 200
        self.other = self.server.create()  # no journal of it keeps what is removed
        for name in ("gone", "pinned"):
            assert self.other.ask("PUT", f"/files/{name}", os.urandom(2 << 20)).status == 200
        assert self.other.ask("PUT", "/files/mounted", b"x").status == 200
        for number in range(60):
            assert self.other.ask("PUT", f"/files/d/{number}?parents=1", b"x").status == 200
        self.checkpoint = self.other.ask("POST", "/checkpoints", {}).json["checkpoint_id"]
        assert self.other.ask("POST", "/actions", {"action": "remove", "path": "/pinned"}).status == 200
        self.fork = self.other.ask("POST", "/forks", {}).json["file_system_id"]
        wait_for(lambda: self.other.ask("GET", "/forks").json["forks"][0]["copied"], 30, "the fork's copy")
        self.volume, self.driver = opened(self.other, self.filler.parent.parent / "state")
        fill(self.filler)
        refused(self.fs.ask("PUT", "/files/big", os.urandom(4 << 20)))
        assert self.fs.ask("GET", "/stat/big").status == 404

    def starved(self) -> None:
        """Nothing more goes in, all that is there can be read."""
        self.count = 0
        while True:  # the database has some space of its own left
            got = self.fs.ask(
                "POST", "/journals/j/entries", {"entries": [{"type": "a", "x": "y" * 60_000}] * 8}
            )
            if got.status != 200:
                refused(got)
                break
            self.count += 8
            assert self.count < 5000
        refused(
            self.fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a", "x": "y" * 60_000}] * 8})
        )
        assert len(self.fs.ask("GET", "/journals/j/entries?limit=8").json["entries"]) == 8
        assert self.fs.ask("GET", "/journals/j/verify").json["entries"] == self.count
        assert self.fs.ask("GET", "/files/kept").body == self.kept
        assert self.server.ask("GET", "/healthz").status == 200

    def removed(self) -> None:
        """What makes room is done all the same, many times over; nothing else gets at what it used."""
        for number in range(60):
            got = self.other.ask("POST", "/actions", {"action": "remove", "path": f"/d/{number}"})
            assert got.status == 200, got.body
        refused(self.fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]}))
        refused(self.fs.ask("POST", "/actions", {"action": "mkdir", "path": "/new"}))
        before = stored(self.server)
        for size in (4 << 20, 1 << 20, 200_000):  # as mounts that try again do: none of it stays on the disk
            refused(self.fs.ask("PUT", "/files/big", os.urandom(size)))
        assert stored(self.server) == before
        assert self.other.ask("POST", "/actions", {"action": "remove", "path": "/gone"}).status == 200
        assert self.other.ask("DELETE", f"/checkpoints/{self.checkpoint}").status == 200
        assert self.other.ask("DELETE", f"/forks/{self.fork}").status == 200
        told = self.server.admin("GET", f"/v1/file-systems/{self.fs.id}/tokens").json["tokens"]
        for change in ("disable", "enable"):  # who has lost a token cannot wait for room
            token = f"/v1/file-systems/{self.fs.id}/tokens/{told[0]['token_id']}"
            got = self.server.admin("POST", f"{token}/{change}", {})
            assert got.status == 200, got.body
            assert self.fs.ask("GET", "/journals").status == (401 if change == "disable" else 200)
        mounted = self.driver.call(lambda: self.volume.lookup(ROOT_INO, b"mounted"))
        assert mounted is not None
        self.driver.call(lambda: self.volume.unlink(ROOT_INO, b"mounted"))
        self.driver.until(self.volume.barrier())
        assert self.other.ask("GET", "/stat/mounted").status == 404

        freed: list[int] = []

        def swept() -> bool:
            got = self.server.ask("POST", "/v1/sweep", {"older_than_ms": 0}, token=self.server.admin_key)
            assert got.status == 200, got.body
            freed.append(got.json["object_bytes"])
            return sum(freed) >= 2 * (2 << 20)

        wait_for(swept, 30, "the objects of what was removed to go")
        assert self.fs.ask("GET", "/files/kept").body == self.kept

    def restarted(self) -> None:
        """A server that is started on the full disk goes on with it, and so do mounts."""
        session = self.other.ask("POST", "/sessions", {"mount_id": "before"}).json["session"]
        rest = self.filler.with_name("rest")
        fill(rest)
        assert self.server.stop() == 0
        self.server.restart()
        assert self.other.ask("POST", "/sessions", {"mount_id": "new"}).status == 201
        assert self.other.ask("GET", f"/changes?after=0&session={session}").status == 200
        assert self.other.ask("POST", f"/sessions/{session}/report", {"pending": [0, 0, 0]}).status == 200
        assert self.other.ask("POST", "/actions", {"action": "mkdir", "path": "/more"}).status == 507
        assert self.other.ask("POST", "/actions", {"action": "remove", "path": "/d"}).status == 200
        rest.unlink()

    def again(self) -> None:
        """The disk has room: as before."""
        self.filler.unlink()
        got = self.fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]})
        assert got.status == 200 and got.json["first_seq"] == self.count + 1, got.body
        assert self.fs.ask("PUT", "/files/big", self.kept).status == 200
        self.volume.close()
        assert self.server.stop() == 0
        self.server.restart()
        assert self.fs.ask("GET", "/journals/j/verify").json["entries"] == self.count + 1
        assert self.fs.ask("GET", "/files/big").body == self.kept
        said = self.server.log.read_text()
        assert "no_space" in said and "Traceback" not in said, said


if __name__ == "__main__":
    main()
