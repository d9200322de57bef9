"""`dpdist serve` under load, against the bare loop: as many processes that do nothing but answer.

    python benchmarks/serving.py [RELEASE] [--replicas 1] [--clients 100] [--draws 1000] [--quick]

Both in interleaved rounds on the same CPUs, so that whatever else the machine does slows both; the
server has its clients beside it, the loop has nobody. The median of the rounds' ratios is what
counts. Without RELEASE: small ones on 8 x 8 digits, made here. Needs `pip install "dpdist[serve]"`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from _common import parse_arguments, scratch_folder, train_small_run

import dpdist
from dpdist import pipeline
from dpdist.publishing import write_release
from dpdist.runs.folder import RunFolder
from dpdist.serving.app import RequestLimits
from dpdist.serving.deployment import ServingSettings, deploy_release

MODELS = ("linear", "small-cnn")
IMAGES, PORT = 40, 8017


def made(model: str) -> Path:
    """A release of a model trained for a few steps."""
    recipe = {
        "data": {"name": "digits"},
        "model": model,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 50, "steps": 20, "learning_rate": 0.5},
        "certify": {"sigma": 0.25, "n": 100, "max_inputs": 1},
    }
    path = scratch_folder() / f"{model}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    folder = RunFolder(train_small_run(str(path), {}))
    write_release(folder)
    return folder.release_folder


class Loop:
    """The bare loop of one process."""

    def __init__(self, release: Path, draws: int) -> None:
        found = dpdist.load(release)
        self._answer = found.answerer(n=draws)
        self._images = images(tuple(found.spec.input_shape))
        self.answers(0.5)

    def answers(self, seconds: float) -> float:
        """Per second."""
        began, done = time.monotonic(), 0
        while (spent := time.monotonic() - began) < seconds:
            self._answer(self._images[done % IMAGES])
            done += 1
        return done / spent


def images(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).random((IMAGES, *shape)).round(4)


async def ask(address: str, clients: int, seconds: float) -> dict[str, Any]:
    """So many at once, each of whom asks again when it has its answer."""
    import aiohttp

    about = json.loads(await _get(address))
    bodies = [json.dumps({"input": image.tolist()}).encode() for image in images(
        tuple(about["input_shape"]))]  # fmt: skip
    waited: list[float] = []
    statuses: dict[int, int] = {}
    kind = {"content-type": "application/json"}
    began = time.monotonic()

    async def client(k: int) -> None:
        while time.monotonic() < began + seconds:
            asked = time.monotonic()
            async with session.post(
                f"{address}/predict", data=bodies[k % IMAGES], headers=kind
            ) as reply:
                await reply.read()
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
            waited.append(time.monotonic() - asked)
            k += clients

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*map(client, range(clients)))
    waited.sort()
    return {
        "rate": len(waited) / (time.monotonic() - began),
        "half": waited[len(waited) // 2],
        "most": waited[int(len(waited) * 0.99)],
        "statuses": statuses,
        "asked": len(waited),
    }


async def _get(address: str) -> bytes:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(address) as reply:
        return await reply.read()


def asked(address: str, clients: int, seconds: float) -> dict[str, Any]:
    """`ask` by a process of its own."""
    command = [sys.executable, __file__, "--ask", address, str(clients), str(seconds)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def spent() -> dict[str, float]:
    """Processor seconds of the processes of this session, by what they are."""
    sums: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        name = " ".join(process.cmdline()).strip()
        if "Classifier" in name:
            times = process.cpu_times()
            sums["Classifier"] = sums.get("Classifier", 0.0) + times.user + times.system
    return sums


@contextmanager
def loops(release: Path, arguments: argparse.Namespace) -> Iterator[list[Any]]:
    import ray

    kind = ray.remote(num_cpus=0)(Loop)
    found = [kind.remote(release, arguments.draws) for _ in range(arguments.replicas)]
    yield found
    for actor in found:
        ray.kill(actor)


def measure(release: Path, arguments: argparse.Namespace) -> None:
    import ray

    found = dpdist.load(release)
    limits = RequestLimits(
        requests_per_second=1e6,
        burst_size=10**6,
        max_concurrent=10 * arguments.clients,
        timeout_seconds=60,
    )
    serving = ServingSettings(
        release.resolve(), None, None, arguments.draws, 0.001, arguments.replicas, limits
    )
    with (
        pipeline.run_session(None, arguments.replicas, "ray"),
        deploy_release(found, serving, "127.0.0.1", PORT) as address,
        loops(release.resolve(), arguments) as bare,
    ):
        asked(address, arguments.clients, 2)
        ratios, rates, cpu, answers = [], [], {}, []
        for _ in range(arguments.rounds):
            alone = sum(ray.get([loop.answers.remote(arguments.seconds) for loop in bare]))
            before = spent()
            reply = asked(address, arguments.clients, arguments.seconds)
            for name, seconds in spent().items():
                cpu[name] = cpu.get(name, 0.0) + seconds - before.get(name, 0.0)
            ratios.append(reply["rate"] / alone)
            rates.append((reply["rate"], alone))
            answers.append(reply)
    total = sum(reply["asked"] for reply in answers)
    statuses = {status for reply in answers for status in reply["statuses"]}
    rate, alone = (statistics.median(column) for column in zip(*rates, strict=True))
    print(
        f"{found.name}: {arguments.draws} draws, {arguments.replicas} replicas, "
        f"{arguments.clients} clients: {rate:.0f} answers/s, bare loop {alone:.0f}/s: "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"half within {statistics.median(r['half'] for r in answers):.2f} s, 99 % within "
        f"{statistics.median(r['most'] for r in answers):.2f} s; statuses {sorted(statuses)}"
    )
    each = ", ".join(f"{name} {1000 * seconds / total:.2f}" for name, seconds in cpu.items())
    print(f"  milliseconds of processor time an answer: {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="?", type=Path)
    for name, value in (("replicas", 1), ("clients", 100), ("draws", 1000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a half round")
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=MODELS, help="of the releases made here")
    tiny = {"clients": 2, "draws": 10, "rounds": 1, "seconds": 0.5, "models": MODELS[:1]}
    arguments = parse_arguments(parser, tiny)
    if arguments.ask:
        address, clients, seconds = arguments.ask
        print(json.dumps(asyncio.run(ask(address, int(clients), float(seconds)))))
        return
    if arguments.release:
        measure(arguments.release, arguments)
        return
    for model in arguments.models:
        measure(made(model), arguments)


if __name__ == "__main__":
    main()
