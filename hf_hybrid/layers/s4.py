"""S4 as a layer: a linear state space model over the sequence, one independent system per channel.

B batch · T length · H hidden size · S copies of (A, B) · N state size · M = N/2 modes · C output filters
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from ..context_parallel import Shards, by_channels
from ..kernels.checks import check_positive
from ..kernels.dispatch import exports_to_onnx
from ..kernels.long_conv import filter_bank_conv, long_conv, window_ends_conv
from ..kernels.precision import compute_dtype
from ..kernels.ssm_kernel import dplr_legs, ssm_taps
from .s4_system import S4Cache, S4System, S4Tensors, frozen_s4_advance, frozen_s4_conv, of_channels
from .state_space import StateSpaceLayer, each_row

FEW_TOKENS = 32
"""Tokens after a state up to which a trained system advances by each: more cost more than its powers, made anew."""


class S4Base(StateSpaceLayer):
    """Base of S4 and S4D; see `S4` for the arguments.

    A subclass defines the initial modes; its dynamics have a low-rank term if `TRAINED` lists P.
    """

    discretization: str = "bilinear"

    C: torch.Tensor
    B: torch.Tensor
    P: torch.Tensor | None
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
        num_filters: int = 1,
        max_length: int | None = None,
        use_D: bool = True,
        postact: str | None = None,
        freeze: str = "all",
    ):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=postact, freeze=freeze)
        if num_copies is None:
            num_copies = hidden_size if freeze == "none" else 1
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be a positive even number; got {state_size}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be positive and at most dt_max; got {dt_min} and {dt_max}")
        if num_copies < 1 or hidden_size % num_copies:
            raise ValueError(f"num_copies must be a positive divisor of hidden_size {hidden_size}; got {num_copies}")
        check_positive(num_filters=num_filters, max_length=max_length)
        if num_filters > 1 and "P" not in self.TRAINED["none"]:
            raise ValueError(f"num_filters must be 1 for {type(self).__name__}; got {num_filters}")
        if num_filters > 1 and (bidirectional or max_length is not None or postact is not None):
            raise ValueError(
                f"num_filters must be 1 with bidirectional, max_length or postact; got {num_filters} with "
                f"{bidirectional}, {max_length} and {postact!r}"
            )
        self.num_filters = num_filters
        self.state_size, self.num_copies, self.max_length = state_size, num_copies, max_length
        self.dt_min, self.dt_max = dt_min, dt_max

        modes, has_low_rank = state_size // 2, "P" in self.TRAINED["none"]
        self._declare(
            {
                "C": (2 if bidirectional else num_filters, hidden_size, modes, 2),
                "B": (1, num_copies, modes, 2),
                "P": (1, num_copies, modes, 2) if has_low_rank else None,
                "log_A_real": (num_copies, modes),
                "A_imag": (num_copies, modes),
                "log_dt": (hidden_size,),
                "D": ((hidden_size,) if num_filters == 1 else (num_filters, hidden_size)) if use_D else None,
            }
        )
        self._cache = S4Cache()
        self.reset_parameters()

    def _initial_modes(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return w, P (None without a low-rank term) and B, each `(M,)`, complex."""
        raise NotImplementedError

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return `(B, H, M, 2)`, real and imaginary parts last."""
        return batch, self.hidden_size, self.state_size // 2, 2

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise C complex normal, D normal, log dt uniform, and the modes by `_initial_modes`."""
        if name == "C":
            nn.init.normal_(tensor, std=math.sqrt(0.5))
        elif name == "D":
            nn.init.normal_(tensor)
        elif name == "log_dt":
            nn.init.uniform_(tensor, math.log(self.dt_min), math.log(self.dt_max))
        else:
            w, P, B = self._initial_modes()
            if name == "log_A_real":
                tensor.copy_((-w.real).log())
            elif name == "A_imag":
                tensor.copy_(w.imag)
            else:
                vector = B if name == "B" else P
                assert vector is not None
                tensor.copy_(torch.view_as_real(vector))

    def clear_cache(self) -> None:
        """Drop cached kernels and spectra; needed only after edits through ``.data``, which leave no trace."""
        super().clear_cache()
        self._cache.clear()

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return (
            f"{self.hidden_size}, state_size={self.state_size}, bidirectional={self.bidirectional}, "
            f"num_copies={self.num_copies}, max_length={self.max_length}, freeze={self.freeze!r}"
        )

    def _run(
        self, u: torch.Tensor, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if exports_to_onnx():
            return self._run_exported(u), None
        recorded, compiled = torch.is_grad_enabled(), torch.compiler.is_compiling()
        continued = state is not None and not recorded
        if continued and not compiled and self._goes_by_tokens(u.shape[1]):
            return self._run_tokens(u, state)
        if self.num_filters > 1:
            return self._system().advance_all(u, state, self.D, return_state)
        tensors = self._tensors()
        arguments = *tensors, self.D, self.discretization, self.max_length
        convolution = state is None and not return_state
        # in a graph, the op of frozen systems keeps the constants from the tokens before
        trained = not (continued and compiled) and self._is_trained()
        # their ops hide from torch.export how a kernel is made, which has no symbolic length
        trained = trained and (recorded or not torch.compiler.is_exporting())
        if convolution and not trained:
            return frozen_s4_conv(u, *arguments, False, self._cache.handle), None
        differentiable = recorded and (u.requires_grad or (state is not None and state.requires_grad))
        if not trained and not differentiable:
            return frozen_s4_advance(u, state, *arguments, self._cache.handle)
        system = self._kept_system(trained)
        if convolution:
            return system.convolve(u, self.D, self.max_length), None
        return system.advance(u, state, self.D, self.max_length)

    def _goes_by_tokens(self, length: int) -> bool:
        return length == 1 or (length <= FEW_TOKENS and self.max_length is None and self._requires_grad())

    def _run_tokens(self, u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Continue token by token without gradients, with constants from the tokens before."""
        system = self._for_tokens("system", self._system) if self._requires_grad() else self._kept_system(False)
        outputs = []
        for token in u.split(1, dim=1):
            if self.num_filters > 1:
                y, state = system.advance_all(token, state, self.D, True)
            else:
                y, state = system.advance(token, state, self.D, self.max_length)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state

    def _run_exported(self, u: torch.Tensor) -> torch.Tensor:
        """Convolve with plain operations on real numbers, for ONNX."""
        kernel = self._exported_kernel(u)
        if self.num_filters > 1:
            return filter_bank_conv(u, kernel, skip=self.D)
        return long_conv(u, kernel[0], reverse_kernel=kernel[1] if self.bidirectional else None, skip=self.D)

    def _exported_kernel(self, u: torch.Tensor) -> torch.Tensor:
        C, B, P, log_A_real, A_imag, log_dt = self._tensors()
        w = torch.stack([-log_A_real.double().exp(), A_imag.double()], dim=-1)
        length = u.shape[1] if self.max_length is None else min(u.shape[1], self.max_length)
        low_rank = None if P is None else P[0]
        taps = ssm_taps(C, B[0], low_rank, w, log_dt.double().exp(), length, self.discretization)
        return taps.to(torch.promote_types(compute_dtype(u), C.dtype))

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        if self.num_filters > 1:
            return super()._run_packed(u, cu_seqlens)
        return self._kept_system(self._is_trained()).convolve(u, self.D, self.max_length, cu_seqlens=cu_seqlens)

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        if self.num_filters > 1:
            return self._run_bank_divided(u, shards)
        trained = self._is_trained()
        # whichever sends less: states, which do not know of a largest length, or tokens for channels
        complete = self.max_length is None or self.max_length >= shards.longest
        if complete and (shards.size - 1) * self.state_size < 2 * max(shards.lengths):
            return self._kept_system(trained).divide(u, self.D, shards)

        def convolve(x: torch.Tensor, channels: slice, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
            system = self._kept_system(trained, channels)
            skip = None if self.D is None else self.D[channels]
            return system.convolve(x, skip, self.max_length, cu_seqlens=cu_seqlens)

        return by_channels(shards, convolve, u, *self._tensors(), self.D)

    def _run_bank_divided(self, u: torch.Tensor, shards: Shards) -> torch.Tensor:
        """Return all filters' outputs at own tokens, `(C, B, T_r, H)`."""

        def convolve(x: torch.Tensor, channels: slice, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
            system = S4System(of_channels(self._tensors(), channels), self.discretization)
            skip = None if self.D is None else self.D[:, channels]
            return each_row(lambda rows: system.advance_all(rows, None, skip, False)[0], x, cu_seqlens)

        return by_channels(shards, convolve, u, *self._tensors(), self.D, num_filters=self.num_filters)

    def _kept_system(self, trained: bool, channels: slice | None = None) -> S4System:
        """Return the system, or that of some channels, from the cache if it is frozen."""
        tensors = self._tensors() if channels is None else of_channels(self._tensors(), channels)
        if trained or torch.compiler.is_compiling():  # tracers see no addresses
            return S4System(tensors, self.discretization)
        return self._cache.system(tensors, self.discretization)

    def _tensors(self) -> S4Tensors:
        return S4Tensors(self.C, self.B, self.P, self.log_A_real, self.A_imag, self.log_dt)

    def _system(self) -> S4System:
        """Build a system for this call only."""
        return S4System(self._tensors(), self.discretization)


class S4(S4Base):
    """Structured state space model with HiPPO-LegS dynamics (SPADE, section 3; Gu et al. 2022).

    x[t] = Abar x[t-1] + Bbar u[t],  y[t] = C x[t] + D u[t],  per channel, in O(T log T) as a convolution and O(N) per
    decoded token, at any length.

    Bidirectional (SPADE's encoder): y[t] = sum_{j>=0} k0[j] u[t-j] + sum_{j>=0} k1[j] u[t+1+j] + D u[t].

    With one filter and no tensor that requires a gradient, kernels and spectra are cached between calls.

    Several filters: y_c[t] = C_c x[t] + D_c u[t], outputs `(C, B, T, H)` from one state. `sample`, `follow` and `read`
    compute only selected outputs.

    Args:
        hidden_size: Channels H.
        state_size: N, even.
        bidirectional: Whether a second kernel reads the future.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        num_copies: Copies S of (A, B), a divisor of H; channel c reads copy ``c % S``. When None, 1 for frozen A, B
            and step (equal copies would compute the same function) and H for trained ones.
        num_filters: Output filters C of each channel, with as many tensors C and D.
        max_length: Taps of the kernel in tokens; unlimited when None.
        use_D: Whether to add a skip connection D.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection after the convolution, as in S4's own layer.
        freeze: ``"all"`` (SPADE), ``"ab_dt"`` (train C and D only) or ``"none"``.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        `max_length` truncates the convolution, not the state. Decoding from a state therefore agrees with the
        convolution up to `max_length` tokens.
    """

    TRAINED: ClassVar = {
        "all": (),
        "ab_dt": ("C", "D"),
        "none": ("C", "B", "P", "log_A_real", "A_imag", "log_dt", "D"),
    }

    def _initial_modes(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """HiPPO-LegS."""
        return dplr_legs(self.state_size)

    def sample(self, u: torch.Tensor, window: int) -> torch.Tensor:
        """Return all filters' outputs at the end of each full window, `(B, T // window, C, H)`, in u's dtype."""
        if exports_to_onnx():
            return window_ends_conv(u, self._exported_kernel(u), self.D, window).permute(1, 2, 0, 3)
        return self._system().sample(u, self.D, window)

    def sample_divided(self, u: torch.Tensor, window: int, shards: Shards) -> torch.Tensor:
        """Return `sample` for own tokens of a divided sequence: outputs at the ends of windows that lie in them."""
        return self._system().sample(u, self.D, window, shards)

    def follow(self, u: torch.Tensor, state: torch.Tensor | None, stops: Sequence[int]) -> list[torch.Tensor]:
        """Return the states `(B, H, M, 2)` before tokens `stops` of masked inputs `(B, T, H)`; a stop may be T."""
        return self._system().follow(u, state, stops)

    def read(self, state: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return all filters' outputs `(B, C, H)` at a token, from the state after it and its input `(B, H)`."""
        return self._system().read(state, last, self.D)
