"""Pre-training: each objective with a model of ours and a peer, the same noise for all, and what is refused."""

import itertools
import json
import math
import random
import re
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from hf_hybrid.data.denoising import Denoiser, cut_into_pieces, noise_generator
from hf_hybrid.data.tokenizer import add_sentinels, byte_tokenizer, train_tokenizer
from hf_hybrid.training import pretrain
from hf_hybrid.training.flags import run
from hf_hybrid.training.run_folder.resume import check_resumed_examples
from hf_hybrid.training.scores.pretrain import hidden_bytes
from hf_hybrid.training.trainer.noisy_data import NoisyRows, StoredRows, make_rows
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer
from tests.matrix import some
from tests.training.conftest import MODELS, NO_DROPOUT
from tests.training.pages import read_page

BERT = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32"
TINY = MODELS | {
    "bert": BERT,
    "roberta": BERT,
    "chela": "hidden_size=32,num_hidden_layers=2,intermediate_size=32,short_kernel_sizes=[3],long_kernel_size=16",
}
WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge", "market", "teacher", "music", "garden"]
LENGTH = 32


def _texts(count, seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 20))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for seed, (split, count) in enumerate({"train": 40, "validation": 9}.items()):
        lines = [json.dumps({"text": text}) + "\n" for text in _texts(count, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def command(files, data, tmp_path):
    """A function: objective, model type and more flags to a small command line."""

    def build(objective, model_type, *more, output="out"):
        return [
            "--objective", objective, "--model_type", model_type, "--config_overrides", TINY[model_type],
            "--train_file", str(files / "train.jsonl"), "--validation_file", str(files / "validation.jsonl"),
            "--tokenizer_type", "bytes", "--cache_dir", str(data["cache"]), "--max_seq_length", str(LENGTH),
            "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--logging_steps", "1", "--use_cpu",
            "--disable_tqdm", "true", "--report", "false", "--bf16", "false", "--output_dir", str(tmp_path / output),
            *more,
        ]  # fmt: skip

    return build


def _restart(argv, folder):
    """The same command line for a checkpoint."""
    start = argv.index("--model_type")
    argv = [*argv[:start], "--model_name_or_path", str(folder), *argv[start + 4 :]]
    start = argv.index("--tokenizer_type")
    return argv[:start] + argv[start + 2 :]


def _pieces(path, tokenizer, frame):
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return list(cut_into_pieces([np.array(row) for row in ids], LENGTH - frame))


@pytest.mark.parametrize(
    ("objective", "model_type"),
    some(
        [
            ("span_corruption", "spade"),
            ("span_corruption", "t5"),
            ("text_infilling", "spade"),
            ("text_infilling", "bart"),
            ("masked_words", "chela"),
            ("masked_words", "bert"),
        ],
        ("span_corruption", "t5"),
        ("text_infilling", "spade"),
        ("masked_words", "chela"),
    ),
)
def test_scores_are_those_of_the_saved_model(command, files, tmp_path, objective, model_type):
    """Computed again row by row, with the noise of epoch 0 and seed 0, though the run has another seed."""
    argv = command(objective, model_type, "--do_train", "--do_eval", "--max_steps", "2", "--seed", "5")
    metrics = pretrain.main([*argv, "--report", "true"])
    folder = tmp_path / "out"
    auto_class = AutoModelForMaskedLM if objective == "masked_words" else AutoModelForSeq2SeqLM
    model, tokenizer = auto_class.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    density = 0.3 if objective == "text_infilling" else 0.15
    denoise = Denoiser.of(tokenizer, objective, density, 3.0)
    nats = labels = right = size = 0
    for number, piece in enumerate(_pieces(files / "validation.jsonl", tokenizer, denoise.frame)):
        row = denoise(piece, noise_generator(0, 0, number))
        targets = torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=targets[None]).logits[0].float()
        nats += F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100).item()
        right += (logits.argmax(-1) == targets).sum().item()
        labels += (targets != -100).sum().item()
        size += sum(token not in tokenizer.all_special_ids for token in row["labels"] if token != -100)  # bytes
        number += 1
    assert metrics["eval_samples"] == number
    assert metrics["eval_tokens"] == labels
    assert metrics["eval_loss"] == pytest.approx(nats / labels, rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(right / labels)
    assert metrics["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    page = read_page(folder / "report.html")
    assert page.problems == []
    assert len(page.samples) == 3
    assert all(set(sample) == {"corrupted text", "what labels hold", "filled in"} for sample in page.samples)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "python -m hf_hybrid.training pretrain" in card
    assert "eval_bits_per_byte" in card or "bits_per_byte" in card


@pytest.mark.parametrize(
    ("objective", "model_type"),
    some(
        [
            ("masked_words", "chela"),
            ("masked_words", "spade"),
            ("span_corruption", "spade"),
            ("text_infilling", "spade"),
        ],
        ("masked_words", "chela"),
        ("text_infilling", "spade"),
    ),
)
def test_packed_pieces_do_not_see_each_other(command, tmp_path, objective, model_type):
    """A model scores the same pieces with the same noise equally well, alone and packed."""
    more = ["--do_eval", "--max_seq_length", "300", "--learning_rate", "0.01"]
    tiny = TINY[model_type]
    train = ["--config_overrides", tiny.replace("num_decoder_layers=1,", "") if objective == "masked_words" else tiny]
    train += ["--do_train", "--report", "true"]
    packed = pretrain.main(command(objective, model_type, *more, *train, "--max_steps", "2", "--packing"))
    alone = pretrain.main(_restart(command(objective, model_type, *more, output="alone"), tmp_path / "out"))
    assert packed["eval_samples"] < alone["eval_samples"]
    for name in ("eval_loss", "eval_tokens", "eval_bits_per_byte"):
        assert packed[name] == pytest.approx(alone[name], rel=1e-5)


# ---- the same noise ----


def _weights(folder):
    return load_file(folder / "model.safetensors")


def _assert_equal(folder, other):
    weights, others = _weights(folder), _weights(other)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    "way", some(["group_by_length", "random", "streaming", "workers"], "random", "streaming", "workers")
)
def test_a_run_resumed_in_the_middle_of_its_second_epoch_ends_with_the_same_weights(command, tmp_path, way):
    """32 rows, four to a step: the checkpoint is made two steps into the second epoch."""
    flags = {
        "streaming": ["--streaming"],
        "workers": ["--dataloader_num_workers", "2", "--dataloader_persistent_workers", "true"],
    }.get(way, ["--train_sampling_strategy", way])
    flags += ["--do_train", "--max_train_samples", "32", "--max_steps", "12", "--save_steps", "10"]
    pretrain.main(command("masked_words", "bert", *flags))
    shutil.copytree(tmp_path / "out" / "checkpoint-10", tmp_path / "again" / "checkpoint-10")
    pretrain.main([*command("masked_words", "bert", *flags, output="again"), "--resume_from_checkpoint", "auto"])
    _assert_equal(tmp_path / "out", tmp_path / "again")


def _in_another_order(argv, path):
    """The same command line for as many rows, the last one first."""
    at = argv.index("--train_file") + 1
    rows = Path(argv[at]).read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(rows[::-1]) + "\n", encoding="utf-8")
    return [*argv[:at], str(path), *argv[at + 1 :]]


def test_a_run_is_not_resumed_with_other_examples(command, no_data, tmp_path):
    flags = ["--do_train", "--max_train_samples", "32", "--save_steps", "1", "--resume_from_checkpoint", "auto"]
    pretrain.main(command("text_infilling", "t5", *flags, "--max_steps", "1"))
    again = command("text_infilling", "t5", *flags, "--max_steps", "2")
    with pytest.raises(ValueError, match=r"checkpoint-1: the number of training rows is 32 there and 20 in this run"):
        pretrain.main([*again, "--max_train_samples", "20"])
    with pytest.raises(ValueError, match=r"checkpoint-1: the digest of the training rows is '\w+' there and '\w+' in"):
        pretrain.main(_in_another_order(again, tmp_path / "other.jsonl"))
    no_data()
    for more, message in [
        (
            ["--objective", "span_corruption"],
            "--objective is 'text_infilling' there and 'span_corruption' in this run",
        ),
        (["--noise_density", "0.2"], "--noise_density is 0.3 there and 0.2"),
        (["--mean_noise_span_length", "2"], "--mean_noise_span_length is 3.0 there and 2.0"),
        (["--max_seq_length", "31"], "--max_seq_length is 32 there and 31"),
        (["--seed", "7"], "--data_seed is 42 there and 7"),
        (["--streaming"], "--streaming is False there and True"),
        (["--train_sampling_strategy", "random"], "--train_sampling_strategy is 'group_by_length' there and 'random'"),
        (["--gradient_accumulation_steps", "2"], r"the number of examples in a step \(.*\) is 4 there and 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            pretrain.main([*again, *more])


def test_a_stream_is_not_resumed_with_other_files(command, no_data, tmp_path):
    flags = ["--do_train", "--max_train_samples", "32", "--save_steps", "1", "--resume_from_checkpoint", "auto"]
    pretrain.main(command("text_infilling", "t5", *flags, "--streaming", "--max_steps", "1"))
    again = command("text_infilling", "t5", *flags, "--streaming", "--max_steps", "2")
    other = _in_another_order(again, tmp_path / "other.jsonl")
    no_data()
    with pytest.raises(ValueError, match=r"--train_file is \['train.jsonl', \d+\] there and \['other"):
        pretrain.main(other)
    with pytest.raises(ValueError, match="--max_train_samples is 32 there and 20"):
        pretrain.main([*again, "--max_train_samples", "20"])


def _without(flag, argv):
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :]


def test_a_stream_is_not_resumed_with_other_rows(command, tmp_path):
    """Whatever makes them others: flags alone do not tell."""
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": text, "other": text[::-1]}) + "\n" for text in _texts(40, seed=4)]
    path.write_text("".join(rows), encoding="utf-8")
    flags = ["--train_file", str(path), "--streaming", "--do_train", "--save_steps", "1"]
    flags += ["--resume_from_checkpoint", "auto"]
    held_out = ["--do_eval", "--max_eval_samples", "4"]
    argv = _without("--validation_file", command("masked_words", "bert", *flags))
    pretrain.main([*argv, *held_out, "--max_steps", "1"])
    argv += ["--max_steps", "2"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("e", "a")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    at = argv.index("--tokenizer_type")
    named = [*argv[:at], "--tokenizer_name", str(tmp_path / "tokenizer"), *argv[at + 2 :]]
    swapped = "".join([*rows[:10], rows[11], rows[10], *rows[12:]])  # a file of the same size
    for again, message in [
        (argv, r"cut off for validation \(.*\) is 5 there and 0 in this run"),
        ([*argv, *held_out, "--validation_split_percentage", "6"], "is 5 there and 6 in this run"),
        ([*argv, *held_out, "--text_column", "other"], r"the digest of the first 64 rows is '\w+' there and '\w+' in"),
        ([*named, *held_out], "the digest of the first 64 rows"),
        ([*argv, *held_out], "the digest of the first 64 rows"),
    ]:
        if again == [*argv, *held_out]:
            path.write_text(swapped, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            pretrain.main(again)
    path.write_text("".join(rows), encoding="utf-8")
    pretrain.main([*argv, *held_out, "--drop_empty_rows"])  # there are none


def test_steps_may_be_divided_in_another_way(command, tmp_path):
    """As after running out of memory: the same examples make a step."""
    flags = ["--do_train", "--max_train_samples", "32", "--max_steps", "10", "--save_steps", "9"]
    flags += ["--config_overrides", f"{TINY['t5']},{NO_DROPOUT['t5']}"]
    pretrain.main(command("span_corruption", "t5", *flags))
    shutil.copytree(tmp_path / "out" / "checkpoint-9", tmp_path / "again" / "checkpoint-9")
    flags += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    pretrain.main([*command("span_corruption", "t5", *flags, output="again"), "--resume_from_checkpoint", "auto"])
    weights, others = _weights(tmp_path / "out"), _weights(tmp_path / "again")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-5, msg=name)


def test_a_checkpoint_without_a_record_of_its_examples_is_resumed(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    check_resumed_examples({"--objective": "masked_words"}, str(tmp_path))


def test_a_stream_has_the_noise_of_stored_data(command, tmp_path):
    """In the second pass too; another seed has another noise."""
    flags = ["--do_train", "--max_train_samples", "32", "--max_steps", "10", "--save_strategy", "no"]
    flags += ["--config_overrides", f"{TINY['t5']},{NO_DROPOUT['t5']}"]  # drawn anew for each pass over stored data
    pretrain.main(command("span_corruption", "t5", *flags, "--train_sampling_strategy", "sequential"))
    streamed = command("span_corruption", "t5", *flags, "--streaming", output="streamed")
    pretrain.main([*streamed, "--dataloader_num_workers", "1"])
    _assert_equal(tmp_path / "out", tmp_path / "streamed")


@pytest.mark.parametrize("packed", [None, 16])
def test_stored_rows_are_places_in_arrays_of_tokens(packed):
    """The same rows, with the same digest, as objects; a source without tokens, and one that holds several pieces."""
    sources = [np.arange(count, dtype=np.int32) for count in (9, 0, 13, 40)]
    places = [range(0, 4), range(4, 7), range(7, 9), range(9, 20), range(22, 32), range(32, 62)]
    flat = np.concatenate(sources)
    expected = list(make_rows((flat[place.start : place.stop] for place in places), packed, 1))
    rows = StoredRows(sources, make_rows(places, packed, 1))
    assert [len(row) for row in rows] == ([1] * 6 if packed is None else [3, 1, 1, 1])
    assert len(rows) == len(expected)
    for row, other in zip([*rows, rows[-1]], [*expected, expected[-1]], strict=True):
        assert [(number, [*piece]) for number, piece in row] == [(number, [*piece]) for number, piece in other]
    assert np.shares_memory(rows[0][0][1], sources[0])
    with pytest.raises(IndexError):
        rows[len(rows)]
    # as in checkpoints
    assert {NoisyRows(some, None, seed=3).digest() for some in (rows, expected)} == {"5ba9b951967744de"}


def test_a_stored_piece_takes_a_few_bytes():
    source = np.zeros(20_000, dtype=np.int32)
    tracemalloc.start()
    try:
        rows = StoredRows([source], make_rows((range(n, n + 9) for n in range(10_000)), None, 1))
        assert tracemalloc.get_traced_memory()[0] / len(rows) < 32
    finally:
        tracemalloc.stop()


def _rows():
    tokenizer = byte_tokenizer()
    add_sentinels(tokenizer, 20)
    denoise = Denoiser.of(tokenizer, "span_corruption", 0.15, 3.0)
    return NoisyRows(list(make_rows((np.arange(10, 50) for _ in range(4)), None, denoise.frame)), denoise, seed=3)


def test_each_epoch_has_its_noise_and_workers_that_live_on_draw_it_too():
    rows = _rows()
    loader = DataLoader(rows, batch_size=None, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        seen.append(list(loader))
        assert seen[-1] == [rows[number] for number in range(len(rows))]
    assert seen[0] == seen[2] != seen[1]
    assert len({tuple(row["input_ids"]) for row in seen[0] + seen[1]}) > 4  # of the same piece


# ---- tokens, documents, and what is refused ----


def test_a_checkpoint_gets_the_tokens_that_it_lacks(command, tmp_path):
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no"]
    pretrain.main(command("span_corruption", "t5", *flags))
    before = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight
    pretrain.main(_restart(command("text_infilling", "t5", *flags, output="more"), tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "more")
    after = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "more").get_input_embeddings().weight
    assert tokenizer.mask_token_id == len(before)
    assert len(after) == len(before) + 1 == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<extra_id_99>") < len(before)


def test_a_txt_file_is_one_document(command, tmp_path):
    text = "".join(f"{line}\n" for line in _texts(20, seed=3))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    argv = command("masked_words", "bert", "--do_eval", "--validation_file", str(tmp_path / "text.txt"))
    trained = pretrain.main([*argv, "--do_train", "--max_steps", "1", "--save_strategy", "no"])
    assert trained["eval_samples"] == math.ceil((len(text) - 1) / (LENGTH - 1))


@pytest.mark.parametrize("way", ["stored", "streaming"])
def test_each_txt_file_of_a_folder_is_one_document(command, tmp_path, collated, way):
    texts = ["".join(f"{line}\n" for line in _texts(5, seed)) for seed in range(3)]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.replace("\n", "\r\n").encode())
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--per_device_train_batch_size", "99"]
    argv = _without("--validation_file", command("masked_words", "bert", *flags))
    argv = [*_without("--train_file", argv), "--dataset_name", str(tmp_path / "texts")]
    pretrain.main([*argv, *(["--streaming", "--max_train_samples", "99"] if way == "streaming" else [])])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    pieces = [text[start : start + LENGTH - 1] for text in texts for start in range(0, len(text), LENGTH - 1)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    rows = list(itertools.chain.from_iterable(collated))[: len(pieces)]
    assert sorted(_restored(row, tokenizer, "masked_words") for row in rows) == sorted(
        piece.replace("\n", "\u010a") for piece in pieces
    )


@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl"])
@pytest.mark.parametrize("way", ["stored", "streaming"])
def test_a_split_of_blank_rows_is_refused(command, tmp_path, name, way):
    (tmp_path / name).write_text("\n \n\n" if name == "text.txt" else '{"text": "  "}\n' * 3)
    flags = ["--do_train", "--max_steps", "1", "--train_file", str(tmp_path / name)]
    flags += ["--streaming"] if way == "streaming" else []
    with pytest.raises(ValueError, match="'train' must hold at least one row with more than spaces; got 3 blank ones"):
        pretrain.main(command("masked_words", "bert", *flags))


def test_a_bad_row_of_a_stream_is_named_by_its_number_in_the_file(command, tmp_path):
    """Also behind rows that validate."""
    rows = [{"text": "a text"}] * 130 + [{"text": 7}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--do_train", "--do_eval", "--max_eval_samples", "2", "--streaming", "--max_steps", "50"]
    flags += ["--train_file", str(tmp_path / "rows.jsonl"), "--save_strategy", "no"]
    argv = _without("--validation_file", command("masked_words", "bert", *flags))
    with pytest.raises(ValueError, match=r"rows.jsonl, row 131 .*: column 'text' must hold text .*; got int: 7"):
        pretrain.main(argv)


@pytest.mark.parametrize(
    ("objective", "model_type", "more", "message"),
    [
        ("span_corruption", "t5", ["--objective", "spans"], "must be one of .*; got 'spans'|invalid choice"),
        ("span_corruption", "t5", ["--noise_density", "1"], "--noise_density must lie between 0 and 1.*got 1.0"),
        ("span_corruption", "t5", ["--mlm_probability", "0"], "--noise_density must lie between 0 and 1.*got 0.0"),
        (
            "span_corruption", "t5", ["--mean_noise_span_length", "0.5"],
            "--mean_noise_span_length must lie between 1 and 1000000 for --objective span_corruption; got 0.5",
        ),
        (
            "text_infilling", "bart", ["--mean_noise_span_length", "1e30"],
            r"--mean_noise_span_length must lie between 0.1 and 1000000 for --objective text_infilling; got 1e\+30",
        ),
        (
            "masked_words", "bert", ["--mean_noise_span_length", "3"],
            "--mean_noise_span_length has no meaning for --objective masked_words",
        ),
        (
            "span_corruption", "t5", ["--packing"],
            r"--packing with --objective span_corruption needs a model .*\(spade\); got t5",
        ),
        (
            "masked_words", "bert", ["--packing"],
            r"--packing with --objective masked_words needs a model .*\(chela or spade\); got bert",
        ),
        ("masked_words", "bart", [], "--objective masked_words needs an encoder; bart is an encoder-decoder"),
        (
            "span_corruption", "bert", [],
            r"bert.* has no class for AutoModelForSeq2SeqLM\. It is no encoder-decoder: .* --objective masked_words",
        ),
        ("masked_words", "bert", ["--streaming", "--max_steps", "-1"], "--streaming needs --max_steps"),
        ("masked_words", "bert", ["--data_seed", "-1"], "--data_seed must not be negative; got -1"),
        (
            "masked_words", "bert", ["--streaming", "--dataloader_num_workers", "2"],
            "--dataloader_num_workers must be 0 or 1 with --streaming: .*; got 2",
        ),
        (
            "masked_words", "bert", ["--streaming", "--train_sampling_strategy", "group_by_length"],
            "--train_sampling_strategy must be sequential or left out with --streaming.*; got group_by_length",
        ),
        (
            "masked_words", "bert", ["--streaming", "--preprocessing_num_workers", "4"],
            "--preprocessing_num_workers must be 1 or left out with --streaming.*; got 4",
        ),
        (
            "masked_words", "bert", ["--do_eval", "--metric_for_best_model", "bits"],
            "--metric_for_best_model must be one of .*bits_per_byte; got bits",
        ),
    ],
)  # fmt: skip
def test_bad_flags_are_refused_before_the_data(command, no_data, objective, model_type, more, message):
    no_data()
    with pytest.raises(ValueError, match=message):
        pretrain.main(command(objective, model_type, "--do_train", "--max_steps", "1", *more))


@pytest.mark.parametrize("tokenizer_type", ["bytes", "bpe"])
def test_a_length_that_leaves_nothing_of_a_text_is_refused_before_the_data(command, no_data, tokenizer_type):
    """Also if the tokenizer would be trained on the data."""
    no_data()
    flags = ["--do_train", "--max_seq_length", "2", "--tokenizer_type", tokenizer_type]
    with pytest.raises(ValueError, match=r"--max_seq_length must exceed the 1 special tokens .* by at least 2; got 2"):
        pretrain.main(command("masked_words", "bert", *flags))


def test_a_stream_is_not_read_for_a_validation_split(command, no_data, tmp_path):
    no_data()
    (tmp_path / "text.txt").write_text("a text\n")
    text_file = ["--train_file", str(tmp_path / "text.txt")]
    flags = ["--streaming", "--do_train", "--do_eval", "--max_steps", "1"]
    for more, message in [
        ([], r"--streaming needs --validation_file or --max_eval_samples for --do_eval"),
        ([*text_file, "--max_eval_samples", "2"], r"a txt file needs --validation_file"),
    ]:
        with pytest.raises(ValueError, match=message):
            pretrain.main(_without("--validation_file", command("masked_words", "bert", *flags, *more)))


def test_positions_that_begin_behind_padding_suffice(command, tmp_path):
    """RoBERTa's: a new model gets as many as the pieces need, and a checkpoint is checked."""
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no"]
    few = ["--config_overrides", f"{BERT},max_position_embeddings=20"]
    pretrain.main(command("masked_words", "roberta", *flags, *few))
    again = _restart(command("masked_words", "roberta", *flags, output="again"), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    most = config.max_position_embeddings - config.pad_token_id - 1
    assert most >= LENGTH
    pretrain.main([*again, "--max_seq_length", str(most), "--per_device_train_batch_size", "40"])
    with pytest.raises(ValueError, match=f"must be at most the model's {most} position embeddings"):
        pretrain.main([*again, "--max_seq_length", str(most + 1), "--overwrite_output_dir"])


@pytest.fixture
def collated(monkeypatch):
    """The rows of each batch, as the collator gets them."""
    batches, collate = [], pretrain._collator

    def spied(*arguments):
        inner = collate(*arguments)
        return lambda rows: batches.append(rows) or inner(rows)

    monkeypatch.setattr(pretrain, "_collator", spied)
    return batches


@pytest.mark.parametrize("way", ["stored", "streaming"])
@pytest.mark.parametrize(
    ("objective", "model_type"), [("span_corruption", "t5"), ("text_infilling", "bart"), ("masked_words", "bert")]
)
def test_what_a_model_reads_and_learns_makes_up_the_documents(
    command, files, tmp_path, collated, objective, model_type, way
):
    """Each document once: of encoders the labels fill in what is hidden, of others sentinels are looked up."""
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--per_device_train_batch_size", "500"]
    flags += ["--streaming", "--max_train_samples", "500"] if way == "streaming" else []
    pretrain.main(command(objective, model_type, *flags))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [json.loads(line)["text"] for line in (files / "train.jsonl").read_text().splitlines()]
    pieces = [text[start : start + LENGTH - 1] for text in texts for start in range(0, len(text), LENGTH - 1)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    rows = list(itertools.chain.from_iterable(collated))[: len(pieces)]
    assert sorted(_restored(row, tokenizer, objective) for row in rows) == sorted(pieces)


def _restored(row, tokenizer, objective):
    """The text of a row, from both sides."""

    def spelt(ids):
        return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("\u0120", " ")  # as byte tokenizers write a space

    inputs, labels = row["input_ids"][:-1], row["labels"][:-1]
    if objective == "masked_words":
        return spelt([token if label == -100 else label for token, label in zip(inputs, labels, strict=True)])
    if objective == "text_infilling":
        return spelt(labels)
    before, *parts = re.split(r"<extra_id_(\d+)>", spelt(labels))
    assert before == ""
    spans = dict(zip(parts[::2], parts[1::2], strict=True))
    return re.sub(r"<extra_id_(\d+)>", lambda found: spans.pop(found[1]), spelt(inputs))


def test_names_of_special_tokens_in_a_text_are_text(command, tmp_path, collated):
    (tmp_path / "tags.jsonl").write_text(json.dumps({"text": "a </s> and <extra_id_0> or <pad>"}) + "\n")
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--train_file", str(tmp_path / "tags.jsonl")]
    pretrain.main(command("span_corruption", "t5", *flags))
    row, tokenizer = collated[0][0], AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = [*row["input_ids"], *row["labels"]]
    assert ids.count(tokenizer.eos_token_id) == 2  # one at each end
    assert ids.count(tokenizer.convert_tokens_to_ids("<extra_id_0>")) == 2  # one for each side of the first span
    assert tokenizer.pad_token_id not in ids


def test_it_computes_in_bfloat16_where_that_is_fast(command, monkeypatch, tmp_path):
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--overwrite_output_dir"]
    argv = command("masked_words", "bert", *flags)
    place = argv.index("--bf16")
    used, dtypes = [], set()

    def watched(**parts):
        used.append(parts["args"])
        parts["model"].bert.encoder.layer[0].intermediate.dense.register_forward_hook(
            lambda module, inputs, output: dtypes.add(output.dtype)
        )
        return ScriptTrainer(**parts)

    monkeypatch.setattr(pretrain, "ScriptTrainer", watched)
    for fast, given, wanted in [(True, [], True), (False, [], False), (True, ["--bf16", "false"], False)]:
        monkeypatch.setattr(run, "computes_bfloat16_fast", lambda device, fast=fast: fast)
        pretrain.main([*argv[:place], *argv[place + 2 :], *given])
        assert used[-1].bf16 is wanted
        assert used[-1].mixed_precision == ("bf16" if wanted else "no")
        assert dtypes == {torch.bfloat16 if wanted else torch.float32}
        dtypes.clear()


@pytest.mark.parametrize("chosen", ["launch", "deepspeed"])
def test_what_the_launch_or_deepspeed_has_chosen_is_kept(chosen, monkeypatch, tmp_path):
    """DeepSpeed would cast state space models; its files have an autocast of their own."""
    monkeypatch.setattr(run, "computes_bfloat16_fast", lambda device: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16" if chosen == "launch" else "no")
    training_args = run.ScriptTrainingArguments(output_dir=str(tmp_path), do_train=True, use_cpu=True)
    training_args.deepspeed_plugin = object() if chosen == "deepspeed" else None
    before = training_args.mixed_precision
    training_args.use_bfloat16_where_it_is_fast()
    assert not training_args.bf16
    assert training_args.mixed_precision == before == ("fp16" if chosen == "launch" else "no")


# ---- bytes of tokens ----


@pytest.mark.parametrize("kind", ["word pieces", "unigrams", "byte pairs", "marked", "bytes"])
@pytest.mark.parametrize(
    "text", ["The river bridges and stones are unbelievable", "Gr\u00fc\u00dfe an \u6771\u4eac und \U0001f600"]
)
def test_tokens_have_the_bytes_of_their_text(kind, text):
    """All of a text's tokens together have its bytes, the space counted that joins it to a text before it."""
    if kind == "marked":
        text += "'s focalLength in _Stone.Bridge(x)\n\u2040 and \u21e7\u2040\nNext"
        tokenizer = train_tokenizer([text] * 20, 300, tokenizer_type="marked")
    else:
        text += " \u2040\u21e7\u2060" if kind in ("byte pairs", "bytes") else ""  # no marks there
        tokenizer = byte_tokenizer() if kind == "bytes" else _trained(kind, [text] * 20)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spaces = 1 if kind in ("word pieces", "unigrams") else 0
    assert hidden_bytes(tokenizer, np.array([-100, *ids])) == len(text.encode()) + spaces


def _trained(kind, texts):
    model, split, decoder, trainer = {
        "word pieces": (
            models.WordPiece(unk_token="<unk>"),
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
            trainers.WordPieceTrainer(vocab_size=80, special_tokens=["<unk>", "<pad>"], show_progress=False),
        ),
        "unigrams": (
            models.Unigram(),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
            trainers.UnigramTrainer(
                vocab_size=80, special_tokens=["<unk>", "<pad>"], unk_token="<unk>", show_progress=False
            ),
        ),
        "byte pairs": (
            models.BPE(),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
            trainers.BpeTrainer(
                vocab_size=280,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                special_tokens=["<unk>", "<pad>"],
                show_progress=False,
            ),
        ),
    }[kind]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
