"""Noise beside the published procedures, written again from what their papers say and from nothing of this package.

T5's (Raffel et al. 2020: section 3.1.4, figure 2, and the numbers of its published preprocessing), BART's (Lewis et
al. 2020: sections 2.2 and 4) and BERT's (Devlin et al. 2019: section 3.1 and appendix A.1).
"""

import itertools
import math
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import T5Tokenizer

from hf_hybrid.data.denoising import (
    DENSITIES,
    MEAN_SPAN_LENGTH,
    Denoiser,
    corrupt_spans,
    infill_text,
    mask_words,
    noise_generator,
    noise_mask,
)
from hf_hybrid.data.tokenizer import add_mask_token, add_sentinels, byte_tokenizer
from hf_hybrid.training.flags.data import PretrainArguments
from tests.fuzz.fuzzing import examples

MASK = -7
SIGMAS = 5  # of each estimate: chance alone exceeds them once in millions
TEXT = "The river Wye runs by the stone bridge – and on, past orchards, to the sea; nobody has counted its bends."


def test_the_defaults_are_the_papers():
    """15 % in spans of 3 (T5, sections 3.3.3 and 3.3.4), 30 % with λ = 3 (BART), 15 % (BERT)."""
    assert DENSITIES == {"span_corruption": 0.15, "text_infilling": 0.3, "masked_words": 0.15}
    for objective, density in DENSITIES.items():
        chosen = PretrainArguments(objective=objective)
        assert (chosen.density, chosen.mean_length) == (density, MEAN_SPAN_LENGTH) == (density, 3)


# ---- T5 ----


def half_even(share):
    """The nearest integer, of two the even one."""
    below = math.floor(share)
    return below + (share - below > Fraction(1, 2) or (share - below == Fraction(1, 2) and below % 2))


def read_aloud(tokens, is_hidden):
    """Figure 2, one token after the other: a dropped span is announced by its sentinel on both sides."""
    source, target, spans = [], [], 0
    for place, (token, hidden) in enumerate(zip(tokens, is_hidden, strict=True)):
        if not hidden:
            source.append(token)
            continue
        if place == 0 or not is_hidden[place - 1]:
            source.append(f"<extra_id_{spans}>")
            target.append(f"<extra_id_{spans}>")
            spans += 1
        target.append(token)
    return source, target


def written_back(source, target):
    """The text, from the strings that a model reads and writes."""
    pieces = re.split(r"<extra_id_(\d+)>", target)
    assert pieces[0] == ""
    spans = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    assert list(spans) == [str(number) for number in range(len(spans))]
    assert re.findall(r"<extra_id_(\d+)>", source) == list(spans)
    return re.sub(r"<extra_id_(\d+)>", lambda found: spans[found[1]], source)


def published_counts(length):
    """Tokens of noise and spans, exactly: 15 % and thirds, rounded, at least one and something left to read."""
    noise = min(max(half_even(Fraction(15 * length, 100)), 1), length - 1)
    return noise, max(half_even(Fraction(noise, 3)), 1)


def test_every_length_has_the_published_counts():
    rng = np.random.default_rng(0)
    for length in range(2, 1200):
        mask = noise_mask(length, rng)
        assert (mask.sum(), (np.diff(mask.astype(int)) == 1).sum()) == published_counts(length), length


@examples(60)
@given(length=st.integers(2, 1200), seed=st.integers(0, 2**32))
def test_spans_are_laid_out_as_in_figure_2(length, seed):
    """With the papers' numbers: so many tokens in so many spans, sentinels in order, each token on one side."""
    noise, spans = published_counts(length)
    words = [f"w{number}" for number in range(length)]
    sentinels = range(10**6, 10**6 - 500, -1)  # from the end of a vocabulary downwards, as T5's
    inputs, targets = corrupt_spans(np.arange(length), np.random.default_rng(seed), sentinels)

    def spelt(ids):
        return [words[token] if token < length else f"<extra_id_{10**6 - token}>" for token in ids.tolist()]

    hidden = set(targets.tolist())
    expected = read_aloud(words, [number in hidden for number in range(length)])
    assert (spelt(inputs), spelt(targets)) == expected
    assert len(targets) == noise + spans
    assert len(inputs) == length - noise + spans
    assert spelt(inputs)[0] == "w0"
    assert spelt(inputs)[-1] == f"<extra_id_{spans - 1}>"
    assert written_back("".join(expected[0]), "".join(expected[1])) == "".join(words)


def test_568_tokens_are_the_published_512_and_114():
    """What T5's preprocessing makes of its 512 positions: the longest text that fits them, and its targets."""
    lengths = []
    for length in (568, 569):
        sides = corrupt_spans(np.arange(length), np.random.default_rng(0), range(1000, 1100))
        lengths.append([len(side) + 1 for side in sides])  # and the end token
    assert lengths[0] == [512, 114]
    assert lengths[1][0] > 512


@pytest.mark.parametrize(("length", "density", "mean_length"), [(9, 0.5, 2.0), (12, 0.4, 1.5), (8, 0.15, 3.0)])
def test_every_mask_that_keeps_the_counts_is_as_likely_as_any_other(length, density, mean_length):
    """The masks are found by trying all: text first, noise last, so much noise in so many spans."""
    noise = half_even(Fraction(density).limit_denominator(100) * length)
    spans = max(half_even(Fraction(noise) / Fraction(mean_length)), 1)
    possible = [
        mask
        for mask in itertools.product([False, True], repeat=length)
        if not mask[0] and mask[-1] and sum(mask) == noise and len(list(itertools.groupby(mask))) == 2 * spans
    ]
    rng, draws = np.random.default_rng(1), 400 * len(possible)
    drawn = Counter(
        tuple(noise_mask(length, rng, density=density, mean_length=mean_length).tolist()) for _ in range(draws)
    )
    assert set(drawn) == set(possible)
    assert max(abs(drawn[mask] - 400) for mask in possible) < SIGMAS * 20


def published_tokenizer():
    """T5's own class, of characters: its sentinels are the last ids of the vocabulary, the first one the last."""
    letters = ["▁", *sorted(set(TEXT) - {" "})]
    vocab = ["<pad>", "</s>", "<unk>", *letters, *(f"<extra_id_{number}>" for number in reversed(range(100)))]
    return T5Tokenizer(vocab=[(token, -2.0 if token in letters else 0.0) for token in vocab])


@pytest.mark.parametrize("make", [published_tokenizer, byte_tokenizer])
def test_both_sides_end_and_decode_to_the_text(make):
    tokenizer = make()
    assert bool(add_sentinels(tokenizer, 100)) == (make is byte_tokenizer)
    denoise = Denoiser.of(tokenizer, "span_corruption", 0.15, 3.0)
    assert len(denoise.sentinels) == 100
    assert tokenizer.convert_ids_to_tokens(list(denoise.sentinels[:2])) == ["<extra_id_0>", "<extra_id_1>"]
    if make is published_tokenizer:
        size = len(tokenizer)
        assert list(denoise.sentinels) == list(range(size - 1, size - 101, -1))
    ids = np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    for number in range(20):
        row = denoise(ids, noise_generator(0, 0, number))
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in row["input_ids"][:-1] + row["labels"][:-1]
        spelt = [tokenizer.convert_ids_to_tokens(row[side][:-1]) for side in ("input_ids", "labels")]
        together = written_back(*map("".join, spelt))
        assert together == "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


# ---- BART ----


def poisson(count, mean):
    return math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1))


def expected_spans(total, mean=3.0):
    """How many spans of each length are expected: lengths are drawn until they hold so many tokens, the last is cut.

    n draws hold a sum that is Poisson of n times the mean, so ``reached[s]`` is how often s tokens are hidden so far.
    """
    reached = [(s == 0) + sum(poisson(s, n * mean) for n in range(1, 100)) for s in range(total)]
    drawn = [poisson(length, mean) for length in range(total)]
    spans = [sum(reached[: total - length]) * drawn[length] for length in range(total)] + [0.0]
    for length in range(1, total + 1):  # the last: so long, or cut to it
        spans[length] += reached[total - length] * (1 - sum(drawn[:length]))
    return spans


def test_infilling_draws_lengths_until_the_share_is_hidden():
    """In a long text of little noise two masks hardly ever touch, so that each length can be read off."""
    length, total, draws = 3000, 12, 3000
    text, rng, found = np.arange(length), np.random.default_rng(2), []
    for _ in range(draws):
        inputs, targets = infill_text(text, rng, MASK, density=total / length)
        assert (targets == text).all()
        known = np.concatenate([[-1], inputs, [length]])
        (places,) = np.nonzero(known == MASK)
        sizes = known[places + 1] - known[places - 1] - 1
        if not (np.diff(places) == 1).any():
            assert sizes.sum() == total
            found.append(np.bincount(sizes, minlength=total + 1))
    assert len(found) > 0.98 * draws
    for size, (expected, counts) in enumerate(zip(expected_spans(total), np.transpose(found), strict=True)):
        error = (max(counts.var(), expected) / len(found)) ** 0.5
        assert abs(counts.mean() - expected) < SIGMAS * error, size


def test_infilling_hides_thirty_percent_and_masks_stand_anywhere():
    """A mask is as likely to be first, or last, as to be anywhere else; hidden tokens are the text's share."""
    length, draws, rng = 200, 4000, np.random.default_rng(3)
    first, last, spans, share = [], [], [], []
    for _ in range(draws):
        inputs, _ = infill_text(np.arange(length), rng, MASK)
        masks = inputs == MASK
        assert (~masks).sum() == length - 60
        spans.append(masks.sum())
        share.append(masks.mean())
        first.append(masks[0])
        last.append(masks[-1])
    for ends in (first, last):
        assert abs(np.mean(ends) - np.mean(share)) < SIGMAS * np.std(ends) / draws**0.5
    assert abs(np.mean(spans) - sum(expected_spans(60))) < SIGMAS * np.std(spans) / draws**0.5


def test_an_infilled_text_ends_as_barts_does():
    """Both sides between the tokenizer's special tokens, which are never hidden; the target is the text."""
    tokenizer = byte_tokenizer()
    add_mask_token(tokenizer)
    denoise = Denoiser.of(tokenizer, "text_infilling", 0.3, 3.0)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    row = denoise(np.array(ids), noise_generator(0, 0, 0))
    assert row["labels"] == [*ids, tokenizer.eos_token_id]
    assert tokenizer.decode(row["labels"], skip_special_tokens=True) == TEXT
    kept = "".join(tokenizer.convert_ids_to_tokens(row["input_ids"][:-1])).split("<mask>")
    assert len(kept) > 3
    assert re.fullmatch(".*".join(map(re.escape, kept)), "".join(tokenizer.convert_ids_to_tokens(ids)))


# ---- BERT ----


def test_each_word_is_as_likely_to_be_guessed_and_what_becomes_of_it_does_not_depend_on_which():
    length, special, draws = 64, (0, 1, 2), 4000
    text = np.array([0, *range(10, 10 + length - 2), 1])
    words = np.arange(100, 140)
    rng = np.random.default_rng(4)
    chosen, fates = np.zeros(length), np.zeros((length, 3))
    randoms = Counter()
    for _ in range(draws):
        inputs, labels = mask_words(text, rng, MASK, words, special)
        guessed = labels != -100
        assert guessed.sum() == 10  # 15 % of 64 are 9.6
        assert (labels[guessed] == text[guessed]).all()
        assert (inputs[~guessed] == text[~guessed]).all()
        chosen += guessed
        fates[:, 0] += guessed & (inputs == MASK)
        fates[:, 1] += guessed & (inputs >= 100)
        fates[:, 2] += guessed & (inputs == text)
        randoms.update(inputs[inputs >= 100].tolist())
    assert chosen[0] == chosen[-1] == 0
    rate = 10 / (length - 2)
    assert np.abs(chosen[1:-1] / draws - rate).max() < SIGMAS * (rate * (1 - rate) / draws) ** 0.5
    for column, share in enumerate((0.8, 0.1, 0.1)):
        found = fates[1:-1, column] / chosen[1:-1]
        assert np.abs(found - share).max() < SIGMAS * (share * (1 - share) / chosen[1:-1].min()) ** 0.5
    each = sum(randoms.values()) / len(words)
    assert set(randoms) == set(words.tolist())
    assert max(abs(count - each) for count in randoms.values()) < SIGMAS * each**0.5
