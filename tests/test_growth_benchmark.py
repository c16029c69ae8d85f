"""The table of growth: cells are measured once, and exponents above the linear ones are explained."""

import math
import subprocess
import sys

import pytest
import torch

from benchmarks import bench_growth, bench_models, results_page
from benchmarks.bench_growth import KEPT, KEYS, LENGTHS, LIMIT, MEASURES, REASONS, report
from benchmarks.builders import build
from benchmarks.record import GrowingRecord, growing_columns, read_csv, stamp
from hf_hybrid.models.bst.configuration_bst import CONTEXT_FILTERS, CONTEXT_SHIFTS, CONTEXT_TYPES
from hf_hybrid.models.chela.configuration_chela import ATTENTION_FNS, MIXERS
from hf_hybrid.models.spade.configuration_spade import ATTENTION_TYPES
from hf_hybrid.models.spade.state_space_fields import SSM_TYPES
from hf_hybrid.models.srformer.configuration_srformer import MODES
from tests.matrix import some
from tests.measuring import measure_here, shrink_models

COLUMNS = growing_columns(KEYS, (*MEASURES, KEPT, LIMIT))


@pytest.fixture
def quick(monkeypatch):
    """Measure here, tiny models, and each of them once."""
    measure_here(monkeypatch, bench_growth)
    shrink_models(monkeypatch)
    monkeypatch.setattr(bench_growth, "CALLS", dict.fromkeys(bench_growth.CALLS, 1))
    monkeypatch.setattr(bench_growth, "DECODED", 2)
    monkeypatch.setattr(bench_growth, "keep_freed_memory", lambda heap: True)  # not in the tests' own process


@pytest.mark.usefixtures("quick")
def test_a_second_call_measures_only_what_is_missing(tmp_path, monkeypatch, capsys):
    out = tmp_path / "growth.csv"
    flags = ["--models", "bst-sh-s4", "srformer", "--threads", "1", "--lengths", "32", "--out", str(out)]
    assert bench_growth.main([*flags, "--tasks", "decode", "--precisions", "fp32"]) == 0
    kept = read_csv(out)
    assert [(*(row[name] for name in KEYS), row["outcome"]) for row in kept] == [
        ("bst-sh-s4", "decode", "fp32", "32", "ok"),
        ("srformer", "decode", "fp32", "32", "ok"),
    ]
    measured = []
    real = bench_growth.in_process
    monkeypatch.setattr(bench_growth, "in_process", lambda *a: measured.append(a[1][:4]) or real(*a))
    assert bench_growth.main(flags) == 0
    rows = read_csv(out)
    assert rows[:2] == kept
    assert measured == [
        (model, task, precision, 32)
        for model in ("bst-sh-s4", "srformer")
        for task in ("step", "forward", "decode")
        for precision in ("fp32", "bf16")
        if (task, precision) != ("decode", "fp32")
    ]
    assert all(row["outcome"] == "ok" and float(row["seconds"]) > 0 for row in rows)
    limit = bench_models.most_memory() / 2**20
    assert all(float(row[LIMIT]) == pytest.approx(limit, rel=1e-4) for row in rows)
    shown = capsys.readouterr().out
    assert "| srformer | decode | bf16 | 32 | - | - | - | not measured beyond 16384 |" in shown
    assert all((row["task"] == "decode") == (not row[KEPT]) for row in rows)
    assert f"A process may hold {limit / 1024:.1f} GiB." in shown


@pytest.mark.full
@pytest.mark.usefixtures("quick")
def test_steps_hold_no_logits(monkeypatch):
    """Of any model: the loss alone is computed."""
    asked = []

    def watched(name):
        model = build(name)
        model.register_forward_pre_hook(lambda _, __, given: asked.append(given.get("skip_logits")), with_kwargs=True)
        return model

    monkeypatch.setattr(bench_growth, "build", watched)
    for model in ("bst-sh-s4", "chela-bidirectional", "spade-seq2seq", "srformer-bart"):
        for task, expected in (("step", True), ("forward", None)):
            asked.clear()
            sent = bench_growth.in_process(bench_growth.measure, (model, task, "fp32", 32, 1, 60.0), 60.0)
            assert sent[-1] == ("outcome", "ok"), (model, task)
            assert set(asked) == {expected}


def test_a_process_may_hold_what_its_container_has(tmp_path, monkeypatch):
    machine = bench_models.most_memory()
    monkeypatch.setattr(bench_models, "CONTAINER_LIMITS", (tmp_path / "none", tmp_path / "max", tmp_path / "least"))
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "least").write_text("3000\n")
    assert bench_models.most_memory() == 2000 < machine


@pytest.mark.parametrize(
    ("kind", "field", "values", "left_out"),
    [
        # quadratic on purpose, or a part of what is measured
        ("spade", "attention_type", ATTENTION_TYPES, {"full", "none"}),
        ("spade", "ssm_type", SSM_TYPES, set()),
        # the parts of short-long convolutions; random features in the place of a norm
        ("chela", "mixer", MIXERS, {"long"}),
        ("chela", "attention_fn", ATTENTION_FNS, {"laplace_feature"}),
        ("bst", "context_type", CONTEXT_TYPES, set()),
        ("bst", "context_filter", CONTEXT_FILTERS, set()),
        ("bst", "context_shift", CONTEXT_SHIFTS, set()),
        # ablations, and the peers' own attention
        (
            "srformer_t5",
            "cross_attention_mode",
            MODES,
            {"no_norm", "no_raf", "own_segment", "transformer_xl", "longt5", "full"},
        ),
    ],
)
def test_every_way_to_grow_is_measured_or_left_out(configs, kind, field, values, left_out):
    measured = {getattr(config, field) for config in configs if config.model_type == kind}
    assert measured | left_out == {*values}
    assert not measured & left_out


@pytest.fixture(scope="module")
def configs():
    with torch.device("meta"):
        return [build(name).config for name in bench_growth.MODELS]


def test_every_model_is_measured_up_to_the_length_that_it_can_have(tmp_path, monkeypatch):
    asked = []
    ended = [("seconds", 1.0), ("held_mib", 1.0), ("outcome", "ok")]
    monkeypatch.setattr(bench_growth, "in_process", lambda *a: asked.append(a[1][:4]) or ended)
    assert bench_growth.main(["--out", str(tmp_path / "growth.csv")]) == 0
    assert {model for model, *_ in asked} == {*bench_growth.MODELS}
    assert max(length for model, *_, length in asked if model == "srformer-bart") == 16384
    assert max(length for model, *_, length in asked if model == "chela-bidirectional") == 65536
    assert {task for model, task, *_ in asked if model == "chela-bidirectional"} == {"step", "forward"}
    precisions = {model: {cell[2] for cell in asked if cell[0] == model} for model in bench_growth.MODELS}
    assert all(found == {"fp32"} for model, found in precisions.items() if model in bench_growth.FURTHER)
    assert precisions["chela"] == {"fp32", "bf16"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "model",
    some(
        ["spade-seq2seq-chunk", "srformer-bart", "chela-bidirectional", "bst-mf-s4", *bench_growth.FURTHER],
        *("srformer-bart", "bst-mf-s4", "srformer-recurrent", "chela-laplace-chunks"),
    ),
)
def test_other_modes_run(model):
    for task in bench_growth.TASKS[: 2 if model in bench_growth.BIDIRECTIONAL else 3]:
        sent = bench_growth.in_process(bench_growth.measure, (model, task, "bf16", 40, 1, 60.0), 60.0)
        assert sent[-1] == ("outcome", "ok"), task


def grown(model, task, time, memory, lengths=LENGTHS, outcome="ok"):
    common = stamp() | {"threads": "1", "model": model, "task": task, "precision": "fp32", "outcome": outcome}
    return [
        common | {"length": str(s), "seconds": f"{1e-9 * s**time:.6g}", "held_mib": f"{1e-3 * s**memory:.6g}"}
        for s in lengths
    ]


def test_the_table_has_a_reason_for_what_is_more_than_linear(tmp_path, capsys):
    rows = grown("srformer", "step", 1.9, 1.2) + grown("spade", "step", 1.0, 1.0)
    assert bench_growth.unexplained(rows) == []
    rows += grown("chela", "step", 1.3, 0.0)
    rows[-1] |= {"seconds": "", "held_mib": "", "outcome": "out of memory"}
    lines = report(rows).splitlines()[-3:]
    reasons = [REASONS["srformer", "step", name] for name in ("time", "memory")]
    assert lines[0] == (
        "| srformer | step | fp32 | 1024 to 65536 | 1.90, 1.90 | - | 1.20, 1.20 "
        f"| time: {reasons[0]}; memory: {reasons[1]}; not measured beyond 16384 |"
    )
    assert lines[1] == "| spade | step | fp32 | 1024 to 65536 | 1.00, 1.00 | - | 1.00, 1.00 |  |"
    assert lines[2] == (
        "| chela | step | fp32 | 1024 to 16384 | 1.30, 1.30 | - | 0.00, 0.00 "
        "| time: not explained yet; 65536: out of memory |"
    )
    record = GrowingRecord(tmp_path / "growth.csv", COLUMNS, KEYS, {})
    record.add(*rows[:8])
    assert bench_growth.main(["--report", str(record.path)]) == 0
    record.add(*rows[8:])
    capsys.readouterr()
    assert bench_growth.main(["--report", str(record.path)]) == 1
    assert capsys.readouterr().err == "chela step fp32: time: not explained yet\n"


def test_growth_at_the_end_needs_a_reason_too():
    rows = grown("spade", "step", 1.0, 1.0)
    rows[-1] |= {"seconds": f"{float(rows[-1]['seconds']) * 1.2:.6g}"}  # of four times the length
    assert bench_growth.unexplained(rows) == ["spade step fp32: time: not explained yet"]
    assert "| 1.04, 1.13 | - | 1.00, 1.00 |" in report(rows)


@pytest.mark.parametrize(("kept", "explained"), [(1.0, True), (1.2, False)])
def test_freed_memory_is_a_reason_where_keeping_it_makes_time_linear(kept, explained):
    rows = grown("spade", "step", 1.3, 1.0)
    for row in rows:
        row[KEPT] = f"{1e-9 * int(row['length']) ** kept:.6g}"
    assert (bench_growth.unexplained(rows) == []) == explained
    assert (f"time: {bench_growth.FREED}" in report(rows)) == explained
    assert f"| 1.30, 1.30 | {kept:.2f}, {kept:.2f} | 1.00, 1.00 |" in report(rows)


def test_freed_memory_is_no_reason_where_a_length_was_not_timed_with_it():
    rows = grown("spade", "step", 1.3, 1.0)
    for row in rows[:-1]:
        row[KEPT] = f"{1e-9 * int(row['length']):.6g}"
    assert bench_growth.unexplained(rows) == ["spade step fp32: time: not explained yet"]
    assert "| 1.30, 1.30 | - | 1.00, 1.00 |" in report(rows)


@pytest.mark.usefixtures("quick")
def test_calls_with_kept_memory_need_time(monkeypatch):
    """A cell whose calls by default take all of it is measured none the less."""
    monkeypatch.setattr(bench_growth, "keep_freed_memory", lambda heap: pytest.fail("there was no time"))
    sent = bench_growth.in_process(bench_growth.measure, ("chela", "forward", "fp32", 32, 1, 0.0), 60.0)
    assert [name for name, _ in sent].count("seconds") == 1
    assert sent[-1] == ("outcome", "ok")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("held", [math.nan, 2.0**30])
def test_kept_memory_must_fit_beside_what_a_cell_held(monkeypatch, held):
    monkeypatch.setattr(bench_growth, "memory", lambda field: held)
    monkeypatch.setattr(bench_growth, "forget_peak", lambda: 0.0)
    monkeypatch.setattr(bench_growth, "keep_freed_memory", lambda heap: pytest.fail("there was no room"))
    sent = bench_growth.in_process(bench_growth.measure, ("chela", "forward", "fp32", 32, 1, 60.0), 60.0)
    assert sent[-1] == ("outcome", "ok")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("enough", "calls"), [(0.0, 1), (60.0, 3)])
def test_no_call_begins_once_there_were_enough(monkeypatch, enough, calls):
    monkeypatch.setattr(bench_growth, "ENOUGH_S", enough)
    monkeypatch.setattr(bench_growth, "CALLS", {"forward": 3})
    sent = bench_growth.in_process(bench_growth.measure, ("chela", "forward", "fp32", 32, 1, 60.0), 60.0)
    assert [name for name, _ in sent].count("seconds") == calls


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_kept_memory_costs_no_page_faults_again():
    code = """
import resource, torch
from benchmarks.bench_models import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(2**24).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
freed = faults()
assert keep_freed_memory(2**30)
for _ in range(3):  # the heap grows to what it needs
    faults()
assert faults() * 10 < freed, freed
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reasons_are_those_of_cells():
    assert {(model, task) for model, task, _ in REASONS} <= {
        (model, task) for model in bench_growth.MODELS for task in bench_growth.TASKS
    }


def test_a_record_of_another_machine_is_not_continued(tmp_path):
    path = tmp_path / "growth.csv"
    row = grown("spade", "step", 1, 1)[0]
    common = {name: row[name] for name in ("date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid")}
    record = GrowingRecord(path, COLUMNS, bench_growth.KEYS, common)
    record.add(row)
    again = GrowingRecord(path, COLUMNS, bench_growth.KEYS, common | {"date": "another day"})
    assert ("spade", "step", "fp32", "1024") in again
    assert ("spade", "step", "fp32", "2048") not in again
    with pytest.raises(ValueError, match=r"growth.csv must have threads '2' to go on; got '1'"):
        GrowingRecord(path, COLUMNS, bench_growth.KEYS, common | {"threads": "2"})
    with pytest.raises(ValueError, match="must have the columns model; got date"):
        GrowingRecord(path, ("model",), ("model",), {})


def test_the_page_shows_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "<!-- table: growth_cpu.csv -->\n\n<!-- end -->"
    record = GrowingRecord(tmp_path / "growth_cpu.csv", COLUMNS, bench_growth.KEYS, {})
    for row in grown("spade", "step", 1.0, 1.0):
        record.add(row)
    assert "| spade | step | fp32 | 1024 to 65536 | 1.00, 1.00 | - | 1.00, 1.00 |  |" in results_page.renewed(page)
    with pytest.raises(FileNotFoundError):
        results_page.renewed("<!-- table: grown_cpu.csv -->\n\n<!-- end -->")
