"""`summarize`, `generate`, `classify` and `embed`: what they answer, in which files, and how they go on."""

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from peft import get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from hf_hybrid import SpadeConfig, peft_config
from hf_hybrid.commands import answer
from hf_hybrid.commands.answers import Embed, Generate, batches
from hf_hybrid.commands.program import main
from hf_hybrid.commands.results import progress_file
from hf_hybrid.training.errors import run_command_line

from ..matrix import some
from .conftest import PEERS

TEXTS = ["A first document.", "b", "The third one is by far the longest of the four.", "Four"]
NEW = ["--max_new_tokens", "5"]


def call(*arguments):
    """Run a command without a document that cannot be read."""
    assert main([str(argument) for argument in arguments]) == 0


def rows(*arguments, capsys):
    """Return the rows that a command prints."""
    call(*arguments, "--output_format", "jsonl")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def written(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def folder(tmp_path):
    """A folder of documents, some of which cannot be read."""
    documents = tmp_path / "documents"
    documents.mkdir()
    for index, text in enumerate(TEXTS):
        (documents / f"{index}.txt").write_text(text)
    (documents / "2b.txt").write_bytes(b"\0")
    return documents


# ---- what is answered ----


@pytest.mark.parametrize("model_type", ["spade", "srformer_bart", "srformer_t5", "t5"])
def test_summaries_are_those_of_generate(model_type, folders, capsys):
    checkpoint = folders(model_type, "AutoModelForSeq2SeqLM")
    got = rows("summarize", checkpoint, *TEXTS, *NEW, "--num_beams", "2", capsys=capsys)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for number, (row, text) in enumerate(zip(got, TEXTS, strict=True), start=1):
        inputs = tokenizer(text, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=5, num_beams=2)
        summary = tokenizer.decode(ids[0], skip_special_tokens=True).strip()
        assert row == {"document": f"text {number}", "summary": summary, "tokens": length, "tokens_read": length}


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade", "gpt2"])
def test_continuations_are_those_of_generate(model_type, folders, capsys):
    checkpoint = folders(model_type, "AutoModelForCausalLM")
    got = rows("generate", checkpoint, *TEXTS, *NEW, capsys=capsys)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for row, text in zip(got, TEXTS, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert row["text"] == tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade", "bert"])
def test_labels_are_those_of_the_model(model_type, folders, capsys):
    checkpoint = folders(model_type, "AutoModelForSequenceClassification", num_labels=3)
    got = rows("classify", checkpoint, *TEXTS, "--top_k", "2", capsys=capsys)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for row, text in zip(got, TEXTS, strict=True):
        with torch.no_grad():
            scores = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        best = scores.argsort(descending=True)[:2].tolist()
        assert [pair["label"] for pair in row["labels"]] == [f"LABEL_{index}" for index in best]
        assert [pair["score"] for pair in row["labels"]] == pytest.approx(scores[best].tolist(), abs=1e-5)
        assert (row["label"], row["score"]) == tuple(row["labels"][0].values())


def test_several_labels_of_a_document_have_their_own_probabilities(folders, capsys):
    problem = {"num_labels": 3, "problem_type": "multi_label_classification"}
    checkpoint = folders("chela", "AutoModelForSequenceClassification", **problem)
    (row,) = rows("classify", checkpoint, TEXTS[0], "--top_k", "9", capsys=capsys)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(checkpoint)(TEXTS[0], return_tensors="pt")).logits[0]
    wanted = sorted(logits.sigmoid().tolist(), reverse=True)
    assert [pair["score"] for pair in row["labels"]] == pytest.approx(wanted, abs=1e-5)


def test_a_model_of_numbers_gives_the_number(folders, capsys):
    checkpoint = folders("chela", "AutoModelForSequenceClassification", num_labels=1)
    (row,) = rows("classify", checkpoint, TEXTS[0], capsys=capsys)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(checkpoint)(TEXTS[0], return_tensors="pt")).logits
    assert row["score"] == pytest.approx(logits.item(), abs=1e-5)


def test_a_model_of_several_numbers_gives_them_all(folders, capsys):
    checkpoint = folders("chela", "AutoModelForSequenceClassification", num_labels=3, problem_type="regression")
    (row,) = rows("classify", checkpoint, TEXTS[0], capsys=capsys)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(checkpoint)(TEXTS[0], return_tensors="pt")).logits[0]
    assert [pair["label"] for pair in row["labels"]] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert [pair["score"] for pair in row["labels"]] == pytest.approx(logits.tolist(), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        *(
            ("chela", "AutoModelForCausalLM"),
            ("spade", "AutoModelForSeq2SeqLM"),
            ("spade", "AutoModelForTextEncoding"),
        ),
        *(("srformer_t5", "AutoModelForSeq2SeqLM"), ("bert", "AutoModelForMaskedLM")),
    ],
)
def test_vectors_are_pooled_hidden_states(model_type, auto_class, pooling, folders, capsys):
    checkpoint = folders(model_type, auto_class)
    flags = ["--pooling", pooling, "--normalize_embeddings"]
    got = rows("embed", checkpoint, *TEXTS, *flags, capsys=capsys)
    model, tokenizer = AutoModel.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    for row, text in zip(got, TEXTS, strict=True):
        with torch.no_grad():
            states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
        assert row["embedding"] == pytest.approx((vector / vector.norm()).tolist(), abs=1e-5)


def test_an_adapter_is_used_with_its_base(folders, tmp_path, capsys):
    base = folders("chela", "AutoModelForCausalLM")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, peft_config(model, "lora", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    (row,) = rows("generate", tmp_path / "adapter", TEXTS[0], *NEW, capsys=capsys)
    tokenizer = AutoTokenizer.from_pretrained(base)
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    ids = adapted.eval().generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert row["text"] == tokenizer.decode(ids, skip_special_tokens=True).strip()
    with pytest.raises(ValueError, match="is an adapter: merge it"):
        main(["embed", str(tmp_path / "adapter"), "text"])
    with pytest.raises(ValueError, match=r"is an adapter of a language model \(CAUSAL_LM\): use hf-hybrid generate"):
        main(["classify", str(tmp_path / "adapter"), "text"])


def test_drawing_is_repeatable_by_its_seed(folders, capsys):
    def drawn(seed):
        flags = ["--do_sample", "--top_k", "0", "--seed", seed]
        return rows("generate", folders("chela", "AutoModelForCausalLM"), *TEXTS, *NEW, *flags, capsys=capsys)

    assert drawn("1") == drawn("1") != drawn("2")


# ---- how much is read ----


def test_everything_is_read_unless_the_model_lacks_positions(folders, capsys):
    long = "x" * 3000
    (row,) = rows("summarize", folders("spade", "AutoModelForSeq2SeqLM"), long, *NEW, capsys=capsys)
    assert row["tokens"] == 3001
    checkpoint = folders("srformer_bart", "AutoModelForSeq2SeqLM")
    positions = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).config.max_position_embeddings
    call("summarize", checkpoint, long, *NEW, "--output_format", "jsonl")
    captured = capsys.readouterr()
    assert f"text 1: {positions:,} of its 3,001 tokens are read" in captured.err
    row = json.loads(captured.out)
    assert (row["tokens"], row["tokens_read"]) == (3001, positions)
    call("summarize", folders("spade", "AutoModelForSeq2SeqLM"), long, *NEW, "--max_source_length", "10")
    assert "10 of its 3,001 tokens are read" in capsys.readouterr().err


def test_of_many_documents_that_are_cut_a_few_are_named(folders, capsys):
    call("embed", folders("chela", "AutoModel"), *["a long text"] * 7, "--max_source_length", "4")
    said = [line for line in capsys.readouterr().err.splitlines() if "cut" in line or "are read" in line]
    named = [f"text {number}: 4 of its 12 tokens are read" for number in range(1, 6)]
    assert said[:-1] == [*named, "further documents that are cut are counted"]
    assert re.search(r"^7 documents in .* per second\); 7 cut$", said[-1])


def test_numbers_have_the_digits_that_they_need(folders, capsys):
    printed = [rows("embed", folders("chela", "AutoModel"), "a text", capsys=capsys)[0]["embedding"]]
    printed.append(
        [rows("classify", folders("chela", "AutoModelForSequenceClassification"), "a", capsys=capsys)[0]["score"]]
    )
    for values in printed:
        assert values == [float(f"{value:.9g}") for value in values]


def test_a_continuation_sees_the_end_of_a_text_that_is_too_long(folders, capsys):
    checkpoint = folders("gpt2", "AutoModelForCausalLM")
    positions = AutoModelForCausalLM.from_pretrained(checkpoint).config.max_position_embeddings
    end = "y" * (positions - 5)
    cut, whole = rows("generate", checkpoint, "x" * 100 + end, end, *NEW, "--batch_size", "1", capsys=capsys)
    assert cut["text"] == whole["text"]


def test_a_continuation_has_room_also_if_nobody_says_how_long(folders, capsys):
    checkpoint = folders("gpt2", "AutoModelForCausalLM")
    positions = AutoModelForCausalLM.from_pretrained(checkpoint).config.max_position_embeddings
    long, short = rows("generate", checkpoint, "x" * 2 * positions, "x", "--min_new_tokens", "9", capsys=capsys)
    assert (long["tokens_read"], short["tokens_read"]) == (positions // 2, 1)


def test_positions_that_begin_behind_padding_are_not_counted(folders, capsys):
    checkpoint = folders("roberta", "AutoModelForSequenceClassification")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.model_max_length > 1e9
    (row,) = rows("classify", checkpoint, "x" * 200, capsys=capsys)
    assert row["tokens_read"] == PEERS["roberta"]["max_position_embeddings"] - tokenizer.pad_token_id - 1


def test_flags_of_generation_are_checked_with_those_of_the_checkpoint(folders, tmp_path, capsys):
    folder = tmp_path / "t5"
    shutil.copytree(folders("t5", "AutoModelForSeq2SeqLM"), folder)
    arguments = ["summarize", str(folder), TEXTS[0], "--length_penalty", "2.0", *NEW]
    with pytest.raises(ValueError, match=r"the flags of generation: .*only used in beam-based generation"):
        main(arguments)
    assert "generation flags" not in capsys.readouterr().err  # transformers' own words
    config = GenerationConfig.from_pretrained(folder)
    config.num_beams = 2
    config.save_pretrained(folder)
    assert main(arguments) == 0
    contents = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(contents | {"temperature": 0.5}))
    assert main(arguments) == 0  # what the checkpoint says without effect is its own


def test_flags_that_generation_refuses_are_one_line(folders):
    flags = ["--cache_implementation", "quantized"]  # needs a package
    with pytest.raises(ValueError, match=r"^the model cannot generate with --cache_implementation quantized: .*need"):
        main(["generate", folders("gpt2", "AutoModelForCausalLM"), TEXTS[0], *flags])


def test_the_prefix_is_what_the_checkpoint_was_trained_with(folders, tmp_path, capsys):
    checkpoint = folders("t5", "AutoModelForSeq2SeqLM")
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.config.task_specific_params = {"summarization": {"prefix": "summarize: "}}
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    (row,) = rows("summarize", tmp_path / "model", TEXTS[0], *NEW, capsys=capsys)
    (other,) = rows("summarize", checkpoint, f"summarize: {TEXTS[0]}", *NEW, capsys=capsys)
    assert row == other
    (row,) = rows("summarize", tmp_path / "model", TEXTS[0], *NEW, "--source_prefix", "", capsys=capsys)
    assert row == rows("summarize", checkpoint, TEXTS[0], *NEW, capsys=capsys)[0]


def test_batches_have_similar_lengths_and_few_tokens():
    lengths = [5, 1, 9, 4, 9, 2]
    assert list(batches(lengths, 2, 100)) == [[2, 4], [0, 3], [5, 1]]
    assert list(batches(lengths, 9, 12)) == [[2], [4], [0, 3], [5, 1]]
    assert list(batches([50], 9, 12)) == [[0]]
    assert list(batches([], 9, 12)) == []


def test_a_batch_that_needs_too_much_memory_is_divided(folders, capsys, monkeypatch):
    answered = Generate.answer

    def tight(self, prompts):
        if len(prompts) > 1 or len(prompts[0].ids) > 30:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1")
        return answered(self, prompts)

    monkeypatch.setattr(Generate, "answer", tight)
    checkpoint = folders("chela", "AutoModelForCausalLM")
    assert main(["generate", checkpoint, *TEXTS, *NEW]) == 1
    captured = capsys.readouterr()
    assert re.findall("==> (.*) <==", captured.out) == ["text 1", "text 2", "text 4"]
    assert "text 3 is skipped: there is not enough memory for its 48 tokens" in captured.err
    monkeypatch.setattr(Generate, "answer", lambda self, prompts: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):  # any other error is one
        main(["generate", checkpoint, *TEXTS, *NEW])


# ---- the output ----


def test_text_is_for_reading(folders, folder, capsys):
    checkpoint = folders("chela", "AutoModelForSequenceClassification", num_labels=3)
    call("classify", checkpoint, folder / "0.txt")
    assert re.fullmatch(r"LABEL_\d\t0\.\d{4}\n", capsys.readouterr().out)
    assert main(["classify", checkpoint, str(folder)]) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(rf"({re.escape(str(folder))}/\d\.txt\tLABEL_\d\t0\.\d{{4}}\n){{4}}", captured.out)
    assert "2b.txt is skipped: it is no text but binary data" in captured.err
    assert re.search(r"^4 documents in .* s \(.* per second\); 1 skipped$", captured.err, re.MULTILINE)
    checkpoint = folders("chela", "AutoModelForCausalLM")
    call("generate", checkpoint, *TEXTS[:2], *NEW)
    assert re.fullmatch(r"==> text 1 <==\n[^\n]*\n\n==> text 2 <==\n[^\n]*\n", capsys.readouterr().out)
    call("generate", checkpoint, TEXTS[0], *NEW)
    assert "==>" not in capsys.readouterr().out


def test_csv_has_a_header_and_vectors_as_json(folders, tmp_path):
    out = tmp_path / "out.csv"
    call("embed", folders("spade", "AutoModelForTextEncoding"), "one, two", "three", "-o", out)
    first, second = csv.DictReader(io.StringIO(out.read_text(encoding="utf-8")))
    assert list(first) == ["document", "embedding", "tokens", "tokens_read"]
    assert len(json.loads(first["embedding"])) == len(json.loads(second["embedding"])) > 1


@pytest.mark.parametrize(
    ("extension", "torn"),
    some(
        [(extension, torn) for extension in ("jsonl", "csv", "txt") for torn in (b"", b'["torn')],
        *(("jsonl", b'["torn'), ("csv", b""), ("txt", b'["torn')),
    ),
)
def test_a_command_goes_on_where_it_was_cut_off(extension, torn, folders, folder, tmp_path, capsys, monkeypatch):
    checkpoint = folders("chela", "AutoModelForCausalLM")
    monkeypatch.setattr(answer, "_BATCHES", 1)
    answered = []
    respond = Generate.answer

    def counted(self, prompts):
        answered.extend(prompts)
        return respond(self, prompts)

    monkeypatch.setattr(Generate, "answer", counted)
    out = tmp_path / f"out.{extension}"
    command = ["generate", checkpoint, str(folder), *NEW, "--batch_size", "2", "-o", str(out)]
    assert main(command) == 1
    whole, lines = out.read_bytes(), progress_file(out).read_bytes().splitlines(keepends=True)
    assert len(lines) == 11  # two batches, whose documents are answered, about to be written, written
    for kept in range(1, 12):
        records = [json.loads(line) for line in lines[1:kept]]
        length = max([0, *(record[1] for record in records if isinstance(record, list))])
        begun = max([length, *(record for record in records if isinstance(record, int))])
        known = {one["document"] if isinstance(one, dict) else one[0] for one in records if not isinstance(one, int)}
        for cut in {length, (length + begun) // 2, begun}:  # the output may be ahead of what is written down
            out.write_bytes(whole[:cut])
            progress_file(out).write_bytes(b"".join(lines[:kept]) + torn)
            answered.clear()
            assert main(command) == 1
            assert out.read_bytes() == whole
            assert len(answered) == 4 - len(known)  # nothing twice
        out.write_bytes(whole[:begun] + b"somebody's")
        progress_file(out).write_bytes(b"".join(lines[:kept]))
        with pytest.raises(ValueError, match=r"was changed after it was written|is not the output of such"):
            main(command)


def test_documents_that_are_new_or_changed_are_added(folders, folder, tmp_path):
    checkpoint, out = folders("chela", "AutoModelForCausalLM"), tmp_path / "out.jsonl"
    (folder / "2b.txt").unlink()
    call("generate", checkpoint, folder, *NEW, "-o", out)
    first = written(out)
    (folder / "new.txt").write_text("new")
    (folder / "1.txt").write_text("changed")
    call("generate", checkpoint, folder, *NEW, "-o", out)
    assert written(out)[:4] == first
    assert [Path(row["document"]).name for row in written(out)[4:]] == ["1.txt", "new.txt"]


def test_an_output_of_other_settings_is_kept(folders, tmp_path):
    checkpoint, out = folders("chela", "AutoModelForCausalLM"), tmp_path / "out.jsonl"
    call("generate", checkpoint, *TEXTS, *NEW, "-o", out)
    before = out.read_bytes()
    for flags, message in [
        (["--max_new_tokens", "6"], "was written with max_new_tokens 5, and now it is 6"),
        ([*NEW, "--output_format", "csv"], "was written with format 'jsonl', and now it is 'csv'"),
    ]:
        with pytest.raises(ValueError, match=message):
            main(["generate", checkpoint, *TEXTS, *flags, "-o", str(out)])
        assert out.read_bytes() == before
    with out.open("ab") as stream:
        stream.write(b"a line of somebody\n")
    with pytest.raises(ValueError, match="was changed after it was written: name another --output"):
        main(["generate", checkpoint, *TEXTS, *NEW, "-o", str(out)])
    assert out.read_bytes() == before + b"a line of somebody\n"
    out.write_bytes(before)
    progress_file(out).unlink()
    with pytest.raises(ValueError, match="exists and is not the output of such a command"):
        main(["generate", checkpoint, *TEXTS, *NEW, "-o", str(out)])
    assert out.read_bytes() == before
    call("generate", checkpoint, TEXTS[1], *NEW, "-o", out, "--overwrite_output")
    assert [row["document"] for row in written(out)] == ["text 1"]


def test_an_output_of_an_older_checkpoint_is_kept(folders, tmp_path):
    checkpoint, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(folders("chela", "AutoModelForCausalLM"), checkpoint)
    arguments = ["generate", str(checkpoint), *TEXTS[:2], *NEW, "-o", str(out)]
    call(*arguments)
    call(*arguments)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.lm_head.weight.data.neg_()
    model.save_pretrained(checkpoint)  # as training that goes on does
    with pytest.raises(ValueError, match="was written before the files of the model were changed"):
        main(arguments)


def test_a_changed_base_of_an_adapter_is_noticed_and_what_stands_beside_a_model_is_not(folders, tmp_path):
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "base" / "out.txt"
    shutil.copytree(folders("chela", "AutoModelForCausalLM"), base)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, peft_config(model, "lora")).save_pretrained(adapter)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    arguments = ["generate", str(adapter), *TEXTS[:2], *NEW, "-o", str(out)]
    call(*arguments)
    (base / "notes.txt").write_text("a note")
    call(arguments[0], f"{adapter}/", *arguments[2:])
    model.save_pretrained(base)
    with pytest.raises(ValueError, match="was written before the files of the model were changed"):
        main(arguments)


def test_one_odd_file_is_answered_with_another_encoding_into_the_same_output(folders, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.txt").write_text("Gr\xfc\xdfe", encoding="latin-1")
    arguments = ["generate", folders("chela", "AutoModelForCausalLM"), str(tmp_path), *NEW, "-o", str(out)]
    assert main(arguments) == 1
    assert main([*arguments, "--encoding", "latin-1"]) == 0
    assert [Path(row["document"]).name for row in written(out)] == ["a.txt", "b.txt"]
    assert "1 were there already" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["[]", '{"a": 1}', "[1, 2, 3]", '["a", "b"]', "{"])
def test_a_damaged_progress_file_is_named(record, folders, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["generate", folders("chela", "AutoModelForCausalLM"), *TEXTS[:2], *NEW, "-o", str(out)]
    call(*arguments)
    with progress_file(out).open("a") as stream:
        stream.write(f"{record}\n")
    with pytest.raises(ValueError, match=r"out\.jsonl\.progress is damaged: name another --output"):
        main(arguments)


def test_a_document_on_which_the_model_fails_is_skipped(folders, tmp_path, capsys, monkeypatch):
    respond = Generate.answer

    def picky(self, prompts):
        if any(len(prompt.ids) == 1 for prompt in prompts):
            raise ValueError("no such short texts")
        return respond(self, prompts)

    monkeypatch.setattr(Generate, "answer", picky)
    arguments = ["generate", folders("chela", "AutoModelForCausalLM")]
    for texts in (TEXTS, TEXTS[1:]):  # also if it is the first
        assert main([*arguments, *texts, *NEW, "--batch_size", "4", "--output_format", "jsonl"]) == 1
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == len(texts) - 1
        assert "is skipped: the model fails on it: ValueError: no such short texts" in captured.err
    with pytest.raises(ValueError, match="no such short texts"):
        main([*arguments, "a", "b", *NEW])


@pytest.mark.parametrize("auto_class", ["AutoModelForSequenceClassification", "AutoModel"])
def test_what_is_no_number_is_no_answer(auto_class, folders, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(folders("bert", auto_class), folder)
    model = getattr(transformers, auto_class).from_pretrained(folder)
    (number,) = AutoTokenizer.from_pretrained(folder)("z", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[number].fill_(torch.nan)
    model.save_pretrained(folder)
    command = "embed" if auto_class == "AutoModel" else "classify"
    assert main([command, str(folder), "A B", "z", "--output_format", "jsonl"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["document"] for line in captured.out.splitlines()] == ["text 1"]
    assert "text 2 is skipped: the model's answer is no number" in captured.err


def test_a_model_that_reads_the_last_position_gets_no_padding_there(folders, tmp_path):
    checkpoint = folders("xlnet", "AutoModelForSequenceClassification")
    for size in (1, 4):
        call("classify", checkpoint, *TEXTS, "--batch_size", size, "-o", tmp_path / f"{size}.jsonl")
    alone, together = (written(tmp_path / f"{size}.jsonl") for size in (1, 4))
    assert [row["score"] for row in alone] == pytest.approx([row["score"] for row in together], abs=1e-5)


def test_two_models_that_were_put_together_have_their_own_positions(folders, tmp_path, capsys):
    parts = [folders("bert", auto_class) for auto_class in ("AutoModel", "AutoModelForMaskedLM")]
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(*parts)
    tokenizer = AutoTokenizer.from_pretrained(parts[0])
    model.config.decoder_start_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(tmp_path / "pair")
    tokenizer.save_pretrained(tmp_path / "pair")
    positions = model.config.encoder.max_position_embeddings
    (row,) = rows("summarize", tmp_path / "pair", "x" * 2 * positions, capsys=capsys)
    assert row["tokens_read"] == positions


@pytest.mark.parametrize("content", ['{"max_new_tokens": 3,', "[1]", '{"max_new_tokens": "three"}'])
def test_a_damaged_generation_config_is_named(content, folders, tmp_path):
    folder = tmp_path / "gpt2"
    shutil.copytree(folders("gpt2", "AutoModelForCausalLM"), folder)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"its generation_config\.json cannot be read"):
        main(["generate", str(folder), "text"])


def test_one_text_has_no_heading_and_several_have(folders, tmp_path):
    out = tmp_path / "out.txt"
    arguments = ["generate", folders("chela", "AutoModelForCausalLM")]
    call(*arguments, TEXTS[0], *NEW, "-o", out)
    with pytest.raises(ValueError, match="holds one document without its name, and now there are several"):
        main([*arguments, *TEXTS[:2], *NEW, "-o", str(out)])


def test_files_are_the_same_by_any_name(folders, folder, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    (folder / "2b.txt").unlink()
    (folder / "rows.csv").write_text("text\none\ntwo\n")
    arguments = ["generate", folders("chela", "AutoModelForCausalLM"), *NEW, "-o", str(out)]
    call(*arguments, folder)
    before = out.read_bytes()
    monkeypatch.chdir(folder)
    call(*arguments, *sorted(os.listdir(folder)), tmp_path / "documents" / ".." / "documents")
    assert out.read_bytes() == before


def test_without_a_terminal_some_lines_say_how_far_it_is(folders, capsys, monkeypatch):
    monkeypatch.setattr(answer, "_SAID_EVERY", 0.0)
    call("embed", folders("chela", "AutoModel"), *TEXTS, "--batch_size", "2")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Reading:")]
    assert len(said) == 2
    assert re.match(r"Reading: +50%.* 2/4 \[\S+<\S+, .*document", said[0])


def test_batches_and_devices_may_change(folders, tmp_path):
    checkpoint, out = folders("chela", "AutoModelForCausalLM"), tmp_path / "out.jsonl"
    call("generate", checkpoint, *TEXTS[:2], *NEW, "-o", out)
    call("generate", checkpoint, *TEXTS, *NEW, "-o", out, "--batch_size", "1", "--device", "cpu")
    assert len(written(out)) == 4


def on_one_thread(arguments):
    """Run a command in a fork, which has none of its parent's threads."""
    torch.set_num_threads(1)
    main(arguments)


def test_a_killed_process_leaves_what_it_wrote(folders, folder, tmp_path):
    out = tmp_path / "out.jsonl"
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"{index} {TEXTS[2]}" * 20)
    command = ["generate", folders("chela", "AutoModelForCausalLM"), str(folder)]
    command += ["--batch_size", "1", "--batch_tokens", "1", "--max_new_tokens", "30", "-o", str(out)]
    process = multiprocessing.get_context("fork").Process(target=on_one_thread, args=(command,))
    process.start()
    while process.is_alive() and not (out.is_file() and out.read_bytes().count(b"\n") > 3):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 3 < out.read_bytes().count(b"\n") < 40
    assert main(command) == 1  # for 2b.txt
    got = [row["document"] for row in written(out)]
    assert got == sorted(str(path) for path in folder.iterdir() if path.name != "2b.txt")


def test_an_interruption_keeps_every_answer(folders, tmp_path, monkeypatch, capsys):
    respond, prompts = Embed.answer, []

    def interrupted(self, batch):
        if len(prompts) == 3 * 8:
            raise KeyboardInterrupt
        prompts.extend(batch)
        return respond(self, batch)

    texts, out = [f"Text {number}" for number in range(40)], tmp_path / "out.jsonl"
    arguments = ["embed", folders("chela", "AutoModelForCausalLM"), *texts, "-o", str(out)]
    monkeypatch.setattr(Embed, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--overwrite_output"])
    assert "the same command without --overwrite_output goes on" in capsys.readouterr().err
    before = written(out)  # in the documents' order: what stands behind one without an answer waits for it
    assert [row["document"] for row in before] == [f"text {number}" for number in range(1, len(before) + 1)]
    answered = 0

    def counted(self, batch):
        nonlocal answered
        answered += len(batch)
        return respond(self, batch)

    monkeypatch.setattr(Embed, "answer", counted)
    assert main(arguments) == 0
    assert [row["document"] for row in written(out)] == [f"text {number}" for number in range(1, 41)]
    assert answered == 40 - 24  # nothing twice
    assert not list(tmp_path.glob("*.lock"))


def test_a_model_that_cannot_be_loaded_leaves_the_output(folders, tmp_path):
    broken, out = tmp_path / "broken", tmp_path / "out.jsonl"
    arguments = ["embed", folders("chela", "AutoModelForCausalLM"), *TEXTS, "-o", str(out)]
    assert main(arguments) == 0
    before = out.read_bytes()
    shutil.copytree(arguments[1], broken)
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="broken"):
        main([arguments[0], str(broken), *arguments[2:], "--overwrite_output"])
    with pytest.raises(ValueError, match="was written with pooling"):
        main([*arguments, "--pooling", "last"])
    assert out.read_bytes() == before
    assert not list(tmp_path.glob("*.lock"))


def test_one_process_writes_an_output(folders, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["embed", folders("chela", "AutoModelForCausalLM"), *TEXTS, "-o", str(out)]
    with FileLock(f"{out}.lock"), pytest.raises(ValueError, match="is being written by another process"):
        main(arguments)
    assert main(arguments) == 0


def test_an_output_is_no_document_of_its_own(folders, tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out.txt"
    text.write_text("A text")
    command = ["generate", folders("chela", "AutoModelForCausalLM")]
    with pytest.raises(ValueError, match="is a document and the --output"):
        main([*command, str(text), "-o", str(text), "--overwrite_output"])
    assert text.read_text() == "A text"
    for _ in range(3):  # as a shell passes *.txt
        assert main([*command, *sorted(map(str, tmp_path.glob("*.txt"))), *NEW, "-o", str(out)]) == 0
    assert out.read_text().count("==>") <= 1


@pytest.mark.parametrize("auto_class", ["AutoModelForSequenceClassification", "AutoModel"])
def test_a_tokenizer_that_pads_left_changes_no_answer(auto_class, folders, tmp_path, capsys):
    folder = tmp_path / "bert"
    shutil.copytree(folders("bert", auto_class), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    command = "classify" if auto_class == "AutoModelForSequenceClassification" else "embed"
    for size in (1, 4):
        call(command, folder, *TEXTS, "--batch_size", size, "-o", tmp_path / f"{size}.jsonl")
    alone, together = (written(tmp_path / f"{size}.jsonl") for size in (1, 4))
    key = "score" if command == "classify" else "embedding"
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.tensor(one[key]), torch.tensor(other[key]), rtol=1e-5, atol=1e-6)


def test_a_classifier_without_a_pad_token_takes_a_batch(folders, tmp_path):
    folder = tmp_path / "gpt2"
    shutil.copytree(folders("gpt2", "AutoModelForSequenceClassification"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert main(["classify", str(folder), *TEXTS]) == 0


def test_an_interruption_says_how_to_go_on(folders, tmp_path, capsys, monkeypatch):
    def interrupt(self, prompts):
        raise KeyboardInterrupt

    monkeypatch.setattr(Embed, "answer", interrupt)
    arguments = ["embed", folders("chela", "AutoModelForCausalLM"), *TEXTS, "-o", str(tmp_path / "out.jsonl")]
    with pytest.raises(SystemExit) as left:
        run_command_line(lambda: main(arguments))
    assert left.value.code == 130
    error = capsys.readouterr().err
    assert f"what is written stays in {tmp_path / 'out.jsonl'}; the same command goes on from there" in error
    assert "Traceback" not in error


def test_a_full_disk_is_one_line_and_loses_nothing(folders, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    arguments = ["generate", folders("chela", "AutoModelForCausalLM"), *TEXTS, *NEW, "-o", str(out)]
    call(*arguments)
    whole = out.read_bytes()
    call(*arguments[:2], *TEXTS[:2], *NEW, "-o", out, "--overwrite_output")
    kept, real = out.read_bytes(), os.fsync

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_command_line(lambda: main(arguments))
    assert left.value.code == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no room on a disk")
    assert out.read_bytes()[: len(kept)] == kept
    monkeypatch.setattr(os, "fsync", real)
    call(*arguments)
    assert out.read_bytes() == whole


# ---- what cannot be used ----


PAIRS = "SpadeForSequencePairClassification"


@pytest.fixture(scope="module")
def pairs(folders, tmp_path_factory):
    """A folder of an encoder that says it is a classifier of pairs."""
    encoder = folders("spade", "AutoModelForTextEncoding")
    folder = shutil.copytree(encoder, tmp_path_factory.mktemp("pairs") / "pairs")
    SpadeConfig.from_pretrained(encoder, architectures=[PAIRS]).save_pretrained(folder)
    return folder


def test_a_classifier_of_pairs_embeds_single_texts(pairs, capsys):
    call("embed", pairs, "a text")
    assert json.loads(capsys.readouterr().out)["embedding"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summarize"], "needs a model"),
        (["summarize", "no/such/model", "text"], "there is no such folder"),
        (["summarize", "{causal}", "text"], r"is a language model \(ChelaForCausalLM\): use hf-hybrid generate"),
        (["generate", "{classifier}", "text"], r"is a classifier \(.*\): use hf-hybrid classify"),
        (["classify", "{seq2seq}", "text"], r"is an encoder-decoder \(.*\): use hf-hybrid summarize"),
        (["summarize", "{encoder}", "text"], r"is an encoder \(SpadeEncoderModel\): use hf-hybrid embed"),
        (
            ["classify", "{pairs}", "text"],
            rf"is a classifier of pairs, .*: use {PAIRS}\.from_pretrained$",
        ),
        (["summarize", "none", "text"], r"^there is no folder none here, and none can be had from the Hub\. "),
        (["summarize", "{tmp}", "text"], r"is not a checkpoint: config\.json"),
        (["generate", "{causal}", "text", "--num_beam", "3"], "unknown flag --num_beam. Did you mean 'num_beams'"),
        (["generate", "{causal}", "text", "--num_beams", "x"], "invalid int value: 'x'"),
        (
            ["generate", "{causal}", "text", "--min_new_tokens", "9", "--max_new_tokens", "5"],
            "must be at most the 5 of --max_new_tokens; got 9",
        ),
        (["generate", "{causal}", "text", "--min_new_tokens", "200"], "must be at most the 128 of --max_new_tokens"),
        (["generate", "{causal}", "text", "--min_new_tokens", "-3"], "--min_new_tokens must not be negative; got -3"),
        (["generate", "{causal}", "text", "--max_time", "-1"], "--max_time must be a positive number; got -1.0"),
        (["generate", "{causal}", "text", "--length_penalty", "nan"], "--length_penalty must be a number; got nan"),
        (["generate", "{causal}", "text", "--temperature", "inf"], "--temperature must be a positive number; got inf"),
        (["generate", "{causal}", "text", "--seed", "-1"], "--seed must be between 0 and 4294967295; got -1"),
        (["generate", "{causal}", "text", "--max_new_tokens", "0"], "--max_new_tokens must be a positive integer"),
        (["generate", "{causal}", "text", "--top_p", "2", "--do_sample"], "--top_p must be a probability"),
        (["generate", "{causal}", "text", "--temperature", "-1", "--do_sample"], "--temperature must be a positive"),
        (["generate", "{causal}", "text", "--cache_implementation", "x"], "the flags of generation: .*cache_implem"),
        (["classify", "{classifier}", "text", "--top_k", "0"], "--top_k must be a positive integer; got 0"),
        (["generate", "{causal}", "text", "--device", "gpu"], "--device must be a device such as cpu or cuda:0"),
        (["generate", "{causal}", "text", "--device", "cuda:99"], r"torch sees \d+ CUDA devices here"),
        (["generate", "{causal}", "text", "-o", "out.xml"], r"--output must end in \.txt, \.jsonl, \.csv"),
        (["generate", "{causal}", "text", "-o", "{tmp}"], "must be a file; it is a folder"),
        (["generate", "{causal}", "text", "-o", "{tmp}/no/out.txt"], "there is no folder"),
        (["embed", "{causal}", "text", "--output_format", "text"], "must be jsonl or csv for vectors"),
        (["embed", "{causal}", "text", "--pooling", "max"], "invalid choice: 'max'"),
        (["summarize", "{bart}", "text", "--max_new_tokens", "5000"], "must be less than the model's 1024 positions"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, folders, pairs, tmp_path):
    places = {
        "causal": folders("chela", "AutoModelForCausalLM"),
        "classifier": folders("bst", "AutoModelForSequenceClassification"),
        "seq2seq": folders("spade", "AutoModelForSeq2SeqLM"),
        "encoder": folders("spade", "AutoModelForTextEncoding"),
        "bart": folders("srformer_bart", "AutoModelForSeq2SeqLM"),
        "pairs": pairs,
        "tmp": tmp_path,
    }
    with pytest.raises(ValueError, match=message) as raised:
        main([argument.format(**places) for argument in arguments])
    assert "\n" not in str(raised.value)
