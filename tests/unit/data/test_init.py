"""`dpdist init` on tables: CSV, texts, columns that are named or left out, and public ranges."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import language_models as lm
from support.datasets import png, write_split
from support.optional_extras import needs_hf
from support.training import make, train
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.evaluation import evaluate_stage
from dpdist.privacy.plan import UserUnit
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import load_recipe, resolve_recipe
from dpdist.training.records import data_source, load_test_records, records_with_canaries


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*options: str) -> str:
    done = CliRunner().invoke(app, ["init", *options])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def write_scans() -> None:
    Path("scans").mkdir()
    for split, first, count in (("train", 0, 200), ("test", 1000, 40)):
        rows = [
            f"p{first + n % 50},{first + n},{20 + (7 * n + first) % 70}.5,{'abc'[n % 3]},{n % 2}"
            for n in range(count)
        ]
        text = "\n".join(["patient_id,number,age,ward,ill", *rows])
        Path("scans", f"{split}.csv").write_text(f"{text}\n")


def test_csv_is_read_as_it_is_and_what_is_left_out_is_named():
    write_scans()
    before = sorted(Path("scans").iterdir())
    out = said("scans", "--label", "ill")
    assert sorted(Path("scans").iterdir()) == before
    for name in ("patient_id", "ward", "number"):
        assert f"left out: {name}: " in out
    recipe = load_recipe(Path("scans.yaml"))
    assert recipe.data.columns.features == ["age"]
    recipe = resolve_recipe(recipe, changes={"data.columns.preprocessing": {}})
    records = records_with_canaries(recipe, data_source(recipe))
    assert records.inputs[:, 0].tolist() == [20.5 + 7 * n % 70 for n in range(200)]


def test_named_features_and_a_group():
    write_scans()
    said("scans", "--label", "ill", "--features", "number,age", "--user", "patient_id")
    recipe = load_recipe(Path("scans.yaml"))
    columns = recipe.data.columns
    assert (columns.features, columns.user) == (["number", "age"], "patient_id")
    assert records_with_canaries(recipe, data_source(recipe)).largest_user == 4
    assert recipe.user_unit == UserUnit("patient_id", 4)
    assert (recipe.privacy.delta, recipe.training.batch_size) == (0.001, 4)  # of 50 persons
    assert "50 users" in checked("scans.yaml")


@pytest.mark.slow
def test_texts_with_labels_become_a_classifier_on_a_model_of_ones_own():
    needs_hf()
    write_jsonl("films", review=LINES, label=["bad", "good"] * 24)
    said("films")  # without a model: of words counted by hash
    recipe = load_recipe(Path("films.yaml"))
    assert recipe.data.columns.preprocessing["review"].text == 256
    assert len(load_test_records(recipe, data_source(recipe))) == 8
    lm.save_model(Path("base"))
    said("films", "--base", "base", "--pretraining-data", "books", "--output", "base.yaml")
    recipe = load_recipe(Path("base.yaml"))
    assert (recipe.data.num_classes, recipe.data.predicts_next_token) == (2, False)
    assert recipe.model.initial.folder == Path("base").resolve()
    assert trained("base.yaml").model_folder.is_dir()


def test_adapters_on_many_texts_train_within_minutes_on_a_cpu():
    """Few tokens in all: a base of 22 million parameters reads about 1,000 a second on a core."""
    Path("base").mkdir()
    Path("base/config.json").write_text('{"model_type": "bert", "max_position_embeddings": 512}')
    Path("films").mkdir()
    for split in ("train", "test"):
        rows = [{"review": f"{split} text {n}", "label": n % 2} for n in range(20_000)]
        Path("films", f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said("films", "--base", "base", "--pretraining-data", "books")
    recipe = load_recipe(Path("films.yaml"))
    training = recipe.training
    assert training.steps * training.batch_size * recipe.data.text.length < 300_000


def test_numbers_are_learned_in_a_public_range_and_predicted_in_their_own_unit():
    Path("st").mkdir()
    for split, first in (("train", 0), ("test", 100)):
        rows = [f"{n}.5,{n},{1000 * n}.0" for n in range(first, first + 30)]
        Path("st", f"{split}.csv").write_text("\n".join(["size,floor,price", *rows, ""]))
    with pytest.raises(UserError, match="price=LOW,HIGH"):
        said("st", "--label", "price", "--range", "*=0,200")  # a pattern is for inputs
    said("st", "--label", "floor", "--range", "floor=0,200", "--output", "floor.yaml")
    assert load_recipe(Path("floor.yaml")).data.targets == "number"  # integers with a range
    said("st", "--label", "price", "--range", "price=-50000,50000", "--range", "*=0,200")
    recipe = load_recipe(Path("st.yaml"))
    assert recipe.data.columns.features == ["size", "floor"]
    learned = records_with_canaries(recipe, data_source(recipe)).labels[:, 0]
    assert np.allclose(learned, 0.5 + 0.01 * np.arange(30))
    raw = recipe.model_dump(mode="json")
    made, run = make(Path("runs"), "st.yaml", data=raw["data"], model=raw["model"],
                     training__steps=1, training__batch_size=8, training__loss="mse")  # fmt: skip
    train(made, run)
    evaluate_stage(made, run)
    told = CliRunner().invoke(app, ["predict", run.path.name, "st/test.csv"]).stdout
    errors = [float(line.rpartition(" ")[2]) - 1000 * n for n, line in
              enumerate(told.splitlines(), 100)]  # fmt: skip
    measured = json.loads(run.evaluation.read_text())["measures"]  # of prices that are not cut
    assert np.isclose(measured["mean absolute error"], np.abs(errors).mean(), rtol=1e-4)
    assert np.isclose(measured["mean squared error"], np.square(errors).mean(), rtol=1e-4)


@pytest.mark.parametrize(("values", "hinted"), [(3, False), (30, True)])
def test_many_whole_numbers_as_a_label_may_be_meant_as_a_number(values, hinted):
    Path("st").mkdir()
    for split, first in (("train", 0), ("test", 60)):
        rows = [f"{n}.5,{n % values}" for n in range(first, first + 60)]
        Path("st", f"{split}.csv").write_text("\n".join(["size,floor", *rows, ""]))
    assert ("--range floor=" in said("st", "--label", "floor")) is hinted
    assert load_recipe(Path("st.yaml")).data.classes == values


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


def trained(recipe: str) -> RunFolder:
    """One step of the recipe, by its data, model and unit."""
    raw = load_recipe(Path(recipe)).model_dump(mode="json")
    names = {"unit", "max_records_per_user"} & raw["privacy"].keys()
    unit = {f"privacy__{name}": raw["privacy"][name] for name in names}
    made, folder = make(Path("runs"), recipe, data=raw["data"], model=raw["model"],
                        training__steps=1, training__batch_size=8, **unit)  # fmt: skip
    train(made, folder)
    return folder


@pytest.mark.slow
def test_texts_without_a_label_become_a_recipe_of_next_tokens():
    write_jsonl("notes", text=LINES, source=["web"] * 48, page_id=list(range(48)))
    said("notes")
    recipe = load_recipe(Path("notes.yaml"))
    assert recipe.data.predicts_next_token and recipe.data.classes == 258
    assert trained("notes.yaml").model_folder.is_dir()


@pytest.mark.slow
def test_chats_become_adapters_on_a_model_of_ones_own():
    needs_hf()
    write_jsonl("chats", messages=TALK, who=[f"SPLIT {n // 2}" for n in range(48)])
    lm.save_model(Path("base"))
    with pytest.raises(UserError, match="--pretraining-data"):
        said("chats", "--base", "base")
    said("chats", "--base", "base", "--pretraining-data", "books", "--user", "who")
    recipe = load_recipe(Path("chats.yaml"))
    text = recipe.data.text
    assert (text.messages, text.tokenizer, text.length) == ("messages", Path("base").resolve(), 128)
    assert recipe.data.columns.user == "who" and recipe.model.initial.pretraining_data == "books"
    assert trained("chats.yaml").model_folder.is_dir()


@pytest.mark.slow
def test_prompts_and_answers_become_adapters_that_learn_the_answers():
    needs_hf()
    answers = [f"a {n}" for n in range(48)]
    write_jsonl("pairs", instruction=LINES, output=answers, input=["x"] * 48)
    lm.save_model(Path("base"))
    said("pairs", "--base", "base", "--pretraining-data", "books")
    recipe = load_recipe(Path("pairs.yaml"))
    text = recipe.data.text
    assert (text.prompt, text.answer, text.messages) == ("instruction", "output", None)
    assert trained("pairs.yaml").model_folder.is_dir()
    targets = load_test_records(recipe, data_source(recipe)).targets(slice(0, 1))[0]
    assert lm.chat_tokenizer().decode(targets[targets >= 0]) == "a 0<|im_end|>\n"


def write_rows(header: str, row: str, changed: str) -> None:
    """Write st/SPLIT.csv with rows of `row`, in which N is a number (and M one of another row), and
    a changed one first."""
    Path("st").mkdir(exist_ok=True)
    for split, first in (("train", 0), ("test", 100)):
        rows = [row.replace("N", str(first + n)) for n in range(30)]
        rows[0] = changed.replace("N", str(first)).replace("M", str(first + 4))
        Path("st", f"{split}.csv").write_text("\n".join([header, *rows]) + "\n")


def checked(recipe: str) -> str:
    done = CliRunner().invoke(app, ["data", "check", recipe])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_run_on_records_that_changed_does_not_go_on():
    write_rows("age,ill", "N.5,1", "N.25,0")
    said("st", "--label", "ill", "--features", "age")
    raw = load_recipe(Path("st.yaml")).model_dump(mode="json")
    made, run = make(Path("runs"), "st.yaml", data=raw["data"], model=raw["model"],
                     training__steps=1, training__batch_size=8)  # fmt: skip
    train(made, run)
    write_rows("age,ill", "N.5,1", "N.75,0")
    with pytest.raises(UserError, match="changed"):
        train(made, run)


def test_a_person_whose_name_has_a_blank_behind_it_is_not_two():
    write_rows("pid,age,ill", "pN,N.5,1", "pM ,N.75,0")
    said("st", "--label", "ill", "--user", "pid")
    with pytest.raises(UserError, match="'pid'"):
        checked("st.yaml")


def test_pictures_in_a_column_with_labels_in_words():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 10), dtype=np.uint8)
    cells = [{"bytes": png(each), "path": None} for each in pixels]
    for split, part in (("train", slice(6)), ("validation", slice(6, 8))):
        write_split(Path("st"), split, scan=cells[part], **{"class": (["well", "ill"] * 4)[part]})
    said("st")
    recipe = load_recipe(Path("st.yaml"))
    assert recipe.data.names == ["ill", "well"] and recipe.data.classes == 2
    assert (recipe.data.columns.image, recipe.data.columns.label) == ("scan", "class")
    assert (recipe.data.test, recipe.model.name) == ("validation", "small-cnn")
    records = records_with_canaries(recipe, data_source(recipe))
    assert records.input_shape == (1, 10, 10) and records.labels.tolist() == [1, 0] * 3
    assert len(load_test_records(recipe, data_source(recipe))) == 2


def test_a_pattern_stands_for_the_columns_that_it_fits():
    names = ("mean_a", "std_a", "mean_b")
    for split, first in (("train", 0.0), ("test", 100.0)):
        columns = {name: [first + place, first + 9] for place, name in enumerate(names)}
        write_split(Path("st"), split, **columns, label=[0, 1])
    said("st")
    recipe = load_recipe(Path("st.yaml"))

    def read(features: str):
        changes = {"data.columns.features": [features], "data.columns.preprocessing": {}}
        changed = resolve_recipe(recipe, changes=changes)
        return np.asarray(records_with_canaries(changed, data_source(changed)).inputs).tolist()

    assert read("mean_*") == [[0.0, 2.0], [9.0, 9.0]] and len(read("*")[0]) == 3
    with pytest.raises(UserError, match=r"max_\*"):
        read("max_*")
