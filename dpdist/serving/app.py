"""Answer HTTP requests for a released model: limits, parsing, asking, counting, and the protocol.

Nothing of an image is kept. Each answer takes as long as its draws do, so a limit on the rate is a
limit on the work that strangers can cause. The process of the gate speaks HTTP itself: a proxy of
Ray Serve between the two, with the calls from process to process that each request then costs,
took ten times what an answer's draws do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpdist.certification.predict import to_model_input
from dpdist.core.errors import UserError
from dpdist.core.files import error_text, parse_json
from dpdist.data.parquet import UnreadableImage, decode_picture

# --- the gate ---------------------------------------------------------------------------------


_HEALTH_CHECK_SECONDS = 5.0  # seconds
_MOST_PIXELS = 2**24  # of a picture that is resized
_BODY_SECONDS = 10.0  # for a body, which holds a place meanwhile

AnswerFunction = Callable[[Any], Awaitable[dict[str, Any]]]  # of an image, or of a text


class ReplicaLostError(Exception):
    """The worker of a request is gone; the request may be repeated."""


@dataclass(frozen=True)
class RequestLimits:
    """max_body_bytes: bytes of a request. requests_per_second: requests to answer per second, on
    average; burst_size: at once. max_concurrent: requests under way. timeout_seconds: that one may
    take, repetition included."""

    max_body_bytes: int = 2**20
    requests_per_second: float = 20.0
    burst_size: int = 40
    max_concurrent: int = 100
    timeout_seconds: float = 60.0


@dataclass(frozen=True)
class Reply:
    """status: of HTTP. body: JSON, or text."""

    status: int
    body: dict[str, Any] | str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_type(self) -> str:
        return "text/plain; version=0.0.4" if isinstance(self.body, str) else "application/json"

    @property
    def content(self) -> bytes:
        text = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return text.encode()


class _RequestError(Exception):
    def __init__(self, status: int, message: str, **headers: str) -> None:
        self.reply = Reply(status, {"error": message}, headers)


class RequestHandler:
    """description: what GET / says. input_shape: of the model's input; None where it is a text.
    answer_image: one image or text to its answer; raises Lost where it may be asked again. clock:
    seconds, for the rate. fit_picture: brings an encoded picture to the input's shape; None: it
    must have it. bounded: whether numbers of images must lie in [0, 1]."""

    def __init__(
        self,
        description: dict[str, Any],
        input_shape: tuple[int, ...] | None,
        answer_image: AnswerFunction,
        limits: RequestLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        fit_picture: Callable[[np.ndarray], np.ndarray] | None = None,
        bounded: bool = True,
    ) -> None:
        self._fit_picture, self._bounded = fit_picture, bounded
        self._description, self._input_shape, self._answer_image = (
            description,
            input_shape,
            answer_image,
        )
        self._limits, self._clock = limits or RequestLimits(), clock
        self._tokens, self._refilled_at = float(self._limits.burst_size), clock()
        self._in_progress = 0
        self._reply_counts: Counter[int] = Counter()
        self._abstention_count = self._retry_count = 0
        self._total_seconds = 0.0
        self._healthy, self._last_check = True, -_HEALTH_CHECK_SECONDS

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> Reply:
        """The reply to one request; never raises. headers: names in lower case."""
        started = self._clock()
        try:
            found = await self._route(method, path, headers, body)
        except _RequestError as refused:
            found = refused.reply
        except Exception as error:  # a fault of ours: the others go on
            logging.getLogger(__name__).exception("a request ended in a fault")
            found = Reply(500, {"error": f"{type(error).__name__}; the server's log has more"})
        if path == "/predict":
            self._reply_counts[found.status] += 1
            self._total_seconds += self._clock() - started
        return found

    async def _route(
        self, method: str, path: str, headers: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> Reply:
        known = {"/predict": "POST", "/": "GET", "/health": "GET", "/metrics": "GET"}
        if path not in known:
            raise _RequestError(404, f"there is {', '.join(known)}")
        if method != known[path]:
            raise _RequestError(405, f"{path} takes {known[path]}", allow=known[path])
        if path == "/":
            return Reply(200, self._description)
        if path == "/health":
            return await self._check_health()
        if path == "/metrics":
            return Reply(200, self.metrics())
        self._check_limits()
        self._in_progress += 1
        try:
            image = self._parse_input(await self._read_body(headers, body), headers)
            answer = await self._answer_with_retry(image)
            if "error" in answer:  # of a text that the model cannot continue
                raise _RequestError(400, answer["error"])
            self._abstention_count += answer.get("abstain", False)
            return Reply(200, answer)
        finally:
            self._in_progress -= 1

    def _check_limits(self) -> None:
        """Raise unless one more request may be taken now."""
        now, limits = self._clock(), self._limits
        grown = self._tokens + (now - self._refilled_at) * limits.requests_per_second
        self._tokens, self._refilled_at = min(float(limits.burst_size), grown), now
        if self._in_progress >= limits.max_concurrent:
            raise _RequestError(503, "too many requests are under way", **{"retry-after": "1"})
        if self._tokens < 1:
            wait = max(1, round((1 - self._tokens) / limits.requests_per_second))
            raise _RequestError(
                429,
                f"more than {limits.requests_per_second:g} requests per second",
                **{"retry-after": str(wait)},
            )
        self._tokens -= 1

    async def _read_body(self, headers: Mapping[str, str], body: AsyncIterator[bytes]) -> bytes:
        most = self._limits.max_body_bytes
        stated = headers.get("content-length", "0")
        too_large = _RequestError(413, f"at most {most:,} bytes")
        if not stated.isascii() or not stated.isdigit() or len(stated) > 15 or int(stated) > most:
            raise too_large
        read = bytearray()
        try:
            async with asyncio.timeout(min(self._limits.timeout_seconds, _BODY_SECONDS)):
                async for chunk in body:
                    read += chunk
                    if len(read) > most:
                        raise too_large
        except TimeoutError:
            raise _RequestError(408, "the body did not come in time") from None
        return bytes(read)

    def _parse_input(self, raw: bytes, headers: Mapping[str, str]) -> np.ndarray | str:
        """Return the image of JSON {"input": numbers in lists}, or of an encoded picture, in the
        model's shape; of a model of texts that of JSON {"text": ...}."""
        is_json = headers.get("content-type", "").split(";")[0].strip() == "application/json"
        try:
            if self._input_shape is None:
                if not is_json:
                    raise ValueError('send JSON, {"text": "..."}, as application/json')
                return str(parse_json(raw, "body", {"text": str})["text"])
            if is_json:
                numbers = parse_json(raw, "body", {"input": list})["input"]
                image = np.asarray(numbers, dtype=np.float64)
            elif len(self._input_shape) == 3 and self._fit_picture is not None:
                image = self._fit_picture(decode_picture(raw, most=_MOST_PIXELS))
            elif len(self._input_shape) == 3:
                image = decode_picture(raw, (self._input_shape[1], self._input_shape[2]))
            else:
                raise ValueError('send JSON, {"input": [...]}, as application/json')
            to_model_input(image, self._input_shape, bounded=self._bounded)
        except UnreadableImage as error:
            raise _RequestError(400, f"not a readable image: {error_text(error)}") from None
        except (UserError, ValueError, TypeError, OverflowError) as error:
            raise _RequestError(400, error_text(error)) from None
        return image

    async def _answer_with_retry(self, image: np.ndarray | str) -> dict[str, Any]:
        """Asked once more where whoever worked on it was lost."""
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                try:
                    answer = await self._answer_image(image)
                except ReplicaLostError:
                    self._retry_count += 1
                    answer = await self._answer_image(image)
        except (ReplicaLostError, TimeoutError) as error:
            self._healthy = False
            why = "took too long" if isinstance(error, TimeoutError) else "was lost, twice"
            raise _RequestError(503, f"the answer {why}", **{"retry-after": "1"}) from None
        else:
            self._healthy = True
        finally:
            self._last_check = self._clock()
        return answer

    async def _check_health(self) -> Reply:
        """Whether the last request was answered; when that was long ago, whether a grey image
        is. Looking costs an answer, so it is not done for everybody who asks."""
        if not self._in_progress and self._clock() - self._last_check >= _HEALTH_CHECK_SECONDS:
            self._last_check = self._clock()  # who asks meanwhile does not look too
            shape = self._input_shape
            try:
                await self._answer_with_retry("a" if shape is None else np.full(shape, 0.5))
            except _RequestError:
                pass  # told below
            except Exception:
                logging.getLogger(__name__).exception("a grey image ended in a fault")
                self._healthy = False
        return Reply(200 if self._healthy else 503, {"healthy": self._healthy})

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        lines = ["# TYPE dpdist_requests_total counter"]
        lines += [
            f'dpdist_requests_total{{status="{status}"}} {count}'
            for status, count in sorted(self._reply_counts.items())
        ]
        for name, kind, value in (
            ("abstentions_total", "counter", self._abstention_count),
            ("repeated_total", "counter", self._retry_count),
            ("seconds_total", "counter", round(self._total_seconds, 6)),
            ("under_way", "gauge", self._in_progress),
        ):
            lines += [f"# TYPE dpdist_{name} {kind}", f"dpdist_{name} {value}"]
        return "\n".join(lines) + "\n"


# --- HTTP -------------------------------------------------------------------------------------


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CONNECTIONS = 1000
_HEADER_BYTES = 64 * 2**10
_LINGER = 1.0  # seconds


class AsgiApplication:
    """A gate as ASGI asks for it."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        body = _RequestBody(receive)
        reply = await self._handler.handle(scope["method"], scope["path"], headers, body.chunks())
        await body.drain()
        content = reply.content
        said = dict(reply.headers) | {
            "content-type": reply.content_type,
            "content-length": str(len(content)),
        }
        await send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(name.encode(), value.encode()) for name, value in said.items()],
            }
        )
        await send({"type": "http.response.body", "body": content})


class _RequestBody:
    def __init__(self, receive: Receive) -> None:
        self._receive, self._has_more = receive, True

    async def chunks(self) -> AsyncIterator[bytes]:
        while self._has_more:
            message = await self._receive()
            self._has_more = message["type"] == "http.request" and message.get("more_body", False)
            yield message.get("body", b"")

    async def drain(self) -> None:
        """Read for a moment what was refused unread: else the connection ends by a reset, which
        takes the refusal with it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                async for _ in self.chunks():
                    pass


def listen(host: str, port: int) -> socket.socket:
    """Raises UserError where that cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


def start_http_server(handler: RequestHandler, listener: socket.socket) -> asyncio.Task[None]:
    """Answers who connects, in the running loop; the task ends only by a fault."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            AsgiApplication(handler),
            http="h11",  # the other one reads headers of any size
            h11_max_incomplete_event_size=_HEADER_BYTES,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
        )
    )
    return asyncio.ensure_future(server.serve(sockets=[listener]))
