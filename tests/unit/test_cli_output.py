"""Documents, text, queries and errors on the two streams."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli import FILE_SYSTEM, SECRET, TOKEN, inside

from fsd.cli import main, table
from fsd.cli.context import Context, Streams
from fsd.cli.do_fork import _merge_text
from fsd.cli.env import Environment, Redactor
from fsd.cli.output import Document, columns, error_json, error_text, plain, render
from fsd.host.seam import Host
from fsd.model.errors import (
    Busy,
    Conflict,
    FsdError,
    InternalError,
    NotAuthenticated,
    NotDrained,
    NotFound,
    NotPermitted,
    PosixError,
    Unavailable,
    Unsupported,
    UsageError,
)

ENV = {"FSD_TOKEN": TOKEN, "FSD_REGION_CODE": "local"}
OBJECT = {"b": "two", "a": [1, 2], "c": None, "d": True, "e": {"x": 1}}
ROWS = [{"b": "x y", "a": 1}, {"a": 22, "c": None}]


def test_json_is_indented_and_keeps_its_order() -> None:
    assert render(Document({"b": 1, "a": "ü"}), "json", None) == '{\n  "b": 1,\n  "a": "ü"\n}\n'


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("b", "two\n"),
        ("c", "null\n"),
        ("d", "true\n"),
        ("a", "1\n2\n"),
        ("a[0]", "1\n"),
        ("missing", "null\n"),
        ("e", "x\t1\n"),
        ("{n: b, m: a}", "n\ttwo\nm\t1,2\n"),
    ],
)
def test_query_with_text(query: str, text: str) -> None:
    assert render(Document(OBJECT), "text", query) == text


def test_what_a_terminal_would_obey_is_shown_in_every_message() -> None:
    """Progress names files, and a name is whoever's who has a token."""
    err = io.StringIO()
    rows = table.load()
    found = rows.find(["cp"])
    assert found is not None
    streams = Streams(io.BytesIO(b"no\n"), io.BytesIO(), err, True, True, True)
    args = SimpleNamespace(yes=False)
    context = Context(Environment({}), rows, found[0], ("cp",), False, args, streams, "text", Host())
    context.progress("1 file /a\x1b[2Jb\nc\td\x9b")
    assert err.getvalue() == "\r\x1b[K" + r"1 file /a\x1b[2Jb\nc\td\x9b"
    context.end_progress()
    before = len(err.getvalue())
    context.say("kept \x1b]0;title\x07\nand more")
    with pytest.raises(UsageError, match="not yes"):
        context.confirm("Remove /\x1b[2J?", needs_yes=True)
    told = err.getvalue()[before:]
    assert told == r"kept \x1b]0;title\x07" + "\nand more\n" + r"Remove /\x1b[2J? Type yes to go on: "


def test_a_name_with_a_line_break_is_one_line_of_a_merge() -> None:
    answer = {"status": "merged", "applied": 1, "fs_seq": 5, "conflicts": []}
    changes = [{"change": "added", "path": "/a\nremoved\t/b"}]
    text = _merge_text({**answer, "changes": changes})
    assert text.splitlines()[1:] == ["added\t/a\\nremoved\\t/b"]


def test_a_list_of_objects_is_a_table_with_sorted_columns() -> None:
    assert plain(ROWS) == "a   b    c\n1   x y\n22       null\n"
    assert plain([]) == ""
    assert plain({"entries": ROWS, "n": 1}) == "n\t1\na   b    c\n1   x y\n22       null\n"


def test_query_with_json_keeps_json() -> None:
    assert json.loads(render(Document(OBJECT), "json", "a")) == [1, 2]


def test_a_renderer_of_its_own_is_for_text_without_query() -> None:
    document = Document({"rows": ROWS}, text=columns(("b", "a"), "rows"))
    assert render(document, "text", None).splitlines()[0] == "b    a"
    assert render(document, "text", "rows[0].a") == "1\n"


def test_a_wrong_query_is_found_before_the_work_is_done() -> None:
    found = inside("rm", "/x", "--query", "a[", env=ENV)
    assert found.code == 2
    assert "--query 'a['" in found.err


def test_a_cut_off_query_is_told_in_a_whole_line() -> None:
    assert inside("ls", "--query", "[[", env=ENV).error["message"].endswith("Incomplete expression")


def test_a_bench_of_nothing_says_so() -> None:
    found = inside("bench", "/no/such/place")
    assert (found.code, found.error["message"]) == (5, "no such directory: /no/such/place")


def test_a_query_is_applied_to_the_result_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "call", lambda *_: Document({"a": 1, "b": 2}))
    assert inside("stat", "/x", "--query", "keys(@)", env=ENV).json == ["a", "b"]
    found = inside("stat", "/x", "--query", "keys(a)", env=ENV)
    assert found.code == 2
    assert "the command itself was done" in found.err


def test_commands_that_give_bytes_refuse_a_query() -> None:
    found = inside("fs", "read-file", "--path", "/x", "--query", "a", env=ENV)
    assert found.code == 2
    assert "output.query_not_supported" in found.err


def test_names_that_are_no_utf8_still_make_one_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"a\xff".decode("utf-8", "surrogateescape")
    monkeypatch.setattr(main, "call", lambda *_: Document({"path": name}))
    found = inside("stat", "/x", env=ENV)
    assert json.loads(found.out) == {"path": name}


EXITS = [
    (InternalError("x"), 1),
    (Conflict("x"), 1),
    (Unavailable("x"), 1),
    (PosixError(39, "x"), 1),
    (UsageError("x"), 2),
    (Unsupported("x"), 2),
    (NotAuthenticated("x"), 3),
    (NotPermitted("x"), 4),
    (NotFound("x"), 5),
    (NotDrained("x"), 6),
    (Busy("x"), 7),
]


@pytest.mark.parametrize(("error", "code"), EXITS, ids=lambda v: type(v).__name__)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: FsdError, code: int) -> None:
    def raising(*_: object) -> Any:
        raise error

    monkeypatch.setattr(main, "call", raising)
    found = inside("stat", "/x", env=ENV)
    assert found.code == code
    assert found.out == b""
    assert found.err.startswith(f"fsd [ERROR]: {error.message}\n")
    assert found.error["code"] == error.code
    assert found.error["retryable"] == error.retryable
    assert set(found.error) >= {"code", "message", "hint", "retryable", "request_id"}


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "call", raising)
    found = inside("stat", "/x", env=ENV)
    assert found.code == 130
    assert found.error["code"] == "interrupted"


def test_a_defect_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> Any:
        raise ZeroDivisionError(f"with {TOKEN}")

    monkeypatch.setattr(main, "call", raising)
    found = inside("stat", "/x", "--debug", env=ENV)
    assert found.code == 1
    assert "Traceback" in found.err
    assert "ZeroDivisionError" in found.error["message"]
    assert SECRET not in found.err


def test_an_answer_beside_an_error_prints_both(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Document({"status": "not_drained"}, error=NotDrained("left", details={"pending": 3}))
    monkeypatch.setattr(main, "call", lambda *_: answer)
    found = inside("drain", "/mnt")
    assert found.code == 6
    assert found.json == {"status": "not_drained"}
    assert found.error["details"] == {"pending": 3}


def test_text_errors_carry_no_json() -> None:
    found = inside("cat", terminal=True)
    assert found.code == 2
    assert "{" not in found.err
    assert inside("cat", "--output", "text").err == found.err
    assert inside("cat").error["code"] == "invalid_argument"


def test_the_long_spelling_is_json_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "call", lambda *_: Document({"a": 1}))
    assert inside("fs", "describe-file", "--path", "/x", env=ENV, terminal=True).json == {"a": 1}
    assert inside("stat", "/x", env=ENV, terminal=True).text == "a\t1\n"
    assert inside("stat", "/x", env=ENV).json == {"a": 1}
    assert inside("stat", "/x", "--output", "json", env=ENV, terminal=True).json == {"a": 1}


def test_secrets_never_reach_a_stream() -> None:
    redact = Redactor(("topsecretadminkey",))
    error = UsageError(f"bad {TOKEN} and topsecretadminkey", hint=TOKEN)
    told = error_text(error, redact) + error_json(error, redact)
    assert SECRET not in told
    assert "topsecret" not in told
    assert "fsd1.…" in told


def test_a_token_given_as_an_argument_is_not_repeated() -> None:
    found = inside("cat", "/x", "--fs-token", TOKEN, "--region", "nowhere")
    assert found.code == 2
    assert SECRET not in found.err
    assert "this token knows: local" in found.err


def test_control_characters_cannot_drive_the_terminal() -> None:
    text = error_text(NotFound("no such file: a\x1b[2Jb\r"), Redactor())
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_dry_run_tells_the_request() -> None:
    found = inside(
        "fs-journal", "create-journal", "--journal-id", "j", "--label", "a=b", "--dry-run", env=ENV
    )
    assert found.code == 0
    told = found.json
    assert told["dry_run"] is True
    assert told["command"] == "fsd fs-journal create-journal"
    assert told["operation"] == "create-journal"
    assert told["would_send_request"] is True
    assert told["request"]["method"] == "POST"
    assert told["request"]["path"] == f"/v1/file-systems/{FILE_SYSTEM}/journals"
    assert told["request"]["description"] == "make the journal j"
    assert told["request"]["body"] == {"journal_id": "j", "label": [["a", "b"]]}
    assert [c["status"] for c in told["checks"]] == ["ok", "ok"]


def test_dry_run_without_an_identity_fails_as_the_command_would() -> None:
    found = inside("rm", "/tasks/x", "--dry-run")
    assert found.code == 3
    assert found.json["would_send_request"] is False
    assert found.json["checks"][-1]["status"] == "failed"


def test_dry_run_is_refused_where_nothing_changes() -> None:
    found = inside("cat", "/x", "--dry-run", env=ENV)
    assert found.code == 2
    assert "changes nothing" in found.err


def test_no_text_for_people_moves_their_terminal() -> None:
    rows = [{"host": "a\x1b[2J", "labels": {"k": "\x07"}, "list": ["\x9b"]}]
    for document in (
        Document({"rows": rows}),
        Document(rows),
        Document({"rows": rows}, text=columns(["host", "labels", "list"], "rows")),
        Document(rows, text=lambda value: f"{value[0]['host']}\n"),
    ):
        text = render(document, "text", None)
        assert "a\\x1b[2J" in text
        assert text.replace("\n", "").replace("\t", "").isprintable()
    # A bare value that was asked for is what it is: scripts take it.
    assert render(Document({"rows": rows}), "text", "rows[0].host") == "a\x1b[2J\n"
