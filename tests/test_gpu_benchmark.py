"""The benchmark for a GPU, rehearsed on a CPU: what it compares is the same, and what is wrong shows."""

import argparse
import copy
import importlib.util
import math
import statistics
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import (
    gpu,
    gpu_further,
    gpu_kernels,
    gpu_models,
    gpu_plan,
    gpu_sanitizer,
    gpu_tables,
    gpu_tuning,
    results_page,
)
from benchmarks.aot_launches import MODULES, shipped
from benchmarks.gpu_cases import attention, cases, checked_cases
from benchmarks.gpu_kernels import check
from benchmarks.gpu_paths import code_of, launched
from benchmarks.record import read_csv, write_csv
from hf_hybrid.kernels.launching import Configuration, record_launches
from hf_hybrid.kernels.local_attention import local_attention

from .matrix import some

CPU = torch.device("cpu")
# they compute something else on purpose, or want a GPU
OTHERS = {
    "softmax attention (SDPA)",
    "softmax attention (SDPA) to all segments",
    "flash-attn, without the bias",
    "fla chunk_linear_attn",
    "FlashFFTConv",
    "FlexAttention, compiled",
    "the same, compiled",
    "causal-conv1d",
    "accelerated-scan",
}
SMALL = {f"{case.op} {case.shape}": case for case in cases(small=True)}
SMALL_CASE = next(iter(SMALL.values()))


@pytest.mark.parametrize("name", SMALL)
def test_peers_compute_what_the_op_does(name):
    case = SMALL[name]
    torch.manual_seed(0)
    inputs = {name: x.double() for name, x in case.make(CPU).items()}
    expected = case.run(inputs, "torch")
    for name, peer in case.peers.items():
        if name not in OTHERS:
            assert gpu_kernels.relative_error(peer()(inputs), expected) < 1e-6, name


def test_every_shipped_configuration_is_checked():
    """On sm_80 and sm_90 together, by a forward and a backward of the cases that a GPU is given."""
    module_of = {"s4_kernel": "ssm_kernel", "segment_step": "segment_recurrence"} | {op: op for op in MODULES}
    expected = {(op, name) for op in MODULES for name in shipped(op)}
    taken = set()
    for case in checked_cases(small=False):
        for dtype in gpu_kernels.DTYPES.values():
            for capability in (80, 90):
                inputs = gpu_kernels.make_inputs(case, CPU, dtype, seed=0)
                with record_launches(capability) as launches:
                    outputs = case.run(inputs, "triton")
                    if not case.decodes:
                        sum(x.sum() for x in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
                taken |= {(module_of[case.op], launch.configuration.name) for launch in launches}
    assert taken == expected


def test_dropout_is_checked_with_the_mask_that_was_drawn():
    case = attention.local_dropout(2, 40, 2, 16, 7, 0.25)
    inputs = gpu_kernels.make_inputs(case, CPU, torch.float64, seed=1)
    torch.manual_seed(3)
    actual = local_attention(inputs["q"], inputs["k"], inputs["v"], bias=inputs["bias"], radius=7, dropout=0.25)
    assert gpu_kernels.relative_error(actual.detach(), case.run(inputs, "torch").detach()) < 1e-6
    rows = check(case, "fp32", CPU, ("torch", "triton"))
    assert [row["outcome"] for row in rows] == ["ok", "not every tensor is on a CUDA device"]


def test_what_is_wrong_shows():
    case = next(case for case in SMALL.values() if case.op == "short_conv")

    def wrong(x, backend):
        return case.run(x, "torch") * (1 if backend == "torch" else 1 + 1e-3)

    def moving(x, backend):
        return case.run(x, "torch") + (0 if backend == "torch" else 1e-9 * torch.rand(()))

    def raising(x, backend):
        if backend == "triton":
            raise RuntimeError("an illegal memory access was encountered")
        return case.run(x, backend)

    outcomes = {}
    for run in (case.run, wrong, moving, raising):
        torch_row, row = check(case._replace(run=run), "fp32", CPU, ("torch", "triton"))
        assert torch_row["outcome"] == "ok"
        outcomes[run] = row["outcome"]
    assert outcomes[case.run] == "not every tensor is on a CUDA device"
    assert outcomes[wrong].startswith("wrong: output, ")
    assert outcomes[moving] == "not the same twice: output"
    assert outcomes[raising] == "raised: RuntimeError: an illegal memory access was encountered"
    assert all(outcome.startswith(gpu.FAILURES) for run, outcome in outcomes.items() if run is not case.run)


def test_a_refusal_is_a_failure_where_kernels_are_due(monkeypatch):
    """On a GPU; so that a machine without Triton, or with a GPU that is too old, does not pass."""
    assert gpu_kernels.kernels_are_due(torch.device("cuda"))
    refused = ValueError("short_conv cannot run on triton: triton is not installed")
    outcome = gpu_kernels.own_outcome(refused, torch.device("cuda"))
    assert outcome == "refused: triton is not installed"
    assert outcome.startswith(gpu.FAILURES)
    if not gpu_kernels.kernels_are_due(CPU):
        assert gpu_kernels.own_outcome(refused, CPU) == "triton is not installed"
    monkeypatch.setattr(gpu_kernels, "kernels_are_due", lambda device: True)
    case = next(case for case in SMALL.values() if case.op == "short_conv")
    _, row = check(case, "fp32", CPU, ("torch", "triton"))
    assert row["outcome"] == "refused: not every tensor is on a CUDA device"


def absent():
    raise ModuleNotFoundError("No module named 'causal_conv1d'")


def broken(inputs):
    raise RuntimeError("device-side assert triggered")


def test_contenders_of_ours_that_do_not_run_are_failures_and_peers_are_not(tmp_path, monkeypatch):
    case = next(case for case in SMALL.values() if case.op == "short_conv")
    case = case._replace(peers={"absent": absent, "broken": lambda: broken})
    monkeypatch.setattr(gpu, "cases", lambda small: [case])
    assert gpu.run_part("kernels", part_arguments(tmp_path)) == 0  # on a CPU, Triton's kernels cannot run
    monkeypatch.setattr(gpu_kernels, "kernels_are_due", lambda device: True)
    assert gpu.run_part("kernels", part_arguments(tmp_path / "due")) == gpu.FAILED

    def raising(x, backend):
        return broken(x) if backend == "torch" else case.run(x, "torch")

    monkeypatch.setattr(gpu, "cases", lambda small: [case._replace(run=raising)])
    assert gpu.run_part("kernels", part_arguments(tmp_path / "raises")) == gpu.FAILED
    outcomes = {}
    for folder in ("due", "raises"):
        rows = [row for row in read_csv(tmp_path / folder / "kernels.csv") if row["direction"] == "forward"]
        outcomes[folder] = {row["contender"]: row["outcome"] for row in rows}
    peers = {
        "absent": "not installed: No module named 'causal_conv1d'",
        "broken": "RuntimeError: device-side assert triggered",
    }
    assert outcomes["due"] == peers | {
        "hf_hybrid, triton": "refused: not every tensor is on a CUDA device",
        "hf_hybrid, torch": "ok",
    }
    assert outcomes["raises"] == peers | {
        "hf_hybrid, triton": "ok",
        "hf_hybrid, torch": "raised: RuntimeError: device-side assert triggered",
    }
    assert not any(outcome.startswith(gpu.FAILURES) for outcome in peers.values())


def test_steps_are_raced_in_graphs_too():
    ceilings = {"copy_gbs": "1", "fp32_tflops": "1"}
    rows = list(
        gpu_kernels.race(
            next(case for case in SMALL.values() if case.op == "local_attention_step"),
            "fp32",
            gpu_kernels.Clock(CPU),
            ceilings,
            1,
        )
    )
    refused = "NeedsGpu: CUDA graphs need a GPU"
    assert {row["contender"]: row["outcome"] for row in rows if row["contender"] != "hf_hybrid, triton"} == {
        "hf_hybrid, torch": "ok",
        "SDPA, cut to the window": "ok",
        "hf_hybrid, torch, CUDA graph": refused,
        "SDPA, cut to the window, CUDA graph": refused,
    }
    assert {row["direction"] for row in rows} == {"forward"}


def part_arguments(folder, **given):
    return argparse.Namespace(
        **{"device": "cpu", "small": True, "out": folder, "until": math.inf, "ops": None, "tuned": None} | given,
        csv=None,
    )


def test_a_part_keeps_what_it_has_measured(tmp_path, monkeypatch):
    measured = []

    def cells(device, arguments, rows):
        for op, outcome in (("one", "wrong: output"), ("two", "ok"), ("three", "ok")):
            key = {"op": op, "shape": "B1", "dtype": "fp32", "fingerprint": mark[0]}
            yield key, lambda op=op, outcome=outcome: measured.append(op) or broken.get(op) or [{"outcome": outcome}]

    mark, broken = ["a"], {"three": iter(lambda: 1 // 0, None)}
    monkeypatch.setitem(gpu.PARTS, "checks", cells)
    with pytest.raises(ZeroDivisionError):
        gpu.run_part("checks", part_arguments(tmp_path))
    assert [row["op"] for row in read_csv(tmp_path / "checks.csv")] == ["one", "two"]
    assert gpu.run_part("checks", part_arguments(tmp_path, until=0)) == gpu.NOT_DONE
    page = gpu.report(tmp_path, {"checks": "failed, exit 1"})
    assert "checks: failed, exit 1" in page
    assert "checks: 2 rows, 1 of them failed" in page
    assert "- one B1 fp32: wrong: output" in page
    broken.clear()
    assert gpu.run_part("checks", part_arguments(tmp_path)) == 4  # the first one is still wrong
    assert measured == ["one", "two", "three", "three"]
    mark[0] = "b"  # other configurations: what was measured before is measured again, and replaced
    assert gpu.run_part("checks", part_arguments(tmp_path)) == 4
    assert measured[4:] == ["one", "two", "three"]
    assert [(row["op"], row["fingerprint"]) for row in read_csv(tmp_path / "checks.csv")] == [
        ("one", "b"),
        ("two", "b"),
        ("three", "b"),
    ]


def test_what_ended_a_part_comes_last_and_the_second_time_is_a_failure(tmp_path, monkeypatch):
    """As if the process had been killed: the rows of half a cell stay until it is measured anew."""
    began = []

    def cells(device, arguments, rows):
        for op in ("hangs", "well"):

            def measure(op=op):
                began.append(op)
                yield {"contender": "first", "outcome": "ok"}
                if op == "hangs":
                    raise KeyboardInterrupt

            yield {"op": op, "shape": "B1", "dtype": "fp32", "fingerprint": "a"}, measure

    monkeypatch.setitem(gpu.PARTS, "kernels", cells)
    for expected in (["hangs"], ["well", "hangs"]):
        began.clear()
        with pytest.raises(KeyboardInterrupt):
            gpu.run_part("kernels", part_arguments(tmp_path))
        assert began == expected
    assert [row["op"] for row in read_csv(tmp_path / "kernels.csv")] == ["well", "hangs"]
    began.clear()
    assert gpu.run_part("kernels", part_arguments(tmp_path)) == gpu.FAILED
    assert began == []
    outcomes = [(row["op"], row["contender"], row["outcome"]) for row in read_csv(tmp_path / "kernels.csv")]
    assert outcomes[1:] == [
        ("hangs", "first", "ok"),
        ("hangs", "", "raised: it did not end in the time of two calls"),
    ]
    assert gpu.run_part("kernels", part_arguments(tmp_path)) == gpu.FAILED  # and is not begun a third time
    assert began == []


def test_a_part_that_is_ended_goes_on_in_the_same_call(tmp_path, monkeypatch):
    """Its share was too short; what is left of the call goes to it."""
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda *_, **__: SimpleNamespace(wait=wait, pid=0))
    monkeypatch.setattr(gpu.os, "killpg", lambda *_: None)

    def wait(seconds=None):
        if seconds is not None:
            raise subprocess.TimeoutExpired("", seconds)

    ended = gpu._start("models", ["all"], tmp_path / "models.csv", time.monotonic(), part_arguments(tmp_path))
    assert ended.said.startswith(gpu.LATER)
    assert not ended.finished


def test_what_was_tuned_is_of_the_kernels_code(tmp_path, monkeypatch):
    code, measured = ["a"], []
    key = dict.fromkeys(gpu.KEYS["tune"], "") | {"op": "short_conv", "configuration": "none"}
    monkeypatch.setitem(gpu.PARTS, "tune", lambda *_: [(key, lambda: measured.append(code[0]) or [{"outcome": "ok"}])])
    monkeypatch.setattr(gpu, "fingerprint", lambda tuned=True: "all" if tuned else code[0])
    for code[0] in "aabb":
        assert gpu.run_part("tune", part_arguments(tmp_path)) == 0
    assert measured == ["a", "b"]
    assert [row["code"] for row in read_csv(tmp_path / "tune.csv")] == ["b"]
    assert (tmp_path / "tuned.py").exists()


def test_results_travel_in_few_archives(tmp_path):
    """Without data that can be drawn again; what was in the folder before stays."""
    results = tmp_path / "results"
    run = results / "lra" / "lra_listops" / "CHELA-0"
    for path in (
        results / "plan.json",
        results / "checks" / "long_conv.csv",
        run / "checkpoint.pt",
        run / "result.json",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (results / "lra" / "data").mkdir()
    (results / "lra" / "data" / "00000.npz").write_text("rows")
    gpu.pack(results, tmp_path / "packed")
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["gpu-CHELA-0.tar.gz", "gpu.tar.gz"]
    gpu.unpack(tmp_path / "packed", tmp_path / "again")
    found = sorted(str(path.relative_to(tmp_path / "again")) for path in (tmp_path / "again").rglob("*.*"))
    assert found == [
        "checks/long_conv.csv",
        "lra/lra_listops/CHELA-0/checkpoint.pt",
        "lra/lra_listops/CHELA-0/result.json",
        "plan.json",
    ]


def test_the_fingerprint_is_that_of_code_and_configurations(tmp_path):
    def fingerprint(op="", tuned=True):
        gpu_kernels.fingerprint.cache_clear()
        return gpu_kernels.fingerprint(op, tmp_path, tuned=tuned)

    files = ["triton_kernels.py"]
    files += [f"{op}/triton_kernels.py" for op in ("long_conv", "local_attention", "local_attention/step")]
    for name in (*files, "long_conv/reference.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    changed = {}
    for name in (*files, "long_conv/reference.py"):
        before = {op: fingerprint(op) for op in ("", "long_conv", "local_attention", "local_attention_step")}
        (tmp_path / name).write_text("x = 2\n")
        changed[name] = {op for op, mark in before.items() if fingerprint(op) != mark}
    every = {"", "long_conv", "local_attention", "local_attention_step"}
    local = {"", "local_attention", "local_attention_step"}
    wanted = dict(zip(files, (every, {"", "long_conv"}, local, local), strict=True))
    assert changed == wanted | {"long_conv/reference.py": set()}
    code, before = fingerprint(tuned=False), {op: fingerprint(op) for op in every}
    with gpu_tuning.table({("local_attention", "forward", 90): Configuration("forward", "", {"BT": 64}, 4, 2)}):
        assert fingerprint(tuned=False) == code
        assert {op for op, mark in before.items() if fingerprint(op) != mark} == local
    gpu_kernels.fingerprint.cache_clear()
    assert gpu.place(SMALL_CASE, "fp32")["fingerprint"] == gpu_kernels.fingerprint(gpu_kernels.op_of(SMALL_CASE))
    assert gpu_models._key("spade", "64", "logits")["fingerprint"] == gpu_kernels.fingerprint()
    assert gpu_models._key("mamba2", "64", "logits")["fingerprint"] == "-"


def test_what_was_missing_is_looked_for_again(tmp_path, monkeypatch):
    outcomes = {"here": "ok", "gone": "not installed: fla"}

    def cells(device, arguments, rows):
        for model, outcome in outcomes.items():
            key = {"model": model, "length": "", "loss": "", "fingerprint": "-"}
            yield key, lambda outcome=outcome: [{"outcome": outcome}]

    monkeypatch.setitem(gpu.PARTS, "models", cells)
    assert gpu.run_part("models", part_arguments(tmp_path)) == 0
    outcomes["gone"] = "ok"
    assert gpu.run_part("models", part_arguments(tmp_path)) == 0
    assert [row["outcome"] for row in read_csv(tmp_path / "models.csv")] == ["ok", "ok"]


class Calls:
    """Calls of `gpu.run_parts` on a clock that moves when a part runs; each part needs some seconds in all."""

    def __init__(self, folder, monkeypatch, needed, made_by="code"):
        self.folder, self.now, self.needed, self.made_by, self.started = folder, 0.0, needed, made_by, []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(gpu, "time", clock)
        monkeypatch.setattr(gpu_plan, "time", clock)
        monkeypatch.setattr(gpu, "_start", self.start)

    def start(self, part, ops, csv, deadline, arguments):
        spent = min(self.needed[part], deadline - self.now)
        csv.write_text("")
        self.started.append((part, round(spent)))
        self.tuned += [part] if arguments.tuned else []
        self.now += spent
        self.needed[part] -= spent
        return gpu.End("ok", True) if self.needed[part] == 0 else gpu.End(f"{gpu.LATER}; the rest is below", False)

    def call(self):
        """Return what ran, with its seconds, and how each part ended."""
        plan = gpu_plan.Plan(self.folder / "plan.json", dict.fromkeys(self.needed, self.made_by))
        arguments = argparse.Namespace(
            parts=tuple(self.needed), minutes=9, out=self.folder, ops=None, small=True, device="cpu", packed=None
        )
        self.started, self.tuned = [], []
        said = gpu.run_parts(arguments, plan)
        return self.started, said


def test_each_part_has_its_share_of_all_calls(tmp_path, monkeypatch):
    """A part that needs more than its share does not keep the others from beginning; what is left over goes to it."""
    shares = gpu_plan.SECONDS
    assert sum(shares.values()) + gpu_plan.HEADROOM <= 1800
    calls = Calls(tmp_path, monkeypatch, {"kernels": 100, "tune": 2000, "models": 390, "losses": 200})
    started, said = calls.call()
    assert started == [("kernels", 100), ("tune", 440)]
    assert said["kernels"] == "ok"
    assert said["models"] == "out of time; not begun in this call"
    started, said = calls.call()
    assert started == [("tune", shares["tune"] - 440), ("models", 390), ("losses", 70)]
    assert said["kernels"] == "ok (in an earlier call)"
    started, said = calls.call()
    assert started == [("tune", 540)]  # the 20 seconds that are left of a share are too few to begin
    assert said["losses"].startswith(gpu.LATER)
    calls.made_by = "other code"  # then everything has its share again
    assert calls.call()[0] == [("kernels", 0), ("tune", shares["tune"])]
    assert gpu_plan.Plan(tmp_path / "plan.json", {"losses": "other code"}).left("losses") == shares["losses"]


def test_models_run_with_what_was_tuned_when_all_is(tmp_path, monkeypatch):
    calls = Calls(tmp_path, monkeypatch, {"tune": gpu_plan.SECONDS["tune"] + 100, "models": 700, "losses": 80})
    (tmp_path / "tuned.py").write_text("TUNED = {}\n")
    calls.call()
    assert calls.started[0] == ("tune", gpu_plan.SECONDS["tune"])
    assert calls.tuned == []
    calls.call()
    assert calls.started[0] == ("models", gpu_plan.SECONDS["models"])
    calls.call()
    assert calls.started[0][0] == "tune"
    assert calls.tuned == ["models"]


def test_a_process_uses_the_table_that_was_tuned(tmp_path, monkeypatch):
    """As it would if the table were shipped: fingerprints are the same."""
    key, found = ("short_conv", "forward", 90), []
    (tmp_path / "tuned.py").write_text(f"TUNED = {{{key}: ({{'BT': 64}}, 8, 3)}}\n")
    monkeypatch.setitem(gpu.PARTS, "models", lambda *_: found.append(dict(gpu_kernels.TUNED)) or [])
    before = gpu_kernels.fingerprint("short_conv"), gpu_kernels.fingerprint("long_conv")
    with gpu_tuning.table({}):  # which puts the table back
        assert gpu.run_part("models", part_arguments(tmp_path, tuned=tmp_path / "tuned.py")) == 0
        after = gpu_kernels.fingerprint("short_conv"), gpu_kernels.fingerprint("long_conv")
    gpu_kernels.fingerprint.cache_clear()
    assert found == [{key: ({"BT": 64}, 8, 3)}]
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)


def test_models_of_the_arena_share_the_time(tmp_path, monkeypatch):
    """A model that is done leaves its time to the others."""
    given = []
    monkeypatch.setattr(gpu_further, "_train", lambda *arguments: given.append(arguments) or [])
    arguments, first = part_arguments(tmp_path, small=False), gpu_further.LRA_MODELS[0]
    for outcome in (None, f"{gpu.LATER}: 2 % of the recipe", "ok"):
        rows = [{"model": first, "outcome": outcome}] if outcome else []
        for _, measure in gpu_further.lra(CPU, arguments, rows):
            measure()
    sharing = [(model, count) for model, _, _, count, _ in given]
    others = [(model, 1) for model in gpu_further.LRA_MODELS[1:]]
    assert sharing == [(first, 2), *others, (first, 2), *others, (first, 1), *others]


def test_a_call_that_is_stopped_counts_too(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(gpu_plan, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu_plan, "EVERY", 0.01)
    path = tmp_path / "plan.json"
    with gpu_plan.Plan(path, {"tune": "a"}).spending("tune"):
        clock[0] = 100.0
        while not path.exists() or gpu_plan.Plan(path, {"tune": "a"}).left("tune") == gpu_plan.SECONDS["tune"]:
            time.sleep(0.01)
        assert gpu_plan.Plan(path, {"tune": "a"}).left("tune") == gpu_plan.SECONDS["tune"] - 100
    assert gpu_plan.Plan(path, {"tune": "b"}).left("tune") == gpu_plan.SECONDS["tune"]


def test_rows_of_other_ops_stay(tmp_path, monkeypatch):
    """Only some ops are checked again; the rest comes from their files, or from the gathered one if they are gone."""

    def start(part, ops, csv, deadline, arguments):
        write_csv(csv, gpu.COLUMNS["checks"], [{"op": op, "outcome": "ok"} for op in ops])
        return gpu.End("ok", True)

    monkeypatch.setattr(gpu, "_start", start)
    gpu._in_parallel("checks", ["short_conv", "long_conv"], 0, part_arguments(tmp_path))
    assert gpu._in_parallel("checks", ["ssm_step"], 0, part_arguments(tmp_path)) == gpu.End("ok", True)
    (tmp_path / "checks" / "long_conv.csv").unlink()
    gpu._in_parallel("checks", ["ssm_step"], 0, part_arguments(tmp_path))
    assert {row["op"] for row in read_csv(tmp_path / "checks.csv")} == {"short_conv", "long_conv", "ssm_step"}


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--ops", "short_cnov"])
    assert "--ops must be of short_conv, linear_attention" in capsys.readouterr().err


def test_a_cell_without_rows_is_not_done(tmp_path, monkeypatch):
    key = {"task": "lra_listops", "model": "CHELA"}
    monkeypatch.setitem(gpu.PARTS, "lra", lambda *_: [(key, list)])
    assert gpu.run_part("lra", part_arguments(tmp_path)) == gpu.NOT_DONE
    for share in ("2 %", "4 %"):  # goes on, and has a row of what there is
        rows = [{"of_recipe": share, "outcome": f"{gpu.LATER}: {share} of the recipe"}]
        monkeypatch.setitem(gpu.PARTS, "lra", lambda *_, rows=rows: [(key, lambda: rows)])
        assert gpu.run_part("lra", part_arguments(tmp_path)) == gpu.NOT_DONE
        assert [row["of_recipe"] for row in read_csv(tmp_path / "lra.csv")] == [share]
    monkeypatch.setitem(gpu.PARTS, "lra", lambda *_: [(key, lambda: [{"outcome": "raised: CUDA error"}])])
    assert gpu.run_part("lra", part_arguments(tmp_path)) == gpu.BROKEN


# parts, ops, and the rows of checks: complex numbers are checked in one dtype
PAGES = [("checks", "diagonal_scan", 4), ("checks kernels", "short_conv diagonal_scan ssm_step", 10)]


@pytest.mark.parametrize(("parts", "ops", "rows"), some(PAGES, PAGES[0]))
def test_parts_run_apart_and_the_page_is_written(tmp_path, capfd, parts, ops, rows):
    """Without models, with the smallest shapes; each op in a process of its own."""
    flags = ["--parts", *parts.split(), "--ops", *ops.split()]
    packed = str(tmp_path / "packed")
    code = gpu.main(["--device", "cpu", "--small", *flags, "--out", str(tmp_path / "here"), "--packed", packed])
    assert code == 0, capfd.readouterr()
    page = (tmp_path / "here" / "gpu.md").read_text()
    assert "- checks: ok" in page
    assert f"- checks: {rows} rows, 0 of them failed" in page
    assert ("## kernels" in page) == ("kernels" in parts)
    capfd.readouterr()
    there = (tmp_path / "here" / "checks.csv").read_text()
    again = ["--device", "cpu", "--small", *flags, "--out", str(tmp_path / "again"), "--earlier", packed]
    assert gpu.main([*again, "--minutes", "0.01"]) == len(parts.split())  # no time to begin, but nothing is lost
    assert (tmp_path / "again" / "checks.csv").read_text() == there
    capfd.readouterr()
    for folder in (tmp_path / "here", results_page.GPU):
        assert gpu.main(["--report", str(folder)]) == 0
        assert capfd.readouterr().out.startswith("# Kernels and models on a GPU")


def raced(name, length=24, loss="logits", **given):
    (row,) = gpu_models.race(name, length, loss, gpu_kernels.Clock(CPU), True, 1, **given)
    return row


def test_models_are_measured_and_failing_ones_said(monkeypatch):
    for name in ("bst", "srformer_t5"):
        row = raced(name)
        assert row["outcome"] == "ok"
        assert {"step_ms", "tokens_s", "prompt_ms", "token_ms", "code"} <= row.keys()
    row = raced("bst", loss="without logits", decodes=False)
    assert row["outcome"] == "ok"
    assert "prompt_ms" not in row
    assert raced("no such model")["outcome"] == "raised: KeyError: 'no such model'"
    monkeypatch.setattr(gpu_models, "kernels_are_due", lambda device: True)
    assert raced("bst")["outcome"] == "raised: RuntimeError: no Triton kernel ran"
    monkeypatch.setattr(gpu_models, "_decoding", broken_peer)
    row = raced("mamba2")
    assert row["outcome"] == row["decoding"] == "RuntimeError: this GPU is too old"  # a peer's, which is no failure
    assert float(row["step_ms"]) > 0
    assert row["code"] == "torch"  # it says that none of Mamba's kernels ran


def test_a_model_decodes_where_its_step_needs_too_much_memory(monkeypatch):
    measure = gpu_models._measure

    def too_much(*given):
        measure(*given)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_models, "_measure", too_much)
    row = raced("bst")
    assert row["outcome"] == "OutOfMemoryError: CUDA out of memory"
    assert row["decoding"] == "ok"
    assert float(row["token_ms"]) > 0
    monkeypatch.setattr(gpu_models, "_decoding", broken_peer)
    row = raced("bst")  # which is ours: a failure
    assert row["outcome"] == row["decoding"] == "raised: RuntimeError: this GPU is too old"
    row = raced("no such model")
    assert row == {"batch": "2", "outcome": "raised: KeyError: 'no such model'"}


def test_the_peak_of_a_step_has_its_gradients(monkeypatch):
    held, build = [], gpu_models.build
    monkeypatch.setattr(gpu_models, "build", lambda *given: held.append(build(*given)) or held[0])

    class Peak(gpu_kernels.Clock):
        def peak(self, function):
            held.append([x.grad for x in held[0].parameters() if x.grad is not None])
            return 1.0

    (row,) = gpu_models.race("bst", 24, "logits", Peak(CPU), True, 1, decodes=False)
    assert row["outcome"] == "ok"
    assert held[1:] == [[]]


def broken_peer(*_):
    raise RuntimeError("this GPU is too old")


def test_the_code_that_ran_is_seen():
    class Peer(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 2 * x

        @staticmethod
        def backward(context, grad):
            return 2 * grad

    Peer.__module__ = "mamba_ssm.ops.triton.ssd_combined"
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    assert code_of(Peer.apply(q).relu().sum()) == ["mamba_ssm Peer"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        (flash,) = code_of(F.scaled_dot_product_attention(q, q, q).sum())
    assert flash.startswith("SDPA FlashAttention")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert code_of(F.scaled_dot_product_attention(q, q, q).sum()) == []
    inputs = gpu_kernels.make_inputs(SMALL_CASE, CPU, torch.float32, seed=0)
    assert code_of(SMALL_CASE.run(inputs, "torch").sum()) == []  # an op of ours
    with record_launches(90), launched() as keys:
        SMALL_CASE.run(inputs, "triton")
    assert {op for op, _, _ in keys} == {"short_conv"}


def test_llama_is_held_to_flash_attention():
    assert gpu_models.runs_flash(CPU)
    row = raced("llama-flash")
    assert row["outcome"] == "ok"
    assert row["code"].startswith("SDPA FlashAttention")


def test_models_are_planned_by_length_and_loss(monkeypatch):
    monkeypatch.setattr(gpu_models, "PACKAGES", {"gated-deltanet": "no_such_package"})
    keys = [key for key, _ in gpu_models.cells(gpu_kernels.Clock(CPU), small=False)]
    absent, keys = keys[0], keys[1:]
    assert (absent["model"], absent["length"]) == ("gated-deltanet", "")
    checked, keys = keys[: len(gpu_models.OURS)], keys[len(gpu_models.OURS) :]
    assert [(key["model"], key["loss"]) for key in checked] == [(name, "checked") for name in gpu_models.OURS]
    found = [(key["model"], int(key["length"]), key["loss"]) for key in keys]
    assert {length for _, length, _ in found} == {1024, 4096, 16384, 65536}
    assert ("llama-flash", 65536, "logits") in found
    assert not [name for name, _, _ in found if name == "llama-sdpa"]
    for name in gpu_models.OURS:
        for length in (1024, 4096, 16384, 65536):
            losses = [loss for model, tokens, loss in found if (model, tokens) == (name, length)]
            assert losses == (["without logits", "logits"] if length >= 16384 else ["logits"])
    assert ("pegasus-x", 65536, "logits") in found
    assert ("pegasus-x", 65536, "without logits") not in found


@pytest.mark.parametrize("name", ["spade", "srformer_t5"])
def test_whole_models_must_compute_the_same_everywhere(name, monkeypatch):
    assert list(gpu_models.check_whole(name, CPU)) == [{"outcome": "ok", "code": "torch"}]

    def other(model):
        found = copy.deepcopy(model)
        with torch.no_grad():
            next(x for name, x in found.named_parameters() if "norm" in name)[0] *= 1.01
        return found

    monkeypatch.setattr(gpu_models, "copy", SimpleNamespace(deepcopy=other))
    (row,) = gpu_models.check_whole(name, CPU)
    assert row["outcome"].startswith("wrong: ")
    assert "% of the tokens" in row["outcome"]


@pytest.mark.parametrize("wrong", ["a number that is none", "a large one", "none", "one more", "a token", "no kernel"])
def test_every_gradient_of_a_whole_model_counts(wrong, monkeypatch):
    logits, words = torch.ones(3), torch.arange(4)
    right = {"first": torch.ones(2), "rounding": torch.full((2,), 1e-9), "last": torch.ones(2), "logits": logits}
    found, tokens = {name: x.clone() for name, x in right.items()}, words.clone()
    if wrong == "a number that is none":
        found["last"][1] = math.nan
    elif wrong == "a large one":
        found["rounding"][0] = 1.0
    elif wrong == "none":
        del found["last"]
    elif wrong == "one more":
        found["more"] = torch.ones(1)
    elif wrong == "a token":
        tokens[0] = 7
    results = iter([(right, words), (found, tokens)])
    monkeypatch.setattr(gpu_models, "_results", lambda model, name: next(results))
    monkeypatch.setattr(gpu_models, "kernels_are_due", lambda device: wrong == "no kernel")
    (row,) = gpu_models.check_whole("chela", CPU)
    assert row["outcome"].startswith("wrong: ")


def test_each_op_has_its_turn():
    found = [SimpleNamespace(op=op, number=number) for number, op in enumerate("aabbac")]
    assert [case.number for case in gpu.in_turns(found)] == [0, 2, 5, 1, 3, 4]


def test_what_is_slow_is_timed_three_times(monkeypatch):
    clock, calls = gpu_kernels.Clock(CPU), []
    monkeypatch.setattr(clock, "once", lambda function, lead: calls.append(function) or function)
    times = clock.interleaved({"fast": 1.0, "slow": 900.0}, 20, alone=True)
    assert times == {"fast": 1.0, "slow": 900.0}
    assert (calls.count(1.0), calls.count(900.0)) == (23, 6)


@pytest.mark.parametrize("part", gpu.PARTS)
def test_every_part_has_a_table_on_the_page(part, tmp_path, monkeypatch):
    """Also of rows that have nothing but an outcome."""
    monkeypatch.setattr(results_page, "GPU", tmp_path)
    row = dict.fromkeys(gpu.COLUMNS[part], "") | {"device": "a GPU", "outcome": "raised: no luck"}
    write_csv(tmp_path / f"{part}.csv", gpu.COLUMNS[part], [row])
    page = results_page.tables(tmp_path / f"{part}.csv")
    assert "a GPU" in page
    assert "| --- |" in page


def test_the_table_of_decoding_says_what_was_not_tried():
    row = dict.fromkeys(gpu.COLUMNS["models"], "") | {"length": "65536", "loss": "logits"}
    ended = {"outcome": "OutOfMemoryError: CUDA out of memory"}
    rows = [
        row | {"model": "bst", "tokens_s": "1000", "token_ms": "2", "decoding": "ok", "outcome": "ok"},
        row | {"model": "mamba2", "token_ms": "3", "decoding": "ok"} | ended,
        row | {"model": "t5-sdpa", "decoding": ended["outcome"]} | ended,
        row | {"model": "t5-sdpa", "length": "1024", "token_ms": "1", "decoding": "ok", "outcome": "ok"},
        row | {"model": "pegasus-x"} | ended,
        row | {"model": "pegasus-x", "length": "1024", "token_ms": "4", "decoding": "ok", "outcome": "ok"},
    ]
    training, _, _, decoding = gpu_tables.report("models", rows).split("**")[2::2]
    assert "| bst, logits |  | 1.00 |" in training
    assert "| mamba2 |  | 3.0 |\n| t5-sdpa | 1.0 | out of memory |\n| pegasus-x | 4.0 | not tried |" in decoding, (
        decoding
    )


def test_tables_show_what_failed():
    row = dict.fromkeys(gpu.COLUMNS["checks"], "") | {"op": "short_conv", "shape": "B1"}
    rows = [row | {"backend": "torch", "outcome": "ok"}, row | {"backend": "float64", "outcome": "raised: no memory"}]
    assert "| short_conv | 1 | 0 of 1 | - |" in gpu_tables.report("checks", rows)
    row = dict.fromkeys(gpu.COLUMNS["models"], "")
    rows = [row | {"model": "spade", "loss": "checked", "outcome": "wrong: 1.0e-01 at head, 50% of the tokens"}]
    rows += [
        row | {"model": model, "length": "65536", "loss": loss, "tokens_s": speed, "outcome": outcome}
        for model, loss, speed, outcome in (
            ("spade", "without logits", "2000", "ok"),
            ("spade", "logits", "", "OutOfMemoryError: CUDA out of memory"),
            ("llama-flash", "logits", "1000", "ok"),
            ("t5-sdpa", "logits", "", "OutOfMemoryError: CUDA out of memory"),
        )
    ]
    page = gpu_tables.report("models", rows)
    assert "beside a CPU: spade wrong: 1.0e-01 at head, 50% of the tokens." in page
    assert "| spade | 2.00 |\n| llama-flash | 1.00 |" in page


def test_models_are_of_one_size_and_have_no_dropout():
    """Language models within 3 % of their mean, and so encoder-decoders."""
    for names in (gpu_models.LANGUAGE_MODELS, gpu_models.ENCODER_DECODERS):
        sizes = {}
        for name in names:
            if importlib.util.find_spec(gpu_models.PACKAGES.get(name, "transformers")) is None:
                continue
            with torch.device("meta"):
                model = gpu_models.build(name, small=False)
            sizes[name] = model.num_parameters()
            fields = model.config.to_dict().items()
            chances = {field: value for field, value in fields if "dropout" in field and "classifier" not in field}
            assert not any(chances.values()), name
            assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)), name
        mean = statistics.mean(sizes.values())
        assert all(abs(size / mean - 1) <= 0.03 for size in sizes.values()), sizes


def test_pictures_tell_losses_apart(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [
        {"model": "spade", "length": "16384", "loss": "without logits", "tokens_s": "9", "peak_mib": ""},
        {"model": "spade", "length": "1024", "loss": "logits", "tokens_s": "8", "peak_mib": ""},
        {"model": "gated-deltanet", "length": "", "loss": "", "tokens_s": "", "peak_mib": ""},
    ]
    write_csv(tmp_path / "models.csv", tuple(rows[0]), rows)
    drawn, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure) or close(figure))
    gpu_tables.draw(tmp_path)
    speed, _ = (figure.axes[0] for figure in drawn)
    assert speed.get_ylabel() == "training, tokens per second"
    assert [line.get_label() for line in speed.lines] == ["spade, without logits", "spade"]


def test_losses_agree_and_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(gpu_further, "PACKAGES", {"liger": "no_such_package"})
    found = {}
    for key, measure in gpu_further.losses(CPU, part_arguments(None), []):
        (found[key["dtype"], key["loss"]],) = measure()
    assert found.pop(("", "liger"))["outcome"] == "not installed: no_such_package"
    assert {loss for _, loss in found} == {"plain", "chunked", "torch"}
    assert {row["outcome"] for row in found.values()} == {"ok"}
    monkeypatch.setitem(gpu_further.LOSSES, "plain", lambda *inputs: 1.01 * gpu_further._chunked(*inputs))
    (row,) = gpu_further._loss(300, 40, "fp32", "plain", gpu_kernels.Clock(CPU), 1)
    assert row["outcome"] == "wrong: the loss or a gradient"
    monkeypatch.setitem(gpu_further.LOSSES, "torch", lambda *inputs: 1.01 * gpu_further._chunked(*inputs))
    (row,) = gpu_further._loss(300, 40, "fp32", "torch", gpu_kernels.Clock(CPU), 1)
    assert row["outcome"] == "inexact"


COMMAND = gpu_sanitizer.launches("short_conv", part_arguments(None))


def install_sanitizer(folder, monkeypatch, script):
    program = folder / gpu_sanitizer.SANITIZER
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", "ok"),
        ("echo '========= ERROR SUMMARY: 3 errors'", "wrong: 3 errors, exit 0"),
        ("echo '========= RACECHECK SUMMARY: 2 hazards displayed'", "wrong: 2 errors, exit 0"),
        ("echo no device; exit 7", "raised: no summary, exit 7: no device"),
    ],
)
def test_the_sanitizers_summary_is_read(tmp_path, monkeypatch, script, outcome):
    install_sanitizer(tmp_path, monkeypatch, script)
    (row,) = gpu_sanitizer._sanitize(COMMAND, "memcheck", float("inf"))
    assert row["outcome"] == outcome


def test_without_the_sanitizer_there_is_one_row_and_it_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    planned = [(key, *measure()) for key, measure in gpu_sanitizer.sanitizer(CPU, part_arguments(None), [])]
    assert [key["tool"] for key, _ in planned] == [""] * len({case.op for case in cases(small=True)})
    said = "not done: compute-sanitizer is not installed"
    assert {row["outcome"] for _, row in planned} == {said}

    def start(part, ops, csv, deadline, arguments):
        write_csv(csv, gpu.COLUMNS["sanitizer"], [key | row for key, row in planned if key["op"] in ops])
        return gpu.End("ok", True)

    monkeypatch.setattr(gpu, "_start", start)
    assert gpu._run_in_processes("sanitizer", 0, part_arguments(tmp_path)) == gpu.End(said, False)


def test_each_tool_watches_each_op(tmp_path, monkeypatch):
    """What was watched with this code is not watched again; other ops' configurations do not matter."""
    install_sanitizer(tmp_path, monkeypatch, "echo '========= ERROR SUMMARY: 0 errors'")
    ops = list(dict.fromkeys(case.op for case in cases(small=True)))
    planned = [(key["op"], key["tool"]) for key, _ in gpu_sanitizer.sanitizer(CPU, part_arguments(None), [])]
    assert planned == [(op, tool) for op in ops for tool in gpu_sanitizer.TOOLS]
    compiled, rows = [], []
    monkeypatch.setattr(gpu_sanitizer, "kernels_are_due", lambda device: True)
    monkeypatch.setattr(gpu_sanitizer, "compile_first", lambda command, *_: compiled.append(command[-1]))
    some = part_arguments(None, ops=["short_conv", "long_conv"])
    for key, measure in gpu_sanitizer.sanitizer(CPU, some, rows):
        if key["op"] == "short_conv":
            rows += [key | row for row in measure()]
    assert compiled == ["short_conv", "long_conv"]
    assert [row["outcome"] for row in rows] == ["ok"] * 4
    entry = {("long_conv", "forward", 90): Configuration("forward", "", {"BT": 64}, 4, 2)}
    with gpu_tuning.table(entry):
        gpu_kernels.fingerprint.cache_clear()
        list(gpu_sanitizer.sanitizer(CPU, some, rows))
    gpu_kernels.fingerprint.cache_clear()
    assert compiled[2:] == ["long_conv"]


def test_a_tool_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """One that had its full time says so; one that this call ended goes on in the next."""
    install_sanitizer(tmp_path, monkeypatch, "sleep 60 & wait")
    assert list(gpu_sanitizer._sanitize(COMMAND, "memcheck", 0.0)) == []
    monkeypatch.setattr(gpu_sanitizer, "LONGEST", 0.5)
    (row,) = gpu_sanitizer._sanitize(COMMAND, "memcheck", float("inf"))
    assert row["outcome"] == "not finished in 0 s"


@pytest.mark.full
def test_kernels_are_compiled_before_the_tools_watch():
    assert gpu_sanitizer.compile_first(COMMAND, math.inf)
    assert not gpu_sanitizer.compile_first(COMMAND, 0.0)
    assert not gpu_sanitizer.compile_first([*COMMAND, "--device", "no such device"], math.inf)


def test_the_tools_watch_what_was_tuned(tmp_path, monkeypatch):
    tuned, found = tmp_path / "tuned.py", []
    tuned.write_text("TUNED = {('short_conv', 'forward', 90): ({'BT': 64}, 8, 3)}\n")
    install_sanitizer(tmp_path, monkeypatch, f"echo $* > {tmp_path}/watched; echo '========= ERROR SUMMARY: 0 errors'")
    arguments = part_arguments(tmp_path, ops=["short_conv"], tuned=tuned)
    (_, measure), *_ = gpu_sanitizer.sanitizer(CPU, arguments, [])
    assert [row["outcome"] for row in measure()] == ["ok"]
    watched = (tmp_path / "watched").read_text().split()
    assert watched[-2:] == ["--tuned", str(tuned)]
    monkeypatch.setattr(gpu_sanitizer, "results_of", lambda *_: found.append(dict(gpu_kernels.TUNED)))
    with gpu_tuning.table({}):  # which puts the table back
        assert gpu_sanitizer.main(watched[watched.index("--device") :]) == 0
    gpu_kernels.fingerprint.cache_clear()
    assert found[0] == {("short_conv", "forward", 90): ({"BT": 64}, 8, 3)}


def test_what_the_tools_watch_runs(capsys):
    assert gpu_sanitizer.main(["--device", "cpu", "--op", "short_conv"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["short_conv"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "torch sees none" in capsys.readouterr().err
