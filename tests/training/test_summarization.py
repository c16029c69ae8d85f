import json
import math

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PegasusConfig

from hf_hybrid.training import splits, summarization
from hf_hybrid.training.flags.overrides import parse_config_overrides
from hf_hybrid.training.scores.summarization import rouge_scores
from tests.matrix import some
from tests.training.conftest import MODELS, NO_DROPOUT
from tests.training.pages import read_page


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(arguments, tmp_path_factory):
    """A function: model type to the folder and the metrics of one run of everything."""
    done = {}

    def run(model_type):
        if model_type not in done:
            folder = tmp_path_factory.mktemp("run") / "out"
            argv = arguments(
                model_type, folder, "--do_train", "--do_eval", "--do_predict", "--predict_with_generate",
                "--max_steps", "2", "--max_train_samples", "20", "--max_eval_samples", "4",
                "--max_predict_samples", "3", "--report", "true",
            )  # fmt: skip
            done[model_type] = folder, summarization.main(argv)
        return done[model_type]

    return run


@pytest.mark.parametrize("model_type", some(MODELS, "t5", "bart", "spade"))
def test_everything_runs_and_writes_the_files_of_the_example_script(runs, model_type):
    folder, metrics = runs(model_type)
    scores = [
        f"{split}_{name}" for split in ("eval", "predict") for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")
    ]
    for name in ("train_loss", "eval_loss", "predict_loss", "eval_gen_len", "predict_gen_len", *scores):
        assert math.isfinite(metrics[name]), name
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["predict_samples"]) == (20, 4, 3)
    written = _read(folder / "all_results.json")
    for split in ("train", "eval", "predict"):
        part = _read(folder / f"{split}_results.json")
        assert f"{split}_loss" in part
        assert part.items() <= written.items()
    assert written == {name: metrics[name] for name in written}
    assert _read(folder / "trainer_state.json")["global_step"] == 2
    assert "summarization" in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "checkpoint-2").is_dir()


@pytest.mark.parametrize("model_type", some(MODELS, "t5", "bart", "spade"))
def test_the_report_shows_the_scores_beside_those_of_baselines_and_what_was_generated(runs, data, model_type):
    folder, metrics = runs(model_type)
    page = read_page(folder / "report.html")
    assert page.problems == []
    assert page.headings[0] == f"Summarization: {model_type}"
    assert {name: float(value) for name, (value,) in page.tables["Metrics of this run"].items()} == metrics
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = {
        split: [json.loads(line) for line in data[split].read_text(encoding="utf-8").splitlines()]
        for split in ("train", "validation", "test")
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    words = round(np.median([len(row["summary"].split()) for row in rows["train"]]))
    for split, prefix, count in (("validation", "eval", 4), ("test", "predict", 3)):
        table = page.tables[f"ROUGE on the {split} split, {count} documents, in percent"]
        own = [metrics[f"{prefix}_{name}"] for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")]
        assert [float(value) for value in table["this model"]] == own
        documents = [row["document"] for row in rows[split][:count]]
        ids = tokenizer(text_target=[row["summary"] for row in rows[split][:count]], max_length=8, truncation=True)
        references = tokenizer.batch_decode(ids["input_ids"], skip_special_tokens=True)
        plain = {
            "first sentence of the document": documents,  # no second one: a sentence begins with a capital
            "lead baseline": [" ".join(document.split()[:words]) for document in documents],
        }
        for name, texts in plain.items():
            scores = [scorer.score(*pair)["rouge1"].fmeasure for pair in zip(references, texts, strict=True)]
            assert float(table[name][0]) == pytest.approx(100 * np.mean(scores), abs=1e-4), name
        assert 0 <= float(table["random training summary"][0]) <= 100
    lines = (folder / "generated_predictions.txt").read_text(encoding="utf-8").splitlines()
    shown = [sample["generated"].replace("(empty)", "") for sample in page.samples]
    assert shown == [line.replace("\\n", "\n") for line in lines]
    assert [sample["document"] for sample in page.samples] == [row["document"] for row in rows["test"][:3]]
    assert [sample["reference"] for sample in page.samples] == [reference.strip() for reference in references]
    assert (int(page.facts["steps taken"]), page.facts["train split"]) == (2, "20 documents")


def _first_documents(data, tokenizer):
    """The first three test documents, as a model reads them."""
    rows = [json.loads(line) for line in data["test"].read_text(encoding="utf-8").splitlines()[:3]]
    documents = [row["document"] for row in rows]
    return tokenizer(documents, return_tensors="pt", padding=True, truncation=True, max_length=48)


@pytest.mark.parametrize("model_type", MODELS)
def test_the_checkpoint_loads_and_generates_what_was_predicted(runs, data, model_type):
    folder, _ = runs(model_type)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    start = {"bart": tokenizer.eos_token_id, "led": tokenizer.eos_token_id}.get(model_type, tokenizer.pad_token_id)
    assert model.generation_config.decoder_start_token_id == start
    inputs = _first_documents(data, tokenizer)
    if model_type == "led":
        inputs["global_attention_mask"] = torch.zeros_like(inputs["input_ids"])
        inputs["global_attention_mask"][:, 0] = 1
    generated = model.generate(**inputs)
    assert generated.shape[1] <= 8  # --max_target_length, saved with the model
    texts = [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]
    lines = (folder / "generated_predictions.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4
    assert lines[3] == ""
    assert lines[:3] == ["\\n".join(text.splitlines()) for text in texts]


def test_summaries_repeat_nothing_if_asked_and_the_checkpoint_keeps_that(arguments, data, tmp_path):
    asked = ["--do_train", "--max_steps", "1", "--do_predict", "--predict_with_generate"]
    summarization.main(arguments("spade", tmp_path, *asked, "--no_repeat_ngram_size", "1"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = _first_documents(data, tokenizer)
    assert model.generation_config.no_repeat_ngram_size == 1
    for row in model.generate(**inputs)[:, 1:].tolist():
        tokens = [token for token in row if token != tokenizer.pad_token_id]
        assert len(set(tokens)) == len(tokens)
    lines = (tmp_path / "generated_predictions.txt").read_text(encoding="utf-8").split("\n")
    texts = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    assert lines[:3] == ["\\n".join(text.strip().splitlines()) for text in texts]
    free = model.generate(**inputs, no_repeat_ngram_size=0)[:, 1:].tolist()
    assert any(len(set(row)) < len(row) for row in free)  # a new model does repeat itself


def test_a_checkpoint_is_trained_on_and_its_embedding_grows_with_the_tokenizer(runs, arguments, tmp_path, caplog):
    folder, _ = runs("t5")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = len(tokenizer)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    argv = arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1")[4:]
    argv += ["--model_name_or_path", str(folder), "--tokenizer_name", str(tmp_path / "tokenizer")]
    summarization.main(argv)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.get_input_embeddings().weight.shape[0] == before + 2
    assert f"resized to {before + 2}" in caplog.text
    for place, start in ((folder, "from scratch"), (tmp_path / "out", f"from a local checkpoint, `{folder.name}`")):
        assert f"), trained {start}, on train.jsonl" in (place / "README.md").read_text(encoding="utf-8")


def test_only_predicting_uses_the_checkpoint_as_it_is(runs, arguments, tmp_path):
    folder, metrics = runs("spade")
    argv = arguments(
        "spade", tmp_path / "out", "--do_predict", "--predict_with_generate", "--max_predict_samples", "3",
        "--report", "true",
    )  # fmt: skip
    again = summarization.main([*argv[4:], "--model_name_or_path", str(folder)])
    assert again["predict_loss"] == pytest.approx(metrics["predict_loss"], rel=1e-5)
    assert again["predict_rouge1"] == metrics["predict_rouge1"]
    assert "train_loss" not in again
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    assert "random training summary" not in page.text
    assert "Nothing was trained in this run: no curves." in page.text
    assert not (tmp_path / "out" / "curves.png").exists()
    assert "steps taken" not in page.facts
    expected = (folder / "generated_predictions.txt").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "generated_predictions.txt").read_text(encoding="utf-8") == expected


def test_summaries_that_are_no_text_are_refused(data, arguments, tmp_path):
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"document": "a text", "summary": 3}\n' * 2, encoding="utf-8")
    argv = arguments("spade", tmp_path / "out", "--do_predict", "--predict_with_generate")
    with pytest.raises(ValueError, match=r"column 'summary' of split 'test' must hold text; row 1 .* holds int: 3"):
        summarization.main([*argv, "--test_file", str(numbers)])


@pytest.mark.parametrize("summaries", [None, ""])
def test_documents_without_summaries_are_summarized(runs, data, arguments, tmp_path, summaries):
    folder, _ = runs("spade")
    rows = [json.loads(line) for line in data["test"].read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["summary"]
        if summaries is not None:
            row["summary"] = summaries
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = arguments("spade", tmp_path / "out", "--do_predict", "--max_predict_samples", "3", "--report", "true")[4:]
    argv += ["--model_name_or_path", str(folder), "--test_file", str(alone)]
    with pytest.raises(ValueError, match="--do_predict needs --predict_with_generate"):
        summarization.main(argv)
    metrics = summarization.main([*argv, "--predict_with_generate"])
    assert metrics["predict_samples"] == 3
    assert not any("rouge" in name or "loss" in name for name in metrics)
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    assert "The test split has no summaries, so the generated ones have no scores." in page.text
    expected = (folder / "generated_predictions.txt").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "generated_predictions.txt").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("model_type", some(MODELS, "spade"))
def test_gradient_accumulation_equals_one_large_batch(arguments, tmp_path, model_type):
    """Summaries differ in length: a mean over batches is not one over tokens. T5's own loss does not count them."""
    logs = {}
    for size, steps in ((8, 1), (2, 4)):
        folder = tmp_path / f"{steps}"
        argv = arguments(
            model_type, folder, "--do_train", "--max_steps", "1", "--save_strategy", "no",
            "--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(steps),
            overrides=NO_DROPOUT[model_type],
        )  # fmt: skip
        summarization.main(argv)
        logs[steps] = _read(folder / "trainer_state.json")["log_history"][0]
    assert logs[4]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)
    assert logs[4]["grad_norm"] == pytest.approx(logs[1]["grad_norm"], rel=1e-4)


def test_label_smoothing_and_accumulation(arguments, tmp_path):
    losses = []
    for size, steps in ((8, 1), (2, 4)):
        argv = arguments(
            "t5", tmp_path / f"{steps}", "--do_train", "--max_steps", "1", "--save_strategy", "no",
            "--label_smoothing_factor", "0.1", "--per_device_train_batch_size", str(size),
            "--gradient_accumulation_steps", str(steps), overrides=NO_DROPOUT["t5"],
        )  # fmt: skip
        losses.append(summarization.main(argv)["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_padding_to_full_length_and_source_prefix(arguments, tmp_path, monkeypatch):
    seen = {}
    train = summarization.train

    def spy(trainer, resume_from, argv):
        seen["row"] = trainer.train_dataset[0]
        seen["batch"] = trainer.data_collator(list(trainer.train_dataset))
        seen["tokenizer"] = trainer.processing_class
        return train(trainer, resume_from, argv)

    monkeypatch.setattr(summarization, "train", spy)
    argv = arguments("bart", tmp_path / "out", "--do_train", "--max_steps", "1", "--save_strategy", "no")
    summarization.main([*argv, "--pad_to_max_length", "--source_prefix", "summarize: "])
    assert len(seen["row"]["input_ids"]) == 48
    assert len(seen["row"]["labels"]) == 8
    assert seen["tokenizer"].decode(seen["row"]["input_ids"]).startswith("summarize: The ")
    labels = seen["batch"]["labels"]
    assert labels.shape == (32, 8)
    assert (labels == -100).any()
    assert not (labels == seen["tokenizer"].pad_token_id).any()


def test_positions_of_a_new_model_follow_the_lengths(arguments, tmp_path, caplog):
    argv = arguments("bart", tmp_path / "out", "--do_eval", "--max_source_length", "80")
    summarization.main(argv)
    assert "max_position_embeddings is raised from 64 to 80" in caplog.text


@pytest.mark.parametrize("flag", ["max_source_length", "max_target_length", "val_max_target_length"])
def test_positions_of_a_checkpoint_are_checked_before_the_data(runs, arguments, tmp_path, no_data, flag):
    folder, _ = runs("bart")
    no_data()
    argv = arguments("bart", tmp_path / "out", "--do_eval", f"--{flag}", "80")[4:]
    with pytest.raises(ValueError, match=rf"--{flag} must be at most the model's 64 .*; got 80"):
        summarization.main([*argv, "--model_name_or_path", str(folder)])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--forced_bos_token", "<en>"], "--forced_bos_token '<en>' is not in the tokenizer's vocabulary"),
        (["--config_overrides", f"{MODELS['t5']},vocab_size=9"], r"vocab_size must be at least the .*; got 9"),
    ],
)
def test_a_named_tokenizer_is_checked_before_the_data(runs, arguments, tmp_path, no_data, more, message):
    folder, _ = runs("t5")
    no_data()
    with pytest.raises(ValueError, match=message):
        summarization.main([*arguments("t5", tmp_path / "out", "--do_eval", "--tokenizer_name", str(folder)), *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--predict_with_generate", "--metric_for_best_model", "rogue1"],
            r"--metric_for_best_model must be one of loss, rouge1, .*; got rogue1\. Did you mean 'rouge1'\?",
        ),
        (["--metric_for_best_model", "eval_rouge1"], "--metric_for_best_model must be one of loss; got eval_rouge1"),
        (
            ["--predict_with_generate", "--val_max_target_length", "1"],
            "--val_max_target_length must be at least 2 with --predict_with_generate",
        ),
        (
            ["--predict_with_generate", "--generation_max_length", "1"],
            "--generation_max_length must be at least 2 with --predict_with_generate",
        ),
        (["--resume_from_checkpoint", "auto"], "--resume_from_checkpoint auto needs --do_train"),
    ],
)
def test_what_would_fail_at_the_first_evaluation_is_checked_before_the_data(
    arguments, tmp_path, no_data, more, message
):
    no_data()
    with pytest.raises(ValueError, match=message):
        summarization.main([*arguments("t5", tmp_path / "out", "--do_eval"), *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_source_length", "1"], "--max_source_length must exceed the 1 tokens .*; got 1"),
        (
            ["--source_prefix", "alpha beta " * 30],
            r"--max_source_length must exceed the \d+ tokens that --source_prefix",
        ),
    ],
)
def test_a_source_length_that_leaves_nothing_of_a_document_is_refused(arguments, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        summarization.main([*arguments("t5", tmp_path / "out", "--do_train"), *more])
    assert not (tmp_path / "out").exists()


def test_the_weights_of_a_new_model_may_have_another_precision(arguments, tmp_path):
    argv = arguments("spade", tmp_path / "out", "--do_train", "--max_steps", "1", "--dtype", "bfloat16")
    summarization.main(argv)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for name, tensor in weights.items() if ".ssm." not in name} == {torch.bfloat16}


def test_a_language_is_checked_before_the_data_and_reaches_tokenizer_and_model(
    runs, arguments, tmp_path, monkeypatch, no_data
):
    folder, _ = runs("t5")
    no_data()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.src_lang = tokenizer.tgt_lang = None
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    argv = arguments("mbart", tmp_path / "out", "--do_eval", "--tokenizer_name", str(folder), overrides=MODELS["bart"])
    with pytest.raises(ValueError, match="--lang is required"):
        summarization.main(argv)
    with pytest.raises(ValueError, match="--lang xx is no language"):
        summarization.main([*argv, "--lang", "xx"])
    monkeypatch.undo()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    seen = []
    monkeypatch.setattr(summarization.SummarizationTrainer, "evaluate", lambda self, **kwargs: seen.append(self) or {})
    summarization.main([*argv, "--lang", "a", "--forced_bos_token", "b"])
    model = seen[0].model
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("a", "a")
    assert model.generation_config.decoder_start_token_id == tokenizer.convert_tokens_to_ids("a")
    assert model.generation_config.forced_bos_token_id == tokenizer.convert_tokens_to_ids("b")


def test_positions_of_a_checkpoint_are_lengthened_where_its_model_can_and_the_run_is_resumed(
    runs, arguments, tmp_path, caplog
):
    folder, _ = runs("bart")
    argv = arguments("pegasus", tmp_path / "out", "--do_train", "--save_steps", "1", "--max_source_length", "80")
    values = parse_config_overrides(MODELS["bart"], PegasusConfig)
    config = PegasusConfig(**values | {"vocab_size": len(AutoTokenizer.from_pretrained(folder))})
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "pegasus")
    argv = [*argv[4:], "--model_name_or_path", str(tmp_path / "pegasus"), "--tokenizer_name", str(folder)]
    summarization.main([*argv, "--max_steps", "1"])
    assert "max_position_embeddings is raised from 64 to 80" in caplog.text
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config.max_position_embeddings == 80
    summarization.main([*argv, "--max_steps", "2", "--resume_from_checkpoint", "auto"])


def test_rouge_is_the_mean_in_percent():
    scores = rouge_scores(["the cat sat"] * 300 + ["dog"] * 300, ["the cat sat"] * 600)
    assert scores == {"rouge1": 50.0, "rouge2": 50.0, "rougeL": 50.0, "rougeLsum": 50.0}


def test_the_default_data_set_is_named_in_the_log(arguments, tmp_path, monkeypatch, caplog, data):
    from hf_hybrid.data.loading import load_raw_datasets

    asked = []

    def load(*, dataset_name, **kwargs):
        asked.append(dataset_name)
        return load_raw_datasets(train_file=str(data["train"]), cache_dir=str(data["cache"]))

    monkeypatch.setattr(splits, "load_raw_datasets", load)
    argv = arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1", "--save_strategy", "no")
    position = argv.index("--train_file")
    with caplog.at_level("INFO"):
        summarization.main(argv[:position] + argv[position + 6 :])
    assert asked == ["embedded:docstrings"]
    assert "embedded:docstrings" in caplog.text


def test_a_row_without_text_stops_the_run_unless_it_may_be_dropped(arguments, tmp_path):
    rows = [{"document": "one two three", "summary": "one"}, {"document": "", "summary": "nothing"}]
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    argv = arguments("spade", tmp_path / "out", "--do_predict", "--predict_with_generate", "--test_file", str(path))
    with pytest.raises(ValueError, match=r"split 'test' must hold text.*'document' of row 2.*drop_empty_rows"):
        summarization.main(argv)
    assert summarization.main([*argv, "--drop_empty_rows"])["predict_samples"] == 1


def test_rows_of_a_split_that_is_not_used_do_not_matter(runs, arguments, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"document": "", "summary": ""}), encoding="utf-8")
    folder, _ = runs("spade")
    argv = arguments("spade", tmp_path / "out", "--do_predict", "--train_file", str(path))[4:]
    assert "predict_loss" in summarization.main([*argv, "--model_name_or_path", str(folder)])


def test_a_decoders_position_table_limits_the_summaries(runs, arguments, tmp_path):
    absolute = "decoder_position=learned_absolute,max_decoder_position_embeddings=6"
    argv = arguments("spade", tmp_path / "new", "--do_train", "--max_steps", "1", overrides=absolute)
    summarization.main(argv)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new")
    assert model.config.max_decoder_position_embeddings == 8  # raised to --max_target_length
    argv = arguments("spade", tmp_path / "out", "--do_eval", "--model_name_or_path", str(tmp_path / "new"))[4:]
    with pytest.raises(ValueError, match=r"--max_target_length must be at most the model's 8 .*got 9"):
        summarization.main([*argv, "--max_target_length", "9"])
