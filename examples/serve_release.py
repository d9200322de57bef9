"""Answer HTTP requests by a released model, on Ray Serve.

    pip install "ray[serve]"
    python examples/serve_release.py RELEASE --replicas 2
    curl --data-binary @image.png http://127.0.0.1:8000/
    curl -H 'content-type: application/json' -d '{"input": [[[0.1, ...]]]}' http://127.0.0.1:8000/
    curl -H 'content-type: application/json' -d '{"text": "a text"}' http://127.0.0.1:8000/

An answer is the class and its certified radius, or ABSTAIN. The noise is drawn afresh and in secret
for each request; among k answers, one is wrong with probability at most k * alpha. There is no
password and no encryption, so the address is this machine's own: put a proxy that has both in front
of any other. Ray Serve's replicas also listen for one another, on every interface of the machine
and unpickling what they get: use a machine or a container that only you can reach.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from PIL import Image
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import dpdist


@serve.deployment(max_ongoing_requests=1)
class Predictor:
    """One process that holds the model and answers one request at a time."""

    def __init__(self, folder: Path, signer: Path | None, draws: int) -> None:
        self._release = dpdist.load(folder, signer=signer)
        self._answer: Any = (
            self._release.text_answerer
            if self._release.description.tokens
            else self._release.answerer(n=draws)
        )

    async def __call__(self, request: Request) -> JSONResponse:
        """Return class and radius; status 400 and one line for what the model cannot read."""
        try:
            return JSONResponse(self._answer(self._input(await request.body())).as_json)
        except (ValueError, KeyError, TypeError, OSError, dpdist.UserError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    def _input(self, body: bytes) -> Any:
        """Return the text, the numbers or the pixels (C, H, W) of a request."""
        if body[:1] == b"{":
            read = json.loads(body)
            return read["text"] if self._release.description.tokens else np.array(read["input"])
        pixels = np.atleast_3d(np.asarray(Image.open(io.BytesIO(body))))
        return self._release.fit_picture(np.moveaxis(pixels, -1, 0))


def main() -> None:
    """Serve a release until Ctrl-C."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("release", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--signer", type=Path, help="public key that must have signed the release")
    asked = parser.parse_args()
    with dpdist.connect(cpus=asked.replicas):
        serve.start(http_options={"host": "127.0.0.1", "port": asked.port})
        replicas = Predictor.options(num_replicas=asked.replicas)
        serve.run(replicas.bind(asked.release.resolve(), asked.signer, asked.draws))
        Event().wait()


if __name__ == "__main__":
    main()
