"""Hyena: element-wise products of projections and long convolutions whose filters a small network generates.

B batch · T length · H hidden size · L largest length · O order · Z directions, 2 if bidirectional · K short taps ·
E positional features · F width of the network
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..context_parallel import Shards, by_channels
from ..context_parallel import short_conv as divided_short_conv
from ..kernels.checks import check_positive
from ..kernels.long_conv import long_conv
from ..kernels.packed import to_rows
from ..kernels.precision import compute_dtype
from .dropout import Dropout
from .implicit_filter import ImplicitFilter


class Hyena(ImplicitFilter):
    """Hyena operator of any order (Poli et al. 2023).

    x_0, ..., x_(O-1), v = split(short_conv(W_in u + b_in));  for n = O-1, ..., 1:  v = h_n * (x_n v) + D_n (x_n v);
    y = W_out (x_0 v) + b_out,  per channel except for the projections, in O(T log T).

    `ImplicitFilter` defines the filters h_n; D_n is its D.

    Bidirectional: a second output of the same network is a filter of the future, from lag 1 on, as in `S4`. The short
    convolution always reads only the past.

    Args:
        hidden_size: Channels H.
        order: O, the number of gates, with O - 1 long convolutions between them.
        max_length: L, taps of a filter in tokens. The filters are functions of t / L, so they change with L.
        filter_size: F.
        embedding_size: E, odd.
        sine_frequency: Initial value of w.
        short_kernel_size: Taps K of the depthwise convolution on the projections.
        dropout: Probability of dropping an input of a long convolution.
        bidirectional: Whether a second filter reads the future.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection after the layer, as in S4's own.
        freeze: Freeze ``"all"`` or ``"none"`` of the filters and D. The projections and the short convolution are
            ordinary modules, always trained and cast with the model.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        A decoded token costs O(L H): a dot product with the taps. Under torch.compile each call recomputes the taps,
        O(L H F).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        max_length: int,
        order: int = 2,
        filter_size: int = 64,
        embedding_size: int = 33,
        sine_frequency: float = 14.0,
        short_kernel_size: int = 3,
        dropout: float = 0.0,
        bidirectional: bool = False,
        postact: str | None = None,
        freeze: str = "all",
    ):
        if order < 2:
            raise ValueError(f"order must be at least 2; got {order}")
        super().__init__(
            hidden_size,
            order - 1,
            max_length=max_length,
            filter_size=filter_size,
            embedding_size=embedding_size,
            sine_frequency=sine_frequency,
            bidirectional=bidirectional,
            postact=postact,
            freeze=freeze,
        )
        check_positive(short_kernel_size=short_kernel_size)
        self.order, self.short_kernel_size = order, short_kernel_size

        width = (order + 1) * hidden_size
        self.in_proj = nn.Linear(hidden_size, width)
        self.short_conv = nn.Conv1d(width, width, short_kernel_size, groups=width)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return `(B, (K-1) (O+1) + (O-1) (L-1), H)`: last inputs of the short convolution, then of each long one."""
        rows = (self.short_kernel_size - 1) * (self.order + 1) + (self.order - 1) * (self.max_length - 1)
        return batch, rows, self.hidden_size

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every tensor in place, except those marked ``_is_hf_initialized`` (loaded from a checkpoint).

        The projections before the products get torch's initialisation: with the small weights of transformers,
        products of three factors would be almost zero.
        """
        super().reset_parameters()
        for module in (self.in_proj, self.short_conv):
            bound = module.weight[0].numel() ** -0.5
            for tensor in module.parameters():
                if not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta:
                    nn.init.uniform_(tensor, -bound, bound)

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return (
            f"{self.hidden_size}, order={self.order}, max_length={self.max_length}, "
            f"bidirectional={self.bidirectional}, freeze={self.freeze!r}"
        )

    def _run_masked(
        self, u: torch.Tensor, kept: torch.Tensor | None, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        short_past, long_pasts = self._split_state(state)
        # both biases give padding a value, which must stay zero
        projected = _zero_masked(self.in_proj(u.to(self.in_proj.weight.dtype)), kept)
        inputs = _join(short_past, projected)
        last_inputs = [_last(inputs, self.short_kernel_size - 1).unflatten(-1, (-1, self.hidden_size)).flatten(1, 2)]
        inputs = F.pad(inputs, (0, 0, self.short_kernel_size - 1 if short_past is None else 0, 0))
        convolved = _zero_masked(self.short_conv(inputs.to(projected.dtype).mT).mT, kept)
        *gates, v = convolved.chunk(self.order + 1, dim=-1)

        if state is not None and self._requires_grad():
            taps = self._for_tokens("taps", lambda: self._generate(self.max_length))
        else:
            taps = self._taps(u.shape[1] if state is None else self.max_length)
        # the convolution computes a product that nothing else reads, without storing it
        stored = return_state or v.shape[1] == 1 or (self.training and self.dropout.p > 0)
        for index, past in enumerate(long_pasts):
            gate, filters = gates[-1 - index], (taps[:, index], self.D[index], v.shape[1])
            if past is None and not stored:
                v = self._convolve(v, *filters, gate).to(v.dtype)
                continue
            v = self.dropout(v * gate)
            inputs = _join(past, v)
            last_inputs.append(_last(inputs, self.max_length - 1))
            v = self._convolve(inputs, *filters).to(v.dtype)
        y = self.out_proj((v * gates[0]).to(self.out_proj.weight.dtype)).to(u.dtype)
        if not return_state:
            return y, None
        wide = compute_dtype(v)
        return y, torch.cat([x.to(wide) for x in last_inputs], dim=1)

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        rows, kept = to_rows(self.in_proj(u.to(self.in_proj.weight.dtype)), cu_seqlens)
        convolved = self.short_conv(F.pad(rows, (0, 0, self.short_kernel_size - 1, 0)).mT).mT[kept][None]
        *gates, v = convolved.chunk(self.order + 1, dim=-1)
        taps = self._taps(rows.shape[1])
        for index, gate in enumerate(reversed(gates[1:])):
            filters = (taps[:, index], self.D[index], v.shape[1])
            v = self._convolve(self.dropout(v * gate), *filters, cu_seqlens=cu_seqlens).to(v.dtype)
        return self.out_proj((v * gates[0]).to(self.out_proj.weight.dtype)).to(u.dtype)

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        projected = _zero_masked(self.in_proj(u.to(self.in_proj.weight.dtype)), kept)
        kernel = self.short_conv.weight[:, 0].flip(1)  # by lag
        convolved = _zero_masked(divided_short_conv(projected, kernel, shards, self.short_conv.bias), kept)
        *gates, v = convolved.chunk(self.order + 1, dim=-1)
        taps = self._generate(min(shards.longest, self.max_length), shards.share(self.hidden_size))
        for index, gate in enumerate(reversed(gates[1:])):

            def convolve(
                x: torch.Tensor, channels: slice, cu_seqlens: torch.Tensor | None, index: int = index
            ) -> torch.Tensor:
                filters = taps[:, index], self.D[index, channels], x.shape[1]
                return self._convolve(x, *filters, cu_seqlens=cu_seqlens)

            v = by_channels(shards, convolve, self.dropout(v * gate), taps, self.D).to(v.dtype)
        return self.out_proj((v * gates[0]).to(self.out_proj.weight.dtype)).to(u.dtype)

    def _split_state(self, state: torch.Tensor | None) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Return last inputs of the short convolution, `(B, K-1, (O+1) H)`, and of each long one, `(B, L-1, H)`."""
        if state is None:
            return None, [None] * (self.order - 1)
        short, long = self.short_kernel_size - 1, self.max_length - 1
        pasts = state.split([short * (self.order + 1), *[long] * (self.order - 1)], dim=1)
        return pasts[0].reshape(state.shape[0], short, (self.order + 1) * self.hidden_size), list(pasts[1:])

    def _convolve(
        self,
        inputs: torch.Tensor,
        taps: torch.Tensor,
        skip: torch.Tensor,
        length: int,
        gate: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a long convolution's outputs at the last `length` of its inputs `(B, ·, H)`; taps are `(Z, ·, H)`."""
        if length == 1:  # as many inputs as taps
            return (inputs * taps[0].flip(0)).sum(1, keepdim=True) + skip * inputs[:, -1:]
        reverse_kernel = taps[1].mT if self.bidirectional else None
        y = long_conv(
            inputs, taps[0].mT, reverse_kernel=reverse_kernel, skip=skip, input_gate=gate, cu_seqlens=cu_seqlens
        )
        return y[:, -length:]


def _zero_masked(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return x if kept is None else x.masked_fill(~kept[..., None], 0)


def _join(past: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if past is None else torch.cat([past, x.to(past.dtype)], dim=1)


def _last(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last `count` tokens of `(B, T, D)`, padded with zeros before the first."""
    x = x[:, max(0, x.shape[1] - count) :]
    return F.pad(x, (0, 0, count - x.shape[1], 0))
