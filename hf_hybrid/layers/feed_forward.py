"""The position-wise feed-forward network, plain or gated."""

import torch
from torch import nn

from .dropout import Dropout


class FeedForward(nn.Module):
    """Two-layer network for every position: ``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Args:
        hidden_size: D, width of input and output.
        intermediate_size: Width of the hidden layer.
        activation: The non-linearity.
        gated: Whether to add the gate (T5 v1.1).
        bias: Whether the projections have biases.
        dropout: Probability of dropping an intermediate activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: nn.Module,
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`."""
        if self.gate_proj is not None:
            hidden_states = self.dropout(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        elif isinstance(self.activation, nn.ReLU):
            hidden_states = self.dropout.after_relu(self.up_proj(hidden_states))
        else:
            hidden_states = self.dropout(self.activation(self.up_proj(hidden_states)))
        return self.down_proj(hidden_states)
