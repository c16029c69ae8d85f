"""The wheel and the sdist hold the package, all of it, and nothing else."""

import email
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from build import ProjectBuilder
from pyproject_hooks import quiet_subprocess_runner

import hf_hybrid

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Wheel and sdist, from a copy of the tree: building writes into it. setuptools is the one that is installed."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_SOURCE)
    (folder / "tree" / "runs" / "demo").mkdir(parents=True)
    (folder / "tree" / "runs" / "demo" / "model.safetensors").touch()
    for compiled in ("__pycache__/__init__.cpython-311.pyc", "spade-en-tiny/__pycache__/x.cpython-311.pyc"):
        path = folder / "tree" / "hf_hybrid" / "starters" / compiled
        path.parent.mkdir(parents=True)
        path.touch()
    builder = ProjectBuilder(folder / "tree", runner=quiet_subprocess_runner)
    return {kind: Path(builder.build(kind, folder / "dist")) for kind in ("sdist", "wheel")}


def package_files() -> set[str]:
    files = (path for path in (ROOT / "hf_hybrid").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
        about = f"hf_hybrid-{hf_hybrid.__version__}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{about}/METADATA"))
    assert {name for name in names if not name.startswith(about)} == package_files()
    assert {"hf_hybrid/py.typed", "hf_hybrid/starters/spade-en-tiny/model.safetensors"} <= names
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["Name"] == "hf-hybrid"
    assert metadata["Version"] == hf_hybrid.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    described = metadata.get_payload(decode=True).decode("utf-8")
    assert described.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    needed = {re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed >= {"accelerate", "datasets", "peft", "torch", "transformers"}
    assert not needed & {"build", "pytest", "ruff", "sphinx"}


def test_the_sdist_holds_what_a_wheel_is_built_from(built):
    with tarfile.open(built["sdist"]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    written = {name for name in names if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", "constraints.txt", "pyproject.toml"}
    assert names - written == package_files() | files


def test_both_are_small_with_their_starters(built):
    assert sum(path.stat().st_size for path in built.values()) < 25_000_000
