from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpdist.cluster.actor_pool import run_chunks
from dpdist.cluster.executor import RayExecutor
from dpdist.cluster.session import Session, connect
from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings
from dpdist.core.errors import ClusterError, InvalidResultsError


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A local session of two CPUs; its log file."""
    log = tmp_path_factory.mktemp("session") / "private" / "ray.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with connect(log, cpus=2):
            yield log


def collect(factory: Any, shared: Any, chunks: list[Chunk], **settings: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def on_result(key: str, result: Any) -> None:
        assert key not in results, "delivered twice"
        results[key] = result

    run_chunks(ChunkJob(factory, shared, chunks, on_result, PoolSettings(**settings)))
    return results


def chunks_of(count: int) -> list[Chunk]:
    return [Chunk(f"c{i}", i, i) for i in range(count)]


def test_an_actor_on_a_host_with_different_code_ends_the_job(monkeypatch):
    """Also on a host that joined after the driver had checked all of them."""
    monkeypatch.setattr(
        "dpdist.cluster.actor_pool.package_fingerprints", lambda _: {"dpdist": "/here:different"}
    )
    executor = RayExecutor(Session("a cluster", 2, 0, 1))
    results: list[str] = []
    job = ChunkJob(lambda _: str, None, chunks_of(3), lambda key, _: results.append(key))
    with pytest.raises(ClusterError, match=r"node [\d.]+: dpdist: "):
        executor.run_chunks(job)
    assert results == []


def test_an_actor_killed_among_thousands_loses_nothing(tmp_path):
    def factory(folder: Path) -> Any:
        def work(payload: int) -> int:
            mark = folder / f"killed-{payload}"
            if payload in (700, 1400) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return payload

        return work

    got = collect(factory, tmp_path, chunks_of(2000), actors=2)
    assert got == {f"c{i}": i for i in range(2000)}
    assert len(list(tmp_path.glob("killed-*"))) == 2


def test_a_hanging_actor_is_done_without(tmp_path):
    """Another one takes its place."""

    def factory(folder: Path) -> Any:
        def work(payload: int) -> int:
            mark = folder / "hung"
            if payload == 3 and not mark.exists():
                mark.touch()
                time.sleep(600)
            return payload

        return work

    got = collect(factory, tmp_path, chunks_of(12), actors=1, stall_seconds=2.0)
    assert got == {f"c{i}": i for i in range(12)}


def test_results_that_do_not_hold_are_not_tried_again(tmp_path):
    """A second attempt might pass the check by chance, and wrong results would be kept."""

    def factory(folder: Path) -> Any:
        def once(payload: int) -> int:
            mark = folder / f"{payload}"
            if payload == 77 and not mark.exists():
                mark.touch()
                raise InvalidResultsError("they do not hold")
            return payload

        return once

    with pytest.raises(InvalidResultsError):
        collect(factory, tmp_path, chunks_of(200), actors=2)
    assert (tmp_path / "77").exists()
