"""Which backend runs and what is said about it, with a GPU that is only claimed to be there."""

import itertools
import logging
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import dispatch, use_backend
from hf_hybrid.kernels.dispatch import choose_backend, forces_triton, wished_backend
from hf_hybrid.kernels.packed import spans


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.delenv("HF_HYBRID_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_told", set())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return types.SimpleNamespace(is_cuda=True, device="cuda:0")


def test_auto_runs_triton_on_a_gpu_unless_the_op_objects(on_a_gpu, caplog):
    with caplog.at_level(logging.INFO, "hf_hybrid.kernels.dispatch"):
        assert choose_backend("op", "auto", [on_a_gpu], lambda: None) == "triton"
        for _ in range(3):
            assert choose_backend("op", "auto", [on_a_gpu], lambda: "too wide") == "torch"
    assert [record.getMessage() for record in caplog.records] == ["op runs on torch (too wide)"]


def test_forced_triton_runs_or_raises_with_the_reason(on_a_gpu, monkeypatch):
    assert choose_backend("op", "triton", [on_a_gpu], lambda: None) == "triton"
    for wish in ("argument", "context", "environment"):
        with use_backend("triton") if wish == "context" else use_backend("auto"):
            if wish == "environment":
                monkeypatch.setenv("HF_HYBRID_BACKEND", "triton")
            elif wish == "argument":
                continue
            with pytest.raises(ValueError, match="op cannot run on triton: too wide"):
                choose_backend("op", "auto", [on_a_gpu], lambda: "too wide")
    assert choose_backend("op", "triton", [on_a_gpu, None], lambda: None) == "triton"
    with pytest.raises(ValueError, match="not every tensor is on a CUDA device"):
        choose_backend("op", "triton", [on_a_gpu, torch.ones(1)], lambda: None)
    elsewhere = types.SimpleNamespace(is_cuda=True, device="cuda:1")
    with pytest.raises(ValueError, match="the tensors must be on one device; got cuda:0, cuda:1"):
        choose_backend("op", "triton", [on_a_gpu, elsewhere], lambda: None)


def test_devices_that_the_kernels_do_not_know(on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"need compute capability 8.0 or later; got 7.5"):
        choose_backend("op", "triton", [on_a_gpu], lambda: None)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backend("op", "triton", [on_a_gpu], lambda: None)


def test_a_backward_keeps_what_the_forward_was_told(monkeypatch):
    monkeypatch.delenv("HF_HYBRID_BACKEND", raising=False)
    assert wished_backend("auto") == "auto"
    with use_backend("torch"):
        assert wished_backend("auto") == "torch"
    assert not forces_triton("auto")
    monkeypatch.setenv("HF_HYBRID_BACKEND", "triton")
    assert forces_triton("auto")
    assert not forces_triton("torch")


def test_the_choice_is_seen_in_other_threads_and_not_compiled():
    with use_backend("torch"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(wished_backend, "auto").result() == "torch"
        seen = []
        torch.compile(lambda x: (seen.append(wished_backend("auto")), x + 1)[1], backend="eager")(torch.ones(1))
    assert seen == ["auto"]
    assert wished_backend("auto") == "auto"


@pytest.mark.parametrize("bounds", [[0, 10], [0, 4, 4, 9, 10], [0, 0, 10, 10], [0, 8, 10]])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_spans_cover_every_token_once(bounds, size):
    table, ends = spans(torch.tensor(bounds), 10, size)
    expected = [
        [n, first, min(first + size, stop)]
        for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        for first in range(start, stop, size)
    ]
    assert table.tolist()[: len(expected)] == expected
    assert all(row == [len(bounds) - 1, 0, 0] for row in table.tolist()[len(expected) :])
    assert len(table) == 10 // size + len(bounds) - 1
    assert ends[0].tolist() == bounds


@pytest.mark.parametrize("bounds", [[-5, 30, 2, 10], [0, 4], [2, 10], [0, 12], [0, 6, 4, 10]])
def test_spans_of_wrong_bounds_are_refused(bounds):
    with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to T = 10"):
        spans(torch.tensor(bounds), 10, 4)
    with patch("torch._assert_async"):  # which a GPU comes to later
        table, ends = spans(torch.tensor(bounds), 10, 4)
    assert table.min() >= 0
    assert table[:, 1:].max() <= 10
    assert ends[0].diff().min() >= 0
