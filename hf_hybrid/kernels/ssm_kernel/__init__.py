"""S4: a state space model with diagonal plus low-rank dynamics, as a convolution kernel and as a recurrence.

x[t] = Abar x[t-1] + Bbar u[t],  y[t] = C x[t],  hence y = K * u with K[l] = C Abar^l Bbar      (SPADE, eqs. 3 and 4)

`s4_kernel` computes K for training and prompts, `frozen_s4_kernel` once for many calls. `s4_step` is one token of the
recurrence in O(N), `ssm_step` one token of either model with all outputs (a single kernel on a GPU). `s4_final_state`
and `s4_state_response` pass a state between parts of a sequence: ``f(a ++ b) == f(b | state after f(a))``.
`s4_window_states` returns the state at the end of every window, which `s4_output` reads. S4D, with diagonal dynamics,
has functions under its own name.

B batch · T length · H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps
"""

from torch import Tensor

from ..checks import check_choice, check_positive
from .discrete import (
    S4Blocks,
    S4Step,
    check_system,
    s4_block_constants,
    s4_final_state,
    s4_output,
    s4_state_response,
    s4_step,
    s4_step_constants,
    s4_step_states,
)
from .exported import discretize_pairs, ssm_taps
from .hippo import diagonalize_legs, dplr_legs, hippo_legs
from .s4d import (
    DISCRETIZATIONS,
    S4DStep,
    discretize,
    s4d_block_powers,
    s4d_final_state,
    s4d_kernel,
    s4d_state_response,
    s4d_step,
    s4d_step_constants,
)
from .step import ssm_step
from .taps import ALGORITHMS, choose_algorithm, taps
from .windows import s4_window_states

__all__ = [
    "DISCRETIZATIONS",
    "S4Blocks",
    "S4DStep",
    "S4Step",
    "diagonalize_legs",
    "discretize",
    "discretize_pairs",
    "dplr_legs",
    "frozen_s4_kernel",
    "hippo_legs",
    "s4_block_constants",
    "s4_final_state",
    "s4_kernel",
    "s4_output",
    "s4_state_response",
    "s4_step",
    "s4_step_constants",
    "s4_step_states",
    "s4_window_states",
    "s4d_block_powers",
    "s4d_final_state",
    "s4d_kernel",
    "s4d_state_response",
    "s4d_step",
    "s4d_step_constants",
    "ssm_step",
    "ssm_taps",
]


def s4_kernel(
    C: Tensor,
    B: Tensor,
    P: Tensor,
    w: Tensor,
    dt: Tensor,
    length: int,
    *,
    algorithm: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the first taps of S4's convolution kernel.

    K[l] = C Abar^l Bbar = 2 Re sum over one of each conjugate pair,  A = diag(w) - P P^H, bilinear transform
    (SPADE, eqs. 3 to 5)

    Torch computes in float64 and rounds the result once. Triton computes the sums of ``"cauchy"``, prepared in
    float64, in float32, with errors of about 1e-6 of a channel's largest tap. Extra memory stays below a few hundred
    MiB. The backward of ``"two_level"`` uses C's precision and stores O(N sqrt(L)) numbers per channel and filter;
    that of ``"cauchy"`` uses the forward's precision, stores O(N) and recomputes the sums.

    Args:
        C: Output filters, `(C, H, M)`, complex.
        B: `(S, M)`, complex; channel c reads copy ``c % S``.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`, positive.
        length: Number of taps L in tokens, positive.
        algorithm: ``"two_level"`` (products of powers of Abar) or ``"cauchy"`` (S4's generating function); they agree
            to rounding. When None, ``"cauchy"`` on Triton, which has no other, and ``"two_level"`` elsewhere.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(C, H, L)`, real, in C's precision. Differentiable in every tensor, once.

    Raises:
        ValueError: A shape does not fit, the length is not positive or the algorithm unknown.
    """
    check_system(C, B, P, w, dt)
    check_positive(length=length)
    if algorithm is not None:
        check_choice("algorithm", algorithm, ALGORITHMS)
    algorithm = choose_algorithm(algorithm, backend, C.device, C.real.dtype)
    return taps(C, B, P, w, dt, length, algorithm, backend)


def frozen_s4_kernel(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, length: int) -> Tensor:
    """Compute `s4_kernel` in torch, on any device: a kernel that is not trained serves many calls."""
    check_system(C, B, P, w, dt)
    check_positive(length=length)
    return taps(C, B, P, w, dt, length, "two_level", "torch")
