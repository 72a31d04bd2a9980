"""The scenario of scripts/demo: state that survives disposable sandboxes, each step shown and proved.

A *sandbox* here is an empty home directory and an environment that holds two values, the token and the region
code. The trusted machine holds the admin key. Everything lies below one temporary directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

FSD = Path(sys.executable).with_name("fsd")
REGION = "aws-us-east-1"
COMMAND_TIMEOUT = 60
PLAN = "# Plan\n1. inspect\n2. change\n3. verify\n"
TOKEN = re.compile(r"fsd1\.[A-Za-z0-9_.=-]+")


class NotProved(Exception):
    """A step did not show what it should have shown."""


def redacted(text: str) -> str:
    return TOKEN.sub("fsd1.…", text)


class Place:
    """Somewhere commands run: a name for people, an environment, a home of its own."""

    def __init__(self, base: Path, name: str, **variables: str) -> None:
        self.name = name
        self.home = base / re.sub(r"[^a-z0-9]+", "-", name.split(":")[0].lower())
        (self.home / "run").mkdir(parents=True)
        self.variables = variables
        self.env = {
            "PATH": f"{FSD.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "HOME": os.fspath(self.home),
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": os.fspath(self.home / "run"),
            **variables,
        }

    def show(self) -> None:
        print(f"\n── {self.name} " + "─" * max(3, 90 - len(self.name)))
        for key, value in self.variables.items():
            secret = "…" if key == "FSD_ADMIN_KEY" else redacted(value)
            print(f"   {key}={secret}")
        print(f"   (and PATH, LANG, HOME and XDG_RUNTIME_DIR, which are empty directories: {self.home.name})")

    def run(self, command: str, *, stdin: str | None = None, quiet: bool = False) -> str:
        """Run a shell command as a user would; its stdout. Raises `NotProved` when it fails."""
        print(f"   $ {redacted(command)}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            input=None if stdin is None else stdin.encode(),
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env=self.env,
            cwd=self.home,
            timeout=COMMAND_TIMEOUT,
        )
        out = done.stdout.decode(errors="replace")
        told = redacted(done.stderr.decode(errors="replace").rstrip())
        if out and not quiet:
            for line in redacted(out.rstrip("\n")).split("\n")[:12]:
                print(f"     {line[:160]}")
        if done.returncode:
            raise NotProved(f"exit {done.returncode} from: {redacted(command)}\n{told}")
        return out


def prove(what: str, holds: bool) -> None:
    """Say what was just proved, or stop."""
    if not holds:
        raise NotProved(what)
    print(f"   ✓ {what}")


class Demo:
    """The steps. `clean` undoes everything in whatever state it is."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.server: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self.token = ""

    def sandbox(self, name: str) -> Place:
        """A new empty environment with the two values."""
        place = Place(self.base, name, FSD_TOKEN=self.token, FSD_REGION_CODE=REGION)
        place.show()
        return place

    def serve(self) -> None:
        print("The trusted side: one server on SQLite and a directory.")
        command = [os.fspath(FSD), "serve", "--data-dir", os.fspath(self.base / "data")]
        command += ["--listen", "127.0.0.1:0", "--region", REGION, "--output", "json"]
        print(f"   $ {shlex.join(['fsd', *command[1:]])} &", flush=True)
        log = (self.base / "serve.log").open("wb")
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        log.close()
        assert self.server.stdout is not None
        # A server that says nothing is ended, which ends the wait for its first line.
        watchdog = threading.Timer(30, self.server.kill)
        watchdog.start()
        line = self.server.stdout.readline()
        watchdog.cancel()
        if not line:
            raise NotProved(f"the server did not start:\n{(self.base / 'serve.log').read_text()[-2000:]}")
        self.endpoint = str(json.loads(line)["url"])
        print(f"   listening on {self.endpoint}")

    def provision(self) -> None:
        key = (self.base / "data" / "admin.key").read_text().strip()
        trusted = Place(self.base, "Trusted machine", FSD_ADMIN_KEY=key, FSD_ENDPOINT=self.endpoint)
        trusted.show()
        command = "fsd fs create-file-system --wait --query fs_token --output text"
        self.token = trusted.run(command, quiet=True).strip()
        print(f"     {redacted(self.token)}")
        prove("one command made the filesystem and its token", self.token.startswith("fsd1."))

    def first_sandbox(self) -> None:
        one = self.sandbox("Sandbox 1: an empty environment, two values")
        one.run(
            "printf '%s\\n' '# Plan' '1. inspect' '2. change' '3. verify' | "
            "fsd fs copy-file --from-stdin --to-remote /tasks/task-42/plan.md"
        )
        one.run(
            "fsd fs-journal create-journal --journal-id task-42 --journal-kind agent "
            '--title "task 42" --actor agent:worker-1'
        )
        one.run(
            "fsd fs-journal append-journal-entries --journal-id task-42 "
            '--entry-json \'{"type":"task.checkpoint","step":"inspection-complete"}\''
        )
        self.gone(one)

    def second_sandbox(self) -> None:
        two = self.sandbox("Sandbox 2: a replacement that never saw the first")
        plan = two.run("fsd fs read-file --path /tasks/task-42/plan.md")
        prove("the plan is what sandbox 1 wrote", plan == PLAN)
        read = json.loads(two.run("fsd fs-journal read-journal-entries --journal-id task-42 --after-seq 0"))
        steps = [entry.get("step") for entry in read["entries"]]
        prove("the journal's entry came back with its step", steps == ["inspection-complete"])
        self.gone(two)

    def work_on_a_mount(self) -> dict[str, str]:
        three = self.sandbox("Sandbox 3: ordinary tools on a mount")
        mount, state = three.home / "work", three.home / "state"
        mount.mkdir()
        three.run(f"fsd mount {mount} --state-dir {state} >/dev/null")
        prove("the plan is there as a file", (mount / "tasks/task-42/plan.md").read_text() == PLAN)
        three.run(
            f"cd {mount}/tasks/task-42 && mkdir -p results/raw && "
            "for n in 1 2 3; do head -c 200000 /dev/urandom > results/raw/part-$n; done && "
            "cat results/raw/part-* > results/all && sed -i 's/1. inspect/1. inspect (done)/' plan.md && "
            "ln -s results/all latest && ln results/all results/same && "
            "tar czf results/raw.tar.gz results/raw && mv results/raw.tar.gz . && ls -l"
        )
        written = digests(mount)
        prove(f"{len(written)} files and links written", len(written) >= 7)
        three.run(f"fsd unmount {mount}")
        prove("the kernel lists no mount any more", not os.path.ismount(mount))
        self.gone(three)
        return written

    def read_elsewhere(self, written: dict[str, str]) -> None:
        four = self.sandbox("Sandbox 4: another mount, another place, no state")
        mount = four.home / "elsewhere"
        mount.mkdir()
        four.run(f"fsd mount {mount} --state-dir {four.home / 'state'} >/dev/null")
        found = digests(mount)
        prove("every file, link and byte is there", found == written)
        print("   Now this sandbox is lost without warning: a file is fsynced, then everything is killed.")
        last = mount / "tasks/task-42/last-words"
        four.run(f"printf 'survives\\n' > {last} && sync {last}")
        status = json.loads(four.run(f"fsd status {mount} --output json", quiet=True))
        for pid in (status["supervisor_pid"], status["pid"]):
            if pid:
                print(f"   $ kill -9 {pid}")
                os.kill(int(pid), signal.SIGKILL)
        detach(mount)
        self.gone(four)
        five = self.sandbox("Sandbox 5: after the loss")
        words = five.run("fsd cat /tasks/task-42/last-words")
        prove("what fsync had returned for is there", words == "survives\n")

    def gone(self, place: Place) -> None:
        shutil.rmtree(place.home)
        print(f"   (this environment is deleted with all it held: {place.home.name})")

    def clean(self) -> list[str]:
        """End and delete everything; what could not be."""
        for mount in mounts_below(self.base):
            detach(mount)
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            try:
                self.server.wait(15)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait(10)
        for pid in processes_below(self.base):
            os.kill(pid, signal.SIGKILL)
        for record in records_below(self.base):
            record.unlink(missing_ok=True)
        left = [f"mount {mount}" for mount in mounts_below(self.base)]
        if not left:
            shutil.rmtree(self.base)
        return left


def digests(root: Path) -> dict[str, str]:
    """Path → what it holds, of everything below `root` that is no directory."""
    found = {}
    for directory, dirs, files in os.walk(root):
        for name in files + [d for d in dirs if os.path.islink(os.path.join(directory, d))]:
            path = Path(directory, name)
            relative = os.fspath(path.relative_to(root))
            if path.is_symlink():
                found[relative] = "→ " + os.readlink(path)
            else:
                found[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def mounts_below(base: Path) -> list[Path]:
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(row.split(" ")[4].replace("\\040", " ")) for row in rows]
    return sorted((p for p in points if base in p.parents), reverse=True)


def processes_below(base: Path) -> list[int]:
    """Processes of ours that work for something below `base`, as their command lines tell."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # ended meanwhile
        if os.fsencode(base) + b"/" in command:
            found.append(int(entry.name))
    return found


def records_below(base: Path) -> list[Path]:
    """What is kept of ended mounts, for `fsd wait-exit`: as root in one directory for the machine."""
    found = []
    for record in Path("/run/fsd").glob("*.json"):
        try:
            mountpoint = Path(json.loads(record.read_text())["mountpoint"])
        except (OSError, ValueError, KeyError):
            continue  # another mount's, being written
        if base in mountpoint.parents:
            found += [record, record.with_suffix(".lock"), record.with_suffix(".sock")]
    return found


def detach(mount: Path) -> None:
    subprocess.run(["fusermount3", "-uz", os.fspath(mount)], timeout=20, check=False, capture_output=True)


def stopped(number: int, frame: Any) -> NoReturn:
    raise NotProved("stopped: it took too long, or was interrupted")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    base = Path(tempfile.mkdtemp(prefix="fsd-demo.")).resolve()
    demo = Demo(base)
    failed: str | None = None
    mounted = os.access("/dev/fuse", os.R_OK | os.W_OK)
    try:
        demo.serve()
        demo.provision()
        demo.first_sandbox()
        demo.second_sandbox()
        if mounted:
            demo.read_elsewhere(demo.work_on_a_mount())
    except (NotProved, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as exc:
        failed = redacted(str(exc))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    left = demo.clean()
    print()
    if failed:
        print(f"demo: NOT proved: {failed}", file=sys.stderr)
    if left:
        print(f"demo: left behind: {', '.join(left)} ({base})", file=sys.stderr)
    if failed or left:
        return 1
    if not mounted:
        print("demo: /dev/fuse is absent or not accessible, so nothing was mounted; the rest was proved.")
    else:
        print("demo: everything was proved; nothing was left behind.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
