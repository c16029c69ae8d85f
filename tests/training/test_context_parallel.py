"""``--context_parallel_size``: four processes, some of which share sequences, do what one process does."""

import importlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints

from ..matrix import some
from ..tolerances import assert_close
from ..torchrun import in_forks, once
from .children import pair
from .conftest import NO_DROPOUT

CLM, GLUE, LONG_RANGE, PRETRAIN, SUMMARIZATION = (
    f"hf_hybrid.training.{name}" for name in ("clm", "glue", "long_range", "pretrain", "summarization")
)
PROCESSES = 4
TIMED = re.compile(r"runtime|per_second|^epoch")
SIZES = "hidden_size=32,num_hidden_layers=2,intermediate_size=32"
MODELS = {
    "spade": f"{SIZES},num_attention_heads=4,local_radius=4,ssm_state_size=8,{NO_DROPOUT['spade']}",
    "chela": f"{SIZES},dropout=0,attention_dropout=0",
    "bst": f"{SIZES},num_attention_heads=4,window=8,{NO_DROPOUT['spade']}",
}
_WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "context_parallel_scripts", _write_rows)


def _write_rows(folder):
    """Seven of them to evaluate: two groups with two rows each have an uneven last batch."""
    rng = random.Random(0)
    for split, count in (("train", 24), ("validation", 7), ("test", 7)):
        texts = [" ".join(rng.choices(_WORDS, k=rng.randint(3, 12))) for _ in range(count)]
        labels = [rng.randint(0, 2) for _ in texts]
        rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
        if split == "test":
            rows = [{"text": text} for text in texts]
        lines = [json.dumps(row) for row in rows]
        summaries = [json.dumps({"document": text, "summary": text[:7]}) for text in texts]
        (folder / f"{split}.summaries.jsonl").write_text("\n".join(summaries) + "\n")
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{split}.txt").write_text("\n".join(texts * 8) + "\n")


def _jobs(folder, cache, sharing):
    """Jobs by name, with the number of processes that share sequences, from a function of the job's."""

    def argv(name, model_type, ending, size, batch, *more):
        files = {split: str(folder / f"{split}.{ending}") for split in ("train", "validation", "test")}
        rows = batch if not sharing else batch * size // PROCESSES
        shared = ["--context_parallel_size", str(size), "--ddp_backend", "gloo"] if sharing else []
        return [
            "--train_file", files["train"], "--validation_file", files["validation"], "--do_train", "--do_eval",
            "--model_type", model_type, "--config_overrides", MODELS[model_type], "--tokenizer_type", "bytes",
            "--per_device_train_batch_size", str(rows), "--per_device_eval_batch_size", "2", "--optim", "sgd",
            "--logging_steps", "1", "--use_cpu", "--report", "false", "--disable_tqdm", "true",
            "--cache_dir", str(folder / cache), "--output_dir", str(folder / f"{cache}-{name}"), *shared, *more,
            *(["--test_file", files["test"], "--do_predict"] if model_type == "chela" and ending == "jsonl" else []),
        ]  # fmt: skip

    def listops(size, batch):
        counts = ("--max_train_samples", "8", "--max_eval_samples", "7", "--max_predict_samples", "5")
        given = argv("listops", "chela", "txt", size, batch, *counts, *none, "2", "--learning_rate", "0.05")
        for flag in ("--train_file", "--validation_file", "--tokenizer_type"):
            del given[given.index(flag) : given.index(flag) + 2]
        fields = ",norm_type=batch_norm,training_length=200,long_kernel_size=200"
        given[given.index("--config_overrides") + 1] += fields
        return [*given, "--task_name", "lra_listops_200", "--do_predict"]

    none = ("--save_strategy", "no", "--max_steps")
    clm = ("--block_size", "32", "--eval_sequence_length", "61", "--max_eval_samples", "7")
    sharded = "tests.training.sharded" if sharing else CLM
    # of an optimizer without states torch loads none; with a large epsilon the steps are smooth in the gradients
    smooth = ("--optim", "adamw_torch", "--adam_epsilon", "1", "--learning_rate", "0.3", "--max_grad_norm", "1.2")
    saved = (*clm, *smooth, "--max_steps", "4", "--save_steps", "2", "--gradient_accumulation_steps", "2")
    masked = ("--objective", "masked_words", "--max_seq_length", "48", "--bf16", "false")  # by length
    spans = ("--max_seq_length", "48", "--bf16", "false", "--train_sampling_strategy", "random")
    return {
        # clipped in some steps
        "many steps": (CLM, argv("many", "spade", "txt", 2, 4, *clm, *none, "50", "--learning_rate", "0.02",
            "--max_grad_norm", "1.2")),
        "smoothed": (CLM, argv("smoothed", "bst", "txt", 4, 4, *clm, *none, "2", "--learning_rate", "0.05",
            "--label_smoothing_factor", "0.1", "--gradient_accumulation_steps", "2")),
        "streamed": (CLM, argv("streamed", "chela", "txt", 2, 4, *clm, *none, "2", "--streaming")),
        "classes": (GLUE, argv("classes", "chela", "jsonl", 2, 4, *none, "4", "--learning_rate", "0.05",
            "--max_seq_length", "48", "--gradient_accumulation_steps", "2")),
        # one group: a batch norm's statistics are those of a group's rows
        "listops": (LONG_RANGE, listops(4, 2)),
        "masked": (PRETRAIN, argv("masked", "spade", "jsonl", 4, 2, *masked, *none, "3", "--learning_rate", "0.05")),
        "spans": (PRETRAIN, argv("spans", "spade", "jsonl", 4, 2, *spans, *none, "2", "--learning_rate", "0.05")),
        "summaries": (SUMMARIZATION, argv("summaries", "spade", "summaries.jsonl", 2, 4, *none, "3",
            "--learning_rate", "0.05", "--max_source_length", "48", "--max_target_length", "9", "--do_predict",
            "--predict_with_generate", "--test_file", str(folder / "test.summaries.jsonl"))),
        "first part": (CLM, argv("parts", "chela", "txt", 2, 4, *clm, "--max_steps", "6", "--save_steps", "3",
            "--learning_rate", "0.05")),
        "other size": (CLM, argv("others", "chela", "txt", 4, 4, *clm, "--max_steps", "6", "--save_steps", "3",
            "--learning_rate", "0.05", "--resume_from_checkpoint", str(folder / f"{cache}-parts" / "checkpoint-3"))),
        "alone": (CLM, argv("alone", "chela", "txt", 1, 4, *clm, "--max_steps", "6", "--save_steps", "3",
            "--learning_rate", "0.05")),
        "together": (CLM, argv("together", "chela", "txt", 4, 4, *clm, "--max_steps", "6", "--save_steps", "3",
            "--learning_rate", "0.05", "--resume_from_checkpoint", str(folder / f"{cache}-alone" / "checkpoint-3"))),
        "sharded": (sharded, argv("sharded", "spade", "txt", 2, 4, *saved)),
        "sharded further": (sharded, argv("further", "spade", "txt", 4, 4, *saved, "--resume_from_checkpoint",
            str(folder / f"{cache}-sharded" / "checkpoint-2"))),
    }  # fmt: skip


ORDINARY = ("smoothed", "masked", "summaries", "alone", "together", "sharded", "sharded further")
"""The jobs that are always run; the others run in the full run only."""


@pytest.fixture(scope="module")
def outcomes(folder, tmp_path_factory):
    """A function: a job's name to what each of its processes had."""

    def read(name):
        ordinary = name in ORDINARY
        ran = once(
            tmp_path_factory, f"context_parallel_scripts/ran_{ordinary}", lambda ran: _run_jobs(folder, ran, ordinary)
        )
        return [json.loads((ran / f"outcomes-{rank}.json").read_text())[name] for rank in range(PROCESSES)]

    return read


def _run_jobs(folder, ran, ordinary):
    jobs = {name: job for name, job in _jobs(folder, "four", True).items() if (name in ORDINARY) == ordinary}
    path = ran / "jobs.json"
    path.write_text(json.dumps(list(jobs.values())))
    done = in_forks("tests.training.jobs", str(path), str(PROCESSES))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(PROCESSES):
        path = ran / f"outcomes-{rank}.json"
        path.write_text(json.dumps(dict(zip(jobs, json.loads(path.read_text()), strict=True))))


def _scores(metrics):
    # padding counts as work, and each group pads batches of its own
    return {name: value for name, value in metrics.items() if not TIMED.search(name) and name != "total_flos"}


@pytest.mark.parametrize(
    "name",
    some(
        ["many steps", "smoothed", "streamed", "classes", "listops", "masked", "spans", "summaries", "sharded"],
        *("smoothed", "masked", "summaries", "sharded"),
    ),
)
def test_processes_that_share_sequences_give_what_one_gives(name, folder, outcomes):
    """Losses and gradient norms at each step, weights, scores and predictions."""
    module, argv = _jobs(folder, "one", False)[name]
    expected = _scores(importlib.import_module(module).main(argv))
    for outcome in outcomes(name):
        actual = _scores(outcome["metrics"])
        assert actual.keys() == expected.keys()
        for metric, value in expected.items():
            assert_close(torch.tensor(actual[metric]), torch.tensor(value), "float32 model")
    one, four = (
        folder / argv[argv.index("--output_dir") + 1].replace("one-", f"{cache}-") for cache in ("one", "four")
    )
    if name == "many steps":  # all rows are of one length
        assert_close(
            *(torch.tensor(json.loads((run / "trainer_state.json").read_text())["total_flos"]) for run in (four, one)),
            "float32 model",
        )
    for field in ("loss", "grad_norm", "eval_loss"):
        logs = [json.loads((run / "trainer_state.json").read_text())["log_history"] for run in (one, four)]
        values = [torch.tensor([row[field] for row in log if field in row]) for log in logs]
        assert values[0].shape == values[1].shape
        assert_close(values[1], values[0], "float32 model")
    _same_weights(one, four)
    for file in one.glob("*predict*.txt"):
        assert file.read_text() == (four / file.name).read_text()
    assert name not in ("classes", "listops", "summaries") or list(one.glob("*predict*.txt"))


def _weights(run):
    """What a run saved; with FSDP the files hold a tied head twice."""
    weights = load_file(run / "model.safetensors")
    head, embedding = (weights.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del weights["lm_head.weight"]
    return weights


def _same_weights(one, four):
    weights = [_weights(run) for run in (one, four)]
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[0].items():
        assert_close(weights[1][key], tensor, "float32 model")


@pytest.mark.full
def test_a_run_goes_on_with_other_groups(folder, outcomes):
    """From a checkpoint of two groups of two processes with a group of four, and with one process."""
    jobs = _jobs(folder, "one", False)
    importlib.import_module(CLM).main(jobs["first part"][1])
    assert "error" not in outcomes("other size")[0]
    _same_weights(folder / "one-parts", folder / "four-others")
    argv = jobs["other size"][1]
    argv[argv.index("--resume_from_checkpoint") + 1] = str(folder / "four-parts" / "checkpoint-3")
    importlib.import_module(CLM).main(argv)
    _same_weights(folder / "one-parts", folder / "one-others")
    steps = json.loads((folder / "four-others" / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_processes_that_shared_nothing_go_on_as_a_group(folder, outcomes):
    """They drew the same random numbers, for different rows; now each draws its own for its part of a row."""
    assert len({outcome["seed"] for outcome in outcomes("alone")}) == 1
    assert len({outcome["seed"] for outcome in outcomes("together")}) == PROCESSES
    _same_weights(folder / "four-alone", folder / "four-together")


def test_a_run_that_shards_weights_goes_on_with_other_groups(folder, outcomes):
    """By FSDP2, beside two groups of two processes, then with a group of four."""
    assert "error" not in outcomes("sharded further")[0]
    _same_weights(folder / "four-sharded", folder / "four-further")


def _pair(folder, tmp_path, *fault):
    argv = [
        "--train_file", str(folder / "train.txt"), "--validation_file", str(folder / "validation.txt"), "--do_train",
        "--do_eval", "--model_type", "spade", "--config_overrides",
        MODELS["spade"], "--tokenizer_type", "bytes", "--block_size", "16", "--per_device_train_batch_size", "1",
        "--use_cpu", "--report", "false", "--disable_tqdm", "true", "--cache_dir", str(tmp_path / "cache"),
        "--output_dir", str(tmp_path / "out"), "--max_steps", "5", "--save_steps", "1", "--ddp_backend", "gloo",
        "--context_parallel_size", "2", "--context_parallel_timeout", "3",
    ]  # fmt: skip
    return pair("clm", argv, tmp_path, fault=fault)


def _said_by_rank_1(tmp_path):
    """What torchrun shows of other processes than the first."""
    return f"error: {json.loads((tmp_path / 'error1').read_text())['message']['message']}"


@pytest.mark.parametrize(
    ("kind", "rank", "call", "last"),
    some(
        [
            ("hangs", "1", 3, 2),
            ("ends", "1", 3, 2),
            ("ends", "0", 3, 2),
            ("hangs reading", "1", 4, 2),  # a batch is read before the one before it is used
            ("hangs", "1", 7, 5),  # in evaluation, after five steps
            ("stops", "1", 3, 2),
        ],
        ("ends", "0", 3, 2),
        ("hangs reading", "1", 4, 2),
        ("stops", "1", 3, 2),
    ),
)
def test_all_processes_name_the_one_that_is_missing(kind, rank, call, last, folder, tmp_path):
    """In a certain call of the model, or of what makes batches; of each step before there is a checkpoint."""
    children = _pair(folder, tmp_path, kind, rank, call)
    other = children.pop(1 - int(rank))
    code, said = other.wait()
    for child in children:
        child.process.kill()
        child.process.join()
    said = _said_by_rank_1(tmp_path) if rank == "0" else said
    assert code == 1, said
    assert "Traceback" not in said
    named = "the store of rank 0 with it" if rank == "0" else "rank 1 ended, or did not answer in time"
    assert len(re.findall(f"^error: .*{named}", said, re.MULTILINE)) == 1, said
    saved = complete_checkpoints(tmp_path / "out")
    assert [Path(path).name for path in saved] == [f"checkpoint-{step + 1}" for step in range(last)]


def test_processes_that_read_different_rows_stop(folder, tmp_path):
    (code, said), (other_code, _) = (child.wait() for child in _pair(folder, tmp_path, "reads less", "1", 0))
    assert code == other_code == 2
    for words in (said, _said_by_rank_1(tmp_path)):
        assert re.search(r"^error: .*: ranks 1 and 0 share a sequence .* \[1, 15\]", words, re.MULTILINE), words
