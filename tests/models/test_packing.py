"""Packed batches: several sequences in one row give what each gives alone, or are refused."""

import inspect

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache

from tests.matrix import some
from tests.models.tiny import (
    ATTENTION_FREE,
    DECODERS,
    MODEL_CLASSES,
    is_causal_lm,
    main_output,
    tiny_config,
    tiny_inputs,
    tiny_model,
)
from tests.tolerances import assert_close

LENGTHS = (7, 1, 13, 5)
BOTH = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
FORMS = {
    "position_ids": DataCollatorWithFlattening(),
    "cu_seq_lens_q": DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True),
    "seq_idx": DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True),
}
PACKING = [
    (model_type, name)
    for model_type, name in MODEL_CLASSES
    if name
    in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForTokenClassification")
    or (name == "AutoModel" and not tiny_config(model_type).is_encoder_decoder)
]
LABELLED = [key for key in PACKING if key[1] not in ("AutoModel", "AutoModelForTextEncoding")]
REFUSING = [key for key in MODEL_CLASSES if key not in PACKING]
VARIANTS = {
    ("chela", "AutoModelForMaskedLM"): {
        "long": {"mixer": "long"},
        "s4d": {"mixer": "s4d", "mixer_state_size": 8},
        "moving average": {"mixer": "ema"},
        "laplace in chunks": {"attention_fn": "laplace", "chunk_size": 5},
    },
    ("spade", "AutoModelForMaskedLM"): {
        "chunk": {"attention_type": "chunk"},
        "full": {"attention_type": "full"},
        "s4d": {"ssm_type": "s4d", "ssm_freeze": "none"},
        "s5": {"ssm_type": "s5"},
        "hyena": {"ssm_type": "hyena", "ssm_l_max": 8},
        "lstm": {"ssm_type": "lstm"},
    },
}
OPTIONS = {
    (*key, case): options
    for key in PACKING
    for case, options in {"default": {}, **DECODERS.get(key, {}), **VARIANTS.get(key, {})}.items()
    if options or case == "default"
}


def sequences(model):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 64, (length,), generator=generator) for length in LENGTHS]
    classes = model.config.num_labels if "TokenClassification" in type(model).__name__ else 64
    labels = [torch.randint(classes, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def alone(model, examples):
    """Outputs of every sequence alone, joined."""
    outputs = [model(**{name: x[None] for name, x in example.items() if name != "labels"}) for example in examples]
    return torch.cat([main_output(output) for output in outputs], dim=1)


def gradients(model, output):
    """Gradients of a random linear function of the output."""
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    return torch.autograd.grad((output * weight).sum(), list(model.parameters()), allow_unused=True)


SDPA = [(*case, "sdpa") for case in OPTIONS]
EAGER = [(*case, "eager") for case in OPTIONS if case[0] not in ATTENTION_FREE]


@pytest.mark.parametrize(
    ("model_type", "auto_class", "case", "attention"),
    some([*SDPA, *EAGER], *SDPA, *(case for case in EAGER if case[2] == "default")),
)
def test_packed_sequences_are_what_each_is_alone(model_type, auto_class, case, attention):
    options = OPTIONS[model_type, auto_class, case]
    model = tiny_model(model_type, auto_class, attn_implementation=attention, **options).double()
    examples = sequences(model)
    wanted = alone(model, examples)
    batch = BOTH(examples)
    batch.pop("labels")
    packed = main_output(model(**batch))
    # eager attention has its softmax in float32, as in transformers
    precision = "float32" if attention == "eager" else "float64"
    assert_close(packed, wanted, f"{precision} gradient")
    for got, expected in zip(gradients(model, packed), gradients(model, wanted), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(got, expected, f"{precision} gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model_type", "auto_class"), LABELLED)
def test_each_form_of_bounds_gives_the_losses_of_the_sequences(model_type, auto_class, form):
    model = tiny_model(model_type, auto_class).double()
    examples, shifted = sequences(model), is_causal_lm(model)
    batch = FORMS[form](examples)
    if not shifted:
        batch["labels"] = torch.cat([example["labels"] for example in examples])[None]
    losses, count = 0.0, 0
    for example in examples:
        tokens = len(example["labels"]) - shifted
        if tokens:  # the mean over no token is NaN
            losses += tokens * model(**{name: x[None] for name, x in example.items()}).loss
        count += tokens
    assert_close(model(**batch).loss, losses / count, "float32")  # transformers' losses are in float32


@pytest.mark.parametrize("form", ["position_ids", "seq_idx"])
@pytest.mark.parametrize(("model_type", "auto_class"), PACKING)
def test_several_packed_rows(model_type, auto_class, form):
    model = tiny_model(model_type, auto_class).double()
    examples = sequences(model)
    row = FORMS[form](examples)
    row.pop("labels")
    other = {name: x.flip(1) if name == "input_ids" else x for name, x in row.items()}
    other[form] = FORMS[form](examples[::-1])[form]
    wanted = torch.cat([main_output(model(**part)) for part in (row, other)])
    packed = model(**{name: torch.cat([row[name], other[name]]) for name in row}, output_hidden_states=True)
    assert_close(main_output(packed), wanted, "float64 gradient")
    assert packed.hidden_states[0].shape[:2] == row["input_ids"].expand(2, -1).shape


@pytest.mark.parametrize(("model_type", "auto_class"), PACKING)
def test_gradient_checkpointing_computes_packed_sequences_again(model_type, auto_class):
    found = []
    for checkpointing in (False, True):
        model = tiny_model(model_type, auto_class).double().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        batch = BOTH(sequences(model))
        batch.pop("labels")
        torch.manual_seed(4)  # dropout must draw the same masks
        found.append(gradients(model, main_output(model(**batch))))
    for plain, checkpointed in zip(*found, strict=True):
        assert (plain is None) == (checkpointed is None)
        if plain is not None:
            assert_close(checkpointed, plain, "float64 gradient")


@pytest.mark.parametrize(("model_type", "auto_class"), PACKING)
def test_one_sequence_per_row_is_not_packed(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    wanted = main_output(model(**inputs))
    batch, length = inputs["input_ids"].shape
    positions = torch.arange(length)
    rows = torch.arange(batch)[:, None].expand(batch, length)
    for told in ({"position_ids": positions[None]}, {"position_ids": positions + 3 * rows}, {"seq_idx": rows}):
        assert torch.equal(main_output(model(**inputs, **told)), wanted)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :4] = 0
    padded = main_output(model(**inputs, attention_mask=mask))
    from_mask = (mask.cumsum(-1) - 1).clamp_min(0)  # as generation makes them: they restart in the padding
    assert torch.equal(main_output(model(**inputs, attention_mask=mask, position_ids=from_mask)), padded)


def test_contradictory_bounds_are_refused():
    model = tiny_model("bst", "AutoModelForCausalLM")
    ids = torch.arange(2, 12)[None]
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    restarts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    for given, message in (
        ({"cu_seq_lens_q": bounds, "cu_seq_lens_k": torch.tensor([0, 5, 10])}, "cu_seq_lens_k must equal"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, r"must rise from 0 to T = 10; got \[0, 4, 9\]"),
        ({"cu_seq_lens_q": bounds.float()}, "must be .* int32 or int64"),
        ({"cu_seq_lens_q": bounds, "attention_mask": torch.ones_like(ids)}, "together with attention_mask"),
        ({"cu_seq_lens_q": bounds, "past_key_values": DynamicCache(config=model.config)}, "with past_key_values"),
        ({"cu_seq_lens_k": bounds}, "cu_seq_lens_k must come with cu_seq_lens_q"),
        (
            {"position_ids": restarts, "attention_mask": torch.ones_like(ids)},
            "not restart together with attention_mask",
        ),
        ({"position_ids": restarts, "past_key_values": DynamicCache(config=model.config)}, "with past_key_values"),
        ({"seq_idx": torch.zeros(1, 9)}, r"seq_idx must be \(1, 10\); got \(1, 9\)"),
        ({"cu_seq_lens_q": bounds, "input_ids": ids.expand(2, -1)}, "must have a batch of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": ids, **given})


# ---- packed pairs ----

PAIRS = ((7, 4), (1, 6), (13, 1), (5, 5))
"""Lengths of documents and of their targets."""


def pairs(model):
    generator = torch.Generator().manual_seed(1)
    names = ("input_ids", "labels")
    return [
        {
            name: torch.randint(2, 64, (1, length), generator=generator)
            for name, length in zip(names, pair, strict=True)
        }
        for pair in PAIRS
    ]


def packed_pairs(examples, *, padding=(0, 0)):
    """One row of all pairs, each column with padding behind them, which is a sequence of its own."""
    batch = {}
    names = {"input_ids": "position_ids", "labels": "decoder_position_ids"}
    for (name, of_positions), free, value in zip(names.items(), padding, (0, -100), strict=True):
        columns = [*(example[name] for example in examples), torch.full((1, free), value)]
        batch[name] = torch.cat(columns, dim=1)
        batch[of_positions] = torch.cat([torch.arange(column.shape[1]) for column in columns])[None]
    return batch


@pytest.mark.parametrize("padding", [(0, 0), (3, 2), (0, 4), (2, 0)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"combine_mode": "concat"},
        {"attention_type": "chunk"},
        {"decoder_position": "learned_absolute", "max_decoder_position_embeddings": 8},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_packed_pairs_are_what_each_is_alone(options, padding):
    """Outputs, losses and gradients."""
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", **options).double()
    examples = pairs(model)
    outputs = [model(**example) for example in examples]
    wanted = torch.cat([output.logits for output in outputs], dim=1)
    output = model(**packed_pairs(examples, padding=padding))
    precision = "float32" if options.get("attn_implementation") == "eager" else "float64"
    kept = output.logits[:, : wanted.shape[1]]
    assert_close(kept, wanted, f"{precision} gradient")
    counts = [length for _, length in PAIRS]
    loss = sum(count * alone.loss for count, alone in zip(counts, outputs, strict=True)) / sum(counts)
    assert_close(output.loss, loss, "float32")
    for got, expected in zip(gradients(model, kept), gradients(model, wanted), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(got, expected, f"{precision} gradient")


def test_rows_of_packed_pairs():
    """Two rows with pairs in other orders are what each row is alone."""
    model = tiny_model("spade", "AutoModelForSeq2SeqLM").double()
    examples = pairs(model)
    rows = [packed_pairs(examples), packed_pairs(examples[::-1])]
    wanted = torch.cat([model(**row).logits for row in rows])
    assert_close(model(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]}).logits, wanted, "float64")


def test_pairs_that_do_not_fit_are_refused():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    batch = packed_pairs(pairs(model))
    for given, message in (
        ({"decoder_position_ids": None}, "position_ids must not pack several .*which position_ids and decoder_pos"),
        ({"position_ids": None}, r"must restart equally often .*got \[1\] documents and \[4\] targets"),
        ({"decoder_position_ids": torch.arange(16)[None]}, r"got \[4\] documents and \[1\] targets"),
        ({"decoder_position_ids": batch["decoder_position_ids"][:, :9]}, r"must be \(1, 16\); got \(1, 9\)"),
        ({"attention_mask": torch.ones_like(batch["input_ids"])}, "not restart together with attention_mask"),
        ({"decoder_attention_mask": torch.ones(1, 16, dtype=torch.long)}, "not restart together with attention_mask"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**batch, **given})
    rows = {"position_ids": torch.arange(26)[None], "decoder_position_ids": torch.arange(16)[None]}
    whole = {name: batch[name] for name in ("input_ids", "labels")}
    assert torch.equal(model(**whole, **rows).logits, model(**whole).logits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model_type", "auto_class"), REFUSING)
def test_what_reads_whole_sequences_refuses_packed_ones(model_type, auto_class, form):
    model = tiny_model(model_type, auto_class)
    batch = FORMS[form]([{"input_ids": torch.arange(2, 2 + length)} for length in LENGTHS])
    inputs = {**tiny_inputs(model, batch=1), **batch}
    inputs.pop("labels")
    if "pair_input_ids" in inspect.signature(model.forward).parameters:
        inputs["pair_input_ids"] = inputs["input_ids"]
    with pytest.raises(ValueError, match=f"{form} must not pack several sequences into a row: "):
        model(**inputs)
