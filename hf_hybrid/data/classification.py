"""Read the data of a sentence classifier: GLUE's tasks, columns of sentences and labels, and label ids."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_hybrid.data.columns import IDENTIFIER, is_text
from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = [
    "GLUE_TASKS",
    "GlueTask",
    "Label",
    "Labels",
    "find_labels",
    "is_unlabelled",
    "label_column",
    "read_labels",
    "sentence_columns",
]

Label = str | int | float | None
"""A label as it stands in the data; None where it is missing."""

_NAMED_ROWS = 5  # rows listed in a message


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE (Wang et al. 2019).

    Attributes:
        columns: Sentence columns of the Hub's dataset.
        labels: Label names by id; empty for regression.
        tsv_columns: Sentence columns of GLUE's own TSV files, where they differ.
        tsv_header: Columns of these files, where they lack a header line.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    tsv_columns: tuple[str, ...] = ()
    tsv_header: tuple[str, ...] | None = None


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE_TASKS: dict[str, GlueTask] = {
    "cola": GlueTask(
        ("sentence",), ("unacceptable", "acceptable"), tsv_header=("source", "label", "mark", "sentence")
    ),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), tsv_columns=_SENTENCES),
    "mrpc": GlueTask(_SENTENCES, ("not_equivalent", "equivalent"), tsv_columns=("#1 String", "#2 String")),
    "qnli": GlueTask(("question", "sentence"), _ENTAILMENT),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate")),
    "rte": GlueTask(_SENTENCES, _ENTAILMENT),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "stsb": GlueTask(_SENTENCES, ()),
    "wnli": GlueTask(_SENTENCES, ("not_entailment", "entailment")),
}
"""The nine tasks by their names on the Hub."""

_PAIRS = (*dict.fromkeys(task.columns for task in GLUE_TASKS.values() if len(task.columns) == 2),)
_LABEL_NAMES = ("label", "labels", "gold_label", "score", "is_duplicate", "Quality", "target", "class", "category")


def sentence_columns(
    dataset: "DatasetDict", *, task: str | None, label: str | None, named: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the column of the sentence, or the two columns of a pair.

    The user's choice comes first, then the task's columns, named as on the Hub or in GLUE's own files. Without a
    task: the pair of columns of any GLUE task, or else the text columns that are neither label nor identifier, if
    there are one or two.

    Args:
        dataset: The splits.
        task: A key of `GLUE_TASKS`, or None.
        label: The label column.
        named: The user's choice.

    Raises:
        ValueError: A split lacks a column, there are more than two, or the choice is not clear.
    """
    first = next(iter(dataset.values()))
    everywhere = [name for name in first.column_names if all(name in rows.column_names for rows in dataset.values())]
    there = f"; the columns of every split are: {', '.join(everywhere)}"
    if named is not None:
        for name in named:
            if name not in everywhere:
                raise ValueError(
                    f"text_column_names must be columns of every split; got {name!r}.{did_you_mean(name, everywhere)}"
                    f"{there}"
                )
        if len(set(named)) != len(named) or len(named) > 2 or label in named:
            raise ValueError(
                f"text_column_names must be one or two columns other than the label {label!r}; got {', '.join(named)}"
            )
        return tuple(named)
    known = _PAIRS if task is None else tuple(filter(None, (GLUE_TASKS[task].columns, GLUE_TASKS[task].tsv_columns)))
    for columns in known:
        if set(columns) <= set(everywhere):
            return columns
    if task is not None:
        wanted = " or ".join(", ".join(columns) for columns in known)
        raise ValueError(f"task_name {task} must have the columns {wanted} (or name text_column_names){there}")
    texts = [
        name
        for name in everywhere
        if name != label and is_text(first.features[name]) and not IDENTIFIER.fullmatch(name)
    ]
    if not 1 <= len(texts) <= 2:
        found = f"got {', '.join(texts)}" if texts else "got none"
        raise ValueError(f"text_column_names must say which one or two columns of text are classified; {found}{there}")
    return tuple(texts)


def label_column(dataset: "DatasetDict", *, needed: Sequence[str], named: str | None = None) -> str | None:
    """Return the name of the label column.

    Args:
        dataset: The splits.
        needed: Splits that must have labels.
        named: The user's choice; when None, a column with a usual name (``label``, ``score``, ...).

    Returns:
        The name; None if no split has or needs labels.

    Raises:
        ValueError: A split that needs the column lacks it.
    """
    splits = [split for split in needed if split in dataset] or list(dataset)
    columns = list(dataset[splits[0]].column_names)
    column = named if named is not None else next((name for name in _LABEL_NAMES if name in columns), None)
    if column is None and not needed:
        return None
    for split in needed:
        names = dataset[split].column_names
        if column is None or column not in names:
            wanted = f"a column {column!r}" if column else "a column such as 'label'"
            raise ValueError(
                f"split {split!r} must hold labels in {wanted} (label_column_name names another); it has: "
                f"{', '.join(names)}.{did_you_mean(column, names) if column else ''}"
            )
    return column


def read_labels(split: "Dataset", column: str, *, name: str) -> list[Label]:
    """Return the labels of a split: names, integers or other numbers, and None where one is missing.

    Args:
        split: Rows.
        column: The label column.
        name: The split's name, for messages.

    Raises:
        ValueError: The column holds other values.
    """
    from datasets import ClassLabel

    feature = split.features[column]
    values = split.with_format(None)[column][:]
    if isinstance(feature, ClassLabel):
        return [None if value is None or value < 0 else feature.names[value] for value in values]
    labels: list[Label] = []
    for number, value in enumerate(values, start=1):
        if isinstance(value, bool):
            labels.append(str(value).lower())
        elif isinstance(value, str):
            labels.append(value.strip() or None)
        elif isinstance(value, float) and math.isnan(value):
            labels.append(None)
        elif value is None or isinstance(value, int | float):
            labels.append(value)
        else:
            raise ValueError(
                f"column {column!r} of split {name!r} must hold labels, which are text or numbers; row {number} (the "
                f"first row is 1) holds {type(value).__name__}: {str(value)[:80]}"
            )
    return labels


def is_unlabelled(labels: Sequence[Label]) -> bool:
    """Return whether every label is missing or -1, as in the Hub's test splits."""
    return all(label is None or label == -1 for label in labels)


@dataclass(frozen=True)
class Labels:
    """The labels of a dataset.

    Attributes:
        names: Their names by id; empty for regression.
        ids: Id of each label as it stands in the data.
    """

    names: tuple[str, ...]
    ids: Mapping[str | int | float, int] = field(default_factory=dict)

    @property
    def are_numbers(self) -> bool:
        """Whether the labels are numbers to predict (regression)."""
        return not self.names

    def encode(self, labels: Sequence[Label], *, name: str) -> list[int] | list[float]:
        """Return the ids of labels, or the numbers themselves for regression.

        Args:
            labels: Labels from `read_labels`.
            name: The split's name, for messages.

        Raises:
            ValueError: A label is missing or unknown.
        """
        rows = "(the first row is 1)"
        if missing := [row for row, label in enumerate(labels, start=1) if label is None]:
            raise ValueError(
                f"split {name!r} must hold a label in every row; {len(missing)} of {len(labels)} rows have none: row "
                f"{_few(missing)} {rows}"
            )
        if self.are_numbers:
            for row, label in enumerate(labels, start=1):
                if isinstance(label, str):
                    raise ValueError(
                        f"split {name!r} must hold a number as the label of every row; row {row} {rows} holds "
                        f"{label!r}"
                    )
            return [float(label) for label in labels]  # type: ignore[arg-type]
        keys = [label.casefold() if isinstance(label, str) else label for label in labels]
        if unknown := [row for row, key in enumerate(keys, start=1) if key not in self.ids]:
            known = _few([str(label) for label in self.ids], 20)
            raise ValueError(
                f"the labels of split {name!r} must be labels that the model learns ({known}); "
                f"{labels[unknown[0] - 1]!r} is not, in row {_few(unknown)} {rows}"
            )
        return [self.ids[key] for key in keys]  # type: ignore[index]


def _few(values: Sequence[object], count: int = _NAMED_ROWS) -> str:
    return ", ".join(map(str, values[:count])) + (", ..." if len(values) > count else "")


def find_labels(
    labels: Iterable[Label], *, name: str, names: Sequence[str] | None = None, task: str | None = None
) -> Labels:
    """Find the set of labels.

    Fractions, and all labels of STS-B, are numbers to predict. Integers and text are classes, in the order of the
    dataset's list of names or of the task, otherwise sorted.

    Args:
        labels: Labels from `read_labels`, usually of the training split.
        name: The split's name, for messages.
        names: The dataset's list of names, if it has one.
        task: A key of `GLUE_TASKS`, or None.

    Raises:
        ValueError: There is no label, text and numbers are mixed, or the task does not have a label.
    """
    found = {label.casefold() if isinstance(label, str) else label: label for label in labels if label is not None}
    if not found:
        raise ValueError(f"split {name!r} must hold labels; got none")
    texts = [label for label in found.values() if isinstance(label, str)]
    if task == "stsb" or (task is None and any(isinstance(label, float) for label in found)):
        if texts:
            raise ValueError(f"split {name!r} must hold numbers as labels; got {texts[0]!r}")
        return Labels(())
    if names is None and task is not None:
        names = GLUE_TASKS[task].labels
    if names is not None:
        ids: dict[str | int | float, int] = {label.casefold(): position for position, label in enumerate(names)}
        ids |= {position: position for position in range(len(names))}
        if (wrong := next((label for key, label in found.items() if key not in ids), None)) is not None:
            raise ValueError(
                f"the labels of split {name!r} must be {', '.join(names)} or 0 to {len(names) - 1}"
                f"{f', those of {task}' if task else ''}; got {wrong!r}"
            )
        return Labels(tuple(names), ids)
    if texts and len(texts) < len(found):
        raise ValueError(f"the labels of split {name!r} must be all text or all numbers; got both")
    order = sorted(found.items())  # type: ignore[type-var]
    return Labels(tuple(str(label) for _, label in order), {key: position for position, (key, _) in enumerate(order)})
