"""Starters: their names everywhere, and what the shipped one is, has read and has learnt."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_hybrid
from benchmarks import ship_starter
from benchmarks.starter import (
    HELD_OUT,
    Contained,
    digest,
    divided,
    documentation,
    hash_of_page,
    hashes_of_pages,
    held_out,
)
from hf_hybrid.commands.program import main as hf_hybrid_main
from hf_hybrid.data.corpora import corpus_report, embedded_corpus
from hf_hybrid.data.docstrings import words_of
from hf_hybrid.starters import STARTERS, folder_of_starter, name_of_starter, starter
from hf_hybrid.training import clm, glue, long_range, summarization

from ..matrix import some

NAME = "spade-en-tiny"
FEW = ("huggingface_hub", "networkx")
"""Packages whose documentation is read in seconds."""
TEXT = (
    "The old bridge over the river was closed for the winter, and every child in the village had to walk through the "
    "forest to school."
)


def test_a_name_is_a_folder():
    assert STARTERS == (NAME,)
    assert hf_hybrid.starter(NAME) == starter(NAME) == Path(hf_hybrid.__file__).resolve().parent / "starters" / NAME
    with pytest.raises(
        ValueError, match=r"must be a starter: .*; got 'spade_en_tiny'\. Did you mean 'spade-en-tiny'\?"
    ):
        starter("spade_en_tiny")


def test_names_and_folders_are_each_others(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert folder_of_starter(NAME) == str(starter(NAME))
    assert name_of_starter(folder_of_starter(NAME)) == NAME
    for other in ("google-t5/t5-small", "runs/mine", "no such thing"):
        assert folder_of_starter(other) == name_of_starter(other) == other
    (tmp_path / NAME).mkdir()  # one's own folder comes first, as before names on the Hub
    for _ in range(2):
        assert folder_of_starter(NAME) == name_of_starter(NAME) == NAME
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{NAME} is what is called so in {tmp_path}, and not the starter of that name."]  # once


# ---- what is shipped ----


def test_a_starter_is_small_and_whole():
    files = {path.name: path.stat().st_size for path in starter(NAME).iterdir()}
    assert sum(files.values()) < 16_000_000
    assert files.keys() >= {"README.md", "config.json", "model.safetensors", "sources.json", "tokenizer.json"}
    config = AutoConfig.from_pretrained(starter(NAME))
    model, report = AutoModelForSeq2SeqLM.from_pretrained(starter(NAME), output_loading_info=True)
    assert not any(report.values())
    assert 7_000_000 < model.num_parameters() < 15_000_000
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(starter(NAME))
    assert len(tokenizer) == config.vocab_size
    for text in (TEXT, "def focal_length(aNumber=3):\n    return [π, '…']"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_a_card_says_what_a_user_must_know():
    card = ModelCard.load(starter(NAME) / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    sources = json.loads((starter(NAME) / "sources.json").read_text(encoding="utf-8"))
    for source in sources.values():
        assert source["licence"] in card.text
        assert f"{source['train']['characters']:,}" in card.text
    for title in ("Load it", "Data and licences", "Results", "Training", "Command", "Limits"):
        assert f"\n## {title}\n" in card.text
    assert f'hf_hybrid.starter("{NAME}")' in card.text
    assert " hours on two CPU cores" in card.text
    assert "/tmp" not in card.text  # where it was made is nobody's business
    assert "/work" not in card.text
    # what `benchmarks.ship_starter` writes of these sources, and of this length
    length = re.search(r"--max_seq_length (\d+)", card.text)[1]
    assert ship_starter.LIMITS.format(length=length, **sources["documentation"]) in card.text
    assert ship_starter.data_and_licences(sources) in card.text


@torch.no_grad()
def test_it_restores_hidden_words():
    """Of a text that it has not read, it knows what is there and guesses what is hidden better than by chance."""
    tokenizer = AutoTokenizer.from_pretrained(starter(NAME))
    model = AutoModelForSeq2SeqLM.from_pretrained(starter(NAME)).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    hidden = slice(8, 11)
    source = torch.cat([ids[:, :8], torch.tensor([[tokenizer.mask_token_id]]), ids[:, 11:]], dim=1)
    losses = torch.nn.functional.cross_entropy(
        model(input_ids=source, labels=ids).logits[0].log_softmax(-1), ids[0], reduction="none"
    )
    seen = torch.ones(ids.shape[1], dtype=torch.bool)
    seen[hidden] = False
    assert losses[seen].mean() < 0.3
    assert losses[~seen].mean() < 0.7 * math.log(model.config.vocab_size)


@pytest.mark.parametrize("packages", some([None, FEW], FEW), ids=["all packages", "few packages"])
def test_the_starter_has_read_those_pages_and_nothing_that_is_held_out(packages, subtests):
    """In one test, so that one process makes the pages, which of all packages takes long."""
    pages, numbers = documentation(packages=packages)
    recorded = json.loads((starter(NAME) / "sources.json").read_text(encoding="utf-8"))["documentation"]
    with subtests.test("no document that the demo holds out is read"):
        _nothing_held_out_is_read(pages, packages)
    with subtests.test("no page with what is held out is recorded"):
        _nothing_held_out_is_recorded(pages, recorded, packages)
    _those_pages_and_no_others(pages, numbers, recorded, packages, subtests)


def _nothing_held_out_is_read(pages, packages):
    contained = Contained(held_out(packages=packages))
    assert HELD_OUT == ("docstrings", "modules")
    assert not any(contained.parts(page.split("\n\n")) for page in pages.values())
    read = "\n".join(map(words_of, pages.values()))
    tested = list(embedded_corpus("docstrings", packages=packages)["test"])
    for row in tested[::5]:  # literally, and not as `Contained` looks for it
        for text in row["document"], row["summary"]:
            assert words_of(text) not in read, text


def _those_pages_and_no_others(pages, numbers, recorded, packages, subtests):
    """So nothing that the demo is tested on: the recorded hashes are those of the texts without it."""
    installed = corpus_report(embedded_corpus("text", packages=packages))["packages"]
    read = {package: set(hashes.split()) for package, hashes in recorded["pages"].items()}
    here = hashes_of_pages(pages, {**dict.fromkeys(read), **installed})
    assert sum(map(len, read.values())) == sum(recorded[split]["documents"] for split in ("train", "validation"))
    compared = []
    for package in packages or recorded["packages"]:
        version = recorded["packages"][package]
        with subtests.test(package):
            if _release(package, version) != _release(package, installed.get(package, "none")):
                pytest.skip(f"the starter has read {package} {version}; {installed.get(package, 'none')} is installed")
            compared.append(package)
            assert _shared(read, here, [package]) >= _SAME_OF_ONE
    assert compared, f"no package is installed in the version that the starter has read: {recorded['packages']}"
    assert _shared(read, here, compared) >= _SAME
    if installed == recorded["packages"]:
        assert here == read
        assert numbers.items() <= recorded.items()  # with the documents that pages repeat all the same
        for split, texts in divided(pages).items():
            assert digest(texts.values()) == recorded[split]["sha256"]


# What other packages document, and Python's patches, change what is a copy of what: without the standard library 0.99
# of the others' pages are the same, and at least 0.90 of those of each.
_SAME, _SAME_OF_ONE = 0.95, 0.7


def _shared(read, here, packages):
    """Return how many of the pages of packages, read or here, are both."""
    both = sum(len(read[package] & here[package]) for package in packages)
    return both / sum(len(read[package] | here[package]) for package in packages)


def _release(package, version):
    """Return a version without what hardly changes its documentation: Python's patch, and torch's build."""
    public = version.partition("+")[0]
    return public.rpartition(".")[0] if package == "Python" else public


def _nothing_held_out_is_recorded(pages, recorded, packages):
    """Neither the pages of modules that are held out, nor a page as it is with the parts that are left out."""
    read = set(" ".join(recorded["pages"].values()).split())
    corpus = embedded_corpus("text", packages=packages)
    others = [text for split in ("validation", "test") for text in corpus[split]["text"]]
    whole = {row["source"]: row["text"] for row in corpus["train"]}
    others += [page for module, page in whole.items() if page != pages.get(module)]
    assert len(others) > (100 if packages is None else 20)
    assert read.isdisjoint(map(hash_of_page, others))


# ---- names ----


@pytest.fixture(scope="module")
def run(data):
    """A function: output folder and flags to a run of a few steps."""

    def summarize(output, *more):
        flags = {split: data[split] for split in ("train", "validation")}
        return summarization.main(
            [
                *(part for split, path in flags.items() for part in (f"--{split}_file", str(path))),
                *("--cache_dir", str(data["cache"]), "--max_source_length", "48", "--max_target_length", "8"),
                *("--max_steps", "1", "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(output), *more),
            ]
        )

    return summarize


def test_scripts_take_the_name(run, tmp_path, monkeypatch):
    command = ["run_summarization.py", "--model_name_or_path", NAME]
    monkeypatch.setattr(sys, "argv", command)
    run(tmp_path, "--model_name_or_path", NAME, "--do_train", "--do_eval")
    trained = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    started = AutoModelForSeq2SeqLM.from_pretrained(starter(NAME))
    for (name, one), other in zip(trained.named_parameters(), started.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-3, name  # one step of fine-tuning
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"trained from `{NAME}`, a starter of hf_hybrid, on" in card
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(starter(NAME)) not in report + card
    assert NAME in report


def test_a_run_does_not_take_the_name(run, tmp_path, monkeypatch, no_data):
    """Or the same command would train from its own output the next time."""
    monkeypatch.chdir(tmp_path)
    no_data()
    with pytest.raises(ValueError, match=f"--output_dir {NAME} must not be a starter's name, which would mean that"):
        run(NAME, "--model_name_or_path", NAME, "--do_train")


def test_a_new_model_takes_its_size_and_tokenizer(run, tmp_path):
    run(tmp_path, "--config_name", NAME, "--tokenizer_name", NAME, "--do_train", "--report", "false")
    fields = ("hidden_size", "vocab_size", "num_hidden_layers")
    configs = [AutoConfig.from_pretrained(folder) for folder in (tmp_path, starter(NAME))]
    assert len({tuple(getattr(config, field) for field in fields) for config in configs}) == 1
    trained = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    started = AutoModelForSeq2SeqLM.from_pretrained(starter(NAME))
    assert not torch.allclose(trained.get_input_embeddings().weight, started.get_input_embeddings().weight, atol=0.1)


def test_an_adapter_names_its_starter(run, tmp_path, capsys, monkeypatch):
    """The package lies elsewhere on another machine. Saving must not ask the Hub for the name."""
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *asked: pytest.fail(str(asked)))
    (tmp_path / "here" / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run(first, "--model_name_or_path", NAME, "--peft", "lora", "--do_train", "--report", "false")
    run(second, "--model_name_or_path", str(first), "--do_train", "--do_eval", "--report", "false")
    for folder in (first, second):
        for place in (folder, folder / "checkpoint-1"):
            config = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
            assert config["base_model_name_or_path"] == NAME
            for path in (path for path in place.iterdir() if path.suffix in (".json", ".md")):
                assert str(starter(NAME)) not in path.read_text(encoding="utf-8"), path
        card = (folder / "README.md").read_text(encoding="utf-8")
        loaded = {}
        exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], loaded)
        weights = load_file(folder / "adapter_model.safetensors")
        found = loaded["model"].state_dict()
        assert weights
        for key, weight in weights.items():
            assert torch.equal(found[key.replace(".weight", ".default.weight")], weight), key
    monkeypatch.chdir(tmp_path / "here")  # a folder of the starter's name is not what the adapter was trained on
    assert hf_hybrid_main(["summarize", str(second), TEXT, "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out


def test_commands_take_the_name(tmp_path, capsys):
    (tmp_path / "page.txt").write_text(TEXT, encoding="utf-8")
    output = tmp_path / "out.jsonl"
    command = ["summarize", NAME, str(tmp_path / "page.txt"), "--max_new_tokens", "24", "--output", str(output)]
    assert hf_hybrid_main(command) == 0
    assert hf_hybrid_main(command) == 0  # it goes on with its own output
    row = json.loads(output.read_text(encoding="utf-8"))
    assert "bridge" in row["summary"]  # it copies what is not hidden
    with pytest.raises(ValueError, match=f"{NAME} is an encoder-decoder .*: use hf-hybrid summarize"):
        hf_hybrid_main(["classify", NAME, str(tmp_path / "page.txt")])


def test_a_name_that_is_nearly_a_starters_is_explained(run, tmp_path):
    for flag in ("--model_name_or_path", "--config_name"):
        with pytest.raises(ValueError, match=rf"{flag} spade_en_tiny: no configuration .* Did you mean '{NAME}'\?$"):
            run(tmp_path / "out", flag, "spade_en_tiny", "--do_train")
    with pytest.raises(ValueError, match=rf"there is no folder spade-tiny here, .* Did you mean '{NAME}'\?$"):
        hf_hybrid_main(["summarize", "spade-tiny", TEXT])
    with pytest.raises(ValueError, match="no configuration") as raised:
        run(tmp_path / "out", "--model_name_or_path", "me/spade-en-tiny", "--do_train")
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            clm,
            ["--model_name_or_path", NAME],
            f"--model_name_or_path {NAME}: is_encoder_decoder must be False for SpadeForCausalLM; .*"
            r"\. It is an encoder-decoder: train it with summarization$",
        ),
        (
            clm,
            ["--config_name", NAME],
            f"--config_name {NAME}: is_encoder_decoder must be False for .* summarization$",
        ),
        (
            glue,
            ["--model_name_or_path", NAME, "--init_from", "t5"],
            f"--init_from t5 --model_name_or_path {NAME}: .*spade",
        ),
        (
            summarization,
            ["--model_name_or_path", NAME, "--model_type", "spade"],
            f"--model_type spade trains from scratch and cannot be combined with --model_name_or_path {NAME}; ",
        ),
        (
            summarization,
            ["--model_name_or_path", NAME, "--tokenizer_type", "bytes"],
            f"--tokenizer_type bytes makes a tokenizer and cannot be combined with an existing one: {NAME}$",
        ),
        (
            long_range,
            ["--model_name_or_path", NAME, "--task_name", "lra_listops"],
            f"--model_name_or_path {NAME} has another vocabulary than lra_listops, ",
        ),
        (
            long_range,
            ["--model_name_or_path", NAME, "--task_name", "lra_pathfinder"],
            f"--model_name_or_path {NAME}: .* must read real values",
        ),
    ],
)
def test_what_cannot_take_it_says_its_name(script, flags, message, data, tmp_path):
    """And not the folder in which the package lies."""
    files = [] if script is long_range else ["--train_file", str(data["train"])]
    with pytest.raises(ValueError, match=message) as raised:
        script.main([*flags, *files, "--do_train", "--use_cpu", "--output_dir", str(tmp_path / "out")])
    assert str(starter(NAME)) not in str(raised.value)
