"""More of what people run in a directory that is to be an ordinary disk: databases, other version
controls, package managers side by side, deliveries of mail, rotated logs, increments of archives.

Each is looked at again in another sandbox, the first being lost. All are long: they run with `--all`.
"""

from __future__ import annotations

import glob
import mailbox
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.processes import die_with_parent, free_ports
from support.twice import GIT, Twice, sh
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(900)]


class Cluster:
    """A PostgreSQL whose data lies on a mount. As root it runs as user `postgres`. Close it always."""

    def __init__(self, data: Path) -> None:
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))
        assert found, "PostgreSQL is not installed: run scripts/setup-test as root"
        self.programs, self.data = Path(found[-1]).parent, data
        self.by: dict[str, object] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            self.by = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        [self.port] = free_ports(1)
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, program: str, *argv: str, timeout: float = 300) -> str:
        done = subprocess.run(
            [self.programs / program, *argv], cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": "/", "LANG": "C.UTF-8"},
            capture_output=True, text=True, timeout=timeout, check=False, **self.by,  # type: ignore[call-overload]
        )  # fmt: skip
        assert done.returncode == 0, f"{program} {argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def client(self, program: str, *argv: str) -> str:
        return self.run(program, "-h", "127.0.0.1", "-p", str(self.port), "-U", "fsd", *argv)

    def sql(self, statement: str) -> str:
        return self.client("psql", "-X", "-At", "-c", statement, "postgres").strip()

    def start(self, data: Path) -> None:
        self.data = data
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "shared_buffers": "16MB",
            "dynamic_shared_memory_type": "mmap",
            "max_connections": "20",
        }
        more = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self.process = subprocess.Popen(
            [self.programs / "postgres", "-D", data, *more], cwd="/",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent, **self.by,  # type: ignore[call-overload]
        )  # fmt: skip

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"PostgreSQL ended: {self.process.returncode}"
            ready = [self.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
            return subprocess.run(ready, check=False, timeout=30).returncode == 0

        wait_for(answers, 240, "PostgreSQL to start")

    def end(self, number: int) -> None:
        """SIGKILL also to its children, as a machine's end would."""
        if self.process is None:
            return
        told = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            for child in told.stdout.split():
                try:
                    os.kill(int(child), number)
                except ProcessLookupError:
                    continue  # gone with its parent
        self.process.wait(120)
        self.process = None


def test_postgresql_with_its_data_on_the_mount(twice: Twice) -> None:
    """initdb, pgbench, SIGKILL of all of it under load and its own recovery, then another sandbox: what was
    committed is there, and amcheck finds every heap and index whole."""
    pg = Cluster(twice.top / "pg")
    for directory in (twice.top, twice.boxes[0].base, *twice.boxes[0].base.parents):
        if not os.access(directory, os.X_OK) or not directory.stat().st_mode & 1:
            directory.chmod(directory.stat().st_mode | 0o011)
    pg.data.mkdir(mode=0o700)
    if "user" in pg.by:
        shutil.chown(pg.data, pg.by["user"], pg.by["group"])  # type: ignore[call-overload]
    try:
        pg.run("initdb", "-D", str(pg.data), "-U", "fsd", "-A", "trust", "-E", "UTF8", "--data-checksums")
        pg.start(pg.data)
        pg.client("pgbench", "-i", "-q", "-s", "1", "postgres")
        told = pg.client("pgbench", "-c", "4", "-t", "60", "-n", "postgres")
        assert "240/240" in told, told
        pg.sql("create table acknowledged(n integer primary key, pad text)")
        acknowledged = 0
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            pg.end(signal.SIGKILL)

        killer = threading.Timer(4, kill)
        killer.start()
        try:
            while True:
                pg.sql(f"insert into acknowledged values ({acknowledged}, repeat('x', 1000))")
                acknowledged += 1
        except AssertionError:
            if not killed.is_set():
                raise
            killer.join()
        assert acknowledged > 0, "killed before anything was committed"
        pg.start(pg.data)
        assert int(pg.sql("select count(*) from acknowledged")) in (acknowledged, acknowledged + 1)
        check(pg)
        pg.end(signal.SIGKILL)  # once more, and nobody recovers it here
        there = twice.again() / "pg"
        for directory in (twice.boxes[1].mountpoint, twice.boxes[1].base):
            directory.chmod(directory.stat().st_mode | 0o011)
        pg.start(there)
        assert int(pg.sql("select count(*) from acknowledged")) in (acknowledged, acknowledged + 1)
        check(pg)
        assert "80/80" in pg.client("pgbench", "-c", "2", "-t", "40", "-n", "postgres")
        pg.end(signal.SIGINT)
        pg.run("pg_checksums", "--check", "-D", str(there))
    finally:
        pg.end(signal.SIGKILL)


def check(pg: Cluster) -> None:
    """Heaps and indexes whole, and pgbench's books balanced."""
    pg.client("pg_amcheck", "--install-missing", "--heapallindexed", "--parent-check", "-d", "postgres")
    sums = "(select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches)"
    first, second, third = pg.sql(f"select {sums}, (select sum(tbalance) from pgbench_tellers)").split("|")
    assert first == second == third


LMDB = """
import lmdb, os, sys
env = lmdb.open(sys.argv[1], map_size=64 << 20, writemap=sys.argv[2] == "map", max_dbs=2)
def whole(env):
    with env.begin() as tx:
        found = dict(tx.cursor())
    assert all(value == key * 50 for key, value in found.items()), "a wrong value"
    return len(found)
what = sys.argv[3]
if what == "fill":
    for turn in range(20):
        with env.begin(write=True) as tx:
            for n in range(100):
                key = b"%06d" % (turn * 100 + n)
                tx.put(key, key * 50)
        print(turn, flush=True)
elif what == "die":
    with env.begin(write=True) as tx:
        for n in range(500):
            tx.put(b"%06d" % (n + 10**5), b"x")
        os.kill(os.getpid(), 9)
else:
    print(whole(env))
"""


@pytest.mark.parametrize("way", ["write", "map"])
def test_lmdb(twice: Twice, tmp_path: Path, way: str) -> None:
    """A store in one shared mapping; written by write(2) or through the mapping itself (msync)."""
    pip = '"$1" -m pip -q --disable-pip-version-check install --no-cache-dir --target "$2" "lmdb>=1.4"'
    sh(tmp_path, pip, sys.executable, tmp_path / "lib", timeout=300)
    script = tmp_path / "store.py"
    script.write_text(LMDB)
    run = 'PYTHONPATH="$1/lib" "$2" "$1/store.py" "$3" "$4" "$5"'
    store = twice.top / "store"

    def told(where: Path, what: str) -> str:
        return sh(tmp_path, run, tmp_path, sys.executable, where, way, what, timeout=300)

    told(store, "fill")
    died = subprocess.run(
        ["bash", "-c", run, "-", tmp_path, sys.executable, store, way, "die"], timeout=120, check=False
    )
    assert died.returncode in (-9, 137)
    assert told(store, "look") == "2000"
    twice.boxes[0].drain()
    there = twice.again() / "store"
    assert told(there, "look") == "2000"
    told(there, "fill")
    assert told(there, "look") == "2000"


def test_a_log_structured_store(twice: Twice, tmp_path: Path) -> None:
    """RocksDB's way with files: a log that is appended to and synced, sorted files written once, a manifest
    swapped by rename, old files removed, all with a lock file. A killed writer loses nothing it synced."""
    pip = '"$1" -m pip -q --disable-pip-version-check install --no-cache-dir --target "$2" rocksdict'
    sh(tmp_path, pip, sys.executable, tmp_path / "lib", timeout=400)
    script = tmp_path / "store.py"
    script.write_text(
        """
import os, sys
from rocksdict import Options, Rdict, WriteOptions
options = Options(); options.create_if_missing(True); options.set_write_buffer_size(256 << 10)
db = Rdict(sys.argv[1], options)
sync = WriteOptions(); sync.sync = True; db.set_write_options(sync)
if sys.argv[2] == "fill":
    for n in range(400):
        db[n] = os.urandom(3) * 2000
        print(n, flush=True)
    os.kill(os.getpid(), 9)
found = [n for n in range(400) if n in db]
assert all(len(db[n]) == 6000 and len({db[n][at:at + 3] for at in range(0, 6000, 3)}) == 1 for n in found)
db.compact_range(None, None)
print(len(found))
db.close()
"""
    )
    run = ["env", f"PYTHONPATH={tmp_path / 'lib'}", sys.executable, str(script)]
    store = twice.top / "store"
    died = subprocess.run([*run, store, "fill"], capture_output=True, text=True, timeout=400, check=False)
    assert died.returncode in (-9, 137), died.stderr
    acknowledged = len(died.stdout.split())
    assert acknowledged == 400
    assert sh(tmp_path, 'shift; "$@"', "-", *run, store, "look") == "400"
    there = twice.again() / "store"
    assert sh(tmp_path, 'shift; "$@"', "-", *run, there, "look") == "400"


def test_git_by_four_processes(twice: Twice) -> None:
    """They contend for index.lock and for refs: each commit is there once, or was refused in words; with the
    untracked cache, and the file system monitor asked for."""
    repo = twice.top / "repo"
    repo.mkdir()
    sh(repo, f"{GIT} init -q .; {GIT} config core.untrackedCache true; {GIT} commit -q --allow-empty -m base")
    work = (
        "made=0; for n in $(seq 25); do echo $1 > f$1-$n;"
        f" if {GIT} add f$1-$n 2> err$1 && {GIT} commit -qm c$1-$n f$1-$n 2>> err$1; then made=$((made + 1));"
        " else grep -qE 'lock|cannot lock ref' err$1 || { cat err$1 >&2; exit 1; }; fi; done; echo $made"
    )
    workers = [
        subprocess.Popen(["bash", "-uc", work, "-", str(who)], cwd=repo, stdout=subprocess.PIPE, text=True)
        for who in range(4)
    ]
    counts = [worker.communicate(timeout=600)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    made = sum(map(int, counts))
    assert made > 0
    look = f"{GIT} fsck --strict > /dev/null; test ! -e .git/index.lock; {GIT} rev-list --count HEAD"
    assert int(sh(repo, look, timeout=300)) == made + 1
    # A daemon that watches for changes may not work here; then git says so and looks itself.
    sh(
        repo,
        f"rm -f err?; {GIT} config core.fsmonitor true; echo more > watched;"
        f" {GIT} status --porcelain > ../told 2>&1;"
        f" grep -q watched ../told; echo again >> f0-1; {GIT} status --porcelain > ../told 2>&1;"
        f" grep -q f0-1 ../told; {GIT} fsmonitor--daemon stop || true;"
        f" {GIT} config --unset core.fsmonitor; rm watched",
    )
    there = twice.again() / "repo"
    assert int(sh(there, look, timeout=300)) == made + 1


def test_mercurial(twice: Twice) -> None:
    hg = "hg --config ui.username=n"
    repo = twice.top / "repo"
    sh(
        twice.top,
        f"{hg} init repo; cd repo; for n in $(seq 12); do mkdir -p d$n; echo $n > d$n/f;"
        f" {hg} -q commit -A -m $n; done;"
        f" {hg} -q update 5; echo other > other; {hg} -q commit -A -m other; {hg} -q merge;"
        f" {hg} -q commit -m merge;"
        f" {hg} verify -q; cd ..; {hg} -q clone repo clone; cd clone; {hg} verify -q; ln -s x link;"
        f" {hg} -q commit -A -m link;"
        f" {hg} -q push; {hg} -q clone --pull . ../pulled",
        timeout=400,
    )
    count = f"{hg} verify -q; {hg} log -T x | wc -c; silent {hg} status"
    assert sh(repo, count) == "15"
    there = twice.again()
    assert [sh(there / name, count) for name in ("repo", "clone", "pulled")] == ["15"] * 3


def test_subversion(twice: Twice) -> None:
    """A repository with its SQLite parts, and working copies with theirs."""
    sh(
        twice.top,
        'svnadmin create repo; svn -q checkout "file://$PWD/repo" one;'
        ' svn -q checkout "file://$PWD/repo" two;'
        " cd one; for n in $(seq 10); do mkdir d$n; echo $n > d$n/f; done; svn -q add d*;"
        " svn -q commit -m 'first revision'; cd ../two;"
        " svn -q update; echo two > d1/f; svn -q commit -m 'second revision'; cd ../one; echo one > d2/f;"
        " svn -q update; svn -q commit -m 'third revision';"
        " svn -q move d3 moved; svn -q commit -m 'fourth revision'; svn -q cleanup",
        timeout=400,
    )
    there = twice.again()
    assert sh(there, "svnadmin verify -q repo; svnlook youngest repo") == "4"
    # The working copies know the repository by its place.
    sh(there, 'svn relocate "$(svn info --show-item repos-root-url one)" "file://$PWD/repo" one; cd one;'
              ' svn -q update;'
              ' silent svn status; cat d1/f d2/f moved/f', timeout=300)  # fmt: skip


def test_maildir_deliveries_by_many(twice: Twice) -> None:
    """Files in `tmp`, linked or renamed into `new`, moved to `cur` by a reader meanwhile: each message"
    " once."""
    script = """
import mailbox, sys
box = mailbox.Maildir(sys.argv[1])
for n in range(60):
    box.add(f"Subject: {sys.argv[2]}-{n}\\n\\nbody {n}\\n" * 3)
"""
    mailbox.Maildir(twice.top / "mail").flush()
    writers = [
        subprocess.Popen([sys.executable, "-c", script, twice.top / "mail", str(who)]) for who in range(5)
    ]
    box = mailbox.Maildir(twice.top / "mail", create=False)
    while any(writer.poll() is None for writer in writers):
        for key in box.keys():  # noqa: SIM118 - it looks at the directory each time
            message = box[key]
            if message.get_subdir() == "new":
                message.set_subdir("cur")
                message.set_flags("S")
                box[key] = message
    assert [writer.wait() for writer in writers] == [0] * 5

    def subjects(where: Path) -> list[str]:
        return sorted(str(message["Subject"]) for message in mailbox.Maildir(where, create=False))

    wanted = sorted(f"{who}-{n}" for who in range(5) for n in range(60))
    assert subjects(twice.top / "mail") == wanted
    there = twice.again()
    assert subjects(there / "mail") == wanted
    assert os.listdir(there / "mail" / "tmp") == []


def test_incremental_archives(twice: Twice, tmp_path: Path) -> None:
    """tar looks at inode numbers, devices and times to tell what is new: here, and in the other sandbox after
    an unmount, nothing that did not change is new."""
    sh(
        twice.top,
        "mkdir -p d/e d/gone; for n in $(seq 30); do echo $n > d/e/f$n; done; echo x > d/gone/x;"
        ' tar --listed-incremental="$1/snap" -cf "$1/0.tar" d; cp "$1/snap" "$1/snap0"; sleep 1;'
        " echo changed > d/e/f7; rm -r d/gone; mv d/e/f8 d/e/new;"
        ' tar --listed-incremental="$1/snap" -cf "$1/1.tar" d',
        tmp_path,
    )

    def files(archive: str) -> list[str]:
        listed = sh(tmp_path, 'tar -tf "$1"', archive).splitlines()
        return [name for name in listed if not name.endswith("/")]

    assert files("1.tar") == ["d/e/f7", "d/e/new"]
    there = twice.again()
    sh(there, 'tar --no-check-device --listed-incremental="$1/snap" -cf "$1/2.tar" d', tmp_path)
    assert files("2.tar") == []
    (tmp_path / "out").mkdir()
    sh(
        tmp_path / "out",
        'for n in 0 1 2; do tar --listed-incremental=/dev/null -xf ../$n.tar; done; diff -r d "$1/d"',
        there,
    )


def test_logrotate(twice: Twice) -> None:
    """By rename and by copytruncate, compressed, under a writer that appends all the time: no line is"
    " lost."""
    sh(
        twice.top,
        "chmod 755 .;"
        ' printf "%s {\\n rotate 5\\n size 1\\n compress\\n delaycompress\\n missingok\\n su root'
        ' root\\n}\\n" "$PWD/a.log" > conf;'
        ' printf "%s {\\n rotate 50\\n size 1\\n copytruncate\\n su root root\\n}\\n" "$PWD/b.log" >>'
        " conf; chmod 644 conf;"
        " for n in 1 2 3; do for i in $(seq 50); do echo $n-$i >> a.log; echo $n-$i >> b.log; done;"
        " /usr/sbin/logrotate -s state conf; done",
    )
    lines = "{ zcat a.log.*.gz; cat a.log.1; cat a.log 2> /dev/null; } | sort -u | wc -l;"
    lines += " cat b.log* | sort -u | wc -l"
    assert sh(twice.top, lines).split() == ["150", "150"]
    there = twice.again()
    assert sh(there, lines).split() == ["150", "150"]


def test_what_inotify_tells(twice: Twice) -> None:
    """What is done through the mount itself, in order;"
    " nothing of what comes from elsewhere (docs/posix.md)."""
    work = twice.top / "work"
    work.mkdir()
    watcher = subprocess.Popen(
        ["inotifywait", "-q", "-m", "-r", "--format", "%e %f", str(work)], stdout=subprocess.PIPE, text=True
    )
    told: list[str] = []
    assert watcher.stdout is not None
    stream = watcher.stdout
    reader = threading.Thread(target=lambda: told.extend(line.strip() for line in stream))
    reader.start()
    try:
        wait_for(lambda: (work / "ready").touch() or told, 60, "the watch to begin", every=0.2)  # type: ignore[func-returns-value]
        sh(work, "echo x > f; echo y >> f; chmod 600 f; mv f g; ln g h; rm h; mkdir d; rmdir d; : > g; rm g")
        other = twice.boxes[1]
        twice.boxes[0].drain()
        other.mount()
        (other.mountpoint / "work" / "elsewhere").write_text("x")
        other.drain()
        wait_for((work / "elsewhere").exists, 60, "the other's file")
        (work / "end").touch()
        wait_for(lambda: any("end" in line for line in told), 60, "the last event")
    finally:
        watcher.kill()
        watcher.wait()
        reader.join()
    for event in ("CREATE f", "MODIFY f", "CLOSE_WRITE,CLOSE f", "ATTRIB f", "MOVED_FROM f", "MOVED_TO g",
                  "CREATE h",
                  "DELETE h", "CREATE,ISDIR d", "DELETE,ISDIR d", "DELETE g"):  # fmt: skip
        assert event in told, (event, told)
    assert not any("elsewhere" in line for line in told)


def test_package_managers_side_by_side(twice: Twice, tmp_path: Path) -> None:
    """Two installations into one directory tree at once, by pip into a venv and by npm with its cache on the
    mount, and npm once more from the cache in the other sandbox."""
    sh(
        twice.top,
        'mkdir js && echo \'{"name":"x","version":"1.0.0","dependencies":{"lodash":"4"}}\' > js/package.json;'
        ' export npm_config_cache="$PWD/cache"; (cd js;'
        " npm install --no-audit --no-fund --loglevel=error) & first=$!;"
        ' "$1" -m venv venv;'
        " venv/bin/pip -q --disable-pip-version-check --cache-dir pip-cache install click idna six attrs;"
        " wait $first;"
        " cd js; node -e 'require(\"lodash\").chunk([1, 2], 1)';"
        " ../venv/bin/python -c 'import click, idna, six, attrs'; ../venv/bin/pip check",
        sys.executable,
        timeout=600,
    )
    there = twice.again()
    sh(
        there,
        'export npm_config_cache="$PWD/cache"; cd js; rm -r node_modules;'
        " npm ci --prefer-offline --no-audit --no-fund --loglevel=error;"
        " node -e 'require(\"lodash\").chunk([1, 2], 1)';"
        " PYTHONPATH=../venv/lib/python3.11/site-packages \"$1\" -c 'import click, idna, six, attrs'",
        sys.executable,
        timeout=600,
    )


def test_a_build_with_hard_links(twice: Twice) -> None:
    """cargo's way: outputs in `deps`, hard-linked into place; incremental state in renamed directories; a
    build that is up to date stays so in the other sandbox, by nanoseconds."""
    cargo = shutil.which("cargo") or os.path.expanduser("~/.cargo/bin/cargo")
    assert os.path.exists(cargo), "cargo is not installed"
    sh(
        twice.top,
        "mkdir -p app/src; cd app;"
        ' printf \'[package]\\nname = "app"\\nversion = "0.1.0"\\nedition = "2021"\\n\' > Cargo.toml;'
        ' for n in $(seq 8); do echo "pub fn f() -> u32 { $n }" > src/m$n.rs;'
        ' echo "mod m$n;" >> src/main.rs; done;'
        ' echo "fn main() { println!(\\"{}\\", m1::f() + m8::f()); }" >> src/main.rs;'
        ' "$1" build --offline -q; target/debug/app | grep -qx 9;'
        ' test $(stat -c %h target/debug/app) = 2; "$1" build --offline 2>&1 | grep -q Finished;'
        " touch -r target/debug/app mark",
        cargo,
        timeout=600,
    )
    there = twice.again() / "app"
    told = sh(
        there,
        'CARGO_LOG=cargo::core::compiler::fingerprint=info "$1" build --offline 2>&1; target/debug/app',
        cargo,
        timeout=600,
    )
    assert told.endswith("9")
    # The path of the sources is another there, which is all that may make it build again.
    sh(
        there,
        'sed -i s/8/9/ src/m8.rs; "$1" build --offline -q; target/debug/app | grep -qx 10',
        cargo,
        timeout=600,
    )
