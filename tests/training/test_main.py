"""`python -m hf_hybrid.training`, the scripts of those who have no clone."""

import runpy
import sys

import pytest

from hf_hybrid.training import clm, glue, pretrain, summarization
from hf_hybrid.training.__main__ import TASKS, main
from hf_hybrid.training.flags.command_line import show_command


@pytest.mark.parametrize("module", [summarization, glue, clm])
def test_a_task_is_its_script(module, monkeypatch):
    called = []
    monkeypatch.setattr(module, "main", lambda flags: called.append(flags) or {"eval_loss": 1.0})
    task = module.__name__.rpartition(".")[2]
    assert main([task, "--model_type", "spade"]) == {"eval_loss": 1.0}
    assert called == [["--model_type", "spade"]]
    monkeypatch.setattr(sys, "argv", ["__main__.py", task, "--do_train"])
    main()
    assert called[1] == ["--do_train"]
    assert sys.argv == [f"python -m hf_hybrid.training {task}", "--do_train"]
    assert show_command(f"run_{task}.py", ["--do_train"]) == [f"python -m hf_hybrid.training {task}", "--do_train"]
    monkeypatch.setattr(sys, "argv", ["python -m hf_hybrid.training demo"])  # which calls a script itself
    assert show_command(f"run_{task}.py", ["--do_train"]) == [f"python run_{task}.py", "--do_train"]


def test_a_task_without_a_script_is_shown_as_it_is_run(monkeypatch):
    called = []
    monkeypatch.setattr(pretrain, "main", lambda flags: called.append(flags) or {})
    assert main(["pretrain", "--do_train"]) == {}
    assert called == [["--do_train"]]
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert show_command("pretrain", ["--do_train"]) == ["python -m hf_hybrid.training pretrain", "--do_train"]
    monkeypatch.setattr(sys, "argv", ["hf-hybrid train pretrain"])
    assert show_command("pretrain", ["--do_train"]) == ["hf-hybrid train pretrain", "--do_train"]


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"WORLD_SIZE": "1"}, "python run_clm.py"),
        ({"WORLD_SIZE": "2"}, "torchrun --nproc_per_node 2 run_clm.py"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "torchrun --nnodes 2 --nproc_per_node 8 run_clm.py"),
        ({"WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate launch --num_processes 4 run_clm.py"),
    ],
)
def test_several_processes_are_shown_with_their_launcher(monkeypatch, environment, shown):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert show_command("run_clm.py", ["--do_train"]) == [shown, "--do_train"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "got ''"), (["sumarization"], "Did you mean 'summarization'"), (["--do_train"], "must be")],
)
def test_a_wrong_task_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        main(argv)


def test_the_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "clm", "--learning_rat", "1"])
    monkeypatch.delitem(sys.modules, "hf_hybrid.training.__main__")  # imported above, which a command line does not
    with pytest.raises(SystemExit) as left:
        runpy.run_module("hf_hybrid.training", run_name="__main__")
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: unknown flag --learning_rat. Did you mean 'learning_rate'?")


def test_help_names_the_tasks(capsys):
    assert main(["--help"]) is None
    printed = capsys.readouterr().out
    assert all(task in printed for task in TASKS)
