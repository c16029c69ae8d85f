import json
import logging
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, TrainingArguments

import hf_hybrid
from hf_hybrid.training import splits, summarization
from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import SummarizationArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.overrides import parse_config_overrides, parse_peft_config
from hf_hybrid.training.flags.removed import translate_removed_flags
from hf_hybrid.training.flags.run import ScriptTrainingArguments, SummarizationTrainingArguments
from hf_hybrid.training.model.config import load_config

ROOT = Path(hf_hybrid.__file__).parent.parent
GROUPS = (ModelArguments, SummarizationArguments, SummarizationTrainingArguments)

# added to a command line that works -> what the message must say
REFUSED = {
    "zero length": (["--max_source_length", "0"], ["--max_source_length", "positive", "0"]),
    "negative length": (["--max_source_length", "-3"], ["--max_source_length", "positive", "-3"]),
    "zero target": (["--max_target_length", "0"], ["--max_target_length", "positive", "0"]),
    "zero validation target": (["--val_max_target_length", "0"], ["--val_max_target_length", "0"]),
    "no beams": (["--num_beams", "0"], ["--num_beams", "positive", "0"]),
    "negative length of words": (["--no_repeat_ngram_size", "-1"], ["--no_repeat_ngram_size", "negative", "-1"]),
    "no train samples": (["--max_train_samples", "0"], ["--max_train_samples", "0"]),
    "no eval samples": (["--max_eval_samples", "0"], ["--max_eval_samples", "0"]),
    "negative predict samples": (["--max_predict_samples", "-1"], ["--max_predict_samples", "-1"]),
    "no workers": (["--preprocessing_num_workers", "0"], ["--preprocessing_num_workers", "0"]),
    "no batch": (["--per_device_train_batch_size", "0"], ["--per_device_train_batch_size", "0"]),
    "no accumulation": (["--gradient_accumulation_steps", "0"], ["--gradient_accumulation_steps", "0"]),
    "zero steps": (["--max_steps", "0"], ["--max_steps", "0"]),
    "no epochs": (["--num_train_epochs", "0"], ["--num_train_epochs", "0"]),
    "negative rate": (["--learning_rate", "-1"], ["--learning_rate", "-1"]),
    "negative ssm rate": (["--ssm_learning_rate", "-1"], ["--ssm_learning_rate", "-1"]),
    "smoothing": (["--label_smoothing_factor", "1.5"], ["--label_smoothing_factor", "1.5"]),
    "not a number": (["--max_source_length", "long"], ["--max_source_length", "int", "long"]),
    "vocabulary": (["--tokenizer_vocab_size", "10"], ["--tokenizer_vocab_size", "259", "10"]),
    "unknown flag": (["--lerning_rate", "1"], ["--lerning_rate", "Did you mean 'learning_rate'?"]),
    "abbreviated flag": (["--max_source", "5"], ["--max_source", "Did you mean 'max_source_length'?"]),
    "stray value": (["--seed", "1", "2"], ["'2'", "--flag"]),
    "kept activations": (
        ["--activation_checkpointing_kwargs", '{"save": "product"}'],
        ["save in --activation_checkpointing_kwargs", "operations, products; got 'product'. Did you mean 'products'?"],
    ),
    "kept activations of no checkpoints": (
        ["--activation_checkpointing_kwargs", '{"save": "products"}'],
        ["save in --activation_checkpointing_kwargs needs --activation_checkpointing"],
    ),
    "kept activations of another model": (
        ["--activation_checkpointing", "--activation_checkpointing_kwargs", '{"save": "products"}'],
        ["save in --activation_checkpointing_kwargs", "left out with t5"],
    ),
    "kept activations without JSON": (
        ["--activation_checkpointing_kwargs", "products"],
        ["--activation_checkpointing_kwargs must be a JSON object", "got 'products'"],
    ),
    "strategy": (["--eval_strategy", "step"], ["--eval_strategy", "'step'", "Did you mean 'steps'?"]),
    "dtype": (["--dtype", "float31"], ["--dtype", "float32", "float31"]),
    "model type": (["--model_type", "spad"], ["--model_type", "spad", "Did you mean 'spade'?"]),
    "model type of another task": (["--model_type", "gpt2"], ["--model_type gpt2", "AutoModelForSeq2SeqLM", "t5"]),
    "two models": (["--model_name_or_path", "x"], ["--model_type", "--model_name_or_path"]),
    "unknown field": (["--config_overrides", "num_layer=2"], ["num_layer", "Did you mean 'num_layers'?", "d_model"]),
    "field of another type": (["--config_overrides", "num_layers=two"], ["num_layers", "int", "two"]),
    "field of another type in JSON": (["--config_overrides", '{"num_layers": "two"}'], ["num_layers", "two"]),
    "architecture rule": (
        ["--config_overrides", "feed_forward_proj=a-b"],
        ["--config_overrides", "feed_forward_proj"],
    ),
    "rule between fields": (
        ["--model_type", "spade", "--config_overrides", "hidden_size=7"],
        ["--config_overrides hidden_size=7: hidden_size must be a multiple of num_attention_heads"],
    ),
    "rule of a field": (
        ["--model_type", "spade", "--config_overrides", "ssm_state_size=3"],
        ["--config_overrides ssm_state_size=3: ssm_state_size must be even; got 3"],
    ),
    "unknown preset": (
        ["--model_type", "spade", "--config_overrides", "preset=tinny,dropout=0"],
        ["preset must be one of base, small, tiny", "got 'tinny'. Did you mean 'tiny'?"],
    ),
    "preset in JSON": (["--model_type", "spade", "--config_overrides", '{"preset": 1}'], ["preset must be", "'1'"]),
    "preset without presets": (["--config_overrides", "preset=tiny"], ["T5Config has no field 'preset'"]),
    "no such tokenizer": (["--tokenizer_name", "/no/such"], ["--tokenizer_name /no/such", "no such folder"]),
    "forced token of no tokenizer": (
        ["--forced_bos_token", "<en>"],
        ["--forced_bos_token <en>", "--tokenizer_name"],
    ),
    "language of no tokenizer": (["--lang", "en_XX"], ["--lang en_XX", "--tokenizer_name"]),
    "nothing to train a tokenizer on": ([], ["no training split", "--tokenizer_name"]),
    "no train file": (["--do_train"], ["--do_train", "train split", "--train_file"]),
    "no test file": (["--do_predict"], ["--do_predict", "test split", "--test_file"]),
    "embedded": (
        ["--dataset_name", "embedded:docstring"],
        ["embedded:docstring", "Did you mean 'embedded:docstrings'?"],
    ),
    "corpus of another script": (
        ["--dataset_name", "embedded:docpairs"],
        ["embedded:docstrings, embedded:modules", "got 'embedded:docpairs'"],
    ),
    "resume nothing": (["--resume_from_checkpoint", "true", "--do_train"], ["--do_train"]),
}


@pytest.fixture
def base(data, tmp_path):
    return [
        "--model_type", "t5", "--validation_file", str(data["validation"]), "--do_eval", "--use_cpu",
        "--output_dir", str(tmp_path / "out"), "--cache_dir", str(data["cache"]),
    ]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_any_work(base, tmp_path, monkeypatch, case):
    def work(**kwargs):
        raise AssertionError("data were loaded before the arguments were checked")

    monkeypatch.setattr(splits, "load_raw_datasets", work)
    more, expected = REFUSED[case]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        summarization.main([*base, *more])
    for words in expected:
        assert words in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_something_must_be_done_and_a_model_be_named(base):
    with pytest.raises(ValueError, match=r"nothing to do.*--do_train"):
        summarization.main([argument for argument in base if argument != "--do_eval"])
    with pytest.raises(ValueError, match=r"--model_name_or_path.*--model_type"):
        summarization.main(base[2:])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], ["config.json", "model.safetensors"]),
        (["config.json"], ["model.safetensors"]),
        (None, ["no such folder"]),
    ],
)
def test_a_folder_that_is_no_checkpoint(base, tmp_path, content, expected):
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        for name in content:
            (folder / name).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="--model_name_or_path") as raised:
        summarization.main([*base[2:], "--model_name_or_path", str(folder)])
    assert str(folder) in str(raised.value)
    for words in expected:
        assert words in str(raised.value)


def test_a_run_folder_with_checkpoints_is_told_from_a_checkpoint(base, tmp_path):
    checkpoint = tmp_path / "model" / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}", encoding="utf-8")
    save_file({"weight": torch.zeros(1)}, checkpoint / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)
    with pytest.raises(ValueError, match=r"Did you mean .*checkpoint-7"):
        summarization.main([*base[2:], "--model_name_or_path", str(tmp_path / "model")])


def test_a_folder_that_holds_a_model_in_another_names_it(base, tmp_path):
    (tmp_path / "demo" / "trained").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "demo" / "trained" / name).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.safetensors missing\. Did you mean .*trained\?"):
        summarization.main([*base[2:], "--model_name_or_path", str(tmp_path / "demo")])


def test_a_hub_model_that_cannot_be_had(base):
    with pytest.raises(ValueError, match="--model_name_or_path nobody/no-such-model"):
        summarization.main([*base[2:], "--model_name_or_path", "nobody/no-such-model"])


def test_a_tokenizer_folder_without_tokenizer(base, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--tokenizer_name .*empty.*tokenizer\.json"):
        summarization.main([*base, "--tokenizer_name", str(tmp_path / "empty")])


def test_a_data_set_with_nothing_to_train_a_tokenizer_on(base, data, tmp_path):
    (tmp_path / "set").mkdir()
    shutil.copy(data["validation"], tmp_path / "set" / "validation.jsonl")
    position = base.index("--validation_file")
    with pytest.raises(ValueError, match="no training split to train one on: give --tokenizer_name"):
        summarization.main(
            [*base[:position], "--dataset_name", str(tmp_path / "set"), *base[position + 2 :]],
        )


def test_a_preset_is_a_start_for_other_fields(tmp_path):
    argv = ["--model_type", "spade", "--config_overrides", "preset=tiny,hidden_size=128", "--do_eval"]
    model_args, *_ = parse_arguments(GROUPS, [*argv, "--use_cpu", "--output_dir", str(tmp_path)])
    config = load_config(model_args, AutoModelForSeq2SeqLM)
    expected = CONFIG_MAPPING["spade"].from_preset("tiny", hidden_size=128)
    assert config.to_dict() == expected.to_dict()
    assert config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "spade", "ssm_state_size": 3}', "ssm_state_size must be even; got 3"),
        ('{"model_type": "t5", "num_layers": "two"}', "'num_layers' expected int, got str (value: 'two')"),
        ("{", "JSON"),
        ("[1]", "config"),
        ("null", "config.json must be an object of configuration fields"),
        ('{"model_type": "spade", "id2label": [1]}', "each of its type: 'list' object has no attribute 'items'"),
        ('{"model_type": "spade", "layer_types": []}', "layer_types must be left out"),
        ('{"model_type": "spade", "dtype": "flot32"}', "flot32"),
        pytest.param(
            '{"model_type": "spade", "dropout": ' + "[" * 50000 + "]" * 50000 + "}", "nested too deeply", id="nested"
        ),
    ],
)
def test_a_checkpoint_with_a_broken_configuration_gives_one_line(base, tmp_path, capsys, content, message):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as exit_:
        run_command_line(lambda: summarization.main([*base[2:], "--config_name", str(tmp_path / "model")]))
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: --config_name {tmp_path / 'model'}: ")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_vocabulary_smaller_than_the_tokenizer(arguments, tmp_path):
    argv = arguments("t5", tmp_path / "out", "--do_eval", overrides="vocab_size=100")
    with pytest.raises(ValueError, match=r"vocab_size must be at least the tokenizer's .*; got 100"):
        summarization.main(argv)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--warmup_ratio 0.1", "--warmup_steps 0.1"),
        ("--warmup-ratio=0.1", "--warmup_steps 0.1"),
        ("--warmup_ratio 0", ""),
        ("--group_by_length", "--train_sampling_strategy group_by_length"),
        ("--group_by_length True --seed 1", "--train_sampling_strategy group_by_length --seed 1"),
        ("--group_by_length false", ""),
        ("--no_cuda", "--use_cpu"),
        ("--evaluation_strategy steps", "--eval_strategy steps"),
        ("--logging_dir logs", ""),
        ("--save_safetensors false", ""),
        ("--per_gpu_train_batch_size 2", "--per_device_train_batch_size 2"),
        ("--torch_dtype bfloat16", "--dtype bfloat16"),
        ("--half_precision_backend auto", ""),
        ("--jit_mode_eval", ""),
        ("--past_index -1 --do_train", "--do_train"),
    ],
)
def test_removed_flags_are_translated_with_one_warning(old, new, caplog):
    assert translate_removed_flags(old.split()) == new.split()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    successor = new.split(" ")[0]
    done = "it is left out" if successor in ("", "--do_train") else f"it is taken as {successor}"
    assert done in caplog.text
    assert old.lstrip("-").split("=")[0].split()[0].replace("-", "_") in caplog.text


def test_removed_flags_reach_the_training_arguments(base, caplog):
    old = ["--warmup_ratio", "0.25", "--no_cuda", "--evaluation_strategy", "epoch", "--group_by_length"]
    *_, training_args = parse_arguments(GROUPS, [*base, *old, "--overwrite_output_dir"])
    assert training_args.warmup_steps == 0.25
    assert training_args.use_cpu
    assert training_args.eval_strategy == "epoch"
    assert training_args.train_sampling_strategy == "group_by_length"
    assert training_args.overwrite_output_dir
    assert len([record for record in caplog.records if "removed from transformers" in record.message]) == 4


def test_a_removed_flag_with_a_bad_value(base):
    with pytest.raises(ValueError, match=r"--warmup_ratio must lie in \[0, 1\); got 2"):
        parse_arguments(GROUPS, [*base, "--warmup_ratio", "2"])


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_arguments_from_a_file(tmp_path, suffix):
    values = {
        "model_type": "t5",
        "config_overrides": "d_model=8,num_layers=1",
        "do_train": True,
        "pad_to_max_length": False,
        "learning_rate": 5e-5,
        "dataset_name": "embedded:modules",
        "max_train_samples": None,
        "label_names": ["labels", "decoder_input_ids"],
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "output_dir": str(tmp_path / "out"),
    }
    path = tmp_path / f"arguments{suffix}"
    path.write_text(json.dumps(values) if suffix == ".json" else yaml.safe_dump(values), encoding="utf-8")
    model_args, data_args, training_args = parse_arguments(GROUPS, [str(path)])
    assert model_args.config_overrides == "d_model=8,num_layers=1"
    assert training_args.do_train
    assert not data_args.pad_to_max_length
    assert training_args.learning_rate == 5e-5
    assert data_args.max_train_samples is None
    assert training_args.label_names == ["labels", "decoder_input_ids"]
    assert training_args.lr_scheduler_kwargs == {"num_cycles": 2}
    path.write_text('{"model_typ": "t5"}', encoding="utf-8")
    with pytest.raises(ValueError, match="Did you mean 'model_type'"):
        parse_arguments(GROUPS, [str(path)])
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="one object of flags"):
        parse_arguments(GROUPS, [str(path)])
    with pytest.raises(ValueError, match="does not exist"):
        parse_arguments(GROUPS, [str(tmp_path / f"none{suffix}")])


@pytest.mark.parametrize(
    ("model_type", "text", "expected"),
    [
        ("t5", "num_layers=2,dropout_rate=0.5", {"num_layers": 2, "dropout_rate": 0.5}),
        (
            "t5",
            " num_layers = 2 , feed_forward_proj='gated-gelu'",
            {"num_layers": 2, "feed_forward_proj": "gated-gelu"},
        ),
        ("t5", "num_decoder_layers=none", {"num_decoder_layers": None}),
        ("t5", "hidden_size=64", {"d_model": 64}),
        ("t5", "dropout_rate=1e-1", {"dropout_rate": 0.1}),
        (
            "bart",
            "scale_embedding=true,tie_word_embeddings=no",
            {"scale_embedding": True, "tie_word_embeddings": False},
        ),
        ("led", "attention_window=[8,16],d_model=32", {"attention_window": [8, 16], "d_model": 32}),
        ("led", "attention_window=8", {"attention_window": 8}),
        ("spade", "global_layers=[0,1],hidden_size=64", {"global_layers": [0, 1], "hidden_size": 64}),
        ("spade", "global_layers=bottom", {"global_layers": "bottom"}),
        ("spade", "global_layers=[a, 'b,c', \"d\"]", {"global_layers": ["a", "b,c", "d"]}),
        ("t5", "num_layers=064", {"num_layers": 64}),
        ("spade", "ssm_freeze=none,ssm_init=none", {"ssm_freeze": "none", "ssm_init": None}),
        ("spade", '{"global_layers": [0, 1], "dropout": 0.0}', {"global_layers": [0, 1], "dropout": 0.0}),
        ("t5", '{"num_layers": 2}', {"num_layers": 2}),
        ("spade", "global_layers=[a, b,],dropout=0", {"global_layers": ["a", "b"], "dropout": 0}),
        ("bart", 'id2label={"0":"a","1":"b"}', {"id2label": {"0": "a", "1": "b"}}),
        (
            "bart",
            "id2label={'0':'a, b=c', 1:'it\\'s'},d_model=8",
            {"id2label": {"0": "a, b=c", 1: "it's"}, "d_model": 8},
        ),
        ("t5", "feed_forward_proj=it's, d_model=8", {"feed_forward_proj": "it's", "d_model": 8}),
        ("t5", "feed_forward_proj=f(a,b=c),d_model=8", {"feed_forward_proj": "f(a,b=c)", "d_model": 8}),
        ("t5", 'feed_forward_proj="a,b=\'c",d_model=8', {"feed_forward_proj": "a,b='c", "d_model": 8}),
    ],
)
def test_config_overrides(model_type, text, expected):
    values = parse_config_overrides(text, CONFIG_MAPPING[model_type])
    assert values == expected
    assert {name: type(value) for name, value in values.items()} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on,off", ["on", "off"]),
        ("yes,b", [True, "b"]),
        ("017,b", [17, "b"]),
        ("017", [17]),
        ("1e-1,b", [0.1, "b"]),
        ("none,null", [None, None]),
        ("None,b", [None, "b"]),
        ("x,2020-01-01", ["x", "2020-01-01"]),
        ("a: b", ["a: b"]),
        ("'1',b", ["1", "b"]),
        ("'none',b", ["none", "b"]),
        ("[a,017],{'k':[b]},{'k':1}", None),
        ("[a,017],{'k':1}", [["a", 17], {"k": 1}]),
        ("it's,b", ["it's", "b"]),
        ("~,b", ["~", "b"]),
        ("1:30,b", ["1:30", "b"]),
        ("a b , c", ["a b", "c"]),
        ("a,,b", None),
        (",", None),
        ("a]b[c", None),
    ],
)
def test_items_of_lists_are_parsed_like_other_values(text, expected):
    def parse():
        return parse_config_overrides(f"global_layers=[{text}]", CONFIG_MAPPING["spade"])["global_layers"]

    if expected is None:
        with pytest.raises(ValueError, match=r"--config_overrides.*(takes a list such as|is missing in)"):
            parse()
        return
    assert repr(parse()) == repr(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target_modules='.*(q|v),k=.*',r=4", {"target_modules": ".*(q|v),k=.*", "r": 4}),
        ("target_modules=(q|v)_proj,r=4", {"target_modules": "(q|v)_proj", "r": 4}),
        ("layers_pattern=[a,b=c],r=4", {"layers_pattern": ["a", "b=c"], "r": 4}),
        ('rank_pattern={"q,a=b":4},r=4', {"rank_pattern": {"q,a=b": 4}, "r": 4}),
        ("target_modules=[q,v],lora_alpha=8", {"target_modules": ["q", "v"], "lora_alpha": 8}),
    ],
)
def test_peft_config(text, expected):
    assert parse_peft_config(text, "lora") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layers", "name=value"),
        ("num_layers=1,,d_model=2", "name=value"),
        ("=1", "name=value"),
        ("num_layers=1,num_layers=2", "num_layers is given twice"),
        ("d_model=1,hidden_size=2", "hidden_size is given twice"),
        ("num_layers=[1", "']' is missing in 'num_layers=[1'"),
        ("num_layers=064x", "num_layers takes int; got '064x'"),
        ("feed_forward_proj=relu,gated", "takes name=value pairs with commas between them; got 'gated'"),
        ("id2label=[a", "']' is missing in 'id2label=[a'"),
        ("id2label=[a]b", "id2label takes a list such as [1,2] or a JSON object; got '[a]b'"),
        ("id2label={0:a,1:b}", "id2label takes a list such as [1,2] or a JSON object; got '{0:a,1:b}'"),
        ("id2label={1,2}", "id2label takes a list such as [1,2] or a JSON object; got '{1,2}'"),
        ("num_layers=(1,2)", "num_layers takes int; got '(1,2)'"),
        ("id2label=(1,2)", "id2label takes a list such as [1,2] or a JSON object; got '(1,2)'"),
        ("id2label=[a,(1,2)]", "id2label takes a list such as [1,2] or a JSON object; got '(1,2)'"),
        (f"id2label={'[' * 21}{']' * 21}", "brackets must not be nested this deeply"),
        ("feed_forward_proj='relu", '"\'" is missing'),
        ("num_layers=1.5", "num_layers takes int; got '1.5'"),
        ('{"num_layers": 1', "JSON"),
    ],
)
def test_config_overrides_that_are_refused(text, message):
    with pytest.raises(ValueError, match="--config_overrides") as raised:
        parse_config_overrides(text, CONFIG_MAPPING["t5"])
    assert message in str(raised.value)


def test_the_command_prints_one_line_and_exits_with_2(base, monkeypatch, capfd):
    more = ["--model_type", "spade", "--config_overrides", "ssm_state_size=3"]
    monkeypatch.setattr(sys, "argv", ["run_summarization.py", *base, *more])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "run_summarization.py"), run_name="__main__")
    assert left.value.code == 2
    error = capfd.readouterr().err
    assert error == "error: --config_overrides ssm_state_size=3: ssm_state_size must be even; got 3\n"


def test_training_arguments_of_0_1_0_can_be_read(tmp_path, monkeypatch):
    """In an interpreter that has not imported them."""
    kinds, paths = (ScriptTrainingArguments, SummarizationTrainingArguments), []
    for kind in kinds:
        paths.append(str(tmp_path / f"{kind.__name__}.bin"))
        with monkeypatch.context() as earlier:
            earlier.setattr(kind, "__module__", "hf_hybrid.training.arguments")  # as they are called in its files
            torch.save(kind(output_dir=str(tmp_path), do_train=True, use_cpu=True, learning_rate=0.5), paths[-1])
    command = (
        "import sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    arguments = torch.load(path, weights_only=False)\n"
        "    print(type(arguments).__module__, type(arguments).__name__, arguments.learning_rate)"
    )
    result = subprocess.run(
        [sys.executable, "-c", command, *paths], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    assert result.stdout.splitlines() == [f"hf_hybrid.training.flags.run {kind.__name__} 0.5" for kind in kinds]


def test_the_script_is_short():
    assert len((ROOT / "run_summarization.py").read_text(encoding="utf-8").splitlines()) <= 20


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(GROUPS, ["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--config_overrides", "--overwrite_output_dir", "--ssm_learning_rate", "--max_source_length"):
        assert flag in text


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sequences_divided_among_processes_are_refused(name, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{name} must be 1, .* --context_parallel_size 2 in its place; got 2"):
        ScriptTrainingArguments(str(tmp_path), do_train=True, parallelism_config=ParallelismConfig(**{name: 2}))
    # what `accelerate launch` tells its processes
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "4")
    with pytest.raises(ValueError, match=f"{name} must be 1, .*; got 4"):
        ScriptTrainingArguments(str(tmp_path), do_train=True)


@pytest.mark.parametrize(
    ("processes", "fields", "message"),
    [
        ("", {}, "--context_parallel_size must divide the number of processes .*; got 2 and one process"),
        ("3", {}, "got 2 and 3 processes"),
        ("4", {"context_parallel_size": 0}, "--context_parallel_size must be a positive integer; got 0"),
        ("4", {"train_sampling_strategy": "group_by_length"}, "must not be group_by_length with"),
        ("4", {"average_tokens_across_devices": False}, "--average_tokens_across_devices must be true"),
        ("4", {"deepspeed": "zero.json"}, "--deepspeed cannot be used with --context_parallel_size 2"),
        ("4", {"torch_compile": True}, "--torch_compile must be false with --context_parallel_size 2"),
        ("4", {"context_parallel_timeout": 0}, "--context_parallel_timeout must be a positive integer; got 0"),
    ],
)
def test_what_divided_sequences_cannot_have_is_refused(processes, fields, message, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=message):
        ScriptTrainingArguments(str(tmp_path), do_train=True, use_cpu=True, **{"context_parallel_size": 2, **fields})


def test_the_first_fsdp_is_refused_with_divided_sequences(tmp_path, monkeypatch):
    """Asked for by flags, which transformers reads in its part of the initialization, or by ``accelerate launch``."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def read(plugin):
        monkeypatch.setattr(
            TrainingArguments, "__post_init__", lambda arguments: setattr(arguments, "fsdp_plugin_args", plugin)
        )
        with pytest.raises(ValueError, match=r"fsdp_version must be 2 with --context_parallel_size 2, .*; got 1"):
            ScriptTrainingArguments(str(tmp_path), do_train=True, use_cpu=True, context_parallel_size=2)

    read({"fsdp_version": 1})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    read(None)


def test_one_process_in_place_of_several_is_refused(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # what `accelerate launch --cpu --num_processes 2` sets
    ScriptTrainingArguments(str(tmp_path), do_train=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match=r"starts one process .*: use torchrun --nproc_per_node, with --use_cpu"):
        ScriptTrainingArguments(str(tmp_path), do_train=True)


def test_reports_that_cannot_be_written_are_refused(tmp_path):
    for name, message in (
        ("clearml", "--report_to clearml: clearml is not installed; install it, or give --report_to none"),
        ("tensorbord", "--report_to must be none, all or one of .*tensorboard.*; got 'tensorbord'"),
    ):
        with pytest.raises(ValueError, match=message):
            ScriptTrainingArguments(str(tmp_path), do_train=True, report_to=name)
    assert ScriptTrainingArguments(str(tmp_path), do_train=True, report_to="none").report_to == []


def test_what_a_cpu_makes_of_flags_for_gpus(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        plain = ScriptTrainingArguments(str(tmp_path), do_train=True, use_cpu=True)
        assert not plain.dataloader_pin_memory
        assert not caplog.records
        assert ScriptTrainingArguments(str(tmp_path), do_train=True, use_cpu=True, fp16=True).fp16
    assert "--fp16 on a CPU: products are computed in float16" in caplog.text


def test_bars_are_for_terminals(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert ScriptTrainingArguments(str(tmp_path), do_train=True).disable_tqdm
    assert not ScriptTrainingArguments(str(tmp_path), do_train=True, disable_tqdm=False).disable_tqdm
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert not ScriptTrainingArguments(str(tmp_path), do_train=True).disable_tqdm
