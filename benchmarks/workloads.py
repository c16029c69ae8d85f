"""Models at work: a training step, a forward, tokens decoded one by one, and generation.

A model is a causal language model or an encoder-decoder of transformers. Tokens are random.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import EncoderDecoderCache

TARGET = 64  # tokens of an encoder-decoder's target
_FIRST = 3  # smallest token that is not special


def seconds(call: Callable[[], object], count: int = 1) -> float:
    """Return the time of a call, the mean of `count` of them."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def random_tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    """Draw token ids `(batch, length)`, none of them special."""
    return torch.randint(_FIRST, model.config.vocab_size, (batch, length), device=model.device)


def _inputs(model: Any, length: int) -> dict[str, Any]:
    tokens = random_tokens(model, 1, length)
    labels = random_tokens(model, 1, TARGET) if model.config.is_encoder_decoder else tokens
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def training_step(model: Any, length: int, precision: str, *, skip_logits: bool = False) -> Callable[[], None]:
    """Return a function that runs forward and backward of one sequence, without an optimizer.

    Args:
        model: The model; it is put in training mode.
        length: Tokens of the sequence; an encoder-decoder's target has `TARGET`.
        precision: "fp32", or "bf16" for autocast.
        skip_logits: Whether a model of ours computes the loss without the logits of all tokens.
    """
    inputs = _inputs(model.train(), length) | ({"skip_logits": True} if skip_logits else {})

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**inputs).loss
        loss.backward()

    return step


def forward(model: Any, length: int) -> Callable[[], None]:
    """Return a function that runs a forward of one sequence without gradients, with the logits of all its tokens."""
    inputs = _inputs(model.eval(), length)

    @torch.no_grad()
    def run() -> None:
        model(**inputs)

    return run


@torch.no_grad()
def decoding(model: Any, length: int, batch: int = 1) -> tuple[Callable[[], None], Any]:
    """Read a prompt, or an encoder-decoder's source, of a length.

    Returns:
        A function that decodes one more token of every row, and the cache that it extends.
    """
    tokens = random_tokens(model.eval(), batch, length)
    given: dict[str, Any] = {"use_cache": True}
    name, token = "input_ids", random_tokens(model, batch, 1)
    if model.config.is_encoder_decoder:
        given["encoder_outputs"] = model.get_encoder()(input_ids=tokens)
        name = "decoder_input_ids"
        outputs = model(**given, decoder_input_ids=token)
    else:
        outputs = model(**given, input_ids=tokens, logits_to_keep=1)
    key = "past_key_values" if getattr(outputs, "past_key_values", None) is not None else "cache_params"  # of Mamba
    given[key] = getattr(outputs, key)

    @torch.no_grad()
    def step() -> None:
        model(**given, **{name: token})

    return step, given[key]


def generation(model: Any, length: int, tokens: int, batch: int = 1, **settings: Any) -> Callable[[], None]:
    """Return a function that generates tokens greedily after a prompt, or from an encoder-decoder's source.

    Args:
        model: The model; it is put in evaluation mode.
        length: Tokens of the prompt or source.
        tokens: Tokens to generate for every row; none of them ends it.
        batch: Rows, without padding.
        settings: Further arguments of `generate`.
    """
    prompt = random_tokens(model.eval(), batch, length)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": tokens}
    given |= settings

    def run() -> None:
        model.generate(prompt, **given)

    return run


class Stored:
    """Counts the storages that autograd keeps inside a ``with`` block, but for those of some tensors."""

    def __init__(self, *others: torch.Tensor):
        self.bytes = 0
        self._seen = {x.untyped_storage().data_ptr() for x in others}
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(x.detach())
            self.bytes += storage.nbytes()
        return x

    def __enter__(self) -> "Stored":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that a transformers cache holds."""
    if isinstance(cache, EncoderDecoderCache):
        yield from tensors_of(cache.self_attention_cache)
        yield from tensors_of(cache.cross_attention_cache)
    for layer in getattr(cache, "layers", []):
        for value in vars(layer).values():
            yield from (item for item in tree_leaves(value) if isinstance(item, torch.Tensor))


def held_mib(cache: Any) -> float:
    """Return the MiB of memory that a cache's tensors hold; a shared one counts once."""
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(cache)}
    return sum(held.values()) / 2**20
