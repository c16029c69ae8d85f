"""CHELA: short-long convolutions feed linear attention (Liu et al. 2024).

Shapes: B batch · T length · D width.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...context_parallel import Shards
from ...layers.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from ...layers.dropout import Dropout
from ...layers.feed_forward import FeedForward
from ...layers.long_conv import ShortLongConv
from ...layers.norms import ScaleNorm, apply_norm, make_norm
from ...layers.state_space import StateSpaceLayer
from ..checkpointing import CheckpointingMixin
from ..checks import check_fixed_length
from ..description import ModelCardMixin
from ..generation import HybridGenerationMixin
from ..heads import (
    CausalLMForward,
    MaskedLMForward,
    QuestionAnsweringForward,
    SequenceClassificationForward,
    SequencePairClassificationForward,
    StateSpaceModelMixin,
    TokenClassificationForward,
    as_decoder,
)
from ..inputs import RealValuesMixin, check_reads_tokens
from ..masks import check_covers, without_padding
from ..packing import take_bounds, take_shards
from ..state_cache import state_layer
from .configuration_chela import ChelaConfig
from .unit import ChelaUnit


class ChelaLayer(GradientCheckpointingLayer):
    """One layer: CHELA's unit, with a gate as residual path, and a feed-forward network with a residual.

    Pre-norm ``u = unit(N1(x), x)``, ``y = u + ffn(N2(u))``; post-norm ``u = N1(unit(x, x))``, ``y = N2(u + ffn(u))``.

    Without dropout, a causal layer of the default kind keeps 14 D + F numbers of a token for the backward: what both
    norms read and return (4 D); what the short convolutions return, Z, G and M - r (4 D); Q, K, V, what V is the SiLU
    of, the other gate before its SiLU and the normalised Q (K^T V) (6 D); and what the feed-forward network activates
    (F, its inner width). Statistics of norms, a few numbers, are left out.
    """

    def __init__(self, config: ChelaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.pre_norm = config.norm_position == "pre"
        self.raw_residual = config.gate_residual == "raw"
        self.unit = ChelaUnit(config)
        self.unit_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, ACT2FN[config.hidden_act], dropout=config.activation_dropout
        )
        self.feed_forward_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`; `attention_mask` is `(B, T)`, True = keep."""
        inputs = apply_norm(self.unit_norm, hidden_states, attention_mask, shards) if self.pre_norm else hidden_states
        residual = hidden_states if self.raw_residual else inputs
        cached = None if past_key_values is None else state_layer(past_key_values, self.layer_idx)
        state = None if cached is None else cached.state
        hidden_states, state = self.unit(
            inputs, residual, attention_mask, state, cached is not None, cu_seqlens, shards
        )
        if cached is not None:
            cached.store(state, inputs.shape[1])
        if self.pre_norm:
            inputs = apply_norm(self.feed_forward_norm, hidden_states, attention_mask, shards)
            return hidden_states + self.dropout(self.feed_forward(inputs))
        hidden_states = apply_norm(self.unit_norm, hidden_states, attention_mask, shards)
        hidden_states = hidden_states + self.dropout(self.feed_forward(hidden_states))
        return apply_norm(self.feed_forward_norm, hidden_states, attention_mask, shards)


class ChelaPreTrainedModel(ModelCardMixin, CheckpointingMixin, StateSpaceModelMixin, RealValuesMixin, PreTrainedModel):
    """Base class of all CHELA models."""

    config: ChelaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False
    _no_split_modules = ["ChelaLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["mixer"]
    _can_record_outputs = {"hidden_states": ChelaLayer}

    @property
    def _can_compile_fullgraph(self) -> bool:
        """Whether one graph serves all decoding steps; Laplace attention keeps more keys after each."""
        return self.config.attention_fn != "laplace"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, StateSpaceLayer | AdaptiveEmbedding | AdaptiveSoftmax | ChelaUnit):
            module.reset_parameters()
        elif isinstance(module, ScaleNorm):
            if module.weight is not None:
                init.ones_(module.weight)
        elif isinstance(module, nn.Embedding) and self.config.scale_embeddings:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def fuse_short_convs(self, *, keep_branches: bool = True):
        """Fuse the parallel short convolutions of every layer into one, for inference (CHELA, section 4.2).

        Outputs do not change. The branches are kept and saved; `unfuse_short_convs` or training restores them.
        Repeated calls have no effect.

        Args:
            keep_branches: If False, drop the branches: the model and its config have a single short convolution, and
                are saved so.

        Raises:
            ValueError: The model is in training mode.
        """
        convolutions = self._short_convs()
        for convolution in convolutions:  # before changing any
            convolution.check_not_training()
        for convolution in convolutions:
            if keep_branches:
                convolution.fuse_short_convs()
            else:
                convolution.merge_branches()
        if convolutions and not keep_branches:
            config = copy.deepcopy(self.config)  # other models may share the old one
            config.short_kernel_sizes = [max(config.short_kernel_sizes)]
            config.short_conv_bias = convolutions[0].short_bias
            config.short_branch_norm = False
            for module in self.modules():
                if getattr(module, "config", None) is self.config and module is not self:
                    module.config = config
            self.config = config

    def unfuse_short_convs(self):
        """Undo `fuse_short_convs`, unless it dropped the branches."""
        for convolution in self._short_convs():
            convolution.unfuse_short_convs()

    def _short_convs(self) -> list[ShortLongConv]:
        return [module for module in self.modules() if isinstance(module, ShortLongConv)]


class ChelaModel(ChelaPreTrainedModel):
    """CHELA without a head: embedding, layers and final norm, bidirectional or, with `config.is_decoder`, causal.

    Pass sequences of real values, such as pixels or audio, as `input_values` `(B, T)` or `(B, T, config.input_size)`.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may set fields without checking them
        self.add_input_embedding()
        self.layers = nn.ModuleList(ChelaLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(
                config.norm_type, config.hidden_size, config.layer_norm_eps, affine=config.final_norm_affine
            )
        self.dropout = Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        inputs_embeds = self.embed_tokens_or_values(input_ids, inputs_embeds, input_values)
        if self.config.mixer == "s4d":  # the others make their taps alike for each length
            check_fixed_length("input_ids", inputs_embeds)
        if not self.config.is_decoder:
            past_key_values = None
        shards = take_shards(kwargs, inputs_embeds, attention_mask, past_key_values)
        cu_seqlens = None if shards else take_bounds(kwargs, inputs_embeds, attention_mask, past_key_values)
        if self.config.is_decoder and use_cache and past_key_values is None and cu_seqlens is None and shards is None:
            past_key_values = DynamicCache(config=self.config)
        kept = None
        if attention_mask is not None:
            length = inputs_embeds.shape[1]
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            check_covers(attention_mask, inputs_embeds, past, or_new_alone=True)
            kept = attention_mask[:, -length:].to(torch.bool)
            if length == 1:
                kept = without_padding(kept)
        hidden_states = self.dropout(inputs_embeds)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer for an early exit in generation
            hidden_states = layer(
                hidden_states,
                attention_mask=kept,
                past_key_values=past_key_values,
                cu_seqlens=cu_seqlens,
                shards=shards,
                **kwargs,
            )
        if self.final_norm is not None:
            hidden_states = apply_norm(self.final_norm, hidden_states, kept, shards)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)


class ChelaForCausalLM(CausalLMForward, HybridGenerationMixin, ChelaPreTrainedModel):
    """CHELA causal language model (CHELA, section 5.3).

    With `adaptive_cutoffs` the logits are log-probabilities, and None in training with labels.

    Args:
        config: The config; a copy is used with `is_decoder` True, if that is False.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__(as_decoder(config))
        check_reads_tokens(self)
        self.model = ChelaModel(self.config)
        self.add_lm_head()
        self.post_init()


class ChelaForMaskedLM(MaskedLMForward, ChelaPreTrainedModel):
    """Bidirectional CHELA with a language modelling head, for masked language modelling."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        check_reads_tokens(self)
        if config.is_decoder:
            raise ValueError(
                f"is_decoder must be False for ChelaForMaskedLM; got {config.is_decoder}: use ChelaForCausalLM"
            )
        self.model = ChelaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class ChelaClassifier(nn.Module):
    """Mega's classifier of pooled vectors: a layer with an activation, and a projection to the labels.

    Args:
        config: The config.
        num_sequences: Number of concatenated pooled vectors in the input.
    """

    weight = None  # peft's IA3 reads it when it merges a saved module

    def __init__(self, config: ChelaConfig, num_sequences: int = 1):
        super().__init__()
        self.dense = nn.Linear(num_sequences * config.hidden_size, config.classifier_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.classifier_size, config.num_labels, bias=False)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(pooled))))


class ChelaForSequenceClassification(SequenceClassificationForward, ChelaPreTrainedModel):
    """CHELA that classifies sequences of tokens or real values (CHELA, sections 5.1 and 5.2).

    `config.pooling` selects the classifier's input.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.model = ChelaModel(config)
        self.classifier = ChelaClassifier(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            labels=labels,
            **kwargs,
        )

    def _classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(pooled)


class ChelaForSequencePairClassification(SequencePairClassificationForward, ChelaPreTrainedModel):
    """CHELA that reads two sequences separately and classifies the pair: the Long Range Arena's retrieval task.

    The classifier reads both pooled vectors, concatenated with the second sequence's first, as Mega's does. Hidden
    states are not returned.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.model = ChelaModel(config)
        self.classifier = ChelaClassifier(config, num_sequences=2)
        self.post_init()

    def _classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(pooled)


class ChelaForTokenClassification(TokenClassificationForward, ChelaPreTrainedModel):
    """CHELA that classifies every token."""

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.model = ChelaModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class ChelaForQuestionAnswering(QuestionAnsweringForward, ChelaPreTrainedModel):
    """CHELA that marks an answer's first and last token."""

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.model = ChelaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
