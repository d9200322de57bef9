"""Draw the README's figure from the tables of results that are committed.

python docs/tools/figure.py     # writes docs/pictures/results.svg
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "pictures" / "results.svg"
TUNING = ROOT / "benchmarks" / "results" / "tuning.md"
CERTIFIED = ROOT / "papers" / "dp-cert" / "README.md"


def tuning() -> dict[str, list[tuple[int, float]]]:
    """Return the mean number of trials and epsilon, by the distribution of that number."""
    found: dict[str, list[tuple[int, float]]] = {}
    row = r"^\| (logarithmic|geometric|fixed),? (?:mean )?(\d+)(?: trials)? \| ([\d.]+) \|"
    for name, trials, epsilon in re.findall(row, TUNING.read_text(), flags=re.M):
        found.setdefault(name, []).append((int(trials), float(epsilon)))
    return found


def certified() -> dict[str, list[tuple[float, float]]]:
    """Return radius and certified accuracy in percent on MNIST: published, and ours."""
    text = CERTIFIED.read_text()
    rows = {
        "DP-CERT, published, ε about 2.9": r"published \(DP-CERT\)",
        "dpdist, ε = 2.0": r"`mnist-flagship`, three keys: mean",
        "dpdist, ε = 2.9 with its search": r"`mnist-flagship-search`: its tuning is counted",
    }
    found = {}
    for name, row in rows.items():
        cells = re.search(rf"^\| {row} \|[^|]*\|([^\n]+)\|$", text, flags=re.M)
        assert cells is not None, name
        values = [float(each) for each in cells[1].split("|")]
        found[name] = list(zip((0.0, 0.3, 0.5, 0.7), values, strict=True))
    return found


def draw() -> None:
    """Draw both panels, and write the SVG."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dpdist", "font.size": 10,
                     "font.family": "sans-serif"}  # fmt: skip
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.axhline(3, color="0.6", linestyle=":", label="one training")
    names = {"fixed": "a fixed number, every trial counted"}
    for name, points in tuning().items():
        label = names.get(name, f"a random number, {name}")
        left.plot(*zip(*points, strict=True), marker="o", label=label)
    left.set(xscale="log", xlabel="trials (mean)", ylabel="ε at δ = 1e-5",
             title="Privacy cost of a search", xticks=[2, 5, 10, 50])  # fmt: skip
    left.set_xticklabels(["2", "5", "10", "50"])
    left.minorticks_off()
    for name, points in certified().items():
        dots = "o:" if name.startswith("DP-CERT") else "o-"
        right.plot(*zip(*points, strict=True), dots, label=name)
    right.set(xlabel="ℓ2 radius", ylabel="certified accuracy in %",
              title="MNIST, 10,000 images, noise 0.25")  # fmt: skip
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")
