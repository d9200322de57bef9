"""Key the random numbers that a model or a loss uses in a pass: dropout, stochastic depth, a VAE.

Unit: one record, or one user. Let the step's sample be given. Record i in row r of pass p adds
f_i(w_i), its clipped gradient under its random numbers w_i, of norm at most C for every w_i.

1. *Draws by row* (`standard`). The state of torch's generator in a pass follows from the run's key
   and the pass's label: attempt, step, shard, block, pass, place among a user's records,
   augmentation. No two passes have one label. Every random call has a dimension that scales with
   the rows, so that each row has its own numbers: the w_i are independent of each other, and the
   distribution of w_i depends only on record i. One more record x moves others of its block to
   different rows, which changes none of these distributions. So give the other records the same
   numbers w with and without x. For each w and each own v of x the two sums differ by f_x(v), whose
   norm is at most C. The released sums are mixtures, with one distribution of w, of pairs
   N(s(w) + f_x(v), sigma^2) and N(s(w), sigma^2), each as far apart as the plan accounts for. The
   hockey-stick divergence of any order is jointly convex, so the mixtures are no farther apart, and
   neither is the mixture over samples.
2. *One state for all passes of a step* (`fixed-row`). Given the state, w_i follows from the
   record's row, which follows from its id and the step's key. One more record does not change the
   others, so the sums differ by f_x, for each state. The mixture over states is no farther apart.
   This is valid for numbers that rows share, too.
3. *A state for each record* (passes of one row). w_i follows from the record's id, as in 2.

Without the condition of 1 it fails: a scalar drawn once per pass may double or zero all of its
rows, so that one more record, which starts a new pass, moves passes of 2 and 17 records of norm C
by up to 16 C. Passes of two and of three rows show which numbers rows share, and exchanging the
numbers of one row shows whether other rows depend on them (`mixes_draws`). If values decide how
many numbers a call draws, as in RReLU on a CPU, records change the numbers of others: the screening
raises an error (`dpdist.gradients.independence`).

Assumed: torch's generator in a state of secret random bits cannot be distinguished from true
randomness. It is not a cipher, but its numbers are never released. States are secret, live for one
pass and are never written anywhere. On a CPU all 19,968 bits of the generator's state come from the
key, since its seeds have 32 bits; on a GPU the 64 bits of the seed and 60 of the offset. Torch
decides how a state becomes numbers: with MKL on an Intel CPU a Bernoulli mask follows from 32 bits.
"""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpdist.core.errors import UserError
from dpdist.randomness.keys import derive_key, stream_words

# --- states of the generators -----------------------------------------------------------------


PURPOSE = "random numbers of a pass"
States = tuple[Tensor, Tensor | None]  # of torch's generators, on the CPU and on the GPU in use

_WORDS = 624  # of 32 bits, each in 8 bytes
_HEAD = struct.Struct("<QiiQ")  # seed, numbers left, seeded, next number
_BYTES = 5056


def random_states(device: torch.device) -> States:
    """Return the states of torch's global generators."""
    on_device = device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_device else None


def restore_states(states: States, device: torch.device) -> None:
    """Set torch's global generators."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def states_of_key(key: bytes, device: torch.device) -> States:
    """Return the states that follow from a key of 32 bytes.

    The CPU's has 624 unused words of the key's stream; the GPU's has a seed and an offset.
    """
    words = stream_words(key, 0, _WORDS // 2 + 2)
    state = bytearray(_empty_state())
    values = words[: _WORDS // 2].view("<u4").astype("<u8")
    state[_HEAD.size : _HEAD.size + 8 * _WORDS] = values.tobytes()
    on_cpu = torch.frombuffer(state, dtype=torch.uint8)
    if device.type != "cuda":
        return on_cpu, None
    seed, offset = int(words[-2]), int(words[-1]) >> 4 << 2  # a multiple of 4, with room above
    return on_cpu, torch.frombuffer(bytearray(struct.pack("<QQ", seed, offset)), dtype=torch.uint8)


@functools.cache
def _empty_state() -> bytes:
    """Return a state whose words are to be replaced.

    Raises UserError if torch lays out a state differently.
    """
    raw = torch.Generator().manual_seed(7).get_state().numpy().tobytes()
    words = np.frombuffer(raw, "<u8", _WORDS, _HEAD.size) if len(raw) == _BYTES else np.zeros(2)
    second = (1812433253 * 7 + 1) % 2**32  # Matsumoto and Nishimura's initialization
    if _HEAD.unpack(raw[: _HEAD.size]) != (7, 1, 1, 0) or words[:2].tolist() != [7, second]:
        raise UserError(
            f"torch {torch.__version__}: lays out the state of its generator differently, so that "
            "random numbers of a model cannot be keyed: set dropout to 0, or use another version"
        )
    return raw


def keyed_draws(key: bytes, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which torch's random numbers follow from a key of 32 bytes."""
    return draws_again(states_of_key(key, device), device)


@contextmanager
def draws_again(states: States, device: torch.device) -> Iterator[None]:
    """Run torch's generators from these states in the block, and restore their own afterwards."""
    before = random_states(device)
    restore_states(states, device)
    try:
        yield
    finally:
        restore_states(before, device)


def pass_key(draw_key: bytes, *label: str | int) -> bytes:
    """Return the key of one pass. draw_key: 32 bytes of attempt and step."""
    return derive_key(draw_key, PURPOSE, *label)


# --- what is drawn ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """The random calls of a model and its loss in a pass.

    any: whether there are any. shared: names of calls whose numbers rows share. inside: names of
    layers without a rule that draw.
    """

    any: bool = False
    shared: tuple[str, ...] = ()
    inside: frozenset[str] = frozenset()


# Calls in which rows are not independent, although they draw one number per row.
_NEVER_BY_ROW = ("randperm",)


class _Watch(TorchDispatchMode):
    """Record random calls that move torch's generators: name, shapes of results, and layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.inside = device, list[str]()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = random_states(self.device)
        found = func(*args, **(kwargs or {}))
        if not same_states(before, random_states(self.device)):
            shapes = tuple(
                tuple(each.shape) for each in pytree.tree_leaves(found) if isinstance(each, Tensor)
            )
            name = func.overloadpacket.__name__.rstrip("_")
            if name == "multinomial" and args[0].dim() == 1:
                name = "randperm"  # without replacement, one row for all
            self.calls.append((name, shapes, self.inside[-1] if self.inside else ""))
        return found


def same_states(one: States, other: States) -> bool:
    """Return whether two states are equal, so that nothing was drawn in between."""
    same = torch.equal(one[0], other[0])
    return same and (one[1] is None or other[1] is None or torch.equal(one[1], other[1]))


def find_draws(run: Callable[[int, list[str]], Any], device: torch.device) -> Draws:
    """Find what passes of two and of three rows draw.

    Args:
        run: runs a pass of this many rows, and keeps the names of the layers without a rule that it
            is in on the list.
        device: device of the model.

    Raises:
        UserError: numbers come from a different generator than torch's global ones.
    """
    calls = []
    with torch.no_grad():
        before, others = random_states(device), _other_generators()
        run(2, [])
        for name, state in _other_generators().items():
            if state != others[name]:
                raise UserError(
                    "model: must draw its random numbers with torch, for each record, got "
                    f"{name}'s generator, which cannot be keyed by record"
                )
        if same_states(before, random_states(device)):
            return Draws()
        for rows in (2, 3):
            watch = _Watch(device)
            with watch:
                run(rows, watch.inside)
            calls.append(watch.calls)
    two, three = calls
    inside = frozenset(where for _, _, where in (*two, *three) if where)
    alone = [[call for call in each if not call[2]] for each in calls]
    if [name for name, _, _ in alone[0]] != [name for name, _, _ in alone[1]]:
        return Draws(True, ("a number of calls that changes with the rows",), inside)
    shared = [
        name
        for (name, first, _), (_, second, _) in zip(*alone, strict=True)
        if name in _NEVER_BY_ROW or not all(map(_scales, first, second))
    ]
    if not (two or three):  # the generators moved without a visible call
        shared = ["an unknown call"]
    return Draws(True, tuple(dict.fromkeys(shared)), inside)


def _scales(two: tuple[int, ...], three: tuple[int, ...]) -> bool:
    """Return whether exactly one dimension grows with the rows."""
    if len(two) != len(three):
        return False
    grows = [(a, b) for a, b in zip(two, three, strict=True) if a != b]
    return len(grows) == 1 and grows[0][0] * 3 == grows[0][1] * 2


def _other_generators() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state()
    return {"Python": random.getstate(), "numpy": (kind, np.asarray(words).tobytes(), *rest)}


# --- draws that move with their rows ----------------------------------------------------------


_TRIES = 4  # seeds of `mixes_draws`


class DrawsOfRows:
    """Record the random numbers of each row, and reuse them after rows have moved."""

    def __init__(self, run: Callable[[list[int]], Any]) -> None:
        """Find the dimension of the rows in each random call. run: runs a pass of examples."""
        shapes, self.has_unknown = [], False
        for rows in ([0, 1], [0, 1, 0]):
            seen = _Recorder()
            with seen:
                run(rows)
            self.has_unknown |= seen.has_unknown
            shapes.append([tuple(each.shape) for each in seen.drawn])
        self._dims = [
            next(
                (place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]),
                None,
            )
            for a, b in zip(*shapes, strict=True)
        ]
        self._run = run
        self._known: dict[int, list[Tensor]] = {}  # numbers of its row, by example

    def __call__(self, rows: list[int]) -> Any:
        """Run a pass in which each example has the numbers of its first pass."""
        if not self._known.keys() >= set(rows):
            recorder = _Recorder()
            with recorder:
                found = self._run(rows)
            for place, example in enumerate(rows):
                self._known[example] = [
                    drawn if dim is None else _part(drawn, dim, place, len(rows))
                    for drawn, dim in zip(recorder.drawn, self._dims, strict=True)
                ]
            return found
        given = [
            self._known[rows[0]][call]
            if dim is None
            else torch.cat([self._known[example][call] for example in rows], dim)
            for call, dim in enumerate(self._dims)
        ]
        with _Recorder(given):
            return self._run(rows)

    def draw_as(self, example: int, other: DrawsOfRows) -> None:
        """Give an example the numbers that it has in `other`."""
        self._known[example] = other._known[example]


def mixes_draws(run: Callable[[int, list[int]], Tensor]) -> bool:
    """Return whether a row's result depends on the random numbers of other rows.

    An example is a block drop that scales by the mean over the batch: each row has its own numbers,
    and one more record changes the results of the others.

    run: runs a pass of examples 0 and 1 with the random numbers of a given seed, and returns a
    result for each row. Calls whose result does not show their numbers are not checked.
    """
    for number in range(0, 2 * _TRIES, 2):
        try:
            own, other = (DrawsOfRows(functools.partial(run, it)) for it in (number, number + 1))
        except RuntimeError:  # RReLU, for which the screening raises an error
            return False
        if own.has_unknown:
            return False
        first, second = own([0, 1])[0], other([0, 1])[1]
        own.draw_as(1, other)
        mixed = own([0, 1])
        if not torch.allclose(mixed, torch.stack([first, second]), rtol=1e-4, atol=1e-6):
            return True
    return False


def _part(drawn: Tensor, dim: int, place: int, rows: int) -> Tensor:
    width = drawn.shape[dim] // rows
    return drawn.narrow(dim, place * width, width)


class _Recorder(TorchDispatchMode):
    """Record the numbers of random calls, or replace them by given ones.

    Raises RuntimeError in a call whose result does not show its numbers.
    """

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn, self._given = list[Tensor](), None if given is None else iter(given)
        self.has_unknown = False  # whether fused attention drew, whose result hides the numbers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name.startswith("_scaled_dot"):
            before = random_states(args[0].device)
            found = func(*args, **kwargs)
            self.has_unknown |= not same_states(before, random_states(args[0].device))
            return found
        if name.startswith("rrelu"):
            raise RuntimeError(name)
        mask = name == "native_dropout"
        if self._given is None:
            found = func(*args, **kwargs)
            self.drawn.append((found[1] if mask else found).clone())
            return found
        wanted = next(self._given)
        if mask:
            return args[0] * wanted / (1 - args[1]), wanted
        return args[0].copy_(wanted) if name.endswith("_") else wanted.clone()


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Leave torch's random state as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
