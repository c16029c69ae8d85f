"""Configuration of SPADE models: the encoder-decoder, the encoder, and the decoder's view for caches."""

import copy
import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from hf_hybrid.suggestions import did_you_mean

ATTENTION_TYPES = ("window", "chunk", "full")
COMBINE_MODES = ("concat", "add", "stack")
CONCAT_ORDERS = ("local_global", "global_local")
DECODER_POSITIONS = ("relative", "learned_absolute")
NORM_POSITIONS = ("post", "pre")
NORM_TYPES = ("layer_norm", "rms_norm")
SSM_FREEZES = ("all", "ab_dt", "none")
SSM_POSTACTS = (None, "gelu_glu")
SSM_TYPES = ("s4",)
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_decoder_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "chunk_size",
    "relative_attention_max_distance",
    "max_decoder_position_embeddings",
    "ssm_state_size",
    "ssm_n_ssm",
    "ssm_l_max",
)

PRESETS = {
    # the paper's encoder-decoder, section 5.1
    "base": {},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6},
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4},
}


@strict
class SpadeConfig(PreTrainedConfig):
    r"""Configuration of a SPADE model (Zuo et al. 2022).

    The defaults are the paper's base encoder-decoder (section 5.1): a T5-shaped model with post-layer-norm, whose
    encoder attends locally and whose bottom encoder layer also reads a frozen bidirectional S4. One class serves the
    encoder-decoder and the encoder alone. Lengths and distances are in tokens.

    Args:
        vocab_size: Rows of the token embedding.
        hidden_size: Model width D.
        num_hidden_layers: Encoder layers.
        num_decoder_layers: Decoder layers; as many as encoder layers when None.
        num_attention_heads: Heads H of every attention.
        head_dim: Width of one head; ``hidden_size / num_attention_heads`` when None.
        intermediate_size: Inner width of the feed-forward network.
        hidden_act: Its activation, a name known to transformers.
        gated_feed_forward: Whether the feed-forward network is gated (T5 v1.1).
        feed_forward_bias: Whether its projections have biases.
        attention_bias: Whether the attention projections have biases.
        scale_attention: Whether scores are multiplied by ``head_dim ** -0.5``; T5 itself does not.
        norm_type: `"layer_norm"` or `"rms_norm"` (T5).
        norm_position: `"post"` (the paper's encoder-decoder) or `"pre"` (T5, language models).
        layer_norm_eps: Epsilon of every norm.
        embedding_norm: Whether a norm follows the embedding of each stack; when None, exactly with post-norm.
        final_norm: Whether a norm ends each stack; when None, exactly with pre-norm.
        dropout: Dropout on embeddings and on the output of every sub-layer.
        attention_dropout: Dropout on attention probabilities.
        activation_dropout: Dropout inside the feed-forward network.
        initializer_range: Standard deviation of initial weights.
        attention_type: Encoder self-attention: `"window"`, `"chunk"` or `"full"`.
        local_radius: Reach of window attention: keys at most this far from the query are seen, on each side where
            the model is bidirectional.
        chunk_size: Length of a chunk for chunk attention.
        decoder_attention_type: Decoder self-attention: `"full"`, `"window"` or `"chunk"`, always causal.
        relative_attention_num_buckets: Buckets of the relative position bias.
        relative_attention_max_distance: Distance from which on all positions share a bucket.
        share_relative_bias: Whether all encoder layers use one bias table instead of one each.
        decoder_position: `"relative"` (one causal T5 table shared by all decoder layers) or `"learned_absolute"`.
        max_decoder_position_embeddings: Rows of the absolute position table; 1024 when None, and None where there is
            no such table.
        global_layers: Encoder layers that also read the state space model: a list of indices, or `"none"`,
            `"all"`, `"bottom"`, `"top"`, `"bottom-K"`, `"top-K"`; kept as the list it means.
        decoder_global_layers: The same for the decoder, where the state space model is causal.
        combine_mode: How a global layer joins its two branches: `"concat"` (the paper: a linear map of both,
            normalised, side by side), `"add"` (a weighted sum of both, normalised), `"stack"` (attention reads the
            state space model's output).
        combine_alpha: Weight of the global branch for `"add"`; the local one gets the rest.
        concat_order: `"local_global"` (the paper) or `"global_local"` (the published code).
        ssm_type: The state space model, `"s4"`.
        ssm_state_size: Its state size N, even.
        ssm_dt_min: Smallest initial step Δ.
        ssm_dt_max: Largest initial step Δ.
        ssm_n_ssm: Independent copies of (A, B); when None, one where they are frozen and `hidden_size` where they are
            trained.
        ssm_freeze: `"all"` (the paper), `"ab_dt"` (train C and D only) or `"none"` (train everything).
        ssm_stop_gradient: Whether the gradient through the global branch to its input is cut, as in the published
            code.
        ssm_l_max: Longest memory of the encoder's state space models; unlimited when None, as in a decoder always.
        ssm_use_D: Whether it has a skip connection D.
        ssm_postact: None (the paper) or `"gelu_glu"`, an activation and gated projection behind it.
        tie_word_embeddings: Whether the language modelling head shares the embedding table, which is one for encoder
            and decoder in any case (T5; without, T5 v1.1).
        scale_decoder_outputs: Whether the decoder's output is multiplied by ``hidden_size ** -0.5`` before the
            language modelling head (T5 with tied embeddings).
        use_cache: Whether decoding returns its key, value and state cache.
        is_encoder_decoder: Whether the model has an encoder and a decoder.
        is_decoder: Whether this config describes a decoder stack.
        pad_token_id: Padding token.
        bos_token_id: Beginning-of-sequence token, if there is one.
        eos_token_id: End-of-sequence token or tokens.
        decoder_start_token_id: First token the decoder reads.

    Raises:
        ValueError: The names of layers or the head width break one of the rules above.
        huggingface_hub.errors.StrictDataclassError: Another value breaks its rule, or is of the wrong type. As with
            every config of transformers, the error that names the field, the value and the rule is its cause.
    """

    model_type = "spade"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_decoder_layers: int | None = None
    num_attention_heads: int = 12
    head_dim: int | None = None
    intermediate_size: int = 3072
    hidden_act: str = "relu"
    gated_feed_forward: bool = False
    feed_forward_bias: bool = True
    attention_bias: bool = False
    scale_attention: bool = True
    norm_type: str = "layer_norm"
    norm_position: str = "post"
    layer_norm_eps: float | int = 1e-6
    embedding_norm: bool | None = None
    final_norm: bool | None = None
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    attention_type: str = "window"
    local_radius: int = 128
    chunk_size: int = 128
    decoder_attention_type: str = "full"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    share_relative_bias: bool = False
    decoder_position: str = "relative"
    max_decoder_position_embeddings: int | None = None
    global_layers: list[int] | str = "bottom"
    decoder_global_layers: list[int] | str = "none"
    combine_mode: str = "concat"
    combine_alpha: float | int = 0.5
    concat_order: str = "local_global"
    ssm_type: str = "s4"
    ssm_state_size: int = 64
    ssm_dt_min: float | int = 1e-3
    ssm_dt_max: float | int = 1e-1
    ssm_n_ssm: int | None = None
    ssm_freeze: str = "all"
    ssm_stop_gradient: bool = False
    ssm_l_max: int | None = None
    ssm_use_D: bool = True
    ssm_postact: str | None = None
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = False
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "SpadeConfig":
        """Build the configuration of a named size.

        Args:
            name: `"base"` (12+12 layers, width 768: the paper's), `"small"` (6+6, 512) or `"tiny"` (4+4, 256).
            **overrides: Fields to set differently.

        Raises:
            ValueError: No preset has this name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}.{did_you_mean(name, PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    def __post_init__(self, **kwargs):
        """Fill in the fields whose default depends on others."""
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_hidden_layers
        self._spell_out_layers()
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads unless head_dim is given; "
                    f"got {self.hidden_size} and {self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.max_decoder_position_embeddings is None and self.decoder_position == "learned_absolute":
            self.max_decoder_position_embeddings = 1024
        if self.embedding_norm is None:
            self.embedding_norm = self.norm_position == "post"
        if self.final_norm is None:
            self.final_norm = self.norm_position == "pre"
        if self.ssm_n_ssm is None:
            self.ssm_n_ssm = self.hidden_size if self.ssm_freeze == "none" else 1
        super().__post_init__(**kwargs)

    def _spell_out_layers(self):
        self.global_layers = _layer_list("global_layers", self.global_layers, self.num_hidden_layers)
        self.decoder_global_layers = _layer_list(
            "decoder_global_layers", self.decoder_global_layers, self.num_decoder_layers
        )

    def validate_architecture(self):
        """Check every field against its rule; part of the strict dataclass validation."""
        self._spell_out_layers()  # they may have been set anew
        for field in POSITIVE_FIELDS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be a positive integer; got {value}")
        if self.local_radius < 0:
            raise ValueError(f"local_radius must not be negative; got {self.local_radius}")
        if self.ssm_state_size % 2:
            raise ValueError(f"ssm_state_size must be even; got {self.ssm_state_size}")
        if self.hidden_size % self.ssm_n_ssm:
            raise ValueError(
                f"ssm_n_ssm must divide hidden_size; got {self.ssm_n_ssm} and hidden_size {self.hidden_size}"
            )
        if self.relative_attention_num_buckets < 4 or self.relative_attention_num_buckets % 2:
            raise ValueError(
                f"relative_attention_num_buckets must be even and at least 4; "
                f"got {self.relative_attention_num_buckets}"
            )
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError(
                f"relative_attention_max_distance must exceed half of relative_attention_num_buckets; "
                f"got {self.relative_attention_max_distance} and {self.relative_attention_num_buckets}"
            )
        for field in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field} must lie in [0, 1); got {getattr(self, field)}")
        if not 0 <= self.combine_alpha <= 1:
            raise ValueError(f"combine_alpha must lie in [0, 1]; got {self.combine_alpha}")
        for field in ("layer_norm_eps", "initializer_range", "ssm_dt_min", "ssm_dt_max"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be positive and finite; got {getattr(self, field)}")
        if self.ssm_dt_max < self.ssm_dt_min:
            raise ValueError(
                f"ssm_dt_max must be at least ssm_dt_min; got {self.ssm_dt_max} and ssm_dt_min {self.ssm_dt_min}"
            )
        if self.ssm_l_max is not None and self.decoder_global_layers:
            raise ValueError(
                f"ssm_l_max must be None where decoder_global_layers are given, since a state that is carried from "
                f"step to step never forgets; got {self.ssm_l_max} and decoder_global_layers "
                f"{self.decoder_global_layers}"
            )
        for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, field)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{field} must lie in the vocabulary, from 0 to vocab_size - 1; got {value} and vocab_size "
                        f"{self.vocab_size}"
                    )
        for field, allowed in {
            "attention_type": ATTENTION_TYPES,
            "combine_mode": COMBINE_MODES,
            "concat_order": CONCAT_ORDERS,
            "decoder_attention_type": ATTENTION_TYPES,
            "decoder_position": DECODER_POSITIONS,
            "norm_position": NORM_POSITIONS,
            "norm_type": NORM_TYPES,
            "ssm_freeze": SSM_FREEZES,
            "ssm_postact": SSM_POSTACTS,
            "ssm_type": SSM_TYPES,
        }.items():
            if getattr(self, field) not in allowed:
                names = ", ".join("None" if name is None else name for name in allowed)
                raise ValueError(f"{field} must be one of {names}; got {getattr(self, field)!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act must name an activation of transformers; got {self.hidden_act!r}."
                f"{did_you_mean(self.hidden_act, ACT2FN)}"
            )

    @property
    def layer_types(self) -> list[str] | None:
        """What each layer of a decoder stack keeps in a cache, in transformers' words; None for other stacks."""
        if not self.is_decoder:
            return None
        local = self.attention_type != "full"
        plain = "sliding_attention" if local else "full_attention"
        hybrid = "hybrid_sliding" if local else "hybrid"
        return [hybrid if layer in self.global_layers else plain for layer in range(self.num_hidden_layers)]

    @property
    def sliding_window(self) -> int | None:
        """Keys one decoding step gets to see, its own included; None without local decoder attention."""
        if not self.is_decoder or self.attention_type == "full":
            return None
        keys = self.local_radius + 1 if self.attention_type == "window" else self.chunk_size
        return max(keys, 2)  # transformers' sliding cache keeps one less, and cannot keep none

    def get_text_config(self, decoder=None, encoder=None) -> "SpadeConfig":
        """Return the view of one stack of an encoder-decoder, with that stack's depth, attention and global layers.

        This is what a stack is built from, and what transformers builds decoding caches from.
        """
        if not self.is_encoder_decoder or decoder == encoder:
            return self
        view = copy.deepcopy(self)
        view.is_decoder = bool(decoder)
        if decoder:
            view.num_hidden_layers = self.num_decoder_layers
            view.attention_type = self.decoder_attention_type
            view.global_layers = self.decoder_global_layers
            view.share_relative_bias = True
        return view


def _layer_list(field: str, value: list[int] | str, num_layers: int) -> list[int]:
    """Spell out which layers a config field means."""
    if num_layers < 1:
        return value  # the number of layers is what is wrong then, and its own rule says so
    if isinstance(value, str):
        end, _, count = value.partition("-")
        if value in ("none", "all"):
            count = "0" if value == "none" else str(num_layers)
        elif end not in ("bottom", "top") or (count and not count.isdigit()):
            raise ValueError(
                f"{field} must be a list of layer indices or one of none, all, bottom, top, bottom-K, top-K; "
                f"got {value!r}"
            )
        size = int(count or 1)
        if size > num_layers:
            raise ValueError(f"{field} must not ask for more than the {num_layers} layers there are; got {value!r}")
        return list(range(num_layers - size, num_layers) if end == "top" else range(size))
    if any(not 0 <= layer < num_layers for layer in value) or len(set(value)) < len(value):
        raise ValueError(f"{field} must list distinct layers between 0 and {num_layers - 1}; got {value}")
    return sorted(value)


__all__ = ["SpadeConfig"]
