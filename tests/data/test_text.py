"""Texts as rows of tokens, and every complaint."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
from support.datasets import write_split

from dpdist.data import Columns, DataSource, TextColumn, load

TEXTS = ["ab", "", "é!", "longer than that"]


def write(root, texts, name="texts"):
    write_split(root / name, text=texts, label=list(range(len(texts))))


def source(root, name="texts", **text):
    return DataSource(name, 9, root, columns=Columns(text=TextColumn(**text)))


def test_bytes_with_begin_end_and_padding(tmp_path):
    write(tmp_path, TEXTS)
    dataset = load(source(tmp_path, length=6), "train")
    assert dataset.input_shape == (6,) and dataset.labels.tolist() == [0, 1, 2, 3]
    assert dataset.batch(slice(0, 4)).tolist() == [
        [0, 97 + 2, 98 + 2, 1, -1, -1],
        [0, 1, -1, -1, -1, -1],
        [0, 0xC3 + 2, 0xA9 + 2, 33 + 2, 1, -1],
        [0, *(byte + 2 for byte in b"long"), 1],
    ]
    longer = load(source(tmp_path, length=7), "train")
    assert longer.folder != dataset.folder and longer.input_shape == (7,)
    assert pickle.loads(pickle.dumps(longer)).fingerprint != dataset.fingerprint


def test_a_document_is_known_by_all_of_its_text_whatever_reads_it(tmp_path):
    """So runs that read it otherwise are charged to one budget, and comparisons find it."""
    texts = ["same beginning, one end", "same beginning, another", "third", "third"]
    write(tmp_path, texts)
    short, long = (load(source(tmp_path, length=length), "train") for length in (5, 30))
    assert (short.hashes == long.hashes).all() and short.fingerprint != long.fingerprint
    assert len(set(short.hashes[:3])) == 3 and short.hashes[2] == short.hashes[3]
    assert (short.inputs[0] == short.inputs[1]).all()
    chosen = replace(source(tmp_path, length=5), labels=(2, 0))
    assert (load(chosen, "train").hashes == short.hashes[[0, 2]]).all()
    # What is drawn for a part must differ where its inputs do: it is named by how they were read.
    parts = [each.select(np.array([True, False, True, True])) for each in (short, long)]
    assert (parts[0].hashes == parts[1].hashes).all()
    assert parts[0].fingerprint != parts[1].fingerprint
