"""Tests of what an extra brings are skipped, with the reason, where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_hf(*, whole_file: bool = False) -> None:
    """Skip unless the extra hf is there. whole_file: at import of a file of tests."""
    missing = [name for name in ("transformers", "peft", "tokenizers") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: pip install 'dpdist[hf]'",
                    allow_module_level=whole_file)  # fmt: skip


def needs_datasets() -> None:
    """Skip a test unless Hugging Face's datasets is there, which no extra brings."""
    if find_spec("datasets") is None:
        pytest.skip("datasets missing: pip install datasets")


def needs_lightning() -> None:
    """Skip a file of tests unless the extra lightning is there."""
    if find_spec("lightning") is None:
        pytest.skip("lightning missing: pip install 'dpdist[lightning]'", allow_module_level=True)
