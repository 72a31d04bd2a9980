"""Where a program of the system lies, for processes that serve a mount.

`subprocess` leaves the search through PATH to the child, and waits for it in vfork(2) with the interpreter's
lock held. Agents have directories of their mount in PATH (a virtual environment, node_modules/.bin): the
child then asks the mount for a name that nobody can answer, and both wait for good.
"""

from __future__ import annotations

import errno
import os
from typing import Final

# Where systems keep mount, umount and fusermount3; looked at before whatever else PATH names, since any of
# that may lie in this mount or in another whose server is away.
_SYSTEM: Final = frozenset(
    ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/local/sbin", "/run/wrappers/bin")
)


def program(name: str) -> str:
    """The absolute path of `name`, by PATH; to start it by. Looking gives the interpreter's lock away. Raises
    `FileNotFoundError`."""
    named = [entry for entry in os.get_exec_path() if os.path.isabs(entry)]
    for entry in sorted(named, key=lambda entry: os.path.normpath(entry) not in _SYSTEM):
        path = os.path.join(entry, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def installed(name: str) -> str | None:
    """The same; None where there is none."""
    try:
        return program(name)
    except FileNotFoundError:
        return None
