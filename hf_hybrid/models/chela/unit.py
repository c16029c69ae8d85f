"""CHELA's unit: short-long convolutions, attention over their output, and two gates (Liu et al. 2024, section 4.3).

Shapes: B batch · T length · P tokens already read · D width · H heads · K = D / H head width · C chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import logging

from ...context_parallel import Shards
from ...context_parallel import laplace_attention as divided_laplace
from ...context_parallel import linear_attention as divided_linear
from ...kernels import laplace_attention, linear_attention
from ...kernels.laplace_attention import laplace
from ...kernels.packed import to_rows
from ...kernels.precision import autocast_once
from ...layers.dropout import Dropout
from ...layers.long_conv import DampedEMA, LongConv, ShortLongConv
from ...layers.norms import make_norm
from ...layers.s4d import S4D
from ...layers.state_space import StateSpaceLayer
from ..masks import first_kept
from .configuration_chela import ChelaConfig

ALPHA_STD = 0.02
"""Initial standard deviation of α_q and α_k: the norm removes their size, but Adam moves small values further."""

logger = logging.get_logger(__name__)


def make_mixer(config: ChelaConfig) -> StateSpaceLayer:
    """Build the module that computes Z in one layer."""
    width, bidirectional = config.hidden_size, not config.is_decoder
    if config.mixer == "s4d":
        return S4D(width, config.mixer_state_size, bidirectional=bidirectional, freeze="none")
    if config.mixer == "ema":
        return DampedEMA(width, config.mixer_state_size, bidirectional=bidirectional)
    options = {
        "groups": config.long_kernel_groups,
        "bidirectional": bidirectional,
        "init": config.long_kernel_init,
        "squash": config.kernel_squash,
        "kernel_dropout": config.kernel_dropout,
        "smoothing": config.kernel_smoothing,
        "use_D": config.long_conv_skip,
    }
    if config.mixer == "long":
        return LongConv(width, config.long_kernel_size, **options)
    return ShortLongConv(
        width,
        config.long_kernel_size,
        short_kernel_sizes=config.short_kernel_sizes,
        short_bias=config.short_conv_bias,
        branch_norm=config.short_branch_norm,
        **options,
    )


class KeptKeys(NamedTuple):
    """State of Laplace attention.

    Attributes:
        key: `(B, P, H, K)`; with chunks only of the last C - 1 tokens.
        value: `(B, P, H, K)`.
        kept: `(B, P)`, True for kept tokens.
        first: Position of each row's first kept token relative to these keys, `(B,)`; P if none is kept. Chunks are
            counted from there.
    """

    key: torch.Tensor
    value: torch.Tensor
    kept: torch.Tensor
    first: torch.Tensor


class ChelaState(NamedTuple):
    """State of a layer: the mixer's, and the attention's, a matrix `(B, H, K, K)` or keys."""

    mixer: Any
    attention: torch.Tensor | KeptKeys


class ChelaUnit(nn.Module):
    """Convolutions, attention over their output, and two gates (CHELA, section 4.3).

    Z = mixer(x),  Q = α_q Z + β_q,  K = α_k Z + β_k,  V = SiLU(x W_v + b_v)                    (eqs. 8, 11 to 13)
    M = Norm(Q (K^T V)) ⊙ SiLU(Z W_g + b_g),  U = M ⊙ G + r ⊙ (1 - G),  G = sigmoid(Z W_o + b_o)    (eqs. 9 to 15)

    with a residual r from the caller; Q (K^T V) has causal sums in a causal model.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.mixer = make_mixer(config)
        self.v_proj = nn.Linear(width, width)
        self.gate_proj = None if config.share_gate_value_proj else nn.Linear(width, width)
        self.gate_bias = nn.Parameter(torch.zeros(width)) if config.share_gate_value_proj else None
        self.output_gate_proj = nn.Linear(width, width)
        self.query_alpha, self.key_alpha = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.query_beta, self.key_beta = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.attention_norm = None
        if config.attention_norm in ("rms_norm", "layer_norm") and config.attention_fn != "laplace":
            head_dim = width // config.num_attention_heads
            self.attention_norm = make_norm(config.attention_norm, head_dim, config.attention_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.value_dropout = Dropout(config.activation_dropout)

    def reset_parameters(self):
        """Initialise the offsets and scales of queries and keys, and the gate's bias."""
        for alpha in (self.query_alpha, self.key_alpha):
            if self.config.alpha_init is None:
                init.normal_(alpha, std=ALPHA_STD)
            else:
                init.constant_(alpha, float(self.config.alpha_init))
        for bias in (self.query_beta, self.key_beta, self.gate_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        attention_mask: torch.Tensor | None,
        state: ChelaState | None,
        return_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[torch.Tensor, ChelaState | None]:
        """Run the unit.

        Args:
            hidden_states: x, `(B, T, D)`.
            residual: r, `(B, T, D)`.
            attention_mask: `(B, T)`, True = keep; None keeps all.
            state: State before these tokens.
            return_state: Whether to return the state after them.
            cu_seqlens: Bounds of the sequences in a packed batch; see `packing`.
            shards: The layout of a divided sequence, of which these are own tokens; see `packing`.

        Returns:
            U, `(B, T, D)`, and the state or None.
        """
        if attention_mask is not None:
            hidden_states = hidden_states.masked_fill(~attention_mask[..., None], 0)
        mixer_state = None
        if state is not None or return_state:
            before = None if state is None else state.mixer
            mixed, mixer_state = self.mixer(hidden_states, attention_mask, state=before, return_state=True)
        else:
            mixed = self.mixer(hidden_states, attention_mask, cu_seqlens=cu_seqlens, shards=shards)
        mixed = self.dropout(mixed)
        value = self.value_dropout(F.silu(self.v_proj(hidden_states)))
        before = None if state is None else state.attention
        read = autocast_once(mixed)
        attended, attention_state = self._attend(
            mixed, value, self._gate(read), attention_mask, before, cu_seqlens, shards
        )
        output_gate = torch.sigmoid(self.output_gate_proj(read))
        attended = self.dropout(attended)
        output = torch.addcmul(residual, output_gate, attended - residual)
        return output, ChelaState(mixer_state, attention_state) if return_state else None

    def _gate(self, mixed: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.gate_proj(mixed)
        if isinstance(self.v_proj, nn.Linear):
            return F.linear(mixed, self.v_proj.weight, self.gate_bias)
        # an adapter wraps the shared map: subtract the value's bias from its output
        return self.v_proj(mixed) - self.v_proj(torch.zeros_like(mixed[:1, :1])) + self.gate_bias

    def _attend(
        self,
        mixed: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        kept: torch.Tensor | None,
        state: torch.Tensor | KeptKeys | None,
        cu_seqlens: torch.Tensor | None,
        shards: Shards | None,
    ) -> tuple[torch.Tensor, torch.Tensor | KeptKeys | None]:
        """Compute M, `(B, T, D)`, and the attention's next state (None in a bidirectional model)."""
        shape = mixed.shape
        if cu_seqlens is not None:
            mixed, value, gate = (x.flatten(0, 1)[None] for x in (mixed, value, gate))
        heads = (*mixed.shape[:2], self.config.num_attention_heads, mixed.shape[2] // self.config.num_attention_heads)
        query = torch.addcmul(self.query_beta, mixed, self.query_alpha).to(value.dtype)
        key = torch.addcmul(self.key_beta, mixed, self.key_alpha).to(value.dtype)
        if self.config.attention_fn == "laplace_feature":
            query, key = laplace(query), laplace(key)
        if kept is not None:  # β gives padding a key
            key = key.masked_fill(~kept[..., None], 0)
        query, key, value, gate = query.view(heads), key.view(heads), value.view(heads), gate.view(heads)
        if self.config.attention_fn == "laplace":
            if shards is not None:
                attended = self._divided_laplace(query, key, value, kept, shards)
            else:
                attended, state = self._laplace_attention(query, key, value, kept, state, cu_seqlens)
            return (attended * F.silu(gate)).reshape(shape), state
        options = {"causal": self.config.is_decoder}
        normed = self.config.attention_norm == "simple_rms_norm"
        if normed:
            options |= {"norm_eps": self.config.attention_norm_eps, "gate": gate}
        if shards is not None:
            attended = divided_linear(query, key, value, shards, **options)
        else:
            attended, state = linear_attention(query, key, value, state=state, cu_seqlens=cu_seqlens, **options)
        if normed:
            return attended.reshape(shape), state
        attended = self._normed(attended).to(value.dtype) * F.silu(gate)
        if self.attention_norm is None and value.dtype == torch.float16:
            logger.warning_once("attention_norm 'none' overflows float16 on long inputs: use bfloat16.")
        return attended.reshape(shape), state

    def _normed(self, attended: torch.Tensor) -> torch.Tensor:
        """Normalise each head in the dtype of the sums, whatever the dtype of the weights."""
        if self.attention_norm is None:
            return attended
        weights = dict(self.attention_norm.named_parameters())
        if all(weight.dtype == attended.dtype for weight in weights.values()):
            return self.attention_norm(attended)
        weights = {name: weight.to(attended.dtype) for name, weight in weights.items()}
        return torch.func.functional_call(self.attention_norm, weights, attended)

    def _divided_laplace(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor | None, shards: Shards
    ) -> torch.Tensor:
        return divided_laplace(
            query,
            key,
            value,
            shards,
            causal=self.config.is_decoder,
            attention_mask=kept,
            chunk_size=self.config.chunk_size,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )

    def _laplace_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kept: torch.Tensor | None,
        state: KeptKeys | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, KeptKeys | None]:
        if cu_seqlens is not None:
            (query, kept), (key, _), (value, _) = (to_rows(x, cu_seqlens) for x in (query, key, value))
            attended, _ = self._laplace_attention(query, key, value, kept, None, None)
            return attended[kept][None], None
        kept = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if kept is None else kept
        first = position = first_kept(kept)
        if state is not None:
            past = state.kept.shape[1]
            first = torch.where(state.first < past, state.first, past + position)
            key, value = torch.cat([state.key, key], dim=1), torch.cat([state.value, value], dim=1)
            kept = torch.cat([state.kept, kept], dim=1)
        attended = laplace_attention(
            query,
            key,
            value,
            causal=self.config.is_decoder,
            attention_mask=kept,
            chunk_size=self.config.chunk_size,
            first=first,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        total = kept.shape[1]
        dropped = 0 if self.config.chunk_size is None else max(0, total - self.config.chunk_size + 1)
        return attended, KeptKeys(key[:, dropped:], value[:, dropped:], kept[:, dropped:], first - dropped)
