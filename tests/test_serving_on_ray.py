"""`dpdist serve` on Ray actors, under a modest load, while a replica dies."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.optional_extras import needs_serve
from support.processes import LOOPBACK, listening_addresses
from support.training import make, train

import dpdist
from dpdist import pipeline
from dpdist.core.errors import ClusterError
from dpdist.publishing import write_release
from dpdist.serving.app import RequestLimits
from dpdist.serving.deployment import ServingSettings, deploy_release

pytestmark = pytest.mark.whole

needs_serve()

DRAWS, REQUESTS, CLIENTS = 2000, 400, 100


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    recipe, folder = make(
        tmp_path_factory.mktemp("runs"), "x", training__steps=20, training__learning_rate=1.0,
        privacy__run_key=None, model="linear", certify={"sigma": 0.25},
    )  # fmt: skip
    train(recipe, folder)
    write_release(folder)
    return folder.release_folder


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def post(address: str, body: bytes) -> tuple[int, dict[str, Any], float]:
    """Status, answer, seconds. Nothing may hang."""
    began = time.monotonic()
    asked = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=90) as reply:
            status, raw = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    return status, json.loads(raw), time.monotonic() - began


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"{address}{path}", timeout=60) as reply:
        return reply.read().decode()


def kill_one() -> None:
    """One of the processes that answer, without a word."""
    tree = psutil.Process().children(recursive=True)
    next(process for process in tree if "Classifier" in " ".join(process.cmdline())).kill()


@pytest.mark.long
def test_nothing_is_served_without_a_session(released):
    """Ray would start one by itself, which listens on every interface."""
    limits = RequestLimits(requests_per_second=10, burst_size=10)
    serving = ServingSettings(released.resolve(), None, None, DRAWS, 0.001, 1, limits)
    deployed = deploy_release(dpdist.load(released), serving, "127.0.0.1", free_port())
    with pytest.raises(ClusterError, match="no session of Ray is open"), deployed:
        pass


@pytest.mark.long
def test_many_clients_and_a_replica_that_dies(released, capsys):
    from sklearn.datasets import load_digits

    images = [image[None] / 16 for image in load_digits().images[:40]]
    found = dpdist.load(released)
    alone = found.answerer(n=DRAWS)
    began = time.monotonic()
    expected = [alone(image).label for image in images]
    bare = len(images) / (time.monotonic() - began)
    limits = RequestLimits(
        requests_per_second=1e6, burst_size=10**6, max_concurrent=1000, timeout_seconds=60
    )
    serving = ServingSettings(released.resolve(), None, None, DRAWS, 0.001, 2, limits)
    bodies = [json.dumps({"input": image.tolist()}).encode() for image in images]
    with (
        pipeline.run_session(None, 2, "ray"),
        deploy_release(found, serving, "127.0.0.1", free_port()) as address,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        assert json.loads(get(address, "/"))["draws"] == DRAWS
        assert listening_addresses(os.getpid()) <= LOOPBACK  # Ray Serve's replicas listened on [::]
        began = time.monotonic()
        first = list(clients.map(lambda k: post(address, bodies[k % 40]), range(REQUESTS)))
        rate = REQUESTS / (time.monotonic() - began)
        pending = [clients.submit(post, address, bodies[k % 40]) for k in range(REQUESTS)]
        time.sleep(0.2)
        kill_one()
        second = [future.result() for future in pending]
        assert json.loads(get(address, "/health")) == {"healthy": True}
        metrics = get(address, "/metrics")
    with capsys.disabled():
        print(f"\nserve: {rate:.1f}/s by 2 replicas, bare loop {bare:.1f}/s", end=" ")
    assert {status for status, _, _ in first} == {200}
    statuses = [status for status, _, _ in second]
    assert set(statuses) <= {200, 503} and statuses.count(200) > REQUESTS // 2
    assert max(seconds for _, _, seconds in first + second) < 75
    for replies in (first, second):
        for k, (status, answer, _) in enumerate(replies):
            # Each is wrong with probability at most 0.001, as is each of those expected: about one
            # pair in 500 may differ where neither abstains.
            if status == 200 and -1 not in (answer["label"], expected[k % 40]):
                wrong = answer["label"] != expected[k % 40]
                assert not wrong or np.isclose(answer["radius"], 0, atol=0.05)
    assert f'dpdist_requests_total{{status="200"}} {REQUESTS + statuses.count(200)}' in metrics
