"""What the documentation offers can be typed: Python and commands run, flags are known, links lead somewhere."""

import argparse
import importlib
import json
import re
import runpy
import shutil
import socket
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft.utils.constants import (
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
)
from transformers import (
    CONFIG_MAPPING,
    BartConfig,
    BartForConditionalGeneration,
    HfArgumentParser,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks import readme_tables
from benchmarks.workloads import tensors_of
from hf_hybrid.data import sources
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.peft_targets import PARENTS
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.overrides import parse_config_overrides
from hf_hybrid.training.model.learning_rates import recorded_rate
from hf_hybrid.version import __version__

from .data.conftest import write_package
from .matrix import some
from .models.sharding import CASES as SHARDED
from .models.test_remote_code import EXPORTED
from .models.tiny import PADDED_SIDES, tiny_inputs, tiny_model
from .pages import (
    COMMANDS,
    FENCE,
    MAINS,
    PAGES_WITH_RUNS,
    README,
    ROOT,
    SCRIPTS,
    SMALLER,
    TEXTS,
    Command,
    blocks,
    broken_links,
    commands,
    write_data,
)
from .test_pages import EXECUTED
from .tolerances import assert_close

LANGUAGES = {"bibtex", "python", "sh", "json", "yaml", "", "{eval-rst}", "{include}", "{toctree}"}
ADAPTER_TABLES = (
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)


def unknown_flags(text: str) -> list[str]:
    """Flags in the commands of a page that their script does not have, those it only translates included."""
    unknown = []
    for _, script, arguments in commands(text):
        if script in SCRIPTS:
            known = {name for action in HfArgumentParser(SCRIPTS[script])._actions for name in action.option_strings}
            flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
            unknown += [f"{script} {flag}" for flag in flags if flag not in known]
    return unknown


class Understood(Exception):
    """Raised where a module has parsed its arguments and would go to work."""


def check_module(name: str, arguments: list[str], monkeypatch) -> None:
    """Assert that a module has a main function that takes the arguments; nothing is measured."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser, argv=None, namespace=None):
        parse(parser, argv, namespace)
        raise Understood

    is_package = hasattr(importlib.import_module(name), "__path__")
    main = importlib.import_module(f"{name}.__main__" if is_package else name).main
    if not arguments:  # some take none
        return
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        with pytest.raises(Understood):
            main(arguments)


def test_links_lead_somewhere():
    assert broken_links(ROOT) == []


def test_commands_are_understood(tmp_path, monkeypatch):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 20
    for page, command in COMMANDS:
        words = [*command.before, command.name, *command.arguments]
        assert command.is_run or command.answers or command.is_known, (
            f"{page}: {command} is neither run nor known as not run"
        )
        if command.is_run:
            parse_arguments(SCRIPTS[command.name], command.arguments)
        elif command.name in SCRIPTS:  # on this machine there may not be what it asks for
            _, unknown = HfArgumentParser(SCRIPTS[command.name]).parse_known_args(command.arguments)
            assert unknown == [], (page, command)
        elif command.name == "make":
            assert {argument for argument in command.arguments if "=" not in argument} <= targets, (page, command)
        elif command.name == "hf_hybrid.run":  # the arguments are another program's
            continue
        elif command.before[-1:] == ["-m"] and command.name.split(".")[0] in ("benchmarks", "hf_hybrid", "tests"):
            check_module(command.name, command.arguments, monkeypatch)
        files = [word for word in words if re.match(r"(benchmarks/experiments|configs)/", word)]
        assert all((ROOT / file).is_file() for file in files), (page, command)
    for page, text in TEXTS.items():
        assert unknown_flags(text) == [], page


def wrong_rate(arguments: list[str]) -> str | None:
    """What is wrong with the learning rate of a command that trains a new model on data that it names, if anything."""
    flags = dict(pairwise(arguments))
    names_data = {"--train_file", "--dataset_name", "--task_name"} & set(arguments)
    if "--do_train" not in arguments or {"--model_name_or_path", "--recipe"} & set(arguments) or not names_data:
        return None
    config_class = CONFIG_MAPPING[flags["--model_type"]]
    fields = parse_config_overrides(flags.get("--config_overrides", "{}"), config_class)
    preset = fields.pop("preset", None)
    config = config_class(**fields) if preset is None else config_class.from_preset(preset, **fields)
    recorded, given = recorded_rate(config, preset), float(flags.get("--learning_rate", "nan"))
    return None if recorded is None or given == recorded.value else f"{given} is not {recorded.value}"


def test_commands_train_new_models_at_the_recorded_rate():
    found = [(page, wrong_rate(command.arguments)) for page, command in COMMANDS if command.name in SCRIPTS]
    assert [(page, wrong) for page, wrong in found if wrong is not None] == []
    base = ["--model_type", "spade", "--config_overrides", "preset=base", "--train_file", "a.txt", "--do_train"]
    assert wrong_rate([*base, "--learning_rate", "4e-4"]) is None
    assert wrong_rate([*base, "--learning_rate", "5e-5"]) == "5e-05 is not 0.0004"
    assert wrong_rate(base) == "nan is not 0.0004"
    assert wrong_rate(["--model_type", "gpt2", *base[4:]]) is None


def test_the_checks_see_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "[a](docs/page.md#top) [`b`](docs/none.md) `[c](none)` [d](https://x.org/y)\n```sh\n[e](gone)\n```\n"
    )
    (tmp_path / "CONTRIBUTING.md").write_text("[f](none.md)")
    (tmp_path / "docs" / "page.md").write_text("[g](../README.md)")
    assert broken_links(tmp_path) == ["README.md: docs/none.md", "CONTRIBUTING.md: none.md"]
    text = "```sh\npython run_summarization.py --do_train \\\n    --learn_rate=1 --no_cuda  # --comment\n```\n"
    assert unknown_flags(text) == ["run_summarization.py --learn_rate", "run_summarization.py --no_cuda"]
    text = "```sh\nA=1 torchrun -n 2 -m hf_hybrid.training clm --b 1 && make x\n```\n`python -m benchmarks.aot\n--c`"
    found = list(commands(text))
    assert [command.name for command in found] == ["run_clm.py", "make", "benchmarks.aot"]
    assert [command.arguments for command in found] == [["--b", "1"], ["x"], ["--c"]]
    assert [(command.is_run, command.is_known) for command in found] == [(False, True)] * 3
    assert not Command([], "makes", []).is_known
    assert not Command([], "hf-hybrid", ["summary"]).is_known
    assert [command.name for command in commands("```sh\ncat a.txt | hf-hybrid embed b\n```\n")] == [
        "cat",
        "hf-hybrid",
    ]
    assert Command(["python"], "run_clm.py", ["--do_train"]).is_run
    assert not Command(["python"], "run_clm.py", ["--push_to_hub"]).is_run
    with pytest.raises(SystemExit):
        check_module("benchmarks.bench_chela", ["--width", "3"], monkeypatch)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory) -> dict[str, Path]:
    """Name of a checkpoint that pages load -> a tiny one of its kind."""
    root, tokenizer = tmp_path_factory.mktemp("checkpoints"), byte_tokenizer()
    size = len(tokenizer)
    t5 = {"vocab_size": size, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    flan = t5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    bart = {"vocab_size": size, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    bart |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    torch.manual_seed(0)
    models = {
        "google-t5/t5-small": T5ForConditionalGeneration(T5Config(**t5)),
        "google/flan-t5-base": T5ForConditionalGeneration(T5Config(**flan)),
        "facebook/bart-base": BartForConditionalGeneration(BartConfig(**bart)),
        "my-language-model": tiny_model(
            "spade", "AutoModelForCausalLM", vocab_size=size, eos_token_id=None, num_hidden_layers=1
        ),
        "my-spade": tiny_model("spade", "AutoModelForSeq2SeqLM", vocab_size=size),
        "my-summarizer": tiny_model("spade", "AutoModelForSeq2SeqLM", vocab_size=size),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture
def workplace(stand_ins, tmp_path, monkeypatch) -> Path:
    """The working directory of a reader: what a name on the Hub would fetch lies in a folder of that name.

    transformers takes such a folder before it asks the Hub. The offline corpora are built from a small package.
    """
    for name, folder in stand_ins.items():
        shutil.copytree(folder, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "DEFAULT_PACKAGES", {str(write_package(tmp_path / "orchard")): "orchard"})
    return tmp_path


@pytest.mark.parametrize(
    "page",
    some(
        [page for page in PAGES_WITH_RUNS if page not in EXECUTED],
        "README.md",  # its first command is also the one of docs/training/summarization.md
        "docs/training/pretraining.md",
    ),
)
def test_commands_run(page, workplace):
    """In small, in this process, one after the other; the files that they name are written first."""
    for script, arguments in (
        (command.name, command.arguments) for where, command in COMMANDS if where == page and command.is_run
    ):
        for flag, value in pairwise(arguments):
            if flag in ("--train_file", "--validation_file", "--test_file") and not Path(value).exists():
                write_data(script, Path(value))
            if flag == "--data_dir":
                for split in ("train", "validation", "test"):
                    write_data(script, Path(value, f"{split}.jsonl"))
        extra = [*SMALLER[script].split(), "--use_cpu", "--disable_tqdm", "true", "--cache_dir", "cache"]
        if "--model_name_or_path" not in arguments and "--tokenizer_name" not in arguments:
            extra += ["--tokenizer_vocab_size", "300"]
        results = MAINS[script]([*arguments, *extra])
        output = Path(arguments[arguments.index("--output_dir") + 1])
        written = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
        for flag, key in {"--do_train": "train_loss", "--do_eval": "eval_loss"}.items():
            assert (key in written) == (flag in arguments)
            assert flag not in arguments or results[key] > 0
        assert ("eval_rouge1" in written) == ({"--predict_with_generate", "--do_eval"} <= set(arguments))
        assert any(output.glob("*model.safetensors")) == ("--do_train" in arguments)


def test_every_block_is_of_a_known_kind():
    for page, text in TEXTS.items():
        assert {language for language, _ in FENCE.findall(text)} <= LANGUAGES, page
        assert text.count("```") == 2 * len(FENCE.findall(text)), (
            f"{page} has a fence that no block begins or ends with"
        )


def test_the_readmes_python_does_what_it_says(workplace):
    first, second = blocks(README, "python")
    names = {}
    torch.manual_seed(0)
    exec(compile(first, "README.md", "exec"), names)
    document, summary = names["document"], names["summary"]
    assert document.shape == (1, 16_000)
    assert summary.shape[0] == 1
    assert 2 <= summary.shape[1] <= 21  # the start token, and up to 20 new ones
    with torch.no_grad():
        logits = names["model"](input_ids=document, decoder_input_ids=summary[:, :-1]).logits
    assert_close(logits.argmax(-1), summary[:, 1:], "exact")
    exec(compile(second, "README.md", "exec"), names)
    assert names["srformer"] is names["t5"]
    assert names["srformer"].config.model_type == "srformer_t5"
    assert names["spade"].config.combine_mode == "residual"  # of from_t5


def test_the_readme_cites_this_version():
    (citation,) = blocks(README, "bibtex")
    assert f"version = {{{__version__}}}" in citation
    assert set(re.findall(r"url +=? *{(.*)}", citation)) == {
        f"https://arxiv.org/abs/{number}" for number in ("2212.08136", "2406.08128", "2306.09539", "2305.16340")
    }


PAGES_WITH_PYTHON = [
    page for page, text in TEXTS.items() if page not in ("README.md", *EXECUTED) and blocks(text, "python")
]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_python_on_other_pages_runs(page, workplace, monkeypatch):
    with socket.socket() as free:  # as torchrun starts the only process of a group
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for source in blocks(TEXTS[page], "python"):
        code = compile(source, page, "exec")
        for name, value in group.items() if "init_process_group" in source else ():
            monkeypatch.setenv(name, value)
        if "onnxruntime" not in source:  # tests/clients runs that, where it is installed
            exec(code, {})


def test_the_readmes_tables_are_those_of_the_code_and_of_the_committed_measurements(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert re.findall(r"<!-- (\w+) -->\n[|S]", README) == ["jobs", "architectures", "measured", "demo"]
    assert readme_tables.renewed(README) == README
    assert readme_tables.renewed(README.replace("| masked tokens", "| unmasked tokens")) == README
    training = TEXTS["docs/training/new_models.md"]
    assert re.findall(r"<!-- (\w+) -->\n\|", training) == ["learning_rates"]
    assert readme_tables.renewed(training) == training
    assert [page.as_posix() for page in readme_tables.PAGES] == ["README.md", "docs/training/new_models.md"]


def test_the_readmes_table_of_architectures_is_true():
    families = readme_tables.FAMILIES
    assert sorted(name for names in families.values() for name in names) == sorted(ARCHITECTURES)
    assert set(readme_tables.TASKS) == {auto_class for _, models in ARCHITECTURES.values() for auto_class in models}
    features = {name: dict(zip(families, cells, strict=True)) for name, cells in readme_tables.FEATURES.items()}
    for family, model_types in families.items():
        classes = [model for name in model_types for model in ARCHITECTURES[name][1].values()]
        has = {feature: cells[family] for feature, cells in features.items()}
        assert (has["gradient checkpointing"] == "yes") == all(
            model.supports_gradient_checkpointing for model in classes
        )
        one_sided = [name for name in model_types if name in PADDED_SIDES]
        assert has["padding"] == ("both; BART's: right" if one_sided == ["srformer_bart"] else "both sides")
        assert bool(has["reads in both directions"]) == any(sees_the_future(name) for name in model_types)
        sizes = [cache_sizes(name) for name in model_types if "AutoModelForCausalLM" in ARCHITECTURES[name][1]]
        constant = bool(sizes) and all(before == after for before, after in sizes)
        assert bool(has["`generate` from a cache of bounded size"]) == constant
        starts = hasattr(classes[0], "from_t5") or "srformer" in model_types[0]
        assert bool(has["starts from a checkpoint of"]) == starts
        sharded = {name for name, *_ in SHARDED["generative"]}
        assert ("FSDP" in has["several GPUs"]) == ({*model_types} <= sharded)
        adapted = all({*model_types} <= table.keys() for table in ADAPTER_TABLES)
        inherited = all(table[name] == table[PARENTS[name]] for table in ADAPTER_TABLES for name in model_types
                        if name in PARENTS)  # fmt: skip
        word = "as in T5, BART" if {*model_types} <= PARENTS.keys() and inherited else "yes" if adapted else ""
        assert has["LoRA, DoRA, IA3 without naming modules"] == word
        exported = {*model_types} <= EXPORTED.keys()
        assert (has["loads without this package (`export_remote_code`)"] == "yes") == exported


def sees_the_future(model_type: str) -> bool:
    """Whether what the base model, or its encoder, makes of the first token depends on the last."""
    model = tiny_model(model_type, "AutoModel")
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    ids = tiny_inputs(model, batch=1, length=5)["input_ids"]
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 60
    with torch.no_grad():
        first, second = (model(input_ids=tokens).last_hidden_state[0, 0] for tokens in (ids, other))
    return (first - second).abs().max().item() > 1e-3  # transforms round a little of the future into the past


def cache_sizes(model_type: str) -> list[int]:
    """Numbers that a language model's cache holds after 40 and after 80 tokens."""
    model = tiny_model(model_type, "AutoModelForCausalLM")
    sizes = []
    for length in (40, 80):
        with torch.no_grad():
            cache = model(tiny_inputs(model, batch=1, length=length)["input_ids"], use_cache=True).past_key_values
        sizes.append(sum(tensor.numel() for tensor in tensors_of(cache)))
    return sizes


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_architectures.py"))
    assert drawn["PICTURE"].read_text(encoding="utf-8") == drawn["picture"]()
