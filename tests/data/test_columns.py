import logging

import pytest
from datasets import Dataset, DatasetDict

from hf_hybrid.data.columns import check_texts, summarization_columns, text_column


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


def splits_of(**columns):
    """Splits of one row each, with the named columns."""
    return DatasetDict(
        {split: Dataset.from_dict({name: ["x"] for name in names.split()}) for split, names in columns.items()}
    )


def test_two_columns_are_needed_and_must_differ():
    with pytest.raises(
        ValueError, match=r"must have a column of texts and one of summaries in every split; 'train' has: document$"
    ):
        choose(["document"])
    with pytest.raises(ValueError, match="text_column and summary_column must differ; got 'a' for both"):
        choose(["a", "b"], text_column="a", summary_column="a")


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        (
            {"train": "text summary title", "test": "text title"},  # the title is no stand-in for the summary
            {},
            "summary_column 'summary' must be in every split; 'test' has only: text, title",
        ),
        (
            {"train": "text summary", "validation": "text summary best", "test": "text summary best"},
            {"summary_column": "best"},
            "summary_column 'best' must be in every split; 'train' has only: text, summary",
        ),
        (
            {"train": "document", "test": "document summary"},
            {},
            "must have a column of texts and one of summaries in every split; 'train' has: document; "
            "'test' has: document, summary",
        ),
    ],
)
def test_a_column_that_is_not_in_every_split_is_named_with_the_split_that_lacks_it(columns, named, message):
    with pytest.raises(ValueError, match=message):
        summarization_columns(splits_of(**columns), dataset_name=None, **named)


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ({"train": "document summary", "test": "id document"}, ("document", "summary")),
        ({"train": "long short", "test": "long"}, ("long", "short")),
        ({"test": "id document"}, ("document", None)),
        ({"test": "long short"}, ("long", None)),  # a second column of any name holds no summaries
        ({"test": "document abstract"}, ("document", "abstract")),
    ],
)
def test_an_unscored_split_may_lack_summaries(columns, chosen):
    assert summarization_columns(splits_of(**columns), dataset_name=None, unscored="test") == chosen


def test_an_unscored_split_has_the_texts_of_the_others():
    splits = splits_of(train="document summary", test="article")
    with pytest.raises(ValueError, match="text_column 'document' must be in every split; 'test' has only: article"):
        summarization_columns(splits, dataset_name=None, unscored="test")


def test_splits_may_differ_in_columns_that_are_not_needed(caplog):
    splits = splits_of(train="id text summary", validation="text summary best")
    with caplog.at_level(logging.INFO):
        assert summarization_columns(splits, dataset_name=None) == ("text", "summary")
    assert "ignoring columns that some splits lack: id, best" in caplog.text
    assert summarization_columns(splits_of(train="extra long short", test="long short"), dataset_name=None) == (
        "long",
        "short",
    )


EMPTY = {"text": ["a", "", None, "d", "e"], "summary": ["A", "B", "C", " \n\u3000", "E"], "n": range(5)}


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_a_row_without_text_is_refused_with_split_column_and_row(name):
    with pytest.raises(
        ValueError,
        match=rf"split '{name}' must hold text in every row; 3 of 5 rows do not: 'text' of row 2, 'text' of row 3, "
        r"'summary' of row 4 \(the first row is 1\)\. drop_empty_rows drops such rows",
    ):
        check_texts(Dataset.from_dict(EMPTY), ("text", "summary"), name=name)


def test_blank_text_is_text_to_a_language_model():
    split = Dataset.from_dict({"text": ["a", "", " "]})
    assert check_texts(split, ["text"], name="train", may_be_blank=True) is split
    missing = Dataset.from_dict({"text": ["a", "", None]})
    with pytest.raises(ValueError, match=r"1 of 3 rows do not: 'text' of row 3 "):
        check_texts(missing, ["text"], name="train", may_be_blank=True)
    assert check_texts(missing, ["text"], name="train", may_be_blank=True, drop_empty=True)["text"][:] == ["a", ""]


def test_the_column_of_running_text():
    both = {"train": {"id": True, "text": True, "more": True}, "test": {"text": True, "more": True}}
    assert text_column(both) == "text"
    assert text_column(both, "more") == "more"
    assert text_column({"train": {"id": True, "label": False, "body": True}}) == "body"
    with pytest.raises(ValueError, match=r"text_column must be one of .*: text, more; got 'id'"):
        text_column(both, "id")
    with pytest.raises(ValueError, match=r"text_column must be one of the columns of every split: a, b$"):
        text_column({"train": {"a": True, "b": True}})


def test_rows_without_text_can_be_dropped_and_are_counted(caplog):
    split = Dataset.from_dict(EMPTY)
    with caplog.at_level(logging.WARNING):
        kept, again = (check_texts(split, ("text", "summary"), name="train", drop_empty=True) for _ in range(2))
    assert kept["n"][:] == [0, 4]
    assert kept._fingerprint == again._fingerprint  # what is cached for these rows is found again
    assert (
        "train: dropped 3 of 5 rows: 'text' of row 2, 'text' of row 3, 'summary' of row 4 (the first row is 1)"
        in caplog.text
    )


def test_only_the_first_rows_without_text_are_named():
    split = Dataset.from_dict({"text": ["a"] * 2000, "summary": ["A"] * 990 + [""] * 1010})
    with pytest.raises(ValueError, match=r"1010 of 2000 rows do not: .* 'summary' of row 995, \.\.\. \(the first"):
        check_texts(split, ("text", "summary"), name="train")


@pytest.mark.parametrize("drop_empty", [False, True])
def test_a_complete_split_is_returned_as_it_is(caplog, drop_empty):
    split = Dataset.from_dict({"text": ["a"], "summary": ["A"]})
    assert check_texts(split, ("text", "summary"), name="train", drop_empty=drop_empty) is split
    assert not caplog.text


@pytest.mark.parametrize(("values", "drop_empty"), [(["", None], True), ([None, None], True), ([], True), ([], False)])
def test_a_split_without_any_text_is_refused(values, drop_empty):
    split = Dataset.from_dict({"text": ["a"] * len(values), "summary": values})
    with pytest.raises(ValueError, match=r"split 'validation' must hold at least one row with text in .* none of"):
        check_texts(split, ("text", "summary"), name="validation", drop_empty=drop_empty)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([None, 7], r"row 2 \(the first row is 1\) holds int: 7"),
        ([["a"], ["b"]], r"row 1 \(the first row is 1\) holds list: \['a'\]"),
    ],
)
def test_a_value_that_is_no_text_is_named_with_its_row(values, found):
    split = Dataset.from_dict({"text": ["a", "b"], "summary": values})
    with pytest.raises(ValueError, match=rf"column 'summary' of split 'train' must hold text; {found}"):
        check_texts(split, ("text", "summary"), name="train")
