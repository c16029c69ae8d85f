"""Start SPADE from T5: translate config and weights of the T5 family, and add state space models.

T5's layer is a special case of SPADE's: pre-norm with RMS norms, no biases, unscaled scores, one relative bias table
per stack (UMT5: per layer). The reach of the encoder's attention changes. The state space models of the global layers
are new and enter through a projection that is zero at first (``combine_mode="residual"``).
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_hybrid.suggestions import did_you_mean

from .configuration_spade import SpadeConfig

# model type -> prefix of its classes in transformers
FAMILY = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}
HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "use_safetensors",
    "variant",
)
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
SUBLAYERS = {"encoder": ("mixer", "feed_forward"), "decoder": ("mixer", "cross_attention", "feed_forward")}
MODULES = {
    "SelfAttention": "mixer.attention",
    "LocalSelfAttention": "mixer.attention",
    "EncDecAttention": "cross_attention",
    "DenseReluDense": "feed_forward",
}
TENSORS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "relative_attention_bias": "relative_attention_bias",
    "wi": "up_proj",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
}
NEW_TENSORS = re.compile(r"\.mixer\.(ssm|local_norm|global_norm|aggregate|global_proj)\.")


def start_from_t5(
    model_class: type[PreTrainedModel],
    name_or_model: str | os.PathLike | PreTrainedModel,
    *,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    device_map: str | int | dict | torch.device | None = None,
    **options,
) -> PreTrainedModel:
    """Build a SPADE model from a model of the T5 family; documented at `SpadePreTrainedModel.from_t5`."""
    dtype = dtype or torch_dtype or "auto"
    hub_options = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    is_loaded = isinstance(name_or_model, PreTrainedModel)
    if not is_loaded and not isinstance(name_or_model, str | os.PathLike):
        raise ValueError(
            f"name_or_model must be a name on the Hub, a folder, or a loaded model of transformers; "
            f"got {type(name_or_model).__name__}"
        )
    if is_loaded and hub_options:
        raise ValueError(f"{next(iter(hub_options))} must not be given for a loaded model")
    if model_class.__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"{model_class.__name__} cannot start from T5, whose decoder reads an encoder; "
            f"use SpadeForConditionalGeneration"
        )
    source_config = name_or_model.config if is_loaded else AutoConfig.from_pretrained(name_or_model, **hub_options)
    config = config_from_t5(source_config, **options)

    with torch.device("meta"):
        skeleton = model_class(config).state_dict()
    names = {name.removeprefix("model."): name for name in skeleton}
    shapes = {target: skeleton[name].shape for target, name in names.items()}
    parts = {target.split(".")[0] for target in names} & {"encoder", "decoder", "lm_head"}
    if "decoder" not in parts:
        parts.discard("lm_head")  # a head on an encoder is new
    source = name_or_model
    if not is_loaded:
        source = _load_source(name_or_model, source_config.model_type, parts, dtype=dtype, **hub_options)
    weights = weights_from_t5(source.state_dict(), config, parts)
    _check_targets(weights, shapes, parts, source)
    if "lm_head" in parts:
        config.tie_word_embeddings = "lm_head.weight" not in weights
    if is_loaded:  # loading would share memory with the source
        weights = {target: tensor.to("cpu", copy=True) for target, tensor in weights.items()}

    model = model_class.from_pretrained(
        None,
        config=config,
        state_dict={names[target]: tensor for target, tensor in weights.items()},
        dtype=source.dtype if dtype == "auto" else dtype,
        attn_implementation=attn_implementation,
        device_map=device_map,
        generation_config=getattr(source, "generation_config", None),
    )
    model.name_or_path = model.config.name_or_path = ""  # it has no name yet
    if model.can_generate():
        for field in options.keys() & set(TOKEN_IDS):
            setattr(model.generation_config, field, options[field])
    return model


def config_from_t5(source: PreTrainedConfig, **overrides) -> SpadeConfig:
    """Describe a T5 as a SPADE model.

    Args:
        source: Config of T5 (1.0, 1.1, Flan), mT5, UMT5, or LongT5 with local attention.
        **overrides: Fields of `SpadeConfig` to set differently, and `num_labels`.

    Returns:
        The config, with `tie_word_embeddings` True: only the weights show whether a checkpoint has its own head.

    Raises:
        ValueError: The source is of another kind, an override is no field, or it contradicts the source's weights.
        huggingface_hub.errors.StrictDataclassError: An override breaks its rule in `SpadeConfig`.
    """
    if source.model_type not in FAMILY:
        raise ValueError(
            f"from_t5 supports the model types {', '.join(FAMILY)} (longt5 with local attention); "
            f"got model type {source.model_type!r}"
        )
    if source.model_type == "longt5" and source.encoder_attention_type != "local":
        raise ValueError(
            f"from_t5 supports longt5 with encoder_attention_type 'local'; got {source.encoder_attention_type!r}, "
            f"whose global tokens SPADE does not have"
        )
    fixed = _fixed_fields(source)
    known = {field.name for field in dataclasses.fields(SpadeConfig)} | {"num_labels"}
    for name, value in overrides.items():
        if name not in known:
            options = [*known, *HUB_OPTIONS, "attn_implementation", "device_map", "dtype"]
            raise ValueError(f"from_t5 has no option or config field {name!r}.{did_you_mean(name, options)}")
        if name == "tie_word_embeddings":
            raise ValueError(f"tie_word_embeddings must be left out: the source's weights determine it; got {value!r}")
        if name in fixed and value != fixed[name]:
            raise ValueError(f"{name} must be {fixed[name]!r}, as in the source; got {value!r}")
    chosen = {
        "dropout": source.dropout_rate,
        "attention_dropout": source.dropout_rate,
        "activation_dropout": source.dropout_rate,
        "combine_mode": "residual",
        **{field: getattr(source, field, None) for field in TOKEN_IDS},
    }
    if source.model_type == "longt5":
        chosen["local_radius"] = source.local_radius
    return SpadeConfig(**{**fixed, **chosen, **overrides})


def _fixed_fields(source: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of `SpadeConfig` that a T5's config determines."""
    has_own_tables = source.model_type == "umt5"
    return {
        "vocab_size": source.vocab_size,
        "hidden_size": source.d_model,
        "num_hidden_layers": source.num_layers,
        "num_decoder_layers": source.num_decoder_layers,
        "num_attention_heads": source.num_heads,
        "head_dim": source.d_kv,
        "intermediate_size": source.d_ff,
        "hidden_act": source.dense_act_fn,
        "gated_feed_forward": source.is_gated_act,
        "feed_forward_bias": False,
        "attention_bias": False,
        "scale_attention": False,
        "norm_type": "rms_norm",
        "norm_position": "pre",
        "layer_norm_eps": source.layer_norm_epsilon,
        "embedding_norm": False,
        "final_norm": True,
        "relative_attention_num_buckets": source.relative_attention_num_buckets,
        "relative_attention_max_distance": source.relative_attention_max_distance,
        "share_relative_bias": not has_own_tables,
        "decoder_share_relative_bias": not has_own_tables,
        "decoder_position": "relative",
        "tie_word_embeddings": True,
        "scale_embeddings": False,
        # mT5 never scales, UMT5 always; T5 and LongT5 have a field
        "scale_decoder_outputs": getattr(source, "scale_decoder_outputs", source.model_type == "umt5"),
        "is_encoder_decoder": True,
        "is_decoder": False,
    }


def weights_from_t5(
    source: Mapping[str, torch.Tensor], config: SpadeConfig, parts: set[str]
) -> dict[str, torch.Tensor]:
    """Rename the tensors of a T5 to SPADE's names.

    Args:
        source: State dict of a T5 model with or without head, or of its encoder.
        config: SPADE's config, from `config_from_t5`.
        parts: Parts to return: `"encoder"`, with it `"decoder"`, with both `"lm_head"`.

    Returns:
        The same tensors, not copied, by their names in `SpadeModel`; `lm_head.weight` only if it differs from the
        embedding.

    Raises:
        ValueError: SPADE has no tensor for one of these parts.
    """
    source = {name.removeprefix("transformer."): tensor for name, tensor in source.items()}
    embedding = source.get("shared.weight")
    weights, unused = {}, []
    for name, tensor in source.items():
        part = name.split(".")[0]
        if part in ("decoder", "lm_head") and part not in parts:
            continue
        is_shared = embedding is not None and tensor.data_ptr() == embedding.data_ptr()
        if name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight") and is_shared:
            continue
        target = name if name == "lm_head.weight" else _target(name, config)
        if target is None:
            unused.append(name)
        else:
            weights[target] = tensor
    if unused:
        raise ValueError(f"SPADE does not have these tensors of the source: {_listed(unused)}")
    return weights


def _target(name: str, config: SpadeConfig) -> str | None:
    """Return SPADE's name for a tensor of T5, or None."""
    if name == "shared.weight":
        return "encoder.embed_tokens.weight"
    stack, _, rest = name.partition(".")
    if stack not in SUBLAYERS:
        return None
    if rest == "final_layer_norm.weight":
        return f"{stack}.final_norm.weight"
    match = re.fullmatch(r"block\.(\d+)\.layer\.(\d)\.(?:(\w+)\.)?(\w+)\.weight", rest)
    if match is None:
        return None
    layer, sublayer, module, tensor = match.groups()
    if int(sublayer) >= len(SUBLAYERS[stack]):
        return None
    root, sublayer_name = f"{stack}.layers.{layer}", SUBLAYERS[stack][int(sublayer)]
    if module is None:
        return f"{root}.{sublayer_name}_norm.weight" if tensor == "layer_norm" else None
    if tensor not in TENSORS or not MODULES.get(module, "").startswith(sublayer_name):
        return None
    if tensor == "relative_attention_bias":
        shared = config.share_relative_bias if stack == "encoder" else config.decoder_share_relative_bias
        if shared:
            return f"{stack}.relative_attention_bias.weight" if layer == "0" else None
    return f"{root}.{MODULES[module]}.{TENSORS[tensor]}.weight"


def _load_source(name: str | os.PathLike, model_type: str, parts: set[str], **options) -> PreTrainedModel:
    """Load these parts of a T5 checkpoint; raise ValueError if tensors are missing or unused."""
    ending = "ForConditionalGeneration" if "lm_head" in parts else "Model" if "decoder" in parts else "EncoderModel"
    source_class = getattr(transformers, FAMILY[model_type] + ending)
    source, info = source_class.from_pretrained(name, output_loading_info=True, **options)
    unwanted = tuple(f"{part}." for part in ("decoder", "lm_head") if part not in parts)
    unused = [key for key in info["unexpected_keys"] if not key.startswith(unwanted)]
    if info["missing_keys"]:
        raise ValueError(f"{name} lacks tensors of a {source_class.__name__}: {_listed(info['missing_keys'])}")
    if unused:
        raise ValueError(f"SPADE does not have these tensors of {name}: {_listed(unused)}")
    return source


def _check_targets(
    weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], parts: set[str], source: PreTrainedModel
) -> None:
    """Raise ValueError unless the source has exactly the tensors that SPADE takes from T5, in the right shapes."""
    misfits = [
        f"{target} {tuple(tensor.shape)}" for target, tensor in weights.items() if shapes.get(target) != tensor.shape
    ]
    if misfits:
        raise ValueError(f"SPADE with this config does not have the source's {_listed(misfits)}")
    missing = [
        target
        for target in shapes
        if target not in weights and target.split(".")[0] in parts - {"lm_head"} and not NEW_TENSORS.search(target)
    ]
    if "lm_head" in parts and source.get_output_embeddings() is None:
        missing.append("lm_head.weight")
    if missing:
        raise ValueError(f"the source, a {type(source).__name__}, has no weights for {_listed(missing)}")


def _listed(names: Iterable[str]) -> str:
    """Join at most three names and count the others."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
