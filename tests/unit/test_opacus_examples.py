"""Opacus' example scripts, rewritten: each runs on invented data and ends with its guarantee."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dpdist.core.optional_imports import import_torchvision
from dpdist.runs.folder import RunFolder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "from_opacus"
QUICK = {
    "mnist": ["--epochs", "1"],
    "cifar10": ["--epochs", "1", "--batch-size", "64"],
    "dcgan": ["--epochs", "1"],
    "imdb": ["--epochs", "1"],
    "char_lstm": ["--epochs", "2"],
    "bert_snli": ["--epochs", "1"],
    "dp_lora": ["--epochs", "1"],
}


MARKS = {"char_lstm": [], "cifar10": [pytest.mark.slow, pytest.mark.nightly]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=MARKS.get(each, [pytest.mark.slow])) for each in QUICK]
)
def test_it_runs_on_invented_data(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("bert_snli", "dp_lora"):
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
    import_torchvision()
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--invented", "--folder", "runs/it", *QUICK[name]])
    run = RunFolder(tmp_path / "runs" / "it")
    assert run.training_summary.exists()
    assert "-DP, zero-out adjacency" in capsys.readouterr().out
