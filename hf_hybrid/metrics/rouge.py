"""ROUGE as an `evaluate.Metric` that works offline.

ROUGE: Chin-Yew Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), computed by `rouge_score`.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import evaluate

__all__ = ["ROUGE_TYPES", "Rouge"]

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

_INPUTS = """
Args:
    predictions: Generated texts. For rougeLsum, one sentence per line.
    references: A reference, or a list of references, for each text.
    rouge_types: Some of rouge1 ... rouge9, rougeL, rougeLsum. Default: rouge1, rouge2, rougeL, rougeLsum.
    use_aggregator: Return one number per type (default) instead of a list with one number per text.
    use_stemmer: Strip word endings with the Porter stemmer before comparing. Default: False.
    tokenizer: A function from a text to its words, instead of rouge_score's.
Returns:
    F-measures between 0 and 1 by type.
"""


class Rouge(evaluate.Metric):
    """ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum F-measures.

    Arguments and keys are those of the Hub's ``rouge``. Aggregates are medians of 1,000 bootstrap resamples, close to
    the mean; ``use_aggregator=False`` returns the scores. With several references for a text, the best F-measure of
    each type counts.

    Args:
        seed: Seed of the bootstrap; the default is fixed, so equal texts score equally.
        **kwargs: Arguments of `evaluate.Metric`.
    """

    def __init__(self, *, seed: int = 42, **kwargs: Any) -> None:
        super().__init__(seed=seed, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        texts = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description="Overlap of word sequences between generated and reference summaries.",
            citation="Chin-Yew Lin. ROUGE: A Package for Automatic Evaluation of Summaries. 2004.",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": texts}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add predictions and references for ``compute()``.

        Raises:
            ValueError: There are none, their numbers differ, or they are not text.
        """
        if predictions is not None and len(predictions) == 0:
            raise ValueError("predictions must hold at least one text; got none")
        super().add_batch(predictions=predictions, references=references, **kwargs)

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str] | Sequence[Sequence[str]],
        rouge_types: Sequence[str] | None = None,
        use_aggregator: bool = True,
        use_stemmer: bool = False,
        tokenizer: Callable[[str], list[str]] | None = None,
    ) -> dict[str, Any]:
        from rouge_score import rouge_scorer, scoring

        types = list(ROUGE_TYPES if rouge_types is None else rouge_types)
        words = SimpleNamespace(tokenize=tokenizer) if tokenizer else None  # the interface that rouge_score expects
        scorer = rouge_scorer.RougeScorer(types, use_stemmer=use_stemmer, tokenizer=words)
        scores = [
            scorer.score(reference, prediction)
            if isinstance(reference, str)
            else scorer.score_multi(reference, prediction)
            for reference, prediction in zip(references, predictions, strict=True)
        ]
        if not use_aggregator:
            return {kind: [score[kind].fmeasure for score in scores] for kind in types}
        aggregator = scoring.BootstrapAggregator()
        for score in scores:
            aggregator.add_scores(score)
        return {kind: float(interval.mid.fmeasure) for kind, interval in aggregator.aggregate().items()}
