"""The environment, read here and nowhere below.

Ours win over `TI_*` where set and not empty; a flag wins over both. Secrets come from the environment, a file
readable by its owner only, or stdin.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

from fsd.client.identity import Claim
from fsd.host.seam import Crasher, Host
from fsd.model.errors import NotAuthenticated, UsageError
from fsd.model.limits import TOKEN_MAX
from fsd.model.plain import dataclass, field, replace
from fsd.model.token import parse, redact

TOKEN = ("FSD_TOKEN", "TI_FS_TOKEN")
REGION = ("FSD_REGION_CODE", "TI_REGION_CODE")
FILE_SYSTEM_ID = ("FSD_FILE_SYSTEM_ID", "TI_FS_FILE_SYSTEM_ID")
ENDPOINT = ("FSD_ENDPOINT",)
ADMIN_KEY = ("FSD_ADMIN_KEY",)
DATABASE = ("FSD_DATABASE_URL",)
BLOBS = ("FSD_BLOBS_URL",)
CRASH = "FSD_CRASH"
BOOT_ID = "FSD_BOOT_ID"
_PASSWORD = re.compile(r"[^:/?#]+://[^/?#@]*:[^/?#]*@|[^#]*[?&\s]password=", re.IGNORECASE)
_CRASH_FORM = re.compile(r"^([A-Za-z0-9_.-]+)(?::(\d{1,9}))?$")


@dataclass(frozen=True, slots=True)
class Environment:
    """A frozen copy of the process environment."""

    variables: Mapping[str, str] = field(repr=False)

    def get(self, names: tuple[str, ...]) -> str | None:
        """The first of `names` that is set and not empty."""
        for name in names:
            value = self.variables.get(name, "").strip()
            if value:
                return value
        return None

    def host(self) -> Host:
        """The machine; for tests one that ends this process at a durable step (FSD_CRASH=POINT[:COUNT]), or
        that says it was started anew since (FSD_BOOT_ID=TEXT)."""
        host = Host()
        text = self.variables.get(CRASH, "")
        if text:
            match = _CRASH_FORM.match(text)
            if not match:
                raise UsageError(f"{CRASH}={text!r} is not of the form POINT[:COUNT]")
            host = replace(host, crash_point=Crasher(match[1], int(match[2] or 1)))
        boot_id = self.variables.get(BOOT_ID, "")
        if boot_id:
            host = replace(host, boot_id=lambda: boot_id)
        return host

    def state_root(self) -> Path:
        """Where mounts keep their state: $XDG_STATE_HOME/fsd, else ~/.local/state/fsd."""
        base = self.variables.get("XDG_STATE_HOME", "")
        if base.startswith("/"):
            return Path(base) / "fsd"
        home = self.variables.get("HOME", "")
        if not home.startswith("/"):
            home = os.path.expanduser("~")
        if not home.startswith("/"):
            told = f"HOME={home!r} is no absolute path" if home else "HOME is not set"
            raise UsageError(f"no place for the state directory: {told}", hint="pass --state-dir DIR")
        return Path(home) / ".local" / "state" / "fsd"

    def runtime_dir(self) -> Path:
        """Where running mounts are listed: as root /run/fsd whatever the environment (umount(8) calls us with
        none), else $XDG_RUNTIME_DIR/fsd, else a directory of the user's under the temporary one."""
        if os.geteuid() == 0 and os.access("/run", os.W_OK):
            return Path("/run/fsd")
        base = self.variables.get("XDG_RUNTIME_DIR", "")
        if base.startswith("/"):
            return Path(base) / "fsd"
        import tempfile  # a megabyte with what it imports, of every command and of a mount's supervisor

        temporary = self.variables.get("TMPDIR") or tempfile.gettempdir()
        return Path(temporary) / f"fsd-{os.geteuid()}"


def make_claim(env: Environment, args: SimpleNamespace, stdin: BinaryIO) -> Claim:
    """Who the caller is, from flags, files and the environment. Nothing is checked against a server."""
    token = _secret(getattr(args, "token_file", None), stdin, "--token-file")
    given = getattr(args, "fs_token", None)
    if token is None and given is not None:
        token = _read_stdin(stdin, "--fs-token") if given == "-" else given
    token = token or env.get(TOKEN)
    admin_key = _secret(getattr(args, "admin_key_file", None), stdin, "--admin-key-file") or env.get(
        ADMIN_KEY
    )
    region = getattr(args, "region", None) or env.get(REGION)
    endpoint = getattr(args, "endpoint", None) or env.get(ENDPOINT)
    if endpoint is None and token is not None and admin_key is not None:
        # The control plane lives where the token's data plane does.
        endpoint = parse(token).endpoint(region)
    return Claim(
        token=token,
        admin_key=admin_key,
        region=region,
        endpoint=endpoint,
        file_system_id=getattr(args, "file_system_id", None) or env.get(FILE_SYSTEM_ID),
        insecure=bool(getattr(args, "insecure", False)),
    )


def store_url(
    env: Environment, given: str | None, names: tuple[str, ...], flag: str, say: Callable[[str], None]
) -> str | None:
    """The URL of a server's database or bucket, which may hold a password: `given` by its flag, else from
    the environment. Says so when a password is where every user of the machine can read it."""
    if given is None:
        return env.get(names)
    if _PASSWORD.match(given):
        say(f"{flag}: its password can be read in the list of processes; set {names[0]} instead")
    return given


def _hint(what: str) -> str:
    if what == "--admin-key-file":
        return "give the file that `fsd serve` wrote: DIR/admin.key"
    return f"{what} takes a file that holds the fs_token, or - for stdin"


def _read_stdin(stdin: BinaryIO, what: str) -> str:
    raw = stdin.read(TOKEN_MAX + 1)
    if len(raw) > TOKEN_MAX or not raw.strip():
        raise NotAuthenticated(f"{what} -: stdin holds no secret", hint=_hint(what))
    return _decode(raw, what)


def _decode(raw: bytes, what: str) -> str:
    try:
        return raw.decode("ascii").strip()
    except UnicodeDecodeError as exc:
        raise NotAuthenticated(f"{what}: what was read is no secret of ours", hint=_hint(what)) from exc


def _secret(path: str | None, stdin: BinaryIO, what: str) -> str | None:
    """The secret in the file `path` (`-` is stdin); refused when others can read the file."""
    if path is None:
        return None
    if path == "-":
        return _read_stdin(stdin, what)
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
                raise NotAuthenticated(
                    f"{what} {path}: others can read this file (mode {info.st_mode & 0o7777:o})",
                    hint=f"chmod 600 {path}",
                )
            raw = file.read(TOKEN_MAX + 1)
    except OSError as exc:
        raise NotAuthenticated(f"{what} {path}: {exc.strerror}", hint=_hint(what)) from exc
    if len(raw) > TOKEN_MAX or not raw.strip():
        raise NotAuthenticated(f"{what} {path}: the file holds no secret", hint=_hint(what))
    return _decode(raw, what)


def redactor(claim: Claim | None) -> Redactor:
    """What takes the secrets of this call out of any text."""
    secrets = [s for s in (claim.admin_key, claim.token) if s] if claim else []
    return Redactor(tuple(s.strip() for s in secrets if len(s.strip()) >= 8))


@dataclass(frozen=True, slots=True)
class Redactor:
    """Takes tokens (by their form) and the secrets it was told out of text."""

    secrets: tuple[str, ...] = field(default=(), repr=False)

    def __call__(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return redact(text)
