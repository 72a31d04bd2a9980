"""The service's data is replaced by a copy from before: what mounts know of it is of another history, in
which the same numbers may mean other files. They send nothing there, and keep what they have."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree
from support.inproc import InProcess, NoCache

from fsd.model.attrs import session_of
from fsd.model.errors import HistoryChanged, PosixError, Unavailable
from fsd.service.open import ServiceOptions, open_service
from fsd.vfs import recover
from fsd.vfs.takeout import take_out
from fsd.wire.messages import FeedPage

HEAD = b"h" * 5000


class Scene:
    """A service, its copy from before, and a mount that saw what came after the copy."""

    def __init__(self, base: Path) -> None:
        self.base, self.clock, self.rng = base, Clock(), random.Random(1)
        self.bench = Bench(base / "server", self.clock.host(self.rng))
        self.mount = self.client("mount")
        self.top = self.mount.volume.root_ino
        self.mount.put(self.top, b"old", b"old", sync=True)

    def client(self, name: str) -> Client:
        made = Client(self.base / name, self.bench, self.clock, self.rng, name)
        made.net.faulty = False
        made.open()
        return made

    def copy(self) -> None:
        shutil.copytree(self.bench.directory, self.base / "copy")

    def go_back(self) -> None:
        """The copy takes the place of the data, and the service starts on it."""
        self.bench.service.close()
        shutil.rmtree(self.bench.directory)
        shutil.copytree(self.base / "copy", self.bench.directory)
        self.bench.service = open_service(ServiceOptions(self.bench.directory), self.bench.host)
        self.mount.remote = InProcess(self.bench.service, self.bench.fs, self.mount.net)

    def late(self, name: str) -> Client:
        """A mount whose session number the copy will give to a mount again (one goes to the service)."""
        self.unmount(self.client(f"before {name}"))
        return self.client(name)

    def reuse_numbers(self, ino: int) -> dict[str, tuple[object, ...]]:
        """Another mount gets the numbers that were given out before, `ino` among them; the tree it makes."""
        other = self.client("other")
        for at in range(20):
            other.put(self.top, b"other%d" % at, b"other's %d" % at, sync=True)
        self.unmount(other)
        assert any(entry.attr.ino == ino for entry in self.bench.entries().values()), "not reused"
        return server_tree(self.bench)

    def unmount(self, client: Client) -> None:
        client.until(client.volume.barrier())
        client.volume.close()

    def end(self) -> None:
        self.bench.close()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_old_number_never_reaches_another_file(scene: Scene) -> None:
    """A mount begun after the copy has a session number that the copy gives out once more."""
    scene.copy()
    late = scene.late("late")
    ino = late.put(scene.top, b"mine", HEAD, sync=True)
    scene.go_back()
    late.remote = InProcess(scene.bench.service, scene.bench.fs, late.net)
    before = scene.reuse_numbers(ino)
    fh = late.call(lambda v: v.open(ino, 2))
    late.call(lambda v: v.write(fh, 0, b"later"))
    with pytest.raises(HistoryChanged):
        late.call(lambda v: v.fsync(fh, False))
    assert server_tree(scene.bench) == before
    late.kill()
    scene.unmount(scene.client("again"))
    scene.end()


def test_revisions_of_direct_commands_are_not_given_again(scene: Scene) -> None:
    """`--if-match`, `fsd run` and the libraries compare them: the same one is the same file."""
    scene.unmount(scene.mount)
    scene.copy()
    scene.go_back()
    lost = scene.bench.service.commits.new_ino()
    scene.go_back()
    again = scene.bench.service.commits.new_ino()
    assert session_of(lost) == session_of(again), "nothing was at stake"
    assert abs(lost - again) > 1_000_000
    scene.end()


def test_what_others_did_after_the_copy_is_no_base_either(scene: Scene) -> None:
    """The session of this mount is in the copy as it is: only what it saw of others is not."""
    scene.copy()
    other = scene.late("late")
    other.put(scene.top, b"theirs", HEAD, sync=True)
    scene.unmount(other)
    scene.mount.feed()
    node = scene.mount.call(lambda v: v.lookup(scene.top, b"theirs"))
    assert node is not None
    fh = scene.mount.call(lambda v: v.open(node.ino, 2))
    scene.go_back()
    before = scene.reuse_numbers(node.ino)
    scene.mount.call(lambda v: v.write(fh, 0, HEAD[::-1]))
    with pytest.raises(HistoryChanged):
        scene.mount.call(lambda v: v.fsync(fh, False))
    assert server_tree(scene.bench) == before
    # The same after the daemon was killed: the log says what had been seen.
    scene.mount.kill()
    with pytest.raises(HistoryChanged):
        scene.mount.open()
    assert server_tree(scene.bench) == before
    scene.end()


def test_it_is_read_only_then_and_gives_back_what_it_holds(scene: Scene) -> None:
    mount, volume = scene.mount, scene.mount.volume
    scene.copy()
    ino = mount.put(scene.top, b"after", HEAD, sync=True)
    mount.put(scene.top, b"old", b" and pending")
    mount.put(scene.top, b"after", b" and pending")
    mount.put(scene.top, b"new", b"new")
    scene.go_back()
    with pytest.raises(HistoryChanged) as told:
        mount.remote.changes(volume.feed_seq, volume.session, 0.0, known=volume.core.mark)
    volume.history_changed(told.value)
    with pytest.raises(HistoryChanged):
        mount.until(volume.barrier())
    assert "--export DIR" in told.value.hint
    status = volume.status()
    assert "older copy" in str(status["reason"])
    assert status["pending"] != {"operations": 0, "files": 0, "bytes": 0}
    with pytest.raises(PosixError, match="older copy"):
        mount.put(scene.top, b"more", b"more")
    assert mount.read_all(ino) == HEAD + b" and pending"  # what is known is shown
    mount.kill()
    with pytest.raises(HistoryChanged):
        mount.open()
    target = scene.base / "taken"
    taken = take_out(mount.options, mount.host, mount.remote, NoCache(), lambda: {scene.top: b"/"}, target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {
        "old": b"old and pending",
        "after": bytes(len(HEAD)) + b" and pending",  # its beginning went with the service's data
        "new": b"new",
    }
    assert taken.incomplete == [str(target / "after")]
    scene.end()


def test_a_recovery_waits_for_a_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks which history the server has first, and that is no reason to give up sooner."""
    scene = Scene(tmp_path)
    scene.mount.put(scene.top, b"new", b"new")
    scene.mount.kill()
    changes, away = scene.mount.remote.changes, [3]

    def not_yet(*args: Any, **kwargs: Any) -> FeedPage:
        away[0] -= 1
        if away[0] >= 0:
            raise Unavailable("it starts")
        return changes(*args, **kwargs)

    monkeypatch.setattr(scene.mount.remote, "changes", not_yet)
    monkeypatch.setattr(recover, "AGAIN", 0.01)
    scene.mount.open()
    assert away[0] < 0
    assert server_tree(scene.bench)["/new"][1] == b"new"
    scene.unmount(scene.mount)
    scene.end()
