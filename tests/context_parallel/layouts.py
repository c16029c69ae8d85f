"""Layouts of divided sequences that hypothesis draws: the same ones in every process and every run."""

import zlib
from typing import NamedTuple, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

KINDS = ("plain", "padded", "packed", "checkpointed")
"""How a model's batch is made."""
LENGTH = 24
"""Tokens of an operation."""
Drawn = TypeVar("Drawn")


class Layout(NamedTuple):
    """How the sequences of a model are divided and filled.

    Attributes:
        kind: One of `KINDS`.
        lengths: Tokens of each process.
        targets: Target tokens of each process, of pairs.
        pieces: Lengths of packed sequences.
        mask: `(2, tokens)`, 1 = keep.
    """

    kind: str
    lengths: tuple[int, ...]
    targets: tuple[int, ...]
    pieces: tuple[int, ...]
    mask: torch.Tensor


@st.composite
def cuts(draw: st.DrawFn, tokens: int, parts: int) -> tuple[int, ...]:
    """Lengths of consecutive parts of a sequence, some of them 0."""
    borders = sorted(draw(st.lists(st.integers(0, tokens), min_size=parts - 1, max_size=parts - 1)))
    return tuple(stop - start for start, stop in zip([0, *borders], [*borders, tokens], strict=True))


@st.composite
def operation_layouts(draw: st.DrawFn, size: int, packed: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    """Tokens of each process, the bounds of packed sequences, some of them empty, or None, and a padding's seed."""
    lengths = draw(cuts(LENGTH, size))
    inner = draw(st.none() | st.lists(st.integers(0, LENGTH), max_size=5)) if packed else None
    return lengths, None if inner is None else (0, *sorted(inner), LENGTH), draw(st.integers(0, 99))


@st.composite
def model_layouts(draw: st.DrawFn, size: int, pads_left: bool) -> Layout:
    """Up to 40 tokens, packed or padded, on both sides or on the right alone."""
    kind, tokens = draw(st.sampled_from(KINDS)), draw(st.integers(2, 40))
    lengths, targets = draw(cuts(tokens, size)), draw(st.integers(1, 12).flatmap(lambda targets: cuts(targets, size)))
    ends_with_shards = draw(st.booleans())
    pieces = lengths if ends_with_shards else draw(st.integers(1, 5).flatmap(lambda parts: cuts(tokens, parts)))
    mask = torch.ones(2, tokens, dtype=torch.int64)
    first, stop = sorted(draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    mask[0, first + 1 :] = 0
    mask[1, stop + 1 :] = 0
    if pads_left:
        mask[1, : min(first, tokens - 1)] = 0
    return Layout(kind, lengths, targets, tuple(length for length in pieces if length), mask)


def drawn(strategy: st.SearchStrategy[Drawn], name: str, number: int) -> Drawn:
    """Return one of many draws of the name; the first one is the simplest."""
    found: list[Drawn] = []

    @seed(zlib.crc32(name.encode()))
    @settings(
        max_examples=number + 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: Drawn) -> None:
        found.append(example)

    keep()
    return found[number]
