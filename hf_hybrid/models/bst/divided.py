"""Context states of the window before, for own tokens of a sequence that is divided among processes.

Shapes: B batch · T_r tokens of this process · D width · H heads · K head width · W window · n windows · n_r windows
that end in own tokens · S states of a window.
"""

import torch
from torch.nn import functional as F

from ...context_parallel import Shards, Span, fetch, first_kept
from .windows import from_windows, to_windows

Pair = tuple[torch.Tensor, torch.Tensor]


def check_windows(shards: Shards, attention_mask: torch.Tensor | None):
    """Raise ValueError if a window starts anywhere but at a multiple of W, which all processes must agree on."""
    if shards.ends is not None:
        raise ValueError("context states of the window before have no form for packed sequences in context_parallel")
    if attention_mask is None:
        return
    first = first_kept(shards, attention_mask.to(torch.bool))
    if ((first > 0) & (first < shards.length)).any():
        raise ValueError(
            "attention_mask must be 1 at each row's first token in context_parallel with context states of the window "
            f"before: pad on the right; got first kept tokens {first.tolist()}"
        )


def windows_before(shards: Shards, window: int) -> list[Span]:
    """Return for each process the windows whose states its tokens read: those before the ones that hold its tokens."""
    return [
        Span(max(0, own.start // window - 1), (own.stop - 1) // window) if own.length else Span(0, 0)
        for own in shards.spans
    ]


def fetch_tokens(shards: Shards, window: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Return what own tokens read of a state per token: keys and values `(B, T_r, H, K)` to `(B, n, W, H, K)`."""
    spans = [Span(window * first, window * stop) for first, stop in windows_before(shards, window)]
    key, value = fetch(shards, spans, key, value)
    shape = (len(key), key.shape[1] // window, window, *key.shape[2:])
    return key.reshape(shape), value.reshape(shape)


def fetch_windows(shards: Shards, window: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Return what own tokens read of states per window, `(B, n, S, H, K)`, from own windows `(B, n_r, S, H, K)`."""
    key, value = fetch(shards.of_windows(window), windows_before(shards, window), key, value)
    return key, value


def own_windows(shards: Shards, window: int, query: torch.Tensor) -> torch.Tensor:
    """Cut own queries `(B, T_r, H, K)` into the windows of the sequence, `(B, n, W, H, K)`, zeros around them."""
    head = shards.own.start % window
    query = F.pad(query, (0, 0, 0, 0, head, 0))
    return to_windows(query, None, -(-query.shape[1] // window), window)


def own_tokens(shards: Shards, window: int, x: torch.Tensor) -> torch.Tensor:
    """Invert `own_windows`."""
    head = shards.own.start % window
    return from_windows(x, None, head + shards.own.length)[:, head:]
