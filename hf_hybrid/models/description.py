"""Model cards of models that are pushed to the Hub."""

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
    """Return the Auto class that loads a model; None if only its own class does."""
    for name in PIPELINE_TAGS:
        mapping = getattr(transformers, name)._model_mapping
        if type(model.config) in mapping:
            classes = mapping[type(model.config)]
            loaded = [*classes] if isinstance(classes, (list, tuple)) else [classes]
            loaded += [cls._without_head(model.config) for cls in loaded if hasattr(cls, "_without_head")]
            if type(model) in loaded:
                return name
    brought = getattr(model.config, "auto_map", None) or {}  # of a class from a checkpoint with its code
    ends = f".{type(model).__name__}"
    return next((name for name in PIPELINE_TAGS if str(brought.get(name)).endswith(ends)), None)


def brings_code(model: PreTrainedModel) -> bool:
    """Whether a model's class comes from a checkpoint with its code, which is then saved with the model."""
    return type(model).__module__.startswith("transformers_modules.")


def loading_lines(model: PreTrainedModel, name: str) -> str:
    """Return Python lines that load a model from a folder or repository of this name."""
    auto_class, module = auto_class_of(model), type(model).__module__
    is_own = module.startswith(f"{PACKAGE}.")
    if auto_class is None:
        loader = type(model).__name__
        return f"from {PACKAGE if is_own else module} import {loader}\n\nmodel = {loader}.from_pretrained({name!r})"
    register = f"import {PACKAGE}  # registers the architecture with transformers' Auto classes\n" if is_own else ""
    trust = ", trust_remote_code=True" if brings_code(model) else ""
    return f"{register}from transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained({name!r}{trust})"


class ModelCardMixin:
    """Mixin before `PreTrainedModel`: writes a model card on a push to the Hub.

    It replaces the empty template of transformers and keeps any other card.
    """

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(working_dir, "README.md")
        if path.is_file() and UNTOUCHED in path.read_text(encoding="utf-8"):
            card = ModelCard.load(path)
            home = "custom_code" if brings_code(self) else PACKAGE
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
            f"{settings}. All settings are in `config.json`.\n\n"
            f"## Load it\n\n```python\n{loading_lines(self, repo_id)}\n```\n\n"
            "## Training\n\nNot documented.\n"
        )
