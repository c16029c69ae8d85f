import bz2
import csv
import gzip
import json
import lzma

import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from hf_hybrid.data.files import iterate_rows, read_table
from hf_hybrid.data.loading import load_raw_datasets

ROWS = [
    {"document": 'He said "yes, no".\nSecond line — naïve 日本 😀', "summary": "A"},
    {"document": "long " * 40_000, "summary": "NA"},
    {"document": "", "summary": "None"},
]


@pytest.fixture
def load(tmp_path):
    """Load files through a cache of the test's own."""

    def call(**kwargs):
        return load_raw_datasets(cache_dir=str(tmp_path / "cache"), **kwargs)

    return call


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def call(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return call


def as_csv(rows, path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.read_bytes()


def contents(kind, tmp_path):
    if kind == "csv":
        return as_csv(ROWS, tmp_path / "plain")
    if kind == "array":
        return json.dumps(ROWS, indent=1).encode()
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


@pytest.mark.parametrize(
    "compress", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
@pytest.mark.parametrize(
    ("name", "kind"), [("a.csv", "csv"), ("a.json", "lines"), ("a.jsonl", "lines"), ("a.json", "array")]
)
def test_every_format_gives_the_same_rows(load, write, tmp_path, name, kind, compress):
    suffix, pack = compress
    path = write(name + suffix, pack(contents(kind, tmp_path)))
    assert load(train_file=path)["train"].to_list() == ROWS


def test_tsv_takes_its_fields_as_they_are(load, write):
    path = write("a.tsv", 'text\tlabel\r\n"quoted" \t1\r\n\n, "open\t2')
    assert load(train_file=path)["train"].to_list() == [
        {"text": '"quoted" ', "label": 1},
        {"text": ', "open', "label": 2},
    ]


def test_tsv_without_a_header_line_is_given_names(load, write):
    names = ("source", "label", "mark", "sentence")
    path = write("a.tsv", "gj04\t1\t\tIt is.\ngj05\t0\t*\tIs it.\n")
    rows = load(train_file=path, tsv_header=names)["train"].to_list()
    assert rows[0] == {"source": "gj04", "label": 1, "mark": "", "sentence": "It is."}
    assert len(rows) == 2
    with_header = write("b.tsv", "index\tsentence\n0\tIt is.\n")
    assert load(test_file=with_header, tsv_header=names)["test"].to_list() == [{"index": 0, "sentence": "It is."}]
    named = write("c.tsv", "\t".join(names) + "\ngj04\t1\t\tIt is.\n")
    assert load(test_file=named, tsv_header=names)["test"].to_list() == rows[:1]


def test_running_text_is_rows_of_lines_for_those_who_ask(load, write):
    path = write("a.txt.gz", gzip.compress("one\n\ntwo é\r\nthree".encode()))
    for keep, expected in ((True, ["one\n", "\n", "two é\n", "three"]), (False, ["one", "", "two é", "three"])):
        rows = load(train_file=path, keep_linebreaks=keep)["train"]
        assert rows.column_names == ["text"]
        assert rows["text"][:] == expected
    with pytest.raises(ValueError, match=r"train_file must end in \.csv, \.tsv, \.json, \.jsonl, \.parquet, or"):
        load(train_file=path)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_file_of_a_folder_is_one_row_for_those_who_ask(load, tmp_path, streaming):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes("\ufeffone\r\ntwo \u00e9\n\n".encode())
    (folder / "b.txt").write_bytes(b"three")
    rows = load(dataset_name=str(folder), whole_text_files=True, streaming=streaming)["train"]
    assert [row["text"] for row in rows] == ["one\ntwo \u00e9\n\n", "three"]
    assert len(list(load(dataset_name=str(folder), streaming=streaming)["train"])) == 4  # lines
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.jsonl").write_text('{"text": "one"}\n')
    rows = load(dataset_name=str(tmp_path / "tables"), whole_text_files=True, streaming=streaming)["train"]
    assert list(rows) == [{"text": "one"}]


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "csv"), ("a.jsonl", "lines"), ("a.json", "array")])
def test_streams_have_the_rows_of_the_files(load, write, tmp_path, name, kind):
    path = write(name, contents(kind, tmp_path))
    stream = load(train_file=path, streaming=True)["train"]
    assert isinstance(stream, IterableDataset)
    assert list(stream) == list(stream) == ROWS


def test_a_stream_names_the_line_that_cannot_be_read(load, write):
    stream = iter(load(train_file=write("a.jsonl", '{"a": 1}\n{"a": \n'), streaming=True)["train"])
    assert next(stream) == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.jsonl', line 2: must be one JSON object on each line"):
        next(stream)


def test_saved_data_sets_are_streamed(load, tmp_path):
    DatasetDict({"train": Dataset.from_dict({"a": [1, 2]})}).save_to_disk(tmp_path / "saved")
    stream = load(dataset_name=str(tmp_path / "saved"), streaming=True)["train"]
    assert isinstance(stream, IterableDataset)
    assert list(stream) == [{"a": 1}, {"a": 2}]


def test_more_splits_than_the_usual_three(load, write):
    splits = load(
        train_file=write("t.jsonl", '{"a": 1}'), files={"validation_mismatched_file": write("v.jsonl", '{"a": 2}')}
    )
    assert {name: rows["a"][:] for name, rows in splits.items()} == {"train": [1], "validation_mismatched": [2]}


def test_files_become_splits_and_may_differ_in_format_and_order(load, write):
    splits = load(
        train_file=write("t.jsonl", '{"a": "1x", "b": "2x"}\n\n{"a": "3x", "b": "4x"}\n'),
        validation_file=write("v.csv", "b,a\n5x,6x\n"),
        test_file=write("w.json", '[{"b": "7x", "a": "8x"}]'),
    )
    assert {name: splits[name].to_list() for name in splits} == {
        "train": [{"a": "1x", "b": "2x"}, {"a": "3x", "b": "4x"}],
        "validation": [{"b": "5x", "a": "6x"}],
        "test": [{"b": "7x", "a": "8x"}],
    }


def test_a_byte_order_mark_is_no_part_of_the_first_column(load, write):
    assert load(train_file=write("a.csv", b"\xef\xbb\xbfa,b\nx,y\n"))["train"].column_names == ["a", "b"]


def test_columns_of_numbers_in_csv_become_numbers(load, write):
    text = "sentence,label,score,mixed\nx,1,0.5,1\ny,,2,z\n"
    rows = load(train_file=write("a.csv", text))["train"].to_list()
    assert rows == [
        {"sentence": "x", "label": 1, "score": 0.5, "mixed": "1"},
        {"sentence": "y", "label": None, "score": 2.0, "mixed": "z"},
    ]


@pytest.mark.parametrize("text", ["++5", "+-6", "-+7", "+", "5+", "1_000", "0x10"])
def test_only_one_sign_belongs_to_a_number_in_csv(load, write, text):
    path = write("a.csv", f"number,text\n+5,{text}\n-6,1\n")
    assert load(train_file=path)["train"].to_list() == [{"number": 5, "text": text}, {"number": -6, "text": "1"}]


def test_csv_headers_may_follow_blank_lines_and_span_lines(load, write):
    path = write("a.csv", '\n\r\n a ,"b\nc"\n\nx,"y\nz"\n')
    assert load(train_file=path)["train"].to_list() == [{"a": "x", "b\nc": "y\nz"}]


def test_only_a_line_feed_ends_a_line_of_tsv(load, write):
    path = write("a.tsv", "\na\tb\nx\r1\ty\r\n")
    assert load(train_file=path)["train"].to_list() == [{"a": "x\r1", "b": "y"}]


def test_long_fields_are_read_from_several_csv_streams_at_once(load, write):
    """The csv module's limit belongs to the whole process: no stream may lower it for another, or leave it raised."""
    limit = csv.field_size_limit()
    field = "x" * (2 * limit)
    paths = [write(f"{name}.csv", "a\n" + f"{field}\n" * 3) for name in "ab"]
    first, second = (iter(load(train_file=path, streaming=True)["train"]) for path in paths)
    assert next(first) == next(second) == {"a": field}
    assert csv.field_size_limit() == limit
    assert list(first) == list(second) == [{"a": field}] * 2


def test_json_keeps_types_and_missing_keys_are_null(load, write):
    text = '{"a": "2020-01-01", "b": ["x"], "n": 1}\n{"a": null, "b": [], "n": 2.5, "c": {"k": true}}\n'
    assert load(train_file=write("a.jsonl", text))["train"].to_list() == [
        {"a": "2020-01-01", "b": ["x"], "n": 1.0, "c": None},
        {"a": None, "b": [], "n": 2.5, "c": {"k": True}},
    ]


def test_many_rows_keep_their_order_and_late_columns(load, write):
    lines = [json.dumps({"i": i, "late": "x"} if i > 2000 else {"i": i}) for i in range(2500)]
    split = load(train_file=write("a.jsonl", "\n".join(lines)))["train"]
    assert split["i"][:] == list(range(2500))
    assert split["late"][1999:2002] == [None, None, "x"]


def test_a_changed_file_is_read_again(load, write):
    assert load(train_file=write("a.csv", "a,b\nx,y\n"))["train"].to_list() == [{"a": "x", "b": "y"}]
    assert load(train_file=write("a.csv", "a,b\nx,changed\n"))["train"].to_list() == [{"a": "x", "b": "changed"}]


BAD_FILES = {
    "empty": ("a.jsonl", "", r"train_file must hold at least one row; got '.*a\.jsonl', which is empty"),
    "empty when unpacked": ("a.jsonl.gz", gzip.compress(b""), r"must hold at least one row; got none"),
    "blank": ("a.jsonl", "\n\n", r"train_file '.*a\.jsonl' must hold at least one row; got none"),
    "header only": ("a.csv", "a,b\n", r"train_file '.*a\.csv' must hold at least one row; got none"),
    "empty array": ("a.json", "[]", r"must hold at least one row; got none"),
    "extension": ("a.txt", "x", r"train_file must end in \.csv, \.tsv, .*, \.parquet, or .*; got '.*a\.txt'"),
    "quoted line break in tsv": (
        "a.tsv",
        'a\tb\n"x\ny"\tz\n',
        r"a\.tsv', line 2: must have the header's 2 columns \(a, b\); got 1",
    ),
    "nameless column of tsv": ("a.tsv", "a\t\nx\ty\n", r"line 1: the header must name each column once"),
    "close extension": ("a.jsnl.gz", "x", r"train_file must end in .*\. Did you mean '\.jsonl?'\?"),
    "no extension": ("a", "x", r"train_file must end in"),
    "malformed line": ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl', line 2: must be one JSON object on each line"),
    "pretty object": (
        "a.json",
        '{\n"a": 1\n}',
        r"line 1: must be one JSON object on each line, or the file one array",
    ),
    "malformed array": ("a.json", '[\n{"a": 1},\n{"a" 2}]', r"line 3: must be valid JSON; Expecting ':' delimiter"),
    "not an object": ("a.jsonl", '{"a": 1}\n3\n', r"line 2: must be a JSON object such as \{\.\.\.\}; got int"),
    "malformed on one line": ("a.json", '\n[{"a": 1}, {"a" 2}]', r"line 2: .*; Expecting ':' delimiter \(column 17\)"),
    "no comma in an array": ("a.json", '[{"a": 1}\n {"a": 2}]', r"line 2: .*; Expecting ',' delimiter \(column 2\)"),
    "comma too many": ("a.json", '[{"a": 1},\n]', r"line 2: must be valid JSON; Expecting value \(column 1\)"),
    "open array": ("a.json", '[{"a": 1}\n', r"line 2: must be valid JSON; Expecting ',' delimiter \(column 1\)"),
    "only a bracket": ("a.json", "[", r"line 1: must be valid JSON; Expecting value \(column 2\)"),
    "two arrays": ("a.json", '[{"a": 1}]\n[]', r"line 2: must be valid JSON; Extra data \(column 1\)"),
    "more after no rows": ("a.json", "[]\n{}", r"line 2: must be valid JSON; Extra data \(column 1\)"),
    "list in an array": (
        "a.json",
        '\n[{"a":\n1},\n[\n2]]',
        r"a\.json', row 2: must be a JSON object such as \{\.\.\.\}; got list",
    ),
    "mixed types in an array": (
        "a.json",
        '[\n{"a": 1},\n\n{"b": "1\\n2",\n"a": 2}, {"a": "x"}]',
        r"a\.json', row 3: column 'a' must hold values of one kind; got text after a number",
    ),
    "lone surrogate in an array": (
        "a.json",
        '[\n{"a": "x"},\n{"a": "\\ud800"}\n]',
        r"a\.json', row 2: column 'a' must hold values that Arrow can store as one type; .*surrogates",
    ),
    "mixed types": (
        "a.jsonl",
        '{"a": 1}\n\n{"a": "x"}\n',
        r"a\.jsonl', line 3: column 'a' must hold values of one kind; got text after a number",
    ),
    "true after a fraction": (
        "a.jsonl",
        '{"a": 1.5}\n{"a": true}\n',
        r"line 2: column 'a' must hold values of one kind; got true or false after a number",
    ),
    "true after a fraction in a list": (
        "a.jsonl",
        '{"a": [0.5]}\n{"a": [1, true]}\n',
        r"line 2: column 'a' must hold values of one kind; got true or false after a number inside it",
    ),
    "true after a fraction in an object": (
        "a.jsonl",
        '{"a": [{"k": 0.5}]}\n{"a": [{"l": true}]}\n{"a": [{"k": true}]}\n',
        r"line 3: column 'a' must hold values of one kind; got true or false after a number inside it",
    ),
    "mixed types after many rows": (
        "a.jsonl",
        '{"a": 1}\n' * 1500 + '{"a": true}\n{"a": 1}\n',
        r"a\.jsonl', line 1501: column 'a' must hold values of one kind; got true or false after a number",
    ),
    "fraction after a number that is none": (
        "a.jsonl",
        '{"a": 9007199254740993}\n' * 1000 + '{"a": 0.5}\n' * 2,
        r"line 1001 to line 1002: a column must hold .* store as one type; Integer value 9007199254740993 not in",
    ),
    "lone surrogate": (
        "a.jsonl",
        '{"a": "x"}\n{"a": "\\ud800"}\n{"a": "x"}',
        r"a\.jsonl', line 2: column 'a' must hold values that Arrow can store as one type; .*surrogates",
    ),
    "huge number": (
        "a.jsonl",
        '{"a": 1}\n{"a": 99999999999999999999999}',
        r"a\.jsonl', line 2: column 'a' must .*; Python int too large",
    ),
    "short row": (
        "a.csv",
        'a,b\n"x\ny",z\nx\n',
        r"a\.csv', line 4: must have the header's 2 columns \(a, b\); got 1 \(in CSV, put double quotes around text",
    ),
    "long row": ("a.csv", "a,b\nx,y,z\n", r"line 2: must have the header's 2 columns \(a, b\); got 3"),
    "repeated column": ("a.csv", "a,a\nx,y\n", r"line 1: the header must name each column once; got \['a', 'a'\]"),
    "nameless column": ("a.csv", "a,\nx,y\n", r"line 1: the header must name each column once"),
    "repeated column after a blank line": ("a.csv", "\na,a\nx,y\n", r"line 2: the header must name each column once"),
    "open quote": ("a.csv", 'a,b\nx,y\n"x,y\n', r"a\.csv', line 3: must be valid CSV; unexpected end of data"),
    "open quote in the last column": (
        "a.csv",
        'a,b\nx,"y\nz,w\nq,r',
        r"a\.csv', line 2: must be valid CSV; unexpected end of data",
    ),
    "text after a quote": ("a.csv", 'a,b\n"x"y,z\n', r"line 2: must be valid CSV; ',' expected after '\"'"),
    "not utf-8": ("a.jsonl", b'{"a": "x"}\n{"a": "\xff"}', r"line 2: must be UTF-8 text; invalid start byte"),
    "not utf-8 csv": ("a.csv", b"a,b\nx,\xff\n", r"line 2: must be UTF-8 text; invalid start byte"),
    "binary": ("a.csv", b"PK\x03\x04\0\0", r"line 1: must be text; got binary data"),
    "binary after the header of csv": ("a.csv", b"a,b\nx,y\nx,\0\n", r"line 3: must be text; got binary data"),
    "binary after the header of tsv": ("a.tsv", b"a\tb\nx\ty\nx\t\0\n", r"line 3: must be text; got binary data"),
    "not gzip": ("a.jsonl.gz", b'{"a": 1}', r"a\.jsonl\.gz' cannot be read: Not a gzipped file"),
    "not xz": ("a.jsonl.xz", b'{"a": 1}', r"must be a complete \.xz file; it cannot be read"),
    "not bz2": ("a.jsonl.bz2", b'{"a": 1}', r"a\.jsonl\.bz2' cannot be read: Invalid data stream"),
    "cut gzip": (
        "a.jsonl.gz",
        gzip.compress(b'{"a": 1}\n' * 99)[:-9],
        r"must be a complete \.gz file; it cannot be read",
    ),
    "cut xz": (
        "a.jsonl.xz",
        lzma.compress(b'{"a": 1}\n' * 99)[:-9],
        r"must be a complete \.xz file; it cannot be read",
    ),
    "damaged gzip": ("a.json.gz", b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 9, r"must be a complete \.gz file"),
}


def test_an_array_may_be_laid_out_in_any_way(load, write):
    text = ' [\r\n\t{"a": "]", "b": [1]} ,{"a":"},{"}\n,\n{}]\n \n'
    assert load(train_file=write("a.json", text))["train"].to_list() == [
        {"a": "]", "b": [1]},
        {"a": "},{", "b": None},
        {"a": None, "b": None},
    ]


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_file_line_and_rule(load, write, case):
    name, content, message = BAD_FILES[case]
    with pytest.raises(ValueError, match=message):
        load(train_file=write(name, content))


def test_a_missing_file_is_named_with_the_closest_there_is(load, write, tmp_path):
    write("train.jsonl", '{"a": 1}')
    with pytest.raises(
        ValueError,
        match=r"train_file must be an existing file; got '.*trian\.jsonl' \(no such file\)\. Did you mean 'train",
    ):
        load(train_file=str(tmp_path / "trian.jsonl"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=r"test_file must be an existing file; got '.*folder\.csv' \(a folder\)"):
        load(test_file=str(tmp_path / "folder.csv"))


def test_a_missing_file_is_found_before_another_is_read(load, write, tmp_path):
    with pytest.raises(ValueError, match="validation_file must be an existing file"):
        load(train_file=write("a.jsonl", "not json"), validation_file=str(tmp_path / "b.jsonl"))


def test_files_may_differ_in_columns(load, write):
    splits = load(
        train_file=write("t.jsonl", '{"a": "1x", "b": "2x"}'),
        validation_file=write("v.jsonl", '{"id": 3, "b": "4x", "a": "5x", "more": ["6x"]}'),
    )
    assert splits["train"].to_list() == [{"a": "1x", "b": "2x"}]
    assert splits["validation"].to_list() == [{"id": 3, "b": "4x", "a": "5x", "more": ["6x"]}]


def test_files_must_have_a_column_in_common(load, write):
    with pytest.raises(
        ValueError,
        match=r"all files must have a column in common; train_file '.*t\.csv' has: a, b; "
        r"test_file '.*v\.csv' has: c, d",
    ):
        load(train_file=write("t.csv", "a,b\nx,y\n"), test_file=write("v.csv", "c,d\nx,y\n"))


def test_something_must_be_named_but_not_two_things(load, write):
    with pytest.raises(ValueError, match=r"a dataset must be named: dataset_name .*embedded:docstrings"):
        load()
    with pytest.raises(ValueError, match="dataset_name and train_file must not be given together"):
        load(dataset_name="xsum", train_file=write("a.csv", "a,b\nx,y\n"))


def test_embedded_names_are_checked(load):
    with pytest.raises(ValueError, match=r"got 'embedded:docstring'\. Did you mean 'embedded:docstrings'\?"):
        load(dataset_name="embedded:docstring")
    with pytest.raises(ValueError, match="dataset_config_name must be None for 'embedded:docstrings'"):
        load(dataset_name="embedded:docstrings", dataset_config_name="en")


def test_an_embedded_corpus_is_loaded(load, package, monkeypatch):
    from hf_hybrid.data import sources

    monkeypatch.setattr(sources, "DEFAULT_PACKAGES", {package: "orchard"})
    splits = load(dataset_name="embedded:modules")
    assert list(splits) == ["train", "validation", "test"]
    assert splits["train"][0]["source"].startswith("orchard.")


def test_a_folder_of_data_files(load, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"a": "x"}\n')
    (folder / "test.jsonl").write_text('{"a": "y"}\n')
    splits = load(dataset_name=str(folder))
    assert {name: splits[name]["a"][:] for name in splits} == {"train": ["x"], "test": ["y"]}


def test_a_folder_written_by_save_to_disk(load, tmp_path):
    rows = Dataset.from_dict({"a": ["x"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"validation": rows}).save_to_disk(str(tmp_path / "many"))
    assert list(load(dataset_name=str(tmp_path / "one"))) == ["train"]
    assert list(load(dataset_name=str(tmp_path / "many"))) == ["validation"]


def test_an_empty_folder_is_named(load, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"dataset_name must be a folder that datasets can read; got '.*nothing'"):
        load(dataset_name=str(tmp_path / "nothing"))


def test_a_file_as_dataset_name_is_sent_to_train_file(load, write):
    with pytest.raises(ValueError, match=r"got the file '.*a\.jsonl': give it as train_file"):
        load(dataset_name=write("a.jsonl", '{"a": 1}'))


def test_a_name_that_cannot_be_reached_says_what_else_there_is(load, monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError(f"Couldn't reach {args[0]!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError,
        match=r"Hub dataset that can be reached .* one of embedded:docstrings, embedded:modules, .*, which need no "
        r"network; got 'docstrings' \(Couldn't reach 'docstrings' on the Hub\)\. Did you mean 'embedded:docstrings'\?",
    ):
        load(dataset_name="docstrings")


def test_hub_names_reach_datasets_unchanged(load, monkeypatch, tmp_path):
    import datasets

    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        return DatasetDict()

    monkeypatch.setattr(datasets, "load_dataset", record)
    load(dataset_name="abisee/cnn_dailymail", dataset_config_name="3.0.0", token="secret")
    ((name, arguments),) = calls
    assert name == ("abisee/cnn_dailymail", "3.0.0")
    assert arguments == {"cache_dir": str(tmp_path / "cache"), "token": "secret", "streaming": False}


def test_a_configuration_that_a_folder_lacks_is_one_error(load, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a", "summary": "b"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"dataset_name must be a folder that datasets can read.*nope"):
        load(dataset_name=str(folder), dataset_config_name="nope")


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder"])
def test_a_path_that_does_not_exist_is_one_error(load, name):
    with pytest.raises(ValueError, match=rf"an existing folder.*got {name!r}"):
        load(dataset_name=name)


@pytest.mark.parametrize("suffix", [".parquet", ".parquet.gz"])
def test_parquet(suffix, tmp_path):
    rows = {"text": ["one", "two\nlines", None], "label": [0, 1, 1], "parts": [["a"], [], ["b", "c"]]}
    plain = tmp_path / "plain.parquet"
    pyarrow.parquet.write_table(pa.table(rows), plain)
    file = tmp_path / f"data{suffix}"
    file.write_bytes(gzip.compress(plain.read_bytes()) if suffix.endswith("gz") else plain.read_bytes())
    assert read_table("train_file", str(file)).to_pydict() == rows
    assert list(iterate_rows("train_file", str(file))) == pa.table(rows).to_pylist()
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(plain.read_bytes()[:-10])
    for read in (read_table, lambda *place: list(iterate_rows(*place))):
        with pytest.raises(ValueError, match=r"train_file '.*broken\.parquet' must be a Parquet file; it cannot be"):
            read("train_file", str(broken))


def test_the_index_that_pandas_writes_is_left_out(tmp_path):
    file = tmp_path / "data.csv"
    pandas.DataFrame({"text": ["a", "b"], "label": [1, 0]}).to_csv(file)
    assert file.read_text(encoding="utf-8").startswith(",text,label\n0,a,1\n")
    assert read_table("train_file", str(file)).to_pydict() == {"text": ["a", "b"], "label": [1, 0]}
    assert list(iterate_rows("train_file", str(file)))[1] == {"text": "b", "label": "0"}
    file.write_text("a,,b\n1,2,3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: the header must name each column once"):
        read_table("train_file", str(file))


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_inside_an_object_are_pointed_at(indent, tmp_path):
    file = tmp_path / "data.json"
    rows = [{"text": "a"}, {"text": "b"}]
    file.write_text(json.dumps({"version": "1.0", "data": rows}, indent=indent), encoding="utf-8")
    message = "must be one JSON object on each line, or the file one array of objects.*"
    with pytest.raises(ValueError, match=message + "The file is one object whose field 'data' holds 2 rows"):
        read_table("train_file", str(file))
    file.write_text(json.dumps({"text": "a", "parts": [{"of": 1}], "others": [{"of": 2}]}), encoding="utf-8")
    assert read_table("train_file", str(file)).num_rows == 1
