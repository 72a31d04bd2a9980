"""What every peer is given: random bytes, a tar of small files, a git repository. Made once, kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIT = {
    "GIT_AUTHOR_NAME": "bench",
    "GIT_AUTHOR_EMAIL": "bench@localhost",
    "GIT_COMMITTER_NAME": "bench",
    "GIT_COMMITTER_EMAIL": "bench@localhost",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}
LARGEST = 2 * MIB  # a "small file" of the tar is smaller


@dataclass(frozen=True, slots=True)
class Inputs:
    """Paths of what was made. `files` is the number of files in `tar`."""

    data: Path
    mib: int
    tar: Path
    files: int
    repo: Path


def make(work: Path, *, mib: int = 256, files: int = 3000) -> Inputs:
    """Have the inputs below `work`."""
    work.mkdir(parents=True, exist_ok=True)
    data, repo = work / f"data-{mib}.bin", work / "repo.git"
    if not data.exists():
        _random_bytes(data, mib)
    if not repo.exists():
        _repository(repo)
    return Inputs(data, mib, tree(work, files), files, repo)


def tree(work: Path, files: int) -> Path:
    """A tar of `files` files of the Python library below `tree/`."""
    tar = work / f"tree-{files}.tar"
    if not tar.exists():
        part = tar.with_suffix(".part")
        with tarfile.open(part, "w") as archive:
            for source, name in _named(files):
                archive.add(source, arcname=name)
        part.rename(tar)
    return tar


def _random_bytes(path: Path, mib: int) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        for _ in range(mib):
            out.write(os.urandom(MIB))
    part.rename(path)


def _library() -> list[Path]:
    found: list[Path] = []
    for base, directories, names in os.walk(sysconfig.get_paths()["stdlib"]):
        directories[:] = sorted(set(directories) - {"__pycache__", "dist-packages", "site-packages"})
        for name in sorted(names):
            path = Path(base, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size < LARGEST:
                found.append(path)
    return found


def _named(files: int) -> Iterator[tuple[Path, str]]:
    """The library again and again under numbered directories, until there are `files`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    library = _library()
    for at in range(files):
        path = library[at % len(library)]
        yield path, f"tree/{at // len(library)}/{path.relative_to(root)}"


def _repository(repo: Path) -> None:
    """1,000 files in 20 directories, ten commits."""
    source, part = repo.with_suffix(".source"), repo.with_suffix(".part")
    for stale in (source, part):
        shutil.rmtree(stale, ignore_errors=True)
    environment = {**os.environ, **GIT}

    def git(*argv: str) -> None:
        subprocess.run(["git", *argv], check=True, env=environment, timeout=300, capture_output=True)

    git("init", "-q", "-b", "main", os.fspath(source))
    for commit in range(10):
        for at in range(100):
            directory = source / f"d{at % 20}"
            directory.mkdir(exist_ok=True)
            (directory / f"f{commit}-{at}.txt").write_text(f"commit {commit}, file {at}\n" * (20 + at))
        git("-C", os.fspath(source), "add", "-A")
        git("-C", os.fspath(source), "commit", "-qm", f"commit {commit}")
    git("clone", "-q", "--bare", "--no-hardlinks", os.fspath(source), os.fspath(part))
    part.rename(repo)
    shutil.rmtree(source)
