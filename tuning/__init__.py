"""Private hyper-parameter search on Ray Tune: the cost of tuning, counted."""
