"""CHELA: short-long convolutions feed linear attention (Liu et al. 2024).

Shapes: B batch · T length · P tokens already read · D width · H heads · K = D / H head width · C chunk.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...kernels import laplace_attention, linear_attention
from ...kernels.laplace_attention import laplace
from ...layers.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from ...layers.feed_forward import FeedForward
from ...layers.long_conv import DampedEMA, LongConv, ShortLongConv
from ...layers.norms import ScaleNorm, apply_norm, make_norm
from ...layers.s4d import S4D
from ...layers.state_space import StateSpaceLayer
from ..checks import check_not_empty
from ..description import ModelCardMixin
from ..heads import (
    CausalLMForward,
    MaskedLMForward,
    QuestionAnsweringForward,
    SequenceClassificationForward,
    StateSpaceModelMixin,
    TokenClassificationForward,
    make_embedding,
    make_lm_head,
    pool,
)
from ..state_cache import StatefulGenerationMixin, state_layer
from .configuration_chela import ChelaConfig

ALPHA_STD = 0.02
"""Of α_q and α_k at first. The norm behind them takes their size out, but a step of Adam moves small ones further."""

logger = logging.get_logger(__name__)


class KeptKeys(NamedTuple):
    """What Laplace attention remembers: keys and values, which of them are kept, and where the grid of chunks starts.

    Attributes:
        key: `(B, P, H, K)`, of the last C - 1 tokens where there are chunks.
        value: `(B, P, H, K)`.
        kept: `(B, P)`, boolean.
        first: Place of each row's first kept token among these keys, before them if negative, `(B,)`; P where none is
            kept yet.
    """

    key: torch.Tensor
    value: torch.Tensor
    kept: torch.Tensor
    first: torch.Tensor


class ChelaState(NamedTuple):
    """What a layer hands on: the mixer's state, and that of the attention, a matrix `(B, H, K, K)` or keys."""

    mixer: Any
    attention: torch.Tensor | KeptKeys


class ChelaUnit(nn.Module):
    """Convolutions, attention over what they give, and two gates (CHELA, section 4.3).

    Z = mixer(x),  Q = α_q Z + β_q,  K = α_k Z + β_k,  V = SiLU(x W_v + b_v)                    (eqs. 8, 11 to 13)
    M = Norm(Q (K^T V)) ⊙ SiLU(Z W_g + b_g),  U = M ⊙ G + r ⊙ (1 - G),  G = sigmoid(Z W_o + b_o)    (eqs. 9 to 15)

    with the residual r that the caller gives; causal sums in Q (K^T V) where the model is.

    Args:
        config: The config.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.mixer = make_mixer(config)
        self.v_proj = nn.Linear(width, width)
        self.gate_proj = None if config.share_gate_value_proj else nn.Linear(width, width)
        self.gate_bias = nn.Parameter(torch.zeros(width)) if config.share_gate_value_proj else None
        self.output_gate_proj = nn.Linear(width, width)
        self.query_alpha, self.key_alpha = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.query_beta, self.key_beta = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.attention_norm = None
        if config.attention_norm in ("rms_norm", "layer_norm") and config.attention_fn != "laplace":
            head_dim = width // config.num_attention_heads
            self.attention_norm = make_norm(config.attention_norm, head_dim, config.attention_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.value_dropout = nn.Dropout(config.activation_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        kept: torch.Tensor | None,
        state: ChelaState | None,
        return_state: bool,
    ) -> tuple[torch.Tensor, ChelaState | None]:
        """Run the unit.

        Args:
            hidden_states: x, `(B, T, D)`.
            residual: r, `(B, T, D)`.
            kept: `(B, T)`, True for tokens to keep; all when None.
            state: What the tokens before left behind.
            return_state: Whether to return the state after these.

        Returns:
            U, `(B, T, D)`, and the state or None.
        """
        if kept is not None:
            hidden_states = hidden_states.masked_fill(~kept[..., None], 0)
        mixer_state = None
        if state is not None or return_state:
            before = None if state is None else state.mixer
            mixed, mixer_state = self.mixer(hidden_states, kept, state=before, return_state=True)
        else:
            mixed = self.mixer(hidden_states, kept)
        mixed = self.dropout(mixed)
        value = self.value_dropout(F.silu(self.v_proj(hidden_states)))
        before = None if state is None else state.attention
        attended, attention_state = self._attend(mixed, value, self._gate(mixed), kept, before)
        output_gate = torch.sigmoid(self.output_gate_proj(mixed))
        attended = self.dropout(attended)
        output = residual + output_gate * (attended - residual)
        return output, ChelaState(mixer_state, attention_state) if return_state else None

    def _gate(self, mixed: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.gate_proj(mixed)
        if isinstance(self.v_proj, nn.Linear):
            return F.linear(mixed, self.v_proj.weight, self.gate_bias)
        # what an adapter makes of the shared map, without the value's bias
        return self.v_proj(mixed) - self.v_proj(torch.zeros_like(mixed[:1, :1])) + self.gate_bias

    def _attend(
        self,
        mixed: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        kept: torch.Tensor | None,
        state: torch.Tensor | KeptKeys | None,
    ) -> tuple[torch.Tensor, torch.Tensor | KeptKeys | None]:
        """M, `(B, T, D)`, and the attention's next state, which a bidirectional model does not have."""
        heads = (*mixed.shape[:2], self.config.num_attention_heads, -1)
        query = (mixed * self.query_alpha + self.query_beta).to(value.dtype)
        key = (mixed * self.key_alpha + self.key_beta).to(value.dtype)
        if self.config.attention_fn == "laplace_feature":
            query, key = laplace(query), laplace(key)
        if kept is not None:  # an offset gives padding a key
            key = key.masked_fill(~kept[..., None], 0)
        query, key, value, gate = query.view(heads), key.view(heads), value.view(heads), gate.view(heads)
        if self.config.attention_fn == "laplace":
            attended, state = self._laplace_attention(query, key, value, kept, state)
            return (attended * F.silu(gate)).flatten(2), state
        options = {"causal": self.config.is_decoder, "state": state}
        if self.config.attention_norm == "simple_rms_norm":
            eps = self.config.attention_norm_eps
            attended, state = linear_attention(query, key, value, norm_eps=eps, gate=gate, **options)
            return attended.flatten(2), state
        attended, state = linear_attention(query, key, value, **options)
        attended = self._normed(attended).to(value.dtype) * F.silu(gate)
        if self.attention_norm is None and value.dtype == torch.float16:
            logger.warning_once("attention_norm 'none' leaves float16's range on long inputs: use bfloat16.")
        return attended.flatten(2), state

    def _normed(self, attended: torch.Tensor) -> torch.Tensor:
        """The norm of each head in the precision of the sums, whatever the weights' own."""
        if self.attention_norm is None:
            return attended
        weights = dict(self.attention_norm.named_parameters())
        if all(weight.dtype == attended.dtype for weight in weights.values()):
            return self.attention_norm(attended)
        weights = {name: weight.to(attended.dtype) for name, weight in weights.items()}
        return torch.func.functional_call(self.attention_norm, weights, attended)

    def _laplace_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kept: torch.Tensor | None,
        state: KeptKeys | None,
    ) -> tuple[torch.Tensor, KeptKeys]:
        kept = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if kept is None else kept
        length = kept.shape[1]
        place = torch.where(kept.any(1), kept.int().argmax(1), length)
        first = place
        if state is not None:
            past = state.kept.shape[1]
            first = torch.where(state.first < past, state.first, past + place)
            key, value = torch.cat([state.key, key], dim=1), torch.cat([state.value, value], dim=1)
            kept = torch.cat([state.kept, kept], dim=1)
        attended = laplace_attention(
            query,
            key,
            value,
            causal=self.config.is_decoder,
            attention_mask=kept,
            chunk_size=self.config.chunk_size,
            first=first,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        total = kept.shape[1]
        dropped = 0 if self.config.chunk_size is None else max(0, total - self.config.chunk_size + 1)
        return attended, KeptKeys(key[:, dropped:], value[:, dropped:], kept[:, dropped:], first - dropped)


class ChelaLayer(GradientCheckpointingLayer):
    """One layer: CHELA's unit, whose output gate is its residual path, and a feed-forward network with a residual.

    Pre-norm ``u = unit(N1(x), x)``, ``y = u + ffn(N2(u))``; post-norm ``u = N1(unit(x, x))``, ``y = N2(u + ffn(u))``.

    Args:
        config: The config.
        layer_idx: Index of the layer, for the cache.
    """

    def __init__(self, config: ChelaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.pre_norm = config.norm_position == "pre"
        self.raw_residual = config.gate_residual == "raw"
        self.unit = ChelaUnit(config)
        self.unit_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            ACT2FN[config.hidden_act],
            dropout=config.activation_dropout,
        )
        self.feed_forward_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`; `attention_mask` is `(B, T)`, True for tokens to keep."""
        inputs = apply_norm(self.unit_norm, hidden_states, attention_mask) if self.pre_norm else hidden_states
        residual = hidden_states if self.raw_residual else inputs
        cached = None if past_key_values is None else state_layer(past_key_values, self.layer_idx)
        state = None if cached is None else cached.state
        hidden_states, state = self.unit(inputs, residual, attention_mask, state, cached is not None)
        if cached is not None:
            cached.store(state, inputs.shape[1])
        if self.pre_norm:
            inputs = apply_norm(self.feed_forward_norm, hidden_states, attention_mask)
            return hidden_states + self.dropout(self.feed_forward(inputs))
        hidden_states = apply_norm(self.unit_norm, hidden_states, attention_mask)
        hidden_states = hidden_states + self.dropout(self.feed_forward(hidden_states))
        return apply_norm(self.feed_forward_norm, hidden_states, attention_mask)


class ChelaPreTrainedModel(ModelCardMixin, StateSpaceModelMixin, PreTrainedModel):
    """Base of all CHELA models: initialisation, and what transformers wants to know about them."""

    config: ChelaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ChelaLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["mixer"]
    _can_record_outputs = {"hidden_states": ChelaLayer}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, StateSpaceLayer | AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters()
        elif isinstance(module, ScaleNorm):
            if module.weight is not None:
                init.ones_(module.weight)
        elif isinstance(module, nn.Embedding) and self.config.scale_embeddings:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, ChelaUnit):
            for alpha, beta in (
                (module.query_alpha, module.query_beta),
                (module.key_alpha, module.key_beta),
            ):
                init.zeros_(beta)
                if self.config.alpha_init is None:
                    init.normal_(alpha, std=ALPHA_STD)
                else:
                    init.constant_(alpha, float(self.config.alpha_init))
            if module.gate_bias is not None:
                init.zeros_(module.gate_bias)

    def post_init(self):
        """Finish construction as everywhere in transformers, and say what the model reads."""
        super().post_init()
        if self.config.input_size is not None:
            self.main_input_name = "input_values"

    def fuse_short_convs(self, *, keep_branches: bool = True):
        """Make one convolution of the parallel short ones of every layer, for inference (CHELA, section 4.2).

        Outputs stay what they are. The branches stay too, and are what is saved; `unfuse_short_convs` or training
        brings them back. Calling it twice changes nothing more.

        Args:
            keep_branches: Whether they are kept. Without, the model becomes one with a single short convolution, in
                its config as well, and is saved as such.

        Raises:
            ValueError: The model is in training mode.
        """
        convolutions = self._short_convs()
        for convolution in convolutions:  # all or none
            convolution.check_not_training()
        for convolution in convolutions:
            if keep_branches:
                convolution.fuse_short_convs()
            else:
                convolution.merge_branches()
        if convolutions and not keep_branches:
            config = copy.deepcopy(self.config)  # other models may have the old one
            config.short_kernel_sizes = [max(config.short_kernel_sizes)]
            config.short_conv_bias = convolutions[0].short_bias
            config.short_branch_norm = False
            for module in self.modules():
                if getattr(module, "config", None) is self.config and module is not self:
                    module.config = config
            self.config = config

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        """Resize the vocabulary, as everywhere in transformers, if there is one."""
        if self.config.input_size is not None:
            raise ValueError(f"input_size must be None to resize the vocabulary; got {self.config.input_size}")
        return super().resize_token_embeddings(*args, **kwargs)

    def unfuse_short_convs(self):
        """Undo `fuse_short_convs`, unless it gave up the branches."""
        for convolution in self._short_convs():
            convolution.unfuse_short_convs()

    def _short_convs(self) -> list[ShortLongConv]:
        return [module for module in self.modules() if isinstance(module, ShortLongConv)]


class ChelaModel(ChelaPreTrainedModel):
    """CHELA without a head: embedding, layers and final norm, bidirectional or, with `config.is_decoder`, causal.

    Sequences of real values, such as pixels or audio, come as `input_values` `(B, T)` or `(B, T, config.input_size)`.

    Args:
        config: The config.
    """

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may have set fields without checking them
        self.embed_tokens = self.input_proj = None
        if config.input_size is not None:
            self.input_proj = nn.Linear(config.input_size, config.hidden_size)
        else:
            self.embed_tokens = make_embedding(config)
        self.layers = nn.ModuleList(ChelaLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(
                config.norm_type, config.hidden_size, config.layer_norm_eps, affine=config.final_norm_affine
            )
        self.dropout = nn.Dropout(config.dropout)
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
        if inputs_embeds is None:
            inputs_embeds = self._embed(input_ids, input_values)
        elif input_ids is not None or input_values is not None:
            raise ValueError("only one of input_ids, input_values and inputs_embeds may be given")
        check_not_empty("input_ids", inputs_embeds)
        if not self.config.is_decoder:
            past_key_values = None
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        kept = None
        if attention_mask is not None:
            batch, length, _ = inputs_embeds.shape
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            if attention_mask.shape not in ((batch, length), (batch, past + length)):
                raise ValueError(
                    f"attention_mask must be of shape (batch, length) = {(batch, past + length)}, for all tokens so "
                    f"far, or {(batch, length)}; got {tuple(attention_mask.shape)}"
                )
            kept = attention_mask[:, -length:].to(torch.bool)
        hidden_states = self.dropout(inputs_embeds)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=kept, past_key_values=past_key_values, **kwargs)
        if self.final_norm is not None:
            hidden_states = apply_norm(self.final_norm, hidden_states, kept)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _embed(self, input_ids: torch.Tensor | None, input_values: torch.Tensor | None) -> torch.Tensor:
        """Embeddings `(B, T, D)` of tokens or of real values."""
        size = self.config.input_size
        if (input_ids is None) == (input_values is None) or (input_values is None) == (size is not None):
            wanted, other = ("input_ids", "input_values") if size is None else ("input_values", "input_ids")
            raise ValueError(
                f"{wanted} or inputs_embeds must be given, and no {other}, for a model with input_size {size}"
            )
        if size is None:
            return self.embed_tokens(input_ids)
        if input_values.dim() == 2:
            input_values = input_values[..., None]
        if input_values.shape[-1] != size:
            raise ValueError(f"input_values must be (B, T, {size}); got {tuple(input_values.shape)}")
        return self.input_proj(input_values.to(self.input_proj.weight.dtype))


class ChelaForCausalLM(CausalLMForward, StatefulGenerationMixin, ChelaPreTrainedModel):
    """CHELA causal language model (CHELA, section 5.3).

    With `adaptive_cutoffs` the logits are log-probabilities, and None in training with labels.

    Args:
        config: The config; whatever it says about that, this model is causal.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ChelaConfig):
        config = copy.deepcopy(config)
        config.is_decoder = True
        super().__init__(config)
        check_reads_tokens(self)
        self.model = ChelaModel(config)
        self.lm_head = make_lm_head(config, self.model.embed_tokens)
        if config.adaptive_cutoffs is not None:
            self._tied_weights_keys = None  # a tied softmax has no tables of its own
        self.post_init()


class ChelaForMaskedLM(MaskedLMForward, ChelaPreTrainedModel):
    """Bidirectional CHELA with a language modelling head, for masked language modelling.

    Args:
        config: The config.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

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
    """Classifier of pooled vectors: a layer with an activation, and a projection to the labels (Mega's).

    Args:
        config: The config.
        num_sequences: How many pooled vectors it reads, side by side.
    """

    weight = None  # peft's IA3 hands the weight of a module that it saved to the merged model, if it has one or not

    def __init__(self, config: ChelaConfig, num_sequences: int = 1):
        super().__init__()
        self.dense = nn.Linear(num_sequences * config.hidden_size, config.classifier_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.classifier_size, config.num_labels, bias=False)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(pooled))))


class ChelaForSequenceClassification(SequenceClassificationForward, ChelaPreTrainedModel):
    """CHELA that classifies whole sequences of tokens or real values (CHELA, sections 5.1 and 5.2).

    `config.pooling` says what the classifier reads; `config.num_labels` and `config.problem_type` are as everywhere in
    transformers.

    Args:
        config: The config.
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


class ChelaForSequencePairClassification(ChelaPreTrainedModel):
    """CHELA that reads two sequences, each by itself, and classifies the pair: the Long Range Arena's retrieval task.

    The classifier reads both pooled vectors side by side, the second sequence's first, as Mega's does. Hidden states
    are not returned.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.model = ChelaModel(config)
        self.classifier = ChelaClassifier(config, num_sequences=2)
        self.post_init()

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
        kwargs.setdefault("use_cache", False)
        names = ("input_ids", "inputs_embeds", "input_values")
        first = dict(zip(names, (input_ids, inputs_embeds, input_values), strict=True))
        second = dict(zip(names, (pair_input_ids, pair_inputs_embeds, pair_input_values), strict=True))
        sizes = [next((x.shape[0] for x in inputs.values() if x is not None), None) for inputs in (first, second)]
        if None in sizes or sizes[0] != sizes[1]:
            raise ValueError(
                f"both sequences of a pair must be given (input_ids and pair_input_ids, or the like), in batches of "
                f"one size; got sizes {sizes[0]} and {sizes[1]}"
            )
        pooled = []
        for inputs, mask in ((second, pair_attention_mask), (first, attention_mask)):
            outputs = self.model(attention_mask=mask, return_dict=True, **inputs, **kwargs)
            pooled.append(pool(outputs.last_hidden_state, mask, self.config.pooling))
        logits = self.classifier(torch.cat(pooled, dim=-1))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class ChelaForTokenClassification(TokenClassificationForward, ChelaPreTrainedModel):
    """CHELA that classifies every token.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.model = ChelaModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class ChelaForQuestionAnswering(QuestionAnsweringForward, ChelaPreTrainedModel):
    """CHELA that marks an answer's first and last token.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    def __init__(self, config: ChelaConfig):
        super().__init__(config)
        self.model = ChelaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


def check_reads_tokens(model: ChelaPreTrainedModel):
    """Raise ValueError if a language model is to read real values."""
    if model.config.input_size is not None:
        raise ValueError(f"input_size must be None for {type(model).__name__}; got {model.config.input_size}")


def make_mixer(config: ChelaConfig) -> StateSpaceLayer:
    """Build what makes Z in one layer."""
    width, bidirectional = config.hidden_size, not config.is_decoder
    if config.mixer == "s4d":
        return S4D(width, config.mixer_state_size, bidirectional=bidirectional, freeze="none")
    if config.mixer == "ema":
        return DampedEMA(width, config.mixer_state_size, bidirectional=bidirectional)
    options = {
        "groups": config.long_kernel_groups,
        "bidirectional": bidirectional,
        "init": config.long_kernel_init,
        "lam": config.kernel_squash,
        "kernel_dropout": config.kernel_dropout,
        "smoothing": config.kernel_smoothing,
        "use_D": config.long_conv_skip,
    }
    if config.mixer == "long":
        return LongConv(width, config.long_kernel_size, **options)
    return ShortLongConv(
        width,
        config.long_kernel_size,
        short_kernel_sizes=config.short_kernel_sizes,
        short_bias=config.short_conv_bias,
        branch_norm=config.short_branch_norm,
        **options,
    )


__all__ = [
    "ChelaForCausalLM",
    "ChelaForMaskedLM",
    "ChelaForQuestionAnswering",
    "ChelaForSequenceClassification",
    "ChelaForSequencePairClassification",
    "ChelaForTokenClassification",
    "ChelaModel",
    "ChelaPreTrainedModel",
]
