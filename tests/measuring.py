"""Benchmarks in this process, on models so small that their logic takes no time."""

from benchmarks import bench_language_models, bench_models

TINY = {"WIDTH": 32, "HEADS": 2, "HEAD_DIM": 16, "INNER": 64, "LAYERS": 2, "VOCABULARY": 64}
FEW = ["--rounds", "1", "--threads", "1"]


class Sent(list):
    """A pipe that keeps what is sent."""

    send = list.append


def measure_here(monkeypatch, *modules):
    """Let benchmarks measure in this process, without limits of memory and of time."""

    def in_process(target, arguments, _limit):
        target(sent := Sent(), *arguments)
        return sent

    for module in (bench_models, *modules):
        monkeypatch.setattr(module, "in_process", in_process)
        monkeypatch.setattr(module, "limit_memory", lambda threads, limit=0: None)
    monkeypatch.setattr(bench_models, "MATMULS", ((64, 64, 64),))


def shrink_models(monkeypatch):
    """Make the models of `bench_models` and `bench_language_models` tiny."""
    for name, value in TINY.items():
        for module in (bench_models, bench_language_models):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(bench_models, "TARGET", 8)
    monkeypatch.setattr(bench_language_models, "WINDOW", 16)
    monkeypatch.setattr(bench_language_models, "DECODED", 4)
