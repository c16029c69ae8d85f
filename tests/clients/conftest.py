"""Collect these tests only where the clients are installed."""

from importlib.util import find_spec

CLIENTS = ("gradio", "lm_eval", "onnxruntime", "onnxscript", "playwright", "sentence_transformers", "trl")
collect_ignore_glob = [] if all(find_spec(name) for name in CLIENTS) else ["test_*.py"]
