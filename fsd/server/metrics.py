"""Counters of the server as Prometheus text, without a client library. Any thread but for `in_flight`, which
is the event loop's."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from typing import Final

_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Requests by route template, method and status, and how long they took."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._mutex = threading.Lock()
        self._requests: dict[tuple[str, str, int], int] = defaultdict(int)
        self._buckets: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS) + 1))
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._errors: dict[str, int] = defaultdict(int)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        with self._mutex:
            self._requests[(route, method, status)] += 1
            self._buckets[(route, method)][bisect_left(_BOUNDS, seconds)] += 1
            self._seconds[(route, method)] += seconds

    def error(self, code: str) -> None:
        with self._mutex:
            self._errors[code] += 1

    def text(self, gauges: dict[str, float], counters: dict[str, float]) -> str:
        """The exposition; `gauges` and `counters` are added by name."""
        with self._mutex:
            return self._text(gauges, counters)

    def _text(self, gauges: dict[str, float], counters: dict[str, float]) -> str:
        lines = ["# TYPE fsd_requests_total counter"]
        for (route, method, status), count in sorted(self._requests.items()):
            lines.append(
                f"fsd_requests_total{{{_labels(route=route, method=method, status=str(status))}}} {count}"
            )
        lines.append("# TYPE fsd_request_seconds histogram")
        for (route, method), counts in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), counts, strict=True):
                total += count
                labels = _labels(route=route, method=method, le=bound)
                lines.append(f"fsd_request_seconds_bucket{{{labels}}} {total}")
            labels = _labels(route=route, method=method)
            lines.append(f"fsd_request_seconds_sum{{{labels}}} {self._seconds[(route, method)]:.6f}")
            lines.append(f"fsd_request_seconds_count{{{labels}}} {total}")
        lines.append("# TYPE fsd_errors_total counter")
        for code, count in sorted(self._errors.items()):
            lines.append(f"fsd_errors_total{{{_labels(code=code)}}} {count}")
        for name, value in {"fsd_requests_in_flight": self.in_flight, **gauges}.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        for name, value in counters.items():
            lines += [f"# TYPE {name} counter", f"{name} {value:.0f}"]
        return "\n".join(lines) + "\n"


def _labels(**pairs: str) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return ",".join(f'{key}="{quoted(value)}"' for key, value in pairs.items())
