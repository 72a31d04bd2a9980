"""A mount beside a local directory, on which sequences of `differential` are played, and again elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.differential import Maker, Pair, Step, differences, identities, shortest, tree
from support.sandbox import Sandbox
from support.server import Server


class Bench:
    """A mount and a local directory, in which pairs of directories are made for each sequence."""

    def __init__(self, server: Server, base: Path, *options: str, maker: type[Maker] = Maker) -> None:
        """`options` of every mount; `maker` makes the sequences."""
        self.fs, self.base, self.options, self.maker = server.create(), base, options, maker
        self.local = base / "local"
        self.local.mkdir()
        self.boxes: list[Sandbox] = []
        self.box = self.new_box()
        self.made = 0
        self.local.chmod(0o755)
        self.box.mountpoint.chmod(0o755)

    def new_box(self) -> Sandbox:
        box = Sandbox(self.base / f"b{len(self.boxes)}", self.fs, *self.options)
        self.boxes.append(box)
        box.mount()
        return box

    def play(self, steps: Sequence[Step]) -> None:
        """Both in directories of their own; raises AssertionError at the first difference."""
        self.made += 1
        here, there = self.local / str(self.made), self.box.mountpoint / str(self.made)
        pair = Pair(here, there)
        try:
            pair.play(steps)
        finally:
            pair.close()
        found = differences(tree(here), tree(there))
        assert not found, f"the trees differ: {found}"

    def fails(self, steps: Sequence[Step]) -> bool:
        try:
            self.play(steps)
        except AssertionError:
            return True
        return False

    def random(self, seed: int, count: int) -> None:
        """A sequence from `seed`. When it fails, what of it fails already."""
        steps = self.maker(seed, len(identities())).steps(count)
        try:
            self.play(steps)
        except AssertionError as exc:
            less = "\n".join(map(repr, shortest(steps, self.fails)))
            raise AssertionError(f"seed {seed}, {count} steps: {exc}\nshortest:\n{less}") from exc

    def killed(self) -> None:
        """SIGKILL of the daemon, and the same place mounted again."""
        self.box.kill()
        self.box.detach()
        self.box.mount()

    def same_everywhere(self) -> None:
        """What is mounted is what the local directory has: here, on a second mount, after a kill of the
        daemon, and after the sandbox is gone. Times and inode numbers are those of before."""
        whole = tree(self.box.mountpoint, exact=True)
        self.box.drain()
        second = self.new_box()
        assert not differences(whole, tree(second.mountpoint, exact=True))
        second.unmount()
        self.killed()
        assert not differences(whole, tree(self.box.mountpoint, exact=True))
        assert not differences(tree(self.local), tree(self.box.mountpoint))
        self.box.unmount()
        self.box.lose()
        self.box = self.new_box()
        assert not differences(whole, tree(self.box.mountpoint, exact=True))

    def close(self) -> None:
        for box in self.boxes:
            box.close()


def follows(whole: dict[bytes, tuple[object, ...]], mountpoint: Path) -> bool:
    """Whether `mountpoint` shows `whole`; not while names come and go under the walk."""
    try:
        return not differences(whole, tree(mountpoint, exact=True))
    except (FileNotFoundError, NotADirectoryError):
        return False
