"""Handlers of journals. Entries travel as the JSON text they were given in, so numbers stay as written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, BinaryIO, Final

from fsd.cli import local, values
from fsd.cli.context import Context, path_bytes
from fsd.cli.output import Document, Raw, columns, lines_of, visible
from fsd.client.http import Http
from fsd.client.journals import Journals, check_entry
from fsd.client.sources import told
from fsd.model.errors import FsdError, IntegrityError, UsageError
from fsd.model.limits import JOURNAL_BATCH_BYTES, JOURNAL_BATCH_MAX, JOURNAL_PAGE_MAX
from fsd.wire.strictjson import dumps, read_written, show

_DECODER: Final = json.JSONDecoder(parse_int=str)  # int() refuses more than 4,300 digits


def journals(context: Context) -> Journals:
    return Journals(Http(context.data(), context.host))


def create(context: Context, args: SimpleNamespace) -> Document:
    values.labels(args.label)
    made = journals(context).create(
        args.journal_id, kind=args.journal_kind, title=args.title, actor=args.actor, labels=args.label
    )
    return Document(made)


def append(context: Context, args: SimpleNamespace) -> Document:
    """Read and check the entries, then the barrier of the mounts here, then the append."""
    api = journals(context)
    texts = [with_defaults(t, args) for t in entries(context, args)]
    barrier = False
    if not args.no_barrier:
        about = context.data().file_system_id
        barrier = local.barrier(context, about, args.timeout, undone="nothing was appended")
    answer = api.append(
        args.journal_id,
        texts,
        idempotency_key=args.idempotency_key,
        expected_seq=args.expected_seq,
        barrier=barrier,
    )
    return Document(answer)


def entries(context: Context, args: SimpleNamespace) -> list[str]:
    """The texts of the entries given: flags, JSON lines or one JSON array from stdin."""
    if args.entry_json:
        if args.json_array:
            raise UsageError("--json-array is for entries from stdin, not beside --entry-json")
        return [check_entry(t, "--entry-json") for t in args.entry_json]
    if context.streams.interactive:
        raise UsageError("no entry", hint="pass --entry-json JSON, or JSON lines on stdin")
    raw = context.streams.stdin.read(2 * JOURNAL_BATCH_BYTES + 1)
    if len(raw) > 2 * JOURNAL_BATCH_BYTES:
        raise UsageError(f"stdin holds more than the {JOURNAL_BATCH_BYTES} bytes one append may have")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"stdin is no UTF-8: byte {exc.start}") from exc
    if args.json_array:
        found = split_array(text)
    else:
        found = [line for line in text.split("\n") if line.strip()]
    if not found:
        raise UsageError("stdin holds no entry")
    if len(found) > JOURNAL_BATCH_MAX:
        raise UsageError(f"{len(found)} entries, at most {JOURNAL_BATCH_MAX} in one append")
    return [check_entry(t, f"stdin, entry {at}") for at, t in enumerate(found, 1)]


def split_array(text: str) -> list[str]:
    """The source texts of the elements of one JSON array."""

    def blank(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    found: list[str] = []
    try:
        at = blank(0)
        if text[at] != "[":
            raise ValueError("no array")
        at = blank(at + 1)
        while text[at] != "]":
            if found:
                if text[at] != ",":
                    raise ValueError("no comma between elements")
                at = blank(at + 1)
            _, end = _DECODER.raw_decode(text, at)
            found.append(text[at:end])
            at = blank(end)
        if blank(at + 1) != len(text):
            raise ValueError("more after the array")
    except (ValueError, IndexError, RecursionError) as exc:
        raise UsageError(f"stdin is no JSON array: {exc}") from exc
    return found


def with_defaults(text: str, args: SimpleNamespace) -> str:
    """The entry's text with the fields of --entry-type, --source and --subject it does not name itself."""
    given = read_written(text)
    wanted: dict[str, Any] = {}
    if args.entry_type is not None:
        wanted["type"] = args.entry_type
    if args.source is not None:
        wanted["source"] = args.source
    if args.subject:
        wanted["subjects"] = args.subject
    added = {k: v for k, v in wanted.items() if k not in given}
    if not added:
        return text
    # Spliced into the text: parsing and writing it again would round the entry's numbers.
    body = text.rstrip()[:-1].rstrip()
    return body + ("," if given else "") + json.dumps(added, ensure_ascii=False)[1:]


def read(context: Context, args: SimpleNamespace) -> Document:
    page = journals(context).read_page(args.journal_id, after_seq=args.after_seq, limit=args.limit)
    if not args.no_wait:
        _wait_for(context, page["entries"], args.timeout)
    return Document(page, text=lambda value: lines_of(entry_line(e) for e in value["entries"]))


def entry_line(entry: dict[str, Any]) -> str:
    """One entry for people: number, time, type, then everything the caller said."""
    server = {"seq", "entry_id", "observed_at", "fs_seq", "prev_hash", "entry_hash", "type", "barrier"}
    own = {k: v for k, v in entry.items() if k not in server}
    told = show(own) if own else ""
    return f"{entry['seq']}  {entry['observed_at']}  {entry['type']}  {told}".rstrip()


def _wait_for(context: Context, found: list[dict[str, Any]], timeout: float) -> None:
    """Until the mounts here show what the entries speak of."""
    seq = max((int(e.get("fs_seq") or 0) for e in found), default=0)
    if seq:
        local.wait_seq(context, context.data().file_system_id, seq, timeout)


def follow(context: Context, args: SimpleNamespace) -> Raw:
    found = journals(context).follow(args.journal_id, after_seq=args.after_seq)
    for seen, entry in enumerate(found, 1):
        if not args.no_wait:
            _wait_for(context, [entry], args.timeout)
        line = visible(entry_line(entry)) if context.text else show(entry)
        context.streams.stdout.write(line.encode("utf-8", "backslashreplace") + b"\n")
        context.streams.stdout.flush()
        if args.count is not None and seen >= args.count:
            break
    return Raw()


def list_all(context: Context, args: SimpleNamespace) -> Document:
    labels = ["=".join(args.label)] if args.label else []
    found = []
    for journal in journals(context).list(kind=args.journal_kind, labels=labels):
        found.append(journal)
        if args.limit is not None and len(found) >= args.limit:
            break
    shown = ("journal_id", "kind", "title", "next_seq", "updated_at")
    return Document({"journals": found}, text=columns(shown, "journals"))


def search(context: Context, args: SimpleNamespace) -> Document:
    filters: dict[str, list[str]] = {}
    for name, flag in (
        ("journal_id", args.journal_id),
        ("type", args.entry_type),
        ("status", args.status),
        ("kind", args.journal_kind),
        ("actor", args.actor),
        ("since", _time(context, args.since)),
        ("until", _time(context, args.until)),
        ("cursor", args.cursor),
    ):
        if flag is not None:
            filters[name] = [flag]
    filters["subject"] = list(args.subject)
    filters["label"] = ["=".join(pair) for pair in args.label]
    asked = {name for name, given in filters.items() if given}
    if asked and asked <= {"kind", "label"} and not args.include_entries:
        # As ti does: filters that speak of journals alone find journals.
        return Document({"matches": _journals_page(context, args), "next_cursor": None}, text=_journals_text)
    matches: list[dict[str, Any]] = []
    while True:
        # A page may hold fewer than asked and yet not be the last: the server looks at a bounded number.
        page = journals(context).search(filters, limit=args.limit - len(matches))
        matches += page["matches"]
        cursor = page.get("next_cursor")
        if cursor is None or len(matches) >= args.limit:
            break
        filters["cursor"] = [cursor]

    def text(value: Any) -> str:
        return lines_of(f"{m['journal_id']}  {entry_line(m['entry'])}" for m in value["matches"])

    return Document({"matches": matches, "next_cursor": cursor}, text=text)


def _journals_page(context: Context, args: SimpleNamespace) -> list[dict[str, Any]]:
    labels = ["=".join(pair) for pair in args.label]
    found: list[dict[str, Any]] = []
    for journal in journals(context).list(kind=args.journal_kind, labels=labels):
        found.append(journal)
        if len(found) >= args.limit:
            break
    return found


def _journals_text(value: Any) -> str:
    return columns(("journal_id", "kind", "title", "next_seq", "updated_at"), "matches")(value)


def _time(context: Context, text: str | None) -> str | None:
    """An RFC 3339 time; a duration means so long before now."""
    if text is None:
        return None
    try:
        back = values.duration(text)
    except UsageError:
        values.date_ns(text)
        return text
    at = datetime.fromtimestamp(context.host.wall_ns() / 1e9 - back, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def verify(context: Context, args: SimpleNamespace) -> Document:
    if args.file is not None:
        answer = _verify_export(context, args)
    elif args.journal_id is None:
        raise UsageError("JOURNAL is missing", hint="or --file with what `fsd journal export` wrote")
    else:
        answer = journals(context).verify(args.journal_id, args.head_hash)
    error: FsdError | None = None
    if not answer.get("ok"):
        bad = answer.get("first_bad_seq")
        where = f"the first bad entry is {bad}" if bad is not None else "the trusted head is not in its chain"
        error = IntegrityError(f"the journal {answer['journal_id']} does not verify: {where}")
    return Document(answer, error=error)


def _verify_export(context: Context, args: SimpleNamespace) -> dict[str, Any]:
    """The answer of `verify` for an export."""
    from fsd.wire.chain import verify_lines

    if args.file == "-":
        answer = verify_lines(_lines(context.streams.stdin), args.head_hash)
    else:
        name = path_bytes(args.file)
        with told(name), open(name, "rb") as stream:
            answer = verify_lines(_lines(stream), args.head_hash)
    if args.journal_id not in (None, answer["journal_id"]):
        raise UsageError(f"that is an export of the journal {answer['journal_id']}, not of {args.journal_id}")
    return answer


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Lines as text. Bytes that are no UTF-8 become what no JSON of ours may hold: they are found there."""
    while line := stream.readline(JOURNAL_BATCH_BYTES + 1):
        if len(line) > JOURNAL_BATCH_BYTES:
            raise UsageError("a line of more than 4 MiB: that is no export of a journal")
        yield line.decode("utf-8", "surrogateescape")


def export(context: Context, args: SimpleNamespace) -> Raw:
    """The journal's own record on the first line, then one entry a line: all the hashes are made from."""
    api = journals(context)
    _line(context, {"journal": api.describe(args.journal_id)})
    after = 0
    while True:
        page = api.read_page(args.journal_id, after_seq=after, limit=JOURNAL_PAGE_MAX)
        for entry in page["entries"]:
            _line(context, entry)
        if not page["entries"]:
            break
        after = page["next_after_seq"]
    context.streams.stdout.flush()
    return Raw()


def _line(context: Context, value: dict[str, Any]) -> None:
    text = dumps(value)
    context.streams.stdout.write(text.encode() + b"\n")
