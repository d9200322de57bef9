"""What the list of operations says, held against what they do.

Each operation is run on tensors with the records along every dimension in turn, merged ones too.
Where its rule accepts, other records' numbers may not move a record's part of the result, and the
same records in another order must give the same parts in that order: the operation does to each
record the same thing, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dpdist.gradients.row_operations import (
    OPERATIONS,
    POINTWISE,
    PUBLIC,
    MixesRecords,
    Operation,
    RecordLocation,
    TensorMark,
    possible_locations,
)

aten = torch.ops.aten
COUNT = 3
F, I = "float", "index"  # noqa: E741


def call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], marks: dict[int, TensorMark]
) -> tuple[list[TensorMark], list[Tensor]]:
    """The marks of the results, and these."""
    one = Operation(func, args, kwargs, lambda tensor: marks.get(id(tensor), PUBLIC), COUNT)
    one.check_arguments(1)
    found = one.result_marks(func(*args, **kwargs))
    return found, one.results


def ordered(tensor: Tensor, place: RecordLocation | None, order: list[int]) -> Tensor:
    """The records of a tensor in another order."""
    if place is None:
        return tensor
    dimension, inner = place
    index = torch.arange(tensor.shape[dimension])
    record = index // inner % COUNT
    moved = index + (torch.tensor(order)[record] - record) * inner
    return tensor.index_select(dimension, moved)


def numbers(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    if kind == I:
        return torch.randint(0, 3, shape, generator=generator)
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1


# Name, shapes and kinds of its tensor arguments, and how it is called on them.
Case = tuple[Any, list[tuple[tuple[int, ...], str]], Callable[..., tuple[tuple, dict]]]


def cases() -> Iterator[tuple[str, Case]]:
    two, three, four = (6, 6), (6, 3, 6), (3, 6, 6, 3)

    def plain(*more: Any, **named: Any) -> Callable[..., tuple[tuple, dict]]:
        return lambda *tensors: ((*tensors, *more), named)

    for shape in (two, three):
        one = [(shape, F)]
        for d in range(len(shape)):
            for keep in (False, True):
                yield f"sum {d}", (aten.sum.dim_IntList, one, plain([d], keep))
                yield f"mean {d}", (aten.mean.dim, one, plain([d], keep))
                yield f"amax {d}", (aten.amax.default, one, plain([d], keep))
                yield f"max {d}", (aten.max.dim, one, plain(d, keep))
                yield f"argmax {d}", (aten.argmax.default, one, plain(d, keep))
                yield f"logsumexp {d}", (aten.logsumexp.default, one, plain([d], keep))
                yield f"norm {d}", (aten.linalg_vector_norm.default, one, plain(2, [d], keep))
                yield f"var {d}", (aten.var.correction, one, plain([d], keepdim=keep))
                yield f"prod {d}", (aten.prod.dim_int, one, plain(d, keep))
            for name in ("_softmax", "_log_softmax"):
                func = getattr(aten, name).default
                yield f"{name} {d}", (func, one, plain(d, False))
                yield f"{name} backward {d}", (
                    getattr(aten, f"{name}_backward_data").default, one * 2,
                    plain(d, torch.float64),
                )  # fmt: skip
            yield f"cumsum {d}", (aten.cumsum.default, one, plain(d))
            yield f"sort {d}", (aten.sort.default, one, plain(d))
            yield f"topk {d}", (aten.topk.default, one, plain(2, d))
            yield f"select {d}", (aten.select.int, one, plain(d, 1))
            yield f"select backward {d}", (
                aten.select_backward.default, one,
                plain([*shape[:d], 6, *shape[d:]], d, 1),
            )  # fmt: skip
            yield f"unbind {d}", (aten.unbind.int, one, plain(d))
            yield f"split {d}", (aten.split.Tensor, one, plain(3, d))
            yield f"slice {d}", (aten.slice.Tensor, one, plain(d, 0, 2))
            yield f"slice all {d}", (aten.slice.Tensor, one, plain(d, 0, 9))
            yield f"slice backward {d}", (
                aten.slice_backward.default, one,
                plain([*shape[:d], 2 * shape[d], *shape[d + 1 :]], d, 0, shape[d], 1),
            )  # fmt: skip
            yield f"flip {d}", (aten.flip.default, one, plain([d]))
            yield f"roll {d}", (aten.roll.default, one, plain([1], [d]))
            yield f"unfold {d}", (aten.unfold.default, one, plain(d, 2, 1))
            yield f"unsqueeze {d}", (aten.unsqueeze.default, one, plain(d))
            yield f"index {d}", (
                aten.index.Tensor, [*one, ((2, 2), I)],
                lambda x, i, d=d: ((x, [*[None] * d, i]), {}),
            )  # fmt: skip
            yield f"index select {d}", (
                aten.index_select.default, [*one, ((2,), I)], lambda x, i, d=d: ((x, d, i), {})
            )  # fmt: skip
            yield f"gather {d}", (
                aten.gather.default, [*one, (shape, I)], lambda x, i, d=d: ((x, d, i), {})
            )  # fmt: skip
            few = tuple(1 if each == d else size for each, size in enumerate(shape))
            yield f"gather few {d}", (
                aten.gather.default, [*one, (few, I)], lambda x, i, d=d: ((x, d, i), {})
            )  # fmt: skip
            yield f"gather first rows {d}", (
                aten.gather.default, [*one, ((1, *shape[1:]), I)],
                lambda x, i, d=d: ((x, d, i), {}),
            )  # fmt: skip
            yield f"scatter add {d}", (
                aten.scatter_add.default, [*one, (shape, I), (shape, F)],
                lambda x, i, y, d=d: ((x, d, i, y), {}),
            )  # fmt: skip
            yield f"cat {d}", (aten.cat.default, one * 2, lambda x, y, d=d: (([x, y], d), {}))
            yield f"stack {d}", (aten.stack.default, one * 2, lambda x, y, d=d: (([x, y], d), {}))
        yield "sum all", (aten.sum.default, one, plain())
        yield "max all", (aten.max.default, one, plain())
        yield "flip none", (aten.flip.default, one, plain([]))
        yield "roll flat", (aten.roll.default, one, plain([1]))
        yield "softmax flat", (aten.linalg_vector_norm.default, one, plain())
        yield "pad", (aten.constant_pad_nd.default, one, plain([1, 1]))
        yield "pad all", (aten.constant_pad_nd.default, one, plain([0, 0] * len(shape)))
        yield "clone", (aten.clone.default, one, plain())
        yield "tril", (aten.tril.default, one, plain())
        yield "expand", (aten.expand.default, one, plain([2, *shape]))
        yield "repeat", (aten.repeat.default, one, plain([2] * len(shape)))
        yield "where flat", (aten.where.default, [(shape, F)], plain())
        for new in (
            (36,),
            (6, 6),
            (3, 12),
            (12, 3),
            (2, 18),
            (4, 9),
            (9, 4),
            (3, 2, 6),
            (2, 3, 6),
            (6, 2, 3),
            (6, 3, 2),
            (1, 36),
            (108,),
            (18, 6),
            (6, 18),
            (3, 36),
            (9, 12),
        ):
            if torch.Size(new).numel() == torch.Size(shape).numel():
                yield f"view {new}", (aten.view.default, one, plain(list(new)))
    yield "t", (aten.t.default, [(two, F)], plain())
    yield "transpose", (aten.transpose.int, [(three, F)], plain(0, 2))
    yield "permute", (aten.permute.default, [(three, F)], plain([1, 2, 0]))
    yield "mm", (aten.mm.default, [(two, F), (two, F)], plain())
    yield "addmm", (aten.addmm.default, [((6,), F), (two, F), (two, F)], plain())
    yield "addmm column", (aten.addmm.default, [((6, 1), F), (two, F), (two, F)], plain())
    yield "bmm", (aten.bmm.default, [(three, F), ((6, 6, 3), F)], plain())
    yield "baddbmm", (
        aten.baddbmm.default, [((6, 3, 3), F), (three, F), ((6, 6, 3), F)], plain()
    )  # fmt: skip
    for name in ("add.Tensor", "mul.Tensor", "pow.Tensor_Tensor", "sub.Tensor", "copy.default"):
        func = getattr(getattr(aten, name.split(".")[0]), name.split(".")[1])
        for shapes in ((two, two), (two, (6,)), (three, (3, 6)), (two, (6, 1)), (two, (1, 6))):
            yield f"{name} {shapes}", (func, [(s, F) for s in shapes], plain())
    yield "where", (
        aten.where.self, [(two, F), (two, F), ((6,), F)], lambda c, x, y: ((c > 0.5, x, y), {})
    )  # fmt: skip
    yield "embedding", (aten.embedding.default, [((6, 3), F), (two, I)], plain())
    yield "convolution", (
        aten.convolution.default, [(three, F), ((3, 3, 2), F), ((3,), F)],
        plain([1], [0], [1], False, [0], 1),
    )  # fmt: skip
    yield "convolution 2d", (
        aten.convolution.default, [(four, F), ((3, 6, 2, 2), F), ((3,), F)],
        plain([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    )  # fmt: skip
    for mask in ([True, False, False], [True, True, False]):
        yield f"convolution backward {mask}", (
            aten.convolution_backward.default, [((6, 3, 5), F), (three, F), ((3, 3, 2), F)],
            plain(None, [1], [0], [1], False, [0], 1, mask),
        )  # fmt: skip
    yield "group norm", (
        aten.native_group_norm.default, [(four, F), ((6,), F), ((6,), F)],
        plain(3, 6, 18, 2, 1e-5),
    )  # fmt: skip
    yield "group norm of one", (
        aten.native_group_norm.default, [(four, F), ((18,), F), ((18,), F)],
        plain(1, 18, 18, 2, 1e-5),
    )  # fmt: skip
    for last in ([3], [6, 3]):
        yield f"layer norm {last}", (
            aten.native_layer_norm.default, [(four, F), (tuple(last), F), (tuple(last), F)],
            lambda x, w, b, last=last: ((x, last, w, b, 1e-5), {}),
        )  # fmt: skip
    yield "batch norm", (
        aten.native_batch_norm.default, [(four, F), ((6,), F), ((6,), F)],
        plain(None, None, True, 0.1, 1e-5),
    )  # fmt: skip
    for reduction in (0, 1):
        yield f"nll {reduction}", (
            aten.nll_loss_forward.default, [(two, F), ((6,), I)], plain(None, reduction, -100)
        )  # fmt: skip
        yield f"mse {reduction}", (aten.mse_loss.default, [(two, F), (two, F)], plain(reduction))
    yield "nll of one", (aten.nll_loss_forward.default, [((6,), F), ((), I)], plain(None, 0, -100))
    yield "attention", (
        aten._scaled_dot_product_flash_attention_for_cpu.default, [((3, 2, 6, 3), F)] * 3, plain()
    )  # fmt: skip
    yield "attention masked", (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        [*[((3, 2, 6, 3), F)] * 3, ((6, 6), F)],
        lambda q, k, v, m: ((q, k, v), {"attn_mask": m}),
    )  # fmt: skip
    for name in ("max_pool2d_with_indices", "avg_pool2d"):
        yield name, (getattr(aten, name).default, [(four, F)], plain([2, 2]))
        yield f"{name} of one", (getattr(aten, name).default, [(three, F)], plain([2, 2]))
    yield "adaptive", (aten._adaptive_avg_pool2d.default, [(four, F)], plain([2, 2]))
    yield "adaptive backward", (
        aten._adaptive_avg_pool2d_backward.default, [((3, 6, 2, 2), F), (four, F)], plain()
    )  # fmt: skip
    yield "nearest", (aten.upsample_nearest2d.default, [(four, F)], plain([12, 6]))
    for last, left in (([3], (3, 6, 6, 1)), ([6, 3], (3, 6, 1, 1))):
        yield f"layer norm backward {last}", (
            aten.native_layer_norm_backward.default, [(four, F)] * 2 + [(left, F)] * 2,
            lambda g, x, *rest, last=last: (
                (g, x, last, *rest, None, None, [True, False, False]), {}
            ),
        )  # fmt: skip
    yield "index rows", (
        aten.index.Tensor, [(two, F), ((6,), I)], lambda x, i: ((x, [i]), {})
    )  # fmt: skip
    yield "scatter first rows", (
        aten.scatter_add.default, [(two, F), ((1, 6), I), ((6, 6), F)],
        lambda x, i, y: ((x, 1, i, y), {}),
    )  # fmt: skip
    yield "where of a row", (aten.where.default, [((6,), F)], plain())
    yield "glu", (aten.glu.default, [(three, F)], plain(2))
    yield "index put", (
        aten.index_put.default, [((6, 6, 3), F), ((2,), I), ((6, 2, 3), F)],
        lambda x, i, y: ((x, [None, i], y, True), {}),
    )  # fmt: skip
    yield "unfold backward", (
        aten.unfold_backward.default, [((6, 5, 6, 2), F)], plain([6, 6, 6], 1, 2, 1)
    )  # fmt: skip
    yield "rms norm", (
        aten._fused_rms_norm.default, [(four, F), ((3,), F)],
        lambda x, w: ((x, [3], w, 1e-5), {}),
    )  # fmt: skip


CASES = list(cases())
ORDER = [2, 0, 1]


@pytest.mark.long
def test_what_is_accepted_treats_each_record_alone() -> None:
    accepted, refused = set(), 0
    for name, (func, arguments, arrange) in CASES:
        generator = torch.Generator().manual_seed(0)
        tensors = [numbers(shape, kind, generator) for shape, kind in arguments]
        choices = [[None, *possible_locations(tensor.shape, COUNT)] for tensor in tensors]
        for lying in product(*choices):
            if not any(lying):
                continue
            args, kwargs = arrange(*tensors)
            # What an argument is called with may be made of it (a comparison): the same place.
            leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs))
                      if isinstance(t, Tensor)]  # fmt: skip
            marks = {
                id(t): TensorMark(p, pass_number=1) for t, p in zip(leaves, lying, strict=True)
            }
            try:
                found, results = call(func, args, kwargs, marks)
            except MixesRecords:
                refused += 1
                continue
            accepted.add(func._schema.name)
            others = [ordered(t, p, ORDER) for t, p in zip(tensors, lying, strict=True)]
            args, kwargs = arrange(*others)
            again = [t for t in torch.utils._pytree.tree_leaves(func(*args, **kwargs))
                     if isinstance(t, Tensor)]  # fmt: skip
            changed = [t.clone() for t in tensors]
            for tensor, place in zip(changed, lying, strict=True):
                if place is not None:  # record 0 alone is another one
                    index = torch.arange(tensor.shape[place[0]]) // place[1] % COUNT == 0
                    part = tensor.movedim(place[0], 0)[index]
                    tensor.movedim(place[0], 0)[index] = (
                        (part + 1) % 3 if tensor.dtype == torch.int64 else part * 0.5 + 0.01
                    )
            args, kwargs = arrange(*changed)
            moved = [t for t in torch.utils._pytree.tree_leaves(func(*args, **kwargs))
                     if isinstance(t, Tensor)]  # fmt: skip
            for mark, one, two, three in zip(found, results, again, moved, strict=True):
                where = f"{name} with records at {lying}"
                if mark.mixed:
                    continue
                torch.testing.assert_close(
                    two, ordered(one, mark.location, ORDER), rtol=1e-9, atol=1e-12,
                    msg=lambda text, where=where: f"{where}, in another order: {text}",
                )  # fmt: skip
                if mark.location is None:
                    torch.testing.assert_close(three, one, msg=f"{where}: not public")
                    continue
                d, inner = mark.location
                keep = torch.arange(one.shape[d]) // inner % COUNT != 0
                torch.testing.assert_close(
                    three.movedim(d, 0)[keep], one.movedim(d, 0)[keep], rtol=1e-9, atol=1e-12,
                    msg=lambda text, where=where: f"{where}, another record changed: {text}",
                )  # fmt: skip
    assert refused > 500 and len(accepted) > 55


@pytest.mark.long
def test_what_is_said_to_be_the_same_for_all_records_is() -> None:
    """Of results of no record: their parts at a place are equal."""
    seen = 0
    for name, (func, arguments, arrange) in CASES:
        generator = torch.Generator().manual_seed(0)
        for chosen, (shape, kind) in enumerate(arguments):
            for place in possible_locations(shape, COUNT):
                tensors = [numbers(s, k, generator) for s, k in arguments]
                equal = torch.zeros_like(tensors[chosen])
                for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
                    equal += ordered(tensors[chosen], place, order)
                tensors[chosen] = equal if kind == F else equal % 3
                args, kwargs = arrange(*tensors)
                leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs))
                          if isinstance(t, Tensor)]  # fmt: skip
                marks = {id(leaves[chosen]): TensorMark(uniform_locations=frozenset((place,)))}
                found, results = call(func, args, kwargs, marks)
                for mark, result in zip(found, results, strict=True):
                    for same in mark.uniform_locations:
                        seen += 1
                        where = f"{name}, argument {chosen} the same at {place}"
                        torch.testing.assert_close(
                            ordered(result, same, ORDER), result, rtol=1e-9, atol=1e-12,
                            msg=lambda text, where=where: f"{where}: {text}",
                        )  # fmt: skip
    assert seen > 300


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.zeros.default, ([6, 6],)), (aten.full.default, ([6, 3], 2.0)),
        (aten.zeros_like.default, (torch.rand(6, 6),)),
        (aten.expand.default, (torch.rand(1, 6), [6, 6])),
        (aten.expand.default, (torch.rand(6), [3, 6])),
        (aten.repeat.default, (torch.rand(2), [6])), (aten.repeat.default, (torch.rand(3), [6])),
        (aten.repeat.default, (torch.rand(2, 3), [3, 1])),
    ],
)  # fmt: skip
def test_what_repeats_a_number_says_where(func: Any, args: tuple[Any, ...]) -> None:
    (mark,), (result,) = call(func, args, {}, {})
    assert mark.uniform_locations
    for place in possible_locations(result.shape, COUNT):
        assert torch.equal(ordered(result, place, ORDER), result) == (
            place in mark.uniform_locations
        )


def arguments_for(func: Any, shape: tuple[int, ...], whole: bool) -> list[Any] | None:
    """Arguments by their types, losses not added up; None for types that are none of tensors."""
    found: list[Any] = []
    for argument in func._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            one = torch.randint(0, 9, shape) if whole else torch.rand(shape, dtype=torch.float64)
            found.append(one > 0.5 if argument.name in ("mask", "condition") else one)
        elif argument.has_default_value() and argument.name != "reduction":
            continue
        else:
            known = {"number": 0.5, "float": 0.5, "int": 0, "bool": False, "str": "none"}
            if kind not in known:
                return None
            found.append(2 if whole and kind == "number" else known[kind])
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operations_take_each_number_alone(name: str) -> None:
    """Numbers in another order give the same results in that order; one at a time does so too."""
    tried, order = 0, torch.tensor([4, 2, 0, 5, 3, 1])
    packet = getattr(aten, name)
    for overload in packet.overloads():
        func = getattr(packet, overload)
        first = str(func._schema.arguments[0].type) if func._schema.arguments else ""
        if "out" in overload or "grad_input" in overload or first != "Tensor":
            continue
        if any(a.name == "dim" for a in func._schema.arguments) or (name, overload) == (
            "where",
            "default",
        ):
            continue
        for whole in (False, True):
            torch.manual_seed(0)
            args = arguments_for(func, (6,), whole)
            if args is None:
                continue
            try:
                result = func(*args)
            except (RuntimeError, NotImplementedError):  # of numbers of the other kind
                continue
            for index in (order, torch.tensor([3])):
                some = [a[index] if isinstance(a, Tensor) and a.dim() else a for a in args]
                torch.testing.assert_close(
                    torch.utils._pytree.tree_leaves(func(*some)),
                    [each[index] for each in torch.utils._pytree.tree_leaves(result)],
                    rtol=1e-12, atol=0, equal_nan=True,
                )  # fmt: skip
            tried += 1
    assert tried


def test_every_name_on_the_list_is_an_operation() -> None:
    backward = {name for name in OPERATIONS if name.endswith("_backward")}
    assert [n for n in OPERATIONS if n not in backward and not hasattr(aten, n)] == []


@pytest.mark.parametrize(
    ("func", "args", "why"),
    [
        (aten._local_scalar_dense.default, (torch.rand(1),), "to Python"),
        (aten.equal.default, (torch.rand(3), torch.rand(3)), "to Python"),
        (aten.nonzero.default, (torch.rand(3),), "not on the list"),
        (aten.unique_dim.default, (torch.rand(3, 2), 0), "not on the list"),
        (aten.bernoulli.default, (torch.rand(3),), "random"),
        (aten.native_dropout.default, (torch.rand(3), 0.5, True), "random"),
        (aten.dot.default, (torch.rand(3), torch.rand(3)), "not on the list"),
        (aten.view.dtype, (torch.rand(3, 2), torch.int32), "dimension of the records"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_accepted(func: Any, args: tuple[Any, ...], why: str) -> None:
    marks = {id(args[0]): TensorMark((0, 1), pass_number=1)}
    with pytest.raises(MixesRecords, match=why):
        call(func, args, {}, marks)


def test_memory_that_is_not_filled_is_not_accepted() -> None:
    with pytest.raises(MixesRecords, match="memory as it was"):
        call(aten.empty.memory_format, ([3, 2],), {}, {})
