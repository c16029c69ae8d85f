"""Which fields each state space model of SPADE reads, and which values they may have."""

from transformers import PreTrainedConfig

from ..checks import MAX_LAYERS, check_choices, check_not_absurd

# state space model -> allowed values, the default first
SSM_DISCRETIZATIONS = {
    "s4": ("bilinear",),
    "s4d": ("zoh", "bilinear"),
    "s5": ("zoh", "bilinear"),
    "hyena": (None,),
    "lstm": (None,),
}
SSM_INITS = {"s4": ("legs",), "s4d": ("lin", "inv", "legs"), "s5": ("legs",), "hyena": (None,), "lstm": (None,)}
SSM_FREEZES = {
    "s4": ("all", "ab_dt", "none"),
    "s4d": ("all", "ab_dt", "none"),
    "s5": ("all", "ab_dt", "none"),
    "hyena": ("all", "none"),
    "lstm": ("none",),
}
SSM_TYPES = tuple(SSM_FREEZES)
_STATE_SPACE = ("ssm_state_size", "ssm_dt_min", "ssm_dt_max", "ssm_use_D")
_HYENA = ("order", "filter_size", "embedding_size", "sine_frequency", "short_kernel_size")
# state space model -> those of its fields that not all of them read
SSM_FIELDS = {
    "s4": (*_STATE_SPACE, "ssm_num_copies"),
    "s4d": (*_STATE_SPACE, "ssm_num_copies"),
    "s5": (*_STATE_SPACE, "ssm_blocks"),
    "hyena": tuple(f"hyena_{name}" for name in _HYENA),
    "lstm": (),
}


def check_state_space(config: PreTrainedConfig):
    """Raise ValueError if a field of the state space model breaks its rule."""
    check_choices(config, {"ssm_type": SSM_TYPES})
    choices = {"ssm_freeze": SSM_FREEZES, "ssm_init": SSM_INITS, "ssm_discretization": SSM_DISCRETIZATIONS}
    check_choices(
        config,
        {field: of_type[config.ssm_type] for field, of_type in choices.items()},
        where=f" for ssm_type {config.ssm_type}",
    )
    if config.ssm_type == "s5" and config.ssm_state_size % (2 * config.ssm_blocks):
        raise ValueError(
            f"ssm_state_size must be a multiple of twice ssm_blocks for ssm_type s5; got {config.ssm_state_size} "
            f"and ssm_blocks {config.ssm_blocks}"
        )
    if config.hyena_order < 2:
        raise ValueError(f"hyena_order must be at least 2; got {config.hyena_order}")
    check_not_absurd("hyena_order", config.hyena_order, MAX_LAYERS)
    if config.hyena_embedding_size < 3 or config.hyena_embedding_size % 2 == 0:
        raise ValueError(f"hyena_embedding_size must be odd and at least 3; got {config.hyena_embedding_size}")
    if config.ssm_type == "hyena" or config.ssm_l_max is None:
        return
    if config.ssm_type not in ("s4", "s4d"):
        raise ValueError(f"ssm_l_max must be None for ssm_type {config.ssm_type}; got {config.ssm_l_max}")
    causal_layers = config.global_layers if config.is_decoder else config.decoder_global_layers
    if causal_layers:
        field = "global_layers" if config.is_decoder else "decoder_global_layers"
        raise ValueError(
            f"ssm_l_max must be None where a decoder has {field}: a state carried from step to step never forgets; "
            f"got {config.ssm_l_max} and {field} {causal_layers}"
        )
