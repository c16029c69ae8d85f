"""S4D as a layer: S4 with a diagonal state matrix, and two simpler ways to initialise it.

B batch · T length · H hidden size · S copies of (A, B) · N state size · M = N/2 modes
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from ..kernels.ssm_kernel import DISCRETIZATIONS, S4DCache, S4DSystem, S4DTensors, dplr_legs
from .state_space import StateSpaceLayer, check_choice, check_positive

INITS = ("lin", "inv", "legs")


class S4D(StateSpaceLayer):
    """Diagonal state space model, one independent system per channel (Gu et al. 2022, S4D).

    x[t] = Abar x[t-1] + Bbar u[t],  y[t] = 2 Re C x[t] + D u[t],  per channel, in O(T log T) as a convolution and O(N)
    per decoded token. Works at any length: nothing depends on the lengths seen in training.

    Bidirectional: y[t] = sum_{j>=0} k0[j] u[t-j] + sum_{j>=0} k1[j] u[t+1+j] + D u[t], as in `S4`.

    As long as nothing is trained, kernels and spectra are kept between calls.

    Args:
        hidden_size: Channels H.
        state_size: N, even.
        init: Imaginary parts of the eigenvalues for n = 0 to M - 1, beside real parts of -1/2: ``"lin"``, pi n;
            ``"inv"``, (N / pi) (N / (2n + 1) - 1); ``"legs"``, those of HiPPO-LegS without its low-rank term.
        discretization: ``"zoh"`` or ``"bilinear"``.
        bidirectional: Whether a second kernel reads the future.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        num_copies: Copies S of (A, B), a divisor of H; channel c reads copy ``c % S``. When None, 1 where A, B and the
            step are frozen (equal copies would compute the same function) and H where they are trained.
        max_length: Taps of the kernel in tokens; unlimited when None.
        use_D: Whether there is a skip connection D.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection behind the convolution, as in S4's own layer.
        freeze: ``"all"``, ``"ab_dt"`` (train C and D only) or ``"none"``.

    Raises:
        ValueError: An argument breaks its rule; the message names it, its value and the rule.

    Note:
        With `max_length`, only the convolution is cut off, as in `S4`. Under torch.compile nothing is kept: the kernel
        is computed in every call.
    """

    TRAINED: ClassVar = {
        "all": (),
        "ab_dt": ("C", "D"),
        "none": ("C", "B", "log_A_real", "A_imag", "log_dt", "D"),
    }

    C: torch.Tensor
    B: torch.Tensor
    log_A_real: torch.Tensor
    A_imag: torch.Tensor
    log_dt: torch.Tensor
    D: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 64,
        *,
        init: str = "lin",
        discretization: str = "zoh",
        bidirectional: bool = False,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        num_copies: int | None = None,
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
        check_choice("init", init, INITS)
        check_choice("discretization", discretization, DISCRETIZATIONS)
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be positive and at most dt_max; got {dt_min} and {dt_max}")
        if num_copies < 1 or hidden_size % num_copies:
            raise ValueError(f"num_copies must be a positive divisor of hidden_size {hidden_size}; got {num_copies}")
        check_positive(max_length=max_length)
        self.state_size, self.num_copies, self.max_length = state_size, num_copies, max_length
        self.init, self.discretization, self.dt_min, self.dt_max = init, discretization, dt_min, dt_max

        modes = state_size // 2
        self._declare(
            {
                "C": (2 if bidirectional else 1, hidden_size, modes, 2),
                "B": (1, num_copies, modes, 2),
                "log_A_real": (num_copies, modes),
                "A_imag": (num_copies, modes),
                "log_dt": (hidden_size,),
                "D": (hidden_size,) if use_D else None,
            }
        )
        self._cache = S4DCache()
        self.reset_parameters()

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """`(B, H, M, 2)`, real and imaginary parts last."""
        return batch, self.hidden_size, self.state_size // 2, 2

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """C complex normal, D normal, steps uniform in their logarithm; B is 1, or half of HiPPO-LegS's."""
        if name == "C":
            nn.init.normal_(tensor, std=math.sqrt(0.5))
        elif name == "D":
            nn.init.normal_(tensor)
        elif name == "log_dt":
            nn.init.uniform_(tensor, math.log(self.dt_min), math.log(self.dt_max))
        elif name == "log_A_real":
            nn.init.constant_(tensor, math.log(0.5))
        elif name == "A_imag":
            tensor.copy_(self._frequencies())
        elif self.init == "legs":
            tensor.copy_(torch.view_as_real(dplr_legs(self.state_size)[2] / 2))
        else:
            tensor.copy_(torch.tensor([1.0, 0.0], dtype=tensor.dtype))

    def _frequencies(self) -> torch.Tensor:
        """Initial imaginary parts of the eigenvalues, `(M,)`."""
        if self.init == "legs":
            return dplr_legs(self.state_size)[0].imag
        order = torch.arange(self.state_size // 2, dtype=torch.float64, device="cpu")
        if self.init == "lin":
            return math.pi * order
        return self.state_size / math.pi * (self.state_size / (2 * order + 1) - 1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "S4D":
        self.clear_cache()
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> "S4D":
        """Set the mode; constants kept during evaluation are dropped when training starts again."""
        if mode and not self.training:
            self.clear_cache()
        return super().train(mode)

    def clear_cache(self) -> None:
        """Drop kept kernels and spectra; only needed after an edit through ``.data``, which nothing can see."""
        self._cache.clear()

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return (
            f"{self.hidden_size}, state_size={self.state_size}, init={self.init!r}, "
            f"discretization={self.discretization!r}, bidirectional={self.bidirectional}, "
            f"num_copies={self.num_copies}, max_length={self.max_length}, freeze={self.freeze!r}"
        )

    def _run(
        self, u: torch.Tensor, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        system = self._system()
        if state is None and not return_state:
            return system.convolve(u, self.D, self.max_length), None
        return system.advance(u, state, self.D, self.max_length)

    def _system(self) -> S4DSystem:
        """The discretised system, kept while no optimizer may change it in ways that no version counter shows."""
        tensors = S4DTensors(self.C, self.B, self.log_A_real, self.A_imag, self.log_dt)
        trained = any(tensor.requires_grad for _, tensor in self.own_tensors())
        if torch.compiler.is_compiling() or (trained and (self.training or torch.is_grad_enabled())):
            return S4DSystem(tensors, self.discretization, reuse=False)
        return self._cache.system(tensors, self.discretization)
