"""`fsd doctor`: what works on this machine and what to do about the rest. Changes nothing."""

from __future__ import annotations

import email.utils
import os
import platform
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from fsd import __version__
from fsd.cli import leftovers, local
from fsd.cli.context import Context
from fsd.cli.output import Document, align
from fsd.client.control import Control
from fsd.client.http import Http
from fsd.client.identity import Identity
from fsd.client.run import left_overs
from fsd.host.programs import installed
from fsd.model.errors import FsdError
from fsd.model.limits import GIB

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"
SKEW_MAX: Final = 5.0  # seconds; times of files come from the machine that wrote them
FREE_MIN: Final = GIB


class Findings:
    """The checks in order. The first failure decides how the command ends."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.checks: list[dict[str, str]] = []
        self.error: FsdError | None = None

    def add(self, name: str, status: str, message: str, hint: str = "") -> None:
        message = self._context.redact(message)
        self.checks.append({"name": name, "status": status, "message": message, "hint": hint})

    def failed(self, name: str, error: FsdError) -> None:
        self.add(name, FAILED, error.message, error.hint)
        self.error = self.error or error


def doctor(context: Context, args: SimpleNamespace) -> Document:
    found = Findings(context)
    kernel = platform.release()
    found.add("version", OK, f"fsd {__version__}, Python {platform.python_version()}, Linux {kernel}")
    can_mount = check_fuse(found)
    check_mounts(context, found)
    check_state(context, args, found)
    reachable = check_server(context, found)
    value: dict[str, Any] = {
        "status": FAILED if found.error else OK,
        "version": __version__,
        "works": {"direct": reachable, "mount": reachable and can_mount, "run": reachable},
        "checks": found.checks,
    }
    return Document(value, text=_text, error=found.error)


def _text(value: Any) -> str:
    rows = [[c["status"], c["name"], c["message"]] for c in value["checks"]]
    hints = [f"  {c['name']}: {c['hint']}" for c in value["checks"] if c["hint"]]
    works = value["works"]
    ways = [
        f"direct commands: {'work' if works['direct'] else 'do not work'}",
        f"fsd mount: {'works' if works['mount'] else 'does not work'}",
        f"fsd run: {'works' if works['run'] else 'does not work'}",
    ]
    return align(rows) + "".join(line + "\n" for line in [*hints, *ways])


def check_fuse(found: Findings) -> bool:
    """Whether the kernel and this user can mount at all."""
    from fsd.kernel.mountpoint import MTAB, MTAB_HINT, require_fuse

    try:
        require_fuse()
    except FsdError as exc:
        found.add("fuse", WARNING, exc.message, exc.hint.removesuffix("; `fsd doctor` tells more"))
        return False
    helper = installed("fusermount3")
    if os.geteuid() == 0:
        note = "" if helper else "; fusermount3 is not installed, root does without"
        found.add("fuse", OK, f"/dev/fuse can be opened, as root{note}")
        return _has_pyfuse3(found)
    assert helper is not None
    mode = os.stat(helper).st_mode
    if not mode & stat.S_ISUID:
        found.add("fuse", WARNING, f"{helper} is not setuid root", f"as root: chmod u+s {helper}")
        return False
    found.add("fuse", OK, f"/dev/fuse can be opened, {helper} is there")
    if not os.path.exists(MTAB):
        found.add("fuse", WARNING, f"there is no {MTAB}: {helper} cannot unmount without it", MTAB_HINT)
    return _has_pyfuse3(found)


def _has_pyfuse3(found: Findings) -> bool:
    import importlib.util

    if importlib.util.find_spec("pyfuse3") is None:
        found.add("pyfuse3", WARNING, "pyfuse3 is not installed", "install fsd with `pip install .`")
        return False
    return True


def check_mounts(context: Context, found: Findings) -> None:
    """Mount points of ours: alive, or left dead by a daemon that was killed."""
    from fsd.kernel.mountpoint import answers, list_mounts
    from fsd.kernel.prune import prune
    from fsd.kernel.unmount import BEING_STARTED, coming_hint, is_coming

    directory = local.runtime(context)
    prune(directory)
    records = {record.mount_id: record for record in directory.records()}
    ours = [entry for entry in list_mounts() if entry.ids is not None]
    for entry in ours:
        answer = answers(entry.path)
        if answer is True:
            found.add("mount", OK, f"{entry.path} is mounted ({entry.source})")
        elif answer is None:
            found.add("mount", WARNING, f"{entry.path} does not answer", f"see `fsd status {entry.path}`")
        elif isinstance(answer, PermissionError):
            found.add("mount", OK, f"{entry.path} is another user's ({entry.source})")
        elif (
            entry.ids is not None
            and (record := records.get(entry.ids[1])) is not None
            and is_coming(record)
            and directory.home(record).alive(record.mount_id)
        ):
            found.add("mount", WARNING, f"{entry.path} {BEING_STARTED}", coming_hint(record))
        else:
            hint = f"the next `fsd mount {entry.path}` cleans it up; `fsd unmount --lazy {entry.path}` too"
            found.add("mount", WARNING, f"{entry.path} is dead: {answer}", hint)


def check_state(context: Context, args: SimpleNamespace, found: Findings) -> None:
    """The state directory: usable, enough room, and what ended mounts left behind."""
    root = Path(args.state_dir) if args.state_dir else context.env.state_root()
    where = next(p for p in (root, *root.parents) if os.path.exists(p))  # False, too, where one may not look
    if not os.access(where, os.W_OK | os.X_OK):
        hint = "pass --state-dir DIR to `fsd mount`, or set XDG_STATE_HOME"
        found.add("state", WARNING, f"{where} is not writable: mounts can keep no state there", hint)
        return
    free = shutil.disk_usage(where).free
    if free < FREE_MIN:
        hint = "what is written through a mount waits there; free space or pass --state-dir"
        found.add("state", WARNING, f"only {free // 2**20} MiB are free under {where}", hint)
    else:
        found.add("state", OK, f"{root}, {free / GIB:.1f} GiB free")
    for left in leftovers.find(context, root):
        found.add("left-over", WARNING, left.told, left.command)
    for place in left_overs(root / "run"):
        hint = f"fsd run --push-left {place}"
        found.add("left-over", WARNING, f"{place} holds what an `fsd run` did not push", hint)


def check_server(context: Context, found: Findings) -> bool:
    """Token, endpoint, clock, and whether the server takes the token."""
    try:
        identity, wanted = context.admin_or_owner(None) if _admin_only(context) else _owner(context)
    except FsdError as exc:
        found.failed("token", exc)
        return False
    found.add("token", OK, f"of {wanted}" if identity.file_system_id else "admin key")
    try:
        http = Http(identity, context.host)
        if http.proxy is not None:
            found.add("proxy", OK, f"{identity.endpoint} is reached through {http.proxy.shown}")
        started = context.host.monotonic()
        reply = http.open("/healthz")
        reply.read(4096)
        taken = context.host.monotonic() - started
        found.add("server", OK, f"{identity.endpoint} answers in {taken * 1000:.1f} ms")
        _skew(context, found, reply.header("Date"))
        Control(http).describe(wanted)
        found.add("filesystem", OK, f"{wanted} is served")
    except FsdError as exc:
        found.failed("server", exc)
        return False
    return True


def _admin_only(context: Context) -> bool:
    return context.claim.token is None and context.claim.admin_key is not None


def _owner(context: Context) -> tuple[Identity, str]:
    identity = context.data()
    return identity, identity.file_system_id


def _skew(context: Context, found: Findings, date: str | None) -> None:
    """This machine's clock against the server's Date header, which has whole seconds."""
    if not date:
        found.add("clock", WARNING, "the server's answer has no Date")
        return
    try:
        there = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        found.add("clock", WARNING, "the server's Date cannot be read")
        return
    skew = context.host.wall_ns() / 1e9 - there
    if abs(skew) > SKEW_MAX:
        hint = "set the clock (NTP): times of files come from the machine that writes them"
        found.add("clock", WARNING, f"this clock is {skew:+.0f} s from the server's", hint)
    else:
        found.add("clock", OK, f"within {SKEW_MAX:.0f} s of the server's")
