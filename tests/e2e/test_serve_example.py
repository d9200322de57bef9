"""The example that serves a release answers as the release does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import dpdist

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_release.py"


def test_a_release_is_served(golden, tmp_path):
    pytest.importorskip("starlette", reason='Ray Serve is missing: pip install "ray[serve]"')
    folder = golden("release", tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def post(body: bytes) -> tuple[int, dict]:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/", body)
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    image = np.linspace(0, 1, 64).reshape(1, 8, 8)
    command = [sys.executable, EXAMPLE, folder.release_folder, "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        # A shell's background jobs, and what they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as served:  # fmt: skip
        try:
            for _ in range(300):
                try:
                    status, answer = post(json.dumps({"input": image.tolist()}).encode())
                    break
                except (OSError, ValueError):  # not there yet, or no route yet
                    assert served.poll() is None, served.stderr.read().decode()
                    time.sleep(0.3)
            assert status == 200
            wanted = dpdist.load(folder.release_folder).answerer(n=1000)(image)
            assert answer.keys() == wanted.as_json.keys()
            assert (answer["sigma"], answer["norm"], answer["alpha"]) == (0.25, "l2", wanted.alpha)
            assert post(b'{"input": [[1.0]]}')[0] == post(b"no picture")[0] == 400
        finally:
            served.send_signal(signal.SIGINT)
            served.communicate(timeout=60)
