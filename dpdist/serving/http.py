"""HTTP of one gate, spoken by its own process: a proxy of Serve's between the two, with what each
request then costs in calls from process to process, took ten times what an answer's draws do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from dpdist.base.errors import UserError
from dpdist.serving.gate import Gate

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CONNECTIONS = 1000
_HEADER_BYTES = 64 * 2**10
_LINGER = 1.0  # seconds


class Application:
    """A gate as ASGI asks for it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        body = _Body(receive)
        reply = await self._gate.reply(scope["method"], scope["path"], headers, body.pieces())
        await body.rest()
        content = reply.content
        said = dict(reply.headers) | {
            "content-type": reply.kind,
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


class _Body:
    def __init__(self, receive: Receive) -> None:
        self._receive, self._more = receive, True

    async def pieces(self) -> AsyncIterator[bytes]:
        while self._more:
            message = await self._receive()
            self._more = message["type"] == "http.request" and message.get("more_body", False)
            yield message.get("body", b"")

    async def rest(self) -> None:
        """Read for a moment what was refused unread: else the connection ends by a reset, which
        takes the refusal with it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                async for _ in self.pieces():
                    pass


def listen(host: str, port: int) -> socket.socket:
    """Raises UserError where that cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


def speak(gate: Gate, listening: socket.socket) -> asyncio.Task[None]:
    """Answers who connects, in the running loop; the task ends only by a fault."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            Application(gate),
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
    return asyncio.ensure_future(server.serve(sockets=[listening]))
