"""Secrets out of bytes: every occurrence is overwritten with zero bytes of the same length.

Zeroes and not a mark or a hash: what is stored must not tell the secret from another one. Overlapping
occurrences are all overwritten. A file without a secret, the common case, costs one linear search for each;
where one is found an automaton (Aho-Corasick) goes through once, so that no choice of secrets and bytes makes
it slower than linear.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from fsd.model.errors import UsageError
from fsd.model.limits import MIB, SECRET_BYTES_MAX, SECRET_LEAST, SECRETS_MAX

WINDOW: Final = MIB


class Secrets:
    """A set of secrets. Any thread."""

    def __init__(self, values: Iterable[bytes]) -> None:
        """Raises `UsageError` for too many, too long, or one so short that zeroing it would ruin files."""
        self.values = sorted(set(values), key=lambda value: (-len(value), value))
        if len(self.values) > SECRETS_MAX:
            raise UsageError(f"{len(self.values)} secrets, at most {SECRETS_MAX}")
        if any(len(value) > SECRET_BYTES_MAX for value in self.values):
            raise UsageError(f"a secret has at most {SECRET_BYTES_MAX} bytes")
        if any(len(value) < SECRET_LEAST for value in self.values):
            raise UsageError(
                f"a secret of fewer than {SECRET_LEAST} bytes is found everywhere",
                hint="leave it out, or exclude the files that hold it",
            )
        self.longest = len(self.values[0]) if self.values else 0
        self._goto: list[dict[int, int]] = []
        self._fail: list[int] = []
        self._ends: list[int] = []  # length of the longest secret that ends in a state, 0: none
        self._first: re.Pattern[bytes] | None = None

    def __bool__(self) -> bool:
        return bool(self.values)

    def ranges(self, data: bytes) -> Iterator[tuple[int, int]]:
        """[start, end) of every occurrence that no other one begins before and ends with; may overlap."""
        if not any(value in data for value in self.values):
            return
        if self._first is None:
            self._build()
        assert self._first is not None
        goto, fail, ends, first = self._goto, self._fail, self._ends, self._first
        state, at, size = 0, 0, len(data)
        while at < size:
            if not state:
                found = first.search(data, at)
                if found is None:
                    return
                at = found.start()
            byte = data[at]
            while state and byte not in goto[state]:
                state = fail[state]
            state = goto[state].get(byte, 0)
            at += 1
            if ends[state]:
                yield at - ends[state], at

    def _build(self) -> None:
        goto: list[dict[int, int]] = [{}]
        ends = [0]
        for value in self.values:
            state = 0
            for byte in value:
                following = goto[state].get(byte)
                if following is None:
                    following = goto[state][byte] = len(goto)
                    goto.append({})
                    ends.append(0)
                state = following
            ends[state] = len(value)
        fail = [0] * len(goto)
        waiting = deque(goto[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, following in goto[state].items():
                back = fail[state]
                while back and byte not in goto[back]:
                    back = fail[back]
                fail[following] = goto[back].get(byte, 0)
                ends[following] = max(ends[following], ends[fail[following]])
                waiting.append(following)
        self._goto, self._fail, self._ends = goto, fail, ends
        self._first = re.compile(b"[" + b"".join(re.escape(bytes([b])) for b in goto[0]) + b"]", re.DOTALL)

    def redacted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """`pieces` without the secrets, also those that lie across pieces; in other pieces."""
        if not self.values:
            yield from pieces
            return
        keep = self.longest - 1
        raw, masked = b"", bytearray()
        for piece in pieces:
            raw += piece
            masked += piece
            if len(raw) < WINDOW + keep:
                continue
            self._zero(raw, masked)
            # The last bytes may be the beginning of a secret that goes on in the next piece.
            cut = len(raw) - keep
            yield bytes(masked[:cut])
            raw, masked = raw[cut:], masked[cut:]
        self._zero(raw, masked)
        yield bytes(masked)

    def _zero(self, raw: bytes, masked: bytearray) -> None:
        for start, end in self.ranges(raw):
            masked[start:end] = bytes(end - start)
