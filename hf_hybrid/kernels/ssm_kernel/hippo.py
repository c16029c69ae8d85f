"""HiPPO-LegS, S4's initial state matrix, and its normal plus low-rank form.

N state size · N/2 modes, one of each conjugate pair
"""

import torch
from torch import Tensor


def hippo_legs(state_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return HiPPO-LegS as a normal matrix minus a rank-one term.

    P_i = sqrt(i + 1/2),  B_i = sqrt(2i + 1),
    S_ij = -P_i P_j (i > j), -1/2 (i = j), P_i P_j (i < j),  A = S - P P^T          (SPADE, eq. 5)

    Args:
        state_size: N.
        dtype: Floating dtype of the results.

    Returns:
        A `(N, N)`, B `(N,)`, P `(N,)` and S `(N, N)`, on the CPU.
    """
    order = torch.arange(state_size, dtype=dtype, device="cpu")
    P = torch.sqrt(order + 0.5)
    B = torch.sqrt(2 * order + 1)
    upper = torch.outer(P, P).triu(1)
    S = upper - upper.mT
    S.diagonal().fill_(-0.5)
    return S - torch.outer(P, P), B, P, S


def diagonalize_legs(state_size: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of the normal part S of HiPPO-LegS.

    S + I/2 is skew, so ``-i (S + I/2)`` is Hermitian and its eigenvectors are orthonormal to rounding. Never
    diagonalise A itself: its eigenvectors are singular to working precision (condition number 6e19 at N = 64).

    Returns:
        w `(N/2,)` with ``Re w = -1/2`` and ``Im w > 0``, and V `(N, N/2)`, both complex128 on the CPU. The other half
        is the conjugate. The eigenvectors' phases make ``V^H B`` real and positive, so that the result does not depend
        on the linear algebra library.
    """
    if state_size < 2 or state_size % 2:
        raise ValueError(f"state_size must be a positive even number; got {state_size}")
    _, B, _, S = hippo_legs(state_size)
    skew = S + 0.5 * torch.eye(state_size, dtype=torch.float64, device="cpu")
    frequencies, vectors = torch.linalg.eigh(-1j * skew)
    half = vectors[:, state_size // 2 :]
    # orthogonal to their conjugates up to rounding times |S| over the frequency gap; this step squares the error
    full = torch.cat([half, half.conj()], dim=1)
    half = 1.5 * half - 0.5 * full @ (full.mH @ half)
    phase = half.mH @ B.to(half.dtype)
    w = torch.complex(torch.full_like(frequencies, -0.5), frequencies)[state_size // 2 :]
    return w, half * (phase / phase.abs())


def dplr_legs(state_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return HiPPO-LegS in diagonal plus low-rank form: ``V^H A V = diag(w) - P P^H``.

    Returns:
        w, ``V^H P`` and ``V^H B``, each `(N/2,)` complex128 on the CPU, for one of each conjugate pair of modes.
    """
    w, V = diagonalize_legs(state_size)
    _, B, P, _ = hippo_legs(state_size)
    return w, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype)
