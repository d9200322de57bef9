"""Reports from the files of a run folder: tables, charts, one HTML page, comparisons."""
