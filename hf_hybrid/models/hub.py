"""What a model that is pushed to the Hub says of itself."""

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

# Auto class -> the Hub's name of its task
PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSeq2SeqLM": None,  # many tasks
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTextEncoding": None,
    "AutoModelForTokenClassification": "token-classification",
    "AutoModel": "feature-extraction",
}
UNTOUCHED = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."


def auto_class_of(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model; None where only its own class does."""
    for name in PIPELINE_TAGS:
        mapping = getattr(transformers, name)._model_mapping
        if type(model.config) in mapping:
            classes = mapping[type(model.config)]
            if type(model) in (classes if isinstance(classes, (list, tuple)) else (classes,)):
                return name
    return None


def loading_lines(model: PreTrainedModel, name: str, *, own: bool) -> str:
    """Python that loads a model.

    Args:
        model: The model.
        name: Where it lies, a folder or a repository.
        own: Whether it is an architecture of ours, which must be registered first.
    """
    auto_class = auto_class_of(model)
    loader = auto_class or type(model).__name__
    if auto_class is None and own:
        return f"from hf_hybrid import {loader}\n\nmodel = {loader}.from_pretrained({name!r})"
    register = "import hf_hybrid  # registers the architecture with transformers' Auto classes\n" if own else ""
    return f"{register}from transformers import {loader}\n\nmodel = {loader}.from_pretrained({name!r})"


class ModelCardMixin:
    """Put before PreTrainedModel in the bases: a pushed model without a card gets one with what is known of it.

    Transformers puts an empty template there, in whose place it is written; any other card stays.
    """

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(working_dir, "README.md")
        if path.is_file() and UNTOUCHED in path.read_text(encoding="utf-8"):
            card = ModelCard.load(path)
            tags = [self.config.model_type, "hf_hybrid", *(card.data.tags or [])]
            card.data.tags = list(dict.fromkeys(tags))
            card.data.pipeline_tag = PIPELINE_TAGS.get(auto_class_of(self) or "")
            card.text = self._describe(repo_id)
            card.save(path)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _describe(self, repo_id: str) -> str:
        sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
        settings = ", ".join(f"{name} {getattr(self.config, name)}" for name in sizes)
        return (
            f"# {repo_id.split('/')[-1]}\n\n"
            f"A `{type(self).__name__}` (`{self.config.model_type}`) of {self.num_parameters():,} parameters: "
            f"{settings}; all else is in `config.json`.\n\n"
            f"## Load it\n\n```python\n{loading_lines(self, repo_id, own=True)}\n```\n\n"
            "## Training\n\nWhat it was trained on, and how well it does, its author has not said here yet.\n"
        )
