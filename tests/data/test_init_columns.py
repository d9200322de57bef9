"""`dpdist init` on tables: CSV, texts, columns that are named or left out, and public ranges."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import language_models as lm
from support.datasets import write_split
from support.optional_extras import needs_hf
from support.training import make, train
from typer.testing import CliRunner

import dpdist
from dpdist import models
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.privacy.plan import UserUnit
from dpdist.publishing import write_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import load_recipe, resolve_recipe
from dpdist.training.records import data_source, load_test_records, records_with_canaries

ROWS = 200


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(seed: int, rows: int = ROWS) -> dict[str, list]:
    rng = np.random.default_rng(seed)
    return {
        "patient_id": [f"p{seed}-{i % 50}" for i in range(rows)], "number": list(range(rows)),
        "visit_id": [i % 7 for i in range(rows)], "age": rng.uniform(20, 90, rows).tolist(),
        "pulse": rng.integers(40, 180, rows).tolist(),
        "ward": rng.choice(["a", "b", "c"], rows).tolist(),
        "ill": [i % 2 for i in range(rows)],
    }  # fmt: skip


def write_csv(name: str = "scans") -> Path:
    Path(name).mkdir()
    for split, seed, rows in (("train", 0, ROWS), ("test", 1, 40)):
        columns = table(seed, rows)
        lines = [
            ",".join(columns),
            *(",".join(map(str, r)) for r in zip(*columns.values(), strict=True)),
        ]
        Path(name, f"{split}.csv").write_text("\n".join(lines) + "\n")
    return Path(name)


def said(*options: str, code: int = 0, given: str | None = None) -> str:
    done = CliRunner().invoke(app, ["init", *options], input=given)
    if code == 0 and done.exception is not None:
        raise done.exception
    return done.stdout


def test_csv_is_read_as_it_is_and_what_is_left_out_is_named():
    before = sorted(write_csv().iterdir())
    out = said("scans", "--label", "ill")
    assert sorted(Path("scans").iterdir()) == before
    for name in ("patient_id", "ward", "visit_id", "number"):
        assert f"left out: {name}: " in out
    assert "[0, 120]" in out and "50.0" in out
    recipe = load_recipe(Path("scans.yaml"))
    assert recipe.data.columns.features == ["age", "pulse"]
    recipe = resolve_recipe(recipe, changes={"data.columns.preprocessing": {}})
    records = records_with_canaries(recipe, data_source(recipe))
    wanted = np.array([table(0)["age"], table(0)["pulse"]], dtype=np.float32).T
    assert np.array_equal(np.asarray(records.inputs), wanted)
    assert "# Left out: ward: text." in Path("scans.yaml").read_text()


def test_public_ranges_scale_features_and_cut_what_lies_beyond():
    write_csv()
    said("scans", "--label", "ill", "--range", "age=30,80", "--range", "pu*=40,180")
    recipe = load_recipe(Path("scans.yaml"))
    rules = recipe.data.columns.preprocessing
    assert {n: rule.range for n, rule in rules.items()} == {"age": (30, 80), "pulse": (40, 180)}
    records = records_with_canaries(recipe, data_source(recipe))
    age, pulse = np.array(table(0)["age"], np.float32), np.array(table(0)["pulse"], np.float32)
    wanted = np.stack([np.clip((age - 30) / 50, 0, 1), (pulse - 40) / 140], 1)
    found = np.asarray(records.inputs)
    assert np.allclose(found, wanted, atol=1e-6) and found.min() == 0 and found.max() == 1
    assert "data.columns.preprocessing" in checked("scans.yaml")
    plain = resolve_recipe(recipe, changes={"data.columns.preprocessing": {}})
    assert np.asarray(records_with_canaries(plain, data_source(plain)).inputs).max() > 100


def test_a_range_is_not_taken_for_categories_of_text():
    """Numbers with thousands separators are text in a file."""
    for split in ("train", "test"):
        write_split(Path("sales"), split, amount=["1,058.71", "unknown", "3"] * 20, x=[0.5] * 60,
                    label=[0, 1] * 30)  # fmt: skip
    for answer in ("10,20000", "10,20000,log1p,flag"):
        with pytest.raises(UserError, match=r"--range: .*amount"):
            said("sales", "--range", f"amount={answer}")
    assert not Path("sales.yaml").exists()
    for split in ("train", "test"):
        write_split(Path("marked"), split, amount=["1,058.71", "", "3"] * 20, x=[0.5] * 60,
                    label=[0, 1] * 30)  # fmt: skip
    with pytest.raises(UserError, match=r"amount .*1234\.5"):
        said("marked", "--range", "amount=10,20000")
    said("sales", "--range", "*=0,1", "--range", "amount=low,high")
    rules = load_recipe(Path("sales.yaml")).data.columns.preprocessing
    assert rules["amount"].categories == ("low", "high") and rules["x"].range == (0, 1)


def test_named_features_and_a_group():
    write_csv()
    said("scans", "--label", "ill", "--features", "number,pulse", "--user", "patient_id")
    recipe = load_recipe(Path("scans.yaml"))
    columns = recipe.data.columns
    assert (columns.features, columns.user) == (["number", "pulse"], "patient_id")
    assert records_with_canaries(recipe, data_source(recipe)).largest_user == 4
    assert recipe.user_unit == UserUnit("patient_id", 4)
    assert (recipe.privacy.delta, recipe.training.batch_size) == (0.001, 4)  # of 50 persons
    assert "50 users" in checked("scans.yaml")


def test_texts_become_a_recipe_of_texts():
    for split, rows in (("train", 120), ("test", 20)):
        write_split(Path("films"), split, review=[f"{split} {i} good" for i in range(rows)],
                    film_id=list(range(rows)), label=["bad", "good"] * (rows // 2))  # fmt: skip
    out = said("films")
    assert "column review" in out and "left out: film_id" in out
    recipe = load_recipe(Path("films.yaml"))
    assert recipe.data.columns.features == ["review"] and recipe.data.names == ["bad", "good"]
    assert recipe.data.columns.preprocessing["review"].text == 256
    assert recipe.model.name == "linear" and recipe.certify is None
    assert len(load_test_records(recipe, data_source(recipe))) == 20


@pytest.mark.slow
def test_texts_with_labels_become_a_classifier_on_a_model_of_ones_own():
    needs_hf()
    write_jsonl("films", review=LINES, label=["bad", "good"] * 24)
    lm.save_model(Path("base"))
    said("films", "--base", "base", "--pretraining-data", "books")
    recipe = load_recipe(Path("films.yaml"))
    assert (recipe.data.num_classes, recipe.data.predicts_next_token) == (2, False)
    assert recipe.model.initial.folder == Path("base").resolve()
    assert trained("films.yaml").model_folder.is_dir()
    with pytest.raises(UserError, match="--base"):
        write_csv()
        said("scans", "--label", "ill", "--base", "base", "--pretraining-data", "books")


# --- next tokens of texts and chats


def write_jsonl(name: str, **rows: list) -> None:
    Path(name).mkdir()
    for split, count in (("train", 48), ("test", 8)):
        lines = [
            json.dumps({key: values[n] for key, values in rows.items()}).replace("SPLIT", split)
            for n in range(count)
        ]
        Path(name, f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


TALK = [
    [{"role": "user", "content": f"SPLIT q {n}"}, {"role": "assistant", "content": f"a {n}"}]
    for n in range(48)
]
LINES = [f"SPLIT text {n}" for n in range(48)]


def trained(recipe: str, **more: Any) -> RunFolder:
    """One step of the recipe, by its data, model and unit."""
    raw = load_recipe(Path(recipe)).model_dump(mode="json")
    unit = ("unit", "max_records_per_user")
    more = {
        f"privacy__{key}": raw["privacy"].get(key) for key in unit if key in raw["privacy"]
    } | more
    made, folder = make(Path("runs"), recipe, data=raw["data"], model=raw["model"],
                        training__steps=1, training__batch_size=8, **more)  # fmt: skip
    train(made, folder)
    return folder


@pytest.mark.slow
def test_texts_without_a_label_become_a_recipe_of_next_tokens():
    write_jsonl("notes", text=LINES, source=["web"] * 48, page_id=list(range(48)))
    out = said("notes")
    assert "column text" in out and "left out: source: " in out and "--label source" in out
    recipe = load_recipe(Path("notes.yaml"))
    assert recipe.data.predicts_next_token and recipe.data.classes == 258
    assert recipe.model.name == "next-word-lstm" and recipe.certify is None
    assert trained("notes.yaml").model_folder.is_dir()


@pytest.mark.slow
def test_chats_become_adapters_on_a_model_of_ones_own():
    needs_hf()
    write_jsonl("chats", messages=TALK, who=[f"SPLIT {n // 2}" for n in range(48)])
    lm.save_model(Path("base"))
    for options, key in (
        ([], "--base"),
        (["--base", "base"], "--pretraining-data"),
        (["--base", "base", "--pretraining-data", " "], "--pretraining-data"),
        (["--base", "none", "--pretraining-data", "books"], r"config\.json"),
    ):
        with pytest.raises(UserError, match=key):
            said("chats", *options)
    assert not Path("chats.yaml").exists() and not list(Path("chats").glob("*.parquet"))
    out = said("chats", "--base", "base", "--pretraining-data", "books", "--user", "who")
    assert "column messages" in out
    recipe = load_recipe(Path("chats.yaml"))
    text = recipe.data.text
    assert (text.messages, text.tokenizer, text.length) == ("messages", Path("base").resolve(), 128)
    assert recipe.data.columns.user == "who" and recipe.model.initial.pretraining_data == "books"
    assert trained("chats.yaml").model_folder.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("question", "answer"), ("instruction", "output")])
def test_prompts_and_answers_become_adapters_that_learn_the_answers(names):
    needs_hf()
    prompt, answer = names
    rows = {prompt: LINES, answer: [f"a {n}" for n in range(48)], "input": ["x"] * 48}
    write_jsonl("pairs", **rows, who=[f"SPLIT {n // 2}" for n in range(48)])
    with pytest.raises(UserError, match="--base"):
        said("pairs")
    lm.save_model(Path("base"))
    out = said("pairs", "--base", "base", "--pretraining-data", "books", "--user", "who")
    assert f"column {prompt}" in out and f"column {answer}" in out and "left out: input: " in out
    recipe = load_recipe(Path("pairs.yaml"))
    text = recipe.data.text
    assert (text.prompt, text.answer, text.messages) == (prompt, answer, None)
    assert trained("pairs.yaml").model_folder.is_dir()
    targets = load_test_records(recipe, data_source(recipe)).targets(slice(0, 1))[0]
    learned = lm.chat_tokenizer().decode(targets[targets >= 0])
    assert learned == "a 0<|im_end|>\n"


@pytest.mark.slow
def test_predict_and_a_release_take_raw_features():
    write_csv()
    said("scans", "--label", "ill", "--range", "age=30,80", "--range", "pulse=40,180")
    raw = load_recipe(Path("scans.yaml")).data.model_dump(mode="json")
    recipe, folder = make(Path("runs"), "scans", data=raw, model={"name": "linear"},
                          training__steps=5)  # fmt: skip
    train(recipe, folder)
    write_release(folder, not_private=True)
    (row,) = np.array([[55.0, 110.0]])
    np.save("row.npy", row)
    sys.path.insert(0, ".")
    seen: list[torch.Tensor] = []
    release = dpdist.load(RunFolder(folder.path).release_folder)
    release.model.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    release.answerer(sigma=1e-6, n=100)(row)
    assert torch.allclose(seen[-1].mean(0), torch.tensor([0.5, 0.5]), atol=1e-3)
    for where in (folder.path, folder.release_folder):
        done = CliRunner().invoke(app, ["predict", str(where), "row.npy", "--json",
            "--set", "certify.sigma=1e-6", "--set", "certify.n=200"])  # fmt: skip
        assert done.exception is None, done.exception
        with torch.no_grad():
            best = int(models.load(folder.model_folder)(torch.tensor([[0.5, 0.5]])).argmax())
        assert f'"label": {best}' in done.stdout
        Path("rows.csv").write_text("pulse,name,age\n110,x,55\n40,y,30\n")
        done = CliRunner().invoke(app, ["predict", str(where), "rows.csv", "--json",
            "--set", "certify.sigma=1e-6", "--set", "certify.n=200"])  # fmt: skip
        assert done.exception is None, done.exception
        first, second = map(json.loads, done.stdout.splitlines())
        assert (first["image"], first["label"]) == ("rows.csv:0", best)
        assert second["image"] == "rows.csv:1"
    page = (folder.release_folder / "README.md").read_text()
    assert "`pulse`" in page and "[40, 180]" in page


# --- changed files


SPLITS = {"train": 30, "test": 6}


def write_rows(name: str, header: str, row: str, **changed: dict[int, str]) -> Path:
    """Write SPLIT.csv with a row of `row`, in which N is its number; changed: rows by split."""
    Path(name).mkdir(exist_ok=True)
    for split, count in SPLITS.items():
        rows = [row.replace("N", str(n + 100 * (split == "test"))) for n in range(count)]
        for place, text in changed.get(split, {}).items():
            rows[place] = text
        Path(name, f"{split}.csv").write_text("\n".join([header, *rows]) + "\n")
    return Path(name)


def checked(recipe: str) -> str:
    done = CliRunner().invoke(app, ["data", "check", recipe])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_run_on_records_that_changed_does_not_go_on():
    write_rows("st", "age,ill", "N.5,1", train={0: "7.25,0"}, test={0: "8.25,0"})
    said("st", "--label", "ill", "--features", "age")
    raw = load_recipe(Path("st.yaml")).model_dump(mode="json")
    made, run = make(Path("runs"), "st.yaml", data=raw["data"], model=raw["model"],
                     training__steps=1, training__batch_size=8)  # fmt: skip
    train(made, run)
    write_rows("st", "age,ill", "N.5,1", train={0: "9.25,0"}, test={0: "8.25,0"})
    with pytest.raises(UserError, match="changed"):
        train(made, run)


def test_a_person_whose_name_has_a_blank_behind_it_is_not_two():
    write_rows("st", "pid,age,ill", "pN,N.5,1", train={3: "p4 ,7.75,0"})
    said("st", "--label", "ill", "--user", "pid")
    with pytest.raises(UserError, match="'pid'"):
        checked("st.yaml")


# --- whom a record belongs to ------------------------------------------------------------------


def test_an_id_that_repeats_is_told_by_init_and_by_data_check():
    write_csv()
    out = said("scans", "--label", "ill")
    told = "patient_id repeats: 200 rows of 50 values: a person?"
    assert told in out and "--user patient_id" in out
    assert f"# {told} Then: dpdist init --user patient_id" in Path("scans.yaml").read_text()
    assert told in checked("scans.yaml")
    said("scans", "--label", "ill", "--user", "patient_id", "--output", "persons.yaml")
    assert "repeats" not in checked("persons.yaml").replace("visit_id repeats", "")
    assert checked("persons.yaml") and trained("persons.yaml").path.is_dir()
