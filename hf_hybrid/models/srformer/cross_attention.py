"""SRformer's cross-attention, as parts that T5's and BART's classes are mixed with (SRformer, section 3 and figure 2).

What depends on the document alone, keys, values and the states of recurrent attention, is made once per document, in
training as in decoding, and what depends on the target is one path for both: `Reading` says which token reads what.

Shapes: B batch · D documents · L source length · T tokens of this call · H heads · K head width · M segments ·
S segment size · N slots · n tiles of g tokens.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils.generic import can_return_tuple

from ...kernels import segment_recurrence
from .segments import Reading, SegmentCache, SegmentMemory, cut, previous_slot

NORM_FLOOR = 1e-6
THRESHOLD_FLOOR = 1e-3


class RAF(nn.Module):
    """The trained numbers of recurrent accumulate-and-fire neurons (SRformer, section 3.3 and appendix A.2).

    Args:
        width: Width of a head.
        leak: Initial leak.
        threshold: Initial threshold.
    """

    def __init__(self, width: int, *, leak: float, threshold: float):
        super().__init__()
        self.initial = (leak, threshold)
        self.linear = nn.Linear(width, width, bias=False)
        self.leak = nn.Parameter(torch.full((1,), float(leak)))
        self.threshold = nn.Parameter(torch.full((1,), float(threshold)))

    def reset_parameters(self) -> None:
        """Set leak and threshold to their initial values; the linear map is drawn as the parent's."""
        init.constant_(self.leak, self.initial[0])
        init.constant_(self.threshold, self.initial[1])


class SegmentedCrossAttention:
    """Mixin for a parent's attention module: reads segments instead of everything.

    `add_segments` adds the modules that the config's mode needs; q, k, v and o stay the parent's.
    """

    def add_segments(self, config: PreTrainedConfig, heads: int, width: int) -> None:
        """Add what the mode trains beside the parent's projections.

        Args:
            config: An SRformer's config.
            heads: H.
            width: K.
        """
        self.segment_shape = (heads, width)
        if config.has_neurons:
            self.raf = RAF(width, leak=config.leak_init, threshold=config.threshold_init)
        if config.mix == "sigma":
            self.sigma = nn.Parameter(torch.full((1,), 0.5))
        if config.cross_attention_mode == "transformer_xl":
            self.rnn_k = nn.RNN(heads * width, heads * width, batch_first=True)
            self.rnn_v = nn.RNN(heads * width, heads * width, batch_first=True)

    def read(
        self,
        query: torch.Tensor,
        source: torch.Tensor,
        project_key: Callable[[torch.Tensor], torch.Tensor],
        project_value: Callable[[torch.Tensor], torch.Tensor],
        past_key_values: EncoderDecoderCache | None,
        reading: Reading,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            query: Projected, `(B, T, H K)`.
            source: The encoder's output as `cut` returns it, `(D, M S, width)`; not looked at once it is in the cache.
            project_key: The parent's projection.
            project_value: The parent's projection.
            past_key_values: Cache; what is made of the documents is kept there.
            reading: Which token reads what.

        Returns:
            Output before its projection, `(B, T, H K)`; and with eager attention the probabilities of the keys that
            each token sees, `(B, H, T, keys)`.
        """
        memory = None
        if past_key_values is not None:
            cache = past_key_values.cross_attention_cache
            if not isinstance(cache, SegmentCache):
                cache = SegmentCache(reading.segments, reading.documents)
                past_key_values.cross_attention_cache = cache
            if past_key_values.is_updated.get(self.layer_idx):
                memory = cache.layers[self.layer_idx].memory
        if memory is None:
            memory = self.memorize(project_key(source), project_value(source), reading)
            if past_key_values is not None:
                cache.keep(self.layer_idx, memory)
                past_key_values.is_updated[self.layer_idx] = True
        query = reading.lay_out(query.unflatten(2, self.segment_shape)) * self.scaling
        segmented = probabilities = recurrent = None
        if memory.keys is not None:
            segmented, probabilities = self._segmented(query, memory, reading)
        if memory.states is not None:
            recurrent = torch.matmul(query, reading.pick(memory.states))
            if memory.norm is not None:
                recurrent = recurrent / reading.of_rows(memory.norm)[:, :, None]
        output = reading.collect(self._mixed(segmented, recurrent)).flatten(2)
        if probabilities is not None and self.config._attn_implementation == "eager":
            return output, reading.collect(probabilities).transpose(1, 2)
        return output, None

    def memorize(self, key: torch.Tensor, value: torch.Tensor, reading: Reading) -> SegmentMemory:
        """Make of keys and values `(D, M S, H K)` what a target reads.

        Keys and values of segments that no token visits are not kept.
        """
        segments, mode = reading.segments, self.config.cross_attention_mode
        if segments.kept is not None:
            key, value = (x.masked_fill(~segments.kept[..., None], 0) for x in (key, value))
        key, value = (
            x.unflatten(1, (segments.number, segments.size))
            .unflatten(3, self.segment_shape)
            .permute(0, 3, 1, 2, 4)
            .contiguous()
            for x in (key, value)
        )
        visited = segments.visited()
        states = norm = mean_keys = mean_values = None
        if self.config.has_states:
            states, norm = self._states(key, value, visited), self._norm(key)
        if mode == "recurrent":
            return SegmentMemory(None, None, states=states, norm=norm)
        if mode == "longt5":
            mean_keys, mean_values = (self._means(x, segments.kept) for x in (key, value))
        if visited is not None:
            index = visited.expand(key.shape[0], -1)[:, None, :, None, None]
            key, value = (x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:])) for x in (key, value))
        if mode == "transformer_xl":
            key, value = self._with_previous(key, self.rnn_k), self._with_previous(value, self.rnn_v)
        return SegmentMemory(key, value, mean_keys, mean_values, states, norm)

    def _states(self, key: torch.Tensor, value: torch.Tensor, visited: torch.Tensor | None) -> torch.Tensor:
        neurons = {}
        if self.config.has_neurons:
            neurons = {
                "weight": self.raf.linear.weight,
                "leak": self.raf.leak,
                "threshold": self.raf.threshold.clamp_min(THRESHOLD_FLOOR),
            }
        return segment_recurrence(
            key,
            value,
            visited=visited,
            source="segment" if self.config.cross_attention_mode == "own_segment" else "complement",
            clamp=self.config.kv_clamp,
            surrogate=self.config.raf_surrogate,
            **neurons,
        )

    def _norm(self, key: torch.Tensor) -> torch.Tensor | None:
        """norm(K) of keys `(D, H, M, S, K)`, `(D, H, 1, K or 1)`."""
        if self.config.norm_type == "none" or self.config.cross_attention_mode == "no_norm":
            return None
        axes = (2,) if self.config.norm_type == "feature_l2" else (2, 3)
        wide = torch.promote_types(key.dtype, torch.float32)
        norm = torch.linalg.vector_norm(key.flatten(2, 3), dim=axes, keepdim=True, dtype=wide)
        return norm.clamp_min(NORM_FLOOR).to(key.dtype)

    @staticmethod
    def _means(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Mean of the kept rows of each segment, `(D, H, M, S, K)` to `(D, H, M, K)`."""
        if kept is None:
            return x.mean(3)
        counts = kept.unflatten(1, x.shape[2:4]).sum(2).clamp_min(1)
        return x.sum(3) / counts[:, None, :, None].to(x.dtype)

    @staticmethod
    def _with_previous(x: torch.Tensor, rnn: nn.RNN) -> torch.Tensor:
        """Put what an RNN makes of the slot before in front of each slot of `(D, H, N, S, K)`."""
        tokens = x.permute(0, 2, 3, 1, 4)
        passed = rnn(tokens.flatten(3).flatten(1, 2))[0].view(tokens.shape).permute(0, 3, 1, 2, 4)
        return torch.cat([previous_slot(passed, 2), x], dim=3)

    def _segmented(
        self, query: torch.Tensor, memory: SegmentMemory, reading: Reading
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention of tiles `(B, H, n, g, K)` to their segments: output and probabilities."""
        keys, values = reading.pick(memory.keys), reading.pick(memory.values)
        scores = torch.matmul(query, keys.mT)
        if memory.mean_keys is not None:
            means = reading.of_rows(memory.mean_keys)[:, :, None]
            scores = torch.cat([scores, torch.matmul(query, means.mT)], dim=-1)
        if reading.visible is not None:
            scores = scores.masked_fill(~reading.visible, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        if reading.visible is not None:
            probabilities = probabilities.masked_fill(~reading.visible, 0)  # where a segment has no key at all
        probabilities = nn.functional.dropout(probabilities, p=self.dropout, training=self.training)
        if memory.mean_values is None:
            return torch.matmul(probabilities, values), probabilities
        own, shared = probabilities.split([values.shape[3], probabilities.shape[-1] - values.shape[3]], dim=-1)
        means = reading.of_rows(memory.mean_values)[:, :, None]
        return torch.matmul(own, values) + torch.matmul(shared, means), probabilities

    def _mixed(self, segmented: torch.Tensor | None, recurrent: torch.Tensor | None) -> torch.Tensor:
        if segmented is None or recurrent is None:
            return recurrent if segmented is None else segmented
        if self.config.mix == "sigma":
            sigma = self.sigma.to(segmented.dtype)
            return sigma * segmented + (1 - sigma) * recurrent
        return segmented + recurrent


class SegmentedPreTrainedModel:
    """Mixin for a parent's models: initialises what SRformer adds."""

    @classmethod
    def is_custom_code(cls) -> bool:
        # For classes outside of it, transformers initialises no module without tensors of its own, and so would draw
        # the projections in T5's attention a hundred times too large. The guard is for draws that would overwrite what
        # a checkpoint holds; there are none here.
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, RAF):
            module.reset_parameters()
        elif isinstance(module, SegmentedCrossAttention) and hasattr(module, "sigma"):
            init.constant_(module.sigma, 0.5)
        elif isinstance(module, nn.RNN):
            bound = module.hidden_size**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)


class SegmentedDecoder(SegmentedPreTrainedModel):
    """Mixin for a parent's decoder: plans once per call what all layers read."""

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
        if encoder_hidden_states is not None:
            if encoder_hidden_states.shape[1] == 0:
                raise ValueError(
                    f"encoder_hidden_states must hold at least one position; got {tuple(encoder_hidden_states.shape)}"
                )
            if self.config.cross_attention_mode != "full":
                if use_cache is None and past_key_values is None and self._spreads_over_target(decoder_horizon):
                    use_cache = False  # a step that went on from it would be of a target of another length
                kwargs["reading"], encoder_hidden_states = self._plan(
                    input_ids if inputs_embeds is None else inputs_embeds,
                    encoder_hidden_states,
                    encoder_attention_mask,
                    past_key_values,
                    use_cache=bool(use_cache),
                    decoder_horizon=decoder_horizon,
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

    def _spreads_over_target(self, decoder_horizon: int | None) -> bool:
        return decoder_horizon is None and self.config.horizon_mode == "target_length"

    def _plan(
        self,
        inputs: torch.Tensor,
        source: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: EncoderDecoderCache | None,
        *,
        use_cache: bool,
        decoder_horizon: int | None,
    ) -> tuple[Reading, torch.Tensor]:
        """Say what each token of `inputs` `(B, T)` reads; cut `source` `(D, L, width)` unless a cache has it cut."""
        batch, length = inputs.shape[:2]
        cache = None
        if past_key_values is not None:
            cache = self._segment_cache(past_key_values, decoder_horizon)
        if cache is not None:
            segments, documents = cache.segments, cache.documents
        else:
            horizon = decoder_horizon
            if horizon is None:
                whole = self._spreads_over_target(None) and past_key_values is None and not use_cache
                horizon = length if whole else self.config.decoder_horizon
            segments, source = cut(self.config, source, attention_mask, horizon)
            documents = None
            if batch != source.shape[0]:
                if batch % source.shape[0]:
                    raise ValueError(
                        f"decoder inputs must have as many rows as encoder_hidden_states, {source.shape[0]}, or a "
                        f"multiple (beams); got {batch}"
                    )
                documents = torch.arange(source.shape[0], device=inputs.device)
                documents = documents.repeat_interleave(batch // source.shape[0])
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if isinstance(past, torch.Tensor):  # a static cache counts in place
            past = past.clone()
        reading = Reading(
            segments,
            length,
            past=past,
            batch=batch,
            heads=self.cross_attention_heads,
            documents=documents,
            device=inputs.device,
        )
        return reading, source

    def _segment_cache(self, past_key_values: EncoderDecoderCache, horizon: int | None) -> SegmentCache | None:
        """Return the cache of documents if there is one, and check that it is of use."""
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
            raise ValueError(
                f"decoder_horizon must be {cache.segments.horizon}, for which past_key_values was made; got {horizon}"
            )
        return cache


class SegmentedModel(SegmentedPreTrainedModel):
    """Mixin for a parent's model without a head."""

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
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        if decoder_horizon is not None:
            kwargs["decoder_horizon"] = decoder_horizon
        return super().forward(
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


class SegmentedGeneration(SegmentedPreTrainedModel):
    """Mixin for a parent's model with a head: its loss, and how generation knows the length of the target."""

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
        **kwargs,
    ) -> Seq2SeqLMOutput:
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            use_cache = False if use_cache is None else use_cache
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        if decoder_horizon is not None:
            kwargs["decoder_horizon"] = decoder_horizon
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
            return_dict=True,
            **kwargs,
        )
        if labels is None:
            return outputs
        # the parents' own loss ignores num_items_in_batch, and so is wrong by a factor where gradients are accumulated
        loss = self.loss_function(
            logits=outputs.logits,
            labels=labels,
            vocab_size=self.config.vocab_size,
            shift_labels=labels,  # the decoder's inputs are shifted already
            num_items_in_batch=num_items_in_batch,
        )
        return Seq2SeqLMOutput(loss=loss, **outputs)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        decoder_horizon: int | None = None,
        **kwargs,
    ):
        """Generate as every model of transformers does, with the segments spread over the length that is asked for.

        Args:
            inputs: As everywhere.
            generation_config: As everywhere.
            *args: As everywhere.
            decoder_horizon: Length of the target, in tokens, over which the segments are spread. When None: with
                `horizon_mode="fixed"` the config's `decoder_horizon`; otherwise `max_new_tokens` or `max_length - 1`,
                whether given here or by a generation config, and without either the config's `decoder_horizon`.
                Tokens beyond it read the last segment.
            **kwargs: As everywhere.

        Raises:
            ValueError: `decoder_horizon` is not positive.
        """
        if decoder_horizon is None:
            decoder_horizon = self._generation_horizon(generation_config, kwargs)
        elif decoder_horizon < 1:
            raise ValueError(f"decoder_horizon must be a positive integer; got {decoder_horizon}")
        return super().generate(inputs, generation_config, *args, decoder_horizon=decoder_horizon, **kwargs)

    def _generation_horizon(self, generation_config: GenerationConfig | None, options: dict) -> int | None:
        cache = getattr(options.get("past_key_values"), "cross_attention_cache", None)
        if getattr(cache, "segments", None) is not None:
            return None  # the cache's
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
        """Repeat rows for beams, but not documents: the beams of a document read it together."""
        shared = {}
        if self.config.cross_attention_mode != "full":
            shared = {name: kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in kwargs}
        expands_documents = is_encoder_decoder and not shared
        input_ids, kwargs = super()._expand_inputs_for_generation(expand_size, expands_documents, input_ids, **kwargs)
        return input_ids, {**kwargs, **shared}
