"""What models read: embeddings of tokens, of sequences of real values, and those that are given.

They read of a config: `vocab_size hidden_size scale_embeddings adaptive_cutoffs`, with cutoffs `adaptive_factor`; what
reads real values `input_size`.

Shapes: B batch · T length · D width.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..layers.adaptive_softmax import AdaptiveEmbedding
from ..layers.embedding import ScaledEmbedding
from .checks import check_fixed_length, check_not_empty


def make_embedding(config: PreTrainedConfig) -> nn.Module:
    """Build the token embedding, ordinary or adaptive, scaled by ``sqrt(hidden_size)`` if the config asks for it."""
    scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
    if config.adaptive_cutoffs is None:
        return ScaledEmbedding(config.vocab_size, config.hidden_size, scale)
    cutoffs, factor = config.adaptive_cutoffs, config.adaptive_factor
    return AdaptiveEmbedding(config.vocab_size, config.hidden_size, cutoffs, factor, scale=scale)


def embed_inputs(
    embed_tokens: nn.Module, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """Return the embeddings `(B, T, D)` of tokens, or those given; raise ValueError unless there is one of the two."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    if inputs_embeds is None:
        inputs_embeds = embed_tokens(input_ids)
    check_not_empty("input_ids", inputs_embeds)
    check_fixed_length("input_ids", inputs_embeds)
    return inputs_embeds


class RealValuesMixin:
    """Mixin before `PreTrainedModel` for models that read sequences of real values if `config.input_size` is set.

    The model below the heads calls `add_input_embedding` and `embed_tokens_or_values`.
    """

    def post_init(self):
        """Finish construction and set `main_input_name`."""
        super().post_init()
        if self.config.input_size is not None:
            self.main_input_name = "input_values"

    def add_input_embedding(self):
        """Build `embed_tokens`, or for real values `input_proj`, a linear map; the other one is None."""
        self.embed_tokens = self.input_proj = None
        if self.config.input_size is not None:
            self.input_proj = nn.Linear(self.config.input_size, self.config.hidden_size)
        else:
            self.embed_tokens = make_embedding(self.config)

    def embed_tokens_or_values(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        input_values: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the embeddings `(B, T, D)` of tokens or real values, or those given.

        Raises:
            ValueError: There is not exactly one of the three, the model reads the other kind, or shapes do not fit.
        """
        size = self.config.input_size
        if inputs_embeds is not None:
            if input_ids is not None or input_values is not None:
                raise ValueError("exactly one of input_ids, input_values and inputs_embeds must be given")
        elif (input_ids is None) == (input_values is None) or (input_values is None) == (size is not None):
            wanted, other = ("input_ids", "input_values") if size is None else ("input_values", "input_ids")
            raise ValueError(
                f"{wanted} or inputs_embeds must be given, and no {other}, for a model with input_size {size}"
            )
        elif size is None:
            inputs_embeds = self.embed_tokens(input_ids)
        else:
            if input_values.dim() == 2:
                input_values = input_values[..., None]
            if input_values.shape[-1] != size:
                raise ValueError(f"input_values must be (B, T, {size}); got {tuple(input_values.shape)}")
            inputs_embeds = self.input_proj(input_values.to(self.input_proj.weight.dtype))
        check_not_empty("input_ids" if size is None else "input_values", inputs_embeds)
        return inputs_embeds

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        """Resize the vocabulary, as in every model of transformers, if there is one."""
        if self.config.input_size is not None:
            raise ValueError(f"input_size must be None to resize the vocabulary; got {self.config.input_size}")
        return super().resize_token_embeddings(*args, **kwargs)


def check_reads_tokens(model: nn.Module):
    """Raise ValueError if a model whose outputs are tokens has inputs of real values."""
    if model.config.input_size is not None:
        raise ValueError(f"input_size must be None for {type(model).__name__}; got {model.config.input_size}")
