"""docs/how-to/trainers.md: both scripts run as printed, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.optional_extras import needs_hf, needs_lightning

import dpdist

needs_hf(whole_file=True)
needs_lightning()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "trainers.md"
SCRIPTS = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
FOLDERS = ["lora", "net"]
LOADED_BY_PEFT = """
torch.manual_seed(0)
loaded = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), "adapter").eval()
ids = torch.tensor(rows[:3])
assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
"""


@pytest.mark.parametrize("place", [0, 1])
def test_a_script_runs_as_printed(tmp_path, place):
    """Nothing is imported before: where torchvision does not fit torch, dpdist mends it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[place] + LOADED_BY_PEFT * (place == 0))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script.name], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    guarantee = dpdist.load_results(tmp_path / "runs" / FOLDERS[place]).guarantee
    assert 2.9 < guarantee.epsilon <= 3 and guarantee.kind == "proved"
    assert str(guarantee) in done.stdout
