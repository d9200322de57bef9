from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpdist.cluster.actor_pool import _Pool, _Slot, run_chunks
from dpdist.cluster.executor import RayExecutor
from dpdist.cluster.session import Session, connect
from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings
from dpdist.core.errors import ClusterError, InvalidResultsError

pytestmark = pytest.mark.e2e


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


def test_lower_priority_goes_first(tmp_path):
    def factory(log: Path) -> Any:
        def work(payload: int) -> None:
            with open(log, "a") as file:
                file.write(f"{payload}\n")

        return work

    chunks = [Chunk(f"c{i}", i, -i) for i in range(20)]
    collect(factory, tmp_path / "log", chunks, actors=1)
    assert (tmp_path / "log").read_text().split() == [str(i) for i in reversed(range(20))]


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


def test_a_stream_of_chunks_is_read_only_a_little_ahead():
    """A million chunks would not fit in memory with their inputs."""

    def factory(_: None) -> Any:
        return lambda payload: payload

    made, delivered, ahead = 0, 0, 0

    def stream() -> Iterator[Chunk]:
        nonlocal made, ahead
        for i in range(3000):
            made += 1
            ahead = max(ahead, made - delivered)
            yield Chunk(f"c{i}", i, -i)

    def on_result(key: str, result: int) -> None:
        nonlocal delivered
        assert key == f"c{result}"
        delivered += 1

    run_chunks(ChunkJob(factory, None, stream(), on_result, PoolSettings(actors=2)))
    assert delivered == made == 3000
    assert ahead <= 1000 + 2 * 2 + 1


def test_a_failure_among_thousands_is_blamed_on_its_own_chunk():
    def factory(_: None) -> Any:
        def work(payload: int) -> int:
            if payload == 1777:
                raise ValueError("no such pixel")
            return payload

        return work

    with pytest.raises(ClusterError, match="c1777"):
        collect(factory, None, chunks_of(3000), actors=2)


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


def test_chunks_that_grow_long_are_shared_out():
    """No actor keeps long chunks from the other."""

    def factory(_: None) -> Any:
        def work(payload: int) -> int:
            time.sleep(0.3 * (payload >= 1500))
            return os.getpid()

        return work

    got = collect(factory, None, chunks_of(1516), actors=2)
    shares = [list(got.values())[1500:].count(pid) for pid in set(got.values())]
    assert len(shares) == 2 and min(shares) >= 4


def test_a_chunk_waits_for_the_actor_that_has_yet_to_start(tmp_path):
    """Two long chunks are worked on by two actors, though one of these starts late."""

    def seen(mark: Path) -> bool:
        until = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return mark.exists()

    def factory(folder: Path) -> Any:
        try:
            (folder / "started").touch(exist_ok=False)
        except FileExistsError:
            seen(folder / "working-0")

        def work(payload: int) -> bool:
            (folder / f"working-{payload}").touch()
            return seen(folder / f"working-{1 - payload}")

        return work

    assert collect(factory, tmp_path, chunks_of(2), actors=2) == {"c0": True, "c1": True}


def test_an_interrupt_drops_nothing_that_is_finished(tmp_path):
    """Ctrl-C while a result is stored: the calls that end meanwhile are delivered before leaving,
    and the interrupted result is given once more."""

    def factory(folder: Path) -> Any:
        def work(payload: int) -> int:
            (folder / str(payload)).touch()
            return payload

        return work

    results: list[str] = []

    def on_result(key: str, result: int) -> None:
        if not results:
            until = time.monotonic() + 60
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.02)
            results.append("interrupted")
            raise KeyboardInterrupt
        results.append(key)

    with pytest.raises(KeyboardInterrupt):
        run_chunks(ChunkJob(factory, tmp_path, chunks_of(2), on_result, PoolSettings(actors=1)))
    assert results[0] == "interrupted" and sorted(results[1:]) == ["c0", "c1"]


@pytest.mark.parametrize("actors", [1, 2])
def test_a_hanging_actor_is_done_without(tmp_path, actors):
    """Another one takes its place."""

    def factory(folder: Path) -> Any:
        def work(payload: int) -> int:
            mark = folder / "hung"
            if payload == 3 and not mark.exists():
                mark.touch()
                time.sleep(600)
            return payload

        return work

    start = time.monotonic()
    got = collect(factory, tmp_path, chunks_of(12), actors=actors, stall_seconds=2.0)
    assert got == {f"c{i}": i for i in range(12)}
    assert time.monotonic() - start < 300, "it waited for the one that hangs"


def test_results_that_do_not_hold_are_not_tried_again():
    """Whoever tried once more might be lucky, and the results would pass for sound ones."""

    def factory(folder: Path) -> Any:
        def once(payload: int) -> int:
            mark = folder / f"{payload}"
            if payload == 77 and not mark.exists():
                mark.touch()
                raise InvalidResultsError("they do not hold")
            return payload

        return once

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(InvalidResultsError, match=r"^they do not hold$"):
            collect(factory, Path(folder), chunks_of(200), actors=2)
        assert (Path(folder) / "77").exists()


@pytest.mark.parametrize("paused", [False, True])
def test_no_actor_is_blamed_for_a_pause_of_this_process(paused):
    """After a laptop's sleep the clock has gone on, and no actor had a chance to answer."""
    removed: list[_Slot] = []

    class Pool(_Pool):
        def _remove_dead_actor(self, slot: _Slot, error: Exception) -> None:
            removed.append(slot)

    pool, now = Pool(ChunkJob(int, None, [], lambda key, result: None), ()), time.monotonic()
    pool.durations = [0.1]
    pool.slots = [
        _Slot(None, None, is_ready=True, last_result_time=now - 1000, calls={"ref": None})
    ]
    pool.last_stall_check = now - (1000 if paused else 2)
    pool._replace_stalled()
    assert removed == ([] if paused else pool.slots)
    pool.last_stall_check = time.monotonic() - 2
    pool._replace_stalled()  # and is given its time from then on
    assert len(removed) == (0 if paused else 2)
