"""Configuration of SPADE models: the encoder-decoder, the encoder, the causal language model."""

import copy
import re
from itertools import chain

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..checks import (
    MAX_STATE_SIZE,
    NORM_TYPES,
    check_activation,
    check_adaptive_vocabulary,
    check_batch_norm,
    check_choices,
    check_not_absurd,
    check_number_of_layers,
    check_positive_integers,
    check_positive_numbers,
    check_probabilities,
    check_relative_attention,
    check_token_ids,
    check_unknown_fields,
    check_unread,
    fill_defaults,
    fill_head_dim,
    forget_code,
    preset_fields,
)
from .state_space_fields import SSM_DISCRETIZATIONS, SSM_FIELDS, SSM_INITS, check_state_space

ATTENTION_TYPES = ("window", "chunk", "full", "none")
COMBINE_MODES = ("concat", "add", "stack", "residual")
CONCAT_ORDERS = ("local_global", "global_local")
DECODER_POSITIONS = ("relative", "learned_absolute")
NORM_POSITIONS = ("post", "pre")
POOLINGS = ("first", "mean", "last")
SSM_POSTACTS = (None, "gelu_glu")
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_decoder_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "chunk_size",
    "max_decoder_position_embeddings",
    "ssm_num_copies",
    "ssm_l_max",
    "ssm_blocks",
    "hyena_filter_size",
    "hyena_embedding_size",
    "hyena_short_kernel_size",
    "adaptive_factor",
    "input_size",
)
POSITIVE_NUMBERS = ("layer_norm_eps", "initializer_range", "ssm_dt_min", "ssm_dt_max", "hyena_sine_frequency")
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "adaptive_dropout", "classifier_dropout")

PRESETS = {
    # the size of the paper's encoder-decoder, section 5.1
    "base": {},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6},
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4},
    # the paper's language model, section 4.2 and appendix C.3
    "wikitext103": {
        "is_encoder_decoder": False,
        "is_decoder": True,
        "vocab_size": 267744,
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
        "final_norm": False,
        "layer_norm_eps": 1e-5,
        "combine_mode": "concat",
        "dropout": 0.3,
        "activation_dropout": 0.1,
        "adaptive_cutoffs": [20000, 60000],
        "adaptive_dropout": 0.2,
        "ssm_num_copies": 1024,
        "eos_token_id": None,
        "pad_token_id": None,
        "decoder_start_token_id": None,
    },
}


@strict
class SpadeConfig(PreTrainedConfig):
    r"""Configuration of a SPADE model (Zuo et al. 2022).

    The defaults have the size and shape of the paper's base encoder-decoder (section 5.1): a T5-shaped model with
    post-layer-norm, whose encoder attends locally and whose bottom encoder layer also reads a bidirectional S4. In two
    of them they leave the paper, because models learn better so: its encoder-decoder has ``combine_mode="concat",
    ssm_freeze="all"``. The class serves the encoder-decoder, the encoder alone and, with ``is_decoder=True,
    is_encoder_decoder=False``, the causal language model, whose defaults differ where the paper's do. Lengths and
    distances are in tokens.

    Args:
        vocab_size: Rows of the token embedding.
        hidden_size: Model width D.
        num_hidden_layers: Encoder layers.
        num_decoder_layers: Decoder layers; as many as encoder layers when None.
        num_attention_heads: Heads H of every attention.
        intermediate_size: Inner width of the feed-forward network.
        dropout: Dropout on embeddings and on the output of every sub-layer.
        attention_dropout: Dropout on attention probabilities.
        activation_dropout: Dropout inside the feed-forward network.
        initializer_range: Standard deviation of initial weights. When None, ``hidden_size ** -0.5``, which keeps
            projections as large as their inputs at every width, and in post-norm encoders and their decoders
            ``0.4 ** 0.5`` times as much, so that what a layer adds is small beside its normalised input (SmallInit,
            Nguyen and Salazar 2019).
        is_encoder_decoder: Whether the model has an encoder and a decoder.
        is_decoder: Whether this is a causal stack: a language model, or the view of a decoder.
        use_cache: Whether decoding returns its cache of keys, values and states.
        pad_token_id: Padding token.
        bos_token_id: Beginning-of-sequence token, if there is one.
        eos_token_id: End-of-sequence token or tokens.
        decoder_start_token_id: First token the decoder reads.
        input_size: For sequences of real values (pixels, audio), which an encoder or classifier reads: numbers per
            position, which a linear map embeds; None for tokens.

    Attention:
        attention_type: Self-attention of the encoder or of the language model: `"window"`, `"chunk"`, `"full"`, or
            `"none"` if every layer is global (a state space model alone).
        local_radius: Reach of window attention: a query sees keys at most this far away, on both sides where the model
            is bidirectional. When None, 511 for a language model (a window of 512) and 128 otherwise.
        chunk_size: Length of a chunk of chunk attention; when None, 512 for a language model and 128 otherwise.
        decoder_attention_type: Decoder self-attention of an encoder-decoder, always causal.
        head_dim: Width of one head; ``hidden_size / num_attention_heads`` when None.
        attention_bias: Whether the attention projections have biases.
        scale_attention: Whether scores are multiplied by ``head_dim ** -0.5``; T5 itself does not.
        relative_attention_num_buckets: Buckets of the relative position bias.
        relative_attention_max_distance: Distance from which all positions share a bucket.
        relative_attention_init: Initial biases: `"recency"`, which prefers near keys, with a different reach in each
            head, and which optimizers would take long to find; or `"normal"`, small random numbers as in T5.
        share_relative_bias: Whether all layers of the encoder or language model share one bias table; when None, only
            a language model's do.
        decoder_share_relative_bias: Whether all decoder layers share one (T5) or have one each (UMT5).
        decoder_position: `"relative"` (causal T5 tables) or `"learned_absolute"`.
        max_decoder_position_embeddings: Rows of the absolute position table; when None, 1024 if there is such a table.

    State space model:
        global_layers: Encoder layers that also read the state space model: a list of indices, or `"none"`, `"all"`,
            `"bottom"`, `"top"`, `"bottom-K"`, `"top-K"`, which becomes a list.
        decoder_global_layers: The same for the decoder, where the state space model is causal.
        combine_mode: How a global layer joins its two branches: `"concat"` (the paper: one linear map of both
            normalised branches), `"add"` (a weighted sum of both normalised branches), `"stack"` (attention reads the
            state space model's output), `"residual"` (attention plus a linear map of the normalised state space
            branch, zero at first, so that the layer starts as a local one). When None, `"residual"`, which learns
            better.
        ssm_type: The state space model: `"s4"`, `"s4d"`, `"s5"`, or in its place `"hyena"` or `"lstm"`.
        ssm_state_size: State size N, even; per channel (S4, S4D) or of the whole layer (S5). When None, 64 for S4 and
            S4D, 256 for S5.
        ssm_freeze: `"all"` (the paper; of Hyena the filters), `"ab_dt"` (train C and D only; S4, S4D and S5) or
            `"none"` (train everything, as the published code does in language models). When None, `"none"`, which
            learns better.
        ssm_dt_min: Smallest initial step Δ.
        ssm_dt_max: Largest initial step Δ.
        ssm_l_max: Longest memory of the state space model. S4 and S4D: in an encoder only, unlimited when None. Hyena:
            anywhere, its filters are functions of t / ssm_l_max; 4096 when None.

    Feed forward and norms:
        hidden_act: Activation of the feed-forward network, a name known to transformers.
        gated_feed_forward: Whether the feed-forward network is gated (T5 v1.1).
        feed_forward_bias: Whether its projections have biases.
        norm_type: `"layer_norm"`, `"rms_norm"` (T5), `"scale_norm"` or, in an encoder or classifier, `"batch_norm"`,
            which ignores padding. Pixels and sound are hard to learn without it.
        norm_position: `"post"` or `"pre"` (T5); when None, `"pre"` for a language model and `"post"` otherwise, as in
            the paper.
        layer_norm_eps: Epsilon of every norm.
        embedding_norm: Whether a norm follows the embedding of each stack; when None, only with post-norm.
        final_norm: Whether a norm ends each stack; when None, only with pre-norm.

    Embeddings and heads:
        tie_word_embeddings: Whether the language modelling head shares the embedding table. Encoder and decoder always
            share one (T5; False: T5 v1.1).
        scale_embeddings: Whether token embeddings are multiplied by ``sqrt(hidden_size)``, which makes them as large
            as what the first layer adds; when None, only without `embedding_norm`.
        scale_decoder_outputs: Whether the input of a language modelling head is multiplied by ``hidden_size ** -0.5``
            (T5 with tied embeddings).
        skip_logits: Whether a model with a language modelling head computes the loss alone when it is in training mode
            and has labels: the output's `logits` are None, and those of a whole sequence are never held. An argument
            `skip_logits` of the call comes first; by itself, a model in evaluation mode returns logits.
        adaptive_cutoffs: For a language model: token ids, sorted by frequency, at which the next cluster of an
            adaptive input embedding and softmax begins (Baevski and Auli 2019); None for an ordinary vocabulary.
        adaptive_factor: How much narrower each cluster's embeddings are than those of the one before.
        adaptive_dropout: Dropout on the softmax's input and on its projections to the later clusters.
        pooling: What a sequence classifier reads: the `"mean"` of the encoder's kept tokens, or the `"first"` (for
            inputs that begin with a class token) or `"last"` of them.
        classifier_dropout: Dropout before the classification heads; `dropout` when None.

    Ablations and variants:
        combine_alpha: For `"add"`, the weight of the global branch; the local one gets the rest.
        concat_order: For `"concat"`, `"local_global"` (the paper) or `"global_local"` (the published code).
        ssm_init: Initial eigenvalues: `"legs"`, for S4D also `"lin"` (the default there) or `"inv"`.
        ssm_discretization: `"zoh"` (the default) or `"bilinear"` for S4D and S5, `"bilinear"` for S4.
        ssm_blocks: HiPPO blocks that S5's state starts as.
        ssm_num_copies: Independent copies of (A, B) in S4 and S4D, which the channels share; one when None. Also
            accepted as `ssm_n_ssm`.
        ssm_stop_gradient: Whether to cut the gradient through the global branch to its input, as the published code
            does.
        ssm_use_D: Whether the state space model has a skip connection D.
        ssm_postact: None (the paper) or `"gelu_glu"`: an activation and a gated projection after it.
        hyena_order: Order of Hyena's recurrence: products of projections, with a long convolution between every two.
        hyena_filter_size: Width of the network that makes Hyena's filters.
        hyena_embedding_size: Positional features that it reads, odd.
        hyena_sine_frequency: Initial frequency of its sine activations.
        hyena_short_kernel_size: Taps of the short convolution on Hyena's projections.

    Raises:
        ValueError: The names of layers or the head width break a rule above.
        huggingface_hub.errors.StrictDataclassError: Another value breaks its rule, or has the wrong type. Its cause is
            the error that names the field, the value and the rule, as with every config of transformers.
    """

    model_type = "spade"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"ssm_n_ssm": "ssm_num_copies"}  # its name up to 0.1
    base_model_fsdp_plan = {}  # each stack names its own layers

    vocab_size: int = 32128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_decoder_layers: int | None = None
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    initializer_range: float | int | None = None
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0
    input_size: int | None = None
    attention_type: str = "window"
    local_radius: int | None = None
    chunk_size: int | None = None
    decoder_attention_type: str = "full"
    head_dim: int | None = None
    attention_bias: bool = False
    scale_attention: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_init: str = "recency"
    share_relative_bias: bool | None = None
    decoder_share_relative_bias: bool = True
    decoder_position: str = "relative"
    max_decoder_position_embeddings: int | None = None
    global_layers: list[int] | str = "bottom"
    decoder_global_layers: list[int] | str = "none"
    combine_mode: str | None = None
    ssm_type: str = "s4"
    ssm_state_size: int | None = None
    ssm_freeze: str | None = None
    ssm_dt_min: float | int = 1e-3
    ssm_dt_max: float | int = 1e-1
    ssm_l_max: int | None = None
    hidden_act: str = "relu"
    gated_feed_forward: bool = False
    feed_forward_bias: bool = True
    norm_type: str = "layer_norm"
    norm_position: str | None = None
    layer_norm_eps: float | int = 1e-6
    embedding_norm: bool | None = None
    final_norm: bool | None = None
    tie_word_embeddings: bool = True
    scale_embeddings: bool | None = None
    scale_decoder_outputs: bool = False
    skip_logits: bool = False
    adaptive_cutoffs: list[int] | None = None
    adaptive_factor: int = 4
    adaptive_dropout: float | int = 0.0
    pooling: str = "mean"
    classifier_dropout: float | int | None = None
    combine_alpha: float | int = 0.5
    concat_order: str = "local_global"
    ssm_init: str | None = None
    ssm_discretization: str | None = None
    ssm_blocks: int = 4
    ssm_num_copies: int | None = None
    ssm_stop_gradient: bool = False
    ssm_use_D: bool = True
    ssm_postact: str | None = None
    hyena_order: int = 2
    hyena_filter_size: int = 64
    hyena_embedding_size: int = 33
    hyena_sine_frequency: float | int = 14.0
    hyena_short_kernel_size: int = 3

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "SpadeConfig":
        """Build the configuration of a named size.

        Args:
            name: `"base"` (12+12 layers, width 768: the paper's size), `"small"` (6+6, 512) or `"tiny"` (4+4, 256);
                `"wikitext103"`, the paper's language model.
            **overrides: Fields to set differently; of `"wikitext103"`, another `hidden_size` may need another
                `ssm_num_copies` with it, and another `vocab_size` other `adaptive_cutoffs`.

        Raises:
            ValueError: No preset has this name.
        """
        fields = {**preset_fields(PRESETS, name), **overrides}
        choices = (fields.get(by, getattr(cls, by)) for by in ("ssm_type", "combine_mode", "adaptive_cutoffs"))
        unread = _unread(*choices)
        return cls(**{field: value for field, value in fields.items() if field in overrides or field not in unread})

    def __post_init__(self, **kwargs):
        """Set the fields whose default depends on others."""
        check_unknown_fields(self, kwargs)
        forget_code(self, kwargs)
        fill_defaults(self, num_decoder_layers=self.num_hidden_layers)
        check_number_of_layers(self, ("num_hidden_layers", "num_decoder_layers"))
        self._spell_out_layers()
        fill_head_dim(self)
        self._fill_in_defaults()
        fill_defaults(
            self,
            max_decoder_position_embeddings=1024 if self.decoder_position == "learned_absolute" else None,
            embedding_norm=self.norm_position == "post",
            final_norm=self.norm_position == "pre",
        )
        fill_defaults(self, scale_embeddings=not self.embedding_norm)
        super().__post_init__(**kwargs)

    def _fill_in_defaults(self):
        causal = self.is_decoder and not self.is_encoder_decoder
        inits, discretizations = (table.get(self.ssm_type, (None,)) for table in (SSM_INITS, SSM_DISCRETIZATIONS))
        fill_defaults(
            self,
            norm_position="pre" if causal else "post",
            combine_mode="residual",
            local_radius=511 if causal else 128,
            chunk_size=512 if causal else 128,
            share_relative_bias=causal,
            ssm_state_size={"s4": 64, "s4d": 64, "s5": 256}.get(self.ssm_type),
            ssm_freeze="none",
            ssm_init=inits[0],
            ssm_discretization=discretizations[0],
            ssm_l_max=4096 if self.ssm_type == "hyena" else None,
            ssm_num_copies=1 if "ssm_num_copies" in SSM_FIELDS.get(self.ssm_type, ()) else None,
            classifier_dropout=self.dropout,
        )
        if self.hidden_size > 0:
            scale = 1.0 if causal or self.norm_position == "pre" else 0.4**0.5
            fill_defaults(self, initializer_range=scale * self.hidden_size**-0.5)

    def _spell_out_layers(self):
        self.global_layers = _layer_list("global_layers", self.global_layers, self.num_hidden_layers)
        self.decoder_global_layers = _layer_list(
            "decoder_global_layers", self.decoder_global_layers, self.num_decoder_layers
        )

    def validate_architecture(self):
        """Check every field; part of the strict dataclass validation."""
        self._spell_out_layers()  # they may have been set again
        check_positive_integers(self, ("ssm_state_size",), MAX_STATE_SIZE)
        check_positive_integers(self, POSITIVE_FIELDS)
        if self.local_radius < 0:
            raise ValueError(f"local_radius must not be negative; got {self.local_radius}")
        check_not_absurd("local_radius", self.local_radius)
        if (self.ssm_state_size or 0) % 2:
            raise ValueError(f"ssm_state_size must be even; got {self.ssm_state_size}")
        if self.hidden_size % (self.ssm_num_copies or 1):
            raise ValueError(
                f"ssm_num_copies must divide hidden_size; got {self.ssm_num_copies} and hidden_size {self.hidden_size}"
            )
        check_relative_attention(self)
        check_probabilities(self, PROBABILITIES)
        if not 0 <= self.combine_alpha <= 1:
            raise ValueError(f"combine_alpha must lie in [0, 1]; got {self.combine_alpha}")
        check_positive_numbers(self, POSITIVE_NUMBERS)
        if self.ssm_dt_max < self.ssm_dt_min:
            raise ValueError(
                f"ssm_dt_max must be at least ssm_dt_min; got {self.ssm_dt_max} and ssm_dt_min {self.ssm_dt_min}"
            )
        check_state_space(self)
        if self.adaptive_cutoffs is not None:
            if self.is_encoder_decoder or not self.is_decoder or self.input_size is not None:
                raise ValueError(
                    f"adaptive_cutoffs must be None except for a language model (is_decoder True, is_encoder_decoder "
                    f"False, input_size None); got {self.adaptive_cutoffs}"
                )
            check_adaptive_vocabulary(self)
        for stack in ("", "decoder_") if self.is_encoder_decoder else ("",):
            layers = self.num_decoder_layers if stack else self.num_hidden_layers
            attention, global_layers = getattr(self, f"{stack}attention_type"), getattr(self, f"{stack}global_layers")
            if attention == "none" and len(global_layers) < layers:
                raise ValueError(
                    f"{stack}attention_type must not be 'none' unless all layers are in {stack}global_layers; "
                    f"got {stack}global_layers {global_layers} of {layers} layers"
                )
        check_token_ids(self, ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"))
        check_choices(
            self,
            {
                "attention_type": ATTENTION_TYPES,
                "combine_mode": COMBINE_MODES,
                "concat_order": CONCAT_ORDERS,
                "decoder_attention_type": ATTENTION_TYPES,
                "decoder_position": DECODER_POSITIONS,
                "norm_position": NORM_POSITIONS,
                "norm_type": NORM_TYPES,
                "pooling": POOLINGS,
                "ssm_postact": SSM_POSTACTS,
            },
        )
        check_batch_norm(self)
        check_activation(self)
        self._check_unread()

    def _check_unread(self):
        """Refuse fields that have no effect."""
        check_unread(self, _unread(self.ssm_type, self.combine_mode, self.adaptive_cutoffs))
        if self.is_decoder and not self.is_encoder_decoder:
            for field, default in (("decoder_attention_type", "full"), ("decoder_global_layers", [])):
                if getattr(self, field) != default:
                    raise ValueError(
                        f"{field} must be left out for a language model, which reads "
                        f"{field.removeprefix('decoder_')}; got {getattr(self, field)!r}"
                    )

    @property
    def layer_types(self) -> list[str] | None:
        """Cache type of each layer of a decoder stack; None for other stacks."""
        if not self.is_decoder:
            return None
        local = self.attention_type != "full"
        plain = "sliding_attention" if local else "full_attention"
        hybrid = "hybrid_sliding" if local else "hybrid"
        return [hybrid if layer in self.global_layers else plain for layer in range(self.num_hidden_layers)]

    @property
    def sliding_window(self) -> int | None:
        """Keys of one decoding step, its own included; None without local decoder attention."""
        if not self.is_decoder or self.attention_type == "full":
            return None
        keys = {"window": self.local_radius + 1, "chunk": self.chunk_size, "none": 0}[self.attention_type]
        return max(keys, 2)  # transformers' sliding cache keeps one less, at least one

    def get_text_config(self, decoder=None, encoder=None) -> "SpadeConfig":
        """Return the config of one stack of an encoder-decoder: its depth, attention and global layers.

        Stacks are built from it, and so are transformers' decoding caches.
        """
        if not self.is_encoder_decoder or decoder == encoder:
            return self
        view = copy.deepcopy(self)
        view.is_decoder = bool(decoder)
        if decoder:
            view.num_hidden_layers = self.num_decoder_layers
            view.attention_type = self.decoder_attention_type
            view.global_layers = self.decoder_global_layers
            view.share_relative_bias = self.decoder_share_relative_bias
        return view


def _unread(ssm_type: str, combine_mode: str | None, adaptive_cutoffs: list[int] | None) -> dict[str, str]:
    """Return the fields that have no effect → the field that causes it."""
    read = SSM_FIELDS.get(ssm_type, ())
    unread = {field: "ssm_type" for field in chain(*SSM_FIELDS.values()) if field not in read}
    if combine_mode != "add":
        unread["combine_alpha"] = "combine_mode"
    if combine_mode != "concat":
        unread["concat_order"] = "combine_mode"
    if adaptive_cutoffs is None:
        unread |= dict.fromkeys(("adaptive_factor", "adaptive_dropout"), "adaptive_cutoffs")
    return unread


def _layer_list(field: str, value: list[int] | str, num_layers: int) -> list[int]:
    """Return the layers that a config field selects."""
    if num_layers < 1:
        return value  # refused by the rule for the number of layers
    if isinstance(value, str):
        end, _, count = value.partition("-")
        if value in ("none", "all"):
            count = "0" if value == "none" else str(num_layers)
        elif end not in ("bottom", "top") or not re.fullmatch("[0-9]{0,9}", count):
            raise ValueError(
                f"{field} must be a list of layer indices or one of none, all, bottom, top, bottom-K, top-K; "
                f"got {value!r}"
            )
        size = int(count or 1)
        if size > num_layers:
            raise ValueError(f"{field} must select at most {num_layers} layers; got {value!r}")
        return list(range(num_layers - size, num_layers) if end == "top" else range(size))
    if any(not 0 <= layer < num_layers for layer in value) or len(set(value)) < len(value):
        raise ValueError(f"{field} must list distinct layers between 0 and {num_layers - 1}; got {value}")
    return sorted(value)
