"""A local directory into a manifest and back: random trees, hostile manifests, trees that change meanwhile.

Beside the destination lies a directory that must stay as it was, whatever a manifest says.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fsd.client import manifest, manifesttree
from fsd.client.capture import Capture
from fsd.client.manifest import DIR, FILE, FILES, LINK, Entry
from fsd.client.policy import Policy
from fsd.client.redact import Secrets
from fsd.client.restore import STAGING, Restore
from fsd.host.seam import Host
from fsd.model.errors import (
    Conflict,
    FsdError,
    IntegrityError,
    InvalidBlob,
    InvalidPath,
    InvalidWorkspace,
    MissingBlob,
    NoSpace,
    TooLarge,
    Unavailable,
    UnsupportedEntry,
)

ALL = Policy(exclude=())


class Blobs:
    """A store in memory."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.puts = 0

    def has(self, key: str) -> bool:
        return key in self.held

    def put(self, key: str, size: int, spool: IO[bytes]) -> None:
        spool.seek(0)
        data = spool.read()
        assert len(data) == size
        assert FILES + hashlib.sha256(data).hexdigest() == key
        self.held[key] = data
        self.puts += 1

    def fetch(self, key: str) -> Iterator[bytes]:
        if key not in self.held:
            raise MissingBlob(f"no {key}")
        yield self.held[key]

    def add(self, data: bytes) -> str:
        key = FILES + hashlib.sha256(data).hexdigest()
        self.held[key] = data
        return key


def tree(root: Path) -> dict[str, Any]:
    """Everything below a directory, links not followed."""
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            at, info = str(path.relative_to(root)), path.lstat()
            if path.is_symlink():
                found[at] = ("link", os.readlink(path))
            elif path.is_dir():
                found[at] = "dir"
            else:
                found[at] = (path.read_bytes(), stat.S_IMODE(info.st_mode), info.st_mtime_ns)
    return found


def random_tree(root: Path, rng: random.Random, many: int) -> None:
    root.mkdir(exist_ok=True)
    dirs = [root]
    for number in range(many):
        where, roll = rng.choice(dirs), rng.random()
        path = where / rng.choice((f"n{number}", f"ü {number}", f"{number % 5}"))
        if os.path.lexists(path):
            continue
        if roll < 0.25:
            path.mkdir()
            dirs.append(path)
        elif roll < 0.35:
            path.symlink_to(rng.choice(("x", "sub/./y", ".", "a/../b")))
        else:
            path.write_bytes(rng.choice((b"", b"same", rng.randbytes(rng.randrange(3000)))))
            path.chmod(rng.choice((0o644, 0o755, 0o600)))
            os.utime(path, ns=(5, rng.randrange(10**18)))


def restore(
    entries: list[Entry], root: Path, blobs: Blobs, policy: Policy = ALL, *, replace: bool = True
) -> None:
    Restore(entries, policy, blobs.fetch, Host()).run(str(root), replace=replace)


def test_random_trees_come_back(tmp_path: Path, seed: int) -> None:
    rng, blobs = random.Random(seed), Blobs()
    for number in range(12):
        source, target = tmp_path / f"s{number}", tmp_path / f"t{number}"
        random_tree(source, rng, rng.randrange(40))
        random_tree(target, rng, rng.randrange(40))
        got = Capture(ALL, Secrets([]), blobs).run(str(source))
        entries = manifest.read([entry.to_json() for entry in got.entries])
        restore(entries, target, blobs)
        assert tree(target) == tree(source)
        assert entries == Capture(ALL, Secrets([]), blobs).run(str(target)).entries
    assert blobs.puts == len(blobs.held), "something was sent twice"


def test_policy_and_secrets_hold_through_both(tmp_path: Path) -> None:
    source, target, blobs = tmp_path / "s", tmp_path / "t", Blobs()
    for path in (".git/config", "a/node_modules/x.js", ".env", "src/main.py", "empty/keep"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(f"token=SECRET-1 in {path}")
    os.mkfifo(source / ".git" / "fifo")
    (source / "nothing").mkdir()
    got = Capture(Policy(), Secrets([b"SECRET-1"]), blobs).run(str(source))
    assert [(e.path, e.kind) for e in got.entries] == [
        ("a", DIR),
        ("empty/keep", FILE),
        ("nothing", DIR),
        ("src/main.py", FILE),
    ]
    assert not any(b"SECRET" in data for data in blobs.held.values())
    (target / ".git").mkdir(parents=True)
    (target / ".git" / "HEAD").write_text("mine")
    (target / "stale").write_text("old")
    (target / "src").write_text("a file where a directory is wanted")
    with pytest.raises(Conflict):
        restore(got.entries, target, blobs, Policy(), replace=False)
    restore(got.entries, target, blobs, Policy())
    assert (target / "src/main.py").read_bytes() == b"token=" + bytes(8) + b" in src/main.py"
    assert (target / ".git" / "HEAD").read_text() == "mine"
    assert sorted(p.name for p in target.iterdir()) == [".git", "a", "empty", "nothing", "src"]


def refused(source: Path, error: type[FsdError], words: str, policy: Policy = ALL) -> None:
    with pytest.raises(error) as told:
        Capture(policy, Secrets([]), Blobs(), file_max=1000).run(str(source))
    assert words in told.value.message


def test_what_a_manifest_cannot_hold_fails_by_name(tmp_path: Path) -> None:
    def case(name: str, make: Callable[[Path], object], error: type[FsdError], words: str) -> None:
        source = tmp_path / name
        source.mkdir()
        (source / "good").write_text("x")
        make(source)
        refused(source, error, words)
        Capture(Policy(exclude=("bad*",)), Secrets([]), Blobs()).run(str(source))

    def bind(source: Path) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(source / "bad-socket"))

    case("fifo", lambda s: os.mkfifo(s / "bad-fifo"), UnsupportedEntry, "bad-fifo")
    case("sock", bind, UnsupportedEntry, "bad-socket")
    case("abs", lambda s: (s / "bad").symlink_to("/etc"), UnsupportedEntry, "/etc")
    case("up", lambda s: (s / "bad").symlink_to("../x"), UnsupportedEntry, "../x")
    case("name", lambda s: (s / os.fsdecode(b"bad\xff")).touch(), InvalidPath, "bad")
    case("slash", lambda s: (s / "bad\\x").touch(), InvalidPath, "bad")
    case("big", lambda s: (s / "bad").write_bytes(bytes(1001)), TooLarge, "bad")
    refused(tmp_path / "absent", InvalidWorkspace, "absent")
    (tmp_path / "alias").symlink_to(tmp_path / "fifo")
    refused(tmp_path / "alias", InvalidWorkspace, "alias")
    links = Capture(Policy(exclude=(), skip_links=True), Secrets([]), Blobs()).run(str(tmp_path / "abs"))
    assert links.skipped == ["bad"]


def test_a_capture_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03}").write_bytes(b"x" * (2000 if number % 20 == 7 else 10))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TooLarge):
            Capture(ALL, Secrets([]), Blobs(), file_max=1000).run(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    (source / "f").write_bytes(b"0" * 100)

    class Changing(Secrets):
        """Somebody writes while the file is read, so often."""

        times = 1

        def redacted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
            yield from pieces
            if self.times:
                self.times -= 1
                (source / "f").write_bytes(b"1" * (100 + self.times))

    blobs = Blobs()
    (entry,) = Capture(ALL, Changing([]), blobs).run(str(source)).entries
    assert blobs.held == {entry.key: b"1" * 100}
    always = Changing([])
    always.times = 10
    with pytest.raises(InvalidWorkspace, match="changes faster"):
        Capture(ALL, always, Blobs()).run(str(source))


# restore against what is hostile


def hostile(rng: random.Random, blobs: Blobs) -> list[dict[str, Any]]:
    """A manifest with good entries and some that lead, or could lead, elsewhere."""
    names = ("a", "b", "l", "d", "..", ".", "", "outside", STAGING + "x", "a\\b", "e\0")
    found: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 7)):
        bad = rng.random() < 0.2
        path = "/".join(rng.choices(names if bad else names[:4], k=rng.randrange(1, 4)))
        kind = rng.choice((FILE, FILE, LINK, DIR))
        entry: dict[str, Any] = {"path": path, "kind": kind}
        if kind == FILE:
            data = rng.randbytes(5)
            entry |= {"blobKey": blobs.add(data), "size": 5 if rng.random() < 0.9 else 6, "mode": 0o4755}
            if rng.random() < 0.1:
                blobs.held[entry["blobKey"]] = b"other"
            elif rng.random() < 0.1:
                del blobs.held[entry["blobKey"]]
        elif kind == LINK:
            entry["target"] = rng.choice(("a", "b/c", "../outside", "/etc", "..", "../d"))
        found.append(entry)
    return found


def play_hostile(base: Path, rng: random.Random) -> tuple[bool, str]:
    """One manifest against one destination: whether it was restored, or why not."""
    outside, target, blobs = base / "outside", base / "t", Blobs()
    outside.mkdir(parents=True)
    (outside / "a").write_text("precious")
    random_tree(target, rng, rng.randrange(8))
    for name in ("a", "l", "d"):
        if rng.random() < 0.3 and not os.path.lexists(target / name):
            (target / name).symlink_to("../outside")
    before, kept = tree(target), tree(outside)
    files = hostile(rng, blobs)
    why = ""
    try:
        restore(manifest.read(files), target, blobs)
    except FsdError as exc:
        why = type(exc).__name__
    assert tree(outside) == kept, files
    got = tree(target)
    if why:
        assert got == before, f"touched, then refused: {why}"
        return False, why
    for entry in files:
        there = got[entry["path"]]
        if entry["kind"] == FILE:
            assert there[0] == blobs.held[entry["blobKey"]]
            assert there[1] == 0o755, "set-id bits come from nobody"
        else:
            assert there == ("dir" if entry["kind"] == DIR else ("link", entry["target"]))
    return True, ""


def test_hostile_manifests_stay_inside(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    told = [play_hostile(tmp_path / str(number), rng) for number in range(150)]
    assert sum(done for done, _ in told) > 20
    assert {"InvalidPath", "InvalidBlob", "MissingBlob"} <= {why for _, why in told}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_hostile_manifests_stay_inside_for_long(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(20_000):
        play_hostile(tmp_path / str(number), rng)


def test_a_tree_that_is_changed_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    """While a restore runs, somebody turns directories of the destination into links to elsewhere."""
    outside, target, blobs = tmp_path / "outside", tmp_path / "t", Blobs()
    outside.mkdir()
    (outside / "f0").write_text("precious")
    entries = [Entry(f"d{n % 3}/f{n}", FILE, blobs.add(b"%d" % n), len(b"%d" % n)) for n in range(60)]
    stop, swaps = threading.Event(), [0]

    def swap() -> None:
        while not stop.is_set():
            for name in ("d0", "d1", "d2"):
                place = target / name
                try:
                    os.rename(place, target / f"{name}.away")
                    place.symlink_to("../outside")
                    swaps[0] += 1
                    os.unlink(place)
                    os.rename(target / f"{name}.away", place)
                except OSError:
                    continue  # not there yet, or made again meanwhile

    attacker = threading.Thread(target=swap)
    attacker.start()
    try:
        turns = 0
        while turns < 40 or not swaps[0]:
            turns += 1
            try:
                restore(entries, target, blobs)
            except (FsdError, OSError):
                pass  # the attacker was in the way: refused is fine, elsewhere is not
    finally:
        stop.set()
        attacker.join()
    assert tree(outside) == {"f0": (b"precious", 0o644, (outside / "f0").stat().st_mtime_ns)}


def test_nothing_is_touched_before_all_is_verified(tmp_path: Path) -> None:
    target, blobs = tmp_path / "t", Blobs()
    target.mkdir()
    (target / "mine").write_text("old")
    key = blobs.add(b"new")
    before = tree(target)

    def killed(name: str) -> None:
        assert name == "restore.verified"
        now = tree(target)
        assert [p for p in now if not p.startswith(STAGING)] == list(before)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Restore([Entry("f", FILE, key, 3)], ALL, blobs.fetch, Host(crash_point=killed)).run(
            str(target), replace=True
        )
    assert tree(target) == before
    with pytest.raises(InvalidBlob, match="'f'"):
        restore([Entry("f", FILE, key, 4)], target, blobs)
    assert tree(target) == before


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (MissingBlob("not stored"), MissingBlob),
        (IntegrityError("pack 1 is lost"), InvalidBlob),
        (Unavailable("cut off"), Unavailable),
    ],
)
def test_a_content_that_cannot_be_had_is_told_by_the_name_of_its_file(
    tmp_path: Path, fault: FsdError, told: type[FsdError]
) -> None:
    entry = Entry("d/f", FILE, FILES + "0" * 64, 3)

    def fetch(key: str) -> Iterator[bytes]:
        yield b"x"
        raise fault

    uses: list[Callable[[], object]] = [
        lambda: Restore([entry], ALL, fetch, Host()).run(str(tmp_path / "t"), replace=True),
        lambda: list(manifesttree.read_file(entry, fetch)),
        lambda: manifesttree.export([entry], b"", fetch, io.BytesIO()),
    ]
    for use in uses:
        with pytest.raises(told, match=f"^'d/f': {fault.message}$"):
            use()
    assert tree(tmp_path / "t") == {}


@pytest.mark.parametrize("marked", [False, True])
def test_a_part_of_a_checkpoint_can_tell_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    blobs, left = Blobs(), [1]
    entries = [Entry(name, FILE, blobs.add(name.encode()), 1) for name in "abc"]
    place = Restore._place

    def full(work: Restore, entry: Entry, staging: int, *, last: bool) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "full")
        place(work, entry, staging, last=last)

    with monkeypatch.context() as patched:
        patched.setattr(Restore, "_place", full)
        with pytest.raises(NoSpace):
            Restore(entries, ALL, blobs.fetch, Host()).run(str(tmp_path), replace=False, marked=marked)
    assert "a" in os.listdir(tmp_path) and "b" not in os.listdir(tmp_path)
    assert any(name.startswith(STAGING) for name in os.listdir(tmp_path)) == marked
    Restore(entries, ALL, blobs.fetch, Host()).run(str(tmp_path), replace=True, marked=marked)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize("include", [(), ("a",)])
def test_what_a_killed_restore_left_goes_with_the_next(tmp_path: Path, include: tuple[str, ...]) -> None:
    """A restore into a new directory was refused for it, and with `--include` it stayed for good."""
    target, blobs = tmp_path / "t", Blobs()
    entries = [Entry("a", FILE, blobs.add(b"new"), 3), Entry("l", LINK, target="a")][: 1 if include else 2]
    policy = Policy(exclude=(), include=include)
    pid = os.fork()
    if pid == 0:
        kill = Host(crash_point=lambda name: os.kill(os.getpid(), signal.SIGKILL))
        Restore(entries, policy, blobs.fetch, kill).run(str(target), replace=False)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert [name[: len(STAGING)] for name in os.listdir(target)] == [STAGING]
    Restore(entries, policy, blobs.fetch, Host()).run(str(target), replace=False)
    assert sorted(os.listdir(target)) == [entry.path for entry in entries]


def test_what_a_restore_under_way_has_is_left_to_it(tmp_path: Path) -> None:
    target, blobs = tmp_path / "t", Blobs()
    entries = [Entry("a", FILE, blobs.add(b"new"), 3)]
    refused: list[str] = []

    def meanwhile(name: str) -> None:
        with pytest.raises(Conflict) as exc:
            Restore(entries, ALL, blobs.fetch, Host()).run(str(target), replace=False)
        refused.append(str(exc.value))

    Restore(entries, ALL, blobs.fetch, Host(crash_point=meanwhile)).run(str(target), replace=False)
    assert os.listdir(target) == ["a"] and STAGING in refused[0]


def test_what_is_protected_is_not_replaced(tmp_path: Path) -> None:
    target, blobs = tmp_path / "t", Blobs()
    (target / "a" / ".git").mkdir(parents=True)
    key = blobs.add(b"x")
    for entry in (Entry("a", FILE, key, 1), Entry("a/.git", FILE, key, 1), Entry("a/.git/x", FILE, key, 1)):
        with pytest.raises(InvalidPath):
            restore([entry], target, blobs, Policy())
    restore([Entry("b", FILE, key, 1)], target, blobs, Policy())
    assert sorted(tree(target)) == ["a", "a/.git", "b"]
    (tmp_path / "alias").symlink_to(target)
    with pytest.raises(InvalidWorkspace):
        restore([Entry("b", FILE, key, 1)], tmp_path / "alias", blobs)
    os.mkfifo(target / "pipe")
    with pytest.raises(UnsupportedEntry):
        restore([Entry("b", FILE, key, 1)], target, blobs)
