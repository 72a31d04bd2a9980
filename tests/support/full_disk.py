"""What happens on a full disk under a data directory. Run inside `unshare -m` by test_database_faults.

`full_disk.py DIR` mounts 48 MiB of memory on DIR and asserts its way through; one word a stage is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsd.host.seam import Host
from fsd.meta.database import open_database
from fsd.model.errors import NoSpace
from fsd.wire.frame import make_blob
from support.packstore import FS_NAME, PackStore, check, noise, open_packs, upload


def expect_no_space(at: PackStore, parts: int, size: int, seed: str) -> None:
    blobs = [make_blob(noise(f"{seed}.{part}", size)) for part in range(parts)]
    with pytest.raises(NoSpace, match="full"):
        at.packs.store(at.fs, FS_NAME, blobs)
    assert not at.packs.read(at.fs, [blob.hash for blob in blobs]), "an upload that failed is there"


def fill(path: Path) -> None:
    """All the rest of the disk, to the last byte."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    piece = 1 << 20
    while piece:
        try:
            os.write(fd, b"x" * piece)
        except OSError:
            piece //= 2
    os.close(fd)


def all_are_told(at: PackStore) -> None:
    """Several store at once where there is no room."""
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            at.packs.store(at.fs, FS_NAME, [make_blob(noise(f"many.{number}", 60_000))])
        except NoSpace as exc:
            errors.append(exc)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 6, f"{len(errors)} of 6 writers were told"


def main() -> None:
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", disk], check=True, timeout=50)
    data, filler = disk / "data", disk / "filler"
    at = open_packs(data, Host())
    for number in range(4):
        at.packs.store(at.fs, FS_NAME, upload(number))
    at.close()
    fill(filler)
    db = open_database(data, Host())  # with what was kept back: there is no room even for what reading takes
    assert db.read(lambda tx: tx.one("SELECT count(*) FROM fs")) == (1,)
    db.write(lambda tx: tx.execute("DELETE FROM counter WHERE name='none'"), frees=True)
    db.close()
    filler.unlink()
    at = open_packs(data, Host())
    print("opened")

    fill(filler)
    expect_no_space(at, 4, 1 << 20, "object")
    assert not list((data / ".unfinished").iterdir()), "a failed upload left its file"
    print("full")

    # Small uploads go on inside the WAL's space until that is used up as well.
    taken = 4
    while True:
        try:
            at.packs.store(at.fs, FS_NAME, upload(taken))
        except NoSpace:
            break
        taken += 2
        assert taken < 20_000
    print("starved")

    all_are_told(at)
    assert check(at, 4, set(range(4))) == 4, "reading goes on"
    print("alone")

    filler.unlink()
    at.packs.store(at.fs, FS_NAME, upload(5))
    at.packs.store(at.fs, FS_NAME, upload(taken))
    print("again")

    fill(filler)
    at.close()
    fill(filler)
    try:  # a server may start on a full disk to be read from, or say why not
        open_packs(data, Host()).close()
    except NoSpace as exc:
        print("full:", exc.message, file=sys.stderr)
    filler.unlink()
    at = open_packs(data, Host())
    acknowledged = {0, 1, 2, 3, 5, *range(4, taken, 2), taken}
    assert check(at, taken + 1, acknowledged) >= len(acknowledged)
    at.close()
    print("reopened")


if __name__ == "__main__":
    main()
