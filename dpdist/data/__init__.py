"""Data sets: tables in by Arrow, memory-mapped arrays out."""

from dpdist.data.column_names import tells_answer as tells_answer
from dpdist.data.dataset import Dataset as Dataset
from dpdist.data.dataset import RecordHashes as RecordHashes
from dpdist.data.dataset import UserDataset as UserDataset
from dpdist.data.dataset import check_test_records_unseen as check_test_records_unseen
from dpdist.data.dataset import check_test_split as check_test_split
from dpdist.data.dataset import refuse_common_records as refuse_common_records
from dpdist.data.dataset import refuse_common_users as refuse_common_users
from dpdist.data.parquet import FEATURES_FILE as FEATURES_FILE
from dpdist.data.parquet import Columns as Columns
from dpdist.data.parquet import holds_features as holds_features
from dpdist.data.record_hashes import names_nobody as names_nobody
from dpdist.data.registry import BUILT_IN as BUILT_IN
from dpdist.data.registry import DOWNLOADABLE as DOWNLOADABLE
from dpdist.data.registry import DataSource as DataSource
from dpdist.data.registry import cache_folder as cache_folder
from dpdist.data.registry import fetch as fetch
from dpdist.data.registry import load as load
from dpdist.data.registry import split_by_id as split_by_id
from dpdist.data.registry import split_exists as split_exists
from dpdist.data.text import WORDS_FILE as WORDS_FILE
from dpdist.data.text import TextColumn as TextColumn
from dpdist.data.text import WordList as WordList
from dpdist.data.text import next_tokens as next_tokens
