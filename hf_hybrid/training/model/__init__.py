"""The model of a run: configuration, tokenizer, weights, adapter, labels and learning rates of new models."""
