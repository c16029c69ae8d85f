import dataclasses
import json

import pytest

from hf_hybrid.training import demo
from tests.training.conftest import MODELS
from tests.training.pages import read_page


@pytest.fixture(scope="module")
def micro(data):
    """A recipe of three steps on small files instead of the embedded corpus."""
    flags = {
        "train_file": data["train"],
        "validation_file": data["validation"],
        "test_file": data["test"],
        "cache_dir": data["cache"],
        "tokenizer_type": "marked",
        "tokenizer_vocab_size": 300,
        "max_source_length": 48,
        "max_target_length": 8,
        "max_predict_samples": 5,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    model = dict(pair.split("=") for pair in MODELS["spade"].split(","))
    return demo.Recipe(
        model_type="spade",
        model={name: int(value) for name, value in model.items()},
        flags=flags,
        training={"max_steps": 3, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4},
    )


def test_the_demo_writes_its_report_and_fails_a_model_that_has_learnt_nothing(micro, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SHORT", micro)
    folder = tmp_path / "demo"
    assert demo.main(["--output_dir", str(folder)]) == 1
    results = json.loads((folder / "demo_results.json").read_text(encoding="utf-8"))
    assert results["passed"] is False
    assert list(results["table"]) == ["untrained model", "random training summary", "lead baseline", "trained model"]
    for name, row in results["table"].items():
        assert 0 <= row["rouge1"] <= 100
        assert (row["validation_loss"] is None) == (name in ("random training summary", "lead baseline"))
    for name in ("trained", "untrained"):
        metrics = json.loads((folder / name / "all_results.json").read_text(encoding="utf-8"))
        assert results["table"][f"{name} model"]["validation_loss"] == metrics["eval_loss"]
        assert ("train_loss" in metrics) == (name == "trained")
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


def test_an_interrupted_demo_goes_on_when_it_is_started_again(micro, tmp_path, monkeypatch):
    trained = []

    def interrupted(argv):
        metrics = summarization_main([*argv, "--max_steps=2"])
        trained.append(metrics)
        raise KeyboardInterrupt

    summarization_main = demo.summarization.main
    with monkeypatch.context() as patch:
        patch.setattr(demo.summarization, "main", interrupted)
        with pytest.raises(KeyboardInterrupt, match="start the demo again to continue from its last checkpoint"):
            demo.run_demo(micro, tmp_path)
    (tmp_path / ".DS_Store").touch()
    resumed = []
    monkeypatch.setattr(
        demo.summarization,
        "main",
        lambda argv: resumed.append("--resume_from_checkpoint=auto" in argv) or summarization_main(argv),
    )
    assert demo.run_demo(micro, tmp_path)["training_seconds"] is None
    assert "Trained in" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    history = json.loads((tmp_path / "trained" / "trainer_state.json").read_text(encoding="utf-8"))
    assert resumed == [True, False]
    assert history["global_step"] == 3
    assert demo.run_demo(micro, tmp_path)["training_seconds"] > 0  # a finished one is replaced
    assert resumed[2:] == [False, False]


@pytest.mark.parametrize("recipe", [demo.SHORT, demo.LONG], ids=["short", "long"])
def test_recipes_are_command_lines_that_are_understood(recipe, tmp_path):
    groups = (demo.ModelArguments, demo.SummarizationArguments, demo.SummarizationTrainingArguments)
    model_args, data_args, training_args = demo.parse_arguments(groups, demo._argv(recipe, tmp_path))
    assert data_args.dataset_name == "embedded:docstrings"
    assert training_args.do_train
    assert training_args.max_steps == recipe.training["max_steps"]
    config = summarization_config(model_args)
    for name, value in recipe.model.items():
        assert getattr(config, name) == value


def summarization_config(model_args):
    from transformers import AutoModelForSeq2SeqLM

    from hf_hybrid.training.model.config import load_config

    return load_config(model_args, AutoModelForSeq2SeqLM)


REFERENCES = ["sort the list", "open a file", "add two numbers", "close the window"]


def _table(trained, untrained=1.0, chance=5.0):
    def row(score):
        return dict.fromkeys(demo.SCORES, score)

    return {demo.TRAINED: row(trained), demo.UNTRAINED: row(untrained), demo.RANDOM: row(chance)}


def test_a_model_that_summarizes_passes_the_checks():
    assert all(demo.check_learning(_table(100.0), REFERENCES, REFERENCES).values())


@pytest.mark.parametrize(
    ("table", "predictions", "failing"),
    [
        (_table(50.0, chance=60.0), REFERENCES, [1]),
        (_table(50.0, untrained=60.0), REFERENCES, [0]),
        (_table(5.5, untrained=5.0, chance=1.0), ["x", "y", "z", "w"], [0]),  # more, but not clearly
        (_table(5.5, untrained=1.0, chance=5.0), ["x", "y", "z", "w"], [1]),
        (_table(0.0, untrained=0.0, chance=-1.0), ["x", "y", "z", "w"], [0, 3]),  # a multiple of nothing is no more
        (_table(50.0), ["return the value"] * 4, [2]),
        (_table(0.0, untrained=-1.0, chance=-1.0), ["x", "y", "z", "w"], [3]),
    ],
)
def test_each_check_can_fail(table, predictions, failing):
    checks = list(demo.check_learning(table, predictions, REFERENCES).values())
    assert [index for index, holds in enumerate(checks) if not holds] == failing


def test_shuffled_references_must_cost_more_than_the_margin(monkeypatch):
    monkeypatch.setattr(demo, "rouge_scores", lambda *texts: dict.fromkeys(demo.SCORES, 5.0))
    for score, expected in ((5.5, False), (demo.MARGIN * 5.0, True)):
        checks = demo.check_learning(_table(score, chance=1.0), REFERENCES, REFERENCES)
        assert list(checks.values()) == [True, True, True, expected]
        assert sum(f"at least {demo.MARGIN} times" in sentence for sentence in checks) == 3


def test_a_demo_of_another_size_is_not_resumed(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SHORT", micro)
    monkeypatch.setattr(demo, "LONG", dataclasses.replace(micro, model=micro.model | {"hidden_size": 64}))
    demo.main(["--output_dir", str(tmp_path / "demo")])
    (tmp_path / "demo" / "demo_results.json").unlink()  # as if it had been interrupted
    with pytest.raises(ValueError, match="hidden_size is 32 there and 64 in this run"):
        demo.main(["--long", "--output_dir", str(tmp_path / "demo")])


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
