import random

import pytest
from transformers import AutoTokenizer

from hf_hybrid.data.preprocessing import tokenize_texts
from hf_hybrid.data.tokenizer import MIN_VOCAB_SIZE, byte_tokenizer, leave_texts_open, train_tokenizer

TEXTS = [
    f"The {a} of the {b} is read, written and closed again.\n" for a in ("file", "stream") for b in ("disk", "net")
]
HARD = [
    "plain words",
    "  two  spaces\n\n\tand a tab \n",
    "spaces before . and 's , ?",
    "日本語 émoji 😀 \x00 \u200b",
    "a literal </s> and <pad><unk>",
    "12345 and 0x7f",
    "",
]


MARKED = [
    "Don't set MatrixSolve.focal_length (as GPUs do) 'quoted', 2D",
    "\u2040 marks \u21e7 a of\u2040 the\u21e7\u2060\u2040\u2060 text\u2060",
    "\u21e7 a\u21e7A\u2040 a",
    "Ärger\nÉtat, ÎleÎle; x\tTab",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def marked():
    return train_tokenizer([*TEXTS, *MARKED] * 9, 400, tokenizer_type="marked")


def test_special_ids_and_the_appended_end(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 300
    for text in HARD:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == 1
        assert ids.count(1) == 1
        assert not {0, 2} & set(ids)
    assert tokenizer("the file", max_length=3, truncation=True)["input_ids"][-1] == 1
    assert list(tokenizer("the")) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("text", HARD)
def test_bytes_are_tokens(text, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 259
    for either in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = either(text)["input_ids"]
        assert len(ids) == len(text.encode()) + 1
        assert ids[-1] == 1
        assert min(ids[:-1], default=3) >= 3
        assert either.decode(ids, skip_special_tokens=True) == text


def test_words_are_tokens_by_frequency(tmp_path):
    texts = ["b a c b", "b <unk>\n\ta b </s>"]
    tokenizer = train_tokenizer(iter(texts), 259, tokenizer_type="words")
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == ["<pad>", "</s>", "<unk>", "b", "a", "c"]
    for either in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert either("a  <unk> d b\n")["input_ids"] == [4, 2, 2, 3, 1]
    two, seen = (
        train_tokenizer(iter(texts), 259, tokenizer_type="words", cache_dir=str(tmp_path), fingerprint="x"),
        [],
    )
    again = train_tokenizer(iter(seen), 259, tokenizer_type="words", cache_dir=str(tmp_path), fingerprint="x")
    assert again.get_vocab() == two.get_vocab() == tokenizer.get_vocab()
    other = train_tokenizer(iter(texts), 259, cache_dir=str(tmp_path), fingerprint="x")  # of the same texts
    assert other.get_vocab() != two.get_vocab()
    with pytest.raises(ValueError, match="tokenizer_type must be bpe, marked or words for training; got 'bytes'"):
        train_tokenizer(texts, 259, tokenizer_type="bytes")


@pytest.mark.parametrize("text", HARD)
def test_text_comes_back_exactly(tokenizer, text, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for either in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert either.decode(either(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [*HARD, *MARKED])
def test_marked_text_comes_back_exactly(marked, text, tmp_path):
    marked.save_pretrained(tmp_path)
    for either in (marked, AutoTokenizer.from_pretrained(tmp_path)):
        ids = either(text)["input_ids"]
        assert ids[-1] == 1
        assert ids.count(1) == 1
        assert either.decode(ids, skip_special_tokens=True) == text


def test_marked_text_comes_back_exactly_whatever_it_is(marked):
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("aAbB.x_'\n \t9\u00e9\u4e2d\u2040\u21e7\u2060", k=rng.randrange(12)))
        assert marked.decode(marked(text)["input_ids"], skip_special_tokens=True) == text


def test_marked_words_are_spelt_alike_wherever_they_stand(marked, tokenizer):
    places = ["the file", "file", "File", "(file)", "the_file", "theFile", "the\nfile", "a.file"]

    def spelt(tokenizer):
        ids = tokenizer("of file", add_special_tokens=False)["input_ids"]
        word = ids[len(tokenizer("of", add_special_tokens=False)["input_ids"]) :]
        return [word == [number for number in tokenizer(place)["input_ids"] if number in word] for place in places]

    assert all(spelt(marked))
    assert not all(spelt(tokenizer))


def test_offsets_of_marked_tokens_lie_in_the_text(marked):
    text = "Set theFile.name of_it"
    spans = marked(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    assert spans == sorted(spans)  # a mark has the letter behind it
    covered = {place for start, end in spans for place in range(start, end)}
    assert covered >= {place for place, letter in enumerate(text) if letter != " "}
    assert max(end for _, end in spans) == len(text)


def test_a_folder_reads_back_as_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(HARD)["input_ids"] == tokenizer(HARD)["input_ids"]


def test_training_is_deterministic_and_merges_what_is_frequent(tokenizer):
    again = train_tokenizer(iter(TEXTS), 300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer(" the")["input_ids"]) == 2


def test_a_fingerprint_keeps_the_tokenizer(tmp_path, tokenizer):
    def unread():
        raise AssertionError("texts must not be read again")
        yield ""

    first = train_tokenizer(TEXTS, 300, cache_dir=str(tmp_path), fingerprint="one")
    second = train_tokenizer(unread(), 300, cache_dir=str(tmp_path), fingerprint="one")
    assert first.get_vocab() == second.get_vocab() == tokenizer.get_vocab()
    assert second(HARD)["input_ids"] == tokenizer(HARD)["input_ids"]
    with pytest.raises(AssertionError, match="must not be read"):
        train_tokenizer(unread(), 300, cache_dir=str(tmp_path), fingerprint="two")
    with pytest.raises(AssertionError, match="must not be read"):
        train_tokenizer(unread(), 301, cache_dir=str(tmp_path), fingerprint="one")


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE - 1, 0, -5, 300.0, True])
def test_vocab_size_is_checked(vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size must be an integer of at least {MIN_VOCAB_SIZE} .*; got"):
        train_tokenizer(TEXTS, vocab_size)


def test_the_smallest_vocabulary_spells_bytes():
    tokenizer = train_tokenizer(TEXTS, MIN_VOCAB_SIZE)
    assert len(tokenizer) == MIN_VOCAB_SIZE
    assert len(tokenizer("é!")["input_ids"]) == 4


def test_few_texts_do_not_fill_a_large_vocabulary(caplog):
    tokenizer = train_tokenizer(["a b"], 1000)
    assert len(tokenizer) < 1000
    assert "of vocab_size=1000 entries" in caplog.text


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_texts_are_needed(texts):
    with pytest.raises(ValueError, match="texts must hold at least one text that is not empty; got none"):
        train_tokenizer(texts, 300)


def test_an_open_tokenizer_leaves_prompts_open_and_documents_apart(tmp_path):
    leave_texts_open(byte_tokenizer()).save_pretrained(tmp_path)
    tokenizer, ending = AutoTokenizer.from_pretrained(tmp_path), byte_tokenizer()
    for texts in (["a prompt"], ["", "two texts", "</s>"]):
        assert tokenizer(texts)["input_ids"] == ending(texts, add_special_tokens=False)["input_ids"]
        documents = tokenize_texts({"text": texts}, tokenizer, column="text")["input_ids"]
        assert [row.tolist() for row in documents] == ending(texts)["input_ids"]
        lines = tokenize_texts({"text": texts}, tokenizer, column="text", are_lines=True)["input_ids"]
        assert [row.tolist() for row in lines] == tokenizer(texts)["input_ids"]
