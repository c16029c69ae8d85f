"""Every operation on a divided sequence computes what one process computes, and sends what its docstring says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hybrid.context_parallel import check_divisible

from ..bare import BARE
from ..matrix import some
from ..torchrun import LIMIT, once
from .behaviours import BEHAVIOURS
from .checking import cases, drawn_names
from .losing import ALONE, LAST, WATCHED, victim
from .models import model_cases
from .training import TRAINING

FULL_LIMIT = 1800
"""Seconds for the rest of the matrix, in which up to eight processes share the cores."""
pytestmark = pytest.mark.timeout(FULL_LIMIT)  # the first test of a run waits for all
CHECKING = "tests.context_parallel.checking"
LOSING = f"{BARE}from tests.context_parallel import losing; losing.main(losing.Path(sys.argv[1]))"
ORDINARY = [case.name for case in cases(False)]
REST = [*(case.name for case in cases(True)), *drawn_names()]
MODELS, MODELS_REST = ([name for name, *_ in model_cases(full)] for full in (False, True))


def table(tmp_path_factory, full: bool) -> dict[str, str]:
    limit = FULL_LIMIT if full else LIMIT
    return filled(tmp_path_factory, f"context_parallel_{int(full)}", "-m", CHECKING, str(int(full)), limit=limit)


def filled(tmp_path_factory, name: str, *command: str, limit: int = LIMIT) -> dict:
    """The table that Python writes to a folder, its last argument."""

    def fill(folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, *command, str(folder)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert run.returncode == 0, run.stderr

    return json.loads((once(tmp_path_factory, name, fill) / "table.json").read_text())


@pytest.mark.parametrize("name", some(dict.fromkeys(ORDINARY + REST), *ORDINARY))
def test_a_divided_operation_equals_one_process(name, tmp_path_factory):
    assert table(tmp_path_factory, name not in ORDINARY)[name] == ""


def test_divided_operations_keep_the_tolerances_of_float32(tmp_path_factory):
    assert table(tmp_path_factory, False)["float32"] == ""


@pytest.mark.parametrize("name", some(MODELS + MODELS_REST, *MODELS))
def test_a_model_on_a_divided_sequence_equals_one_process(name, tmp_path_factory):
    assert table(tmp_path_factory, name not in MODELS)[name] == ""


@pytest.mark.parametrize("name", some([*TRAINING[False], *TRAINING[True]], *TRAINING[False]))
def test_training_on_divided_sequences(name, tmp_path_factory):
    assert table(tmp_path_factory, name in TRAINING[True])[name] == ""


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_all_operations_behave(name, tmp_path_factory):
    assert table(tmp_path_factory, False)[name] == ""


@pytest.mark.parametrize("case", [*ALONE, *WATCHED])
def test_all_that_are_left_name_the_lost_process_and_no_other(case, tmp_path_factory):
    messages = filled(tmp_path_factory, "context_parallel_losing", "-c", LOSING, limit=2 * LIMIT)[case]
    if case == "barrier leaves":  # it has ended in order, so nobody misses it
        assert messages == ["nothing"] * LAST
        return
    said = f"rank {LAST} ended, or did not answer in time, and none can go on without the others"
    if victim(case) == 0:
        said = "rank 0, or what started it, did not answer for 6 seconds"
    assert all(message.removeprefix("aloud: ").startswith(said) for message in messages), messages
    assert [message.startswith("aloud: ") for message in messages].count(True) <= 1


def test_what_cannot_be_divided_is_refused():
    check_divisible("LSTM", 1)
    check_divisible("s4", 8)
    with pytest.raises(ValueError, match=r"context_parallel_size must be 1 with LSTM: its gates.* got 8 processes"):
        check_divisible("LSTM", 8)
