"""Make an untrained T5 with SPADE's starting values: ``python -m benchmarks.t5_start FOLDER``.

It has the starter's sizes and tokenizer. Its weights are those of a new SPADE with full attention and no state space
model, which has the same parameters under other names: biases that prefer near keys, sizes by width.

AdamW moves every weight by about the learning rate, while T5's own optimizer moves it by a share of its size. So
weights whose sizes differ only by convention are brought nearer to each other: queries, into which T5 draws the scale
of scores, and keys get one size, and embeddings a tenth of T5's, for which the decoder's last norm makes up.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from hf_hybrid import SpadeForConditionalGeneration, starter
from hf_hybrid.models.spade.conversion_spade import config_from_t5, weights_from_t5

STARTER = "spade-en-tiny"
EMBEDDINGS, LAST_NORM = 0.1, 6.3
"""Standard deviation of the embeddings, and gain of the norm before the head, which multiplies with them again."""


def starting(config: T5Config, seed: int) -> T5ForConditionalGeneration:
    """Return a new T5 with SPADE's starting values."""
    torch.manual_seed(seed)
    t5 = T5ForConditionalGeneration(config)
    like = config_from_t5(config, attention_type="full", global_layers=[])
    values = SpadeForConditionalGeneration(like).model.state_dict()
    with torch.no_grad():
        for name, tensor in weights_from_t5(t5.state_dict(), like, {"encoder", "decoder"}).items():
            if name != "encoder.embed_tokens.weight":
                tensor.copy_(values[name])
        for attention in (part for part in t5.modules() if isinstance(part, T5Attention)):
            ratio = (attention.k.weight.std() / attention.q.weight.std()).sqrt()
            attention.q.weight.mul_(ratio)
            attention.k.weight.div_(ratio)
        t5.shared.weight.mul_(EMBEDDINGS)
        t5.decoder.final_layer_norm.weight.fill_(LAST_NORM)
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
