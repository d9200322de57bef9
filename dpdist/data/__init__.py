"""Datasets: Parquet/Arrow in, memory-mapped arrays out."""

from dpdist.data.catalog import Source, cache_folder, fetch, load, split_by_id
from dpdist.data.dataset import Dataset
from dpdist.data.parquet import Columns

__all__ = ["Columns", "Dataset", "Source", "cache_folder", "fetch", "load", "split_by_id"]
