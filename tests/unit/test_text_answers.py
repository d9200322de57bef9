"""Texts are answered by predict, of runs and of releases, by the tokens of training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.optional_extras import needs_hf
from support.training import make, train
from typer.testing import CliRunner

import dpdist
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.core.fields import BEGIN
from dpdist.core.optional_imports import import_extra
from dpdist.data.text import TextColumn
from dpdist.evaluation import load_model
from dpdist.publishing import write_release
from dpdist.release import generation
from dpdist.release.description import FORMAT
from dpdist.release.files import CHECKSUMS, DESCRIPTION, TOKENIZER, WORDS, compute_checksums
from dpdist.release.verify import verify_release
from dpdist.runs.folder import RunFolder

WORDS_OF = ("the", "cat", "sat", "mat", "dog", "ran")
LENGTH = 8


def made(tmp: Path, name: str, text: dict[str, Any]) -> RunFolder:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        texts = [f"{split} {k} " + " ".join(rng.choice(WORDS_OF, 5)) for k in range(40)]
        write_split(tmp / "data" / "own", split, text=texts, label=np.arange(40) % 2)
    (tmp / "data" / "own" / "words.txt").write_text("".join(f"{word}\n" for word in WORDS_OF))
    data: dict[str, Any] = {"name": "own", "root": str(tmp / "data")}
    data["text"] = {"length": LENGTH, "predict": "next", **text}
    model = {"name": "next-word-mlp", "options": {}}
    recipe, folder = make(tmp / "runs", name, data=data, model=model, training__steps=3)
    train(recipe, folder)
    write_release(folder, not_private=True)
    return folder


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return made(tmp_path_factory.mktemp("next"), "next", {"words": 4})


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.slow
def test_the_next_word_is_that_of_the_last_word_of_a_text(following):
    recipe = following.read_recipe()
    row = torch.full((1, LENGTH), -1.0)
    row[0, :3] = torch.tensor([BEGIN, 3.0, 4.0])  # begin, the, cat: no end
    with torch.no_grad():
        wanted = load_model(recipe, following)(row)[0, 2].double().softmax(0)
    names = ["<begin>", "<end>", "<unknown>", "the", "cat", "sat", "mat"]
    answers = [
        json.loads(said("predict", where, "--text", "The cat", "--json"))
        for where in (following.path, following.release_folder)
    ]
    assert answers[0] == answers[1] and answers[0]["text"] == "'The cat'"
    best = int(wanted.argmax())
    assert (answers[0]["label"], answers[0]["name"]) == (best, names[best])
    order = wanted.argsort(descending=True)[:5].tolist()
    assert [each["name"] for each in answers[0]["likely"]] == [names[place] for place in order]
    shares = [each["probability"] for each in answers[0]["likely"]]
    assert shares == pytest.approx([float(wanted[place]) for place in order])


def test_a_release_holds_the_words_of_the_training_and_no_other(following, tmp_path):
    words = (following.release_folder / WORDS).read_text()
    assert words.split() == list(WORDS_OF[:4])
    rows = dict(verify_release(following.release_folder))
    assert WORDS in rows["tokenizer"]
    about = json.loads((following.release_folder / DESCRIPTION).read_text())
    assert about["text"] == {"length": LENGTH, "tokens": "words", "words": 4, "predict": "next"}
    assert about["format"] == FORMAT and str(tmp_path.parent) not in json.dumps(about)
    assert (about["classes"], about["vocabulary"], about["data"]["classes"]) == ([], 7, 7)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"length": 9}, r"text\.length"),
        ({"words": 5}, "words"),
        ({"tokens": "tokenizer", "words": None}, TOKENIZER),
        (None, "text"),
    ],
)
def test_an_edited_tokenizer_is_refused(following, tmp_path, change, key):
    folder = tmp_path / "release"
    folder.mkdir()
    for path in following.release_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    about = json.loads((folder / DESCRIPTION).read_text())
    about["text"] = None if change is None else about["text"] | change
    (folder / DESCRIPTION).write_text(json.dumps(about))
    (folder / CHECKSUMS).write_text(compute_checksums(folder))
    with pytest.raises(UserError, match=key):
        verify_release(folder)


# --- the begin and end of a text


def words_in(folder: Path, names: dict[str, str], own: str = "") -> Path:
    """A tokenizer of words as `save_pretrained` writes it, which names these marks.

    own: what it puts around a text by itself, such as "<s> $A".
    """
    needs_hf()
    tokenizers = import_extra("tokenizers", "hf", "tests")
    transformers = import_extra("transformers", "hf", "tests")
    vocabulary = {"<s>": 0, "</s>": 1, "[UNK]": 2} | {w: k + 3 for k, w in enumerate(WORDS_OF)}
    cutter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    cutter.add_special_tokens(["<s>", "</s>"])
    if own:
        marks = [("<s>", 0), ("</s>", 1)]
        cutter.post_processor = tokenizers.processors.TemplateProcessing(
            single=own, special_tokens=marks
        )
    folder.mkdir(parents=True)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, **names)
    made.save_pretrained(folder)
    return folder / TOKENIZER


BOTH_MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
END_ALONE, ONE_MARK = {"eos_token": "</s>"}, {"bos_token": "</s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("names", "own", "short", "empty", "cut", "beginning"),
    [  # of "the cat", of no text, of eight words that are cut to five tokens, of "the" that goes on
        (BOTH_MARKS, "", [0, 3, 4, 1], [0, 1], [0, 3, 3, 3, 3], [0, 3]),
        (BOTH_MARKS, "<s> $A </s>", [0, 3, 4, 1], [0, 1], [0, 3, 3, 3, 3], [0, 3]),
        (END_ALONE, "", [3, 4, 1], [1], [3, 3, 3, 3, 3], [3]),
        (ONE_MARK, "</s> $A", [1, 3, 4, 1], [1, 1], [1, 3, 3, 3, 3], [1, 3]),
    ],
)
def test_a_document_has_one_begin_and_one_end(tmp_path, names, own, short, empty, cut, beginning):
    file = words_in(tmp_path / "cutter", names, own)
    column = TextColumn(length=5, tokenizer=file, predicts_next_token=True, bos_eos=True)

    def row(text: str) -> list[int]:
        return [int(each) for each in column.tokenize_one(text)[0] if each >= 0]

    assert (row("the cat"), row(""), row("the " * 8)) == (short, empty, cut)
    assert row("the " * (5 - len(short) + 2)) == [*short[:-3], *[3] * (7 - len(short)), 1]
    assert column.tokenize_beginning("the").tolist() == beginning
    assert 1 in column.ends
    if own == "":
        plain = replace(column, bos_eos=False)
        assert plain.tokenize_one("the cat").tolist() == [[3, 4, -1, -1, -1]]
        assert column.content_description != plain.content_description
        other = replace(plain, length=5)
        assert other.content_description == plain.content_description


# --- sampled texts


@pytest.mark.slow
def test_texts_are_sampled_by_the_scores_of_the_next_word(following):
    answerer = dpdist.load(following.release_folder).text_answerer
    scores = answerer.next_scores(np.array([BEGIN, 3, 4])).clone()  # begin, the, cat
    scores[[BEGIN, 2]] = float("-inf")  # no text
    wanted = scores.softmax(-1)
    sampling = generation.Sampling(count=4000, max_tokens=1, temperature=1.0, seed=7)
    found = list(generation.sample_texts(answerer, "The cat", sampling))
    names = ["", "the", "cat", "sat", "mat"]  # "" of the end
    shares = [found.count(name) / 4000 for name in names]
    # Hoeffding: all five within 0.04 but with probability 10 exp(-2 * 4000 * 0.04^2) < 3e-5
    assert shares == pytest.approx([float(wanted[place]) for place in (1, 3, 4, 5, 6)], abs=0.04)
    assert sum(shares) == 1
    best = names[max(range(5), key=lambda place: float(wanted[[1, 3, 4, 5, 6]][place]))]
    cold = sampling.model_copy(update={"count": 200, "temperature": 0.001})
    assert set(generation.sample_texts(answerer, "The cat", cold)) == {best}
