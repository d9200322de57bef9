"""A store that strangers cannot read: moto answers whoever asks, this refuses requests without an
Authorization header and hands the others on."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_REFUSAL = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"


@contextmanager
def guarded(url: str) -> Iterator[str]:
    """The address of the guard before the server at `url`."""
    behind = urlsplit(url).netloc

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "Authorization" not in self.headers:
                self._answer(403, [("Content-Type", "application/xml")], _REFUSAL)
                return
            connection = http.client.HTTPConnection(behind, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
            skip = ("transfer-encoding", "connection", "date", "server")
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in skip]
            self._answer(answer.status, headers, content)
            connection.close()

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
