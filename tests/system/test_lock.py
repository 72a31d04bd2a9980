"""`fsd lock`: one holder at a time, told by its fence, given up at the end and on signals, lost to nobody."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.cli import command, process, start_lock
from support.proxy import FaultProxy
from support.server import Server, TestFs, clean_env
from support.wait import wait_for


def held(fs: TestFs) -> list[dict[str, object]]:
    found: list[dict[str, object]] = fs.ask("GET", "/leases").json["leases"]
    return found


def test_the_command_runs_under_the_lock_and_knows_its_fence(shared_fs: TestFs) -> None:
    fences = []
    for _ in range(2):
        done = process("lock", "/not/there", "--", "sh", "-c", 'echo "$FSD_FENCE"', env=shared_fs.env)
        assert done.code == 0, done.err
        fences.append(int(done.text))
    assert fences[1] > fences[0] > 0
    assert not held(shared_fs)
    assert process("lock", "/x", "--", "sh", "-c", "exit 5", env=shared_fs.env).code == 5
    missing = process("lock", "/x", "--", "/no/such/command", env=shared_fs.env)
    assert missing.code == 127 and "/no/such/command cannot be run: No such file" in missing.err
    forbidden = process("lock", "/x", "--", "/etc/passwd", env=shared_fs.env)
    assert forbidden.code == 126 and "cannot be run: Permission denied" in forbidden.err
    assert process("lock", "/x", "--", "", env=shared_fs.env).code == 2
    assert process("lock", "/x", "--", "sh", "-c", "kill -9 $$", env=shared_fs.env).code == 137
    assert process("lock", "/x", env=shared_fs.env).code == 2
    assert not held(shared_fs)


def test_one_at_a_time_and_who_waits_is_told_by_whom(shared_fs: TestFs, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    first = start_lock(shared_fs.env, "/db", "--", "sh", "-c", f"read line < {gate}; echo done")
    wait_for(lambda: held(shared_fs), 30, "the lock to be taken")
    late = process("lock", "/db", "--timeout", "0", "--output", "json", "--", "true", env=shared_fs.env)
    assert late.code == 7
    assert late.error["code"] == "lease_held"
    assert late.error["details"]["holder"]["command"].startswith("sh -c read")
    assert process("lock", "/other", "--", "true", env=shared_fs.env).code == 0
    waiting = start_lock(shared_fs.env, "/db", "--", "echo", "second")
    assert waiting.stderr is not None
    assert "holds the lock /db since" in waiting.stderr.readline()
    gate.write_text("go\n")
    assert first.communicate(timeout=60)[0] == "done\n"
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "second\n")
    assert not held(shared_fs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_to_the_command_and_the_lock_is_given_up(shared_fs: TestFs, number: int) -> None:
    name = signal.Signals(number).name[3:]
    running = start_lock(
        shared_fs.env,
        "/db",
        "--",
        "sh",
        "-c",
        f"trap 'kill $!; echo got; exit 3' {name}; sleep 30 >&- 2>&- & wait",
    )
    wait_for(lambda: held(shared_fs), 30, "the lock to be taken")
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    wait_for(children.read_text, 30, "the command to run")
    # The trap is set when the shell has a child of its own.
    shell = int(children.read_text().split()[0])
    wait_for(Path(f"/proc/{shell}/task/{shell}/children").read_text, 30, "the shell's child")
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (3, "got\n"), err
    assert not held(shared_fs)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_whoever_started_it_ignores_is_for_nobody(
    shared_fs: TestFs, tmp_path: Path, number: signal.Signals
) -> None:
    """`nohup fsd lock …`, and a job in the background of a script: neither it nor the command ends."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"kill -{number} $PPID $$; echo alive; read line < {gate}; echo done"
    running = start_lock(shared_fs.env, "/db", "--", "sh", "-c", script, ignored=number)
    assert running.stdout is not None
    assert running.stdout.readline() == "alive\n"
    running.send_signal(number)
    gate.write_text("go\n")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "done\n"), err


def test_the_exit_code_is_known_where_whoever_started_it_ignores_sigchld(shared_fs: TestFs) -> None:
    for words in (("lock", "/x"), ("run",)):
        done = subprocess.run(
            [*command(), *words, "--", "sh", "-c", "exit 5"],
            env=clean_env(**shared_fs.env),
            capture_output=True,
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        )
        assert done.returncode == 5, (words, done.stderr)


def test_a_signal_while_waiting_ends_the_waiting(shared_fs: TestFs) -> None:
    first = start_lock(shared_fs.env, "/db", "--", "sleep", "60")
    wait_for(lambda: held(shared_fs), 30, "the lock to be taken")
    waiting = start_lock(shared_fs.env, "/db", "--", "echo", "never")
    assert waiting.stderr is not None
    waiting.stderr.readline()
    waiting.terminate()
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (128 + signal.SIGTERM, "")
    first.terminate()
    assert first.wait(50) == 128 + signal.SIGTERM


def test_a_killed_holder_is_waited_out_and_its_fence_is_behind(shared_fs: TestFs) -> None:
    first = start_lock(
        shared_fs.env, "/db", "--lease-time", "1s", "--", "sh", "-c", "echo $FSD_FENCE; exec sleep 60"
    )
    assert first.stdout is not None
    before = int(first.stdout.readline())
    child = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0])
    first.kill()
    first.wait(50)
    done = process("lock", "/db", "--", "sh", "-c", "echo $FSD_FENCE", env=shared_fs.env)
    assert done.code == 0
    assert int(done.text) > before
    os.kill(child, signal.SIGKILL)


def test_lost_it_ends_the_command_and_says_so(server: Server, tmp_path: Path) -> None:
    """Its server goes away for longer than the lock lasts, and another takes it meanwhile."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        holder = start_lock(
            fs.env,
            "/db",
            "--lease-time",
            "1s",
            "--",
            "sh",
            "-c",
            "trap 'echo ended; exit 0' TERM; echo on; while :; do sleep 0.1; done",
            FSD_ENDPOINT=proxy.url,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "on\n"
        proxy.refuse()
        other = process("lock", "/db", "--timeout", "20s", "--", "true", env=fs.env)
        assert other.code == 0, other.err
        out, err = holder.communicate(timeout=60)
    assert holder.returncode == 1
    assert out == "ended\n"
    assert "the lock /db was lost and the command ended" in err
