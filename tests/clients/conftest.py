"""Collect each of these tests only where its clients are installed."""

from importlib.util import find_spec

CLIENTS = {
    "test_app.py": ("gradio", "playwright"),
    "test_commands.py": ("lm_eval",),
    "test_onnx.py": ("onnxruntime", "onnxscript"),
    "test_sentence_transformers.py": ("sentence_transformers",),
    "test_trl.py": ("trl",),
}
collect_ignore = [file for file, names in CLIENTS.items() if not all(find_spec(name) for name in names)]
