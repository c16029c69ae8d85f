"""Time training steps, prompts and decoding of complete models against transformers' for `benchmarks.gpu`.

Language models and encoder-decoders of one width and depth, random weights, bfloat16 autocast; batches hold the same
number of tokens, at least one sequence.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_kernels import Clock
from benchmarks.record import Row

LENGTHS = (4096, 65536, 16384, 1024)  # the most important first, in case time runs out
LONGEST = max(LENGTHS)
TARGET = 256  # tokens of an encoder-decoder's target
DECODED = 32  # tokens
VOCABULARY = 32128
LANGUAGE_MODELS = ("spade", "chela", "bst", "llama-sdpa", "mamba2")
ENCODER_DECODERS = ("spade-seq2seq", "srformer_t5", "t5-sdpa", "longt5-tglobal")


def _shape(small: bool) -> dict[str, int]:
    width, layers = (32, 2) if small else (768, 8)
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // (16 if small else 64)}


def _t5(small: bool, **fields: Any) -> dict[str, Any]:
    shape = _shape(small)
    return {
        "d_model": shape["hidden_size"],
        "d_ff": 4 * shape["hidden_size"],
        "d_kv": shape["hidden_size"] // shape["num_attention_heads"],
        "num_layers": shape["num_hidden_layers"],
        "num_heads": shape["num_attention_heads"],
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
        **fields,
    }


def build(name: str, small: bool) -> Any:
    """Build one of the models with random weights."""
    import transformers

    import hf_hybrid

    shape, tokens = _shape(small), {"vocab_size": VOCABULARY}
    inner = {"intermediate_size": 4 * shape["hidden_size"]}
    window = 16 if small else 512
    configs: dict[str, Callable[[], Any]] = {
        "spade": lambda: hf_hybrid.SpadeConfig(
            is_decoder=True, is_encoder_decoder=False, local_radius=window - 1, **shape, **inner, **tokens
        ),
        "chela": lambda: hf_hybrid.ChelaConfig(
            is_decoder=True, long_kernel_size=8 * window, long_kernel_groups=shape["num_attention_heads"],
            **shape, **inner, **tokens,
        ),
        "bst": lambda: hf_hybrid.BstConfig(window=window, **shape, **inner, **tokens),
        "llama-sdpa": lambda: transformers.LlamaConfig(
            max_position_embeddings=2 * LONGEST, intermediate_size=8 * shape["hidden_size"] // 3, **shape, **tokens
        ),
        "mamba2": lambda: transformers.Mamba2Config(
            hidden_size=shape["hidden_size"], num_hidden_layers=shape["num_hidden_layers"],
            num_heads=2 * shape["num_attention_heads"], head_dim=shape["hidden_size"] // shape["num_attention_heads"],
            n_groups=1, **tokens,
        ),
        "spade-seq2seq": lambda: hf_hybrid.SpadeConfig(
            local_radius=window // 4, num_decoder_layers=shape["num_hidden_layers"], **shape, **inner, **tokens
        ),
        "srformer_t5": lambda: hf_hybrid.SRformerT5Config(**_t5(small)),
        "t5-sdpa": lambda: transformers.T5Config(**_t5(small)),
        "longt5-tglobal": lambda: transformers.LongT5Config(
            **_t5(small, encoder_attention_type="transient-global", local_radius=window // 4)
        ),
    }  # fmt: skip
    auto = transformers.AutoModelForCausalLM if name in LANGUAGE_MODELS else transformers.AutoModelForSeq2SeqLM
    options = {"attn_implementation": "sdpa"} if name.endswith("sdpa") else {}
    torch.manual_seed(0)
    return auto.from_config(configs[name](), **options)


def race(length: int, names: tuple[str, ...], clock: Clock, small: bool, rounds: int) -> Iterator[Row]:
    """Time models at one length, one after the other.

    Yields:
        A row for each model, with its error if it fails.
    """
    for name in names:
        row = {"model": name, "length": str(length)}
        try:
            yield row | _measure(name, length, clock, small, rounds) | {"outcome": "ok"}
        except Exception as error:  # out of memory, or a model that cannot run here, is a result
            said = str(error).splitlines()[0] if str(error) else ""
            memory = isinstance(error, torch.OutOfMemoryError)
            yield row | {"outcome": f"{'' if memory else 'raised: '}{type(error).__name__}: {said}"[:160]}
        if clock.device.type == "cuda":
            gc.collect()  # reference cycles keep models alive
            torch.cuda.empty_cache()


def _measure(name: str, length: int, clock: Clock, small: bool, rounds: int) -> Row:
    model = build(name, small).to(clock.device)
    batch = 2 if small else max(1, 16384 // length)
    ids = torch.randint(3, 999, (batch, length), device=clock.device)
    target = torch.randint(3, 999, (batch, min(TARGET, length)), device=clock.device)
    inputs = {"input_ids": ids, "labels": ids if name in LANGUAGE_MODELS else target}

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(clock.device.type, torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()

    step()
    peak = clock.peak(step)
    spent = clock.interleaved({"step": step}, rounds)["step"]
    model.zero_grad(set_to_none=True)
    row = {
        "parameters": str(model.num_parameters()),
        "batch": str(batch),
        "step_ms": f"{spent:.4g}",
        "tokens_s": f"{1e3 * batch * length / spent:.4g}",
        "peak_mib": "" if peak is None else f"{peak:.0f}",
    }
    return row | _decoding(model.eval().to(torch.bfloat16), name, ids, clock, rounds)


@torch.no_grad()
def _decoding(model: Any, name: str, ids: torch.Tensor, clock: Clock, rounds: int) -> Row:
    """Return the milliseconds of a prompt and per greedily decoded token."""
    fixed = {"do_sample": False, "pad_token_id": 0}
    if name in LANGUAGE_MODELS:
        fixed |= {"eos_token_id": None}

    def generate(count: int) -> Callable[[], object]:
        return lambda: model.generate(ids, min_new_tokens=count, max_new_tokens=count, **fixed)

    few = {"prompt": generate(1), "all": generate(1 + DECODED)}
    spent = clock.interleaved(few, max(1, rounds // 4))
    return {"prompt_ms": f"{spent['prompt']:.4g}", "token_ms": f"{(spent['all'] - spent['prompt']) / DECODED:.4g}"}
