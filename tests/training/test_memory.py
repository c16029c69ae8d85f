"""What saves memory or time in the scripts: checkpointed activations, bfloat16, compilation."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from hf_hybrid.training import clm, glue, summarization

from ..matrix import some
from ..tolerances import assert_close
from .conftest import BART, MODELS, NO_DROPOUT, T5

SMALL = "hidden_size=32,num_hidden_layers=2,intermediate_size=32,dropout=0"
CASES = {  # model type -> script, its data flags, a configuration without dropout
    "spade": (summarization, f"{MODELS['spade']},{NO_DROPOUT['spade']}"),
    "srformer_t5": (summarization, f"{T5},dropout_rate=0,segment_size=4"),
    "srformer_bart": (summarization, f"{BART},{NO_DROPOUT['bart']},max_position_embeddings=64,segment_size=4"),
    "bst": (clm, f"{SMALL},num_attention_heads=4,window=8,state_size=8"),
    "chela": (glue, SMALL),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function: train a model for three steps by a script; its losses, and the folder."""
    folder = tmp_path_factory.mktemp("memory")
    outputs = (folder / f"run{number}" for number in itertools.count())
    lines = [
        {"document": f"river {row} stone " * (row + 1), "summary": f"cloud {row}", "label": row % 2}
        for row in range(6)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "train.txt").write_text("river and stone\n" * 40)

    def run(model_type, *more):
        script, overrides = CASES[model_type]
        data = {
            summarization: ["--max_source_length", "40", "--max_target_length", "8", "--text_column", "document",
                            "--summary_column", "summary"],
            glue: ["--max_seq_length", "40", "--text_column_names", "document,summary"],
            clm: ["--block_size", "24"],
        }[script]  # fmt: skip
        output = next(outputs)
        script.main(
            [
                "--model_type", model_type, "--config_overrides", overrides, "--tokenizer_type", "bytes", *data,
                "--train_file", str(folder / ("train.txt" if script is clm else "train.jsonl")), "--cache_dir",
                str(folder / "cache"), "--do_train", "--max_steps", "3", "--per_device_train_batch_size", "2",
                "--learning_rate", "0.01", "--logging_steps", "1", "--save_strategy", "no", "--use_cpu",
                "--disable_tqdm", "true", "--output_dir", str(output), *more,
            ]
        )  # fmt: skip
        history = json.loads(Path(output, "trainer_state.json").read_text())["log_history"]
        return torch.tensor([row["loss"] for row in history if "loss" in row])

    return run


@pytest.mark.parametrize("model_type", some(CASES, "spade"))
def test_checkpointed_activations_and_bfloat16(model_type, train):
    plain = train(model_type)
    assert len(set(plain.tolist())) == len(plain) == 3
    assert_close(train(model_type, "--gradient_checkpointing"), plain, "float32 model")
    kept = ("--activation_checkpointing_kwargs", '{"save": "products"}')
    assert_close(train(model_type, "--activation_checkpointing", *kept), plain, "float32 model")
    cast = train(model_type, "--bf16")
    assert not torch.equal(cast, plain)
    assert_close(cast, plain, "bfloat16")


@pytest.mark.full
def test_a_compiled_run_takes_each_step_in_one_graph(train, monkeypatch):
    plain = train("bst")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train("bst", "--torch_compile", "--torch_compile_backend", "aot_eager")
    assert_close(compiled, plain, "float32 model")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
