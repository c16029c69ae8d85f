"""The model of a run: configuration, tokenizer, weights, adapter, and the rate at which a new one learns."""
