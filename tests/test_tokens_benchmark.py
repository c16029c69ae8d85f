"""The time of a token against the weights that it reads, and the time until a model works."""

import pytest
import torch
from torch import nn

from benchmarks import bench_generation, bench_loading, bench_tokens, builders, results_page
from benchmarks.bench_tokens import weights_read
from benchmarks.record import read_csv
from benchmarks.workloads import generation


class Reader(nn.Module):
    """Reads a table at three tokens, a weight without a module's forward, and not what is unused."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.unused = nn.Embedding(50, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 50, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self):
        return nn.functional.linear(self.table(torch.tensor([1, 2, 3])), self.head.weight)


@pytest.mark.parametrize(("tied", "numbers"), [(False, 3 * 4 + 50 * 4), (True, 50 * 4)])
def test_weights_that_are_read_are_counted_once(tied, numbers):
    assert weights_read(model := Reader(tied), model) == 4 * numbers


def test_the_rate_and_the_host_are_measured():
    assert bench_tokens.reading_rate(mib=1) > 1e8
    assert 0.5 < bench_tokens.host_share(lambda: [n * n for n in range(300_000)]) <= 1
    x = torch.randn(400, 400)
    assert bench_tokens.host_share(lambda: [x @ x for _ in range(20)]) < 0.5


def test_a_token_is_measured_once(tmp_path, monkeypatch, capsys):
    out = tmp_path / "tokens.csv"
    flags = ["--models", "bst-sh-s4", "--batches", "2", "--lengths", "24", "--threads", "1", "--out", str(out)]
    assert bench_tokens.main(flags) == 0
    (row,) = read_csv(out)
    assert (row["model"], row["batch"], row["outcome"]) == ("bst-sh-s4", "2", "ok")
    assert all(float(row[name]) > 0 for name in bench_tokens.MEASURES)
    monkeypatch.setattr(bench_tokens, "in_process", None)  # nothing is measured again
    assert bench_tokens.main(flags) == 0
    assert f"| bst-sh-s4 | 2 | 24 | {row['weights_mib']} |" in capsys.readouterr().out
    assert results_page.tables(out) == bench_tokens.report(read_csv(out))


def test_generation_is_measured_once_beside_a_peer(tmp_path, monkeypatch, capsys):
    out = tmp_path / "generation.csv"
    flags = ["--sizes", "tiny", "--models", "llama", "bst", "--batches", "2", "--threads", "1", "--out", str(out)]
    assert bench_generation.main(flags) == 0
    llama, bst = read_csv(out)
    assert (llama["model"], bst["model"], bst["batch"], bst["outcome"]) == ("llama", "bst", "2", "ok")
    assert all(float(row[name]) > 0 for row in (llama, bst) for name in bench_generation.MEASURES)
    monkeypatch.setattr(bench_generation, "in_process", None)  # nothing is measured again
    assert bench_generation.main(flags) == 0
    share = float(bst["token_ms"]) / float(llama["token_ms"])
    assert f"| {share:.2f} | {bst['operators']} |" in capsys.readouterr().out
    assert results_page.tables(out) == bench_generation.report(read_csv(out))


@pytest.mark.parametrize("name", builders.SIZED)
def test_models_of_any_size_generate(name, monkeypatch):
    monkeypatch.setitem(builders.SIZES, "tiny", (16, 1))
    assert bench_generation.operators(generation(builders.build_sized(name, "tiny"), length=5, tokens=2)) > 20


def test_loading_runs_everything_in_turns_and_says_what_fails(tmp_path, monkeypatch, capsys):
    codes = {
        ("import", "peer"): "time.sleep(0.1)",
        ("import", "ours"): "time.sleep(0.2)",
        ("script", "broken"): "import no_such_module_here",
    }
    monkeypatch.setattr(bench_loading, "subjects", lambda length: codes)
    out = tmp_path / "loading.csv"
    assert bench_loading.main(["--rounds", "2", "--out", str(out)]) == 1
    peer, ours, broken = read_csv(out)
    assert [row["repeats"] for row in (peer, ours, broken)] == ["2", "2", "0"]
    assert 0.1 <= float(peer["lowest"]) <= float(peer["seconds"]) <= float(peer["highest"])
    assert float(ours["seconds"]) >= 0.2
    assert broken["outcome"] == "failed: ModuleNotFoundError: No module named 'no_such_module_here'"
    ratio = float(ours["seconds"]) / float(peer["seconds"])
    assert f"| import | ours | {ours['seconds']} | {ours['lowest']} to {ours['highest']} | {ratio:.2f} |" in (
        capsys.readouterr().out
    )
    assert results_page.tables(out) == bench_loading.report(read_csv(out))


def test_what_is_loaded_can_be_run():
    """In this process, at a small length: the code of a step and of a token, and names of modules that there are."""
    found = bench_loading.subjects(length=16)
    for key in (
        ("first step", "bst-sh-s4"),
        ("first token", "spade-seq2seq"),
        ("script", "clm"),
        ("import", "hf_hybrid"),
    ):
        exec(found[key], {})
    measures = dict.fromkeys(measure for measure, _ in found)
    firsts = {measure: next(subject for m, subject in found if m == measure) for measure in measures}
    assert firsts["first step"] == firsts["first token"] == bench_loading.LLAMA
