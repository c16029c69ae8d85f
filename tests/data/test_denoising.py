"""Noise: layouts written by hand, what holds for every text, and how often what is drawn."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_hybrid.data.denoising import (
    Denoiser,
    corrupt_spans,
    cut_into_pieces,
    infill_text,
    mask_words,
    most_spans,
    noise_generator,
    noise_mask,
    replace_spans,
    text_frame,
)
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.tokenizer import add_mask_token, add_sentinels, byte_tokenizer
from tests.fuzz.fuzzing import examples

SENTINELS = list(range(1000, 3000))
MASK = 999
VOCABULARY = np.arange(100, 200)
TEXT = np.arange(200, 212)


def runs(mask):
    """The lengths of the runs of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return edges[1::2] - edges[::2]


# ---- span corruption ----


@pytest.mark.parametrize(
    ("hidden", "inputs", "targets"),
    [
        # the paper's figure 2, whose text goes on behind the last span: Thank you <X> me to your party <Y> week.
        (
            "..##.....#..",
            [200, 201, 1000, 204, 205, 206, 207, 208, 1001, 210, 211],
            [1000, 202, 203, 1001, 209, 1002],
        ),
        # the published code's masks begin with text and end in noise
        (".###.......#", [200, 1000, 204, 205, 206, 207, 208, 209, 210, 1001], [1000, 201, 202, 203, 1001, 211]),
        ("..........##", [*range(200, 210), 1000], [1000, 210, 211]),
    ],
)
def test_sentinels_stand_where_the_spans_were(hidden, inputs, targets):
    mask = np.array([sign == "#" for sign in hidden])
    assert replace_spans(TEXT, mask, SENTINELS).tolist() == inputs
    assert replace_spans(TEXT, ~mask, SENTINELS).tolist() == targets


def restored(inputs, targets):
    """The text from inputs and targets: each sentinel of the inputs gives way to what follows it in the targets."""
    spans, sentinel = {}, None
    for token in targets:
        if token >= SENTINELS[0]:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    return [token for item in inputs for token in spans.get(item, [item])]


@examples(80)
@given(length=st.integers(2, 400), density=st.floats(0.01, 0.99), mean=st.floats(1, 20), seed=st.integers(0, 2**32))
def test_every_token_is_in_inputs_or_targets_once(length, density, mean, seed):
    tokens = np.arange(length)
    how = {"density": density, "mean_length": mean}
    inputs, targets = corrupt_spans(tokens, np.random.default_rng(seed), SENTINELS, **how)
    mask = noise_mask(length, np.random.default_rng(seed), **how)
    noise = min(max(round(length * density), 1), length - 1)
    spans = min(max(round(noise / mean), 1), noise, length - noise)
    assert mask.sum() == noise
    assert len(runs(mask)) == len(runs(~mask)) == spans <= most_spans(length, **how)
    assert not mask[0]
    assert mask[-1]
    assert [token for token in inputs if token < 1000] == tokens[~mask].tolist()
    assert [token for token in targets if token < 1000] == tokens[mask].tolist()
    for part in (inputs, targets):
        assert [token for token in part if token >= 1000] == SENTINELS[:spans]
    assert restored(inputs.tolist(), targets.tolist()) == tokens.tolist()
    assert max(len(inputs), len(targets)) <= length  # positions for a text are enough for its noise
    assert most_spans(length, **how) >= most_spans(length - 1, **how) or length == 2


def test_all_divisions_into_spans_are_equally_likely():
    """Eight tokens with four of noise in two spans: three divisions of the noise times three of the rest."""
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(noise_mask(8, rng, density=0.5, mean_length=2)) for _ in range(4500))
    assert len(drawn) == 9
    assert max(abs(count - 500) for count in drawn.values()) < 5 * 21.1  # standard deviations


def test_spans_have_the_papers_length():
    lengths = np.concatenate([runs(noise_mask(512, np.random.default_rng(seed))) for seed in range(200)])
    assert lengths.mean() == pytest.approx(77 / 26)  # of 512 tokens, round(76.8) in round(25.67) spans
    # 77 in 26 parts, all divisions alike: the first part is 1 as often as 76 is divided into 25
    assert np.mean(lengths == 1) == pytest.approx(25 / 76, abs=5 * (0.22 / len(lengths)) ** 0.5)


def test_too_few_tokens_or_sentinels_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="length must be at least 2 tokens, one to hide and one to read; got 1"):
        noise_mask(1, rng)
    with pytest.raises(ValueError, match="sentinels must be as many as there are spans, 5; got 4"):
        corrupt_spans(np.arange(100), rng, SENTINELS[:4])


# ---- text infilling ----


@examples(80)
@given(length=st.integers(1, 300), density=st.floats(0.01, 0.99), mean=st.floats(0.2, 20), seed=st.integers(0, 2**32))
def test_each_span_is_one_mask_and_the_target_is_the_text(length, density, mean, seed):
    tokens = np.arange(1000, 1000 + length)
    inputs, targets = infill_text(tokens, np.random.default_rng(seed), MASK, density=density, mean_length=mean)
    assert targets.tolist() == tokens.tolist()
    kept = inputs[inputs != MASK]
    assert len(kept) == length - min(max(round(length * density), 1), length)
    assert sorted(set(kept)) == kept.tolist()
    assert set(kept) <= set(tokens)
    assert len(inputs) <= length
    if len(kept) < length:  # between masks nothing is missing
        known = [None, *(token for token in inputs), None]
        for left, right in pairwise(known):
            if left not in (None, MASK) and right not in (None, MASK):
                assert right == left + 1


def test_span_lengths_are_poissons_and_some_are_zero():
    """Known from the inputs where two masks are apart: the tokens missing between their neighbours."""
    drawn = []
    for seed in range(300):
        text = np.arange(1000, 1600)
        inputs, _ = infill_text(text, np.random.default_rng(seed), MASK, density=0.05)
        tokens = inputs.tolist()
        for place, token in enumerate(tokens[1:-1], start=1):
            left, right = tokens[place - 1], tokens[place + 1]
            if token == MASK and MASK not in (left, right):
                drawn.append(right - left - 1)
    drawn = np.array(drawn)
    assert len(drawn) > 2000
    for length, share in enumerate((0.0498, 0.1494, 0.2240, 0.2240, 0.1680)):  # e^-3 3^k / k!
        # the last of about ten spans is cut, and the first longer than zero counts none behind it
        assert np.mean(drawn == length) == pytest.approx(share, abs=0.035), length
    assert np.mean(drawn == 0) > 0.03


# ---- masked words ----


@examples(80)
@given(
    tokens=st.lists(st.integers(0, 50), min_size=1, max_size=200), density=st.floats(0.01, 0.99), seed=st.integers(0)
)
def test_labels_are_where_tokens_were_chosen(tokens, density, seed):
    fixed = (0, 1, 2)
    text = np.array(tokens)
    inputs, labels = mask_words(text, np.random.default_rng(seed), MASK, VOCABULARY, fixed, density=density)
    free = sum(token not in fixed for token in tokens)
    chosen = labels != IGNORED_LABEL
    assert chosen.sum() == min(max(round(len(tokens) * density), 1), free)
    assert (inputs[~chosen] == text[~chosen]).all()
    assert (labels[chosen] == text[chosen]).all()
    assert not np.isin(text[chosen], fixed).any()
    changed = inputs[chosen & (inputs != text)]
    assert np.isin(changed, [MASK, *VOCABULARY]).all()


def test_of_ten_words_eight_are_masked_one_is_random_and_one_stays():
    text = np.full(40_000, 7)
    inputs, labels = mask_words(text, np.random.default_rng(0), MASK, VOCABULARY)
    chosen = inputs[labels != IGNORED_LABEL]
    assert len(chosen) == 6000
    for share, found in ((0.8, chosen == MASK), (0.1, np.isin(chosen, VOCABULARY)), (0.1, chosen == 7)):
        assert found.mean() == pytest.approx(share, abs=5 * (share * (1 - share) / 6000) ** 0.5)
    assert len(set(chosen[np.isin(chosen, VOCABULARY)])) > 90  # of 100, after 600 draws


# ---- pieces and tokens ----


def test_a_piece_holds_one_document():
    rows = [np.arange(10), np.arange(20, 23), np.arange(1), np.arange(0), np.arange(30, 36)]
    pieces = [piece.tolist() for piece in cut_into_pieces(rows, 4)]
    assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [20, 21, 22], [30, 31, 32, 33], [34, 35]]
    joined = [piece.tolist() for piece in cut_into_pieces(rows, 4, joined=True)]
    flat = np.concatenate(rows).tolist()
    assert joined == [flat[start : start + 4] for start in range(0, 20, 4)]
    assert [len(piece) for piece in cut_into_pieces([np.arange(9)], 4, joined=True)] == [4, 4]  # one token is left


@examples(100)
@given(lengths=st.lists(st.integers(0, 20), max_size=8), size=st.integers(2, 9))
def test_spans_lie_where_pieces_are_cut(lengths, size):
    tokens = np.arange(100, 100 + sum(lengths))
    ends = np.cumsum(lengths, dtype=int)
    pieces = [piece.tolist() for piece in cut_into_pieces(np.split(tokens, ends[:-1]), size)]
    spans = list(cut_into_pieces(map(range, ends - lengths, ends), size))
    assert all(isinstance(span, range) for span in spans)
    assert [tokens[span.start : span.stop].tolist() for span in spans] == pieces


def test_noise_depends_on_seed_epoch_and_piece_alone():
    def draw(*key):
        return noise_mask(60, noise_generator(*key)).tolist()

    assert draw(0, 1, 2) == draw(0, 1, 2)
    assert len({tuple(draw(*key)) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (1, 0, 2)]}) == 5


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def test_tokens_that_a_tokenizer_lacks_are_added_once(tokenizer, tmp_path):
    size = len(tokenizer)
    assert add_sentinels(tokenizer, 3) == ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    assert add_sentinels(tokenizer, 4) == ["<extra_id_3>"]
    assert add_mask_token(tokenizer) == ["<mask>"]
    assert add_sentinels(tokenizer, 2) == add_mask_token(tokenizer) == []
    assert len(tokenizer) == size + 5
    tokenizer.save_pretrained(str(tmp_path))
    loaded = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.mask_token == "<mask>"
    assert set(loaded.all_special_ids) == set(tokenizer.all_special_ids)
    assert set(range(size, size + 5)) <= set(loaded.all_special_ids)
    assert loaded("<extra_id_0>", add_special_tokens=False)["input_ids"][0] < size  # a text's own is characters


def test_a_tokenizer_that_cannot_encode_a_word_is_refused():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"tree": 0, "</s>": 1})), eos_token="</s>"
    )
    with pytest.raises(ValueError, match=r"must have tokens for any text; it has none for 'a': .*UNK"):
        text_frame(tokenizer)


def test_each_objective_frames_its_texts(tokenizer):
    add_sentinels(tokenizer, 9)
    add_mask_token(tokenizer)
    end, mask = tokenizer.eos_token_id, tokenizer.mask_token_id
    text = np.array(tokenizer("The river is wide and long.", add_special_tokens=False)["input_ids"])
    assert text_frame(tokenizer) == ((), (end,))
    for objective in ("span_corruption", "text_infilling", "masked_words"):
        denoise = Denoiser.of(tokenizer, objective, 0.3, 3.0)
        row = denoise(text, noise_generator(0, 0, 0))
        assert row["input_ids"][-1] == end
        if objective == "masked_words":
            assert len(row["input_ids"]) == len(row["labels"]) == len(text) + 1
            assert row["labels"][-1] == IGNORED_LABEL
        else:
            assert row["labels"][-1] == end
        if objective == "span_corruption":
            assert row["labels"][0] == denoise.sentinels[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>")
        else:
            assert mask in row["input_ids"]
        if objective == "text_infilling":
            assert row["labels"] == [*text.tolist(), end]
        assert not set(denoise.vocabulary) & set(tokenizer.all_special_ids)
        assert denoise.takes(text)
        assert not denoise.takes(np.array([end, mask]))


def test_an_empty_text_is_not_infilled():
    with pytest.raises(ValueError, match="tokens must hold at least one; got none"):
        infill_text(np.array([], dtype=np.int64), noise_generator(0, 0, 0), 1)
