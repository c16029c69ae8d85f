"""Filters that a small network draws, one tap for each distance: Hyena's, and causal convolutions with them.

B batch · T length · H hidden size · L largest length · Z directions, 2 if bidirectional · C filters per channel ·
E positional features · F width of the network
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..kernels.long_conv import fft_length, filter_bank_conv, long_conv
from ..kernels.precision import full_precision
from .state_space import StateSpaceLayer, check_positive, fingerprint


class ImplicitFilter(StateSpaceLayer):
    """Base of layers with filters drawn by a network (Hyena, Poli et al. 2023; BST, appendix E, pseudocode 1).

    h_n[t] = W_n [sin(w (W_2 sin(w (W_1 sin(w (W_0 z_t + b_0)) + b_1)) + b_2))] exp(-t |δ|),  one frequency vector w
    for all three activations;  z_t = [t, cos f θ_t, -sin f θ_t]  with t from 0 to 1 over L positions, θ_t from 0 to 2π
    and frequencies f from 1e-4 to (E - 3)/2;  δ from ln(0.01)/1.5 in the first channel to ln(0.01)/0.3 in the last.

    The taps are kept between calls if none of their tensors requires a gradient, `(Z, C, L, H)` numbers at most.

    Args:
        hidden_size: Channels H.
        num_filters: C.
        max_length: L, taps of a filter in tokens. The filters are functions of t / L: another L, other filters.
        filter_size: F.
        embedding_size: E, odd.
        sine_frequency: Initial value of w.
        bidirectional: Whether there are filters of the future too.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection behind the layer, as in S4's own.
        freeze: ``"all"`` or ``"none"`` of the filters and the skip connection D.

    Raises:
        ValueError: An argument breaks its rule; the message names it, its value and the rule.
    """

    TRAINED: ClassVar = {
        "all": (),
        "none": (
            "mlp_in_weight",
            "mlp_in_bias",
            "mlp_hidden_weight",
            "mlp_hidden_bias",
            "mlp_out_weight",
            "sine_frequency",
            "D",
        ),
    }

    mlp_in_weight: torch.Tensor
    mlp_in_bias: torch.Tensor
    mlp_hidden_weight: torch.Tensor
    mlp_hidden_bias: torch.Tensor
    mlp_out_weight: torch.Tensor
    sine_frequency: torch.Tensor
    D: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        num_filters: int,
        *,
        max_length: int,
        filter_size: int,
        embedding_size: int,
        sine_frequency: float,
        bidirectional: bool,
        postact: str | None,
        freeze: str,
    ):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=postact, freeze=freeze)
        check_positive(num_filters=num_filters, max_length=max_length, filter_size=filter_size)
        if embedding_size < 3 or embedding_size % 2 == 0:
            raise ValueError(f"embedding_size must be odd and at least 3; got {embedding_size}")
        if sine_frequency <= 0:
            raise ValueError(f"sine_frequency must be positive; got {sine_frequency}")
        self.max_length, self.embedding_size, self.initial_frequency = max_length, embedding_size, sine_frequency
        self._declare(
            {
                "mlp_in_weight": (filter_size, embedding_size),
                "mlp_in_bias": (filter_size,),
                "mlp_hidden_weight": (2, filter_size, filter_size),
                "mlp_hidden_bias": (2, filter_size),
                "mlp_out_weight": (2 if bidirectional else 1, num_filters, hidden_size, filter_size),
                "sine_frequency": (filter_size,),
                "D": (num_filters, hidden_size),
            }
        )
        self._kept: tuple[tuple[Any, ...], list[torch.Tensor], torch.Tensor] | None = None

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """D normal; weights and biases of the network as torch's linear layers have them."""
        if name == "D":
            nn.init.normal_(tensor)
        elif name == "sine_frequency":
            nn.init.constant_(tensor, self.initial_frequency)
        else:
            fan_in = self.embedding_size if name.startswith("mlp_in") else tensor.shape[-1]
            nn.init.uniform_(tensor, -(fan_in**-0.5), fan_in**-0.5)

    def clear_cache(self) -> None:
        """Drop kept taps; only needed after an edit through ``.data``, which nothing can see."""
        self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _may_keep(self) -> bool:
        """Whether taps may be kept until a tensor is seen to change."""
        return not self._is_trained()

    def _taps(self, length: int) -> torch.Tensor:
        """Taps of all filters for inputs of a length, `(Z, C, min(length, L), H)`, kept while nothing is trained."""
        wanted = min(length, self.max_length)
        if not self._may_keep() or torch.compiler.is_compiling():  # no tracer sees an address
            return self._generate(wanted)
        tensors = [tensor for _, tensor in self.own_tensors()]
        key = fingerprint(tensors)
        if self._kept is None or self._kept[0] != key or self._kept[2].shape[2] < wanted:
            with torch.inference_mode(False), torch.no_grad():  # they may be wanted in training
                made = self._generate(min(fft_length(length) // 2, self.max_length))
            # held on to, the tensors' addresses cannot become another's
            self._kept = key, [x.detach() for x in tensors], made
        return self._kept[2][:, :, :wanted]

    def _generate(self, length: int) -> torch.Tensor:
        """The filters' first taps, `(Z, C, length, H)`: in the layout of inputs, for the sake of decoding."""
        with full_precision(self.mlp_in_weight.device):
            return self._basis(length) @ self.mlp_out_weight.mT * self._envelope(length)

    def _basis(self, length: int) -> torch.Tensor:
        """What every filter is a sum of, but for the envelope, `(length, F)`."""
        weight = self.mlp_in_weight
        bands = (self.embedding_size - 1) // 2
        with full_precision(weight.device):
            position = torch.arange(length, dtype=weight.dtype, device=weight.device)
            frequency = torch.linspace(1e-4, bands - 1, bands, dtype=weight.dtype, device=weight.device)
            angle = torch.outer(position * (2 * math.pi / self.max_length), frequency)
            x = torch.cat([self._time(length)[:, None], angle.cos(), -angle.sin()], dim=-1)
            x = torch.sin(self.sine_frequency * F.linear(x, weight, self.mlp_in_bias))
            for hidden_weight, hidden_bias in zip(self.mlp_hidden_weight, self.mlp_hidden_bias, strict=True):
                x = torch.sin(self.sine_frequency * F.linear(x, hidden_weight, hidden_bias))
            return x

    def _envelope(self, length: int) -> torch.Tensor:
        """``exp(-t |δ|)``, `(length, H)`."""
        return torch.exp(torch.outer(-self._time(length), self._decay()))

    def _time(self, length: int) -> torch.Tensor:
        like = self.mlp_in_weight
        return torch.arange(length, dtype=like.dtype, device=like.device) / max(1, self.max_length - 1)

    def _decay(self) -> torch.Tensor:
        """|δ| of every channel, `(H,)`: e-folds over L positions."""
        slow, fast = -math.log(0.01) / 1.5, -math.log(0.01) / 0.3
        like = self.mlp_in_weight
        return torch.linspace(slow, fast, self.hidden_size, dtype=like.dtype, device=like.device)


class ImplicitConv(ImplicitFilter):
    """Causal convolutions of a sequence with several filters of a network (BST, appendix E, pseudocode 1).

    y_c[t] = sum_{j<L} h_c[j] u[t-j] + D_c u[t],  per channel, in O(T log T).

    As in `S4`, `sample`, `follow` and `read` compute no more than what is wanted of many filters.

    Args:
        hidden_size: Channels H.
        num_filters: C.
        max_length: L, taps of a filter in tokens: what lies further back has no part. The filters are functions of
            t / L: another L, other filters.
        filter_size: F.
        embedding_size: E, odd.
        sine_frequency: Initial value of w.

    Raises:
        ValueError: An argument breaks its rule; the message names it, its value and the rule.

    Note:
        A decoded token costs O(C L H). Taps are kept in evaluation while no gradient is recorded, until a tensor is
        seen to change or the layer trains; a fused optimizer that steps in evaluation mode wants `clear_cache`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        max_length: int,
        num_filters: int = 1,
        filter_size: int = 64,
        embedding_size: int = 33,
        sine_frequency: float = 14.0,
    ):
        super().__init__(
            hidden_size,
            num_filters,
            max_length=max_length,
            filter_size=filter_size,
            embedding_size=embedding_size,
            sine_frequency=sine_frequency,
            bidirectional=False,
            postact=None,
            freeze="none",
        )
        self.num_filters = num_filters
        self.reset_parameters()

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """`(B, L, H)`: the last inputs."""
        return batch, self.max_length, self.hidden_size

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{self.hidden_size}, num_filters={self.num_filters}, max_length={self.max_length}"

    def train(self, mode: bool = True) -> "ImplicitConv":
        """Set the mode; training drops kept taps."""
        if mode:
            self.clear_cache()
        return super().train(mode)

    def _may_keep(self) -> bool:
        return not self.training and not torch.is_grad_enabled()

    def _run(
        self, u: torch.Tensor, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs `(B, T, H)`, or `(C, B, T, H)` of several filters."""
        inputs = u if state is None else torch.cat([state, u.to(state.dtype)], dim=1)
        new_state = self.follow(u, state, [u.shape[1]])[0] if return_state else None
        taps = self._taps(inputs.shape[1])[0]
        if u.shape[1] == 1:
            wide = torch.promote_types(u.dtype, taps.dtype)
            last = inputs[:, -taps.shape[1] :].to(wide)
            y = torch.einsum("blh,clh->cbh", last.flip(1), taps.to(wide)) + self.D[:, None].to(wide) * last[:, -1]
            y = y[:, :, None]
        elif self.num_filters > 1:
            y = filter_bank_conv(inputs, taps.mT, skip=self.D)[:, :, -u.shape[1] :]
        else:
            y = long_conv(inputs, taps[0].mT, skip=self.D[0])[None, :, -u.shape[1] :]
        return (y if self.num_filters > 1 else y[0]).to(u.dtype), new_state

    def sample(self, u: torch.Tensor, window: int) -> torch.Tensor:
        """Outputs of all filters at the last token of every whole window, `(B, T // window, C, H)`, in u's dtype.

        All filters are sums over one basis: windows are projected on it, and no filter's taps are made.
        """
        wide = torch.promote_types(u.dtype, self.mlp_in_weight.dtype)
        count = u.shape[1] // window
        longest = min(max(1, count * window), self.max_length)
        basis, envelope = self._basis(longest).flip(0).mT, self._envelope(longest).flip(0)
        outputs = []
        for end in range(window, count * window + 1, window):
            inputs = u[:, max(0, end - self.max_length) : end].to(wide)
            arguments = inputs, basis[:, -inputs.shape[1] :], envelope[-inputs.shape[1] :]
            if torch.is_grad_enabled():  # the products would be kept for the backward
                outputs.append(checkpoint(self._project, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                outputs.append(self._project(*arguments))
        if not outputs:
            return u.new_zeros(u.shape[0], 0, self.num_filters, self.hidden_size)
        return torch.stack(outputs, dim=1).to(u.dtype)

    def _project(self, inputs: torch.Tensor, basis: torch.Tensor, envelope: torch.Tensor) -> torch.Tensor:
        """Outputs of all filters at the last of some inputs `(B, l, H)`, `(B, C, H)`; basis and envelope reversed."""
        with full_precision(inputs.device):
            projected = basis.to(inputs.dtype) @ (inputs * envelope)
            y = torch.einsum("bfh,chf->bch", projected, self.mlp_out_weight[0].to(inputs.dtype))
        return y + self.D.to(inputs.dtype) * inputs[:, -1:]

    def follow(self, u: torch.Tensor, state: torch.Tensor | None, stops: Sequence[int]) -> list[torch.Tensor]:
        """The states `(B, L, H)` before tokens `stops` of masked inputs `(B, T, H)`; the last stop may be T.

        All but the last are views of one tensor, to be read at once; the last is for a cache to keep.
        """
        wide = torch.promote_types(u.dtype, self.mlp_in_weight.dtype)
        if state is None:
            state = u.new_zeros(u.shape[0], self.max_length, u.shape[2], dtype=wide)
        inputs = torch.cat([state.to(wide), u.to(wide)], dim=1)
        states = [inputs[:, stop : stop + self.max_length] for stop in stops]
        return [*states[:-1], states[-1].clone()]

    def read(self, state: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Outputs of all filters at the last token, `(B, C, H)`, given the state behind it and its input `(B, H)`."""
        basis, envelope = self._basis(self.max_length).flip(0).mT, self._envelope(self.max_length).flip(0)
        return self._project(state, basis, envelope).to(last.dtype)
