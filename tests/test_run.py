"""`python -m hf_hybrid.run` runs a program's own main in a process that knows our models."""

import sys

import pytest

from hf_hybrid import run


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])


def test_a_module_gets_its_arguments_untouched(tmp_path, monkeypatch, capsys):
    (tmp_path / "some_program.py").write_text(
        "import sys, transformers\n"
        "print(__name__, sys.argv[1:])\n"
        "print(transformers.AutoConfig.for_model('chela').model_type, transformers.BstForCausalLM.__name__)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    run.main(["some_program", "--flag", "a b", "-h"])
    assert capsys.readouterr().out.splitlines() == [
        "__main__ ['--flag', 'a b', '-h']",
        "chela BstForCausalLM",
    ]


def test_a_command_is_its_entry_point(capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["accelerate", "estimate-memory", "--help"])
    assert not stopped.value.code
    assert "accelerate" in sys.argv[0]
    assert "--library_name" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: hf-hybrid run PROGRAM"),
        (["no_such_program"], "PROGRAM must be an installed command or module; got 'no_such_program'"),
        (["no.such.program"], "PROGRAM must be an installed command or module; got 'no.such.program'"),
        (["./script.py"], "PROGRAM must be an installed command or module; got './script.py'"),
        (["--model", "x"], "PROGRAM must be an installed command or module; got '--model'"),
    ],
)
def test_what_is_no_program_is_named(argv, message):
    with pytest.raises(SystemExit, match=message):
        run.main(argv)


def test_help(capsys):
    run.main(["--help"])
    assert "usage: hf-hybrid run" in capsys.readouterr().out
