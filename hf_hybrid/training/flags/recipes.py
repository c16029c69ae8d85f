"""How the papers train on the Long Range Arena: one table of published settings, each with its source.

A recipe is a size of an architecture of ours and the flags of its training. What a source leaves open, or what our
architectures lack, stands in `LongRangeRecipe.source`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_hybrid.data.lra import LRA
from hf_hybrid.models.chela.configuration_chela import PRESETS as CHELA_PRESETS
from hf_hybrid.models.chela.configuration_chela import ChelaConfig
from hf_hybrid.suggestions import did_you_mean


@dataclass(frozen=True)
class LongRangeRecipe:
    """How one architecture is trained on one task.

    Attributes:
        model_type: The architecture.
        fields: Fields of its configuration.
        batch_size: Examples of an update.
        learning_rate: Its peak.
        weight_decay: Of AdamW.
        epochs: Passes over the training split.
        warmup: Share of the updates in which the learning rate rises.
        source: Where the numbers are from.
        schedule: Transformers' name of how the learning rate falls.
        clip: Largest norm of a gradient; 0 for any.
        beta2: Of AdamW.
        ssm_learning_rate: Learning rate of a state space model's A, B and Δ; None for that of all others.
    """

    model_type: str
    fields: Mapping[str, Any]
    batch_size: int
    learning_rate: float
    weight_decay: float
    epochs: int
    warmup: float
    source: str
    schedule: str = "linear"
    clip: float = 1.0
    beta2: float = 0.98
    ssm_learning_rate: float | None = None

    def flags(self, replicas: int = 1) -> dict[str, Any]:
        """Return the flags of its training.

        Args:
            replicas: Processes, or groups of them that read the same rows, of which each takes its part of a batch.

        Raises:
            ValueError: A batch cannot be divided among them.
        """
        if self.batch_size % replicas:
            raise ValueError(
                f"the recipe's batches of {self.batch_size} cannot be divided among {replicas} processes, or groups "
                "of --context_parallel_size: give --per_device_train_batch_size"
            )
        flags = {
            "per_device_train_batch_size": self.batch_size // replicas,
            "learning_rate": self.learning_rate,
            "ssm_learning_rate": self.ssm_learning_rate,
            "weight_decay": self.weight_decay,
            "num_train_epochs": self.epochs,
            "warmup_steps": self.warmup,
            "lr_scheduler_type": self.schedule,
            "max_grad_norm": self.clip,
            "adam_beta2": self.beta2,
        }
        return {name: value for name, value in flags.items() if value is not None}


# task -> preset of ChelaConfig with CHELA's depths, widths and norms
_PRESETS = {
    "lra_listops": "listops",
    "lra_text": "text",
    "lra_retrieval": "retrieval",
    "lra_image": "image",
    "lra_pathfinder": "pathfinder",
    "lra_pathx": "pathx",
    "lra_speech": "speech",
}
_SIZES: dict[str, dict[str, Any]] = {task: dict(CHELA_PRESETS[name]) for task, name in _PRESETS.items()}  # type: ignore[call-overload]
_LIKE = {"lra_listops_200": "lra_listops", "lra_pathfinder_16": "lra_pathfinder", "lra_speech_1000": "lra_speech"}
"""Shortened tasks, trained by the recipes of the whole ones."""
_MEGA = "facebookresearch/mega, examples/mega/README.lra.md at 88b5aeb"
_MEGA_SPEECH = "facebookresearch/mega, examples/mega/README.sc.md at 09f1a87"
# task -> warm-up over all updates, as Mega's commands have them
_WARMUPS = {
    "lra_listops": 3_000 / 90_000,
    "lra_text": 10_000 / 25_000,
    "lra_retrieval": 10_000 / 91_960,
    "lra_image": 9_000 / 180_000,
    "lra_pathfinder": 50_000 / 250_000,
    "lra_pathx": 25_000 / 125_000,
    "lra_speech": 10_000 / 250_000,
}


def _mega_source(task: str) -> str:
    return _MEGA_SPEECH if task == "lra_speech" else _MEGA


# ---- CHELA, table 7: batch size, learning rate, weight decay, epochs; depth, width, norm and dropout are the presets'

_TABLE_7 = {
    "lra_listops": (64, 0.001, 0.01, 60),
    "lra_text": (50, 0.004, 0.01, 50),
    "lra_retrieval": (64, 0.003, 0.04, 40),
    "lra_image": (50, 0.01, 0.02, 200),
    "lra_pathfinder": (128, 0.01, 0.01, 200),
    "lra_pathx": (128, 0.01, 0.01, 100),
    "lra_speech": (20, 0.01, 0.01, 200),
}
_CHELA = {
    task: LongRangeRecipe(
        "chela",
        _SIZES[task],
        *numbers,
        warmup=_WARMUPS[task],
        source=f"CHELA, table 7; schedule, warm-up and betas: {_mega_source(task)}",
    )
    for task, numbers in _TABLE_7.items()
}

# ---- Mega: its numbers are those of CHELA's table 7 but for ListOps' norm; attention sees the whole sequence, of
# speech chunks of 1,000

_MEGA_FIELDS = {"mixer": "ema", "attention_fn": "laplace"}
_MEGA_OWN: dict[str, dict[str, Any]] = {
    "lra_listops": {"norm_type": "layer_norm"},
    "lra_speech": {"chunk_size": 1000},
}
_MEGA_DEVIATIONS = "; CHELA's unit with a moving average and Laplace attention"
_MEGAS = {
    task: replace(
        recipe,
        fields={**recipe.fields, **_MEGA_FIELDS, **_MEGA_OWN.get(task, {})},
        source=_mega_source(task)
        + _MEGA_DEVIATIONS
        + (", where Mega has softmax on tokens" if LRA[task].vocab_size else "")
        + ("; its warm-up rises with the square of the step, ours linearly" if task == "lra_pathx" else ""),
    )
    for task, recipe in _CHELA.items()
}

# ---- SPADE, table 10: batch size, learning rate, weight decay, dropout, chunk; depth, width and norms are Mega's
# (C.2), and so is that attention has no dropout; branches are joined by concatenation (section 3.2)

_TABLE_10 = {
    "lra_listops": (64, 0.0015, 0.0, 0.2, 128),
    "lra_text": (100, 0.01, 0.01, 0.2, 128),
    "lra_retrieval": (128, 0.004, 0.03, 0.1, 128),
    "lra_image": (100, 0.01, 0.02, 0.0, 128),
    "lra_pathfinder": (128, 0.01, 0.01, 0.0, 128),
    "lra_pathx": (16, 0.01, 0.01, 0.0, 1024),
}


def _local(attention_type: str, chunk: int) -> dict[str, Any]:
    """Return the fields of chunks, or of windows of as many keys."""
    reach = {"chunk_size": chunk} if attention_type == "chunk" else {"local_radius": chunk // 2}
    return {"attention_type": attention_type, **reach}


def _spade_fields(task: str, attention: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    layers = {name: _SIZES[task][name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    mega = _MEGAS[task].fields
    layers |= {name: mega.get(name, getattr(ChelaConfig, name)) for name in ("norm_type", "norm_position")}
    heads = max(1, layers["hidden_size"] // 32)
    rates = {"dropout": dropout, "attention_dropout": 0.0}
    model = {"num_attention_heads": heads, "is_encoder_decoder": False, "combine_mode": "concat"}
    return {**layers, **model, **rates, **attention}


def _spade(attention_type: str) -> dict[str, LongRangeRecipe]:
    recipes = {
        task: LongRangeRecipe(
            "spade",
            _spade_fields(task, _local(attention_type, chunk), dropout),
            batch_size,
            learning_rate,
            weight_decay,
            epochs=_TABLE_7[task][3],
            warmup=_WARMUPS[task],
            source=f"SPADE, table 10; depth, width, norms, epochs, warm-up and betas: {_MEGA}",
        )
        for task, (batch_size, learning_rate, weight_decay, dropout, chunk) in _TABLE_10.items()
    }
    speech = replace(
        _CHELA["lra_speech"],
        model_type="spade",
        fields=_spade_fields("lra_speech", _local(attention_type, 128), 0.0),
        source=f"CHELA, table 7, with SPADE's chunks of 128: it has no speech; warm-up: {_MEGA_SPEECH}",
    )
    return {**recipes, "lra_speech": speech}


# ---- S4: width, norm position, state size, copies of (A, B), least Δ, dropout, batch size, learning rate, epochs

_S4 = "state-spaces/s4, configs/experiment/lra/s4-{}.yaml at 62a14bb"
_S4_DEVIATIONS = "; ours has a feed-forward network in each layer"
_S4_CONFIGS: dict[str, tuple[str, int, str, int, int, float, float, int, float, int]] = {
    "lra_listops": ("listops", 256, "post", 4, 1, 0.001, 0.0, 32, 0.01, 40),
    "lra_text": ("imdb", 256, "pre", 4, 1, 0.001, 0.0, 16, 0.01, 32),
    "lra_retrieval": ("aan", 256, "pre", 4, 1, 0.001, 0.0, 64, 0.01, 20),
    "lra_image": ("cifar", 512, "post", 64, 1, 0.001, 0.1, 50, 0.01, 200),
    "lra_pathfinder": ("pathfinder", 256, "pre", 64, 256, 0.001, 0.0, 64, 0.004, 200),
    "lra_pathx": ("pathx", 256, "pre", 64, 256, 0.0001, 0.0, 16, 0.002, 50),
}


def _s4(
    file: str,
    width: int,
    norm_position: str,
    state_size: int,
    copies: int,
    least_dt: float,
    dropout: float,
    batch_size: int,
    learning_rate: float,
    epochs: int,
) -> LongRangeRecipe:
    sizes = {"hidden_size": width, "num_hidden_layers": 6, "intermediate_size": width, "num_attention_heads": 1}
    space = {"ssm_type": "s4", "ssm_state_size": state_size, "ssm_num_copies": copies, "ssm_postact": "gelu_glu"}
    space |= {"ssm_dt_min": least_dt}
    layers = {"attention_type": "none", "global_layers": "all", "ssm_freeze": "none"}
    layers |= {"norm_type": "batch_norm", "norm_position": norm_position}
    return LongRangeRecipe(
        "spade",
        {**sizes, **space, **layers, "is_encoder_decoder": False, "dropout": dropout, "attention_dropout": 0.0},
        batch_size,
        learning_rate,
        weight_decay=0.05,
        epochs=epochs,
        warmup=0.1,
        source=_S4.format(file) + _S4_DEVIATIONS,
        schedule="cosine",
        clip=0.0,
        beta2=0.999,
        ssm_learning_rate=0.001,
    )


RECIPES: dict[str, dict[str, LongRangeRecipe]] = {
    "chela": _CHELA,
    "mega": _MEGAS,
    "spade_window": _spade("window"),
    "spade_chunk": _spade("chunk"),
    "s4": {task: _s4(*config) for task, config in _S4_CONFIGS.items()},
}
"""Name → task → recipe."""


def find_recipe(name: str, task: str) -> LongRangeRecipe:
    """Return the recipe of a name for a task; a shortened task has that of the whole one.

    Raises:
        ValueError: There is none.
    """
    if name not in RECIPES:
        raise ValueError(f"--recipe must be one of {', '.join(RECIPES)}; got {name!r}.{did_you_mean(name, RECIPES)}")
    known = RECIPES[name]
    if _LIKE.get(task, task) not in known:
        raise ValueError(f"--recipe {name} has no settings for --task_name {task}; it has some for {', '.join(known)}")
    return known[_LIKE.get(task, task)]


def fit_fields(fields: Mapping[str, Any], task: str, length: int) -> dict[str, Any]:
    """Return the fields of a configuration for a task of sequences of at most a length.

    Fields that say how many tokens a part of the model sees are cut to the length; those of the vocabulary, or of real
    values, become the task's.
    """
    known = LRA[task]
    fitted = {**fields, "eos_token_id": None, "pad_token_id": 0, "input_size": 1 if known.vocab_size is None else None}
    if known.vocab_size is not None:
        fitted["vocab_size"] = known.vocab_size
    if "training_length" in fields:
        fitted["training_length"] = length
        fitted["long_kernel_size"] = min(length, fields["long_kernel_size"])
    fitted.pop("num_labels", None)
    return fitted
