"""A real S3 server on loopback for tests: moto's, in an environment of its own.

    python -m venv .venv/moto && .venv/moto/bin/pip install -r tests/s3-requirements.txt

(of its own, since its botocore wants an older python-dateutil than the project's pins). Looked for
in $DPDIST_MOTO_SERVER, in moto/ of the environment that runs the tests, and on the PATH.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_server() -> str | None:
    """The program, or None when there is none."""
    beside = Path(sys.prefix) / "moto" / "bin" / "moto_server"
    return (
        os.environ.get("DPDIST_MOTO_SERVER")
        or (str(beside) if beside.exists() else None)
        or shutil.which("moto_server")
    )


@contextmanager
def running(program: str) -> Iterator[str]:
    """Start it on a free port; yields http://127.0.0.1:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{program} did not start") from None
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
