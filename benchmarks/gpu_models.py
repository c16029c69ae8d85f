"""Check complete models, and time their training steps, prompts and decoding against peers, for `benchmarks.gpu`.

First, small models of ours in float32, with padding, must compute what they do on a CPU: outputs, all gradients and
the tokens that they decode. What is timed are language models and encoder-decoders of one width and about as many
parameters (a peer with other layers has more or fewer of them, or another feed-forward network), random weights, no
dropout, bfloat16 autocast; batches hold the same number of tokens, at least one sequence. From `LONG` tokens on, our
models compute the loss without the logits of all tokens first, as they do in the training scripts, and then with them,
as the peers do.
"""

import copy
import gc
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_kernels import Clock, error_line, fingerprint, kernels_are_due, relative_error
from benchmarks.gpu_paths import Key, code_of, launched
from benchmarks.gpu_tuning import Cell
from benchmarks.record import Row

LENGTHS = (4096, 65536, 16384, 1024)  # the most important first, in case time runs out
LONG, LONGEST = 16384, max(LENGTHS)
TARGET = 256  # tokens of an encoder-decoder's target
DECODED = 32  # tokens
VOCABULARY = 32128
LANGUAGE_MODELS = ("spade", "chela", "bst", "llama-flash", "llama-sdpa", "mamba2", "gated-deltanet")
ENCODER_DECODERS = ("spade-seq2seq", "srformer_t5", "t5-sdpa", "longt5-tglobal", "pegasus-x")
OURS = ("spade", "chela", "bst", "spade-seq2seq", "srformer_t5")
PACKAGES = {"gated-deltanet": "fla"}  # peers that need another package than transformers
LOGITS, NO_LOGITS = "logits", "without logits"
CHECKED = "checked"
ALLOWED = 2e-5
"""Relative error of a small model's outputs and of each gradient, in float32, against a CPU."""
KEYS = ("model", "length", "loss", "fingerprint")
# fmt: off
COLUMNS = (
    *KEYS, "code", "parameters", "batch", "step_ms", "tokens_s", "peak_mib", "prompt_ms", "token_ms", "decoding",
    "outcome",
)
# fmt: on


def cells(clock: Clock, small: bool) -> Iterator[Cell]:
    """Yield the key of each row and what measures it; a peer that is not installed has one row."""
    attention = "llama-sdpa" if runs_flash(clock.device) else "llama-flash"
    there = [name for name in (*LANGUAGE_MODELS, *ENCODER_DECODERS) if name != attention]
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            there.remove(name)
            yield _key(name, "", ""), partial(list, [{"outcome": f"not installed: {package}"}])
    for name in OURS:
        yield _key(name, "", CHECKED), partial(check_whole, name, clock.device)
    lengths, long = ((64,), 64) if small else (LENGTHS, LONG)
    pairs = [(name, length) for length in lengths for name in there]
    long_ones = [pair for pair in pairs if pair[0] in OURS and pair[1] >= long]
    found = [(*pair, NO_LOGITS if pair in long_ones else LOGITS, True) for pair in pairs]
    found += [(*pair, LOGITS, False) for pair in long_ones]
    for name, length, loss, decodes in found:
        measure = partial(race, name, length, loss, clock, small, 1 if small else 8, decodes=decodes)
        yield _key(name, str(length), loss), measure


def _key(name: str, length: str, loss: str) -> Row:
    mark = fingerprint() if name in OURS else "-"  # peers have no kernels of ours
    return dict(zip(KEYS, (name, length, loss, mark), strict=True))


def runs_flash(device: torch.device) -> bool:
    """Return whether torch's attention can be held to flash attention on a device."""
    q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    except RuntimeError:
        return False
    return True


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
        "dropout_rate": 0.0,
        **fields,
    }


def _pegasus_x(small: bool) -> dict[str, Any]:
    shape, fields = _shape(small), {"d_model": _shape(small)["hidden_size"], "vocab_size": VOCABULARY}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": shape["num_hidden_layers"], f"{side}_ffn_dim": 4 * shape["hidden_size"]}
        fields[f"{side}_attention_heads"] = shape["num_attention_heads"]
    return fields


def _ours(small: bool) -> dict[str, Callable[[], Any]]:
    import hf_hybrid

    shape, width = _shape(small), _shape(small)["hidden_size"]
    inner, window = 4 * width, 16 if small else 512
    decoder: dict[str, Any] = {**shape, "vocab_size": VOCABULARY, "dropout": 0.0, "attention_dropout": 0.0}
    return {
        "spade": lambda: hf_hybrid.SpadeConfig(
            is_decoder=True, is_encoder_decoder=False, local_radius=window - 1, intermediate_size=inner, **decoder
        ),
        "chela": lambda: hf_hybrid.ChelaConfig(
            is_decoder=True, long_kernel_size=8 * window, long_kernel_groups=shape["num_attention_heads"],
            intermediate_size=9 * width // 2, **decoder,
        ),
        "bst": lambda: hf_hybrid.BstConfig(window=window, intermediate_size=7 * width // 2, **decoder),
        "spade-seq2seq": lambda: hf_hybrid.SpadeConfig(
            local_radius=window // 4, num_decoder_layers=shape["num_hidden_layers"], intermediate_size=inner, **decoder
        ),
        "srformer_t5": lambda: hf_hybrid.SRformerT5Config(**_t5(small)),
    }  # fmt: skip


def _peers(small: bool) -> dict[str, Callable[[], Any]]:
    import transformers

    shape, width = _shape(small), _shape(small)["hidden_size"]
    decoder: dict[str, Any] = {**shape, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    layers = {name: size for name, size in decoder.items() if name != "num_attention_heads"}

    def llama() -> Any:
        lengths = {"max_position_embeddings": 2 * LONGEST}
        return transformers.LlamaConfig(intermediate_size=8 * width // 3, attention_dropout=0.0, **lengths, **decoder)

    def gated_deltanet() -> Any:
        from fla.models import GatedDeltaNetConfig

        head, count = (8, 3) if small else (64, 9)
        return GatedDeltaNetConfig(num_heads=count, head_dim=head, intermediate_size=2 * width, **layers)

    def mamba2() -> Any:  # without feed-forward networks, so twice as many layers less one
        more = {**layers, "num_hidden_layers": 2 * shape["num_hidden_layers"] - 1}
        heads = 2 * shape["num_attention_heads"]
        return transformers.Mamba2Config(num_heads=heads, head_dim=2 * width // heads, n_groups=1, **more)

    return {
        "llama-flash": llama,
        "llama-sdpa": llama,
        "mamba2": mamba2,
        "gated-deltanet": gated_deltanet,
        "t5-sdpa": lambda: transformers.T5Config(**_t5(small)),
        "longt5-tglobal": lambda: transformers.LongT5Config(
            **_t5(small, encoder_attention_type="transient-global", local_radius=4 if small else 128)
        ),
        "pegasus-x": lambda: transformers.PegasusXConfig(
            dropout=0.0, block_size=16 if small else 512, **_pegasus_x(small)
        ),
    }


def build(name: str, small: bool) -> Any:
    """Build one of the models with random weights."""
    import transformers

    config = (_ours(small) | _peers(small))[name]()
    auto = transformers.AutoModelForCausalLM if name in LANGUAGE_MODELS else transformers.AutoModelForSeq2SeqLM
    options = {"attn_implementation": "sdpa"} if name.endswith(("sdpa", "flash")) else {}
    torch.manual_seed(0)
    return auto.from_config(config, **options).train()


def check_whole(name: str, device: torch.device) -> Iterator[Row]:
    """Compare a small model with itself on a CPU; yields its row."""
    try:
        model = build(name, small=True).eval()
        there = copy.deepcopy(model).to(device)
        wanted, words = _results(model, name)
        with launched() as keys:
            found, same = _results(there, name)
    except Exception as error:
        yield {"outcome": f"raised: {error_line(error)}"}
        return
    row = {"code": _code(keys)}
    least = 1e-6 * max(x.norm().item() for x in wanted.values())  # below, as of a key's bias, all is rounding
    errors = {x: relative_error(found[x].cpu(), wanted[x], least) if x in found else math.inf for x in wanted}
    errors |= dict.fromkeys(found.keys() - wanted.keys(), math.inf)
    worst = max(errors, key=lambda name: errors[name])
    share = (words == same.cpu()).float().mean().item()
    if kernels_are_due(device) and not keys:
        row["outcome"] = "wrong: no Triton kernel ran"
    elif errors[worst] > ALLOWED or share < 1:
        row["outcome"] = f"wrong: {errors[worst]:.1e} at {worst}, {share:.0%} of the tokens"
    yield {"outcome": "ok"} | row


def _code(keys: Iterable[Key], others: Sequence[str] = ()) -> str:
    """Say which kernels ran, of ours and of others."""
    return "; ".join([*dict.fromkeys(f"Triton {op}" for op, _, _ in keys), *others])[:400] or "torch"


def _results(model: Any, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return logits and all gradients of a padded batch, and the tokens that follow it."""
    draws = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(3, 999, (3, 217), generator=draws), torch.ones(3, 217, dtype=torch.long)
    if name in LANGUAGE_MODELS:
        mask[1, :50] = 0
    else:
        mask[1, -50:] = 0
    labels = ids if name in LANGUAGE_MODELS else ids[:, :40].contiguous()
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    outputs = model(**inputs, labels=labels.to(model.device))
    outputs.loss.backward()
    results = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    tokens = model.generate(**inputs, do_sample=False, min_new_tokens=24, max_new_tokens=24, pad_token_id=0)
    return results | {"logits": outputs.logits.detach()}, tokens


def race(
    name: str, length: int, loss: str, clock: Clock, small: bool, rounds: int, *, decodes: bool = True
) -> Iterator[Row]:
    """Time one model at one length: a training step, then decoding, whose outcome has a column of its own.

    Yields:
        Its row, with its first failure; too little memory, or a peer that cannot run here, is none.
    """
    attention: AbstractContextManager[Any] = (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "llama-flash" else nullcontext()
    )
    batch = 2 if small else max(1, 16384 // length)
    row = {"batch": str(batch)}
    ends = []
    with attention:
        try:
            model = build(name, small).to(clock.device)
            ids = torch.randint(3, 999, (batch, length), device=clock.device)
            _measure(model, name, ids, loss, clock, rounds, row)
        except Exception as error:
            ends.append(_outcome(error, name, small))
        if decodes and "parameters" in row and not any("CUDA error" in end for end in ends):
            try:  # also where a step needs too much memory
                model.zero_grad(set_to_none=True)
                _free(clock)
                row |= _decoding(model.eval().to(torch.bfloat16), name, ids, clock, rounds) | {"decoding": "ok"}
            except Exception as error:
                row["decoding"] = _outcome(error, name, small)
                ends.append(row["decoding"])
    failed = [end for end in ends if end.startswith("raised")]
    yield row | {"outcome": [*failed, *ends, "ok"][0]}
    model = ids = None
    _free(clock)


def _outcome(error: Exception, name: str, small: bool) -> str:
    is_result = isinstance(error, torch.OutOfMemoryError) or name in _peers(small)
    return error_line(error) if is_result else f"raised: {error_line(error)}"[:160]


def _free(clock: Clock) -> None:
    if clock.device.type == "cuda":
        gc.collect()  # reference cycles keep models alive
        torch.cuda.empty_cache()


def _measure(model: Any, name: str, ids: torch.Tensor, loss: str, clock: Clock, rounds: int, row: Row) -> None:
    """Time a model's training step; fills its row as it goes, so that it says what was known when memory ended."""
    batch, length = ids.shape
    row["parameters"] = str(model.num_parameters())
    labels = ids if name in LANGUAGE_MODELS else torch.randint_like(ids[:, :TARGET], 3, 999)
    options = {"use_cache": False} | ({"skip_logits": True} if loss == NO_LOGITS else {})

    def forward(rows: int, tokens: int) -> torch.Tensor:
        with torch.autocast(clock.device.type, torch.bfloat16):
            found = model(input_ids=ids[:rows, :tokens], labels=labels[:rows, :tokens], **options).loss
        assert isinstance(found, torch.Tensor)
        return found

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward(batch, length).backward()

    with launched() as keys:  # a short one, which memory suffices for
        first = forward(1, min(length, 1024))
        code = code_of(first)
        first.backward()
        del first
    row["code"] = _code(keys, code)
    if name in OURS and kernels_are_due(clock.device) and not keys:
        raise RuntimeError("no Triton kernel ran")
    step()
    model.zero_grad(set_to_none=True)  # gradients are part of what a step holds
    peak = clock.peak(step)
    spent = clock.interleaved({"step": step}, rounds, warm_ups=1)["step"]
    model.zero_grad(set_to_none=True)
    row |= {
        "step_ms": f"{spent:.4g}",
        "tokens_s": f"{1e3 * batch * length / spent:.4g}",
        "peak_mib": "" if peak is None else f"{peak:.0f}",
    }


@torch.no_grad()
def _decoding(model: Any, name: str, ids: torch.Tensor, clock: Clock, rounds: int) -> Row:
    """Return the milliseconds of a prompt and per greedily decoded token."""
    fixed: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if name in LANGUAGE_MODELS:
        fixed |= {"eos_token_id": None}

    def generate(count: int) -> Callable[[], object]:
        return lambda: model.generate(ids, min_new_tokens=count, max_new_tokens=count, **fixed)

    few = {"prompt": generate(1), "all": generate(1 + DECODED)}
    spent = clock.interleaved(few, max(1, rounds // 4), warm_ups=1)
    return {"prompt_ms": f"{spent['prompt']:.4g}", "token_ms": f"{(spent['all'] - spent['prompt']) / DECODED:.4g}"}
