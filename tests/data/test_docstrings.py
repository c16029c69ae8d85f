import pytest

from hf_hybrid.data.docstrings import DocumentationError, docstring_pair, module_pair, read_docstrings

BODY = (
    "The window of the signal is multiplied with a weight that falls from the middle to the edges of it. "
    "A signal shorter than the window is padded with zeros at both of its ends before the weight is applied."
)

SOURCE = f'''
"""Windows for signals that are cut into pieces.

{BODY}
"""
import missing_package
raise SystemExit("must not run")

class Window(Base):
    """A window that is applied to every piece of a signal.

    {BODY}
    """

    def __init__(self, size: int, *, weight="flat"): ...

    def apply(self, signal: list[float]) -> list[float]:
        """Multiply a signal with the window, piece by piece. It is not changed.

        See :func:`~scipy.signal.get_window` for the weights that a window of a signal can have.

        >>> Window(3).apply([1, 2, 3])
        [0, 2, 0]

        Args:
            signal: The signal that the window is multiplied with; shorter signals are padded with zeros at both ends.
        """

if True:
    def helper():
        def inner():
            """Not documentation."""
'''


def titles(source, module="pkg.windows"):
    return [docstring.title for docstring in read_docstrings(source.encode(), module)]


def pairs(source, module="pkg.windows"):
    found = [docstring_pair(docstring, module) for docstring in read_docstrings(source.encode(), module)]
    return [pair for pair in found if pair is not None]


def function(docstring):
    return f'def window(signal):\n    """{docstring}"""\n'


def test_docstrings_come_in_source_order_with_signatures_and_nothing_runs():
    assert titles(SOURCE) == [
        "pkg.windows",
        "pkg.windows.Window(size, *, weight='flat')",
        "pkg.windows.Window.apply(signal)",
    ]


def test_definitions_under_conditions_are_found():
    source = 'try:\n    import x\nexcept ImportError:\n    def f(a, /, b=1, *c, d, **e):\n        """Doc."""\n'
    assert titles(source, "m") == ["m.f(a, /, b=1, *c, d, **e)"]


def test_a_method_whose_self_is_positional_only_keeps_its_defaults():
    assert titles('class A:\n    def f(self, /, b=1):\n        """Doc."""\n', "m") == ["m.A.f(b=1)"]


def test_invalid_source_is_reported():
    for source in (b"def f(:\n", b"\xff\xfe", b"\0"):
        with pytest.raises(DocumentationError, match=r"pkg\.broken"):
            read_docstrings(source, "pkg.broken")


def test_the_summary_is_the_first_sentence_and_leaves_the_document():
    pair = pairs(SOURCE)[1]
    assert pair.summary == "Multiply a signal with the window, piece by piece."
    assert pair.source == "pkg.windows"
    lines = pair.document.splitlines()
    assert lines[:2] == ["pkg.windows.Window.apply(signal)", "It is not changed."]
    assert pair.summary not in pair.document


def test_markup_and_doctests_are_removed():
    document = pairs(SOURCE)[1].document
    assert "See scipy.signal.get_window for" in document
    assert ">>>" not in document
    assert "[0, 2, 0]" not in document
    assert "Args:\nsignal: The signal" in document


@pytest.mark.parametrize(
    "docstring",
    [
        "",
        "Multiply a signal with the window of weights.",  # no body
        "Window.\n\n" + BODY,  # too short
        f"Window the signal {'with weights ' * 40}.\n\n{BODY}",  # too long
        "Deprecated: use the other window of the signal.\n\n" + BODY,
        "See base class for the window of the signal.\n\n" + BODY,
        "Args: signal: The signal that is multiplied with the window.\n\n" + BODY,
        "Multiply the signal with these weights of a window:\n\n" + BODY,
        "Copyright by the authors of the window and the signal.\n\n" + BODY,
        "Multiply a signal with the window of weights.\n\nExamples\n--------\n>>> window([1])\n" + "1\n" * 40,
        "Multiply a signal with the window of weights.\n\n" + "a = b + c * 3 ** 4 / 5\n" * 20,
        "Brew coffee quickly for unexpected tired visitors.\n\n" + BODY,  # nothing in the body says so
        "Multiply a signal with the window.\n\nMultiply a signal with the window. " + BODY,  # the body says it again
    ],
)
def test_what_makes_no_good_pair_is_left_out(docstring):
    assert pairs(function("Multiply a signal with the window of weights.\n\n" + BODY))
    assert not pairs(function(docstring))


def test_a_module_pair_holds_all_documentation_but_the_summary():
    definitions = "".join(
        f'def apply{i}(signal):\n    """Multiply window {i}.\n\n    {BODY}\n    """\n' for i in range(9)
    )
    source = f'"""Windows\n=======\n\nWindows for signals that are cut\ninto pieces.\n\n{BODY}\n"""\n{definitions}'
    pair = module_pair(read_docstrings(source.encode(), "pkg.windows"), "pkg.windows")
    assert pair is not None
    assert pair.summary == "Windows for signals that are cut into pieces."
    assert pair.document.startswith(
        f"pkg.windows\n\nWindows\n\n{BODY}\n\npkg.windows.apply0(signal)\n\nMultiply window 0."
    )
    assert "pkg.windows.apply8(signal)" in pair.document
    assert "cut\ninto" not in pair.document


@pytest.mark.parametrize("source", ["", "x = 1", '"""Windows for signals that are cut into pieces."""'])
def test_a_module_without_enough_documentation_makes_no_pair(source):
    assert module_pair(read_docstrings(source.encode(), "m"), "m") is None
