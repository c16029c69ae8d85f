"""Configuration of CHELA models: bidirectional ones for classification, causal ones for language modelling."""

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..checks import (
    MAX_NUMBER,
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
    check_token_ids,
    check_unknown_fields,
    fill_defaults,
    forget_code,
    in_float32,
    preset_fields,
)
from ..state_cache import LAYER_TYPE

ATTENTION_FNS = ("norm", "laplace", "laplace_feature")
ATTENTION_NORMS = ("simple_rms_norm", "rms_norm", "layer_norm", "none")
GATE_RESIDUALS = ("raw", "normed")
KERNEL_INITS = ("double_exp", "random")
KERNEL_ROUNDINGS = ("odd", "down")
MIXERS = ("short_long", "long", "s4d", "ema")
NORM_POSITIONS = ("pre", "post")
POOLINGS = ("mean", "first", "last")
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "training_length",
    "long_kernel_size",
    "long_kernel_groups",
    "chunk_size",
    "adaptive_factor",
    "input_size",
    "classifier_size",
)
PROBABILITIES = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "adaptive_dropout",
    "classifier_dropout",
    "kernel_dropout",
)


def _long_range(labels: int, width: int, layers: int, *, length: int = 4096, **fields) -> dict:
    """Return the fields of a model of the Long Range Arena or of raw speech."""
    sizes = {"num_labels": labels, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width}
    return {**sizes, "training_length": length, "long_kernel_size": length, "dropout": 0.1, **fields}


BYTES = {"vocab_size": 259, "norm_type": "scale_norm", "norm_position": "post"}
REAL_VALUES = {"input_size": 1, "norm_type": "batch_norm", "dropout": 0.0}
LANGUAGE_MODEL = {"is_decoder": True, "short_kernel_rounding": "down", "eos_token_id": None, "pad_token_id": None}
PRESETS = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "training_length": 1024,
        "long_kernel_size": 1024,
    },
    # the paper's language models, section 5.3 and table 8
    "wikitext103": {
        **LANGUAGE_MODEL,
        "vocab_size": 267744,
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "intermediate_size": 1536,
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "tie_word_embeddings": False,
        "adaptive_cutoffs": [20000, 60000],
    },
    "enwik8": {**LANGUAGE_MODEL, "vocab_size": 205, "num_hidden_layers": 12, "hidden_size": 512, "dropout": 0.1},
    # the paper's rows of the Long Range Arena and of raw speech, table 7; docs/models/chela.md lists what it leaves
    # open. Texts are tokens of bytes.
    "listops": _long_range(10, 80, 6, vocab_size=20, norm_type="batch_norm", norm_position="post", length=2048),
    "text": _long_range(2, 128, 4, **BYTES),
    "retrieval": _long_range(2, 128, 6, **BYTES),
    "image": _long_range(10, 160, 8, **REAL_VALUES, length=1024),
    "pathfinder": _long_range(2, 128, 6, **REAL_VALUES, length=1024),
    "pathx": _long_range(2, 64, 4, **REAL_VALUES, length=16384),
    # the paper's 493 thousand parameters leave room for 460 taps
    "speech": _long_range(10, 60, 6, **REAL_VALUES, length=16000, long_kernel_size=460),
}


def short_kernel_size(length: int, rounding: str) -> int:
    """Size of CHELA's second short convolution, ``2 log10(L) + 1`` made an integer (CHELA, section 4.2).

    Args:
        length: Training length L in tokens.
        rounding: `"odd"`, the nearest odd integer; `"down"`, the integer below.
    """
    return 2 * round(math.log10(length)) + 1 if rounding == "odd" else int(2 * math.log10(length) + 1)


@strict
class ChelaConfig(PreTrainedConfig):
    r"""Configuration of a CHELA model (Liu et al. 2024).

    The defaults are a bidirectional model of the enwik8 model's size; with ``is_decoder=True`` everything is causal.
    Lengths are in tokens.

    Args:
        vocab_size: Rows of the token embedding.
        hidden_size: Model width D.
        num_hidden_layers: Layers.
        num_attention_heads: Heads H of the linear attention. The paper has one, with a state of D x D numbers per
            layer; D / 64 to D / 128 of them cost less time and memory.
        intermediate_size: Inner width of the feed-forward network.
        dropout: Dropout on embeddings, on the mixer's output Z and on the output of every sub-layer.
        attention_dropout: Dropout on the weights of `attention_fn` `"laplace"`; the others have none.
        activation_dropout: Dropout on the values V and inside the feed-forward network.
        initializer_range: Standard deviation of initial weights; ``hidden_size ** -0.5`` when None, which keeps gates
            and values as large as their inputs at every width.
        is_decoder: Whether the model is causal.
        is_encoder_decoder: False: the model is one stack.
        use_cache: Whether decoding returns its states.
        pad_token_id: Padding token.
        bos_token_id: Beginning-of-sequence token, if there is one.
        eos_token_id: End-of-sequence token or tokens.
        input_size: For sequences of real values (pixels, audio): numbers per position, which a linear map embeds; None
            for tokens.

    Convolutions:
        training_length: Training length L, from which `short_kernel_sizes` follows when None; nothing else reads it.
        short_kernel_sizes: Taps of each short convolution; 3 and ``2 log10(L) + 1`` when None. Odd unless causal.
        short_kernel_rounding: How to round the second: `"odd"`, to the nearest odd integer, or `"down"`.
        long_kernel_size: Taps of the long convolution. Shorter inputs use the first of them; longer inputs remember
            that many tokens.
        long_kernel_groups: Groups of channels that share a kernel; `hidden_size`, one group each, when None.
        long_kernel_init: `"double_exp"`, noise that decays at rates spread over the channels, or `"random"`.

    Attention:
        attention_fn: `"norm"`, linear attention with a norm in place of the softmax; `"laplace"`, Mega's elementwise
            function of all scores, quadratic; `"laplace_feature"`, that function applied to queries and keys of linear
            attention.
        attention_norm: Norm of linear attention, per head: `"simple_rms_norm"` (no scale), `"rms_norm"`,
            `"layer_norm"` or `"none"`, which overflows float16 on long inputs.
        attention_norm_eps: Its epsilon.
        chunk_size: Length of the chunks into which `"laplace"` is cut, which makes it linear; None for whole
            sequences.

    Feed forward and norms:
        hidden_act: Activation of the feed-forward network and of the sequence classifier, a name known to
            transformers.
        norm_type: `"layer_norm"`, `"rms_norm"`, `"scale_norm"` or, unless causal, `"batch_norm"`, which ignores
            padding.
        norm_position: `"pre"` or `"post"`.
        layer_norm_eps: Epsilon of these norms.
        final_norm: Whether a norm ends the stack; when None, only with pre-norm.
        final_norm_affine: Whether that norm has scale and bias.

    Embeddings and heads:
        tie_word_embeddings: Whether a language modelling head shares the embedding table.
        scale_embeddings: Whether embeddings start with a variance of 1 / D and are multiplied by
            ``sqrt(hidden_size)``, which makes them as large as what the first layer adds; when None, they are.
        skip_logits: Whether a model with a language modelling head computes the loss alone when it is in training mode
            and has labels: the output's `logits` are None, and those of a whole sequence are never held. An argument
            `skip_logits` of the call comes first; by itself, a model in evaluation mode returns logits.
        adaptive_cutoffs: For a causal language model: token ids, sorted by frequency, at which the next cluster of an
            adaptive input embedding and softmax begins; None for an ordinary vocabulary.
        adaptive_factor: How much narrower each cluster's embeddings are than those of the one before.
        adaptive_dropout: Dropout on the softmax's input and on its projections to the later clusters.
        pooling: What a sequence classifier reads: the `"mean"` of all kept tokens, the `"first"` or the `"last"`.
        classifier_size: Width of its hidden layer; twice `hidden_size` when None.
        classifier_dropout: Dropout in the classification heads; `dropout` when None.

    Ablations and variants:
        mixer: What makes Z: `"short_long"` (the paper), `"long"` (the long convolution alone), `"s4d"` or `"ema"`
            (Mega's damped moving average).
        mixer_state_size: N of `"s4d"` and `"ema"`; 64 and 16 when None.
        short_conv_bias: Whether each short convolution has a bias.
        short_branch_norm: Whether a batch norm follows each, as in RepVGG; not if causal.
        kernel_squash: How far the long kernel's taps are moved towards zero. Also accepted as `kernel_lam`.
        kernel_dropout: Dropout on these taps.
        kernel_smoothing: Width of a moving average over them, odd; 1 for none.
        long_conv_skip: Whether the long convolution has a skip connection.
        alpha_init: Initial value of α_q and α_k; noise with a standard deviation of 0.02, as in GAU, when None.
        gate_residual: What the output gate mixes with: `"raw"`, the layer's input (Mega), or `"normed"`, its norm
            (CHELA's equations to the letter, which leave no path around the norms).
        share_gate_value_proj: Whether the attention's gate has the value's projection (eq. 10 to the letter).

    Raises:
        huggingface_hub.errors.StrictDataclassError: A value breaks its rule, or has the wrong type. Its cause is the
            error that names the field, the value and the rule, as with every config of transformers.
    """

    model_type = "chela"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"kernel_lam": "kernel_squash"}  # its name up to 0.1
    # embedding and head, which may share tables, stay in the model's own group
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}
    # every GPU computes all heads; v_proj stays whole, since its weight may be the gate's too
    base_model_tp_plan = {
        "layers.*.unit.output_gate_proj": "colwise_gather_output",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    }

    vocab_size: int = 32128
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 1
    intermediate_size: int = 1024
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    initializer_range: float | int | None = None
    is_decoder: bool = False
    is_encoder_decoder: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    input_size: int | None = None
    training_length: int = 4096
    short_kernel_sizes: list[int] | None = None
    short_kernel_rounding: str = "odd"
    long_kernel_size: int = 4096
    long_kernel_groups: int | None = None
    long_kernel_init: str = "double_exp"
    attention_fn: str = "norm"
    attention_norm: str = "simple_rms_norm"
    attention_norm_eps: float | int = 1e-6
    chunk_size: int | None = None
    hidden_act: str = "silu"
    norm_type: str = "layer_norm"
    norm_position: str = "pre"
    layer_norm_eps: float | int = 1e-5
    final_norm: bool | None = None
    final_norm_affine: bool = True
    tie_word_embeddings: bool = True
    scale_embeddings: bool | None = None
    skip_logits: bool = False
    adaptive_cutoffs: list[int] | None = None
    adaptive_factor: int = 4
    adaptive_dropout: float | int = 0.0
    pooling: str = "mean"
    classifier_size: int | None = None
    classifier_dropout: float | int | None = None
    mixer: str = "short_long"
    mixer_state_size: int | None = None
    short_conv_bias: bool = True
    short_branch_norm: bool = False
    kernel_squash: float | int = 0.0
    kernel_dropout: float | int = 0.0
    kernel_smoothing: int = 1
    long_conv_skip: bool = True
    alpha_init: float | int | None = None
    gate_residual: str = "raw"
    share_gate_value_proj: bool = False

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ChelaConfig":
        """Build the configuration of a named model.

        Args:
            name: `"tiny"` (4 layers of width 256); `"wikitext103"` and `"enwik8"`, the paper's language models;
                `"listops"`, `"text"`, `"retrieval"`, `"image"`, `"pathfinder"`, `"pathx"` and `"speech"`, its models
                of the Long Range Arena and of raw speech.
            **overrides: Fields to set differently.

        Raises:
            ValueError: No preset has this name.
        """
        return cls(**{**preset_fields(PRESETS, name), **overrides})

    def __post_init__(self, **kwargs):
        """Set the fields whose default depends on others."""
        check_unknown_fields(self, kwargs)
        forget_code(self, kwargs)
        check_number_of_layers(self, ("num_hidden_layers",))
        fill_defaults(
            self,
            final_norm=self.norm_position == "pre",
            long_kernel_groups=self.hidden_size,
            mixer_state_size=64 if self.mixer == "s4d" else 16,
            classifier_size=2 * self.hidden_size,
            classifier_dropout=self.dropout,
            initializer_range=self.hidden_size**-0.5 if self.hidden_size > 0 else None,
            scale_embeddings=True,
        )
        if self.short_kernel_sizes is None and self.training_length > 0:
            self.short_kernel_sizes = [3, short_kernel_size(self.training_length, self.short_kernel_rounding)]
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check every field; part of the strict dataclass validation."""
        check_positive_integers(self, ("mixer_state_size",), MAX_STATE_SIZE)
        check_positive_integers(self, POSITIVE_FIELDS)
        for field, divided in {"num_attention_heads": "heads", "long_kernel_groups": "groups"}.items():
            if self.hidden_size % getattr(self, field):
                raise ValueError(
                    f"{field} must divide hidden_size into equal {divided}; got {getattr(self, field)} and "
                    f"hidden_size {self.hidden_size}"
                )
        check_probabilities(self, PROBABILITIES)
        check_positive_numbers(self, ("layer_norm_eps", "attention_norm_eps", "initializer_range"))
        check_choices(
            self,
            {
                "attention_fn": ATTENTION_FNS,
                "attention_norm": ATTENTION_NORMS,
                "gate_residual": GATE_RESIDUALS,
                "long_kernel_init": KERNEL_INITS,
                "mixer": MIXERS,
                "norm_position": NORM_POSITIONS,
                "norm_type": NORM_TYPES,
                "pooling": POOLINGS,
                "short_kernel_rounding": KERNEL_ROUNDINGS,
            },
        )
        check_activation(self)
        if self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be False, because CHELA is one stack; got True")
        check_token_ids(self, ("pad_token_id", "bos_token_id", "eos_token_id"))
        self._validate_convolutions()
        if self.adaptive_cutoffs is not None:
            if not self.is_decoder or self.input_size is not None:
                raise ValueError(
                    f"adaptive_cutoffs must be None except for a language model (is_decoder True, input_size None); "
                    f"got {self.adaptive_cutoffs}"
                )
            check_adaptive_vocabulary(self)
        if self.chunk_size is not None and self.attention_fn != "laplace":
            raise ValueError(f"chunk_size must be None unless attention_fn is laplace; got {self.chunk_size}")
        check_batch_norm(self)
        check_batch_norm(self, "short_branch_norm")

    def _validate_convolutions(self):
        sizes = self.short_kernel_sizes
        if not sizes or any(size < 1 for size in sizes):
            raise ValueError(f"short_kernel_sizes must be one or more positive integers; got {sizes}")
        check_not_absurd("short_kernel_sizes", max(sizes))
        if not self.is_decoder and any(size % 2 == 0 for size in sizes):
            raise ValueError(
                f"short_kernel_sizes must be odd unless is_decoder is True: they are centred; got {sizes}"
            )
        if not 0 <= self.kernel_squash <= MAX_NUMBER:
            hint = in_float32(self.kernel_squash) if self.kernel_squash > 0 else ""
            raise ValueError(f"kernel_squash must be finite and not negative; got {self.kernel_squash}{hint}")
        if self.alpha_init is not None and not abs(self.alpha_init) <= MAX_NUMBER:
            raise ValueError(f"alpha_init must be finite; got {self.alpha_init}{in_float32(self.alpha_init)}")
        if self.kernel_smoothing < 1 or self.kernel_smoothing % 2 == 0:
            raise ValueError(f"kernel_smoothing must be a positive odd integer; got {self.kernel_smoothing}")
        check_not_absurd("kernel_smoothing", self.kernel_smoothing)
        if self.mixer == "s4d" and self.mixer_state_size % 2:
            raise ValueError(f"mixer_state_size must be even for mixer s4d; got {self.mixer_state_size}")

    @property
    def layer_types(self) -> list[str] | None:
        """Cache type of each layer of a causal model; None for other models."""
        return [LAYER_TYPE] * self.num_hidden_layers if self.is_decoder else None

    def validate_layer_type(self):
        """Accept the layer type of `models.state_cache`, which transformers does not know."""
