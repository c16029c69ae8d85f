"""The table of activation checkpointing."""

import pytest

from benchmarks import bench_checkpointing
from benchmarks.record import read_csv, stamp


@pytest.mark.full
def test_every_model_is_measured_with_everything_kept_and_less(tmp_path, capsys):
    out = tmp_path / "checkpointing.csv"
    assert (
        bench_checkpointing.main(["--models", "bst-sh-s4", "--lengths", "64", "--threads", "1", "--out", str(out)])
        == 0
    )
    rows = read_csv(out)
    assert [(row["kept"], row["outcome"]) for row in rows] == [(kept, "ok") for kept in bench_checkpointing.KEPT]
    assert all(float(row["cpu_seconds"]) > 0 for row in rows)
    assert "| bst-sh-s4 | " in capsys.readouterr().out


def test_the_table_compares_times_with_those_of_no_checkpointing():
    common = stamp() | {"threads": "1", "model": "chela", "precision": "bf16", "length": "4096", "outcome": "ok"}
    rows = [
        common | {"kept": kept, "held_mib": held, "peak_mib": "90", "cpu_seconds": seconds}
        for kept, held, seconds in (("everything", "70.4", "2"), ("inputs", "10", "3"))
    ]
    rows.append(common | {"kept": "products", "outcome": "failed: no memory"})
    table = bench_checkpointing.report(rows)
    assert "| chela | 70 / 90, × 1.00 | failed | - | 10 / 90, × 1.50 |" in table
