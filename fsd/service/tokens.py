"""Owner tokens: made, looked up, disabled and deleted.

The database holds the hash of a secret, never the secret. A secret is derived from a random seed and the
admin key, so that the answer to "create a token" can be kept under an idempotency key as its seed alone and
be given again to a caller that lost it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Conflict, NotAuthenticated, NotFound, UsageError
from fsd.model.limits import TOKEN_LABEL_MAX, TOKEN_RECALL, TOKENS_RECALLED_MAX
from fsd.model.times import NS, rfc3339
from fsd.model.token import Token, parse, secret_hash
from fsd.service.access import ACTIVE, FsRef, Grant, check_status, hold, no_file_system
from fsd.service.text import check_line, new_id

TTL_MAX_S: Final = 100 * 366 * 86_400
PAGE_MAX: Final = 200
_COLUMNS: Final = "id, name, kind, status, issued, expires"


class Tokens:
    """All methods from any thread. `announce` is called once, before the first token is made."""

    def __init__(self, db: Database, host: Host) -> None:
        self._db = db
        self._host = host
        self._regions: dict[str, str] = {}
        self._master = b""
        # By the hash of the token's text: whose it is, when it expires (wall), until when it is remembered.
        self._recalled: dict[bytes, tuple[FsRef, Grant, int | None, float]] = {}

    def announce(self, regions: dict[str, str], master: bytes) -> None:
        """What new tokens say of where the service is (region code → URL), and the key their secrets are
        derived with (the admin key)."""
        self._regions = dict(regions)
        self._master = master

    @property
    def region(self) -> str:
        """The code of the service's own region."""
        return next(iter(self._regions))

    # -- data plane ----------------------------------------------------------------------------------

    def authenticate(self, text: str, fs_name: str | None) -> tuple[FsRef, Grant]:
        """Whose token `text` is, asked of the database each time: a revocation holds from the next request.

        `fs_name` is the filesystem in the request's path; another one than the token's is `NotFound`, in the
        same words whether it exists or not. Raises `NotAuthenticated` for everything wrong with the token.
        """
        fs, who, _ = self._look_up(text, fs_name)
        return fs, who

    def _look_up(self, text: str, fs_name: str | None) -> tuple[FsRef, Grant, int | None]:
        given = parse(text)
        now = self._host.wall_ns()
        row = self._db.read(
            lambda tx: tx.one(
                "SELECT t.id, t.name, t.kind, t.status, t.expires, f.id, f.name, f.status "
                "FROM token t JOIN fs f ON f.id = t.fs WHERE t.secret = ?",
                (secret_hash(given.secret),),
            )
        )
        if row is None:
            check_status("", None)
        assert row is not None, "check_status raises"
        token_id, name, kind, status, expires, fs_id, own_name, fs_status = row
        check_status(token_id, status)
        if expires is not None and expires <= now:
            raise NotAuthenticated(f"the token {token_id} expired at {rfc3339(expires)}")
        if fs_status != "active" or fs_name not in (None, own_name):
            raise no_file_system(fs_name or own_name)
        return FsRef(fs_id, own_name), Grant(token_id, name or token_id, kind), expires

    def recall(self, text: str, fs_name: str | None) -> tuple[FsRef, Grant]:
        """As `authenticate`, from memory for TOKEN_RECALL seconds after the database said it. Only before
        something that asks again: a change whose transaction does, under the filesystem's lock
        (`access.hold` with the grant), or a poll that looks before it answers. A revocation holds there from
        the next request on, as everywhere."""
        key = token_key(text)
        found = self.remembered(key, fs_name)
        if found is not None:
            return found
        now = self._host.monotonic()
        fs, who, expires = self._look_up(text, fs_name)
        if len(self._recalled) >= TOKENS_RECALLED_MAX:
            self._recalled.clear()
        self._recalled[key] = (fs, who, expires, now + TOKEN_RECALL)
        return fs, who

    def remembered(self, key: bytes, fs_name: str | None) -> tuple[FsRef, Grant] | None:
        """What `recall` knows of a token without the database, by its `token_key`; it does not block."""
        found = self._recalled.get(key)
        if found is None:
            return None
        fs, who, expires, until = found
        if self._host.monotonic() >= until or fs_name not in (None, fs.name):
            return None
        return None if expires is not None and expires <= self._host.wall_ns() else (fs, who)

    # -- control plane, inside the caller's transaction ------------------------------------------------

    def create(self, tx: Tx, fs: FsRef, name: str, ttl_s: int | None) -> dict[str, Any]:
        """A new owner token. The answer's `fs_token` is sealed: `unseal` before it is sent."""
        check_line(name, "token_name", TOKEN_LABEL_MAX)
        if ttl_s is not None and not 1 <= ttl_s <= TTL_MAX_S:
            raise UsageError(f"ttl_s is between 1 and {TTL_MAX_S} seconds")
        hold(tx, fs)
        return self.create_first(tx, fs, name, ttl_s)

    def create_first(self, tx: Tx, fs: FsRef, name: str = "", ttl_s: int | None = None) -> dict[str, Any]:
        """As `create`, of a filesystem that the caller holds, or that the same transaction makes."""
        now = self._host.wall_ns()
        expires = None if ttl_s is None else now + ttl_s * NS
        token_id = new_id(self._host, "tok_")
        seed = self._host.token_bytes(32)
        token = self._token(fs.name, token_id, seed)
        tx.execute(
            "INSERT INTO token (id, fs, name, kind, secret, status, issued, expires, scopes) "
            "VALUES (?, ?, ?, 'owner', ?, ?, ?, ?, ?)",
            (token_id, fs.id, name, secret_hash(token.secret), ACTIVE, now, expires, "[]"),
        )
        made = self._shown(fs.name, (token_id, name, "owner", ACTIVE, now, expires), now)
        return {**made, "fs_token": "sealed:" + seed.hex()}

    def unseal(self, answer: dict[str, Any]) -> dict[str, Any]:
        """`answer` with the token itself where `create` left its seed. Raises `Conflict` where it was made
        under another admin key: what this one gives for the seed is no token."""
        sealed = answer.get("fs_token")
        if not isinstance(sealed, str) or not sealed.startswith("sealed:"):
            return answer
        seed = bytes.fromhex(sealed.removeprefix("sealed:"))
        token_id = answer.get("token_id") or ""
        token = self._token(answer["file_system_id"], token_id, seed)
        row = self._db.read(lambda tx: tx.one("SELECT secret FROM token WHERE id = ?", (token_id,)))
        if row is not None and row[0] != secret_hash(token.secret):
            raise Conflict(
                f"the token {token_id} was made by a server with another admin key and cannot be shown again",
                hint="give all servers of one database the same admin key; `fsd token create` makes another",
            )
        return {**answer, "fs_token": token.text()}

    def set_status(self, tx: Tx, fs: FsRef, token_id: str, status: str) -> dict[str, Any]:
        """Enable or disable; the same again is no error. Raises `NotFound`."""
        hold(tx, fs)
        touched = tx.execute("UPDATE token SET status = ? WHERE fs = ? AND id = ?", (status, fs.id, token_id))
        if not touched:
            raise NotFound(
                f"no token {token_id} of this filesystem", hint="`fsd token list` shows those there are"
            )
        return {"file_system_id": fs.name, "token_id": token_id, "status": status}

    def delete(self, tx: Tx, fs: FsRef, token_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        hold(tx, fs)
        if not tx.execute("DELETE FROM token WHERE fs = ? AND id = ?", (fs.id, token_id)):
            raise NotFound(
                f"no token {token_id} of this filesystem", hint="`fsd token list` shows those there are"
            )
        return {"file_system_id": fs.name, "token_id": token_id, "status": "deleted"}

    def list(self, fs: FsRef, *, include_expired: bool, offset: int, limit: int) -> dict[str, Any]:
        """A page, oldest first; `next_offset` is None at the end."""
        now = self._host.wall_ns()
        where = "" if include_expired else "AND (expires IS NULL OR expires > ?)"
        params = [fs.id] if include_expired else [fs.id, now]
        rows = self._db.read(
            lambda tx: tx.all(
                f"SELECT {_COLUMNS} FROM token WHERE fs = ? {where} ORDER BY issued, id LIMIT ? OFFSET ?",
                [*params, limit + 1, offset],
            )
        )
        more = len(rows) > limit
        return {
            "tokens": [self._shown(fs.name, row, now) for row in rows[:limit]],
            "next_offset": offset + limit if more else None,
        }

    def _token(self, fs_name: str, token_id: str, seed: bytes) -> Token:
        raw = hmac.new(self._master, b"fsd token secret\0" + seed, hashlib.sha256).digest()
        secret = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        return Token(fs_name, token_id, dict(self._regions), secret)

    @staticmethod
    def _shown(fs_name: str, row: tuple[Any, ...], now: int) -> dict[str, Any]:
        token_id, name, kind, status, issued, expires = row
        return {
            "file_system_id": fs_name,
            "token_id": token_id,
            "token_name": name,
            "scope_kind": kind,
            "status": status,
            "expired": expires is not None and expires <= now,
            "issued_at": rfc3339(issued),
            "expires_at": None if expires is None else rfc3339(expires),
        }


def token_key(text: str) -> bytes:
    """What stands for a token in memory."""
    return hashlib.sha256(text.encode()).digest()
