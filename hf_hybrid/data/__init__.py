"""Turn text into model inputs: offline corpora, dataset files and columns, preprocessing, tokenizer training.

The package uses no model and no Trainer. It imports ``datasets`` and ``tokenizers`` only when a function needs them.
"""
