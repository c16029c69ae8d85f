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
from benchmarks.starter import HELD_OUT, Contained, digest, divided, documentation, held_out
from hf_hybrid.commands.program import main as hf_hybrid_main
from hf_hybrid.data.corpora import corpus_report, embedded_corpus
from hf_hybrid.data.docstrings import words_of
from hf_hybrid.starters import STARTERS, folder_of_starter, name_of_starter, starter
from hf_hybrid.training import summarization

NAME = "spade-en-tiny"
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


@pytest.fixture(scope="module")
def pages():
    """The documentation to pre-train on, and how much is left out."""
    return documentation()


def test_no_document_that_the_demo_holds_out_is_read(pages):
    contained = Contained(held_out())
    assert HELD_OUT == ("docstrings", "modules")
    assert not any(contained.parts(page.split("\n\n")) for page in pages[0])
    read = "\n".join(map(words_of, pages[0]))
    for row in list(embedded_corpus("docstrings")["test"])[::5]:  # literally, and not as `Contained` looks for it
        for text in row["document"], row["summary"]:
            assert words_of(text) not in read, text


def test_it_has_read_those_pages_and_no_others(pages):
    """So nothing that the demo is tested on: the recorded hashes are those of the texts without it."""
    sources = json.loads((starter(NAME) / "sources.json").read_text(encoding="utf-8"))["documentation"]
    installed = corpus_report(embedded_corpus("text"))["packages"]
    if installed != sources["packages"]:  # other versions document other things
        pytest.skip(f"the starter was trained on {sources['packages']}; these are installed: {installed}")
    assert pages[1] == sources["left_out"]
    for split, texts in divided(pages[0]).items():
        assert digest(texts) == sources[split]["sha256"]


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
