import subprocess
import sys
from itertools import combinations

import pytest

from hf_hybrid.data.corpora import _matches_and_mismatches, corpus_report, embedded_corpus
from hf_hybrid.data.docstrings import words_of

from ..bare import BARE
from .conftest import write_package


def rows_of(corpus):
    return {split: corpus[split].to_list() for split in corpus}


def assert_nothing_crosses_splits(corpus):
    assert list(corpus) == ["train", "validation", "test"]
    bodies, summaries, prefixes, sources = {}, {}, {}, {}
    for split, members in rows_of(corpus).items():
        assert members
        normalised = [(words_of(row["document"].partition("\n")[2]), words_of(row["summary"])) for row in members]
        bodies[split] = {body for body, _ in normalised}
        summaries[split] = {summary for _, summary in normalised}
        prefixes[split] = {summary + body[:60] for body, summary in normalised}
        sources[split] = {row["source"] for row in members}
    for keys in (bodies, summaries, prefixes, sources):
        for one, other in combinations(keys.values(), 2):
            assert not one & other


@pytest.fixture(scope="module")
def numpy_corpora(tmp_path_factory):
    """Two corpora of real documentation."""
    folder = str(tmp_path_factory.mktemp("cache"))
    return {name: embedded_corpus(name, cache_dir=folder, packages=["numpy"]) for name in ("docstrings", "docpairs")}


@pytest.fixture
def numpy_corpus(numpy_corpora):
    return numpy_corpora["docstrings"]


@pytest.mark.parametrize("name", ["docstrings", "modules"])
def test_pairs_of_a_folder(name, package, tmp_path):
    corpus = embedded_corpus(name, cache_dir=str(tmp_path), packages=[package])
    assert_nothing_crosses_splits(corpus)
    assert all(corpus[split].column_names == ["document", "summary", "source"] for split in corpus)
    row = corpus["train"][0]
    assert row["source"].startswith("orchard.module_")
    assert row["document"].startswith(row["source"])
    assert row["summary"] not in row["document"]
    report = corpus_report(corpus)
    assert report["rows"] == {split: len(corpus[split]) for split in corpus}
    assert list(report["packages"]) == ["orchard"]
    assert (report["files"], report["unreadable_files"]) == (100, 0)


def test_two_builds_are_equal(package, tmp_path):
    one, two = (embedded_corpus("docstrings", cache_dir=str(tmp_path / name), packages=[package]) for name in "ab")
    assert rows_of(one) == rows_of(two)
    assert corpus_report(one) == corpus_report(two)


def test_two_processes_at_once_build_one_corpus(package, tmp_path):
    code = (
        f"{BARE} import os; from hf_hybrid.data.corpora import embedded_corpus; child = os.fork();"
        "corpus = embedded_corpus('docstrings', cache_dir=sys.argv[1], packages=[sys.argv[2]]);"
        "out = open(f'{sys.argv[1]}/{bool(child)}.txt', 'w');"
        "print(len(corpus['train']), corpus['train'][0]['document'], file=out, flush=True);"
        "assert not child or os.waitpid(child, 0)[1] == 0"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), package], timeout=120, check=True)
    outputs = [(tmp_path / f"{parent}.txt").read_text() for parent in (False, True)]
    assert outputs[0] == outputs[1]
    assert outputs[0].strip()
    folders = [path for path in (tmp_path / "hf_hybrid" / "embedded").iterdir() if path.is_dir()]
    assert len(folders) == 1


def test_a_changed_source_gives_a_new_corpus(tmp_path):
    root = write_package(tmp_path / "orchard")
    before = corpus_report(embedded_corpus("modules", cache_dir=str(tmp_path), packages=[str(root)]))
    next(root.iterdir()).unlink()
    after = corpus_report(embedded_corpus("modules", cache_dir=str(tmp_path), packages=[str(root)]))
    assert after["fingerprint"] != before["fingerprint"]
    assert sum(after["rows"].values()) == sum(before["rows"].values()) - 1


def test_a_broken_source_file_is_counted_and_a_copied_one_left_out(tmp_path):
    root = write_package(tmp_path / "orchard")
    (root / "broken.py").write_text("def f(:\n")
    original = sorted(root.glob("module_*.py"))[0]
    (root / "zz_copy.py").write_text(original.read_text())
    corpus = embedded_corpus("docstrings", cache_dir=str(tmp_path), packages=[str(root)])
    report = corpus_report(corpus)
    assert report["unreadable_files"] == 1
    assert report["near_copies"] == 5
    assert "orchard.zz_copy" not in {row["source"] for members in rows_of(corpus).values() for row in members}


def assert_balanced(pairs, documents):
    """Every document and every summary stands in one match and in one mismatch; nothing crosses splits."""
    for split, rows in rows_of(pairs).items():
        texts = {row["document"]: row["summary"] for row in documents[split]}
        matches = [row for row in rows if row["label"] == 1]
        mismatches = [row for row in rows if row["label"] == 0]
        assert len(matches) == len(mismatches) == len(texts) > 1
        assert {row["sentence1"]: row["sentence2"] for row in matches} == texts
        assert {row["sentence1"] for row in mismatches} == set(texts)
        assert {row["sentence2"] for row in mismatches} == set(texts.values())
        assert all(texts[row["sentence1"]] != row["sentence2"] for row in mismatches)


def test_matches_and_mismatches_of_a_folder(package, tmp_path):
    pairs, documents = (
        embedded_corpus(name, cache_dir=str(tmp_path), packages=[package]) for name in ("docpairs", "docstrings")
    )
    assert pairs["train"].features["label"].names == ["mismatch", "match"]
    assert_balanced(pairs, documents)
    assert corpus_report(pairs)["rows"] == {split: len(pairs[split]) for split in pairs}


def test_mismatches_of_real_documentation_are_not_told_by_length_or_module(numpy_corpora):
    numpy_corpus, pairs = numpy_corpora.values()
    assert_balanced(pairs, numpy_corpus)
    own = {row["document"]: row for row in numpy_corpus["train"]}
    source = {row["summary"]: row["source"] for row in own.values()}
    gaps = []
    for row in pairs["train"]:
        if row["label"] == 0:
            assert source[row["sentence2"]] != row["source"]
            gaps.append(abs(len(row["sentence2"]) - len(own[row["sentence1"]]["summary"])))
    assert sorted(gaps)[int(0.9 * len(gaps))] <= 3  # characters
    again = _matches_and_mismatches(list(numpy_corpus["train"]))
    assert [row["sentence2"] for row in again] == pairs["train"]["sentence2"][:]


def test_the_trade_of_summaries_where_modules_are_few():
    rows = [{"document": f"d{i}", "summary": "s" * (i + 1), "source": "a" if i < 3 else "b"} for i in range(5)]
    made = _matches_and_mismatches(rows)
    sources = {row["summary"]: row["source"] for row in rows}
    mixed = [row for row in made if row["label"] == 0 and sources[row["sentence2"]] != row["source"]]
    assert len(mixed) == 4  # two of each module can trade; the fifth keeps to its own
    one_module = [row | {"source": "a"} for row in rows]
    for row in _matches_and_mismatches(one_module):
        assert (row["sentence2"] == "s" * (int(row["sentence1"][1:]) + 1)) == bool(row["label"])
    assert _matches_and_mismatches(rows[:1]) == []


def test_running_text_of_a_folder(tmp_path):
    root = write_package(tmp_path / "orchard")
    before = embedded_corpus("text", cache_dir=str(tmp_path), packages=[str(root)])
    original = sorted(root.glob("module_*.py"))[0]
    (root / "zz_copy.py").write_text(original.read_text())
    corpus = embedded_corpus("text", cache_dir=str(tmp_path), packages=[str(root)])
    assert rows_of(corpus) == rows_of(before)
    assert corpus_report(corpus)["near_copies"] == corpus_report(before)["near_copies"] + 6  # five functions, a module
    sources = [source for split in corpus for source in corpus[split]["source"]]
    assert len(sources) == len(set(sources)) == 100
    row = corpus["train"][0]
    assert row["text"].startswith(row["source"])
    assert row["text"].count(" rule.\n\n") == 5  # the first sentence of each function, and its body behind it


def test_real_documentation(numpy_corpus):
    assert_nothing_crosses_splits(numpy_corpus)
    everything = [row for members in rows_of(numpy_corpus).values() for row in members]
    by_title = {row["document"].partition("(")[0]: row for row in everything}
    row = by_title["numpy._core.fromnumeric.put"]
    assert row["summary"] == "Replaces specified elements of an array with given values."
    assert row["document"].startswith("numpy._core.fromnumeric.put(a, ind, v, mode='raise')\nThe indexing works on")
    assert len(everything) > 300


def test_an_unknown_name_gets_a_suggestion(tmp_path):
    with pytest.raises(ValueError, match=r"embedded corpus must be one of: docstrings, .*; got 'docstring'\. Did you"):
        embedded_corpus("docstring", cache_dir=str(tmp_path))


def test_too_few_documents_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"enough documented modules for every split of embedded:docstrings; .* textwrap"
    ):
        embedded_corpus("docstrings", cache_dir=str(tmp_path), packages=["textwrap"])
