"""S4D as a layer: S4 with a diagonal state matrix and two simpler initialisations.

B batch · T length · H hidden size · S copies of (A, B) · N state size · M = N/2 modes
"""

import math
from typing import Any, ClassVar

import torch

from ..kernels.checks import check_choice
from ..kernels.ssm_kernel import DISCRETIZATIONS, dplr_legs
from .s4 import S4Base

INITS = ("lin", "inv", "legs")


class S4D(S4Base):
    """Diagonal state space model, one independent system per channel (Gu et al. 2022, S4D).

    x[t] = Abar x[t-1] + Bbar u[t],  y[t] = 2 Re C x[t] + D u[t],  per channel, in O(T log T) as a convolution and O(N)
    per decoded token, at any length. Directions, caching and `max_length` are as in `S4`.

    Args:
        hidden_size: Channels H.
        state_size: N, even.
        init: Imaginary parts of the eigenvalues for n = 0 to M - 1; the real parts are -1/2. ``"lin"``: pi n;
            ``"inv"``: (N / pi) (N / (2n + 1) - 1); ``"legs"``: HiPPO-LegS without its low-rank term. B is 1, or half
            of HiPPO-LegS's for ``"legs"``.
        discretization: ``"zoh"`` or ``"bilinear"``.
        **options: The other arguments of `S4`.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.
    """

    TRAINED: ClassVar = {
        "all": (),
        "ab_dt": ("C", "D"),
        "none": ("C", "B", "log_A_real", "A_imag", "log_dt", "D"),
    }

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 64,
        *,
        init: str = "lin",
        discretization: str = "zoh",
        **options: Any,
    ):
        check_choice("init", init, INITS)
        check_choice("discretization", discretization, DISCRETIZATIONS)
        # the base's constructor reads them when it initialises the tensors
        self.init, self.discretization = init, discretization
        super().__init__(hidden_size, state_size, **options)

    def _initial_modes(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if self.init == "legs":
            w, _, B = dplr_legs(self.state_size)
            return w, None, B / 2
        order = torch.arange(self.state_size // 2, dtype=torch.float64, device="cpu")
        if self.init == "lin":
            frequencies = math.pi * order
        else:
            frequencies = self.state_size / math.pi * (self.state_size / (2 * order + 1) - 1)
        w = torch.complex(torch.full_like(order, -0.5), frequencies)
        return w, None, torch.ones_like(w)

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{super().extra_repr()}, init={self.init!r}, discretization={self.discretization!r}"
