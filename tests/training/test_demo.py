import dataclasses
import json
import re
from pathlib import Path

import pytest

from hf_hybrid import SpadeConfig, SpadeForConditionalGeneration, starter
from hf_hybrid.data.tokenizer import train_tokenizer
from hf_hybrid.training import demo
from hf_hybrid.training.model.tokenizer import fit_config_to_tokenizer
from tests.matrix import some
from tests.training.conftest import MODELS
from tests.training.pages import read_page


@pytest.fixture(scope="module")
def micro(data, tmp_path_factory):
    """A recipe of three steps on small files and a small checkpoint, instead of the embedded corpus and a starter."""
    start = tmp_path_factory.mktemp("start")
    texts = [json.loads(line)["document"] for line in Path(data["train"]).read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer(texts, 300, tokenizer_type="marked")
    fields = {name: int(value) for name, value in (pair.split("=") for pair in MODELS["spade"].split(","))}
    config = SpadeConfig(**fields)
    fit_config_to_tokenizer(config, tokenizer)
    SpadeForConditionalGeneration(config).save_pretrained(start)
    tokenizer.save_pretrained(start)
    flags = {
        "train_file": str(data["train"]),
        "validation_file": str(data["validation"]),
        "test_file": str(data["test"]),
        "cache_dir": str(data["cache"]),
        "max_source_length": 48,
        "max_target_length": 8,
        "max_predict_samples": 5,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    training = {"max_steps": 3, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
    return demo.Recipe(start=str(start), flags=flags, training=training, scratch={"learning_rate": 1e-2})


def test_the_demo_writes_its_report_and_fails_a_model_that_has_learnt_nothing(micro, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SHORT", micro)
    folder = tmp_path / "demo"
    assert demo.main(["--output_dir", str(folder)]) == 1
    results = json.loads((folder / "demo_results.json").read_text(encoding="utf-8"))
    assert results["passed"] is False
    assert list(results["table"]) == [demo.UNTRAINED, demo.RANDOM, demo.LEAD, demo.SCRATCH, demo.TRAINED]
    for name, row in results["table"].items():
        assert 0 <= row["rouge1"] <= 100
        assert (row["validation_loss"] is None) == (name in (demo.RANDOM, demo.LEAD))
    for row, name in ((demo.TRAINED, "trained"), (demo.SCRATCH, "scratch"), (demo.UNTRAINED, "untrained")):
        metrics = json.loads((folder / name / "all_results.json").read_text(encoding="utf-8"))
        assert results["table"][row]["validation_loss"] == metrics["eval_loss"]
        assert ("train_loss" in metrics) == (name != "untrained")
    cards = {name: (folder / name / "README.md").read_text(encoding="utf-8") for name in ("trained", "scratch")}
    assert [name for name, card in cards.items() if "trained from scratch" in card] == ["scratch"]
    rates = {
        name: json.loads((folder / name / "trainer_state.json").read_text(encoding="utf-8"))["log_history"][0]
        for name in ("trained", "scratch")
    }
    assert rates["scratch"]["learning_rate"] == pytest.approx(200 * rates["trained"]["learning_rate"])
    assert results["test_documents"] == 5
    assert len(results["samples"]) == 5
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert report in capsys.readouterr().out
    assert f'AutoModelForSeq2SeqLM.from_pretrained("{(folder / "trained").as_posix()}")' in report
    assert "THE MODEL HAS NOT LEARNT ENOUGH" in report
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = read_page(folder / "report.html")
    assert page.problems == []
    table = page.tables["ROUGE on 5 held-out test documents, in percent"]
    for name, row in results["table"].items():
        scores = [row[key] for key in demo.SCORES]
        assert [float(value) for value in table[name][:3]] == scores
    assert [sample["summary"].replace("(empty)", "") for sample in page.samples] == [
        sample["summary"] for sample in results["samples"]
    ]
    assert "It has not learnt enough." in page.text
    assert not (folder / "untrained" / "report.html").exists()
    assert demo.main(["--output_dir", str(folder)]) == 1  # again, over its own folder
    again = json.loads((folder / "demo_results.json").read_text(encoding="utf-8"))
    assert again["table"] == results["table"]


def test_the_demo_leaves_other_folders_alone(micro, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"thesis\.tex, which no demo wrote"):
        demo.run_demo(micro, tmp_path)


def test_the_long_recipe_is_chosen(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(
        demo, "run_demo", lambda recipe, folder: ran.append((recipe, folder.as_posix())) or {"passed": True}
    )
    assert demo.main(["--long"]) == 0
    assert demo.main([]) == 0
    assert demo.main(["--output_dir", "elsewhere"]) == 0
    assert ran == [(demo.LONG, "runs/demo-long"), (demo.SHORT, "runs/demo"), (demo.SHORT, "elsewhere")]


@pytest.mark.parametrize("after", some([0, 1], 1))
def test_an_interrupted_demo_goes_on_when_it_is_started_again(micro, tmp_path, monkeypatch, after):
    """It is interrupted in its first training, then in its second."""
    calls, summarization_main = [], demo.summarization.main

    def interrupted(argv):
        calls.append(argv)
        if len(calls) <= after:
            return summarization_main(argv)
        summarization_main([*argv, "--max_steps=2"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo.summarization, "main", interrupted)
        with pytest.raises(KeyboardInterrupt, match="start the demo again to continue from its last checkpoint"):
            demo.run_demo(micro, tmp_path)
    (tmp_path / ".DS_Store").touch()
    resumed = []

    def noted(argv):
        resumed.append("--resume_from_checkpoint=auto" in argv)
        return summarization_main(argv)

    monkeypatch.setattr(demo.summarization, "main", noted)
    results = demo.run_demo(micro, tmp_path)
    assert results["training_seconds"][demo.TRAINED] is None
    assert (results["training_seconds"][demo.SCRATCH] is None) == bool(after)
    assert "Training took" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert resumed == [True, bool(after), False]
    for name in ("trained", "scratch"):
        history = json.loads((tmp_path / name / "trainer_state.json").read_text(encoding="utf-8"))
        assert history["global_step"] == 3
    again = demo.run_demo(micro, tmp_path)  # a finished one is replaced
    assert min(again["training_seconds"].values()) > 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert re.search(r"Training took 0\.\d minutes \(trained starter\) and", report)
    assert resumed[3:] == [False, False, False]


@pytest.mark.parametrize("recipe", [demo.SHORT, demo.LONG], ids=["short", "long"])
def test_recipes_are_command_lines_that_are_understood(recipe, tmp_path):
    groups = (demo.ModelArguments, demo.SummarizationArguments, demo.SummarizationTrainingArguments)
    model_args, data_args, training_args = demo.parse_arguments(groups, demo._argv(recipe, tmp_path, demo.TRAINED))
    assert data_args.dataset_name == "embedded:docstrings"
    assert training_args.do_train
    assert training_args.max_steps == recipe.training["max_steps"]
    assert model_args.model_name_or_path == str(starter(recipe.start))
    model_args, _, training_args = demo.parse_arguments(groups, demo._argv(recipe, tmp_path, demo.SCRATCH))
    assert (model_args.is_new, model_args.config_name) == (True, str(starter(recipe.start)))
    assert (training_args.max_steps, training_args.learning_rate) == (recipe.training["max_steps"], 2e-3)


REFERENCES = ["sort the list", "open a file", "add two numbers", "close the window"]


def _table(trained, untrained=1.0, chance=5.0, lead=0.0, scratch=0.0):
    def row(score):
        return dict.fromkeys(demo.SCORES, score)

    scores = {demo.TRAINED: trained, demo.UNTRAINED: untrained, demo.RANDOM: chance}
    return {name: row(score) for name, score in (scores | {demo.LEAD: lead, demo.SCRATCH: scratch}).items()}


def test_a_model_that_summarizes_passes_the_checks():
    assert all(demo.check_learning(_table(100.0), REFERENCES, REFERENCES).values())


@pytest.mark.parametrize(
    ("table", "predictions", "failing"),
    [
        (_table(50.0, chance=60.0), REFERENCES, [1]),
        (_table(50.0, untrained=60.0), REFERENCES, [0]),
        (_table(5.5, untrained=5.0, chance=1.0), ["x", "y", "z", "w"], [0]),  # more, but not clearly
        (_table(5.5, untrained=1.0, chance=5.0), ["x", "y", "z", "w"], [1]),
        (
            _table(0.0, untrained=0.0, chance=-1.0, lead=-1.0, scratch=-1.0),
            ["x", "y", "z", "w"],
            [0, 5],
        ),  # a multiple of nothing is no more
        (_table(50.0, lead=50.0), REFERENCES, [2]),
        (_table(50.0, scratch=50.1), REFERENCES, [3]),
        (_table(50.0), ["return the value"] * 4, [4]),
        (_table(0.0, untrained=-1.0, chance=-1.0, lead=-1.0, scratch=-1.0), ["x", "y", "z", "w"], [5]),
    ],
)
def test_each_check_can_fail(table, predictions, failing):
    checks = list(demo.check_learning(table, predictions, REFERENCES).values())
    assert [index for index, holds in enumerate(checks) if not holds] == failing


def test_shuffled_references_must_cost_more_than_the_margin(monkeypatch):
    monkeypatch.setattr(demo, "rouge_scores", lambda *texts: dict.fromkeys(demo.SCORES, 5.0))
    for score, expected in ((5.5, False), (demo.MARGIN * 5.0, True)):
        checks = demo.check_learning(_table(score, chance=1.0), REFERENCES, REFERENCES)
        assert list(checks.values()) == [True, True, True, True, True, expected]
        assert sum(f"at least {demo.MARGIN} times" in sentence for sentence in checks) == 3


def test_a_demo_of_another_recipe_is_not_resumed(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SHORT", micro)
    monkeypatch.setattr(demo, "LONG", dataclasses.replace(micro, training=micro.training | {"max_steps": 4}))
    demo.main(["--output_dir", str(tmp_path / "demo")])
    (tmp_path / "demo" / "demo_results.json").unlink()  # as if it had been interrupted
    with pytest.raises(ValueError, match="holds an interrupted demo of another recipe; delete the folder"):
        demo.main(["--long", "--output_dir", str(tmp_path / "demo")])


@pytest.mark.full
def test_pictures_that_cannot_be_drawn_cost_nothing_else(micro, tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("no ink")

    monkeypatch.setattr(demo, "draw_picture", fail)
    monkeypatch.setattr(demo, "write_page", fail)
    assert demo.run_demo(micro, tmp_path)["passed"] is False
    assert "curves.png is left out. OSError: no ink" in caplog.text
    assert "report.html is left out. OSError: no ink" in caplog.text
    assert "curves.png" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "demo_results.json").exists()
