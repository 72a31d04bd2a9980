"""Starting is fast: a direct command loads nothing it does not use."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

from support.cli import TOKEN, command, process
from support.server import TestFs

# Each costs tens of milliseconds of every command.
HEAVY = "pyfuse3 trio anyio starlette uvicorn boto3 psycopg httpx httpcore argparse jmespath zstandard"

LOOK = f"""
import sys
sys.argv = ["fsd", *sys.argv[1:]]
from fsd.cli.main import main
code = main()
heavy = [name for name in {HEAVY.split()!r} if name in sys.modules]
print(code, *heavy, file=sys.stderr)
"""


def loaded(env: dict[str, str], *argv: str) -> list[str]:
    """What of the heavy modules a run of the command had loaded, behind its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *argv],
        env={"PATH": "/usr/bin:/bin", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=60,
        check=True,
        text=True,
    )
    return done.stderr.splitlines()[-1].split()


def test_a_direct_command_loads_nothing_heavy(shared_fs: TestFs) -> None:
    env = shared_fs.env
    assert loaded(env, "journal", "create", "j", "--output", "text") == ["0"]
    assert loaded(env, "journal", "append", "j", "--entry-json", '{"type":"a"}', "--output", "json") == ["0"]
    assert loaded(env, "journal", "read", "j") == ["0"]
    assert loaded(env, "mkdir", "/d") == ["0"]
    assert loaded(env, "cp", sys.executable, ":/d/") == ["0"]
    assert loaded(env, "cat", "/d/" + sys.executable.rsplit("/", 1)[1]) == ["0"]
    assert loaded(env, "ls", "/") == ["0"]


def test_a_command_starts_within_its_time() -> None:
    """60 ms were measured. Counted is the time of the processor, which other load may more than double, not
    that of the clock, and the best of several."""
    best = min(_timed() for _ in range(5))
    assert best < 0.25, f"{best * 1000:.0f} ms"


def _timed() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process("journal", "create", "j", "--dry-run", env={"FSD_TOKEN": TOKEN}, anew=True).code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


INTERRUPTED = """
import os, signal, sys

class There:
    def find_spec(self, name, path=None, target=None):
        if name == "fsd.cli.table":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, There())
from fsd.cli.start import main
main()
"""


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, "--version"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


HANDLES = """
import signal, sys
signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
from fsd.cli import main as program, start
program.main = lambda: print(signal.getsignal(signal.SIGINT) is getattr(signal, sys.argv[1])) or 0
start.main()
"""


def test_the_program_handles_ctrl_c_as_it_was_before_it_was_loaded() -> None:
    """Who had it ignored (a job in the background of a script) goes on to ignore it."""
    for before in ("default_int_handler", "SIG_IGN", "SIG_DFL"):
        argv = [sys.executable, "-c", HANDLES, before]
        assert subprocess.run(argv, capture_output=True, timeout=60).stdout == b"True\n", before


LEAVES = """
import atexit, sys, threading, time
from fsd.cli import main as program, start

def main():
    atexit.register(print, "taken apart")
    print("answer")
    if sys.argv[1] == "busy":
        threading.Thread(target=lambda: (time.sleep(0.05), print("worked"))).start()
    return 7

program.main = main
sys.exit(start.main())
"""


def test_a_command_ends_at_once_but_joins_a_thread_that_works() -> None:
    for state, said in (("idle", b"answer\n"), ("busy", b"answer\nworked\ntaken apart\n")):
        done = subprocess.run([sys.executable, "-c", LEAVES, state], capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (7, said, b""), state


def test_what_is_asked_of_pythons_warnings_is_asked_of_other_programs(shared_fs: TestFs) -> None:
    """The environment of a sandbox in which somebody runs tests."""
    for asked in ({"PYTHONWARNINGS": "error"}, {"PYTHONWARNINGS": "default"}, {"PYTHONDEVMODE": "1"}):
        env = {"PATH": "/usr/bin:/bin", **shared_fs.env, **asked}
        done = subprocess.run([*command(), "ls", "/"], env=env, capture_output=True, timeout=60, check=True)
        assert done.stderr == b"", asked
