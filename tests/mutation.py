"""`make mutation`: change the five modules that guarantees rest on, and see which tests notice.

    python tests/mutation.py [PATTERN ...]     # of mutants, such as "dpdist.core.binomial*"

mutmut does the work (`[tool.mutmut]` of pyproject.toml); the same command continues what was
interrupted. Printed are a table and the change of every mutant that no test noticed.
docs/contributing/testing.md says which of these are known.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTMUT = [sys.executable, "-m", "mutmut"]
NOTICED = ("killed", "timeout", "segfault", "caught by type check")
LOG = ROOT / "mutants" / "run.log"  # of the tool, whose spinner fills any other


def output_of(*arguments: str) -> str:
    command = [*MUTMUT, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout


def main(patterns: list[str]) -> int:
    LOG.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    with LOG.open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [*MUTMUT, "run", "--max-children", "2", *patterns],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    left = []
    for name, status in re.findall(r"^ *(\S+): (.+)$", output_of("results", "--all", "true"), re.M):
        if status != "not checked":
            counts[name.rsplit(".", 1)[0]][status] += 1
            if status not in NOTICED:
                left.append((name, status))
    print(f"{'module':28} {'mutants':>8} {'noticed':>8} {'survived':>9} {'no test':>8}")
    for module, found in sorted(counts.items()):
        noticed = sum(found[status] for status in NOTICED)
        print(
            f"{module:28} {found.total():8} {noticed:8} {found['survived']:9} {found['no tests']:8}"
        )
    print(f"{time.monotonic() - began:.0f} s\n")
    for name, status in left:
        print(f"{name}: {status}")
        for line in re.findall(r"^[-+](?![-+]).*$", output_of("show", name), re.M):
            print("   ", " ".join(line.split()))
    if run.returncode or not counts:
        print(f"mutmut ended with {run.returncode}: {LOG}")
    return run.returncode or not counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
