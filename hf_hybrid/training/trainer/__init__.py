"""What the scripts add to transformers' Trainer.

`script_trainer` overrides methods of Trainer, each in one place, and calls the other files.
"""
