"""The examples of docs/extending.md, by the file name in their first line."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
EXAMPLES: dict[str, str] = {
    name: text
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", _PAGE.read_text(), re.S)
}
