"""A release behind HTTP: what one request may do, and what becomes of it when a replica dies."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.datasets import png

from dpdist.core.errors import UserError
from dpdist.release.bundle import ReleasedPictures
from dpdist.serving.app import (
    AsgiApplication,
    ReplicaLostError,
    Reply,
    RequestHandler,
    RequestLimits,
    listen,
    start_http_server,
)
from dpdist.serving.deployment import Classifier, RequestBatcher, require_server

pytestmark = pytest.mark.whole

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
    gate: RequestHandler,
    raw: bytes = b"",
    path: str = "/predict",
    method: str = "POST",
    **headers: str,
) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(gate.handle(method, path, named, pieces(raw)))


def picture(width: int = 4, height: int = 4) -> bytes:
    return png(np.full((height, width), 51, dtype=np.uint8))


def numbers(value: Any) -> bytes:
    return json.dumps({"input": value}).encode()


JSON = {"content_type": "application/json; charset=utf-8"}


def test_an_image_and_numbers_are_answered():
    replica = Replica()
    gate = RequestHandler({"name": "x"}, SHAPE, replica)
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
    reply = ask(RequestHandler({}, SHAPE, replica), raw, **headers)
    assert reply.status == 400 and "\n" not in json.loads(reply.content)["error"]
    assert not replica.asked


def test_a_picture_of_another_size_is_not_decoded(monkeypatch):
    """A small file may hold very many pixels."""
    raw = picture(4000, 4000)
    assert len(raw) < 2**17
    monkeypatch.setattr(Image.Image, "load", lambda self: 1 / 0)
    reply = ask(RequestHandler({}, SHAPE, Replica()), raw)
    assert reply.status == 400 and "4000 x 4000" in reply.content.decode()


def test_a_picture_is_resized_where_the_release_says_how(monkeypatch):
    replica = Replica()
    pictures = ReleasedPictures(resize=None)
    gate = RequestHandler(
        {}, SHAPE, replica, fit_picture=lambda pixels: pictures.fit(pixels, SHAPE)
    )
    assert ask(gate, picture(40, 30)).status == 200 and ask(gate, picture()).status == 200
    assert [image.shape for image in replica.asked] == [SHAPE, SHAPE]
    reply = ask(gate, numbers(np.zeros((1, 40, 30)).tolist()), **JSON)
    assert reply.status == 400  # numbers are no picture
    large = picture(5000, 5000)
    monkeypatch.setattr(Image.Image, "load", lambda self: 1 / 0)
    reply = ask(gate, large)
    assert reply.status == 400 and "more than 16,777,216" in reply.content.decode()


def test_large_bodies_are_refused_whatever_they_say():
    replica = Replica()
    gate = RequestHandler({}, SHAPE, replica, RequestLimits(max_body_bytes=1000, burst_size=10))
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
    gate = RequestHandler(
        {}, SHAPE, Replica(), RequestLimits(requests_per_second=2.0, burst_size=3), clock
    )
    statuses = [ask(gate, picture()).status for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert ask(gate, picture()).headers["retry-after"] == "1"
    clock.now = 1.0
    assert [ask(gate, picture()).status for _ in range(3)] == [200, 200, 429]
    assert ask(gate, path="/", method="GET").status == 200  # costs nothing


def test_a_lost_replica_is_asked_once_more(caplog):
    replica = Replica(ReplicaLostError("died"), ANSWER)
    gate = RequestHandler({}, SHAPE, replica)
    assert ask(gate, picture()).status == 200 and len(replica.asked) == 2
    replica.answers = [ReplicaLostError("died"), ReplicaLostError("died")]
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
    gate = RequestHandler({}, SHAPE, Replica("never"), RequestLimits(timeout_seconds=0.05))
    assert ask(gate, picture()).status == 503

    assert asyncio.run(gate.handle("POST", "/predict", {}, silent())).status == 408
    assert "dpdist_under_way 0" in gate.metrics()


async def silent() -> AsyncIterator[bytes]:
    """A body that does not come while a request may take its time."""
    await asyncio.sleep(5)
    yield b""


def test_a_body_that_does_not_come_holds_no_place(monkeypatch):
    """However long an answer may take: a body has a limit of its own."""
    monkeypatch.setattr("dpdist.serving.app._BODY_SECONDS", 0.05)
    gate = RequestHandler({}, SHAPE, Replica())
    assert asyncio.run(gate.handle("POST", "/predict", {}, silent())).status == 408


def test_too_many_under_way_are_sent_away():
    """The third of three, without being asked, and at the cost of nobody's turn."""
    replica = Replica("never", "never", "never")
    gate = RequestHandler(
        {},
        SHAPE,
        replica,
        RequestLimits(max_concurrent=2, timeout_seconds=0.1, burst_size=3),
        Clock(),
    )

    async def several() -> list[Reply]:
        asked = [gate.handle("POST", "/predict", {}, pieces(picture())) for _ in range(3)]
        return await asyncio.gather(*asked)

    replies = asyncio.run(several())
    assert [reply.status for reply in replies] == [503, 503, 503] and len(replica.asked) == 2
    errors = [json.loads(reply.content)["error"] for reply in replies]
    assert errors == ["the answer took too long"] * 2 + ["too many requests are under way"]
    assert "dpdist_under_way 0" in gate.metrics()
    replica.answers.clear()
    assert [ask(gate, picture()).status for _ in range(2)] == [200, 429]


def test_health_is_looked_up_now_and_then():
    clock, replica = Clock(), Replica()
    gate = RequestHandler({}, SHAPE, replica, clock=clock)
    for _ in range(20):
        assert ask(gate, path="/health", method="GET").status == 200
    assert len(replica.asked) == 1
    clock.now, replica.answers = 6.0, [ReplicaLostError("died"), ReplicaLostError("died")]
    assert ask(gate, path="/health", method="GET").status == 503
    clock.now = 12.0
    assert ask(gate, path="/health", method="GET").status == 200


def test_many_who_ask_for_health_cost_one_look():
    replica = Replica()
    gate = RequestHandler({}, SHAPE, replica, clock=Clock())

    async def crowd() -> None:
        await asyncio.gather(*(gate.handle("GET", "/health", {}, pieces(b"")) for _ in range(200)))

    asyncio.run(crowd())
    assert len(replica.asked) == 1


def test_a_model_that_only_fails_is_not_healthy():
    clock, replica = Clock(), Replica(RuntimeError("a fault"))
    gate = RequestHandler({}, SHAPE, replica, clock=clock)
    for _ in range(3):
        assert ask(gate, path="/health", method="GET").status == 503
    clock.now = 6.0
    assert ask(gate, path="/health", method="GET").status == 200 and len(replica.asked) == 2


def test_other_paths_and_methods():
    gate = RequestHandler({}, SHAPE, Replica())
    assert ask(gate, path="/elsewhere").status == 404
    assert ask(gate, method="GET").headers["allow"] == "POST"
    assert ask(gate, path="/metrics", method="GET").content_type.startswith("text/plain")


class Calls:
    """A replica's side of a call: the answer to an image is its own number."""

    def __init__(self, seconds: float = 1e-4, *outcomes: Any) -> None:
        self.seconds, self.outcomes, self.sizes, self.running = seconds, list(outcomes), [], 0

    async def __call__(self, images: list[np.ndarray]) -> tuple[list[Any], float]:
        self.sizes.append(len(images))
        self.running += 1
        assert self.running <= 2
        await asyncio.sleep(0.001)
        self.running -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome == "never":
            await asyncio.sleep(60)
        found = [{"label": int(image.flat[0])} if image.flat[0] >= 0 else None for image in images]
        return found, self.seconds * len(images)


def together(batches: RequestBatcher, *values: float) -> list[Any]:
    async def all_of_them() -> list[Any]:
        asked = (batches(np.full(SHAPE, value)) for value in values)
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_who_waits_together_is_asked_together_and_gets_an_answer_of_his_own():
    calls = Calls()
    answers = together(RequestBatcher(calls, 2, 1.0), *range(100))
    assert [answer["label"] for answer in answers] == list(range(100))
    assert len(calls.sizes) <= 6 and max(calls.sizes) <= 64 and sum(calls.sizes) == 100


def test_slow_answers_are_not_put_together():
    calls = Calls(seconds=0.2)
    together(RequestBatcher(calls, 2, 1.0), *range(8))
    assert calls.sizes == [1] * 8


def test_a_fault_of_one_image_is_its_own():
    answers = together(RequestBatcher(Calls(), 1, 1.0), 3, 1, -1, 2)
    assert [a["label"] for a in answers if isinstance(a, dict)] == [3, 1, 2]
    assert isinstance(answers[2], RuntimeError)


def test_calls_that_are_lost_or_hang_end_and_free_their_lane():
    answers = together(
        RequestBatcher(Calls(1e-4, ReplicaLostError("died"), "never"), 1, 0.05), 1, 2, 3
    )
    assert isinstance(answers[0], ReplicaLostError) and isinstance(answers[1], TimeoutError)
    assert answers[2] == {"label": 3}

    async def left() -> list[Any]:
        calls = Calls(1e-4, "never")
        batches = RequestBatcher(calls, 1, 0.05)
        first, gone = (asyncio.ensure_future(batches(np.full(SHAPE, k))) for k in (1, 2))
        await asyncio.sleep(0.01)
        gone.cancel()
        last = asyncio.ensure_future(batches(np.full(SHAPE, 3)))
        await asyncio.wait((first, gone, last))
        return [calls.sizes, await last]

    assert asyncio.run(left()) == [[1, 1], {"label": 3}]


def test_the_requests_of_a_lost_call_are_asked_again():
    """Gate and batches together, as they are in the server."""
    outcomes: list[Any] = [None, ReplicaLostError("died")]

    async def call(images: list[np.ndarray]) -> tuple[list[Any], float]:
        await asyncio.sleep(0.001)
        if outcomes and (outcome := outcomes.pop(0)):
            raise outcome
        return [{"label": round(100 * image.flat[0]), "abstain": False} for image in images], 1e-4

    gate = RequestHandler({}, SHAPE, RequestBatcher(call, 2, 1.0), RequestLimits(burst_size=100))

    async def several() -> list[Reply]:
        bodies = [numbers(np.full(SHAPE, k / 100).tolist()) for k in range(60)]
        kind = {"content-type": "application/json"}
        asked = (gate.handle("POST", "/predict", kind, pieces(body)) for body in bodies)
        return await asyncio.gather(*asked)

    replies = asyncio.run(several())
    assert [json.loads(reply.content)["label"] for reply in replies] == list(range(60))
    assert "dpdist_repeated_total 1\n" in gate.metrics()


class Noisy:
    """An answerer whose answers tell which of its draws they are."""

    asked = 0

    def __call__(self, image: np.ndarray) -> Any:
        self.asked += 1
        if image.flat[0] < 0:
            raise ValueError("a fault of ours")
        return SimpleNamespace(as_json={"draw": self.asked, "image": float(image.flat[0])})


def test_a_replica_answers_each_image_by_noise_of_its_own():
    replica = Classifier.__new__(Classifier)
    replica._answerer = Noisy()
    asked = [np.full(SHAPE, value) for value in (0.5, -1.0, 0.5, 0.25)]
    answers, seconds = replica.answer(asked)
    assert answers == [
        {"draw": 1, "image": 0.5}, None, {"draw": 3, "image": 0.5}, {"draw": 4, "image": 0.25}
    ] and seconds >= 0  # fmt: skip


def talk(gate: RequestHandler, *raws: bytes) -> list[bytes]:
    """What comes back for these bytes, each on a connection of its own."""
    pytest.importorskip("uvicorn", reason='no HTTP server: pip install "dpdist[serve]"')

    async def one(port: int, raw: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        found = await reader.read()
        writer.close()
        return found

    async def all_of_them() -> list[bytes]:
        listening = listen("127.0.0.1", 0)
        speaking = start_http_server(gate, listening)
        port = listening.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1, port {port}"):
            listen("127.0.0.1", port)
        try:
            return await asyncio.gather(*(one(port, raw) for raw in raws))
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)

    return asyncio.run(all_of_them())


def post(body: bytes, **headers: object) -> bytes:
    stated = {"host": "x", "connection": "close", "content-length": len(body)} | headers
    lines = [f"{name}: {value}" for name, value in stated.items()]
    return "\r\n".join(["POST /predict HTTP/1.1", *lines, "", ""]).encode() + body


def test_http_is_spoken():
    gate = RequestHandler(
        {"name": "x"}, SHAPE, Replica(), RequestLimits(max_body_bytes=2**16, burst_size=100)
    )
    large = b"x" * 2**17
    found = talk(
        gate,
        post(picture()),
        post(numbers(np.zeros(SHAPE).tolist()), **{"Content-Type": "application/json"}),
        post(b"no picture"),
        post(large),
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"\x16\x03\x01 what is this\r\n\r\n",
        *[post(picture())] * 50,
    )
    statuses = [reply.split(b" ", 2)[1] for reply in found]
    assert statuses == [b"200", b"200", b"400", b"413", b"200", b"405", b"400"] + [b"200"] * 50
    head, body = found[0].split(b"\r\n\r\n")
    assert json.loads(body) == ANSWER and b"content-type: application/json" in head.lower()
    assert f"content-length: {len(body)}" in head.decode().lower()


def test_a_header_without_end_is_not_read_to_its_end():
    """60 MiB of header were kept in 630 MiB of memory."""
    pytest.importorskip("uvicorn", reason='no HTTP server: pip install "dpdist[serve]"')
    piece, most = b"x" * 2**16, 1000

    async def taken() -> int:
        listening = listen("127.0.0.1", 0)
        speaking = start_http_server(RequestHandler({}, SHAPE, Replica()), listening)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        sent = 0
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nlong: ")
            while sent < most and not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
                sent += 1
        except ConnectionError:
            pass
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
        return sent

    assert asyncio.run(taken()) < most


def test_a_client_that_leaves_is_asked_for_nothing_more():
    """What came of its body is no image, which nobody hears."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"{", "more_body": True},
                {"type": "http.disconnect"}]  # fmt: skip

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    replica = Replica()
    scope = {"method": "POST", "path": "/predict", "headers": [(b"Content-Type", b"text/x")]}
    asyncio.run(AsgiApplication(RequestHandler({}, SHAPE, replica))(scope, receive, send))
    assert sent[0]["status"] == 400 and not replica.asked


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        UserError, match=r"dpdist serve: needs uvicorn .*: pip install 'dpdist\[serve\]'"
    ):
        require_server()
