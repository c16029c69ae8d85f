"""Configuration of SRformer: a T5 or BART config with the fields of segmented cross-attention."""

import os
from dataclasses import dataclass
from typing import Self

from huggingface_hub.dataclasses import strict
from transformers import BartConfig, PreTrainedConfig, T5Config
from transformers.activations import ACT2FN

from hf_hybrid.suggestions import did_you_mean

from ..checks import (
    MAX_NUMBER,
    check_activation,
    check_choices,
    check_given,
    check_number_of_layers,
    check_positive_integers,
    check_positive_numbers,
    check_probabilities,
    check_relative_buckets,
    check_token_ids,
    check_unknown_fields,
    forget_code,
    in_float32,
    known_fields,
)

# mode -> what it adds to a layer: "states" of segments and the "neurons" that compute them
MODES = {
    "sr": ("states", "neurons"),
    "segmented": (),
    "recurrent": ("states", "neurons"),
    "no_norm": ("states", "neurons"),
    "no_raf": ("states",),
    "own_segment": ("states", "neurons"),
    "transformer_xl": (),
    "longt5": (),
    "full": (),
}
HORIZON_MODES = ("target_length", "fixed")
MASK_MODES = ("exact", "official")
MIXES = ("add", "sigma")
NORM_TYPES = ("feature_l2", "frobenius", "none")
RECURRENT_INITS = ("published", "gated")


@dataclass(kw_only=True)
class SegmentedCrossAttentionFields:
    """Fields that SRformer adds to its parents' configs, with their rules."""

    segment_size: int = 64
    cross_attention_mode: str = "sr"
    decoder_horizon: int = 128
    horizon_mode: str = "target_length"
    per_example_segments: bool = True
    mask_mode: str = "exact"
    kv_clamp: float | int | None = None
    norm_type: str = "feature_l2"
    leak_init: float | int | None = None
    threshold_init: float | int = 0.1
    raf_surrogate: bool = False
    mix: str = "add"
    recurrent_init: str = "published"
    skip_logits: bool = False

    parent_model_type = ""
    default_leak = 0.0
    base_model_fsdp_plan = {}  # its models list the parents' layers

    def __post_init__(self, **kwargs):
        """Set the default leak, that of the published code for this parent."""
        check_unknown_fields(self, kwargs)
        forget_code(self, kwargs)
        if self.leak_init is None:
            self.leak_init = self.default_leak
        super().__post_init__(**kwargs)

    def validate_segments(self):
        """Check every field; part of the strict dataclass validation."""
        if not self.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder must be True: an SRformer reads a document; got {self.is_encoder_decoder}"
            )
        check_positive_integers(self, ("segment_size", "decoder_horizon"))
        check_choices(
            self,
            {
                "cross_attention_mode": MODES,
                "horizon_mode": HORIZON_MODES,
                "mask_mode": MASK_MODES,
                "norm_type": NORM_TYPES,
                "mix": MIXES,
                "recurrent_init": RECURRENT_INITS,
            },
        )
        if self.mask_mode == "official" and self.per_example_segments:
            raise ValueError(
                "per_example_segments must be False with mask_mode 'official', which cuts the padded batch; got True"
            )
        if self.mix == "sigma" and not self.has_both_parts:
            raise ValueError(
                f"mix must be 'add' unless cross_attention_mode has a segmented and a recurrent part; got 'sigma' and "
                f"cross_attention_mode {self.cross_attention_mode!r}"
            )
        check_positive_numbers(self, ("kv_clamp", "threshold_init"))
        if not abs(self.leak_init) <= MAX_NUMBER:
            raise ValueError(f"leak_init must be finite; got {self.leak_init}{in_float32(self.leak_init)}")

    @property
    def has_states(self) -> bool:
        """Whether the mode adds recurrent attention, O_R."""
        return "states" in MODES[self.cross_attention_mode]

    @property
    def has_neurons(self) -> bool:
        """Whether RAF neurons compute its states."""
        return "neurons" in MODES[self.cross_attention_mode]

    @property
    def has_both_parts(self) -> bool:
        """Whether the mode has a segmented and a recurrent part, O_S and O_R."""
        return self.has_states and self.cross_attention_mode != "recurrent"

    @property
    def has_gate(self) -> bool:
        """Whether a trained weight per head scales O_R before it is added to O_S."""
        return self.recurrent_init == "gated" and self.mix == "add" and self.has_both_parts

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> Self:
        """Load a config of this class, or turn one of its parent's into one.

        Args:
            pretrained_model_name_or_path: Name on the Hub, or folder, of an SRformer or of a plain T5 or BART.
            **kwargs: As for every config, including fields to set.

        Raises:
            ValueError: It is a config of another kind.
        """
        values, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type = values.get("model_type")
        if model_type not in (cls.model_type, cls.parent_model_type):
            raise ValueError(
                f"pretrained_model_name_or_path must hold a model of type {cls.model_type} or {cls.parent_model_type} "
                f"for {cls.__name__}; got {model_type} in {pretrained_model_name_or_path}"
            )
        if model_type == cls.parent_model_type:
            values = cls._of_parent(values)
        return cls.from_dict({**values, "model_type": cls.model_type}, **kwargs)

    @classmethod
    def from_parent(cls, config: PreTrainedConfig, **fields) -> Self:
        """Turn a config of the parent into one of this class.

        Args:
            config: A `T5Config` or `BartConfig`; not changed.
            **fields: Fields that SRformer adds.

        Raises:
            ValueError: The config is of another kind, or a name is not one of SRformer's fields.
        """
        if config.model_type != cls.parent_model_type:
            raise ValueError(
                f"{cls.__name__} is made from a model of type {cls.parent_model_type}; got {config.model_type}"
            )
        known = SegmentedCrossAttentionFields.__dataclass_fields__
        for name in fields:
            if name not in known:
                raise ValueError(f"{cls.__name__} adds no field {name!r}.{did_you_mean(name, known)}")
        values = cls._of_parent(config.to_dict())
        for name in ("model_type", "architectures", "transformers_version"):
            values.pop(name, None)
        values["is_encoder_decoder"] = True  # a T5EncoderModel that shared the config switched it off
        return cls.from_dict({**values, "attn_implementation": config._attn_implementation, **fields})

    @classmethod
    def _of_parent(cls, values: dict) -> dict:
        """Keep the known fields of a parent's config, since old files have others.

        A decoder that was trained without O_R starts without it: `recurrent_init` is "gated".
        """
        known = {name: value for name, value in values.items() if name in known_fields(cls)}
        return {**known, "recurrent_init": "gated"}


_FIELDS_DOC = """
    Fields beside the parent's:

    Args:
        segment_size: Keys per segment of the document, in tokens.
        cross_attention_mode: `"sr"` (the paper: attention to one segment, and recurrent attention to the rest) or
            `"segmented"` (to one segment alone). The paper's ablations, table 3: `"recurrent"` (I, the rest alone),
            `"no_norm"` (II), `"no_raf"` (III), `"own_segment"` (IV). For comparison: `"transformer_xl"` (the keys of
            the segment before, through an RNN), `"longt5"` (the mean of every segment as a key), `"full"` (the
            parent).
        decoder_horizon: Target length, in tokens, over which segments are spread in decoding, unless generate() is
            given a length.
        horizon_mode: `"target_length"` (the paper: in training and evaluation the length of the batch's target) or
            `"fixed"` (`decoder_horizon`, unless a call gives another).
        recurrent_init: How recurrent attention starts. `"published"`, as in the published code: the neurons' map is
            random, and O_R as large as that makes it. `"gated"`: the map is the identity and, with `mix` `"add"`, O_R
            has a trained weight per head that starts at zero, so that the model starts as `"segmented"`. Models made
            from a T5 or BART are gated unless this is given.
        skip_logits: Whether a model with a head computes the loss alone when it is in training mode and has labels:
            the output's `logits` are None, and those of all tokens are never held. An argument `skip_logits` of the
            call comes first; by itself, a model in evaluation mode returns logits.

    Ablations and variants:
        per_example_segments: Whether each document has its own number of segments, instead of the padded batch's.
        mask_mode: `"exact"` (sums leave padding out) or `"official"` (as in the published code: sums include padding,
            and BART attends to it).
        kv_clamp: Bound on the entries of K^T V and of each segment's, before their subtraction; None for none.
        norm_type: norm(K): `"feature_l2"` (of each feature over all keys), `"frobenius"` or `"none"`.
        leak_init: Initial leak of the RAF neurons; when None the published code's, 0.1 for T5 and 0.5 for BART. The
            paper's appendix has 1.
        threshold_init: Their initial threshold.
        raf_surrogate: Whether their reset has a surrogate gradient.
        mix: `"add"` (eq. 11) or `"sigma"` (eq. 10, with a trained weight that starts at 0.5).

    Raises:
        huggingface_hub.errors.StrictDataclassError: A value breaks its rule, or has the wrong type. Its cause is the
            error that names the field, the value and the rule.
"""


@strict
class SRformerT5Config(SegmentedCrossAttentionFields, T5Config):
    """Configuration of an SRformer made of T5, T5 v1.1 or Flan-T5."""

    __doc__ += _FIELDS_DOC
    model_type = "srformer_t5"
    parent_model_type = "t5"
    default_leak = 0.1

    def validate_parent(self):
        """Check T5's own fields, which T5 leaves unchecked; part of the strict dataclass validation."""
        check_number_of_layers(self, ("num_layers", "num_decoder_layers"))
        check_positive_integers(self, ("num_layers", "num_decoder_layers"))
        check_positive_integers(self, ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads"))
        check_positive_numbers(self, ("layer_norm_epsilon", "initializer_factor"))
        check_probabilities(self, ("dropout_rate", "classifier_dropout"))
        if self.dense_act_fn not in ACT2FN:
            raise ValueError(
                f"feed_forward_proj must be an activation of transformers, optionally after 'gated-'; got "
                f"{self.feed_forward_proj!r}.{did_you_mean(self.dense_act_fn, ACT2FN)}"
            )
        check_relative_buckets(self)
        check_token_ids(self, ("pad_token_id", "eos_token_id"))


@strict
class SRformerBartConfig(SegmentedCrossAttentionFields, BartConfig):
    """Configuration of an SRformer made of BART."""

    __doc__ += _FIELDS_DOC
    model_type = "srformer_bart"
    parent_model_type = "bart"
    default_leak = 0.5
    attribute_map = {**BartConfig.attribute_map, "num_decoder_layers": "decoder_layers"}

    kv_clamp: float | int | None = 2.0

    def validate_parent(self):
        """Check BART's own fields, which BART leaves unchecked; part of the strict dataclass validation."""
        stacks = ("encoder", "decoder")
        layers, heads = ([f"{stack}_{what}" for stack in stacks] for what in ("layers", "attention_heads"))
        sizes = ["vocab_size", "d_model", *(f"{stack}_ffn_dim" for stack in stacks), "max_position_embeddings", *heads]
        dropouts = ["dropout", "attention_dropout", "activation_dropout", "classifier_dropout"]
        dropouts += [f"{stack}_layerdrop" for stack in stacks]
        check_given(self, [*layers, *sizes, *dropouts, "init_std"])
        check_number_of_layers(self, layers)
        check_positive_integers(self, [*layers, *sizes])
        for field in heads:
            if self.d_model % getattr(self, field):
                raise ValueError(f"{field} must divide d_model; got {getattr(self, field)} and d_model {self.d_model}")
        check_positive_numbers(self, ("init_std",))
        check_probabilities(self, dropouts)
        check_activation(self, "activation_function")
        check_token_ids(
            self, ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
        )
