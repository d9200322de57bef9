"""How near bought statistics are to a column's own, by number of records and epsilon.

    OMP_NUM_THREADS=1 python benchmarks/quality/bought_statistics.py    # 10 seconds
    python benchmarks/quality/bought_statistics.py --table

The columns are invented: ages, normal and cut to [0, 100], on the grid of the range [0, 150]; and
incomes, log-normal, on the grid of all numbers. Both are counted together, as `dpdist.statistics`
counts them: the same grids, noise and estimates, without folder and ledger. A line is the mean of
--draws data sets.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import RESULTS_FOLDER, parse_arguments

from dpdist.data.histograms import COUNTS, count_cells, estimate, linear_edges, universal_edges
from dpdist.privacy.calibration import counts_noise_for
from dpdist.privacy.phases import GaussianCounts
from dpdist.reports.compare import markdown_table

RESULTS = RESULTS_FOLDER / "bought_statistics.jsonl"
RECORDS, EPSILONS, DELTA, MISSING = (1_000, 100_000), (0.1, 0.3, 1.0), 1e-6, 0.1
QUANTILES = (0.01, 0.99)


def columns(records: int, generator: np.random.Generator) -> dict[str, tuple[np.ndarray, Any]]:
    """Return by name the numbers of a column, a tenth of them missing, and its grid."""
    age = generator.normal(45, 15, records).clip(0, 100)
    income = generator.lognormal(10, 1, records)
    for values in (age, income):
        values[generator.random(records) < MISSING] = np.nan
    return {"age": (age, linear_edges(0, 150)), "income": (income, universal_edges())}


def measured(values: np.ndarray, edges: np.ndarray, deviation: float, noise: Any) -> list[float]:
    """Return what one release tells: off in ranks, share in the range, its width, off in missing.

    The width is in units of that from the smallest to the greatest 1 %.
    """
    counts = count_cells(values, edges) + noise.normal(0, deviation, COUNTS)
    found = estimate(counts, edges, QUANTILES, deviation)
    present = values[~np.isnan(values)]
    low, high = np.quantile(present, QUANTILES)
    kept = np.mean((found.low <= present) & (present <= found.high))
    return [
        abs(float(np.mean(present <= found.median)) - 0.5),
        float(kept),
        (found.high - found.low) / float(high - low),
        abs(found.missing - float(np.isnan(values).mean())),
    ]


def lines(records: int, epsilon: float, draws: int) -> list[dict[str, Any]]:
    """Return a line for each column."""
    generator = np.random.default_rng([records, round(1000 * epsilon)])
    noise = counts_noise_for(epsilon, DELTA, "add-or-remove-one")
    phase = GaussianCounts.of_columns(noise, columns=2)
    found: dict[str, list[list[float]]] = {}
    for _ in range(draws):
        for name, (values, edges) in columns(records, generator).items():
            one = measured(values, edges, phase.deviation, generator)
            found.setdefault(name, []).append(one)
    told = ("median", "kept", "missing")
    return [
        {
            "records": records, "epsilon": epsilon, "delta": DELTA, "column": name,
            "deviation": phase.deviation, "draws": draws,
            **dict(zip(told, np.mean(all_of, 0)[[0, 1, 3]].tolist(), strict=True)),
            "width": float(np.median(np.array(all_of)[:, 2])),
        }
        for name, all_of in found.items()
    ]  # fmt: skip


def table(path: Path) -> str:
    """Return the results in Markdown."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    head = ["records", "ε", "column", "noise", "median", "in the range", "width", "missing"]
    body = [
        [
            f"{row['records']:,}", f"{row['epsilon']:g}", row["column"],
            f"{row['deviation']:.0f}", f"{100 * row['median']:.1f} %",
            f"{100 * row['kept']:.1f} %", f"{row['width']:.2f}", f"{100 * row['missing']:.1f} %",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--draws", type=int, default=50, help="data sets per line")
    parser.add_argument("--table", action="store_true", help="print the results in Markdown")
    given = parse_arguments(parser, {"draws": 2}, ("results",))
    if not given.table:
        found = [
            line
            for records in RECORDS
            for epsilon in EPSILONS
            for line in lines(records, epsilon, given.draws)
        ]
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text("".join(json.dumps(line) + "\n" for line in found))
    print(table(given.results))


if __name__ == "__main__":
    main()
