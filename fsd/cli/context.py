"""What a handler is given: streams, format, identity, options of the call. One per process run."""

from __future__ import annotations

import importlib
import os
import threading
from types import SimpleNamespace
from typing import BinaryIO, TextIO

from fsd.cli.env import Environment, Redactor, make_claim, redactor
from fsd.cli.output import Document, Raw, Result, visible
from fsd.cli.table import Command, Table, Words
from fsd.client.identity import Claim, Identity, admin_identity, data_identity
from fsd.host.seam import Host
from fsd.model.errors import FsdError, UsageError
from fsd.model.plain import dataclass, field, replace
from fsd.model.token import parse


class Interrupted(FsdError):
    """Ctrl-C. The first stops in order; a second one, while that goes on, ends at once."""

    code = "interrupted"
    exit_code = 130


@dataclass(slots=True)
class Streams:
    """The process's streams; tests pass their own."""

    stdin: BinaryIO
    stdout: BinaryIO
    stderr: TextIO
    interactive: bool  # stdin and stderr are a terminal: questions can be asked
    stdout_terminal: bool
    stderr_terminal: bool


@dataclass(slots=True)
class Context:
    """One command being run. Handlers use it from the main thread; `say` and `progress` from any."""

    env: Environment
    table: Table
    command: Command
    words: Words
    long: bool
    args: SimpleNamespace
    streams: Streams
    format: str
    host: Host
    _claim: Claim | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _progress_shown: bool = False

    @property
    def claim(self) -> Claim:
        """Flags, files and environment as one claim; read once (stdin may hold the secret)."""
        if self._claim is None:
            self._claim = make_claim(self.env, self.args, self.streams.stdin)
        return self._claim

    @property
    def redact(self) -> Redactor:
        return redactor(self._claim)

    def data(self) -> Identity:
        """The data plane's identity: the token."""
        return data_identity(self.claim)

    def admin(self) -> Identity:
        """The control plane's identity: the admin key."""
        return admin_identity(self.claim)

    def admin_or_owner(self, file_system_id: str | None) -> tuple[Identity, str]:
        """The admin key where there is one, else the token; and which filesystem is meant."""
        claim = self.claim
        wanted = file_system_id or claim.file_system_id
        if claim.admin_key:
            if not wanted and claim.token:
                wanted = parse(claim.token).file_system_id
            if not wanted:
                raise UsageError(
                    "which filesystem? its id is missing",
                    hint="`fsd list` shows the ids; --file-system-id takes one in every command",
                )
            return self.admin(), wanted
        identity = self.data()
        return identity, identity.file_system_id

    def admin_or_origin(self) -> Identity:
        """For what may be done to a fork: the admin key where there is one, else a token of the filesystem it
        was made from, which is not the one that is named."""
        claim = self.claim
        if claim.admin_key or not claim.token:
            return self.admin()
        return data_identity(replace(claim, file_system_id=None))

    def file_system_id(self) -> str:
        """The filesystem an admin command is about: named, or the token's."""
        return self.admin_or_owner(getattr(self.args, "file_system_id", None))[1]

    @property
    def text(self) -> bool:
        return self.format == "text"

    def say(self, message: str) -> None:
        """A line for people, on stderr."""
        with self._lock:
            self._clear_progress()
            self.streams.stderr.write(visible(self.redact(message)) + "\n")
            self.streams.stderr.flush()

    def progress(self, message: str) -> None:
        """A line that the next one overwrites; on a terminal only."""
        if not self.streams.stderr_terminal:
            return
        shown = visible(message).replace("\n", "\\n").replace("\t", "\\t")
        with self._lock:
            self.streams.stderr.write("\r\x1b[K" + shown[:200])
            self.streams.stderr.flush()
            self._progress_shown = True

    def end_progress(self) -> None:
        with self._lock:
            self._clear_progress()

    def _clear_progress(self) -> None:
        if self._progress_shown:
            self.streams.stderr.write("\r\x1b[K")
            self._progress_shown = False

    def confirm(self, question: str, *, needs_yes: bool) -> None:
        """Ask before something destructive. `--yes` and long spellings never ask; without a terminal it is
        refused when `needs_yes`. Raises `UsageError` when the answer is no."""
        if getattr(self.args, "yes", False) or self.long:
            return
        if not self.streams.interactive:
            if needs_yes:
                raise UsageError(
                    f"not done, nobody could be asked: {question}", hint="give --yes to do it without asking"
                )
            return
        self.streams.stderr.write(f"{visible(question)} Type yes to go on: ")
        self.streams.stderr.flush()
        if self.streams.stdin.readline().decode("utf-8", "replace").strip().lower() not in ("yes", "y"):
            raise UsageError("not done: the answer was not yes")


def path_bytes(text: str) -> bytes:
    """The bytes of a path as the shell passed them."""
    return os.fsencode(text)


def remote_path(text: str) -> bytes:
    """A remote path of a command whose paths are remote always; a leading colon is dropped."""
    raw = path_bytes(text)
    for mark in (b"fsd:", b":"):
        if raw.startswith(mark + b"/"):
            raw = raw[len(mark) :]
            break
    if not raw.startswith(b"/"):
        raise UsageError(f"a remote path is absolute: {text!r}", hint=f"write /{text.lstrip('/')}")
    return raw


def call(handler: str, context: Context) -> Result:
    """Import and run `module:function`."""
    module, _, name = handler.partition(":")
    function = getattr(importlib.import_module(f"fsd.cli.{module}"), name)
    result = function(context, context.args)
    assert isinstance(result, (Document, Raw))
    return result
