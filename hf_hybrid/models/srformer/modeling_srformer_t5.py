"""SRformer based on T5, T5 v1.1 or Flan-T5: its decoder reads the document by segments.

Modules have T5's names, so that its checkpoints load. New parts are in `cross_attention.py` and
`modeling_srformer.py`.

Shapes: B batch · T target length · L source length · D width · H heads · K head width.
"""

import copy
import math

import torch
from torch import nn
from transformers import T5ForConditionalGeneration, T5Model
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from .configuration_srformer import SRformerT5Config
from .cross_attention import RAF, SegmentedCrossAttention
from .modeling_srformer import SegmentedDecoder, SegmentedGeneration, SegmentedModel
from .segments import Reading


class SRformerT5Attention(SegmentedCrossAttention, T5Attention):
    """T5's cross-attention to segments."""

    def __init__(self, config: SRformerT5Config, layer_idx: int):
        super().__init__(config, has_relative_attention_bias=False, layer_idx=layer_idx)
        self.add_segments(config, config.num_heads, config.d_kv)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values=None,
        reading: Reading | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if reading is None:
            return super().forward(
                hidden_states,
                mask=mask,
                key_value_states=key_value_states,
                position_bias=position_bias,
                past_key_values=past_key_values,
                **kwargs,
            )
        output, probabilities = self.read(
            self.q(hidden_states), key_value_states, self.k, self.v, past_key_values, reading
        )
        return self.o(output), None, probabilities  # T5's cross-attention has no position bias


class SRformerT5Stack(SegmentedDecoder, T5Stack):
    """T5's decoder with segmented cross-attention."""

    config: SRformerT5Config

    def __init__(self, config: SRformerT5Config):
        super().__init__(config)
        self.cross_attention_heads = config.num_heads
        for layer_idx, block in enumerate(self.block):
            block.layer[1].EncDecAttention = SRformerT5Attention(config, layer_idx)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, RAF) and self.config.recurrent_init == "published":
            # as torch initialises a Linear; T5's rule assumes the model width
            init.kaiming_uniform_(module.linear.weight, a=math.sqrt(5))


class SRformerT5Model(SegmentedModel, T5Model):
    """SRformer based on T5, without a head."""

    config: SRformerT5Config
    _fsdp_plan = {"encoder.block.*": "free_full_weight", "decoder.block.*": "free_full_weight"}

    def __init__(self, config: SRformerT5Config):
        super().__init__(config)
        self.decoder = SRformerT5Stack(copy.deepcopy(self.decoder.config))
        self.post_init()


class SRformerT5ForConditionalGeneration(SegmentedGeneration, T5ForConditionalGeneration, GenerationMixin):
    """SRformer based on T5 with a language modelling head, for summarization and other text-to-text tasks."""

    config: SRformerT5Config
    _fsdp_plan = {"encoder.block.*": "free_full_weight", "decoder.block.*": "free_full_weight"}

    def __init__(self, config: SRformerT5Config):
        super().__init__(config)
        self.decoder = SRformerT5Stack(copy.deepcopy(self.decoder.config))
        self.post_init()

    def run_body(self, **inputs) -> Seq2SeqModelOutput:
        return T5Model.forward(self, **inputs)  # which has the same parts

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = self.model_dim**-0.5 if self.config.scale_decoder_outputs else 1.0
        return self.lm_head(hidden_states * scale)
