"""The door for files: what lies there is told in one line, and reading ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpdist.core.errors import UserError
from dpdist.core.files import (
    MissingFileError,
    parse_json,
    read_bytes,
    read_json,
    read_yaml,
    write_json,
)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nprivacy:\n  x: 1\nb: 2\nprivacy:\n  x: 2\n",
        "yes: 1\ntrue: 2\n",
        "[" * 2_000,
        "a: " + "9" * 5000,
        "a: !!python/object:os.system x",
        "a: 1\nb: 0100\n",
        "a: [1:30]",
        "[1]: 2",
        "a: [",
    ],
)
def test_yaml_with_more_than_one_meaning_or_none_is_refused(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        read_yaml(path)


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
    "text",
    ["[1]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}",
     '{"a": "1"}', ""],
)  # fmt: skip
def test_json_of_another_shape_is_refused(text):
    with pytest.raises(UserError, match=r"x\.json"):
        parse_json(text, "x.json", {"a": int})


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    names = (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "latin", Path("a\0b"))
    for path in names:
        with pytest.raises(UserError):
            read_json(path)
    with pytest.raises(MissingFileError, match="nothing"):
        read_bytes(tmp_path / "nothing")


def test_nan_is_never_written_as_json(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not (tmp_path / "x.json").exists()
