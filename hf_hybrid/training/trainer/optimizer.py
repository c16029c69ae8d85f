"""Optimizer groups: state space parameters do not decay, and may learn at a rate of their own."""

import torch


def separate_ssm_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, learning_rate: float | None = None
) -> int:
    """Move a model's trained state space parameters into optimizer groups of their own, without weight decay.

    Decay pulls the eigenvalues and step sizes of a state space towards values that mean something (a time constant of
    one step), not towards "small"; S4 and its successors train them without it, often with a smaller learning rate
    (S4, appendix D; S5, appendix G).

    Args:
        optimizer: A new optimizer; its groups are changed in place. Calling twice changes nothing more.
        model: The model. It may have a method ``ssm_parameters(dynamics=None)``; without one there is nothing to move.
        learning_rate: That of the parameters that shape the memory (A, B, Δ; ``dynamics=True``); C and D keep that of
            the first group, as all do when None.

    Returns:
        How many parameter tensors were moved, or had been.
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
