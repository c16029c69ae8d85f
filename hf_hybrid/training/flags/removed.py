"""Translate flags that transformers has removed, so that older command lines still work."""

import logging
from collections.abc import Sequence

from hf_hybrid.training.processes import is_first_process

logger = logging.getLogger(__name__)

_RENAMED = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "use_auth_token": "token",
    "torch_dtype": "dtype",
}
_SWITCHES = {
    "group_by_length": "--train_sampling_strategy group_by_length",
    "no_cuda": "--use_cpu",
    "evaluate_during_training": "--eval_strategy steps",
    "adafactor": "--optim adafactor",
}
_AUTOCAST = "; torch's autocast is always used"
_IGNORED = {
    "logging_dir": "; set TENSORBOARD_LOGGING_DIR in the environment",
    "save_safetensors": "; checkpoints are always safetensors",
    **dict.fromkeys(("half_precision_backend", "fp16_backend", "fp16_opt_level"), _AUTOCAST),
    "use_mps_device": "; the device is found automatically",
    "from_tf": "; TensorFlow weights cannot be loaded",
    **dict.fromkeys(("jit_mode_eval", "use_ipex", "past_index", "ray_scope"), ""),
    **dict.fromkeys(("tpu_num_cores", "tpu_metrics_debug"), ""),
}


def translate_removed_flags(arguments: Sequence[str], known: set[str] | None = None) -> list[str]:
    """Replace each flag that transformers has removed by its successor, and warn; leave `known` flags alone.

    Raises:
        ValueError: The value of a removed flag cannot be translated.
    """
    removed = (_RENAMED.keys() | _SWITCHES.keys() | _IGNORED.keys()) - (known or set())
    translated: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in removed:
            translated.append(argument)
            continue
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        successor, note = _translate(name, values)
        translated += successor
        if is_first_process():
            logger.warning("--%s was removed from transformers: %s.", name, note)
    return translated


def _translate(name: str, values: list[str]) -> tuple[list[str], str]:
    """Return the arguments that replace a flag and its values, and the text of the warning."""
    if name in _SWITCHES:
        is_on = not values or values[0].lower() in ("true", "t", "yes", "y", "1")
        return _SWITCHES[name].split() if is_on else [], (
            f"it is taken as {_SWITCHES[name]}" if is_on else "it is left out"
        )
    if name in _IGNORED:
        return [], f"it is left out{_IGNORED[name]}"
    if name == "warmup_ratio":
        _check_ratio(values)
        kept = [f"--{_RENAMED[name]}", *values] if float(values[0]) else []
        return kept, f"it is taken as {' '.join(kept)}" if kept else "it is left out"
    return [f"--{_RENAMED[name]}", *values], f"it is taken as --{_RENAMED[name]}"


def _check_ratio(values: list[str]) -> None:
    try:
        ratio = float(values[0])
    except (IndexError, ValueError):
        raise ValueError(f"--warmup_ratio takes a number in [0, 1); got {' '.join(values)!r}") from None
    if not 0 <= ratio < 1:
        raise ValueError(f"--warmup_ratio must lie in [0, 1); got {ratio}")
