"""Comparisons on data: what is trained in which order, what is kept, and what is said of it."""

import gzip
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import (
    compare_on_data,
    costs,
    facts,
    figures,
    first_summaries,
    results_page,
    review_splits,
    speech_splits,
    train_one,
    whole_sentences,
)
from benchmarks import experiment as experiment_module
from benchmarks.compare_on_data import Queue
from benchmarks.comparison import COLUMNS, CURVE_COLUMNS, append_rows, best_rate, compare, read_rows, report, verdict
from benchmarks.experiment import Experiment, read_experiment
from benchmarks.record import read_csv
from benchmarks.sizes import sizes
from benchmarks.without_training import BASELINES
from hf_hybrid.data.lra import load_lra
from hf_hybrid.training.flags.recipes import find_recipe
from tests.matrix import some

EXPERIMENTS = Path(__file__).parent.parent / "benchmarks" / "experiments"
SEEDS = (0, 1, 2)
SPEC = {
    "script": "clm",
    "data": "texts",
    "scores": ["eval_loss", "eval_accuracy"],
    "learning_rates": [0.001, 0.01, 0.1],
    "flags": {"max_steps": 8, "config_overrides": {"hidden_size": 32}},
    "models": {"searched, S4": {"model_type": "a"}, "fixed": {"model_type": "b", "learning_rate": 0.01}},
}
ORDER = [
    ("searched, S4", 0, 0.001),
    ("searched, S4", 0, 0.01),
    ("searched, S4", 0, 0.1),
    ("fixed", 0, 0.01),
    ("searched, S4", 1, 0.01),
    ("searched, S4", 2, 0.01),
    ("fixed", 1, 0.01),
    ("fixed", 2, 0.01),
]


class Ended:
    """A process that did its work at once."""

    class stdin:
        @staticmethod
        def close():
            pass

    def __init__(self, returncode=0):
        self.returncode = returncode

    def poll(self):
        return self.returncode

    wait = poll


class Bench:
    """A queue in a folder of its own, with a function in place of training: model type, seed, rate to a loss."""

    def __init__(self, root, spec=SPEC, name="small"):
        self.root, self.name, self.begun, self.flags = root, name, [], {}
        self.at_start = lambda: None
        for split in ("train", "validation"):
            (root / "data" / "texts").mkdir(parents=True, exist_ok=True)
            (root / "data" / "texts" / f"{split}.txt").write_text("a text\n")
        self.change(spec)

    def change(self, spec):
        self.spec = spec
        (self.root / f"{self.name}.json").write_text(json.dumps(spec))

    @staticmethod
    def loss(model_type, seed, rate):
        return 1.0 + abs(math.log10(rate) + 2) + 0.01 * seed  # 0.01 is the best rate

    def start(self, folder):
        self.at_start()
        run = json.loads((folder / "run.json").read_text())
        flags = run["flags"]
        model = next(
            name
            for name, own in (self.spec.get("start", {}) | self.spec["models"]).items()
            if own.get("model_type") == flags.get("model_type")
        )
        self.begun.append((model, flags["seed"], flags["learning_rate"]))
        self.flags[self.begun[-1]] = flags
        (self.root / "begun").mkdir(exist_ok=True)
        (self.root / "begun" / f"{len(self.begun) - 1}.json").write_text(json.dumps(flags))
        loss = self.loss(flags.get("model_type"), flags["seed"], flags["learning_rate"])
        if loss is None:
            (folder / "log").write_text("one line\nValueError: no\n")
            return Ended(1)
        values = {"parameters": 10, "steps": 8, "cpu_minutes": 0.5, "eval_loss": loss, "eval_accuracy": 1 / loss}
        ok = math.isfinite(loss)
        curve = [{"step": 4, "train_loss": loss + 1}, {"step": 8, "train_loss": loss, "eval_loss": loss}]
        result = {"outcome": "ok" if ok else "diverged", "values": values if ok else {}, "curve": curve}
        (folder / "result.json").write_text(json.dumps(result))
        return Ended()

    def work(self, seeds=SEEDS, jobs=1):
        self.begun = []
        experiment = read_experiment(self.root / f"{self.name}.json", [self.root / "data"], self.root / "results")
        queue = Queue([experiment], seeds, self.root / "runs", start=self.start)
        queue.work(jobs, pause=0.0)
        return queue

    @property
    def table(self):
        return self.root / "results" / f"{self.name}.csv"

    def rows(self):
        return read_csv(self.table)

    def done(self):
        return [(row["model"], int(row["seed"]), float(row["learning_rate"])) for row in self.rows()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


# ---- the order of work ----


def test_rates_are_searched_with_the_first_seed_and_the_best_is_repeated_with_the_others(bench):
    assert bench.work().failures == {}
    assert bench.begun == bench.done() == ORDER
    assert bench.flags[ORDER[4]]["config_overrides"] == {"hidden_size": 32}
    assert bench.flags[ORDER[4]]["train_file"].endswith("texts/train.txt")
    assert list((bench.root / "runs").iterdir()) == []
    points = read_rows(bench.root / "results" / "curves" / "small.csv", CURVE_COLUMNS)
    assert [point["step"] for point in points] == ["4", "8"] * 8
    assert points[0]["eval_loss"] == ""
    assert points[1]["eval_loss"] == "2"
    bench.work()
    assert bench.begun == []
    bench.work(seeds=(0, 1, 2, 3))
    assert bench.begun == [("searched, S4", 3, 0.01), ("fixed", 3, 0.01)]


def test_runs_side_by_side_fill_up_with_what_can_begin(bench):
    bench.work(jobs=3)
    assert sorted(bench.done()) == sorted(ORDER)
    assert bench.begun[:3] == ORDER[:3]


def test_a_score_of_which_more_is_better_chooses_the_other_way(bench):
    bench.change(SPEC | {"select": "eval_accuracy"})
    bench.loss = lambda model_type, seed, rate: rate
    bench.work()
    assert ("searched, S4", 1, 1e-05) in bench.done()
    assert list(bench.rows()[0])[len(COLUMNS) :] == ["eval_accuracy", "eval_loss"]
    with pytest.raises(ValueError, match="'eval_runtime' must be one that is known"):
        best_rate(bench.rows(), "fixed", "eval_runtime")


@pytest.mark.parametrize(
    ("best", "further", "repeated"),
    [(0.01, [], 0.01), (0.0001, [0.0001, 1e-05], 0.0001), (10.0, [1.0, 10.0], 10.0), (1e-9, [0.0001, 1e-05], 1e-05)],
)
def test_a_search_goes_on_where_the_best_is_at_its_edge(bench, best, further, repeated):
    bench.loss = lambda model_type, seed, rate: 1.0 + abs(math.log10(rate / best))
    bench.work()
    searched = [rate for model, seed, rate in bench.done() if model != "fixed" and seed == 0]
    assert searched == [0.001, 0.01, 0.1, *further]
    assert ("searched, S4", 2, repeated) in bench.done()
    assert [rate for model, _, rate in bench.done() if model == "fixed"] == [0.01] * 3
    bench.work()
    assert bench.begun == []


def test_a_search_whose_edges_diverge_does_not_go_on(bench):
    bench.loss = lambda model_type, seed, rate: math.nan
    bench.work()
    assert bench.done() == ORDER[:4]


def test_drawn_data_need_no_folder_and_read_ones_are_named(bench, tmp_path):
    flags = {**SPEC["flags"], "task_name": "lra_listops_200"}
    spec = SPEC | {"script": "long_range", "data": "drawn:lra_listops_200", "scores": ["eval_loss"], "flags": flags}
    bench.change(spec)
    assert bench.work(seeds=(0,)).failures == {}
    assert not bench.flags[ORDER[0]].keys() & {"data_dir", "train_file", "validation_file"}
    bench.table.unlink()
    bench.change(spec | {"data": "texts"})
    assert bench.work(seeds=(0,)).failures == {}
    assert bench.flags[ORDER[0]]["data_dir"] == str(tmp_path / "data" / "texts")
    assert "train_file" not in bench.flags[ORDER[0]]
    bench.change(SPEC | {"data": "drawn:lra_listops_200"})
    with pytest.raises(ValueError, match="--data must name a folder with drawn:lra_listops_200 in it"):
        bench.work()


def test_only_experiments_that_read_files_need_a_folder_of_data(bench, tmp_path, monkeypatch, capsys):
    worked = []
    monkeypatch.setattr(Queue, "work", lambda queue, jobs: worked.extend(queue.experiments))
    flags = {**SPEC["flags"], "task_name": "lra_listops_200"}
    bench.change(SPEC | {"script": "long_range", "data": "drawn:lra_listops_200", "flags": flags})
    command = [
        str(tmp_path / "small.json"),
        "--results",
        str(tmp_path / "results"),
        "--output_dir",
        str(tmp_path / "o"),
    ]
    assert compare_on_data.main(command) == 0
    assert worked == ["small"]
    bench.change(SPEC)
    with pytest.raises(SystemExit):
        compare_on_data.main(command)
    assert "small.json: --data must name a folder with texts in it; got none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare_on_data.main([])
    assert "give experiments, or --report" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lra_listops", "lra_pathfinder", "lra_speech", "lra_text"])
def test_the_rows_that_score_a_model_choose_nothing(name):
    spec = json.loads((EXPERIMENTS / f"{name}.json").read_text(encoding="utf-8"))
    assert "predict_accuracy" in spec["scores"]
    assert Experiment(name, spec, {}, Path()).scores[0] == "eval_loss"  # of the validation split
    assert spec["flags"]["do_predict"]
    assert spec["flags"]["max_predict_samples"] > spec["flags"]["max_eval_samples"]


def test_recordings_are_held_out_for_a_test(tmp_path):
    (tmp_path / "all").mkdir()
    for split, count in (("train", 12), ("validation", 3)):
        audio = np.arange(2 * count, dtype=np.int16)  # two samples each: 2 n and 2 n + 1
        offsets, labels = np.arange(0, 2 * count + 1, 2), np.arange(count) % 10
        np.savez(tmp_path / "all" / f"{split}.npz", audio=audio, offsets=offsets, labels=labels, speakers=labels + 1)
    assert speech_splits.main([str(tmp_path / "all"), str(tmp_path / "apart")]) == 0
    found = {path.stem: np.load(path) for path in (tmp_path / "apart").iterdir()}
    first = {split: part["audio"][part["offsets"][:-1]] // 2 for split, part in found.items()}
    assert first["test"].tolist() == [0, 5, 10]
    assert first["train"].tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 11]
    assert first["validation"].tolist() == [0, 1, 2]
    for split, part in found.items():
        assert part["labels"].tolist() == (first[split] % 10).tolist()
        assert part["speakers"].tolist() == (part["labels"] + 1).tolist()
    rows = load_lra("lra_speech", "test", data_dir=tmp_path / "apart")
    assert [(2**15 * row).tolist() for row in rows.inputs] == [[0, 1], [10, 11], [20, 21]]


def test_the_most_frequent_label_is_scored(tmp_path):
    for split, labels in (("train", [1, 1, 0]), ("validation", [0, 1, 0, 0])):
        lines = (json.dumps({"text": "a film", "label": label}) + "\n" for label in labels)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    files = {f"{split}_file": str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")}
    read = {"task_name": "lra_text", "data_dir": str(tmp_path)}
    for script, flags in (("glue", files), ("long_range", read)):
        _, baseline = BASELINES[script]
        assert baseline(flags) == {"most frequent label": {"eval_accuracy": 0.25}}
        assert baseline(flags | {"max_eval_samples": 2}) == {"most frequent label": {"eval_accuracy": 0.5}}
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    (tmp_path / "train.jsonl").write_text((tmp_path / "test.jsonl").read_text())
    tested = BASELINES["long_range"][1](read | {"do_predict": True, "max_predict_samples": 2})
    assert tested == {"most frequent label": {"eval_accuracy": 0.25, "predict_accuracy": 1.0}}


def test_the_outermost_operator_of_listops_is_scored(tmp_path):
    rows = {
        "train": ["[MAX 8 9 ]", "[MAX 9 1 ]", "[MIN 0 3 ]"],
        "validation": ["[MAX 9 2 ]", "[MIN 0 7 ]", "[MIN 4 5 ]", "[MED 9 9 9 ]"],
    }
    for split, sources in rows.items():
        values = [9, 9, 0] if split == "train" else [9, 0, 4, 9]
        lines = (
            json.dumps({"source": text, "target": value}) + "\n" for text, value in zip(sources, values, strict=True)
        )
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    scores = BASELINES["long_range"][1]({"task_name": "lra_listops", "data_dir": str(tmp_path)})
    assert scores == {"most frequent label": {"eval_accuracy": 0.5}, "outermost operator": {"eval_accuracy": 0.5}}


def test_an_experiment_of_other_drawn_rows_or_settings_is_another_one(tmp_path, monkeypatch):
    flags = {**SPEC["flags"], "task_name": "lra_listops_200", "recipe": "chela"}
    spec = SPEC | {"script": "long_range", "data": "drawn:lra_listops_200", "flags": flags}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(spec))

    def recipe():
        return read_experiment(path, [], tmp_path).recipe("fixed", None)

    hashes = [recipe(), recipe()]
    monkeypatch.setattr(experiment_module, "digest_of_drawn", lambda *arguments: "other rows")
    hashes.append(recipe())
    monkeypatch.setattr(
        experiment_module, "find_recipe", lambda *names: replace(find_recipe(*names), learning_rate=1.0)
    )
    hashes.append(recipe())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    asked = []
    monkeypatch.setattr(experiment_module, "digest_of_drawn", lambda name, split, seed: asked.append(split) or "rows")
    path.write_text(json.dumps(spec | {"flags": flags | {"do_predict": True}}))
    recipe()
    assert asked == ["train", "validation", "test"]


def test_the_plan_tries_every_model_and_counts_all_runs(bench):
    def plan(spec, **more):
        bench.begun = []
        flags = {"per_device_train_batch_size": 2, "max_eval_samples": 6, **more}
        bench.change(spec | {"flags": SPEC["flags"] | flags})
        experiment = read_experiment(bench.root / "small.json", [bench.root / "data"], bench.root / "results")
        return compare_on_data.plan_of(experiment, SEEDS, bench.root / "runs", start=bench.start)

    table, minutes = plan(SPEC)  # a step takes an eighth of a minute
    assert bench.begun == [ORDER[0], ORDER[3]]
    assert bench.flags[ORDER[0]]["max_steps"] == 4
    assert "| searched, S4 | 5 | 7.50 | 6 |" in table  # 5 runs of 8.8 steps and an evaluation like one step
    assert minutes == pytest.approx((5 + 3) * 9.8 / 8)
    table, minutes = plan(
        SPEC, do_predict=True, max_predict_samples=12
    )  # two steps more, of runs and not of the trial
    assert minutes == pytest.approx((5 + 3) * 11.8 / 8)
    assert bench.flags[ORDER[0]]["do_predict"] is False
    assert not bench.table.exists()
    bench.loss = lambda model_type, seed, rate: None
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1; the end of .*ValueError: no"):
        plan(SPEC)
    with pytest.raises(ValueError, match="--plan tries models that start from scratch"):
        plan(SPEC | {"start": {"parent": {"model_type": "p", "learning_rate": 0.1}}})


def test_validation_documents_are_cut_to_excerpts(bench):
    texts = ["abcdefgh", "0123456"]
    for split in ("train", "validation"):
        (bench.root / "data" / "texts" / f"{split}.txt").unlink()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (bench.root / "data" / "texts" / f"{split}.jsonl").write_text(lines)
    read = []
    bench.at_start = lambda: read.append([json.loads(line) for line in next(bench.root.glob("runs/*.jsonl")).open()])
    bench.change(SPEC | {"excerpt": 4})
    assert bench.work(seeds=(0,)).failures == {}
    assert read[0] == [{"text": "cdef"}, {"text": "1234"}]
    flags = bench.flags[ORDER[0]]
    assert flags["validation_file"] == str(next(bench.root.glob("runs/*.jsonl")))
    assert flags["train_file"].endswith("texts/train.jsonl")
    bench.change(SPEC | {"excerpt": 3})
    assert "have another recipe" in bench.work().failures["small"]
    bench.table.unlink()
    bench.change(SPEC | {"excerpt": 8})
    assert "excerpt must be at most the 7 characters of the shortest" in str(bench.work(seeds=(0,)).failures)
    bench.change(SPEC | {"excerpt": 0})
    with pytest.raises(ValueError, match="excerpt must be a positive number of characters; got 0"):
        bench.work()


def test_the_next_experiment_begins_when_there_is_nothing_more_to_begin(bench, tmp_path):
    other = Bench(tmp_path, SPEC | {"models": {"alone": {"model_type": "c", "learning_rate": 1.0}}}, name="other")
    bench.spec = SPEC | {"models": SPEC["models"] | other.spec["models"]}
    experiments = [
        read_experiment(tmp_path / f"{name}.json", [tmp_path / "data"], tmp_path / "results")
        for name in ("small", "other")
    ]
    Queue(experiments, (0,), tmp_path / "runs", start=bench.start).work(jobs=5, pause=0.0)
    assert bench.begun == [*ORDER[:4], ("alone", 0, 1.0)]
    assert len(other.rows()) == 1


# ---- stopped and started again ----


def test_a_queue_that_is_stopped_anywhere_goes_on_where_it_was(bench):
    for stopped_after in (3, 2):
        left = iter(range(stopped_after))

        def stop(left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt

        bench.at_start = stop
        with pytest.raises(KeyboardInterrupt):
            bench.work()
    bench.at_start = lambda: None
    bench.work()
    assert bench.done() == ORDER


def test_a_result_that_nobody_noted_is_noted(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "_record", lambda self, run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bench.work()
    assert bench.begun == ORDER[:1]
    bench.work()
    assert bench.begun == ORDER[1:]
    assert bench.done() == ORDER


def test_a_line_that_was_cut_off_is_dropped_and_its_run_done_again(bench):
    bench.work()
    whole = bench.table.read_bytes()
    for cut in (3, 40, len(whole.splitlines()[-1])):
        bench.table.write_bytes(whole[:-cut])
        bench.work()
        assert bench.begun == ORDER[-1:]
        assert bench.table.read_bytes() == whole
    bench.table.write_bytes(whole[:20])  # of the header
    bench.work()
    assert bench.done() == ORDER


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "a.csv"
    append_rows(path, ["a", "b"], [{"a": 1, "b": "x, y"}, {"a": 2}])
    assert read_rows(path, ["a", "b"]) == [{"a": "1", "b": "x, y"}, {"a": "2", "b": ""}]
    with pytest.raises(ValueError, match="must have the columns a, c; it has a, b"):
        read_rows(path, ["a", "c"])


# ---- what must not be mixed ----


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("model_name_or_path", ["config.json", "model.safetensors", "tokenizer.json"]),
        ("config_name", ["config.json"]),
        ("tokenizer_name", ["tokenizer.json"]),
    ],
)
def test_rows_of_a_model_that_began_with_other_files_are_another_recipe(tmp_path, monkeypatch, flag, read):
    """A starter's name stays when its weights are trained anew."""
    names = {"tiny": str(tmp_path), str(tmp_path): str(tmp_path), "nobody/tiny": "nobody/tiny"}
    monkeypatch.setattr(experiment_module, "folder_of_starter", names.get)
    spec = {**SPEC, "models": {name: {flag: name} for name in names}}
    files = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    for file in files:
        (tmp_path / file).write_text("1")

    def recipes():
        experiment_module._content.cache_clear()
        return {name: Experiment("x", spec, {}, Path("x.csv")).recipe(name, None) for name in names}

    before = recipes()
    assert recipes() == before
    for file in files:
        (tmp_path / file).write_text("2")
        changed = [name for name, recipe in recipes().items() if recipe != before[name]]
        assert changed == (["tiny", str(tmp_path)] if file in read else [])
        (tmp_path / file).write_text("1")


def test_rows_of_another_recipe_are_refused(bench):
    bench.work(seeds=(0,))
    before = bench.table.read_bytes()
    bench.change(SPEC | {"flags": SPEC["flags"] | {"eval_steps": 2}})
    assert bench.work(seeds=(0,)).failures == {}
    for changed in (
        {"flags": SPEC["flags"] | {"weight_decay": 0.1}},
        {"models": SPEC["models"] | {"fixed": SPEC["models"]["fixed"] | {"initial": {"bias": {"value": 1.0}}}}},
        {"models": SPEC["models"] | {"fixed": SPEC["models"]["fixed"] | {"config_overrides": {"window": 2}}}},
    ):
        bench.change(SPEC | changed)
        failures = bench.work().failures
        assert list(failures) == ["small"]
        assert "rows of '" in failures["small"]
        assert "seed 0 at 0.01" in failures["small"]
        assert bench.begun == []
        assert bench.table.read_bytes() == before
    bench.change(SPEC | {"learning_rates": [0.001, 0.01, 0.1, 1.0]})
    assert bench.work(seeds=(0,)).failures == {}
    assert bench.begun == [("searched, S4", 0, 1.0)]


def test_rows_of_another_version_are_not_gone_on_with(bench, monkeypatch):
    bench.work()
    monkeypatch.setattr("benchmarks.comparison.__version__", "99.0")
    assert bench.work().failures == {}  # nothing is left to do
    failures = bench.work(seeds=(0, 1, 2, 3)).failures
    assert "come from version" in failures["small"]
    assert bench.begun == []


def test_a_report_mixes_nothing(bench):
    bench.work()
    rows = bench.rows()
    rows[0]["parameters"] = "11"
    with pytest.raises(ValueError, match="must have one value of parameters; got 10, 11"):
        report(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"claims": ""}, "it has claims"),
        ({"data": "none"}, "--data must name a folder with none in it"),
        ({"start": {"a": {}, "b": {}}}, "start must be one model"),
        ({"flags": {}}, "'searched, S4' must have max_steps"),
        ({"select": "eval_gen_len"}, "'eval_gen_len' must be one that is known"),
    ],
)
def test_an_experiment_that_cannot_be_done_is_refused(bench, change, message):
    bench.change(SPEC | change)
    with pytest.raises(ValueError, match=message):
        bench.work()


# ---- failures ----


def test_a_failure_stops_nothing_else_and_is_tried_again(bench, capsys):
    bench.loss = lambda model_type, seed, rate: (
        None if (model_type, seed) == ("a", 1) else Bench.loss(model_type, seed, rate)
    )
    queue = bench.work()
    assert list(queue.failures) == ["small: searched, S4, seed 1, learning rate 0.01"]
    assert "exit status 1" in capsys.readouterr().out.partition("FAILED")[2]
    assert ("searched, S4", 2, 0.01) in bench.done()
    assert ("fixed", 2, 0.01) in bench.done()
    assert "| searched, S4 (n=2) |" in report(bench.rows())
    bench.loss = Bench.loss
    assert bench.work().failures == {}
    assert bench.begun == [("searched, S4", 1, 0.01)]


def test_a_rate_at_which_the_loss_is_no_number_is_not_the_best(bench):
    bench.loss = lambda model_type, seed, rate: math.nan if rate > 0.01 or model_type == "b" else 1 / rate
    bench.work()
    assert bench.begun == [*ORDER[:6]]  # nothing is known of the best rate where all diverged
    text = report(bench.rows())
    assert "| searched, S4 | 10 | 0.01 | 0.5 | 100.0000 ± 0.0000 |" in text
    assert "| fixed |  |  |  | diverged | diverged |" in text
    assert "| searched, S4 | 1000.0000 | **100.0000** | diverged |" in text
    assert "cannot be compared: one of them diverged" in compare(bench.rows(), "searched, S4", "fixed", "eval_loss")


# ---- a start ----


def test_models_start_from_what_another_learnt_with_their_seed(tmp_path):
    parent = {"parent": {"model_type": "p", "learning_rates": [0.001, 0.01, 0.1]}}
    bench = Bench(tmp_path, SPEC | {"start": parent, "models": {"child": {"learning_rates": [0.005, 0.01, 0.02]}}})
    bench.work(seeds=(0, 1))
    first = [*(("parent", 0, rate) for rate in (0.001, 0.01, 0.1)), ("parent", 1, 0.01)]
    rest = [*(("child", 0, rate) for rate in (0.005, 0.01, 0.02)), ("child", 1, 0.01)]
    assert bench.begun == first + rest
    for run in rest:
        assert f"parent-{bench.rows()[0]['recipe']}-{run[1]}-0.01/model" in bench.flags[run]["model_name_or_path"]
    assert list((tmp_path / "runs").iterdir()) == []  # nobody needs the parents any more
    bench.work(seeds=(0, 1, 2))
    assert bench.begun == [("parent", 2, 0.01), ("child", 2, 0.01)]
    rows = bench.rows()
    (tmp_path / "results" / "small.csv").write_text(
        "".join(line for line in bench.table.read_text().splitlines(True) if ",child,1," not in line)
    )
    bench.work(seeds=(0, 1, 2))  # the parent is trained again, and has its row already
    assert bench.begun == [("parent", 1, 0.01), ("child", 1, 0.01)]
    assert sorted(row["model"] for row in bench.rows()) == sorted(row["model"] for row in rows)


# ---- what is said ----


def table_of(losses, scores=("eval_loss",)):
    """Rows at one rate: model -> the losses of its seeds."""
    common = dict.fromkeys(COLUMNS, "x") | {"learning_rate": "0.001", "recipe": "r", "outcome": "ok"}
    common |= {"date": "2000-01-01", "dataset": "texts", "parameters": "1000", "steps": "8", "cpu_minutes": "1.5"}
    return [
        {**common, "model": model, "seed": str(seed), **dict.fromkeys(scores, str(loss))}
        for model, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_tables_show_mean_and_standard_error():
    text = report(table_of({"A": [1.0, 1.1, 1.2], "B": [2.0]}))
    assert "texts, 8 steps, 3 seeds: mean ± standard error" in text
    assert "| A | 1,000 | 0.001 | 1.5 | 1.1000 ± 0.0577 |" in text
    assert "| B (n=1) | 1,000 | 0.001 | 1.5 | 2.0000 |" in text
    assert "searched" not in text


@pytest.mark.parametrize(
    ("first", "second", "score", "expected"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.4], "eval_loss", "A is ahead of B by 1.1000 ± 0.1291 (8.5 standard errors)"),
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.4], "eval_accuracy", "B is ahead of A by 1.100 ± 0.129 (8.5 standard errors)"),
        (
            [1.0, 1.1, 1.2],
            [1.1, 1.2, 1.3],
            "eval_loss",
            "A and B are not told apart: A is ahead by 0.1000 ± 0.0816 (1.2 standard errors)",
        ),
        ([1.0], [2.0, 2.2], "eval_loss", "A has 1.0000, B has 2.1000 ± 0.1000: the seeds do not tell which is ahead"),
        (
            [0.5] * 3,
            [0.5] * 3,
            "eval_loss",
            "A has 0.5000 ± 0.0000, B has 0.5000 ± 0.0000: the seeds do not tell which is ahead",
        ),
        ([1.0, 1.1, float("nan")], [2.0, 2.2], "eval_loss", "A and B cannot be compared: one of them diverged"),
    ],
)
def test_one_model_beside_another(first, second, score, expected):
    rows = table_of({"A": first, "B": second}, scores=("eval_loss", "eval_accuracy"))
    assert compare(rows, "A", "B", score) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.4], "shown"),
        ([2.0, 2.2, 2.4], [1.0, 1.1, 1.2], "contradicted at this size"),
        ([1.0, 1.1, 1.2], [1.1, 1.2, 1.3], "not shown at this size"),
        ([1.1, 1.2, 1.3], [1.0, 1.1, 1.2], "not shown at this size"),
        ([1.0], [2.0, 2.2], "not shown at this size"),
        ([0.5] * 3, [0.5] * 3, "not shown at this size"),
        ([1.0, 1.1], [2.0, 2.2], "shown"),
        ([1.0, 1.2], [1.3, 1.5], "not shown at this size"),
        ([1.0, 1.1, float("nan")], [2.0, 2.2, 2.4], "not shown at this size"),
    ],
)
def test_what_a_claim_is_worth(first, second, expected):
    assert verdict(table_of({"A": first, "B": second}), "A", "B", "eval_loss") == expected


def test_a_claim_is_not_judged_by_the_seeds_that_came_through():
    rows = table_of({"A": [1.0, 1.1, 1.2], "B": [2.0, 2.2, 2.4]})
    assert verdict(rows, "A", "B", "eval_loss") == "shown"
    rows[2]["outcome"] = "diverged"
    assert verdict(rows, "A", "B", "eval_loss") == "not shown at this size"
    assert "| A (n=2) |" in report(rows)


def test_a_score_that_is_not_a_number_is_shown():
    assert "| A | 1,000 | 0.001 | 1.5 | nan ± nan |" in report(table_of({"A": [1.0, float("nan")]}))


def test_statements_are_written_into_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    scores = (*COLUMNS, "eval_loss")
    append_rows(tmp_path / "t.csv", scores, table_of({"A, S4": [1.0, 1.1], "B": [2.0, 2.2]}))
    for mark in "|;":
        begin = f"So <!-- compare: t.csv {mark} A, S4 {mark} B {mark} eval_loss -->"
        told = "A, S4 is ahead of B by 1.0500 ± 0.1118 (9.4 standard errors)"
        assert results_page.renewed(f"{begin}old<!-- end -->.\n") == f"{begin}{told}<!-- end -->.\n"
        begin = begin.replace("compare", "verdict")
        assert results_page.renewed(f"{begin}old<!-- end -->.\n") == f"{begin}shown<!-- end -->.\n"
        for first, second, lead in (("A, S4", "B", "+1.0500 ± 0.1118"), ("B", "A, S4", "−1.0500 ± 0.1118")):
            begin = f"<!-- ahead: t.csv {mark} {first} {mark} {second} {mark} eval_loss -->"
            assert results_page.renewed(f"{begin}old<!-- end -->") == f"{begin}{lead}<!-- end -->"
        (tmp_path / "run.json").write_text('{"eval_loss": 4.11951}')
        begin = f"<!-- value: run.json {mark} eval_loss -->"
        assert results_page.renewed(f"{begin}old<!-- end -->") == f"{begin}4.120<!-- end -->"
    assert "| A, S4 | 1,000 |" in results_page.renewed("<!-- table: t.csv -->\n<!-- end -->")
    for wrong in ("C | B | eval_loss", "B | C | eval_loss", "B | B | eval_f1"):
        with pytest.raises(ValueError, match="must be one of"):
            results_page.renewed(f"<!-- compare: t.csv | {wrong} --><!-- end -->")


def test_models_that_an_experiment_has_not_come_to_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "EXPERIMENTS", tmp_path)
    (tmp_path / "t.json").write_text(json.dumps({"models": {"A": {}, "B": {}}}))

    def said(kind, second):
        page = results_page.renewed(f"<!-- {kind}: t.csv | A | {second} | eval_loss -->old<!-- end -->")
        return page.split("-->")[1].removesuffix("<!-- end ")

    assert said("compare", "B") == said("verdict", "B") == "not measured yet"
    append_rows(tmp_path / "t.csv", (*COLUMNS, "eval_loss"), table_of({"A": [1.0, 1.1], "B": [2.0]}))
    assert said("verdict", "B") == "not measured yet"
    with pytest.raises(ValueError, match="must be one of"):
        said("verdict", "C")


# ---- figures ----


def test_curves_are_those_of_the_best_rate(bench):
    bench.work()
    (panel,) = figures.learning(bench.root / "results")
    assert panel.title == "small on texts"
    assert {
        model: [tuple(round(v, 6) for v in point) for point in points] for model, points in panel.models.items()
    } == {
        "searched, S4": [(8, 1.01, 1.0, 1.02)],
        "fixed": [(8, 1.01, 1.0, 1.02)],
    }
    drawn = figures.draw([panel])
    assert drawn == figures.draw([panel])
    assert drawn.endswith(f"<!-- shows {figures.digest([panel])} -->\n")
    assert "searched, S4: 1.010" in drawn
    other = figures.Curves(panel.title, {**panel.models, "fixed": [(8, 1.0, 1.0, 1.0)]})
    assert figures.digest([other]) != figures.digest([panel])


def test_defaults_are_drawn_by_architecture_and_width(tmp_path):
    assert figures.defaults(tmp_path) == []
    names = ["CHELA, 64: before", "CHELA, 64: gates, twice", "CHELA, 128: before", "SPADE, 64: before"]
    rows = table_of({name: [place + 1.0, place + 2.0] for place, name in enumerate(names)}, ["eval_loss"])
    append_rows(tmp_path / "defaults.csv", (*COLUMNS, "eval_loss"), rows)
    panels = figures.defaults(tmp_path)
    assert [(panel.title, list(panel.cells)) for panel in panels] == [
        ("CHELA, 64", ["before", "gates, twice"]),
        ("CHELA, 128", ["before"]),
        ("SPADE, 64", ["before"]),
    ]
    assert panels[0].score == "validation loss"
    assert panels[0].cells["gates, twice"] == (2.5, 0.5)
    assert "2.500 ± 0.500" in figures.draw(panels)
    append_rows(tmp_path / "defaults.csv", (*COLUMNS, "eval_loss"), table_of({"CHELA": [1.0]}, ["eval_loss"]))
    with pytest.raises(ValueError, match="must be called 'ARCHITECTURE, KIND: CELL'; got 'CHELA'"):
        figures.defaults(tmp_path)


def test_costs_are_those_of_the_models_that_have_a_name(tmp_path):
    assert costs.costs(tmp_path) == []
    measured = "model,precision,length,median_s,peak_mib,outcome"
    pairs = "t5-sdpa,fp32,2048,4.096,9,ok; t5-sdpa,fp32,1024,1.024,5,ok; t5-sdpa,fp32,4096,,,out of memory; "
    pairs += "spade,fp32,1024,0.512,3,ok; spade,bf16,1024,9,9,ok; another,fp32,1024,9,9,ok; led,fp32,1024,,,failed"
    (tmp_path / "models_cpu.csv").write_text("\n".join([measured, *pairs.split("; ")]), "utf-8")
    measured = "model,length,step_s,peak_mib,token_s,cache_mib,outcome"
    rows = "spade,1024,1.024,7,0.002,4,ok llama-sdpa,1024,2.048,8,0.003,5,ok bst-sh-s4,1024,3.072,6,0.004,6,ok"
    rows += " bst-slide,1024,9,9,9,9,ok"
    (tmp_path / "language_models_cpu.csv").write_text("\n".join([measured, *rows.split()]), "utf-8")
    panels = costs.costs(tmp_path)
    time, memory, *language = panels
    assert time.models == {"T5": [(1024, 1000.0), (2048, 2000.0)], "SPADE": [(1024, 500.0)]}
    assert memory.models == {"T5": [(1024, 5.0), (2048, 9.0)], "SPADE": [(1024, 3.0)]}
    assert time.out_of_memory == memory.out_of_memory == ["T5"]
    values = [{name: value for name, [(_, value)] in panel.models.items()} for panel in language]
    names = ("SPADE", "Llama", "BST")
    expected = ((1000.0, 2000.0, 3000.0), (7.0, 8.0, 6.0), (2.0, 3.0, 4.0), (4.0, 5.0, 6.0))
    assert values == [dict(zip(names, row, strict=True)) for row in expected]
    drawn = figures.draw(panels)
    assert drawn == figures.draw(panels)
    assert drawn.count("then out of memory") == 2
    assert drawn.count(">BST<") == 4
    other = replace(time, out_of_memory=[])
    assert figures.digest([other]) != figures.digest([time])
    assert "out of memory" not in figures.draw([other])


def test_a_model_whose_training_runs_out_of_memory_still_decodes(tmp_path):
    columns = "model,length,step_s,peak_mib,token_s,cache_mib,outcome"
    rows = ["mamba2,8192,8.192,5,0.004,7,ok", "mamba2,16384,,,0.005,7,out of memory"]
    (tmp_path / "language_models_cpu.csv").write_text("\n".join([columns, *rows]), "utf-8")
    step, peak, token, cache = costs.costs(tmp_path)
    assert [panel.out_of_memory for panel in (step, peak, token, cache)] == [["Mamba-2"], ["Mamba-2"], [], []]
    assert [len(panel.models["Mamba-2"]) for panel in (step, peak, token, cache)] == [1, 1, 2, 2]
    assert token.models["Mamba-2"][-1] == (16384, 5.0)


def test_names_of_lines_stand_apart():
    wanted = {"a": 0.5, "b": 0.52, "c": 0.1, "d": 0.99, "e": 0.48}
    heights = costs.spread(wanted, 0.1)
    assert heights == pytest.approx({"c": 0.1, "e": 0.4, "a": 0.5, "b": 0.6, "d": 0.99})
    assert list(heights) == ["c", "e", "a", "b", "d"]
    crowd = costs.spread({"a": 0.95, "b": 1.0, "c": 0.85, "d": 0.0}, 0.1)
    assert crowd == pytest.approx({"d": 0.0, "c": 0.8, "a": 0.9, "b": 1.0})
    assert costs.spread({"a": -0.3}, 0.1) == {"a": 0.0}


# ---- the experiments that there are ----


@pytest.mark.parametrize("name", ["novels", "wikitext2", "imdb", "dialogsum"])
def test_models_beside_each_other_are_of_one_size(name):
    counts = sizes(json.loads((EXPERIMENTS / f"{name}.json").read_text(encoding="utf-8")))
    assert max(counts.values()) <= 1.002 * min(counts.values()), counts


@pytest.mark.parametrize("name", ["lra_listops", "lra_pathfinder", "lra_speech", "lra_text"])
def test_models_of_the_long_range_arena_are_as_large_as_one_whole_width_allows(name):
    spec = json.loads((EXPERIMENTS / f"{name}.json").read_text(encoding="utf-8"))
    counts = sizes(spec)
    wider = {
        model: {**flags, "config_overrides": {**flags["config_overrides"], "intermediate_size": width + 1}}
        for model, flags in spec["models"].items()
        for width in [flags["config_overrides"]["intermediate_size"]]
    }
    unit = max(count - counts[model] for model, count in sizes({**spec, "models": wider}).items())
    assert max(counts.values()) - min(counts.values()) <= unit, counts


def test_the_sizes_are_those_of_what_is_trained(tmp_path):
    """What the script builds for a task, with its labels and vocabulary, has as many parameters as were counted."""
    spec = json.loads((EXPERIMENTS / "lra_listops.json").read_text(encoding="utf-8"))
    flags = {"max_train_samples": 4, "max_eval_samples": 2, "max_steps": 1, "per_device_train_batch_size": 2}
    flags |= {"learning_rate": 0.001, "seed": 0, "cache_dir": str(tmp_path / "cache"), "max_predict_samples": 3}
    experiment = Experiment("", spec, {}, Path())
    run = {"script": "long_range", "flags": {**experiment.flags("SPADE"), **flags}, "save_every": 100.0}
    result = train_one.train(run, tmp_path / "model")
    assert result["outcome"] == "ok"
    assert result["values"]["parameters"] == sizes(spec)["SPADE"]
    assert {"eval_loss", "eval_accuracy", "predict_accuracy", "cpu_minutes"} <= result["values"].keys()
    assert [point["step"] for point in result["curve"]] == [1]


NAMES = [path.stem for path in sorted(EXPERIMENTS.glob("*.json"))]


# its rows take long to draw
@pytest.mark.parametrize("name", some(NAMES, *(name for name in NAMES if name != "lra_pathfinder")))
def test_experiments_can_be_read(tmp_path, name):
    path = EXPERIMENTS / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    if not data.startswith("drawn:"):
        (tmp_path / data).mkdir(parents=True)
        for split in ("train", "validation"):
            (tmp_path / data / f"{split}.jsonl").write_text("{}\n")
    experiment = read_experiment(path, [tmp_path], tmp_path)
    runs = compare_on_data.plan(experiment, [], SEEDS, lambda run: False)
    assert all(run.seed == 0 for run in runs)
    assert len({run.folder for run in runs}) == len(runs)


def test_facts_are_where_their_keys_are_and_summaries_tell_them(tmp_path, capsys):
    argv = [str(tmp_path), "--keys", "12", "--values", "5", "--asked", "9", "--train", "40", "--validation", "7"]
    assert facts.main(argv) == 0
    assert capsys.readouterr().out == "loss: 1.1771 with all answers right, 1.9394 with all of them guessed\n"
    for split, count in (("train", 40), ("validation", 7)):
        lines = (tmp_path / f"{split}.jsonl").read_text().splitlines()
        assert len(set(lines)) == count
        for line in lines:
            row = json.loads(line)
            told = {word[:3]: word[3:] for word in row["document"].split()}
            assert sorted(told) == [f"k{key:02}" for key in range(12)]
            assert set(told.values()) <= {f"v{value}" for value in range(5)}
            asked = row["summary"].split()
            assert [told[key] for key in asked[::2]] == asked[1::2]
            assert len(asked) == 18
    before = (tmp_path / "train.jsonl").read_text()
    facts.main(argv)
    assert (tmp_path / "train.jsonl").read_text() == before


def test_first_summaries_are_first(tmp_path):
    (tmp_path / "several").mkdir()
    for split, count in (("train", 3), ("validation", 2)):
        rows = [{"id": n, "document": f"{split} {n}", "summaries": [f"first {n}", "second"]} for n in range(count)]
        with gzip.open(tmp_path / "several" / f"{split}.jsonl.gz", "wt", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    assert first_summaries.main([str(tmp_path / "several"), str(tmp_path / "first")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "first" / "validation.jsonl").read_text().splitlines()]
    assert rows == [{"document": f"validation {n}", "summary": f"first {n}"} for n in range(2)]
    assert len((tmp_path / "first" / "train.jsonl").read_text().splitlines()) == 3


def test_every_second_review_is_held_out_for_a_test(tmp_path):
    (tmp_path / "all").mkdir()
    for split, count in (("train", 3), ("validation", 5)):
        rows = [json.dumps({"text": f"{split} {row}", "label": row % 2}) + "\n" for row in range(count)]
        (tmp_path / "all" / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    assert review_splits.main([str(tmp_path / "all"), str(tmp_path / "apart")]) == 0
    found = {
        path.stem: [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (tmp_path / "apart").iterdir()
    }
    assert found == {
        "train": ["train 0", "train 1", "train 2"],
        "validation": ["validation 0", "validation 2", "validation 4"],
        "test": ["validation 1", "validation 3"],
    }


def test_whole_sentences_are_held_out_with_their_parts(tmp_path, capsys):
    sentences = [
        "a fine film",
        "it is a fine film",
        "fine",
        "dull , dull",
        "no",
        "it is",
        "so it is",
        "film it",
        "a  b",
    ]
    rows = [{"idx": at, "sentence": text, "label": at % 2} for at, text in enumerate(sentences)]
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert whole_sentences.main([str(tmp_path / "sst2"), str(tmp_path / "whole")]) == 0
    found = {
        path.stem: [json.loads(line)["idx"] for line in path.read_text().splitlines()]
        for path in (tmp_path / "whole").iterdir()
    }
    # whole are 1, 3, 4, 6, 7 and 8; 0, 2 and 5 are parts of 1
    assert found == {"validation": [1, 6], "train": [3, 4, 7, 8]}
    with pytest.raises(SystemExit):
        whole_sentences.main([str(tmp_path / "nothing"), str(tmp_path / "new")])
    assert "source must be a folder; got" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# ---- a run ----


def test_initial_values_are_edited_and_nothing_else_moves():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.LayerNorm(100))

    edited, plain = model(), model()
    state = torch.get_rng_state()
    edits = {r"^0\.weight": {"std": 0.5}, r"0\.bias": {"scale": 2.0}, r"1\.weight": {"value": 3.0}}
    train_one.edit_initial_values(edited, edits, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0.49 < edited[0].weight.std() < 0.51
    assert torch.equal(edited[0].bias, 2 * plain[0].bias)
    assert torch.equal(edited[1].bias, plain[1].bias)
    assert edited[1].weight.unique().tolist() == [3.0]
    for wrong in ({"none": {"std": 1.0}}, {"bias": {"mean": 1.0}}, {"bias": {"std": 1.0, "value": 1.0}}):
        with pytest.raises(ValueError, match="must be one of std, value and scale, of a parameter"):
            train_one.edit_initial_values(model(), wrong, seed=0)


def test_a_run_that_is_cut_off_ends_where_it_would_have(tmp_path, monkeypatch):
    rng = random.Random(0)
    for split, lines in (("train", 40), ("validation", 10)):
        text = "".join(" ".join(rng.choices(["river", "stone", "cloud"], k=20)) + "\n" for _ in range(lines))
        (tmp_path / f"{split}.txt").write_text(text)
    flags = {
        "model_type": "chela", "config_overrides": {"hidden_size": 16, "num_hidden_layers": 1, "dropout": 0.1},
        "tokenizer_type": "bytes", "block_size": 32, "per_device_train_batch_size": 4, "max_steps": 6,
        "train_file": str(tmp_path / "train.txt"), "validation_file": str(tmp_path / "validation.txt"),
        "cache_dir": str(tmp_path / "cache"), "learning_rate": 0.01, "seed": 1, "max_eval_samples": 12,
    }  # fmt: skip
    run = {"script": "clm", "flags": flags, "evaluations": {"16": {"block_size": 16}}, "save_every": 1000.0}
    run["initial"] = {"embed": {"std": 0.5}}
    straight = train_one.train(run, tmp_path / "straight")
    assert straight["outcome"] == "ok"
    values, curve = straight["values"], straight["curve"]
    assert values["steps"] == 6
    assert values["cpu_minutes"] > 0
    assert 50 < values["peak_mib"] < 50_000
    assert [point["step"] for point in curve] == list(range(1, 7))
    assert [point["step"] for point in curve if "eval_loss" in point] == list(range(1, 7))

    counted = []

    def cut_off(clock, args, state, control, **kwargs):
        if state.global_step == 3:
            counted.append(clock.seconds)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_one._Clock, "on_step_begin", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train_one.train(run | {"save_every": 0.0}, tmp_path / "cut")
    resumed = train_one.train(run, tmp_path / "cut")
    assert resumed["curve"] == curve
    for score in ("eval_loss", "eval_loss, 16"):
        assert resumed["values"][score] == values[score]
    assert resumed["values"]["cpu_minutes"] > counted[0] / 60
    assert resumed["values"]["peak_mib"] > 50

    plain = train_one.train({**run, "initial": {}, "flags": flags | {"max_steps": 1}}, tmp_path / "plain")
    assert plain["curve"][0]["train_loss"] != curve[0]["train_loss"]
