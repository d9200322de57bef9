"""Two objects of one digest give the same answers; the digest is the same in every process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpdist.models.factory_code import object_digest

SCRIPT = '''
import numpy as np, torch
from torch import nn
from dpdist.models.factory_code import object_digest

W = torch.arange(4.0)
NAMES = {"a", "b", "c"}

class Net(nn.Module):
    """Words."""
    def __init__(self):
        super().__init__()
        self.scale, self.names = 2.0, {"x", "y", "z"}
        self.register_buffer("mean", torch.ones(2), persistent=False)
    def forward(self, x):
        return helper(x) * self.scale

def helper(x):
    return x @ W if "a" in {"a", "b", "c"} | NAMES else x

def made(k):
    def inner(x):
        return x * k
    return inner

things = [Net(), helper, made(3)]
'''


CHANGES = {  # which of the three: module, function, closure
    ("self.scale, self.names = 2.0", "self.scale, self.names = 3.0"): [0],
    ('{"x", "y", "z"}', '{"x", "y"}'): [0],
    ("torch.ones(2)", "torch.zeros(2)"): [0],
    ("return helper(x) * self.scale", "return -helper(x) * self.scale"): [0],
    ("torch.arange(4.0)", "torch.arange(4.0) + 1"): [0, 1],
    ('NAMES = {"a", "b", "c"}', 'NAMES = {"a", "b"}'): [0, 1],
    ('"a" in {"a", "b", "c"} |', '"a" in {"a", "b"} |'): [0, 1],
    ("made(3)", "made(4)"): [2],
    ("return x * k", "return x + k"): [2],
}


def digests_of(text: str) -> list[str | None]:
    """Execute the script in a main module of its own."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), space)
    return [object_digest(each) for each in space["things"]]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_script_s_objects_is_another_digest(change: tuple[str, str]) -> None:
    assert SCRIPT.count(change[0]) == 1
    before, after = digests_of(SCRIPT), digests_of(SCRIPT.replace(*change))
    assert None not in before and len(set(before)) == 3
    assert [place for place in range(3) if after[place] != before[place]] == CHANGES[change]
    assert digests_of("# moved\n" + SCRIPT.replace("Words.", "Other words.")) == before


@pytest.mark.e2e
def test_every_process_has_the_same_digests(tmp_path: Path) -> None:
    found = set()
    for seed in ("0", "7", "8"):  # each another order of sets of texts
        (tmp_path / seed).mkdir()
        script = tmp_path / seed / "script.py"
        script.write_text(SCRIPT + "print(*map(object_digest, things))\n")
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        found.add(done.stdout)
    assert found == {" ".join(map(str, digests_of(SCRIPT))) + "\n"}


def linear(**changed: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    torch.manual_seed(0)
    nn.init.normal_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    for name, value in changed.items():
        setattr(module, name, value)
    return module


def touch(change: Callable[[nn.Module], Any]) -> nn.Module:
    module = linear()
    with torch.no_grad():
        change(module)
    return module


@pytest.mark.parametrize(
    "other",
    [
        lambda: touch(lambda m: m[0].weight[0, 0].add_(1e-6)),
        lambda: touch(lambda m: m.double()),
        lambda: touch(lambda m: setattr(m[1], "p", 0.25)),
        lambda: touch(lambda m: m.append(nn.ReLU())),
        lambda: touch(lambda m: m[0].register_forward_hook(lambda *a: None)),
        lambda: linear(temperature=2),
        lambda: linear(table=np.arange(3)),
        lambda: linear(shift=torch.ones(1)),
        lambda: linear(after=functools.partial(torch.clamp, min=0)),
        lambda: linear(forward=lambda x: x),
    ],
)
def test_every_part_of_a_module_counts(other: Callable[[], nn.Module]) -> None:
    assert object_digest(linear()) == object_digest(linear()) is not None
    assert object_digest(other()) not in (None, object_digest(linear()))


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        torch.Generator(),
        torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)),
        torch.zeros(2).to_sparse(),
    ],
    ids=["lock", "generator", "graph", "sparse"],
)
def test_a_state_that_cannot_be_read_has_no_digest(value: Any) -> None:
    assert object_digest(value) is None
    assert object_digest(linear(hidden=[{"deep": value}])) is None
