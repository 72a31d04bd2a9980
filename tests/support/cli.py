"""The command line for tests: in this process with streams in memory, or as a real process."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsd.cli import table
from fsd.cli.context import Streams
from fsd.cli.env import Environment
from fsd.cli.fields import names
from fsd.cli.main import run
from support import preloaded

SECRET = "s" * 43
TOKEN = (
    "fsd1.eyJmcyI6ImZzX2FhYWFhYWFhYWFhYWFhYWFhYWFhIiwiaWQiOiJ0b2tfeCIsInIiOnsibG9jYWwiOiJo"
    f"dHRwOi8vMTI3LjAuMC4xOjkifX0.{SECRET}"
)
ROWS = table.load()
FILE_SYSTEM = "fs_aaaaaaaaaaaaaaaaaaaa"


@dataclass(frozen=True)
class Outcome:
    """What one command did."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error object on the last line of stderr."""
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found


def inside(
    *argv: str,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    terminal: bool = False,
    interactive: bool = False,
) -> Outcome:
    """Run the command in this process."""
    out, err = io.BytesIO(), io.StringIO()
    streams = Streams(io.BytesIO(stdin), out, err, interactive, terminal, False)
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        code = run(list(argv), Environment(dict(env or {})), streams)
    finally:
        # `grep` has Ctrl-C end its process, ours here: a later test that raises it would end the run.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupted)
    return Outcome(code, out.getvalue(), err.getvalue())


def command() -> list[str]:
    return [sys.executable, "-m", "fsd"]


def process(
    *argv: str | bytes,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    anew: bool = False,
) -> Outcome:
    """Run the command as a process whose environment is exactly `env` and a PATH. `anew`: as a shell starts
    it, never by one that has loaded the program already (`preloaded`)."""
    full = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **(env or {})}
    done = preloaded.run(argv, full, stdin=stdin, timeout=timeout, cwd=cwd, anew=anew)
    found = Outcome(done.returncode, done.stdout, done.stderr.decode())
    words = [word for word in argv if isinstance(word, str)]
    if found.code == 0 and not {"--query", "--output", "--help", "--dry-run", "-"} & set(words):
        check_fields(words, found)
    return found


def start_lock(
    env: Mapping[str, str], *argv: str, ignored: signal.Signals | None = None, **more: str
) -> subprocess.Popen[str]:
    """`fsd lock` with these arguments, running; `env` (and `more`) as in `process`. A signal is `ignored` as
    nohup, and a shell for what it starts in the background, has it."""
    full = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env, **more}
    return subprocess.Popen(
        [*command(), "lock", *argv],
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if ignored is None else lambda: signal.signal(ignored, signal.SIG_IGN),
    )


def check_fields(argv: list[str], found: Outcome) -> None:
    """What a command printed is what the documentation says it prints."""
    row = ROWS.find(argv)
    assert row is not None
    if row[0].raw or "--to-stdout" in argv or not row[0].handler or row[0].name == "serve":
        return
    always, maybe, open_end = names(row[0].name, row[1])
    keys = set(found.json)
    assert always <= keys, f"{row[0].name} does not print {always - keys}"
    assert open_end or keys <= always | maybe, f"{row[0].name} prints {keys - always - maybe} undocumented"
