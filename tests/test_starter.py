"""The texts that the starter is pre-trained on: nothing that the demo validates or tests with is among them."""

import hashlib
import json
import lzma
import os
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks import demo_copies, ship_starter, starter
from benchmarks.record import read_csv
from benchmarks.starter import SOURCES, Contained, articles, digest, documentation, held_out, is_free, main
from hf_hybrid.data.corpora import embedded_corpus
from hf_hybrid.starters import starter as starter_folder
from hf_hybrid.training import pretrain
from tests.data.conftest import write_package
from tests.training.conftest import MODELS, NO_DROPOUT

OTHER = "Return the sum of all elements along the given axis of an array"
SIZE = f"{MODELS['spade']},{NO_DROPOUT['spade']}"
UNLIKE = "Draw a picture of the tree with its leaves at the bottom of the page"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (OTHER, True),
        (f"f(x)\n\n{OTHER.upper()}!\n\n{UNLIKE}", True),
        (f"{OTHER.split('along')[0]} along the given row", True),  # half of its runs
        ("Return the sum of the elements of a list", False),
        (UNLIKE, False),
    ],
)
def test_what_contains_a_text_is_recognised(text, wanted):
    assert Contained([OTHER, "another text of some words"])(text) is wanted


def test_parts_contain_a_text_together():
    """A copy with blank lines where the text has none, on a page of other things."""
    words = [one + other for one in "abcdef" for other in "ghijkl"]
    text = " ".join(words)
    parts = [UNLIKE, *(" ".join(words[at : at + 9]) for at in range(0, 36, 9)), OTHER]
    contained = Contained([text])
    assert not any(map(contained, parts))
    assert contained.parts(parts) == {1, 2, 3, 4}
    assert contained.without(parts) == [UNLIKE, OTHER]
    assert contained.without(parts[:3]) == parts[:3]  # less than half of it


def test_a_short_text_is_one_run():
    contains = Contained(["Close it."])
    assert contains("close it")
    assert not contains("Open it and close it.")


LONGER = " ".join(["It has many words so that nobody takes it for a stray line of a table ."] * 4)


def test_articles_are_divided_and_written_as_before(tmp_path):
    lines = [
        *(" ", " = A title = ", " ", " A well @-@ known ( if small ) town , with 1 @,@ 000 people . ", " "),
        *(" = = Past = = ", " ", " It 's said \" to be old \" ; it isn 't . Nobody of <unk> is . Is it ? ", " "),
        *(" = = A <unk> = = ", " ", f" {LONGER} ", " ", " = Games played ; = Wins = ", " "),
        *(" = Stray = ", " ", " A line . ", " ", " = Another = ", " ", f" {LONGER} Text . ", ""),
    ]
    text = "\n".join(lines)
    (tmp_path / "wikitext2").mkdir()
    with lzma.open(tmp_path / "wikitext2" / "train.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write(text)
    longer = LONGER.replace(" .", ".")
    assert list(articles(tmp_path, "train")) == [
        "A title\nA well-known (if small) town, with 1,000 people.\nPast\n"
        f"It's said \"to be old\"; it isn't. Is it?\n{longer}\nGames played; = Wins",
        f"Another\n{longer} Text.",
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("Hardy_Tess_1891", True), ("Galsworthy_River_1933", False), ("Forster_Angels_1905", False)],
)
def test_novels_are_free_by_their_year_and_their_authors(name, wanted):
    assert is_free(name) is wanted


def test_a_novel_of_an_unknown_author_is_no_free_one():
    with pytest.raises(KeyError, match="Nobody"):
        is_free("Nobody_Nothing_1850")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Arguments of embedded corpora of a small package."""
    folder = tmp_path_factory.mktemp("embedded")
    return {"cache_dir": str(folder / "cache"), "packages": [write_package(folder / "orchard")]}


def test_documentation_has_nothing_that_is_held_out(places, monkeypatch):
    pages, numbers = documentation(**places)
    texts = held_out(**places)
    assert numbers["held_out"] == len(texts) > sum(numbers["contained_together"].values()) >= 0
    contained = Contained(texts)
    parts = [part for page in pages.values() for part in page.split("\n\n")]
    assert not any(contained.parts(page.split("\n\n")) for page in pages.values())
    whole = embedded_corpus("text", **places)["train"]["text"]
    assert len(parts) + numbers["left_out"] == sum(len(page.split("\n\n")) for page in whole)
    secret = max(parts, key=len)
    monkeypatch.setattr(starter, "held_out", lambda **_: [secret])  # had it been held out, it would not be there
    pages, numbers = documentation(**places)
    assert numbers["left_out"] > 0
    assert secret not in "\n\n".join(pages.values()).split("\n\n")


def test_what_pages_have_read_is_counted_across_paragraphs_and_pages():
    one, two, three = ("a b c d e f g h", "i j k l m n o p", "q r s t u v w x")  # five runs of four words each
    pages = ["a b c d e\n\nf g h", "i j k l m", "l m n o p", "q r s t"]
    together, in_one = starter.read_of([one, two, three], pages)
    assert (together, in_one) == ({0, 1}, {0})
    assert starter.read_of([two], pages[1:2]) == (set(), set())
    assert not Contained([one]).parts(pages[0].split("\n\n"))  # which looks at each paragraph's own runs


def test_a_demo_is_scored_without_what_has_been_read(tmp_path, monkeypatch):
    documents, references = [OTHER, UNLIKE, "q r s t u v"], ["Return the sum", "Draw a picture", "q r s t u"]
    texts = [text for pair in zip(documents, references, strict=True) for text in pair]
    monkeypatch.setattr(demo_copies, "held_out", lambda: texts)
    monkeypatch.setattr(demo_copies, "documentation", lambda: ({"one": f"of it {OTHER}", "two": "q r s t u"}, {}))
    monkeypatch.setattr(demo_copies, "tested_with", lambda *_: (documents, references, ["Two words", "Two more"]))
    demo = tmp_path / "demo"
    with pytest.raises(ValueError, match="must be the folder of a finished demo; it has no demo_results"):
        demo_copies.main(["--demos", str(demo), "--out", str(tmp_path / "found.csv")])
    for folder, lines in (("trained", references), ("scratch", ["Draw a picture"] * 3)):
        (demo / folder).mkdir(parents=True)
        (demo / folder / "generated_predictions.txt").write_text("".join(line + "\n" for line in lines))
    (demo / "demo_results.json").write_text("{}")
    assert demo_copies.main(["--demos", str(demo), "--out", str(tmp_path / "found.csv")]) == 0
    rows = read_csv(tmp_path / "found.csv")
    found = {(row["documents"], row["model"]): row for row in rows}
    assert len(found) == len(rows) == 9
    assert [found[kind, "trained starter"]["number"] for kind in ("all", "not read", "read in part")] == [
        "3",
        "1",
        "2",
    ]
    assert float(found["all", "trained starter"]["rouge1"]) == 100
    assert float(found["not read", "trained from scratch"]["rouge1"]) == 100  # the second document alone
    assert float(found["read in part", "trained from scratch"]["rouge1"]) < 30
    assert [found["all", model]["distinct"] for model in ("trained starter", "trained from scratch")] == ["3", "1"]


def test_pages_have_hashes_by_package():
    pages = {"json.decoder": "one", "orchard": "two", "orchard.apples": "three"}
    found = starter.hashes_of_pages(pages, ["Python", "orchard", "numpy"])
    assert {package: len(hashes) for package, hashes in found.items()} == {"Python": 1, "orchard": 2, "numpy": 0}
    assert found["Python"] == {hashlib.sha256(b"one").hexdigest()[:12]}


def test_the_corpus_is_written_with_its_sources(places, tmp_path, monkeypatch):
    data = tmp_path / "data"
    for folder in ("english_novels", "wikitext2"):
        (data / folder).mkdir(parents=True)
    for split, name in (("train", "train"), ("validation", "valid")):
        with lzma.open(data / "wikitext2" / f"{name}.txt.xz", "wt", encoding="utf-8") as stream:
            stream.write(f" \n = One = \n \n {LONGER} Text of {split} . \n")
        with lzma.open(data / "english_novels" / f"{split}.jsonl.xz", "wt", encoding="utf-8") as stream:
            text = f"A line\nand one\n\nof {split}\n\n{OTHER} here."
            for name in ("Hardy_Tess_1891", "Forster_Angels_1905", "Woolf_Night_1919", "Hardy_Jude_1895"):
                stream.write(json.dumps({"id": name, "text": f"{text}\n\n{name}"}) + "\n")
            for name in ("Woolf_Voyage_1915", "Hardy_Native_1878"):  # of which nothing is left
                stream.write(json.dumps({"id": name, "text": f"{OTHER}\nhere."}) + "\n")
    for name in starter.EVALUATED:
        (data / name).mkdir(parents=True)
        row = {"document": OTHER, "summaries": [UNLIKE, "of train"], "label": 1}
        (data / name / "validation.jsonl").write_text(json.dumps(row) + "\n")
    assert starter.evaluated(data) == [OTHER, UNLIKE] * len(starter.EVALUATED)
    embedded = starter.embedded_corpus
    monkeypatch.setattr(starter, "embedded_corpus", lambda name: embedded(name, **places))
    assert main([str(data), str(tmp_path / "corpus")]) == 0
    report = json.loads((tmp_path / "corpus" / "sources.json").read_text())
    documents = []
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (tmp_path / "corpus" / f"{split}.jsonl").read_text().splitlines()]
        every_second = ["Hardy_Tess_1891", "Hardy_Jude_1895"]
        longer = LONGER.replace(" .", ".")
        assert [row["text"] for row in rows[:3]] == [
            *(f"A line and one\nof {split}\n{name}" for name in every_second),
            f"One\n{longer} Text of {split}.",
        ]
        assert report["novels"][split]["names"] == every_second
        for name in starter.SOURCES:
            texts = [row["text"] for row in rows if row["source"] == name]
            assert report[name][split]["documents"] == len(texts) > 0
            assert report[name][split]["characters"] == sum(map(len, texts))
            assert report[name][split]["sha256"] == digest(texts)
            documents += texts if name == "documentation" else []
        assert [report[name][split]["lines_of_evaluated_tasks"] for name in ("novels", "wikipedia")] == [3, 0]
    assert list(report["documentation"]["packages"]) == ["orchard"]
    recorded = report["documentation"]["pages"]["orchard"].split()
    assert recorded == sorted(map(starter.hash_of_page, documents))


@pytest.mark.full
@pytest.mark.skipif("HF_HYBRID_DATA" not in os.environ, reason="HF_HYBRID_DATA names no folder of the texts")
def test_the_starter_has_read_the_texts_that_it_records(tmp_path):
    """Of novels and Wikipedia; for documentation see tests/training/test_starters.py, since packages change."""
    assert main([os.environ["HF_HYBRID_DATA"], str(tmp_path)]) == 0
    there = json.loads((tmp_path / "sources.json").read_text())
    shipped = json.loads((Path(starter_folder("spade-en-tiny")) / "sources.json").read_text())
    assert there["novels"] == shipped["novels"]
    assert there["wikipedia"] == shipped["wikipedia"]


def test_a_run_becomes_a_starter(tmp_path, monkeypatch):
    train, corpus, run = tmp_path / "train.jsonl", tmp_path / "corpus", tmp_path / "run"
    train.write_text("".join(json.dumps({"text": f"{OTHER} {number} {UNLIKE}"}) + "\n" for number in range(8)))
    pretrain.main(
        [
            *("--objective", "span_corruption", "--model_type", "spade", "--config_overrides", SIZE),
            *("--tokenizer_type", "marked", "--tokenizer_vocab_size", "300", "--train_file", str(train)),
            *("--validation_file", str(train), "--cache_dir", str(tmp_path / "cache"), "--max_seq_length", "32"),
            *("--max_steps", "3", "--logging_steps", "1", "--per_device_train_batch_size", "2", "--do_train"),
            *("--do_eval", "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(run)),
        ]
    )
    corpus.mkdir()
    split = {"documents": 8, "characters": 1234, "sha256": "", "names": ["Hardy_Tess_1891"]}
    sources = {name: {"what": what, "licence": licence, "train": split} for name, (what, licence) in SOURCES.items()}
    together, in_one = {"documents": 34, "summaries": 21}, {"documents": 3, "summaries": 2}
    numbers = {
        "left_out": 5,
        "held_out": 1200,
        "contained_together": together,
        "contained_in_one_page": in_one,
    }
    sources["documentation"] |= numbers | {"packages": {"orchard": "1.2"}}
    (corpus / "sources.json").write_text(json.dumps(sources))
    folder = tmp_path / "spade-en-tiny"
    assert ship_starter.main([str(run), str(corpus), str(folder)]) == 0

    trained, shipped = (AutoModelForSeq2SeqLM.from_pretrained(place) for place in (run, folder))
    assert (shipped.config.dropout, shipped.config.attention_dropout) == (0.1, 0.1)
    assert {weight.dtype for weight in shipped.parameters()} == {torch.float32}
    for (name, one), other in zip(trained.named_parameters(), shipped.parameters(), strict=True):
        assert torch.equal(one if ".ssm." in name else one.bfloat16().float(), other), name
    stored = sum(weight.numel() * (4 if ".ssm." in name else 2) for name, weight in trained.named_parameters())
    assert stored <= (folder / "model.safetensors").stat().st_size < stored + 40_000  # tied weights once
    texts = [OTHER, "theFile of_it"]
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (run, folder)]
    assert tokenizers[0](texts)["input_ids"] == tokenizers[1](texts)["input_ids"]
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    for said in (
        'hf_hybrid.starter("spade-en-tiny")',
        "orchard 1.2",
        "Hardy Tess 1891",
        "CC BY-SA",
        "3 steps",
        "at most 32 tokens",
        "So of those 1,200 documents and summaries",
        "words of 34 documents and 21 summaries on all",
        "and of 3 documents and 2 summaries on\n",
        "1,234",
    ):
        assert said in card.text, said
    assert "`dropout`" in (run / "README.md").read_text()
    assert "`dropout`" not in card.text  # 0.1, the default
    assert json.loads((folder / "sources.json").read_text()) == sources
    assert "--output_dir starter" in card.text
    for place in (run, corpus):
        assert str(place) not in card.text
    hours = float(re.search(r"\n([\d.]+) hours on two CPU cores, 3 steps", card.text)[1])
    assert hours == pytest.approx(json.loads((run / "all_results.json").read_text())["train_runtime"] / 3600, abs=0.01)
    monkeypatch.setattr(ship_starter, "_resumed_at", lambda run: 2)
    assert ship_starter.main([str(run), str(corpus), str(folder)]) == 0
    assert re.search(r"\nAbout [\d.]+ hours on two CPU cores, 3 steps", ModelCard.load(folder / "README.md").text)


def test_the_last_part_of_a_run_is_found(tmp_path):
    report = tmp_path / "report.html"
    report.write_text("<tr><th>steps</th><td>6,400</td></tr>")
    assert ship_starter._resumed_at(tmp_path) == 0
    report.write_text("<tr><th>resumed at step</th><td>3,200</td></tr>")
    assert ship_starter._resumed_at(tmp_path) == 3200
