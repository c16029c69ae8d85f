"""The scripts and a Hub: what they push, what they load, and what they say when it does not work."""

import io
import json
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from hf_hybrid.training import clm, summarization
from hf_hybrid.training.flags.command_line import read_arguments, show_command
from hf_hybrid.training.report.model_card import MARK, is_written_by_hand
from hf_hybrid.training.run_folder.checkpoints import faults, was_cut_off
from hf_hybrid.training.run_folder.files import MARKER as COMPLETE
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer
from tests.hub import READER, WRITER, LoopbackHub
from tests.training.conftest import MODELS

ROOT = Path(__file__).resolve().parents[3]
SIZES = "hidden_size=32,num_hidden_layers=2,intermediate_size=48"
RUNS = {  # script and, after a space, what else is special -> model type, its configuration, its own flags, its class
    "summarization": ("spade", "", ["--predict_with_generate"], "AutoModelForSeq2SeqLM"),
    "summarization srformer": ("srformer_t5", MODELS["t5"], ["--predict_with_generate"], "AutoModelForSeq2SeqLM"),
    "glue": ("chela", f"{SIZES},long_kernel_size=8", ["--max_seq_length", "48"], "AutoModelForSequenceClassification"),
    "clm": ("bst", f"{SIZES},num_attention_heads=4,window=8", ["--block_size", "32"], "AutoModelForCausalLM"),
}
HAND = "---\nlicense: mit\n---\n# Mine\n\nWritten with care.\n"


@pytest.fixture(scope="module")
def commands(arguments, tmp_path_factory):
    """A function: script and output folder to a small command line, to which more flags are added."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for split, count in {"train": 24, "validation": 8, "test": 4}.items():
        texts = [" ".join(rng.choices(["river", "stone", "forest", "cloud", "winter"], k=12)) for _ in range(count)]
        rows = [json.dumps({"sentence": text, "label": number % 2}) for number, text in enumerate(texts)]
        (folder / f"{split}.glue.jsonl").write_text("\n".join(rows), encoding="utf-8")
        (folder / f"{split}.clm.txt").write_text("\n".join(texts), encoding="utf-8")

    def build(name, output, *more):
        model_type, sizes, own, _ = RUNS[name]
        script = name.split()[0]
        if script == "summarization":
            return [*arguments(model_type, output, *own, overrides=sizes), *more]
        suffix = {"glue": "glue.jsonl", "clm": "clm.txt"}[script]
        files = [word for split in ("train", "validation", "test")
                 for word in (f"--{split}_file", str(folder / f"{split}.{suffix}"))]  # fmt: skip
        return [
            "--model_type", model_type, "--config_overrides", sizes, *files, "--tokenizer_type", "bytes", *own,
            "--cache_dir", str(folder / "cache"), "--per_device_train_batch_size", "4", "--logging_steps", "1",
            "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(output), *more,
            "--report", str(output.name == "clm"),
        ]  # fmt: skip

    return build


def from_hub(argv, name):
    """The same command line for a model of the Hub and its tokenizer."""
    dropped = ("--model_type", "--config_overrides", "--tokenizer_vocab_size", "--tokenizer_type")
    kept = [word for at, word in enumerate(argv) if not {word, argv[at - 1]} & set(dropped)]
    return [*kept, "--model_name_or_path", name]


def all_metrics(card):
    """The table of results of a card, by split and metric."""
    rows = re.findall(r"^\| (\w+) +\| (\w+) +\| (\S+) +\|$", card.split("## Results")[1].split("##")[0], re.MULTILINE)
    return {(split, metric): value for split, metric, value in rows[1:]}


def test_scripts_and_the_hub(commands, tmp_path):
    train = ["--do_train", "--do_eval", "--do_predict", "--max_steps", "2", "--push_to_hub"]
    plan = []

    def step(name, script, *more, source=None, **client):
        argv = commands(script, tmp_path / name, *more)
        plan.append(
            {"name": name, "script": script.split()[0], "argv": from_hub(argv, source) if source else argv, **client}
        )

    repositories = {script: f"user/{script.replace(' ', '-')}" for script in RUNS}
    own = {script: ["--hub_model_id", name] for script, name in repositories.items()}
    own["glue"] = ["--hub_model_id", "glue"]  # of the token's owner
    own["clm"] += ["--hub_strategy", "checkpoint", "--save_steps", "1", "--save_total_limit", "1"]
    for script, name in repositories.items():
        step(script, script, *train, *own[script], "--hub_token", WRITER)
        step(f"{script} again", script, "--do_eval", source=name)
    evaluate = ["--do_eval", "--push_to_hub", "--hub_model_id", "user/clm"]
    step("only evaluated", "clm", *evaluate, source="user/clm")
    adapt = ["--peft", "lora", "--hub_model_id", "user/adapter"]  # the labels are the adapter's, not its base's
    step("adapter", "glue", *train, *adapt, source="user/clm")
    step("adapter again", "glue", "--do_eval", source="user/adapter")
    bad = {
        "no token": {"token": None},
        "refused": {"token": "hf_unknown"},
        "reader": {"token": READER},
        "unreachable": {"endpoint": "http://127.0.0.1:9"},
        "stranger": {},
        "bad name": {},
        "missing": {},
    }
    names = {"stranger": "somebody/model", "bad name": "user/a/b"}
    for name, client in bad.items():
        if name == "missing":
            step(name, "clm", "--do_eval", source="user/none")
        else:
            step(name, "clm", *train, "--hub_model_id", names.get(name, "user/new"), **client)
    for failure in ("error", "drop"):
        saved = "steps" if failure == "error" else "no"
        step(failure, "clm", *train, "--hub_model_id", f"user/{failure}", "--save_strategy", saved)
        (tmp_path / failure).mkdir()
    (tmp_path / "error" / "README.md").write_text(HAND, encoding="utf-8")
    next(run for run in plan if run["name"] == "error")["argv"].append("--overwrite_output_dir")

    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with LoopbackHub() as hub:
        hub.failing = {"user/error": "error", "user/drop": "drop"}
        client = [sys.executable, "-m", "tests.training.hub_client", "plan.json", "found.json"]
        client[3:] = [str(tmp_path / name) for name in client[3:]]
        environment = hub.environment(tmp_path / "home")
        subprocess.run(client, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))

    for script, (model_type, _, _, auto_class) in RUNS.items():
        assert not was_cut_off(tmp_path / script), "what was pushed is marked as cut off"
        done, again = found[script], found[f"{script} again"]
        assert (done["code"], again["code"]) == (0, 0), done["said"] + again["said"]
        assert again["metrics"]["eval_loss"] == pytest.approx(done["metrics"]["eval_loss"], rel=1e-5)
        there = hub.files(repositories[script])
        assert {"config.json", "model.safetensors", "tokenizer.json", "all_results.json", "README.md"} <= there.keys()
        assert script != "clm" or {"report.html", "curves.png"} <= there.keys()
        assert not [path for path in there if path.startswith(("_", "checkpoint-"))], (
            "what is not for others was pushed"
        )
        assert not [path for path, content in there.items() if WRITER.encode() in content], "the token was pushed"
        assert torch.load(io.BytesIO(there["training_args.bin"]), weights_only=False).hub_token is None
        check_card(there["README.md"].decode(), done["metrics"], model_type, auto_class, repositories[script])
    resume_from_hub(commands, hub.files("user/clm"), tmp_path)
    assert found["only evaluated"]["code"] == 0, found["only evaluated"]["said"]
    assert MARK.encode() in hub.files("user/clm")["README.md"]

    done, again = found["adapter"], found["adapter again"]
    assert (done["code"], again["code"]) == (0, 0), done["said"] + again["said"]
    assert again["metrics"]["eval_loss"] == pytest.approx(done["metrics"]["eval_loss"], rel=1e-5)
    assert "model.safetensors" not in hub.files("user/adapter")

    for name, message in {
        "no token": "--push_to_hub needs a token for the Hub: give --hub_token",
        "refused": "refuses the token",
        "reader": "needs a token that may write to the Hub; got one that may only read",
        "unreachable": "http",
        "stranger": "somebody/model cannot be made on the Hub: 403 Forbidden",
        "bad name": "--hub_model_id user/a/b: ",
        "missing": "--model_name_or_path user/none: no configuration could be loaded. user/none is not a local folder",
    }.items():
        line = last_line(found[name])
        assert found[name]["code"] == 2, found[name]["said"]
        assert line.startswith("error: --"), name
        assert message in line, name
        assert "Traceback" not in found[name]["said"], name
        assert not (tmp_path / name).exists() or not [*(tmp_path / name).rglob("*.safetensors")], name
    assert not {"user/new", "somebody/model"} & hub.repositories.keys()

    for name in ("error", "drop"):
        folder, line = tmp_path / name, last_line(found[name])
        assert found[name]["code"] == 2, found[name]["said"]
        assert f"error: --push_to_hub: the model could not be pushed to user/{name}: " in line  # after a progress bar
        assert f"model card are in {folder}. To push them later: hf upload user/{name} {folder} ." in line
        assert not hub.files(f"user/{name}"), "a part of it was pushed"
        saved = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
        assert {"train_loss", "eval_loss", "predict_loss"} <= saved.keys()
        again = evaluate_without_hub(commands, folder, tmp_path / f"{name} later")
        assert again["eval_loss"] == pytest.approx(saved["eval_loss"], rel=1e-5)
    assert "a checkpoint could not be pushed to user/error: " in found["error"]["said"]
    assert "a checkpoint could not be pushed" not in found["clm"]["said"]
    assert (tmp_path / "error" / "README.md").read_text(encoding="utf-8") == HAND
    assert MARK in (tmp_path / "drop" / "README.md").read_text(encoding="utf-8")


def resume_from_hub(commands, files, folder):
    """A checkpoint that was pushed is whole, and says so; a run goes on from it."""
    checkpoint = folder / "downloaded"
    checkpoint.mkdir()
    for path, content in files.items():
        if path.startswith("last-checkpoint/"):
            (checkpoint / Path(path).name).write_bytes(content)
    assert (checkpoint / COMPLETE).is_file()
    assert not faults(checkpoint, named=True)
    argv = commands("clm", folder / "resumed", "--do_train", "--max_steps", "3", "--save_strategy", "no")
    clm.main([*argv, "--resume_from_checkpoint", str(checkpoint)])
    state = json.loads((folder / "resumed" / "trainer_state.json").read_text(encoding="utf-8"))
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry][-2:] == [2, 3]


@pytest.mark.parametrize("error", [None, OSError("broken")])
def test_a_checkpoint_that_is_copied_for_a_push_is_whole_or_marked(error, tmp_path, monkeypatch):
    marked = []

    def copy(self, checkpoint_folder):
        marked.append(was_cut_off(tmp_path))
        if error:
            raise error

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", copy)
    monkeypatch.setattr(ScriptTrainer, "is_world_process_zero", lambda self: True)
    trainer = ScriptTrainer.__new__(ScriptTrainer)  # about to copy a checkpoint into the output folder
    trainer.args = SimpleNamespace(
        output_dir=str(tmp_path), hub_strategy=HubStrategy.EVERY_SAVE, save_total_limit=None
    )
    trainer._is_marked, trainer._save_total_limit = True, 1
    with pytest.raises(OSError, match="broken") if error else nullcontext():
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert marked == [True]
    assert was_cut_off(tmp_path) == (error is not None)


def last_line(run):
    return run["said"].strip().splitlines()[-1]


def evaluate_without_hub(commands, folder, output):
    """Evaluate what a run has left on the disk."""
    return clm.main(from_hub(commands("clm", output, "--do_eval"), str(folder)))


def check_card(text, metrics, model_type, auto_class, name):
    card = ModelCard(text)
    data = card.data.to_dict()
    assert (data["license"], data["library_name"]) == ("unknown", "transformers")
    assert {model_type, "hf_hybrid", "generated_from_trainer"} <= set(data["tags"])
    assert data["pipeline_tag"] in ("summarization", "text-classification", "text-generation")
    assert "base_model" not in data
    assert "datasets" not in data
    scores = {(result.dataset_split, result.metric_name): result.metric_value for result in card.data.eval_results}
    assert scores["validation", "loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    assert scores["test", "loss"] == pytest.approx(metrics["predict_loss"], rel=1e-4)
    table = all_metrics(text)
    for metric, value in metrics.items():
        prefix, _, rest = metric.partition("_")
        if prefix in ("train", "eval", "predict"):
            split = {"train": "training", "eval": "validation", "predict": "test"}[prefix]
            assert float(table[split, rest]) == pytest.approx(value, rel=1e-3, abs=1e-4), metric
    for split, count in (("training", metrics["train_samples"]), ("validation", metrics["eval_samples"])):
        assert re.search(rf"^\| {split} +\| {count} ", text.split("## Data")[1], re.MULTILINE), split
    assert re.search(rf"^\| model type +\| `{model_type}`", text, re.MULTILINE)
    assert re.search(r"^\| parameters +\| [\d,]+ ", text, re.MULTILINE)
    assert re.search(r"^\| `hidden_size` +\| `32` ", text, re.MULTILINE)
    loading = text.split("## Load it")[1].split("```")[1]
    assert loading.startswith("python\nimport hf_hybrid")
    assert f"{auto_class}.from_pretrained('{name}')" in loading
    assert re.search(rf"--hub_model_id (user/)?{name.partition('/')[2]} ", text)
    assert re.search(r"^```sh\npython run_\w+\.py \\\n    --model_type", text, re.MULTILINE)
    assert "--hub_token ..." in text


def test_a_command_line_without_its_secrets(tmp_path):
    argv = ["--token", "hf_a", "--hub-token=hf_b", "--output_dir", "my folder", "--push_to_hub_token", "hf_c"]
    argv += ["--forced_bos_token", "<de>", "--use_auth_token", "hf_d", "--do_train"]
    assert show_command("run_clm.py", argv) == [
        *("python run_clm.py", "--token ...", "--hub-token=...", "--output_dir 'my folder'"),
        *("--push_to_hub_token ...", "--forced_bos_token '<de>'", "--use_auth_token ...", "--do_train"),
    ]
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"hub_token": "hf_a", "do_train": True}), encoding="utf-8")
    shown = show_command("run_clm.py", read_arguments([str(path)]))
    assert shown == ["python run_clm.py", "--hub_token=...", "--do_train=True"]


def test_whose_card_it_is():
    from huggingface_hub import ModelCardData

    template = ModelCard.from_template(ModelCardData(library_name="peft"))
    assert not is_written_by_hand(str(template))
    assert not is_written_by_hand(f"{template}\n### Framework versions\n\n- PEFT 0.18.0")
    assert not is_written_by_hand(f"# Mine\n{MARK}\n")
    assert is_written_by_hand(str(template).replace("[More Information Needed]", "me", 1))
    assert is_written_by_hand(HAND)
    assert is_written_by_hand("---\n: : :\n---\nbroken")


def test_without_a_network_pushing_is_refused_at_once(arguments, tmp_path, no_data, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_some")
    no_data()
    argv = arguments("spade", tmp_path / "out", "--do_train", "--push_to_hub")
    with pytest.raises(ValueError, match=r"^--push_to_hub: .* cannot be asked .* offline mode"):
        summarization.main(argv)
    assert not (tmp_path / "out").exists()
