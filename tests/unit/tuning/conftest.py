"""Shared by the tests of searches."""

from support.search_fixtures import begin, coarse_grid, recipe, run_trials, session

__all__ = ["begin", "coarse_grid", "recipe", "run_trials", "session"]
