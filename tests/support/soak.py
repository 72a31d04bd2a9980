"""Programs that write through mounts without pause, while checkpoints are taken, mounted, restored, forked,
merged, pruned and swept beside them: each must show for ever what it showed when it was taken.

A checkpoint made through a mount is compared with the numbered calls of the program there: it is what the
program had done after so many calls, not fewer than had returned when it was asked for, not more than had
begun when the answer came. The manifest recorded then is what every later look must find.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from support.processes import die_with_parent
from support.sandbox import Sandbox
from support.server import Reply, Server, TestFs
from support.soakwriter import Counters, Step, Steps, Value
from support.wait import wait_for

Manifest = dict[str, Value]
ALIVE: Final = 8  # checkpoints there are at a time, about
KEEP: Final = 5  # of them a prune leaves
QUIET: Final = 12  # files of the directory that is restored
WAIT: Final = 300.0
TABLES: Final = ("inode", "dentry", "block", "blob", "pack", "dropped", "pin", "checkpoint", "named")


def of_tar(raw: bytes) -> Manifest:
    found: Manifest = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for one in tar:
            path = one.name.removeprefix("./")
            if one.issym():
                found[path] = ("l", 0o777, one.linkname)
            elif one.isdir():
                found[path] = ("d", one.mode, "")
            else:
                member = tar.extractfile(one)  # through a hard link too
                assert member is not None
                found[path] = ("f", one.mode, hashlib.sha256(member.read()).hexdigest())
    found.pop(".", None)
    return found


def _told(error: OSError) -> None:
    raise error


def of_directory(top: Path) -> Manifest:
    found: Manifest = {}
    for where, directories, files in os.walk(top, onerror=_told):
        for name in (*directories, *files):
            path = Path(where, name)
            mode = path.lstat().st_mode & 0o7777
            key = os.fspath(path.relative_to(top))
            if path.is_symlink():
                found[key] = ("l", 0o777, os.readlink(path))
            elif path.is_dir():
                found[key] = ("d", mode, "")
            else:
                found[key] = ("f", mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def below(found: Manifest, top: str) -> Manifest:
    return {path[len(top) + 1 :]: value for path, value in found.items() if path.startswith(top + "/")}


def need(reply: Reply, *statuses: int) -> Any:
    assert reply.status in (statuses or (200, 201)), (reply.status, reply.body[:500])
    return reply.json if reply.body[:1] in (b"{", b"[") else reply.body


class Writer:
    """One program in a mount of its own, and how far its model is."""

    def __init__(self, base: Path, fs: TestFs, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.box = Sandbox(base / name, fs)
        self.box.mount()
        self.steps = Steps(seed)
        self.counters = Counters(base / f"{name}.counters")
        self._process: subprocess.Popen[bytes] | None = None
        self._half: Step | None = None  # a call of the model that was begun

    def start(self) -> None:
        top = self.box.mountpoint / self.name
        top.mkdir()
        command = [sys.executable, "-m", "support.soakwriter", os.fspath(top), str(self.seed)]
        command.append(os.fspath(self.box.base.parent / f"{self.name}.counters"))
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )

    def check(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            _, told = self._process.communicate()
            raise AssertionError(f"the program of {self.name} ended: {told.decode()}\n{self.box.logs()}")

    def end(self) -> None:
        """The program ends behind its last call; the model is there too."""
        self.check()
        assert self._process is not None
        self.counters.stop = 1
        _, told = self._process.communicate(timeout=WAIT)
        assert self._process.returncode == 0, told.decode()
        self.go_to(self.counters.done)

    def go_to(self, count: int) -> None:
        while self.steps.count < count:
            self._finish_call()

    def _finish_call(self) -> None:
        step, self._half = self._half or self.steps.next(), None
        self.steps.apply(step)

    def match(self, found: Manifest, least: int, most: int) -> None:
        """Bring the model to the number of calls after which the tree was `found`, or into the middle of one
        that the kernel cuts."""
        self.go_to(least)
        nearest: tuple[int, int, list[str]] | None = None
        while (have := self.steps.manifest()) != found:
            wrong = [path for path in have.keys() | found.keys() if have.get(path) != found.get(path)]
            nearest = min(nearest or (len(wrong), 0, wrong), (len(wrong), self.steps.count, wrong))
            if self._half is None and self.steps.count < most:
                self._half = self.steps.next()
                if not self.steps.begin(self._half):
                    self._finish_call()
            elif self._half is not None:
                self._finish_call()
            else:
                raise AssertionError(
                    f"{self.name} is no prefix of {least} to {most} calls; nearest: {nearest}"
                )

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self.box.close()


def _is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


class Soak:
    """`run` for some seconds, then `finish`, then `empty`; close it always. Threads are its actors."""

    def __init__(self, base: Path, server: Server, seed: int, writers: int = 2) -> None:
        self.base, self.server = base, server
        self.fs = server.create(display_name="soak")
        self._rng = random.Random(seed)
        self.did = dict.fromkeys(
            ("taken", "exact", "looked", "mounted", "restored", "forked", "merged", "pruned", "swept"), 0
        )
        self._kept: dict[str, Manifest] = {}
        self._gone: set[str] = set()
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._number = 0
        self.writers = [Writer(base, self.fs, f"w{at}", seed * 10 + at) for at in range(writers)]

    # -- the run -------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        for at in range(QUIET):
            need(self.put(self.fs, f"quiet/f{at}"))
        for writer in self.writers:
            writer.start()
        actors: list[Callable[[random.Random], None]] = [
            partial(self._taker, writer) for writer in self.writers
        ]
        actors += [self._outside, self._looker, self._restorer, self._forker, self._pruner, self._sweeper]
        threads = [
            threading.Thread(target=self._guard, args=(actor, random.Random(self._rng.random())), daemon=True)
            for actor in actors
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        longest = deadline + 4 * seconds  # on a machine that has other work
        while not self._failures and time.monotonic() < longest:
            for writer in self.writers:
                writer.check()
            if time.monotonic() > deadline and all(self.did.values()):
                break
            self._stop.wait(0.2)
        self._stop.set()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive(), "an actor hangs"
        if self._failures:
            raise self._failures[0]
        assert all(self.did.values()), f"the run did too little: {self.did}"

    def _guard(self, actor: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self._stop.is_set():
                actor(rng)
                self._stop.wait(rng.random())
        except BaseException as exc:  # noqa: BLE001 - told by `run`
            self._failures.append(exc)
            self._stop.set()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    # -- looking -------------------------------------------------------------------------------------

    def put(self, fs: TestFs, path: str) -> Reply:
        """New content; often one that was there before."""
        data = random.Random(self._rng.randrange(40)).randbytes(self._rng.choice((9, 5000, 90_000)))
        return fs.ask("PUT", f"/files/{path}?parents=1", data)

    def export(self, fs: TestFs, checkpoint: str | None = None, path: str = "") -> Manifest:
        """Verified by the server; raises `LookupError` where there is no such state."""
        query = "" if checkpoint is None else f"?checkpoint={checkpoint}"
        reply = fs.ask("GET", f"/export/{path}{query}")
        if reply.status == 404:
            raise LookupError(checkpoint)
        need(reply)
        found = of_tar(reply.body)
        return below(found, path) if path else found

    def _note(self, checkpoint: str, found: Manifest) -> None:
        with self._mutex:
            self._kept[checkpoint] = found
            self.did["taken"] += 1

    def _count(self, what: str, more: int = 1) -> None:
        with self._mutex:
            self.did[what] += more

    def _one(self, rng: random.Random) -> tuple[str, Manifest] | None:
        with self._mutex:
            found = sorted(self._kept.items())
        return rng.choice(found) if found else None

    @contextmanager
    def _may_go(self, checkpoint: str) -> Iterator[None]:
        """Of a checkpoint that somebody deletes meanwhile it may be said that it is not there, by whatever
        looks at it; of no other."""
        try:
            yield
        except (LookupError, AssertionError):
            with self._mutex:
                if checkpoint not in self._gone:
                    raise

    def _same(self, found: Manifest, wanted: Manifest, what: str) -> None:
        wrong = [path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path)]
        told = {path: (found.get(path), wanted.get(path)) for path in sorted(wrong)[:4]}
        assert not wrong, f"{what} shows something else in {len(wrong)} paths: {told}"

    # -- actors --------------------------------------------------------------------------------------

    def _taker(self, writer: Writer, rng: random.Random) -> None:
        """A checkpoint through the mount: what its program had done after so many calls."""
        least = writer.counters.done
        where = os.fspath(writer.box.mountpoint)  # the other mounts are here too, and only drained
        made = writer.box.json("checkpoint", "create", "--mount", where, timeout=WAIT)["checkpoint_id"]
        most = writer.counters.begun
        with self._may_go(made):
            found = self.export(self.fs, made)
            writer.match(below(found, writer.name), least, most)
            self._count("exact")
            self._note(made, found)
        self._stop.wait(rng.random() * 3)

    def _outside(self, rng: random.Random) -> None:
        """By the server, which asks the mounts, or does not."""
        body = rng.choice(({}, {"drain": {"timeout": 10}}))
        made = need(self.fs.ask("POST", "/checkpoints", body))["checkpoint_id"]
        with self._may_go(made):
            self._note(made, self.export(self.fs, made))
        self._stop.wait(rng.random() * 5)

    def _looker(self, rng: random.Random) -> None:
        one = self._one(rng)
        if one is None:
            return
        name, wanted = one
        with self._may_go(name):
            if rng.random() < 0.5:
                self._same(self.export(self.fs, name), wanted, name)
                self._count("looked")
                return
            self._mounted(name, wanted, delete=rng.random() < 0.3)

    def _mounted(self, name: str, wanted: Manifest, *, delete: bool) -> None:
        """A mount of it shows it, also when the checkpoint is deleted meanwhile and all is swept."""
        box = Sandbox(self.base / "then", self.fs, "--checkpoint", name)
        try:
            box.mount()
            if delete:
                self._delete(name)
                self._sweeper(self._rng)
            self._same(of_directory(box.mountpoint), wanted, f"the mount of {name}")
            box.unmount()
            self._count("mounted")
        finally:
            box.close()

    def _delete(self, name: str) -> None:
        with self._mutex:
            self._gone.add(name)
            self._kept.pop(name, None)
        need(self.fs.ask("DELETE", f"/checkpoints/{name}"), 200, 404)

    def _restorer(self, rng: random.Random) -> None:
        """A directory that nobody else changes goes back to a checkpoint; what it was is kept."""
        for _ in range(rng.randrange(6)):
            path = f"quiet/f{rng.randrange(QUIET)}"
            if rng.random() < 0.3:
                self.fs.ask("POST", "/actions", {"action": "remove", "path": f"/{path}"})
            else:
                need(self.put(self.fs, path))
        one = self._one(rng)
        if one is None or not below(one[1], "quiet"):
            return
        before = self.export(self.fs, None, "quiet")
        undo = None
        with self._may_go(one[0]):
            body = {"checkpoint": one[0], "path": "/quiet", "force": True}  # the programs write elsewhere
            done = need(self.fs.ask("POST", "/restore", body))
            self._same(self.export(self.fs, None, "quiet"), below(one[1], "quiet"), "what was restored")
            self._count("restored")
            undo = done["undo_checkpoint_id"]
        if undo is not None:
            with self._may_go(undo):
                found = self.export(self.fs, undo)
                self._same(below(found, "quiet"), before, "what a restore kept")
                self._note(undo, found)

    def _forker(self, rng: random.Random) -> None:
        """A fork of a checkpoint shows it, copied or not; goes on alone, back and forth; is merged; goes."""
        one = self._one(rng)
        if one is None:
            return
        with self._may_go(one[0]):
            reply = self.fs.ask("POST", "/forks", {"checkpoint": one[0]})
            if reply.status == 404:
                raise LookupError(one[0])
            self._fork(TestFs(self.server, *self._ids(need(reply))), one[1], rng)

    @staticmethod
    def _ids(made: dict[str, Any]) -> tuple[str, str]:
        return made["file_system_id"], made["fs_token"]

    def _fork(self, fork: TestFs, wanted: Manifest, rng: random.Random) -> None:
        self._same(self.export(fork), wanted, "a fork")
        first = need(fork.ask("POST", "/checkpoints", {}))["checkpoint_id"]
        again = TestFs(self.server, *self._ids(need(fork.ask("POST", "/forks", {"checkpoint": first}))))
        self._number += 1
        here = f"merged/{self._number}"
        if rng.random() < 0.5:
            self._write_through_mount(fork, here)
        else:
            for at in range(3):
                need(self.put(fork, f"{here}/f{at}"))
        gone = {"action": "remove", "path": "/quiet", "recursive": True}
        need(fork.ask("POST", "/actions", gone), 200, 404)
        added = self.export(fork, None, here)
        # Back to what it was, and forth again by the checkpoint that the restore kept.
        back = need(fork.ask("POST", "/restore", {"checkpoint": first}))
        self._same(self.export(fork), wanted, "a fork that went back")
        need(fork.ask("POST", "/restore", {"checkpoint": back["undo_checkpoint_id"], "path": f"/{here}"}))
        self._same(self.export(fork, None, here), added, "a fork that went forth again")
        self._count("forked")
        merged = need(self.fs.ask("POST", "/merges", {"fork": fork.id}))
        assert merged["status"] == "merged", merged
        self._same(self.export(self.fs, None, here), added, "what was merged")
        self._count("merged")
        how = "?detach=1" if rng.random() < 0.5 else "?cascade=1"
        need(self.fs.ask("DELETE", f"/forks/{fork.id}{how}"))
        if how == "?detach=1":
            self._same(self.export(again), wanted, "the fork of a checkpoint of a fork that is gone")
        # With `cascade` only forks that were not copied yet go along.
        need(self.server.admin("DELETE", f"/v1/file-systems/{again.id}"), 200, 404)

    def _write_through_mount(self, fork: TestFs, here: str) -> None:
        box = Sandbox(self.base / "fork", fork)
        try:
            box.mount()
            top = box.mountpoint / here
            top.mkdir(parents=True)
            for at in range(3):
                top.joinpath(f"f{at}").write_bytes(os.urandom(60_000))
            box.unmount(timeout=WAIT)
        finally:
            box.close()

    def _pruner(self, rng: random.Random) -> None:
        self._stop.wait(2 + rng.random() * 3)
        with self._mutex:
            if len(self._kept) <= ALIVE:
                return
            before = set(self._kept)
            self._gone |= before
        done = need(self.fs.ask("POST", "/checkpoints/prune", {"keep": str(KEEP), "named": True}))
        with self._mutex:
            for name in before - set(done["deleted"]):
                self._gone.discard(name)
            for name in done["deleted"]:
                self._gone.add(name)
                self._kept.pop(name, None)
            self.did["pruned"] += len(done["deleted"])

    def _sweeper(self, rng: random.Random) -> None:
        self._count("swept", self.sweep())

    def sweep(self, now_ms: int | None = None) -> int:
        """All that nothing shows any more, however young; how many blobs, rows and objects went."""
        cursor: str | None = ""
        swept = 0
        headers = {} if now_ms is None else {"X-Fsd-Test-Now": str(now_ms)}
        while cursor is not None:
            body = {"older_than_ms": 0, **({"cursor": cursor} if cursor else {})}
            reply = self.server.admin("POST", "/v1/sweep", body, headers=headers, timeout=WAIT)
            if reply.status == 409:  # the other who sweeps
                if self._stop.is_set() and now_ms is None:
                    return swept
                time.sleep(0.2)
                continue
            page = need(reply)
            swept += sum(page[name] for name in ("blobs", "packs", "objects", "rows", "pins") if name in page)
            cursor = page["next_cursor"]
        return swept

    # -- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The programs end; what they did is there, and every checkpoint is what it was."""
        for writer in self.writers:
            writer.end()
        for writer in self.writers:
            writer.box.drain(timeout=WAIT)
        live = self.export(self.fs)
        for writer in self.writers:
            self._same(below(live, writer.name), writer.steps.manifest(), f"the end of {writer.name}")
            mounted = of_directory(writer.box.mountpoint / writer.name)
            self._same(mounted, writer.steps.manifest(), f"the mount of {writer.name}")
        listed = {one["checkpoint_id"] for one in self.checkpoints()}
        assert set(self._kept) <= listed, f"checkpoints are lost: {set(self._kept) - listed}"
        for name, wanted in self._kept.items():
            self._same(self.export(self.fs, name), wanted, name)

    def checkpoints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = need(self.fs.ask("GET", f"/checkpoints?limit=50&cursor={cursor}"))
            found += page["checkpoints"]
            cursor = page["next_cursor"]
        return found

    def empty(self, collected: Callable[[], bool]) -> None:
        """Everything is removed, checkpoints one by one, and swept as in forty days, until nothing is left of
        forks that were deleted (`collected`): their packs stay as long as what was merged needs them."""
        for one in self.checkpoints():
            need(self.fs.ask("DELETE", f"/checkpoints/{one['checkpoint_id']}"))
        for path in sorted({name.split("/")[0] for name in self.export(self.fs)}):
            self._remove(path)
        for writer in self.writers:
            # The feed tells within a second; after the server's restart it may be some seconds later.
            wait_for(partial(_is_empty, writer.box.mountpoint), 30, "a mount to hear of what is gone")
            writer.box.unmount(timeout=WAIT)
        assert not need(self.fs.ask("GET", "/forks?all=1"))["forks"], "forks that nobody deleted"
        days = 40

        def swept() -> bool:
            nonlocal days
            days += 40
            self.sweep(int((time.time() + days * 86_400) * 1000))
            return days > 120 and collected()

        wait_for(swept, WAIT, "the forks to be gone", every=1)

    def _remove(self, path: str) -> None:
        more = True
        while more:
            body = {"action": "remove", "path": f"/{path}", "recursive": True}
            more = need(self.fs.ask("POST", "/actions", body))["more"]
