"""Jobs on a running cluster, through Ray's job server: submit, follow, stop, collect.

The server listens on the head's loopback interface only; an SSH tunnel (`ray dashboard
cluster.yaml`) brings it to this machine, and every request carries the cluster's token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.base.errors import ClusterError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_DONE = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL = 1.0  # seconds
_SILENT = 300.0  # seconds without any answer before following gives up


@dataclass(frozen=True)
class Job:
    """One job: state is PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; begun in seconds since
    1970, 0 when unknown."""

    name: str
    state: str
    message: str
    entrypoint: str
    metadata: dict[str, str]
    begun: float

    @property
    def done(self) -> bool:
        return self.state in _DONE


class Jobs:
    """The jobs of the cluster whose job server answers at `address` (http://HOST:PORT).

    Raises ClusterError when nothing answers there or the token is refused.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            raise ClusterError(f"--address {self.address}: must be http://HOST:PORT")
        _use_token()
        from ray.job_submission import JobSubmissionClient

        self._client = self._call(lambda: JobSubmissionClient(self.address))

    def _call(self, action: Callable[[], Any]) -> Any:
        from ray.exceptions import AuthenticationError
        from requests.exceptions import RequestException

        try:
            return action()
        except AuthenticationError as error:
            raise ClusterError(
                f"{self.address}: the cluster refuses this machine's token: use the token the "
                "cluster was started with (~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH)"
            ) from error
        except (ConnectionError, RequestException) as error:
            raise _NoAnswer(
                f"no cluster answers at {self.address}; open the tunnel first, with `ray dashboard "
                "cluster.yaml` or `ssh -N -L 8265:127.0.0.1:8265 HEAD`"
            ) from error
        except RuntimeError as error:
            raise ClusterError(f"{self.address}: {_gist(error)}") from error

    def submit(
        self,
        name: str,
        entrypoint: str,
        *,
        working_dir: Path | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Start `entrypoint` (a shell command) on the head as job `name`, with a copy of
        `working_dir` as its directory on every host."""
        environment = {} if working_dir is None else {"working_dir": str(working_dir)}
        self._call(
            lambda: self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env=environment,
                metadata=dict(metadata or {}),
            )
        )

    def job(self, name: str) -> Job:
        """What is known of a job. Raises ClusterError when there is none of that name."""
        try:
            return _job(self._call(lambda: self._client.get_job_info(name)))
        except _NoAnswer:
            raise
        except ClusterError as error:
            if "does not exist" in str(error):
                raise ClusterError(f"{name}: no such job at {self.address}") from error
            raise

    def jobs(self) -> list[Job]:
        """All submitted jobs, the newest first."""
        found = [_job(info) for info in self._call(self._client.list_jobs) if info.submission_id]
        return sorted(found, key=lambda job: -job.begun)

    def log(self, name: str) -> str:
        """All that the job has printed so far."""
        return self._call(lambda: self._client.get_job_logs(name)) or ""

    def stop(self, name: str) -> bool:
        """Ask a job to end (it gets SIGTERM); False when it had ended."""
        self.job(name)
        return bool(self._call(lambda: self._client.stop_job(name)))

    def follow(self, name: str, write: Callable[[str], None]) -> Job:
        """Hand what the job prints to `write` until it has ended; returns its last state.

        Survives interruptions of the tunnel of up to five minutes. Raises ClusterError beyond.
        """
        shown, silent_since = 0, None
        while True:
            try:
                job = self.job(name)
                text = self.log(name)
                silent_since = None
            except _NoAnswer:
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since > _SILENT:
                    raise
                time.sleep(5 * _POLL)
                continue
            if len(text) > shown:
                write(text[shown:])
                shown = len(text)
            if job.done:
                return job
            time.sleep(_POLL)


class _NoAnswer(ClusterError):
    pass


def _job(info: Any) -> Job:
    return Job(
        name=info.submission_id or "",
        state=info.status.value,
        message=info.message or "",
        entrypoint=info.entrypoint or "",
        metadata=dict(info.metadata or {}),
        begun=(info.start_time or 0) / 1000,
    )


def _gist(error: BaseException) -> str:
    """The last line of a server's traceback."""
    lines = [line for line in str(error).replace("\\n", "\n").splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _use_token() -> None:
    """Send the token whenever this machine has one: Ray only does when the mode is set."""
    has_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or has_file.exists()):
        os.environ["RAY_AUTH_MODE"] = "token"
    from dpdist.cluster.session import read_environment_again

    read_environment_again()
