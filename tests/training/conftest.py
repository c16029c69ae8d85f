import json
import os
import random
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

T5 = "d_model=32,d_kv=8,d_ff=32,num_layers=1,num_heads=4"
BART = (
    "d_model=32,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=32,decoder_ffn_dim=32,encoder_attention_heads=4,"
    "decoder_attention_heads=4"
)
MODELS = {
    "t5": T5,
    "longt5": f"{T5},local_radius=7",
    "bart": f"{BART},max_position_embeddings=64",
    "led": f"{BART},max_encoder_position_embeddings=64,max_decoder_position_embeddings=64,attention_window=[8]",
    "spade": "hidden_size=32,num_hidden_layers=2,num_decoder_layers=1,num_attention_heads=4,intermediate_size=32,"
    "local_radius=4,ssm_state_size=8",
}
NO_DROPOUT = {
    "t5": "dropout_rate=0",
    "longt5": "dropout_rate=0",
    "bart": "dropout=0,attention_dropout=0,activation_dropout=0",
    "led": "dropout=0,attention_dropout=0,activation_dropout=0",
    "spade": "dropout=0,attention_dropout=0",
}
_WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge", "market", "teacher", "music", "garden"]


def _row(rng: random.Random) -> dict[str, str]:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(6, 20))]
    return {
        "document": f"The {words[0]}. {' '.join(words[1:])}.",
        "summary": " ".join(words[: rng.randint(1, 4)]),
    }


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, Path]:
    """Data files by split, and a cache folder of this process."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for split, rows in (("train", 32), ("validation", 6), ("test", 5)):
        lines = [json.dumps(_row(rng)) for _ in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {split: folder / f"{split}.jsonl" for split in ("train", "validation", "test")} | {
        "cache": folder / "cache"
    }


@pytest.fixture(scope="session")
def arguments(data):
    """A function: model type and output folder to a small command line, to which more flags are added."""

    def build(model_type, output_dir, *more, overrides=""):
        config = ",".join(filter(None, [MODELS.get(model_type), overrides]))
        return [
            "--model_type", model_type, "--config_overrides", config, "--tokenizer_vocab_size", "300",
            "--cache_dir", str(data["cache"]), "--train_file", str(data["train"]),
            "--validation_file", str(data["validation"]), "--test_file", str(data["test"]),
            "--max_source_length", "48", "--max_target_length", "8", "--per_device_train_batch_size", "4",
            "--logging_steps", "1", "--use_cpu", "--disable_tqdm", "true", "--report", "false",
            "--output_dir", str(output_dir), *more,
        ]  # fmt: skip

    return build


@pytest.fixture
def no_data(monkeypatch):
    """A function: from its call on, loading data fails the test, for what is wrong can be seen before."""

    from hf_hybrid.training import splits

    def work(**kwargs):
        raise AssertionError("data were loaded before everything else was checked")

    return lambda: monkeypatch.setattr(splits, "load_raw_datasets", work)
