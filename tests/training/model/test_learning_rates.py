import json
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, TrainingArguments

from benchmarks.comparison import best_rate
from benchmarks.record import read_csv
from hf_hybrid import BstConfig, ChelaConfig, SpadeConfig
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.starters import STARTERS, starter
from hf_hybrid.training import demo
from hf_hybrid.training.flags.command_line import given_flags, parse_arguments
from hf_hybrid.training.flags.data import ClmArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.learning_rates import (
    FINE_TUNING_RATE,
    RATES,
    STARTER_RATES,
    fit_learning_rate,
    recorded_rate,
)

ROOT = Path(__file__).parents[3]
SEARCHED = "an encoder-decoder of two layers"
PRESETS = {
    model_type: getattr(sys.modules[config_class.__module__], "PRESETS", {})
    for model_type, (config_class, _) in ARCHITECTURES.items()
}


@pytest.mark.parametrize(
    ("model_type", "preset"), [(model_type, preset) for model_type in PRESETS for preset in PRESETS[model_type]]
)
def test_every_preset_is_recorded(model_type, preset):
    config = CONFIG_MAPPING[model_type].from_preset(preset)
    rate = recorded_rate(config, preset)
    assert rate.size == f"preset {preset}"
    assert rate.hidden_size == config.hidden_size


def test_what_is_recorded_is_there():
    assert sum(map(len, PRESETS.values())) > 10  # they are found
    assert set(RATES) == set(ARCHITECTURES)
    for model_type, rates in RATES.items():
        assert all(FINE_TUNING_RATE < rate.value < 0.1 and rate.source for rate in rates)
        sizes = {rate.size: rate for rate in rates}
        assert len(sizes) == len(rates)
        others = sizes.keys() - {f"preset {preset}" for preset in PRESETS[model_type]}
        if PRESETS[model_type]:
            assert others - {"the default size"} == ({SEARCHED} if model_type == "spade" else set())
        else:
            assert others == {"the default size"}
        if "the default size" in others:
            assert sizes["the default size"].hidden_size == CONFIG_MAPPING[model_type]().hidden_size
    assert TrainingArguments(use_cpu=True).learning_rate == FINE_TUNING_RATE


def test_a_searched_rate_is_that_of_the_best_run():
    rate = next(rate for rate in RATES["spade"] if rate.size == SEARCHED)
    path = re.search(r"\S+\.csv", rate.source)[0]
    experiment = Path("benchmarks/experiments", Path(path).stem).with_suffix(".json")
    fields = json.loads((ROOT / experiment).read_text(encoding="utf-8"))["models"]["SPADE"]["config_overrides"]
    assert fields["hidden_size"] == rate.hidden_size
    rows = read_csv(ROOT / path)
    assert float(best_rate(rows, "SPADE", "eval_loss")) == rate.value


@pytest.mark.parametrize(
    ("model_type", "fields", "preset", "size"),
    [
        ("spade", {"hidden_size": 352}, None, "preset tiny"),
        ("spade", {"hidden_size": 372}, None, "preset small"),  # nearer to 256 in numbers, to 512 in size
        ("spade", {"hidden_size": 32}, None, SEARCHED),
        ("spade", {"hidden_size": 4096}, "tiny", "preset wikitext103"),  # the preset's other fields do not count
        ("chela", {"hidden_size": 128}, None, "preset text"),  # the first of three
        ("chela", {"hidden_size": 128}, "pathfinder", "preset pathfinder"),
        ("chela", {}, None, "the default size"),
        ("chela", {}, "enwik8", "preset enwik8"),
        ("bst", {"hidden_size": 512}, None, "preset tiny"),
        ("srformer_t5", {"d_model": 64}, None, "the default size"),
    ],
)
def test_the_nearest_width_counts(model_type, fields, preset, size):
    fields |= {"num_attention_heads": 4} if "hidden_size" in fields else {}
    assert recorded_rate(CONFIG_MAPPING[model_type](**fields), preset).size == size


@pytest.mark.parametrize("model_type", ["t5", "gpt2", "bart"])
def test_other_architectures_are_not_recorded(model_type):
    assert recorded_rate(CONFIG_MAPPING[model_type]()) is None


@pytest.fixture
def fitted(tmp_path):
    """A function: a model's configuration and flags to the learning rate that the run gets."""

    def fit(config, *flags):
        argv = [*flags, "--use_cpu", "--output_dir", str(tmp_path)]
        model_args, data_args, training_args = parse_arguments(
            (ModelArguments, ClmArguments, ScriptTrainingArguments), argv
        )
        fit_learning_rate(training_args, model_args, data_args, config, given_flags(argv))
        return training_args.learning_rate

    return fit


NEW = ("--do_train", "--model_type", "spade")
FILE = ("--train_file", "train.txt")
TINY = SpadeConfig.from_preset("tiny")


def said(caplog):
    """The messages since the last question, with their level."""
    messages = [(record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return messages


def recorded(model_type, size):
    return next(rate.value for rate in RATES[model_type] if rate.size == size)


def test_a_run_without_data_trains_at_the_recorded_rate_and_says_so(fitted, caplog):
    caplog.set_level(logging.INFO)
    tiny, small = recorded("spade", "preset tiny"), recorded("spade", "preset small")
    assert fitted(TINY, *NEW) == tiny
    assert said(caplog) == [
        (
            logging.INFO,
            f"--learning_rate is {tiny:g}, recorded for a new spade model of about this size (preset tiny: measured).",
        )
    ]
    assert fitted(TINY, *NEW, "--resume_from_checkpoint", "auto") == tiny
    assert fitted(SpadeConfig.from_preset("small"), *NEW, "--config_overrides", "preset=small") == small
    assert len(said(caplog)) == 2
    retrieval = ChelaConfig.from_preset("retrieval"), "--do_train", "--model_type", "chela"
    assert fitted(*retrieval, "--config_overrides", "preset=retrieval") == recorded("chela", "preset retrieval")
    assert fitted(*retrieval, "--config_overrides", "hidden_size=128") == recorded("chela", "preset text")
    said(caplog)
    assert fitted(TINY, *NEW, "--learning_rate", "1e-3") == 1e-3
    assert fitted(TINY, *NEW, "--learning-rate=1e-3") == 1e-3
    assert fitted(CONFIG_MAPPING["gpt2"](), "--do_train", "--model_type", "gpt2") == FINE_TUNING_RATE
    assert fitted(TINY, "--do_eval", *NEW[1:]) == FINE_TUNING_RATE
    assert said(caplog) == []


@pytest.mark.parametrize(
    "flags",
    [
        (*NEW, *FILE),
        (*NEW, *FILE, "--learning_rate", "5e-5"),
        (*NEW, "--learning_rate", "5e-5"),
        (*NEW, "--dataset_name", "embedded:text", "--config_overrides", "preset=tiny"),
        ("--do_train", "--config_name", "my-spade", *FILE),
    ],
)
def test_a_new_model_that_is_trained_as_if_it_were_old_gets_one_warning(fitted, caplog, flags):
    caplog.set_level(logging.INFO)
    assert fitted(TINY, *flags) == FINE_TUNING_RATE
    assert said(caplog) == [
        (
            logging.WARNING,
            "--learning_rate is 5e-05, transformers' rate for fine-tuning: for a new spade model of about this "
            f"size {recorded('spade', 'preset tiny'):g} is recorded (preset tiny: measured).",
        )
    ]


def test_starters_have_a_rate_of_their_own():
    assert STARTER_RATES.keys() == {*STARTERS}
    assert STARTER_RATES[demo.SHORT.start].value == demo.SHORT.training["learning_rate"]


@pytest.mark.parametrize("adapter", [(), ("--peft", "lora")], ids=["whole", "adapter"])
@pytest.mark.parametrize("by", [str, starter], ids=["name", "folder"])
def test_a_starter_that_is_trained_as_if_it_were_large_gets_one_warning(fitted, caplog, by, adapter):
    caplog.set_level(logging.INFO)
    flags = ("--do_train", "--model_name_or_path", str(by("spade-en-tiny")), *adapter)
    assert fitted(TINY, *flags, *FILE) == FINE_TUNING_RATE
    said_of = "spade-en-tiny 0.001 is recorded (fine-tuning: make demo)."
    assert said(caplog) == [
        (logging.WARNING, f"--learning_rate is 5e-05, transformers' rate for fine-tuning: for {said_of}")
    ]
    assert fitted(TINY, *flags) == STARTER_RATES["spade-en-tiny"].value  # a run without data
    said_of = "spade-en-tiny (fine-tuning: make demo)."
    assert said(caplog) == [(logging.INFO, f"--learning_rate is 0.001, recorded for {said_of}")]
    assert fitted(TINY, *flags, *FILE, "--learning_rate", "1e-4") == 1e-4
    assert fitted(TINY, "--do_eval", *flags[1:], *FILE) == FINE_TUNING_RATE
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (TINY, (*NEW, *FILE, "--learning_rate", "6e-5")),
        (TINY, (*NEW, *FILE, "--learning_rate", "0")),
        (TINY, ("--do_eval", *NEW[1:], "--validation_file", "valid.txt")),
        (TINY, ("--do_train", "--model_name_or_path", "my-spade", *FILE)),
        (TINY, ("--do_train", "--model_name_or_path", "my-spade")),
        (TINY, ("--do_train", "--model_name_or_path", "my-t5", "--init_from", "t5", *FILE)),
        (CONFIG_MAPPING["gpt2"](), ("--do_train", "--model_type", "gpt2", *FILE)),
    ],
)
def test_no_warning_for_another_rate_a_checkpoint_or_another_architecture(fitted, caplog, config, flags):
    caplog.set_level(logging.INFO)
    rate = float(dict(pairwise(flags)).get("--learning_rate", FINE_TUNING_RATE))
    assert fitted(config, *flags) == rate
    assert said(caplog) == []


def test_given_flags(tmp_path):
    argv = ["--do_train", "--learning-rate=1e-3", "--label_names", "a", "b", "--no_keep_linebreaks", "--seed", "-1"]
    assert given_flags(argv) == {"do_train", "learning_rate", "label_names", "no_keep_linebreaks", "seed"}
    path = tmp_path / "flags.yaml"
    path.write_text("learning_rate: 5.0e-5\nlogging_steps: null\n", encoding="utf-8")
    assert given_flags([str(path)]) == {"learning_rate"}


def test_a_bst_learns_at_its_own_rate(fitted, caplog):
    config = BstConfig.from_preset("tiny")
    fitted(config, "--do_train", "--model_type", "bst", *FILE)
    assert re.search(rf"a new bst model .* {recorded('bst', 'preset tiny'):g} is recorded", caplog.text)
