"""Figures of fsd alone: requests, distance, many sandboxes on one server, memory (`states` is a module)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.proxy import FaultProxy, delay
from support.server import Server

from bench import inputs, proc
from bench.measure import Values, small, timed, tool
from bench.peers import Failed, Fsd, run
from bench.states import states, states_postgresql
from bench.targets import FSD, FSD_POSTGRESQL
from bench.tree import make_files, mounted

Special = Callable[[Path, inputs.Inputs, bool], Values]
DISTANCE = 0.02  # seconds added to each request
FEED = "changes"  # the route of the change feed: asked all the time, not for what is measured


@contextmanager
def proxied(base: Path) -> Iterator[tuple[Fsd, FaultProxy]]:
    """The same with a proxy between the two."""
    server = Server(base / "server").start()
    try:
        with (
            FaultProxy(server.url) as proxy,
            mounted(base / "box", server=server, endpoint=proxy.url) as peer,
        ):
            yield peer, proxy
    finally:
        server.end()
        shutil.rmtree(base, ignore_errors=True)


def asked(proxy: FaultProxy) -> int:
    """Requests since the counts were reset, the change feed's apart."""
    with proxy._lock:
        return sum(count for route, count in proxy.requests.items() if route != FEED)


def requests(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """How often the server is asked for a cold listing and for one small fsync."""
    with proxied(base) as (peer, proxy):
        make_files(peer.root, 5000)
        peer.unmount()
        peer.mount()
        proxy.reset_counts()
        tool(["ls", "-R", peer.root])
        yield "requests of a cold ls -R of 5,000", asked(proxy)
        peer.settle()
        count = 200  # SQLite brings its WAL home every 130 or so, with three syncs
        with counted_syncs(peer.server.pid, base) as syncs:
            proxy.reset_counts()
            took = [fsynced(peer.root / f"s{at}") for at in range(count)]
        yield "requests of a small fsync", asked(proxy) / count
        if syncs:
            yield "durable writes of a small fsync", round(syncs[0] / count, 1)
    with mounted(base) as peer:
        took = [fsynced(peer.root / f"s{at}") for at in range(3 * count)][count:]
        yield "small fsync, p50 ms", statistics.median(took) * 1e3
        yield "small fsync, p99 ms", quantile(took, 0.99) * 1e3


def fsynced(path: Path) -> float:
    """Write a small new file and fsync it; seconds of the fsync."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, b"x" * 4096)
        return timed(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


@contextmanager
def counted_syncs(pid: int, base: Path) -> Iterator[list[int]]:
    """Into the list, at the end: fsync and fdatasync calls of a process, by strace; empty without it."""
    found: list[int] = []
    strace = shutil.which("strace")
    if strace is None:
        yield found
        return
    report = base / "strace"
    tracer = subprocess.Popen(
        [strace, "-f", "-e", "trace=fsync,fdatasync", "-o", report, "-p", str(pid)],
        stderr=subprocess.DEVNULL,
    )
    try:
        traced = re.compile(r"^TracerPid:\t[1-9]", re.MULTILINE)
        status = Path(f"/proc/{pid}/status")
        proc.await_true("strace", lambda: bool(traced.search(status.read_text())), 10)
        yield found
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(20)
    calls = [line for line in report.read_text().splitlines() if "sync(" in line]
    found.append(len(calls))


def distance(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """Untar until durable, clone and cold listing, through a proxy without and with 20 ms a request."""
    from bench.measure import git

    for word, seconds in (("through a proxy", 0.0), ("at +20 ms", DISTANCE)):
        for _ in range(1 if quick else 3):
            with proxied(base) as (peer, proxy):
                if seconds:
                    proxy.always(delay(seconds), lambda request: request.route != FEED)
                for figure, value in small(peer, made, peer.root):
                    if figure == "untar until durable, s":
                        yield f"untar until durable {word}, s", value
                    if figure == "first ls -R, s":
                        yield f"cold ls -R {word}, s", value
                for figure, value in git(peer, made, peer.root):
                    if figure == "git clone, s":
                        yield f"git clone {word}, s", value


def many(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """Sandboxes on one server, each untarring and draining at once, then each fsyncing small files."""
    files = 300
    tar = inputs.tree(made.tar.parent, files)
    for count in (1, 4) if quick else (1, 2, 4, 8, 16, 32):
        server = Server(base / "server").start()
        boxes = [Fsd(base / f"box{at}", server=server) for at in range(count)]
        try:
            for box in boxes:
                box.start()
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(Fsd.mount, boxes))

                def work(box: Fsd, tar: Path = tar) -> None:
                    tool(["tar", "-xf", tar, "-C", box.root, "--no-same-owner"])
                    box.settle()

                took = timed(lambda work=work, boxes=boxes, pool=pool: list(pool.map(work, boxes)))  # type: ignore[misc]
                yield f"{count} sandboxes: files a second until durable", files * count / took

                def sync(box: Fsd) -> list[float]:
                    return [fsynced(box.root / f"s{at}") for at in range(30)]

                waits = sorted(second for one in pool.map(sync, boxes) for second in one)
                yield f"{count} sandboxes: fsync p50, ms", statistics.median(waits) * 1e3
                yield f"{count} sandboxes: fsync p99, ms", quantile(waits, 0.99) * 1e3
        finally:
            for box in boxes:
                box.stop()
            server.end()
            shutil.rmtree(base, ignore_errors=True)


def memory(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """RSS after find over many files in a fresh mount; growth over rounds of creating and deleting names."""
    with mounted(base) as peer:
        count = 20_000 if quick else 100_000
        make_files(peer.root, count)
        peer.settle()
        peer.unmount()
        peer.mount()
        found = tool(["find", peer.root, "-type", "f", "-size", "+1k"])
        if found:
            raise Failed("empty files have a size")
        told = f"{count:,}"
        yield f"RSS after find over {told}, MiB", proc.memory(peer.daemons(), "VmRSS")
        yield f"peak RSS of find over {told}, MiB", proc.memory(peer.daemons(), "VmHWM")
    with mounted(base) as peer:
        rounds, count = (4, 10_000) if quick else (10, 100_000)
        sizes = []
        for number in range(rounds):
            directory = peer.root / f"r{number}"
            directory.mkdir()
            make_files(directory, count)
            run(["rm", "-rf", directory])
            peer.settle()
            sizes.append(proc.memory(peer.daemons(), "VmRSS"))
            yield f"RSS after each round of {count:,} names, MiB", sizes[-1]
        yield f"RSS growth, round 3 to {rounds} of {count:,} names, %", (max(sizes[2:]) / sizes[2] - 1) * 100


# What is measured of each group, by the peer it is shown as.
SPECIAL: dict[str, dict[str, Special]] = {
    "requests": {FSD: requests},
    "distance": {FSD: distance},
    "many": {FSD: many},
    "memory": {FSD: memory},
    "states": {FSD: states, FSD_POSTGRESQL: states_postgresql},
}
