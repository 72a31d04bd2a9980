"""From words to values, in both spellings."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from support.cli import TOKEN, inside

from fsd.cli import parse, table, values
from fsd.model.errors import Unsupported, UsageError

ROWS = table.load()


def parsed(*argv: str) -> SimpleNamespace:
    found = ROWS.find(list(argv))
    assert found is not None
    row, long, words, rest = found
    return parse.parse(row, long, words, rest)


def test_operands_and_flags_give_the_same_values() -> None:
    short = parsed("journal", "create", "task-42", "--title", "task 42", "--actor", "agent:worker-1")
    long = parsed(
        "fs-journal",
        "create-journal",
        "--journal-id",
        "task-42",
        "--title=task 42",
        "--actor",
        "agent:worker-1",
    )
    short.profile = long.profile
    assert short == long
    assert short.journal_id == "task-42"


@pytest.mark.parametrize("mode", ["-x", "-rwx", "-w,o+r", "-X", "-"])
def test_a_mode_may_begin_with_a_dash(mode: str) -> None:
    assert vars(parsed("chmod", mode, "/a", "/b")) == vars(parsed("chmod", "--mode", mode, "/a", "/b"))
    both = parsed("chmod", "-R", mode, "/a")
    assert (both.mode, both.path, both.recursive) == (mode, "/a", True)
    with pytest.raises(UsageError, match="unknown flag -z"):
        parsed("chmod", "-z", "/a")
    with pytest.raises(UsageError, match="unknown flag -w"):
        parsed("chmod", "+x", "/a", "-w")


def test_text_is_text_and_names_are_bytes() -> None:
    half = os.fsdecode(b"a\xff")
    for argv in (
        ("ls", "/", "--checkpoint", half),
        ("list", "--label", f"k={half}"),
        ("journal", "search", "--actor", f"agent:{half}"),
        ("wait", "m", "--journal", f"{half}:1"),
        ("find", "/", "--tag", half),
        ("token", "delete", half),
    ):
        with pytest.raises(UsageError, match="no UTF-8 text"):
            parsed(*argv)
    assert parsed("find", "/" + half, "--name", half).file_name_pattern == half
    assert parsed("lock", "/" + half, "--", "echo", half).command == ["echo", half]
    assert parsed("cp", half, ":/" + half).source == half


@pytest.mark.parametrize(
    "argv",
    [
        ("cat", "--offset", "1", "/x", "--length", "2"),
        ("cat", "/x", "--offset=1", "--length=2"),
        ("cat", "--path", "/x", "--offset", "1", "--length", "2"),
        ("fs", "read-file", "--path", "/x", "--offset", "1", "--length", "2"),
        ("fs", "cat", "--length", "2", "--path", "/x", "--offset", "1"),
    ],
)
def test_flags_and_operands_may_stand_in_any_order(argv: tuple[str, ...]) -> None:
    args = parsed(*argv)
    assert (args.path, args.offset, args.length) == ("/x", 1, 2)


def test_an_operand_that_was_named_is_not_expected_again() -> None:
    args = parsed("mv", "--to-remote", "/b", "/a")
    assert (args.from_remote, args.to_remote) == ("/a", "/b")


def test_grouped_switches() -> None:
    args = parsed("rm", "-ry", "/x")
    assert args.recursive
    assert args.yes
    assert parsed("mkdir", "-pm", "700", "/x").mode == 0o700
    assert parsed("mkdir", "-m700", "-p", "/x").parents


def test_everything_behind_the_first_word_of_a_command_is_its_own() -> None:
    args = parsed("run", "--path", "/p", "--", "make", "--path", "-j2")
    assert args.path == "/p"
    assert args.command == ["make", "--path", "-j2"]
    assert parsed("run", "make", "--path", "x").command == ["make", "--path", "x"]


def test_double_dash_ends_the_flags() -> None:
    assert parsed("cat", "--", "-x").path == "-x"
    assert parsed("cp", "-", ":/x").source == "-"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (("cat",), "PATH is missing"),
        (("fs", "read-file"), "--path is missing"),
        (("ln", "/a", "/b", "/c"), "one operand too many: '/c'"),
        (("fs", "read-file", "/a"), "takes flags only"),
        (("cat", "/a", "--nonsense"), "unknown flag --nonsense"),
        (("cat", "/a", "-z"), "unknown flag -z"),
        (("cat", "/a", "--offset"), "--offset needs a value"),
        (("cat", "/a", "--offset", "x"), "--offset: 'x' is no whole number"),
        (("cat", "/a", "--offset", "-1"), "--offset: -1 is out of range"),
        (("cat", "/a", "--offset", "1", "--offset", "2"), "--offset is given twice"),
        (("rm", "/a", "--recursive=yes"), "--recursive takes no value"),
        (("ls", "--output", "xml"), "--output: 'xml' is none of text, json"),
        (("journal", "read", "j", "--limit", "1001"), "1001 is out of range: 1 to 1000"),
        (("create", "--label", "novalue"), "no label of the form key=value"),
    ],
)
def test_a_wrong_line_names_what_is_wrong(argv: tuple[str, ...], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(*argv)
    assert what in caught.value.message


def test_refused_flags_give_the_reason_and_take_what_happens_anyway() -> None:
    mount = ("fs", "mount-file-system", "--mount-path", "/mnt")
    with pytest.raises(Unsupported, match="no WebDAV"):
        parsed(*mount, "--driver", "webdav")
    assert parsed(*mount, "--driver", "auto").driver == "auto"
    with pytest.raises(Unsupported, match="profiles"):
        parsed(*mount, "--mount-profile", "coding-agent")
    with pytest.raises(Unsupported, match="stores no credentials"):
        parsed("fs", "list-files", "--profile", "work")
    assert parsed("fs", "list-files", "--profile", "default").path == "/"


def test_long_only_flags_are_unknown_to_the_short_spelling() -> None:
    with pytest.raises(UsageError, match="unknown flag --driver"):
        parsed("mount", "/mnt", "--driver", "fuse")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("5m", 300), ("1.5h", 5400), ("7d", 604800), ("250ms", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert values.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64K", 65536), ("10MiB", 10 << 20), ("2g", 2 << 30), ("1.5kb", 1536)]
)
def test_sizes(text: str, size: int) -> None:
    assert values.size(text) == size


@pytest.mark.parametrize("text", ["9" * 400, "5300w", "36501d", "9" * 18 + "w"])
def test_durations_no_clock_can_count(text: str) -> None:
    """They came back from the libraries below as defects of ours, after the work or in the middle of it."""
    assert values.duration("100w") == 100 * 604800
    with pytest.raises(UsageError, match=r"years|no duration"):
        values.duration(text)


@pytest.mark.parametrize("text", ["9" * 400, "1048577T", "9" * 18 + "T"])
def test_sizes_nothing_has(text: str) -> None:
    assert values.size("1048576T") == 1 << 60
    with pytest.raises(UsageError, match=r"PiB|no size"):
        values.size(text)


@pytest.mark.parametrize("flag", ["--cache-size", "--buffer-size"])
def test_a_bound_of_nothing_is_refused_and_not_the_default(flag: str) -> None:
    with pytest.raises(UsageError, match="more than zero"):
        parsed("mount", "/m", flag, "0K")
    assert getattr(parsed("mount", "/m", flag, "1K"), flag[2:].replace("-", "_")) == 1024


def test_a_name_is_no_cursor() -> None:
    assert parsed("ls", "/", "--after", "cGxhbg").after == "cGxhbg"
    with pytest.raises(UsageError, match="no cursor"):
        parsed("ls", "/", "--after", "pl\udcffn")


def test_modes_dates_addresses() -> None:
    assert values.mode("0755") == values.mode("755") == values.mode("0o755") == 0o755
    assert values.date_ns("1970-01-02") == 86400 * 10**9
    assert values.date_ns("1970-01-01T00:00:00.000001Z") == 1000
    assert values.date_ns("1970-01-01T01:00:00+01:00") == 0
    assert values.listen("127.0.0.1:0") == ("127.0.0.1", 0)
    assert values.listen("[::1]:80") == ("::1", 80)
    assert values.listen("::1:8420") == ("::1", 8420)
    assert values.listen("[fe80::1%eth0]:80") == ("fe80::1%eth0", 80)
    for address in ("::1", "[::1", "a:b:80", "[::g]:80"):
        with pytest.raises(UsageError, match="no HOST:PORT"):
            values.listen(address)
    assert values.journal_at("a:b:17") == ("a:b", 17)
    for wrong in ("8", "888", "77777", "rwx"):
        with pytest.raises(UsageError):
            values.mode(wrong)
    for wrong in ("127.0.0.1", "x:99999", "x:"):
        with pytest.raises(UsageError):
            values.listen(wrong)
    with pytest.raises(UsageError, match="no date"):
        values.date_ns("yesterday")


def test_a_label_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        values.labels([("a", "1"), ("a", "2")])


def test_find_by_short_type_letters() -> None:
    assert parsed("find", "/", "--type", "d").resource_type == "directory"
    with pytest.raises(UsageError):
        parsed("find", "/", "--type", "x")


def test_an_unknown_command_names_the_nearest() -> None:
    found = inside("mout", "/x")
    assert found.code == 2
    assert "did you mean `fsd mount`?" in found.err
    assert inside("fs", "read-fil", "--path", "/x").error["hint"] == "did you mean `fsd fs read-file`?"


def test_the_second_word_alone_names_the_whole_command() -> None:
    assert inside("prune").error["hint"] == "did you mean `fsd checkpoint prune`?"
    assert inside("rotate", "tok").error["hint"] == "did you mean `fsd token rotate`?"


def test_an_unknown_flag_names_the_nearest() -> None:
    everything = "see `fsd ls --help`"
    assert inside("ls", "--recusive").error["hint"] == f"did you mean --recursive? Else {everything}"
    assert inside("ls", "--checkpont=cp_x").error["hint"] == f"did you mean --checkpoint? Else {everything}"
    assert inside("ls", "--nothing-like-it").error["hint"] == everything
    assert inside("find", "/", "-name", "x").error["hint"].startswith("did you mean --name? Else")
    assert inside("ls", "-Z").error["hint"] == everything
    # A word of it: `fsd run` has --path.
    assert "mean --mount-path or --remote-path? Else" in inside("mount", "m", "--path", "/x").error["hint"]
    assert "mean --display-name? Else" in inside("create", "--name", "x").error["hint"]


def test_common_flags_may_stand_before_the_command() -> None:
    env = {"FSD_TOKEN": TOKEN}
    before = inside("--output", "text", "--region=local", "journal", "create", "j", "--dry-run", env=env)
    behind = inside("journal", "create", "j", "--dry-run", "--output", "text", "--region", "local", env=env)
    assert before.code == behind.code == 0
    assert before.text == behind.text
    assert before.text.startswith("dry_run\ttrue\n")
    assert inside("--output", "xml", "ls").code == 2
    assert inside("--nonsense", "ls").code == 2
