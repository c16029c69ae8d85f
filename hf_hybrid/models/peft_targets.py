"""Default target modules of PEFT's adapters, and the modules to train besides.

peft has one table of defaults per method, by model type. We write ours into them when peft is loaded, before or after
this package; importing this package does not load peft.
"""

import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from peft import PeftConfig

METHODS = ("lora", "dora", "ia3")
LORA_TARGETS = {
    "bst": ["q_proj", "v_proj"],  # of tokens and of context states
    "chela": ["v_proj", "output_gate_proj"],  # its queries and keys have no projection
    "spade": ["q_proj", "v_proj", "aggregate", "global_proj"],  # the last two read the state space model's output
}
"""Model type → target modules of LoRA and similar methods (DoRA, AdaLoRA, LoHa, VeRA, ...)."""
IA3_TARGETS = {
    "bst": ["k_proj", "v_proj", "down_proj"],
    "chela": ["v_proj", "down_proj"],
    "spade": ["k_proj", "v_proj", "down_proj"],
}
IA3_FEED_FORWARD = ["down_proj"]
"""Modules whose input IA3 scales, instead of the output."""
PARENTS = {"srformer_bart": "bart", "srformer_t5": "t5"}
"""Model type → the model type of transformers whose entries it inherits."""
TRAINED_BESIDE = ("raf", "recurrent_gate", "rnn_k", "rnn_v", "dense")
"""Small modules of ours that may be new when a checkpoint is fine-tuned; peft knows the heads."""
TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""Ending of a class name → PEFT's name of the task."""

_TABLES = "peft.utils.constants"


def register_adapters() -> None:
    """Add our defaults to peft's tables, now or as soon as peft is loaded; repeated calls have no effect."""
    if _TABLES in sys.modules:
        _add_defaults(vars(sys.modules[_TABLES]))
    elif not any(isinstance(finder, _TablesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TablesFinder())


class _TablesFinder(MetaPathFinder):
    """Adds our defaults to the module of peft's tables after it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of that module, None for others."""
        if fullname != _TABLES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: types.ModuleType) -> None:
                load(module)
                _add_defaults(vars(module))

            spec.loader.exec_module = load_and_add
        return spec


def _add_defaults(constants: Mapping[str, object]) -> None:
    lora = constants["TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"]
    tables = {name: table for name, table in constants.items() if name.startswith("TRANSFORMERS_MODELS_TO_")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        ours: dict[str, list[str]] = {}
        if name.endswith("_IA3_TARGET_MODULES_MAPPING"):
            ours = IA3_TARGETS
        elif name.endswith("_IA3_FEEDFORWARD_MODULES_MAPPING"):
            ours = {kind: [x for x in targets if x in IA3_FEED_FORWARD] for kind, targets in IA3_TARGETS.items()}
        elif table.get("llama") == lora["llama"]:  # a method with the target modules of LoRA
            ours = LORA_TARGETS
        inherited = {model_type: table[parent] for model_type, parent in PARENTS.items() if parent in table}
        table.update({**ours, **inherited})


def peft_config(model: PreTrainedModel, method: str = "lora", **fields) -> "PeftConfig":
    """Build PEFT's config of an adapter for a model, with its task and the new modules to train.

    ``get_peft_model(model, LoraConfig(task_type=...))`` finds the projections by itself, but not the small modules
    that are new when the checkpoint of another architecture is fine-tuned: SRformer's neurons and the weights of their
    output, and the pooling layer of a classifier. This function adds them to ``modules_to_save``.

    Args:
        model: A model of transformers, without an adapter.
        method: ``"lora"``, ``"dora"`` or ``"ia3"``.
        **fields: Fields of `peft.LoraConfig` or `peft.IA3Config`, which replace the chosen ones.

    Raises:
        ValueError: The method is unknown.
    """
    from peft import IA3Config, LoraConfig

    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}.{did_you_mean(method, METHODS)}")
    name = type(model).__name__
    fields.setdefault("task_type", next((task for ending, task in TASKS.items() if name.endswith(ending)), None))
    if "modules_to_save" not in fields:
        fields["modules_to_save"] = trained_beside(model) or None
    if method == "ia3":
        return IA3Config(**fields)
    return LoraConfig(**{"use_dora": method == "dora", **fields})


def trained_beside(model: PreTrainedModel) -> list[str]:
    """Return the names in `TRAINED_BESIDE` of which a model of ours has modules."""
    if model.config.model_type not in {*LORA_TARGETS, *PARENTS}:
        return []
    own = {name.rpartition(".")[2] for name, _ in model.named_modules() if ".classifier." not in f".{name}."}
    return [name for name in TRAINED_BESIDE if name in own]
