"""Batches whose rows are not one sequence each.

Packed: several sequences in one row, as padding-free data collators make them. Divided among processes: by
`context_parallel`, for models that call `take_shards`; by accelerate, refused.

Shapes: B batch · T length · N sequences.
"""

import sys
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from ..context_parallel import Shards, Span, active_group, fetch, make_shards
from ..kernels.packed import bounds, check_cu_seqlens, sequence_starts

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_ids")
"""Arguments by which transformers' models are told of packed sequences."""
PAIRS = "an encoder-decoder reads pairs of sequences"
PAIRS_BY_POSITIONS = f"{PAIRS}, which position_ids and decoder_position_ids tell apart"


def take_bounds(
    arguments: dict[str, Any],
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
) -> torch.Tensor | None:
    """Remove `BOUNDS` from a forward's further arguments and return the bounds of the packed sequences.

    Sequences are known by `cu_seq_lens_q`, by `seq_idx`, or by `position_ids` that do not rise by one. Other positions
    are ignored: these models count positions themselves.

    Args:
        arguments: Changed in place.
        inputs: `(B, T, ...)`, tokens or embeddings.
        attention_mask: The forward's.
        past_key_values: The forward's.

    Returns:
        `(N + 1,)`, the bounds in the rows joined to one, `(B T,)`; None if each row is one sequence.

    Raises:
        ValueError: The bounds are contradictory or do not fit, there is a mask or a cache too, or positions are given
            to an export, whose program cannot depend on where they restart.
    """
    _refuse_divided()
    given = {name: arguments.pop(name, None) for name in BOUNDS}
    cu_seqlens, seq_idx, position_ids = (given[name] for name in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    batch, length = inputs.shape[:2]
    named = "cu_seq_lens_q" if cu_seqlens is not None else "seq_idx" if seq_idx is not None else None
    if named and (attention_mask is not None or past_key_values is not None):
        other = "attention_mask" if attention_mask is not None else "past_key_values"
        raise ValueError(f"{named} must be None together with {other}: sequences are packed without padding or cache")
    if cu_seqlens is None and given["cu_seq_lens_k"] is not None:
        raise ValueError("cu_seq_lens_k must come with cu_seq_lens_q, which says where sequences begin; got None")
    if cu_seqlens is not None:
        keys = given["cu_seq_lens_k"]
        if keys is not None and not (keys is cu_seqlens or torch.equal(keys, cu_seqlens)):
            raise ValueError(f"cu_seq_lens_k must equal cu_seq_lens_q {cu_seqlens.tolist()}; got {keys.tolist()}")
        check_cu_seqlens(cu_seqlens, inputs, "input_ids")
        bounds(cu_seqlens, length)
        return None if len(cu_seqlens) == 2 else cu_seqlens.to(inputs.device)
    if seq_idx is None:
        seq_idx = _packed_by_positions(position_ids, batch, attention_mask, past_key_values)
        if seq_idx is None:
            return None
    if seq_idx.shape != (batch, length):
        raise ValueError(f"{named or 'position_ids'} must be {(batch, length)}; got {tuple(seq_idx.shape)}")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return None if len(starts) == batch else torch.cat([starts, starts.new_tensor([batch * length])])


def take_shards(
    arguments: dict[str, Any],
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
) -> Shards | None:
    """Return the layout of a sequence that is divided among processes; None outside a `context_parallel` block.

    A layout that the caller has made already is taken from `arguments`. Otherwise remove `BOUNDS` from these. Packed
    sequences are known by `cu_seq_lens_q`, bounds that count the tokens of all processes, or by own `seq_idx` or
    `position_ids`, in a batch of one.

    Args:
        arguments: Changed in place.
        inputs: Own tokens or embeddings, `(B, T_r, ...)`.
        attention_mask: The forward's, `(B, T_r)`.
        past_key_values: The forward's.

    Raises:
        ValueError: There is a cache, or packed sequences with a mask or in a larger batch.
    """
    if "shards" in arguments:
        return arguments.pop("shards")
    group = active_group()
    if group is None:
        return None
    if past_key_values is not None:
        raise ValueError("past_key_values must be None in context_parallel, which divides complete sequences")
    given = {name: arguments.pop(name, None) for name in BOUNDS}
    (rows, length), device = inputs.shape[:2], inputs.device
    cu_seqlens, numbers = given["cu_seq_lens_q"], given["seq_idx"]
    if cu_seqlens is None and (numbers is not None or given["position_ids"] is not None):
        cu_seqlens = _divided_bounds(
            numbers, given["position_ids"], make_shards(length, group, rows=rows, device=device)
        )
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        if attention_mask is not None or inputs.shape[0] > 1:
            raise ValueError(
                "packed sequences must have no attention_mask and a batch of 1 in context_parallel; "
                f"got a batch of {inputs.shape[0]}"
            )
        return make_shards(length, group, cu_seqlens=cu_seqlens, device=device)
    return make_shards(length, group, rows=rows, device=device)


def _divided_bounds(numbers: torch.Tensor | None, position_ids: torch.Tensor | None, shards: Shards) -> torch.Tensor:
    """Return the bounds of sequences that begin where their number changes or positions do not rise by one."""
    x = numbers if numbers is not None else position_ids
    spans = [Span(max(0, own.start - 1), own.stop) if own.length else own for own in shards.spans]
    (known,) = fetch(shards, spans, x[:1])
    steps = known.diff() != (0 if numbers is not None else 1)
    begins = torch.nn.functional.pad(steps, (1 if shards.own.start == 0 and shards.own.length else 0, 0), value=True)
    (everywhere,) = fetch(shards, [Span(0, shards.length)] * shards.size, begins)
    starts = everywhere[0].nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([shards.length])])


def take_pairs(
    arguments: dict[str, Any],
    document: torch.Tensor,
    targets: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    decoder_attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Remove `decoder_position_ids` from a forward's further arguments and return what keeps packed pairs apart.

    `position_ids` and `decoder_position_ids` restart with each document and its targets, in the same order. One of
    them may end with one sequence more, its padding.

    Args:
        arguments: Changed in place; `position_ids` stay, for the encoder.
        document: `(B, S, ...)`, tokens or embeddings.
        targets: `(B, T, ...)`.
        attention_mask: The document's.
        decoder_attention_mask: The targets'.

    Returns:
        A mask of cross-attention, `(B, 1, T, S)`, by which targets see their own document alone, and the removed
        positions, `(B, T)`; None if each row is one pair, or if there are no `decoder_position_ids`.

    Raises:
        ValueError: A shape is wrong, positions of documents and targets do not restart equally often, or sequences are
            packed together with a mask, or in `context_parallel`.
    """
    decoder_position_ids = arguments.pop("decoder_position_ids", None)
    if decoder_position_ids is None:
        return None
    positions = {"position_ids": arguments.get("position_ids"), "decoder_position_ids": decoder_position_ids}
    numbers = []
    for (name, given), inputs, mask in zip(
        positions.items(), (document, targets), (attention_mask, decoder_attention_mask), strict=True
    ):
        shape = tuple(inputs.shape[:2])
        found = _packed_by_positions(given, shape[0], mask)
        numbers.append(inputs.new_zeros(shape, dtype=torch.long) if found is None else found)
        if numbers[-1].shape != shape:
            raise ValueError(f"{name} must be {shape}; got {tuple(numbers[-1].shape)}")
    counts = [(found[:, -1] + 1).tolist() for found in numbers]
    if counts == [[1] * len(document)] * 2:
        return None
    if active_group() is not None:
        raise ValueError("decoder_position_ids must not pack several sequences into a row in context_parallel")
    if any(abs(sources - written) > 1 for sources, written in zip(*counts, strict=True)):
        raise ValueError(
            f"position_ids and decoder_position_ids must restart equally often in each row, padding aside; got "
            f"{counts[0]} documents and {counts[1]} targets"
        )
    documents, written = numbers
    written = written.clamp_max(documents[:, -1:])  # padding without any sees the last document's
    return written[:, None, :, None] == documents[:, None, None, :], decoder_position_ids


def refuse_packed(arguments: dict[str, Any], why: str, attention_mask: torch.Tensor | None = None):
    """Remove `BOUNDS` from a forward's further arguments, and raise ValueError if sequences are packed."""
    _refuse_divided()
    given = {name: arguments.pop(name, None) for name in BOUNDS}
    if _packed_by_positions(given["position_ids"], 1, attention_mask) is None:
        given["position_ids"] = None
    for name in ("cu_seq_lens_q", "seq_idx", "position_ids"):
        if given[name] is not None:
            raise ValueError(f"{name} must not pack several sequences into a row: {why}")


def _packed_by_positions(
    position_ids: torch.Tensor | None,
    batch: int,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None = None,
) -> torch.Tensor | None:
    """Return the number of each token's sequence in its row, `(B, T)`; None if positions do not restart.

    Raises:
        ValueError: They restart between two kept tokens, and there is a mask or a cache; or there are positions in an
            export.
    """
    if position_ids is None:
        return None
    if attention_mask is None and past_key_values is None:
        if torch.compiler.is_exporting():
            raise ValueError("position_ids must be None in an export: this model counts positions itself")
        return find_packed_sequence_indices(position_ids.expand(batch, -1) if len(position_ids) == 1 else position_ids)
    if torch.compiler.is_compiling() or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return None
    restarts = position_ids[:, 1:] <= position_ids[:, :-1]
    if attention_mask is not None and attention_mask.ndim == 2:
        kept = attention_mask[:, -position_ids.shape[1] :].to(torch.bool)
        restarts = restarts & kept[:, 1:] & kept[:, :-1]
    if restarts.any():
        other = "past_key_values" if attention_mask is None else "attention_mask"
        raise ValueError(
            f"position_ids must not restart together with {other}: sequences are packed without padding or cache"
        )
    return None


def _refuse_divided():
    """Raise ValueError if sequences are divided among processes, for models that do not support it."""
    if active_group() is not None:
        raise ValueError("this model does not support context_parallel: call it outside the block")
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or torch.compiler.is_compiling():
        return
    parallelism = accelerate.AcceleratorState._shared_state.get("parallelism_config")  # without creating the state
    for name in ("cp_size", "sp_size"):
        if getattr(parallelism, name, 1) > 1:
            raise ValueError(
                f"{name} must be 1: this model does not support context or sequence parallelism, which divide each "
                f"sequence among processes; got {getattr(parallelism, name)}"
            )


def row_starts(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the first token of each token's sequence, counted from its row's first, `(B, T)`."""
    batch, length = shape
    starts = sequence_starts(cu_seqlens, batch * length).view(batch, length)
    return starts - torch.arange(batch, device=starts.device)[:, None] * length
