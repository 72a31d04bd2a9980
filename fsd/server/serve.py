"""`fsd serve`: one server process from its options to its end.

Order at start: check the address rule, take the data directory (a second server there is `Busy`), make or
read the admin key, bind, open, say where it listens. Order at the end (SIGTERM, SIGINT): refuse new
connections, end long polls at once, let requests in flight finish within `stop_timeout`, close the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import uvicorn
import uvloop

from fsd.host.files import make_dirs_durable, write_durable
from fsd.host.heap import few_heaps
from fsd.host.seam import Host
from fsd.model.endpoint import is_loopback
from fsd.model.errors import Busy, FsdError, UsageError
from fsd.model.limits import MIB, STOP_TIMEOUT
from fsd.model.plain import dataclass, field
from fsd.server.app import Front, make_app
from fsd.server.clock import with_test_clock
from fsd.server.context import Context
from fsd.server.protocol import BoundedProtocol
from fsd.server.sweep import in_background
from fsd.service.open import ServiceOptions, open_service
from fsd.service.retention import Retention

log = logging.getLogger(__name__)

ADMIN_KEY: Final = "admin.key"
_ADMIN_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_BACKLOG: Final = 1024
_KEEP_ALIVE: Final = 75
_COLLECT_EVERY: Final = 1.0  # seconds between looks for deleted filesystems and expired keys


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`listen` is host and port (0: any free one). `database` and `blobs` are URLs, None: SQLite and packs
    in `data_dir`. `admin_key` None: from `data_dir`/admin.key, made at the first start. `output_json`: the
    ready line goes to stdout too, as one JSON object. `notify_socket`: systemd's NOTIFY_SOCKET.
    `retention`: how long what nothing shows is kept. `stop_timeout` in seconds."""

    data_dir: Path
    listen: tuple[str, int] = ("127.0.0.1", 8420)
    region: str = "local"
    public_url: str | None = None
    database: str | None = field(default=None, repr=False)
    blobs: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    behind_proxy: bool = False
    test_clock: bool = False
    output_json: bool = False
    notify_socket: str | None = None
    retention: Retention = field(default_factory=Retention)
    stop_timeout: float = STOP_TIMEOUT


def run(options: ServeOptions, host: Host) -> int:
    """Serve until a signal; the exit code. Main thread only. Raises `UsageError` (options), `Busy` (address
    or data directory in use), `FormatTooNew`, `NoSpace`, `Unavailable`."""
    _check(options)
    os.umask(0o077)  # all that is made here is the server's own
    _raise_descriptors()
    _collect_seldom()
    # Bodies come from the heap: mapped anew for each, their page faults were a sixth of an upload's CPU.
    few_heaps(mapped_from=32 * MIB, keep=32 * MIB)
    if options.test_clock:
        host = with_test_clock(host)
    _make_data_dir(options.data_dir)
    service = open_service(
        ServiceOptions(options.data_dir, options.database, options.blobs, options.retention), host
    )
    try:
        key = options.admin_key or _admin_key(options.data_dir, host)
        if not _ADMIN_KEY.fullmatch(key):
            raise UsageError(
                "an admin key is one line of 16 to 512 printable characters",
                hint=f"put it back into {options.data_dir / ADMIN_KEY}, or remove it for a new one",
            )
        bound = _bind(options.listen)
    except BaseException:
        service.close()
        raise
    url = _url(options, bound)
    service.tokens.announce({options.region: options.public_url or url}, key.encode())
    front = make_app(service, host, key, test_clock=options.test_clock)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options, front, bound, lambda: _say_ready(options, url)))
    finally:
        bound.close()
        _close(front, options.stop_timeout)


async def _serve(options: ServeOptions, front: Front, bound: socket.socket, ready: Callable[[], None]) -> int:
    config = uvicorn.Config(
        front,
        http=BoundedProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=options.behind_proxy,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, int(options.stop_timeout)),
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    server = _Server(config, front, ready)
    loop = asyncio.get_running_loop()
    front.context.loop = loop
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    # What is old by one clock is not by the other.
    background = [asyncio.create_task(housekeeping(front.context, expire=not options.test_clock))]
    if not options.test_clock:
        background.append(asyncio.create_task(in_background(front.context)))
    try:
        await server.serve(sockets=[bound])
    finally:
        for task in background:
            task.cancel()
        _notify(options.notify_socket, "STOPPING=1")
    return 0 if server.started else 1


def _close(front: Front, timeout: float) -> None:
    """End worker threads and service. A request that hangs past `timeout` (an object store that does not
    answer) is left behind: nothing it has not finished was acknowledged."""
    closing = threading.Thread(target=front.close, name="close", daemon=True)
    try:
        closing.start()
    except RuntimeError as exc:
        log.warning("%s; ending without a limit of time", exc)
        front.close()
        return
    closing.join(timeout)
    if closing.is_alive():
        log.error("a request did not end within %.0f s; leaving it", timeout)
        os._exit(1)


class _Server(uvicorn.Server):
    """uvicorn with our signals and a word when it listens."""

    def __init__(self, config: uvicorn.Config, front: Front, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._front = front
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the event loop's here (`_serve`)."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    def stop(self) -> None:
        """First: finish what runs. Second signal: do not wait for it."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._front.context.waiters.stop()


async def housekeeping(ctx: Context, *, expire: bool) -> None:
    """Remove what deleted filesystems left and, with `expire`, keys and checkpoints whose time is over, a
    bounded part at a time. One that fails, while the store is away say, holds up none of the others."""
    service = ctx.service
    jobs = [service.filesystems.collect, service.forks.copy_some]
    if expire:
        jobs += [service.idempotency.sweep, service.checkpoints.expire]
    while True:
        done, failed = 0, False
        for job in jobs:
            try:
                done += await ctx.poll(job)
            except FsdError as exc:
                log.warning("housekeeping: %s; it is tried again", exc)
                failed = True
            except Exception:  # a defect of one round must not end all later ones
                log.exception("housekeeping failed; it is tried again")
                failed = True
        await asyncio.sleep(0.01 if done and not failed else _COLLECT_EVERY)


def _check(options: ServeOptions) -> None:
    if not _REGION.fullmatch(options.region):
        raise UsageError(
            f"not a region code: {options.region!r}",
            hint="lower-case letters, digits and '-', for example local",
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("TLS needs both a certificate and a key", hint="give --tls-cert and --tls-key")
    if options.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as exc:
            raise UsageError(
                f"{options.tls_cert} and {options.tls_key} are no certificate and its key: {exc}",
                hint="both in PEM form, the key without a password",
            ) from exc
    loopback = is_loopback(options.listen[0])
    if not loopback and not (options.tls_cert or options.behind_proxy or options.insecure):
        raise UsageError(
            f"refusing to listen on {options.listen[0]} without TLS: tokens would travel readable",
            hint="give --tls-cert and --tls-key, or --behind-proxy when a proxy in front does TLS",
        )
    url = options.public_url
    if url is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise UsageError(f"not a URL: {url!r}", hint="the form is https://HOST[:PORT]")


def _raise_descriptors() -> None:
    """As many open files as this process may have: each connection is one, and 1,024 is a common default."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _collect_seldom() -> None:
    """What a request makes is freed by its counts, however it ends (test_refused_bodies): the collector finds
    nothing, at 5 % of a commit's CPU."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _make_data_dir(path: Path) -> None:
    try:
        make_dirs_durable(path)
    except OSError as exc:
        raise UsageError(
            f"cannot make the data directory {path}: {exc.strerror}", hint="choose another --data-dir"
        ) from exc


def _admin_key(data_dir: Path, host: Host) -> str:
    """The key in `data_dir`/admin.key; made, durable and 0600, when there is none."""
    path = data_dir / ADMIN_KEY
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        key = "fsdadmin_" + host.token_bytes(32).hex()
        write_durable(host, path, (key + "\n").encode(), "admin_key")
        return key
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read the admin key in {path}: {exc}",
            hint="put the key back (one line), or remove it: the next start makes a new one",
        ) from exc


def _bind(listen: tuple[str, int]) -> socket.socket:
    address, port = listen
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise UsageError(f"cannot listen on {address}: {exc.strerror}") from exc
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.setblocking(False)
    except OSError as exc:
        made.close()
        raise Busy(
            f"cannot listen on {address} port {port}: {exc.strerror}",
            hint="another server listens there, or the address is not this machine's",
        ) from exc
    return made


def _url(options: ServeOptions, bound: socket.socket) -> str:
    address, port = options.listen[0], bound.getsockname()[1]
    shown = f"[{address}]" if ":" in address else address
    return f"{'https' if options.tls_cert else 'http'}://{shown}:{port}"


def _say_ready(options: ServeOptions, url: str) -> None:
    """The socket accepts from now on."""
    if options.output_json:
        ready = {"status": "listening", "url": url, "pid": os.getpid(), "region_code": options.region}
        print(json.dumps(ready), flush=True)
    if options.public_url is None and options.listen[0] in ("0.0.0.0", "::"):
        print(
            f"fsd serve: new tokens name {url}, which no other machine can reach: give --public-url",
            file=sys.stderr,
        )
    print(f"fsd serve: listening on {url}", file=sys.stderr, flush=True)
    _notify(options.notify_socket, "READY=1")


def _notify(where: str | None, state: str) -> None:
    """Tell systemd, where it asked to be told (sd_notify's protocol: one datagram)."""
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        try:
            to.sendto(state.encode(), address)
        except OSError as exc:
            log.warning("cannot tell systemd %s: %s", state, exc)
