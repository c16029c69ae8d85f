import json
import math
import random
import re

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from sklearn.dummy import DummyClassifier

from hf_hybrid.data.preprocessing import guess_labels, majority_label, unigram_losses
from hf_hybrid.training import clm, summarization
from hf_hybrid.training.flags.command_line import show_command
from hf_hybrid.training.report import run_page
from hf_hybrid.training.report import summarization as report
from hf_hybrid.training.report.curves import Panel, describe, draw_picture, draw_svg, find_panels
from hf_hybrid.training.report.page import Page, Sample, Section, Table, excerpt, format_value, write_page
from tests.training.pages import read_page

HOSTILE = {
    "markup": "</p></script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} &amp; \"a\" 'b'",
    "right to left": "هذا نص عربي with English \u202eand an override without end",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈 " * 20,
    "one word": "x" * 650,
}


def _page(**parts):
    return Page(**{"title": "A run", "summary": "It ran."} | parts)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_any_text_is_shown_as_it_is_everywhere(tmp_path, text):
    table = Table(text, ["", text], [(text, [text, 1])])
    sample = Sample([(text, text), ("blank", " \n"), ("empty", "")], text, True)
    page = _page(
        title=text, summary=text, tiles={text: text}, facts={text: text}, command=[text], notes=[text], code=[text],
        sections=[Section(text, [table], [sample], [text])],
        curves=[Panel("Loss", {"training": [(1, 2.0)]})], measured={text: text}, environment={text: text},
        numbers={text: 1.5},
    )  # fmt: skip
    write_page(page, tmp_path / "report.html")
    content = read_page(tmp_path / "report.html")
    assert content.problems == []
    assert content.headings[0] == text.strip()
    assert content.samples == [{text.strip(): text, "blank": "(blank)", "empty": "(empty)"}]
    assert content.tables[text.strip()][text.strip()] == [text.strip(), "1"]
    assert content.facts[text.strip()] == text.strip()
    assert not list(tmp_path.glob(".*"))


def test_the_reader_of_these_tests_sees_what_is_wrong(tmp_path):
    write_page(_page(curves=[Panel("Loss", {"training": [(1, 2.0)]})]), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    for old, new, complaint in (
        ("</main>", "<div></main>", "closes nothing"),
        ("<main>", "<main><script>x</script>", "<script>"),
        ("<main>", "<main><img src='https://example.org/x.png'>", "is another file"),
        ("<main>", "<main><p id='curve-0-alt'></p>", "twice"),
        ("curve-0-alt", "curve-0-other", "is not there"),
        ("<style>", "<style>body { background: url(x.png) }", "the style loads something"),
    ):
        (tmp_path / "broken.html").write_text(html.replace(old, new, 1), encoding="utf-8")
        assert any(complaint in problem for problem in read_page(tmp_path / "broken.html").problems), complaint


def test_what_no_page_can_hold_is_replaced(tmp_path):
    text = "a\x00b\x1b[31mc\ud800d\u2028e\r\nf\tg"
    write_page(_page(sections=[Section("S", samples=[Sample([("text", text)])])]), tmp_path / "report.html")
    content = read_page(tmp_path / "report.html")
    assert content.problems == []
    assert content.samples == [{"text": "a�b�[31mc�d\ne\nf\tg"}]


def test_a_page_of_nothing_has_no_empty_parts(tmp_path):
    write_page(_page(sections=[Section("Samples")]), tmp_path / "report.html")
    assert read_page(tmp_path / "report.html").headings == ["A run"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(TypeError):
        write_page(_page(facts={"size": object()}), path)
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), ("word", "word"), (True, "yes"), (0, "0"), (1234567, "1,234,567"), (0.0, "0"),
        (37.12345, "37.12"), (0.123456, "0.1235"), (-2.5, "-2.500"), (12345.678, "12,346"), (1e-7, "1e-07"),
        (9.99996, "10.000"), (math.nan, "undefined"), (math.inf, "inf"), (5e-5, "5e-05"),
    ],
)  # fmt: skip
def test_values_are_written_for_people(value, text):
    assert format_value(value) == text


def test_a_long_text_says_how_long_it_is():
    assert excerpt("short") == "short"
    assert excerpt("a\r\n" * 5) == "a\n" * 5
    assert excerpt("\n".join("abcdefghijklmnop")) == "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl … (31 characters in all)"
    assert excerpt("ab " * 500, 10) == "ab ab ab a … (1,500 characters in all)"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--a", "b c", "--d=e'f"], """--a 'b c' '--d=e'"'"'f'"""),
        (["--token", "SECRET", "--hub_token=SECRET", "--seed", "1"], "--token ... --hub_token=... --seed 1"),
        (["--hub-token", "SECRET", "--use_auth_token", "SECRET"], "--hub-token ... --use_auth_token ..."),
        (["--push_to_hub_token=SECRET", "--push_to_hub"], "--push_to_hub_token=... --push_to_hub"),
        (["--use_auth_token", "--seed", "1"], "--use_auth_token --seed 1"),
        (["--train_file", "https://me:SECRET@host/x"], "--train_file https://...@host/x"),
        (["--model_name_or_path", "hf_SECRETSECRET"], "--model_name_or_path ..."),
        (["--tokenizer_name", "mine"], "--tokenizer_name mine"),
    ],
)  # fmt: skip
def test_the_command_is_shown_without_its_secrets(argv, shown):
    assert " ".join(show_command("run.py", argv)) == f"python run.py {shown}"
    assert "SECRET" not in shown


# ---- curves ----


def test_curves_are_found_in_the_log():
    history = [
        {"step": 1, "loss": 3.0, "learning_rate": 0.1},
        {"step": 2, "loss": math.nan, "learning_rate": 0.2},
        {"step": 2, "eval_loss": 2.0, "eval_accuracy": 0.5},
        {"step": 2, "eval_loss": 9.0},  # a second validation split
        {"step": 2, "train_runtime": 1.0},
    ]
    wanted = {"Loss": {"loss": "training", "eval_loss": "validation"}, "Norm": {"grad_norm": "norm"}}
    panels = find_panels(history, wanted)
    assert panels == [Panel("Loss", {"training": [(1, 3.0)], "validation": [(2, 2.0)]}, left_out=1)]
    assert describe(panels[0]) == "Loss: training 3 at step 1; validation 2 at step 2."
    assert find_panels([], wanted) == []


def test_many_points_make_a_small_drawing_within_the_bounds_of_the_curve(tmp_path):
    rng = random.Random(0)
    panel = Panel("Loss", {"training": [(step, rng.random()) for step in range(50_000)]})
    svg = draw_svg(panel, "x")
    assert len(svg) < 100_000
    assert svg == draw_svg(panel, "x")
    draw_picture([panel] * 3, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_drawings_take_their_colours_from_the_page():
    svg = draw_svg(Panel("Loss", {"a": [(1, 2.0), (2, 1.0)], "b": [(1, 1.0)]}), "x")
    assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    assert set(re.findall(r"currentColor|var\([\w-]+\)", svg)) == {
        "currentColor", "var(--series-1)", "var(--series-2)", "var(--line)"
    }  # fmt: skip
    assert "http" not in svg


# ---- baselines ----


def test_label_baselines_are_those_of_another_library():
    rng = random.Random(0)
    known = [rng.choice([0, 1, 1, 1, 2]) for _ in range(500)]
    truth = np.array([rng.choice([0, 1, 2]) for _ in range(4000)])
    majority = DummyClassifier(strategy="most_frequent").fit([[0]] * 500, known).predict([[0]])
    assert majority_label(known) == majority[0] == 1
    drawn = guess_labels(known, len(truth), 3)
    assert np.array_equal(drawn, guess_labels(known, len(truth), 3))
    assert not np.array_equal(drawn, guess_labels(known, len(truth), 4))
    shares, expected = (np.bincount(labels, minlength=3) / len(labels) for labels in (drawn, known))
    deviation = np.sqrt(expected * (1 - expected) / len(truth))
    assert (np.abs(shares - expected) < 5 * deviation).all()


def test_unigram_losses_are_a_distribution():
    losses = unigram_losses([1, 1, 1, 3], 5)
    assert losses == pytest.approx([-math.log(count / 9) for count in (1, 4, 1, 2, 1)])
    assert np.exp(-losses).sum() == pytest.approx(1)


# ---- around a run ----


@pytest.fixture
def tiny_run(arguments, tmp_path):
    argv = arguments("spade", tmp_path / "out", "--do_train", "--max_steps", "1", "--save_strategy", "no")
    return lambda *more: summarization.main([*argv, "--report", "true", *more])


def test_a_report_that_cannot_be_drawn_costs_the_report_alone(tiny_run, arguments, tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(run_page, "write_page", fail)
    metrics = tiny_run()
    folder = tmp_path / "out"
    assert json.loads((folder / "all_results.json").read_text(encoding="utf-8"))["train_loss"] == metrics["train_loss"]
    assert (folder / "README.md").exists()
    assert f"{folder / 'report.html'} is left out. OSError: the disk is full" in caplog.text
    (folder / "report.html").write_text("another run's", encoding="utf-8")
    argv = [*arguments("spade", folder, "--do_eval", "--report", "true")[4:], "--model_name_or_path", str(folder)]
    summarization.main([*argv, "--overwrite_output_dir"])
    assert not (folder / "report.html").exists()  # none at all rather than an older one


def test_a_part_that_fails_is_named_and_the_others_are_there(tiny_run, tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no samples today")

    monkeypatch.setattr(report, "_samples", fail)
    monkeypatch.setattr(run_page, "draw_picture", fail)
    tiny_run()
    assert "the part 'samples' is left out. RuntimeError: no samples today" in caplog.text
    assert "curves.png is left out" in caplog.text
    content = read_page(tmp_path / "out" / "report.html")
    assert content.problems == []
    assert "samples: making this part failed; the log says why." in content.text
    assert "Curves" in content.headings


def test_no_report_is_written_where_none_is_wanted(tiny_run, tmp_path):
    tiny_run("--report", "false")
    assert not (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out" / "curves.png").exists()


def test_a_run_that_only_evaluates_leaves_the_report_of_the_training_alone(tiny_run, arguments, tmp_path):
    tiny_run()
    folder = tmp_path / "out"
    trained = (folder / "report.html").read_bytes()
    argv = [*arguments("spade", folder, "--do_eval", "--report", "true")[4:], "--model_name_or_path", str(folder)]
    summarization.main(argv)
    assert (folder / "report.html").read_bytes() == trained
    page = read_page(folder / "report-2.html")
    assert page.problems == []
    assert "No summaries were generated (--predict_with_generate)" in page.text
    summarization.main([*argv, "--overwrite_output_dir"])
    assert "Nothing was trained in this run" in read_page(folder / "report.html").text
    tiny_run("--overwrite_output_dir", "--report", "false")
    assert not list(folder.glob("report*"))  # they were of other weights


def test_an_adapter_is_named_and_generates(tmp_path, monkeypatch):
    """A model that is wrapped before it is trained: its own class and parameters are shown, and its samples."""
    load_model = clm.load_model

    def load_adapted(*args, **kwargs):
        model = load_model(*args, **kwargs)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))

    monkeypatch.setattr(clm, "load_model", load_adapted)
    path = tmp_path / "text.txt"
    path.write_text("the river and the stone " * 40, encoding="utf-8")
    clm.main(
        [
            "--model_type", "gpt2", "--config_overrides", "n_embd=32,n_layer=1,n_head=4", "--tokenizer_type", "bytes",
            "--train_file", str(path), "--validation_file", str(path), "--block_size", "32", "--do_train", "--do_eval",
            "--max_steps", "1", "--cache_dir", str(tmp_path / "cache"), "--use_cpu", "--disable_tqdm", "true",
            "--output_dir", str(tmp_path / "out"),
        ]
    )  # fmt: skip
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    assert (page.facts["model class"], page.facts["adapter"]) == ("GPT2LMHeadModel", "LORA")
    assert 0 < int(page.facts["trained parameters"]) < int(page.facts["parameters"]) / 4
    assert len(page.samples) == 3
