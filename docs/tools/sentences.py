"""Print the long sentences of the documentation, and refuse new ones and too many words.

    python docs/tools/sentences.py [--all]      # part of `make lint`

A sentence of more than `MOST` words is long. Tables, code, quotations and headings do not count,
and a piece of code inside a sentence is one word. `LIMITS` says how many long sentences a file may
have at most; the numbers may only fall, and a file that is not listed may have none.

The pages that people read (README, index, tutorials, how-to, explanation) may have `MOST_IN_ALL`
words together, which may only fall as well: what is measured belongs to docs/evidence, what the
code says to docs/reference. Everything between spaces that has a letter or a digit is a word,
outside of fenced code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent.parent
MOST = 40
LIMITS = {
    "docs/evidence/flagship.md": 33,
    "docs/evidence/gradients.md": 12,
    "docs/evidence/hidden-noise.md": 11,
    "docs/evidence/objective.md": 6,
    "docs/evidence/papers.md": 3,
    "docs/evidence/pate.md": 5,
    "docs/evidence/privacy.md": 2,
    "docs/evidence/residual.md": 6,
    "docs/evidence/testing.md": 1,
}
READ_BY_PEOPLE = ("README.md", "docs/index.md", "docs/tutorials/*.md", "docs/how-to/*.md",
                  "docs/explanation/*.md")  # fmt: skip
MOST_IN_ALL = 34_600
_FENCED = re.compile(r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence)`*$", flags=re.M | re.S)
_ABBREVIATION = re.compile(r"\b(al|e\.g|i\.e|cf|vs|Eq|Fig|Sec|Thm|approx|St|Dr|pp|no)\.$")


def files(root: Path = ROOT) -> list[Path]:
    """Return the files whose sentences are counted."""
    top = [root / name for name in ("README.md", "CHANGELOG.md")]
    return [*top, *sorted((root / "docs").rglob("*.md"))]


def long_sentences(text: str, most: int = MOST) -> list[str]:
    """Return the sentences of a Markdown text that have more than `most` words."""
    return [each for block in _blocks(text) for each in _sentences(block)
            if len(_words(each)) > most]  # fmt: skip


def _blocks(text: str) -> Iterator[str]:
    """Yield the text of each paragraph and list item outside tables and quotations."""
    depth = 0
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type in ("table_open", "blockquote_open"):
            depth += 1
        elif token.type in ("table_close", "blockquote_close"):
            depth -= 1
        heading = before is not None and before.type == "heading_open"
        if token.type == "inline" and depth == 0 and not heading:
            yield "".join(map(_plain, token.children or ()))


def _plain(token: Token) -> str:
    if token.type == "code_inline":
        return re.sub(r"\W+", "_", f"c{token.content}")
    return " " if token.type in ("softbreak", "hardbreak") else token.content


def _sentences(block: str) -> Iterator[str]:
    begin = 0
    for end in re.finditer(r"[.!?][\"')\]*]*\s+(?=[\"'(\[*]*[A-Z0-9c_])", block):
        said = block[begin : end.start() + 1]
        if not _ABBREVIATION.search(said):
            yield said.strip()
            begin = end.end()
    yield block[begin:].strip()


def _words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def count_words(text: str) -> int:
    """Return the number of words of a Markdown text, without fenced code."""
    return len(_words(_FENCED.sub("", text)))


def words_in_all(root: Path = ROOT) -> int:
    """Return the number of words of all pages that people read."""
    pages = [path for pattern in READ_BY_PEOPLE for path in root.glob(pattern)]
    return sum(count_words(path.read_text()) for path in pages)


def too_many(words: int, most: int) -> list[str]:
    """Return a line where the pages that people read have more words than they may have."""
    return [
        f"{', '.join(READ_BY_PEOPLE)}: must have at most {most:,} words together, got {words:,}; "
        "move figures to docs/evidence, and say each thing once"
    ][: words > most]


def complaints(found: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return a line for each file with more long sentences than its limit."""
    return [
        f"{name}: must have at most {limits.get(name, 0)} sentences of more than {MOST} words, got "
        f"{count}; cut the new ones (python docs/tools/sentences.py --all prints them)"
        for name, count in sorted(found.items())
        if count > limits.get(name, 0)
    ]


def main() -> None:
    """Print the complaints, or with --all every long sentence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print every long sentence")
    show = parser.parse_args().all
    found: dict[str, int] = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        sentences = long_sentences(path.read_text())
        if sentences:
            found[name] = len(sentences)
        for each in sentences if show else ():
            print(f"{name}: {len(_words(each))} words: {each}")
    words = words_in_all()
    wrong = [*complaints(found, LIMITS), *too_many(words, MOST_IN_ALL)]
    for line in wrong:
        print(line)
    for name, limit in LIMITS.items():
        if found.get(name, 0) < limit:
            print(f"{name}: has {found.get(name, 0)} long sentences: its limit of {limit} may fall")
    if words < MOST_IN_ALL:
        print(f"{words:,} words in all: the limit of {MOST_IN_ALL:,} may fall")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
