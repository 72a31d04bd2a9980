"""Ordinary tools on the mount, each looked at again in another sandbox after unmount and loss of the first.

tests/kernel/test_mount.py has shorter runs of tar, rsync, git, sqlite3, an editor's save and mmap; here are
those that need more: a collected and packed clone, a wheel installed into a venv, databases with two writers
in both journal modes, archives and copies with links, times and attributes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]

PYTHON_LIB = Path(os.__file__).parent


class Twice:
    """Work in one sandbox, then `again` in another at another path, the first being lost."""

    def __init__(self, server: Server, base: Path) -> None:
        fs = server.create()
        self.boxes = [Sandbox(base / name, fs) for name in ("first", "second")]
        self.boxes[0].mount()

    @property
    def top(self) -> Path:
        return self.boxes[0].mountpoint

    def again(self) -> Path:
        answer = self.boxes[0].unmount()
        assert answer["pending"] == {"operations": 0, "files": 0, "bytes": 0}
        self.boxes[0].lose()
        self.boxes[1].mount()
        return self.boxes[1].mountpoint

    def close(self) -> None:
        for box in self.boxes:
            box.close()


@pytest.fixture
def twice(trusted: Server, tmp_path: Path) -> Iterator[Twice]:
    made = Twice(trusted, tmp_path)
    try:
        yield made
    finally:
        made.close()


def sh(directory: Path, script: str, *argv: object, timeout: float = 90) -> str:
    """`script` in `directory` with `argv` as $1 and so on; fails with what it said."""
    done = subprocess.run(
        ["bash", "-euc", script, "-", *map(str, argv)],
        cwd=directory,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout.strip()


GIT = "git -c user.name=n -c user.email=e@example.org -c init.defaultBranch=main -c safe.directory='*'"


def test_git_clone_commit_gc_and_fsck(twice: Twice, tmp_path: Path) -> None:
    """A clone from a disk, worked in, packed and collected; then used from another sandbox."""
    origin = tmp_path / "origin"
    origin.mkdir()
    sh(
        origin,
        f"{GIT} init -q .; cp -r $1/email $1/json .; {GIT} add .; {GIT} commit -qm base;"
        f" for i in $(seq 15); do echo $i > n; {GIT} add n; {GIT} commit -qm $i; done; {GIT} tag v1",
        PYTHON_LIB,
    )
    sh(twice.top, f"{GIT} clone -q $1 work", origin)
    work = twice.top / "work"
    sh(
        work,
        f"{GIT} fsck --strict; {GIT} checkout -qb topic; rm -r json; echo new > email/new.txt; {GIT} add -A;"
        f' {GIT} commit -qm topic; {GIT} gc -q; {GIT} fsck --strict; test -z "$({GIT} status --porcelain)";'
        f" {GIT} checkout -q main; test -d json; {GIT} merge -q topic; {GIT} branch -qd topic;"
        f" {GIT} worktree add -q ../tree v1; {GIT} stash list; {GIT} repack -adq; {GIT} prune; {GIT} fsck",
    )
    head = sh(work, f"{GIT} rev-parse HEAD")
    seen = twice.again() / "work"
    assert sh(seen, f"{GIT} rev-parse HEAD") == head
    sh(
        seen,
        f'{GIT} fsck --strict; test -z "$({GIT} status --porcelain)"; test ! -d json;'
        f" {GIT} log --oneline | wc -l | grep -qx 17; echo more > email/new.txt; {GIT} commit -qam more",
    )
    # What was committed there can be fetched by the first repository.
    sh(origin, f"{GIT} fetch -q $1 main; test $({GIT} rev-list --count FETCH_HEAD) = 18", seen)


def wheel(directory: Path) -> Path:
    """A wheel with a package, data and a console script."""
    files = {
        "sample/__init__.py": b"from pathlib import Path\n\ndef main():\n"
        b"    print('sample says', (Path(__file__).parent / 'data.txt').read_text())\n",
        "sample/__main__.py": b"from sample import main\nmain()\n",
        "sample/data.txt": b"data",
        **{f"sample/module_{n}.py": b"VALUE = %d\n" % n for n in range(40)},
        "sample-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n",
        "sample-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "sample-1.0.dist-info/entry_points.txt": b"[console_scripts]\nsample = sample:main\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    made = directory / "sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in {**files, "sample-1.0.dist-info/RECORD": record.encode() + b",,\n"}.items():
            archive.writestr(name, data)
    return made


def test_pip_install_into_a_venv(twice: Twice, tmp_path: Path) -> None:
    sh(twice.top, '"$1" -m venv --without-pip venv', sys.executable)
    pip = '"$1" -m pip --disable-pip-version-check -q --no-cache-dir --python "$2"/bin/python'
    sh(
        twice.top,
        f"{pip} install --no-index --no-deps $3; {pip} check; venv/bin/sample",
        sys.executable,
        twice.top / "venv",
        wheel(tmp_path),
    )
    venv = twice.again() / "venv"
    assert sh(
        venv, 'bin/python -m sample; bin/python -c "from sample import module_39 as m; print(m.VALUE)"'
    ) == ("sample says data\n39")
    # Installed files are as the record of the installation says.
    checked = sh(
        venv,
        'bin/python - <<"END"\n'
        "import base64, hashlib, importlib.metadata as m\n"
        "files = [f for f in m.files('sample') if f.hash]\n"
        "for f in files:\n"
        "    got = base64.urlsafe_b64encode(hashlib.sha256(f.read_binary()).digest()).rstrip(b'=').decode()\n"
        "    assert got == f.hash.value, f\n"
        "print(len(files))\n"
        "END",
    )
    assert int(checked) >= 46
    sh(
        venv,
        f"{pip} uninstall -y sample; test ! -e lib/python3.11/site-packages/sample",
        sys.executable,
        venv,
    )


@pytest.mark.parametrize("mode", ["delete", "wal", pytest.param("truncate", marks=pytest.mark.long)])
def test_sqlite_with_two_writers(twice: Twice, mode: str) -> None:
    """Every transaction of both is there, and the database is whole in the other sandbox."""
    script = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for n in range(25):
    db.execute("begin immediate")
    (before,) = db.execute("select coalesce(sum(n), 0) from t").fetchone()
    db.execute("insert into t values (?, ?, ?)", (sys.argv[2], n, "x" * 3000))
    (after,) = db.execute("select sum(n) from t").fetchone()
    assert after == before + n, "not isolated"
    db.execute("rollback" if n % 5 == 4 else "commit")
"""
    path = twice.top / "db"
    sh(twice.top, f"sqlite3 db 'pragma journal_mode={mode}; create table t(who, n integer, pad)'")
    writers = [subprocess.Popen([sys.executable, "-c", script, path, who]) for who in "ab"]
    for writer in writers:
        assert writer.wait(90) == 0
    check = (
        "sqlite3 db 'pragma integrity_check; select who, count(*) from t group by who; pragma journal_mode'"
    )
    wanted = ["ok", "a|20", "b|20", mode if mode == "wal" else "delete"]
    assert sh(twice.top, check).split() == wanted
    there = twice.again()
    assert sh(there, check).split() == wanted
    sh(there, "sqlite3 db 'delete from t where n % 2; vacuum; pragma integrity_check' | grep -qx ok")


def source(top: Path) -> Path:
    """A tree with links, times, modes, owners, attributes, holes and odd names."""
    made = top / "source"
    (made / "sub" / "deep").mkdir(parents=True)
    for number in range(60):
        (made / "sub" / f"f{number}").write_bytes(os.urandom(number * 997))
        os.utime(made / "sub" / f"f{number}", ns=(10**18 + number, 10**18 + number * 7))
    os.link(made / "sub" / "f1", made / "sub" / "deep" / "hard")
    os.symlink("../f2", made / "sub" / "deep" / "soft")
    os.symlink("nowhere", made / "dangling")
    os.mkfifo(made / "fifo", 0o640)
    os.chmod(made / "sub" / "f3", 0o4751)
    os.chown(made / "sub" / "f4", 12, 34)
    os.chmod(made / "sub" / "deep", 0o2770)
    os.setxattr(made / "sub" / "f5", "user.tag", b"\0value")
    with open(made / "holes", "wb") as holes:
        holes.seek(3 << 20)
        holes.write(b"end")
        holes.truncate(5 << 20)
    (made / "odd \n\t'\"\\ \u00e9").write_bytes(b"odd")
    with open(os.fsencode(made) + b"/\xff\xfe", "wb") as odd:
        odd.write(b"bytes")
    os.utime(made / "sub", ns=(10**18, 10**18 + 123))
    return made


def test_tar_both_ways(twice: Twice, tmp_path: Path) -> None:
    """Packed from a disk into the mount, compared there, packed from the mount, compared with the disk."""
    made = source(tmp_path)
    sh(
        twice.top,
        "tar --xattrs --xattrs-include='*' -cf a.tar -C $1 . ; mkdir x;"
        " tar --xattrs --xattrs-include='*' -xpf a.tar -C x; tar -df a.tar -C x",
        made,
    )
    there = twice.again()
    out = tmp_path / "out"
    out.mkdir()
    sh(
        there,
        "tar -df a.tar -C x; tar --xattrs --xattrs-include='*' -cf - -C x . | tar --xattrs -xpf - -C $1",
        out,
    )
    assert sh(out, 'tar -df "$1" -C .', there / "a.tar") == ""
    assert os.getxattr(there / "x" / "sub" / "f5", "user.tag") == b"\0value"
    assert os.stat(there / "x" / "sub" / "f1").st_ino == os.stat(there / "x" / "sub" / "deep" / "hard").st_ino


def test_rsync_both_ways(twice: Twice, tmp_path: Path) -> None:
    """A second run finds nothing to do, on the mount, in the other sandbox, and back on the disk."""
    made = source(tmp_path)
    nothing = 'test -z "$(rsync -aHXSic --delete "$1/" "$2/")"'
    target = twice.top / "copy"
    sh(twice.top, f'rsync -aHXS --delete "$1/" "$2/"; {nothing}', made, target)
    (made / "sub" / "f7").write_bytes(b"changed")
    (made / "sub" / "f8").unlink()
    changed = sh(twice.top, 'rsync -aHXSi --delete "$1/" "$2/"', made, target).splitlines()
    assert len([line for line in changed if "f7" in line or "f8" in line]) == 2
    there = twice.again() / "copy"
    sh(there, nothing, made, there)
    back = tmp_path / "back"
    sh(there, f'rsync -aHXS "$1/" "$2/"; {nothing}', there, back)
    sh(back, nothing, made, back)
