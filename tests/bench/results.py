"""What a run found: values by peer and figure, failures by name, the machine's noise; as JSON and back."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import proc
from bench.peers import Fsd, Peer

FORMAT = 1


@dataclass(slots=True)
class Results:
    """`values`: peer → figure → one value a round. `failures`: (peer, what, why)."""

    commit: str
    rounds: int
    machine: dict[str, Any]
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def begin(cls, commit: str, rounds: int) -> Results:
        machine = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "root": os.geteuid() == 0,
            "caches_dropped": proc.can_drop_caches(),
        }
        return cls(commit, rounds, machine)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises ValueError for another format than this."""
        raw = json.loads(path.read_text())
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path}: format {raw.get('format')}, this reads {FORMAT}")
        raw["failures"] = [tuple(one) for one in raw["failures"]]
        return cls(**raw)

    def json(self) -> str:
        rounded = {
            peer: {figure: [float(f"{value:.5g}") for value in values] for figure, values in figures.items()}
            for peer, figures in self.values.items()
        }
        return json.dumps({**asdict(self), "values": rounded}, indent=1) + "\n"

    def put(self, peer: str, figure: str, value: float) -> None:
        self.values.setdefault(peer, {}).setdefault(figure, []).append(value)

    def failed(self, peer: str, what: str, why: BaseException) -> None:
        text = " ".join(f"{type(why).__name__}: {why}".split())
        self.failures.append((peer, what, text[:300]))

    def host(self, number: int, work: Path) -> None:
        """How fast the machine is just now, apart from any peer: other work on it shows here."""
        block = bytes(1 << 20)
        start = time.perf_counter()
        for _ in range(64):
            hashlib.sha256(block).digest()
        self.put("host", "sha256, MiB/s", 64 / (time.perf_counter() - start))
        path = work / "host.part"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            start = time.perf_counter()
            for at in range(20):
                os.pwrite(descriptor, block[:4096], 4096 * at)
                os.fsync(descriptor)
            self.put("host", "fsync, ms", (time.perf_counter() - start) * 50)
        finally:
            os.close(descriptor)
            path.unlink()
        self.put("host", "load", os.getloadavg()[0])

    def memory(self, peer: Peer) -> None:
        peer.note_memory()
        if peer.peak:
            self.put(peer.name, "peak RSS, MiB", peer.peak)
        if isinstance(peer, Fsd):
            self.put(peer.name, "peak RSS of the supervisor, MiB", peer.supervisor_peak)

    def median(self, peer: str, figure: str) -> float | None:
        values = self.values.get(peer, {}).get(figure)
        return statistics.median(values) if values else None

    def spread(self, peer: str, figure: str) -> float:
        """Half the distance of the extremes, as a share of the median; 0 for one value."""
        values = self.values[peer][figure]
        middle = statistics.median(values)
        return (max(values) - min(values)) / 2 / middle if middle else 0.0

    def figures(self) -> list[str]:
        """Of the peers side by side, in the order they were first measured."""
        found: dict[str, None] = {}
        for peer, figures in self.values.items():
            if peer != "host":
                found.update(dict.fromkeys(figures))
        return list(found)

    def peers(self) -> Mapping[str, dict[str, list[float]]]:
        return {peer: figures for peer, figures in self.values.items() if peer != "host"}
