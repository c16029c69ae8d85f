"""Turn text into model inputs: offline corpora, data files and columns, preprocessing, tokenizers.

It needs no model and no Trainer, and imports ``datasets`` and ``tokenizers`` only when a function needs them.
"""
