"""Import this module first to use `hf_hybrid.kernels` without transformers.

Importing the package registers its models, which needs transformers; the kernels need only torch.
"""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("transformers") is None:
    sys.modules["hf_hybrid"] = types.ModuleType("hf_hybrid")
    sys.modules["hf_hybrid"].__path__ = [str(Path(__file__).parents[1] / "hf_hybrid")]
