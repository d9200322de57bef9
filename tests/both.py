"""The tests in two processes at once: those that start no Ray beside the others.

    python tests/both.py [PYTEST OPTIONS]

Half of the time of a test on Ray is waiting. The first part's output follows the second's; the exit
code is the worse of both. With a path among the options pytest runs alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Folders whose tests start no Ray (a single one does no harm).
LIGHT = ("data", "fuzz", "gradients", "methods", "models", "privacy", "reports", "wiring")


def main(options: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    if any(Path(option.split("::")[0]).exists() for option in options):
        return subprocess.run([*pytest, *options]).returncode
    light = [str(ROOT / name) for name in LIGHT]
    rest = [str(ROOT), *(f"--ignore={folder}" for folder in light)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as out:
        beside = subprocess.Popen(
            [*pytest, *light, "-p", "no:cacheprovider", *options],
            stdout=out, stderr=subprocess.STDOUT, env=alone,
        )  # fmt: skip
        try:
            first = subprocess.run([*pytest, *rest, *options]).returncode
            second = beside.wait()
        finally:
            beside.kill()
        out.seek(0)
        sys.stdout.write(out.read().decode(errors="replace"))
    print(f"tests on Ray: exit code {first}; tests without: {second}")
    return max(first, second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
