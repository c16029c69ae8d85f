"""Turn a T5 into a LongT5 with local attention: ``python -m benchmarks.long_t5 T5 FOLDER [--local_radius 128]``.

The peer of `SpadeForConditionalGeneration.from_t5` that transformers has no conversion for. LongT5's encoder has the
parameters of T5's under other names, and its decoder is T5's, so at first it computes what T5 does for documents of at
most ``local_radius`` tokens.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, LongT5Config, LongT5ForConditionalGeneration, T5ForConditionalGeneration

_FIELDS = (
    *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "dropout_rate"),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj"),
    *("pad_token_id", "eos_token_id", "decoder_start_token_id"),
)


def convert(t5: T5ForConditionalGeneration, local_radius: int) -> LongT5ForConditionalGeneration:
    """Return a LongT5 with the weights of a T5.

    Args:
        t5: The T5; not changed.
        local_radius: How far a token of the document sees to each side, in tokens.
    """
    known = t5.config.to_dict()
    fields = {name: known[name] for name in _FIELDS if name in known}
    fields["tie_word_embeddings"] = t5.config.scale_decoder_outputs  # T5 1.1 does not scale; the rest is the same
    config = LongT5Config(**fields, local_radius=local_radius, encoder_attention_type="local")
    model = LongT5ForConditionalGeneration(config)
    weights = {
        name.replace("SelfAttention", "LocalSelfAttention") if name.startswith("encoder.") else name: weight
        for name, weight in t5.state_dict().items()
    }
    model.load_state_dict(weights)
    model.generation_config = t5.generation_config
    return model.eval()


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("t5", type=Path, help="folder of the T5")
    parser.add_argument("folder", type=Path, help="folder of the LongT5")
    parser.add_argument("--local_radius", type=int, default=128, help="in tokens (%(default)s)")
    arguments = parser.parse_args(argv)
    if not (arguments.t5 / "config.json").is_file():
        parser.error(f"t5 must be a folder with config.json; got {arguments.t5}")
    convert(T5ForConditionalGeneration.from_pretrained(arguments.t5), arguments.local_radius).save_pretrained(
        arguments.folder
    )
    AutoTokenizer.from_pretrained(arguments.t5).save_pretrained(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
