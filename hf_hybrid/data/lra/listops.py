"""ListOps of the Long Range Arena: nested operations on digits, drawn by the published grammar, read and evaluated."""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from hf_hybrid.data.drawing import check, check_sizes

__all__ = ["LISTOPS_TOKENS", "draw_listops", "evaluate_listops", "listops_ids", "parse_listops"]

_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
_END = "]"
_DIGITS = tuple("0123456789")
_OPERATION = 0.25
"""Probability that an argument is an operation, and no digit."""
LISTOPS_TOKENS = ("<pad>", *_DIGITS, *_OPERATORS, _END)
"""The vocabulary: a token's place is its id, and 0 pads."""
_IDS = {token: place for place, token in enumerate(LISTOPS_TOKENS)}
_KNOWN = frozenset(LISTOPS_TOKENS[1:])


def draw_listops(
    generator: np.random.Generator,
    *,
    max_depth: int = 10,
    max_args: int = 10,
    shortest: int = 500,
    longest: int = 2000,
) -> Iterator[tuple[list[str], int]]:
    """Yield expressions and their values without end, each expression once (Tay et al. 2021; Nangia and Bowman 2018).

    An argument, and the whole, is an operation with a probability of 1/4, and otherwise one of the ten digits; at the
    greatest depth it is always a digit. Operations are the least ([MIN), the greatest ([MAX), the median rounded down
    ([MED) and the sum modulo 10 ([SM) of 2 to `max_args` arguments, all equally likely. Expressions whose length lies
    between the bounds are kept; length counts operators, digits and closing brackets. The published parentheses, which
    group an operator with one argument after the other, say nothing more and are left out. The published sets have
    96,000, 2,000 and 2,000 expressions.

    Args:
        generator: Draws them.
        max_depth: Greatest depth; the whole has depth 1.
        max_args: Most arguments of an operation.
        shortest: Length that an expression must exceed.
        longest: Length that it must stay below.

    Yields:
        Tokens and value.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, max_depth=max_depth)
    check_sizes(2, max_args=max_args)
    check_sizes(0, shortest=shortest)
    check(longest > shortest + 1, "longest", f"more than shortest {shortest} + 1", longest)
    most = _longest_possible(max_depth, max_args)
    check(most > shortest, "shortest", f"below {most}, the longest expression of {max_depth} levels", shortest)
    # thousands of numbers for each expression that is kept: Python's generator takes a tenth of numpy's time
    numbers = random.Random(int(generator.integers(2**63)))
    seen: set[tuple[str, ...]] = set()
    while True:
        tokens: list[str] = []
        if _grow(tokens, numbers, 1, max_depth, max_args, longest) and shortest < len(tokens) < longest:
            expression = tuple(tokens)
            if expression not in seen:
                seen.add(expression)
                yield tokens, evaluate_listops(tokens)


def _longest_possible(max_depth: int, max_args: int) -> int:
    length = 1
    for _ in range(max_depth - 1):
        length = 2 + max_args * length
        if length > 10**6:
            break
    return length


def _grow(tokens: list[str], numbers: random.Random, depth: int, max_depth: int, max_args: int, longest: int) -> bool:
    """Append one argument; return False once the expression is too long."""
    if depth == max_depth or numbers.random() > _OPERATION:
        tokens.append(numbers.choice(_DIGITS))
        return len(tokens) < longest
    arguments = numbers.randint(2, max_args)
    tokens.append(numbers.choice(_OPERATORS))
    for _ in range(arguments):
        if not _grow(tokens, numbers, depth + 1, max_depth, max_args, longest):
            return False
    tokens.append(_END)
    return len(tokens) < longest


def evaluate_listops(tokens: Sequence[str]) -> int:
    """Return the value of an expression.

    Raises:
        ValueError: It is none: a token is unknown, or brackets do not match.
    """
    open_operations: list[tuple[str, list[int]]] = []
    value: int | None = None
    for place, token in enumerate(tokens):
        if value is not None:
            raise ValueError(f"tokens must be one expression; it ends before token {place}, {token!r}")
        if token in _OPERATORS:
            open_operations.append((token, []))
            continue
        if token == _END:
            if not open_operations or not open_operations[-1][1]:
                raise ValueError(f"tokens must close an operation with arguments at token {place}; got {token!r}")
            result = _apply(*open_operations.pop())
        elif token in _DIGITS:
            result = int(token)
        else:
            raise ValueError(f"tokens must be of {' '.join(LISTOPS_TOKENS[1:])}; got {token!r} at token {place}")
        if open_operations:
            open_operations[-1][1].append(result)
        else:
            value = result
    if value is None:
        raise ValueError(f"tokens must be a whole expression; {len(open_operations)} operations are still open")
    return value


def _apply(operator: str, arguments: list[int]) -> int:
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered, middle = sorted(arguments), len(arguments) // 2
    return ordered[middle] if len(arguments) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def parse_listops(text: str) -> list[str]:
    """Return the tokens of an expression, with or without the published parentheses.

    Raises:
        ValueError: A word is no token.
    """
    tokens = [word for word in text.split() if word not in ("(", ")")]
    unknown = next((word for word in tokens if word not in _KNOWN), None)
    if unknown is not None:
        raise ValueError(f"an expression must have the words {' '.join(LISTOPS_TOKENS[1:])} ( ); got {unknown!r}")
    return tokens


def listops_ids(tokens: Sequence[str]) -> list[int]:
    """Return the ids of an expression's tokens."""
    return [_IDS[token] for token in tokens]
