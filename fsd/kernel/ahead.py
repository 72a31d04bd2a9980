"""A mount's supervisor and daemon, begun before the command that starts them has loaded its own half.

Most of what a mount takes until it is ready is Python loading modules: the daemon's take longer than the
command's, and one after the other they keep one core busy. So `fsd mount` forks the supervisor first, which
forks the daemon, which loads all it needs; meanwhile the command loads the rest of itself, reads its
arguments, looks at the place and takes the lock. Then it sends the order: its options, and descriptors of the
lock and of the channel. A command that ends without one, however it ends, closes the socket by that, and both
end at once. They hold no stream, directory or terminal of its before they have the order.

What cannot be had ahead (no process, a daemon that was killed before its order) is started by `supervisor`
as it is in the foreground and at a restart: this gains time, and nothing depends on it.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from typing import Final

from fsd.host.processes import set_streams
from fsd.host.seam import Host
from fsd.kernel import fresh, supervisor
from fsd.kernel.channel import Channel
from fsd.kernel.options import MountOptions, packed, unpacked
from fsd.kernel.runtime import RuntimeDir
from fsd.model.errors import FsdError, Unavailable

MOST: Final = 1 << 17  # bytes of an order: a token, an endpoint, three paths


class Ahead:
    """The command's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def order(self, options: MountOptions, lock: int, channel: int) -> bool:
        """Have it mounted; once. False: nobody is there to do it, or the options (with a test's host) cannot
        be handed on."""
        raw = packed(options)
        with self._sock as sock:
            if options.host != Host() or len(raw) > MOST:
                return False
            with suppress(OSError):
                socket.send_fds(sock, [raw], [lock, channel])
                return True
        return False

    def close(self) -> None:
        """There is no order."""
        self._sock.close()


_begun: list[Ahead] = []


def begin() -> None:
    """To be called once, by a process of one thread."""
    try:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # the mount will say so, should it still be
        return
    with there:
        try:
            middle = os.fork()
        except OSError:  # as above
            here.close()
            return
        if middle == 0:
            here.close()
            supervisor.in_child(lambda: _apart(there))
    os.waitpid(middle, 0)
    _begun.append(Ahead(here))


def taken(options: MountOptions) -> Ahead | None:
    """What was begun, where it is of use for these options; else it ends."""
    begun = _begun.pop() if _begun else None
    if begun is not None and (options.foreground or not options.supervised):
        begun.close()
        return None
    return begun


def _apart(sock: socket.socket) -> int:
    """A process between the command and the supervisor, which so is nobody's child and leads no session."""
    os.setsid()
    with suppress(Unavailable):
        if supervisor.fork_small() == 0:
            supervisor.in_child(lambda: _supervisor(sock))
    return 0


def _supervisor(sock: socket.socket) -> int:
    os.chdir("/")
    set_streams(os.devnull)
    loaded = fresh.prints()
    try:
        first = _begin_daemon(sock, loaded)
    except OSError:
        first = None
    order = _received(sock)
    sock.close()
    if order is None:
        return _given_up(first)
    raw, lock, fd = order
    options, channel = unpacked(raw), Channel(fd)
    # Until it can tell the daemon of a stop, there must be none.
    signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOP_SIGNALS)
    channel.supervisor(os.getpid())
    if channel.fd is None:  # the command was ended since its order
        return _given_up(first)
    directory = RuntimeDir(options.runtime_dir, options.host)
    try:
        directory.log_here(options.mount_id)
    except FsdError as exc:
        channel.failed(exc)
        return _given_up(first)
    if first is not None and fresh.changed(loaded):  # it has C code, which is loaded but once
        first.end()
        first = None
    child = first.told(raw, lock, fd) if first is not None else None
    place = options.mountpoint
    return supervisor.Supervisor(options, place, directory, channel, first=child, loaded=loaded).run()


def _given_up(first: _Daemon | None) -> int:
    """Nobody wants the mount any more."""
    if first is not None:
        first.end()
    return 0


class _Daemon:
    """The supervisor's end of a daemon without an order."""

    def __init__(self, pid: int, stop_pipe: int, sock: socket.socket) -> None:
        self.pid = pid
        self._stop_pipe = stop_pipe
        self._sock = sock

    def told(self, raw: bytes, lock: int, channel: int) -> supervisor.Child | None:
        """Hand the order on. None: it has ended."""
        try:
            with self._sock as sock:
                socket.send_fds(sock, [raw], [lock, channel])
        except OSError:
            self.end()
            return None
        return supervisor.Child(self.pid, self._stop_pipe)

    def end(self) -> None:
        """Nothing has been told to it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._sock.close()
        os.close(self._stop_pipe)


def _begin_daemon(sock: socket.socket, loaded: fresh.Prints) -> _Daemon:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stops, stop_pipe = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(stops)
        os.close(stop_pipe)
        raise
    if pid == 0:
        sock.close()
        here.close()
        os.close(stop_pipe)
        supervisor.in_child(lambda: _daemon(there, stops, loaded))
    there.close()
    os.close(stops)
    return _Daemon(pid, stop_pipe, here)


def _daemon(sock: socket.socket, stops: int, loaded: fresh.Prints) -> int:
    supervisor.alone()
    with suppress(Exception):  # it is met, and told, where this is loaded when there is an order
        supervisor.load_daemon()
    order = _received(sock)
    sock.close()
    if order is not None:
        raw, _, channel = order  # the lock is held as long as this process lives
        options = unpacked(raw)
        directory = RuntimeDir(options.runtime_dir, options.host)
        directory.log_here(options.mount_id)
        where = options.mountpoint, directory, Channel(channel)
        supervisor.daemon(options, supervisor.Start(*where, stops, 0, os.getppid(), loaded))
    return 0


def _received(sock: socket.socket) -> tuple[bytes, int, int] | None:
    """Options, lock and channel; None: whoever would give the order has ended."""
    try:
        raw, fds, _, _ = socket.recv_fds(sock, MOST, 2)
    except OSError:
        return None
    for fd in fds:  # a program that is started from here, fusermount3 say, must not hold the lock
        os.set_inheritable(fd, False)
    return (raw, fds[0], fds[1]) if raw and len(fds) == 2 else None
