"""Text in, model inputs out: offline corpora, dataset files and columns, preprocessing, tokenizer training.

Nothing here knows a model or a Trainer. Importing the package is light: ``datasets`` and ``tokenizers`` load when a
function that needs them is called.
"""
