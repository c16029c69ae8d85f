from hf_hybrid.suggestions import did_you_mean


def test_names_the_closest_option():
    assert did_you_mean("spad", ["spade", "chela"]) == " Did you mean 'spade'?"


def test_says_nothing_when_nothing_is_close():
    assert did_you_mean("zebra", ["spade", "chela"]) == ""
    assert did_you_mean("spade", []) == ""


def test_case_and_dashes_do_not_count():
    assert did_you_mean("SRFORMER-T5", ["srformer_t5", "srformer_bart"]) == " Did you mean 'srformer_t5'?"
