"""Make an untrained T5 with SPADE's starting values: ``python -m benchmarks.t5_start FOLDER``.

It has the starter's sizes and tokenizer. Its weights are those of a new SPADE with full attention and no state space
model, which has the same parameters under other names: biases that prefer near keys, small queries, sizes by width.
The embeddings keep T5's own, which have a standard deviation of one: T5's head scales what it multiplies with them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, T5Config, T5ForConditionalGeneration

from hf_hybrid import SpadeForConditionalGeneration, starter
from hf_hybrid.models.spade.conversion_spade import config_from_t5, weights_from_t5

STARTER = "spade-en-tiny"


def starting(config: T5Config, seed: int) -> T5ForConditionalGeneration:
    """Return a new T5 with SPADE's starting values for everything but the embeddings."""
    torch.manual_seed(seed)
    t5 = T5ForConditionalGeneration(config)
    like = config_from_t5(config, attention_type="full", global_layers=[])
    values = SpadeForConditionalGeneration(like).model.state_dict()
    with torch.no_grad():
        for name, tensor in weights_from_t5(t5.state_dict(), like, {"encoder", "decoder"}).items():
            if name != "encoder.embed_tokens.weight":
                tensor.copy_(values[name])
    return t5


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the T5 is written")
    parser.add_argument("--seed", type=int, default=42, help="of the weights (%(default)s)")
    arguments = parser.parse_args(argv)
    folder = starter(STARTER)
    tokenizer, known = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    sizes = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 640, "num_layers": 4, "num_decoder_layers": 4}
    ids = {name: getattr(known, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    config = T5Config(vocab_size=len(tokenizer), **sizes, **ids, feed_forward_proj="gated-gelu", dropout_rate=0)
    starting(config, arguments.seed).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
