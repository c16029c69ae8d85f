"""The command that pre-trains SPADE base: beside the paper's numbers, and the page's estimates counted again."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from benchmarks.workloads import Stored
from hf_hybrid import SpadeConfig
from hf_hybrid.data.denoising import most_spans
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.model.config import load_config
from tests.pages import SCRIPTS, TEXTS, commands

PAGE = "docs/training/pretraining.md"
VOCABULARY = 32_100  # tokens of google-t5/t5-base


@pytest.fixture(scope="module")
def command():
    """Flags by group, and the GPUs."""
    (found,) = (part for part in commands(TEXTS[PAGE]) if "torchrun" in part.before)
    gpus = int(found.before[found.before.index("--nproc_per_node") + 1])
    return *parse_arguments(SCRIPTS["pretrain"], [*found.arguments, "--use_cpu"]), gpus


def test_the_command_is_the_papers(command):
    """Table 8 and section 5.1."""
    model_args, data_args, training_args, gpus = command
    rows = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * gpus
    assert rows == 2048
    assert (training_args.max_steps, training_args.warmup_steps) == (125_000, 10_000)
    assert (training_args.learning_rate, training_args.weight_decay) == (4e-4, 0.01)
    assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.98, 1e-6)
    assert training_args.max_grad_norm == 0
    assert data_args.max_seq_length == 1024
    config = _config(model_args)
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (768, 3072, 12)
    assert (config.num_hidden_layers, config.num_decoder_layers, config.global_layers) == (12, 12, [0])
    assert (config.ssm_type, config.ssm_freeze, config.combine_mode) == ("s4", "all", "concat")
    assert (config.attention_type, config.local_radius, config.norm_position) == ("window", 128, "post")
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (32, 128)
    assert config.dropout == 0.1


def _kept(config, source, labels, rows, **layers):
    """Bytes that autograd keeps of so many pieces, the weights aside."""
    config = SpadeConfig.from_dict({**config.to_dict(), "vocab_size": 4000, "global_layers": [0], **layers})
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    sides = [torch.randint(3, 4000, (rows, length)) for length in (source, labels)]
    with torch.autocast("cpu", dtype=torch.bfloat16), Stored(*model.parameters()) as stored:
        model(input_ids=sides[0], labels=sides[1], skip_logits=True)
    return stored.bytes


def _activations(config, source, labels, rows):
    """Bytes of so many pieces in all layers, from models of one layer and of two."""
    few = {"num_hidden_layers": 1, "num_decoder_layers": 1}
    per_piece = []
    for more in ({}, {"num_hidden_layers": 2}, {"num_decoder_layers": 2}):
        one, two = (_kept(config, source, labels, number, **(few | more)) for number in (1, 2))
        per_piece.append(two - one)  # without autocast's copies of the weights
    both, *deeper = per_piece
    return rows * (both + (config.num_hidden_layers - 1) * sum(bytes_kept - both for bytes_kept in deeper))


def test_the_estimates_are_those_of_the_page(command):
    model_args, data_args, training_args, gpus = command
    config = _config(model_args)
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = data_args.max_seq_length - 1  # and the end token
    noise = round(text * data_args.density)
    spans = most_spans(text, density=data_args.density, mean_length=data_args.mean_length)
    source, labels = text - noise + spans + 1, noise + spans + 1
    activations = _activations(config, source, labels, training_args.per_device_train_batch_size)
    layers = config.num_hidden_layers
    square = config.hidden_size**2
    feed_forward = 2 * config.hidden_size * config.intermediate_size
    encoder = layers * (4 * square + feed_forward) + 2 * square  # the last of both branches
    decoder = layers * (6 * square + feed_forward) + config.vocab_size * config.hidden_size
    keys = layers * 2 * square  # and values of the source, in the decoder
    plain = 6 * (source * (encoder + keys) + labels * decoder)
    piece = 1.1 * plain
    rows = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * gpus
    run = rows * training_args.max_steps * piece
    said = " ".join(TEXTS[PAGE].split())
    for words in (
        f"{parameters / 1e6:.0f} million parameters in float32 are 16 bytes each, {16 * parameters / 1e9:.1f} GB",
        f"6 bytes each, {6 * parameters / 1e9:.1f} GB",
        f"activations of {training_args.per_device_train_batch_size} pieces {activations / 1e9:.1f} GB",
        f"over {config.vocab_size:,} tokens",
        f"{source} source tokens and {labels} labels, and costs about {piece / 1e12:.2f} TFLOP",
        f"that it multiplies, {plain / 1e12:.2f}, and a tenth more",
        f"The run is {run:.1e} FLOP".replace("e+", "e"),
        f"that is {run / (0.3 * 312e12 * gpus) / 3600:.0f} hours on eight",
        f"990 TFLOP/s, {run / (0.25 * 990e12 * gpus) / 3600:.0f} hours",
    ):
        assert words in said, words


def _config(model_args):
    config = load_config(model_args, AutoModelForSeq2SeqLM)
    config.vocab_size = VOCABULARY
    return config
