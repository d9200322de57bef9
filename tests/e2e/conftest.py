"""Commands, workers and Ray in processes of their own: all of this folder is marked `e2e`."""

from pathlib import Path

import pytest
from support.search_fixtures import begin, recipe, run_trials, session
from support.threads import one_thread_each

__all__ = ["begin", "one_thread_each", "recipe", "run_trials", "session"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
