"""Strict add-or-remove: with a declared number of records nothing published tells the true one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.training import execute, make

from dpdist.config.training import CANONICAL_SHARDS
from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping, rounding_slack, sum_slack
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.sampling import Blocks
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.model_setup import build_engine
from dpdist.training.private_step import PrivateStep, build_shards

NAMES = [f"x{i}" for i in range(6)]


def recipe_on(tmp: Path, records: int, **changes) -> tuple[Recipe, RunFolder]:
    """A run on the first `records` of the same records; everything else is equal."""
    root = tmp / f"on-{records}"
    rng = np.random.default_rng(3)
    for split, rows in (("train", records), ("test", 30)):
        table = {name: rng.random(500)[:rows] for name in NAMES}
        table["label"] = rng.integers(0, 3, 500)[:rows]
        write_split(root / "mine", split, **table)
    columns = {"features": NAMES, "label": "label"}
    settings = {
        "data": {"name": "mine", "root": str(root), "classes": 3, "columns": columns},
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "nominal_records": 128},
        "training": {"batch_size": 16, "epochs": 1, "learning_rate": 0.1},
    }
    return make(tmp, f"run-{records}", **(settings | changes))


def trained_on(tmp: Path, records: int) -> RunFolder:
    recipe, folder = recipe_on(tmp, records)
    execute(prepare(recipe, folder, "test"), world_size=2)
    return folder


def test_one_record_more_changes_nothing_that_is_published(tmp_path):
    published = []
    for records in (120, 121):
        folder = trained_on(tmp_path, records)
        assert PrivacyPlan.from_dict(json.loads(folder.plan.read_text())).nominal
        write_release(folder)
        names = ("privacy_card.json", "privacy_card.md", "model.json", "release.json", "README.md")
        # The released weights, noise and all, are another draw in each run; the card names them.
        weights = json.loads((folder.release_folder / "privacy_card.json").read_text())["extra"]
        own = weights["model hash"].encode()
        files = {
            n: (folder.release_folder / n).read_bytes().replace(own, b"its own") for n in names
        }
        summary = [row for row in load_results(folder).summary() if row[0] != "report"]
        published.append((folder.plan.read_bytes(), files, summary))
        ledger = Ledger.read(folder.ledger)
        assert ledger.release_counts == dict.fromkeys(range(8), 1)  # 128 // 16 steps, whatever N is
    assert published[0] == published[1]
    card = json.loads(published[0][1]["privacy_card.json"])
    assert card["relation"] == card["guarantee"]["relation"] == "add-or-remove-one"
    assert (card["records"], card["records_are"]) == (128, "declared")


def test_the_batch_is_drawn_from_all_records_at_the_declared_rate(tmp_path):
    """Neither the rate nor the divisor follows the true number, here more than the declared."""
    recipe, folder = recipe_on(tmp_path, 260)
    job = prepare(recipe, folder, "test")
    step = job.plan.step(0)
    assert (step.sample_rate, step.expected_batch) == (16 / 128, 16)
    execute(job)
    lines = folder.metrics.read_text().splitlines()
    sizes = [json.loads(line)["examples"] for line in lines]
    # 8 batches of 260 records at rate 1/8: mean 32.5, standard error 1.9. The test's fixed key.
    assert 25 < np.mean(sizes) < 40


@pytest.mark.parametrize(("nominal", "reproducible"), [(None, True), (128, False)])
def test_the_clip_leaves_room_for_one_block(tmp_path, nominal, reproducible):
    training = {"batch_size": 16, "steps": 2, "learning_rate": 0.1, "reproducible": reproducible}
    private = {"noise_multiplier": 1.0, "delta": 1e-3, "nominal_records": nominal}
    more = {"resources": {"workers": 3}, "training": training, "privacy": private}
    recipe, _ = recipe_on(tmp_path, 120, **more)
    engine = build_engine(recipe, torch.nn.Linear(6, 3))
    engine.blocks = Blocks(1, 8)
    inputs, labels = 100 * torch.ones(1, 6), torch.zeros(1, dtype=torch.int64)
    norm = float(engine.clipped_sum(inputs, labels, draw_key=bytes(32)).flat.norm())
    room = rounding_slack(torch.float32) + sum_slack(torch.float32)
    assert norm == pytest.approx(1 / (1 + room), rel=1e-4)


class Rows:
    """Records whose inputs are their numbers, without some of them."""

    def __init__(self, kept: np.ndarray) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_step_s_shard_follows_from_a_record_s_own_position(reproducible):
    """Each shard's members are those of the whole batch with that hash, whatever is beyond them.

    So under the coupling of positions no record but the one that is left out changes its shard: a
    position's sample, shard and block are functions of the key and of this position.
    """
    plan = PrivacyPlan.dp_sgd(
        records=4000, batch_size=1000, noise_multiplier=1.0, steps=1, delta=1e-3
    )

    def shards_of(records: int, workers: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(workers):
            reducer = Reducer(rank, workers, torch.device("cpu"))
            engine = GradientEngine(
                torch.nn.Linear(2, 2), cross_entropy, clipping=FlatClipping(1.0)
            )
            shards = build_shards(records, 4000, reducer, reproducible, nominal=True)
            step = PrivateStep(
                engine, Rows(np.arange(records)), bytes(32), reducer=reducer, shards=shards
            )
            for row, begin, end in shards.local_shards:
                own = row if reproducible else rank
                members = step._members_of_shard(bytes(32), row, begin, end, plan.step(0))
                assert not found.keys() & set(members.tolist())
                found |= dict.fromkeys(members.tolist(), own)
        whole = step.members(bytes(32), 0, records, plan.step(0))
        assert sorted(found) == whole.tolist()
        return found

    fewer, more = shards_of(3700, 3), shards_of(4300, 3)
    assert fewer.items() <= more.items()
    sizes = np.bincount(list(more.values()))
    assert len(sizes) == (CANONICAL_SHARDS if reproducible else 3)
    assert sizes.min() > 0.7 * sizes.mean()


def test_a_counted_number_is_named_in_the_relation(tmp_path):
    recipe, folder = recipe_on(tmp_path, 120, privacy={"noise_multiplier": 1.0, "delta": 1e-3})
    job = prepare(recipe, folder, "test")
    guarantee = job.plan.guarantee()
    assert guarantee.relation == "zero-out adjacency (data set size public)"
    execute(job)
    described = load_results(folder).privacy_card()
    assert described["relation"] == guarantee.relation
    assert described["records_are"] == "counted"


def test_what_would_depend_on_the_true_number_is_refused(tmp_path):
    strict = {"epsilon": 2.0, "delta": 1e-3, "nominal_records": 128}
    search = {
        "space": {"training.learning_rate": {"choice": [0.1, 0.2]}},
        "num_trials": {"name": "geometric", "mean": 3},
    }
    for changes, key in (
        ({"privacy": strict | {"batch_cap": 30}}, "batch_cap"),
        ({"data": {"name": "mine", "max_train": 60}}, r"data\.max_train"),
        ({"tune": search}, "tune"),
    ):
        with pytest.raises(UserError, match=key):
            recipe_on(tmp_path, 120, **changes)
    with pytest.raises(ValueError):
        PrivacyPlan(128, (GaussianSteps(3, 1.0, 0.1, 20),), 1e-3, nominal=True)
    large = {"batch_size": 129, "steps": 3, "learning_rate": 0.1}
    with pytest.raises(UserError, match="batch_size"):
        prepare(*recipe_on(tmp_path, 120, training=large), "test")
