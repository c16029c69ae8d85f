"""What the scripts add to transformers' Trainer.

`script_trainer` has every method of Trainer that is overridden, each once; the other files are what these call.
"""
