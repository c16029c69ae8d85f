"""What a model looked at: the attention of the text that it wrote, over the words of the document.

The output is read once more, all its tokens at once, with attention that returns its weights. Shapes: T tokens of the
output · S tokens of the prompt.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hf_hybrid.commands.answers import Generate, Prompt

MOST_TOKENS = 4096
"""Longest prompt for which attention is computed."""
MOST_WEIGHTS = 2**28
"""Most attention weights that are held at once, of all layers and heads; of a longer output, the beginning is used."""
MOST_PIECES = 800
"""Most pieces into which the document's words are gathered."""
_WORD = re.compile(r"\s*\S{1,24}|\s+$")  # with the space before it; some languages write none


class NotShown(Exception):
    """There is nothing to show; the message says why."""


class Weights(NamedTuple):
    """The attention on each token of the prompt, `(S,)`; with that on the output itself it sums to one.

    It is a mean over layers and heads, of which there are so many, and over so many tokens of the output.
    """

    of_tokens: torch.Tensor
    layers: int
    heads: int
    outputs: int


class Attended(NamedTuple):
    """The attention on a document."""

    pieces: list[str]
    """The text that was read, in pieces of some words."""
    shares: list[float]
    """The share of each piece; they sum to one."""
    document: float
    """How much of all attention was on the document; the rest was on special tokens, the prefix and the output."""
    words: int
    """Words in a piece."""
    weights: Weights


def attended(answerer: Generate, text: str, prompt: Prompt, outputs: torch.Tensor) -> Attended:
    """Compute what a model looked at.

    Args:
        answerer: The model.
        text: The document.
        prompt: What was read of it.
        outputs: What was generated, `(1, T)`, as `Generate.outputs` returns it.

    Raises:
        NotShown: The document is too long, or the model has no attention weights.
    """
    if len(prompt.ids) > MOST_TOKENS:
        raise NotShown(f"it is computed for at most {MOST_TOKENS:,} tokens")
    tokenizer, source = answerer.checkpoint.tokenizer, answerer.prefix + text
    if not tokenizer.is_fast:
        raise NotShown("the tokenizer does not say where in the document its tokens stand")
    cut: dict[str, Any] = {"truncation": True, "max_length": answerer.limit} if answerer.limit else {}
    encoded = tokenizer(source, return_offsets_mapping=True, verbose=False, **cut)
    assert encoded["input_ids"] == prompt.ids
    weights = attention_weights(answerer, prompt, outputs)
    return on_words(source, len(answerer.prefix), encoded["offset_mapping"], weights)


def on_words(source: str, begin: int, offsets: list[tuple[int, int]], weights: Weights) -> Attended:
    """Gather the attention on tokens over the words of the document.

    Args:
        source: The document behind its prefix.
        begin: Where in it the document begins.
        offsets: Where each token begins and ends; special tokens are empty.
        weights: The attention on each token.

    Raises:
        NotShown: There was none on the document.
    """
    inside = [begin <= start < end for start, end in offsets]
    if not any(inside):
        raise NotShown("nothing of the document was read")
    ends = [offset for offset, is_inside in zip(offsets, inside, strict=True) if is_inside]
    first, last = min(start for start, _ in ends), max(end for _, end in ends)
    words = _WORD.findall(source[first:last])
    in_piece = -(-len(words) // MOST_PIECES)
    pieces = ["".join(words[index : index + in_piece]) for index in range(0, len(words), in_piece)]
    starts = [first]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece))
    shares = [0.0] * len(pieces)
    for (start, end), is_inside, weight in zip(offsets, inside, weights.of_tokens.tolist(), strict=True):
        if is_inside:
            token = source[start:end]
            blank = len(token) - len(token.lstrip())  # a token may hold the space before its word
            shares[bisect_right(starts, start + (blank if blank < len(token) else 0)) - 1] += weight
    document = sum(shares)
    if not document > 0:
        raise NotShown("no attention was on the document")
    return Attended(pieces, [share / document for share in shares], document, in_piece, weights)


def attention_weights(answerer: Generate, prompt: Prompt, outputs: torch.Tensor) -> Weights:
    """Compute the attention of the output's tokens on those of the prompt; see `attended`."""
    model = answerer.checkpoint.model
    if hasattr(model, "get_base_model"):
        if model.active_peft_config.is_prompt_learning:
            raise NotShown("the adapter puts tokens of its own before the document")
        model = model.get_base_model()
    ids = torch.tensor([prompt.ids], device=model.device)
    with torch.inference_mode():
        if answerer.continues:
            layers = _self_attention(model, ids, outputs)
        else:
            layers = _cross_attention(model, ids, outputs, answerer.new_tokens)
    rows = layers[0].shape[2]
    means = torch.stack([layer[0].float().mean((0, 1)) for layer in layers]).mean(0)
    return Weights(means[: len(prompt.ids)].cpu(), len(layers), layers[0].shape[1], rows)


def _cross_attention(model: Any, ids: torch.Tensor, outputs: torch.Tensor, new_tokens: int) -> list[torch.Tensor]:
    """Return the attention of each decoder layer on the document, each `(1, H, T, S)`."""
    config = model.config
    mask = torch.ones_like(ids)
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
    segmented = getattr(config, "cross_attention_mode", "full") != "full"
    horizon = {}
    if segmented:
        fixed = config.horizon_mode == "fixed"
        horizon = {"decoder_horizon": config.decoder_horizon if fixed else new_tokens}
    with _returns_weights(model):
        found = model(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=_beginning(model, outputs[:, :-1], ids.shape[1]),
            use_cache=False,
            output_attentions=True,
            **horizon,
        ).cross_attentions
    layers = _given(found)
    if segmented:
        return [_on_document(layer, config, ids.shape[1], horizon["decoder_horizon"]) for layer in layers]
    return layers


def _on_document(weights: torch.Tensor, config: Any, length: int, horizon: int) -> torch.Tensor:
    """Move the attention of an SRformer on segments' keys, `(1, H, T, keys)`, to the document, `(1, H, T, S)`."""
    size, mode = config.segment_size, config.cross_attention_mode
    number = -(-length // size)
    moved = weights.new_zeros(*weights.shape[:3], number * size)
    before = weights.shape[-1] - size if mode == "transformer_xl" else 0  # the memory of the segment before
    segments = [min(token * number // horizon, number - 1) for token in range(weights.shape[2])]
    visited = sorted({min(token * number // horizon, number - 1) for token in range(horizon + 1)})
    for token, segment in enumerate(segments):
        begin = segment * size
        moved[:, :, token, begin : begin + size] = weights[:, :, token, before : before + size]
        if before:
            begin = visited[max(0, visited.index(segment) - 1)] * size
            moved[:, :, token, begin : begin + size] += weights[:, :, token, :before]
    if mode == "longt5":  # one more key for each segment, the mean of its own
        means = weights[..., size:]
        kept = (torch.arange(number * size, device=weights.device) < length).unflatten(0, (number, size))
        moved += (means[..., None] * kept / kept.sum(1, keepdim=True)).flatten(-2)
    return moved[..., :length]


def _self_attention(model: Any, ids: torch.Tensor, outputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention of each layer on the prompt and what was written before, each `(1, H, T, S + T - 1)`."""
    reader, past = model.base_model, ids.shape[1] - 1  # the prompt's last token writes the first of the output
    tokens = _beginning(model, torch.cat([ids[:, past:], outputs[:, :-1]], dim=1), ids.shape[1])
    cache = reader(input_ids=ids[:, :past], use_cache=True).past_key_values if past else None
    if past and cache is None:
        raise NotShown("the model keeps no cache")
    with _returns_weights(model):
        found = reader(input_ids=tokens, past_key_values=cache, use_cache=past > 0, output_attentions=True)
    layers = _given(getattr(found, "attentions", None))
    total = past + tokens.shape[1]
    # a cache of a window holds the last keys only
    return [torch.nn.functional.pad(layer, (total - layer.shape[-1], 0)) for layer in layers]


def _beginning(model: Any, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return as many tokens as have weights for all layers and heads over a document of a length."""
    config = model.config
    layers, heads = (getattr(config, name, None) or 1 for name in ("num_hidden_layers", "num_attention_heads"))
    return tokens[:, : max(1, MOST_WEIGHTS // (layers * heads * length))]


def _given(layers: Any) -> list[torch.Tensor]:
    """Return the attention of the layers that have some."""
    found = [layer for layer in layers or () if isinstance(layer, torch.Tensor)]
    if not found:
        raise NotShown("the model has no attention weights over the document")
    return found


@contextmanager
def _returns_weights(model: Any) -> Iterator[None]:
    """Let a model's attention return its weights."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
