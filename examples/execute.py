"""Execute the notebooks of this folder again, in place: `make notebook`.

What comes out of one is kept but for what was said on stderr (progress, and what libraries say of
the machine) and when. Needs `pip install "dpdist[docs]"`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_extra

HERE = Path(__file__).resolve().parent


def tidy(notebook: Any) -> None:
    """Leave out stderr, times, and the version of Python."""
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    try:
        client, form = (
            import_extra(name, "docs", "make notebook") for name in ("nbclient", "nbformat")
        )
    except UserError as error:
        sys.exit(f"{error}")
    for path in sorted(HERE.glob("*.ipynb")):
        notebook = form.read(path, as_version=4)
        where = {"metadata": {"path": str(HERE)}}
        client.NotebookClient(notebook, kernel_name="python3", resources=where).execute()
        tidy(notebook)
        form.write(notebook, path)


if __name__ == "__main__":
    main()
