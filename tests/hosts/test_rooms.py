"""A machine that cannot play several hosts says why, and the tests here are skipped with it."""

from __future__ import annotations

import os
import shutil

import pytest
import rooms


@pytest.mark.parametrize(
    "missing, package",
    [("ip", "iproute2"), ("rsync", "rsync"), ("/usr/sbin/sshd", "openssh-server")],
)
def test_what_is_missing_is_named(monkeypatch, missing, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/bin/{tool}")
    monkeypatch.setattr(os.path, "exists", lambda path: path != missing)
    said = rooms.why_not.__wrapped__()
    assert f"needs {missing}" in said and package in said


def test_only_root_can_make_namespaces(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert rooms.why_not.__wrapped__() == "needs root to make network namespaces"
