"""``--init_from t5``: a checkpoint of the T5 family goes on as SPADE."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from hf_hybrid.training import summarization
from hf_hybrid.training.flags.model import ModelArguments


@pytest.fixture(scope="module")
def t5(arguments, tmp_path_factory):
    """A T5 with a head of its own and a tokenizer, as the script leaves it."""
    folder = tmp_path_factory.mktemp("t5")
    summarization.main(arguments("t5", folder, "--do_train", "--max_steps", "1"))
    model = T5ForConditionalGeneration.from_pretrained(folder)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.1)
    model.save_pretrained(folder)
    return folder


def without_model(command: list[str]) -> list[str]:
    return command[command.index("--tokenizer_vocab_size") :]


def command(arguments, t5, output_dir, *more):
    return [
        *without_model(arguments("spade", output_dir)),
        "--init_from",
        "t5",
        "--model_name_or_path",
        str(t5),
        *more,
    ]


@pytest.fixture(scope="module")
def bart(arguments, tmp_path_factory):
    """A BART and a tokenizer, as the script leaves it."""
    folder = tmp_path_factory.mktemp("bart")
    summarization.main(arguments("bart", folder, "--do_train", "--max_steps", "1"))
    return folder


@pytest.mark.parametrize("source", ["t5", "bart"])
def test_srformer_starts_from_its_parent(arguments, source, tmp_path, request):
    """One segment is the parent, so a run without learning ends where it began; then it learns and is resumed."""
    folder, output = request.getfixturevalue(source), tmp_path / "out"
    build = [*without_model(arguments(source, output)), "--init_from", source, "--model_name_or_path", str(folder)]
    build += ["--model_type", f"srformer_{source}", "--seed", "3", "--do_train", "--save_steps", "1"]
    more = ["--config_overrides", "segment_size=48", "--max_steps", "1", "--learning_rate", "0"]
    summarization.main([*build, *more, "--output_dir", str(tmp_path / "still")])
    model, parent = (AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (tmp_path / "still", folder))
    assert (model.config.model_type, model.config.segment_size) == (f"srformer_{source}", 48)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, parent(ids, decoder_input_ids=ids).logits)

    evaluate = ["--do_eval", "--predict_with_generate", "--config_overrides", "segment_size=6"]
    metrics = summarization.main([*build, *evaluate, "--max_steps", "2"])
    assert {"eval_rouge1", "train_loss"} <= metrics.keys()
    summarization.main([*build, *evaluate, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 3


def test_srformer_starts_from_nothing_else(arguments, t5, bart, tmp_path):
    def fails(source, folder, *more):
        flags = ["--init_from", source, "--model_name_or_path", str(folder), "--model_type", f"srformer_{source}"]
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
            summarization.main([*without_model(arguments(source, tmp_path / "out")), *flags, *more])
        return str(raised.value)

    assert "SRformerT5Config is made from a model of type t5; got bart" in fails("t5", bart, "--do_train")
    assert "SRformerBartConfig is made from a model of type bart; got t5" in fails("bart", t5, "--do_train")
    assert "adds no field 'd_model'" in fails("t5", t5, "--do_train", "--config_overrides", "d_model=64")
    message = fails("t5", t5, "--do_eval")
    assert "lacks 4 of the weights of SRformerT5ForConditionalGeneration" in message
    assert "it must be trained (--do_train) before it is used" in message


def test_a_run_starts_from_t5_and_is_resumed(arguments, t5, tmp_path):
    more = ["--config_overrides", "local_radius=5,ssm_state_size=8", "--do_train", "--save_steps", "1", "--seed", "3"]
    summarization.main(command(arguments, t5, tmp_path, *more, "--max_steps", "1", "--learning_rate", "0"))
    model, source = (AutoModelForSeq2SeqLM.from_pretrained(folder).eval() for folder in (tmp_path, t5))
    assert (model.config.model_type, model.config.local_radius) == ("spade", 5)
    assert model.config.tie_word_embeddings is False
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, source(ids, decoder_input_ids=ids).logits)
    summarization.main(command(arguments, t5, tmp_path, *more, "--max_steps", "2", "--resume_from_checkpoint", "true"))
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--config_overrides", "hidden_size=64", "--do_train"], "hidden_size must be 32, as in the source; got 64"),
        (["--config_overrides", "local_radius=-1", "--do_train"], "local_radius must not be negative; got -1"),
        (["--do_eval"], "--init_from t5 adds weights that must be trained (--do_train)"),
    ],
)
def test_what_cannot_start(arguments, t5, tmp_path, more, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        summarization.main(command(arguments, t5, tmp_path / "out", *more))
    assert message in str(raised.value)
    assert "--model_name_or_path" in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"init_from": "t5"}, "--init_from t5 needs --model_name_or_path"),
        ({"init_from": "t5", "model_type": "spade"}, "--init_from t5 needs --model_name_or_path"),
        (
            {"init_from": "t5", "model_name_or_path": "a", "model_type": "led"},
            "--init_from t5 makes a spade or srformer_t5 model; got --model_type led",
        ),
        (
            {"init_from": "t5", "model_name_or_path": "a", "config_name": "b"},
            "cannot be combined with --config_name b",
        ),
        ({"init_from": "gpt2", "model_name_or_path": "a"}, "--init_from must be one of t5, bart; got 'gpt2'"),
        (
            {"init_from": "bart", "model_name_or_path": "a", "model_type": "srformer_t5"},
            "--init_from bart makes a srformer_bart model; got --model_type srformer_t5",
        ),
        ({"config_overrides": "dropout=0", "model_name_or_path": "a"}, "it needs --model_type or --init_from"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    with pytest.raises(ValueError, match=message):
        ModelArguments(**flags)
    ModelArguments(init_from="t5", model_name_or_path="a", model_type="spade", config_overrides="dropout=0")
