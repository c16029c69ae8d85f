"""What cannot be divided among processes, and why."""

REFUSED = {
    "LSTM": "its gates read the state before, so the states of shards cannot be folded, and every process would wait "
    "for all before it",
    "full attention": "every token reads every other one, so one process would need all keys, at quadratic cost",
}
"""Name of an operation → reason."""


def check_divisible(name: str, shards: int) -> None:
    """Raise ValueError if an operation cannot run over several shards.

    Args:
        name: The operation, a key of `REFUSED` or any other name.
        shards: Number of processes that hold the sequence.

    Raises:
        ValueError: It is refused.
    """
    if shards > 1 and name in REFUSED:
        raise ValueError(
            f"context_parallel_size must be 1 with {name}: {REFUSED[name]}; got {shards} processes for a sequence"
        )
