"""The program `hf-hybrid`: its commands, what it says of wrong ones, and the doctor."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from hf_hybrid import run as run_module
from hf_hybrid.commands import doctor, program
from hf_hybrid.commands.program import COMMANDS, main
from hf_hybrid.kernels.dispatch import BACKEND_VARIABLE
from hf_hybrid.training import clm, demo
from hf_hybrid.training.__main__ import TASKS
from hf_hybrid.training.flags.command_line import show_command
from hf_hybrid.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argument", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(argument, capsys):
    assert main(argument) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +{re.escape(COMMANDS[name].description)}$", printed, re.M) for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("argument", [[], ["--help"], ["-h"]])
def test_train_lists_its_tasks(argument, capsys):
    assert main(["train", *argument]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: hf-hybrid train TASK ...\n")
    assert {*re.findall(r"^  (\w+)  ", printed, re.MULTILINE)} | {"demo"} == {*TASKS}


@pytest.mark.parametrize("name", ["summarize", "generate", "classify", "embed", "app", "doctor"])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hf-hybrid {name}")


def test_a_wrong_command_is_refused():
    with pytest.raises(ValueError, match=r"unknown command 'sumarize'\. Did you mean 'summarize'"):
        main(["sumarize", "model"])


def test_other_programs_are_commands_too(monkeypatch):
    called = []
    for module, name in ((clm, "train clm"), (demo, "demo"), (run_module, "run")):
        monkeypatch.setattr(module, "main", lambda argv, name=name: called.append((name, argv)))
    main(["train", "clm", "--do_train"])
    main(["demo", "--long"])
    main(["run", "lm_eval", "--help"])
    assert called == [("train clm", ["--do_train"]), ("demo", ["--long"]), ("run", ["lm_eval", "--help"])]
    monkeypatch.setattr(sys, "argv", ["hf-hybrid", "train", "clm", "--do_train"])
    main()
    assert sys.argv == ["hf-hybrid train clm", "clm", "--do_train"]  # reports show it
    assert show_command("run_clm.py", ["--do_train"]) == ["hf-hybrid train clm", "--do_train"]


def test_an_installed_package_has_the_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"hf-hybrid": f"{program.__name__}:{program.run.__name__}"}


def test_errors_are_one_line_and_a_reader_may_leave(folders, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["hf-hybrid", "sumarize"])
    with pytest.raises(SystemExit) as left:
        program.run()
    done = capfd.readouterr()
    assert (left.value.code, done.out) == (2, "")
    assert done.err.startswith("error: unknown command 'sumarize'.")
    assert done.err.count("\n") == 1
    classify = ["classify", folders("chela", "AutoModelForSequenceClassification"), *["text"] * 5]
    command = [sys.executable, "-m", "hf_hybrid", *classify]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 141
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


# ---- the doctor ----


def report(capsys):
    code = main(["doctor"])
    return code, dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)


def test_the_doctor_says_why_triton_does_not_run(capsys, monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    code, lines = report(capsys)
    assert code == 0
    assert f"torch {torch.__version__}" in lines["packages, needed"]
    assert len(doctor._CALLS) == len(list((ROOT / "hf_hybrid/kernels").glob("*/triton_kernels.py")))
    if not torch.cuda.is_available():
        assert {lines[name] for name in doctor._CALLS} == {"torch (not every tensor is on a CUDA device)"}
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    code, lines = report(capsys)
    assert {lines[name] for name in doctor._CALLS} == {f"torch ({BACKEND_VARIABLE} says so)"}


@pytest.mark.full
def test_the_doctor_compares_triton_with_torch():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hf_hybrid", "doctor"],
        env={"TRITON_INTERPRET": "1", "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for name in doctor._CALLS:
        assert re.search(rf"^{re.escape(name)}: Triton \(differs from torch by \S+ of", done.stdout, re.MULTILINE)


def test_the_doctor_finds_wrong_numbers_and_errors(capsys, monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "why_not_on", lambda device: None)
    answers = iter([torch.ones(2), torch.tensor([1.0, 1.1])])
    monkeypatch.setattr(doctor, "_CALLS", {"wrong": lambda device: next(answers), "broken": lambda device: 1 / 0})
    code, lines = report(capsys)
    assert code == 1
    assert lines["wrong"] == "FAILS: Triton and torch differ by 1.0e-01 of the largest number"
    assert lines["broken"] == "FAILS with ZeroDivisionError: division by zero"
