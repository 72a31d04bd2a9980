"""Following a journal's hash chain, entry by entry: the same code for the server and for an export.

An export is JSON lines: first `{"journal": {…}}`, then the entries in order, each as `read` gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsd.model.errors import FsdError, UsageError
from fsd.model.plain import dataclass, field
from fsd.wire.canonical import GENESIS_FIELDS, entry_hash, genesis_hash
from fsd.wire.strictjson import Number, loads


@dataclass(slots=True)
class Chain:
    """`follow` each entry in order; afterwards `problem` says what is wrong first, '' when nothing is.

    `trusted` is a hash the caller got elsewhere: it must be in the chain (the genesis hash counts).
    """

    journal: dict[str, Any]
    trusted: str | None = None
    seq: int = 0
    head: str = ""
    problem: str = ""
    first_bad_seq: int | None = None
    trusted_seen: bool = field(default=False)

    def __post_init__(self) -> None:
        missing = [name for name in GENESIS_FIELDS if name not in self.journal]
        if missing:
            raise UsageError(f"the journal lacks the field {missing[0]}")
        self.head = genesis_hash(self.journal)
        self.trusted_seen = self.trusted == self.head
        if self.journal.get("genesis_hash") != self.head:
            self._bad(0, "the genesis hash is not that of the journal's fields")

    def follow(self, text: str | bytes) -> None:
        """Check the entry in `text`; the first problem is kept, later ones are not looked for."""
        self.seq += 1
        if self.problem:
            return
        try:
            entry = loads(text, f"entry {self.seq}", exact=True)
            shown = entry.get("entry_hash") if isinstance(entry, dict) else None
            if not isinstance(shown, str):
                self._bad(self.seq, "it is not an entry with a hash")
            elif entry.get("seq") != Number(str(self.seq)):
                self._bad(self.seq, "an entry is missing before it, or its number was changed")
            elif entry.get("prev_hash") != self.head:
                self._bad(self.seq, "it does not follow the entry before it")
            elif entry_hash(entry) != shown:
                self._bad(self.seq, "its content does not match its hash")
            else:
                self.head = shown
                self.trusted_seen = self.trusted_seen or self.trusted == shown
        except FsdError as exc:
            self._bad(self.seq, exc.message)

    def finish(self) -> dict[str, Any]:
        """The result of `verify`; compares with the journal's own head where it is given."""
        head = self.journal.get("head_hash")
        if not self.problem and head is not None and head != self.head:
            self._bad(self.seq + 1, "entries are missing at the end: the journal's head is another")
        chain_ok = not self.problem
        trusted_ok = self.trusted is None or self.trusted_seen
        if chain_ok and not trusted_ok:
            self.problem = "the trusted head is not in the chain: entries were replaced or cut off"
        return {
            "ok": chain_ok and trusted_ok,
            "journal_id": self.journal["journal_id"],
            "entries": self.seq,
            "head_hash": self.head,
            "hash_chain_ok": chain_ok,
            "first_bad_seq": self.first_bad_seq,
            "reason": self.problem,
        }

    def _bad(self, seq: int, problem: str) -> None:
        self.first_bad_seq = seq
        self.problem = f"entry {seq}: {problem}" if seq else problem


def verify_lines(lines: Iterable[str], trusted: str | None = None) -> dict[str, Any]:
    """Verify an export; raises `UsageError` when it does not begin with its journal."""
    chain: Chain | None = None
    for line in lines:
        if not line.strip():
            continue
        if chain is None:
            first = loads(line, "the first line", exact=True)
            if not isinstance(first, dict) or not isinstance(first.get("journal"), dict):
                raise UsageError('an export begins with a line {"journal": …}')
            chain = Chain(first["journal"], trusted)
        else:
            chain.follow(line)
    if chain is None:
        raise UsageError("the export is empty")
    return chain.finish()
