"""Print the figures of the layout and of docstrings: files, arrows, circles, files to read, words.

    python tests/house_figures.py [CHECKOUT]

An arrow is one file that imports another, inside functions and for annotations too. A circle is a
group of files that import one another. A walk counts the files that define the functions on the way
from a question to its answer. A docstring should begin with a sentence, neither with "Of" nor with
"What", and use nouns for "what" and "whatever". `tests/test_house_figures.py` holds the limits.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

PACKAGES = ("dpdist", "cluster", "tuning")

# Functions, methods and classes in the order in which a reader meets them.
WALKS = {
    "one training step": """
        PrivacyPlan.step Loop.steps PrivateStep.gradient derive_key poisson_sample Blocks
        cross_entropy GradientEngine.clipped_sum standard_normal_per_record run_pass
        find_rule embedding convolution group_norm recurrent per_example_vjp LayerCall
        PerExampleGradient outer_squared_norms FlatClipping ReduceDtype Reducer
        ReplicatedUpdate.sum_rows
        PermitGate.wait Ledger.record ChainedJournal.append add_noise add_device_noise
        FlatOptimizer.update DivergenceCheck.check Monitor.record_step save_part
    """,
    "a Cohen certificate": """
        Cohen Smoothing.build_sampler Certificate gaussian_l2_radius Gaussian clopper_pearson_lower
        VoteSampler.build_counter InputNoiseCounter.histogram build_checked_counter
        ExecutedClassifier Aes
        StreamKeys CertificationJob JobSpec JobState pin_settings Journal run_chunks PoolActor
        write_cohen_tsv
    """,
    "a search trial": """
        Search _check_scoring draw_trials apply_values TrialLimit trial_resources make_tune_pass
        ManifestSearcher run_trial certified_radii
    """,
    "an epsilon from recipe to report": """
        Recipe PrivacyRecipe make_plan Method.cost PrivacyPlan.guarantee Phase GaussianSteps
        noise_multiplier_for compute_privacy_losses compose_pld sampled_gaussian_pld WorstOfDpEvent
        Guarantee Ledger.guarantee ChainedJournal read_verified_ledger RunFolder read_facts
        make_verdict write_report
    """,
}


def product_files(root: Path) -> Iterator[Path]:
    """Yield the product's files; cluster/ and tuning/ once, though links in dpdist/ lead there."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).parts
            if parts[0] != "dpdist" or parts[1] not in PACKAGES:
                yield path


def module_of(root: Path, path: Path) -> str:
    """Return the name under which a file is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "dpdist" else ("dpdist", *parts))


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the product's modules that a file imports, wherever and for whatever it does so."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules


def circles(needs: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach one another."""
    reached = {name: set(below) for name, below in needs.items()}
    for middle in needs:
        for below in reached.values():
            if middle in below:
                below |= reached[middle]
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in needs
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a file's functions and classes, and of its classes' members."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in tree.body:
        if isinstance(node, kinds):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{inner.name}" for inner in node.body
                            if isinstance(inner, kinds))  # fmt: skip


def walk(names: list[str], where: dict[str, list[str]]) -> list[str]:
    """Return the files that define these names, in order, each once. Raises LookupError for a name
    that is defined nowhere or more than once."""
    files: dict[str, None] = {}
    for name in names:
        if len(where.get(name, [])) != 1:
            raise LookupError(f"{name} is defined in {where.get(name, [])}: name it more closely")
        files[where[name][0]] = None
    return list(files)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a file: of the module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def wording(texts: list[str]) -> dict[str, float]:
    """Return how often docstrings avoid a noun: per 1,000 words, and as their first word."""
    words = [word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", text)]
    vague = sum(word in ("what", "whatever", "whoever") for word in words)
    return {
        "'what' in 1,000 words of docstrings": 1000 * vague / max(1, len(words)),
        "docstrings that begin with Of": sum(text.startswith("Of ") for text in texts),
        "docstrings that begin with What": sum(text.startswith("What") for text in texts),
    }


def without_docstring_rules(root: Path, paths: list[str]) -> list[str]:
    """Return the files for which pyproject.toml leaves out ruff's rules for docstrings."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    ignored = pyproject["tool"]["ruff"]["lint"].get("per-file-ignores", {})
    patterns = []
    for pattern, codes in ignored.items():
        if "D" in codes:
            first, inner, last = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", pattern).groups()
            patterns += [f"{first}{name}{last}" for name in (inner or "").split(",")]
    return [path for path in paths if any(fnmatch(path, pattern) for pattern in patterns)]


def figures(root: Path) -> dict[str, float]:
    """Return each figure by its name."""
    paths = {module_of(root, path): path for path in product_files(root)}
    trees = {module: ast.parse(path.read_text()) for module, path in paths.items()}
    needs = {name: imports_of(tree, set(paths)) - {name} for name, tree in trees.items()}
    where: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for name in definitions(tree):
            where.setdefault(name, []).append(module)
    files = [path for path in paths.values() if path.name != "__init__.py"]
    return {
        "files without package faces": len(files),
        "median of their lines": median(len(path.read_text().splitlines()) for path in files),
        "arrows": sum(map(len, needs.values())),
        "circles": len(circles(needs)),
        **{f"files for {name}": len(walk(names.split(), where)) for name, names in WALKS.items()},
        "files without rules for docstrings": len(
            without_docstring_rules(root, [str(path.relative_to(root)) for path in files])
        ),
        **wording([text for tree in trees.values() for text in docstrings(tree)]),
    }


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    for name, value in figures(checkout).items():
        print(f"{name:48} {round(value, 2):,}")
