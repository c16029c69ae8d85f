"""S4 as a layer: a linear state space model over the sequence, one independent system per channel.

B batch · T length · H hidden size · S copies of (A, B) · N state size · M = N/2 modes
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels.ssm_kernel import (
    S4Cache,
    S4System,
    S4Tensors,
    dplr_legs,
    frozen_s4_advance,
    frozen_s4_conv,
)

FREEZES = ("all", "ab_dt", "none")
POSTACTS = (None, "gelu_glu")

_TRAINED = {
    "all": (),
    "ab_dt": ("C", "D"),
    "none": ("C", "B", "P", "log_A_real", "A_imag", "log_dt", "D"),
}


def ssm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trained tensors of every S4 inside a module, which want no weight decay and their own learning rate.

    Projections around the state space model are not among them.
    """
    for child in module.modules():
        if isinstance(child, S4):
            yield from (parameter for parameter in child.parameters(recurse=False) if parameter.requires_grad)


class S4(nn.Module):
    """Structured state space model with HiPPO-LegS dynamics (SPADE, section 3; Gu et al. 2022).

    x[t] = Abar x[t-1] + Bbar u[t],  y[t] = C x[t] + D u[t],  per channel, in O(T log T) as a convolution and O(N) per
    decoded token. Works at any length: nothing depends on the lengths seen in training.

    Bidirectional (SPADE's encoder): y[t] = sum_{j>=0} k0[j] u[t-j] + sum_{j>=0} k1[j] u[t+1+j] + D u[t].

    Frozen tensors are persistent buffers, since loading a checkpoint makes every parameter trainable; names and
    shapes of the state dict do not depend on what is frozen. Kernels and spectra are kept between calls if no tensor
    requires a gradient. All tensors stay in float32 (or float64) when the model is cast to 16 bits.

    Args:
        hidden_size: Channels H.
        state_size: N, even.
        bidirectional: Whether a second kernel reads the future.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        num_copies: Copies S of (A, B), a divisor of H; channel c reads copy ``c % S``. When None, 1 where A, B and the
            step are frozen (equal copies would compute the same function) and H where they are trained.
        max_length: Taps of the kernel in tokens; unlimited when None.
        use_D: Whether there is a skip connection D.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection behind the convolution, as in S4's own layer.
        freeze: ``"all"`` (SPADE), ``"ab_dt"`` (train C and D only) or ``"none"``.

    Raises:
        ValueError: An argument breaks its rule; the message names it, its value and the rule.

    Note:
        With `max_length`, only the convolution is cut off; a state remembers everything. Decoding from a state
        therefore agrees with the convolution up to `max_length` tokens.
    """

    C: torch.Tensor
    B: torch.Tensor
    P: torch.Tensor
    log_A_real: torch.Tensor
    A_imag: torch.Tensor
    log_dt: torch.Tensor
    D: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 64,
        *,
        bidirectional: bool = False,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        num_copies: int | None = None,
        max_length: int | None = None,
        use_D: bool = True,
        postact: str | None = None,
        freeze: str = "all",
    ):
        super().__init__()
        if freeze not in FREEZES:
            raise ValueError(f"freeze must be one of {', '.join(FREEZES)}; got {freeze!r}")
        if num_copies is None:
            num_copies = hidden_size if freeze == "none" else 1
        if postact not in POSTACTS:
            raise ValueError(f"postact must be None or 'gelu_glu'; got {postact!r}")
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be a positive integer; got {hidden_size}")
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be a positive even number; got {state_size}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be positive and at most dt_max; got {dt_min} and {dt_max}")
        if num_copies < 1 or hidden_size % num_copies:
            raise ValueError(f"num_copies must be a positive divisor of hidden_size {hidden_size}; got {num_copies}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be None or a positive integer; got {max_length}")
        self.hidden_size, self.state_size, self.num_copies = hidden_size, state_size, num_copies
        self.bidirectional, self.max_length, self.freeze = bidirectional, max_length, freeze
        self.dt_min, self.dt_max = dt_min, dt_max

        modes = state_size // 2
        shapes: dict[str, tuple[int, ...]] = {
            "C": (2 if bidirectional else 1, hidden_size, modes, 2),
            "B": (1, num_copies, modes, 2),
            "P": (1, num_copies, modes, 2),
            "log_A_real": (num_copies, modes),
            "A_imag": (num_copies, modes),
            "log_dt": (hidden_size,),
        }
        if use_D:
            shapes["D"] = (hidden_size,)
        else:
            self.register_parameter("D", None)
        # a model built under a 16-bit default dtype keeps its state space model in float32
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=dtype)
            if name in _TRAINED[freeze]:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.output_linear = None if postact is None else nn.Linear(hidden_size, 2 * hidden_size)
        self._cache = S4Cache()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every tensor in place: HiPPO-LegS, C complex normal, D normal, steps uniform in their logarithm.

        Tensors marked ``_is_hf_initialized`` (loaded from a checkpoint) keep their values. The projection of
        `postact` initialises itself.
        """
        w, P, B = dplr_legs(self.state_size)
        for name, tensor in self._own_tensors():
            if getattr(tensor, "_is_hf_initialized", False) or tensor.is_meta:
                continue
            if name == "C":
                nn.init.normal_(tensor, std=math.sqrt(0.5))
            elif name == "D":
                nn.init.normal_(tensor)
            elif name == "log_dt":
                nn.init.uniform_(tensor, math.log(self.dt_min), math.log(self.dt_max))
            elif name == "log_A_real":
                tensor.copy_((-w.real).log())
            elif name == "A_imag":
                tensor.copy_(w.imag)
            else:
                tensor.copy_(torch.view_as_real(B if name == "B" else P))

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in _TRAINED["none"]:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "S4":
        if recurse:
            for child in self.children():
                child._apply(fn)

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4 <= tensor.dtype.itemsize:
                return tensor.to(moved.device)
            return moved

        self.clear_cache()
        return super()._apply(keep_precision, recurse=False)

    def clear_cache(self) -> None:
        """Drop kept kernels and spectra; only needed after an edit through ``.data``, which nothing can see."""
        self._cache.clear()

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return (
            f"{self.hidden_size}, state_size={self.state_size}, bidirectional={self.bidirectional}, "
            f"num_copies={self.num_copies}, max_length={self.max_length}, freeze={self.freeze!r}"
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        return_state: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run the state space model over a sequence.

        Args:
            hidden_states: `(B, T, H)`, any floating dtype.
            attention_mask: `(B, T)`, 1 = keep; inputs elsewhere count as zero, which makes padding exact on the left
                and, as long as no state is taken from behind it, on the right.
            state: State before the first token, `(B, H, M, 2)`; zeros when None. Causal only.
            return_state: Whether to return the state after the last token too. Causal only.

        Returns:
            `(B, T, H)` in the input's dtype, and with `return_state` the state `(B, H, M, 2)`, float32 or float64.

        Raises:
            ValueError: A shape does not fit, or a state is asked of a bidirectional layer.
        """
        u = self._check_input(hidden_states, attention_mask, state, return_state)
        if state is None and not return_state:
            y, new_state = self._convolve(u), None
        else:
            y, new_state = self._advance(u, state)
        if self.output_linear is not None:
            weight = self.output_linear.weight
            y = F.glu(self.output_linear(F.gelu(y).to(weight.dtype)), dim=-1).to(u.dtype)
        if return_state:
            assert new_state is not None
            return y, new_state
        return y

    def _check_input(
        self, u: torch.Tensor, mask: torch.Tensor | None, state: torch.Tensor | None, return_state: bool
    ) -> torch.Tensor:
        if u.dim() != 3 or u.shape[2] != self.hidden_size or u.shape[1] == 0:
            raise ValueError(f"hidden_states must be (B, T, {self.hidden_size}) with T > 0; got {tuple(u.shape)}")
        if self.bidirectional and (state is not None or return_state):
            raise ValueError("a bidirectional S4 has no state: state must be None and return_state False")
        if state is not None and state.shape != (u.shape[0], self.hidden_size, self.state_size // 2, 2):
            raise ValueError(
                f"state must be ({u.shape[0]}, {self.hidden_size}, {self.state_size // 2}, 2); "
                f"got {tuple(state.shape)}"
            )
        if mask is None:
            return u
        if mask.shape != u.shape[:2]:
            raise ValueError(
                f"attention_mask must be {tuple(u.shape[:2])} like hidden_states; got {tuple(mask.shape)}"
            )
        # not a product: a pad's NaN must not survive
        return u.masked_fill(~mask.to(torch.bool)[..., None], 0)

    def _tensors(self) -> S4Tensors:
        return S4Tensors(self.C, self.B, self.P, self.log_A_real, self.A_imag, self.log_dt)

    def _is_trained(self) -> bool:
        """Whether an optimizer may change the tensors; a fused one raises no version counter, so nothing is kept."""
        trained = any(tensor.requires_grad for _, tensor in self._own_tensors())
        if trained:
            self.clear_cache()
        return trained

    def _convolve(self, u: torch.Tensor) -> torch.Tensor:
        if self._is_trained():
            return S4System(self._tensors(), reuse=False).convolve(u, self.D, self.max_length)
        return frozen_s4_conv(u, *self._tensors(), self.D, self.max_length, False, self._cache.handle)

    def _advance(self, u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        differentiable = torch.is_grad_enabled() and (u.requires_grad or (state is not None and state.requires_grad))
        if self._is_trained() or (differentiable and torch.compiler.is_compiling()):
            return S4System(self._tensors(), reuse=False).advance(u, state, self.D, self.max_length)
        if differentiable:
            return self._cache.system(self._tensors()).advance(u, state, self.D, self.max_length)
        return frozen_s4_advance(u, state, *self._tensors(), self.D, self.max_length, self._cache.handle)
