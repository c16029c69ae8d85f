"""Find and list the Python source of installed packages without importing or running it."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_hybrid.suggestions import did_you_mean

__all__ = ["DEFAULT_PACKAGES", "STANDARD_LIBRARY", "Package", "SourceFile", "find_packages", "source_files"]

STANDARD_LIBRARY = "stdlib"

DEFAULT_PACKAGES: Sequence[str] = (
    STANDARD_LIBRARY, "accelerate", "datasets", "evaluate", "fsspec", "huggingface_hub", "joblib", "matplotlib",
    "networkx", "nltk", "numpy", "pandas", "peft", "pyarrow", "safetensors", "scipy", "sklearn", "sympy", "tokenizers",
    "torch", "transformers",
)  # fmt: skip
"""Import names of the packages that the corpora are built from, if installed: our dependencies and theirs."""
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where it differs from the import name
_LEFT_OUT_FOLDERS = {
    "__pycache__", "_vendor", "_vendored", "benchmarks", "examples", "externals", "idlelib", "lib2to3",
    "site-packages", "test", "testing", "tests", "third_party", "vendor",
}  # fmt: skip
_LEFT_OUT_FILES = {"conftest", "setup"}
_LEFT_OUT_MODULES = ("transformers.models.",)  # a quarter of all source, mostly copies of other documentation
_MAX_FILE_BYTES = 1_000_000  # larger files are generated tables


@dataclass(frozen=True)
class Package:
    """A package, a module or a folder of sources.

    Attributes:
        name: Dotted prefix of the module names; empty for the standard library.
        label: Name to display.
        root: Folder or ``.py`` file.
        version: Changes when the sources change.
    """

    name: str
    label: str
    root: Path
    version: str


@dataclass(frozen=True)
class SourceFile:
    """A Python file and the dotted name of its module."""

    module: str
    path: Path


def find_packages(names: Sequence[str] | None = None) -> list[Package]:
    """Locate packages without importing them.

    Args:
        names: Import names of packages or modules (``numpy``, ``json``, ``numpy.linalg``), ``stdlib``, or paths of
            folders or ``.py`` files. The installed ones of `DEFAULT_PACKAGES` when None.

    Returns:
        The packages in the order given.

    Raises:
        ValueError: A name is neither installed nor a path.
    """
    if names is None:
        found = [_find_package(name) for name in DEFAULT_PACKAGES]
        return [package for package in found if package is not None]
    packages = []
    for name in names:
        package = _find_package(name)
        if package is None:
            raise ValueError(
                f"packages must name installed packages, {STANDARD_LIBRARY!r}, or folders of Python files; "
                f"got {name!r}.{did_you_mean(name, DEFAULT_PACKAGES)}"
            )
        packages.append(package)
    if not packages:
        raise ValueError("packages must name at least one package; got none")
    return packages


def _find_package(name: str) -> Package | None:
    """Locate one package; None if it is missing."""
    if name == STANDARD_LIBRARY:
        return Package("", "Python", Path(sysconfig.get_paths()["stdlib"]), platform.python_version())
    path = Path(name)
    if path.is_dir() or (path.suffix == ".py" and path.is_file()):
        return Package(path.resolve().stem, path.resolve().stem, path.resolve(), _state_of(path))
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)  # finds a top-level package without running its code
    except (ImportError, ValueError):
        return None
    if spec is None or not top.isidentifier():
        return None
    if spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations))).joinpath(*inner)
        root = root if root.is_dir() else root.with_suffix(".py")
    elif spec.origin and spec.origin.endswith(".py") and not inner:
        root = Path(spec.origin)
    else:
        return None
    return Package(name, name, root, _version_of(top)) if root.exists() else None


def _version_of(top: str) -> str:
    """Return the version of an import name's distribution, or Python's for the standard library."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(top, top))
    except importlib.metadata.PackageNotFoundError:
        return platform.python_version()


def _state_of(root: Path) -> str:
    """Return a digest of the files below a path: names, sizes and modification times."""
    digest = hashlib.sha256()
    for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
        state = file.stat()
        digest.update(f"{file.relative_to(root)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def source_files(package: Package) -> Iterator[SourceFile]:
    """List a package's Python files by module name, without tests and vendored copies."""
    if package.root.is_file():
        yield SourceFile(package.name, package.root)
        return
    files = []
    for folder, inner, names in os.walk(package.root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            parts = path.relative_to(package.root).with_suffix("").parts
            module = ".".join(filter(None, (package.name, *parts))).removesuffix(".__init__")
            if parts[-1] in _LEFT_OUT_FILES or module.startswith(_LEFT_OUT_MODULES):
                continue
            if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                files.append(SourceFile(module, path))
    yield from sorted(files, key=lambda file: (file.module, file.path.name))
