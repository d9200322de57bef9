"""A store that strangers cannot read: moto answers whoever asks, this refuses requests without an
Authorization header and hands the others on."""

from __future__ import annotations

import http.client
import http.server
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_REFUSAL = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"


class Guard(http.server.BaseHTTPRequestHandler):
    """Before the server at `behind` (HOST:PORT)."""

    protocol_version = "HTTP/1.1"
    behind = ""

    def _pass(self) -> None:
        body = self._body()
        if "Authorization" not in self.headers:
            self._answer(403, [("Content-Type", "application/xml")], _REFUSAL)
            return
        connection = http.client.HTTPConnection(self.behind, timeout=60)
        passed = ("expect", "transfer-encoding", "content-length", "connection")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in passed}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        skip = ("transfer-encoding", "connection", "date", "server")
        given = [(k, v) for k, v in answer.getheaders() if k.lower() not in skip]
        self._answer(answer.status, given, content)
        connection.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(pieces)

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


@contextmanager
def guarded(url: str) -> Iterator[str]:
    """The address of a guard before the server at `url`. In a process of its own: pyarrow keeps
    Python's lock while it asks for a bucket's region."""
    process = subprocess.Popen(
        [sys.executable, __file__, urlsplit(url).netloc], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    Guard.behind = sys.argv[1]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guard)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
