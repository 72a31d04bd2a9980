"""Rows: journals."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.table import Command, Flag, flag, switch
from fsd.model.limits import JOURNAL_PAGE_MAX

GROUP: Final = "Journals"
ROUTE: Final = "/v1/file-systems/{fs}/journals"


def journal(required: bool = True) -> Flag:
    return flag("--journal-id", "id of the journal", metavar="JOURNAL", position=0, required=required)


ROWS: Final = (
    Command(
        ("journal", "create"), ("fs-journal", "create-journal"), GROUP,
        "make a journal; again with the same fields gives the same one",
        'fsd journal create task-42 --title "task 42" --actor agent:worker-1',
        "do_journal:create", changes=True, plan=("POST", ROUTE, "make the journal {journal_id}"),
        flags=(
            journal(required=False),
            flag("--journal-kind --kind", "kind (default agent)", metavar="KIND"),
            flag("--title", "title for people", metavar="TEXT"),
            flag("--actor", "who writes it", values.actor, metavar="TYPE:ID"),
            flag("--label", "label", values.pair, metavar="K=V", many=True),
        ),
    ),
    Command(
        ("journal", "append"), ("fs-journal", "append-journal-entries"), GROUP,
        "append entries; files written before on a mount here are made durable first",
        """fsd journal append task-42 --entry-json '{"type":"task.checkpoint","step":"inspected"}'""",
        "do_journal:append", changes=True,
        plan=("POST", ROUTE + "/{journal_id}/entries", "append to the journal {journal_id}"),
        flags=(
            journal(),
            flag("--entry-json", "one entry; without it JSON lines are read from stdin", metavar="JSON",
                 many=True),
            switch("--json-array", "stdin holds one JSON array"),
            flag("--entry-type", "type of entries that name none", metavar="TYPE"),
            flag("--source", "source of entries that name none", metavar="SOURCE"),
            flag("--subject", "subject of entries that name none", metavar="TYPE:ID", many=True),
            flag("--idempotency-key", "the same key and entries are appended once", metavar="KEY"),
            flag("--expected-seq", "append only if the last entry has this number", values.integer(),
                 metavar="N"),
            switch("--no-barrier", "do not flush the mounts of this filesystem here first"),
            flag("--timeout", "how long the barrier may take (default 300s)", values.positive_duration,
                 metavar="DURATION", default=300.0),
        ),
    ),
    Command(
        ("journal", "read"), ("fs-journal", "read-journal-entries"), GROUP, "read entries in order",
        "fsd journal read task-42 --after-seq 0", "do_journal:read",
        flags=(
            journal(),
            flag("--after-seq", "behind this number", values.integer(), metavar="N", default=0),
            flag("--limit", "at most so many (default 100)", values.integer(1, JOURNAL_PAGE_MAX), metavar="N",
                 default=100),
            switch("--no-wait", "do not wait until the mounts here show what the entries speak of"),
            flag("--timeout", "how long to wait for that (default 60s)", values.positive_duration,
                 metavar="DURATION", default=60.0),
        ),
    ),
    Command(
        ("journal", "follow"), (), GROUP, "print entries as they come, one JSON object a line",
        "fsd journal follow task-42", "do_journal:follow", raw=True,
        flags=(
            journal(),
            flag("--after-seq", "behind this number", values.integer(), metavar="N", default=0),
            switch("--no-wait", "do not wait until the mounts here show what the entries speak of"),
            flag("--timeout", "how long to wait for that (default 60s)", values.positive_duration,
                 metavar="DURATION", default=60.0),
            flag("--count", "end after so many entries", values.integer(1), metavar="N"),
        ),
    ),
    Command(
        ("journal", "list"), (), GROUP, "list journals with their heads",
        "fsd journal list --kind agent", "do_journal:list_all",
        flags=(
            flag("--journal-kind --kind", "only this kind", metavar="KIND"),
            flag("--label", "only with this label", values.pair, metavar="K=V"),
            flag("--limit", "at most so many", values.integer(1), metavar="N"),
        ),
    ),
    Command(
        ("journal", "search"), ("fs-journal", "search-journal-entries"), GROUP, "search entries",
        "fsd journal search --entry-type task.checkpoint --since 24h", "do_journal:search",
        flags=(
            flag("--journal-id", "only this journal", metavar="JOURNAL"),
            flag("--entry-type --type", "type", metavar="TYPE"),
            flag("--status", "status", metavar="STATUS"),
            flag("--journal-kind --kind", "kind of the journal", metavar="KIND"),
            flag("--actor", "actor", values.actor, metavar="TYPE:ID"),
            flag("--subject", "subject; all given must match", metavar="TYPE:ID", many=True),
            flag("--label", "label of the journal; all given must match", values.pair, metavar="K=V",
                 many=True),
            flag("--since", "from this time on (RFC 3339, or a duration back from now)", metavar="TIME"),
            flag("--until", "before this time (RFC 3339, or a duration back from now)", metavar="TIME"),
            flag("--limit", "at most so many (default 100)", values.integer(1, JOURNAL_PAGE_MAX), metavar="N",
                 default=100),
            flag("--cursor", "`next_cursor` of the page before", metavar="CURSOR"),
            switch("--include-entries", "entries even where only kind or label are filtered"),
        ),
    ),
    Command(
        ("journal", "verify"), ("fs-journal", "verify-journal"), GROUP,
        "check the hash chain; exit 1 when it does not hold",
        "fsd journal verify task-42", "do_journal:verify",
        flags=(
            journal(required=False),
            flag("--head-hash", "a head you trust: the chain must pass through it", metavar="HASH"),
            flag("--file", "verify what `journal export` wrote; - is stdin. Needs neither server nor token",
                 metavar="FILE"),
        ),
    ),
    Command(
        ("journal", "export"), (), GROUP, "write the journal as JSON lines that can be verified offline",
        "fsd journal export task-42 > task-42.jsonl", "do_journal:export", raw=True, flags=(journal(),),
    ),
)  # fmt: skip
