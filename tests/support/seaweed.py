"""SeaweedFS's S3 server from PyPI, on free loopback ports, for one test session."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fsd.blobs.s3 import S3Options

from support.processes import die_with_parent, free_ports, server_directory, stop, tail
from support.wait import wait_for


class SeaweedServer:
    """Master, volume, filer and S3 gateway in one process, with one key pair."""

    def __init__(self) -> None:
        found = Path(sys.executable).parent / "weed"
        assert found.exists(), "SeaweedFS is not installed: run scripts/setup"
        self._weed = found
        self._root = server_directory("s3")
        self._log = self._root / "log"
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(16)
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        config = self._root / "s3.json"
        credential = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List"]
        config.write_text(
            json.dumps({"identities": [{"name": "fsd", "credentials": [credential], "actions": actions}]})
        )
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
        names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        command = [str(self._weed), "server", "-dir", str(self._root), "-ip", "127.0.0.1", "-s3", "-filer"]
        command += ["-s3.config", str(config), "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
        command += ["-s3.iam=false", "-volume.max", "20"]
        command += ["-master.volumeSizeLimitMB", "64", "-master.electionTimeout", "1s"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._root,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        wait_for(self._answers, 60, "SeaweedFS to start", every=0.1)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"SeaweedFS ended: {tail(self._log)}"
        try:
            urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=2).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process, signal.SIGKILL)  # asked nicely it takes ten seconds

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._root)


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    server = SeaweedServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def seaweed_bucket(seaweed_server: SeaweedServer) -> S3Options:
    """A bucket for the session; a test takes a prefix of its own."""
    import boto3  # slow to load, and few tests want it

    from fsd.blobs.s3 import S3Options

    options = S3Options(
        bucket="fsd-test",
        endpoint=seaweed_server.endpoint,
        access_key=seaweed_server.access_key,
        secret_key=seaweed_server.secret_key,
    )
    boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        region_name=options.region,
    ).create_bucket(Bucket=options.bucket)
    return options
