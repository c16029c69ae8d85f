"""Lets `hf_hybrid.kernels` be imported where transformers is missing; to be imported before it.

Importing the package registers its models, which needs transformers; the kernels need torch alone.
"""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("transformers") is None:
    sys.modules["hf_hybrid"] = types.ModuleType("hf_hybrid")
    sys.modules["hf_hybrid"].__path__ = [str(Path(__file__).parents[1] / "hf_hybrid")]
