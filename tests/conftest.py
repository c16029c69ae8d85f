"""What holds for every test of a process."""

import gc

import pytest


def _leave_out():
    """Leave what has been imported and collected out of garbage collections, of which every training run makes one."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    _leave_out()


@pytest.fixture(autouse=True, scope="module")
def _later_imports():
    yield
    _leave_out()
