"""Metrics that need no network: ``load_metric("rouge")``, ``load_metric("glue", "cola")``."""

from typing import TYPE_CHECKING

from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    import evaluate

__all__ = ["METRICS", "load_metric"]

METRICS: dict[str, str] = {
    "accuracy": "Share of correct labels.",
    "glue": "The scores of a GLUE task, the configuration: cola, mnli, mrpc, qnli, qqp, rte, ...",
    "mse": "Mean squared error of predicted numbers.",
    "rouge": "ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum F-measures of summaries.",
}
"""The metrics of `load_metric` and their descriptions."""


def load_metric(name: str, config_name: str | None = None) -> "evaluate.Metric":
    """Return a metric that needs neither a network nor a file in the working directory.

    Args:
        name: A key of `METRICS`.
        config_name: The task of ``glue``; None for other metrics.

    Returns:
        An `evaluate.Metric`: ``compute``, ``add_batch`` and ``evaluate.combine`` work as for metrics from the Hub.

    Raises:
        ValueError: ``name`` is unknown, or ``config_name`` does not fit it.
    """
    if name not in METRICS:
        known = ", ".join(sorted(METRICS))
        raise ValueError(f"metric must be one of: {known}; got {name!r}.{did_you_mean(name, METRICS)}")
    if name == "glue":
        from hf_hybrid.metrics.glue import GLUE_SCORES, Glue

        if config_name not in GLUE_SCORES:
            hint = "" if config_name is None else did_you_mean(config_name, GLUE_SCORES)
            raise ValueError(
                f"config_name must be a task of GLUE: {', '.join(GLUE_SCORES)}; got {config_name!r}.{hint}"
            )
        return Glue(config_name)
    if config_name is not None:
        raise ValueError(f"config_name must be None: metric {name!r} has no configurations; got {config_name!r}")
    if name == "rouge":
        from hf_hybrid.metrics.rouge import Rouge

        return Rouge()
    from hf_hybrid.metrics.glue import LabelScores

    return LabelScores(name)
