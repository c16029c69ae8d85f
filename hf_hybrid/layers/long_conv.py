"""Long convolutions with learned taps, alone or after short ones, and the moving average that they replace.

B batch · T length · H hidden size · L taps · G groups · Z directions, 2 if bidirectional · J short taps · N state size
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from ..context_parallel import Shards, by_channels
from ..context_parallel import long_conv as divided_long_conv
from ..context_parallel import short_conv as divided_short_conv
from ..kernels.checks import check_choice, check_positive
from ..kernels.dispatch import exports_any, exports_to_onnx
from ..kernels.long_conv import ConvState, long_conv, online_conv, start_online_conv
from ..kernels.packed import longest
from ..kernels.precision import compute_dtype
from ..kernels.short_conv import merge_kernels, short_conv
from ..kernels.ssm_kernel import (
    S4DStep,
    s4d_block_powers,
    s4d_final_state,
    s4d_kernel,
    s4d_state_response,
)
from .norms import BatchNorm
from .state_space import StateSpaceLayer, keep

INITS = ("double_exp", "random")


class LongConv(StateSpaceLayer):
    """Depthwise convolution whose taps are parameters (Fu et al. 2023; CHELA, eq. 7), in O(T log T).

    y[t] = sum_{0<=j<L} k[j] u[t-j] + D u[t],  and bidirectional  + sum_{0<=j<L} k'[j] u[t+1+j],  per channel.

    Shorter inputs use the first taps; longer ones reach back L tokens, so outputs do not depend on the input's
    length. A decoded token costs O(log(L)^2) per channel, see `kernels.long_conv.online_conv`.

    Args:
        hidden_size: Channels H.
        kernel_size: L, in tokens.
        groups: G, a divisor of H; channel c has the taps of group ``c % G``. None: H, each channel its own.
        bidirectional: Whether a second kernel reads the future.
        init: ``"double_exp"``: normal with deviation 0.02, decaying over L to 1/e in the first group and faster in
            each later one; or ``"random"``: normal with deviation 0.002.
        squash: Threshold of the soft shrinkage on the taps.
        kernel_dropout: Probability of dropping a tap in training.
        smoothing: Odd width of a moving average over the taps; 1 turns it off.
        use_D: Whether to add a skip connection D, initially 1.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        With `squash` or `smoothing`, the resulting taps are kept from a prompt to the tokens after it, if no gradient
        is recorded.
    """

    TRAINED: ClassVar = {"none": ("long_kernel", "D")}

    long_kernel: torch.Tensor
    D: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        *,
        groups: int | None = None,
        bidirectional: bool = False,
        init: str = "double_exp",
        squash: float = 0.0,
        kernel_dropout: float = 0.0,
        smoothing: int = 1,
        use_D: bool = True,
    ):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=None, freeze="none")
        groups = hidden_size if groups is None else groups
        check_positive(kernel_size=kernel_size, groups=groups)
        if hidden_size % groups:
            raise ValueError(f"groups must divide hidden_size {hidden_size}; got {groups}")
        check_choice("init", init, INITS)
        if squash < 0:
            raise ValueError(f"squash must not be negative; got {squash}")
        if not 0 <= kernel_dropout < 1:
            raise ValueError(f"kernel_dropout must lie in [0, 1); got {kernel_dropout}")
        if smoothing < 1 or smoothing % 2 == 0:
            raise ValueError(f"smoothing must be a positive odd integer; got {smoothing}")
        self.kernel_size, self.groups, self.init, self.squash = kernel_size, groups, init, squash
        self.kernel_dropout, self.smoothing = kernel_dropout, smoothing
        self._declare(self._shapes(use_D))
        self.reset_parameters()

    def _shapes(self, use_D: bool) -> dict[str, tuple[int, ...] | None]:
        return {
            "long_kernel": (2 if self.bidirectional else 1, self.groups, self.kernel_size),
            "D": (self.hidden_size,) if use_D else None,
        }

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise D to one, and the taps as `init` says."""
        if name == "D":
            nn.init.ones_(tensor)
        elif self.init == "random":
            nn.init.normal_(tensor, std=0.002)
        else:
            nn.init.normal_(tensor, std=0.02)
            lag = torch.arange(self.kernel_size, dtype=torch.float64) / self.kernel_size
            group = torch.arange(self.groups, dtype=torch.float64) / self.groups
            rate = max(1.0, self.hidden_size / 2) ** group
            tensor.mul_(torch.exp(-torch.outer(rate, lag)).to(tensor))

    def shapes_memory(self, name: str) -> bool:
        """Return whether the tensor is the long kernel."""
        return name == "long_kernel"

    def _check_state(self, state: Any, batch: int) -> None:
        if not isinstance(state, ConvState):
            raise ValueError(f"state must be a ConvState, as returned; got {type(state).__name__}")

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, groups={self.groups}, "
            f"bidirectional={self.bidirectional}, init={self.init!r}"
        )

    def _taps(self, length: int) -> torch.Tensor:
        """Return the taps for inputs of a length, `(Z, G, min(length, L))`."""
        taps = self.long_kernel
        if exports_any(length):
            length = self.kernel_size
        if self.smoothing == 1:
            taps = taps[..., :length]
        if self.squash:
            taps = F.softshrink(taps, float(self.squash))
        taps = F.dropout(taps, self.kernel_dropout, self.training)
        if self.smoothing > 1:
            taps = F.avg_pool1d(taps, self.smoothing, stride=1, padding=self.smoothing // 2)[..., :length]
        return taps

    def _run(self, u: torch.Tensor, state: Any, return_state: bool) -> tuple[torch.Tensor, Any]:
        if state is None and not return_state:
            return self._convolve(u, self._taps(u.shape[1])), None
        if self.training or (not self.squash and self.smoothing == 1):
            taps = self._taps(self.kernel_size)
        else:
            taps = self._for_tokens("taps", lambda: self._taps(self.kernel_size))
        if state is not None:
            return online_conv(u, taps[0], state, skip=self.D)
        return self._convolve(u, taps), start_online_conv(u, taps[0])

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self._convolve(u, self._taps(longest(u, cu_seqlens)), cu_seqlens)

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        kernel, *reverse = self._taps(shards.longest)
        return divided_long_conv(u, kernel, shards, reverse_kernel=reverse[0] if reverse else None, skip=self.D)

    def _convolve(self, u: torch.Tensor, taps: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        reverse_kernel = taps[1] if self.bidirectional else None
        return long_conv(u, taps[0], reverse_kernel=reverse_kernel, skip=self.D, cu_seqlens=cu_seqlens)


class ShortLongState(NamedTuple):
    """State of a short-long convolution: the last inputs `(B, J - 1, H)` and the long convolution's state."""

    short: torch.Tensor
    long: ConvState


class ShortLongConv(LongConv):
    """CHELA's short-long convolution: parallel short convolutions, SiLU, and a long convolution (CHELA, eq. 8).

    a = SiLU(sum_i (s_i * u + b_i)),  y = k * a + D a,  per channel.

    The short convolutions are linear, so they run as one with the sum of their taps, also in training (structural
    reparameterisation; CHELA, section 4.2). With `branch_norm`, which needs batch statistics of each branch, they do
    so only in evaluation.

    Args:
        hidden_size: Channels H.
        kernel_size: L, taps of the long convolution in tokens.
        short_kernel_sizes: J of each short convolution, odd if bidirectional.
        short_bias: Whether each short convolution has a bias.
        branch_norm: Whether a batch norm follows each short convolution.
        **options: The other arguments of `LongConv`.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        *,
        short_kernel_sizes: Sequence[int] = (3, 9),
        short_bias: bool = True,
        branch_norm: bool = False,
        **options: Any,
    ):
        check_short_kernel_sizes(short_kernel_sizes, bidirectional=options.get("bidirectional", False))
        # the base's constructor reads them when it declares the tensors
        self.short_kernel_sizes, self.short_bias = tuple(short_kernel_sizes), short_bias
        branches = [f"short_{kind}_{i}" for i in range(len(short_kernel_sizes)) for kind in ("kernel", "bias")]
        self.TRAINED = {"none": (*LongConv.TRAINED["none"], *branches)}  # type: ignore[misc]
        self.fused = False
        super().__init__(hidden_size, kernel_size, **options)
        self.short_norms = None
        if branch_norm:
            self.short_norms = nn.ModuleList(BatchNorm(hidden_size) for _ in short_kernel_sizes)

    def _shapes(self, use_D: bool) -> dict[str, tuple[int, ...] | None]:
        shapes = super()._shapes(use_D)
        for i, size in enumerate(self.short_kernel_sizes):
            shapes[f"short_kernel_{i}"] = (self.hidden_size, size)
            shapes[f"short_bias_{i}"] = (self.hidden_size,) if self.short_bias else None
        return shapes

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise short taps uniform as in torch's convolutions, and their biases zero."""
        if name.startswith("short_kernel"):
            bound = tensor.shape[1] ** -0.5
            nn.init.uniform_(tensor, -bound, bound)
        elif name.startswith("short_bias"):
            nn.init.zeros_(tensor)
        else:
            super()._initialize(name, tensor)

    def _check_state(self, state: Any, batch: int) -> None:
        if not isinstance(state, ShortLongState):
            raise ValueError(f"state must be a ShortLongState, as returned; got {type(state).__name__}")

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{super().extra_repr()}, short_kernel_sizes={self.short_kernel_sizes}, fused={self.fused}"

    def fuse_short_convs(self) -> None:
        """Cache the sum of the branches until the layer trains; the state dict does not change.

        Raises:
            ValueError: The layer is in training mode.
        """
        self.check_not_training()
        self.fused = True

    def check_not_training(self) -> None:
        """Raise ValueError in training mode."""
        if self.training:
            raise ValueError("short convolutions can be fused in evaluation mode only: call eval() first")

    def unfuse_short_convs(self) -> None:
        """Undo `fuse_short_convs`."""
        self.fused = False
        self.clear_cache()

    def merge_branches(self) -> None:
        """Permanently replace the branches by one short convolution with as many taps as the longest branch.

        Raises:
            ValueError: The layer is in training mode.
        """
        self.check_not_training()
        trained = any(x.requires_grad for branch in self._branches() for x in branch if x is not None)
        with torch.no_grad():
            kernel, bias = self._merged()
        for i in range(len(self.short_kernel_sizes)):
            delattr(self, f"short_kernel_{i}")
            delattr(self, f"short_bias_{i}")
        self.short_kernel_sizes, self.short_bias, self.short_norms = (kernel.shape[1],), bias is not None, None
        self.TRAINED = {"none": (*LongConv.TRAINED["none"], "short_kernel_0", "short_bias_0")}  # type: ignore[misc]
        self._names = self.TRAINED["none"]
        self.short_kernel_0 = nn.Parameter(kernel.clone(), requires_grad=trained)
        self.register_parameter("short_bias_0", None if bias is None else nn.Parameter(bias.clone(), trained))
        self.unfuse_short_convs()

    def train(self, mode: bool = True) -> Self:
        """Set the mode; training unfuses."""
        super().train(mode)
        if mode:
            self.unfuse_short_convs()
        return self

    def _branches(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        count = len(self.short_kernel_sizes)
        return [(getattr(self, f"short_kernel_{i}"), getattr(self, f"short_bias_{i}")) for i in range(count)]

    def _merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return taps and bias of the sum of the branches."""
        kernels: list[torch.Tensor] = []
        total: torch.Tensor | None = None
        for i, (kernel, bias) in enumerate(self._branches()):
            if self.short_norms is not None:
                norm = self.short_norms[i]
                assert isinstance(norm, BatchNorm)
                scale, shift = norm.scale_and_shift()
                kernel, bias = kernel * scale[:, None], shift if bias is None else bias * scale + shift
            kernels.append(kernel)
            if bias is not None:  # not a sum over a stack, whose gradients would share memory
                total = bias if total is None else total + bias
        return merge_kernels(kernels, causal=not self.bidirectional), total

    def _short_filter(self, continues: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `_merged`, cached between calls if fused, and otherwise between those that continue a sequence."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not (self.fused or continues):
            return self._merged()
        norms = [] if self.short_norms is None else [*self.short_norms.parameters(), *self.short_norms.buffers()]
        if not self.fused:
            return self._for_tokens("short", self._merged, *norms)
        tensors = [x for branch in self._branches() for x in branch if x is not None]
        self._kept = keep(self._kept, [*tensors, *norms], self._merged)
        return self._kept[2]

    def _run_masked(
        self, u: torch.Tensor, kept: torch.Tensor | None, state: Any, return_state: bool
    ) -> tuple[torch.Tensor, Any]:
        a, after = self._short_conv(u, kept, None if state is None else state.short)
        # a bias gives padding a value, which must stay zero
        a = a if kept is None else a.masked_fill(~kept[..., None], 0)
        y, long_state = self._run(a, None if state is None else state.long, return_state)
        return y, ShortLongState(after, long_state) if return_state and after is not None else None

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return super()._run_packed(self._short_conv(u, None, None, cu_seqlens)[0], cu_seqlens)

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        a, _ = self._short_conv(u, kept, None, shards=shards)
        return super()._run_divided(a if kept is None else a.masked_fill(~kept[..., None], 0), kept, shards)

    def _short_conv(
        self,
        u: torch.Tensor,
        kept: torch.Tensor | None,
        state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the activated sum of the branches, and the next state."""
        causal = not self.bidirectional

        def convolve(kernel: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Any:
            if shards is not None:
                return divided_short_conv(u, kernel, shards, bias, causal=causal, activation=activation), None
            options: Any = {"causal": causal, "state": state, "cu_seqlens": cu_seqlens}
            return short_conv(u, kernel, bias, activation=activation, **options)

        if not self.training or self.short_norms is None:
            return convolve(*self._short_filter(state is not None), "silu")
        # each branch is normalised by its own batch statistics
        outputs, longest = [], max(self.short_kernel_sizes)
        for norm, (kernel, bias) in zip(self.short_norms, self._branches(), strict=True):
            kernel = merge_kernels([kernel, kernel.new_zeros(self.hidden_size, longest)], causal=causal)
            y, after = convolve(kernel, bias, None)
            outputs.append(norm(y, kept, shards))
        return F.silu(torch.stack(outputs).sum(0)), after


def check_short_kernel_sizes(sizes: Sequence[int], *, bidirectional: bool) -> None:
    """Raise ValueError unless short convolutions can have these sizes."""
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"short_kernel_sizes must be one or more positive integers; got {list(sizes)}")
    if bidirectional and any(size % 2 == 0 for size in sizes):
        raise ValueError(
            f"short_kernel_sizes must be odd for a bidirectional model, which centres them; got {list(sizes)}"
        )


class DampedEMA(StateSpaceLayer):
    """Mega's multi-dimensional damped exponential moving average (Ma et al. 2022, section 3.1).

    h[t] = q h[t-1] + p β u[t],  q = 1 - p α,  y[t] = sum_n η h[t] / sqrt(N) + ω u[t],  with N numbers h per channel,
    p and α between 0 and 1. In O(T log T) as a convolution, O(N) per decoded token.

    Bidirectional: a second average reads the future, from the next token on, as in `S4`.

    Args:
        hidden_size: Channels H.
        state_size: N.
        bidirectional: Whether to also read the future.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        The published code applies SiLU after the layer, and counts the current token in both directions.
    """

    TRAINED: ClassVar = {"none": ("p_logit", "alpha_logit", "beta", "eta", "omega"), "ab_dt": ("eta", "omega")}

    p_logit: torch.Tensor
    alpha_logit: torch.Tensor
    beta: torch.Tensor
    eta: torch.Tensor
    omega: torch.Tensor

    def __init__(self, hidden_size: int, state_size: int = 16, *, bidirectional: bool = False):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=None, freeze="none")
        check_positive(state_size=state_size)
        self.state_size = state_size
        shape = (2 if bidirectional else 1, hidden_size, state_size)
        self._declare({**dict.fromkeys(self.TRAINED["none"][:4], shape), "omega": (hidden_size,)})
        self.reset_parameters()

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return `(B, H, N)`."""
        return batch, self.hidden_size, self.state_size

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise as Mega: logits normal with deviation 0.2, β alternating near 1 and -1, η and ω normal."""
        if name in ("eta", "omega"):
            nn.init.normal_(tensor)
        elif name == "beta":
            nn.init.normal_(tensor, std=0.02)
            tensor.add_(1 - 2 * (torch.arange(self.state_size, device=tensor.device) % 2).to(tensor.dtype))
        else:
            nn.init.normal_(tensor, std=0.2)

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{self.hidden_size}, state_size={self.state_size}, bidirectional={self.bidirectional}"

    def _system(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log q, p β and η / sqrt(N), each `(Z, H, N)` in float64."""
        p, alpha = self.p_logit.double().sigmoid(), self.alpha_logit.double().sigmoid()
        return torch.log1p(-p * alpha), p * self.beta.double(), self.eta.double() / math.sqrt(self.state_size)

    def _run(self, u: torch.Tensor, state: Any, return_state: bool) -> tuple[torch.Tensor, Any]:
        wide = torch.promote_types(compute_dtype(u), self.eta.dtype)
        if u.shape[1] == 1 and not self.bidirectional:
            decay, gain, weight = (
                self._token_constants(wide)
                if state is None
                else self._for_tokens(f"constants in {wide}", lambda: self._token_constants(wide))
            )
            x = u[:, 0].to(wide)
            h = gain * x[..., None]
            if state is not None:
                h = h + decay * state.to(wide)
            y = (weight * h).sum(-1) + self.omega.to(wide) * x
            return y[:, None].to(u.dtype), h
        log_q, gain, weight = self._system()
        y = self._convolve(u.to(wide), (log_q, gain, weight))
        if not return_state and state is None:
            return y.to(u.dtype), None
        # real modes count as half of a conjugate pair, hence the factor 1/2 in C
        step = S4DStep(log_q[0].exp().to(torch.complex128), gain[0].to(torch.complex128))
        powers = s4d_block_powers(step, wide)
        before = None if state is None else torch.complex(state.to(wide), torch.zeros_like(state, dtype=wide))
        if before is not None:
            C = (weight[:1] / 2).to(powers.dtype)
            y = y + s4d_state_response(before, u.shape[1], C, powers)[:, 0]
        step = S4DStep(*(x.to(powers.dtype) for x in step))
        return y.to(u.dtype), s4d_final_state(u, step, powers, before).real

    def _token_constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return q, p β and η / sqrt(N) of the first direction, each `(H, N)`."""
        log_q, gain, weight = self._system()
        return log_q[0].exp().to(dtype), gain[0].to(dtype), weight[0].to(dtype)

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(compute_dtype(u), self.eta.dtype)
        return self._convolve(u.to(wide), self._system(), cu_seqlens).to(u.dtype)

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        system, wide = self._system(), torch.promote_types(compute_dtype(u), self.eta.dtype)

        def convolve(x: torch.Tensor, at: slice, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
            return self._convolve(x, tuple(tensor[:, at] for tensor in system), cu_seqlens, self.omega[at])

        return by_channels(shards, convolve, u.to(wide), *system, self.omega).to(u.dtype)

    def _convolve(
        self,
        u: torch.Tensor,
        system: tuple[torch.Tensor, ...],
        cu_seqlens: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        log_q, gain, weight = system
        skip = self.omega if skip is None else skip
        length = longest(u, cu_seqlens)
        taps = [self._taps(*direction, length) for direction in zip(log_q, gain, weight, strict=True)]
        reverse_kernel = taps[1] if self.bidirectional else None
        return long_conv(u, taps[0], reverse_kernel=reverse_kernel, skip=skip, cu_seqlens=cu_seqlens)

    def _taps(self, log_q: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, length: int) -> torch.Tensor:
        """Return one direction's impulse response `(H, length)` from S4D's kernel; B undoes its discretisation."""
        if exports_to_onnx():
            lag = torch.arange(length, dtype=log_q.dtype, device=log_q.device)
            return ((weight * gain)[:, None] @ (log_q[..., None] * lag).exp())[:, 0].to(self.eta.dtype)
        w = log_q.to(torch.complex128)
        B = (gain * log_q / torch.expm1(log_q)).to(w.dtype)
        dt = log_q.new_ones(len(log_q))
        return s4d_kernel((weight[None] / 2).to(w.dtype), B, w, dt, length)[0].to(self.eta.dtype)
