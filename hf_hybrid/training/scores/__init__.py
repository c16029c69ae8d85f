"""The scores of each task; the metrics themselves are in `hf_hybrid.metrics`."""
