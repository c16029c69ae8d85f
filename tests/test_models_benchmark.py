"""Training steps beside peers of equal size: one tiny run of each benchmark, and what is counted for the floors."""

import itertools
import math

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench_cross_attention, bench_language_models, bench_loss, bench_models, floors, results_page
from benchmarks.aims import aims
from benchmarks.record import in_fp32, of_rounds, read_csv
from tests.measuring import FEW, measure_here, shrink_models

aten = torch.ops.aten


def run(module, flags, tmp_path):
    """Run a benchmark with flags; return its rows, whose table the pages would show."""
    out = tmp_path / "measured.csv"
    assert module.main([*flags, *FEW, "--out", str(out)]) == 0
    rows = read_csv(out)
    assert all(row["outcome"] == "ok" for row in rows), rows
    assert results_page.tables(out) == module.report(rows)
    return rows


def test_encoder_decoders_are_measured(tmp_path, monkeypatch):
    measure_here(monkeypatch)
    shrink_models(monkeypatch)
    rows = run(bench_models, ["--models", "spade", "t5-sdpa", "--lengths", "24"], tmp_path)
    assert [(row["model"], row["precision"]) for row in rows] == [
        *itertools.product(("spade", "t5-sdpa"), ("fp32",)),
        *itertools.product(("spade", "t5-sdpa"), ("bf16",)),
    ]
    for row in rows:
        assert float(row["flops"]) == pytest.approx(bench_models.count_flops(row["model"], 24), rel=1e-3)
        share = float(row["flops"]) / float(row["matmul_gflop_per_s"]) / 1e9 / float(row["median_s"])
        assert float(row["fraction_of_floor"]) == pytest.approx(share, rel=0.05, abs=1e-3)
    shown = bench_models.report(rows)
    assert "| spade, tokens/s | " in shown
    assert "Dropout of the defaults: 0.1" in shown


@pytest.mark.full
def test_encoder_decoders_have_the_dropout_of_their_defaults_and_fill_no_cache(monkeypatch):
    """Those of BART's kind drop no attention weights."""
    measure_here(monkeypatch)
    shrink_models(monkeypatch)
    monkeypatch.setattr(transformers.DynamicCache, "update", None)
    for name, make in bench_models.MODELS.items():
        config = make()
        default = type(config)()
        for field in ("dropout_rate", "dropout", "attention_dropout"):
            assert getattr(config, field, None) == getattr(default, field, None), (name, field)
        if name != "bigbird":  # whose blocks need more tokens
            sent = bench_models.in_process(bench_models.measure_cell, (name, "fp32", 32, 1, 60.0), 60.0)
            assert sent[-1] == ("outcome", "ok"), name


def test_aims_are_of_ratios_within_a_round():
    """The machine is twice as fast in the second round, which moves no ratio."""
    rows = []
    for number, speed in (("1", 1.0), ("2", 2.0)):
        for model, tokens, peak in (("spade", 160.0, "60"), ("led", 100.0, "130"), ("t5-sdpa", 50.0, "110")):
            cell = {"model": model, "precision": "fp32", "length": "4096", "round": number, "fraction_of_floor": "0.5"}
            rows.append(cell | {"tokens_per_s": f"{tokens * speed}", "peak_mib": peak})
    _, table = aims(rows, ["spade"], bench_models.OWN)
    lines = table.splitlines()[2:]
    assert all(line.startswith("| spade |") for line in lines)
    assert [line.removeprefix("| spade ") for line in lines] == [
        "| fraction of the floor | fp32 | 4096 | at least 0.65 | 0.500 (0.50 to 0.50 in 2 rounds) | **no** |",
        "| tokens/s over the fastest peer | fp32 | 4096 | at least 1.5 | 1.600 (1.60 to 1.60 in 2 rounds) | yes |",
        "| memory over the smallest peer | fp32 | 4096 | at most 0.6 | 0.545 (0.55 to 0.55 in 2 rounds) | yes |",
    ]
    assert aims([row for row in rows if row["model"] != "spade"], ["spade"], bench_models.OWN) == []
    rows[-3]["tokens_per_s"] = "299"  # of "spade" in the second round
    _, table = aims(rows, ["spade"], bench_models.OWN)
    assert table.splitlines()[3].endswith("| 1.548 (1.50 to 1.60 in 2 rounds) | not in every round |")


def test_an_interrupted_run_goes_on_and_fractions_are_those_of_a_process(tmp_path, monkeypatch):
    """The second round is slower by half, and so is the machine; in each process the best rate counts."""
    started, stop = [], [3]

    def measured(target, arguments, _limit):
        if len(started) == stop[0]:
            raise KeyboardInterrupt
        started.append(arguments[:3])
        spent, rate = (0.5, 8e9) if len(started) < 3 else (1.0, 4e9)
        steps = [("rate", rate), ("step", spent), ("step", spent), ("rate", rate / 2)]
        return [*steps, ("peak", 10.0 * len(started)), ("outcome", "ok")]

    monkeypatch.setattr(bench_models, "in_process", measured)
    monkeypatch.setattr(bench_models, "count_flops", lambda *_: 2e9)
    out = tmp_path / "models.csv"
    flags = ["--models", "led", "spade", "--lengths", "24", "--precisions", "fp32", "--rounds", "2", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        bench_models.main(flags)
    first = read_csv(out)
    assert [(row["model"], row["round"]) for row in first] == [("led", "1"), ("spade", "1"), ("led", "2")]
    stop[0] = None
    assert bench_models.main(flags) == 0
    assert started == [(name, "fp32", 24) for name in ("led", "spade", "led", "spade")]
    rows = read_csv(out)
    assert rows[:3] == first
    assert [row["fraction_of_floor"] for row in rows] == ["0.500"] * 4
    led, spade = of_rounds(rows)
    numbers = ("repeats", "median_s", "min_s", "max_s", "peak_mib")
    assert [led[name] for name in numbers] == ["4", "0.75", "0.5", "1", "30"]
    assert (spade["peak_mib"], spade["fraction_of_floor"]) == ("40", "0.5")
    assert "| led | 0.500 |" in bench_models.report(rows)
    assert bench_models.main(flags) == 0
    assert len(started) == 4


def test_what_failed_once_is_not_measured_again(tmp_path, monkeypatch):
    outcomes = iter(["ok", "out of memory"])
    monkeypatch.setattr(bench_loss, "in_process", lambda *_: [("peak_mib", 7.0), ("outcome", next(outcomes))])
    flags = ["--vocabularies", "64", "--lengths", "24", "--losses", "plain", "--precisions", "fp32", "--rounds", "3"]
    out = tmp_path / "loss.csv"
    assert bench_loss.main([*flags, "--out", str(out)]) == 0
    rows = read_csv(out)
    assert [(row["round"], row["outcome"]) for row in rows] == [("1", "ok"), ("2", "out of memory")]
    (row,) = of_rounds(rows)
    assert row["outcome"] == "out of memory in 1 of 2 rounds"
    assert bench_loss.main([*flags, "--out", str(out)]) == 0


def test_what_a_second_run_may_mend_is_measured_again(tmp_path, monkeypatch):
    """A package may be there now; what has no value is not "nan"."""
    outcomes = iter([[("outcome", "failed: no such package")], [("peak_mib", math.nan), ("outcome", "ok")]])
    monkeypatch.setattr(bench_loss, "in_process", lambda *_: next(outcomes))
    flags = ["--vocabularies", "64", "--lengths", "24", "--losses", "plain", "--precisions", "fp32", "--rounds", "1"]
    out = tmp_path / "loss.csv"
    assert [bench_loss.main([*flags, "--out", str(out)]) for _ in range(2)] == [1, 0]
    assert [(row["peak_mib"], row["outcome"]) for row in read_csv(out)] == [("", "ok")]


def test_a_record_of_other_conditions_is_an_error_of_the_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_loss, "in_process", lambda *_: [("outcome", "ok")])
    flags = ["--vocabularies", "64", "--lengths", "24", "--rounds", "1", "--out", str(tmp_path / "loss.csv")]
    assert bench_loss.main([*flags, "--threads", "1"]) == 0
    with pytest.raises(SystemExit):
        bench_loss.main([*flags, "--threads", "2"])
    assert "error: --out: " in (said := capsys.readouterr().err)
    assert "must have threads '2' to go on; got '1': name another file" in said


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([("peak_mib", 4097.0), ("outcome", "ok")], "4097 MiB, more than 4096"),
        ([("outcome", "out of memory")], "out of memory"),
    ],
)
def test_a_loss_in_chunks_that_takes_too_much_is_said(tmp_path, monkeypatch, capsys, sent, said):
    monkeypatch.setattr(bench_loss, "in_process", lambda *_: sent)
    flags = ["--lengths", "16384", "--precisions", "fp32", "--rounds", "1", "--out", str(tmp_path / "loss.csv")]
    assert bench_loss.main(flags) == 1
    assert capsys.readouterr().err == f"spade, width 256, fp32: {said}\n"


def test_language_models_are_measured(tmp_path, monkeypatch):
    measure_here(monkeypatch, bench_language_models)
    shrink_models(monkeypatch)
    rows = run(bench_language_models, ["--models", "bst-sh-s4", "llama-sdpa", "--lengths", "24"], tmp_path)
    assert [(row["model"], row["precision"], row["loss"]) for row in rows] == [
        (model, precision, loss)
        for precision in ("fp32", "bf16")
        for model, loss in (("bst-sh-s4", "alone"), ("bst-sh-s4", "with logits"), ("llama-sdpa", "with logits"))
    ]
    assert all(float(row[name]) > 0 for row in rows for name in ("step_s", "kept_bytes", "flops"))
    ours = [row["loss"] for row in rows if row["model"] == "bst-sh-s4" and row["token_s"]]
    assert ours == ["alone", "alone"]  # decoding has no loss
    caches = {(row["model"], row["precision"]): float(row["cache_mib"]) for row in rows if row["cache_mib"]}
    assert caches["llama-sdpa", "bf16"] == pytest.approx(caches["llama-sdpa", "fp32"] / 2, rel=1e-3)
    kept = {row["loss"]: float(row["kept_bytes"]) for row in rows[:2]}
    assert kept["with logits"] > kept["alone"]
    shown = bench_language_models.report(rows)
    assert "**bf16, training: fraction of the floor" in shown
    ratio = float(rows[2]["step_s"]) / float(rows[1]["step_s"])
    assert f"| bst-sh-s4, with logits, tokens/s | {ratio:.2f} (llama-sdpa) |" in shown
    assert shown.count("| bst-sh-s4, with logits | ") == 2 * 5  # none of decoding
    compared = {row["model"]: row for row in in_fp32(tmp_path / "measured.csv")}
    assert {row["loss"] for row in compared.values()} == {"with logits"}
    assert compared["bst-sh-s4"]["step_s"] == rows[1]["step_s"]
    assert compared["bst-sh-s4"]["token_s"] == rows[0]["token_s"]


def test_a_failed_cell_is_a_row(tmp_path, monkeypatch):
    def fail(name, **options):
        raise RuntimeError("no such cell")

    measure_here(monkeypatch, bench_language_models)
    shrink_models(monkeypatch)
    monkeypatch.setattr(bench_language_models, "build_model", fail)
    flags = ["--models", "llama-sdpa", "--lengths", "24", "--precisions", "fp32", "--out", str(tmp_path / "a.csv")]
    assert bench_language_models.main([*flags, *FEW]) == 1
    (row,) = read_csv(tmp_path / "a.csv")
    assert row["outcome"] == "failed: RuntimeError: no such cell"


def test_a_process_of_its_own_says_how_it_ended(monkeypatch):
    monkeypatch.setattr(bench_models, "PRELOADED", ["benchmarks.bench_models"])  # less than what measuring needs
    (_, rate), outcome = bench_models.in_process(bench_models.measure_cell, ("none", "fp32", 8, 1, 9.0), 99.0)
    assert rate > 1e8
    assert outcome == ("outcome", "failed: KeyError: 'none'")
    assert bench_models.in_process(bench_models.measure_cell, ("spade", "fp32", 8, 1, 9.0), 0.0) == [
        ("outcome", "over time")
    ]


def test_losses_are_measured(tmp_path, monkeypatch):
    measure_here(monkeypatch, bench_loss)
    flags = ["--models", "bst", "--widths", "16", "--vocabularies", "64", "--lengths", "24", "--precisions", "bf16"]
    rows = run(bench_loss, flags, tmp_path)
    assert [(row["loss"], float(row["step_s"]) > 0) for row in rows] == [("plain", True), ("chunked", True)]


def test_cross_attention_is_measured(tmp_path, monkeypatch):
    measure_here(monkeypatch, bench_cross_attention)
    sizes = {"WIDTH": 32, "HEADS": 2, "HEAD_DIM": 16, "SEGMENT": 8, "DECODED": 11, "BATCH": 2, "TRAINED": 8}
    for name, value in (sizes | {"STEP_TARGET": 8, "STEP_LENGTHS": (32,), "VOCABULARY": 64}).items():
        monkeypatch.setattr(bench_cross_attention, name, value)
    rows = run(bench_cross_attention, ["--lengths", "32"], tmp_path)
    assert [row["mode"] for row in rows] == ["full", "segmented", "sr"]
    times = [name for name in bench_cross_attention.MEASURES if not name.endswith("_mib")]
    assert all(float(row[name]) > 0 for row in rows for name in times)


def test_language_models_have_equal_sizes():
    def size(name):
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(bench_language_models.MODELS[name]()).num_parameters()

    llama = size("llama-sdpa")
    for name in bench_language_models.MODELS:
        if "base" not in name:
            assert abs(size(name) / llama - 1) < 0.03, name


def test_language_models_drop_nothing_unless_asked(monkeypatch):
    shrink_models(monkeypatch)
    for name in ("spade", "chela", "bst-sh-s4", "modernbert-local"):
        plain = bench_language_models.build_model(name).config
        assert not any(value for field, value in vars(plain).items() if field.endswith("dropout")), name
    assert bench_language_models.build_model("spade", dropout=True).config.dropout > 0


# --- floors


def multiplied(model, **inputs):
    """Return what torch's counter sees of a step's linear maps and of other products, without dropout."""
    with FlopCounterMode(display=False) as counter:
        model.eval()(**inputs, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return counts.get(aten.mm, 0) + counts.get(aten.addmm, 0), counts.get(aten.bmm, 0)


@pytest.mark.parametrize(
    "name", ["spade", "spade-window", "t5-eager", "longt5-local", "longt5-tglobal", "pegasus-x", "led", "bigbird"]
)
def test_counted_linear_maps_of_encoder_decoders_are_those_that_run(monkeypatch, name):
    shrink_models(monkeypatch)
    config = bench_models.MODELS[name]()
    # blocks and windows that need no padding
    config.attention_window, config.block_size, config.stagger_local_blocks = [16] * 2, 16, False
    monkeypatch.setitem(bench_models.MODELS, name, lambda: config)
    source, target = torch.randint(3, 64, (1, 32)), torch.randint(3, 64, (1, 8))
    linear, others = multiplied(bench_models.build_model(name), input_ids=source, labels=target)
    counted = floors.of_encoder_decoder(bench_models.MODELS[name](), 32, 8)
    # the global tokens of PEGASUS-X's last layer, which nothing reads, have no gradients of q, out, fc1 and fc2
    unread = 4 * 32 * 32 * (2 * 32 + 2 * 64) if name == "pegasus-x" else 0
    assert counted.linear - unread == linear
    if name == "t5-eager":  # whose causal decoder computes what it hides, too
        hidden = floors.pairs("full", 8, causal=False) - floors.pairs("full", 8, causal=True)
        assert counted.attention == others - 3 * 4 * 32 * 2 * hidden
    assert bench_models.count_flops(name, 32) == pytest.approx(sum(counted))


@pytest.mark.parametrize(
    "name",
    [
        "spade",
        "chela",
        "bst-sh-s4",
        "bst-mh-s4",
        "bst-mf-s4",
        "llama-sdpa",
        "modernbert-local",
        "mamba",
        "mamba2",
        "qwen3-next",
    ],
)
def test_counted_linear_maps_of_language_models_are_those_that_run(monkeypatch, name):
    shrink_models(monkeypatch)
    tokens = torch.randint(3, 64, (1, 32))
    linear, others = multiplied(bench_language_models.build_model(name), input_ids=tokens, labels=tokens)
    counted = floors.of_language_model(bench_language_models.MODELS[name](), 32)
    single_heads = 0 if name != "bst-mh-s4" else 3 * 2 * 32 * 2 * 32 * 32  # keys and values of one layer
    assert counted.linear - single_heads == linear
    assert others >= single_heads
    assert counted.attention > 0


def test_visible_pairs_are_those_of_masks():
    queries, keys = torch.arange(11)[:, None], torch.arange(11)
    near, same = (queries - keys).abs() <= 3, queries // 4 == keys // 4
    for causal in (False, True):
        allowed = keys <= queries if causal else torch.ones(11, 11, dtype=torch.bool)
        assert floors.pairs("full", 11, causal=causal) == allowed.sum()
        assert floors.pairs("window", 11, reach=3, causal=causal) == (near & allowed).sum()
        assert floors.pairs("chunk", 11, chunk_size=4, causal=causal) == (same & allowed).sum()


def test_what_is_not_counted_is_refused():
    assert bench_language_models.count_flops("spade-hyena", 64) is None
    with pytest.raises(ValueError, match="must be counted in floors"):
        floors.of_language_model(bench_language_models.MODELS["spade-hyena"](), 64)
    with pytest.raises(ValueError, match="the attention of bart must be counted"):
        floors.encoder_pairs(transformers.BartConfig(), 64)


def test_floors_grow_with_the_length_and_with_what_is_trained():
    counted = {name: bench_language_models.count_flops(name, 4096) for name in ("spade", "spade-frozen-s4")}
    assert counted["spade-frozen-s4"] < counted["spade"]
    assert floors.convolution(4096, 8, 64) == pytest.approx(
        floors.convolution(2048, 8, 64) * 2, rel=0.01
    )  # blocks of the kernel's length


def test_a_convolution_is_counted_by_hand():
    """Two channels, 4 taps and 8 tokens: two blocks, each of 8 points, 2.5 * 8 * 3 operations for an FFT."""
    transform, products = 60, 6 * 4
    # of a channel: input, output and the gradients of both; the products of output and of two gradients
    data = 2 * (4 * 2 * transform + 3 * 2 * products)
    kernel = 2 * 2 * transform  # and that of its gradient
    assert floors.convolution(8, 2, 4) == data + kernel
    assert floors.convolution(8, 2, 4, trained=False) == data - 2 * 2 * products
