"""Ordinary tools on the mount, each looked at again in another sandbox after unmount and loss of the first.

tests/kernel/test_mount.py has shorter runs of tar, rsync, git, sqlite3, an editor's save and mmap; here are
those that need more: a collected and packed clone, a wheel installed into a venv, databases with two and with
eight writers in both journal modes, archives and copies with links, times and attributes, a program built by
make, npm's tree of packages, an editor killed before it saved, and a mapping shared by two processes.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.twice import GIT, Twice, sh
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

PYTHON_LIB = Path(os.__file__).parent


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
        f" {GIT} commit -qm topic; {GIT} gc -q; {GIT} fsck --strict; silent {GIT} status --porcelain;"
        f" {GIT} checkout -q main; test -d json; {GIT} merge -q topic; {GIT} branch -qd topic;"
        f" {GIT} worktree add -q ../tree v1; {GIT} stash list; {GIT} repack -adq; {GIT} prune; {GIT} fsck",
    )
    head = sh(work, f"{GIT} rev-parse HEAD")
    seen = twice.again() / "work"
    assert sh(seen, f"{GIT} rev-parse HEAD") == head
    sh(
        seen,
        f"{GIT} fsck --strict; silent {GIT} status --porcelain; test ! -d json;"
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


@pytest.mark.root
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


@pytest.mark.root
def test_rsync_both_ways(twice: Twice, tmp_path: Path) -> None:
    """A second run finds nothing to do, on the mount, in the other sandbox, and back on the disk."""
    made = source(tmp_path)
    nothing = 'silent rsync -aHXSic --delete "$1/" "$2/"'
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


@pytest.mark.long
def test_git_rebase_worktree_and_bisect(twice: Twice, tmp_path: Path) -> None:
    """A branch moved onto another's end, a second working tree, and a search run by a script; a rebase that
    stopped at a conflict is gone on with in the other sandbox."""
    repo = twice.top / "repo"
    repo.mkdir()
    sh(
        repo,
        f"{GIT} init -q .; for i in $(seq 20); do echo $i > n; mkdir -p d$i; echo $i > d$i/f; {GIT} add .;"
        f" {GIT} commit -qm $i; done; {GIT} checkout -qb topic HEAD~10;"
        f" for i in $(seq 5); do echo $i > t$i; {GIT} add .; {GIT} commit -qm t$i; done;"
        f" {GIT} rebase -q main; test $({GIT} rev-list --count HEAD) = 25; {GIT} fsck --strict;"
        f" {GIT} worktree add -q ../beside main; echo beside > ../beside/b; cd ../beside; {GIT} add b;"
        f" {GIT} commit -qm beside; cd ../repo; {GIT} gc -q --prune=now; {GIT} fsck --strict;"
        f" {GIT} bisect start main main~19 > found; {GIT} bisect run sh -c 'test $(cat n) -lt 13' > found;"
        f" grep -q 'is the first bad commit' found; {GIT} show -s --format=%s refs/bisect/bad | grep -qx 13;"
        f" {GIT} bisect reset > found 2>&1; rm found; {GIT} checkout -qb clash main~3; echo clash > n;"
        f" {GIT} commit -qam clash;"
        f" ! {GIT} rebase -q main; grep -q '<<<<' n; {GIT} worktree list | grep -c . | grep -qx 2",
    )
    seen = twice.again() / "repo"
    sh(
        seen,
        f"echo both > n; {GIT} add n; GIT_EDITOR=true {GIT} rebase --continue;"
        f" test $({GIT} rev-list --count HEAD) = 22; {GIT} fsck --strict;"
        f" silent {GIT} status --porcelain; {GIT} worktree repair ../beside; cd ../beside;"
        f" silent {GIT} status --porcelain; {GIT} log -1 --format=%s | grep -qx beside",
    )


def program(top: Path) -> Path:
    """A C program of 60 files with a header each, and a Makefile that knows who includes what."""
    made = top / "program"
    made.mkdir()
    for n in range(60):
        (made / f"part{n}.h").write_text(f"int part{n}(int);\n#define VALUE{n} {n}\n")
        uses = f'#include "part{n + 1}.h"\n' if n < 59 else ""
        more = f" + part{n + 1}(x)" if n < 59 else ""
        (made / f"part{n}.c").write_text(
            f'#include "part{n}.h"\n{uses}int part{n}(int x) {{ return x * VALUE{n}{more}; }}\n'
        )
    (made / "main.c").write_text(
        '#include <stdio.h>\n#include "part0.h"\nint main(void) { printf("%d\\n", part0(2)); return 0; }\n'
    )
    (made / "Makefile").write_text(
        "OBJ := $(patsubst %.c,%.o,$(wildcard *.c))\n"
        "prog: libparts.a main.o\n\t$(CC) -o $@ main.o libparts.a\n"
        "libparts.a: $(filter-out main.o,$(OBJ))\n\trm -f $@\n\tar rcs $@ $^\n"
        "%.o: %.c\n\t$(CC) -O1 -MMD -c -o $@ $<\n-include $(OBJ:.o=.d)\n"
    )
    return made


@pytest.mark.long
def test_make_builds_once_and_only_what_changed(twice: Twice) -> None:
    """What is up to date here is up to date in the other sandbox: times keep their nanoseconds."""
    made = program(twice.top)
    sh(made, "make -j4 > log; test $(grep -c -- -c log) -ge 61; make -q prog", timeout=300)
    assert sh(made, "./prog") == str(2 * sum(range(60)))
    sh(made, "touch part7.h; make | grep -c MMD | grep -qx 2; make -q prog")
    there = twice.again() / "program"
    assert sh(there, "make -q prog; ./prog") == str(2 * sum(range(60)))
    sh(there, "sed -i s/VALUE9\\ 9/VALUE9\\ 10/ part9.h; make | grep -c MMD | grep -qx 2")
    assert sh(there, "./prog; make -q prog") == str(2 * (sum(range(60)) + 1))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_npm_installs_a_real_tree(twice: Twice) -> None:
    """The TypeScript client's own dependencies, by their lock file; its compiler works in both sandboxes."""
    client = Path(__file__).resolve().parents[2] / "clients" / "typescript"
    work = twice.top / "work"
    sh(
        twice.top,
        'mkdir work; cd "$1"; tar cf - --exclude=node_modules --exclude=dist . | tar xf - -C "$2"',
        client,
        work,
    )
    sh(work, "CI=1 npm ci --ignore-scripts --no-audit --no-fund; npm ls --all > /dev/null", timeout=280)
    listing = 'cd node_modules; find . -printf "%p %y %m %s %l %T@\\n" | sort | sha256sum; find . | wc -l'
    before = sh(work, listing)
    assert int(before.split()[-1]) > 100
    sh(work, "node_modules/.bin/tsc --noEmit -p .", timeout=120)
    there = twice.again() / "work"
    assert sh(there, listing) == before
    sh(there, "npm ls --all > /dev/null; node_modules/.bin/tsc --noEmit -p .", timeout=120)
    sh(there, "rm -r node_modules; test ! -e node_modules")


@pytest.mark.root
@pytest.mark.long
def test_rsync_with_acls_asked_for(twice: Twice, tmp_path: Path) -> None:
    """`-A` of files without ACLs copies both ways and finds nothing to do a second time."""
    made = source(tmp_path)
    nothing = 'silent rsync -aHAXSic --delete "$1/" "$2/"'
    target = twice.top / "copy"
    sh(twice.top, f'rsync -aHAXS "$1/" "$2/"; {nothing}', made, target)
    there = twice.again() / "copy"
    back = tmp_path / "back"
    sh(there, f'rsync -aHAXS "$1/" "$2/"; {nothing}', there, back)
    sh(back, nothing, made, back)


@pytest.mark.long
def test_vim_recovers_what_was_not_saved(twice: Twice) -> None:
    """A killed editor's swap file gives the text back, here and in the other sandbox."""
    text = twice.top / "text"
    text.write_text("first\n")
    swap = twice.top / ".text.swp"
    with subprocess.Popen(
        ["vim", "-u", "NONE", "-n", "-es", "-c", "set swapfile updatecount=1 directory=.", "text"],
        cwd=twice.top,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as editor:
        assert editor.stdin is not None
        editor.stdin.write("call append(1, 'not saved')\npreserve\ncall writefile(['x'], 'ready')\n")
        editor.stdin.flush()
        wait_for((twice.top / "ready").exists, 30, "the editor to write its swap file")
        assert swap.exists()
        editor.kill()
    assert text.read_text() == "first\n"
    recover = "vim -u NONE -es -r text -c 'w! '\"$1\" -c 'qa!' < /dev/null > /dev/null || true; cat \"$1\""
    assert sh(twice.top, recover, "here") == "first\nnot saved"
    there = twice.again()
    assert sh(there, recover, "there") == "first\nnot saved"
    sh(
        there,
        "rm .text.swp; vim -u NONE -es text -c '1d' -c 'wq' < /dev/null; test ! -s text; test ! -e .text.swp",
    )


def test_a_mapping_is_one_memory_for_two_processes(twice: Twice) -> None:
    """They take turns: each sees the other's stores at once, and one's write(2) in the other's mapping."""
    script = """
import mmap, os, sys, time
me, path = int(sys.argv[1]), sys.argv[2]
fd = os.open(path, os.O_RDWR)
m = mmap.mmap(fd, 3 * mmap.PAGESIZE)
end = time.monotonic() + 60
for n in range(1, 100):
    if n % 2 == me:
        os.pwrite(fd, b"w%06d" % n, mmap.PAGESIZE - 3)  # over the edge of a page
        m[2 * mmap.PAGESIZE:2 * mmap.PAGESIZE + 7] = b"m%06d" % n
        m[0] = n
    else:
        while m[0] != n:
            assert time.monotonic() < end, (n, m[0])
            time.sleep(0)
        assert m[mmap.PAGESIZE - 3:mmap.PAGESIZE + 4] == b"w%06d" % n, n
        assert os.pread(fd, 7, 2 * mmap.PAGESIZE) == b"m%06d" % n, n
"""
    path = twice.top / "map"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    players = [subprocess.Popen([sys.executable, "-c", script, str(me), path]) for me in (0, 1)]
    assert [player.wait(90) for player in players] == [0, 0]
    data = path.read_bytes()
    assert data[0] == 99 and data[2 * mmap.PAGESIZE :][:7] == b"m000099"
    assert (twice.again() / "map").read_bytes() == data


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_sqlite_with_eight_processes(twice: Twice, mode: str) -> None:
    sh(twice.top, f"sqlite3 db 'pragma journal_mode={mode}; create table t(who integer, n integer, pad)'")
    writer = (
        'for n in $(seq 20); do sqlite3 -cmd ".timeout 120000" db'
        ' "insert into t values($1, $n, randomblob(3000))"; done'
    )
    writers = [subprocess.Popen(["bash", "-euc", writer, "-", str(who)], cwd=twice.top) for who in range(8)]
    assert [one.wait(300) for one in writers] == [0] * 8
    check = "sqlite3 db 'pragma integrity_check; select count(*), count(distinct who * 100 + n) from t'"
    assert sh(twice.top, check).split() == ["ok", "160|160"]
    there = twice.again()
    assert sh(there, check).split() == ["ok", "160|160"]
