"""The training arguments under their name in 0.1.0, which its ``training_args.bin`` asks for when it is read."""

from hf_hybrid.training.flags.run import ScriptTrainingArguments, SummarizationTrainingArguments

__all__ = ["ScriptTrainingArguments", "SummarizationTrainingArguments"]
