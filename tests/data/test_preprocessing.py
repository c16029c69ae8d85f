import pytest
import torch

from hf_hybrid.data import preprocessing
from hf_hybrid.data.preprocessing import (
    IGNORED_LABEL,
    group_into_blocks,
    lead_baseline,
    plain_baselines,
    random_summaries,
    sliding_windows,
    split_sentences,
    tokenize_sentences,
    tokenize_summarization,
    tokenize_texts,
)
from hf_hybrid.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words to split"], 259)  # one token a byte, and </s>


def tokenize(tokenizer, documents=("abcdef", "ab"), summaries=("xyz", "x"), **kwargs):
    lengths = {"max_source_length": 5, "max_target_length": 4, **kwargs}
    batch = {"text": list(documents), "short": list(summaries)}
    return tokenize_summarization(batch, tokenizer, text_column="text", summary_column="short", **lengths)


def test_documents_and_summaries_are_cut_and_end_with_the_end_token(tokenizer):
    batch = tokenize(tokenizer)
    assert [tokenizer.decode(ids) for ids in batch["input_ids"]] == ["abcd</s>", "ab</s>"]
    assert [tokenizer.decode(ids) for ids in batch["labels"]] == ["xyz</s>", "x</s>"]
    assert [sum(mask) for mask in batch["attention_mask"]] == [5, 3]


def test_the_prefix_goes_before_every_document(tokenizer):
    batch = tokenize(tokenizer, source_prefix="#", max_source_length=9)
    assert [tokenizer.decode(ids) for ids in batch["input_ids"]] == ["#abcdef</s>", "#ab</s>"]
    assert tokenize(tokenizer, source_prefix=None) == tokenize(tokenizer)


def test_sentences_and_pairs_are_cut_the_longer_one_first(tokenizer):
    batch = {"a": ["abcdef", "x"], "b": ["gh", "y"]}
    one = tokenize_sentences(batch, tokenizer, columns=["a"], max_length=4)
    assert [tokenizer.decode(ids) for ids in one["input_ids"]] == ["abc</s>", "x</s>"]
    two = tokenize_sentences(batch, tokenizer, columns=["a", "b"], max_length=7, pad_to_max_length=True)
    assert [tokenizer.decode(ids) for ids in two["input_ids"]] == ["abc</s>gh</s>", "x</s>y</s><pad><pad><pad>"]


def test_texts_are_ended_and_lines_are_not(tokenizer):
    batch = {"text": ["é\n", ""]}
    texts = tokenize_texts(batch, tokenizer, column="text")
    assert [tokenizer.decode(ids) for ids in texts["input_ids"]] == ["é\n</s>", "</s>"]
    assert texts["num_bytes"] == [3, 0]
    lines = tokenize_texts(batch, tokenizer, column="text", are_lines=True)
    assert [tokenizer.decode(ids) for ids in lines["input_ids"]] == ["é\n", ""]
    with pytest.raises(ValueError, match="column 'text' must hold text in every row; got NoneType"):
        tokenize_texts({"text": ["a", None]}, tokenizer, column="text")


def test_long_texts_are_tokenized_a_few_at_a_time(tokenizer, monkeypatch):
    monkeypatch.setattr("hf_hybrid.data.preprocessing._CHARACTERS", 5)
    calls = []

    def counted(texts, **options):
        calls.append(texts)
        return tokenizer(texts, **options)

    texts = ["ab", "cd", "ef", "longer than all", "", "g", "h"]
    rows = tokenize_texts({"text": texts}, counted, column="text", are_lines=True)["input_ids"]
    assert calls == [["ab", "cd"], ["ef"], ["longe"], ["r"], [" than"], [" all", "", "g"], ["h"]]
    assert [tokenizer.decode(ids) for ids in rows] == texts
    calls.clear()
    counted.init_kwargs = tokenizer.init_kwargs
    whole = tokenize_texts({"text": texts}, counted, column="text")["input_ids"]  # with special tokens around each
    assert calls == [["ab", "cd"], ["ef"], ["longer than all"], ["", "g", "h"]]
    assert [tokenizer.decode(ids) for ids in whole] == [f"{text}</s>" for text in texts]


def test_blocks_join_texts_and_drop_what_is_left():
    blocks = group_into_blocks({"input_ids": [[1, 2, 3], [], [4, 5], [6, 7, 8]]}, block_size=3)["input_ids"]
    assert [block.tolist() for block in blocks] == [[1, 2, 3], [4, 5, 6]]
    assert group_into_blocks({"input_ids": [[1, 2]]}, block_size=3) == {"input_ids": []}


@pytest.mark.parametrize("count", [2, 5, 10, 11, 12, 13, 40])
@pytest.mark.parametrize(("length", "context"), [(10, 0), (10, 1), (10, 4), (10, 9), (2, 1)])
def test_windows_score_every_token_but_the_first_once(count, length, context):
    tokens = list(range(100, 100 + count))
    scored = []
    for position, window in enumerate(sliding_windows(tokens, length, context)):
        ids, labels = window["input_ids"].tolist(), window["labels"].tolist()
        start = position * (length - max(1, context))
        assert ids == tokens[start : start + length]
        for place, label in enumerate(labels):
            assert label in (IGNORED_LABEL, ids[place])
            if label != IGNORED_LABEL:
                assert place >= max(1, context) or (start == 0 and place > 0)
                scored.append(label)
    assert scored == tokens[1:]


def test_padding_is_ignored_by_the_loss_or_not(tokenizer):
    batch = tokenize(tokenizer, pad_to_max_length=True)
    assert [len(row) for row in batch["input_ids"]] == [5, 5]
    assert batch["input_ids"][1][3:] == [0, 0]
    assert batch["labels"][1][1:] == [1, -100, -100]
    assert tokenize(tokenizer, pad_to_max_length=True, ignore_pad_token_for_loss=False)["labels"][1][1:] == [1, 0, 0]


def test_the_ignored_label_is_public_and_the_one_that_losses_skip():
    assert "IGNORED_LABEL" in preprocessing.__all__
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_LABEL


def test_an_end_token_that_also_pads_is_still_learnt():
    tokenizer = train_tokenizer(["some words"], 259)
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenize(tokenizer, pad_to_max_length=True)["labels"][1][1:] == [1, -100, -100]


@pytest.mark.parametrize("flag", ["max_source_length", "max_target_length"])
@pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
def test_lengths_are_checked(tokenizer, flag, value):
    with pytest.raises(ValueError, match=rf"{flag} must be a positive integer \(tokens\); got {value}"):
        tokenize(tokenizer, **{flag: value})


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("See Dr. Smith, e.g. Figure 3.5 of it. Done", ["See Dr. Smith, e.g. Figure 3.5 of it.", "Done"]),
        ("J. R. R. Tolkien wrote it. He did.", ["J. R. R. Tolkien wrote it.", "He did."]),
        ('He said "No." She left.\nNew line', ['He said "No."', "She left.", "New line"]),
        ("Use torch.nn.Module or a.b. It works", ["Use torch.nn.Module or a.b.", "It works"]),
        ("今天很好。明天也好！", ["今天很好。", "明天也好！"]),
        ("It was I. Then we left.", ["It was I.", "Then we left."]),
        ("no end", ["no end"]),
        (" \n\n ", []),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_lead_baseline():
    assert lead_baseline(" one two\nthree four ", 3) == "one two three"
    assert lead_baseline("one two", 5) == "one two"
    assert lead_baseline("", 5) == ""
    with pytest.raises(ValueError, match="num_words must be a positive integer; got 0"):
        lead_baseline("one", 0)


def test_random_summaries():
    pool = [str(i) for i in range(20)]
    drawn = random_summaries(pool, 20, seed=1)
    assert drawn == random_summaries(pool, 20, seed=1) != random_summaries(pool, 20, seed=2)
    assert sorted(drawn) == sorted(pool) != drawn
    assert len(random_summaries(pool, 50, seed=1)) == 50
    assert random_summaries([], 0, seed=1) == []
    with pytest.raises(ValueError, match="pool must hold at least one summary; got none"):
        random_summaries([], 1, seed=1)
    with pytest.raises(ValueError, match="count must be zero or more; got -1"):
        random_summaries(pool, -1, seed=1)


def test_plain_baselines_are_as_long_as_the_median_training_summary():
    pool = ["one", "one two three", "one two three four five"]
    made = plain_baselines(["a b c d e", "f g"], pool)
    assert made["lead baseline"] == ["a b c", "f g"]
    assert set(made["random training summary"]) <= set(pool)
    assert made == plain_baselines(["a b c d e", "f g"], pool)
