"""What the client does on a full disk under its state directory. Run inside `unshare -m` by
test_client_disk_full.

`full_log.py DIR SERVER_DIR` mounts 24 MiB of memory on DIR and asserts its way through; one word a stage is
printed.
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


def fill(client: Client, name: bytes, most: int) -> tuple[int, bytes, Park | None]:
    """Write whole MiB until the client wants room; the handle, what was taken, and the wait."""
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, name, 0o644, 0, 0, os.O_RDWR))
    taken = bytearray()
    for _ in range(most):
        piece = client.rng.randbytes(MIB)
        try:
            client.volume.write(fh, len(taken), piece)
        except Park as park:
            return fh, bytes(taken), park
        taken += piece
    return fh, bytes(taken), None


def main() -> None:
    disk, server = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True, timeout=50)
    client = Client(disk / "mount", Bench(server), Clock(), random.Random(1))
    client.net.faulty = False
    # The bound is far above the disk: the disk is what ends it.
    client.options = replace(client.options, segment_size=64 * MIB, buffer_size=1 << 40, io_timeout=10.0)
    client.open()
    root = client.volume.root_ino
    keep = client.put(root, b"keep", b"kept")
    client.net.cut = 1 << 30

    fh, taken, park = fill(client, b"big", 40)
    assert park is not None, "24 MiB took 40"
    assert len(taken) >= 10 * MIB
    print("full")

    # Unlink, truncate and the like work on a full disk, and what is there can be read.
    client.call(lambda v: v.mkdir(root, b"dir", 0o755, 0, 0))
    client.call(lambda v: v.rename(root, b"keep", root, b"kept", 0))
    client.call(lambda v: v.setattr(keep, mode=0o600))
    assert client.volume.read(fh, len(taken) - 10, 10) == taken[-10:]
    print("changes")

    client.clock.seconds += 11
    client.volume.tick(client.clock.seconds)
    with pytest.raises(NoSpace, match=str(client.options.state_dir)):
        client.volume.done(park.want)
    print("told")

    # The server is back: everything is sent, the space is freed, writing goes on by itself.
    client.net.cut = 0
    client.until(client.volume.barrier())
    tree = server_tree(client.bench)
    assert tree["/big"][1] == taken
    assert tree["/kept"][1:3] == (b"kept", 0o600)
    assert "/dir" in tree
    again = client.rng.randbytes(4 * MIB)
    assert client.call(lambda v: v.write(fh, len(taken), again)) == len(again)
    client.call(lambda v: v.fsync(fh, False))
    assert server_tree(client.bench)["/big"][1] == taken + again
    print("freed")

    # Nothing else on the disk but what the daemon has: it is killed full, and the next mount sends it.
    client.net.cut = 1 << 30
    _, more, park = fill(client, b"more", 40)
    assert park is not None
    client.kill()
    client.open()
    assert server_tree(client.bench)["/more"][1] == more
    client.volume.close()
    client.bench.close()
    print("recovered")


if __name__ == "__main__":
    main()
