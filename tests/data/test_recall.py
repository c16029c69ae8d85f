"""Recall: every answer is found again by a slow reader of the tokens, and so is its distance."""

import hashlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from hf_hybrid.data.drawing import SPLITS, split_generator
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.recall import NO_DISTANCE, RECALL, draw, memorization
from hf_hybrid.data.recall.needle import NAMES

from ..bare import BARE

TEXT = bytes(range(97, 123)) * 80
GIVEN = {"needle": {"text": TEXT}}
COUNT = 32
FACTS = ("facts", "few_facts", "sparse_facts", "votes")


def drawn(name, split="train", count=COUNT, **sizes):
    return draw(name, split, count, **{**GIVEN.get(name, {}), **sizes})


def size(name, field):
    task = RECALL[name]
    return task.sizes.get(field, inspect.signature(task.function).parameters[field].default)


# ---- slow readers: from the tokens of one sequence, {place of a question: (answer, place of the evidence)} ----


def read_mqar(tokens, name):
    context = 2 * size(name, "pairs")
    value_of = {tokens[place]: (tokens[place + 1], place + 1) for place in range(0, context, 2)}
    places = range(context, len(tokens), 2)
    if not size(name, "random_filler"):
        return {place: value_of[tokens[place]] for place in places if tokens[place] != 0}
    return {place: value_of[tokens[place]] for place in places if tokens[place] in value_of}


def read_in_context_recall(tokens, name):
    first_noise = size(name, "vocab_size") - size(name, "noise_vocab_size")
    found, value_of = {}, {}
    for place in range(0, len(tokens), 2):
        key, value = tokens[place : place + 2]
        if key >= first_noise:
            continue
        if key in value_of:
            found[place] = value_of[key]
            assert value_of[key][0] == value
        value_of[key] = (value, place + 1)
    return found


def read_copied(tokens, name):
    blank, copy = size(name, "vocab_size") - 2, size(name, "vocab_size") - 1
    middle = tokens.index(copy)
    kept = [(token, place) for place, token in enumerate(tokens[:middle]) if token != blank]
    return dict(zip(range(middle + 1, len(tokens)), kept, strict=True))


def read_held(tokens, name):
    classes = size(name, "classes")
    question = classes + size(name, "noise_vocab_size")
    told = [(token, place) for place, token in enumerate(tokens) if token < classes]
    assert len({token for token, _ in told}) == 1
    return {place: told[-1] for place, token in enumerate(tokens) if token == question}


def read_majority(tokens, name):
    classes = size(name, "classes")
    question = classes + size(name, "noise_vocab_size")
    told = [place for place, token in enumerate(tokens) if token < classes]
    assert told == list(range(size(name, "told")))
    (most, votes), (_, fewer) = Counter(tokens[place] for place in told).most_common(2)
    assert votes > fewer
    return {place: (most, told[-1]) for place, token in enumerate(tokens) if token == question}


def read_key_value(tokens, name):
    keys, context = size(name, "keys"), 2 * size(name, "pairs")
    value_of = {tokens[place]: (tokens[place + 1], place + 1) for place in range(0, context, 2)}
    return {place: value_of[token] for place, token in enumerate(tokens) if place >= context and token < keys}


def read_needle(tokens, name):
    told, asked = re.findall(rb"secret number of (\w+) is (\d+)", bytes(tokens))
    assert told[0] == asked[0]
    assert told[1][:-1] == asked[1]
    first = bytes(tokens).index(told[1])
    places = range(len(tokens) - len(told[1]), len(tokens))
    return {place: (told[1][digit], first + digit) for digit, place in enumerate(places)}


READERS = {
    **dict.fromkeys(("mqar", "mqar_64", "mqar_128", "mqar_256", "mqar_512"), read_mqar),
    **dict.fromkeys(("in_context_recall", "noisy_recall"), read_in_context_recall),
    **dict.fromkeys(("copying", "selective_copying"), read_copied),
    **dict.fromkeys(("aggregate", "latch"), read_held),
    "majority": read_majority,
    "key_value": read_key_value,
    "needle": read_needle,
}


def test_every_task_has_a_reader_or_a_test_of_its_own():
    assert READERS.keys() ^ RECALL.keys() == {"compression", "memorization", *FACTS}


@pytest.mark.parametrize("name", READERS)
def test_a_slow_reader_finds_the_same_answers_at_the_same_distances(name):
    examples = drawn(name)
    for tokens, labels, distances in zip(
        examples.input_ids.tolist(), examples.labels.tolist(), examples.distances.tolist(), strict=True
    ):
        found = READERS[name](tokens, name)
        asked = {place: label for place, label in enumerate(labels) if label != IGNORED_LABEL}
        if name == "mqar":  # random filler may look like a question
            found = {place: found[place] for place in asked}
        assert asked == {place: answer for place, (answer, _) in found.items()}
        far = {place: distance for place, distance in enumerate(distances) if distance != NO_DISTANCE}
        assert far == {place: place - evidence for place, (_, evidence) in found.items()}


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("facts", (32, 48)), ("few_facts", (16, 32)), ("sparse_facts", (32, 64)), ("votes", (24, 48))],
)
def test_facts_are_read_from_the_document(name, lengths):
    fields = ("keys", "values", "mentions", "asked", "segment_size")
    keys, values, mentions, asked, segment = (size(name, field) for field in fields)
    for length in lengths:
        examples = drawn(name, length=length)
        blank = examples.vocab_size - 1
        for row in range(COUNT):
            document = examples.document_ids[row].tolist()
            told = [[(token % values, place) for place, token in enumerate(document) if token // values == key]
                    for key in range(keys)]  # fmt: skip
            assert {len(facts) for facts in told} == {mentions}
            assert document.count(blank) == length - keys * mentions
            for place in range(asked):
                facts = told[examples.input_ids[row, place] - keys * values]
                [(value, count)] = Counter(value for value, _ in facts).most_common(1)
                assert (examples.labels[row, place], count) == (keys * values + keys + value, mentions // 2 + 1)
                read = place * (length // segment) // asked
                assert examples.distances[row, place] == min(abs(where // segment - read) for _, where in facts)


def test_compression_asks_for_every_token_but_the_last():
    examples = drawn("compression")
    assert (examples.input_ids[:, -1] == examples.vocab_size - 1).all()
    assert (examples.labels[:, :-1] == examples.input_ids[:, :-1]).all()
    assert (examples.labels[:, -1] == IGNORED_LABEL).all()
    assert (examples.distances == [*range(31, 0, -1), NO_DISTANCE]).all()


def test_what_is_memorized_is_the_same_in_every_split_and_no_two_keys_share_a_value():
    value_of = {}
    for split in SPLITS:
        examples = drawn("memorization", split, 256)
        assert (examples.input_ids[:, 1::2] == examples.vocab_size - 1).all()
        for key, value in zip(examples.input_ids[:, ::2].flat, examples.labels[:, 1::2].flat, strict=True):
            assert value_of.setdefault(key, value) == value
    assert len(set(value_of.values())) == len(value_of) == 127
    assert min(value_of.values()) >= 127 > max(value_of)
    other = memorization(256, split_generator(0, "train"), facts_seed=1)
    assert any(
        value_of[key] != value for key, value in zip(other.input_ids.flat, other.labels[:, 1:].flat, strict=False)
    )


# ---- what holds for every task ----


@pytest.mark.parametrize("name", RECALL)
def test_shapes_and_ids(name):
    examples = drawn(name)
    assert examples.input_ids.shape == examples.labels.shape == examples.distances.shape
    assert examples.input_ids.shape[0] == COUNT
    read = examples.input_ids if examples.document_ids is None else examples.document_ids
    assert read.shape[1] == RECALL[name].length
    for ids in (examples.input_ids, read, examples.labels[examples.labels != IGNORED_LABEL]):
        assert 0 <= ids.min() <= ids.max() < examples.vocab_size
    assert ((examples.labels == IGNORED_LABEL) <= (examples.distances == NO_DISTANCE)).all()
    assert 0 < examples.chance <= (1 / 4 if name == "majority" else 1 / 8)


@pytest.mark.parametrize("name", RECALL)
def test_chance_is_that_of_a_guess(name):
    """The answers that stand at any one place are spread evenly enough that no constant answer does better."""
    labels = drawn(name, count=2000).labels
    asked = labels[labels != IGNORED_LABEL]
    chance = drawn(name).chance
    most = Counter(asked.tolist()).most_common(1)[0][1] / len(asked)
    rows = len(asked) / (1 if name in ("compression", "memorization", *FACTS) else (labels[0] != IGNORED_LABEL).sum())
    assert abs(most - chance) < 5 * (chance / rows) ** 0.5


@pytest.mark.parametrize("name", RECALL)
def test_splits_batches_and_seeds_share_no_sequence(name):
    batches = [
        drawn(name, split, seed=seed, number=number) for split in SPLITS for seed in (0, 1) for number in (0, 1)
    ]
    rows = [b"".join(np.asarray(part)[row].tobytes() for part in (batch.input_ids, batch.labels)) for batch in batches
            for row in range(COUNT)]  # fmt: skip
    assert len(set(rows)) == len(rows)


def digests():
    parts = {name: drawn(name, "test", seed=3, number=5) for name in RECALL}
    return {
        name: hashlib.sha256(part.input_ids.tobytes() + part.labels.tobytes()).hexdigest()[:12]
        for name, part in parts.items()
    }


def test_another_process_draws_the_same():
    code = BARE + "from tests.data.test_recall import digests; print(digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(digests())


def test_the_published_sizes():
    """Zoology's basic example and figure 2, and MAD's baselines, as their code has them."""
    figure_2 = {"mqar_64": (64, 4), "mqar_128": (128, 8), "mqar_256": (256, 16), "mqar_512": (512, 64)}
    for name, (length, pairs) in figure_2.items():
        assert (RECALL[name].train, RECALL[name].test) == (100_000, 3_000)
        assert [size(name, field) for field in ("vocab_size", "length", "pairs", "power", "random_filler")] == [
            8192, length, pairs, 0.01, False,
        ]  # fmt: skip
    assert (RECALL["mqar"].train, RECALL["mqar"].test) == (10_000, 1_000)
    assert [size("mqar", field) for field in ("vocab_size", "length", "pairs", "power", "random_filler")] == [
        256, 64, 4, 0.01, True,
    ]  # fmt: skip
    mad = {
        "in_context_recall": (16, 128, 12_800),
        "noisy_recall": (32, 128, 12_800),
        "selective_copying": (16, 256, 12_800),
        "compression": (16, 32, 12_800),
        "memorization": (256, 32, 256),
    }
    for name, (vocabulary, length, train) in mad.items():
        assert (size(name, "vocab_size"), RECALL[name].length, RECALL[name].train) == (vocabulary, length, train)
        assert RECALL[name].test == 1280
    assert (size("noisy_recall", "noise"), size("noisy_recall", "noise_vocab_size")) == (0.2, 16)
    assert size("selective_copying", "copied") == 16


# ---- the parts that chance decides ----


def values_without_keys(name, examples):
    """Yield the values that a sequence tells, each as often as it is told, and the answers it asks for."""
    for row, (tokens, labels) in enumerate(zip(examples.input_ids.tolist(), examples.labels.tolist(), strict=True)):
        if name in FACTS:
            keys, values = size(name, "keys"), size(name, "values")
            document = examples.document_ids[row]
            answer_of = dict(zip(tokens, labels, strict=True))
            told = Counter(document[document < keys * values].tolist()).most_common()
            best = {token // values: keys * values + keys + token % values for token, _ in reversed(told)}
            assert all(best[token - keys * values] == answer for token, answer in answer_of.items())
            yield [*best.values()], labels
        elif name == "key_value" or name.startswith("mqar"):
            yield tokens[1 : 2 * size(name, "pairs") : 2], labels
        else:
            keys = (size(name, "vocab_size") - size(name, "noise_vocab_size")) // 2
            value_of = {key: value for key, value in zip(tokens[::2], tokens[1::2], strict=True) if key < keys}
            yield [*value_of.values()], labels[len(labels) // 2 :]  # most keys have come by then


@pytest.mark.parametrize("name", [name for name in RECALL if drawn(name, count=1).without_keys is not None])
def test_values_without_their_keys_give_as_many_right_answers_as_said(name):
    examples = drawn(name, "test", 4000 if size(name, "length") < 128 else 1000)
    right = []
    for told, labels in values_without_keys(name, examples):
        likeliest = Counter(told).most_common(1)[0][0]
        right.append(np.mean([label == likeliest for label in labels if label != IGNORED_LABEL]))
    error = np.std(right) / len(right) ** 0.5
    assert abs(np.mean(right) - examples.without_keys) <= 4 * error
    assert examples.without_keys > examples.chance


def test_what_asks_for_no_key_has_no_values_without_keys():
    assert drawn("latch").without_keys is None


def test_questions_of_mqar_come_after_gaps_of_a_power_law():
    """With one pair, the place of its only question has exactly the weights of the paper."""
    examples = draw("mqar_64", "train", 20_000, pairs=1, power=0.01)
    gaps = (examples.distances[examples.labels != IGNORED_LABEL] - 1) // 2
    weights = np.arange(1, 32) ** -0.99
    expected = weights / weights.sum()
    seen = np.bincount(gaps, minlength=31) / len(gaps)
    assert np.abs(seen - expected).max() < 4 * (expected.max() / 20_000) ** 0.5
    uniform = draw("mqar_64", "train", 20_000, pairs=1, power=1.0)
    assert abs(((uniform.distances[uniform.distances > 0] - 1) // 2).mean() - 15) < 0.25


def test_noise_of_noisy_recall_has_its_share_and_never_all():
    examples = drawn("noisy_recall", count=500, noise=0.6)
    pairs = (examples.input_ids[:, ::2] >= 16)[:, :-1]
    assert abs(pairs.mean() - 0.6 * 62 / 63) < 0.02
    alone = drawn("noisy_recall", count=500, noise=0.99, length=8)
    kept = alone.input_ids[:, ::2] < 16
    assert (kept[:, :-1].any(axis=1) & kept[:, -1]).all()
    assert (alone.labels[:, -2] != IGNORED_LABEL).all()


def test_blanks_of_selective_copying_are_spread_over_the_tokens():
    examples = drawn("selective_copying", count=2000)
    places = examples.distances[:, -16:]
    first = 240 + np.arange(16) - places
    gaps = np.diff(first, axis=1, prepend=-1) - 1
    assert gaps.min() >= 0
    assert (gaps.sum(axis=1) == 256 - 33).all()
    assert np.abs(gaps.mean(axis=0) - 223 / 16).max() < 0.5
    assert (examples.input_ids[:, 238] < 14).all()


def test_copying_asks_for_every_token_after_the_same_time():
    examples = drawn("copying", count=200, length=80)
    asked = examples.labels != IGNORED_LABEL
    assert asked[:, -16:].all()
    assert not asked[:, :-16].any()
    assert (examples.distances[asked] == 80 - 16).all()
    assert (examples.labels[:, -16:] == examples.input_ids[:, :16]).all()
    assert np.bincount(examples.input_ids[:, :16].ravel(), minlength=16).tolist()[14:] == [0, 0]


def test_a_vote_is_decided_by_many_tokens():
    """The share that names the same class whatever is drawn decides most votes, but the last tokens alone do not."""
    examples = drawn("majority", count=2000)
    classes, told = (size("majority", field) for field in ("classes", "told"))
    votes = (examples.input_ids[:, :told, None] == np.arange(classes)).sum(axis=1)
    answers = examples.labels.max(axis=1)
    assert (votes.argmax(axis=1) == answers).all()
    assert abs(votes.max(axis=1).mean() / told - (0.25 + 0.75 / 4)) < 0.03
    last = (examples.input_ids[:, told - 8 : told, None] == np.arange(classes)).sum(axis=1).argmax(axis=1)
    assert 0.5 < (last == answers).mean() < 0.8
    tied = drawn("majority", count=500, told=4, classes=2, share=0.0)  # 3 of 8 draws are ties
    assert all(sum(row[:4]) != 2 for row in tied.input_ids.tolist())


def test_blanks_leave_as_many_latches_as_classes():
    assert len({row.tobytes() for row in drawn("latch", count=500, noise_vocab_size=1).input_ids}) == 16


def test_the_needle_lies_at_its_depth_and_every_name_occurs():
    examples = drawn("needle", depth=0.0, length=256)
    assert all(bytes(row.tolist()).startswith(b" The secret number") for row in examples.input_ids)
    deep = drawn("needle", depth=1.0, length=256)
    assert all(row[-40:].max() < 60 for row in deep.distances)
    shallow = drawn("needle", depth=None, count=200, length=256)
    texts = [bytes(row.tolist()) for row in shallow.input_ids]
    assert {re.search(rb"of (\w+) is", text)[1].decode() for text in texts} == set(NAMES)


# ---- bad sizes ----


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("mqar", {"length": 63}, "length must be even; got 63"),
        ("mqar", {"pairs": 17}, "pairs must be at most a quarter of length 64; got 17"),
        ("mqar", {"vocab_size": 8}, "vocab_size must be even and above 8; got 8"),
        ("mqar", {"power": 0.0}, "power must be positive; got 0.0"),
        ("mqar", {"pairs": 2.0}, "pairs must be an integer of at least 1; got 2.0"),
        ("in_context_recall", {"noise": 1.0}, "noise must be from 0 to less than 1; got 1.0"),
        ("in_context_recall", {"noise": 0.5}, "noise_vocab_size must be positive with noise 0.5; got 0"),
        ("in_context_recall", {"length": 7}, "length must be even and at least 4; got 7"),
        ("noisy_recall", {"vocab_size": 17}, "vocab_size must be at least noise_vocab_size 16 + 2; got 17"),
        ("selective_copying", {"length": 33}, "length must be above 33, twice copied and one; got 33"),
        ("copying", {"length": 33}, "length must be above 33, twice copied and one; got 33"),
        ("selective_copying", {"vocab_size": 2}, "vocab_size must be an integer of at least 3; got 2"),
        ("compression", {"length": 1}, "length must be an integer of at least 2; got 1"),
        ("memorization", {"length": 31}, "length must be even and at least 2; got 31"),
        ("latch", {"length": 33}, "length must be above 33, the place of the first question; got 33"),
        ("aggregate", {"share": 0}, "share must be above 0 and at most 1; got 0"),
        ("majority", {"share": 1.5}, "share must be from 0 to 1; got 1.5"),
        ("majority", {"length": 80}, "length must be above 80, the place of the first question; got 80"),
        ("key_value", {"pairs": 9}, "pairs must be at most the 8 keys; got 9"),
        ("key_value", {"length": 38}, "length must be above 38, the place of the first question; got 38"),
        ("needle", {"length": 69}, "length must be at least 70, the bytes of needle and question; got 69"),
        ("needle", {"text": TEXT[:9], "length": 70}, "text must be longer than length 70; got '9 bytes'"),
        ("needle", {"length": 4000}, "text must be longer than length 4000; got '2080 bytes'"),
        ("needle", {"depth": 1.5}, "depth must be from 0 to 1; got 1.5"),
        ("facts", {"length": 30}, "length must be at least the 32 facts; got 30"),
        ("votes", {"mentions": 2}, "mentions must be odd; got 2"),
        ("facts", {"length": 34}, "length must be a multiple of segment_size 4; got 34"),
        ("facts", {"count": 0}, "count must be an integer of at least 1; got 0"),
        (
            "latch",
            {"gaps": 3},
            "latch has no size 'gaps', only classes, length, gap, every, noise_vocab_size. Did you mean 'gap'?",
        ),
        ("latch", {"split": "dev"}, "split must be one of train, validation, test; got 'dev'"),
        ("latch", {"seed": -1}, "seed must be an integer of at least 0; got -1"),
    ],
)
def test_bad_sizes_are_refused_with_name_value_and_rule(name, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(name, **sizes)


def test_unknown_tasks_and_missing_texts_are_named():
    with pytest.raises(
        ValueError, match=r"name must be a task of recall \(mqar, .*\); got 'key_values'. Did you mean"
    ):
        draw("key_values", "train", 1)
    with pytest.raises(ValueError, match="needle needs text; got only none"):
        draw("needle", "train", 1)
