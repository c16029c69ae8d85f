"""A decoded token's attention to one segment and its state, row by row and head by head: the specification of the op.

`B` rows of the target · `D` documents · `H` heads · `N` slots · `S` keys of a slot · `K` key dim · `V` value dim
"""

import itertools

import torch
from torch import Tensor

from ...precision import compute_dtype


def segment_step(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    *,
    visible: Tensor | None = None,
    norm: Tensor | None = None,
    documents: Tensor | None = None,
    sigma: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute `hf_hybrid.kernels.segment_step` row by row, without checks."""
    wide = compute_dtype(query)
    share = None if sigma is None else sigma.to(wide)
    outputs = []
    for (row, head), slot in zip(itertools.product(*map(range, index.shape)), index.flatten().tolist(), strict=True):
        q = query[row, head].to(wide) * scale
        output = torch.zeros((), dtype=wide, device=q.device)
        if state is not None:
            recurrent = q @ state.flatten(0, 2)[slot].to(wide)
            if norm is not None:
                recurrent = recurrent / norm[row if documents is None else documents[row], head, 0].to(wide)
            output = recurrent if share is None else (1 - share) * recurrent
        if key is not None and value is not None:
            k, v = key.flatten(0, 2)[slot].to(wide), value.flatten(0, 2)[slot].to(wide)
            seen = torch.ones_like(k[:, 0], dtype=torch.bool)
            if visible is not None:
                seen = visible[row if visible.shape[0] > 1 else 0]
            segmented = (k[seen] @ q).softmax(0) @ v[seen]
            output = output + (segmented if share is None else share * segmented)
        outputs.append(output)
    return torch.stack(outputs).unflatten(0, index.shape).to(query.dtype)
