"""dpdist serve: a released model behind HTTP, on this machine."""

from __future__ import annotations

import ipaddress
import threading
from contextlib import suppress
from typing import Annotated

import typer
from pydantic import Field

from dpdist.base.errors import Interrupted, UserError
from dpdist.base.fields import Number, Positive, Processes
from dpdist.commands.options import AnswerError, ReleaseArgument, Signer, TrustFactory, kind, option
from dpdist.commands.predict import Draws

_Host = Annotated[str, option("Address to listen on.")]
_Port = Annotated[int, typer.Option(callback=kind(Annotated[int, Number, Field(ge=1, le=65535)]))]
_Replicas = Annotated[int, option("Processes that answer, one CPU each.", Processes)]
_Sigma = Annotated[
    float | None, option("Noise, in input units (default: the release's).", Positive)
]
_N = Annotated[int, option("Draws per answer.", Draws)]
_Rate = Annotated[float, option("Requests per second, on average.", Positive)]
_Bytes = Annotated[int, Number, Field(ge=1, le=2**30)]
_MaxBytes = Annotated[int, option("Largest body of a request.", _Bytes)]


def command(
    release: ReleaseArgument,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    replicas: _Replicas = 1,
    sigma: _Sigma = None,
    n: _N = 1_000,
    alpha: AnswerError = 0.001,
    rate: _Rate = 20.0,
    max_bytes: _MaxBytes = 2**20,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
) -> None:
    """Answer POST /predict with class and certified radius, or ABSTAIN, until Ctrl-C.

    A body is an image file, or {"input": [...]} as application/json. GET / describes the model,
    /health and /metrics the server. No encryption and no passwords: listen on another address than
    this machine's own only behind something that has both.
    """
    from dpdist import pipeline
    from dpdist.base import console
    from dpdist.release.reading import load
    from dpdist.serving.deployments import Serving, deployed, require_server
    from dpdist.serving.gate import Limits

    require_server()
    if not _is_loopback(host):
        console.say(f"serve: {host} is not this machine's own: whoever reaches it can ask")
    found = load(release, trusted_factory=trust_factory, signer=signer)
    found.settings(sigma, n, alpha)  # complaints come before Ray starts
    limits = Limits(body=max_bytes, rate=rate, burst=max(1, round(2 * rate)))
    serving = Serving(release.resolve(), trust_factory, sigma, n, alpha, replicas, limits)
    console.say(f"serve: starting {replicas} of {found.name}")
    with (
        suppress(Interrupted),
        pipeline.session(None, replicas),
        deployed(found, serving, host, port) as address,
    ):
        console.say(f"serve: {found.name} at {address}/predict; Ctrl-C ends it")
        threading.Event().wait()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise UserError(f"--host: must be an address such as 127.0.0.1, got {host!r}") from None
