"""The command line: every flag, what it may be, and how text becomes values.

`model` has the flags of model, tokenizer and adapter, `data` those of the data, `run` those of the training.
"""
