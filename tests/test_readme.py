"""What the documentation offers can be typed: Python and commands run, flags are known, links lead somewhere."""

import argparse
import ast
import importlib
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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
from benchmarks.bench_language_models import tensors_of
from hf_hybrid.data import sources
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.peft_targets import PARENTS
from hf_hybrid.training import clm, glue, summarization
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import ClmArguments, GlueArguments, SummarizationArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.overrides import parse_config_overrides
from hf_hybrid.training.flags.run import ScriptTrainingArguments, SummarizationTrainingArguments
from hf_hybrid.training.model.learning_rates import recorded_rate
from hf_hybrid.version import __version__

from .data.conftest import write_package
from .models.sharding import CASES as SHARDED
from .models.test_remote_code import EXPORTED
from .models.tiny import PADDED_SIDES, tiny_inputs, tiny_model
from .tolerances import assert_close

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = {
    "run_summarization.py": (ModelArguments, SummarizationArguments, SummarizationTrainingArguments),
    "run_glue.py": (ModelArguments, GlueArguments, ScriptTrainingArguments),
    "run_clm.py": (ModelArguments, ClmArguments, ScriptTrainingArguments),
}
MAINS = {"run_summarization.py": summarization.main, "run_glue.py": glue.main, "run_clm.py": clm.main}
TASKS = {"summarization": "run_summarization.py", "glue": "run_glue.py", "clm": "run_clm.py"}
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"bibtex", "python", "sh", "json", "yaml", "", "{eval-rst}", "{include}", "{toctree}"}
# what begins a command that no test runs -> why; the scripts, modules and targets in it are looked up, flags included
NOT_RUN = {
    "make": "makes an environment, or is what runs this test",
    "python -m pip": "needs an index of packages",
    "python -m benchmarks": "measures for minutes, in part on data that are not of the project",
    "python -m hf_hybrid.training": "is one of the scripts, which run; tests/training/test_main.py says so",
    "python -m hf_hybrid.run": "runs other programs; tests/clients does so where they are installed",
    "hf-hybrid app": "shows a page until Ctrl-C; tests/clients does so in a browser",
    "lm_eval": "is such a program",
    "curl": "asks that server",
    "hf": "uploads to the Hub",
    "torchrun": "wants several GPUs or machines; tests/training has runs of two processes",
    "accelerate": "as torchrun",
    ".": "enters an environment",
}
# flags that a script is not run with -> why
NOT_RUN_WITH = {
    "--push_to_hub": "uploads to the Hub",
    "--deepspeed": "wants DeepSpeed",
    "--fsdp": "wants several GPUs",
}
ADAPTER_TABLES = (
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)
# sizes that a run of a test is cut down to; a flag that is given twice counts as it is given last
FEWER = "--max_steps 2 --per_device_train_batch_size 2 --max_train_samples 4 --max_eval_samples 2"
SMALLER = {
    "run_summarization.py": f"{FEWER} --max_predict_samples 2 --max_target_length 8",
    "run_glue.py": f"{FEWER} --max_predict_samples 2 --max_seq_length 32",
    "run_clm.py": FEWER,
}


class Command(NamedTuple):
    """One command of a page: the words before its script or module, that, and the words behind it."""

    before: list[str]
    name: str
    arguments: list[str]

    @property
    def is_run(self) -> bool:
        """Whether a test runs it: a script in one process, on data and models that can be had without a network."""
        return self.before == ["python"] and self.name in SCRIPTS and not NOT_RUN_WITH.keys() & set(self.arguments)

    @property
    def is_known(self) -> bool:
        """Whether the lists of what no test runs have it."""
        words = " ".join([*self.before, self.name, *self.arguments])
        return bool(NOT_RUN_WITH.keys() & set(self.arguments)) or any(
            re.match(re.escape(start) + r"(?!\w)", words) for start in NOT_RUN
        )


def pages(root: Path) -> list[Path]:
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [body for name, body in FENCE.findall(text) if name == language]


def broken_links(root: Path) -> list[str]:
    """Links from a page to a file that does not exist."""
    broken = []
    for page in pages(root):
        prose = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path = target.partition("#")[0]
            if "://" not in target and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(root).as_posix()}: {target}")
    return broken


def commands(text: str) -> Iterator[Command]:
    """Each command of the sh blocks of a page, and of its running text where that names a module or a target."""
    lines = [line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
    prose = FENCE.sub("", text)
    lines += [found.replace("\n", " ") for found in re.findall(r"`((?:python -m [a-z]|make [a-z])[^`]*)`", prose)]
    for line in lines:
        words = shlex.split(line, comments=True)
        for step in (list(part) for part in split_at(words, "&&")):
            while step and re.fullmatch(r"[A-Z_]+=.*", step[0]):
                step = step[1:]  # variables of the environment
            if not step:
                continue
            script = next((word for word in step if re.fullmatch(r"run_\w+\.py", word)), None)
            if script:
                yield Command(step[: step.index(script)], script, step[step.index(script) + 1 :])
            elif "-m" in step:
                place = step.index("-m") + 1
                module, arguments = step[place], step[place + 1 :]
                if module == "hf_hybrid.training" and arguments and arguments[0] in TASKS:
                    yield Command([*step[:place], module], TASKS[arguments[0]], arguments[1:])
                else:
                    yield Command(step[:place], module, arguments)
            else:
                yield Command([], step[0], step[1:])


def split_at(words: list[str], separator: str) -> Iterator[list[str]]:
    """The pieces of a line between separators."""
    piece: list[str] = []
    for word in [*words, separator]:
        if word == separator:
            yield piece
            piece = []
        else:
            piece.append(word)


def script_docstrings() -> dict[str, str]:
    """The commands that each script's docstring names, as a page."""
    sources = {name: ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) for name in SCRIPTS}
    return {name: "```sh\n" + "\n".join(source.split("\n\n")[1:]) + "\n```\n" for name, source in sources.items()}


TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages(ROOT)}
COMMANDS = [(page, command) for page, text in (TEXTS | script_docstrings()).items() for command in commands(text)]
PAGES_WITH_RUNS = sorted({page for page, command in COMMANDS if command.is_run and page in TEXTS})


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
        assert command.is_run or command.is_known, f"{page}: {command} is neither run nor known as not run"
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
    if "--do_train" not in arguments or "--model_name_or_path" in arguments or not names_data:
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
        "my-language-model": tiny_model("spade", "AutoModelForCausalLM", vocab_size=size, eos_token_id=None),
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


def write_data(script: str, path: Path) -> None:
    """Write a file such as a command reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [
        f"the {colour} {thing}" for colour in ("red", "grey", "new") for thing in ("river", "road", "house", "tree")
    ]
    if script == "run_summarization.py":
        rows = [{"document": f"{word} " * 9, "summary": word} for word in words]
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif script == "run_clm.py":
        text = " ".join(words * 60)
    else:  # as GLUE is distributed
        rows = [f"{number % 2}\t{number}\t{number}\t{word} is there\t{word}" for number, word in enumerate(words)]
        text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES_WITH_RUNS)
def test_commands_run(page, workplace):
    """In small, in this process, one after the other; the files that they name are written first."""
    for script, arguments in (
        (command.name, command.arguments) for where, command in COMMANDS if where == page and command.is_run
    ):
        for flag, value in pairwise(arguments):
            if flag in ("--train_file", "--validation_file", "--test_file") and not Path(value).exists():
                write_data(script, Path(value))
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


PAGES_WITH_PYTHON = [page for page, text in TEXTS.items() if page != "README.md" and blocks(text, "python")]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_python_on_other_pages_runs(page, workplace):
    for source in blocks(TEXTS[page], "python"):
        code = compile(source, page, "exec")
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
        assert bool(has["`generate` from a cache of constant size"]) == constant
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
