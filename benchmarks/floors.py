"""Count the floating-point operations that a model's training step needs; their time at a machine's rate is a floor.

Everything is derived from the model's config, and the linear maps from the modules that it makes. A product of m x k
and k x n numbers counts 2 m k n forward and twice that backward, one product for the gradient of each factor.

- Linear maps: those of all modules, each for the tokens that it reads.
- Attention: 4 K per head and visible (query, key) pair, not those that an implementation computes and discards.
  Linear attention, Mamba's kind and the gated delta rule count as recurrences: 4 K V per head and token (the state's
  update and its output), the delta rule 6 K V (its correction too).
- Convolutions: real FFTs of n points at 2.5 n log2 n, of blocks twice as long as the kernel, the products of spectra
  at 6 for each frequency, and a tap of a short convolution at 2. Kernels that are trained have transforms of their own
  in the forward and the backward. Taps that a state space model makes are products of N numbers, 2 N each.

Not counted are norms, activations, gates, softmax, dropout, embeddings, the powers of S4's matrix, the depthwise
convolutions of peers, and what is computed twice, so the floor is slightly too low for every model. `FlopCounterMode`
of torch counts products in another way: it runs the model, so it sees what is discarded or computed twice, too, but no
FFT, nothing inside our custom ops, and not SDPA on a CPU. A test compares the linear maps.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_BACKWARD = 3
"""Operations of forward and backward over those of the forward, of a product whose factors both have gradients."""
_STATE_INPUT = re.compile(r"context\.[kv]_(proj|heads)$")
_CROSS_INPUT = re.compile(r"(cross_attention|encoder_attn|EncDecAttention)\.[kv](_proj)?$")


class Operations(NamedTuple):
    """Floating-point operations of one training step.

    Attributes:
        linear: Of linear maps.
        attention: Of attention, or of the recurrence that replaces it.
        convolutions: Of convolutions, and of the taps of state space models.
    """

    linear: float
    attention: float
    convolutions: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def of_encoder_decoder(config: Any, source: int, target: int) -> Operations:
    """Count a step of an encoder-decoder of transformers or of SPADE.

    Args:
        config: Its config.
        source: Tokens of the document.
        target: Tokens of the target.

    Raises:
        ValueError: The attention of its encoder is not known here.
    """
    extra = config.num_global_tokens if config.model_type == "pegasus_x" else 0

    def tokens(name: str) -> float:
        if name.endswith("_global"):  # LED's, unused without tokens of global attention
            return 0
        if _CROSS_INPUT.search(name):
            return source
        return target if "decoder." in name or name == "lm_head" else source + extra

    encoder = config.get_text_config(encoder=True) if config.model_type == "spade" else config
    layers = getattr(config, "encoder_layers", None) or config.num_hidden_layers
    decoder_layers = getattr(config, "decoder_layers", None) or config.num_decoder_layers
    seen = layers * encoder_pairs(encoder, source)
    seen += decoder_layers * (pairs("full", target, causal=True) + source * target)
    linear = linear_maps("AutoModelForSeq2SeqLM", config, tokens)
    if config.model_type == "longt5" and config.encoder_attention_type == "transient-global":
        # keys and values of summaries of blocks
        linear += layers * 4 * config.hidden_size * _inner(config) * (source // config.global_block_size)
    convolutions = _spade_convolutions(encoder, source) if config.model_type == "spade" else 0.0
    return Operations(_BACKWARD * linear, _BACKWARD * 4.0 * _inner(config) * seen, convolutions)


def of_language_model(config: Any, length: int) -> Operations:
    """Count a step of a causal language model.

    Args:
        config: Its config.
        length: Tokens.

    Raises:
        ValueError: Its mixing of tokens is not known here.
    """
    linear = linear_maps("AutoModelForCausalLM", config, lambda name: _read(config, name, length))
    convolutions = 0.0
    if config.model_type == "spade":
        convolutions = _spade_convolutions(config, length)
    elif config.model_type == "chela":
        convolutions = _chela_convolutions(config, length)
    elif config.model_type == "bst":
        convolutions = len(config.bst_layers) * _bst_filters(config, length)
    return Operations(_BACKWARD * linear, _BACKWARD * _mixing(config, length), convolutions)


def linear_maps(auto_class: str, config: Any, tokens: Callable[[str], float]) -> float:
    """Count the linear maps of a forward.

    Args:
        auto_class: The Auto class that makes the model; it gets no memory.
        config: The model's config.
        tokens: Takes the name of a module and returns how many tokens it reads.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config)
    # by name: the package itself may not be imported here, and BST's maps of single heads are its own
    maps = {
        name: module for name, module in model.named_modules() if type(module).__name__ in ("Linear", "HeadwiseLinear")
    }
    return sum(2.0 * module.weight.numel() * tokens(name) for name, module in maps.items())


def pairs(kind: str, length: int, *, reach: int = 0, chunk_size: int = 1, causal: bool) -> int:
    """Count the (query, key) pairs that are visible.

    Args:
        kind: "full", "window" or "chunk".
        length: Tokens.
        reach: For windows, the largest distance of a key, before a query and without `causal` after it too.
        chunk_size: Length of chunks.
        causal: Whether no key lies after its query.
    """
    if kind == "chunk":
        whole, rest = divmod(length, chunk_size)
        return whole * pairs("full", chunk_size, causal=causal) + pairs("full", rest, causal=causal)
    if kind == "full":
        return length * (length + 1) // 2 if causal else length * length
    reach = min(reach, length - 1)
    before = length * reach - reach * (reach + 1) // 2
    return length + (before if causal else 2 * before)


def encoder_pairs(config: Any, length: int) -> int:
    """Count the visible pairs of one encoder layer, in each model's own pattern.

    - LongT5 transient-global: also a summary of every 16 tokens.
    - Pegasus-X: a block of 512 and 32 global tokens per token; the global tokens see everything and pass through all
      linear maps. The last layer counts like the others, although nothing reads its global tokens.
    - BigBird: the first and the last block see everything, each other one these two, its neighbours and three at
      random; up to 11 blocks, everything sees everything.

    Raises:
        ValueError: The model's pattern is not known here.
    """
    kind = config.model_type
    if kind == "t5":
        return pairs("full", length, causal=False)
    if kind == "longt5":
        summaries = 0 if config.encoder_attention_type == "local" else length // config.global_block_size
        return pairs("window", length, reach=config.local_radius, causal=False) + length * summaries
    if kind == "led":
        window = config.attention_window
        window = window if isinstance(window, int) else window[0]
        return pairs("window", length, reach=window // 2, causal=False)
    if kind == "pegasus_x":
        globals_ = config.num_global_tokens
        return pairs("chunk", length, chunk_size=config.block_size, causal=False) + globals_ * (2 * length + globals_)
    if kind == "bigbird_pegasus":
        size, drawn = config.block_size, config.num_random_blocks
        if length <= (5 + 2 * drawn) * size:
            return pairs("full", length, causal=False)
        blocks = -(-length // size)
        return size * size * (2 * blocks + 2 * (4 + drawn) + (blocks - 4) * (5 + drawn))
    if kind == "spade":
        return _local_pairs(config, length)
    raise ValueError(f"the attention of {kind} must be counted in floors.encoder_pairs; it is not there")


def _local_pairs(config: Any, length: int) -> int:
    return pairs(
        config.attention_type,
        length,
        reach=config.local_radius,
        chunk_size=config.chunk_size,
        causal=config.is_decoder,
    )


def _inner(config: Any) -> int:
    """Return the width of all heads."""
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return head_dim * config.num_attention_heads if head_dim else config.hidden_size


def _read(config: Any, name: str, length: int) -> float:
    """Return how many tokens a linear map of a language model reads."""
    if config.model_type != "bst" or config.context_type != "multi_filter" or not _STATE_INPUT.search(name):
        return length
    return -(-length // config.window) * config.num_context_states  # states at the ends of windows


def _mixing(config: Any, length: int) -> float:
    """Count attention in a forward of a language model, or the recurrence that replaces it."""
    kind, layers = config.model_type, config.num_hidden_layers
    if kind == "chela" and config.attention_fn == "norm":
        return 4.0 * layers * length * config.hidden_size**2 / config.num_attention_heads
    if kind == "mamba":
        return 4.0 * layers * length * config.intermediate_size * config.state_size
    if kind == "mamba2":
        return 4.0 * layers * length * config.num_heads * config.head_dim * config.state_size
    if kind == "qwen3_next":
        rules = config.layer_types.count("linear_attention")
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        full = (layers - rules) * pairs("full", length, causal=True)
        return 6.0 * rules * length * state + 4.0 * _inner(config) * full
    if kind == "llama":
        seen = layers * pairs("full", length, causal=True)
    elif kind == "modernbert-decoder":
        window = {"reach": config.sliding_window - 1, "causal": True}
        kinds = {"full_attention": "full", "sliding_attention": "window"}
        seen = sum(pairs(kinds[layer], length, **window) for layer in config.layer_types)
    elif kind in ("spade", "bst"):
        seen = layers * _local_pairs(config, length)
        if kind == "bst":
            seen += len(config.bst_layers) * _context_pairs(config, length)
    else:
        raise ValueError(f"the mixing of {kind} must be counted in floors; this one is not there")
    return 4.0 * _inner(config) * seen


def _context_pairs(config: Any, length: int) -> int:
    """Count the pairs of queries and context states in one of BST's layers."""
    if config.context_type == "multi_filter":
        return length * config.num_context_states
    if config.context_shift == "window":
        return length * config.window
    return pairs("chunk", length, chunk_size=config.window, causal=True)


def convolution(
    length: int, channels: int, taps: int, *, filters: int = 1, groups: int | None = None, trained: bool = True
) -> float:
    """Count long convolutions and their gradients, by FFTs of blocks.

    The filters read the same input. Two kernels in both directions are one filter, since they share a spectrum.

    Args:
        length: Tokens.
        channels: Channels.
        taps: Taps of a kernel; those beyond the length have no effect.
        filters: Filters of each channel.
        groups: Different kernels of a filter; one for each channel when None.
        trained: Whether the kernel is computed and differentiated in each step.
    """
    block = min(taps, length)
    points = 2 * block
    transform = 2.5 * points * math.log2(points)
    blocks = length / block
    signals = channels * blocks * transform * (2 + 2 * filters)  # input, outputs, and the gradients of both
    spectra = channels * blocks * 6 * block * filters * (3 if trained else 2)
    kernels = 2 * filters * (groups or channels) * transform if trained else 0.0
    return signals + spectra + kernels


def _spade_convolutions(config: Any, length: int) -> float:
    if not config.global_layers:
        return 0.0
    if config.ssm_type != "s4":
        raise ValueError(f"the floor of ssm_type {config.ssm_type!r} must be counted in floors; only 's4' is")
    width, trained = config.hidden_size, config.ssm_freeze != "all"
    taps = min(length, config.ssm_l_max or length)
    count = convolution(length, width, taps, trained=trained)
    if trained:
        directions = 1 if config.is_decoder else 2
        count += _BACKWARD * 2.0 * directions * taps * config.ssm_state_size * width
    return len(config.global_layers) * count


def _chela_convolutions(config: Any, length: int) -> float:
    if config.mixer != "short_long":
        raise ValueError(f"the floor of mixer {config.mixer!r} must be counted in floors; only 'short_long' is")
    width = config.hidden_size
    short = _BACKWARD * 2.0 * length * width * max(config.short_kernel_sizes)
    long = convolution(length, width, config.long_kernel_size, groups=config.long_kernel_groups)
    return config.num_hidden_layers * (short + long)


def _bst_filters(config: Any, length: int) -> float:
    """Count the filters of one of BST's layers."""
    if config.context_filter != "s4":
        raise ValueError(f"the floor of {config.context_filter!r} filters must be counted in floors; only 's4' is")
    width, state = config.hidden_size, config.state_size
    if config.context_type == "multi_filter":  # states at the ends of windows, which all filters read
        outputs = config.num_context_states * (length // config.window)
        return _BACKWARD * 2.0 * state * width * (length + outputs)
    filters = config.num_attention_heads if config.context_type == "multi_head" else 1
    taps = _BACKWARD * 2.0 * filters * length * state * width
    return convolution(length, width, length, filters=filters) + taps
