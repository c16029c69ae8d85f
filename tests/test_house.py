"""The house rules that no linter knows: which package may import which, what importing costs, and how long code is."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .bare import BARE

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_hybrid"

PROGRAMS = ("run", "__main__")  # files at the top that users run; they import the house itself
LEAVES = ("version", "suggestions")  # files at the top that import nothing of the house and serve all of it
# part of the house -> the other parts it may import, beside the leaves
ALLOWED: dict[str, set[str]] = {
    "script": {"training"},
    "commands": {"training", "kernels", "data", "top"},
    "training": {"models", "data", "metrics", "top", "context_parallel", "starters"},
    "top": {
        "models",
        "layers",
        "kernels",
        "context_parallel",
        "starters",
    },  # hf_hybrid/__init__.py: public names and registration
    "models": {"layers", "kernels", "context_parallel"},
    "layers": {"kernels", "context_parallel"},
    "context_parallel": {"kernels"},
    "kernels": set(),
    "data": set(),
    "metrics": set(),
    "starters": set(),
    **{leaf: set() for leaf in LEAVES},
}
# part of the house -> libraries it must do without, even inside a function
FORBIDDEN_LIBRARIES: dict[str, set[str]] = {
    "kernels": {"transformers", "datasets", "evaluate", "accelerate", "peft", "tokenizers"},
    "context_parallel": {"transformers", "datasets", "evaluate", "accelerate", "peft", "tokenizers"},
    "layers": {"datasets", "evaluate", "accelerate", "peft", "tokenizers"},
    "models": {"datasets", "evaluate"},
    "data": {"evaluate"},
    "metrics": {"transformers"},
}
GATHERING_MODULES = ("__init__", "auto")  # of models/: the only ones that may import an architecture

LONGEST_FILE, LONGEST_FUNCTION = 500, 60  # lines
# Triton kernels, and files of them, that are longer: take out what no longer is, and add nothing
LONG = {
    "hf_hybrid/kernels/diagonal_scan/triton_kernels.py: walk_kernel",
    "hf_hybrid/kernels/linear_attention/triton_kernels.py: walk_kernel",
    "hf_hybrid/kernels/local_attention/triton_kernels.py",
    "hf_hybrid/kernels/local_attention/triton_kernels.py: d_key_value_kernel",
    "hf_hybrid/kernels/local_attention/triton_kernels.py: d_query_kernel",
    "hf_hybrid/kernels/segment_recurrence/triton_kernels.py",
    "hf_hybrid/kernels/segment_recurrence/triton_kernels.py: unwind_kernel",
    "hf_hybrid/kernels/short_conv/triton_kernels.py: backward_kernel",
    "hf_hybrid/kernels/ssm_kernel/triton_kernels.py: backward_kernel",
}


class Import(NamedTuple):
    """One imported name: absolute dotted path, line, and whether it runs when its file is imported."""

    path: str
    line: int
    at_import: bool


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """Yield everything a file imports, relative paths made absolute, and `import_module` of literal names."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
            yield Import(f"transformers.{node.attr}", node.lineno, at_import)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    name, dots = argument.value.lstrip("."), len(argument.value) - len(argument.value.lstrip("."))
                    anchor = package[: len(package) - dots + 1] if dots else []
                    yield Import(".".join([*anchor, name]), node.lineno, at_import)
        inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, True)


def part_of(path: str, packages: set[str]) -> str | None:
    """Return the part of the house a dotted path lies in, None outside; a name of `hf_hybrid` itself is "top"."""
    first, _, rest = path.partition(".")
    if first != PACKAGE:
        return "script" if first.startswith("run_") else None
    head = rest.split(".")[0]
    return "commands" if head == "__main__" else head if head in packages or head in LEAVES else "top"


def needs_trainer(path: str) -> bool:
    """Say whether a dotted path of transformers belongs to its Trainer."""
    library, *names = path.split(".")
    return library == "transformers" and any(
        name.startswith(("trainer", "training_args")) or "Trainer" in name or "TrainingArguments" in name
        for name in names
    )


def architecture_of(path: str, architectures: set[str]) -> str | None:
    """Return the architecture whose folder a dotted path lies in, if any."""
    names = path.split(".")
    return names[2] if names[:2] == [PACKAGE, "models"] and len(names) > 2 and names[2] in architectures else None


def module_of(file: Path, root: Path) -> tuple[str, bool]:
    """Return a file's dotted path, and whether it is that of a package."""
    is_package = file.stem == "__init__"
    return ".".join((file.parent if is_package else file.with_suffix("")).relative_to(root).parts), is_package


def broken_rules(root: Path) -> list[str]:
    """Walk `hf_hybrid` and the run scripts below a root; return one line per import or file that breaks a rule."""
    house = root / PACKAGE
    packages = {path.name for path in house.iterdir() if (path / "__init__.py").exists()}
    architectures = {path.name for path in (house / "models").glob("*/") if (path / "__init__.py").exists()}
    problems = [f"{PACKAGE}/{name}: no rule knows this package" for name in sorted(packages - ALLOWED.keys())]
    for file in sorted([*house.rglob("*.py"), *root.glob("run_*.py")]):
        where = file.relative_to(root).as_posix()
        module, is_package = module_of(file, root)
        part = part_of(module, packages)
        if file.parent == house and file.stem not in ("__init__", *PROGRAMS, *LEAVES):
            problems.append(f"{where}: a file at the top belongs in one of the packages")
        if file.name == "utils.py":
            problems.append(f"{where}: a file is named after what it holds, never utils.py")
        if part not in ALLOWED:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=where)
        if part == "kernels":
            problems += [
                f"{where}:{node.lineno}: class {node.name} is a Module; kernels are functions"
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef)
                and any(ast.unparse(b).split(".")[-1] == "Module" for b in node.bases)
            ]
        own = architecture_of(module, architectures)
        gathers = module in (f"{PACKAGE}.models", *(f"{PACKAGE}.models.{name}" for name in GATHERING_MODULES))
        for path, line, at_import in imports_of(tree, module, is_package):
            target = part_of(path, packages)
            library = path.split(".")[0]
            other = architecture_of(path, architectures)
            if target not in (None, part, *LEAVES) and target not in ALLOWED[part]:
                problems.append(f"{where}:{line}: {part} must not import {target} ({path})")
            elif part == "models" and other is not None and other != own and not gathers:
                problems.append(f"{where}:{line}: {own or file.stem} must not import the architecture {other}")
            elif library in FORBIDDEN_LIBRARIES.get(part, ()):
                problems.append(f"{where}:{line}: {part} must not import {library}")
            elif part not in ("training", "script") and needs_trainer(path):
                problems.append(f"{where}:{line}: only training imports the Trainer ({path})")
            elif at_import and file.stem != "triton_kernels" and {"triton", "triton_kernels"} & set(path.split(".")):
                problems.append(f"{where}:{line}: triton is imported on first use, inside a function")
    return problems


def circles(root: Path) -> dict[str, set[str]]:
    """Return the modules of `hf_hybrid` on circles of imports, or between two, with those of them that each imports.

    Imports inside functions count. The packages above a module do not, though Python runs their files first.
    """
    files = {module_of(file, root): file for file in (root / PACKAGE).rglob("*.py")}
    left: dict[str, set[str]] = {module: set() for module, _ in files}
    for (module, is_package), file in files.items():
        for path, *_ in imports_of(ast.parse(file.read_text(encoding="utf-8")), module, is_package):
            while path and path not in left:
                path = path.rpartition(".")[0]
            left[module] |= {path} - {"", module}
    while free := {x for x in left if not left[x] or not any(x in others for others in left.values())}:
        left = {module: others - free for module, others in left.items() if module not in free}
    return left


def too_long(root: Path) -> set[str]:
    """Return the files and functions that are too long: ``path``, ``path: function``."""
    found = set()
    for file in [*(root / PACKAGE).rglob("*.py"), *(root / "benchmarks").rglob("*.py"), *root.glob("*.py")]:
        where, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        found |= {where} if len(text.splitlines()) > LONGEST_FILE else set()
        found |= {
            f"{where}: {node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno >= LONGEST_FUNCTION
        }
    return found


def test_imports_go_one_direction():
    assert broken_rules(ROOT) == []


def test_no_circle_of_imports():
    assert circles(ROOT) == {}


def test_no_long_files_and_functions():
    assert too_long(ROOT) == LONG
    assert all(name.split(":")[0].endswith("/triton_kernels.py") for name in LONG)


HOUSE = {
    "run_glue.py": "from hf_hybrid.training.glue import main\n",
    "hf_hybrid/__init__.py": "from .models.auto import register\nfrom .version import __version__\n",
    "hf_hybrid/version.py": "__version__ = '0'\n",
    "hf_hybrid/kernels/__init__.py": "from .conv import conv\n",
    "hf_hybrid/kernels/conv/__init__.py": "def conv():\n    from .triton_kernels import launch\n",
    "hf_hybrid/kernels/conv/triton_kernels.py": "import triton\n",
    "hf_hybrid/context_parallel/__init__.py": "from ..kernels import conv\n",
    "hf_hybrid/layers/__init__.py": "from ..kernels import conv\n",
    "hf_hybrid/models/__init__.py": "",
    "hf_hybrid/models/auto.py": "from .one import One\nfrom .two import Two\n",
    "hf_hybrid/models/cache.py": "from transformers import DynamicCache\n",
    "hf_hybrid/models/one/__init__.py": "from .modeling_one import One\n",
    "hf_hybrid/models/one/modeling_one.py": "from ...layers import Conv\nfrom ..cache import Cache\n",
    "hf_hybrid/models/two/__init__.py": "from hf_hybrid.kernels import conv\n",
    "hf_hybrid/data/__init__.py": "from ..version import __version__\nfrom transformers import AutoTokenizer\n",
    "hf_hybrid/metrics/__init__.py": "import evaluate\n",
    "hf_hybrid/training/__init__.py": "",
    "hf_hybrid/training/glue.py": "from transformers import Trainer\nfrom hf_hybrid import metrics\n",
}


def build_house(root: Path, changes: dict[str, str]) -> Path:
    for name, source in (HOUSE | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_walker_accepts_a_house_in_order(tmp_path):
    assert broken_rules(build_house(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("run_glue.py", "from hf_hybrid.models import auto\n", "script must not import models"),
        ("run_glue.py", "from hf_hybrid import SpadeModel\n", "script must not import top"),
        ("hf_hybrid/layers/norms.py", "from ..models.cache import Cache\n", "layers must not import models"),
        ("hf_hybrid/kernels/scan.py", "import hf_hybrid.layers\n", "kernels must not import layers"),
        ("hf_hybrid/kernels/scan.py", "from .. import context_parallel\n", "kernels must not import context_parallel"),
        ("hf_hybrid/context_parallel/scan.py", "from ..layers import s4\n", "context_parallel must not import layers"),
        ("hf_hybrid/kernels/scan.py", "def f():\n    import hf_hybrid.models\n", "kernels must not import models"),
        ("hf_hybrid/kernels/scan.py", "from transformers import AutoModel\n", "kernels must not import transformers"),
        ("hf_hybrid/kernels/scan.py", "class A(nn.Module):\n    pass\n", "class A is a Module"),
        ("hf_hybrid/kernels/scan.py", "import triton.language as tl\n", "triton is imported on first use"),
        ("hf_hybrid/kernels/scan.py", "from .conv import triton_kernels\n", "triton is imported on first use"),
        (
            "hf_hybrid/models/two/modeling_two.py",
            "from ..one import One\n",
            "two must not import the architecture one",
        ),
        ("hf_hybrid/models/decoder.py", "from .one import One\n", "decoder must not import the architecture one"),
        ("hf_hybrid/models/cache.py", "from ..training import glue\n", "models must not import training"),
        ("hf_hybrid/models/cache.py", "from transformers import Trainer\n", "only training imports the Trainer"),
        ("hf_hybrid/data/text.py", "from hf_hybrid.models.auto import register\n", "data must not import models"),
        ("hf_hybrid/data/text.py", "import transformers\ntransformers.Trainer\n", "only training imports the Trainer"),
        ("hf_hybrid/data/text.py", "from ..metrics import rouge\n", "data must not import metrics"),
        ("hf_hybrid/metrics/rouge.py", "import_module('hf_hybrid.kernels')\n", "metrics must not import kernels"),
        ("hf_hybrid/metrics/rouge.py", "import_module('..data', __name__)\n", "metrics must not import data"),
        ("hf_hybrid/__init__.py", "from . import training\n", "top must not import training"),
        ("hf_hybrid/version.py", "import hf_hybrid.kernels\n", "version must not import kernels"),
        ("hf_hybrid/tools/__init__.py", "", "no rule knows this package"),
        ("hf_hybrid/helpers.py", "", "a file at the top"),
        ("hf_hybrid/data/utils.py", "", "never utils.py"),
    ],
)
def test_walker_sees_a_broken_rule(tmp_path, file, source, complaint):
    problems = broken_rules(build_house(tmp_path, {file: source}))
    assert len(problems) == 1
    assert problems[0].startswith(file.removesuffix("/__init__.py"))
    assert complaint in problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels/conv/op.py": "from .reference import conv\n", "kernels/conv/reference.py": "from . import op\n"},
        {"kernels/conv/op.py": "def run():\n    from hf_hybrid.kernels import conv\n", "kernels/conv/__init__.py":
            "from .op import run\n"},
        {"models/a.py": "from .b import B\n", "models/b.py": "from . import c\n", "models/c.py": "from .a import A\n"},
    ],
    ids=["of two", "inside a function", "of three"],
)  # fmt: skip
def test_a_circle_of_imports_is_seen(tmp_path, changes):
    names = {f"{PACKAGE}/{name}".removesuffix(".py").removesuffix("/__init__") for name in changes}
    bystander = {"layers/conv.py": "from ..kernels.conv import op\n"}
    files = {f"{PACKAGE}/{name}": source for name, source in (changes | bystander).items()}
    assert circles(build_house(tmp_path, {})) == {}
    assert circles(build_house(tmp_path, files)).keys() == {name.replace("/", ".") for name in names}


def test_long_files_and_functions_are_seen(tmp_path):
    def source(lines):
        return "def outer():\n" + "    x = 1\n" * (lines - 1)

    build_house(tmp_path, {"hf_hybrid/data/short.py": source(60), "benchmarks/long.py": source(61)})
    build_house(tmp_path, {"hf_hybrid/data/edge.py": "x = 1\n" * 500, "hf_hybrid/data/over.py": "x = 1\n" * 501})
    assert too_long(tmp_path) == {"benchmarks/long.py: outer", "hf_hybrid/data/over.py"}


def modules_after(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and return the names of all modules it left loaded."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name for name, m in sys.modules.items() if m]))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_package_is_cheap_and_needs_no_triton():
    """Transformers loads torch's compiler, which loads triton where it is installed: so it is taken away here."""
    loaded = modules_after("import sys; sys.modules['triton'] = None; import hf_hybrid")
    assert not loaded & {"transformers.trainer", "transformers.training_args", "datasets", "evaluate", "peft"}
    assert "triton" not in loaded
    assert not {name for name in loaded if name.endswith("triton_kernels")}


def test_kernels_need_torch_alone():
    """Importing the package registers models, which needs transformers; the kernels by themselves need none of it."""
    loaded = modules_after(f"{BARE}import hf_hybrid.kernels")
    assert "torch" in loaded
    assert not loaded & {"transformers", "datasets", "evaluate", "triton"}
