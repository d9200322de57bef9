"""Texts as rows of tokens, the same in recipes and in Python."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import language_models as lm
from support.datasets import write_split
from support.optional_extras import needs_hf

import dpdist
from dpdist.data import Columns, DataSource, TextColumn, load
from dpdist.data.text import TOKENIZER_FILE

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


@pytest.mark.parametrize("form", ["chats", "answers"])
def test_a_file_gives_the_same_tokens_to_recipes_and_to_python(tmp_path, form):
    needs_hf()
    from dpdist.models.transformers import read_tokens

    base = lm.save_model(tmp_path / "base")
    said = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * n}]
            for n in range(1, 5)]  # fmt: skip
    columns = {"messages": said}
    if form == "answers":
        columns = {"prompt": [f"q{n}" for n in range(4)], "answer": ["a" * n for n in range(1, 5)]}
    path = write_split(tmp_path / "texts", **columns)
    names = {name: name for name in columns}
    text = TextColumn(
        length=60, tokenizer=base / TOKENIZER_FILE, predicts_next_token=True,
        **names,
    )  # fmt: skip
    split = load(DataSource("texts", 9, tmp_path, columns=Columns(text=text)), "train")
    fields = dpdist.documents(path, base, length=60).batch(slice(None))
    tokens, real = read_tokens(split.batch(slice(None)))
    assert torch.equal(tokens, fields["input_ids"])
    assert torch.equal(real.long(), fields["attention_mask"])
    learned = split.targets(slice(None))[:, :-1]
    assert torch.equal(learned.where(learned >= 0, torch.tensor(-100)), fields["labels"][:, 1:])
