"""`make mutants`: plant each fault, one at a time, and see whether the tests notice.

The tree is copied; each copy (two at once) gets one fault after the other and runs the fault's own
tests, stopping at the first failure. A process is forked for each fault from one that has imported
the libraries, which takes most of a short test's time; nothing of ours is imported before the fork.

    python tests/mutants/run.py [WORD ...] [--list] [--no-baseline]

runs the faults whose name contains a WORD (all without one). Exit code 1 when one survived.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 2
CPU_SECONDS, SECONDS = 240, 1800.0  # for one fault: of processor time, and of a crowded machine's
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Running:
    place: Path
    log: Path
    began: float
    fault: object | None
    undo: tuple[Path, bytes, os.stat_result] | None


def copy_tree(target: Path) -> Path:
    """The tracked and the new files, compiled, so that only the changed one is compiled again."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in names:
        if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    packages = [str(target / name) for name in ("cluster", "dpdist", "tuning")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)
    return target


def import_libraries() -> None:
    """What our packages and tests import, but for themselves."""
    for name in (
        "cryptography.hazmat.primitives.ciphers", "dp_accounting.pld.privacy_loss_distribution",
        "dp_accounting.rdp", "hypothesis", "jinja2", "matplotlib.figure", "numpy", "pyarrow.parquet",
        "pydantic", "pytest", "ray.tune", "rich.console", "safetensors.torch", "scipy.optimize",
        "scipy.special", "scipy.stats", "sklearn.datasets", "torch", "torch.func", "typer", "yaml",
    ):  # fmt: skip
        __import__(name)
    import torch

    torch.set_num_threads(1)


def start(place: Path, tests: tuple[str, ...], log: Path) -> int:
    """Fork a process that runs these tests in a copy; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        os.chdir(place)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.dont_write_bytecode = True
        # The copy comes before the tree that is installed.
        sys.path[:] = [str(place), *(p for p in sys.path if p not in (str(ROOT), str(place)))]
        import pytest

        options = ["-x", "-q", "--durations=0", "-p", "no:cacheprovider", "--no-header"]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        os._exit(70)


def plant(place: Path, fault: object) -> tuple[Path, bytes, os.stat_result]:
    """Write the fault into a copy; what to put back."""
    path = place / fault.file  # type: ignore[attr-defined]
    before, status = path.read_bytes(), path.stat()
    text = before.decode()
    assert text.count(fault.old) == 1, f"{fault.name}: occurs {text.count(fault.old)} times"  # type: ignore[attr-defined]
    path.write_text(text.replace(fault.old, fault.new))  # type: ignore[attr-defined]
    os.utime(path, (time.time(), status.st_mtime + 86400))  # never taken for what was compiled
    return path, before, status


def put_back(undo: tuple[Path, bytes, os.stat_result]) -> None:
    path, before, status = undo
    path.write_bytes(before)
    os.utime(path, (status.st_atime, status.st_mtime))


def run(faults: list, folder: Path) -> list[tuple[object, str, float]]:
    """(fault, killed / SURVIVED / timeout / error, seconds) of each, in the order they ended."""
    places = [copy_tree(folder / f"copy-{i}") for i in range(AT_ONCE)]
    free, waiting = list(places), list(faults)
    running: dict[int, Running] = {}
    results = []
    while waiting or running:
        while waiting and free:
            fault, place = waiting.pop(0), free.pop()
            log = folder / f"{place.name}.log"
            undo = plant(place, fault)
            pid = start(place, fault.tests, log)
            running[pid] = Running(place, log, time.monotonic(), fault, undo)
        time.sleep(0.05)
        for pid, job in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - job.began
            if not done and seconds < SECONDS:
                continue
            if not done:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            code = os.waitstatus_to_exitcode(status) if done else None
            hangs = {None: "timeout", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"}
            verdict = {0: "SURVIVED", 1: "killed", **hangs}.get(code, "error")
            if verdict == "error":
                print(job.log.read_text()[-2000:])
            assert job.undo is not None
            put_back(job.undo)
            free.append(job.place)
            results.append((job.fault, verdict, seconds))
            print(f"{verdict:8} {seconds:5.0f} s  {job.fault.name}", flush=True)  # type: ignore[union-attr]
    return results


def baseline(faults: list, folder: Path) -> bool:
    """Whether all the tests pass without a fault: one that fails anyhow kills nothing."""
    tests = tuple(sorted({test for fault in faults for test in fault.tests}))
    files = {test for test in tests if "::" not in test}
    tests = tuple(t for t in tests if t in files or t.partition("::")[0] not in files)
    place, log = copy_tree(folder / "baseline"), folder / "baseline.log"
    _, status = os.waitpid(start(place, tests, log), 0)
    if os.waitstatus_to_exitcode(status):
        print(log.read_text()[-4000:])
        return False
    print(f"without a fault: {log.read_text().strip().splitlines()[-1]}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see whether tests notice.")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-baseline", action="store_true")
    options = parser.parse_args()
    sys.path[0] = str(ROOT / "tests")
    from mutants import FAULTS

    faults = [f for f in FAULTS if not options.words or any(w in f.name for w in options.words)]
    if options.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    import_libraries()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if not options.no_baseline and not baseline(faults, Path(folder)):
            print("the tests fail without any fault: nothing to learn")
            return 2
        results = run(faults, Path(folder))
    counts = Counter(verdict for _, verdict, _ in results)
    noticed = counts["killed"]
    for fault, verdict, _ in results:
        if verdict != "killed":
            print(f"{verdict}: {fault.name}")  # type: ignore[attr-defined]
    minutes = (time.monotonic() - began) / 60
    print(f"{noticed} of {len(results)} faults noticed ({dict(counts)}), {minutes:.0f} minutes")
    return int(noticed < len(results))


if __name__ == "__main__":
    sys.exit(main())
