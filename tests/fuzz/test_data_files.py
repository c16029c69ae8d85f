"""A data file is read, or refused in one line that names the flag, the file and what is wrong, and nothing else."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_hybrid.data.files import TEXT_EXTENSIONS, read_table
from hf_hybrid.data.loading import load_raw_datasets
from hf_hybrid.training import clm, glue, summarization

from .fuzzing import examples, no_hang

COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
LONGEST_MESSAGE = 1500  # characters: a message is read by a person
PIECES = [
    # rows
    b'{"text": "a", "summary": "b"}\n', b'{"text": 1}\n', b'{"text": null}\n', b'{"text": true}\n', b'{"text": 1.5}\n',
    b'{"text": []}\n', b'{"text": {}}\n', b'{"text": [1, "a"]}\n', b'{"text": {"a": [1, {"b": null}]}}\n', b"{}\n",
    b'{"text": "a", "text": "b"}\n', b'{"": 1}\n', b'{"a": NaN}\n', b'{"a": 1e999}\n',
    b'{"a": -9223372036854775809}\n',
    b'[{"text": "x"}, {"text": "y"}]', b"[[1]]", b"[1]", b"[]", b"text,summary\n", b"text\tsummary\n", b"text,text\n",
    b"a,b\n", b'"a\nb",c\n', b"1,2\n", b"-inf,nan\n", b"1_000,\xd9\xa1\n", b"1e999,5\n", b'""\n', b" \n",
    # what tables and JSON are made of
    b"[", b"]", b"{", b"}", b'"', b"'", b",", b":", b"\t", b"\n", b"\r", b"\r\n", b"true", b"//", b"\\ud800",
    # encodings
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x85", b"\xe2\x80\xa8", b"\xe9t\xe9", b'{"text": "\\ud800"}\n',
    "é,ü\n".encode("utf-16"), bytes(range(256)),
    # too much of it
    b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}\n", b"9" * 5000 + b",1\n", b"a" * 200_000,
    b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}\n",
]  # fmt: skip
BODIES = st.one_of(st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join), st.binary(max_size=60))


@st.composite
def files(draw):
    """An extension and bytes, which may be compressed, and then damaged."""
    compressor = draw(st.sampled_from(["", "", "", ".gz", ".xz", ".bz2"]))
    body = draw(BODIES)
    packed = COMPRESSORS[compressor](body)
    damage = draw(st.sampled_from(["", "", "cut", "flip", "plain"])) if compressor else ""
    if damage == "cut":
        packed = packed[: draw(st.integers(0, len(packed)))]
    elif damage == "flip":
        at = draw(st.integers(0, len(packed) - 1))
        packed = packed[:at] + bytes([packed[at] ^ 1 << draw(st.integers(0, 7))]) + packed[at + 1 :]
    elif damage == "plain":
        packed = body
    return draw(st.sampled_from(TEXT_EXTENSIONS)) + compressor, packed


def check_refusal(error: ValueError, path):
    message = str(error)
    assert "--train_file" in message, message
    assert path.name in message, message
    assert len(message.splitlines()) == 1, message
    assert len(message) < LONGEST_MESSAGE, message


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@examples(400)
@given(file=files(), keep=st.booleans(), header=st.sampled_from([None, ("a", "b")]))
def test_a_file_is_read_or_refused_in_one_line(folder, file, keep, header):
    path = folder / f"file{file[0]}"
    path.write_bytes(file[1])
    with no_hang():
        try:
            table = read_table("--train_file", str(path), tsv_header=header, keep_linebreaks=keep)
        except ValueError as error:
            check_refusal(error, path)
            return
    assert table.num_rows > 0
    assert table.num_columns > 0


ROWS = st.lists(
    st.tuples(*[st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=12)] * 2),
    min_size=1,
)


@examples(60)
@given(rows=ROWS, compressor=st.sampled_from(list(COMPRESSORS)), bom=st.booleans())
def test_what_was_written_is_what_is_read(folder, rows, compressor, bom):
    """Whatever the text: quotes, tabs, other alphabets, marks that end a line for Python alone."""
    pairs = [{"a": f"x{a}", "b": f"x{b}"} for a, b in rows]  # the x keeps a column of digits from being numbers
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["a", "b"])
    writer.writeheader()
    writer.writerows(pairs)
    texts = {
        ".csv": table.getvalue(),
        ".jsonl": "".join(json.dumps(pair, ensure_ascii=len(rows) % 2) + "\n" for pair in pairs),
        ".json": json.dumps(pairs, indent=len(rows) % 3 or None),
    }
    for extension, text in texts.items():
        path = folder / f"rows{extension}{compressor}"
        path.write_bytes(COMPRESSORS[compressor](b"\xef\xbb\xbf" * bom + text.encode()))
        assert read_table("--train_file", str(path)).to_pylist() == pairs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("1_000", "1_000"),
        ("1e999", "1e999"),
        ("9" * 400, "9" * 400),
    ],
)
def test_only_numbers_are_parsed(folder, field, value):
    path = folder / "numbers.csv"
    path.write_text(f"a\n{field}\n")
    assert read_table("--train_file", str(path)).to_pylist() == [{"a": value}]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"a": ' + b"[" * 100_000, "line 1: values must not be nested this deeply"),
        (b"[\n" + b'{"a":' * 100_000, "line 1: values must not be nested this deeply"),
        (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", "line 2: numbers must be shorter; Exceeds the limit"),
        (b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]", "line 1: numbers must be shorter; Exceeds the limit"),
    ],
)
def test_json_that_python_does_not_decode(folder, body, complaint):
    path = folder / "limits.json"
    path.write_bytes(body)
    with pytest.raises(ValueError, match=complaint):
        read_table("--train_file", str(path))


SCRIPTS = {
    "summarization": (summarization.main, ["--model_type", "t5"]),
    "glue": (glue.main, ["--model_type", "bert"]),
    "clm": (clm.main, ["--model_type", "gpt2", "--tokenizer_type", "bytes"]),
}


@pytest.mark.parametrize("script", SCRIPTS)
@examples(25)
@given(file=files())
def test_a_script_refuses_a_file_before_it_builds_a_model(script, folder, file):
    path = folder / f"{script}{file[0]}"
    path.write_bytes(file[1])
    try:
        load_raw_datasets(train_file=str(path), keep_linebreaks=True, cache_dir=str(folder / "cache"))
    except ValueError:
        pass
    else:
        return  # data: what columns it has is another matter
    main, flags = SCRIPTS[script]
    out = ["--output_dir", str(folder / "out"), "--do_train", "--max_steps", "1", "--train_file", str(path)]
    with no_hang(), pytest.raises(ValueError, match="train_file") as refusal:
        main([*flags, *out])
    assert len(str(refusal.value).splitlines()) == 1
