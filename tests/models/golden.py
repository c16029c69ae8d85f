"""Records of what is public about every model type: config fields with defaults, state-dict names with shapes.

`python -m tests.models.golden` writes them anew after a deliberate change; the difference belongs in the changelog.
"""

import json
import re
from pathlib import Path

from transformers import PreTrainedConfig

from hf_hybrid.models.auto import ARCHITECTURES

from .tiny import tiny_model

GOLDEN_FOLDER = Path(__file__).parent / "golden"
LANGUAGE_MODEL = {"is_decoder": True, "is_encoder_decoder": False}
# model type -> name -> options that add, drop or reshape weights of the tiny config's model: of the language model
# where they ask for one, otherwise of the class with the most weights, which holds what the others are made of
VARIANTS = {
    "bst": {
        "multi head": {"context_type": "multi_head"},
        "multi filter": {"context_type": "multi_filter"},
        "unstructured": {"context_filter": "unstructured"},
        "multi filter, unstructured": {"context_filter": "unstructured", "context_type": "multi_filter"},
        "states of the window before": {"context_shift": "window"},
        "lifted states": {"context_lift": True},
        "lifted filters": {"context_lift": True, "context_type": "multi_filter"},
        "gate": {"context_mixing": "gate"},
        "no norm of queries and keys": {"qk_norm": False},
        "windows alone": {"bst_layers": []},
        "gated, layer_norm, biases": {
            "gated_feed_forward": True,
            "norm_type": "layer_norm",
            "feed_forward_bias": True,
        },
        "adaptive vocabulary": {**LANGUAGE_MODEL, "adaptive_cutoffs": [10, 30]},
    },
    "chela": {
        "causal": {"is_decoder": True},
        "no affine final norm": {"final_norm_affine": False},
        "post-norm, rms_norm": {"norm_position": "post", "norm_type": "rms_norm"},
        "scale_norm": {"norm_type": "scale_norm"},
        "batch_norm": {"norm_type": "batch_norm"},
        "norms behind the branches": {"short_branch_norm": True},
        "one short convolution without bias": {"short_kernel_sizes": [7], "short_conv_bias": False},
        "shared kernels, no skip connection": {"long_kernel_groups": 4, "long_conv_skip": False},
        "long convolution": {"mixer": "long"},
        "s4d": {"mixer": "s4d"},
        "moving average": {"mixer": "ema"},
        "heads with a norm": {"num_attention_heads": 4, "attention_norm": "layer_norm"},
        "shared projection": {"share_gate_value_proj": True},
        "real values": {"input_size": 2},
        "classifier": {"classifier_size": 8},
        "adaptive vocabulary": {**LANGUAGE_MODEL, "adaptive_cutoffs": [10, 30]},
    },
    "spade": {
        "gated, rms_norm, no biases": {
            "gated_feed_forward": True,
            "norm_type": "rms_norm",
            "feed_forward_bias": False,
        },
        "pre-norm": {"norm_position": "pre"},
        "attention biases": {"attention_bias": True},
        "one bias table": {"share_relative_bias": True},
        "absolute positions": {"decoder_position": "learned_absolute"},
        "state space in the decoder": {"decoder_global_layers": [0]},
        "added": {"combine_mode": "add"},
        "stacked": {"combine_mode": "stack"},
        "concatenated": {"combine_mode": "concat"},
        "scale_norm": {"norm_type": "scale_norm"},
        "one bias table per decoder layer": {"decoder_share_relative_bias": False},
        "frozen state space": {"ssm_freeze": "all", "ssm_postact": "gelu_glu"},
        "no skip connection": {"ssm_use_D": False},
        "s4d": {"ssm_type": "s4d"},
        "s5": {"ssm_type": "s5"},
        "hyena": {"ssm_type": "hyena"},
        "lstm": {"ssm_type": "lstm"},
        "state space alone": {"attention_type": "none", "global_layers": "all"},
        "real values": {"input_size": 2},
        "adaptive vocabulary": {**LANGUAGE_MODEL, "adaptive_cutoffs": [10, 30]},
        "untied adaptive vocabulary": {
            **LANGUAGE_MODEL,
            "adaptive_cutoffs": [10, 30],
            "tie_word_embeddings": False,
        },
    },
    **{
        model_type: {
            "trained weight of the two parts": {"mix": "sigma"},
            "gated": {"recurrent_init": "gated"},
            "no neurons": {"cross_attention_mode": "no_raf"},
            "Transformer-XL": {"cross_attention_mode": "transformer_xl"},
        }
        for model_type in ("srformer_bart", "srformer_t5")
    },
}


def golden_record(model_type: str) -> dict:
    """What the golden file of a model type must say."""
    config_class, models = ARCHITECTURES[model_type]
    parent = next(base for base in config_class.__mro__[1:] if issubclass(base, PreTrainedConfig))
    inherited = set(parent().to_dict())
    fields = {key: value for key, value in config_class().to_dict().items() if key not in inherited}
    weights = {auto_class: weight_shapes(model_type, auto_class) for auto_class in sorted(models)}
    largest = max(weights, key=lambda auto_class: len(weights[auto_class]))
    variants = {}
    for name, options in VARIANTS.get(model_type, {}).items():
        varied = "AutoModelForCausalLM" if LANGUAGE_MODEL.items() <= options.items() else largest
        varied = "AutoModelForSequenceClassification" if "input_size" in options else varied
        changed = changes(weights[varied], weight_shapes(model_type, varied, **options))
        variants[name] = {"options": options, varied: changed}
    return {"config": dict(sorted(fields.items())), "state_dict": weights, "variants": variants}


def weight_shapes(model_type: str, auto_class: str, **options) -> dict[str, list[int]]:
    """Names and shapes of the state dict of a tiny model."""
    weights = tiny_model(model_type, auto_class, **options).state_dict()
    return {name: list(tensor.shape) for name, tensor in sorted(weights.items())}


def changes(before: dict[str, list[int]], after: dict[str, list[int]]) -> dict[str, list[int] | None]:
    """Weights that are new or of a new shape, with it, and those that are gone, with None."""
    return {name: after.get(name) for name in sorted(before | after) if before.get(name) != after.get(name)}


def as_text(record: dict) -> str:
    """JSON with each shape on one line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[\d,\s]+\]", lambda shape: json.dumps(json.loads(shape[0])), text) + "\n"


if __name__ == "__main__":
    GOLDEN_FOLDER.mkdir(exist_ok=True)
    for name in ARCHITECTURES:
        (GOLDEN_FOLDER / f"{name}.json").write_text(as_text(golden_record(name)))
