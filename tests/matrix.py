"""`make matrix`: the other Pythons, both ends of the range of torch, and the older Ray.

Each gets an environment of its own under .venv/ (some GB each). It runs the tests that start no
Ray, then a whole run on built-in data, which does; the older Ray runs the tests
that start Ray too. tests/matrix.txt keeps what came out.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "matrix.txt"
PINNED = ("-c", "constraints.txt")
LOWEST = ("torch==2.12.1", "torchvision==0.27.1", "ray[default,train,tune]==2.60.0")
HIGHEST = ("torch==2.15.0", "torchvision==0.29.2", "ray[default,train,tune]==2.60.0")
OLDER_RAY = "2.59.0"  # the lower end of pyproject.toml; all else is as in constraints.txt
PINNED_BUT_RAY = ("-c", ".venv/constraints-but-ray.txt", f"ray[default,train,tune]=={OLDER_RAY}")
WITHOUT_RAY = (
    "tests/unit/data", "tests/unit/gradients", "tests/unit/methods", "tests/unit/models",
    "tests/unit/privacy", "tests/unit/certification", "tests/unit/cluster",
    "tests/unit/test_cli.py", "tests/unit/test_vision.py", "tests/e2e/test_wheel.py",
)  # fmt: skip
ALL_BUT_SLOW = ("-m", "not slow", "-n", "2", "--dist", "loadfile", "tests")
# name -> (interpreter, what pip is told besides the project, what pytest runs)
CELLS = {
    "3.12": ("python3.12", PINNED, WITHOUT_RAY),
    "3.13": ("python3.13", PINNED, WITHOUT_RAY),
    "lowest": ("python3.11", LOWEST, WITHOUT_RAY),
    "highest": ("python3.11", HIGHEST, WITHOUT_RAY),
    "ray-2.59": ("python3.11", PINNED_BUT_RAY, ALL_BUT_SLOW),
}


def try_out(
    name: str, interpreter: str, requirements: tuple[str, ...], chosen: tuple[str, ...]
) -> str:
    """One line for the record. chosen: the tests, and how they run."""
    place = ROOT / ".venv" / f"matrix-{name}"
    python = place / "bin" / "python"
    others = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("ray==")
    ]
    (ROOT / ".venv" / "constraints-but-ray.txt").write_text("\n".join(others) + "\n")
    try:
        if not python.exists():
            subprocess.run([interpreter, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements, "-e", ".[test]"], cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{name}: could not be installed ({error})"
    return f"{name}: {judge(python, chosen)}"


def judge(python: Path, chosen: tuple[str, ...]) -> str:
    """Run tests and smoke run with an interpreter that has all it needs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if (server := ROOT / ".venv" / "moto" / "bin" / "moto_server").exists():
        environment.setdefault("DPDIST_MOTO_SERVER", str(server))
    versions = subprocess.run(
        [python, "-c", "import platform as p; from importlib.metadata import version as v; "
         "print('Python', p.python_version(), *(f'{n} {v(n)}' for n in ('torch', 'ray')))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    tests = [python, "-m", "pytest", "-q", "-m", "not slow and not e2e", *chosen]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-3000:], file=sys.stderr)
    found = re.search(r"(\d+ (?:passed|failed|error).*?) in ", done.stdout.splitlines()[-1])
    said = found[1] if found else f"pytest ended with {done.returncode}"
    if failed := re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M):
        said += f" ({', '.join(failed)})"
    if done.returncode not in (0, 1):  # interrupted, or not begun
        said += f", then pytest ended with {done.returncode}"
    with tempfile.TemporaryDirectory() as folder:
        smoke = [python, "-m", "dpdist", "run", "digits", "--runs", folder]
        done = subprocess.run(smoke, cwd=folder, env=environment, capture_output=True, text=True)
    print(done.stderr[-1000:], file=sys.stderr)
    smoked = "runs" if done.returncode == 0 else f"smoke run ended with {done.returncode}"
    return f"{versions}: {said}; dpdist run digits: {smoked}"


def main(names: list[str]) -> None:
    """Of the cells that are not tried, the record keeps what came out last."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = {}
    if RECORD.exists():
        lines = {line.partition(":")[0]: line for line in RECORD.read_text().splitlines()[1:]}
    for name in names or list(CELLS):
        lines[name] = f"{try_out(name, *CELLS[name])} ({today})"
        print(lines[name], flush=True)
        kept = [lines[cell] for cell in CELLS if cell in lines]
        RECORD.write_text("\n".join([f"make matrix, {platform.machine()}", *kept]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
