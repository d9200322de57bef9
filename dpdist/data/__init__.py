"""Data sets: tables in by Arrow, memory-mapped arrays out."""

from dpdist.data.column_names import tells_answer
from dpdist.data.dataset import (
    Dataset,
    RecordHashes,
    UserDataset,
    check_test_records_unseen,
    check_test_split,
    refuse_common_records,
    refuse_common_users,
)
from dpdist.data.parquet import FEATURES_FILE, Columns, holds_features
from dpdist.data.record_hashes import names_nobody
from dpdist.data.registry import (
    BUILT_IN,
    DOWNLOADABLE,
    DataSource,
    cache_folder,
    fetch,
    load,
    split_by_id,
    split_exists,
)
from dpdist.data.text import (
    WORDS_FILE,
    ConversationColumns,
    TextColumn,
    WordList,
    next_tokens,
)

__all__ = [
    "BUILT_IN",
    "DOWNLOADABLE",
    "FEATURES_FILE",
    "WORDS_FILE",
    "Columns",
    "ConversationColumns",
    "DataSource",
    "Dataset",
    "RecordHashes",
    "TextColumn",
    "UserDataset",
    "WordList",
    "cache_folder",
    "check_test_records_unseen",
    "check_test_split",
    "fetch",
    "holds_features",
    "load",
    "names_nobody",
    "next_tokens",
    "refuse_common_records",
    "refuse_common_users",
    "split_by_id",
    "split_exists",
    "tells_answer",
]
