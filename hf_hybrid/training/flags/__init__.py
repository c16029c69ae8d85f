"""The command line: every flag, its allowed values, and how text becomes values.

`model` has the flags of model, tokenizer and adapter, `data` those of the data, and `run` those of the training.
"""
