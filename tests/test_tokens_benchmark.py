"""The time of a token against what it reads, and the time until a model works."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import bench_generation, bench_language_models, bench_loading, bench_tokens, builders, results_page
from benchmarks.bench_tokens import accessed
from benchmarks.record import of_rounds, read_csv
from benchmarks.workloads import decoding, generation
from hf_hybrid import BstForCausalLM
from tests.measuring import measure_here, shrink_models


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
    assert accessed(Reader(tied)) == (4 * numbers, 0)


def test_only_the_part_that_is_read_is_counted():
    taps, wide, kept = torch.ones(8, 32), torch.ones(3, dtype=torch.complex64), torch.ones(2, 10)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=kept)])

    def call():
        made = taps[2:4, 5:8].mT * 2  # a view of a view
        kept[:, 3:5] += made[:2].sum() + taps[2:4, 5:9].sum()  # and again, with two numbers more
        return wide[:, None].expand(3, 50).abs().sum() + made.exp().sum()

    assert accessed(call, cache) == (4 * 2 * 4 + 3 * 8, 4 * 2 * 2)


def test_taps_that_a_token_does_not_need_are_not_read(monkeypatch):
    shrink_models(monkeypatch)
    model = bench_language_models.build_model("chela").eval()
    taps = sum(4 * x.numel() for name, x in model.named_parameters() if name.endswith("long_kernel"))
    others = sum(4 * x.numel() for name, x in model.named_parameters() if not name.endswith("long_kernel"))
    call, cache = decoding(model, 128)
    for _ in range(3):
        weights, state = accessed(call, cache)
        assert 0.9 * others < weights < others + 0.1 * taps
        assert 0 < state < 0.1 * bench_tokens.held_mib(cache) * 2**20


def test_of_a_document_only_the_segment_of_the_token_is_read(monkeypatch):
    shrink_models(monkeypatch)
    state = {}
    for length in (128, 1024):  # segments have 64 tokens
        call, cache = decoding(builders.build("srformer").eval(), length)
        state[length] = accessed(call, cache)[1]
    assert state[1024] < 2 * state[128]


def test_the_rate_and_the_host_are_measured():
    assert bench_tokens.reading_rate(2**20) > 1e8
    assert 0.5 < bench_tokens.host_share(lambda: [n * n for n in range(300_000)]) <= 1
    x = torch.randn(400, 400)
    assert bench_tokens.host_share(lambda: [x @ x for _ in range(20)]) < 0.5


def test_a_token_is_measured_once(tmp_path, monkeypatch, capsys):
    measure_here(monkeypatch, bench_tokens)
    shrink_models(monkeypatch)
    monkeypatch.setattr(bench_tokens, "TOKENS", 4)
    out = tmp_path / "tokens.csv"
    flags = ["--models", "bst-sh-s4", "--batches", "2", "--lengths", "24", "--threads", "1", "--out", str(out)]
    assert bench_tokens.main(flags) == 0
    (row,) = read_csv(out)
    assert (row["model"], row["batch"], row["outcome"]) == ("bst-sh-s4", "2", "ok")
    assert all(float(row[name]) > 0 for name in bench_tokens.MEASURES)
    monkeypatch.setattr(bench_tokens, "in_process", None)  # nothing is measured again
    assert bench_tokens.main(flags) == 0
    assert f"| bst-sh-s4 | 2 | 24 | {row['weights_mib']} | {row['state_mib']} |" in capsys.readouterr().out
    assert results_page.tables(out) == bench_tokens.report(read_csv(out))


def test_a_floor_has_the_best_rate_of_all_that_read_as_much():
    sizes = {"weights_mib": "6", "state_mib": "2", "cache_mib": "2", "host_share": "0.5", "token_ms": "8"}
    row = dict.fromkeys(("cpu", "threads", "python", "torch", "transformers", "hf_hybrid", "date"), "-") | sizes
    row |= {"model": "spade", "batch": "1", "length": "9", "outcome": "ok"}
    floors = {"slow": ("8", "2"), "fast": ("8", "1"), "faster, but of less": ("4", "0.25")}
    rows = [
        row | {"model": name, "weights_mib": size, "state_mib": "0", "floor_ms": ms}
        for name, (size, ms) in floors.items()
    ]
    over = [line.split(" | ")[-2] for line in bench_tokens.report(rows).splitlines()[4:]]
    assert over == ["8.0", "8.0", "32.0"]


@pytest.mark.full
def test_generation_is_measured_once_beside_a_peer(tmp_path, monkeypatch, capsys):
    measure_here(monkeypatch, bench_generation)
    monkeypatch.setitem(builders.SIZES, "tiny", (32, 2))
    monkeypatch.setattr(bench_generation, "TOKENS", 8)
    monkeypatch.setattr(bench_generation, "BACKEND", "eager")  # the same graphs, without their code
    torch.compiler.reset()
    out = tmp_path / "generation.csv"
    flags = ["--sizes", "tiny", "--models", "llama", "bst", "--batches", "2", "--threads", "1", "--out", str(out)]
    assert bench_generation.main([*flags, "--rounds", "2"]) == 0
    assert [row["round"] for row in read_csv(out)] == [*"1111", *"2222"]
    llama, bst, llama_compiled, bst_compiled = of_rounds(read_csv(out))
    assert (llama["model"], bst["model"], bst["batch"], bst["outcome"]) == ("llama", "bst", "2", "ok")
    assert (llama_compiled["decoding"], bst_compiled["decoding"], bst_compiled["outcome"]) == (*["compiled"] * 2, "ok")
    assert all(float(row[name]) > 0 for row in (llama, bst) for name in ("start_ms", "token_ms", "operators"))
    assert all(float(row["min_ms"]) <= float(row["token_ms"]) <= float(row["max_ms"]) for row in (llama, bst))
    assert all(float(row["compile_s"]) > 0 and not row["operators"] for row in (llama_compiled, bst_compiled))
    assert not bst["compile_s"]
    monkeypatch.setattr(bench_generation, "in_process", None)  # nothing is measured again
    assert bench_generation.main([*flags, "--rounds", "2"]) == 0
    share = float(bst["token_ms"]) / float(llama["token_ms"])
    assert f"| {share:.2f} | {bst['operators']} | - |" in capsys.readouterr().out
    assert results_page.tables(out) == bench_generation.report(read_csv(out))


def test_what_does_not_compile_has_no_row_of_it(tmp_path, monkeypatch):
    asked = []
    ended = [("start_ms", 1.0), ("token_ms", 1.0), ("outcome", "ok")]
    monkeypatch.setattr(bench_generation, "in_process", lambda *a: asked.append(a[1][1:4]) or ended)
    monkeypatch.setattr(BstForCausalLM, "_can_compile_fullgraph", False)
    flags = ["--sizes", "tiny", "--models", "spade", "bst", "--batches", "1", "--rounds", "1"]
    assert bench_generation.main([*flags, "--out", str(tmp_path / "few.csv")]) == 0
    assert asked == [("spade", 1, "eager"), ("bst", 1, "eager"), ("spade", 1, "compiled")]


@pytest.mark.parametrize("name", builders.SIZED)
def test_models_of_any_size_generate(name, monkeypatch):
    monkeypatch.setitem(builders.SIZES, "tiny", (16, 1))
    assert bench_generation.operators(generation(builders.build_sized(name, "tiny"), length=5, tokens=2)) > 20


def assert_ratio(ratio, seconds, of_peer):
    """A ratio, rounded to hundredths, is one of times that are rounded to thousandths."""
    least, most = ((float(seconds) + sign * 0.0005) / (float(of_peer) - sign * 0.0005) for sign in (-1, 1))
    assert least - 0.005 <= float(ratio) <= most + 0.005


def test_loading_runs_everything_in_turns_and_says_what_fails_and_what_is_slow(tmp_path, monkeypatch, capsys):
    slept = [tuple(f"time.sleep({part})" for part in (0.2, 0.4, last)) for last in (0.1, 0.3)]
    codes = {
        ("import", "peer"): bench_loading.Subject(("time.sleep(0.1)",)),
        ("import", "ours"): bench_loading.Subject(("time.sleep(0.5)",), "peer"),
        ("script", "broken"): bench_loading.Subject(("import no_such_module_here",), "peer"),
        ("first step", "peer"): bench_loading.Subject(slept[0]),
        ("first step", "ours"): bench_loading.Subject(slept[1], "peer"),
    }
    monkeypatch.setattr(bench_loading, "subjects", lambda length: codes)
    out = tmp_path / "loading.csv"
    assert bench_loading.main(["--rounds", "2", "--out", str(out)]) == 1
    peer, ours, broken, first, second = read_csv(out)
    assert [row["repeats"] for row in (peer, ours, broken)] == ["2", "2", "0"]
    assert 0.1 <= float(peer["lowest"]) <= float(peer["seconds"]) <= float(peer["highest"])
    assert float(ours["seconds"]) >= 0.5
    assert_ratio(ours["ratio"], ours["seconds"], peer["seconds"])
    assert (peer["ratio"], broken["ratio"]) == ("", "")
    assert broken["outcome"] == "failed: ModuleNotFoundError: No module named 'no_such_module_here'"
    printed = capsys.readouterr()
    shown = f"{ours['seconds']} | {ours['lowest']} to {ours['highest']} |  |  |  | {ours['ratio']} (peer) |"
    assert f"| import | ours | {shown} above 1.3 |" in printed.out
    assert "import ours: above 1.3 times peer" in printed.err
    assert [first[name] for name in ("imports_ratio", "work_ratio")] == ["", ""]
    for part, least in zip(bench_loading.PARTS, (0.2, 0.4, 0.3), strict=True):
        assert float(second[part]) >= least
    assert_ratio(second["work_ratio"], second["work"], first["work"])
    assert second["work_ratio"] != second["ratio"]
    assert f"{second['work']} ({second['work_ratio']}) | {second['ratio']} (peer) | work above 1.3 |" in printed.out
    assert "first step ours: work above 1.3 times peer" in printed.err
    assert results_page.tables(out) == bench_loading.report(read_csv(out))
    fast = [row | {"ratio": "1.29"} for row in (peer, ours)]
    assert bench_loading.too_slow(fast) == []


def test_what_is_loaded_can_be_run(monkeypatch):
    """In this process and tiny: the code of a step and of a token, and names of modules that there are."""
    shrink_models(monkeypatch)
    found = bench_loading.subjects(length=16)
    for key in (
        ("first step", "bst-sh-s4"),
        ("first token", "spade-seq2seq"),
        ("first token", "t5-sdpa"),
        ("script", "clm"),
        ("script", "transformers' Trainer"),
        ("import", "hf_hybrid"),
    ):
        exec("\n".join(found[key].parts), {})
    for (measure, _), subject in found.items():
        assert not subject.peer or not found[measure, subject.peer].peer


def test_encoder_decoders_are_as_large_as_their_peer():
    sizes = {name: builders.build(name).num_parameters() for name in ("t5-sdpa", "spade-seq2seq", "srformer")}
    for name, size in sizes.items():
        assert abs(size / sizes["t5-sdpa"] - 1) < 0.03, name
