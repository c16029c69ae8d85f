"""What every registered model class must do, run over the table in `hf_hybrid.models.auto`."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_hybrid
from hf_hybrid.models.auto import ARCHITECTURES, register

from ..matrix import some
from ..tolerances import assert_close
from . import test_numerics, test_remote_code, test_triton_models
from .golden import GOLDEN_FOLDER, golden_record
from .tiny import (
    ALWAYS_TIED,
    ATTENTION_FREE,
    DECODER_CASES,
    DECODERS,
    FIELD_NAMES,
    FIRST_CASES,
    GENERATIVE,
    MODEL_CLASSES,
    NEEDS_DICT,
    PADDED_SIDES,
    ROLES,
    SCALED,
    TINY_CONFIGS,
    is_causal_lm,
    main_output,
    new_model,
    tiny_config,
    tiny_inputs,
    tiny_labels,
    tiny_model,
)

every_class = pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)
every_generative = pytest.mark.parametrize(("model_type", "auto_class"), GENERATIVE)
every_decoder = pytest.mark.parametrize(("model_type", "auto_class", "case"), DECODER_CASES)


def test_every_architecture_is_in_the_tables_of_the_tests():
    assert set(TINY_CONFIGS) == set(ARCHITECTURES)
    for table in (test_triton_models.OPS, test_triton_models.FEWEST, test_triton_models.MORE):
        assert set(table) == set(ARCHITECTURES)
    assert set(test_remote_code.EXPORTED) == set(ARCHITECTURES)
    assert {model_type for model_type, *_ in test_numerics.MODELS.values()} == set(ARCHITECTURES)


def test_registration_twice_changes_nothing():
    register()
    for model_type, (config_class, models) in ARCHITECTURES.items():
        assert type(transformers.AutoConfig.for_model(model_type)) is config_class
        for auto_class, model_class in models.items():
            assert type(tiny_model(model_type, auto_class)) is model_class
            assert getattr(hf_hybrid, model_class.__name__) is model_class


@every_class
def test_round_trip_through_a_folder_is_exact(model_type, auto_class, tmp_path):
    model = tiny_model(model_type, auto_class)
    model.save_pretrained(tmp_path)
    loaded, info = getattr(transformers, auto_class).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path)}
    inputs = tiny_inputs(model)
    with torch.no_grad():
        assert_close(main_output(loaded.eval()(**inputs)), main_output(model(**inputs)), "exact")


@every_class
def test_a_loaded_model_trains_exactly_what_a_built_one_does(model_type, auto_class, tmp_path):
    model = tiny_model(model_type, auto_class)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(pretrained_model_name_or_path=tmp_path)

    def trained(module):
        return {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    assert trained(loaded) == trained(model)


@every_class
def test_a_missing_weight_is_initialised_as_at_construction(model_type, auto_class, tmp_path):
    """from_pretrained builds without memory first: whatever a checkpoint lacks must come from `_init_weights`."""
    model = new_model(model_type, auto_class)
    state = model.state_dict()
    model.save_pretrained(tmp_path, state_dict={next(iter(state)): next(iter(state.values()))})
    loaded = []
    for _ in range(2):
        torch.manual_seed(3)
        loaded.append(getattr(transformers, auto_class).from_pretrained(tmp_path))
    for (name, first), (_, second) in zip(loaded[0].state_dict().items(), loaded[1].state_dict().items(), strict=True):
        assert torch.isfinite(first).all(), name
        assert torch.equal(first, second), name
        built = state[name].float()
        if first.numel() >= 64 and built.std() > 0:
            assert 0.5 < (first.float().std() / built.std()).item() < 2, f"{name} starts at another scale"


@pytest.mark.parametrize(
    ("model_type", "auto_class", "side"),
    [(*names, side) for names in MODEL_CLASSES for side in PADDED_SIDES.get(names[0], ("left", "right"))],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(model_type, auto_class, side, attention):
    model = tiny_model(model_type, auto_class, attn_implementation=attention)
    inputs = tiny_inputs(model, batch=1)
    length, pad = inputs["input_ids"].shape[1], 6
    padding = torch.zeros(1, pad, dtype=torch.long)
    ones = torch.ones(1, length, dtype=torch.long)
    order = [padding, inputs["input_ids"]] if side == "left" else [inputs["input_ids"], padding]
    mask = [padding, ones] if side == "left" else [ones, padding]
    padded = {**inputs, "input_ids": torch.cat(order, 1), "attention_mask": torch.cat(mask, 1)}
    with torch.no_grad():
        expected, actual = main_output(model(**inputs)), main_output(model(**padded))
    if "decoder_input_ids" not in inputs and expected.dim() == 3:  # something for each token
        actual = actual[:, -length:] if side == "left" else actual[:, :length]
    assert_close(actual, expected, "float32 model")


@every_class
def test_eager_and_default_attention_agree(model_type, auto_class):
    outputs = []
    for attention in ("sdpa", "eager"):
        model = tiny_model(model_type, auto_class, attn_implementation=attention)
        outputs.append(main_output(model(**tiny_inputs(model, length=23))))
    assert_close(outputs[0], outputs[1], "float32 model")


@every_class
def test_hidden_states_and_attentions_are_recorded(model_type, auto_class):
    model = tiny_model(model_type, auto_class, attn_implementation="eager")
    outputs = model(**tiny_inputs(model), output_hidden_states=True, output_attentions=True)
    layers = model.config.num_hidden_layers
    encoder = model.config.is_encoder_decoder and "encoder_hidden_states" in outputs
    hidden = outputs.encoder_hidden_states if encoder else outputs.hidden_states
    attentions = outputs.encoder_attentions if encoder else outputs.attentions
    assert len(hidden) == layers + 1
    if model_type in ATTENTION_FREE:
        assert attentions is None
    else:
        assert len(attentions) == layers
        assert_close(attentions[0].sum(-1), torch.ones_like(attentions[0].sum(-1)), "float32")
    base = outputs
    if not encoder and "last_hidden_state" not in outputs:  # keys in a cache lie in another order of memory
        base = model.base_model(**tiny_inputs(model), use_cache="logits" in outputs and is_causal_lm(model))
    assert_close(hidden[-1], base.encoder_last_hidden_state if encoder else base.last_hidden_state, "exact")
    if encoder:
        assert len(outputs.decoder_attentions) == len(outputs.cross_attentions) == model.config.num_decoder_layers
    asked = ((True, {"return_dict": False}), (False, {}))
    for model.config.return_dict, options in asked[: 1 if model_type in NEEDS_DICT else 2]:
        as_tuple = model(**tiny_inputs(model), **options)
        assert isinstance(as_tuple, tuple)
        assert_close(as_tuple[0], outputs[0], "exact")


# of each case a long prompt, and one that ends at, before or behind the first window or is a token alone, in turn
SPLITS = [(*case, split) for case in DECODER_CASES for split in (1, 3, 4, 5, 6, 7, 13)]
FEW_SPLITS = [(*case, split) for row, case in enumerate(DECODER_CASES) for split in ((1, 4, 5, 6)[row % 4], 13)]


@pytest.mark.parametrize(("model_type", "auto_class", "case", "split"), some(SPLITS, *FEW_SPLITS))
def test_cached_decoding_equals_the_full_forward(model_type, auto_class, case, split):
    """A prompt of `split` tokens, a chunk of two more, then token by token, against one uncached pass."""
    model = tiny_model(model_type, auto_class, **DECODERS[model_type, auto_class][case]).double()
    inputs = tiny_inputs(model, length=17, target_length=17)
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    tokens = inputs.pop(key)
    with torch.no_grad():
        expected = model(**inputs, **{key: tokens}, use_cache=False).logits
        if model.config.is_encoder_decoder:
            inputs = {"encoder_outputs": model.get_encoder()(**inputs)}
        pieces, cache, start = [], None, 0
        for stop in [split, split + 2, *range(split + 3, tokens.shape[1] + 1)]:
            step = model(**inputs, **{key: tokens[:, start:stop]}, past_key_values=cache, use_cache=True)
            pieces.append(step.logits)
            cache, start = step.past_key_values, stop
    assert_close(torch.cat(pieces, 1), expected, "float64 decode")


@every_decoder
def test_generate_is_the_same_with_and_without_cache(model_type, auto_class, case):
    model = tiny_model(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    inputs = tiny_inputs(model)
    inputs.pop("decoder_input_ids", None)
    strategies = ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"num_beams": 2, "do_sample": True})
    first = (model_type, auto_class, case) in FIRST_CASES
    tokens = 12 if first else 8
    # the last one alone reorders every cache; that steps are right without it, the test above shows
    for strategy in strategies if first else strategies[-1:]:
        sequences = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            sequences.append(
                model.generate(**inputs, **strategy, max_new_tokens=tokens, min_new_tokens=tokens, use_cache=use_cache)
            )
        assert torch.equal(*sequences), f"{strategy} differs with a cache"


@every_decoder
def test_rows_of_a_cache_can_be_repeated_moved_and_selected(model_type, auto_class, case):
    model = tiny_model(model_type, auto_class, **DECODERS[model_type, auto_class][case]).double()
    inputs = tiny_inputs(model, length=13, target_length=13)
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    tokens = inputs.pop(key)
    rows = torch.tensor([1, 0, 1])
    with torch.no_grad():
        expected = model(**inputs, **{key: tokens}, use_cache=False).logits[rows, 8:]
        cache = model(**inputs, **{key: tokens[:, :8]}, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 1, 0, 2]))
        cache.batch_select_indices(torch.tensor([0, 2, 3]))
        inputs = {name: x[rows] for name, x in inputs.items()}
        rest = model(**inputs, **{key: tokens[rows, 8:]}, past_key_values=cache, use_cache=True).logits
    assert_close(rest, expected, "float64 decode")


@every_decoder
def test_generate_with_padding_and_static_cache(model_type, auto_class, case):
    model = tiny_model(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    ids = tiny_inputs(model, batch=1)["input_ids"]
    settings = {"max_new_tokens": 7, "min_new_tokens": 7}
    expected = model.generate(input_ids=ids, **settings)
    padding, ones = torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)
    left = "left" in PADDED_SIDES.get(model_type, ("left",))
    padded = {
        "input_ids": torch.cat([padding, ids] if left else [ids, padding], 1),
        "attention_mask": torch.cat([padding, ones] if left else [ones, padding], 1),
    }
    start = 0 if model.config.is_encoder_decoder else padding.shape[1]
    assert torch.equal(model.generate(**padded, **settings)[:, start:], expected)
    static = model.generate(input_ids=ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static, expected)


SDPA = [(*case, "sdpa") for case in MODEL_CLASSES]
FLEX = [(*case, "flex_attention") for case in MODEL_CLASSES if case[0] != "srformer_t5"]  # a CPU cannot run T5's


@pytest.mark.parametrize(("model_type", "auto_class", "attention"), some([*SDPA, *FLEX], *SDPA))
@torch.no_grad()
def test_flags_say_which_attention_there_is(model_type, auto_class, attention):
    model = tiny_model(model_type, auto_class)
    if model._supports_sdpa if attention == "sdpa" else model._supports_flex_attn:
        other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=attention).eval()
        other.load_state_dict(model.state_dict())
        inputs = tiny_inputs(model)
        assert_close(main_output(other(**inputs)), main_output(model(**inputs)), "float32 model")
    else:
        with pytest.raises(ValueError, match=f"{type(model).__name__} does not support"):
            type(model)._from_config(copy.deepcopy(model.config), attn_implementation=attention)


@every_generative
def test_continuous_batching_is_refused(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    with pytest.raises(ValueError, match=f"continuous batching.*{type(model).__name__} does not have"):
        model.generate_batch([[3, 4], [5]])


@every_class
def test_gradient_checkpointing_changes_no_gradient(model_type, auto_class):
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = tiny_model(model_type, auto_class).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        calls.append(Counter())
        layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
        for name, layer in layers.items():
            # a layer's own hooks lie outside of what is checkpointed, those of its parts inside
            part = next(m for m in layer.modules() if m is not layer and not isinstance(m, nn.ModuleList))
            part.register_forward_pre_hook(lambda *_, count=calls[-1], name=name: count.update([name]))
        torch.manual_seed(4)  # dropout must draw the same masks
        main_output(model(**tiny_inputs(model))).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(calls[0]) >= model.config.num_hidden_layers
    assert calls[1] == {name: 2 * count for name, count in calls[0].items()}, "each layer must be computed twice"
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, "float32 gradient")


@every_class
def test_every_trained_parameter_gets_a_gradient(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    main_output(model(**tiny_inputs(model))).square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


@every_generative
def test_loss_is_the_mean_cross_entropy(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    labels = tiny_labels(model)
    labels[0, -2:] = -100
    inputs = tiny_inputs(model, length=labels.shape[1])
    inputs.pop("decoder_input_ids", None)
    outputs = model(**inputs, labels=labels)
    logits = outputs.logits
    if is_causal_lm(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_close(outputs.loss, expected, "float32")


@pytest.mark.parametrize(
    ("model_type", "auto_class", "recorded"),
    [
        (*key, recorded)
        for key in MODEL_CLASSES
        for recorded in ("attentions", "hidden_states")
        if recorded == "hidden_states" or key[0] not in ATTENTION_FREE
    ],
)
def test_what_is_recorded_stands_in_its_own_field(model_type, auto_class, recorded):
    model = tiny_model(model_type, auto_class, attn_implementation="eager")
    inputs = tiny_inputs(model)
    outputs = model(**inputs, **{f"output_{recorded}": True})
    both = model(**inputs, output_attentions=model_type not in ATTENTION_FREE, output_hidden_states=True)
    names = {name for name in both if name.endswith(recorded)}
    assert {name for name in outputs if name.endswith(("attentions", "hidden_states"))} == names
    for name in names:
        assert [x.shape for x in outputs[name]] == [x.shape for x in both[name]]
        assert all(torch.equal(x, y) for x, y in zip(outputs[name], both[name], strict=True))


@pytest.mark.parametrize(
    ("model_type", "auto_class", "case"), [case for case in DECODER_CASES if case[0] not in ATTENTION_FREE]
)
def test_returned_attentions_get_a_gradient(model_type, auto_class, case):
    model = tiny_model(model_type, auto_class, attn_implementation="eager", **DECODERS[model_type, auto_class][case])
    outputs = model(**tiny_inputs(model), output_attentions=True, use_cache=False)
    returned = [x for name, found in outputs.items() if name.endswith("attentions") for x in found]
    for probabilities in returned:
        probabilities.retain_grad()
    outputs.logits.square().sum().backward()
    assert all(probabilities.grad.abs().sum() > 0 for probabilities in returned)


@every_class
def test_a_config_can_ask_for_gradient_checkpointing(model_type, auto_class):
    config = tiny_config(model_type, **ROLES.get((model_type, auto_class), {}))
    config.gradient_checkpointing = True
    model = getattr(transformers, auto_class).from_config(config)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert "gradient_checkpointing" not in model.config.to_dict()


@every_generative
def test_a_config_can_turn_the_cache_off(model_type, auto_class):
    built = tiny_model(model_type, auto_class, use_cache=False)
    changed = tiny_model(model_type, auto_class)
    assert changed(**tiny_inputs(changed)).past_key_values is not None
    changed.config.use_cache = False
    for model in (built, changed):
        assert model(**tiny_inputs(model)).past_key_values is None
        assert model(**tiny_inputs(model), use_cache=True).past_key_values is not None


# clients such as TRL multiply hidden states and head themselves, to save the memory of logits
HEADS = [key for key in MODEL_CLASSES if key[1].endswith(("CausalLM", "MaskedLM", "Seq2SeqLM"))]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("model_type", "auto_class"), HEADS)
def test_logits_are_the_head_of_the_last_hidden_states(model_type, auto_class, scaled):
    if model_type == "chela":
        scaled = None
    model = tiny_model(model_type, auto_class, **({} if scaled is None else {"scale_decoder_outputs": scaled}))
    inputs = tiny_inputs(model)
    logits = model(**inputs).logits
    if not hasattr(model, "model"):  # T5's classes have no body of their own: there is nothing to read a head with
        assert model_type == "srformer_t5"
        return
    states = model.model(**inputs).last_hidden_state
    assert torch.equal(model.lm_head(states), logits)
    assert torch.equal(nn.functional.linear(states, model.lm_head.weight), logits)
    assert torch.equal(model.get_output_embeddings()(states), logits)


@pytest.mark.parametrize("model_type", ["bst", "spade"])
def test_a_body_without_a_head_does_not_scale_its_states(model_type, tmp_path):
    model = tiny_model(model_type, "AutoModelForCausalLM", scale_decoder_outputs=True)
    model.save_pretrained(tmp_path)
    inputs = tiny_inputs(model)
    states = transformers.AutoModel.from_pretrained(tmp_path)(**inputs).last_hidden_state
    expected = model.model(**inputs).last_hidden_state
    assert_close(states * model.config.hidden_size**-0.5, expected, "float32 model")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_clients_that_read_the_head_fail_with_an_adaptive_vocabulary(model_type, tied):
    adaptive = DECODERS[model_type, "AutoModelForCausalLM"]["adaptive vocabulary"]
    model = tiny_model(model_type, "AutoModelForCausalLM", **adaptive, tie_word_embeddings=tied)
    inputs = tiny_inputs(model)
    with pytest.raises(AttributeError, match="weight"):
        _ = model.lm_head.weight
    states = model.model(**inputs).last_hidden_state
    if tied:
        with pytest.raises(ValueError, match="embedding must be the tied one"):
            model.lm_head(states)
    else:
        assert torch.equal(model.lm_head(states), model(**inputs).logits)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_labels_may_be_shifted_already(model_type, adaptive):
    options = DECODERS[model_type, "AutoModelForCausalLM"]["adaptive vocabulary"] if adaptive else {}
    model = tiny_model(model_type, "AutoModelForCausalLM", **options)
    inputs = tiny_inputs(model)
    labels = inputs["input_ids"].clone()
    labels[0, 3:5] = -100
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    wanted = model(**inputs, labels=labels).loss
    for given in ({"shift_labels": shifted}, {"shift_labels": shifted, "labels": torch.zeros_like(labels)}):
        assert_close(model(**inputs, **given).loss, wanted, "float32")
        counted = model(**inputs, **given, num_items_in_batch=40).loss
        assert_close(counted, wanted * (shifted != -100).sum() / 40, "float32")
    with pytest.raises(ValueError, match="logits_to_keep must be 0"):
        model(**inputs, shift_labels=shifted, logits_to_keep=1)
    with pytest.raises(ValueError, match=r"shift_labels must be \(2, 11\); got \(2, 10\)"):
        model(**inputs, shift_labels=shifted[:, 1:])


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
@every_class
def test_sequences_divided_among_processes_are_refused(model_type, auto_class, size, monkeypatch):
    model = tiny_model(model_type, auto_class)
    assert not model.supports_context_parallel
    state = {"parallelism_config": ParallelismConfig(**{size: 2})}  # what accelerate keeps for the process
    monkeypatch.setattr(AcceleratorState, "_shared_state", state)
    with pytest.raises(ValueError, match=f"{size} must be 1: .*; got 2"):
        model(**tiny_inputs(model))


class _Samples(torch.utils.data.Dataset):
    def __init__(self, model, count):
        self.rows = []
        for row in range(count):
            length = 4 + row % 3  # unequal numbers of labels per batch, or a wrong mean of means would go unseen
            labels = torch.cat(
                [tiny_labels(model, batch=1, length=length, seed=row)[0], torch.full((7 - length,), -100)]
            )
            input_ids = tiny_inputs(model, batch=1, length=7, seed=row)["input_ids"][0]
            input_ids[0] = 2 + row  # nothing before it could tell two rows apart
            self.rows.append({"input_ids": input_ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@every_generative
def test_gradient_accumulation_is_one_large_batch(model_type, auto_class, tmp_path):
    losses, weights = [], []
    for batch, accumulate in ((8, 1), (2, 4)):
        model = tiny_model(model_type, auto_class, dropout=0.0, attention_dropout=0.0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            optim="sgd",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=_Samples(model, 8))
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), "float32 model")
    assert_close(weights[1], weights[0], "float32 model")


@every_generative
def test_overfits_eight_samples(model_type, auto_class):
    model = tiny_model(model_type, auto_class, dropout=0.0, attention_dropout=0.0, initializer_range=0.05).train()
    samples = _Samples(model, 8)
    batch = {key: torch.stack([row[key] for row in samples.rows]) for key in samples.rows[0]}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(75):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def _labelled_inputs(model, auto_class):
    """Inputs with the labels of the task, where it has any."""
    inputs = tiny_inputs(model, length=7)
    if auto_class.endswith("Seq2SeqLM"):
        inputs.pop("decoder_input_ids")  # the model makes them of the labels
    if auto_class.endswith("QuestionAnswering"):
        return {**inputs, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 3])}
    if auto_class.endswith("SequenceClassification"):
        return {**inputs, "labels": torch.tensor([0, 2])}
    if auto_class.endswith("TokenClassification"):
        return {**inputs, "labels": tiny_labels(model) % 3}
    return {**inputs, "labels": tiny_labels(model)} if auto_class.endswith("LM") else inputs


# test_losses.py compiles such a step of CHELA, test_checkpointing.py one of BST
@pytest.mark.parametrize(("model_type", "auto_class"), some(MODEL_CLASSES, ("spade", "AutoModelForSeq2SeqLM")))
def test_a_training_step_compiles_as_one_graph(model_type, auto_class):
    """Forward, loss and backward: a break in the graph is an error, and compiled it computes what it does plain.

    Of the classes that share their layers with a generative one, the forward alone is compiled.
    """
    torch.compiler.reset()  # models of one class would count as recompilations
    fields = {"dropout": 0.0, "attention_dropout": 0.0}
    backend = "aot_eager" if (model_type, auto_class) in GENERATIVE else "eager"
    if backend == "eager":  # their layers are those of the generative class
        fields |= {name: 1 for name in TINY_CONFIGS[model_type] if name.endswith("_layers")}
    losses, gradients = [], []
    for compiled in (False, True):
        model = tiny_model(model_type, auto_class, **fields).train()
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        outputs = step(**_labelled_inputs(model, auto_class))
        losses.append(outputs.loss if "loss" in outputs else outputs.last_hidden_state.square().mean())
        losses[-1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_close(losses[1], losses[0], "float32 model")
    assert gradients[1].keys() == gradients[0].keys()
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, "float32 gradient")


@pytest.mark.parametrize(("model_type", "auto_class"), some(MODEL_CLASSES, *GENERATIVE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model_type, auto_class, dtype, tmp_path):
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    expected = main_output(model(**inputs))
    model.save_pretrained(tmp_path)
    half = getattr(transformers, auto_class).from_pretrained(tmp_path, dtype=dtype).eval()
    assert half.dtype == dtype
    actual = main_output(half(**inputs))
    assert actual.dtype == dtype
    # a whole model deep, errors add up: half a percent of the weights' precision each, compared by direction
    similarity = nn.functional.cosine_similarity(actual.float().flatten(), expected.flatten(), dim=0)
    assert similarity > 0.995
    with torch.autocast("cpu", torch.bfloat16):
        cast = main_output(model(**inputs))
    assert nn.functional.cosine_similarity(cast.float().flatten(), expected.flatten(), dim=0) > 0.995


@pytest.mark.parametrize(
    ("model_type", "auto_class", "tied"),
    [(*names, tied) for names in MODEL_CLASSES for tied in (True, False) if tied or names[0] not in ALWAYS_TIED],
)
def test_embeddings_resize(model_type, auto_class, tied):
    model = tiny_model(model_type, auto_class, tie_word_embeddings=tied)
    inputs = tiny_inputs(model)
    before, kind = main_output(model(**inputs)), type(model.get_input_embeddings())
    model.resize_token_embeddings(70)
    after = main_output(model(**inputs))
    assert model.config.vocab_size == 70
    assert_close(after[..., : before.shape[-1]], before, "float32 model")
    assert type(model.get_input_embeddings()) is kind
    inputs = {name: torch.full_like(ids, 69) for name, ids in inputs.items()}
    assert torch.isfinite(main_output(model(**inputs))).all()


@pytest.mark.parametrize(
    ("model_type", "auto_class", "scaled"),
    [(*names, scaled) for names in MODEL_CLASSES for scaled in (False, True) if not scaled or names[0] in SCALED],
)
def test_embeddings_are_what_a_model_is_given_in_place_of_ids(model_type, auto_class, scaled):
    model = tiny_model(model_type, auto_class, **({"scale_embeddings": True} if scaled else {}))
    inputs = tiny_inputs(model)
    expected = main_output(model(**inputs))
    ids = inputs.pop("input_ids")
    actual = main_output(model(inputs_embeds=model.get_input_embeddings()(ids), **inputs))
    assert_close(actual, expected, "exact")
    if scaled:
        factor = model.config.hidden_size**0.5
        assert_close(model.get_input_embeddings()(ids), factor * model.get_input_embeddings().weight[ids], "exact")


@every_class
def test_any_length_from_one_token_on(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    for length in (1, 2, 5, 9, 10, 64, 300):
        assert torch.isfinite(main_output(model(**tiny_inputs(model, length=length, target_length=1)))).all()


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_names_and_defaults_are_as_recorded(model_type):
    """State-dict names, shapes and config fields are public; `python -m tests.models.golden` records a change."""
    recorded = json.loads(Path(GOLDEN_FOLDER, f"{model_type}.json").read_text())
    assert golden_record(model_type) == recorded
    idle = [name for name, variant in recorded["variants"].items() if not all(variant.values())]
    assert not idle, "these variants change no weight"


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_config_survives_json_and_refuses_wrong_types(model_type, tmp_path):
    config = tiny_config(model_type)
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    width = FIELD_NAMES.get(model_type, {}).get("hidden_size", "hidden_size")
    with pytest.raises(Exception, match=width):
        tiny_config(model_type, hidden_size="wide")
