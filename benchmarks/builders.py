"""Every architecture with random weights, in the sizes of `bench_models` and `bench_language_models`, and smaller."""

from typing import Any

import torch

from benchmarks import bench_language_models, bench_models

ENCODER_DECODERS = ("spade-seq2seq", "srformer")
CAUSAL = ("spade", "chela", "bst-sh-s4")
OURS = (*ENCODER_DECODERS, *CAUSAL)
SIZES = {"tiny": (128, 2), "small": (256, 4)}
"""Width and layers of `build_sized`; of an encoder-decoder in each stack."""
SIZED = ("llama", "spade", "chela", "bst", "t5", "spade-seq2seq", "srformer-t5", "bart", "srformer-bart")
"""Models of `build_sized`: peers, and those of ours that are compared with the one before."""


def build(name: str) -> Any:
    """Build one of `ENCODER_DECODERS`, or a language model of `bench_language_models`."""
    if name == "spade-seq2seq":
        return bench_models.build_model("spade")
    if name == "srformer":
        from hf_hybrid import SRformerT5Config, SRformerT5ForConditionalGeneration

        torch.manual_seed(0)
        return SRformerT5ForConditionalGeneration(SRformerT5Config(**bench_models.t5_fields()))
    return bench_language_models.build_model(name)


def build_sized(name: str, size: str) -> Any:
    """Build one of `SIZED` in one of `SIZES`, with four heads and a vocabulary of 1,000, in its config's defaults."""
    import transformers

    import hf_hybrid

    width, layers = SIZES[size]
    common = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    heads = {"num_attention_heads": 4}
    t5 = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_layers": layers, "num_heads": 4}
    bart: dict[str, Any] = {"d_model": width, "decoder_start_token_id": 2}
    for side in ("encoder", "decoder"):
        bart |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * width, f"{side}_attention_heads": 4}
    configs: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, shape | heads),
        "t5": (transformers.T5Config, t5 | {"decoder_start_token_id": 0}),
        "bart": (transformers.BartConfig, bart),
        "spade": (hf_hybrid.SpadeConfig, shape | heads | {"is_decoder": True, "is_encoder_decoder": False}),
        "spade-seq2seq": (hf_hybrid.SpadeConfig, shape | heads),
        "chela": (hf_hybrid.ChelaConfig, shape | {"is_decoder": True}),
        "bst": (hf_hybrid.BstConfig, shape | heads),
        "srformer-t5": (hf_hybrid.SRformerT5Config, t5 | {"decoder_start_token_id": 0}),
        "srformer-bart": (hf_hybrid.SRformerBartConfig, bart),
    }
    config_class, fields = configs[name]
    config = config_class(**common, **fields)
    torch.manual_seed(0)
    auto_class = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto_class.from_config(config)
