"""SPADE: a state space model in the bottom layer, local attention in all layers (Zuo et al. 2022).

Shapes: B batch · T length of the stack's input · S source length · P tokens already cached · D width · H heads ·
K head width · N state size · R local radius.
"""

import copy
import os

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple

from ...context_parallel import Shards, previous_tokens
from ..generation import HybridGenerationMixin
from ..heads import (
    CausalLMForward,
    MaskedLMForward,
    QuestionAnsweringForward,
    SequenceClassificationForward,
    SequencePairClassificationForward,
    TokenClassificationForward,
    as_decoder,
    mean_loss,
    pass_whole_rows,
    scale_outputs,
)
from ..inputs import check_reads_tokens
from ..losses import loss_alone, loss_of_logits, skips_logits
from ..packing import PAIRS_BY_POSITIONS, take_pairs, take_shards
from .configuration_spade import SpadeConfig
from .stack import SpadePreTrainedModel, SpadeStack

logger = logging.get_logger(__name__)


def as_encoder(config: SpadeConfig) -> SpadeConfig:
    """Return the config of an encoder alone: of an encoder-decoder's, a copy with `is_encoder_decoder` False."""
    if not config.is_encoder_decoder:
        return config
    config = config.get_text_config(encoder=True)
    config.is_encoder_decoder = False
    return config


class SpadeModel(SpadePreTrainedModel):
    """SPADE encoder-decoder without a head (SPADE, section 5.1).

    `AutoModel` makes a `SpadeEncoderModel` from the config of an encoder, and a `SpadeStack` from that of a language
    model.

    Args:
        config: The config; each stack gets its part from `get_text_config`.
    """

    _tp_plan = {
        "decoder.layers.*.cross_attention.q_proj": "colwise_gather_output",
        "decoder.layers.*.cross_attention.k_proj": "colwise_gather_output",
        "decoder.layers.*.cross_attention.v_proj": "colwise_gather_output",
        "decoder.layers.*.cross_attention.o_proj": "rowwise_split_input",
    }

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may set fields without checking them
        check_reads_tokens(self)
        if not config.is_encoder_decoder:
            other = "SpadeForCausalLM" if config.is_decoder else "SpadeEncoderModel"
            raise ValueError(
                f"is_encoder_decoder must be True for SpadeModel; got {config.is_encoder_decoder}: use {other}"
            )
        self.encoder = SpadeStack(config.get_text_config(encoder=True))
        self.decoder = SpadeStack(config.get_text_config(decoder=True))
        self.post_init()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args,
        config: SpadeConfig | None = None,
        **options,
    ):
        """Load a model, as every model of transformers."""
        other = cls._without_head(config)
        load = super().from_pretrained if other is None else other.from_pretrained
        return load(pretrained_model_name_or_path, *args, config=config, **options)

    @classmethod
    def _from_config(cls, config: SpadeConfig, **options):
        other = cls._without_head(config)
        return (super() if other is None else other)._from_config(config, **options)

    @classmethod
    def _without_head(cls, config: SpadeConfig | None) -> type[SpadePreTrainedModel] | None:
        """Return the class that `AutoModel` means by a config, if it is another one."""
        if cls is not SpadeModel or config is None:
            return None
        if "SpadeEncoderModel" in (config.architectures or ()):  # version 0.1.0 called its encoders encoder-decoders
            return SpadeEncoderModel
        return None if config.is_encoder_decoder else body_class(config)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        document = input_ids if inputs_embeds is None else inputs_embeds
        document = document if encoder_outputs is None else encoder_outputs[0]
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError("exactly one of decoder_input_ids and decoder_inputs_embeds must be given")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.encoder.embed_tokens(decoder_input_ids)
        pairs = take_pairs(kwargs, document, decoder_inputs_embeds, attention_mask, decoder_attention_mask)
        source = None if pairs else pass_whole_rows(kwargs, document, PAIRS_BY_POSITIONS, attention_mask)
        target_shards = kwargs.pop("target_shards", None)
        use_cache = self.config.use_cache if use_cache is None else use_cache  # the decoder has a config of its own
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                use_cache=False,
                return_dict=True,
                **kwargs,
            )
        elif isinstance(encoder_outputs, tuple | list):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])  # states, hidden states, attentions
        if source is not None:
            if target_shards is None:
                target_shards = take_shards({}, decoder_inputs_embeds, decoder_attention_mask, past_key_values)
            kwargs |= {"source_shards": source, "shards": target_shards}
        if pairs is not None:
            attention_mask, kwargs["position_ids"] = pairs
        decoder_outputs = self.decoder(
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class SpadeForConditionalGeneration(HybridGenerationMixin, SpadePreTrainedModel):
    """SPADE encoder-decoder with a language modelling head, for summarization and other text-to-text tasks."""

    divides_sequences = True
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeModel(config)
        scale_outputs(self.model.decoder, config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        skips = skips_logits(self, skip_logits, labels is not None, in_training=self.config.skip_logits)
        targets = next((x for x in (decoder_inputs_embeds, decoder_input_ids, labels) if x is not None), None)
        shards = None if targets is None else take_shards({}, targets, decoder_attention_mask, past_key_values)
        if shards is not None:
            kwargs["target_shards"] = shards
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                packed = kwargs.get("decoder_position_ids")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, shards, packed)
            use_cache = False if use_cache is None else use_cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        states = outputs.last_hidden_state
        logits = None if skips else self.lm_head(states)
        loss = None
        if labels is not None:  # the decoder's inputs are shifted
            if skips:
                of_count = loss_alone(self, states, labels)
            else:
                of_count = loss_of_logits(self, logits, labels, shift_labels=labels)
            loss = mean_loss(of_count, labels, num_items_in_batch, shards)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def prepare_decoder_input_ids_from_labels(
        self,
        labels: torch.LongTensor,
        shards: Shards | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
    ) -> torch.LongTensor:
        """Put the start token before labels `(B, T)`, drop the last; ignored positions (-100) become padding.

        Own labels of divided targets follow those of the process before; `shards` is their layout. Packed targets have
        positions `(B, T)`, and each begins with the start token.
        """
        for field in ("decoder_start_token_id", "pad_token_id"):
            if getattr(self.config, field) is None:
                raise ValueError(f"{field} must be set in the config to make decoder inputs from labels; got None")
        if shards is not None:
            shifted = previous_tokens(labels, shards, self.config.decoder_start_token_id)
        else:
            start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
            shifted = torch.cat([start, labels[:, :-1]], dim=1)
            if decoder_position_ids is not None:
                if decoder_position_ids.shape[-1] != labels.shape[1]:
                    raise ValueError(
                        f"decoder_position_ids must be {tuple(labels.shape)}; got {tuple(decoder_position_ids.shape)}"
                    )
                begins = decoder_position_ids[:, 1:] != decoder_position_ids[:, :-1] + 1
                shifted[:, 1:].masked_fill_(begins, self.config.decoder_start_token_id)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache) and cache is not given:
            # transformers builds this cache with the decoder's layer types, but cross-attention is always full
            config = copy.deepcopy(self.config)
            config.decoder_attention_type, config.decoder_global_layers = "full", []
            if isinstance(cache.cross_attention_cache, StaticCache):
                length = model_kwargs["encoder_outputs"][0].shape[1]
                cache.cross_attention_cache = StaticCache(config=config, max_cache_len=length)
            else:
                cache.cross_attention_cache = DynamicCache(config=config)


class SpadeEncoderModel(SpadePreTrainedModel):
    """SPADE's encoder alone; also loads the checkpoint of an encoder-decoder.

    With `config.input_size`, pass sequences of real values, such as pixels or audio, as `input_values` `(B, T)` or
    `(B, T, config.input_size)`.
    """

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        if config.is_decoder and not config.is_encoder_decoder:
            raise ValueError(
                f"is_decoder must be False for SpadeEncoderModel; got {config.is_decoder}: use SpadeForCausalLM"
            )
        config = as_encoder(config)
        super().__init__(config)
        config.validate()  # from_pretrained may set fields without checking them
        self.encoder = SpadeStack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            return_dict=True,
            **kwargs,
        )


class SpadeForCausalLM(CausalLMForward, HybridGenerationMixin, SpadePreTrainedModel):
    """SPADE causal language model (SPADE, section 4.2): a decoder without cross-attention, and a head.

    With `adaptive_cutoffs` the logits are log-probabilities, and None in training with labels.

    Args:
        config: The config, with `is_encoder_decoder` False. Create it with `is_decoder=True`, which sets the defaults
            of a language model; this model is causal in any case.
    """

    def __init__(self, config: SpadeConfig):
        if config.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder must be False for SpadeForCausalLM; got {config.is_encoder_decoder}: use "
                "SpadeConfig(is_decoder=True, is_encoder_decoder=False)"
            )
        if not config.is_decoder:
            logger.warning_once(
                "SpadeForCausalLM sets is_decoder=True. The config was made without it and has an encoder's defaults "
                f"(norm_position {config.norm_position!r}, local_radius {config.local_radius}). For the defaults of a "
                "language model use SpadeConfig(is_decoder=True, is_encoder_decoder=False)."
            )
        config = as_decoder(config)
        super().__init__(config)
        config.validate()  # from_pretrained may set fields without checking them
        check_reads_tokens(self)
        self.model = SpadeStack(config)
        scale_outputs(self.model, config)
        self.add_lm_head()
        self.post_init()


class SpadeForMaskedLM(MaskedLMForward, SpadePreTrainedModel):
    """SPADE encoder with a language modelling head, for masked language modelling."""

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\."]
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: SpadeConfig):
        config = as_encoder(config)
        super().__init__(config)
        check_reads_tokens(self)
        self.model = SpadeEncoderModel(config)
        scale_outputs(self.model.encoder, config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def body_class(config: SpadeConfig) -> type[SpadePreTrainedModel]:
    """Return the class below a head of one stack: a language model's causal stack, or an encoder."""
    return SpadeStack if config.is_decoder else SpadeEncoderModel


class SpadeClassifierMixin:
    """Mixin before a forward: a dense layer and tanh before the classifier, as in BERT."""

    def add_classifier(self, num_sequences: int = 1):
        """Build the head of `num_sequences` concatenated vectors."""
        config = self.config
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(num_sequences * config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def _classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


class SpadeForSequenceClassification(SpadeClassifierMixin, SequenceClassificationForward, SpadePreTrainedModel):
    """SPADE encoder, or causal stack, that classifies sequences of tokens or real values (SPADE, section 5.2).

    The vector that `config.pooling` selects passes through a dense layer and tanh before the classifier, as in BERT.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        config = as_encoder(config)
        super().__init__(config)
        self.model = body_class(config)(config)
        self.add_classifier()
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
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


class SpadeForSequencePairClassification(
    SpadeClassifierMixin, SequencePairClassificationForward, SpadePreTrainedModel
):
    """SPADE encoder, or causal stack, that reads two sequences separately and classifies the pair.

    For the Long Range Arena's retrieval task. The head is that of `SpadeForSequenceClassification`, on both pooled
    vectors, concatenated with the second sequence's first, as in Mega: ``W_c tanh(W_d [p(x_2), p(x_1)] + b_d) + b_c``.
    Hidden states are not returned.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        config = as_encoder(config)
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.model = body_class(config)(config)
        self.add_classifier(num_sequences=2)
        self.post_init()


class SpadeForTokenClassification(TokenClassificationForward, SpadePreTrainedModel):
    """SPADE encoder, or causal stack, that classifies every token."""

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        config = as_encoder(config)
        super().__init__(config)
        self.model = body_class(config)(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class SpadeForQuestionAnswering(QuestionAnsweringForward, SpadePreTrainedModel):
    """SPADE encoder, or causal stack, that marks an answer's first and last token."""

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        config = as_encoder(config)
        super().__init__(config)
        self.model = body_class(config)(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
