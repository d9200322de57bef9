from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.certification.registry import kind_of, settings_of
from dpdist.certification.table_reader import (
    achievable_label_radii,
    merge_tables,
    recertify,
    shards_of_one_run,
    unmerged_tables,
)
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import UserError

pytestmark = pytest.mark.guarantee

CLASSIFIER = {"form": "frozen", "batch": 100, "check": "c", "notes": []}


def make(histograms: Any, labels: Any, mode: str = "fixed", **changes: Any) -> pa.Table:
    n = int(np.sum(histograms[0]))
    settings: Any = settings_of({"sigma": 0.5, "n": n, "mode": mode, "radii": (0.25,), **changes})
    rows = []
    for place, (histogram, label) in enumerate(zip(histograms, labels, strict=True)):
        index = settings.start + place * settings.every
        selected = int(np.argmax(histogram))
        partial: dict[str, Any] = {"selected": selected, "histogram": [int(c) for c in histogram]}
        if mode != "fixed":
            k = int(histogram[selected])
            partial |= {"k": k, "n": n, "looks": 1, "passed": 1, "hits": [k]}
        rows.append(
            kind_of(type(settings)).table_format.row(
                settings,
                index,
                label,
                settings.decide([partial], settings.build_sampler(None, ())),
                None,
            )
        )
    about = {
        "settings": {"sigma": 0.5, "noise": settings.noise, "alpha": settings.alpha,
                     "start": settings.start, "every": settings.every, "max_inputs": None},
        "model": "m", "data": "d", "seed": f"s{settings.start}", "classifier": CLASSIFIER,
    }  # fmt: skip
    return tables.build(rows, about)


HISTOGRAMS = [[990, 10, 0], [0, 700, 300], [510, 490, 0], [1000, 0, 0]]
LABELS = [0, 1, 0, 2]


def test_rebound_equals_certifying_at_that_alpha() -> None:
    table = make(HISTOGRAMS, LABELS)
    again = recertify(table, 0.05)
    assert again.column("k").equals(table.column("k"))
    expected = make(HISTOGRAMS, LABELS, alpha=0.05)
    assert again.to_pylist() == expected.to_pylist()
    assert tables.read_job_record(again)["rebound_alpha"] == 0.05
    assert recertify(table, 0.001).to_pylist() == table.to_pylist()


def test_rebound_of_anytime_results_is_a_confidence_sequence() -> None:
    table = make(HISTOGRAMS, LABELS, mode="anytime")
    again = recertify(table, 0.05)
    assert again.to_pylist() == make(HISTOGRAMS, LABELS, mode="anytime", alpha=0.05).to_pylist()
    naive = clopper_pearson_lower(990, 1000, 0.05)
    assert again["p_lower"][0].as_py() < naive


def test_early_stopped_results_cannot_be_rebounded() -> None:
    with pytest.raises(UserError, match="early stopping"):
        recertify(make(HISTOGRAMS, LABELS, mode="target"), 0.05)


def test_shares_merge_into_the_whole() -> None:
    parts = [make(HISTOGRAMS[i::2], LABELS[i::2], start=i, every=2) for i in (1, 0)]
    whole = merge_tables(parts)
    assert whole.to_pylist() == make(HISTOGRAMS, LABELS).to_pylist()
    assert tables.read_job_record(whole)["seeds"] == ["s0", "s1"]
    assert merge_tables([whole, parts[0]]).num_rows == 4  # the same row twice is one row


def test_other_results_do_not_merge() -> None:
    table = make(HISTOGRAMS, LABELS)
    changed = make([[980, 20, 0]], [0])
    with pytest.raises(UserError, match="two different results for input 0"):
        merge_tables([table, changed])
    with pytest.raises(UserError, match="cannot merge results that differ in alpha"):
        merge_tables([table, make(HISTOGRAMS, LABELS, alpha=0.05)])
    with pytest.raises(UserError, match="differ in alpha, rebound_alpha"):
        merge_tables([table, recertify(table, 0.05)])
    about = {**tables.read_job_record(table), "model": "other"}
    with pytest.raises(UserError, match="differ in model"):
        merge_tables([table, tables.build(table.to_pylist(), about)])
    with pytest.raises(UserError):
        merge_tables([])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": "other"}, "data"),
        ({"model": "other"}, "model"),
        ({"settings": {"sigma": 0.5, "n0": 50}}, "n0"),
        ({"classifier": {**CLASSIFIER, "form": "eager"}}, "classifier.form"),
        ({"classifier": {**CLASSIFIER, "device": "cuda"}}, "classifier.device"),
        ({"rebound_bound": "counts"}, "rebound_bound"),
    ],
)
def test_shares_of_one_certification_differ_in_their_inputs_alone(
    change: dict[str, Any], named: str
) -> None:
    first, second = half(0), half(1)
    about = tables.read_job_record(second)
    for name, value in change.items():
        more = about["settings"] if name == "settings" else {}
        about[name] = {**more, **value} if isinstance(value, dict) else value
    rows = [{**row, "n0": 50} if named == "n0" else row for row in second.to_pylist()]
    other = tables.build(rows, about)
    assert shards_of_one_run([first, other]) == [] and unmerged_tables([first, other])[0][2] == [
        named
    ]
    with pytest.raises(UserError, match=f"cannot merge results that differ in {named} \\(docs/"):
        merge_tables([first, other])
    assert shards_of_one_run([first, second]) == [[0, 1]]


def test_shown_radii_keep_no_shares_apart() -> None:
    """No count depends on them; decided radii are another matter."""
    parts = [half(0, settings={"radii": [0.5, 0.1]}), half(1, settings={"radii": [0.25]}), half(1)]
    assert shards_of_one_run(parts[:2]) == [[0, 1]] and shards_of_one_run(parts) == [[0, 1, 2]]
    whole = merge_tables(parts)
    assert whole.num_rows == 4 and table_reader.from_arrow(whole).radii == (0.1, 0.25, 0.5)
    assert "radii" not in tables.read_job_record(merge_tables([half(0), half(1)]))["settings"]
    for mode in ("target", "anytime"):
        decided = []
        for start, radius in enumerate((0.25, 0.5)):
            part = make(HISTOGRAMS[start::2], LABELS[start::2], mode, start=start, every=2)
            about = tables.read_job_record(part)
            about["settings"] = {**about["settings"], "mode": mode, "radii": [radius]}
            decided.append(tables.build(part.to_pylist(), about))
        assert shards_of_one_run(decided) == [] and unmerged_tables(decided)[0][2] == ["radii"]
        with pytest.raises(UserError, match="cannot merge results that differ in radii"):
            merge_tables(decided)


def test_certified_accuracy_is_of_all_inputs() -> None:
    # Right and certified: the first two of four. The third abstains, the last is wrong.
    found = table_reader.from_arrow(make(HISTOGRAMS, LABELS))
    assert found.certified_accuracy(0.0) == 0.5 and found.abstention_rate == 0.25
    radii = found.radius[:2]
    assert found.certified_accuracy(float(radii.max())) == 0.25
    assert found.average_radius == pytest.approx(radii.sum() / 4)
    assert found.certified_accuracy(0.0, "cohen", "l2") == 0.5


def test_one_table_states_one_alpha() -> None:
    table = make(HISTOGRAMS, LABELS)
    rows = table.to_pylist()
    rows[2] = {**rows[2], "alpha": 0.05}
    mixed = tables.build(rows, tables.read_job_record(table))
    with pytest.raises(UserError, match=r"its rows differ in alpha \(0.001, 0.05\)"):
        table_reader.from_arrow(mixed)
    for row in rows:
        row["alpha"] = 0.05
    with pytest.raises(UserError, match=r"its rows say alpha 0.05, its settings 0.001"):
        table_reader.from_arrow(tables.build(rows, tables.read_job_record(table)))
    assert table_reader.from_arrow(recertify(table, 0.05)).alpha == 0.05


def test_shares_are_found_among_other_tables() -> None:
    halves = [make(HISTOGRAMS[i::2], LABELS[i::2], start=i, every=2) for i in (0, 1)]
    others = [
        make(HISTOGRAMS[i::2], LABELS[i::2], start=i, every=2, noise="laplace") for i in (0, 1)
    ]
    looser = [recertify(half, 0.05) for half in halves]
    parts = [halves[0], looser[0], merge_tables(halves), others[1], halves[1], others[0], looser[1]]
    assert shards_of_one_run(parts) == [[0, 4], [1, 6], [3, 5]]
    assert shards_of_one_run(parts[:4]) == []
    assert table_reader.from_arrow(merge_tables(looser)).alpha == 0.05


def half(start: int, settings: dict[str, Any] | None = None, **classifier: object) -> pa.Table:
    part = make(HISTOGRAMS[start::2], LABELS[start::2], start=start, every=2)
    about = tables.read_job_record(part)
    about["classifier"] = {**about["classifier"], **classifier}
    about["settings"] = {**about["settings"], **(settings or {})}
    return tables.build(part.to_pylist(), about)


def test_what_was_seen_on_check_inputs_keeps_no_shares_apart() -> None:
    parts = [half(0, notes=["b"]), half(1, check="other", notes=["a", "b"])]
    assert shards_of_one_run(parts) == [[0, 1]] and unmerged_tables(parts) == []
    classifier = tables.read_job_record(merge_tables(parts))["classifier"]
    assert classifier["notes"] == ["a", "b"] and "check" not in classifier
    assert classifier["form"] == CLASSIFIER["form"]


@pytest.mark.parametrize("more", [{"form": "frozen"}, {"batch": 9}, {"generator": "aes"}])
def test_what_was_asked_for_is_not_what_is_executed(more: dict[str, Any]) -> None:
    parts = [half(0), half(1, settings=more)]
    assert shards_of_one_run(parts) == [[0, 1]] and merge_tables(parts).num_rows == 4
    # A key that there was not, and one that is not set, are the same.
    assert shards_of_one_run([half(0), half(1, settings={"new": None})]) == [[0, 1]]
    assert shards_of_one_run([half(0), half(1, settings={"new": 0})]) == []


def test_what_is_left_apart_is_said() -> None:
    far = make(HISTOGRAMS, LABELS, alpha=0.05, noise="laplace")
    whole = merge_tables([half(0), half(1)])
    parts = [far, whole, half(0), half(1, form="eager")]
    assert shards_of_one_run(parts) == []
    assert [(place, near, names) for place, near, names in unmerged_tables(parts)][:2] == [
        (2, 3, ["classifier.form"]),
        (3, 2, ["classifier.form"]),
    ]
    assert unmerged_tables([whole, far]) == []  # nothing else is near, a merged one is no share
    # Beside shares that are merged, too.
    parts = [half(0), half(1, form="eager"), half(1)]
    assert shards_of_one_run(parts) == [[0, 2]] and unmerged_tables(parts) == [
        (1, 0, ["classifier.form"])
    ]


N, DRAWS = 60, 1000
BOUNDARY = stats.norm.cdf(1.0)  # of radius 0.5 at sigma 0.5


def counted(hits: Any, alpha: float) -> pa.Table:
    return make([[int(k), DRAWS - int(k)] for k in hits], [0] * len(hits), alpha=alpha)


def test_the_reach_of_a_label_is_that_of_its_upper_bound_rounded_up() -> None:
    k = np.arange(1, DRAWS, 37)
    reach = achievable_label_radii(counted(k, 0.1))
    wanted = 0.5 * stats.norm.ppf(stats.beta.ppf(0.9, k + 1, DRAWS - k))
    assert reach is not None and (reach[wanted > 0] >= wanted[wanted > 0]).all()
    assert reach[wanted > 0] == pytest.approx(wanted[wanted > 0], rel=1e-9)
    assert (reach[wanted <= 0] <= 0).all()


def test_a_radius_in_another_norm_is_the_largest_ball_inside() -> None:
    found = table_reader.from_arrow(make(HISTOGRAMS, LABELS))
    (own,), (other,) = found.sizes_in_norm("l2", 64), found.sizes_in_norm("linf", 64)
    assert found.norm == own.norm == "l2" and other.norm == "linf"
    assert (own.size == found.radius).all() and own.size.max() > 0
    assert np.allclose(other.size, found.radius / 8, rtol=1e-12, atol=0)
    assert (other.size <= found.radius / 8 * (1 + 1e-15)).all()
