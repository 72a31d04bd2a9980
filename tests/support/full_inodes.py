"""What the client does where its state directory's disk has room but no inodes left. Run inside `unshare -m`
by test_client_disk_full.

`full_inodes.py DIR SERVER_DIR` mounts memory with few inodes on DIR and asserts its way through; one word a
stage is printed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsd.model.errors import NoSpace
from fsd.model.limits import MIB
from fsd.vfs.types import Park
from support.bench import Bench
from support.client import Client, Clock, server_tree


def take_inodes(disk: Path) -> list[Path]:
    """Every inode that is left, each by an empty file."""
    taken: list[Path] = []
    while True:
        filler = disk / f"filler{len(taken)}"
        try:
            filler.touch()
        except OSError:
            return taken
        taken.append(filler)


def main() -> None:
    disk, server = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m,nr_inodes=40", "tmpfs", disk], check=True, timeout=50
    )
    client = Client(disk / "mount", Bench(server), Clock(), random.Random(1))
    client.net.faulty = False
    client.options = replace(client.options, segment_size=4 * MIB, io_timeout=10.0)
    client.open()
    client.volume.core.log._give_spare()  # as on a disk that was nearly full before
    fillers = take_inodes(disk)
    root = client.volume.root_ino
    written: dict[bytes, bytes] = {}
    # One segment's worth goes on as ever, and what the server takes makes place for more.
    for at in range(3):
        written[b"f%d" % at] = client.rng.randbytes(MIB // 2)
        client.put(root, b"f%d" % at, written[b"f%d" % at], sync=True)
    print("on")

    client.net.cut = 1 << 30
    _, fh = client.call(lambda v: v.create(root, b"big", 0o644, 0, 0, os.O_RDWR))
    taken = bytearray()

    def fill() -> None:
        for _ in range(20):
            piece = client.rng.randbytes(MIB)
            try:
                client.volume.write(fh, len(taken), piece)
            except Park as park:
                client.until(park.want)  # nothing is sent: it ends with the time-out
            else:
                taken.extend(piece)

    with pytest.raises(NoSpace, match="disk/mount is full"):
        fill()
    assert 0 < len(taken) < 8 * MIB
    print("told")

    for filler in fillers:
        filler.unlink()
    client.net.cut = 0
    client.clock.seconds += 5
    client.volume.tick(client.clock.seconds)
    client.call(lambda v: v.write(fh, len(taken), b"behind"))
    client.call(lambda v: v.fsync(fh, False))
    client.call(lambda v: v.release(fh))
    client.until(client.volume.barrier())
    written[b"big"] = bytes(taken) + b"behind"
    tree = server_tree(client.bench)
    assert {name: tree["/" + name.decode()][1] for name in written} == written
    client.volume.close()
    client.bench.close()
    print("freed")


if __name__ == "__main__":
    main()
