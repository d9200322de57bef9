"""Records of the user's own: every kind of data becomes the same records, or is refused."""

from __future__ import annotations

import os
import pickle
import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.optional_extras import needs_datasets
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from dpdist.core.errors import UserError
from dpdist.data import protocol
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records, canonical

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
SECRET = 91370  # a label that must not be printed
KEY = bytes(range(32))
FEW = np.array([4, 0, 3])
OWN = np.random.default_rng(0)


class Items(Dataset):
    """A map-style data set with a transform, as torchvision's have it."""

    def __init__(self, transform=None, inputs=X, labels=Y):
        self.inputs, self.labels, self.transform = inputs, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        item = torch.from_numpy(np.array(self.inputs[index]))
        return (item if self.transform is None else self.transform(item)), int(self.labels[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def frame() -> pd.DataFrame:
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "label": Y})


def table() -> pa.Table:
    return pa.table({"x": list(X), "label": Y})


def parquet(tmp_path):
    path = tmp_path / "some.parquet"
    pq.write_table(table(), path)
    return as_records(path, target="label", classes=3)


KINDS: dict[str, Any] = {
    "numpy float64": lambda _: as_records((X.astype(float), Y), classes=3),
    "torch": lambda _: as_records((torch.from_numpy(X), torch.from_numpy(Y)), classes=3),
    "tensor data set": lambda _: as_records(
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    ),
    "map-style": lambda _: as_records(Items(), classes=3),
    "list of items": lambda _: as_records(list(zip(X, Y.tolist(), strict=True))),
    "loader": lambda _: as_records(DataLoader(Items(), batch_size=4, shuffle=True)),
    "own collate": lambda _: as_records(DataLoader(Items(), collate_fn=stacked)),
    "pandas": lambda _: as_records(frame(), target="label"),
    "a frame and a column": lambda _: as_records((frame()[["a", "b", "c"]], frame()["label"])),
    "arrow": lambda _: as_records(table(), inputs="x", target="label"),
    "parquet": parquet,
    "other order and bytes": lambda _: as_records(
        (np.array(X[::-1])[::-1].astype(">f4"), Y.astype(">i8"))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_are_the_same_records(kind, tmp_path):
    records = KINDS[kind](tmp_path)
    assert isinstance(records, Records) and len(records) == 6 and records.has_targets
    inputs, targets = records.batch(FEW), records.targets(FEW)
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert torch.equal(inputs, torch.from_numpy(X[FEW]))
    assert torch.equal(targets, torch.from_numpy(Y[FEW]))
    empty = np.array([], dtype=np.int64)
    assert records.batch(empty).shape == (0, 3) and records.targets(empty).shape == (0,)
    assert torch.equal(records.batch(slice(2, 4)), torch.from_numpy(X[2:4]))
    assert [records.unit_id(row) for row in range(6)] == list(range(6))


def test_a_hugging_face_data_set_is_taken():
    needs_datasets()
    import datasets

    names = {"inputs": "x", "target": "label"}
    data = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist(), "who": list("aabbcc")})
    records = as_records(data, unit="who", **names)
    assert torch.equal(records.batch(FEW), torch.from_numpy(X[FEW]))
    assert records.targets(FEW).tolist() == Y[FEW].tolist() and records.unit_id(2) == "b"
    moved = data.with_transform(lambda rows: {"x": [[random.random()] * 3], "label": rows["label"]})
    drawn = as_records(moved, **names)
    assert drawn.keyed_fingerprint(KEY) == as_records(data, **names).keyed_fingerprint(KEY)
    assert torch.equal(drawn.for_step(KEY).batch(FEW), drawn.for_step(KEY).batch(FEW))
    for other in (datasets.DatasetDict({"train": data}), data.to_iterable_dataset()):
        with pytest.raises(UserError, match=type(other).__name__):
            as_records(other)


def test_several_inputs_and_named_fields():
    pair = as_records(((X, X[:, :1]), Y))
    first, second = pair.batch(FEW)
    assert torch.equal(first, torch.from_numpy(X[FEW])) and second.shape == (3, 1)
    assert pair.targets(FEW).tolist() == Y[FEW].tolist()
    named = as_records(({"x": X, "y": Y}, None), target="y", classes=3)
    batch = named.batch(FEW)
    assert set(batch) == {"x", "y"} and named.targets(FEW).tolist() == Y[FEW].tolist()
    items = as_records([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)], target="label")
    assert set(items.batch(FEW)) == {"x", "label"}
    three = as_records([(x, x[:2], y) for x, y in zip(X, Y, strict=True)])
    assert [part.shape for part in three.batch(FEW)] == [(3, 3), (3, 2)]
    alone = as_records(X)
    assert not alone.has_targets and alone.targets(FEW).tolist() == [0, 0, 0]
    mixed = as_records(table().append_column("age", pa.array(Y)), target="label")
    assert set(mixed.batch(FEW)) == {"x", "age", "label"}


def test_records_of_a_class_of_ones_own():
    class Own(Records):
        def __len__(self):
            return 6

        def batch(self, indices):
            return torch.from_numpy(X[indices])

        def targets(self, indices):
            return torch.from_numpy(Y[indices])

    records = as_records(Own(), name="mine")
    assert (records.name, records.unit_id(4)) == ("mine", 4)
    assert records.keyed_fingerprint(KEY) == as_records((X, Y)).keyed_fingerprint(KEY)
    inputs, targets = records.examples(5)
    assert inputs.shape == (5, 3) and set(targets.tolist()) <= {0, 1}


def test_units_are_named_by_a_field_or_given():
    assert as_records((X, Y), unit=list("aabbcc")).unit_id(3) == "b"
    owners = frame().assign(who=list("aabbcc"))
    records = as_records(owners, target="label", unit="who")
    assert records.batch(FEW).shape == (3, 3)
    ids = [records.unit_id(row) for row in range(6)]
    assert len(set(ids)) == 3 and ids[0] == ids[1] != ids[2]
    items = [{"x": x, "who": who} for x, who in zip(X, "aabbcc", strict=True)]
    named = as_records(items, unit="who")
    assert [named.unit_id(row) for row in range(6)] == list("aabbcc")
    assert set(named.batch(FEW)) == {"x"}


@pytest.mark.parametrize(
    "unit", [*([*"aabbc", nobody] for nobody in (None, "", float("nan"))), ["a"] * 5]
)
def test_unknown_units_are_refused(unit):
    with pytest.raises(UserError, match=r"^data:"):
        as_records((X, Y), unit=unit)
    with pytest.raises(UserError, match=r"^data:"):
        as_records([{"x": x, "who": None} for x in X], unit="who")


class Fails(Items):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError(f"patient {SECRET}")
        return super().__getitem__(index)


def loader(**options: Any) -> DataLoader:
    return DataLoader(Items(), **options)


def tensor(change: Callable[[torch.Tensor], Any]) -> Any:
    return change(torch.from_numpy(X)), Y


# The data, the options, and the field, argument or type that the message must name.
# The data, the options, and the field, argument or type that the message must name.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "weights": (lambda: loader(sampler=WeightedRandomSampler([1.0] * 6, 6)), {}, "Weighted"),
    "drop_last": (lambda: loader(batch_size=4, drop_last=True), {}, "drop_last"),
    "a stream": (Stream, {}, "Stream"),
    "other lengths": (lambda: (X, Y[:5]), {}, "targets 5"),
    "labels": (lambda: (X, np.array([0, 1, 2, 0, 1, SECRET])), {"classes": 3}, "targets"),
    "text": (lambda: (np.array(["91370"] * 6), Y), {}, "'inputs'"),
    "ragged lists": (lambda: ([[SECRET], [1, 2]] * 3, Y), {}, "pad_to"),
    "not finite": (lambda: (np.array([[np.inf]] * 6), Y), {}, "'inputs'"),
    "masked": (lambda: (np.ma.masked_array(X, mask=X > 0), Y), {}, "'inputs'"),
    "an item's code": (Fails, {}, "KeyError"),
    "a text column": (lambda: frame().assign(who="91370"), {"target": "label"}, "'who'"),
    "a name twice": (lambda: frame().rename(columns={"b": "a"}), {}, "columns"),
    "empty values": (lambda: pa.table({"a": [1, None]}), {}, "'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field_in_one_line_without_a_value(case):
    make, options, named = REFUSED[case]
    with pytest.raises(UserError, match=r"^data: ") as caught:
        as_records(make(), **options)
    text = str(caught.value)
    assert named in text and "\n" not in text and str(SECRET) not in text
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert str(SECRET) not in str(caught.value.__context__)


def stacked(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def test_ragged_records_get_public_sizes():
    rows = [torch.arange(1, n + 1).float() for n in (2, 5, 3)]
    records = as_records([(row, 0) for row in rows], pad_to=4, pad_value=-1)
    wanted = [[1, 2, -1, -1], [1, 2, 3, 4], [1, 2, 3, -1]]
    assert records.batch(slice(None)).tolist() == wanted
    named = as_records([{"x": row, "n": 1} for row in rows], pad_to={"x": 4}, pad_value={"x": -1})
    assert named.batch(slice(None))["x"].tolist() == wanted

    def padded(items):  # to the longest of the batch: alone, to its own length
        longest = max(len(x) for x, _ in items)
        pad = torch.nn.functional.pad
        return stacked([(pad(x, (0, longest - len(x)), value=-1), y) for x, y in items])

    loader = DataLoader([(row, 0) for row in rows], batch_size=3, collate_fn=padded)
    assert as_records(loader, pad_to=4, pad_value=-1).batch(slice(None)).tolist() == wanted
    with pytest.raises(UserError, match="pad_to"):
        as_records(loader)


TOKENS = [[5, 6, 7], [8, 9]]
TOKEN_ROWS = [
    {"input_ids": row, "attention_mask": [1] * len(row), "labels": row, "who": n}
    for n, row in enumerate(TOKENS)
]


TOKEN_DOORS = {
    "items": lambda rows: rows,
    "loader": lambda rows: DataLoader(
        rows, collate_fn=lambda items: {n: torch.tensor([items[0][n]]) for n in items[0]}
    ),
    "table": pa.Table.from_pylist,
    "pandas": lambda rows: pa.Table.from_pylist(rows).to_pandas(types_mapper=pd.ArrowDtype),
}


@pytest.mark.parametrize("door", TOKEN_DOORS)
@pytest.mark.parametrize("pad_value", [2, {"input_ids": 2}])
def test_labels_are_filled_up_by_what_no_loss_counts_at_every_door(door, pad_value):
    data = TOKEN_DOORS[door](TOKEN_ROWS)
    unit = {} if door == "loader" else {"unit": "who"}
    found = as_records(data, pad_to=4, pad_value=pad_value, **unit).batch(slice(None))
    assert found["input_ids"].tolist() == [[5, 6, 7, 2], [8, 9, 2, 2]]
    assert found["labels"].tolist() == [[5, 6, 7, -100], [8, 9, -100, -100]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_collate_sees_one_record_at_a_time():
    seen = []

    def collate(items):
        seen.append(len(items))
        inputs, targets = stacked(items)
        return inputs - inputs.mean(0), targets

    records = as_records(DataLoader(Items(), batch_size=6, collate_fn=collate))
    together = records.batch(slice(None))
    assert set(seen) == {1} and not together.any()  # a mean over one record is the record


def test_the_fingerprint_is_keyed_and_covers_everything():
    def of(inputs=X, labels=Y, key=KEY, **options):
        return as_records((inputs, labels), **options).keyed_fingerprint(key)

    base, other = of(), X.copy()
    other[5, 2] += 1e-6
    assert base == of(X.copy(), Y.copy()) and len(base) == 32
    different = {
        base, of(key=KEY[::-1]), of(other), of(labels=1 - (Y > 0)), of(X[::-1].copy()),
        of(X[:5], Y[:5]), of(X.reshape(6, 3, 1)), of(X.astype(np.float16)), of(unit=list("aabbcc")),
    }  # fmt: skip
    assert len(different) == 9
    with pytest.raises(ValueError, match="at least 16 bytes"):
        of(key=b"")
    turned = [as_records(Items(inputs=X[order], labels=Y[order])).keyed_fingerprint(KEY)
              for order in (np.arange(6), np.arange(6)[::-1])]  # fmt: skip
    assert turned[0] != turned[1]
    assert as_records(Items(), classes=3).keyed_fingerprint(KEY) != turned[0]  # other options


def test_canonical_bytes_tell_values_apart():
    values = [
        1, 1.0, True, None, "1", b"1", [1], [[1]], [1, 1], {"1": 1}, {"a": [1]}, np.ones(1),
        np.ones((1, 1)), np.ones(1, np.float32), np.int64(1), [np.ones(1)], ["1", "1"], ["11"],
        torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.bfloat16).view(torch.int16), torch.ones(1, dtype=torch.half),
        torch.ones((), dtype=torch.bfloat16),
    ]  # fmt: skip
    assert len({b"".join(canonical(value)) for value in values}) == len(values)
    with pytest.raises(TypeError, match="a set"):
        list(canonical([{1}]))


def test_random_transforms_leave_the_fingerprint_alone():
    plain = as_records(Items()).keyed_fingerprint(KEY)
    clocked = Items(lambda x: x + time.perf_counter_ns())
    parts = torch.utils.data.Subset(clocked, range(6))
    assert as_records(clocked).keyed_fingerprint(KEY) == plain
    assert as_records(parts).keyed_fingerprint(KEY) == plain
    assert clocked.transform is not None and parts.dataset is clocked

    class Inside(Items):  # the transform is not where torchvision has it
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + int.from_bytes(os.urandom(2), "little"), y

    unstable = [as_records(Inside()).keyed_fingerprint(KEY) for _ in range(2)]
    assert unstable[0] != unstable[1]
    said = as_records(Inside(), before_transform=Items().__getitem__)
    assert said.keyed_fingerprint(KEY) == plain


def test_standardized_columns_are_warned_of_wherever_they_are():
    rows = np.random.default_rng(0).normal(5, 3, size=(40, 3)).astype("float32")
    scaled, labels = (rows - rows.mean(0)) / rows.std(0), np.zeros(40, int)
    for data in ((scaled, labels), Items(inputs=scaled, labels=labels)):
        with pytest.warns(UserWarning, match="mean 0 and standard deviation 1"):
            as_records(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_records(Items(inputs=rows / 20, labels=labels))


def test_items_are_read_once_before_a_training():
    read = []

    class Counted(Items):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    records = as_records(Counted())
    found = records.keyed_fingerprint(KEY)
    assert read == [*range(6)]
    assert found == as_records(Items()).keyed_fingerprint(KEY)
    records._digests.clear()  # as in another process, which reads the items again
    assert records.keyed_fingerprint(KEY) == found and len(read) == 12


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draw from each of the generators that are seeded."""
    return x + torch.randn(3) + float(np.random.normal()) + random.random()


def test_transforms_are_seeded_by_key_and_record():
    records = as_records(Items(noisy))
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one, two = records.for_step(KEY), records.for_step(KEY[::-1])
    everything = one.batch(np.arange(6))
    drawn = everything - torch.from_numpy(X)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[2]
    assert np.array_equal(np.random.get_state()[1], state[1])
    assert torch.equal(records.for_step(KEY).batch(FEW), everything[FEW])  # any company
    assert torch.equal(one.targets(FEW), torch.from_numpy(Y[FEW]))
    assert not torch.equal(two.batch(FEW), one.batch(FEW))
    assert len({tuple(row) for row in drawn.tolist()}) == 6
    again = pickle.loads(pickle.dumps(records)).for_step(KEY)
    assert torch.equal(again.batch(FEW), one.batch(FEW))


class Jitter:
    """A transform that draws from what it holds, in a slot of a class above it."""

    __slots__ = ("draw",)

    def __init__(self, draw):
        self.draw = draw

    def __call__(self, x):
        return x + float(self.draw())


class Inherits(Jitter):
    __slots__ = ()


def of_torch(generator: torch.Generator) -> torch.Tensor:
    return torch.rand((), generator=generator)


def drawn_by(bits: np.random.BitGenerator) -> float:
    return float(np.random.Generator(bits).random())


def enclosed(generator):
    return lambda: generator.random()


def of_a_class(source):
    """Return a transform whose class holds the generator, or the function that returns it."""

    class Sharing:
        generator = source

        def __call__(self, x):
            found = self.generator
            return x + (found() if callable(found) else found).random()

    return Sharing()


class Holding(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x + self.generator.random()


@pytest.mark.parametrize(
    "made",
    [
        lambda: Jitter(np.random.default_rng(0).random),
        lambda: Jitter(partial(of_torch, generator=torch.Generator().manual_seed(0))),
        lambda: Jitter(enclosed(random.Random(0))),
        lambda: Jitter(np.random.RandomState(np.random.PCG64(0)).normal),
        lambda: Inherits(np.random.Generator(np.random.Philox(0)).random),
        lambda: Jitter(partial(drawn_by, np.random.SFC64(0))),
        lambda: Jitter(lambda: OWN.normal()),
        lambda: torch.nn.Sequential(torch.nn.Identity(), Holding(random.Random(0))),
        lambda: of_a_class(classmethod(lambda cls: OWN)),
        lambda: of_a_class(property(lambda self: OWN)),
    ],
)
def test_generators_of_its_own_are_seeded_for_each_record_and_restored(made):
    """One that went on from record to record would give others' draws to all behind one less."""
    records = as_records(Items(made()))
    (own,) = records._generators
    state = protocol._state_of(own)
    few = records.for_step(KEY).batch(FEW)
    assert repr(protocol._state_of(own)) == repr(state)
    assert torch.equal(records.for_step(KEY).batch(FEW[1:]), few[1:])  # one record less
    assert len({tuple(row) for row in (few - torch.from_numpy(X[FEW])).tolist()}) == len(FEW)
    assert not torch.equal(records.for_step(KEY[::-1]).batch(FEW), few)


def test_a_generator_made_by_the_first_item_is_seeded_too():
    class Late(Items):
        def __getitem__(self, index):
            if not hasattr(self, "own"):
                self.own = np.random.default_rng()
            x, y = super().__getitem__(index)
            return x + self.own.normal(), y

    records = as_records(Late())
    del records._source.own
    records.for_step(KEY).batch(FEW)  # makes the generator
    assert torch.equal(records.for_step(KEY).batch(FEW[1:]), records.for_step(KEY).batch(FEW)[1:])


def test_an_item_that_fails_restores_the_generators():
    records = as_records(Items(noisy))
    records._source.transform = lambda x: x / np.random.normal() + {}["x"]
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(UserError, match=r"record 4 .* KeyError"):
        records.for_step(KEY).batch(FEW)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_examples_hold_no_record_and_keep_the_declared_ranges():
    options = {"target": "label", "classes": 3, "ranges": {"tokens": 50, "size": (-2.0, 2.0)}}
    fields = {"tokens": np.full((6, 4), 7), "size": X[:, :1], "label": Y}
    inputs, targets = as_records((fields, None), **options).examples(200)
    assert inputs["tokens"].shape == (200, 4) and inputs["tokens"].unique().numel() == 50
    assert inputs["size"].abs().max() <= 2 and inputs["size"].min() < -1.5
    assert targets.unique().tolist() == [0, 1, 2] == inputs["label"].unique().tolist()
    other = {name: np.zeros_like(column) for name, column in fields.items()}
    same, _ = as_records((other, None), **options).examples(200)
    assert all(torch.equal(inputs[name], same[name]) for name in inputs)
    arrays, _ = as_records((X, Y), classes=3).examples(40)
    items, labels = as_records(Items(), classes=3).examples(40)
    assert torch.equal(items, arrays) and labels.max() == 2


@pytest.mark.slow
def test_ray_data_are_materialized_in_one_order():
    """Which blocks do not decide."""
    import ray

    # "local": a cluster that another test started at the same time is not joined.
    ray.init("local", num_cpus=1, include_dashboard=False, ignore_reinit_error=True)
    try:
        rows = [{"x": x.tolist(), "label": int(y), "who": f"p{y}"}
                for x, y in zip(X, Y, strict=True)]  # fmt: skip
        named = {"inputs": "x", "target": "label", "unit": "who"}
        some = as_records(ray.data.from_items(rows), **named)
        turned = as_records(ray.data.from_items(rows[::-1]).repartition(3), **named)
    finally:
        ray.shutdown()
    assert some.keyed_fingerprint(KEY) == turned.keyed_fingerprint(KEY)
    known = {tuple(x): y for x, y in zip(X.tolist(), Y.tolist(), strict=True)}
    targets = some.targets(slice(None)).tolist()
    found = map(tuple, some.batch(slice(None)).tolist())
    assert dict(zip(found, targets, strict=True)) == known
