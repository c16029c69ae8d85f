"""What a model that is pushed to the Hub says of itself."""

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

PACKAGE = "hf_hybrid"
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
    brought = getattr(model.config, "auto_map", None) or {}  # of a class that came along with a checkpoint
    ends = f".{type(model).__name__}"
    return next((name for name in PIPELINE_TAGS if str(brought.get(name)).endswith(ends)), None)


def came_along(model: PreTrainedModel) -> bool:
    """Whether a model's class came along with a checkpoint; its code is saved with it."""
    return type(model).__module__.startswith("transformers_modules.")


def loading_lines(model: PreTrainedModel, name: str) -> str:
    """Python that loads a model, from a folder or a repository of this name."""
    auto_class, module = auto_class_of(model), type(model).__module__
    is_own = module.startswith(f"{PACKAGE}.")
    if auto_class is None:
        loader = type(model).__name__
        return f"from {PACKAGE if is_own else module} import {loader}\n\nmodel = {loader}.from_pretrained({name!r})"
    register = f"import {PACKAGE}  # registers the architecture with transformers' Auto classes\n" if is_own else ""
    trust = ", trust_remote_code=True" if came_along(model) else ""
    return f"{register}from transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained({name!r}{trust})"


class ModelCardMixin:
    """Put before PreTrainedModel in the bases: a pushed model without a card gets one with what is known of it.

    Transformers puts an empty template there, in whose place it is written; any other card stays.
    """

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(working_dir, "README.md")
        if path.is_file() and UNTOUCHED in path.read_text(encoding="utf-8"):
            card = ModelCard.load(path)
            home = "custom_code" if came_along(self) else PACKAGE
            tags = [self.config.model_type, home, *(card.data.tags or [])]
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
            f"## Load it\n\n```python\n{loading_lines(self, repo_id)}\n```\n\n"
            "## Training\n\nWhat it was trained on, and how well it does, its author has not said here yet.\n"
        )
