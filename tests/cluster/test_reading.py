"""The door for files: what lies there is told in one line, and reading ends."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpdist.core.errors import UserError
from dpdist.core.files import (
    MissingFileError,
    parse_json,
    read_bytes,
    read_json,
    read_table,
    read_yaml,
    write_json,
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "a: 1\nprivacy:\n  x: 1\nb: 2\nprivacy:\n  x: 2\n",
            "'privacy' is given twice, on lines 2 and 5",
        ),
        ("a:\n  - b: 1\n    b: 2\n", "'b' is given twice, on lines 2 and 3"),
        ("yes: 1\ntrue: 2\n", "given twice"),
        ("[" * 2_000, "nested too deeply"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
        ("a: !!python/object:os.system x", "cannot be read as YAML"),
        ("a: 0x_", "cannot be read as YAML"),
        ("a: 1\nb: 0100\n", "line 2: "),
        ("-07: a", "-07"),
        ("a: [1:30]", '"1:30"'),
        ("a: 1:30.5", "1:30.5"),
        ("[1]: 2", "a key must be a word"),
        ("a: [", "cannot be read as YAML"),
        ("x" * 200_000, "131,072"),
    ],
)
def test_yaml_with_more_than_one_meaning_or_none_is_refused(tmp_path, text, complaint):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert complaint in str(caught.value) and str(caught.value).startswith(str(path))


def test_yaml_says_what_it_says(tmp_path):
    path = tmp_path / "x.yaml"
    quoted = "\"0100\", '1:30'"
    path.write_text(
        f"a: &a {{b: 1}}\nc: {{<<: *a, d: 2001-01-01}}\n---\n[1, 2.5, null, {quoted}, 0, 010.5]\n"
    )
    first, second = read_yaml(path)
    assert first == {"a": {"b": 1}, "c": {"b": 1, "d": "2001-01-01"}}
    assert second == [1, 2.5, None, "0100", "1:30", 0, 10.5]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "must be an object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1, "a": 2}', "given twice"),
        ("[" * 100_000, "nested"),
        ('{"a": ' + "9" * 5000 + "}", "damaged"),
        ('{"a": "1"}', "a must be int"),
        ("", "damaged"),
    ],
)
def test_json_of_another_shape_is_refused(text, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_json(text, "x.json", {"a": int})


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    for path, complaint in [
        (tmp_path / "pipe", "a pipe, must be a regular file"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
        (tmp_path / "latin", "byte 7"),
        (Path("a\0b"), "cannot be read"),
        (Path("x" * 300), "cannot be read"),
    ]:
        with pytest.raises(UserError, match=complaint):
            read_json(path)
    with pytest.raises(MissingFileError, match="nothing"):
        read_bytes(tmp_path / "nothing")


def test_nan_is_never_written_as_json(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_a_column_that_is_there_twice(tmp_path):
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["i", "i"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="'i' is there twice"):
        read_table(tmp_path / "t.parquet", {"i": (int, None)})
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match="Parquet"):
        read_table(tmp_path / "t.parquet", {"i": (int, None)})
