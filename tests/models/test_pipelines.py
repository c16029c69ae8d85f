"""Models in transformers' pipelines and streamers, from a saved folder with its tokenizer."""

import asyncio
import threading

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from ..tolerances import assert_close
from .tiny import GENERATIVE, MODEL_CLASSES, is_causal_lm, tiny_model

SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{number}" for number in range(60)]
TEXTS = ["w3 w5 w8", "w13 w21 w34 w55 w4 w7 w11 w18 w29 w47 w2", "w40"]
# Auto class -> the task whose pipeline takes it; there is none for summarization and question answering any more
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTextEncoding": "feature-extraction",
    "AutoModelForTokenClassification": "token-classification",
}
# no padding: a tied model that begins with it may write nothing else
WRITING = {"max_new_tokens": 8, "min_new_tokens": 8, "suppress_tokens": [0]}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, as many as the tiny models have."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


@pytest.fixture
def saved(tmp_path):
    """A function: a tiny model and a tokenizer saved into a folder, the folder."""

    def save(model_type, auto_class):
        tiny_model(model_type, auto_class).save_pretrained(tmp_path)
        word_tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def numbers(results) -> torch.Tensor:
    """Every score in what a pipeline returns."""
    if isinstance(results, dict):
        return numbers(list(results.values()))
    if isinstance(results, list | tuple):
        return torch.cat([numbers(result) for result in results]) if results else torch.zeros(0)
    return torch.tensor([float(results)]) if isinstance(results, float | np.floating) else torch.zeros(0)


def names(results) -> list:
    """Everything else in it."""
    if isinstance(results, dict):
        return [(key, names(value)) for key, value in results.items()]
    if isinstance(results, list | tuple):
        return [names(result) for result in results]
    return [] if isinstance(results, float | np.floating) else [results]


@pytest.mark.parametrize(("model_type", "auto_class"), [entry for entry in MODEL_CLASSES if entry[1] in TASKS])
def test_a_pipeline_gives_each_text_in_a_batch_what_it_gives_it_alone(model_type, auto_class, saved):
    task, folder = TASKS[auto_class], saved(model_type, auto_class)
    options = {"text-generation": {"do_sample": False, **WRITING}, "text-classification": {"top_k": None}}.get(
        task, {}
    )
    texts = [f"{text} <mask>" for text in TEXTS] if task == "fill-mask" else TEXTS
    model = getattr(transformers, auto_class).from_pretrained(folder) if task == "feature-extraction" else folder
    run = pipeline(task, model=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu", **options)
    assert type(run.model) is type(tiny_model(model_type, auto_class))
    alone = run(texts, batch_size=1)
    if task == "feature-extraction":  # padding has features too
        together = [[row[0][: len(text.split())]] for row, text in zip(run(texts, batch_size=3), texts, strict=True)]
    else:
        together = run(texts, batch_size=3)
    assert names(together) == names(alone)
    assert_close(numbers(together), numbers(alone), "float32 model")
    assert len({str(result) for result in alone}) == len(texts)
    assert task == "text-generation" or len(numbers(alone)) >= len(texts)


def test_a_classifiers_pipeline_names_its_labels_and_takes_pairs(saved):
    folder = saved("spade", "AutoModelForSequenceClassification")
    run = pipeline("text-classification", model=folder, device="cpu")
    run.model.config.id2label = {0: "bad", 1: "fair", 2: "good"}
    (best,) = run([{"text": TEXTS[0], "text_pair": TEXTS[1]}])
    tokens = run.tokenizer(TEXTS[0], TEXTS[1], return_tensors="pt")
    probabilities = run.model(**tokens).logits.softmax(-1)[0]
    assert best["label"] == ["bad", "fair", "good"][int(probabilities.argmax())]
    assert_close(torch.tensor(best["score"]), probabilities.max(), "float32 model")


def generated(model, tokenizer, text: str, **options) -> str:
    """What a model writes, without streaming."""
    inputs = tokenizer(text, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, **WRITING, **options)[0]
    return tokenizer.decode(
        ids[inputs["input_ids"].shape[1] :] if is_causal_lm(model) else ids, skip_special_tokens=True
    )


@pytest.mark.parametrize(("model_type", "auto_class"), GENERATIVE)
def test_what_is_streamed_is_what_is_generated(model_type, auto_class, saved, capsys):
    folder = saved(model_type, auto_class)
    model, tokenizer = getattr(transformers, auto_class).from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    options = {"skip_prompt": is_causal_lm(model), "skip_special_tokens": True}
    expected = generated(model, tokenizer, TEXTS[1])
    assert expected.split()

    model.generate(**inputs, do_sample=False, **WRITING, streamer=TextStreamer(tokenizer, **options))
    assert capsys.readouterr().out.strip() == expected.strip()

    def in_a_thread(streamer):
        thread = threading.Thread(
            target=model.generate, kwargs={**inputs, "do_sample": False, **WRITING, "streamer": streamer}
        )
        thread.start()
        return thread

    streamer = TextIteratorStreamer(tokenizer, timeout=60, **options)
    thread = in_a_thread(streamer)
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == expected.strip()
    assert len([piece for piece in pieces if piece]) > 1  # as they come, not at once

    async def listen():
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60, **options)
        thread = in_a_thread(streamer)
        pieces = [piece async for piece in streamer]
        thread.join()
        return pieces

    assert "".join(asyncio.run(listen())).strip() == expected.strip()


@pytest.mark.parametrize(
    "model_type", [model_type for model_type, auto_class in GENERATIVE if auto_class == "AutoModelForSeq2SeqLM"]
)
def test_two_lines_are_what_a_summarization_pipeline_was(model_type, saved):
    """A batch of unequal documents gives what each of them gives alone."""
    folder = saved(model_type, "AutoModelForSeq2SeqLM")
    model, tokenizer = (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    summaries = tokenizer.batch_decode(model.generate(**inputs, num_beams=2, **WRITING), skip_special_tokens=True)
    assert summaries == [generated(model, tokenizer, text, num_beams=2) for text in TEXTS]


@pytest.mark.parametrize(
    "model_type",
    [model_type for model_type, auto_class in MODEL_CLASSES if auto_class == "AutoModelForQuestionAnswering"],
)
def test_few_lines_are_what_a_question_answering_pipeline_was(model_type, saved):
    folder = saved(model_type, "AutoModelForQuestionAnswering")
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answers(questions, contexts):
        inputs = tokenizer(questions, contexts, padding=True, return_tensors="pt", return_token_type_ids=True)
        outside = inputs.pop("token_type_ids") == 0  # the question; padding too
        with torch.no_grad():
            starts, ends = (logits.masked_fill(outside, -torch.inf) for logits in model(**inputs)[:2])
        spans = starts[:, :, None] + ends[:, None]
        spans = spans.masked_fill(torch.ones_like(spans).tril(-1).bool(), -torch.inf)  # an end before its start
        firsts, lasts = np.unravel_index(spans.flatten(1).argmax(1), spans.shape[1:])
        rows = zip(inputs["input_ids"], firsts, lasts, strict=True)
        return [tokenizer.decode(ids[first : last + 1]) for ids, first, last in rows]

    questions, contexts = ["w9 w10", "w9", "w1 w2 w3"], [TEXTS[1], TEXTS[0], TEXTS[1][:14]]
    together = answers(questions, contexts)
    assert together == [answers([q], [c])[0] for q, c in zip(questions, contexts, strict=True)]
    assert all(answer and answer in context for answer, context in zip(together, contexts, strict=True))
