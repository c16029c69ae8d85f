"""``--peft``: adapters in the three scripts, and folders of adapters as models."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_hybrid.training import clm, glue, summarization
from hf_hybrid.training.flags.model import ModelArguments

from ...matrix import some
from ...tolerances import assert_close

BST = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=32,window=8,bst_layers=[1]"
GPT2 = "n_embd=32,n_layer=1,n_head=4"
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def from_checkpoint(command, folder):
    """The command with a checkpoint in place of a new model."""
    start = command.index("--model_type")
    return [*command[:start], "--model_name_or_path", str(folder), *command[start + 6 :]]


def read(*path):
    return json.loads(Path(*path).read_text(encoding="utf-8"))


def adapter_weights(folder):
    return load_file(Path(folder, "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def summarizer(arguments, tmp_path_factory):
    """A SPADE and a tokenizer, as the script leaves them."""
    folder = tmp_path_factory.mktemp("spade")
    summarization.main(arguments("spade", folder, "--do_train", "--max_steps", "1"))
    return folder


@pytest.fixture
def adapt(arguments, summarizer):
    """A function: output folder and flags to a run that trains an adapter of the summarizer."""

    def run(output, *more, base=summarizer, method="lora"):
        command = from_checkpoint(arguments("spade", output), base)
        flags = ["--do_train", "--learning_rate", "1e-2", "--seed", "3", *(["--peft", method] if method else [])]
        return summarization.main([*command, *flags, *more])

    return run


def test_an_adapter_of_a_summarizer(adapt, summarizer, arguments, tmp_path):
    """It is trained, resumed and merged; its folder alone is evaluated, and goes on being trained."""
    before = {path.name: path.read_bytes() for path in summarizer.iterdir() if path.is_file()}
    whole, output = tmp_path / "whole", tmp_path / "out"
    more = ["--do_eval", "--predict_with_generate", "--peft_config", "r=4,lora_alpha=8", "--max_steps", "3"]
    more += ["--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1"]
    more += ["--load_best_model_at_end", "--metric_for_best_model", "loss", "--greater_is_better", "true"]  # the first
    expected = adapt(whole, *more)
    more += ["--gradient_checkpointing", "--merge_adapter", "--resume_from_checkpoint", str(whole / "checkpoint-2")]
    metrics = adapt(output, *more)
    assert {path.name: path.read_bytes() for path in summarizer.iterdir() if path.is_file()} == before
    histories = [read(folder, "trainer_state.json")["log_history"] for folder in (whole, output)]
    losses, resumed = [[row["eval_loss"] for row in rows if "eval_loss" in row] for rows in histories]
    assert losses[0] > losses[1] > losses[2]
    assert losses == pytest.approx(resumed, rel=1e-5)
    assert metrics["eval_loss"] == expected["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    assert not (output / "model.safetensors").exists()
    config = read(output, "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "SEQ_2_SEQ_LM")
    assert config["base_model_name_or_path"] == str(summarizer)
    assert "peft" in (output / "README.md").read_text()

    alone = summarization.main(
        [*from_checkpoint(arguments("spade", tmp_path / "alone"), output), "--do_eval", "--predict_with_generate"]
    )
    kept = ("eval_loss", "eval_rouge1", "eval_gen_len")
    assert {name: alone[name] for name in kept} == {name: metrics[name] for name in kept}

    adapted, merged, base = (
        AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (output, output / "merged_model", summarizer)
    )
    outputs = [model(IDS, decoder_input_ids=IDS).logits for model in (adapted, merged, base)]
    assert_close(outputs[1], outputs[0], "float32 model")
    assert (outputs[2] - outputs[0]).abs().max() > 1e-4
    texts = [model.generate(IDS, max_new_tokens=8, min_new_tokens=8) for model in (adapted, merged)]
    assert torch.equal(*texts)

    further = tmp_path / "further"
    adapt(further, "--max_steps", "1", base=output, method=None)
    old, new = adapter_weights(output), adapter_weights(further)
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert read(further, "adapter_config.json")["base_model_name_or_path"] == str(summarizer)


@pytest.fixture(scope="module")
def t5(arguments, tmp_path_factory):
    """A T5 and a tokenizer, as the script leaves them."""
    folder = tmp_path_factory.mktemp("t5")
    summarization.main(arguments("t5", folder, "--do_train", "--max_steps", "1"))
    return folder


def test_what_a_new_architecture_adds_is_trained_with_its_adapter(adapt, t5, arguments, tmp_path):
    """SPADE of T5: its state space model comes along, with a learning rate of its own, and the base stays."""
    output = tmp_path / "out"
    fields = "local_radius=5,ssm_state_size=8"
    more = ["--init_from", "t5", "--config_overrides", fields, "--save_steps", "1", "--do_eval"]
    more += ["--lr_scheduler_type", "constant", "--ssm_learning_rate", "0"]
    adapt(output, *more, "--max_steps", "1", base=t5)
    base = load_file(output / "base_model" / "model.safetensors")
    metrics = adapt(output, *more, "--max_steps", "2", "--seed", "4", "--resume_from_checkpoint", "auto", base=t5)
    saved = adapter_weights(output)
    layer = "model.encoder.layers.0.mixer"
    trained = {name for name in base if name.startswith(f"{layer}.ssm.") and f"base_model.model.{name}" in saved}
    assert {name.rpartition(".")[2] for name in trained} >= {"B", "C", "D", "log_dt"}
    for name in trained:
        shapes_memory = name.rpartition(".")[2] not in ("C", "D")
        assert torch.equal(saved[f"base_model.model.{name}"], base[name]) == shapes_memory, name
    assert not torch.equal(saved[f"base_model.model.{layer}.global_proj.weight"], base[f"{layer}.global_proj.weight"])
    assert read(output, "adapter_config.json")["base_model_name_or_path"] == str(output / "base_model")

    moved = output.rename(tmp_path / "moved")
    alone = summarization.main([*from_checkpoint(arguments("spade", tmp_path / "alone"), moved), "--do_eval"])
    assert alone["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)  # S4's taps, now without gradients


def test_a_run_that_is_cut_off_while_its_base_is_written_begins_anew(adapt, t5, tmp_path):
    base = tmp_path / "out" / "base_model"
    base.mkdir(parents=True)
    for name in ("_incomplete", "model.safetensors"):
        (base / name).touch()
    more = ["--init_from", "t5", "--config_overrides", "local_radius=5,ssm_state_size=8", "--max_steps", "1"]
    with pytest.raises(ValueError, match=r"already holds a run \(base_model\)"):
        adapt(tmp_path / "out", *more, base=t5)
    adapt(tmp_path / "out", *more, "--resume_from_checkpoint", "auto", base=t5)
    assert load_file(base / "model.safetensors")
    assert not (base / "_incomplete").exists()


def test_neurons_are_trained_with_the_adapter_of_an_srformer(adapt, t5, tmp_path):
    more = ["--init_from", "t5", "--model_type", "srformer_t5", "--config_overrides", "segment_size=6"]
    adapt(tmp_path, *more, "--max_steps", "2", base=t5, method="dora")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (model.config.model_type, model.config.segment_size) == ("srformer_t5", 6)
    base = load_file(tmp_path / "base_model" / "model.safetensors")
    raf = "decoder.block.0.layer.1.EncDecAttention.raf"
    saved = adapter_weights(tmp_path)
    for part in ("linear.weight", "threshold"):
        assert not torch.equal(saved[f"base_model.model.{raf}.{part}"], base[f"{raf}.{part}"]), part
    assert any("lora_magnitude_vector" in name for name in saved)


def test_a_classifier_keeps_its_head_and_labels(summarizer, data, tmp_path):
    rows = [{"sentence": "a river " * (1 + n % 3), "label": ("few", "some", "many")[n % 3]} for n in range(24)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = ["--train_file", str(path), "--validation_file", str(path), "--cache_dir", str(data["cache"])]
    common += ["--max_seq_length", "16", "--do_eval", "--use_cpu", "--disable_tqdm", "true"]
    output = tmp_path / "out"
    steps = ["--do_train", "--peft", "ia3", "--max_steps", "3", "--learning_rate", "1e-2", "--merge_adapter"]
    metrics = glue.main([*common, "--model_name_or_path", str(summarizer), "--output_dir", str(output), *steps])
    saved = adapter_weights(output)
    assert {"dense", "classifier"} <= {name.split(".")[2] for name in saved}
    assert all("ia3_l" in name or name.split(".")[2] in ("dense", "classifier") for name in saved)
    alone = glue.main([*common, "--model_name_or_path", str(output), "--output_dir", str(tmp_path / "alone")])
    assert alone["eval_loss"] == metrics["eval_loss"]
    model = AutoModelForSequenceClassification.from_pretrained(output, num_labels=3)
    assert_close(model.classifier.weight, saved["base_model.model.classifier.weight"], "exact")
    merged = AutoModelForSequenceClassification.from_pretrained(output / "merged_model").eval()
    assert merged.config.id2label == {0: "few", 1: "many", 2: "some"}
    assert_close(merged(IDS).logits, model.eval()(IDS).logits, "float32 model")


@pytest.mark.parametrize(("model_type", "fields"), some([("bst", BST), ("gpt2", GPT2)], ("bst", BST)))
def test_an_adapter_of_a_language_model(model_type, fields, data, tmp_path):
    """Ours and a peer: four small batches are one large one, and the merged model is the adapted one."""
    base, output = tmp_path / "base", tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text("the river and the stone\n" * 60, encoding="utf-8")
    common = ["--train_file", str(text), "--validation_file", str(text), "--block_size", "32", "--use_cpu"]
    common += ["--cache_dir", str(data["cache"]), "--disable_tqdm", "true", "--do_train", "--save_strategy", "no"]
    new = ["--model_type", model_type, "--config_overrides", fields, "--tokenizer_type", "bytes", "--max_steps", "1"]
    clm.main([*common, *new, "--output_dir", str(base)])
    flags = ["--model_name_or_path", str(base), "--peft", "lora", "--peft_config", '{"r": 2, "bias": "none"}']
    losses = []
    for size, accumulated in ((8, 1), (2, 4)):
        folder = output if accumulated == 1 else tmp_path / "accumulated"
        batches = ["--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(accumulated)]
        steps = ["--max_steps", "2", "--learning_rate", "1e-2", "--merge_adapter", "--output_dir", str(folder)]
        losses.append(clm.main([*common, *flags, *batches, *steps])["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # dropout draws other numbers
    merged = AutoModelForCausalLM.from_pretrained(output / "merged_model").eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output).eval()
    assert_close(merged(IDS).logits, adapted(IDS).logits, "float32 model")


# ---- errors ----


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"peft": "lara"}, "--peft must be one of lora, dora, ia3; got 'lara'. Did you mean 'lora'?"),
        ({"peft_config": "r=4"}, "--peft_config r=4 needs --peft"),
        ({"peft": "lora", "peft_config": "rr=4"}, "--peft_config: LoraConfig has no field 'rr'"),
        ({"peft": "lora", "peft_config": "lora_alhpa=4"}, "Did you mean 'lora_alpha'?"),
        ({"peft": "lora", "peft_config": "task_type=SEQ_CLS"}, "--peft_config: LoraConfig has no field 'task_type'"),
        ({"peft": "ia3", "peft_config": "r=4"}, "--peft_config: IA3Config has no field 'r'"),
        ({"peft": "lora", "peft_config": "r=four"}, "--peft_config: r takes int; got 'four'"),
        ({"peft": "dora", "peft_config": "r=4,r=8"}, "--peft_config: r is given twice"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        ModelArguments(model_name_or_path="a", **flags)
    assert message in str(raised.value)


def test_a_new_model_takes_no_adapter():
    with pytest.raises(
        ValueError, match="--peft lora trains an adapter of a checkpoint and needs --model_name_or_path"
    ):
        ModelArguments(model_type="spade", peft="lora")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--peft_config", "r=0"], "--peft lora --peft_config r=0: `r` should be a positive integer"),
        (["--peft_config", "target_modules=[query]"], "Target modules {'query'} not found in the base model"),
        (["--peft_config", "modules_to_save=[lm_haed]"], "no module of SpadeForConditionalGeneration: 'lm_haed'."),
        (["--max_source_length", "48", "--resume_from_checkpoint", "BASE"], "is not a complete checkpoint"),
    ],
)
def test_what_does_not_fit_the_model(adapt, summarizer, no_data, tmp_path, more, message):
    no_data()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        adapt(tmp_path, *(str(summarizer) if flag == "BASE" else flag for flag in more))
    assert message in str(raised.value)


def test_weights_that_are_divided_are_not_merged(adapt, no_data, tmp_path, monkeypatch):
    """One process alone would wait for the others' parts for ever."""
    no_data()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="--merge_adapter needs whole weights, and FSDP and DeepSpeed shard them"):
        adapt(tmp_path, "--merge_adapter")


def test_an_adapter_that_begins_with_what_the_weights_are_made_of(adapt, arguments, tmp_path):
    """PiSSA: the checkpoint's weights are taken apart, which cannot be tried before they are there."""
    output = tmp_path / "out"
    trained = adapt(output, "--do_eval", "--max_steps", "1", "--peft_config", "init_lora_weights=pissa,r=2")
    alone = summarization.main([*from_checkpoint(arguments("spade", tmp_path / "alone"), output), "--do_eval"])
    assert alone["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)


def test_runs_that_do_not_fit_each_other(adapt, summarizer, arguments, tmp_path):
    output = tmp_path / "out"
    adapt(output, "--max_steps", "1", "--save_steps", "1", "--peft_config", "r=2")
    checkpoint = str(output / "checkpoint-1")

    def fails(run, *more, **options):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is returned
            run(*more, **options)
        return str(raised.value)

    resume = ["--max_steps", "2", "--resume_from_checkpoint", checkpoint]
    assert "r of its adapter is 2 and 4 in this run" in fails(adapt, output, *resume, "--peft_config", "r=4")
    plain = fails(adapt, output, *resume, method=None)
    assert "is of a run that trained an adapter; this one trains a whole model" in plain
    assert "which is an adapter: continue its training" in fails(adapt, tmp_path / "next", base=output)
    assert "--merge_adapter needs an adapter" in fails(adapt, tmp_path / "next", "--merge_adapter", method=None)
    command = from_checkpoint(arguments("spade", tmp_path / "next"), summarizer)
    assert "--peft needs --do_train" in fails(summarization.main, [*command, "--do_eval", "--peft", "lora"])

    config = read(output, "adapter_config.json")
    gone = {**config, "base_model_name_or_path": str(tmp_path / "gone")}
    (output / "adapter_config.json").write_text(json.dumps(gone), encoding="utf-8")
    assert f"is an adapter of {tmp_path / 'gone'}, which does not exist" in fails(
        adapt, tmp_path / "next", base=output, method=None
    )


def test_a_whole_run_over_one_of_an_adapter_leaves_nothing_of_it(adapt, t5, arguments, tmp_path):
    more = ["--init_from", "t5", "--save_steps", "1", "--merge_adapter"]
    adapt(tmp_path, *more, "--max_steps", "1", base=t5)
    adapt(tmp_path, *more, "--max_steps", "2", "--seed", "4", "--resume_from_checkpoint", "auto", base=t5)
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base_model", "merged_model"))
    drawn = [name for name in base if name.endswith((".ssm.C", ".ssm.log_dt"))]
    assert len(drawn) == 2  # frozen, so they are those that the run began with, whatever the seed is now
    assert all(torch.equal(base[name], merged[name]) for name in drawn)
    summarization.main(arguments("t5", tmp_path, "--do_train", "--max_steps", "1", "--overwrite_output_dir"))
    assert not [
        path for path in tmp_path.iterdir() if "adapter" in path.name or path.name.startswith(("base", "merg"))
    ]
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)).__name__ == "T5ForConditionalGeneration"
