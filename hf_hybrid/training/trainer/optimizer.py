"""Optimizer groups: state space parameters have no weight decay and may have their own learning rate."""

import torch


def separate_ssm_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, learning_rate: float | None = None
) -> int:
    """Move a model's trained state space parameters into optimizer groups of their own, without weight decay.

    For eigenvalues and step sizes, zero is not "small" but a certain time constant, towards which decay would pull
    them. S4 and its successors train them without it, often with a smaller learning rate (S4, appendix D; S5,
    appendix G).

    Args:
        optimizer: A new optimizer; its groups change in place. A second call changes nothing.
        model: The model. Without a method ``ssm_parameters(dynamics=None)`` there is nothing to move.
        learning_rate: Rate of the parameters that shape the memory (A, B, Δ; ``dynamics=True``); None: the rate of
            the first group, which C and D always have.

    Returns:
        The number of parameter tensors in these groups.
    """
    if any(group.get("ssm") for group in optimizer.param_groups):
        return sum(len(group["params"]) for group in optimizer.param_groups if group.get("ssm"))
    list_parameters = getattr(model, "ssm_parameters", None)
    if list_parameters is None:
        return 0
    rate = optimizer.param_groups[0]["lr"]
    count = 0
    for dynamics, wanted_rate in ((False, None), (True, learning_rate)):
        wanted = {id(parameter) for parameter in list_parameters(dynamics=dynamics)}
        separated: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            separated += [parameter for parameter in group["params"] if id(parameter) in wanted]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in wanted]
        if separated:
            own = {"weight_decay": 0.0, "lr": rate if wanted_rate is None else wanted_rate, "ssm": True}
            optimizer.add_param_group({"params": separated, **own})
            count += len(separated)
    return count
