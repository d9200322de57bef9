"""A real set of texts without a download: docstrings of what is installed, one of them a record.

Public are the paragraphs of Python's own help topics (`pydoc_data.topics`), and of these alone the
vocabulary is made. Private are the docstrings of Python's library and of the packages listed below,
read from their source: nothing is imported. The same installation gives the same files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpdist.base.errors import UserError
from dpdist.base.storage import write_json, written_aside
from dpdist.data.text import WORDS, words_of

NAME = "docstrings"
# By the name they are imported by; those that are not installed are left out, and said.
PACKAGES = (
    "dp_accounting", "jinja2", "matplotlib", "numpy", "pyarrow", "pydantic", "ray", "rich",
    "safetensors", "scipy", "sklearn", "torch", "torchvision", "typer", "yaml",
)  # fmt: skip
# Below these lie tests, examples, copies of others' packages, and what is public here.
_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "_vendor",
    "thirdparty_files", "pydoc_data", "__pycache__", "node_modules",
}  # fmt: skip
_FEWEST = 8  # words of a document
_TWICE = 2  # times that a word of the vocabulary stands in the public part
_TESTED = 0.1  # share of the documents, by hash


class _Document(NamedTuple):
    known_by: bytes  # hash of its words: what differs in spaces or capitals alone is the same
    text: str


def make_docstrings(root: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Write root/docstrings: train, test and public.parquet (a column text), words.txt, about.json.

    Every text stands there once, the public ones not among the others; which split a document is in
    follows from its words alone. Raises UserError for a folder that is there, or a Python without
    its sources.
    """
    target = root / NAME
    if target.exists():
        raise UserError(f"{target}: exists already; remove it to make it again")
    public = _once(_paragraphs())
    known = {document.known_by for document in public}
    found, read = [], {}
    for name, version, folder in _sources(progress):
        texts = list(_docstrings(folder))
        progress(f"{name} {version}: {len(texts):,} docstrings")
        read[name] = {"version": version, "docstrings": len(texts)}
        found += texts
    private = [document for document in _once(found) if document.known_by not in known]
    if not private:
        raise UserError("data make: no docstring found: this Python has no sources")
    test = [document for document in private if _place(document) < _TESTED]
    train = [document for document in private if _place(document) >= _TESTED]
    vocabulary = _vocabulary(public)
    target.mkdir(parents=True)
    for split, documents in (("train", train), ("test", test), ("public", public)):
        with written_aside(target / f"{split}.parquet") as aside:
            pq.write_table(pa.table({"text": [document.text for document in documents]}), aside)
        progress(f"{target / split}.parquet: {len(documents):,} documents")
    with written_aside(target / WORDS) as aside:
        aside.write_text("".join(f"{word}\n" for word in vocabulary), encoding="utf-8")
    progress(f"{target / WORDS}: {len(vocabulary):,} words of the public part")
    counts = {"train": len(train), "test": len(test), "public": len(public)}
    write_json(target / "about.json", {"read": read, **counts, "words": len(vocabulary)})
    return target


def _paragraphs() -> list[str]:
    from pydoc_data.topics import topics

    return [part.strip() for name in sorted(topics) for part in topics[name].split("\n\n")]


def _once(texts: list[str]) -> list[_Document]:
    """Each text that has words enough, once, in the order of their hashes: whatever the order in
    which they were found, the files are the same."""
    documents: dict[bytes, str] = {}
    for text in texts:
        words = words_of(text)
        if len(words) >= _FEWEST:
            key = hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()
            documents[key] = min(text, documents.get(key, text))
    return [_Document(*item) for item in sorted(documents.items())]


def _place(document: _Document) -> float:
    return int.from_bytes(document.known_by[:8], "little") / 2**64


def _vocabulary(public: list[_Document]) -> list[str]:
    """The frequent words first; of equals, by the alphabet."""
    counts = Counter(word for document in public for word in words_of(document.text))
    common = [word for word, count in counts.items() if count >= _TWICE]
    return sorted(common, key=lambda word: (-counts[word], word))


def _sources(progress: Callable[[str], None]) -> Iterator[tuple[str, str, Path]]:
    """Name, version and folder of all that is read."""
    yield "python", platform.python_version(), Path(sysconfig.get_path("stdlib"))
    distributions = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            progress(f"{name}: not installed, left out")
            continue
        own = distributions.get(name, [name])[0]
        yield name, importlib.metadata.version(own), Path(spec.submodule_search_locations[0])


def _docstrings(folder: Path) -> Iterator[str]:
    """Those of modules, classes and functions in a folder's source files."""
    for path in sorted(folder.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of others' escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
