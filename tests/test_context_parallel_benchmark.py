"""The benchmark of divided sequences counts without memory what processes have sent."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import bench_context_parallel as benchmark

PAGE = Path(__file__).parents[1] / "docs" / "context_parallel.md"
LENGTH, PROCESSES = 65536, 4


@pytest.fixture
def fake_processes(monkeypatch):
    monkeypatch.setattr(benchmark, "PROCESSES", PROCESSES)
    dist.init_process_group("fake", rank=0, world_size=PROCESSES)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("model_type", benchmark.MODELS)
def test_what_is_counted_was_sent(model_type, fake_processes):
    """The page has what the process with most has sent in real runs."""
    name = model_type.upper()
    row = rf"^\| {name} \| {PROCESSES} \|.* ([\d.]+) \|$"
    (sent,) = re.findall(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **benchmark.MODELS[model_type]))
    counted, operations = benchmark.count_step(model, LENGTH)
    assert f"{counted.bytes / 2**20:.2f}" == sent
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert 0.9 < operations / (6 * LENGTH / PROCESSES * weights) < 2  # a product, and two in the backward
