"""Train several small models on one data set, with several seeds and otherwise equal flags.

Run it from the repository root, with the folder of the data set (``train`` and ``validation`` files)::

    python -m benchmarks.compare_on_data benchmarks/experiments/samsum.json --data path/to/samsum \
        --out benchmarks/results/samsum.csv                                       # the record that is kept
    python -m benchmarks.compare_on_data --report benchmarks/results/samsum.csv   # its table, as Markdown

An experiment is a JSON file: the ``script`` (``summarization``, ``clm`` or ``glue``), its ``flags`` that all models
share, ``models``, which have flags of their own, and ``scores``, the metrics to show. The models begin from scratch,
or where there is a ``start``, one more model with its flags, from what that one has learnt with the first seed. Where
there are ``evaluations``, flags by name, every trained model is evaluated once more with each of them, which gives
``scores`` of the form "metric, name".
Every run is a process of its own with one thread, so that as many as there are cores can run side by side and the
processor time of a run means the same for all. Beside the models stand rows that need no training: for summaries, the
first words of each document (as many as the training summaries' median) and training summaries drawn at random; for
labels, the most frequent one of the training split. What ``--out`` holds already is not trained again.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.record import Row, markdown_table, read_csv, stamp, write_csv

# fmt: off
COLUMNS = (
    "date", "cpu", "python", "torch", "transformers", "hf_hybrid", "dataset", "model", "seed",
    "parameters", "steps", "cpu_minutes",
)
# fmt: on
AUTO_CLASSES = {
    "summarization": "AutoModelForSeq2SeqLM",
    "clm": "AutoModelForCausalLM",
    "glue": "AutoModelForSequenceClassification",
}


def run(experiment: dict[str, Any], data: Path, seeds: Sequence[int], jobs: int, folder: Path, out: Path) -> None:
    """Train every model with every seed that the CSV lacks, rewriting it after each run."""
    script, scores = experiment["script"], tuple(experiment["scores"])
    files = {split: _data_file(data, split) for split in ("train", "validation")}
    common = stamp() | {"dataset": data.name}
    rows = read_csv(out) if out.exists() else []
    if not rows and script in BASELINES:
        baselines = BASELINES[script](files)
        rows = [{**common, "model": name, "seed": "", **_shown(result, scores)} for name, result in baselines.items()]
    done = {(row["model"], row["seed"]) for row in rows}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:

        def train(runs: Sequence[tuple[str, int, dict[str, Any]]]) -> None:
            runs = [run for run in runs if (run[0], str(run[1])) not in done]
            folders = [folder / f"{_slug(name)}-{seed}" for name, seed, _ in runs]
            flags = [
                _flags(experiment["flags"] | own, files, seed, output_dir)
                for output_dir, (_, seed, own) in zip(folders, runs, strict=True)
            ]
            evaluations = [experiment.get("evaluations", {})] * len(runs)
            results = pool.map(_train, [script] * len(runs), flags, evaluations)
            for (name, seed, _), result in zip(runs, results, strict=True):
                rows.append({**common, "model": name, "seed": str(seed), **_shown(result, scores)})
                write_csv(out, (*COLUMNS, *scores), rows)

        start = {}
        for name, flags in experiment.get("start", {}).items():
            train([(name, seeds[0], flags)])
            start["model_name_or_path"] = folder / f"{_slug(name)}-{seeds[0]}"
        train([(name, seed, start | flags) for seed in seeds for name, flags in experiment["models"].items()])


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name)


def _data_file(data: Path, split: str) -> Path:
    pattern = "valid*.*" if split == "validation" else f"{split}.*"
    found = sorted(path for path in data.glob(pattern) if "heldout" not in path.name)
    if len(found) != 1:
        raise ValueError(f"--data {data} must hold one file named {pattern}; got {[path.name for path in found]}")
    return found[0]


def _flags(flags: dict[str, Any], files: dict[str, Path], seed: int, folder: Path) -> dict[str, Any]:
    return {
        **flags,
        **{f"{split}_file": path for split, path in files.items()},
        "do_train": True,
        "do_eval": True,
        "use_cpu": True,
        "seed": seed,
        "disable_tqdm": True,
        "output_dir": folder,
    }


def _train(script: str, flags: dict[str, Any], evaluations: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Train in this process with one thread; its processor time includes start-up, evaluation and generation."""
    import torch
    import transformers

    torch.set_num_threads(1)

    def call(flags: dict[str, Any]) -> dict[str, float]:
        arguments = {k: json.dumps(value) if isinstance(value, dict) else value for k, value in flags.items()}
        return importlib.import_module(f"hf_hybrid.training.{script}").main(
            [f"--{name}={value}" for name, value in arguments.items()]
        )

    metrics, trained = call(flags), flags["output_dir"]
    minutes = time.process_time() / 60
    left_out = {"model_type", "config_overrides", "tokenizer_type", "tokenizer_vocab_size", "do_train", "train_file"}
    again = {name: value for name, value in flags.items() if name not in left_out}
    for name, more in evaluations.items():
        place = {"model_name_or_path": trained, "output_dir": Path(trained) / f"evaluation-{_slug(name)}"}
        metrics |= {f"{metric}, {name}": value for metric, value in call(again | more | place).items()}
    model = getattr(transformers, AUTO_CLASSES[script]).from_pretrained(trained)
    return {
        **metrics,
        "parameters": model.num_parameters(),
        "steps": flags["max_steps"],
        "cpu_minutes": minutes,
    }


def _summaries_without_training(files: dict[str, Path]) -> dict[str, dict[str, float]]:
    from hf_hybrid.data.columns import summarization_columns
    from hf_hybrid.data.loading import load_raw_datasets
    from hf_hybrid.data.preprocessing import plain_baselines
    from hf_hybrid.training.summarization import rouge_scores

    splits = load_raw_datasets(**{f"{split}_file": str(path) for split, path in files.items()})
    text, summary = summarization_columns(splits, dataset_name=None)
    pool, references = list(splits["train"][summary]), list(splits["validation"][summary])
    texts = plain_baselines(list(splits["validation"][text]), pool)
    return {
        name: {f"eval_{score}": value for score, value in rouge_scores(predictions, references).items()}
        for name, predictions in texts.items()
    }


def _most_frequent_label(files: dict[str, Path]) -> dict[str, dict[str, float]]:
    from hf_hybrid.data.loading import load_raw_datasets
    from hf_hybrid.metrics import load_metric

    splits = load_raw_datasets(**{f"{split}_file": str(path) for split, path in files.items()})
    labels = {split: list(splits[split]["label"]) for split in files}
    most = statistics.mode(labels["train"])
    score = load_metric("accuracy").compute(
        predictions=[most] * len(labels["validation"]), references=labels["validation"]
    )
    return {"most frequent label": {f"eval_{name}": value for name, value in score.items()}}


BASELINES: dict[str, Callable[[dict[str, Path]], dict[str, dict[str, float]]]] = {
    "summarization": _summaries_without_training,
    "glue": _most_frequent_label,
}


def _shown(values: dict[str, float], scores: Sequence[str]) -> Row:
    digits = {"parameters": 0, "steps": 0, "cpu_minutes": 1, "eval_loss": 4, "eval_bits_per_byte": 4}
    digits |= dict.fromkeys(("eval_accuracy", "eval_f1", "eval_matthews_correlation"), 3)
    shown = ("parameters", "steps", "cpu_minutes", *scores)
    return {
        name: f"{value:.{digits.get(name.partition(',')[0], 2)}f}" for name, value in values.items() if name in shown
    }


TITLES = {
    "eval_loss": "validation loss",
    "eval_rouge1": "ROUGE-1",
    "eval_rouge2": "ROUGE-2",
    "eval_rougeL": "ROUGE-L",
    "eval_gen_len": "length (tokens)",
}


def report(rows: list[Row]) -> str:
    """Return the table of a run as Markdown: the mean over the seeds, and behind it each seed's value."""
    first = rows[-1]
    scores = [name for name in first if name not in COLUMNS]
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "transformers", "hf_hybrid"))
    counts = sorted({row["steps"] for row in rows if row["steps"]})
    own = ["steps"] if len(counts) > 1 else []
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = [row for row in rows if row["model"] == model]
        parameters = f"{int(runs[0]['parameters']):,}" if runs[0]["parameters"] else ""
        columns = (_mean(runs, name) for name in ("cpu_minutes", *scores))
        lines.append([model, parameters, *(runs[0][name] for name in own), *columns])
    names = [TITLES.get(name, name.removeprefix("eval_").replace("_", " ")) for name in scores]
    steps = "" if own else f"{counts[0]} steps, "
    seeds = ", ".join(dict.fromkeys(row["seed"] for row in rows if row["seed"]))
    return (
        f"{first['date']}, {first['cpu']}, one thread; {versions}. {first['dataset']}, {steps}seeds {seeds}"
        f"{': the mean, and each value' if ',' in seeds else ''}.\n\n"
        + markdown_table(["model", "parameters", *own, "CPU minutes", *names], lines)
    )


def _mean(runs: list[Row], name: str) -> str:
    values = [row[name] for row in runs if row[name]]
    if len(values) < 2:
        return "".join(values)
    digits = len(values[0].partition(".")[2])
    return f"{statistics.fmean(map(float, values)):.{digits}f} ({', '.join(values)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, nargs="?", help="JSON file with flags and models")
    parser.add_argument("--data", type=Path, help="folder with a train and a validation file")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--output_dir", type=Path, help="the models, a new folder (runs/EXPERIMENT)")
    parser.add_argument("--out", type=Path, metavar="CSV", help="default: OUTPUT_DIR/results.csv")
    parser.add_argument("--report", type=Path, metavar="CSV", help="train nothing, print the table of this file")
    arguments = parser.parse_args(argv)
    table = arguments.report
    if table is None:
        if arguments.experiment is None or arguments.data is None:
            parser.error("give an experiment and --data, or --report")
        experiment = json.loads(arguments.experiment.read_text(encoding="utf-8"))
        folder = arguments.output_dir or Path("runs", arguments.experiment.stem)
        table = arguments.out or folder / "results.csv"
        run(experiment, arguments.data, arguments.seeds, arguments.jobs, folder, table)
    print(report(read_csv(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
