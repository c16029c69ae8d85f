"""What an op computes when torch exports it to ONNX, run in eager mode and without onnx."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OnlyWhatOnnxHas(TorchDispatchMode):
    """Fails at an operation that is not torch's own, or that takes or returns a complex tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace == "aten", func
        result = func(*args, **(kwargs or {}))
        assert not any(isinstance(x, torch.Tensor) and x.is_complex() for x in tree_leaves((args, kwargs, result))), (
            func
        )
        return result


@contextmanager
def as_for_onnx():
    """Take the paths of an export to ONNX, and fail where they leave what ONNX has."""
    with (
        patch("torch.compiler.is_exporting", lambda: True),
        patch("torch.onnx.is_in_onnx_export", lambda: True),
        OnlyWhatOnnxHas(),
    ):
        yield
