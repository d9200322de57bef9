"""docs/how-to/trainers.md: both scripts run as printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.optional_extras import needs_hf, needs_lightning

from dpdist.core.optional_imports import install_torchvision_hook

needs_hf(whole_file=True)
needs_lightning()
pytestmark = pytest.mark.whole
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "trainers.md"
SCRIPTS = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())


@pytest.mark.parametrize("place", [0, 1])
def test_a_script_runs_as_printed(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    install_torchvision_hook()
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(SCRIPTS[place], f"script{place}.py", "exec"), names)
    guarantee = names["trainer" if place == 0 else "private"].guarantee
    assert 2.9 < guarantee.epsilon <= 3 and guarantee.kind == "proved"
    assert str(guarantee) in capsys.readouterr().out
    if place == 0:
        config, base = names["config"], names["transformers"].LlamaForCausalLM
        names["torch"].manual_seed(0)
        loaded = names["peft"].PeftModel.from_pretrained(base(config), "adapter").eval()
        ids = names["torch"].tensor(names["rows"][:3])
        trained = names["trainer"].model.eval()
        assert names["torch"].equal(loaded(ids).logits, trained(ids).logits)


def test_the_page_is_short():
    assert len(SCRIPTS) == 2 and len(PAGE.read_text().split()) <= 800
