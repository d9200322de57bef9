"""The client of a cluster's job server, against a small server that speaks its protocol."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import dpdist.cluster.submission as submission
from dpdist.cluster.session import reload_ray_environment
from dpdist.cluster.submission import JobClient
from dpdist.core.errors import ClusterError
from dpdist.runs.recipe import find_recipe

TOKEN = "a" * 64
PARTS = ["training: begins\n", "training: 10 of 20 steps\n", "certified\n"]


class Server(ThreadingHTTPServer):
    """Job "run-1" prints one more part each time its log is asked for, then ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shown = 0
        self.submitted: list[dict] = []
        self.stopped: list[str] = []
        self.drop = 0
        self.has_agent = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode() if not isinstance(value, str) else value.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refused(self) -> bool:
        token = self.headers.get("Authorization", "")
        if token == f"Bearer {TOKEN}":
            return False
        self._answer("Forbidden" if token else "Unauthorized", 403 if token else 401)
        return True

    def _job(self) -> dict:
        done = self.server.shown >= len(PARTS)
        return {
            "type": "SUBMISSION",
            "submission_id": "run-1",
            "status": "SUCCEEDED" if done else "RUNNING",
            "entrypoint": "dpdist run my.yaml",
            "message": "fine",
            "metadata": {"run": "my"},
            "start_time": 1_700_000_000_000,
        }

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == "/api/version":
            self._answer(
                {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}
            )
        elif self.path == "/api/jobs/":
            driver = {"submission_id": None, "type": "DRIVER"}
            fetch = {"submission_id": "fetch-my", "metadata": {"fetch": "my"}}
            older = {"submission_id": "run-0", "start_time": 1_600_000_000_000, "status": "FAILED"}
            others = ({**self._job(), **each} for each in (driver, fetch, older))
            self._answer([*others, self._job()])
        elif self.path == "/api/jobs/run-1":
            self._answer(self._job())
        elif self.path == "/api/jobs/run-1/logs":
            if self.server.drop:
                self.server.drop -= 1
                self.connection.close()
                return
            self.server.shown += 1
            self._answer({"logs": "".join(PARTS[: self.server.shown])})
        else:
            self._answer("Job none does not exist", 404)

    def do_POST(self) -> None:
        if self._refused():
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.server.has_agent:
            self._answer("Traceback ...\nNo available agent to submit job, please try again.", 500)
        elif self.path == "/api/jobs/":
            self.server.submitted.append(json.loads(body))
            self._answer({"job_id": "run-1", "submission_id": "run-1"})
        else:
            self.server.stopped.append(self.path)
            self._answer({"stopped": True})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "set, so that it is put back after the test")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(submission, "_POLL", 0.01)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()
    monkeypatch.undo()
    reload_ray_environment()


@pytest.mark.slow
def test_following_shows_each_part_once_and_outlives_a_lost_tunnel(server):
    server.drop = 2
    said: list[str] = []
    ended = JobClient(server.address).follow("run-1", said.append)
    assert "".join(said) == "".join(PARTS)
    assert ended.status == "SUCCEEDED" and ended.metadata == {"run": "my"}


@pytest.mark.slow
def test_submit_list_and_stop(server):
    jobs = JobClient(server.address)
    jobs.submit("run-1", "dpdist run digits", metadata={"run": "digits"})
    assert server.submitted[0]["entrypoint"] == "dpdist run digits"
    assert server.submitted[0]["submission_id"] == "run-1"
    assert server.submitted[0]["metadata"] == {"run": "digits"}
    assert [job.submission_id for job in jobs.list_jobs()] == ["run-1", "run-0"]
    assert [jobs.find_job(name) for name in ("my", "run-0", "none")] == ["run-1", "run-0", "none"]
    assert jobs.stop("run-1") and server.stopped == ["/api/jobs/run-1/stop"]
    with pytest.raises(ClusterError, match="none: "):
        jobs.stop("none")
    server.has_agent = False
    with pytest.raises(ClusterError, match="--dashboard-agent-listen-port"):
        jobs.submit("run-2", "dpdist run digits")


@pytest.mark.slow
def test_submit_sends_the_command_that_runs_there(server, tmp_path, monkeypatch):
    """Not a recipe outside of what is sent, or in a folder that is never sent."""
    from dpdist.cli.main import app
    from dpdist.core.errors import UserError

    here = tmp_path / "here"
    for path in (tmp_path / "outside.yaml", here / "data" / "inside.yaml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(find_recipe("digits").read_text())
    monkeypatch.chdir(here)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.address)
    for name in ("../outside.yaml", "data/inside.yaml", "none.yaml"):
        done = CliRunner().invoke(app, ["cluster", "submit", name])
        assert isinstance(done.exception, UserError) and name in str(done.exception)
    assert server.submitted == []
    done = CliRunner().invoke(
        app,
        ["cluster", "submit", "digits", "--no-follow",
         "--set", "training.epochs=5", "--set", "data.labels=[3, 5]"],
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    sent = "dpdist run digits --set training.epochs=5 --set 'data.labels=[3, 5]'"
    assert server.submitted[0]["entrypoint"] == sent
    assert server.submitted[0]["runtime_env"] in ({}, None)
