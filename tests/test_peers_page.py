"""docs/explanation/peers.md: its tests and links, and that examples execute what they account."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.privacy.phases import FixedBatches, GaussianAnswers, GaussianSteps, UpfrontPhase
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.runs.recipe import RECIPES_FOLDER, load_recipe, make_plan
from dpdist.training.private_step import PrivateStep
from dpdist.tuning.preview import KNOWN_SIZES

pytestmark = pytest.mark.guarantee

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "peers.md"
RECIPES = sorted(RECIPES_FOLDER.glob("*.yaml"))
RECORDS = 4000  # of the stand-in that samplers choose from
STEPS = 40
UNLIKELY = 1e-9

# --- the page ---------------------------------------------------------------------------------

TEST = re.compile(r"`(\w[\w/]*\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
THREAD = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/(?:(?:issues|pull)/\d+|commit/[0-9a-f]{7,40})"
    r"|https://arxiv\.org/abs/\d{4}\.\d{5}"
)


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of every table, without headings and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ruled = {place for place, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
    return [row for place, row in enumerate(cells) if not {place, place + 1} & ruled]


@functools.cache
def defined_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


def test_every_test_on_the_page_is_there():
    named = TEST.findall(PAGE.read_text())
    lost = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / "tests" / path).is_file() or name not in defined_in(ROOT / "tests" / path)
    ]
    assert lost == []
    assert len(set(named)) > 60 and all(name.startswith("test_") for _, name in named)


def test_every_link_is_a_thread_a_paper_or_a_page():
    for link in LINK.findall(PAGE.read_text()):
        inside = not link.startswith("http") and (PAGE.parent / link.partition("#")[0]).exists()
        assert inside or THREAD.fullmatch(link), link


def test_every_row_names_its_source_and_a_test_or_says_that_there_is_none():
    tables, end, _ = PAGE.read_text().partition("\n## What is divided by what\n")
    rows = rows_of(tables)
    assert end and len(rows) > 50 and all(len(row) == 4 for row in rows)
    for where, wrong, here, shown in rows:
        assert LINK.search(where) or "no thread" in where, where
        assert wrong.endswith(".") and here.endswith("."), (wrong, here)
        assert TEST.search(shown) or "no test" in shown, shown


def test_a_row_without_a_test_would_be_seen():
    table = "| a | b |\n|---|---|\n| [1](https://x.y/z) | `test_a.py::test_b` |\n| c | no |\n"
    assert rows_of(table) == [["[1](https://x.y/z)", "`test_a.py::test_b`"], ["c", "no"]]
    assert not THREAD.fullmatch("https://github.com/a/b/blob/main/c.py")
    assert not TEST.search("no") and TEST.findall("`a/test_b.py::test_c`")


# --- every example executes what it accounts ----------------------------------------------------


def plan_of(path: Path) -> PrivacyPlan:
    """Return the plan of a recipe that comes along. A target epsilon becomes a fixed noise: rates
    and counts do not depend on it, and calibrating takes a second for each recipe."""
    recipe = load_recipe(path)
    changes = {"privacy.delta": 1e-7}
    if recipe.privacy.epsilon is not None:
        changes |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.25}
    records = KNOWN_SIZES.get(recipe.data.name, 50_000)
    return make_plan(load_recipe(path, changes), records, path.stem)


def accounted_steps(event: dpa.DpEvent, count: int = 1) -> Iterator[tuple[int, float, float]]:
    """Yield (how often, rate, noise multiplier) of every Gaussian in what the accountant reads."""
    if isinstance(event, dpa.ComposedDpEvent):
        for each in event.events:
            yield from accounted_steps(each, count)
    elif isinstance(event, dpa.SelfComposedDpEvent):
        yield from accounted_steps(event.event, count * event.count)
    elif isinstance(event, dpa.PoissonSampledDpEvent):
        for often, rate, noise in accounted_steps(event.event, count):
            yield often, rate * event.sampling_probability, noise
    elif isinstance(event, dpa.GaussianDpEvent):
        yield count, 1.0, event.noise_multiplier
    else:
        assert isinstance(event, dpa.NonPrivateDpEvent | dpa.RandomizedResponseDpEvent), event


class StandIn:
    """Records that are counted and never read."""

    def __len__(self) -> int:
        return RECORDS


def drawn(step_plan: StepPlan) -> np.ndarray:
    """Return which records join each step, bool (STEPS, RECORDS), by the step's own sampler."""
    engine = GradientEngine(torch.nn.Linear(2, 2), cross_entropy, clipping=FlatClipping(1.0))
    step = PrivateStep(engine, StandIn(), key=bytes(32))  # type: ignore[arg-type]
    joins = np.zeros((STEPS, RECORDS), dtype=bool)
    for t in range(STEPS):
        joins[t, step.members(t.to_bytes(32, "big"), 0, RECORDS, step_plan)] = True
    return joins


def is_poisson(joins: np.ndarray, rate: float) -> bool:
    """Whether the sizes of these batches scatter about rate * records as independent records do.

    Mean and spread each fail falsely with probability 2e-9, by the normal approximation.
    """
    if rate == 1.0:
        return bool(joins.all())
    mean, variance = rate * joins.shape[1], rate * (1 - rate) * joins.shape[1]
    sizes = joins.sum(1)
    off = (sizes.mean() - mean) ** 2 * len(sizes) / variance
    spread = float(((sizes - mean) ** 2).sum() / variance)
    low, high = chi2.ppf(UNLIKELY, len(sizes)), chi2.isf(UNLIKELY, len(sizes))
    return bool(off < chi2.isf(UNLIKELY, 1) and low < spread < high)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_executes_the_sampler_that_it_accounts(path):
    """Rate, noise and number of the steps in the accountant's event are those of the steps that
    run, and what draws their records is Poisson at that rate. Recipes without such steps pay before
    the first one, for votes, answers or noisy records."""
    plan = plan_of(path)
    if any(isinstance(phase, FixedBatches) for phase in plan.phases):
        assert plan.guarantee().epsilon == math.inf  # as published, and nothing is proved of it
        return
    accounted = Counter[tuple[float, float]]()
    for often, rate, noise in accounted_steps(plan.event()):
        accounted[rate, noise] += often
    executed = Counter[tuple[float, float]]()
    for phase in plan.phases:
        if isinstance(phase, GaussianSteps):
            executed[phase.sample_rate, phase.noise_multiplier] += phase.steps
    ends = np.cumsum(plan.step_counts()).tolist()
    planned = {plan.step(t) for end in ends for t in (end - 1, end % plan.steps)}  # last and first
    for (rate, noise), steps in executed.items():
        assert accounted[rate, noise] == steps
        (taken,) = {
            each for each in planned
            if (each.sample_rate, each.noise_multiplier) == (rate, noise)
        }  # fmt: skip
        assert taken.noise_std == (noise * plan.clip_norm if noise else 0)
        assert taken.expected_batch == pytest.approx(rate * plan.records, rel=1e-12)
        assert is_poisson(drawn(taken), rate)
    assert executed or all(isinstance(p, GaussianAnswers | UpfrontPhase) for p in plan.phases)


def test_other_samplers_are_told_from_it():
    """Shuffled batches, a fixed number at random, a rate that is 1.3 times the accounted one."""
    rng, rate = np.random.default_rng(5), 1 / STEPS
    owner = rng.permutation(RECORDS) % STEPS
    shuffled = owner == np.arange(STEPS)[:, None]
    fixed = np.zeros((STEPS, RECORDS), dtype=bool)
    for row in fixed:
        row[rng.choice(RECORDS, RECORDS // STEPS, replace=False)] = True
    assert is_poisson(rng.random((STEPS, RECORDS)) < rate, rate)
    assert not is_poisson(shuffled, rate) and not is_poisson(fixed, rate)
    assert not is_poisson(rng.random((STEPS, RECORDS)) < 1.3 * rate, rate)
    assert not is_poisson(rng.random((STEPS, RECORDS)) < 0.99, 1.0)


# What these files choose or order at random: public records, check examples, releases of an audit,
# invented pictures.
OTHER_ORDERS = {
    "training/public_training.py", "methods/hidden_noise_shares.py", "models/batch_independence.py",
    "audits/mechanism.py", "data/synthetic.py",
    "integrations/lightning.py",  # a loader of step numbers: it holds no record
}  # fmt: skip
LOADERS = {"DataLoader", "RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler"}
SAMPLERS = LOADERS | {"randperm", "permutation", "shuffle", "choice"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with the last part of its function's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


@pytest.mark.long
def test_no_other_sampler_draws_private_records():
    """Nothing in the package but `poisson_sample` chooses the records of a step, and its rate is
    always one that a plan or a section states."""
    drawing = set()
    for path in sorted((ROOT / "dpdist").rglob("*.py")):
        name = path.relative_to(ROOT / "dpdist").as_posix()
        for called, node in calls(ast.parse(path.read_text())):
            if called == "poisson_sample":
                drawing.add(name)
                assert ast.unparse(node.args[3]).endswith("plan.sample_rate") or (
                    ast.unparse(node.args[3]) == "section.sample_rate"
                )
            assert called not in SAMPLERS or name in OTHER_ORDERS, f"{name}: {called}"
    assert drawing == {
        "training/private_step.py", "audits/trainings.py", "methods/hidden_noise_shares.py"
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_gives_its_records_and_no_sampler(path):
    """One that trains privately; the others train no private record at all."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    called = {name for name, _ in calls(ast.parse("\n".join("".join(c["source"]) for c in cells)))}
    assert not called & LOADERS
    assert called & {"PrivateTraining", "fit", "run"} or path.stem == "certify_any_model"
