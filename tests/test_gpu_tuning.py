"""The tuner of Triton's kernels, rehearsed on a CPU: what it tries, what it ships, and that kernels read its table."""

import runpy

import pytest
import torch

from benchmarks import gpu, gpu_kernels, gpu_tuning
from benchmarks.aot_launches import MODULES, configurations, recorded
from benchmarks.gpu_kernels import Clock
from benchmarks.gpu_tuning import KEYS, NONE, RAGGED, Bench, best, shipped, table, together, variants, write_table
from hf_hybrid.kernels.launching import record_launches
from hf_hybrid.kernels.tuned import TUNED

CPU = torch.device("cpu")
FORWARD = ("short_conv", "forward", 90)
CASES = [case for case in gpu_tuning.cases(small=True) if case.op == "short_conv"]
CASES += [CASES[0]._replace(shape="another"), CASES[0]._replace(shape="a third")]


def row(key, ratio, outcome="ok", tiles=None, place=0, shapes=1, **numbers):
    default = configurations(key[0])[key[1]]
    found = default._replace(tiles=default.tiles | (tiles or {}), **numbers)
    spent = {"ms": f"{ratio}", "default_ms": "1"} if outcome == "ok" else {"ms": "", "default_ms": ""}
    named = gpu_tuning._key(key, (CASES[place], "bf16"), found)
    return named | spent | {"outcome": outcome, "shapes": str(shapes)}


def ragged(op, found, outcome):
    name = gpu_tuning._name(op, found)
    return dict(zip(KEYS, (op, RAGGED, "90", "", "", name, "", ""), strict=True)) | {"ms": "", "outcome": outcome}


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
    narrow = configurations("local_attention")["d_query float32"]
    assert [x.num_warps for x in variants("local_attention", narrow) if x.num_warps != 4] == [1, 2]
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
    for op, outcome in (("short_conv", "ok"), ("ssm_step", "wrong: output (B3 fp16)")):
        rows.append(ragged(op, best(rows), outcome))
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


def test_the_best_one_is_the_best_of_all_shapes():
    """One shape may mislead: a candidate that is slower at another one, or was not timed there, is not taken."""
    default = configurations("short_conv")["forward"]
    rows = [row(FORWARD, 0.5, num_warps=2, shapes=2), row(FORWARD, 0.9, num_warps=8, shapes=2)]
    assert best(rows) == {}
    rows += [row(FORWARD, 1.3, num_warps=2, place=1, shapes=2)]
    assert gpu_tuning.is_slower(FORWARD, default._replace(num_warps=2), rows)
    assert not gpu_tuning.is_slower(FORWARD, default._replace(num_warps=8), rows)
    rows += [row(FORWARD, 0.9, num_warps=8, place=1, shapes=2)]
    assert best(rows) == {FORWARD: default._replace(num_warps=8)}
    rows += [row(FORWARD, 0.95, num_warps=1, shapes=2), row(FORWARD, 0.5, num_warps=1, place=1, shapes=2)]
    assert best(rows) == {FORWARD: default._replace(num_warps=1)}  # the smallest mean, 0.69


def test_the_finalists_are_timed_at_the_other_shapes():
    """All candidates at the first shape, two of them at the others, and none on where it has been slower."""
    default = configurations("short_conv")["forward"]
    fast, faster = default._replace(num_warps=8), default._replace(num_warps=2)
    rows, planned = [], []
    places = [(case, "bf16") for case in CASES]
    for key, _ in gpu_tuning._candidates(FORWARD, places, Bench(Clock(CPU), 1), rows):
        candidate = gpu_tuning._configuration(key)
        planned.append((key["shape"], candidate))
        ratio = {8: 0.8, 2: 0.6 if key["shape"] == CASES[0].shape else 1.5}.get(candidate.num_warps, 1)
        rows.append(key | {"ms": str(ratio), "default_ms": "1", "shapes": "3", "outcome": "ok"})
    others = [(shape, candidate) for shape, candidate in planned if shape != CASES[0].shape]
    assert others == [("another", faster), ("another", fast), ("a third", fast)]
    assert planned[: -len(others)] == [(CASES[0].shape, candidate) for candidate in variants("short_conv", default)]
    assert best(rows) == {FORWARD: fast}


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

    (found,) = gpu_tuning.measure(FORWARD, case._replace(run=run), "fp32", candidate, Bench(Clock(CPU), 1))
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


def failing(error):
    """A case whose kernels cannot be launched in another configuration than the default."""

    def run(x, backend):
        if backend == "triton" and TUNED.get(FORWARD, (None, 4))[1] != 4:
            raise error
        return CASES[0].run(x, "torch")

    return CASES[0]._replace(run=run)


def test_a_candidate_that_does_not_fit_the_device_is_no_failure():
    errors = pytest.importorskip("triton.runtime.errors")
    candidate = configurations("short_conv")["forward"]._replace(num_warps=8)
    outcomes = []
    for error in (errors.OutOfResources(300000, 232448, "shared memory"), errors.PTXASError(""), ZeroDivisionError()):
        for checked in (True, False):
            bench = Bench(Clock(CPU), 1)
            (found,) = gpu_tuning.measure(FORWARD, failing(error), "fp32", candidate, bench, checked=checked)
            outcomes.append(found["outcome"])
            assert "ms" not in found
    assert outcomes[0].startswith("cannot be launched: OutOfResources: out of resource: shared memory")
    assert [outcome.startswith(gpu.FAILURES) for outcome in outcomes] == [False] * 4 + [True] * 2


def test_a_shape_is_computed_in_float64_once_for_all_candidates():
    wide, default = [], configurations("short_conv")["forward"]

    def run(x, backend):
        wide.append(x["u"].dtype == torch.float64)
        return CASES[0].run(x, "torch")

    bench = Bench(Clock(CPU), 1)
    for candidate in variants("short_conv", default)[:3]:
        (found,) = gpu_tuning.measure(FORWARD, CASES[0]._replace(run=run), "fp32", candidate, bench)
        assert found["outcome"] == "ok"
    assert sum(wide) == 1


def test_an_op_that_does_not_run_has_a_row(monkeypatch):
    """Where Triton is missing, the tuner has nothing to do, and must not end as if all were well."""
    monkeypatch.setattr(gpu_tuning, "kernels_are_due", lambda device: True)
    monkeypatch.setattr(gpu_kernels, "kernels_are_due", lambda device: True)
    ((key, measure),) = gpu_tuning.cells(CPU, True, ["short_conv"], [])
    (found,) = measure()
    assert key["configuration"] == NONE
    assert found["outcome"] == "refused: not every tensor is on a CUDA device"
    assert found["outcome"].startswith(gpu.FAILURES)


def test_what_a_case_launches_is_seen():
    case = next(case for case in gpu_tuning.cases(small=True) if case.op == "short_conv")
    with record_launches(90):
        found = gpu_tuning.asked(case, "fp32", CPU)
    assert found == [FORWARD, ("short_conv", "backward", 90)]


def test_cells_go_on_to_the_combination_and_the_ragged_shapes(monkeypatch):
    monkeypatch.setattr(gpu_tuning, "kernels_are_due", lambda device: True)  # the plan alone: nothing is run
    keys = [FORWARD, ("short_conv", "backward", 90)]
    monkeypatch.setattr(gpu_tuning, "asked", lambda *_: keys)
    rows, planned = [], []
    for key, _ in gpu_tuning.cells(CPU, True, ["short_conv"], rows):
        planned.append(key)
        better = key["configuration"] == "forward" and (key["num_warps"] == "2" or '"BD": 64' in key["tiles"])
        ms = "" if key["configuration"] == RAGGED else "0.5" if better else "1"
        rows.append(key | {"ms": ms, "default_ms": "1", "shapes": "1"})
    combined = configurations("short_conv")["forward"]._replace(tiles={"BT": 32, "BD": 64}, num_warps=2)
    assert gpu_tuning._key(FORWARD, (CASES[0], "fp32"), combined) in planned
    assert [key["configuration"] for key in planned][-1] == RAGGED
    assert len({tuple(key.values()) for key in planned}) == len(planned)
