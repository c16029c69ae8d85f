"""The order of the benchmark of recall: rates are searched by the first seed, and published tasks wait for a model."""

from functools import partial

import pytest

from benchmarks.recall_models import MODELS
from benchmarks.recall_order import SLOWER, best_row, is_unlearnt, kept, todo
from benchmarks.recall_run import RECIPES, STATE_TASKS
from tests.recall_rows import row

RATES = ["0.003", "0.001"]


def missing(rows, **more):
    given = {"tasks": ["latch"], "models": ["BST", "T5"], "rates": RATES, "seeds": [4, 5], **more}
    return [(run.model, run.seed, run.rate) for run in todo(rows, *given.values())]


def solved(step, rate, **more):
    return row(rate=rate, solved_step=step, trained_steps="30", validation_accuracy="0.99", **more)


# ---- the best rate ----


def test_the_best_rate_solves_the_task_about_first_or_comes_nearest():
    slow, fast = solved("15", "0.001"), solved("9", "0.003")  # numbers, not words
    assert best_row([slow, fast]) == fast
    nearly, much_slower = solved("13", "0.001"), solved("14", "0.0005")
    assert best_row([fast, nearly, much_slower]) == nearly  # the lowest within 1.5 times the fewest steps
    near, far = (row(validation_accuracy=share, validation_loss="0.1") for share in ("0.9", "0.3"))
    assert best_row([near, slow, far]) == slow
    assert best_row([far, near]) == near
    assert best_row([near, {**near, "validation_loss": "0.05"}])["validation_loss"] == "0.05"
    lucky, taught = row(validation_accuracy="0.115"), row(validation_accuracy="0.1", validation_loss="0.4")
    assert best_row([lucky, taught]) == taught  # both guess, at 0.1
    told = {**lucky, "without_keys": "0.3", "validation_accuracy": "0.125"}  # one of the values told is no guess
    assert best_row([told, {**taught, "without_keys": "0.3"}]) == told
    gone = row(outcome="diverged", validation_loss="", validation_accuracy="")
    overtaken = row(outcome=SLOWER, validation_accuracy="0.98", accuracy="")
    assert best_row([gone, overtaken, far]) == far
    assert best_row([gone]) is None


def test_the_first_seed_searches_and_the_others_take_its_best_rate():
    search = [("BST", 4, "0.003"), ("BST", 4, "0.001")]
    assert missing([]) == search  # T5 reads documents
    rows = [solved("15", "0.001", seed="4")]
    assert missing(rows) == search[:1]
    rows.append(solved("9", "0.003", seed="4"))
    assert missing(rows) == [("BST", 5, "0.003")]
    rows.append(row(seed="5", rate="0.003"))
    assert missing(rows) == []
    assert [(found["seed"], found["learning_rate"]) for found in kept(rows, "latch", "BST")] == [
        ("4", "0.003"),
        ("5", "0.003"),
    ]
    assert kept(rows, "latch", "Llama") == []


def test_rates_that_diverge_are_not_chosen():
    gone = [row(seed="4", rate=rate, outcome="diverged", accuracy="", validation_loss="") for rate in RATES]
    assert missing([gone[0], row(seed="4")]) == [("BST", 5, "0.001")]
    assert missing(gone) == []
    assert [found["learning_rate"] for found in kept(gone, "latch", "BST")] == ["0.003"]


def test_a_rate_runs_no_longer_than_the_one_that_has_solved_the_task():
    def overtaken(rows):
        return {run.rate: run.overtaken for run in todo(rows, ["latch"], ["BST"], [*RATES, "0.01"], [4])}

    assert overtaken([]) == {"0.003": None, "0.001": None, "0.01": None}
    rows = [row(rate="0.003", seed="4")]
    assert overtaken(rows) == {"0.001": None, "0.01": None}
    rows.append(solved("15", "0.001", seed="4"))
    assert overtaken(rows) == {"0.01": 22}  # 1.5 times as many
    assert [run.overtaken for run in todo([*rows, row(rate="0.01", seed="4")], ["latch"], ["BST"], RATES, [4, 5])] == [
        None
    ]  # another seed is not cut


def test_every_model_has_its_first_rate_before_any_has_its_second():
    assert missing([], models=["SPADE", "BST"]) == [
        ("SPADE", 4, "0.003"),
        ("BST", 4, "0.003"),
        ("SPADE", 4, "0.001"),
        ("BST", 4, "0.001"),
    ]


# ---- models that follow others ----


def test_an_ablation_is_searched_as_its_model_and_waits_for_nothing():
    ask = partial(missing, models=["BST, windows alone"])
    search = [("BST, windows alone", 4, rate) for rate in RATES]
    assert ask([]) == search
    assert ask([solved("15", "0.001", seed="4")]) == search
    rows = [
        row(model=name, seed="4", rate=rate, validation_loss=loss)
        for (name, _, rate), loss in zip(search, "12", strict=True)
    ]
    assert ask(rows) == [("BST, windows alone", 5, "0.003")]


def test_another_size_of_the_state_is_a_model_of_its_own():
    task = STATE_TASKS[0]
    search = [("BST, N 8", 4, rate) for rate in RATES]
    assert missing([], tasks=[task], models=["BST, N 8"]) == search
    rows = [solved("15", "0.001", task=task, model="BST, N 8", seed="4")]
    rows.append(row(task, "BST, N 8", seed="4", rate="0.003", outcome=SLOWER, accuracy=""))
    assert missing(rows, tasks=[task], models=["BST, N 8"]) == [("BST, N 8", 5, "0.001")]


def test_on_a_published_task_it_waits_until_its_model_does_more_than_guess():
    ask = partial(missing, tasks=["mqar"], models=["BST, N 8"])
    assert ask([row("mqar", "SPADE", far="0.9")]) == [("BST", 4, "0.003"), ("BST", 4, "0.001")]
    guessed = [row("mqar", seed="4", rate=rate, far="0.12", without_keys="0.05") for rate in RATES]
    learnt = row("mqar", "SPADE", far="0.9")  # opens the task
    assert ask([*guessed, learnt]) == []
    assert ask([{**guessed[0], "far": "0.13"}, guessed[1], learnt]) == [("BST, N 8", 4, rate) for rate in RATES]


def test_what_says_nothing_about_range_has_one_seed():
    one = [("CHELA, long convolution alone", 4, rate) for rate in RATES]
    assert missing([], tasks=[*RECIPES], models=["CHELA, long convolution alone"]) == one
    done = [row("key_value", name, seed="4", rate=rate) for name, _, rate in one]
    assert missing(done, tasks=["key_value"], models=["CHELA, long convolution alone"]) == []
    rows = [row("memorization", "Llama", seed="4", rate=rate, accuracy="0.9") for rate in RATES]
    assert missing(rows, tasks=["memorization"], models=["Llama", "BST"]) == [("BST", 4, rate) for rate in RATES]


# ---- published tasks ----


def test_a_published_task_has_one_seed_until_a_model_has_learnt_it():
    ask = partial(missing, tasks=["mqar"], models=["BST", "BST, windows alone", "BST, N 8", "Llama"])
    names = ["BST", "BST, windows alone", "Llama"]
    search = [(model, 4, rate) for rate in RATES for model in names]
    assert ask([]) == search
    rows = [row("mqar", model, seed="4", rate=rate, far="0.5") for model, _, rate in search]
    assert {*ask(rows[:2])} == {*search[2:]}
    assert ask(rows) == []
    opened = {*ask([*rows[:-1], {**rows[-1], "far": "0.51"}])}
    assert opened == {(model, 5, "0.003") for model in names} | {("BST, N 8", 4, rate) for rate in RATES}


def test_a_task_is_unlearnt_as_long_as_no_run_has_half_of_the_far_answers():
    rows = [row("mqar", far="0.2"), row("mqar", "Llama", far="0.5")]
    assert is_unlearnt(rows, "mqar")
    assert not is_unlearnt(
        [*rows, row("mqar", "CHELA", far="0.51"), row("mqar", "CHELA", seed="5", far="0.1")], "mqar"
    )
    assert is_unlearnt([row("mqar", outcome="diverged", accuracy="")], "mqar")
    assert not is_unlearnt([row("latch", far="0.1")], "latch")  # an own task


def test_own_tasks_come_first_and_mqar_last():
    tasks = [*RECIPES]
    own = [task for task in tasks if RECIPES[task].is_own]
    assert tasks[: len(own)] == own
    assert tasks[-1] == "mqar"
    assert [run.task for run in todo([], tasks, [*MODELS], RATES, [0])][-1] == "mqar"


@pytest.mark.parametrize("task", [task for task, recipe in RECIPES.items() if recipe.is_own])
def test_every_architecture_has_own_tasks_with_its_ablation(task):
    runs = {run.model for run in todo([], [task], [*MODELS], RATES, [0])}
    of_kind = {"SRformer"} if RECIPES[task].is_encoder_decoder else {"SPADE", "BST", "CHELA"}
    assert of_kind < runs
