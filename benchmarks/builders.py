"""Every architecture with random weights, in the sizes of `bench_models` and `bench_language_models`."""

from typing import Any

import torch

from benchmarks import bench_language_models, bench_models

ENCODER_DECODERS = ("spade-seq2seq", "srformer")
CAUSAL = ("spade", "chela", "bst-sh-s4")
OURS = (*ENCODER_DECODERS, *CAUSAL)


def build(name: str) -> Any:
    """Build one of `ENCODER_DECODERS`, or a language model of `bench_language_models`."""
    if name == "spade-seq2seq":
        return bench_models.build_model("spade")
    if name == "srformer":
        from hf_hybrid import SRformerT5Config, SRformerT5ForConditionalGeneration

        torch.manual_seed(0)
        return SRformerT5ForConditionalGeneration(SRformerT5Config(**bench_models.t5_fields()))
    return bench_language_models.build_model(name)
