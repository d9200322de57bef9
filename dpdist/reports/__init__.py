"""Tables, plots and one HTML page, from the files of a run folder only."""
