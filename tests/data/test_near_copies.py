from hf_hybrid.data.near_copies import NearCopyFilter

TEXT = " ".join(f"word{i}" for i in range(60))


def test_exact_copies_and_shared_keys_are_found():
    copies = NearCopyFilter()
    assert not copies.is_copy("one two", "key")
    assert copies.is_copy("one two")
    assert copies.is_copy("something else entirely here now", "key")
    assert not copies.is_copy("something else entirely here now", "another key")


def test_a_text_with_a_few_changed_words_is_a_copy():
    copies = NearCopyFilter()
    copies.is_copy(TEXT)
    assert copies.is_copy(TEXT.replace("word30", "changed"))
    assert copies.is_copy("prefix " + TEXT + " suffix")


def test_texts_that_share_a_quarter_of_their_words_are_not_copies():
    copies = NearCopyFilter()
    copies.is_copy(TEXT)
    shared = " ".join([*TEXT.split()[:15], *(f"other{i}" for i in range(45))])
    assert not copies.is_copy(shared)


def test_what_was_refused_is_not_remembered():
    copies = NearCopyFilter()
    copies.is_copy("one two", "a")
    assert copies.is_copy("three four five six", "a")
    assert not copies.is_copy("three four five six", "b")
