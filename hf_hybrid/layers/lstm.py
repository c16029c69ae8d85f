"""An LSTM with the interface of a state space model, for comparison.

B batch · T length · H hidden size
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..context_parallel import Shards, check_divisible
from ..kernels.precision import full_precision
from .state_space import StateSpaceLayer, keep_precision


class LSTM(StateSpaceLayer):
    """One layer of torch's LSTM, H to H, called like a state space model (SPADE, figure 4).

    The LSTM skips masked tokens, because its biases would change the state even for zero inputs. Their outputs are
    zero.

    Bidirectional: the layer sums both directions, like the two kernels of `S4`, but both read the current token. A
    sum keeps the width without an extra projection.

    Weights and state stay in float32 (or float64) under autocast and when the model is cast to 16 bits, since a
    recurrence rounds its state at every token.

    Args:
        hidden_size: H.
        bidirectional: Whether a second LSTM reads the sequence from its end.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection after the layer, as in S4's own.
        freeze: ``"none"``.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.

    Note:
        O(T) sequential steps, and with a mask one synchronisation, since the host needs the lengths. torch.compile
        leaves the layer out of its graph.
    """

    TRAINED: ClassVar = {"none": ()}  # torch's own module holds the tensors

    def __init__(
        self, hidden_size: int, *, bidirectional: bool = False, postact: str | None = None, freeze: str = "none"
    ):
        super().__init__(hidden_size, bidirectional=bidirectional, postact=postact, freeze=freeze)
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self.lstm = _WideLSTM(hidden_size, hidden_size, batch_first=True, bidirectional=bidirectional, dtype=dtype)
        self.reset_parameters()

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        check_divisible("LSTM", shards.size)
        return self._run_masked(u, kept, None, False)[0]

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return `(B, 2, H)`: the hidden state (the last output) and the cell state."""
        return batch, 2, self.hidden_size

    def own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of the LSTM's tensors."""
        yield from self.lstm.named_parameters(prefix="lstm")

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise weights Xavier uniform and biases zero, as transformers does."""
        if "weight" in name:
            nn.init.xavier_uniform_(tensor)
        else:
            nn.init.zeros_(tensor)

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{self.hidden_size}, bidirectional={self.bidirectional}"

    def _run_masked(
        self, u: torch.Tensor, kept: torch.Tensor | None, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if kept is not None and torch.compiler.is_exporting():
            raise ValueError("attention_mask must be None in an export of an LSTM (ssm_type='lstm'): it packs tokens")
        x = u.to(self.lstm.weight_ih_l0.dtype)
        # h and c, each (1, B, H)
        before = None if state is None else tuple(state.to(x.dtype).movedim(1, 0)[:, None].contiguous())
        with full_precision(u.device):
            y, after = self.lstm(x, before) if kept is None else self._pass_over(x, kept, before)
        if self.bidirectional:
            y = y[..., : self.hidden_size] + y[..., self.hidden_size :]
        return y.to(u.dtype), torch.cat(after).movedim(0, 1) if return_state else None

    def _pass_over(
        self, x: torch.Tensor, kept: torch.Tensor, before: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the LSTM over each row's kept tokens only."""
        order = (~kept).to(torch.int8).argsort(dim=1, stable=True)[..., None]  # the kept ones first
        lengths = kept.sum(1).cpu()
        # a packed sequence needs at least one token; the effect on an empty row is undone below
        packed = pack_padded_sequence(
            x.take_along_dim(order, 1), lengths.clamp_min(1), batch_first=True, enforce_sorted=False
        )
        packed, after = self.lstm(packed, before)
        y, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        y = y.take_along_dim(order.argsort(dim=1), 1).masked_fill(~kept[..., None], 0)
        if before is None:
            before = tuple(torch.zeros_like(part) for part in after)
        moved = kept.any(1)[:, None]
        return y, tuple(torch.where(moved, new, old) for new, old in zip(after, before, strict=True))


class _WideLSTM(nn.LSTM):
    """An LSTM that casts keep in float32 or float64."""

    weight_ih_l0: nn.Parameter

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "_WideLSTM":
        super()._apply(keep_precision(fn), recurse)
        return self
