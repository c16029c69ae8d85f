"""Every architecture and mode with random weights, in the sizes of the benchmarks of models, and smaller ones."""

from typing import Any

import torch

from benchmarks import bench_language_models, bench_models

ENCODER_DECODERS = ("spade-seq2seq", "srformer")
CAUSAL = ("spade", "chela", "bst-sh-s4")
OURS = (*ENCODER_DECODERS, *CAUSAL)
MODES = ("spade-seq2seq-chunk", "srformer-bart", "spade-chunk", "chela-bidirectional", "bst-mh-s4", "bst-mf-s4")
"""Further forms of `OURS`."""
BIDIRECTIONAL = ("chela-bidirectional",)
"""Those that do not decode."""
FURTHER = (*bench_language_models.FORMS, "srformer-segmented", "srformer-recurrent")
"""Forms whose growth is measured in one precision."""
LONGEST_BART = 16384  # tokens; it has a position embedding for each
SIZES = {"tiny": (128, 2), "small": (256, 4)}
"""Width and layers of `build_sized`; of an encoder-decoder in each stack."""
SIZED = {"llama": "", "spade": "llama", "chela": "llama", "bst": "llama", "t5": "", "spade-seq2seq": "t5"} | {
    "srformer-t5": "t5",
    "bart": "",
    "srformer-bart": "bart",
}
"""Models of `build_sized` -> the peer that each is compared with; none for a peer."""


def build(name: str, *, dropout: bool = True) -> Any:
    """Build one of `OURS`, `MODES` or `FURTHER`, or of the peers in `bench_models` and `bench_language_models`.

    Args:
        name: The model.
        dropout: Whether a language model has the dropout of its defaults; an encoder-decoder always
            has `bench_models.DROPOUT`.
    """
    if name.startswith("spade-seq2seq"):
        return bench_models.build_model(name.replace("-seq2seq", ""))
    if name.startswith("srformer"):
        return _srformer(name)
    if name == "chela-bidirectional":
        return _bidirectional_chela()
    if name in bench_models.MODELS and name not in bench_language_models.MODELS:
        return bench_models.build_model(name)
    return bench_language_models.build_model(name, dropout=dropout)


def _srformer(name: str) -> Any:
    import hf_hybrid

    torch.manual_seed(0)
    if name != "srformer-bart":
        mode = {"cross_attention_mode": name.removeprefix("srformer-")} if "-" in name else {}
        config = hf_hybrid.SRformerT5Config(**bench_models.t5_fields(), **mode)
        return hf_hybrid.SRformerT5ForConditionalGeneration(config)
    fields = bench_models.bart_fields() | {"max_position_embeddings": LONGEST_BART}
    return hf_hybrid.SRformerBartForConditionalGeneration(hf_hybrid.SRformerBartConfig(**fields))


def _bidirectional_chela() -> Any:
    import hf_hybrid

    torch.manual_seed(0)
    config = bench_language_models.MODELS["chela"]()
    fields = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    fields |= {name: getattr(config, name) for name in ("vocab_size", "intermediate_size", "long_kernel_groups")}
    return hf_hybrid.ChelaForMaskedLM(hf_hybrid.ChelaConfig(**fields))


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
