"""`fsd mount` whose daemon holds a `TinyVolume` and needs no server.

Run as `python -m support.tinydaemon MOUNTPOINT BASE [foreground] [alone] [hang]` in tests/: state in
BASE/state, records in BASE/run. `old-kernel` cannot make mounts apart from their place, `hang` shortens the
watchdog's patience, `refused` is one operation the server would not take, `stuck` one that never gets there,
`short` has no thread for the first two restarts, `stays` is a mount that nobody can detach, `tidy` one that
looks after its files all the time; with `slow` a step right before the mount takes 2 s and makes BASE/slow.
Exits as the command would.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsd.vfs.open
from fsd.host.seam import Host
from fsd.kernel import ahead, remains, stacks, supervisor, tasks
from fsd.kernel.options import MountOptions
from fsd.model.errors import FsdError, NoSpace
from fsd.model.token import make
from support.tinyvolume import TinyVolume

if TYPE_CHECKING:
    from fsd.kernel.automatic import Automatic


def tiny(*args: Any, **more: Any) -> Any:
    """Stands for `open_volume`; runs in the daemon, so that the supervisor stays as small as it is."""
    import fsd.kernel.daemon
    import fsd.kernel.mountapi
    import fsd.kernel.sender

    if "old-kernel" in sys.argv:
        fsd.kernel.mountapi.FSOPEN = 9999  # type: ignore[misc]
    if "in-python" in sys.argv:
        fsd.kernel.sender.Sender.start = lambda self, connection: None  # type: ignore[method-assign]
    if "slow" in sys.argv:
        fsd.kernel.daemon.Automatic.check = slow  # type: ignore[method-assign, assignment]
    if "tidy" in sys.argv:
        fsd.kernel.daemon.FINDABLE = 0.2  # type: ignore[misc]
    if "short" in sys.argv and is_second_or_third():
        threading.Thread.start = no_thread  # type: ignore[method-assign, assignment]
    if "full" in sys.argv and is_second_or_third():
        raise NoSpace("the disk is full, as the test asked")
    if "stays" in sys.argv:
        fsd.kernel.stop.detach = stays
    made = TinyVolume()
    made.refused = int("refused" in sys.argv)
    made.stuck = int("stuck" in sys.argv)
    return made


def is_second_or_third() -> bool:
    """Whether this is one of the mount's first two restarts."""
    with open(f"{sys.argv[2]}/starts", "a+") as starts:
        starts.write("s")
        starts.flush()
        return 1 < starts.tell() <= 3


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def stays(place: Path, *, lazy: bool, dead: bool = False) -> None:
    raise FsdError(f"{place} cannot be unmounted")


async def slow(automatic: Automatic) -> None:
    """A question the server takes its time for."""
    os.close(os.open(f"{sys.argv[2]}/slow", os.O_CREAT | os.O_WRONLY))
    await tasks.sleep(2)


def main() -> int:
    base = Path(sys.argv[2])
    host = Host()
    options = MountOptions(
        mountpoint=Path(sys.argv[1]),
        token=make(host, "fs_tiny", "tok", {"local": "http://127.0.0.1:9"}),
        endpoint="http://127.0.0.1:9",
        auto_checkpoint=3600.0 if "slow" in sys.argv else 0.0,
        state_dir=base / "state",
        runtime_dir=base / "run",
        foreground="foreground" in sys.argv,
        supervised="alone" not in sys.argv,
        notify_socket=os.environ.get("TEST_NOTIFY"),
        host=host,
    )
    fsd.vfs.open.open_volume = tiny
    if "short" in sys.argv or "full" in sys.argv:
        supervisor.RESTART_PAUSE = 0.05  # type: ignore[misc]
    if "no-rights" in sys.argv:
        remains.end_connections = lambda place, source: False
    if "hang" in sys.argv:
        stacks.HANG = 2.0  # type: ignore[misc]
    if not options.foreground and "late" not in sys.argv:
        ahead.begin()  # as the command line does
    begun = ahead.taken(options)
    try:
        return supervisor.mount(options, order=begun.order if begun else None)
    except FsdError as exc:
        print(f"{exc} ({exc.hint})", file=sys.stderr)
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main())
