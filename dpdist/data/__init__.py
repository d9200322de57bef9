"""Datasets: Parquet/Arrow in, memory-mapped arrays out."""

from dpdist.data.catalog import BUILT_IN, Source, cache_folder, fetch, has, load, split_by_id
from dpdist.data.dataset import Dataset
from dpdist.data.parquet import Columns
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
