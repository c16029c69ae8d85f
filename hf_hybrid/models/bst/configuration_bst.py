"""Configuration of Block-State Transformers."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..checks import (
    MAX_STATE_SIZE,
    check_activation,
    check_adaptive_vocabulary,
    check_choices,
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
from ..state_cache import SLIDING_LAYER_TYPE

CONTEXT_FILTERS = ("s4", "unstructured")
CONTEXT_INPUTS = ("normed", "raw")
CONTEXT_MIXINGS = ("concat", "gate")
CONTEXT_SHIFTS = ("none", "window")
CONTEXT_TYPES = ("single_head", "multi_head", "multi_filter")
NORM_TYPES = ("layer_norm", "rms_norm")
POOLINGS = ("first", "mean", "last")
PAPER_LAYERS = (1, 7, 9)
# fields that not every model reads
FILTER_FIELDS = {
    "s4": ("state_size", "dt_min", "dt_max"),
    "unstructured": ("filter_length", "filter_size", "filter_embedding_size", "filter_sine_frequency"),
}
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "window",
    "num_context_states",
    "filter_length",
    "filter_size",
    "filter_embedding_size",
    "adaptive_factor",
)

PRESETS = {
    # the paper's model of about 200 million parameters, appendix A.2
    "base": {},
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "window": 128,
        "bst_layers": [1, 3],
    },
}


@strict
class BstConfig(PreTrainedConfig):
    r"""Configuration of a Block-State Transformer (Fathi et al. 2023).

    The defaults are the paper's language model of about 200 million parameters: twelve layers of sliding-window
    attention, three of which also attend to context states. Lengths and distances are in tokens.

    Args:
        vocab_size: Rows of the token embedding.
        hidden_size: Model width D.
        num_hidden_layers: Layers.
        num_attention_heads: Heads H of every attention.
        intermediate_size: Inner width of the feed-forward network.
        dropout: Dropout on embeddings and on the output of every sub-layer.
        attention_dropout: Dropout on attention probabilities.
        activation_dropout: Dropout inside the feed-forward network.
        initializer_range: Standard deviation of initial weights; ``hidden_size ** -0.5`` when None, which keeps
            projections as large as their inputs at every width.
        embedding_initializer_range: Standard deviation of initial token embeddings.
        use_cache: Whether decoding returns its cache of keys, values and states.
        is_decoder: True: the model is causal.
        is_encoder_decoder: False: the model is one stack.
        pad_token_id: Padding token.
        bos_token_id: Beginning-of-sequence token, if there is one.
        eos_token_id: End-of-sequence token or tokens.

    Attention:
        window: W: tokens that self-attention reaches, and the distance at which context states are renewed.
        head_dim: Width of one head; ``hidden_size / num_attention_heads`` when None.
        qk_norm: Whether queries and keys are normalised and each head's scores multiplied by a trained number.
        score_scale_init: Initial value of that number; ``head_dim ** 0.5`` when None, which makes the scores of random
            vectors as large as without the norm. (The published code starts at 1, which leaves attention nearly
            uniform, and AdamW raises it slowly.) The biases, which it also multiplies, begin that much smaller.
        scale_attention: Without `qk_norm`, whether scores are multiplied by ``head_dim ** -0.5``.
        relative_attention_num_buckets: Buckets of the relative position bias; every layer has its own table.
        relative_attention_max_distance: Distance from which all positions share a bucket.
        relative_attention_init: Initial biases: `"recency"`, which prefers near keys, with a different reach in each
            head, and which optimizers would take long to find; or `"normal"`, small random numbers as in T5.

    Context states:
        bst_layers: Layers, counted from 0, that attend to context states; 1, 7 and 9, as far as they exist, when None.
            ``[]`` makes a sliding-window transformer.
        context_type: What context states are: `"single_head"`, one filter's outputs at the tokens of the query's
            window so far; `"multi_head"`, the same with one filter per head; `"multi_filter"`, the outputs of
            `num_context_states` filters at the end of the window before.
        num_context_states: S, the states of `"multi_filter"`.
        context_filter: `"s4"`, or `"unstructured"`: filters whose taps a network computes.
        state_size: N of `"s4"`, even.
        dt_min: Smallest initial step Δ of `"s4"`.
        dt_max: Largest initial step Δ of `"s4"`.
        filter_length: Taps of an `"unstructured"` filter, which sees no further back: the training length.

    Feed forward and norms:
        hidden_act: Activation of the feed-forward network, a name known to transformers.
        gated_feed_forward: Whether the feed-forward network is gated.
        feed_forward_bias: Whether its projections have biases.
        norm_type: `"rms_norm"` (the paper's, without mean and bias) or `"layer_norm"`.
        layer_norm_eps: Epsilon of every norm.

    Embeddings and heads:
        tie_word_embeddings: Whether the language modelling head shares the embedding table.
        scale_embeddings: Whether token embeddings are multiplied by ``sqrt(hidden_size)``; when None, only with
            `adaptive_cutoffs`, whose tables start that much smaller.
        scale_decoder_outputs: Whether the input of a language modelling head is multiplied by ``hidden_size ** -0.5``;
            when None, only without `adaptive_cutoffs`.
        skip_logits: Whether a model with a language modelling head computes the loss alone when it is in training mode
            and has labels: the output's `logits` are None, and those of a whole sequence are never held. An argument
            `skip_logits` of the call comes first; by itself, a model in evaluation mode returns logits.
        adaptive_cutoffs: Token ids, sorted by frequency, at which the next cluster of an adaptive input embedding and
            softmax begins; None for an ordinary vocabulary.
        adaptive_factor: How much narrower each cluster's embeddings are than those of the one before.
        adaptive_dropout: Dropout on the softmax's input and on its projections to the later clusters.
        pooling: What a sequence classifier reads: the `"last"` kept token, the only one that has seen all, the
            `"mean"` of them or the `"first"`.
        classifier_dropout: Dropout before the classification heads; `dropout` when None.

    Ablations and variants:
        include_self: Whether the W tokens end with the query's own; otherwise they are the W before it.
        sliding_context_layers: Whether self-attention slides in the layers with context states too; otherwise it stays
            within windows (pseudocode 5 to the letter).
        context_input: What the filters read: the layer's `"normed"` input, like attention, or the `"raw"` one.
        context_shift: `"none"`, or `"window"`: attend to all states of the window before, in the first window to
            trained ones. When None, `"window"` for `"multi_filter"`, which would otherwise see the future, and
            `"none"` for the others.
        context_lift: Whether a trained map lifts states to heads before the projections to keys and values, which can
            do the same; not for `"multi_head"`, whose states have heads.
        context_mixing: How self-attention and attention to states join: `"concat"`, one projection of both and a
            residual; `"gate"`, the same after a trained gate instead of the residual.
        filter_size: Width of the network that computes `"unstructured"` filters.
        filter_embedding_size: Positional features that it reads, odd.
        filter_sine_frequency: Initial frequency of its sine activations.

    Raises:
        ValueError: The head width breaks its rule.
        huggingface_hub.errors.StrictDataclassError: Another value breaks its rule, or has the wrong type. Its cause is
            the error that names the field, the value and the rule, as with every config of transformers.
    """

    model_type = "bst"
    keys_to_ignore_at_inference = ["past_key_values"]
    # embedding and head, which may share tables, stay in the model's own group
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}
    # every GPU computes all heads, since the tables of biases and the context's filters are not split
    base_model_tp_plan = {
        "layers.*.attention.q_proj": "colwise_gather_output",
        "layers.*.attention.k_proj": "colwise_gather_output",
        "layers.*.attention.v_proj": "colwise_gather_output",
        "layers.*.attention.o_proj": "rowwise_split_input",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    }

    vocab_size: int = 32128
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    dropout: float | int = 0.05
    attention_dropout: float | int = 0.05
    activation_dropout: float | int = 0.0
    initializer_range: float | int | None = None
    embedding_initializer_range: float | int = 1.0
    use_cache: bool = True
    is_decoder: bool = True
    is_encoder_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    window: int = 512
    head_dim: int | None = None
    qk_norm: bool = True
    score_scale_init: float | int | None = None
    scale_attention: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_init: str = "recency"
    bst_layers: list[int] | None = None
    context_type: str = "single_head"
    num_context_states: int = 32
    context_filter: str = "s4"
    state_size: int = 16
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    filter_length: int = 4096
    hidden_act: str = "relu"
    gated_feed_forward: bool = False
    feed_forward_bias: bool = False
    norm_type: str = "rms_norm"
    layer_norm_eps: float | int = 1e-6
    tie_word_embeddings: bool = True
    scale_embeddings: bool | None = None
    scale_decoder_outputs: bool | None = None
    skip_logits: bool = False
    adaptive_cutoffs: list[int] | None = None
    adaptive_factor: int = 4
    adaptive_dropout: float | int = 0.0
    pooling: str = "last"
    classifier_dropout: float | int | None = None
    include_self: bool = True
    sliding_context_layers: bool = True
    context_input: str = "normed"
    context_shift: str | None = None
    context_lift: bool = False
    context_mixing: str = "concat"
    filter_size: int = 64
    filter_embedding_size: int = 33
    filter_sine_frequency: float | int = 14.0

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "BstConfig":
        """Build the configuration of a named size.

        Args:
            name: `"base"` (12 layers of width 1024: the paper's smaller model) or `"tiny"` (4 layers of width 256,
                windows of 128).
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
        fill_head_dim(self)
        fill_defaults(
            self,
            score_scale_init=self.head_dim**0.5 if self.head_dim and self.head_dim > 0 else None,
            bst_layers=[layer for layer in PAPER_LAYERS if layer < self.num_hidden_layers],
            context_shift="window" if self.context_type == "multi_filter" else "none",
            initializer_range=self.hidden_size**-0.5 if self.hidden_size > 0 else None,
            scale_embeddings=self.adaptive_cutoffs is not None,
            scale_decoder_outputs=self.adaptive_cutoffs is None,
            classifier_dropout=self.dropout,
        )
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check every field; part of the strict dataclass validation."""
        check_positive_integers(self, ("state_size",), MAX_STATE_SIZE)
        check_positive_integers(self, POSITIVE_FIELDS)
        check_probabilities(
            self, ("dropout", "attention_dropout", "activation_dropout", "adaptive_dropout", "classifier_dropout")
        )
        check_positive_numbers(
            self,
            (
                *("layer_norm_eps", "initializer_range", "embedding_initializer_range", "score_scale_init"),
                *("dt_min", "dt_max", "filter_sine_frequency"),
            ),
        )
        check_choices(
            self,
            {
                "context_filter": CONTEXT_FILTERS,
                "context_input": CONTEXT_INPUTS,
                "context_mixing": CONTEXT_MIXINGS,
                "context_shift": CONTEXT_SHIFTS,
                "context_type": CONTEXT_TYPES,
                "norm_type": NORM_TYPES,
                "pooling": POOLINGS,
            },
        )
        check_activation(self)
        if self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be False, because BST is one stack; got True")
        check_relative_attention(self)
        check_token_ids(self, ("pad_token_id", "bos_token_id", "eos_token_id"))
        if self.adaptive_cutoffs is not None:
            check_adaptive_vocabulary(self)
        if not self.is_decoder:
            raise ValueError("is_decoder must be True: a Block-State Transformer is causal; got False")
        layers = self.bst_layers
        if any(not 0 <= layer < self.num_hidden_layers for layer in layers) or len(set(layers)) < len(layers):
            raise ValueError(f"bst_layers must be distinct, from 0 to {self.num_hidden_layers - 1}; got {layers}")
        self._validate_context()

    def _validate_context(self):
        if self.state_size % 2:
            raise ValueError(f"state_size must be even; got {self.state_size}")
        if self.dt_max < self.dt_min:
            raise ValueError(f"dt_max must be at least dt_min; got {self.dt_max} and dt_min {self.dt_min}")
        if self.filter_embedding_size < 3 or self.filter_embedding_size % 2 == 0:
            raise ValueError(f"filter_embedding_size must be odd and at least 3; got {self.filter_embedding_size}")
        if self.context_type == "multi_filter" and self.context_shift == "none":
            raise ValueError(
                "context_shift must be window for context_type multi_filter, whose states have read all of their "
                "window; got 'none'"
            )
        if self.context_type == "multi_head" and self.context_lift:
            raise ValueError(
                "context_lift must be False for context_type multi_head, whose states have heads; got True"
            )
        other = "unstructured" if self.context_filter == "s4" else "s4"
        unread = dict.fromkeys(FILTER_FIELDS[other], "context_filter")
        if self.context_type != "multi_filter":
            unread["num_context_states"] = "context_type"
        if self.adaptive_cutoffs is None:
            unread |= dict.fromkeys(("adaptive_factor", "adaptive_dropout"), "adaptive_cutoffs")
        check_unread(self, unread)

    # read by the attention in models/local_attention.py

    @property
    def attention_type(self) -> str:
        """Self-attention of the layers without context states, by default of all layers."""
        return "window"

    @property
    def attention_bias(self) -> bool:
        """False: attention has no biases."""
        return False

    @property
    def local_radius(self) -> int:
        """How far back self-attention reaches."""
        return self.window - 1 if self.include_self else self.window

    @property
    def chunk_size(self) -> int:
        """Length of the windows within which queries attend to context states."""
        return self.window

    @property
    def sliding_window(self) -> int:
        """Keys of one decoding step, its own included."""
        return max(self.local_radius + 1, 2)  # transformers' sliding cache keeps one less, at least one

    @property
    def layer_types(self) -> list[str]:
        """Cache type of each layer."""
        return [
            SLIDING_LAYER_TYPE if layer in self.bst_layers else "sliding_attention"
            for layer in range(self.num_hidden_layers)
        ]

    def validate_layer_type(self):
        """Accept the layer types of `models.state_cache`, which transformers does not know."""
