"""Input that is invalid by construction: each case must be refused, as test_fuzz.py says."""

from __future__ import annotations

import copy
import io
import json
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import draws as st
from harness import Fuzz, cases, listing
from hostile import BASE, damage, put, restored
from support.local_execution import run_without_ray as executed_here
from support.parquet_footers import rewrite_row_count
from test_fuzz import OPTIONS

from dpdist import pipeline
from dpdist.audits import membership_statistics
from dpdist.certification import table as certificates
from dpdist.certification import table_reader
from dpdist.cluster import job_folder
from dpdist.data.parquet import decode_picture
from dpdist.poisoning import certificates as votes
from dpdist.privacy.budget import DataBudget
from dpdist.privacy.ledger import Ledger
from dpdist.release.bundle import compute_checksums
from dpdist.release.bundle import load as load_release
from dpdist.release.verify import verify_release
from dpdist.runs.archive import Archive

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

COUNTS = [
    ("training", "batch_size"),
    ("training", "steps"),
    ("data", "max_train"),
    ("certify", "n"),
]
AMOUNTS = [("privacy", "noise_multiplier"), ("privacy", "delta"), ("certify", "sigma")]
NO_NUMBER = [
    "020", "-017", "1:30", "1:30.5", ".nan", "-.inf", '"x"', "[1]", "{a: 1}", "-1", "true", "off",
    "!!int 5", "!!python/name:os.system", "*a", "2001-01-01", '"\\0"', "x" * 5000, "-1e-300",
    "9" * 5000, "[" * 60 + "]" * 60, "%", "'", "{", "@", "`", '"\\ud800"',
]  # fmt: skip
NO_COUNT = [*NO_NUMBER, "1.5", "1.0e+30", "9" * 30, "0x" + "f" * 30, "0", ".inf", "1e-5"]


def test_recipes(fuzz, tmp_path):
    """One number is none, one key is unknown or given twice, or the file is none of its kind."""
    whole = yaml.safe_dump(BASE)

    @cases(250, st.data())
    def one(data):
        draw, raw = data.draw, copy.deepcopy(BASE)
        kind = draw(st.sampled_from(["number", "number", "number", "key", "twice", "bytes"]))
        case: Any = kind
        if kind == "number":
            path = draw(st.sampled_from(COUNTS + AMOUNTS))
            literal = draw(st.sampled_from(NO_COUNT if path in COUNTS else NO_NUMBER))
            put(raw, path, "MARK")
            case, text = (path, literal), yaml.safe_dump(raw).replace("MARK", literal)
        elif kind == "key":
            section = draw(st.sampled_from([(), ("data",), ("training",), ("privacy",)]))
            name = draw(st.text("abcdefghij_.-", min_size=1, max_size=12)) + "q"
            put(raw, (*section, name), draw(st.sampled_from([1, "x", None, []])))
            case, text = (section, name), yaml.safe_dump(raw)
        elif kind == "twice":
            text = whole + draw(st.sampled_from(["name: y\n", "data: {}\n", "certify: 1\n"]))
        else:
            at = draw(st.integers(0, len(whole)))
            wrong = draw(st.sampled_from(["\ud800", "\0", "\x07", "\udcff"]))
            text = whole[:at] + wrong + whole[at:]
        errors = "surrogateescape" if "\udcff" in text else "surrogatepass"
        (tmp_path / "x.yaml").write_bytes(text.encode(errors=errors))
        command = draw(
            st.sampled_from([["run", "--until", "train"], ["run", "--dry-run"], ["recipes"]])
        )
        fuzz.call(case, tmp_path, *command, "x.yaml", invalid=True)

    one()
    fuzz.verdict(250)


NO_TEXT_OF_A_NUMBER = [
    "x", "nan", "1,5", "1/2", "1..2", "0x", "None", "", "-1", "1 2", "½", "²", "1e", "9" * 5000,
    "-0.5", "--", "1_", "\u202e1",
]  # fmt: skip


def test_command_lines(fuzz, tmp_path):
    """An option is no number, unknown or without its value, or there is one word too many."""
    numeric = [
        (command, name)
        for command, given in OPTIONS.items()
        for name, value in given.items()
        if isinstance(value, int | float)
    ]

    @cases(250, st.data())
    def one(data):
        draw = data.draw
        command, name = draw(st.sampled_from(numeric))
        given = dict(OPTIONS[command])
        kind = draw(st.sampled_from(["number", "number", "unknown", "no value", "too many"]))
        if kind == "number":
            given[name] = draw(st.sampled_from(NO_TEXT_OF_A_NUMBER))
        line = [part for key, each in given.items() for part in (f"--{key}", str(each))]
        if kind == "unknown":
            line.append(draw(st.sampled_from(["--no-such", "-q", "--delta-x=1", "--é", "-"])))
        elif kind == "no value":
            line.append(f"--{name}")
        elif kind == "too many":
            line += [draw(st.sampled_from(["x", "", "\n", "1", "*"])), "y"]
        fuzz.call((kind, line), tmp_path, *command, *line, invalid=True)

    one()
    fuzz.verdict(250)


ROWS = 40


def _numbers() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels = [i % 2 for i in range(ROWS)]
    return {"a": rng.random(ROWS).tolist(), "b": rng.random(ROWS).tolist(), "label": labels}


def no_text(rows: int) -> pa.Array:
    """Strings, one of which is not UTF-8."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32).tobytes())
    raw = bytearray(b"a" * rows)
    raw[rows // 2] = 0xFF
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(bytes(raw))])


def _wrong_column(draw: Any) -> pa.Table:
    """Numbers and labels of which one column cannot be used."""
    columns, at = _numbers(), draw(st.integers(0, ROWS - 1))
    name = draw(st.sampled_from(["a", "b", "label"]))
    if name == "label":
        wrong = draw(st.sampled_from([None, -1, 2, 10**18, -(2**63)]))
    else:
        wrong = draw(st.sampled_from([None, float("nan"), float("inf"), 1e300, -1e39]))
    kind = draw(
        st.sampled_from(["value", "value", "gone", "twice", "text", "bytes", "lists", "bool"])
    )
    if kind == "value":
        columns[name][at] = wrong
        return pa.table(columns)
    table = pa.table(columns)
    place = table.column_names.index(name)
    if kind == "gone":
        return table.drop_columns([name])
    if kind == "twice":
        return table.append_column(name, table[name])
    other: dict[str, Any] = {
        "text": no_text(ROWS), "bytes": pa.array([b"x"] * ROWS), "bool": pa.array([True] * ROWS),
        "lists": pa.array([[[1.0]]] * ROWS),
    }  # fmt: skip
    return table.set_column(place, name, other[kind])


def _wrong_file(path: Path, draw: Any) -> str:
    kind = draw(st.sampled_from(["cut", "rows", "damaged"]))
    if kind == "cut":
        raw = path.read_bytes()
        path.write_bytes(raw[: draw(st.integers(0, len(raw) - 1))])
    elif kind == "rows":
        stated = draw(st.sampled_from([ROWS + 1, 3 * ROWS, 2**40, 2**62, -1, 0, ROWS - 1]))
        every = draw(st.booleans()) and stated > ROWS  # no reader notices where it counts fewer
        rewrite_row_count(path, ROWS, stated, only_in_all=not every)
        return f"rows {stated} {every}"
    else:
        how = "_flipped"
        while how == "_flipped":  # which may leave a file that is valid
            path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
            pq.write_table(pa.table(_numbers()), path)
            how = damage(path, draw)
        return how
    return kind


def test_parquet(fuzz, tmp_path):
    """Numbers with one column or file of either split that cannot be used."""
    data = {"name": "d", "root": "root", "classes": 2, "columns": {"features": ["a", "b"]}}
    raw = copy.deepcopy(BASE) | {"data": data, "model": {"name": "mlp"}}
    raw["training"]["batch_size"] = 2

    @cases(200, st.data())
    def one(data):
        draw, place = data.draw, tmp_path / str(fuzz.cases)
        folder = place / "root" / "d"
        folder.mkdir(parents=True, exist_ok=True)
        (place / "x.yaml").write_text(yaml.safe_dump(raw))
        wrong = draw(st.sampled_from(["train", "test"]))
        tables = {"train": pa.table(_numbers()), "test": pa.table(_numbers())}
        by_column = draw(st.booleans())
        if by_column:
            tables[wrong] = _wrong_column(draw)
        for split, table in tables.items():
            pq.write_table(table, folder / f"{split}.parquet")
        case: Any = (wrong, tables[wrong].schema)
        if not by_column:
            case = (wrong, _wrong_file(folder / f"{wrong}.parquet", draw))
        fuzz.call(case, place, "data", "check", "x.yaml", invalid=True)
        if not by_column and wrong == "train":
            fuzz.call(case, place, "init", "root/d", "--output", "y.yaml", invalid=True)
        shutil.rmtree(place)

    one()
    fuzz.verdict(200)


def test_texts(fuzz, tmp_path):
    """Texts that are not UTF-8, missing or no texts, and lists of words that are none."""

    @cases(80, st.data())
    def one(data):
        draw, place = data.draw, tmp_path / str(fuzz.cases)
        folder = place / "root" / "d"
        folder.mkdir(parents=True, exist_ok=True)
        text: dict[str, Any] = {"length": draw(st.integers(3, 9))}
        raw = copy.deepcopy(BASE) | {
            "data": {"name": "d", "root": "root", "classes": 2, "text": text},
            "model": {"name": "transformer"},
        }
        good = pa.array(["some words"] * 20)
        wrong: list[Any] = [
            no_text(20), pa.array([None] + ["a"] * 19), pa.array([1] * 20), pa.array([b"x"] * 20),
            pa.array([["a"]] * 20), pa.array([True] * 20), pa.nulls(20),
        ]  # fmt: skip
        kind = draw(st.integers(0, len(wrong) + 2))
        texts = wrong[kind] if kind < len(wrong) else good
        if kind >= len(wrong):
            text["words"] = draw(st.sampled_from([5, 10**6]))
            lines = [b"\xff\n" * 9, b"", b"same\n" * 9][kind - len(wrong)]
            (folder / "words.txt").write_bytes(lines)
        for split, rows in (("train", texts), ("test", good)):
            labels = [i % 2 for i in range(20)]
            pq.write_table(pa.table({"text": rows, "label": labels}), folder / f"{split}.parquet")
        (place / "x.yaml").write_text(yaml.safe_dump(raw))
        fuzz.call((kind, text), place, "data", "check", "x.yaml", invalid=True)
        shutil.rmtree(place)

    one()
    fuzz.verdict(80)


def encoded(mode: str, form: str, **how: Any) -> bytes:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (12, 12, 4), dtype=np.uint8)
    shapes = {"L": pixels[..., 0], "RGB": pixels[..., :3]}
    picture = Image.fromarray(shapes.get(mode, pixels), mode if mode in shapes else "RGBA")
    if mode not in ("L", "RGB", "RGBA"):
        picture = Image.fromarray(shapes["RGB"], "RGB").convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, form, **how)
    return buffer.getvalue()


def _declared(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels."""
    raw = bytearray(encoded("L", "PNG"))
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


FORMS = [("L", "PNG"), ("RGB", "PNG"), ("RGB", "JPEG"), ("L", "BMP"), ("L", "GIF"), ("RGB", "TIFF"),
         ("RGB", "WEBP")]  # fmt: skip
FRAMES = [Image.new("L", (4, 4), shade) for shade in (0, 255)]


def no_picture(draw: Any) -> tuple[bytes, bool]:
    """Bytes, and whether they cannot be a picture that is taken as it is."""
    kind = draw(st.sampled_from(["cut", "flipped", "random", "other", "size", "json"]))
    mode, form = draw(st.sampled_from(FORMS))
    raw = bytearray(encoded(mode, form))
    if kind == "cut":
        return bytes(raw[: draw(st.integers(0, len(raw) // 2))]), True
    if kind == "flipped":
        for _ in range(draw(st.integers(1, 6))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
        return bytes(raw), False
    if kind == "random":
        return draw(st.binary(max_size=200)), True
    if kind == "size":
        sizes = st.sampled_from([0, 1, 12, 13, 30_000, 2**31 - 1])
        width, height = draw(sizes), draw(sizes)
        return _declared(width, height), False
    if kind == "json":
        return json.dumps(draw(st.sampled_from(["", {}, [], 1]))).encode(), True
    frames = io.BytesIO()
    FRAMES[0].save(frames, "GIF", save_all=True, append_images=FRAMES[1:])
    other = [
        encoded("CMYK", "JPEG"),
        encoded("RGBA", "PNG"),
        frames.getvalue(),
        encoded("CMYK", "TIFF"),
    ]
    return draw(st.sampled_from(other)), True


def test_pictures(tmp_path):
    """Bytes that decoders cannot read, or not exactly."""
    fuzz = Fuzz()

    @cases(300, st.data())
    def one(data):
        raw, invalid = no_picture(data.draw)
        fuzz.read(raw[:80], lambda: decode_picture(raw), invalid=invalid, errors=(ValueError,))

    one()
    fuzz.verdict(300)


def _votes(draw: Any) -> tuple[Any, Any, dict[str, Any], dict[str, list[Any]]]:
    asked = {"models": 3, "partitions": True, "sigma": None, "inputs": [0, 10, 5]}
    rows = {"model": [0, 0, 1, 1, 2, 2], "index": [0, 5] * 3, "label": [1, 2] * 3, "vote": [1] * 6}
    return votes, votes.read_votes, {"format": 1, "settings": asked}, rows


def _bank(draw: Any) -> tuple[Any, Any, dict[str, Any], dict[str, list[Any]]]:
    rows: dict[str, list[Any]] = {field.name: [0] * 8 for field in membership_statistics.SCHEMA}
    for field in membership_statistics.SCHEMA:
        if pa.types.is_floating(field.type):
            rows[field.name] = [0.5] * 8
    rows |= {"model": [0] * 4 + [1] * 4, "passes": [1] * 8, "member": [0, 1, -1, -1] * 2}
    return (
        membership_statistics,
        membership_statistics.read_scores,
        {"format": 1, "settings": {}},
        rows,
    )


@pytest.mark.parametrize("kind", [_votes, _bank])
def test_private_tables(tmp_path, kind):
    """Columns and settings edited, with the digest that goes with them: no traceback. What changes
    how many there are of what is refused."""
    fuzz, path = Fuzz(), tmp_path / "t.parquet"

    @cases(120, st.data())
    def one(data):
        draw = data.draw
        module, read, about, rows = kind(draw)
        schema, at = module.SCHEMA, draw(st.integers(0, 5))
        invalid = False
        name = draw(st.sampled_from(sorted(rows)))
        how = draw(st.sampled_from(["value", "rows", "settings", "model"]))
        if how == "value":
            numbers: list[Any] = [-1, -2, 0, 1, 2**62, -(2**63), 100_001]
            kind_of = schema.field(name).type
            if pa.types.is_floating(kind_of):
                numbers = [float("nan"), float("inf"), -1e300, 0.0]
            bits = 0 if pa.types.is_floating(kind_of) else kind_of.bit_width - 1
            fit = [number for number in numbers if not bits or -(2**bits) <= number < 2**bits]
            rows[name][at] = draw(st.sampled_from(fit))
        elif how == "rows":
            keep = draw(st.integers(0, 5))
            rows, invalid = {key: each[:keep] for key, each in rows.items()}, kind is _votes
        elif how == "model":
            rows["model"][at] = draw(st.sampled_from([7, 2**40, 2**62]))
            invalid = True
        else:
            key = draw(st.sampled_from(["models", "partitions", "sigma", "inputs", "bag"]))
            about["settings"][key] = draw(st.sampled_from(["x", [], {}, [None], -1, 10**12, 1.5]))
            invalid = kind is _votes and key in ("models", "inputs", "partitions")
        table = job_folder.build_table(pa.table(rows).to_pylist(), schema, about, module.KEY)
        job_folder.write_table(table, path)
        fuzz.read((how, name, at, about), lambda: read(path), invalid=invalid)

    one()
    fuzz.verdict(120)


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A folder with a run, certified, and its release."""
    place = tmp_path_factory.mktemp("released")
    raw = copy.deepcopy(BASE) | {"method": {"name": "input-noise", "sigma": 0.5}}
    raw["certify"] |= {"n0": 10}
    (place / "x.yaml").write_text(yaml.safe_dump(raw))
    fuzz = Fuzz()
    with pytest.MonkeyPatch.context() as patch:
        executed_here(patch)
        for command in (["run", "x.yaml"], ["release", "x", "--licence", "Apache-2.0"]):
            fuzz.call("", place, *command)
    assert not fuzz.faults and fuzz.refused == 0, fuzz.faults
    return place


def test_certificates(released, tmp_path):
    """A number of a row that does not follow from its counts, with the digest that goes with it."""
    fuzz, path = Fuzz(), tmp_path / "certificates.parquet"
    whole = next((released / "runs/x/certificates").rglob("certificates.parquet"))
    table = pq.read_table(whole)
    about = job_folder.read_job_record(table, certificates.KEY)
    names = ["radius", "p_lower", "k", "n", "label", "prediction", "index", "alpha", "sigma"]

    @cases(120, st.data())
    def one(data):
        draw, rows = data.draw, table.to_pylist()
        row, name = draw(st.sampled_from(rows)), draw(st.sampled_from(names))
        before = row[name]
        numbers = (
            [-1, 0, 1, 5, 10**9] if isinstance(before, int) else [0.0, 0.1, 5.0, -1.0, float("nan")]
        )
        row[name] = draw(st.sampled_from([value for value in numbers if value != before]))
        schema = table.schema.remove_metadata()
        job_folder.write_table(job_folder.build_table(rows, schema, about, certificates.KEY), path)
        fuzz.read((name, before, row), lambda: table_reader.read(path), invalid=True)

    one()
    fuzz.verdict(60)  # there are no more


def test_releases(released, tmp_path):
    """Any byte or file of a release changed, then its JSON with right sums."""
    fuzz, place = Fuzz(), tmp_path / "release"
    whole = released / "runs/x/release"
    names = sorted(path.name for path in whole.iterdir())

    def read() -> None:
        verify_release(load_release(place))

    @cases(120, st.data())
    def one(data):
        restored(whole, place)
        name = data.draw(st.sampled_from(names))
        how = damage(place / name, data.draw)
        summed = name.endswith(".json") and how == "_edited" and data.draw(st.booleans())
        if summed:
            (place / "SHA256SUMS").write_text(compute_checksums(place))
        changed = summed or listing(place) != listing(whole)
        fuzz.read((name, how, summed), read, place=place, invalid=changed and not summed)

    one()
    fuzz.verdict(120)


def _lines(path: Path, draw: Any) -> str:
    """Damage a journal whose lines are chained; returns how."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["dropped", "swapped", "twice", "edited", "cut", "garbage"]))
    if kind == "swapped" and len(lines) > 1:
        other = (at + 1) % len(lines)
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "edited":
        record = json.loads(lines[at])
        record["record"] = draw(st.sampled_from([{}, [], None, {"step": 1}, "x", {"kind": 1}]))
        lines[at] = json.dumps(record).encode() + b"\n"
    elif kind == "cut":
        lines[at:] = [lines[at][: draw(st.integers(0, len(lines[at]) - 1))]]
    elif kind == "garbage":
        lines.insert(at, draw(st.sampled_from([b"\n", b"{}\n", b"\xff\n", b"[" * 50_000 + b"\n"])))
    else:
        del lines[at]
    path.write_bytes(b"".join(lines))
    return f"{kind} {at}"


@pytest.mark.parametrize("kind", ["ledger", "budget"])
def test_journals(finished, tmp_path, kind):
    """Ledgers and budgets with lines gone, moved or changed, or files that are none."""
    fuzz, place, whole = Fuzz(), tmp_path / "work", tmp_path / "whole"
    reader: Callable[[Path], Any] = DataBudget.open
    if kind == "ledger":
        whole.mkdir()
        with Ledger.open(whole / "ledger.jsonl", "f" * 64) as ledger:
            ledger.begin_attempt({"code": "1"})
            for step in range(4):
                ledger.record(step, f"{step:064x}")
        reader = lambda path: Ledger.open(path, "f" * 64)  # noqa: E731
    else:
        shutil.copytree(finished.parent / "budgets", whole)
    journal = next(whole.glob("*.jsonl"))
    anchor = next(path for path in whole.iterdir() if path.suffix == ".anchor")

    @cases(120, st.data())
    def one(data):
        restored(whole, place)
        name = data.draw(st.sampled_from([journal.name, journal.name, anchor.name]))
        if name == journal.name and data.draw(st.booleans()):
            how = _lines(place / name, data.draw)
        else:
            how = damage(place / name, data.draw)
        changed = listing(place) != listing(whole)
        if name == anchor.name and (place / name).is_file():  # a line's end may be missing
            changed = (place / name).read_bytes().strip() != (whole / name).read_bytes().strip()
        fuzz.read((name, how), lambda: reader(place / journal.name).close(), invalid=changed)

    one()
    fuzz.verdict(120)


def test_archives(finished, tmp_path):
    """A manifest that is not the one that was written, or objects that it does not name."""
    fuzz, work = Fuzz(), tmp_path / "own"
    shutil.copytree(finished, work / "runs")
    archive = Archive.claim(
        pipeline.RunFolder(work / "runs" / "x"), f"file://{tmp_path}/store", True
    )
    assert archive is not None
    archive.update()
    whole, store, here = tmp_path / "whole", tmp_path / "store", tmp_path / "here"
    shutil.copytree(store, whole)
    here.mkdir()

    @cases(80, st.data())
    def one(data):
        restored(whole, store)
        files = sorted(path for path in store.rglob("*") if path.is_file())
        target = next(path for path in files if path.name == "manifest.json")
        if data.draw(st.booleans()):
            objects = [path for path in files if "private" in str(path.relative_to(store))]
            target = data.draw(st.sampled_from(objects))
        how = damage(target, data.draw)
        changed = listing(store) != listing(whole)
        url = f"file://{store}"
        fuzz.call((target.name, how), here, "cluster", "fetch", "--restore", url, invalid=changed)
        shutil.rmtree(here)
        here.mkdir()

    one()
    fuzz.verdict(80)
