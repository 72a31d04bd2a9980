"""`scripts/bench`: see its --help."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support.leftovers import clear_mounts

from bench import inputs, measure, report, special
from bench.peers import Fsd, JuiceFs, JuiceFsRedis, Local, Passthrough, Peer
from bench.results import Results
from bench.wanted import arguments

HERE = Path(__file__).parent


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def peers(base: Path, tools: Path) -> list[Callable[[], Peer]]:
    """How each is made; fsd last, so that its neighbours' leftovers are its problem and not the reverse."""
    juice = tools / "venv/bin/juicefs"
    return [
        lambda: Local(base),
        lambda: Passthrough(base, tools / "passthrough_ll"),
        lambda: JuiceFs(base, juice),
        lambda: JuiceFsRedis(base, juice),
        lambda: Fsd(base),
    ]


def start(makers: list[Callable[[], Peer]], results: Results, only: set[str]) -> list[Peer]:
    """Those that work here, mounted; the others are rows with what they said."""
    working: list[Peer] = []
    for make in makers:
        peer = make()
        if only and peer.name.split(",")[0] not in only:
            continue
        try:
            peer.start()
            peer.mount()
        except Exception as exc:  # noqa: BLE001 - a peer that does not work here is a row of the result
            results.failed(peer.name, "start", exc)
            say(f"{peer.name} does not work here: {exc}")
            peer.stop()
        else:
            working.append(peer)
    return working


def side_by_side(
    working: list[Peer], groups: list[str], made: inputs.Inputs, rounds: int, results: Results, until: float
) -> None:
    """Round by round, group by group, peer by peer, each time another peer first."""
    for number in range(rounds):
        results.host(number, made.data.parent)
        for group in groups:
            first = number % len(working)
            for peer in working[first:] + working[:first]:
                if time.monotonic() > until:
                    results.failed(peer.name, group, TimeoutError("the run's time was over"))
                    continue
                say(f"round {number + 1} of {rounds}: {group}: {peer.name}")
                try:
                    for figure, value in measure.one_round(peer, group, made, number):
                        results.put(peer.name, figure, value)
                except Exception as exc:  # noqa: BLE001 - a figure that fails is a row of the result
                    results.failed(peer.name, group, exc)
                    say(f"{peer.name}: {group}: {exc}")


def commit() -> str:
    """The commit of this checkout, with `+` when tracked files of the package differ from it."""
    git = ["git", "-C", str(HERE)]
    named = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../../fsd"], check=False).returncode
    return (named.stdout.strip() or "unknown") + ("+" if dirty else "")


def stopped(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through the `finally` that unmounts and ends everything


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    chosen = arguments()
    if chosen.show is not None:
        print(report.text(Results.load(chosen.show)))
        return 0
    wanted = chosen.groups
    groups = [name for name in measure.GROUPS if not wanted or name in wanted]
    specials = [name for name in special.SPECIAL if not wanted or name in wanted]
    results = Results.begin(commit(), 1 if chosen.quick else chosen.rounds)
    begun = time.monotonic()
    until = begun + chosen.minutes * 60
    made = inputs.make(chosen.tools / "inputs")
    base = Path(tempfile.mkdtemp(prefix="fsd-bench.", dir=chosen.work))
    working: list[Peer] = []
    try:
        if groups:
            working = start(peers(base, chosen.tools), results, set(chosen.only))
            share = 0.6 if specials else 1.0  # of the time: what is left is for fsd alone
            side_by_side(working, groups, made, results.rounds, results, begun + chosen.minutes * 60 * share)
            for peer in working:
                results.memory(peer)
        for name in specials:
            for peer_name, figures in special.SPECIAL[name].items():
                say(f"{name} ({peer_name} alone)")
                if time.monotonic() > until:
                    results.failed(peer_name, name, TimeoutError("the run's time was over"))
                    continue
                try:
                    for figure, value in figures(base / name, made, chosen.quick):
                        results.put(peer_name, figure, value)
                except Exception as exc:  # noqa: BLE001 - a figure that fails is a row of the result
                    results.failed(peer_name, name, exc)
                    say(f"{name}: {exc}")
    finally:
        for peer in working:
            peer.stop()
        clear_mounts(base)
        shutil.rmtree(base, ignore_errors=True)
    print(report.text(results))
    if chosen.save:
        for path in report.save(results, HERE / "results"):
            say(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
