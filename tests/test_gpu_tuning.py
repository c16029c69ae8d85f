"""The tuner of Triton's kernels, rehearsed on a CPU: what it tries, what it ships, and that kernels read its table."""

import runpy

import pytest
import torch

from benchmarks import gpu_tuning
from benchmarks.aot_launches import MODULES, configurations, recorded
from benchmarks.gpu_kernels import Clock
from benchmarks.gpu_tuning import KEYS, RAGGED, best, shipped, table, together, variants, write_table
from hf_hybrid.kernels.launching import record_launches
from hf_hybrid.kernels.tuned import TUNED

CPU = torch.device("cpu")
FORWARD = ("short_conv", "forward", 90)


def row(key, ratio, outcome="ok", tiles=None, **numbers):
    default = configurations(key[0])[key[1]]
    found = default._replace(tiles=default.tiles | (tiles or {}), **numbers)
    spent = {"ms": f"{ratio}", "default_ms": "1"} if outcome == "ok" else {"ms": "", "default_ms": ""}
    return gpu_tuning._key(key, found) | spent | {"outcome": outcome}


def test_the_shipped_table_names_what_there_is():
    for (op, name, capability), (tiles, num_warps, num_stages) in TUNED.items():
        assert configurations(op)[name].tiles.keys() == tiles.keys()
        assert capability >= 70
        assert num_warps in gpu_tuning.WARPS
        assert num_stages in gpu_tuning.STAGES
    assert gpu_tuning.FREE.keys() == MODULES.keys()


def test_every_launch_reads_the_table():
    """Each configuration that is recorded is looked up by its op, its name and the device's capability."""
    other = {}
    for op in MODULES:
        for default in configurations(op).values():
            other[op, default.name, 90] = default._replace(num_warps=16)
    with table(other):
        launches = list(recorded(90))
    assert {launch.configuration.num_warps for _, launch in launches} == {16}
    with table(other):
        assert {launch.configuration.num_warps for _, launch in recorded(80, ["short_conv"])} == {1, 4}
    assert not any(key in TUNED for key in other)


def test_a_candidate_differs_in_one_number():
    for op in MODULES:
        for default in configurations(op).values():
            for candidate in variants(op, default):
                changed = [
                    name for name in ("num_warps", "num_stages") if getattr(candidate, name) != getattr(default, name)
                ]
                changed += [name for name in default.tiles if candidate.tiles[name] != default.tiles[name]]
                assert len(changed) == 1
                assert candidate.tiles.keys() == default.tiles.keys()
    products = ("local_attention", "linear_attention", "segment_recurrence")
    assert not any(
        32 in sizes for op in products for tile, sizes in gpu_tuning.FREE[op].items() if tile in ("BT", "BV")
    )


def test_the_best_of_every_number_are_tried_together():
    rows = [
        row(FORWARD, 0.9, num_warps=8),
        row(FORWARD, 0.8, num_warps=2),
        row(FORWARD, 0.95, tiles={"BD": 64}),
        row(FORWARD, 0.99, num_stages=3),
        row(FORWARD, 0, outcome="wrong: output", tiles={"BT": 16}),
    ]
    default = configurations("short_conv")["forward"]
    expected = default._replace(tiles={"BT": 32, "BD": 64}, num_warps=2)
    assert together(FORWARD, rows) == expected
    assert together(FORWARD, rows[:2]) is None
    assert best(rows) == {FORWARD: default._replace(num_warps=2)}
    assert best(rows[3:]) == {}


def test_only_what_is_right_at_ragged_shapes_is_written(tmp_path):
    rows = [row(FORWARD, 0.8, num_warps=2), row(("ssm_step", "token m16", 90), 0.5, tiles={"BH": 4})]
    assert shipped(rows) == {}
    for op, outcome in (("short_conv", "ok"), ("ssm_step", "B3 fp16: wrong: output")):
        name = gpu_tuning._name(op, best(rows))
        rows.append(dict(zip(KEYS, (op, RAGGED, "90", name, "", ""), strict=True)) | {"ms": "", "outcome": outcome})
    older = {("long_conv", "multiply", 80): configurations("long_conv")["multiply"]._replace(num_stages=2)}
    older |= {("long_conv", "multiply", 90): configurations("long_conv")["multiply"]._replace(num_stages=3)}
    with table(older):
        write_table(rows, tmp_path / "tuned.py")
    assert runpy.run_path(tmp_path / "tuned.py")["TUNED"] == {
        ("short_conv", "forward", 90): ({"BT": 32, "BD": 32}, 2, 1),
        ("long_conv", "multiply", 80): ({"BF": 512}, 4, 2),
    }
    assert max(map(len, (tmp_path / "tuned.py").read_text().splitlines())) <= 119
    # another candidate is faster: what was checked at ragged shapes is no longer what would be shipped
    assert shipped([*rows, row(FORWARD, 0.7, num_warps=8)]) == {}


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_a_candidate_is_checked_and_timed_and_a_wrong_one_is_not(monkeypatch, shift):
    """On a CPU without the interpreter: torch's path stands in for the kernel's, and reads the table as it would."""
    case = next(case for case in gpu_tuning.cases(small=True) if case.op == "short_conv")
    candidate = configurations("short_conv")["forward"]._replace(num_warps=2)
    read = []

    def run(x, backend):
        tiles = TUNED.get(FORWARD)
        read.append(tiles)
        return case.run(x, "torch") * (1 + shift * (backend == "triton" and tiles is not None))

    (found,) = gpu_tuning.measure(FORWARD, case._replace(run=run), "fp32", candidate, Clock(CPU), 1)
    assert found["num_warps"] == "2"
    assert TUNED.get(FORWARD) is None
    tried = (candidate.tiles, 2, candidate.num_stages)
    assert tried in read
    if shift:
        assert found["outcome"].startswith("wrong: output")
        assert "ms" not in found
    else:
        assert found["outcome"] == "ok"
        assert min(float(found["ms"]), float(found["default_ms"])) > 0
        assert (candidate.tiles, 4, 1) in read


def test_what_a_case_launches_is_seen():
    case = next(case for case in gpu_tuning.cases(small=True) if case.op == "short_conv")
    with record_launches(90):
        found = gpu_tuning.asked(case, "fp32", CPU)
    assert found == [FORWARD, ("short_conv", "backward", 90)]


def test_cells_go_on_to_the_combination_and_the_ragged_shapes(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the plan alone: nothing is run
    keys = [FORWARD, ("short_conv", "backward", 90)]
    monkeypatch.setattr(gpu_tuning, "asked", lambda *_: keys)
    rows, planned = [], []
    for key, _ in gpu_tuning.cells(CPU, True, ["short_conv"], rows):
        planned.append(key)
        better = key["configuration"] == "forward" and (key["num_warps"] == "2" or '"BD": 64' in key["tiles"])
        rows.append(
            key | {"ms": "" if key["configuration"] == RAGGED else "0.5" if better else "1", "default_ms": "1"}
        )
    default = configurations("short_conv")["forward"]
    assert gpu_tuning._key(FORWARD, default._replace(tiles={"BT": 32, "BD": 64}, num_warps=2)) in planned
    assert [key["configuration"] for key in planned][-1] == RAGGED
    assert len({tuple(key.values()) for key in planned}) == len(planned)
