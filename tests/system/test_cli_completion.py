"""Completion in shells."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["fsd", "moun"], {"mount", "mounts"}),
        (["fsd", "journal", "ver"], {"verify"}),
        (["fsd", "journal", "append", "--entry-j"], {"--entry-json"}),
        (["fsd", "cp", "--rec"], {"--recursive"}),
    ],
)
def test_completion_in_bash(typed: list[str], offered: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in typed)
    script = (
        f'eval "$({sys.executable} -m fsd completion bash)"; COMP_WORDS=({words}); '
        f'COMP_CWORD={len(typed) - 1}; _fsd; printf "%s\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=30, check=True, text=True)
    assert set(done.stdout.split()) == offered
