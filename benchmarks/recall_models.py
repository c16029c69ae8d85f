"""The models of `bench_recall`: ours, each with the ablation that has no global part, and peers of equal size."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LongT5Config,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from benchmarks.workloads import tensors_of
from hf_hybrid import BstConfig, ChelaConfig, SpadeConfig, SRformerT5Config

WINDOW = 8
"""Keys that local attention sees, the query's own included; also tokens of CHELA's chunks, and its local kernel."""
SEGMENT = 4
"""Keys of SRformer's segments."""
HEADS, LAYERS = 2, 2
_PER_LAYER = 12
"""Parameters of a transformer's layer with a feed-forward network four times as wide, in squares of the width."""
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class Shape:
    """What a task asks of a model.

    Attributes:
        vocab_size: Tokens.
        length: Tokens of a training sequence, or of a document.
        width: Width of the model.
    """

    vocab_size: int
    length: int
    width: int = 64

    @property
    def budget(self) -> int:
        """Parameters that every model of this shape has, as nearly as one whole size allows."""
        return self.vocab_size * self.width + LAYERS * _PER_LAYER * self.width**2


@dataclass(frozen=True)
class Kind:
    """A model of the benchmark.

    Attributes:
        config: Makes its config, given a shape and the size that is fitted.
        ablation_of: The model that it is without its global part; None if it is no ablation.
        is_encoder_decoder: Whether it reads documents and answers with a decoder.
        encodes: Whether its encoder has a layer. Without one the decoder reads the documents' embeddings: full
            attention in an encoder would carry facts from each segment to the others.
        fields: Fields of its config.
        state_of: The model of which it is a copy with another size of the state; None if it is no such copy.
        tasks: The tasks that it does; None for all of its kind.
        has_seeds: Whether several seeds are worth their time.
    """

    config: Callable[[Shape, int], PreTrainedConfig]
    ablation_of: str | None = None
    is_encoder_decoder: bool = False
    encodes: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    state_of: str | None = None
    tasks: tuple[str, ...] | None = None
    has_seeds: bool = True

    def make(self, shape: Shape, size: int) -> PreTrainedConfig:
        """Make its config."""
        return self.config(shape, size, **self.fields)


def _layers(shape: Shape, size: int) -> dict[str, Any]:
    sizes = {"hidden_size": shape.width, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return {"vocab_size": shape.vocab_size, **sizes, "intermediate_size": size, **_NO_TOKENS}


def _spade(shape: Shape, size: int, **fields: Any) -> PreTrainedConfig:
    role = {"is_decoder": True, "is_encoder_decoder": False, "decoder_start_token_id": None}
    plain = {"dropout": 0.0, "attention_dropout": 0.0, "local_radius": WINDOW - 1}
    return SpadeConfig(**_layers(shape, size), **role, **plain, **fields)


def _bst(shape: Shape, size: int, **fields: Any) -> PreTrainedConfig:
    plain = {"dropout": 0.0, "attention_dropout": 0.0, "window": WINDOW}
    return BstConfig(**_layers(shape, size), **plain, **fields)


def _chela(shape: Shape, size: int, **fields: Any) -> PreTrainedConfig:
    lengths = {"training_length": shape.length, "long_kernel_size": shape.length}
    return ChelaConfig(**{**_layers(shape, size), **lengths, "dropout": 0.0, "is_decoder": True, **fields})


def _llama(shape: Shape, size: int) -> PreTrainedConfig:
    return LlamaConfig(**_layers(shape, size), max_position_embeddings=16 * shape.length, tie_word_embeddings=True)


def _mamba2(shape: Shape, size: int) -> PreTrainedConfig:
    # a layer has no feed-forward network, so there are more of them; the fitted size is that of the state
    sizes = {"hidden_size": shape.width, "num_hidden_layers": 3 * LAYERS // 2, "num_heads": HEADS, "n_groups": 1}
    inner = {"expand": 2, "head_dim": 2 * shape.width // HEADS, "state_size": size, "chunk_size": 16}
    return Mamba2Config(vocab_size=shape.vocab_size, **sizes, **inner, **_NO_TOKENS, tie_word_embeddings=True)


def _t5_fields(shape: Shape, size: int) -> dict[str, Any]:
    # half of the layers on each side; the last token is the start, which nothing asks for
    sizes = {"d_model": shape.width, "d_kv": shape.width // HEADS, "num_heads": HEADS, "d_ff": size}
    layers = {"num_layers": LAYERS // 2, "num_decoder_layers": LAYERS // 2, "dropout_rate": 0.0}
    tokens = {"pad_token_id": shape.vocab_size, "decoder_start_token_id": shape.vocab_size, "eos_token_id": None}
    return {"vocab_size": shape.vocab_size + 1, **sizes, **layers, **tokens}


def _t5(shape: Shape, size: int) -> PreTrainedConfig:
    return T5Config(**_t5_fields(shape, size))


def _longt5(shape: Shape, size: int) -> PreTrainedConfig:
    return LongT5Config(**_t5_fields(shape, size), local_radius=WINDOW - 1, encoder_attention_type="local")


def _srformer(shape: Shape, size: int, **fields: Any) -> PreTrainedConfig:
    return SRformerT5Config(**_t5_fields(shape, size), segment_size=SEGMENT, **fields)


_CHUNKS = {"attention_fn": "laplace", "chunk_size": WINDOW, "long_kernel_size": 4, "short_kernel_sizes": [3]}
MODELS: dict[str, Kind] = {
    "SPADE": Kind(_spade),
    "SPADE, windows alone": Kind(_spade, "SPADE", fields={"global_layers": "none"}),
    "BST": Kind(_bst),
    "BST, windows alone": Kind(_bst, "BST", fields={"bst_layers": []}),
    "CHELA": Kind(_chela),
    "CHELA, chunks alone": Kind(_chela, "CHELA", fields=_CHUNKS),
    "CHELA, long convolution alone": Kind(_chela, fields={"mixer": "long"}, tasks=("key_value",), has_seeds=False),
    "Llama": Kind(_llama),
    "Mamba-2": Kind(_mamba2),
    "SRformer": Kind(_srformer, is_encoder_decoder=True, encodes=False),
    "SRformer, segments alone": Kind(
        _srformer, "SRformer", is_encoder_decoder=True, encodes=False, fields={"cross_attention_mode": "segmented"}
    ),
    "T5": Kind(_t5, is_encoder_decoder=True, encodes=False),
    "LongT5": Kind(_longt5, is_encoder_decoder=True),
    **{f"BST, N {size}": Kind(_bst, fields={"state_size": size}, state_of="BST") for size in (8, 32, 64)},
    **{f"SPADE, N {size}": Kind(_spade, fields={"ssm_state_size": size}, state_of="SPADE") for size in (8, 32)},
}
"""The models by name. An ablation follows its model. BST has N 16, SPADE N 64, if they do not say it."""


def _build(kind: Kind, config: PreTrainedConfig) -> PreTrainedModel:
    auto_class = AutoModelForSeq2SeqLM if kind.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_config(config)
    if not kind.encodes:
        model.get_encoder().block = nn.ModuleList()
    return model


def _count(kind: Kind, shape: Shape, size: int) -> int:
    with torch.device("meta"):
        return _build(kind, kind.make(shape, size)).num_parameters()


def fitted(name: str, shape: Shape) -> PreTrainedConfig:
    """Return a model's config with the size, of its feed-forward network or state, that comes nearest to the budget.

    Raises:
        ValueError: Even the smallest such model is larger than the budget.
    """
    kind = MODELS[name]
    # the count grows by the same number with each step of the size
    base, first = 8, _count(kind, shape, 8)
    step = (_count(kind, shape, 2 * base) - first) / base
    size = round(base + (shape.budget - first) / step)
    if size < 1:
        raise ValueError(f"{name}: width {shape.width} leaves no parameters for its last size; budget {shape.budget}")
    return kind.make(shape, size)


def build(name: str, shape: Shape, seed: int) -> PreTrainedModel:
    """Build a model of the budget's size with random weights."""
    config = fitted(name, shape)
    torch.manual_seed(seed)
    return _build(MODELS[name], config)


class Compressor(nn.Module):
    """A model whose last output must hold the sequence, and a small network that reads it (MAD's autoencoder).

    The network sees the output after the last token plus sinusoids of a place, passes it through two layers of the
    model's width, each a norm, a linear map and GELU, and says which token stands at that place.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        width = model.config.hidden_size
        layers = [part for _ in range(2) for part in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())]
        self.decoder = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, vocab_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of every token from the last output, `(B, L, V)`."""
        last = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, -1:]
        return self.decoder(last + sinusoids(input_ids.shape[1], last.shape[-1]))


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return position embeddings of sines and cosines, `(length, width)`."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 2) / max(width // 2 - 1, 1))
    angles = torch.arange(length)[:, None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


@torch.no_grad()
def state_numbers(name: str, shape: Shape) -> int:
    """Return how many numbers a causal model keeps of one sequence of a shape to continue it: states, and keys."""
    model = build(name, shape, seed=0).eval()
    outputs = model(input_ids=torch.zeros(1, shape.length, dtype=torch.long), use_cache=True)
    cache = outputs.get("past_key_values", outputs.get("cache_params"))  # Mamba-2 has its own name for it
    return sum(tensor.numel() for tensor in tensors_of(cache) if tensor.is_floating_point())


def reach(model: PreTrainedModel, length: int = 96, queries: int = 2 * WINDOW) -> int:
    """Return how many tokens back the farthest token lies that changes an output of a causal model.

    It is read from gradients in float64, of the last outputs of a random sequence. The weights are moved a little
    first, because some parts start at zero.
    """
    model = model.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * moved.to(parameter.dtype))
    inputs = torch.randn(1, length, model.config.hidden_size, generator=generator, dtype=torch.float64)
    inputs.requires_grad_()
    outputs = model.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    weights = torch.randn(outputs.shape[-1], generator=generator, dtype=torch.float64)
    farthest = 0
    for place in range(length - queries, length):
        (gradient,) = torch.autograd.grad((outputs[0, place] * weights).sum(), inputs, retain_graph=True)
        sizes = gradient[0].abs().amax(dim=-1)
        # Fourier transforms leave about 1e-17 where a gradient is zero
        farthest = max(farthest, place - int((sizes > 1e-12 * sizes.max()).nonzero()[0]))
    return farthest


@cache
def ablation_reach(name: str) -> int | None:
    """Return how many tokens back an ablation sees; None for an encoder-decoder, which sees the segment that it reads.

    The width and the vocabulary change nothing.
    """
    if MODELS[name].is_encoder_decoder:
        return None
    return reach(build(name, Shape(vocab_size=20, length=96, width=32), seed=0))
