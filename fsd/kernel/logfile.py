"""The daemon's log: a bounded file that cannot fill a disk with one message.

Two files of at most DAEMON_LOG_MAX. One message (its template) is written at most LOG_REPEATS_MAX times a
minute, then counted. Tokens are taken out. `stack_fd` stays open on the present file for `faulthandler`.
"""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import os
from pathlib import Path
from typing import Final

from fsd.host.seam import Host
from fsd.model.limits import DAEMON_LOG_MAX, LOG_REPEATS_MAX, LOG_TEMPLATES_MAX
from fsd.model.token import redact

WINDOW: Final = 60.0
STOP_LOGGER: Final = "fsd.kernel.stop"


class Throttle(logging.Filter):
    """LOG_REPEATS_MAX records of one template a WINDOW; the next begins with how many were left out."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host
        self._seen: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._host.monotonic()
        key = (record.name, record.msg if isinstance(record.msg, str) else type(record.msg))
        since, count = self._seen.get(key, (now, 0))
        if now - since > WINDOW:
            if count > LOG_REPEATS_MAX:
                record.msg = f"{record.msg} [{count - LOG_REPEATS_MAX} more like it were left out]"
            since, count = now, 0
        if len(self._seen) > LOG_TEMPLATES_MAX:
            self._seen.clear()
        self._seen[key] = (since, count + 1)
        return count < LOG_REPEATS_MAX


class Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class LogFile(logging.handlers.RotatingFileHandler):
    """The rotating file, with a descriptor for `faulthandler` that follows it. `standard_error`: the
    process's stderr goes there too."""

    def __init__(self, path: Path, *, standard_error: bool) -> None:
        self.stack_fd: int | None = None
        self._standard_error = standard_error
        super().__init__(path, maxBytes=DAEMON_LOG_MAX, backupCount=1, encoding="utf-8")
        os.chmod(path, 0o600)
        self.stack_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._follow()

    def _follow(self) -> None:
        if self.stack_fd is not None and self.stream is not None:
            os.dup2(self.stream.fileno(), self.stack_fd, inheritable=False)
            if self._standard_error:
                os.dup2(self.stream.fileno(), 2)

    def doRollover(self) -> None:
        super().doRollover()
        self._follow()

    def dump_stacks(self) -> None:
        """Every thread's stack into the log; any thread. The caller has the interpreter's lock (`stacks`)."""
        if self.stack_fd is not None:
            faulthandler.dump_traceback(self.stack_fd, all_threads=True)


def start_log(path: Path, host: Host, *, verbose: bool, foreground: bool) -> LogFile:
    """Send the process's logging to `path` (in the foreground warnings to stderr as well), and all stacks
    there on a crash."""
    # A full disk must not turn into tracebacks on stderr.
    logging.raiseExceptions = False
    handler = LogFile(path, standard_error=not foreground)
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    handler.addFilter(Throttle(host))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    # Each request would be two lines of its own.
    logging.getLogger("pyfuse3").setLevel(logging.WARNING)
    if foreground:
        screen = logging.StreamHandler()
        # How far a stop is matters to whoever pressed Ctrl-C; other news only when it is bad.
        screen.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == STOP_LOGGER)
        screen.setFormatter(Redacting("fsd: %(message)s"))
        screen.addFilter(Throttle(host))
        root.addHandler(screen)
    assert handler.stack_fd is not None
    faulthandler.enable(file=handler.stack_fd, all_threads=True)
    return handler
