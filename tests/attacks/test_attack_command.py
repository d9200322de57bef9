"""`dpdist attack` on a run folder made by hand, and what the report makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.certificates import shift_classes
from support.local_execution import call
from support.settings import sets

import dpdist.data
from dpdist import models
from dpdist.attacks.table import check_line, read_attack
from dpdist.certification import table as certificates
from dpdist.certification.noise import norm_equivalence_factor
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import key_id
from dpdist.reports.charts import attack_outcome_table
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.monitoring import write_summary

RECIPE = {
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "training": {"batch_size": 100, "steps": 1, "learning_rate": 0.1},
    "certify": {"sigma": 0.3, "n": 1000, "n0": 50, "max_inputs": 20, "radii": [0.1, 0.2]},
    "resources": {"certify_actors": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that finished training: the nearest mean as a linear model (digits are easy)."""
    base = tmp_path_factory.mktemp("runs")
    train = dpdist.data.load(dpdist.data.DataSource("digits", 10), "train")
    recipe = parse_recipe(RECIPE, "recipe")
    folder = RunFolder(base / "small")
    plan = prepare(recipe, folder, "recipe").plan
    spec = models.ModelSpec("linear", train.input_shape, 10)
    model = models.build_model(spec)
    x, y = train.batch(slice(None)).flatten(1), torch.from_numpy(np.array(train.labels))
    means = torch.stack([x[y == c].mean(0) for c in range(10)])
    with torch.no_grad():
        model[1].weight.copy_(means)  # type: ignore[index, operator, union-attr]
        model[1].bias.copy_(-means.square().sum(1) / 2)  # type: ignore[index, operator, union-attr]
    models.save(model, spec, folder.model_folder)
    with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
        told = {"machines": "by hand", "world_size": "1", "threads": "1", "code": "none"}
        ledger.begin_attempt({**told, "key": key_id(folder.read_run_key())})
        ledger.record(0, "0" * 64)
        own = models.model_hash(folder.model_folder)
        write_summary(folder, ledger, 1, 1.0, fallback_layers=[], model=own)
    return base


def good(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def attacked(here: None, runs: Path) -> tuple[Path, str]:
    good("certify", "small", "--runs", runs)
    output = good(
        "attack", "small", "--runs", runs, "--set", "attack.sigma=0.3",
        *sets("attack", "norm=l2", "sizes=[0.2,1.0]", "steps=4", "attacks=[fgsm,pgd]"),
        *sets("attack", "max_inputs=20", "n=300", "samples=4"),
    )  # fmt: skip
    return runs / "small", output


@pytest.mark.slow
def test_accuracy_is_shown_beside_the_certified_one(attacked: tuple[Path, str]) -> None:
    folder, output = attacked
    path = folder / "attacks/l2-sigma-0.3-steps-4-first-20/attacks.parquet"
    assert str(path) in output and "smoothed, sigma 0.3" in output
    table = read_attack(path)
    shown = attack_outcome_table(table, load_results(RunFolder(folder)).tables)
    assert shown.header == [
        "l2 size", "attack", "right", "abstained", "wrong", "certified sigma-0.3-fixed-n-1000"
    ]  # fmt: skip
    assert [(row[0], row[1]) for row in shown.rows] == [
        ("0", "none"),
        *[(size, name) for size in ("0.2", "1") for name in ("fgsm", "pgd", "all of them")],
    ]
    for row in shown.rows:
        assert all(value in output for value in row)
        right, abstained, wrong, certified = (float(value) for value in row[2:])
        assert right + abstained + wrong == pytest.approx(100)
        # What is certified is not answered with another class under attack; two errors of 0.001 in
        # each of 20 inputs: below 0.04 that any of them happens at a size, were they as large as
        # allowed. An abstention may happen to a valid certificate.
        assert certified <= right + abstained + 1e-9
    assert shown.notes == ["certified sigma-0.3-fixed-n-1000: 20 of these inputs"]


@pytest.mark.slow
def test_shares_are_of_all_inputs_and_worst_is_over_the_attacks(attacked) -> None:
    table = read_attack(next((attacked[0] / "attacks").glob("l2-*/attacks.parquet")))
    for size in table.sizes:
        right = {}
        for name in table.attacks:
            here = (table.attack == name) & (table.size == size)
            assert here.sum() == table.inputs == 20
            good_ones = table.index[here & (table.prediction == table.label)]
            right[name] = set(good_ones.tolist())
            assert table.outcome_shares(name, size).correct == len(right[name]) / 20
        assert table.worst(size).correct == pytest.approx(len(right["fgsm"] & right["pgd"]) / 20)


@pytest.mark.slow
def test_certificates_are_checked_and_false_ones_fail(attacked, runs: Path) -> None:
    output = good(
        "attack",
        "small",
        "--runs",
        runs,
        "--check-certificates",
        *sets("attack", "steps=4", "samples=4"),
    )
    assert "0 of " in output and "plausible" in output and "IMPLAUSIBLE" not in output
    # The same table, each certificate of another class.
    source = runs / "small/certificates/sigma-0.3-fixed-n-1000/certificates.parquet"
    table = certificates.read(source)
    false = source.parent.with_name("false") / source.name
    certificates.write(shift_classes(table), false)
    result = call(
        "attack", "small", "--runs", runs, "--check-certificates",
        *sets("attack", "certificates='false'", "step_scale=5"),
    )  # fmt: skip
    assert result.exit_code == 1 and "IMPLAUSIBLE" in result.output
    facts = load_results(RunFolder(runs / "small"))
    assert [check["plausible"] for check in facts.certificate_checks] == [False, True]
    assert "IMPLAUSIBLE" in check_line(facts.certificate_checks[0])
    page = (runs / "small/report/index.html").read_text()
    assert "IMPLAUSIBLE: these certificates do not hold" in page
    assert '<p class="verdict bad">' in page and "<strong>Warning</strong>An attack" in page


@pytest.mark.parametrize("certified", ["l1", "l2", "linf"])
@pytest.mark.parametrize("attacked_norm", ["l2", "linf"])
def test_balls_fit_into_certified_balls(certified: str, attacked_norm: str) -> None:
    order = {"l1": 1, "l2": 2, "linf": np.inf}
    rng = np.random.default_rng(0)
    factor = norm_equivalence_factor(certified, attacked_norm, 30)
    # The corners and axes are extreme; random points are in between.
    points = [np.ones(30), np.eye(30)[0], *rng.normal(size=(200, 30))]
    worst = max(
        np.linalg.norm(p, order[certified]) / np.linalg.norm(p, order[attacked_norm])
        for p in points
    )
    assert worst == pytest.approx(factor)
    with pytest.raises(ValueError, match="norms must be"):
        norm_equivalence_factor("l3", "l2", 4)
