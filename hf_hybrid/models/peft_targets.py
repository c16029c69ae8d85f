"""Adapters of PEFT: which modules of each architecture they are put on by default, and what is trained beside them.

peft looks the defaults up by model type, in one table per method. Ours are written into these tables when peft is
loaded, whether that is before this package or long after it: importing this package does not load it.
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
"""Model type → where LoRA is put, and what PEFT treats like it (DoRA, AdaLoRA, LoHa, VeRA, ...)."""
IA3_TARGETS = {
    "bst": ["k_proj", "v_proj", "down_proj"],
    "chela": ["v_proj", "down_proj"],
    "spade": ["k_proj", "v_proj", "down_proj"],
}
IA3_FEED_FORWARD = ["down_proj"]
"""Where IA3 scales what comes in, and not what goes out."""
PARENTS = {"srformer_bart": "bart", "srformer_t5": "t5"}
"""Model type → the one of transformers whose entry it takes over, in every table that has one."""
TRAINED_BESIDE = ("raf", "recurrent_gate", "rnn_k", "rnn_v", "dense")
"""Small modules of ours that are new when a checkpoint is fine-tuned, beside the heads that peft knows."""
TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""Ending of a class's name → PEFT's name of its task."""

_TABLES = "peft.utils.constants"


def register_adapters() -> None:
    """Write our defaults into peft's tables, now or as soon as peft is loaded; calling it again changes nothing."""
    if _TABLES in sys.modules:
        _add_defaults(vars(sys.modules[_TABLES]))
    elif not any(isinstance(finder, _TablesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TablesFinder())


class _TablesFinder(MetaPathFinder):
    """Finds the module of peft's tables as everybody else does, and adds to it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of that one module, None for all others."""
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
            ours = dict.fromkeys(IA3_TARGETS, IA3_FEED_FORWARD)
        elif table.get("llama") == lora["llama"]:  # a method that adapts the projections that LoRA does
            ours = LORA_TARGETS
        inherited = {model_type: table[parent] for model_type, parent in PARENTS.items() if parent in table}
        table.update({**ours, **inherited})


def peft_config(model: PreTrainedModel, method: str = "lora", **fields) -> "PeftConfig":
    """Describe an adapter for a model: PEFT's config with the task, and with what must be trained beside the adapter.

    ``get_peft_model(model, LoraConfig(task_type=...))`` finds the projections by itself. What it does not know are
    small modules of these architectures that are new when another's checkpoint is fine-tuned: SRformer's neurons
    and the weights of what they give, and the pooling layer of a classifier. They go to ``modules_to_save`` here.

    Args:
        model: A model of transformers, without an adapter.
        method: ``"lora"``, ``"dora"`` or ``"ia3"``.
        **fields: Fields of `peft.LoraConfig` or `peft.IA3Config`; they replace what is chosen here.

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
    """The names in `TRAINED_BESIDE` that a model of ours has modules of."""
    if model.config.model_type not in {*LORA_TARGETS, *PARENTS}:
        return []
    own = {name.rpartition(".")[2] for name, _ in model.named_modules() if ".classifier." not in f".{name}."}
    return [name for name in TRAINED_BESIDE if name in own]
