"""What holds for every test of a process."""

import gc


def pytest_collection_finish():
    """Leave what has been imported and collected out of garbage collections, of which every training run makes one."""
    gc.collect()
    gc.freeze()
