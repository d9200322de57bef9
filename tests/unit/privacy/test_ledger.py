"""The write-ahead ledger: durability, replays, conflicts, charging."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from support.power_cut import anchor_of

from dpdist.privacy.ledger import (
    Ledger,
    LedgerError,
    ReplayConflict,
    anchor_path,
)
from dpdist.privacy.phases import GaussianAnswers
from dpdist.privacy.plan import PrivacyPlan

PLAN = PrivacyPlan.dp_sgd(records=1000, batch_size=50, noise_multiplier=1.5, steps=40, delta=1e-4)
ONE = {"world_size": "1"}


def release(step: int, salt: int = 0) -> str:
    return f"{salt:032x}{step:032x}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "private" / "ledger.jsonl"


@pytest.fixture
def ledger(path):
    with Ledger.open(path, PLAN.fingerprint()) as opened:
        yield opened


def reopen(ledger: Ledger) -> Ledger:
    ledger.close()
    return Ledger.open(ledger.path, PLAN.fingerprint())


def test_undisturbed_run_costs_what_the_plan_says(ledger):
    assert ledger.begin_attempt(ONE) == 0
    for step in range(25):
        assert ledger.record(step, release(step)) == "new"
    assert ledger.guarantee(PLAN) == PLAN.guarantee(steps=25)
    again = reopen(ledger)
    assert again.guarantee(PLAN) == PLAN.guarantee(steps=25)
    assert again.release_counts == dict.fromkeys(range(25), 1)
    assert again.num_superseded == 0


def test_exact_replay_is_stored_once(ledger):
    ledger.begin_attempt(ONE)
    ledger.record(3, release(3))
    size = ledger.path.stat().st_size
    again = reopen(ledger)
    assert again.begin_attempt(dict(ONE)) == 0
    assert again.record(3, release(3)) == "replay"
    assert again.release_counts == {3: 1}
    assert ledger.path.stat().st_size == size


def test_same_noise_on_another_sum_is_refused_and_not_recorded(ledger):
    ledger.begin_attempt(ONE)
    ledger.record(3, release(3))
    size = ledger.path.stat().st_size
    with pytest.raises(ReplayConflict):
        ledger.record(3, release(3, salt=1))
    assert ledger.path.stat().st_size == size
    assert ledger.new_epoch("sum changed") == 1
    assert ledger.record(3, release(3, salt=1)) == "new"
    assert ledger.release_counts == {3: 2}


_FORKING = """
import os, sys
from dpdist.privacy.ledger import Ledger, LedgerError
ledger = Ledger.open(sys.argv[1], sys.argv[2])
ledger.begin_attempt({})
ledger.record(0, "0" * 64)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    ledger.record(1, "1" * 64)
else:
    assert ledger.record(0, "0" * 64) == "replay"
    try:
        ledger.record(1, "2" * 64)
    except LedgerError as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
"""


def test_a_fork_announces_nothing(path):
    """It holds the lock too: both would add the noise of one step to two sums."""
    done = subprocess.run([sys.executable, "-c", _FORKING, path, PLAN.fingerprint()])
    assert done.returncode == 0
    assert Ledger.read(path).release_counts == {0: 1, 1: 1}


def test_changed_identity_starts_an_epoch_and_old_ones_never_return(ledger):
    assert ledger.begin_attempt(ONE) == 0
    assert ledger.begin_attempt(ONE) == 0
    assert ledger.begin_attempt({"world_size": "2"}) == 1
    assert ledger.begin_attempt(ONE) == 2
    again = reopen(ledger)
    assert again.epoch == 2
    assert again.begin_attempt(ONE) == 2
    assert again.new_epoch("forced") == 3
    assert len({attempt["nonce"] for attempt in again.attempts}) == 4
    assert reopen(again).begin_attempt(ONE) == 3


def test_what_a_process_releases_stands_behind_its_own_nonce(path):
    """Also where another one was announced in between, which released nothing."""
    with Ledger.open(path, PLAN.fingerprint()) as opened:
        opened.begin_attempt(ONE)
        opened.record(0, release(0))
        mine = opened.nonce
    with Ledger.open(path, PLAN.fingerprint()) as opened:
        other = opened.announce_process()
    with Ledger.open(path, PLAN.fingerprint(), nonce=mine) as opened:
        opened.record(1, release(1))
        assert opened.released_units(PLAN) == {mine: (2,), other: (0,)}
    assert Ledger.read(path).announced_steps(0) == [(0, 2, mine)]


def test_an_answer_stands_behind_the_process_that_draws_its_noise(path):
    plan = PrivacyPlan(1000, (GaussianAnswers(9.0, 3),), 1e-4)
    nonces = []
    for number in range(3):
        with Ledger.open(path, plan.fingerprint()) as opened:
            assert opened.record_query(release(number), plan) == number
            nonces.append(opened.nonce)
    found = Ledger.read(path)
    assert [found.nonce_of_query(release(number), plan) for number in range(3)] == nonces
    assert found.released_units(plan) == dict.fromkeys(nonces, (1,))


def test_torn_last_line_is_dropped_and_writing_goes_on(ledger):
    ledger.begin_attempt(ONE)
    for step in range(3):
        before = anchor_path(ledger.path).read_bytes()
        ledger.record(step, release(step))
    ledger.close()
    raw = ledger.path.read_bytes()
    ledger.path.write_bytes(raw[:-5])
    anchor_path(ledger.path).write_bytes(before)  # it follows a line that is whole and durable
    with Ledger.open(ledger.path, PLAN.fingerprint(), nonce=ledger.nonce) as again:
        assert again.release_counts == {0: 1, 1: 1}
        assert again.record(2, release(2)) == "new"
    assert ledger.path.read_bytes() == raw


def whole(ledger) -> list[bytes]:
    """Two attempts, the second superseding steps of the first; the lines of the closed file."""
    for epoch in range(2):
        ledger.begin_attempt({"world_size": str(epoch)})
        for step in range(epoch, 3):
            ledger.record(step, release(step, salt=epoch))
    ledger.close()
    return ledger.path.read_bytes().splitlines(keepends=True)


def refused(ledger) -> None:
    for look in (Ledger.read, lambda path: Ledger.open(path, PLAN.fingerprint())):
        with pytest.raises(LedgerError):
            look(ledger.path)


@pytest.mark.parametrize(
    ("damage", "line"), [("delete", 1), ("edit", 0), ("edit", 2), ("edit", -1)]
)
def test_a_damaged_line_is_refused(ledger, damage, line):
    lines = whole(ledger)
    if damage == "delete":
        del lines[line]
    else:
        lines[line] = lines[line].replace(b"0", b"1", 1)
    ledger.path.write_bytes(b"".join(lines))
    refused(ledger)


def test_a_ledger_cut_at_any_line_is_refused(ledger):
    lines = whole(ledger)
    for kept in range(len(lines)):
        ledger.path.write_bytes(b"".join(lines[:kept]))
        refused(ledger)
        assert ledger.path.read_bytes() == b"".join(lines[:kept])
    ledger.path.unlink()
    with pytest.raises(LedgerError):
        Ledger.open(ledger.path, PLAN.fingerprint())
    assert not ledger.path.exists()
    ledger.path.write_bytes(b"".join(lines))
    assert Ledger.read(ledger.path).num_superseded == 2


def test_another_ledger_of_the_same_plan_is_refused(ledger, tmp_path):
    whole(ledger)
    with Ledger.open(tmp_path / "other" / "ledger.jsonl", PLAN.fingerprint()) as other:
        whole(other)
    ledger.path.write_bytes(other.path.read_bytes())
    refused(ledger)


@pytest.mark.parametrize("content", [None, b"", b"7 short"])
def test_a_lost_or_damaged_anchor_is_an_error(ledger, content):
    whole(ledger)
    anchor = anchor_path(ledger.path)
    anchor.unlink()
    if content is not None:
        anchor.write_bytes(content)
    refused(ledger)


def test_an_anchor_behind_the_file_is_what_a_crash_leaves(ledger):
    """Between a line and its anchor any process may die: every earlier state of the anchor, and
    none at all beside a file that holds its header only, are lawful."""
    lines = whole(ledger)
    anchor = anchor_path(ledger.path)
    for lines_known in range(1, len(lines) + 1):
        anchor.write_text(anchor_of(b"".join(lines[:lines_known])).file_line)
        assert Ledger.read(ledger.path).num_superseded == 2
        with Ledger.open(ledger.path, PLAN.fingerprint()) as again:
            assert again.num_superseded == 2
        assert anchor.read_text() == anchor_of(b"".join(lines)).file_line
    anchor.unlink()
    for begun in (lines[0], lines[0][:-7], b""):
        for made in (False, True):  # the file is there before its first line is
            ledger.path.write_bytes(begun)
            if made:
                anchor.touch()
            with Ledger.open(ledger.path, PLAN.fingerprint()) as again:
                assert again.epoch is None
            anchor.unlink()


def test_killed_at_any_moment_the_ledger_opens_again(path):
    """A process that writes as fast as it can is killed; nothing is lost and nothing is refused."""
    code = (
        "import sys\n"
        "from dpdist.privacy.ledger import Ledger\n"
        "with Ledger.open(sys.argv[1], sys.argv[2]) as ledger:\n"
        "    ledger.begin_attempt({'world_size': '1'})\n"
        "    for step in range(len(ledger.release_counts), 10**6):\n"
        "        ledger.record(step, f'{step:064x}')\n"
        "        print(step, flush=True)\n"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, str(path), PLAN.fingerprint()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(20):
                said = process.stdout.readline()
            assert Ledger.read(path).release_counts  # beside the writer
            process.kill()
            said = [said, *process.stdout.read().splitlines()][-1]
        assert len(Ledger.read(path).release_counts) >= int(said.split()[-1])


def test_another_plan_is_refused(ledger):
    ledger.close()
    with pytest.raises(LedgerError):
        Ledger.open(ledger.path, "ff" * 32)
    with pytest.raises(LedgerError):
        Ledger.read(ledger.path).guarantee(replace(PLAN, delta=1e-5))


def test_two_writers_are_refused(ledger, monkeypatch):
    monkeypatch.setattr("dpdist.privacy.ledger._LOCK_SECONDS", 0.2)
    with pytest.raises(LedgerError):
        Ledger.open(ledger.path, PLAN.fingerprint())
    assert Ledger.read(ledger.path).plan_fingerprint == PLAN.fingerprint()


def test_a_failed_write_is_no_release(ledger, monkeypatch):
    ledger.begin_attempt(ONE)
    raw = ledger.path.read_bytes()

    def full(fd):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError):
            ledger.record(0, release(0))
    assert ledger.path.read_bytes() == raw
    with pytest.raises(LedgerError):
        ledger.record(0, release(0))


def test_ctrl_c_inside_a_write_leaves_a_ledger_that_opens_again(ledger, monkeypatch):
    """A notebook goes on after it: a second line must not be chained to the one before the last."""
    ledger.begin_attempt(ONE)

    def interrupted(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.record(0, release(0))
    with pytest.raises(LedgerError):
        ledger.record(1, release(1))
    with closing(reopen(ledger)) as again:
        assert again.release_counts == {0: 1}  # it may have been made


def test_what_cannot_be_accounted_is_not_recorded(ledger):
    with pytest.raises(LedgerError):  # before an attempt
        ledger.record(0, release(0))
    ledger.begin_attempt(ONE)
    for step, name in ((-1, release(0)), (True, release(0)), (0, "ab"), (0, "zz" * 32)):
        with pytest.raises(ValueError):
            ledger.record(step, name)
    ledger.record(40, release(40))  # beyond the plan
    with pytest.raises(ValueError):
        ledger.guarantee(PLAN)


def test_file_is_private(ledger):
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
