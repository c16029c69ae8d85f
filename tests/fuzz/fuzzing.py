"""How the fuzz tests run: the same examples every time, a bounded number of them, and none of which may hang."""

import contextlib
import signal

from hypothesis import HealthCheck, settings

SECONDS = 30


def examples(number: int) -> settings:
    """Settings for so many examples, drawn from a fixed seed, on machines of any speed."""
    return settings(
        max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@contextlib.contextmanager
def no_hang(seconds: int = SECONDS):
    """Fail an example that takes longer than any may."""

    def fail(*_):
        raise AssertionError(f"took longer than {seconds} s")

    # pytest-timeout uses SIGALRM for the test as a whole, and its handler and timer come back here
    handler = signal.signal(signal.SIGALRM, fail)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, handler)
