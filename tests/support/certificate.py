"""A certificate for servers of tests, as an operator makes one by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

MAKE: Final = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x "
    "-addext subjectAltName=IP:127.0.0.1,DNS:server.fsd.invalid"
)
NAME: Final = "server.fsd.invalid"  # it stands for this name too, which resolves nowhere


def self_signed(directory: Path) -> tuple[Path, Path]:
    """One for 127.0.0.1 and `NAME` in `directory`, and its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [*MAKE.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    return certificate, key
