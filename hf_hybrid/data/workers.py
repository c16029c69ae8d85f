"""Processes that work for this one and end with it."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread

__all__ = ["worker_pool"]


@contextmanager
def worker_pool(processes: int, initializer: Callable[[], None] | None = None) -> Iterator[ProcessPoolExecutor]:
    """Start processes that work for this one. An exception within ends what they do, and so does the end of this one.

    It is for programs that start with ``if __name__ == "__main__"``, since the processes import them.

    Args:
        processes: How many.
        initializer: What each calls first.
    """
    others = set(active_children())
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(initializer,)) as pool:
        try:
            yield pool
        except BaseException:
            # leaving the pool waits for what they are doing
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _begin(initializer: Callable[[], None] | None) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _end_with_parent() -> None:
    """End this process once the one that started it is gone, however that ended."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
