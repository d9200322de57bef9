from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.local_execution import call

from dpdist.certification import table as tables
from dpdist.certification import table_reader


@pytest.fixture
def runs(golden, tmp_path: Path) -> Path:
    """A trained run named x that is not certified yet."""
    folder = golden("digits", tmp_path)
    shutil.rmtree(folder.certificates)
    return tmp_path


def good(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.slow
def test_certify_and_certify_again_at_another_error(here: None, runs: Path) -> None:
    output = good("certify", "x", "--runs", runs)
    path = runs / "x/certificates/sigma-0.25-fixed-n-200/certificates.parquet"
    assert "at r=0.25" in output and str(path) in output
    assert "Of the population, at least" in output
    table = tables.read(path)
    assert table.num_rows == 20
    assert table_reader.from_arrow(table).certified_accuracy(0.0) > 0.5
    # Again: nothing is computed, the same file stays.
    before = path.read_bytes()
    good("certify", "x", "--runs", runs)
    assert path.read_bytes() == before
    for named in (path, path.parent):
        good("certify", named, "--set", "certify.alpha=0.05")
    again = path.parent.with_name("sigma-0.25-fixed-n-200-alpha-0.05") / path.name
    looser = tables.read(again)["p_lower"].to_pylist()
    assert all(new > old for new, old in zip(looser, table["p_lower"].to_pylist(), strict=True))


def test_predict(runs: Path) -> None:
    import dpdist.data

    test = dpdist.data.load(dpdist.data.DataSource("digits", 10), "test")
    image = np.array(test.inputs[0])
    pixels = image[0] if image.dtype == np.uint8 else (image[0] * 255).astype(np.uint8)
    Image.fromarray(pixels).save(runs / "a.png")
    np.save(runs / "b.npy", test.batch(slice(0, 1))[0].numpy())
    images = (runs / "a.png", runs / "b.npy")
    lines = good(
        "predict", "x", *images, "--runs", runs, "--json", "--set", "certify.n=2000"
    ).splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["label"] for answer in answers] == [int(test.labels[0])] * 2
    assert all(0 < answer["radius"] < 1.2 and not answer["abstain"] for answer in answers)
    text = good("predict", "x", runs / "a.png", "--runs", runs, "--label-only")
    assert text.strip() == f"{runs / 'a.png'}: {int(test.labels[0])}"
