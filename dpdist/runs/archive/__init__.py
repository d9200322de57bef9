"""A copy of a run folder in an object store, from which a lost folder is brought back.

The run folder itself stays on a file system: the ledger is appended and synced there, under a
lock, before noise is added. The archive follows it. Without the private state it holds what may
be published; with it, a run can be continued from it.

    claims/00000001-TOKEN        who writes here; the highest number owns the prefix
    00000001/manifest.json       written last: every file's object, digest and size; the permit
    00000001/files/TOKEN/PATH    the files, each written whole under a new name

An upload that was torn leaves the manifest before it, which is whole. A new owner claims the next
number and lists the claims: whoever sees another claim as high as its own gives way. An owner looks
for higher claims after each manifest, and stops when there is one.

**What a lost folder may have released.** Its ledger knew, and the archived copy may be older. So
the training asks for a permit: in attempt e, up to step B. The permit is in a manifest, with the
ledger as it was then, before the first of those steps is released; until then the training waits.
When the folder is lost, every step of e below B that the archived ledger lacks is recorded as
released, which is never too little; and a new attempt begins, whose nonce is fresh, so that no
noise is drawn twice. A folder that was not lost after all cannot go on: its next permit finds the
higher claim.
"""

from dpdist.runs.archive.layout import Permit, read_permit
from dpdist.runs.archive.reading import fetch, is_address, open_anywhere, read_copy, restore
from dpdist.runs.archive.writing import Archive

__all__ = [
    "Archive",
    "Permit",
    "fetch",
    "is_address",
    "open_anywhere",
    "read_copy",
    "read_permit",
    "restore",
]
