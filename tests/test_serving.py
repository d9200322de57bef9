"""A release behind HTTP: what one request may do, and what becomes of it when a replica dies."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import ray
from PIL import Image

from dpdist.base.errors import UserError
from dpdist.serving.deployments import require_serve
from dpdist.serving.gate import Gate, Limits, Lost, Reply

SHAPE = (1, 4, 4)
ANSWER = {"label": 3, "abstain": False, "radius": 0.25}


class Replica:
    """Answers what it is told to, in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []

    async def __call__(self, image: np.ndarray) -> dict[str, Any]:
        self.asked.append(image)
        answer = self.answers.pop(0) if self.answers else ANSWER
        if isinstance(answer, BaseException):
            raise answer
        if answer == "never":
            await asyncio.sleep(60)
        return answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def pieces(raw: bytes, size: int = 100) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def ask(
    gate: Gate, raw: bytes = b"", path: str = "/predict", method: str = "POST", **headers: str
) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(gate.reply(method, path, named, pieces(raw)))


def picture(width: int = 4, height: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width), 51, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def numbers(value: Any) -> bytes:
    return json.dumps({"input": value}).encode()


JSON = {"content_type": "application/json; charset=utf-8"}


def test_an_image_and_numbers_are_answered():
    replica = Replica()
    gate = Gate({"name": "x"}, SHAPE, replica)
    assert ask(gate, picture()).status == 200
    reply = ask(gate, numbers(np.full(SHAPE, 0.2).tolist()), **JSON)
    assert reply.status == 200 and json.loads(reply.content) == ANSWER
    assert [image.shape for image in replica.asked] == [SHAPE, SHAPE]
    assert replica.asked[0].dtype == np.uint8 and replica.asked[1].max() == 0.2
    assert json.loads(ask(gate, path="/", method="GET").content) == {"name": "x"}


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        (b"", {}),
        (b"no picture", {}),
        (picture(5), {}),
        (picture()[:-20], {}),
        (numbers([[[0.0] * 4] * 4]), {}),
        (numbers([[[0.0] * 4] * 3]), JSON),
        (numbers([[[0.0] * 4] * 3 + [[0.0]]]), JSON),
        (numbers([[[2.0] * 4] * 4]), JSON),
        (numbers([[["x"] * 4] * 4]), JSON),
        (numbers([[[None] * 4] * 4]), JSON),
        (numbers(3), JSON),
        (b"[" * 400, JSON),
        (b'{"input": [NaN]}', JSON),
        (b'{"input": [1e999]}', JSON),
        (b"\xff\xfe", JSON),
    ],
)
def test_what_is_no_input_is_refused(raw, headers):
    replica = Replica()
    reply = ask(Gate({}, SHAPE, replica), raw, **headers)
    assert reply.status == 400 and "\n" not in json.loads(reply.content)["error"]
    assert not replica.asked


def test_a_picture_of_another_size_is_not_decoded(monkeypatch):
    """A small file may hold very many pixels."""
    raw = picture(4000, 4000)
    assert len(raw) < 2**17
    monkeypatch.setattr(Image.Image, "load", lambda self: 1 / 0)
    reply = ask(Gate({}, SHAPE, Replica()), raw)
    assert reply.status == 400 and "4000 x 4000" in reply.content.decode()


def test_large_bodies_are_refused_whatever_they_say():
    replica = Replica()
    gate = Gate({}, SHAPE, replica, Limits(body=1000, burst=10))
    for raw, headers in (
        (b"x" * 1001, {}),
        (b"x" * 10**6, {"content_length": "10"}),
        (b"", {"content_length": "1001"}),
        (b"", {"content_length": "9" * 400}),
        (b"", {"content_length": "-1"}),
        (b"", {"content_length": "many"}),
    ):
        assert ask(gate, raw, **headers).status == 413
    assert not replica.asked


def test_the_rate_is_limited_and_recovers():
    clock = Clock()
    gate = Gate({}, SHAPE, Replica(), Limits(rate=2.0, burst=3), clock)
    statuses = [ask(gate, picture()).status for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert ask(gate, picture()).headers["retry-after"] == "1"
    clock.now = 1.0
    assert [ask(gate, picture()).status for _ in range(3)] == [200, 200, 429]
    assert ask(gate, path="/", method="GET").status == 200  # costs nothing


def test_a_lost_replica_is_asked_once_more(caplog):
    replica = Replica(Lost("died"), ANSWER)
    gate = Gate({}, SHAPE, replica)
    assert ask(gate, picture()).status == 200 and len(replica.asked) == 2
    replica.answers = [Lost("died"), Lost("died")]
    assert ask(gate, picture()).status == 503 and len(replica.asked) == 4
    assert ask(gate, path="/health", method="GET").status == 503
    assert ask(gate, picture()).status == 200
    assert ask(gate, path="/health", method="GET").status == 200
    replica.answers = [ValueError("a fault of ours")]
    reply = ask(gate, picture())
    assert reply.status == 500 and "a fault of ours" not in reply.content.decode()
    assert "a fault of ours" in caplog.text  # in the server's log, as the reply says
    assert 'dpdist_requests_total{status="503"} 1' in gate.metrics()
    assert "dpdist_repeated_total 2" in gate.metrics()


def test_nothing_hangs():
    gate = Gate({}, SHAPE, Replica("never"), Limits(seconds=0.05))
    assert ask(gate, picture()).status == 503

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    assert asyncio.run(gate.reply("POST", "/predict", {}, silent())).status == 408
    assert "dpdist_under_way 0" in gate.metrics()


def test_too_many_under_way_are_sent_away():
    gate = Gate({}, SHAPE, Replica("never", "never", "never"), Limits(waiting=2, seconds=0.1))

    async def several() -> list[int]:
        asked = [gate.reply("POST", "/predict", {}, pieces(picture())) for _ in range(3)]
        return [reply.status for reply in await asyncio.gather(*asked)]

    assert asyncio.run(several()) == [503, 503, 503]
    assert "dpdist_under_way 0" in gate.metrics()


def test_health_is_looked_up_now_and_then():
    clock, replica = Clock(), Replica()
    gate = Gate({}, SHAPE, replica, clock=clock)
    for _ in range(20):
        assert ask(gate, path="/health", method="GET").status == 200
    assert len(replica.asked) == 1
    clock.now, replica.answers = 6.0, [Lost("died"), Lost("died")]
    assert ask(gate, path="/health", method="GET").status == 503
    clock.now = 12.0
    assert ask(gate, path="/health", method="GET").status == 200


def test_other_paths_and_methods():
    gate = Gate({}, SHAPE, Replica())
    assert ask(gate, path="/elsewhere").status == 404
    assert ask(gate, method="GET").headers["allow"] == "POST"
    assert ask(gate, path="/metrics", method="GET").kind.startswith("text/plain")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delattr(ray, "serve", raising=False)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(
        UserError, match=r"dpdist serve: needs ray.serve .*: pip install 'dpdist\[serve\]'"
    ):
        require_serve()
