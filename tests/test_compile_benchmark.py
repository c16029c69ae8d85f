"""The table of what compiling makes of a training step."""

import pytest

from benchmarks import bench_compile
from benchmarks.builders import build
from benchmarks.record import read_csv, stamp


@pytest.mark.full
def test_a_step_is_measured_eager_and_compiled(tmp_path, capsys):
    out = tmp_path / "compile.csv"
    flags = ["--models", "chela", "--precisions", "fp32", "--lengths", "64", "--threads", "1", "--out", str(out)]
    assert bench_compile.main(flags) == 0
    rows = read_csv(out)
    assert [(row["compiled"], row["outcome"]) for row in rows] == [(name, "ok") for name in bench_compile.COMPILED]
    assert [bool(row["compile_s"]) for row in rows] == [False, True, True]
    assert "| chela | fp32 | 64 | model | " in capsys.readouterr().out


@pytest.mark.parametrize("name", bench_compile.MODELS)
def test_every_layer_is_compiled(name):
    """Four, of an encoder-decoder four on each side."""
    assert bench_compile.compile_layers(build(name)) == (8 if name == "spade-seq2seq" else 4)


def test_the_table_compares_with_the_eager_step():
    common = stamp() | {"threads": "1", "model": "chela", "precision": "bf16", "length": "4096", "outcome": "ok"}
    rows = [
        common | {"compiled": "nothing", "step_s": "2", "compile_s": "", "peak_mib": "50"},
        common | {"compiled": "layers", "step_s": "1.5", "compile_s": "9", "peak_mib": "60"},
        common | {"compiled": "model", "outcome": "failed: no compiler"},
    ]
    table = bench_compile.report(rows)
    assert "| chela | bf16 | 4096 | nothing | 2 | 1.00 | 1.00 | - | ok |" in table
    assert "| chela | bf16 | 4096 | layers | 1.5 | 0.75 | 1.20 | 9 | ok |" in table
    assert "| chela | bf16 | 4096 | model | - | - | - | - | failed: no compiler |" in table
