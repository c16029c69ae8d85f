import random

import evaluate
import numpy as np
import pytest
from rouge_score import rouge_scorer

from hf_hybrid.metrics import load_metric

TYPES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


def texts(count, seed):
    generator = random.Random(seed)
    words = ["the", "cats", "sat", "running", "on", "mats", "with", "dogs", "and", "birds", "that", "sing"]

    def sentence():
        return " ".join(generator.choices(words, k=generator.randint(3, 9))) + "."

    return ["\n".join(sentence() for _ in range(generator.randint(1, 3))) for _ in range(count)]


def test_a_case_computed_by_hand():
    # "the cat sat" and "the cat is here": 2 words in common of 3 and of 4, so F1 = 2 * 2 / 7; one word pair in common
    # of 2 and of 3, so F1 = 2 * 1 / 5; the longest common subsequence is "the cat".
    scores = load_metric("rouge").compute(predictions=["the cat sat"], references=["the cat is here"])
    assert scores == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7, "rougeLsum": 4 / 7})


@pytest.mark.parametrize("use_stemmer", [False, True])
def test_scores_are_those_of_rouge_score(use_stemmer):
    predictions, references = texts(20, 0), texts(20, 1)
    scores = load_metric("rouge").compute(
        predictions=predictions, references=references, use_stemmer=use_stemmer, use_aggregator=False
    )
    scorer = rouge_scorer.RougeScorer(TYPES, use_stemmer=use_stemmer)
    assert list(scores) == TYPES
    for kind in TYPES:
        expected = [scorer.score(r, p)[kind].fmeasure for p, r in zip(predictions, references, strict=True)]
        assert scores[kind] == expected


def test_the_stemmer_counts_forms_of_a_word_as_equal():
    metric = load_metric("rouge")
    pair = {"predictions": ["it was running"], "references": ["it was runs"]}
    assert metric.compute(**pair, use_stemmer=True)["rouge1"] > metric.compute(**pair)["rouge1"]


def test_lines_are_the_sentences_of_rouge_lsum():
    pair = {"predictions": ["c d\na b"], "references": ["a b\nc d"]}
    scores = load_metric("rouge").compute(**pair)
    assert scores["rougeLsum"] == 1.0
    assert scores["rougeL"] == 0.5


def test_the_aggregate_is_near_the_mean_and_does_not_depend_on_the_random_state():
    predictions, references = texts(100, 0), texts(100, 1)
    pairs = {"predictions": predictions, "references": references}
    mean = {k: np.mean(v) for k, v in load_metric("rouge").compute(**pairs, use_aggregator=False).items()}
    np.random.seed(0)
    first = load_metric("rouge").compute(**pairs)
    state = np.random.get_state()[1].copy()
    np.random.seed(1)
    np.random.rand(10)
    assert load_metric("rouge").compute(**pairs) == first
    assert first == pytest.approx(mean, abs=0.01)
    np.random.seed(0)
    assert (np.random.get_state()[1] == state).all()


def test_the_best_of_several_references_counts():
    scores = load_metric("rouge").compute(
        predictions=["a dog", "a bird"],
        references=[["x y", "a dog"], ["the bird", "nothing"]],
        rouge_types=["rouge1"],
        use_aggregator=False,
    )
    assert scores == {"rouge1": [1.0, 0.5]}


def test_an_empty_prediction_scores_zero():
    assert load_metric("rouge").compute(predictions=[""], references=["a b"]) == dict.fromkeys(TYPES, 0.0)


def test_batches_and_single_pairs_add_up_and_the_metric_can_be_used_again():
    predictions, references = texts(6, 0), texts(6, 1)
    metric = load_metric("rouge")
    whole = metric.compute(predictions=predictions, references=references)
    for start in (0, 2):
        metric.add_batch(predictions=predictions[start : start + 2], references=references[start : start + 2])
    for i in (4, 5):
        metric.add(prediction=predictions[i], reference=references[i])
    assert metric.compute() == whole


def test_an_own_tokenizer():
    pair = {"predictions": ["a-b c"], "references": ["a-b d"], "rouge_types": ["rouge1"]}
    assert load_metric("rouge").compute(**pair, tokenizer=str.split) == {"rouge1": 0.5}
    assert load_metric("rouge").compute(**pair)["rouge1"] == pytest.approx(2 / 3)


def test_wrong_inputs_are_refused():
    metric = load_metric("rouge")
    with pytest.raises(ValueError, match="predictions must hold at least one text; got none"):
        metric.compute(predictions=[], references=[])
    with pytest.raises(ValueError, match=r"Mismatch in the number of predictions \(1\) and references \(2\)"):
        load_metric("rouge").compute(predictions=["a"], references=["a", "b"])
    with pytest.raises(ValueError, match="rougeX"):
        load_metric("rouge").compute(predictions=["a"], references=["a"], rouge_types=["rougeX"])


def test_load_metric_names_what_it_knows():
    assert isinstance(load_metric("rouge"), evaluate.Metric)
    with pytest.raises(ValueError, match=r"metric must be one of: .*, rouge; got 'rogue'\. Did you mean 'rouge'\?"):
        load_metric("rogue")
    with pytest.raises(ValueError, match="config_name must be None: metric 'rouge' has no configurations; got 'en'"):
        load_metric("rouge", "en")


def test_the_working_directory_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "rouge").mkdir()
    (tmp_path / "rouge" / "rouge.py").write_text("raise SystemExit('loaded from the working directory')")
    monkeypatch.chdir(tmp_path)
    assert load_metric("rouge").compute(predictions=["a b"], references=["a b"])["rougeL"] == 1.0
