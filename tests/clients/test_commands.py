"""Command-line programs run with our models by `python -m hf_hybrid.run`, and with a checkpoint that has its code."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid import export_remote_code
from tests.hub import LoopbackHub

from .folders import save

RUN = [sys.executable, "-m", "hf_hybrid.run"]
CAUSAL = ["bst", "chela", "spade"]
DOCUMENTS = [{"question": "a b", "answer": 0}, {"question": "a longer one", "answer": 1}]
CHOICES = [" x", " yes"]
TASK = """
task: toy
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" x", " yes"]
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
UPLOAD = """
import sys, huggingface_hub
huggingface_hub.create_repo(sys.argv[1])
huggingface_hub.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
"""


def call(*arguments, **environment) -> str:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def log_likelihoods(folder: Path) -> list[list[float]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for document in DOCUMENTS:
        begin = tokenizer(document["question"], add_special_tokens=False)["input_ids"]
        row = []
        for choice in CHOICES:
            ids = tokenizer(document["question"] + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            row.append(sum(scores[t - 1, ids[t]].item() for t in range(len(begin), len(ids))))
        found.append(row)
    return found


@pytest.mark.parametrize("with_code", [False, True])
@pytest.mark.parametrize("model_type", CAUSAL)
def test_lm_eval(model_type, with_code, tmp_path):
    folder = tmp_path / "model"
    model = save(folder, model_type, "AutoModelForCausalLM")
    arguments = f"pretrained={folder}"
    if with_code:
        export_remote_code(model, folder, tokenizer=AutoTokenizer.from_pretrained(folder), overwrite=True)
        arguments += ",trust_remote_code=True"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS), encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "toy.yaml").write_text(TASK.format(file=data), encoding="utf-8")
    call(
        *([sys.executable, "-m"] if with_code else RUN),
        *("lm_eval", "run", "--model", "hf", "--model_args", arguments, "--device", "cpu", "--batch_size", "2"),
        *("--tasks", "toy", "--include_path", tmp_path / "tasks", "--log_samples", "--output_path", tmp_path / "out"),
        # a checkpoint with its code needs no import of ours
        PYTHONPATH="" if with_code else os.environ.get("PYTHONPATH", ""),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    (samples,) = (tmp_path / "out").rglob("samples_toy_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    found = [[float(answer[0][0]) for answer in row["resps"]] for row in rows]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(log_likelihoods(folder)), rtol=1e-4, atol=1e-4)


def test_estimate_memory(tmp_path):
    model = save(tmp_path / "model", "spade", "AutoModelForCausalLM")
    with LoopbackHub() as hub:
        environment = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        call(sys.executable, "-c", UPLOAD, "user/model", tmp_path / "model", **environment)
        estimate = ("accelerate", "estimate-memory", "user/model", "--library_name", "transformers")
        table = call(*RUN, *estimate, **environment)
    assert "float32" in table
    total = sum(parameter.numel() for parameter in model.parameters()) * 4 / 1024
    assert f"{total:.2f} KB" in table


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("model_type", CAUSAL)
def test_serve(model_type, tmp_path):
    folder = tmp_path / "model"
    save(folder, model_type, "AutoModelForCausalLM")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*RUN, "transformers", "serve", str(folder), "--device", "cpu", "--port", str(port)]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, body = f"http://127.0.0.1:{port}/v1", {"model": str(folder), "max_tokens": 5, "temperature": 0}
        for _ in range(120):
            assert server.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")[-3000:]
            try:
                completed = ask(f"{url}/completions", {**body, "prompt": "A text"})
                break
            except OSError:
                time.sleep(1)
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer("A text", return_tensors="pt")
        wanted = tokenizer.decode(
            model.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1] :]
        )
        assert completed["choices"][0]["text"] == wanted
        chat = ask(f"{url}/chat/completions", {**body, "messages": [{"role": "user", "content": "A text"}]})
        assert isinstance(chat["choices"][0]["message"]["content"], str)
        flags = ["max_new_tokens=5", "do_sample=False"]  # after them it asks whether to go on: N
        said = subprocess.run(
            [*RUN, "transformers", "chat", str(folder), f"http://127.0.0.1:{port}", *flags],
            input="A text\nN\n!exit\n", cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env=os.environ | {"HF_HUB_OFFLINE": "0"},  # this client refuses to ask any server in offline mode
        )  # fmt: skip
        assert said.returncode == 0, said.stderr[-3000:]
        log = (tmp_path / "log").read_text(encoding="utf-8")
        assert log.count('POST /v1/chat/completions HTTP/1.1" 200') == 2, log[-3000:]
    finally:
        server.terminate()
        server.wait(30)
