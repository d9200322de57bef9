"""Data sets: Parquet and Arrow in, memory-mapped arrays out."""

from dpdist.data.dataset import Dataset
from dpdist.data.parquet import Columns
from dpdist.data.registry import BUILT_IN, Source, cache_folder, fetch, has, load, split_by_id
from dpdist.data.text import WORDS, TextColumn, Words

__all__ = [
    "BUILT_IN",
    "WORDS",
    "Columns",
    "Dataset",
    "Source",
    "TextColumn",
    "Words",
    "cache_folder",
    "fetch",
    "has",
    "load",
    "split_by_id",
]
