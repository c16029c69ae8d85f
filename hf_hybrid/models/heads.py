"""Pooling and heads that several architectures share.

They read of a config: `vocab_size hidden_size tie_word_embeddings adaptive_cutoffs`, with cutoffs `adaptive_dropout`;
language models `skip_logits`; classifiers of sequences `pooling`.

A `...Forward` mixin comes before the architecture's base class. The class that uses it builds the modules: `model` and
those named in the mixin's docstring. A language model's logits are `lm_head` of its last hidden states.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..context_parallel import Shards, Span, add_up, fetch, gather, next_tokens, total
from ..kernels.precision import compute_dtype
from ..layers.adaptive_softmax import AdaptiveSoftmax
from ..layers.state_space import ssm_parameters
from .losses import OfCount, loss_alone, loss_of_logits, skips_logits
from .packing import refuse_packed, take_shards


def pool(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, pooling: str, shards: Shards | None = None
) -> torch.Tensor:
    """Reduce `(B, T, D)` to `(B, D)`: the first, the last or the mean of the kept tokens.

    Args:
        hidden_states: `(B, T, D)`; of a divided sequence own tokens, which gives the same on all processes.
        attention_mask: `(B, T)`, 1 = keep; None keeps all.
        pooling: `"first"`, `"last"` or `"mean"`.
        shards: The layout of a divided sequence, or None.
    """
    if attention_mask is None:
        attention_mask = hidden_states.new_ones(hidden_states.shape[:2])
    kept = attention_mask.to(torch.bool)
    if shards is not None:
        return _pool_divided(hidden_states, kept, pooling, shards)
    if pooling == "mean":  # in float32, since a long sum overflows float16
        wide = compute_dtype(hidden_states)
        total = hidden_states.masked_fill(~kept[..., None], 0).sum(1, dtype=wide)
        return (total / kept.sum(1, keepdim=True).clamp_min(1)).to(hidden_states.dtype)
    positions = torch.arange(kept.shape[1], device=kept.device)
    position = kept.int().argmax(1) if pooling == "first" else (positions * kept).argmax(1)
    return hidden_states[torch.arange(kept.shape[0], device=kept.device), position]


def _pool_divided(hidden_states: torch.Tensor, kept: torch.Tensor, pooling: str, shards: Shards) -> torch.Tensor:
    if pooling == "mean":
        wide = compute_dtype(hidden_states)
        summed = add_up(hidden_states.masked_fill(~kept[..., None], 0).sum(1, dtype=wide), shards)
        count = gather(shards, kept.sum(1, keepdim=True)).sum(0)
        return (summed / count.clamp_min(1)).to(hidden_states.dtype)
    position = torch.arange(shards.own.start, shards.own.stop, device=kept.device).expand(kept.shape)
    nowhere = shards.length if pooling == "first" else -1
    own = torch.cat([position.masked_fill(~kept, nowhere), position.new_full((len(kept), 1), nowhere)], dim=1)
    found = gather(shards, own.amin(1)).amin(0) if pooling == "first" else gather(shards, own.amax(1)).amax(0)
    found = torch.where(found == nowhere, 0, found)
    return add_up(hidden_states.masked_fill((position != found[:, None])[..., None], 0).sum(1), shards)


def pass_shards(
    arguments: dict[str, Any],
    inputs: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None = None,
) -> Shards | None:
    """Make the layout of a divided sequence and add it to the arguments of the model below a head; see `packing`."""
    shards = None if inputs is None else take_shards(arguments, inputs, attention_mask, past_key_values)
    if shards is not None:
        arguments["shards"] = shards
    return shards


def pass_whole_rows(
    arguments: dict[str, Any], inputs: torch.Tensor | None, why: str, attention_mask: torch.Tensor | None
) -> Shards | None:
    """Do as `pass_shards`, and raise ValueError if sequences are packed."""
    shards = pass_shards(arguments, inputs, attention_mask)
    if shards is None:
        refuse_packed(arguments, why, attention_mask)
    elif shards.ends is not None:
        raise ValueError(f"sequences must not be packed into a row: {why}")
    return shards


def shared_loss(loss: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    """Return a loss that every process computes alike, so that gradients add up to those of one process."""
    return loss if shards is None else total(loss / shards.size, shards)


def mean_loss(
    of_count: OfCount,
    labels: torch.Tensor,
    count: torch.Tensor | int | None,
    shards: Shards | None,
) -> torch.Tensor:
    """Return a mean of tokens' losses, over all processes if they divide a sequence.

    Args:
        of_count: Takes the number of labels, and returns the sum over own tokens divided by it; of None, the mean.
        labels: `(B, T)` or of own tokens; -100 hides a token.
        count: The number of labels, if it is known.
        shards: The layout of a divided sequence, or None.
    """
    if shards is None:
        return of_count(count)
    return total(of_count(total((labels != -100).sum(), shards) if count is None else count), shards)


def as_decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a causal model: a copy with `is_decoder` True, unless it is True already."""
    if not config.is_decoder:
        config = copy.deepcopy(config)
        config.is_decoder = True
    return config


def scale_outputs(stack: nn.Module, config: PreTrainedConfig):
    """Let a stack below a language modelling head scale its last hidden states, if the config asks for it."""
    if config.scale_decoder_outputs:
        stack.output_scale = config.hidden_size**-0.5


class StateSpaceModelMixin:
    """Mixin before `PreTrainedModel` for models with state space layers."""

    def ssm_parameters(self, *, dynamics: bool | None = None) -> Iterator[nn.Parameter]:
        """Yield the state space layers' trained tensors, which need no weight decay; see `layers.state_space`."""
        return ssm_parameters(self, dynamics=dynamics)


class CausalLMForward:
    """Forward of a causal language model: `lm_head`, from `add_lm_head`, on a causal `model` with `embed_tokens`.

    With `config.adaptive_cutoffs` the logits are log-probabilities; in training with labels they are None, unless the
    call has `skip_logits=False`, since the loss needs only those of each label's cluster.
    """

    divides_sequences = True  # in `context_parallel`; see `check_divisible_model`
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def add_lm_head(self):
        """Build the head: a linear map to the vocabulary, or an adaptive softmax."""
        config = self.config
        if config.adaptive_cutoffs is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            return
        embedding, tied = self.model.embed_tokens, config.tie_word_embeddings
        self.lm_head = AdaptiveSoftmax(embedding, tied=tied, dropout=config.adaptive_dropout)
        self._tied_weights_keys = None  # a tied softmax has no tables of its own

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the token after each token, and with labels the loss.

        In place of `labels`, `shift_labels` `(B, T)` holds the label of each token's prediction: `labels` already
        shifted, as context parallelism passes them. With `skip_logits` (see the config) the loss is computed alone.
        """
        num_items_in_batch, shift_labels = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        has_labels = labels is not None or shift_labels is not None
        adaptive = self.config.adaptive_cutoffs is not None
        skips = skips_logits(self, skip_logits, has_labels, in_training=self.config.skip_logits or adaptive)
        if has_labels:
            inputs = input_ids if inputs_embeds is None else inputs_embeds
            if shift_labels is not None and inputs is not None and shift_labels.shape != inputs.shape[:2]:
                raise ValueError(f"shift_labels must be {tuple(inputs.shape[:2])}; got {tuple(shift_labels.shape)}")
            if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
                raise ValueError("logits_to_keep must be 0 together with labels, which need the logits of all tokens")
            use_cache = False if use_cache is None else use_cache
        shards = pass_shards(
            kwargs, input_ids if inputs_embeds is None else inputs_embeds, attention_mask, past_key_values
        )
        if shards is not None and labels is not None and shift_labels is None:
            shift_labels = next_tokens(labels, shards, -100)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        logits = None if skips else self._logits(hidden_states)
        loss = None
        if has_labels:
            loss = self._loss(logits, hidden_states, labels, shift_labels, num_items_in_batch, shards)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.config.adaptive_cutoffs is None:
            return self.lm_head(hidden_states)
        return self.lm_head(hidden_states, self._tied_tables())

    def _tied_tables(self) -> nn.Module | None:
        return self.model.embed_tokens if self.config.tie_word_embeddings else None

    def _loss(
        self,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None,
        shift_labels: torch.LongTensor | None,
        num_items_in_batch: torch.Tensor | int | None,
        shards: Shards | None,
    ) -> torch.Tensor:
        adaptive = self.config.adaptive_cutoffs is not None
        if logits is not None and not adaptive:
            of_count = loss_of_logits(self, logits, labels, shift_labels=shift_labels)
        else:
            if shift_labels is None:
                hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
            of_count = loss_alone(self, hidden_states, shift_labels, self._adaptive_loss if adaptive else None)
        return mean_loss(of_count, shift_labels, num_items_in_batch, shards)

    def _adaptive_loss(self, hidden_states: torch.Tensor, labels: torch.LongTensor) -> torch.Tensor:
        return self.lm_head.loss(hidden_states, labels, self._tied_tables())[0]

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        """Resize the vocabulary, as in every model of transformers; an adaptive vocabulary has a fixed size."""
        if self.config.adaptive_cutoffs is not None:
            raise ValueError(
                f"adaptive_cutoffs must be None to resize the vocabulary; got {self.config.adaptive_cutoffs}"
            )
        return super().resize_token_embeddings(*args, **kwargs)


class MaskedLMForward:
    """Forward of a masked language model: `lm_head` on every token of a bidirectional `model`."""

    divides_sequences = True

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Compute the logits of every token, and with labels the loss; with `skip_logits` the loss alone."""
        skips = skips_logits(self, skip_logits, labels is not None, in_training=self.config.skip_logits)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        shards = pass_shards(kwargs, input_ids if inputs_embeds is None else inputs_embeds, attention_mask)
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        logits = None if skips else self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            states = outputs.last_hidden_state
            of_count = loss_alone(self, states, labels) if skips else loss_of_logits(self, logits, labels)
            loss = mean_loss(of_count, labels, num_items_in_batch, shards)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class SequenceClassificationForward:
    """Forward of a sequence classifier: `dropout` and `classifier` on the tokens pooled by `config.pooling`."""

    divides_sequences = True
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Compute the logits of every sequence, and with labels the loss."""
        inputs = next((x for x in (inputs_embeds, input_ids, kwargs.get("input_values")) if x is not None), None)
        shards = pass_whole_rows(kwargs, inputs, "each row is classified as one", attention_mask)
        kwargs.setdefault("use_cache", False)
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        logits = self._classify(pool(outputs.last_hidden_state, attention_mask, self.config.pooling, shards))
        loss = None
        if labels is not None:
            loss = shared_loss(self.loss_function(labels=labels, pooled_logits=logits, config=self.config), shards)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(pooled))


class SequencePairClassificationForward:
    """Forward of a classifier of pairs: `model` reads both sequences, and a head both vectors `(B, 2 D)` at once.

    The vectors are pooled by `config.pooling`, and the second sequence's comes first, as in Mega. The class that uses
    it defines `_classify`, which makes logits of them.
    """

    divides_sequences = True
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pair_input_ids: torch.LongTensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        pair_inputs_embeds: torch.Tensor | None = None,
        pair_input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Compute the logits of every pair, and with labels the loss.

        Args:
            input_ids: Tokens of the first sequences, `(B, T)`.
            attention_mask: `(B, T)`, 1 = keep.
            inputs_embeds: In place of tokens, `(B, T, D)`.
            input_values: In place of tokens, real values, `(B, T)` or `(B, T, config.input_size)`.
            pair_input_ids: Tokens of the second sequences, `(B, T_2)`.
            pair_attention_mask: `(B, T_2)`.
            pair_inputs_embeds: `(B, T_2, D)`.
            pair_input_values: `(B, T_2)` or `(B, T_2, config.input_size)`.
            labels: `(B,)`; of several labels at once, or of numbers, as for a classifier of single sequences.
            **kwargs: Passed to `model`.

        Raises:
            ValueError: One of the sequences is missing, there are not as many of one as of the other, or sequences are
                packed.
        """
        kwargs.setdefault("use_cache", False)
        first = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        second = {"input_ids": pair_input_ids, "inputs_embeds": pair_inputs_embeds, "input_values": pair_input_values}
        sizes = [next((x.shape[0] for x in inputs.values() if x is not None), None) for inputs in (first, second)]
        if None in sizes or sizes[0] != sizes[1]:
            raise ValueError(
                f"both sequences of a pair must be given (such as input_ids and pair_input_ids), in batches of equal "
                f"size; got sizes {sizes[0]} and {sizes[1]}"
            )
        layouts = []
        for inputs, mask in ((first, attention_mask), (second, pair_attention_mask)):
            given = next(x for x in inputs.values() if x is not None)
            layouts.append(pass_whole_rows(kwargs, given, "each row is classified as one", mask))
            kwargs.pop("shards", None)  # each has its own
        shards, pair_shards = layouts
        pooled = (
            self._pooled(pair_attention_mask, pair_shards, **second, **kwargs),
            self._pooled(attention_mask, shards, **first, **kwargs),
        )
        logits = self._classify(torch.cat(pooled, dim=-1))
        loss = None
        if labels is not None:
            loss = shared_loss(self.loss_function(labels=labels, pooled_logits=logits, config=self.config), shards)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _pooled(self, attention_mask: torch.Tensor | None, shards: Shards | None, **inputs) -> torch.Tensor:
        if shards is not None:
            inputs["shards"] = shards
        outputs = self.model(attention_mask=attention_mask, return_dict=True, **inputs)
        return pool(outputs.last_hidden_state, attention_mask, self.config.pooling, shards)


class TokenClassificationForward:
    """Forward of a token classifier: `dropout` and `classifier` on every token of `model`."""

    divides_sequences = True
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Compute the logits of every token, and with labels the loss."""
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        shards = pass_shards(kwargs, input_ids if inputs_embeds is None else inputs_embeds, attention_mask)
        kwargs.setdefault("use_cache", False)
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = mean_loss(
                lambda count: self.loss_function(logits, labels, self.config, num_items_in_batch=count),
                labels,
                num_items_in_batch,
                shards,
            )
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class QuestionAnsweringForward:
    """Forward of a model that marks an answer's first and last token: `qa_outputs` on every token of `model`."""

    divides_sequences = True
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Compute the logits of the first and the last token, and with positions the loss."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        shards = pass_whole_rows(kwargs, inputs, "each row has one answer", attention_mask)
        kwargs.setdefault("use_cache", False)
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = logits.unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            if shards is not None:
                (logits,) = fetch(shards, [Span(0, shards.length)] * shards.size, logits)
            loss = shared_loss(self.loss_function(*logits.unbind(dim=-1), start_positions, end_positions), shards)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
