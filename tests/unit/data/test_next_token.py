"""Documents whose targets are their own next tokens, and the set of them made of docstrings."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.datasets import write_split

from dpdist.core.errors import UserError
from dpdist.data import WORDS_FILE, Columns, DataSource, TextColumn, WordList, load
from dpdist.data import text as docstrings
from dpdist.data.text import split_words


def write(root, texts, words):
    write_split(root / "texts", text=texts)
    (root / "texts" / WORDS_FILE).write_text("".join(f"{word}\n" for word in words))


def source(root, count, length=6):
    words = WordList(root / "texts" / WORDS_FILE, count)
    columns = Columns(text=TextColumn(length=length, words=words, predicts_next_token=True))
    return DataSource("texts", count + 3, root, columns=columns)


def test_words_and_what_follows_them(tmp_path):
    write(tmp_path, ["The cat, a cat", "", "a dog is a dog is a dog"], ["cat", "a", ",", "is"])
    dataset = load(source(tmp_path, 3), "train")
    assert dataset.batch(slice(0, 3)).tolist() == [
        [0, 2, 3, 5, 4, 1],
        [0, 1, -1, -1, -1, -1],
        [0, 4, 2, 2, 4, 1],
    ]
    assert dataset.predicts_next_token and dataset.targets(np.array([0, 1])).tolist() == [
        [2, 3, 5, 4, 1, -1],
        [1, -1, -1, -1, -1, -1],
    ]
    other = load(source(tmp_path, 4), "train")
    assert other.batch(slice(2, 3)).tolist() == [[0, 4, 2, 6, 4, 1]]
    assert pickle.loads(pickle.dumps(other)).text_encoding != dataset.text_encoding
    labels = source(tmp_path, 4)
    text = replace(labels.columns.text, predicts_next_token=False)
    with pytest.raises(UserError, match=r"no column 'label'"):
        load(replace(labels, columns=Columns(text=text)), "train")
    with pytest.raises(UserError, match=r"data\.text\.words: .* 4 "):
        load(source(tmp_path, 5), "train")
    (tmp_path / "texts" / WORDS_FILE).write_text("a\ncat\n,\nis\n")  # other tokens: read anew
    again = load(source(tmp_path, 4), "train")
    assert again.batch(slice(2, 3)).tolist() == [[0, 3, 2, 6, 3, 1]]
    assert again.text_encoding != other.text_encoding and (again.hashes == other.hashes).all()


SOURCE = '''"""A module whose words are enough to count as one document."""

def one(x):
    """Return the {} of x, which is a number that somebody gave."""

class Two:
    """return  The length of X, which is a number that somebody gave."""  # the same words as one's

    def short(self):
        """Too short."""
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A Python of two packages."""
    for name, what in (("python", "length"), ("else", "weight")):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text(SOURCE.format(what))
        (tmp_path / name / "broken.py").write_text('"""A module of words that nobody can parse')
        hidden = '"""A module of tests, whose words stand in no document at all."""'
        (tmp_path / name / "tests" / "b.py").write_text(hidden)
    found = [(name, "1", tmp_path / name) for name in ("python", "else")]
    monkeypatch.setattr(docstrings, "_sources", lambda progress: iter(found))
    topics = {"b": "Some words, some words.", "a": "One two three four five six seven, some."}
    same = "A module whose words are enough to count AS one document."
    fake = type(sys)("pydoc_data.topics")
    fake.topics = {**topics, "c": f"{same}\n\n{same}"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", fake)
    return found


def texts_of(folder, split):
    return pq.read_table(folder / f"{split}.parquet")["text"].to_pylist()


def test_each_docstring_is_one_record_once_and_the_vocabulary_is_public(
    tmp_path, monkeypatch, installed
):
    made = docstrings.make_docstrings(tmp_path / "first")
    private = texts_of(made, "train") + texts_of(made, "test")
    assert sorted(" ".join(split_words(text)) for text in private) == [
        f"return the {what} of x , which is a number that somebody gave ."
        for what in ("length", "weight")
    ]
    assert len(texts_of(made, "public")) == 2  # "c" once, "b" is too short; "c" is not private
    # twice in these; "number" is not
    assert (made / WORDS_FILE).read_text().split() == [".", "one"]
    about = json.loads((made / "about.json").read_text())
    assert about["read"]["else"] == {"version": "1", "docstrings": 4}
    installed.reverse()  # the order of what is read says nothing
    again = docstrings.make_docstrings(tmp_path / "second")
    for name in ("train.parquet", "test.parquet", "public.parquet", WORDS_FILE):
        assert (again / name).read_bytes() == (made / name).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        docstrings.make_docstrings(tmp_path / "first")
