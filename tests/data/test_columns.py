import logging

import pytest
from datasets import Dataset, DatasetDict

from hf_hybrid.data.columns import drop_empty_pairs, summarization_columns


def choose(columns, dataset_name=None, **named):
    rows = Dataset.from_dict({column: ["x"] for column in columns})
    return summarization_columns(DatasetDict({"train": rows}), dataset_name=dataset_name, **named)


@pytest.mark.parametrize(
    ("columns", "dataset_name", "chosen"),
    [
        (["id", "highlights", "article"], "abisee/cnn_dailymail", ("article", "highlights")),
        (["title", "summary", "text"], "billsum", ("text", "summary")),
        (["abstract", "article", "summary"], "ccdv/arxiv-summarization", ("article", "abstract")),
        (["summary", "document"], "cnn_dailymail", ("document", "summary")),  # not the known set's columns
        (["id", "summary", "dialogue"], None, ("dialogue", "summary")),
        (["id", "title", "document", "summaries"], None, ("document", "summaries")),
        (["long", "short"], "my/own", ("long", "short")),
        (["id", "long", "doc_id", "short"], None, ("long", "short")),
        (["note", "summary"], None, ("note", "summary")),
        (["summary", "note"], None, ("note", "summary")),
    ],
)
def test_columns_are_recognised(columns, dataset_name, chosen):
    assert choose(columns, dataset_name) == chosen


def test_named_columns_win():
    columns = ["document", "summary", "title"]
    assert choose(columns, summary_column="title") == ("document", "title")
    assert choose(columns, text_column="title", summary_column="document") == ("title", "document")
    assert choose(columns, text_column="summary") == ("summary", "title")


def test_a_missing_column_is_named_with_the_ones_there_are():
    with pytest.raises(
        ValueError,
        match=r"text_column must be one of the dataset's columns: document, summary; got 'documents'\. "
        r"Did you mean 'document'\?",
    ):
        choose(["document", "summary"], text_column="documents")
    with pytest.raises(ValueError, match=r"summary_column must be one of .*; got 'zzz'\.$"):
        choose(["document", "summary"], summary_column="zzz")


def test_two_columns_are_needed_and_must_differ():
    with pytest.raises(
        ValueError, match=r"must have a column of texts and one of summaries; got the columns: document"
    ):
        choose(["document"])
    with pytest.raises(ValueError, match="text_column and summary_column must differ; got 'a' for both"):
        choose(["a", "b"], text_column="a", summary_column="a")


def test_the_columns_must_be_in_every_split():
    splits = DatasetDict(
        {"train": Dataset.from_dict({"text": ["a"], "summary": ["b"]}), "test": Dataset.from_dict({"text": ["a"]})}
    )
    with pytest.raises(ValueError, match=r"summary_column 'summary' must be in every split; 'test' has only: text"):
        summarization_columns(splits, dataset_name=None)


def test_empty_pairs_are_dropped_and_counted(caplog):
    split = Dataset.from_dict(
        {"text": ["a", "", None, "d", "e"], "summary": ["A", "B", "C", " \n", "E"], "n": range(5)}
    )
    with caplog.at_level(logging.WARNING):
        kept = drop_empty_pairs(split, "text", "summary", name="train")
    assert kept["n"][:] == [0, 4]
    assert "train: dropped 3 of 5 rows whose 'text' or 'summary' is empty" in caplog.text


def test_a_complete_split_is_returned_as_it_is(caplog):
    split = Dataset.from_dict({"text": ["a"], "summary": ["A"]})
    assert drop_empty_pairs(split, "text", "summary", name="train") is split
    assert not caplog.text


@pytest.mark.parametrize("values", [["", None], [None, None], []])
def test_a_split_that_becomes_empty_is_refused(values):
    split = Dataset.from_dict({"text": ["a"] * len(values), "summary": values})
    with pytest.raises(
        ValueError, match=r"split 'validation' must hold at least one row with text in both .* none of"
    ):
        drop_empty_pairs(split, "text", "summary", name="validation")


@pytest.mark.parametrize(
    ("values", "found"), [([None, 7], "row 1 holds int: 7"), ([["a"], ["b"]], r"row 0 holds list: \['a'\]")]
)
def test_a_value_that_is_no_text_is_named_with_its_row(values, found):
    split = Dataset.from_dict({"text": ["a", "b"], "summary": values})
    with pytest.raises(ValueError, match=rf"column 'summary' of split 'train' must hold text; {found}"):
        drop_empty_pairs(split, "text", "summary", name="train")
