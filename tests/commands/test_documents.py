"""What the commands read: files of every kind, folders, tables, standard input; and what they say of bad ones."""

import gzip
import io
import re
import sys

import docx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from pypdf import PageObject

from hf_hybrid.commands import readers
from hf_hybrid.commands.documents import find_sources, read_sources
from hf_hybrid.commands.flags import DocumentArguments

from .files import encrypt_pdf, write_docx, write_pdf


def read(*arguments, leave_out=(), **flags):
    flags = DocumentArguments(**flags)
    return list(read_sources(find_sources([str(x) for x in arguments], flags, leave_out=leave_out), flags))


def texts(*arguments, **flags):
    documents = read(*arguments, **flags)
    assert [document.problem for document in documents] == [None] * len(documents)
    return [document.text for document in documents]


def problem(path, **flags):
    (document,) = read(path, **flags)
    assert document.text == ""
    return document.problem


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT", "a.rst"])
def test_text_files_are_one_document(name, tmp_path):
    (tmp_path / name).write_text("Zwei Zeilen,\nnicht mehr — ß.\n", encoding="utf-8")
    (document,) = read(tmp_path / name)
    assert document[:3] == (str(tmp_path / name), "Zwei Zeilen,\nnicht mehr — ß.\n", None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_byte_order_marks_are_understood(encoding, tmp_path):
    mark = b"\xff\xfe" if encoding == "utf-16-le" else b""
    (tmp_path / "a.txt").write_bytes(mark + "Grüße".encode(encoding))
    assert texts(tmp_path / "a.txt") == ["Grüße"]


def test_other_encodings_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("Gr\xfc\xdfe".encode("latin-1"))
    assert "byte 2 is no utf-8 text; name the --encoding" in problem(tmp_path / "a.txt")
    assert texts(tmp_path / "a.txt", encoding="latin-1") == ["Grüße"]
    (tmp_path / "b.txt").write_bytes(b"\x7fELF\0\1")
    assert problem(tmp_path / "b.txt", encoding="latin-1") == "it is no text but binary data (it has zero bytes)"
    with pytest.raises(ValueError, match="--encoding must be one that Python knows; got 'latn'"):
        DocumentArguments(encoding="latn")


def test_pdf(tmp_path):
    write_pdf(tmp_path / "a.pdf", "The first page.", "The second.")
    assert texts(tmp_path / "a.pdf") == ["The first page.\n\nThe second."]


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_protected_pdf_is_named(algorithm, tmp_path):
    write_pdf(tmp_path / "a.pdf", "Secret.")
    encrypt_pdf(tmp_path / "a.pdf", "password", algorithm)
    assert problem(tmp_path / "a.pdf") == "it is protected by a password; save a copy without one"


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_pdf_that_only_its_owner_may_change_is_read(algorithm, tmp_path):
    write_pdf(tmp_path / "a.pdf", "Not secret.")
    encrypt_pdf(tmp_path / "a.pdf", "", algorithm)
    assert texts(tmp_path / "a.pdf") == ["Not secret."]


def test_a_pdf_of_pictures_is_named(tmp_path):
    write_pdf(tmp_path / "a.pdf", "", "")
    assert "its 2 pages have no text, only pictures" in problem(tmp_path / "a.pdf")
    write_pdf(tmp_path / "b.pdf", "")
    assert "its page has no text" in problem(tmp_path / "b.pdf")


def test_docx(tmp_path):
    write_docx(tmp_path / "a.docx")
    assert texts(tmp_path / "a.docx") == ["A heading\nA first paragraph.\nleft\tright\nA last one."]


def test_a_word_file_is_read_whole(tmp_path):
    document = docx.Document()
    table = document.add_table(rows=2, cols=3)
    for number, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = str(number)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
    table.cell(0, 2).merge(table.cell(1, 2)).text = "high"
    table.cell(1, 0).add_table(rows=1, cols=1).cell(0, 0).text = "inner"
    paragraph = document.add_paragraph("inserted: ")
    for xml in (
        "<w:ins {0}><w:r><w:t>new</w:t><w:tab/><w:t>words</w:t></w:r></w:ins>",
        "<w:del {0}><w:r><w:delText>old</w:delText></w:r></w:del>",
    ):
        paragraph._p.append(parse_xml(xml.format(nsdecls("w"))))
    control = "<w:sdt {0}><w:sdtContent><w:p><w:r><w:t>controlled</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    document.element.body.insert(0, parse_xml(control.format(nsdecls("w"))))
    document.save(str(tmp_path / "a.docx"))
    assert texts(tmp_path / "a.docx") == ["controlled\nwide\thigh\n3\ninner\n\t4\t\ninserted: new\twords"]


def test_a_long_pdf_is_read_no_further_than_the_limit(tmp_path, monkeypatch):
    write_pdf(tmp_path / "a.pdf", *["x" * 90] * 30)
    read_pages = []
    extract = PageObject.extract_text
    monkeypatch.setattr(PageObject, "extract_text", lambda page: read_pages.append(page) or extract(page))
    assert "more than --max_document_mb 0.001" in problem(tmp_path / "a.pdf", max_document_mb=0.001)
    assert len(read_pages) == 12  # of 90 letters each


def test_pages_without_text_are_counted(tmp_path):
    write_pdf(tmp_path / "a.pdf", "The first page.", "", "")
    (document,) = read(tmp_path / "a.pdf")
    assert (document.text.strip(), document.note) == ("The first page.", "2 of its 3 pages have no text")


def test_a_long_page_is_read_in_time_that_grows_with_its_length(tmp_path):
    (tmp_path / "a.html").write_text("<ul>" + "<li>word <b>bold</b></li>" * 30_000 + "</ul>")
    (text,) = texts(tmp_path / "a.html")  # a minute and more if each item looks for its place among the others
    assert text.split("\n\n")[:2] == ["word bold", "word bold"]


def test_the_encoding_of_a_page_is_what_it_says_or_what_is_named(tmp_path):
    content = "<p>\u041f\u0440\u0438\u0432\u0435\u0442</p>".encode("cp1251")
    (tmp_path / "a.html").write_bytes(content)
    assert "is no utf-8 text; name the --encoding" in problem(tmp_path / "a.html")
    assert texts(tmp_path / "a.html", encoding="cp1251") == ["\u041f\u0440\u0438\u0432\u0435\u0442"]
    (tmp_path / "a.html").write_bytes(b"<meta charset='windows-1251'>" + content)
    assert texts(tmp_path / "a.html") == ["\u041f\u0440\u0438\u0432\u0435\u0442"]
    (tmp_path / "a.html").write_bytes(b"<meta charset='martian'>" + content)
    assert "it says that its encoding is 'martian', which is unknown; name the --encoding" in problem(
        tmp_path / "a.html"
    )


def test_a_page_with_too_much_markup_is_not_parsed(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>a</p>" * 2000)
    monkeypatch.setattr("bs4.BeautifulSoup", None)
    assert problem(tmp_path / "a.html", max_document_mb=0.001) == (
        "it has 0.0 MB, more than 10 times --max_document_mb 0.001"
    )


def test_html(tmp_path):
    page = (
        "<html><head><meta charset='latin-1'><title>Title</title><style>p {}</style></head><body><script>x</script>"
        "<p>One <b>bo</b>ld\nword &amp; more.</p><ul><li>first<li>second</ul>\xfc<br>end</body></html>"
    )
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    (text,) = texts(tmp_path / "a.html")
    assert [line for line in text.splitlines() if line] == [
        *("Title", "One bold", "word & more.", "first", "second", "ü", "end")
    ]


@pytest.mark.parametrize("name", ["a.pdf", "a.docx"])
def test_broken_files_are_named(name, tmp_path):
    (tmp_path / name).write_bytes(b"this is no such file")
    assert problem(tmp_path / name).startswith(f"it cannot be read as .{name[2:]}: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "it is empty"),
        ("a.pdf", b"", "it is empty"),
        ("a.txt", b" \n\t", "it has no text"),
        ("a.html", b"<p> </p><script>x</script>", "it has no text"),
        ("a.txt", b"\x7fELF\x00\x01", "it is no text but binary data"),
        ("a.html", b"\x7fELF\x00\x01", "it is no text but binary data"),
        ("a.txt", b"x" * 50_000_000, "it has 50.0 MB of text, more than --max_document_mb 10"),
        ("a.txt", b"x" * 1_000_001, "it has 1.0 MB of text, more than --max_document_mb 1"),
    ],
)
def test_what_cannot_be_read_is_said(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    limit = {"max_document_mb": 1.0} if message[-4:] == "mb 1" else {}
    assert problem(tmp_path / name, **limit).startswith(message)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert problem(tmp_path / "a.txt") == "it cannot be read: Permission denied"


def test_folders_are_read_to_their_depths(tmp_path, capsys):
    for name in ("b.txt", "a/c.md", "a/.hidden/d.txt", ".e.txt", "picture.png", "Makefile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "out.jsonl").write_text('{"text": "old"}\n')
    assert texts(tmp_path, leave_out=[tmp_path / "out.jsonl"]) == ["a/c.md", "b.txt"]
    assert texts(tmp_path / "b.txt", tmp_path / "a", tmp_path / "a" / "c.md") == ["b.txt", "a/c.md"]  # each once
    elsewhere = tmp_path / ".elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "f.txt").write_text("f")
    (elsewhere / "deep" / "around").symlink_to(elsewhere)
    (tmp_path / "a" / "link").symlink_to(elsewhere)
    assert texts(tmp_path / "a") == ["a/c.md", "f"]
    assert "files of other kinds are left out: 1 no ending, 1 .png" in capsys.readouterr().err


def test_tables_are_a_document_for_each_row(tmp_path):
    rows = [{"text": "one", "id": "x"}, {"text": " ", "id": "y"}, {"text": "three, and more", "id": "z"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('text,id\none,x\n" ",y\n"three, and more",z\n')
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": " "}\n{"text": "three, and more"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for path in sorted(tmp_path.iterdir()):
        one, two, three = read(path)
        assert (one.name, one.text, two.problem, three.text) == (
            *(f"{path}:1", "one", "it has no text", "three, and more"),
        )


def test_a_first_line_that_is_a_list_leaves_the_lines_behind_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('[1, 2]\n{"text": "one"}\n')
    assert [document.text for document in read(tmp_path / "a.jsonl")] == ["", "", "one"]


def test_parquet_is_read_where_it_can_be(tmp_path):
    late = pa.array([2**52, 0], pa.timestamp("ms"))  # beyond Python's years
    pq.write_table(pa.table({"text": ["one", "two"], "when": late}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one", "two"]
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\4\0\0\0"), pa.py_buffer(b"\xfftwo")]
    )
    pq.write_table(pa.table({"text": broken}), tmp_path / "b.parquet")
    one, two = read(tmp_path / "b.parquet")
    assert one.problem.startswith("row 1: 'utf-8' codec can't decode")
    assert two.text == "two"
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match="must be a Parquet file; it cannot be read") as raised:
        read(tmp_path / "c.parquet")
    assert "\n" not in str(raised.value)


def test_a_table_that_is_gone_when_its_turn_comes_does_not_stop_the_others(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("text\none\ntwo\n")
    sources = find_sources([str(tmp_path)], DocumentArguments())
    (tmp_path / "a.csv").unlink()
    documents = list(read_sources(sources, DocumentArguments()))
    assert [document.text for document in documents] == ["", "", "one", "two"]
    assert "no such file" in documents[1].problem


def test_folders_that_cannot_be_opened_and_dead_links_are_documents_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "c").mkdir()
    listed = type(tmp_path).iterdir

    def refuse(path):
        if path.name == "c":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)
    problems = [document.problem for document in read(tmp_path)]
    assert problems == [None, "it is a link to a file that does not exist", "this folder cannot be opened"]


def test_the_column_of_a_table_is_chosen_or_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("title,body\nT,B\n")
    with pytest.raises(ValueError, match=r"a\.csv: text_column must be one of the columns .*: title, body"):
        read(tmp_path / "a.csv")
    assert texts(tmp_path / "a.csv", text_column="body") == ["B"]
    (tmp_path / "a.csv").write_text("number,share\n12,0.5\n13,\n")
    with pytest.raises(ValueError, match=r"text_column must be one of the columns .*: number, share"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("number,body\n12,B\n13,\n")
    assert [document.text for document in read(tmp_path / "a.csv")] == ["B", ""]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text"\n{"text": "three"}\n', "line 2: must be one JSON object on each line"),
        ("a.json", '[{"text": "one"},\n 2,\n {"text": "three"}]', "row 2: must be a JSON object"),
        (
            "a.jsonl",
            '{"text": "one"}\n{"text": "\\ud800"}\n{"text": "three"}\n',
            "character 1 is half of one (U+D800)",
        ),
        ("a.jsonl", '{"text": "one"}\n{"text": 5}\n{"text": "three"}\n', "column 'text' must hold text; got int 5"),
        ("a.jsonl", '{"text": "one"}\n{}\n{"text": "three"}\n', "column 'text' must hold text; got nothing"),
        ("a.csv", b"id,text\n1,one\n2,tw\xff\n3,three\n", "line 3: must be UTF-8 text"),
        ("a.csv", b"id,text\n1,one\n2,tw\0\n3,three\n", "line 3: must be text; got binary data"),
        ("a.tsv", b"id\ttext\n1\tone\n2\ttw\xff\n3\tthree\n", "line 3: must be UTF-8 text"),
        ("a.jsonl", '{"text": "one"}\n[2]\n{"text": "three"}\n', "line 2: must be a JSON object"),
        ("a.csv", "id,text\n1,one\n2,two,2\n3,three\n", "line 3: must have the header's 2 columns"),
    ],
)
def test_a_broken_row_is_one_document(name, content, why, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    one, two, three = read(tmp_path / name)
    assert (one.text, two.text, three.text) == ("one", "", "three")
    assert two.name == f"{tmp_path / name}:2"
    assert two.problem.startswith(why)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", b'text\n"one\n', r"line 2: must be valid CSV"),
        ("a.jsonl", b'{"text"\n{"text"\n', r"line 1: must be one JSON object"),
        ("a.jsonl", b'{\n"data": [{"text": "one"}]}\n', r"field 'data' holds 1 rows: save that list as a file"),
        ("a.jsonl", b"\n", r"it must hold at least one row; got none"),
        ("a.png", b"x", r"the documents' files must end in one of \.txt"),
    ],
)
def test_a_file_that_cannot_be_read_stops_a_command_only_if_it_is_alone(name, content, why, tmp_path):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / name))}: .*{why}"):
        read(tmp_path / name)
    broken, fine = read(tmp_path / name, tmp_path / "b.txt")
    assert re.search(why, broken.problem)
    assert fine.text == "b"


def test_texts_and_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\n".encode())))
    given = ["a text, not a file", "-", "x" * 5000, "and/or what?", "yes/no", "It says a.txt\nand b.txt", ""]
    documents = read(*given)
    assert [document.name for document in documents] == [
        "text 1",
        "standard input",
        *(f"text {n}" for n in range(2, 7)),
    ]
    assert [document.text for document in documents] == [given[0], "Grüße\n", *given[2:]]
    assert documents[-1].problem == "it has no text"
    assert capsys.readouterr().err.splitlines()[-1] == "'yes/no' is no file or folder here: it is read as a text"


def test_without_arguments_standard_input_is_read_unless_it_is_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert texts() == ["piped"]

    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(ValueError, match="no document is given"):
        read()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{}/b.txt", r"there is no such file or folder\. Did you mean 'a\.txt'\?"),
        ("{}/my report.pdf", "there is no such file or folder"),
        ("my report.pdf", "there is no such file or folder.* read from standard input"),
        ("{}/reports", "there is no such file or folder"),
        ("reports/", "there is no such file or folder"),
        ("./reports", "there is no such file or folder"),
        ("{}/pictures", r"no file in this folder can be read as a document; it has 1 \.png"),
        ("{}/empty", "it has none at all"),
    ],
)
def test_what_does_not_exist_is_said_at_once(argument, message, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "picture.png").write_text("p")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_text("p")
    with pytest.raises(ValueError, match=message):
        read(argument.format(tmp_path))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write_pdf(tmp_path / "a.pdf", "x")
    monkeypatch.setitem(readers.PACKAGES, ".pdf", ("no_such_module", "pypdf"))
    with pytest.raises(ValueError, match=r"\.pdf files need the package pypdf: pip install 'hf-hybrid\[documents\]'"):
        read(tmp_path / "a.pdf")
