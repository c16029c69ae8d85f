import sys

import pytest

from hf_hybrid.data import sources
from hf_hybrid.data.sources import DEFAULT_PACKAGES, find_packages, source_files


def test_installed_packages_are_found_with_their_versions():
    import numpy

    package, library = find_packages(["numpy", "stdlib"])
    assert (package.name, package.version) == ("numpy", numpy.__version__)
    assert library.version == ".".join(map(str, sys.version_info[:3]))
    modules = [file.module for file in source_files(package)]
    assert "numpy" in modules
    assert "numpy.linalg._linalg" in modules
    assert modules == sorted(modules)
    assert not any("tests" in module.split(".") for module in modules)


def test_the_standard_library_is_listed_without_installed_packages():
    modules = [file.module for file in source_files(find_packages(["stdlib"])[0])]
    assert "json.decoder" in modules
    assert not any(module.startswith(("site-packages", "test.")) for module in modules)


def test_modules_and_subpackages_can_be_named():
    single, inner = find_packages(["textwrap", "numpy.linalg"])
    assert [file.module for file in source_files(single)] == ["textwrap"]
    assert "numpy.linalg._linalg" in [file.module for file in source_files(inner)]


def test_packages_are_found_and_listed_without_running_them(tmp_path, monkeypatch):
    for folder in ("never_run", "never_run/inner"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "never_run_module.py").write_text("raise SystemExit('must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    packages = find_packages(["never_run", "never_run.inner", "never_run_module"])
    modules = [[file.module for file in source_files(package)] for package in packages]
    assert modules == [["never_run", "never_run.inner"], ["never_run.inner"], ["never_run_module"]]


def test_the_default_packages_that_are_installed_are_found(monkeypatch):
    monkeypatch.setattr(
        sources, "DEFAULT_PACKAGES", {"numpy": "numpy", "not_installed_anywhere": "x", "torch": "torch"}
    )
    assert [package.name for package in find_packages()] == ["numpy", "torch"]
    assert {"stdlib", "numpy", "torch", "transformers"} <= set(DEFAULT_PACKAGES)


def test_an_unknown_package_is_named_with_the_closest_known():
    with pytest.raises(
        ValueError, match=r"packages must name installed packages.*got 'nunpy'\. Did you mean 'numpy'\?"
    ):
        find_packages(["nunpy"])
    with pytest.raises(ValueError, match="packages must name at least one package; got none"):
        find_packages([])


def test_a_folder_changes_its_version_with_its_files(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = find_packages([str(tmp_path)])[0].version
    assert find_packages([str(tmp_path)])[0].version == before
    (tmp_path / "b.py").write_text("y = 2")
    assert find_packages([str(tmp_path)])[0].version != before
