"""Every architecture and mode with random weights, in the sizes of `bench_models` and `bench_language_models`."""

from typing import Any

import torch

from benchmarks import bench_language_models, bench_models

ENCODER_DECODERS = ("spade-seq2seq", "srformer")
CAUSAL = ("spade", "chela", "bst-sh-s4")
OURS = (*ENCODER_DECODERS, *CAUSAL)
MODES = ("spade-seq2seq-chunk", "srformer-bart", "spade-chunk", "chela-bidirectional", "bst-mh-s4", "bst-mf-s4")
"""Further forms of `OURS`."""
LONGEST_BART = 16384  # tokens; it has a position embedding for each


def build(name: str, *, dropout: bool = True) -> Any:
    """Build one of `OURS`, of `MODES` or of the peers in `bench_models` and `bench_language_models`.

    Args:
        name: The model.
        dropout: Whether a language model has the dropout of its defaults; encoder-decoders always do.
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
    if name == "srformer":
        return hf_hybrid.SRformerT5ForConditionalGeneration(hf_hybrid.SRformerT5Config(**bench_models.t5_fields()))
    fields = bench_models.bart_fields() | {"max_position_embeddings": LONGEST_BART}
    return hf_hybrid.SRformerBartForConditionalGeneration(hf_hybrid.SRformerBartConfig(**fields))


def _bidirectional_chela() -> Any:
    import hf_hybrid

    torch.manual_seed(0)
    config = bench_language_models.MODELS["chela"]()
    fields = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    fields |= {name: getattr(config, name) for name in ("vocab_size", "intermediate_size", "long_kernel_groups")}
    return hf_hybrid.ChelaForMaskedLM(hf_hybrid.ChelaConfig(**fields))
