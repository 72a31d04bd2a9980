"""What a `recorder` told, as a model: what each path held after each call, and what must be found later.

The model is a dictionary of paths; nothing of fsd is used. A *time* is a number of calls: after call n the
tree is `state n`. Three kinds of promises are checked (`Found` is what a reader sees):

* `check_exact`: everything acknowledged is there, at most the one call under way besides;
* `check_since`: each path holds something it held at or after the time up to which it is durable;
* what is neither old nor new, or empty where a truncation hid behind a rewrite, fails either.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.recorder import payload
from support.wait import wait_for

RECORDER = Path(__file__).with_name("recorder.py")


class Value(NamedTuple):
    """What one path is: kind "d", "f" or "l", permission bits, and content hash or target."""

    kind: str
    mode: int
    content: str


Found = dict[str, Value]
PAGE = 4096
_settle = threading.Event()  # never set


def stopped(pid: int) -> bool:
    """Whether the process is stopped, or waits in the kernel for a call that will not return before it is."""
    return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] in (b"T", b"D", b"Z")


@dataclass
class _Node:
    number: int  # two names of one file share it
    kind: str
    mode: int
    data: bytearray = field(default_factory=bytearray)
    target: str = ""
    # Between a truncation to nothing and the close or fsync behind it, no server may show the content.
    hidden: bool = False
    digest: str | None = None  # of `data`, when it is known

    def value(self) -> Value:
        if self.digest is None:
            self.digest = self.target if self.kind == "l" else hashlib.sha256(self.data).hexdigest()
        return Value(self.kind, self.mode, self.digest)


def read_tree(root: Path) -> Found:
    """What a mount shows now."""
    found: Found = {}
    for directory, dirs, files in os.walk(root):
        for name in dirs + files:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, root)
            status = os.lstat(path)
            mode = status.st_mode & 0o7777
            if os.path.islink(path):
                found[relative] = Value("l", 0o777, os.readlink(path))
            elif name in dirs:
                found[relative] = Value("d", mode, hashlib.sha256(b"").hexdigest())
            else:
                data = Path(path).read_bytes()
                assert len(data) == status.st_size, f"{relative}: size {status.st_size}, {len(data)} bytes"
                found[relative] = Value("f", mode, hashlib.sha256(data).hexdigest())
    return found


class Recording:
    """A running recorder and the growing model of what it was told. `stop` ends it."""

    def __init__(self, directory: Path, seed: int, profile: str, steps: int = 100_000) -> None:
        self.seed, self.profile = seed, profile
        self.calls: list[dict[str, Any]] = []
        self.acked: list[float] = []  # when call i+1 returned (CLOCK_MONOTONIC)
        self.failed: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, os.fspath(RECORDER), os.fspath(directory), str(seed), profile, str(steps)],
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = json.loads(raw)
            if "op" in line:
                self.calls.append(line)
            elif "ok" in line:
                assert line["ok"] == len(self.acked) + 1
                self.acked.append(line["t"])
            else:
                self.failed = line

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> int:
        """SIGSTOP; how many calls had returned by then."""
        self._process.send_signal(signal.SIGSTOP)
        # What it told before it stopped may still be in the pipe.
        wait_for(lambda: stopped(self.pid), 30, "the recorder to stop")
        count = -1
        while count != len(self.acked):
            count = len(self.acked)
            _settle.wait(0.05)
        return count

    def so_far(self) -> int:
        """How many calls have returned by now, what is still on its way to us included."""
        if self._process.poll() is not None:
            return len(self.acked)
        count = self.pause()
        self._process.send_signal(signal.SIGCONT)
        return count

    def wait_acked(self, count: int, timeout: float = 60) -> None:
        """Until `count` calls returned; AssertionError with the failed call if one did not."""
        wait_for(
            lambda: len(self.acked) >= count or self.failed or not self._reader.is_alive(),
            timeout,
            f"{count} acknowledged calls (now {len(self.acked)})",
            every=0.005,
        )
        assert len(self.acked) >= count, (
            f"stopped after {len(self.acked)} calls: {self.failed} {self.calls[-1:]}"
        )

    def wait_end(self, timeout: float = 60) -> None:
        """Until it has made all its calls, or one failed."""
        self._reader.join(timeout)
        assert not self._reader.is_alive(), "the recorder did not end"
        self._process.wait(60)

    def stop(self) -> None:
        """SIGKILL, and everything it told is read."""
        self._process.kill()
        self._reader.join(60)
        self._process.wait(60)

    def history(self) -> History:
        """The model of what was told so far; call after `stop` or `wait_end`."""
        return History(self.seed, self.calls, len(self.acked))


class History:
    """The tree after each call. `acked` calls returned; at most one more was under way."""

    def __init__(self, seed: int, calls: list[dict[str, Any]], acked: int) -> None:
        assert len(calls) - acked in (0, 1)
        self._seed = seed
        self.calls, self.acked = calls, acked
        self._tree: dict[str, _Node] = {}
        self._handles: dict[int, tuple[_Node, str, int]] = {}
        self._at: dict[int, int] = {}
        self.states: list[Found] = [{}]
        self._nodes: list[dict[str, int]] = [{}]  # which file each path was, after each call
        # What each file held: (since call, content, hidden), a row for each change.
        self._contents: dict[int, list[tuple[int, str, bool]]] = {}
        self._count = 0
        # When each file, and the names of all, were last made durable, as told by fsync and friends.
        self.synced: dict[int, int] = {}
        self.synced_names = 0
        # The same for close: when each file, and any that a handle had changed, was last closed.
        self.closed: dict[int, int] = {}
        self.closed_names = 0
        self._changed: set[int] = set()  # handles through which something changed
        # What a killed program's last write may have left: some of its pages.
        self._partly: dict[int, set[str]] = {}
        # The kernel sends a write that begins inside a page as two requests: a power cut may come between,
        # and so may the commit of a flush or a barrier.
        self._split: dict[int, list[tuple[int, str, bool]]] = {}
        # The file of a mapping into which the last call stored: its pages are promised nothing yet.
        self.mapped = 0
        for time, call in enumerate(calls, 1):
            if time == acked and call["op"] == "store":
                self.mapped = self._handles[call["h"]][0].number
            if call["op"] in ("write", "pwrite") and call["size"]:
                self._part(time, call)
            getattr(self, "_do_" + call["op"])(time, call)
            self._remember(time)

    def _part(self, time: int, call: dict[str, Any]) -> None:
        """What a write leaves when it ends early, between two pages: the last call of a killed program
        anywhere, one that a power failure or a commit came into at its first page border."""
        node, _, flags = self._handles[call["h"]]
        off = call.get("off", len(node.data) if flags & os.O_APPEND else self._at[call["h"]])
        data = payload(self._seed, call["n"], call["size"])
        killed = time > self.acked
        for end in range((off // PAGE + 1) * PAGE, off + len(data), PAGE):
            if not killed and off % PAGE == 0:
                return
            part = _Node(0, "f", 0, bytearray(node.data))
            self._put(part, off, data[: end - off])
            content = part.value().content
            if not killed:
                self._split.setdefault(node.number, []).append((time, content, node.hidden))
                return
            self._partly.setdefault(node.number, set()).add(content)

    def _remember(self, time: int) -> None:
        state = {path: node.value() for path, node in self._tree.items()}
        self.states.append(state)
        self._nodes.append({path: node.number for path, node in self._tree.items()})
        for path, node in self._tree.items():
            rows = self._contents.setdefault(node.number, [])
            now = (state[path].content, node.hidden)
            if not rows or rows[-1][1:] != now:
                rows.append((time, *now))

    # The model.

    def _new(self, path: str, kind: str, mode: int, target: str = "") -> _Node:
        self._count += 1
        node = self._tree[path] = _Node(self._count, kind, mode, target=target)
        return node

    def _node(self, call: dict[str, Any]) -> _Node:
        return self._handles[call["h"]][0]

    def _put(self, node: _Node, off: int, data: bytes) -> None:
        if len(node.data) < off:
            node.data.extend(bytes(off - len(node.data)))
        node.data[off : off + len(data)] = data
        node.digest = None

    def _do_open(self, time: int, call: dict[str, Any]) -> None:
        path, flags = call["path"], call["flags"]
        node = self._tree.get(path)
        if node is None:
            node = self._new(path, "f", 0o644)
            self._changed.add(call["h"])
        if flags & os.O_TRUNC and node.data:
            node.data.clear()
            node.digest = None
            node.hidden = True
            self._changed.add(call["h"])
        self._handles[call["h"]] = (node, path, flags)
        self._at[call["h"]] = 0

    def _do_write(self, time: int, call: dict[str, Any]) -> None:
        node, _, flags = self._handles[call["h"]]
        data = payload(self._seed, call["n"], call["size"])
        off = len(node.data) if flags & os.O_APPEND else self._at[call["h"]]
        if data:
            self._put(node, off, data)
            self._changed.add(call["h"])
        self._at[call["h"]] = off + len(data)
        # Linux does not even tell a filesystem of a write of nothing.
        if data and flags & (os.O_SYNC | os.O_DSYNC):
            self._durable(time, node)

    def _do_pwrite(self, time: int, call: dict[str, Any]) -> None:
        data = payload(self._seed, call["n"], call["size"])
        if data:
            self._put(self._node(call), call["off"], data)
            self._changed.add(call["h"])

    def _do_ftruncate(self, time: int, call: dict[str, Any]) -> None:
        node, size = self._node(call), call["size"]
        self._changed.add(call["h"])
        node.digest = None
        if size < len(node.data):
            del node.data[size:]
        else:
            node.data.extend(bytes(size - len(node.data)))

    def _do_store(self, time: int, call: dict[str, Any]) -> None:
        self._put(self._node(call), 0, payload(self._seed, call["n"], call["size"]))
        self._changed.add(call["h"])

    def _do_munmap(self, time: int, call: dict[str, Any]) -> None:
        return

    def _do_close(self, time: int, call: dict[str, Any]) -> None:
        node = self._node(call)
        node.hidden = False
        if time <= self.acked:
            self.closed[node.number] = time
            if call["h"] in self._changed:
                self.closed_names = time

    def _do_fsync(self, time: int, call: dict[str, Any]) -> None:
        self._durable(time, self._node(call))

    _do_fdatasync = _do_msync = _do_fsync

    def _do_fsyncdir(self, time: int, call: dict[str, Any]) -> None:
        if time <= self.acked:
            self.synced_names = time

    def _durable(self, time: int, node: _Node) -> None:
        node.hidden = False
        if time > self.acked:
            return  # never returned: it promised nothing
        self.synced[node.number] = time
        self.synced_names = time

    def _do_mkdir(self, time: int, call: dict[str, Any]) -> None:
        self._new(call["path"], "d", 0o755)

    def _do_rename(self, time: int, call: dict[str, Any]) -> None:
        source, target = call["a"], call["b"]
        if self._tree.get(target) is not self._tree[source]:
            self._tree[target] = self._tree.pop(source)

    def _do_unlink(self, time: int, call: dict[str, Any]) -> None:
        self._tree.pop(call["path"])

    def _do_symlink(self, time: int, call: dict[str, Any]) -> None:
        self._new(call["path"], "l", 0o777, call["target"])

    def _do_link(self, time: int, call: dict[str, Any]) -> None:
        self._tree[call["b"]] = self._tree[call["a"]]

    def _do_chmod(self, time: int, call: dict[str, Any]) -> None:
        self._tree[call["path"]].mode = call["mode"]

    # Checks.

    def check_exact(self, found: Found) -> None:
        """Everything acknowledged, and at most the call under way besides."""
        wanted = self.states[self.acked :]
        for path, number in self._nodes[self.acked].items():
            partly = path in found and found[path].content in self._partly.get(number, ())
            if partly or (path in found and number == self.mapped):
                found = {**found, path: found[path]._replace(content=wanted[0][path].content)}
        if found not in wanted:
            raise AssertionError(
                f"seed {self._seed}: after {self.acked} acknowledged calls (then "
                f"{self.calls[self.acked :]}): {difference(found, wanted[0])}"
            )

    def check_since(
        self, found: Found, names: int, synced: dict[int, int], *, recovered: bool = False, late: int = 0
    ) -> None:
        """Names are durable as of time `names`, the content of file n as of `synced[n]`, else in any form it
        had; of a barrier that was somewhere up to time `late`, also what only it made visible. `recovered`,
        after a power cut: beside stand what is of doubtful age, and what was removed in the lost end of the
        log while its content was on its way (it comes back under another name)."""
        wrong = []
        everything = set(found).union(*self.states[names:])
        for path in sorted(everything):
            now = found.get(path)
            if recovered and now is not None and _doubtful(path):
                continue
            since = [state.get(path) for state in self.states[names:]]
            if now is None:
                if None not in since:
                    wrong.append(f"{path} is missing")
                continue
            kinds = {(v.kind, v.mode) for v in since if v is not None}
            if (now.kind, now.mode) not in kinds:
                wrong.append(f"{path} is {now.kind} {now.mode:o}, not one of {kinds}")
            elif self._nodes[-1].get(path, 0) == self.mapped != 0:
                continue
            elif now.content not in self._held(path, names, synced, recovered, late):
                wrong.append(f"{path} holds {now.content[:12]}, {self._trace(path, now.content, names)}")
        assert not wrong, f"seed {self._seed}, {self.acked} calls: {'; '.join(wrong[:20])}"

    def _held(
        self, path: str, names: int, synced: dict[int, int], power_cut: bool = False, late: int = 0
    ) -> set[str]:
        """What `path` may hold: for each file it was since `names`, that file's content since it got this
        name (a name never shows older content than it was given with) and since it was synced."""
        held = set()
        for number in {nodes[path] for nodes in self._nodes[names:] if path in nodes}:
            named = next(t for t, nodes in enumerate(self._nodes) if nodes.get(path) == number)
            start = max(named, synced.get(number, 0))
            rows = self._contents[number]
            for at, (time, content, hidden) in enumerate(rows):
                ended = rows[at + 1][0] if at + 1 < len(rows) else len(self.states)
                # Hidden content is seen only where it was itself made durable.
                durable = time <= start == synced.get(number) or start < time <= late
                if ended > start and (not hidden or durable):
                    held.add(content)
            held |= self._partly.get(number, set())
            for time, content, hidden in self._split.get(number, ()):
                if time > start and (power_cut or not hidden):
                    held.add(content)
        return held

    def _trace(self, path: str, content: str, names: int) -> str:
        """For people: which call left that content, and what happened to the file."""
        number = next((n[path] for n in self._nodes[names:] if path in n), 0)
        rows = [(time, held[:12], hidden) for time, held, hidden in self._contents[number]]
        when = [time for time, held, _ in self._contents[number] if held == content]
        handles = {h for h, (node, _, _) in self._handles.items() if node.number == number}
        did = [
            c for c in self.calls if c.get("h") in handles or path in (c.get("a"), c.get("b"), c.get("path"))
        ]
        return f"as it was after calls {when}, not as after {names}; {rows}; {did}"

    def check_synced(self, found: Found, *, recovered: bool = False) -> None:
        """What fsync and its kin promised, and nothing torn besides."""
        self.check_since(found, self.synced_names, self.synced, recovered=recovered)

    def check_closed(self, found: Found) -> None:
        """What close promises with `--durability close`."""
        self.check_since(found, self.closed_names, self.closed)

    def open_at(self, time: int) -> set[int]:
        """The files that a handle had open after call `time`, or that the call under way then opens."""
        opened: dict[int, int] = {}
        for call in self.calls[: time + 1]:
            if call["op"] == "open":
                opened[call["h"]] = self._handles[call["h"]][0].number
            elif call["op"] == "close" and call["n"] <= time:
                opened.pop(call["h"])
        return set(opened.values())

    def check_up_to(self, found: Found, time: int, *, recovered: bool = False, late: int = 0) -> None:
        """Everything up to `time` is there, in content too. The barrier that saw to it was at the latest at
        `late`: calls that came between may be behind it or not."""
        synced = dict.fromkeys(self._contents, time)
        self.check_since(found, time, synced, recovered=recovered, late=late)


def _doubtful(path: str) -> bool:
    return ".recovered-" in path or ".conflict-" in path or path.split("/")[0] == ".fsd-lost"


def difference(found: Found, wanted: Found) -> str:
    """Where two trees differ, short."""
    lines = [f"missing {p}" for p in sorted(wanted.keys() - found.keys())]
    lines += [f"too many {p}" for p in sorted(found.keys() - wanted.keys())]
    lines += [
        f"{p} is {found[p]} not {wanted[p]}"
        for p in sorted(found.keys() & wanted.keys())
        if found[p] != wanted[p]
    ]
    return f"{len(lines)} differences: " + "; ".join(lines[:12])
