"""Programs of the system are found without a look at what else PATH names: that may be the mount itself."""

from __future__ import annotations

import os

import pytest

from fsd.host.programs import installed, program


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where was looked; `umount` is in /usr/bin, `tool` in /mnt/w/bin, nothing is anywhere else."""
    seen: list[str] = []

    def there(path: str, mode: int = 0) -> bool:
        seen.append(path)
        return path in ("/usr/bin/umount", "/mnt/w/bin/tool")

    monkeypatch.setattr(os, "access", there)
    monkeypatch.setattr(os.path, "isfile", there)
    monkeypatch.setenv("PATH", "/mnt/w/bin:bin::/opt/x:/usr/sbin/:/usr/bin:/home/me/bin")
    return seen


def test_the_systems_directories_come_first(looked: list[str]) -> None:
    assert program("umount") == "/usr/bin/umount"
    assert looked == ["/usr/sbin/umount", "/usr/bin/umount", "/usr/bin/umount"]


def test_then_the_others_as_path_has_them(looked: list[str]) -> None:
    assert program("tool") == "/mnt/w/bin/tool"
    assert looked[:3] == ["/usr/sbin/tool", "/usr/bin/tool", "/mnt/w/bin/tool"]


def test_what_is_nowhere(looked: list[str]) -> None:
    with pytest.raises(FileNotFoundError):
        program("nothing")
    assert installed("nothing") is None
    assert [path.rpartition("/")[0] for path in looked[:5]] == [
        "/usr/sbin", "/usr/bin", "/mnt/w/bin", "/opt/x", "/home/me/bin",
    ]  # fmt: skip
