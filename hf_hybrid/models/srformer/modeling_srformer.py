"""Mixins for SRformer's models of T5 and BART; they go before the parent's classes.

The decoder plans once per call what its layers read. The model with a head has a loss for gradient accumulation, and
passes the length of generation to the plan.

Shapes: B batch · D documents · T tokens of this call · L source length.
"""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils.generic import ModelOutput, can_return_tuple

from ..checkpointing import CheckpointingMixin
from ..checks import check_fixed_length, check_not_empty
from ..description import ModelCardMixin
from ..generation import NoContinuousBatching
from ..losses import cross_entropy, loss_alone, loss_of_logits, skips_logits
from ..packing import PAIRS, refuse_packed
from ..state_cache import cached_length
from .cross_attention import RAF, RecurrentGate, SegmentedCrossAttention
from .segments import Reading, SegmentCache, cut


class SegmentedPreTrainedModel(ModelCardMixin, CheckpointingMixin):
    """Mixin for all models: initialises the parameters that SRformer adds."""

    _supports_context_parallel = False
    why_not_divided = "its encoder, T5's or BART's, is full attention, in which every token reads every other one"

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        if not hasattr(config, "has_states"):  # a checkpoint with its code has its own config class
            raise ValueError(
                f"config must be a {self.config_class.__name__}, as from {self.config_class.__name__}.from_parent; "
                f"got {type(config).__name__}"
            )
        checkpointing = getattr(config, "gradient_checkpointing", False)
        super().__init__(config, *args, **kwargs)
        if checkpointing:  # the parent took it from the config, for its own parts
            config.gradient_checkpointing = True

    @classmethod
    def is_custom_code(cls) -> bool:
        # In custom code, transformers does not initialise modules without own tensors, so the projections of T5's
        # attention would start a hundred times too large. It protects loaded weights, which nothing here overwrites.
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, RAF):
            module.reset_parameters()
            if self.config.recurrent_init == "gated":
                init.eye_(module.linear.weight)
        elif isinstance(module, RecurrentGate):
            init.zeros_(module.weight)
        elif isinstance(module, SegmentedCrossAttention) and hasattr(module, "sigma"):
            init.constant_(module.sigma, 0.5)
        elif isinstance(module, nn.RNN):
            bound = module.hidden_size**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)


class SegmentedDecoder(SegmentedPreTrainedModel):
    """Mixin for a decoder: plans once per call what its layers read."""

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        decoder_horizon: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        check_not_empty("decoder_input_ids", input_ids, inputs_embeds)
        check_fixed_length("decoder_input_ids", input_ids, inputs_embeds)
        if encoder_hidden_states is not None:
            if encoder_hidden_states.shape[1] == 0:
                raise ValueError(
                    f"encoder_hidden_states must hold at least one position; got {tuple(encoder_hidden_states.shape)}"
                )
            if self.config.cross_attention_mode != "full":
                inputs = input_ids if inputs_embeds is None else inputs_embeds
                if decoder_horizon is None and past_key_values is None and not use_cache:
                    decoder_horizon = self._target_length(inputs)
                    # no cache: later steps would have a target of another length
                    use_cache = use_cache if decoder_horizon is None else False
                kwargs["reading"], encoder_hidden_states = self._plan(
                    inputs, encoder_hidden_states, encoder_attention_mask, past_key_values, decoder_horizon
                )
                encoder_attention_mask = None
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **{"return_dict": True, **kwargs},
        )

    def _target_length(self, inputs: torch.Tensor) -> int | None:
        return inputs.shape[1] if self.config.horizon_mode == "target_length" else None

    def _plan(
        self,
        inputs: torch.Tensor,
        source: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: EncoderDecoderCache | None,
        horizon: int | None,
    ) -> tuple[Reading, torch.Tensor]:
        """Return what each token of `inputs` `(B, T)` reads, and `source` `(D, L, width)`, cut unless it is cached."""
        if horizon is not None and (not isinstance(horizon, int) or horizon < 1):
            raise ValueError(f"decoder_horizon must be a positive integer; got {horizon}")
        cache = None if past_key_values is None else self._segment_cache(past_key_values, horizon)
        batch, length = inputs.shape[:2]
        place = {"batch": batch, "heads": self.cross_attention_heads, "device": inputs.device}
        past = cached_length(past_key_values)
        if cache is not None:
            if cache.rows not in (None, batch):
                raise ValueError(
                    f"decoder inputs must have as many rows as past_key_values, {cache.rows}; got {batch}"
                )
            return cache.reading(length, past=past, **place), source
        documents = self._documents(inputs, source)
        segments, source = cut(self.config, source, attention_mask, horizon or self.config.decoder_horizon)
        return Reading(segments, length, past=past, documents=documents, **place), source

    @staticmethod
    def _documents(inputs: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
        """Return the document of each row, `(B,)`, if several consecutive rows (beams) read each document."""
        rows, documents = inputs.shape[0], source.shape[0]
        if rows == documents:
            return None
        if rows % documents:
            raise ValueError(
                f"decoder inputs must have as many rows as encoder_hidden_states, {documents}, or a multiple (beams); "
                f"got {rows}"
            )
        return torch.arange(documents, device=inputs.device).repeat_interleave(rows // documents)

    def _segment_cache(self, past_key_values: EncoderDecoderCache, horizon: int | None) -> SegmentCache | None:
        """Return the cache of documents, if any; raise ValueError if it does not fit."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            raise ValueError(f"past_key_values must be an EncoderDecoderCache; got {type(past_key_values).__name__}")
        cache = past_key_values.cross_attention_cache
        if not isinstance(cache, SegmentCache):
            if any(past_key_values.is_updated.values()):
                raise ValueError(
                    f"past_key_values must come from an SRformer with the same cross_attention_mode; got one whose "
                    f"cross_attention_cache is a {type(cache).__name__}"
                )
            return None
        if cache.segments is None:
            past_key_values.cross_attention_cache = DynamicCache()
            return None
        if horizon is not None and horizon != cache.segments.horizon:
            raise ValueError(f"decoder_horizon must be {cache.segments.horizon}, as in past_key_values; got {horizon}")
        return cache


class SegmentedModel(SegmentedPreTrainedModel):
    """Mixin for a model: encodes the document, and passes the length of the target to the decoder alone."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        decoder_horizon: int | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        run = self.run_body if kwargs.pop("without_head", False) else super().forward
        refuse_packed(kwargs, PAIRS, attention_mask)
        if use_cache is None and not self.config.use_cache:  # the parts have configs of their own
            use_cache = False
        if encoder_outputs is None:
            check_not_empty("input_ids", input_ids, inputs_embeds)
            check_fixed_length("input_ids", input_ids, inputs_embeds)
            encoder_outputs = self.get_encoder()(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        if isinstance(encoder_outputs, ModelOutput):  # T5 would take attentions for hidden states
            names = ("last_hidden_state", "hidden_states", "attentions")
            encoder_outputs = BaseModelOutput(**{name: encoder_outputs.get(name) for name in names})
        if decoder_horizon is not None:
            kwargs["decoder_horizon"] = decoder_horizon
        return run(
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


class SegmentedGeneration(NoContinuousBatching, SegmentedModel):
    """Mixin for a model with a head: its loss, and the horizon of generation.

    The class that uses it has `run_body`, the forward of its parent without a head, and `head`, from there to logits.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        decoder_horizon: int | None = None,
        skip_logits: bool | None = None,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        skips = skips_logits(self, skip_logits, labels is not None, in_training=self.config.skip_logits)
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            use_cache = False if use_cache is None else use_cache
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            decoder_horizon=decoder_horizon,
            return_dict=True,
            without_head=skips,
            **kwargs,
        )
        if labels is None:
            return outputs
        fields = dict(outputs)
        if skips:
            of_count = loss_alone(self, fields.pop("last_hidden_state"), labels, partial(cross_entropy, self.head))
        else:  # the parents' loss ignores num_items_in_batch, so it is wrong with gradient accumulation
            of_count = loss_of_logits(self, outputs.logits, labels, shift_labels=labels)  # inputs are shifted
        return Seq2SeqLMOutput(loss=of_count(num_items_in_batch), **fields)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        decoder_horizon: int | None = None,
        **kwargs,
    ):
        """Generate as every model of transformers, with the segments spread over the requested length.

        Args:
            inputs: As in `GenerationMixin.generate`.
            generation_config: As in `GenerationMixin.generate`.
            *args: As in `GenerationMixin.generate`.
            decoder_horizon: Length of the target, in tokens, over which the segments are spread. When None: with
                `horizon_mode="fixed"` the config's `decoder_horizon`; otherwise `max_new_tokens` or `max_length - 1`,
                given here or in a generation config, and without either the config's `decoder_horizon`. Tokens beyond
                it read the last segment.
            **kwargs: As in `GenerationMixin.generate`.

        Raises:
            ValueError: `decoder_horizon` is not positive.
        """
        if decoder_horizon is None:
            decoder_horizon = self._generation_horizon(generation_config, kwargs)
        return super().generate(inputs, generation_config, *args, decoder_horizon=decoder_horizon, **kwargs)

    def _generation_horizon(self, generation_config: GenerationConfig | None, options: dict) -> int | None:
        cache = getattr(options.get("past_key_values"), "cross_attention_cache", None)
        if getattr(cache, "segments", None) is not None:
            return None  # use the cache's
        if self.config.horizon_mode == "fixed":
            return self.config.decoder_horizon
        prompt = options.get("decoder_input_ids")
        beyond_start = 0 if prompt is None else prompt.shape[1] - 1
        sources = [config for config in (generation_config, self.generation_config) if config is not None]
        for field, more in (("max_new_tokens", beyond_start), ("max_length", -1)):
            lengths = [options.get(field), *(getattr(source, field, None) for source in sources)]
            length = next((length for length in lengths if length is not None), None)
            if length is not None:
                return max(length + more, 1)
        return self.config.decoder_horizon

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, dict]:
        """Repeat rows for beams, but not documents: beams share their document."""
        shared = {}
        if self.config.cross_attention_mode != "full":
            shared = {name: kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in kwargs}
        expands_documents = is_encoder_decoder and not shared
        input_ids, kwargs = super()._expand_inputs_for_generation(expand_size, expands_documents, input_ids, **kwargs)
        return input_ids, {**kwargs, **shared}
