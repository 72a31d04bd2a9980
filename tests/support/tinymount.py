"""A process that mounts `TinyVolume` through the real session, machine and operations.

Run as `python -m support.tinymount MOUNTPOINT LOOP LOGFILE` in tests/. Prints "ready" when mounted. SIGTERM
fails what is parked and ends the session, as the daemon does; an unmount from outside ends it too. While the
file LOGFILE.window exists, the loop sleeps half a second between poll and read. LOGFILE.go lets go what is
held. Exit 0, or 1 when the loop broke.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pyfuse3

from fsd.host.seam import Host
from fsd.kernel.interrupts import look_for_killed
from fsd.kernel.machine import Machine
from fsd.kernel.operations import FsdOperations
from fsd.kernel.session import FuseSession, MiniLoop, make_loop
from support.tinyvolume import TinyVolume


def main() -> int:
    mountpoint, loop_name, log_file = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(filename=log_file, level=logging.INFO)
    sys.setswitchinterval(0.0005)
    loop = make_loop(loop_name)
    never = threading.Event()
    window = Path(log_file + ".window")
    if isinstance(loop, MiniLoop):

        def before_read() -> None:
            if window.exists():
                never.wait(0.5)

        loop.scheduler.before_read = before_read
    volume = TinyVolume(Path(f"{log_file}.go"))
    machine = Machine(cast(Any, volume), cast(Any, None), cast(Any, None), loop, Host(), 300.0)
    operations = FsdOperations(machine)
    broken: list[BaseException] = []
    session = FuseSession(
        loop,
        operations,
        mountpoint,
        {"fsname=tiny", "subtype=fsd"},
        ended=lambda: None,
        died=broken.append,
    )
    loop.hook(machine.pump, operations.abort)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    session.mount()
    machine.start()
    session.start()
    os.stat(mountpoint)
    print("ready", flush=True)
    rounds = 0
    session.stop()
    while session.thread.is_alive():
        session.thread.join(0.05)
        rounds += 1
        machine.post(machine.tick)
        if rounds % 10 == 0:
            look_for_killed(machine)
        if stop.is_set():
            machine.post(operations.abort)
            session.terminate()
    pyfuse3.close(unmount=True)
    return 1 if broken else 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
