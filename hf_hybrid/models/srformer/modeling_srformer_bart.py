"""SRformer based on BART: its decoder reads the document by segments.

Modules have BART's names, so that its checkpoints load. New parts are in `cross_attention.py` and
`modeling_srformer.py`.

Shapes: B batch · T target length · L source length · D width · H heads · K head width.
"""

import torch
from transformers import BartForConditionalGeneration, BartModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.bart.modeling_bart import BartAttention, BartDecoder, BartLearnedPositionalEmbedding

from .configuration_srformer import SRformerBartConfig
from .cross_attention import SegmentedCrossAttention
from .modeling_srformer import SegmentedDecoder, SegmentedGeneration, SegmentedModel
from .segments import Reading


class SRformerBartPositions(BartLearnedPositionalEmbedding):
    """BART's positions, with a ValueError for texts that are too long, instead of a device assertion."""

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values_length: int | torch.Tensor = 0,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        positions = self.num_embeddings - self.offset
        if isinstance(past_key_values_length, int):  # reading the tensor of a static cache would wait for the device
            tokens = input_ids.shape[1] if position_ids is None else position_ids.shape[-1]
            if past_key_values_length + tokens > positions:
                raise ValueError(
                    f"input_ids must hold at most max_position_embeddings = {positions} tokens, cached ones included; "
                    f"got {past_key_values_length + tokens}"
                )
        return super().forward(input_ids, past_key_values_length, position_ids)


class SRformerBartAttention(SegmentedCrossAttention, BartAttention):
    """BART's cross-attention to segments."""

    def __init__(self, config: SRformerBartConfig, layer_idx: int):
        super().__init__(
            config.d_model,
            config.decoder_attention_heads,
            dropout=config.attention_dropout,
            is_decoder=True,
            config=config,
            layer_idx=layer_idx,
        )
        self.add_segments(config, self.num_heads, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        past_key_values=None,
        attention_mask: torch.Tensor | None = None,
        reading: Reading | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if reading is None:
            return super().forward(
                hidden_states,
                key_value_states=key_value_states,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                **kwargs,
            )
        output, probabilities = self.read(
            self.q_proj(hidden_states), key_value_states, self.k_proj, self.v_proj, past_key_values, reading
        )
        return self.out_proj(output), probabilities


class SRformerBartDecoder(SegmentedDecoder, BartDecoder):
    """BART's decoder with segmented cross-attention."""

    config: SRformerBartConfig

    def __init__(self, config: SRformerBartConfig):
        super().__init__(config)
        self.cross_attention_heads = config.decoder_attention_heads
        for layer_idx, layer in enumerate(self.layers):
            layer.encoder_attn = SRformerBartAttention(config, layer_idx)
        self.post_init()


class SRformerBartModel(SegmentedModel, BartModel):
    """SRformer based on BART, without a head."""

    config: SRformerBartConfig
    _fsdp_plan = {"encoder.layers.*": "free_full_weight", "decoder.layers.*": "free_full_weight"}

    def __init__(self, config: SRformerBartConfig):
        super().__init__(config)
        self.decoder = SRformerBartDecoder(config)
        for stack in (self.encoder, self.decoder):
            stack.embed_positions = SRformerBartPositions(config.max_position_embeddings, config.d_model)
        self.post_init()


class SRformerBartForConditionalGeneration(SegmentedGeneration, BartForConditionalGeneration, GenerationMixin):
    """SRformer based on BART with a language modelling head, for summarization and other text-to-text tasks."""

    config: SRformerBartConfig

    def __init__(self, config: SRformerBartConfig):
        super().__init__(config)
        self.model = SRformerBartModel(config)
        self.post_init()

    def run_body(self, **inputs) -> Seq2SeqModelOutput:
        return self.model(**inputs)

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states) + self.final_logits_bias
