"""The rooms of training/: arrows between them go one way, scripts stay short, and each override has one owner."""

import ast
from pathlib import Path

import pytest
import transformers

import hf_hybrid

ROOT = Path(hf_hybrid.__file__).parent / "training"
# from the bottom to the top: each imports of those before it alone
ORDER = ["processes", "errors", "flags", "run_folder", "model", "trainer", "splits", "scores", "report", "steps"]
ORDER += ["texts", "collating"]
TASKS = ["summarization", "glue", "clm", "pretrain", "long_range"]
ORDER += [*TASKS, "demo", "__main__", "arguments"]
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def _imported(tree):
    """The files of training/ that a file imports from: ``flags.model`` or ``steps``."""
    prefix = "hf_hybrid.training."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
            module = f"{node.module}."[len(prefix) :].rstrip(".")
            for name in node.names:
                inside = ROOT / module.replace(".", "/") / f"{name.name}.py"
                yield ".".join(filter(None, [module, name.name])) if inside.is_file() else module


def test_every_room_imports_of_those_below_it_alone():
    for path, tree in FILES.items():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for module in _imported(tree):
            other = module.split(".")[0]
            assert other == room or ORDER.index(other) < ORDER.index(room), f"{path} imports {module}"


@pytest.mark.parametrize("task", TASKS)
def test_the_scripts_mains_are_shorter_than_other_files(task):
    assert len((ROOT / f"{task}.py").read_text(encoding="utf-8").splitlines()) < 400


def test_every_method_of_trainer_is_overridden_in_one_place():
    owners = {}
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    name = getattr(method, "name", "__")
                    if name[:2] != "__" and hasattr(transformers.Trainer, name):
                        owners.setdefault(name, []).append((path.stem, node.name))
    assert {"evaluation_loop", "_save_checkpoint", "training_step"} <= owners.keys()
    assert set(map(tuple, owners.values())) == {(("script_trainer", "ScriptTrainer"),)}
