"""The columns of a table of expected scores: its certificates, and which of them hold."""

from __future__ import annotations

import pyarrow as pa

from cluster.table_files import Column
from dpdist.certification import table as tables

NORMS = ("l2", "linf")
# What each certificate of a table is, and whether it holds.
CERTIFICATES = {
    "classical": "PixelDP: classical Gaussian mechanism, epsilon_r <= 1",
    "extended": "HGM, Eq. 10 corrected: extended (heterogeneous) Gaussian mechanism",
    "analytic": "the same condition with the exact (epsilon, delta) profile (AGM)",
    "exact": "exact Gaussian profile of expected scores, no epsilon_r",
    "cohen": "exact Gaussian profile of the majority vote, Clopper-Pearson (Cohen et al.)",
}
AS_PRINTED = "as_printed_linf"

SIZE_COLUMNS = (*(f"{name}_{norm}" for name in CERTIFICATES for norm in NORMS), AS_PRINTED)
# What a reader relies on beside the columns of every table.
COLUMNS: dict[str, Column] = {
    **dict.fromkeys((*SIZE_COLUMNS, "p_upper"), (float, 0)),
    **dict.fromkeys(("sums", "squares"), (object, None)),
    "bound": (str, None),
}
SCHEMA = pa.schema(
    [
        *tables.SCHEMA,
        pa.field("bound", pa.string(), nullable=False),
        pa.field("p_upper", pa.float64(), nullable=False),
        pa.field("sums", pa.list_(pa.int64()), nullable=False),
        pa.field("squares", pa.list_(pa.int64()), nullable=False),
        *(pa.field(name, pa.float64(), nullable=False) for name in SIZE_COLUMNS),
    ]
)
