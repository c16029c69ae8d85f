"""A small package of documented modules, written to disk, from which corpora are built in a second."""

from pathlib import Path

import pytest

FRUIT = ("apple", "banana", "cherry", "damson", "elder", "fig", "grape", "hazel", "iris", "juniper", "kiwi", "lemon")
THINGS = ("basket", "harvest", "garden", "market", "recipe", "season")


def write_package(root: Path, modules: int = 100) -> Path:
    """Write modules, each with a module docstring and documented functions; every page is of different words."""
    root.mkdir(parents=True)
    for number in range(modules):
        fruit, thing = FRUIT[number % len(FRUIT)], THINGS[number // len(FRUIT) % len(THINGS)]
        key = f"{fruit}{chr(97 + number // 26)}{chr(97 + number % 26)}"
        functions = [_function(verb, key, fruit, thing) for verb in ("sort", "count", "ship", "paint", "weigh")]
        (root / f"module_{key}.py").write_text(
            f'"""Tools that handle the {key} of the {thing} and sort or weigh it.\n\nMore about {key}.\n"""\n\n'
            + "\n\n".join(functions)
        )
    return root


def _function(verb: str, key: str, fruit: str, thing: str) -> str:
    steps = "\n".join(
        f"    The {verb}{x}{key} step of {key}{x} moves the {x}{verb}{key} of {thing}{verb}{key} into {verb}{x}{key}."
        for x in "abcdef"
    )
    return (
        f"def {verb}_{key}({fruit}, limit=3):\n"
        f'    """{verb.title()} the {key} in the {thing} by its {verb} rule.\n\n{steps}\n\n'
        f'    Args:\n        {fruit}: The {key} that the {verb} works on.\n    """\n'
    )


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_package(tmp_path_factory.mktemp("sources") / "orchard"))
