import math

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_hybrid.data.classification import (
    GLUE_TASKS,
    find_labels,
    is_unlabelled,
    label_column,
    read_labels,
    sentence_columns,
)


def splits_of(**columns):
    return DatasetDict(
        {split: Dataset.from_dict({name: ["x"] for name in names.split()}) for split, names in columns.items()}
    )


def test_the_nine_tasks():
    assert sorted(GLUE_TASKS) == ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
    assert {len(task.columns) for name, task in GLUE_TASKS.items() if name not in ("cola", "sst2")} == {2}
    assert {name for name, task in GLUE_TASKS.items() if len(task.labels) != 2} == {"mnli", "stsb"}


@pytest.mark.parametrize(
    ("task", "columns", "expected"),
    [
        *[(name, f"idx {' '.join(task.columns)} label", task.columns) for name, task in GLUE_TASKS.items()],
        ("mnli", "index sentence1_parse sentence1 sentence2 gold_label", ("sentence1", "sentence2")),
        (None, "id premise hypothesis label", ("premise", "hypothesis")),
        (None, "idx review label", ("review",)),
        (None, "guid first second label", ("first", "second")),
    ],
)
def test_columns_of_sentences(task, columns, expected):
    assert sentence_columns(splits_of(train=columns), task=task, label=columns.split()[-1]) == expected


def test_columns_of_a_file_of_glue():
    rows = Dataset.from_list([{"Quality": 1, "#1 ID": 5, "#2 ID": 6, "#1 String": "a", "#2 String": "b"}])
    splits = DatasetDict(train=rows)
    assert label_column(splits, needed=["train"]) == "Quality"
    assert sentence_columns(splits, task="mrpc", label="Quality") == ("#1 String", "#2 String")


def test_columns_that_are_named():
    splits = splits_of(train="a b c label", test="b a")
    assert sentence_columns(splits, task=None, label="label", named=["b"]) == ("b",)
    assert sentence_columns(splits, task="rte", label="label", named=["b", "a"]) == ("b", "a")
    with pytest.raises(ValueError, match=r"must be columns of every split; got 'c'.*are: a, b"):
        sentence_columns(splits, task=None, label="label", named=["c"])
    with pytest.raises(ValueError, match="must be one or two columns other than the label 'a'; got a, b"):
        sentence_columns(splits, task=None, label="a", named=["a", "b"])


def test_columns_that_cannot_be_chosen():
    with pytest.raises(ValueError, match=r"task_name rte must have the columns sentence1, sentence2 .*are: a, label"):
        sentence_columns(splits_of(train="a label"), task="rte", label="label")
    with pytest.raises(ValueError, match=r"must say which one or two columns of text are classified; got a, b, c;"):
        sentence_columns(splits_of(train="a b c label"), task=None, label="label")
    with pytest.raises(ValueError, match=r"must say which .*; got none; the columns of every split are: idx, label"):
        sentence_columns(splits_of(train="idx label"), task=None, label="label")


def test_the_column_of_labels():
    splits = splits_of(train="a is_duplicate", validation="a is_duplicate", test="a")
    assert label_column(splits, needed=["train", "validation"]) == "is_duplicate"
    assert label_column(splits_of(test="a"), needed=[]) is None
    with pytest.raises(ValueError, match=r"split 'test' must hold labels in a column 'is_duplicate' .*; it has: a\."):
        label_column(splits, needed=["train", "test"])
    with pytest.raises(ValueError, match=r"split 'train' must hold labels in a column such as 'label' .*has: a\."):
        label_column(splits_of(train="a"), needed=["train"])


def test_labels_are_read_as_what_they_are():
    def read(values, feature=None):
        rows = Dataset.from_dict({"label": values}, Features({"label": feature}) if feature else None)
        return read_labels(rows, "label", name="train")

    assert read(["a ", "", None]) == ["a", None, None]
    assert read([1, None, -1]) == [1, None, -1]
    assert read([0.5, math.nan, 2.0]) == [0.5, None, 2.0]
    assert read([True, False]) == ["true", "false"]
    assert read([1, 0, -1], ClassLabel(names=["no", "yes"])) == ["yes", "no", None]
    assert read([2.5], Value("float32")) == [2.5]
    with pytest.raises(ValueError, match=r"column 'label' of split 'train' must hold labels.*row 1 .* list: \['a'\]"):
        read([["a"]])


def test_rows_without_labels():
    assert is_unlabelled([-1, None, -1])
    assert not is_unlabelled([-1, 0])


@pytest.mark.parametrize(
    ("labels", "arguments", "names", "ids"),
    [
        (["b", "a", "B"], {}, ("a", "B"), {"a": 0, "b": 1}),
        ([3, 10, 2, None], {}, ("2", "3", "10"), {2: 0, 3: 1, 10: 2}),
        ([-1, 1], {}, ("-1", "1"), {-1: 0, 1: 1}),
        ([0.5, 2], {}, (), {}),
        ([1.0, 0.0], {}, (), {}),
        ([5, 0], {"task": "stsb"}, (), {}),
        (["yes"], {"names": ["no", "yes"]}, ("no", "yes"), {"no": 0, "yes": 1, 0: 0, 1: 1}),
        (
            ["Not_Entailment"],
            {"task": "rte"},
            ("entailment", "not_entailment"),
            {"entailment": 0, "not_entailment": 1, 0: 0, 1: 1},
        ),
        ([1.0, 0.0], {"task": "cola"}, ("unacceptable", "acceptable"), None),
    ],
)
def test_labels_that_there_are(labels, arguments, names, ids):
    found = find_labels(labels, name="train", **arguments)
    assert found.names == names
    assert found.are_numbers == (not names)
    if ids is not None:
        assert found.ids == ids
    present = [label for label in labels if label is not None]
    expected = present if not names else [found.ids[str(x).casefold() if isinstance(x, str) else x] for x in present]
    assert found.encode(present, name="train") == expected


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ([None], {}, "split 'train' must hold labels; got none"),
        (["a", 1], {}, "the labels of split 'train' must be all text or all numbers; got both"),
        ([0.5, "a"], {}, "split 'train' must hold numbers as labels; got 'a'"),
        (["good"], {"task": "stsb"}, "split 'train' must hold numbers as labels; got 'good'"),
        ([2], {"task": "rte"}, "must be entailment, not_entailment or 0 to 1, those of rte; got 2"),
        ([0.5], {"task": "rte"}, "those of rte; got 0.5"),
        (["c"], {"names": ["a", "b"]}, "must be a, b or 0 to 1; got 'c'"),
    ],
)
def test_labels_that_cannot_be(labels, arguments, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        find_labels(labels, name="train", **arguments)
    assert message in str(raised.value)


def test_labels_of_another_split():
    labels = find_labels(["no", "yes"], name="train")
    assert labels.encode(["YES", "no"], name="test") == [1, 0]
    with pytest.raises(ValueError, match=r"split 'test' must hold a label in every row; 1 of 2 rows have none: row 2"):
        labels.encode(["no", None], name="test")
    with pytest.raises(ValueError, match=r"split 'test' must be labels .*\(no, yes\); 'maybe' is not, in row 1, 3 \("):
        labels.encode(["maybe", "no", "Maybe"], name="test")
    with pytest.raises(ValueError, match=r"split 'test' must hold a number .*; row 2 .* holds 'x'"):
        find_labels([0.5], name="train").encode([1, "x"], name="test")
