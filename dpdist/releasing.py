"""The only writer of release/: what is safe to publish, and nothing else."""

from __future__ import annotations

from pathlib import Path

from cluster.storage import write_atomic, write_json
from dpdist.errors import UserError
from dpdist.privacy.card import card_markdown
from dpdist.reports.facts import read_facts
from dpdist.runfolder import RunFolder


def release(folder: RunFolder, *, not_private: bool = False) -> list[Path]:
    """Copy the model and write its privacy card; returns the files.

    Raises UserError when training never finished, or when the run has no finite guarantee or a
    fixed key and `not_private` is not given (the card then says so).
    """
    facts = read_facts(folder)
    described = facts.card()
    if not described["private"] and not not_private:
        reason = "its run key is fixed" if facts.fixed_key else "its proved epsilon is infinite"
        raise UserError(
            f"{folder.path}: this run is not private ({reason}); to release it all the same, "
            "labelled as such, add --not-private"
        )
    written = []
    for name in ("model.safetensors", "model.json"):
        target = folder.release / name
        write_atomic(target, (folder.model / name).read_bytes())
        written.append(target)
    write_json(folder.release / "privacy_card.json", described)
    write_atomic(folder.release / "privacy_card.md", card_markdown(described))
    return [*written, folder.release / "privacy_card.json", folder.release / "privacy_card.md"]
