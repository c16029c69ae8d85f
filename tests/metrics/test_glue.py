import math

import evaluate
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from hf_hybrid.metrics import METRICS, load_metric
from hf_hybrid.metrics.glue import GLUE_SCORES, SCORES

NAMES = {"cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"}
ORACLES = {
    "accuracy": lambda p, r: sklearn_metrics.accuracy_score(r, p),
    "f1": lambda p, r: sklearn_metrics.f1_score(r, p, zero_division=0),
    "matthews_correlation": lambda p, r: sklearn_metrics.matthews_corrcoef(r, p),
    "pearson": lambda p, r: stats.pearsonr(p, r)[0],
    "spearmanr": lambda p, r: stats.spearmanr(p, r)[0],
    "mse": lambda p, r: sklearn_metrics.mean_squared_error(r, p),
}


def test_every_task_has_the_hubs_scores():
    assert set(GLUE_SCORES) == NAMES
    assert GLUE_SCORES["cola"] == ("matthews_correlation",)
    assert GLUE_SCORES["stsb"] == ("pearson", "spearmanr")
    assert GLUE_SCORES["mrpc"] == GLUE_SCORES["qqp"] == ("accuracy", "f1")
    rest = NAMES - {"cola", "stsb", "mrpc", "qqp"}
    assert {GLUE_SCORES[task] for task in rest} == {("accuracy",)}
    assert set(ORACLES) == set(SCORES)


@pytest.mark.parametrize("task", sorted(NAMES))
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_other_libraries(task, seed):
    generator = np.random.default_rng(seed)
    if task == "stsb":
        references = np.round(generator.uniform(0, 5, 60), 1)  # with ties
        predictions = np.round(references + generator.normal(0, 2, 60), 1)
    else:
        labels = 3 if task == "mnli" else 2
        references = generator.integers(0, labels, 60)
        predictions = np.where(generator.random(60) < 0.6, references, generator.integers(0, labels, 60))
    scores = load_metric("glue", task).compute(predictions=predictions, references=references)
    assert tuple(scores) == GLUE_SCORES[task]
    for name, value in scores.items():
        assert type(value) is float
        assert value == pytest.approx(ORACLES[name](predictions, references), rel=1e-12)
        assert value < 1.0


def test_cases_computed_by_hand():
    # 2 hits, one false alarm, one miss: precision and recall are 2 / 3
    pair = {"predictions": [1, 1, 1, 0, 0], "references": [1, 1, 0, 1, 0]}
    assert load_metric("glue", "mrpc").compute(**pair) == pytest.approx({"accuracy": 3 / 5, "f1": 2 / 3})
    # (tp tn - fp fn) / sqrt((tp+fp) (tp+fn) (tn+fp) (tn+fn)) = (2 - 1) / sqrt(3 * 3 * 2 * 2)
    assert load_metric("glue", "cola").compute(**pair) == pytest.approx({"matthews_correlation": 1 / 6})
    ranks = {"predictions": [1.0, 2.0, 3.0], "references": [1.0, 8.0, 27.0]}
    assert load_metric("glue", "stsb").compute(**ranks)["spearmanr"] == pytest.approx(1.0)
    assert load_metric("mse").compute(**ranks) == pytest.approx({"mse": (0 + 36 + 24**2) / 3})
    assert load_metric("accuracy").compute(**pair) == {"accuracy": 0.6}


def test_labels_that_never_change_score_nothing():
    constant = {"predictions": [1, 1, 1], "references": [0, 1, 0]}
    assert load_metric("glue", "cola").compute(**constant) == {"matthews_correlation": 0.0}
    assert load_metric("glue", "mrpc").compute(predictions=[0, 0], references=[0, 0]) == {"accuracy": 1.0, "f1": 0.0}
    scores = load_metric("glue", "stsb").compute(predictions=[2.0, 2.0], references=[1.0, 3.0])
    assert all(math.isnan(value) for value in scores.values())


def test_batches_add_up_and_metrics_combine():
    metric = load_metric("glue", "qqp")
    for predictions, references in (([0, 1], [0, 0]), ([1], [1])):
        metric.add_batch(predictions=predictions, references=references)
    assert metric.compute() == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3})
    both = evaluate.combine([load_metric("accuracy"), load_metric("glue", "cola")])
    assert set(both.compute(predictions=[0, 1], references=[0, 1])) == {"accuracy", "matthews_correlation"}


def test_unknown_tasks_and_superfluous_configurations():
    with pytest.raises(ValueError, match=r"must be a task of GLUE: cola, .*; got 'mnl1'\. Did you mean 'mnli'\?"):
        load_metric("glue", "mnl1")
    with pytest.raises(ValueError, match=r"must be a task of GLUE: .*; got None"):
        load_metric("glue")
    with pytest.raises(ValueError, match="metric 'accuracy' has no configurations; got 'cola'"):
        load_metric("accuracy", "cola")
    assert set(METRICS) == {"accuracy", "glue", "mse", "rouge"}
