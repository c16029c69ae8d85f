"""The smallest useful config of every model type, and inputs for every Auto class; all model tests build from here."""

import inspect

import torch
import transformers
from torch import nn

from hf_hybrid.models.auto import ARCHITECTURES

TINY_CONFIGS = {
    "bst": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "window": 5,
        "state_size": 8,
        "num_labels": 3,
        "initializer_range": 0.2,
    },
    "chela": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "short_kernel_sizes": [3, 5],
        "long_kernel_size": 12,
        "num_labels": 3,
        "initializer_range": 0.2,
    },
    "spade": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "local_radius": 4,
        "chunk_size": 6,
        "ssm_state_size": 8,
        "num_labels": 3,
        "initializer_range": 0.2,  # outputs of ordinary size, so that comparisons mean something
    },
    "srformer_bart": {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "init_std": 0.2,
        "segment_size": 3,
        "decoder_horizon": 12,
        "horizon_mode": "fixed",
    },
    "srformer_t5": {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "segment_size": 3,
        "decoder_horizon": 12,
        "horizon_mode": "fixed",
    },
}
UNSTRUCTURED = {"context_filter": "unstructured", "filter_length": 12}
# where a config serves several roles, what it says for one of them
ROLES = {("spade", "AutoModelForCausalLM"): {"is_decoder": True, "is_encoder_decoder": False}}
# model type -> its own names for fields that the common tests set
FIELD_NAMES = {
    "srformer_t5": {
        "dropout": "dropout_rate",
        "attention_dropout": "dropout_rate",
        "hidden_size": "d_model",
        "initializer_range": None,  # T5 scales each of its draws by the widths of what it is drawn for
    },
    "srformer_bart": {"hidden_size": "d_model", "initializer_range": "init_std"},
}
# model type -> sides on which documents may be padded, where not on both: BART counts positions from column 0
PADDED_SIDES = {"srformer_bart": ("right",)}
# model types whose config cannot ask for tuples, only a call: BART's forward reads its parts' outputs by name
NEEDS_DICT = {"srformer_bart"}
# model types whose resized embeddings are one table: BART's resizing makes it so, tied or not
ALWAYS_TIED = {"srformer_bart"}
# model types whose config may scale embeddings
SCALED = {"bst", "spade", "chela"}

ATTENTION_FREE = {"chela"}  # model types without softmax attention, and so without its implementations and weights
MODEL_CLASSES = [
    (model_type, auto_class) for model_type, (_, models) in ARCHITECTURES.items() for auto_class in sorted(models)
]
GENERATIVE = [(model_type, name) for model_type, name in MODEL_CLASSES if name.endswith(("Seq2SeqLM", "CausalLM"))]
# for each generative class of a model type, every way of decoding that differs in what a cache holds
DECODERS = {
    ("bst", "AutoModelForCausalLM"): {
        "single head": {},
        "multi head": {"context_type": "multi_head"},
        "multi filter": {"context_type": "multi_filter", "num_context_states": 6},
        "single head, unstructured": {**UNSTRUCTURED},
        "multi filter, unstructured": {**UNSTRUCTURED, "context_type": "multi_filter", "num_context_states": 6},
        "states of the window before": {"context_shift": "window", "bst_layers": [0, 1]},
        "lifted filters": {"context_lift": True, "context_type": "multi_filter"},
        "gate, raw states": {"context_mixing": "gate", "context_input": "raw"},
        "windows that do not slide": {"sliding_context_layers": False, "context_type": "multi_filter"},
        "without the query's own key": {"include_self": False, "bst_layers": [0]},
        "window of one": {"window": 1, "context_type": "multi_filter"},
        "windows alone": {"bst_layers": []},
        "windows alone without the query's own key": {"bst_layers": [], "include_self": False},
        "adaptive vocabulary": {"adaptive_cutoffs": [10, 30], "adaptive_factor": 2},
    },
    ("chela", "AutoModelForCausalLM"): {
        "short-long convolution": {},
        "heads": {"num_attention_heads": 4, "attention_norm": "rms_norm"},
        "memory of one token": {"long_kernel_size": 1, "short_kernel_sizes": [1]},
        "shared kernels": {"long_kernel_groups": 4, "kernel_squash": 0.01, "kernel_smoothing": 3},
        "long convolution": {"mixer": "long", "attention_norm": "none"},
        "s4d": {"mixer": "s4d", "mixer_state_size": 8},
        "moving average": {"mixer": "ema", "norm_position": "post"},
        "laplace": {"attention_fn": "laplace", "num_attention_heads": 2},
        "laplace in chunks": {"attention_fn": "laplace", "chunk_size": 5},
        "chunks of one": {"attention_fn": "laplace", "chunk_size": 1},
        "laplace of features": {"attention_fn": "laplace_feature", "attention_norm": "layer_norm"},
        "adaptive vocabulary": {"adaptive_cutoffs": [10, 30], "adaptive_factor": 2, "is_decoder": True},
    },
    ("spade", "AutoModelForSeq2SeqLM"): {
        "full": {},
        "window": {"decoder_attention_type": "window"},
        "window of one": {"decoder_attention_type": "window", "local_radius": 0},
        "chunk": {"decoder_attention_type": "chunk"},
        "chunk of one": {"decoder_attention_type": "chunk", "chunk_size": 1},
        "state space": {"decoder_global_layers": [0]},
        "state space and window": {"decoder_global_layers": "all", "decoder_attention_type": "window"},
        "state space and chunk": {"decoder_global_layers": [1], "decoder_attention_type": "chunk"},
        "frozen and concatenated": {"decoder_global_layers": [0], "ssm_freeze": "all", "combine_mode": "concat"},
        "state space added": {"decoder_global_layers": [0], "combine_mode": "add"},
        "state space below": {"decoder_global_layers": [0], "combine_mode": "stack"},
        "absolute positions": {"decoder_position": "learned_absolute"},
    },
    **{
        (model_type, "AutoModelForSeq2SeqLM"): {
            "segmented recurrent": {},
            "fewer tokens than segments": {"segment_size": 2, "decoder_horizon": 3},
            "segmented": {"cross_attention_mode": "segmented"},
            "recurrent": {"cross_attention_mode": "recurrent"},
            "complements": {"cross_attention_mode": "no_raf", "mix": "sigma"},
            "Transformer-XL": {"cross_attention_mode": "transformer_xl"},
            "LongT5": {"cross_attention_mode": "longt5"},
            "full": {"cross_attention_mode": "full"},
        }
        for model_type in ("srformer_bart", "srformer_t5")
    },
    ("spade", "AutoModelForCausalLM"): {
        "window": {},
        "chunk": {"attention_type": "chunk"},
        "full": {"attention_type": "full"},
        "full attention alone": {"attention_type": "full", "global_layers": "none"},
        "window alone": {"global_layers": "none"},
        "chunk alone": {"attention_type": "chunk", "global_layers": "none"},
        "state space alone": {"attention_type": "none", "global_layers": "all"},
        "absolute positions": {"decoder_position": "learned_absolute"},
        "frozen and concatenated": {"ssm_freeze": "all", "combine_mode": "concat"},
        "s4d": {"ssm_type": "s4d", "global_layers": "all"},
        "s5": {"ssm_type": "s5", "attention_type": "chunk"},
        "hyena": {"ssm_type": "hyena", "ssm_l_max": 8},
        "hyena alone": {"ssm_type": "hyena", "hyena_order": 3, "attention_type": "none", "global_layers": "all"},
        "lstm": {"ssm_type": "lstm"},
        "adaptive vocabulary": {
            "adaptive_cutoffs": [10, 30],
            "adaptive_factor": 2,
            "scale_embeddings": True,
        },
    },
}
DECODERS |= {key: {"default": {}} for key in GENERATIVE if key not in DECODERS}
DECODER_CASES = [(model_type, name, case) for model_type, name in GENERATIVE for case in DECODERS[model_type, name]]
FIRST_CASES = [next(case for case in DECODER_CASES if case[:2] == decoder) for decoder in DECODERS]


def tiny_config(model_type: str, **overrides):
    names = FIELD_NAMES.get(model_type, {})
    overrides = {names.get(name, name): value for name, value in overrides.items() if names.get(name, name)}
    fields = {**TINY_CONFIGS[model_type], **overrides}
    if fields.get("context_filter") == "unstructured":
        fields.pop("state_size")
    if fields.get("ssm_type") in ("hyena", "lstm") and "ssm_state_size" not in overrides:
        fields.pop("ssm_state_size")  # they have none
    return transformers.AutoConfig.for_model(model_type, **fields)


def new_model(model_type: str, auto_class: str, *, seed: int = 0, **overrides):
    """A tiny model in evaluation mode as a user gets it, the same one for the same seed."""
    if model_type in ATTENTION_FREE:
        overrides.pop("attn_implementation", None)
    torch.manual_seed(seed)
    config = tiny_config(model_type, **{**ROLES.get((model_type, auto_class), {}), **overrides})
    return getattr(transformers, auto_class).from_config(config).eval()


def tiny_model(model_type: str, auto_class: str, *, seed: int = 0, **overrides):
    """`new_model`, but with random numbers where it starts with zeros that hide its state space model."""
    model = new_model(model_type, auto_class, seed=seed, **overrides)
    for name, weight in model.named_parameters():
        if name.endswith("global_proj.weight"):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


def tiny_inputs(model, *, batch: int = 2, length: int = 11, target_length: int = 7, seed: int = 1) -> dict:
    """Random inputs for a model, without padding."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(width):
        return torch.randint(2, model.config.vocab_size, (batch, width), generator=generator)

    inputs = {"input_ids": tokens(length)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = tokens(target_length)
    return inputs


def is_causal_lm(model) -> bool:
    return type(model).__name__.endswith("ForCausalLM")


def tiny_labels(model, *, batch: int = 2, length: int = 7, seed: int = 2) -> torch.Tensor:
    return torch.randint(2, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def main_output(outputs) -> torch.Tensor:
    """The tensor that a model is used for: logits, or hidden states where it has no head."""
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def check_unequal_prompts(model):
    """Assert that a batch of prompts of unequal length, padded on the left, generates as each of them alone."""
    prompts = [torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(length)) for length in (3, 9)]
    ids = torch.stack([torch.nn.functional.pad(prompt, (9 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(prompt), (9 - len(prompt), 0)) for prompt in prompts])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12)[:, 9:]
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], max_new_tokens=12, min_new_tokens=12)[:, len(prompt) :]
        assert torch.equal(together[row : row + 1], alone), model.config
