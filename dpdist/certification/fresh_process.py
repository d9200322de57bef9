"""Execute rows one at a time in a process that has executed nothing before.

A copy of a module shares with the original what lies outside the object: globals of its Python
module, attributes of its class, closures. So a row that is executed "alone" by a copy in the same
process may still know what the counted batches left there. Here a new interpreter is started; it
receives the network as a cluster's worker receives it (pickled by this very process, from a model
whose factory was trusted; no file is unpickled), imports the model's modules itself, checks that
they are the code with which the model was saved, and executes nothing. For each row it forks: the
row is executed in the fork, which ends with it. On a GPU, whose driver no fork survives, and where
there is no fork but Linux's, the process itself executes the rows one after the other, each by a
fresh copy of the network: globals are then shared among these rows, not with the counted batches.

Files, the network, shared memory, the environment and the hardware remain common to both.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base import vision
from dpdist.base.errors import UserError
from dpdist.certification import device as devices
from dpdist.certification.classifier import FORMS, OTHER_FORMATS, quiet_threads
from dpdist.models import fresh_copy
from dpdist.models.factory_code import FactoryCode

_SHAPE = struct.Struct("<?QQ")  # whether it went well, rows and classes (or 0 and bytes of text)
_SIZE = struct.Struct("<Q")
_HINT = "the model must be executable in a process of its own, in which its rows are tried alone"


class SameProcess:
    """Executes each row alone by a fresh copy of the network, in this process."""

    def __init__(self, network: nn.Module, form: str = "eager") -> None:
        self._network, self._form = network, form

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of rows (B, ...): (B, classes)."""
        return torch.cat([execute_alone(self._network, self._form, row) for row in rows.split(1)])


class FreshProcess:
    """As `SameProcess`, where nothing else is executed: see above. Started by the first call.

    Args:
        network: as it came, never executed in this process.
        form: of the executed classifier; another number format is kept for a row alone.
        code: with which the model was saved, which the process must have too.
    """

    def __init__(self, network: nn.Module, form: str, code: FactoryCode) -> None:
        from ray import cloudpickle  # what workers receive models by

        try:  # at once: a model may change its own parameters when it is executed
            self._raw = cloudpickle.dumps((network, form, code))
        except Exception as error:  # whatever a user's model does
            raise UserError(f"{_HINT}: it cannot be pickled ({error})") from error
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of rows (B, ...): float64 (B, classes).

        Raises UserError where the process cannot be started, or cannot execute them.
        """
        with self._lock:
            try:
                process = self._process or self._start()
                assert process.stdin is not None and process.stdout is not None
                _send(process.stdin, pickle.dumps(rows.cpu()))
                logits = _received(process.stdout)
            except (OSError, EOFError) as error:
                raise UserError(f"{_HINT}; it ended ({type(error).__name__})") from error
        return logits.to(rows.device)

    def _start(self) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        _send(process.stdin, self._raw)
        _received(process.stdout)  # that it could be loaded
        self._process, self._raw = process, b""
        return process


def alone_by(
    form: str, code: FactoryCode
) -> Callable[[nn.Module, str], SameProcess | FreshProcess]:
    """Return what executes rows alone in a job, for a form: in another process where the form runs
    the model's own Python code, in this one where it is frozen into a graph."""
    if form == "frozen":
        return SameProcess
    return lambda network, form: FreshProcess(network, form, code)


def execute_alone(network: nn.Module, form: str, row: Tensor) -> Tensor:
    """Return the logits of a batch of one row by a network that has kept nothing: (1, classes)."""
    network = fresh_copy(network)
    run = FORMS[form](network, row) if form in OTHER_FORMATS else network
    with torch.inference_mode():
        return run(row)


def serve() -> None:
    """Answer what comes through standard input until it ends: the other side of `FreshProcess`."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's module prints is no answer
    quiet_threads()
    try:
        vision.install()
        network, form, code = pickle.loads(_read(asked))
        code.check("the process in which rows are executed alone")
    except EOFError:
        return
    except Exception as error:  # whatever a user's module does
        _answer(answers, error)
        return
    _answer(answers, torch.empty(0, 0))
    while True:
        try:
            rows = pickle.loads(_read(asked))
        except EOFError:
            return
        _answer(answers, _executed(network, form, rows))


def _executed(network: nn.Module, form: str, rows: Tensor) -> Tensor | Exception:
    """The logits of each row alone, or why there are none."""
    device = next((each.device for each in network.parameters()), torch.device("cpu"))
    try:
        if device.type == "cpu" and sys.platform == "linux":
            return torch.cat([_forked(network, form, row) for row in rows.split(1)])
        devices.settle(device)
        return SameProcess(network, form)(rows.to(device)).double().cpu()
    except Exception as error:  # whatever a user's model does
        return error


def _forked(network: nn.Module, form: str, row: Tensor) -> Tensor:
    """Execute a row in a fork of this process, which has executed nothing."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(into, "wb") as pipe:
                try:
                    _answer(pipe, execute_alone(network, form, row))
                except Exception as error:  # whatever a user's model does
                    _answer(pipe, error)
        finally:
            os._exit(0)
    os.close(into)
    try:
        with os.fdopen(out, "rb") as pipe:
            return _received(pipe)
    finally:
        os.waitpid(pid, 0)


def _answer(pipe: IO[bytes], found: Tensor | Exception) -> None:
    if isinstance(found, Exception):
        raw = (str(found).strip() or type(found).__name__).splitlines()[0].encode()
        pipe.write(_SHAPE.pack(False, 0, len(raw)) + raw)
    else:
        values = found.double().cpu().numpy().astype("<f8")
        pipe.write(_SHAPE.pack(True, *values.shape) + values.tobytes())
    pipe.flush()


def _received(pipe: IO[bytes]) -> Tensor:
    """The logits of an answer. Raises UserError for an error, EOFError where none came."""
    well, rows, classes = _SHAPE.unpack(_exactly(pipe, _SHAPE.size))
    if not well:
        raise UserError(f"{_HINT}: {_exactly(pipe, classes).decode()}")
    raw = _exactly(pipe, 8 * rows * classes)
    return torch.from_numpy(np.frombuffer(raw, "<f8").copy().reshape(rows, classes))


def _send(pipe: IO[bytes], raw: bytes) -> None:
    pipe.write(_SIZE.pack(len(raw)) + raw)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, _SIZE.unpack(_exactly(pipe, _SIZE.size))[0])


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    raw = pipe.read(size)
    if len(raw) < size:
        raise EOFError
    return raw


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process: it stops when nothing more can come."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
