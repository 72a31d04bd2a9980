"""Figures of fsd alone: what checkpoints, forks and merges cost, in the server's time and on its disk.

Small and large trees are compared, since none of it may depend on what there is, only on what changed. All of
it goes through a mount and over HTTP; `server_ms` is what the server's answers say. The same on SQLite and on
PostgreSQL (a cluster of the run's own), each as a peer of the other.
"""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from support.postgres import PostgresServer
from support.sandbox import Sandbox
from support.server import Server, TestFs

from bench import inputs, proc
from bench.measure import Values, timed
from bench.peers import Failed, Fsd
from bench.tree import PER_DIRECTORY, make_files, mounted

SMALL, LARGE = 1000, 100_000
TURNS, PER_TURN = 10, 10  # of the figures in ms
CHECKPOINTS, CHANGES, KEPT = 200, 100, 10  # of the growth
# Tables that grow with commits, with or without checkpoints: content of small ones, the change feed, and the
# last 65,536 operations of a session.
APART = ("pack", "change", "applied")
WAIT = 600.0
# Bytes in the database: of the tables `APART`, of the rest (`rows`), and of that without the room that new
# rows will use (`kept`).
Used = Callable[[], dict[str, float]]


def states(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """Times on a small and on a large tree, the growth of the large one, and a merge of all its files."""
    for count in (SMALL, 5000 if quick else LARGE):
        with mounted(base / str(count)) as peer:
            yield from of_tree(base, peer, count, partial(used_sqlite, peer.server.data_dir), quick)


def states_postgresql(base: Path, made: inputs.Inputs, quick: bool) -> Values:
    """The same figures, on a server that keeps its facts in PostgreSQL."""
    cluster = PostgresServer()
    try:
        cluster.start()
        for count in (SMALL, 5000 if quick else LARGE):
            url = cluster.fresh()
            server = Server(base / f"server{count}", "--database", url)
            try:
                with mounted(base / f"p{count}", server=server.start()) as peer:
                    yield from of_tree(base, peer, count, partial(used_postgresql, url), quick)
            finally:
                server.end()
    finally:
        cluster.remove()


def of_tree(base: Path, peer: Fsd, count: int, used: Used, quick: bool) -> Values:
    peer.root.joinpath("first").write_bytes(b"first")
    make_files(peer.root, count)
    peer.settle()
    if count != SMALL:  # before anything was deleted in it: pages half empty would take new rows
        yield from growth(peer, 20 if quick else CHECKPOINTS, used)
    yield from named(times(peer), f"{count:,} files")
    if count != SMALL:
        yield from named(merge(base / "fork", peer, count), f"{count:,} changes")


def named(values: Values, of: str) -> Values:
    for figure, value in values:
        yield f"{figure}, {of}", value


def ask(fs: TestFs, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer; raises `Failed`."""
    reply = fs.server.ask(method, f"/v1/file-systems/{fs.id}{path}", body, token=fs.token, timeout=WAIT)
    if reply.status >= 300:
        raise Failed(f"{method} {path}: {reply.status} {reply.body[:200]!r}")
    found: dict[str, Any] = reply.json
    return found


def change(peer: Fsd, turn: int, count: int) -> None:
    """Write new content into so many of the files."""
    for number in range(count):
        at = (turn * count + number) % SMALL
        peer.root.joinpath(f"d{at // PER_DIRECTORY}/f{at % PER_DIRECTORY}").write_bytes(
            b"turn %d of %d" % (turn, at)
        )


def times(peer: Fsd) -> Values:
    """Medians of the server's ms, and the first byte of an old state."""
    fs = peer.box().fs
    names = [ask(fs, "POST", "/checkpoints", {})["checkpoint_id"]]
    spent: dict[str, list[float]] = {"create": [], "diff of 10": [], "delete": [], "fork": []}
    for turn in range(TURNS):
        change(peer, turn, PER_TURN)
        peer.settle()
        answer = ask(fs, "POST", "/checkpoints", {})
        spent["create"].append(answer["server_ms"])
        names.append(answer["checkpoint_id"])
        difference = ask(fs, "GET", f"/diff?from={names[-2]}&to={names[-1]}")
        if difference["total"] != PER_TURN:
            raise Failed(f"{difference['total']} differences where {PER_TURN} files changed")
        spent["diff of 10"].append(difference["server_ms"])
    yield "first byte of an old state after its mount, s", first_byte(peer, names[0])
    for _ in range(3):
        fork = ask(fs, "POST", "/forks", {})
        spent["fork"].append(fork["server_ms"])
        one = f"/v1/file-systems/{fork['file_system_id']}"
        proc.await_true(
            "a fork to be copied", lambda at=one: bool(fs.server.admin("GET", at).json["copied"]), WAIT
        )
        ask(fs, "DELETE", f"/forks/{fork['file_system_id']}")
    for name in names:
        spent["delete"].append(ask(fs, "DELETE", f"/checkpoints/{name}")["server_ms"])
    for what, values in spent.items():
        yield (
            f"checkpoint {what}, server ms" if what != "fork" else "fork, server ms",
            statistics.median(values),
        )


def first_byte(peer: Fsd, checkpoint: str) -> float:
    """Seconds from the end of `fsd mount --checkpoint` to the first byte of a file."""
    box = Sandbox(peer.base / "then", peer.box().fs, "--checkpoint", checkpoint, endpoint=peer.server.url)
    try:
        box.mount()
        return timed(lambda: box.mountpoint.joinpath("first").read_bytes())
    finally:
        box.close()


# -- room ----------------------------------------------------------------------------------------------


def growth(peer: Fsd, checkpoints: int, used: Used) -> Values:
    """What checkpoints with changes between them add to the database, and what thinning them gives back."""
    fs = peer.box().fs
    began = used()
    for turn in range(checkpoints):
        change(peer, TURNS + turn, CHANGES)
        peer.settle()
        ask(fs, "POST", "/checkpoints", {})
    grown = used()
    added = grown["rows"] - began["rows"]
    yield "bytes a change of 200 checkpoints", added / (checkpoints * CHANGES)
    apart = grown["apart"] - began["apart"]
    yield "bytes of content, feed and operations a change", apart / (checkpoints * CHANGES)
    spent = 0.0
    more = True
    keep = max(1, KEPT * checkpoints // CHECKPOINTS)
    while more:
        start = time.perf_counter()
        more = ask(fs, "POST", "/checkpoints/prune", {"keep": str(keep), "asked_for": True})["more"]
        spent += time.perf_counter() - start
    yield f"prune --keep {KEPT} of {CHECKPOINTS}, s", spent
    sweep(peer)
    left = used()["kept"] - began["kept"]
    yield "given back by prune, % of the growth", (1 - left / (grown["kept"] - began["kept"])) * 100


def used_sqlite(data_dir: Path) -> dict[str, float]:
    """Of the database's pages in use. It joins pages that got half-empty, so those count whole."""
    with closing(sqlite3.connect(f"file:{data_dir}/fsd.db?mode=ro", uri=True)) as database:
        pages = dict(database.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"))
    return apart_and_rows(pages, {})


def used_postgresql(url: str) -> dict[str, float]:
    """Of tables with their indexes and what is stored beside them, after VACUUM, without their free room. In
    indexes that is whole pages; the room within pages, which PostgreSQL never joins and fills with the next
    keys between those that stayed, is not in `kept`."""
    with psycopg.connect(url, autocommit=True) as connection:
        for extension in ("pg_freespacemap", "pgstattuple"):
            connection.execute(f"CREATE EXTENSION IF NOT EXISTS {extension} SCHEMA public")
        # Index pages that the first one empties are free once a transaction began after it.
        connection.execute("VACUUM")
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute("VACUUM")
        # The extension's own function calls another one by its mere name.
        connection.execute("SELECT set_config('search_path', current_schema() || ', public', false)")
        found = connection.execute(
            "SELECT coalesce(o.relname, t.relname, c.relname), sum(pg_relation_size(c.oid) - "
            "(SELECT coalesce(sum(avail), 0) FROM public.pg_freespace(c.oid::regclass))) "
            "FROM pg_class c LEFT JOIN pg_index i ON i.indexrelid=c.oid "
            "LEFT JOIN pg_class t ON t.oid=i.indrelid "
            "LEFT JOIN pg_class o ON o.reltoastrelid=coalesce(t.oid, c.oid) "
            "WHERE c.relkind IN ('r', 'i', 't') AND (c.relnamespace=current_schema()::regnamespace "
            "OR coalesce(t.oid, c.oid) IN (SELECT reltoastrelid FROM pg_class "
            "WHERE relnamespace=current_schema()::regnamespace)) GROUP BY 1"
        ).fetchall()
        within = connection.execute(
            "SELECT t.relname, sum(s.leaf_pages * (1 - s.avg_leaf_density / 100) * "
            "current_setting('block_size')::bigint) "
            "FROM pg_index i JOIN pg_class t ON t.oid=i.indrelid, "
            "public.pgstatindex(i.indexrelid::regclass) s "
            "WHERE t.relnamespace=current_schema()::regnamespace "
            "AND s.avg_leaf_density <> 'NaN' GROUP BY 1"  # of an index without a key
        ).fetchall()
    sizes = {str(name): float(size) for name, size in found}
    return apart_and_rows(sizes, {str(name): float(size) for name, size in within})


def apart_and_rows(sizes: dict[str, float], within: dict[str, float]) -> dict[str, float]:
    """`within`: of those sizes, room that new rows will use."""
    apart = sum(size for name, size in sizes.items() if name in APART)
    rows = sum(sizes.values()) - apart
    return {
        "apart": apart,
        "rows": rows,
        "kept": rows - sum(size for name, size in within.items() if name not in APART),
    }


def sweep(peer: Fsd) -> None:
    """All of what nothing shows any more, from beginning to end."""
    cursor: str | None = ""
    while cursor is not None:
        body = {"older_than_ms": 0, **({"cursor": cursor} if cursor else {})}
        reply = peer.server.admin("POST", "/v1/sweep", body, timeout=WAIT)
        if reply.status == 409:  # the background's turn
            time.sleep(0.2)
            continue
        if reply.status >= 300:
            raise Failed(f"sweep: {reply.status} {reply.body[:200]!r}")
        cursor = reply.json["next_cursor"]


# -- merge ---------------------------------------------------------------------------------------------


def merge(base: Path, peer: Fsd, count: int) -> Iterator[tuple[str, float]]:
    """A fork in which every file was changed, through a mount of it, merged into its parent."""
    fs = peer.box().fs
    made = ask(fs, "POST", "/forks", {})
    fork = TestFs(fs.server, made["file_system_id"], made["fs_token"])
    box = Sandbox(base, fork, endpoint=peer.server.url)
    try:
        box.mount()
        for at in range(count):
            box.mountpoint.joinpath(f"d{at // PER_DIRECTORY}/f{at % PER_DIRECTORY}").write_bytes(
                b"merged %d" % at
            )
        box.unmount(timeout=WAIT)
    finally:
        box.close()
        shutil.rmtree(base, ignore_errors=True)
    before = proc.cpu([fs.server.pid])
    answer = ask(fs, "POST", "/merges", {"fork": fork.id})
    if answer["status"] != "merged" or answer["applied"] != count:
        raise Failed(f"the merge: {answer['status']}, {answer['applied']} applied of {count}")
    yield "merge, server ms", answer["server_ms"]
    yield "merge, ms CPU of the server", (proc.cpu([fs.server.pid]) - before) * 1000
