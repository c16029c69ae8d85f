"""What each task measures of a model's predictions; the metrics themselves are in `hf_hybrid.metrics`."""
