"""S5 as a layer: one diagonal state space model that reads all channels at once.

B batch · T length · H hidden size · N state size · P = N/2 modes · J blocks
"""

import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from ..context_parallel import Shards
from ..context_parallel import diagonal_scan as divided_scan
from ..kernels.checks import check_choice, check_positive
from ..kernels.diagonal_scan import complex_product, diagonal_scan, scan_pairs
from ..kernels.dispatch import exports_to_onnx
from ..kernels.precision import complex_dtype, compute_dtype, full_precision
from ..kernels.ssm_kernel import DISCRETIZATIONS, diagonalize_legs, discretize, discretize_pairs
from .state_space import StateSpaceLayer

_LARGEST_REAL_PART = -1e-4


class S5(StateSpaceLayer):
    """Simplified state space layer: one system with many inputs and outputs (Smith et al. 2023).

    x[t] = diag(Abar) x[t-1] + Bbar u[t],  y[t] = 2 Re C x[t] + D u[t]      (S5, section 3)

    with one mode of each conjugate pair, by a parallel scan in O(T P H), at any length; O(P H) per decoded token.

    Bidirectional: y[t] = 2 Re (C_0 x[t] + C_1 x'[t]) + D u[t], where x' is the same recurrence from the last token to
    the first. Unlike in a bidirectional `S4`, both directions read the current token.

    Args:
        hidden_size: Channels H.
        state_size: N, a multiple of 2 J.
        blocks: J; A starts as J copies of HiPPO-LegS of size N / J, without its low-rank term.
        discretization: ``"zoh"`` or ``"bilinear"``.
        clip_eigenvalues: Whether to clip the real parts of A at -1e-4, which keeps the recurrence stable.
        bidirectional: Whether a second scan reads the future.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        use_D: Whether to add a skip connection D.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection after the layer.
        freeze: ``"all"``, ``"ab_dt"`` (train C and D only) or ``"none"``.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        S5 draws B and C as real normal matrices and rotates them into the eigenbasis. In an orthonormal basis of
        conjugate pairs this equals independent complex normal numbers, which this layer draws directly.
    """

    TRAINED: ClassVar = {
        "all": (),
        "ab_dt": ("C", "D"),
        "none": ("A", "B", "C", "log_dt", "D"),
    }

    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    log_dt: torch.Tensor
    D: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 256,
        *,
        blocks: int = 4,
        discretization: str = "zoh",
        clip_eigenvalues: bool = True,
        bidirectional: bool = False,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        use_D: bool = True,
        postact: str | None = None,
        freeze: str = "all",
    ):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=postact, freeze=freeze)
        check_positive(blocks=blocks)
        if state_size < 1 or state_size % (2 * blocks):
            raise ValueError(f"state_size must be a positive multiple of 2 * blocks = {2 * blocks}; got {state_size}")
        check_choice("discretization", discretization, DISCRETIZATIONS)
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be positive and at most dt_max; got {dt_min} and {dt_max}")
        self.state_size, self.blocks, self.discretization = state_size, blocks, discretization
        self.clip_eigenvalues, self.dt_min, self.dt_max = clip_eigenvalues, dt_min, dt_max

        modes = state_size // 2
        self._declare(
            {
                "A": (modes, 2),
                "B": (modes, hidden_size, 2),
                "C": (2 if bidirectional else 1, hidden_size, modes, 2),
                "log_dt": (modes,),
                "D": (hidden_size,) if use_D else None,
            }
        )
        self.reset_parameters()

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return `(B, P, 2)`, real and imaginary parts last."""
        return batch, self.state_size // 2, 2

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise B and C complex normal scaled by their number of inputs, D normal, log dt uniform."""
        if name == "A":
            w, _ = diagonalize_legs(self.state_size // self.blocks)
            tensor.copy_(torch.view_as_real(w).repeat(self.blocks, 1))
        elif name == "B":
            nn.init.normal_(tensor, std=math.sqrt(0.5 / self.hidden_size))
        elif name == "C":
            nn.init.normal_(tensor, std=math.sqrt(0.5 / self.state_size))
        elif name == "D":
            nn.init.normal_(tensor)
        else:
            nn.init.uniform_(tensor, math.log(self.dt_min), math.log(self.dt_max))

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return (
            f"{self.hidden_size}, state_size={self.state_size}, blocks={self.blocks}, "
            f"discretization={self.discretization!r}, clip_eigenvalues={self.clip_eigenvalues}, "
            f"bidirectional={self.bidirectional}, freeze={self.freeze!r}"
        )

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self._run(u, None, False, cu_seqlens)[0]

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        return self._run(u, None, False, shards=shards)[0]

    def _run(
        self,
        u: torch.Tensor,
        state: torch.Tensor | None,
        return_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if exports_to_onnx():
            return self._run_exported(u), None
        dtype = torch.promote_types(compute_dtype(u), self.A.dtype)
        if state is None:
            decay, inputs, *outputs = self._matrices(dtype)
        else:
            decay, inputs, *outputs = self._for_tokens(f"matrices of {dtype}", lambda: self._matrices(dtype))
        initial = None if state is None else torch.view_as_complex(state.to(dtype).contiguous())
        with full_precision(u.device):
            x = u.to(dtype)
            # real and imaginary parts side by side, so that real products read and write complex states
            drive = torch.view_as_complex(F.linear(x, inputs).unflatten(-1, (-1, 2)))
            last = None
            if shards is not None:
                states = divided_scan(decay, drive, shards)
            else:
                states, last = diagonal_scan(decay, drive, initial_state=initial, cu_seqlens=cu_seqlens)
            y = F.linear(torch.view_as_real(states).flatten(-2), outputs[0])
            if self.bidirectional:
                if shards is not None:
                    states = divided_scan(decay, drive, shards, reverse=True)
                else:
                    states, _ = diagonal_scan(decay, drive, reverse=True, cu_seqlens=cu_seqlens)
                y = y + F.linear(torch.view_as_real(states).flatten(-2), outputs[1])
            if self.D is not None:
                y = y + self.D.to(dtype) * x
        return y.to(u.dtype), torch.view_as_real(last) if last is not None and return_state else None

    def _run_exported(self, u: torch.Tensor) -> torch.Tensor:
        """Compute the outputs with plain operations on real numbers, for ONNX."""
        x = u.to(torch.promote_types(compute_dtype(u), self.A.dtype))
        dt = self.log_dt.double().exp()[:, None]
        decay, gain = (z.to(x.dtype) for z in discretize_pairs(self._eigenvalues(), dt, self.discretization))
        Bbar = complex_product(gain[:, None], self.B.to(x.dtype))
        drive = F.linear(x, Bbar.transpose(1, 2).flatten(0, 1)).unflatten(-1, (-1, 2))
        y = F.linear(scan_pairs(decay, drive).flatten(-2), self._outputs(0, x.dtype))
        if self.bidirectional:
            y = y + F.linear(scan_pairs(decay, drive, reverse=True).flatten(-2), self._outputs(1, x.dtype))
        return (y if self.D is None else y + self.D.to(x.dtype) * x).to(u.dtype)

    def _eigenvalues(self) -> torch.Tensor:
        """A, `(P, 2)`, float64."""
        A = self.A.double()
        if self.clip_eigenvalues:
            A = torch.stack([A[:, 0].clamp(max=_LARGEST_REAL_PART), A[:, 1]], dim=-1)
        return A

    def _discretized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Abar and Bbar / B, `(P,)`, complex128."""
        return discretize(torch.view_as_complex(self._eigenvalues()), self.log_dt.double().exp(), self.discretization)

    def _matrices(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Abar `(P,)`, complex; Bbar over real coordinates, `(2 P, H)`; and `_outputs` of each direction."""
        decay, gain = (x.to(complex_dtype(dtype)) for x in self._discretized())
        Bbar = torch.view_as_real(gain[:, None] * torch.view_as_complex(self.B.to(dtype)))
        outputs = (self._outputs(direction, dtype) for direction in range(2 if self.bidirectional else 1))
        return decay, Bbar.transpose(1, 2).flatten(0, 1), *outputs

    def _outputs(self, direction: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of 2 Re C x over real coordinates of states, `(H, 2 P)`."""
        C = self.C[direction].to(dtype)
        return torch.stack([2 * C[..., 0], -2 * C[..., 1]], dim=-1).flatten(-2)
