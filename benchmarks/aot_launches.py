"""The launches that `benchmarks.aot` compiles: every op, recorded on tensors without memory."""

import importlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

import benchmarks.kernels_alone  # noqa: F401
from hf_hybrid.kernels.launching import Configuration, Launch, record_launches

# op -> the folder of its kernels
MODULES = {
    "diagonal_scan": "diagonal_scan",
    "linear_attention": "linear_attention",
    "local_attention": "local_attention",
    "local_attention_step": "local_attention.step",
    "long_conv": "long_conv",
    "segment_recurrence": "segment_recurrence",
    "segment_step": "segment_recurrence.step",
    "short_conv": "short_conv",
    "ssm_kernel": "ssm_kernel",
    "ssm_step": "ssm_kernel.step",
}


def configurations(op: str) -> dict[str, Configuration]:
    """Return an op's default configurations by name."""
    module = importlib.import_module(f"hf_hybrid.kernels.{MODULES[op]}.triton_kernels")
    return {configuration.name: configuration for configuration in module.CONFIGURATIONS.values()}


def shipped(op: str) -> list[str]:
    """Return the names of an op's configurations."""
    return list(configurations(op))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _short_conv(dtype: torch.dtype, taps: int, packed: bool) -> None:
    from hf_hybrid.kernels.short_conv import triton_kernels

    batch, width = 1 if packed else 8, 768
    u = _meta(batch, 4096, width, dtype=dtype)
    cu_seqlens = _meta(9, dtype=torch.int32) if packed else None
    state = _meta(8, taps - 1, width, dtype=dtype)
    arguments = (u, _meta(width, taps), _meta(width), state, cu_seqlens, 0, True)
    triton_kernels.forward(*arguments)
    triton_kernels.backward(u, *arguments, True)


def _linear_attention(dtype: torch.dtype, heads: int, width: int, packed: bool) -> None:
    from hf_hybrid.kernels.linear_attention import triton_kernels

    q = _meta(1 if packed else 2, 16384, heads, width, dtype=dtype)
    state = _meta(2, heads, width, width)
    cu_seqlens = _meta(3, dtype=torch.int32) if packed else None
    triton_kernels.forward(q, q, q, state, cu_seqlens)
    triton_kernels.backward(q.float(), state, q, q, q, state, cu_seqlens)
    _, _, normed, scale = triton_kernels.forward_normed(q, q, q, q, state, cu_seqlens, 1e-6, True)
    triton_kernels.backward_norm(q, normed, scale, q)


def _diagonal_scan(dtype: torch.dtype, packed: bool) -> None:
    from hf_hybrid.kernels.diagonal_scan import triton_kernels

    b = _meta(1 if packed else 8, 4096, 384, dtype=dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    a, state, cu_seqlens = _meta(384, dtype=wide), _meta(8, 384, dtype=wide), None
    if packed:
        cu_seqlens = _meta(9, dtype=torch.int32)
    triton_kernels.forward(a, b, state, cu_seqlens, False, False)
    triton_kernels.backward(b, state, a, b, state, cu_seqlens, False)


def _long_conv(dtype: torch.dtype, around: bool, packed: bool) -> None:
    from hf_hybrid.kernels.long_conv import triton_kernels
    from hf_hybrid.kernels.long_conv.blocks import Around, Block, Sequences, Spectrum

    batch, length, width, n_fft = 1 if packed else 8, 4096, 768, 8192
    u = _meta(batch, length, width, dtype=dtype)
    table = _meta(8, 2, dtype=torch.int32) if packed else None
    block = Block(Sequences(None, table, 0, 8, length, n_fft), slice(0, 8), slice(0, width))
    gate = u if around else None
    things = Around(_meta(width) if around else None, gate, gate, around)
    x = triton_kernels.prologue(u, gate, block, torch.float32)
    spectrum = _meta(8, width, n_fft // 2 + 1, dtype=torch.complex64)
    for adjoint in (False, True):
        factor = triton_kernels.factor(Spectrum(spectrum[0], 0), width, adjoint)
        triton_kernels.multiply(spectrum, factor, spectrum, add=adjoint and not around)
    triton_kernels.correlate(spectrum, spectrum, None, 0)
    triton_kernels.epilogue(x, x, things, block, u)
    if around:
        triton_kernels.upstream(x, x, things, u, block, gate)
    triton_kernels.downstream(x, x, x, gate, things, block, u, gate, trains_skip=around)


def _local_attention(
    dtype: torch.dtype, width: int, chunk_size: int | None, packed: bool, masked: bool, biased: bool, dropout: float
) -> None:
    from hf_hybrid.kernels.local_attention import triton_kernels
    from hf_hybrid.kernels.local_attention.settings import Settings

    q = _meta(1 if packed else 8, 4096, 12, width, dtype=dtype)
    bias = _meta(12, 2 * chunk_size - 1 if chunk_size else 257) if biased else None
    mask = _meta(*q.shape[:2], dtype=torch.bool) if masked else None
    seed = _meta(dtype=torch.int64) if dropout else None
    cu_seqlens = _meta(9, dtype=torch.int32) if packed else None
    settings = Settings(None if chunk_size else 128, chunk_size, False, 0.125, dropout)
    options = (bias, mask, seed, cu_seqlens, settings)
    output, log_sum = triton_kernels.forward(q, q, q, *options)
    triton_kernels.backward(q, output, log_sum, q, q, q, *options)


# chunk_size, packed, masked, biased, dropout; the last has everything that takes registers
_LOCAL_FORMS = (
    (None, False, False, True, 0.0),
    (None, False, True, False, 0.1),
    (512, False, True, False, 0.0),
    (None, True, False, True, 0.1),
    (512, True, True, True, 0.1),
)


def _ssm_kernel(filters: int) -> None:
    from hf_hybrid.kernels.ssm_kernel import triton_kernels

    C, B = _meta(filters, 768, 32, dtype=torch.complex128), _meta(768, 32, dtype=torch.complex128)
    rate = _meta(768, dtype=torch.float64)
    taps = triton_kernels.forward(C, B, B, B, rate, 16384, 0, torch.float32)
    triton_kernels.backward(taps, C, B, B, B, rate, 0)


def _local_attention_step(dtype: torch.dtype, width: int, chunk_size: int | None) -> None:
    from hf_hybrid.kernels.local_attention.settings import StepSettings
    from hf_hybrid.kernels.local_attention.step import triton_kernels

    cache = _meta(8, 12, 4096, width, dtype=dtype).transpose(1, 2)
    position, mask = _meta(1, dtype=torch.int64), _meta(8, 4096, dtype=torch.int64)
    bias = _meta(257 if chunk_size is None else chunk_size, 12).t()
    settings = StepSettings(0, 0, 256 if chunk_size is None else None, chunk_size, chunk_size is not None, 0.125)
    query = _meta(8, 1, 12, width, dtype=dtype)
    triton_kernels.forward(query, cache, cache, bias, mask, position, None, settings)


def _ssm_step(dtype: torch.dtype, modes: int, low_rank: bool) -> None:
    from hf_hybrid.kernels.ssm_kernel.step import triton_kernels

    C, constant = (_meta(*shape, 768, modes, dtype=torch.complex64) for shape in ((4,), ()))
    column, u = constant if low_rank else None, _meta(8, 768, dtype=dtype)
    triton_kernels.forward(_meta(8, 768, modes, 2), u, C, constant, column, column, constant, _meta(4, 768))


def _segment_recurrence(dtype: torch.dtype, width: int, full: bool) -> None:
    from hf_hybrid.kernels.segment_recurrence import triton_kernels

    key = _meta(8, 12, 64, 64, width, dtype=dtype)
    neuron = (_meta(width, width), _meta(1), _meta(1)) if full else (None,) * 3
    visited = _meta(8, 32, dtype=torch.int64) if full else None
    options = (visited, full, 2.0 if full else None)
    states = triton_kernels.forward(key, key, *neuron, *options)
    triton_kernels.backward(states, key, key, *neuron, *options, full)


def _segment_step(dtype: torch.dtype, width: int, full: bool) -> None:
    from hf_hybrid.kernels.segment_recurrence.step import triton_kernels

    key, states = _meta(8, 12, 64, 64, width, dtype=dtype), _meta(8, 12, 32 if full else 64, width, width, dtype=dtype)
    query, norm, sigma = key[:, :, 0, 0], key[:, :, :1, 0], _meta(1) if full else None
    index, visible = _meta(8, 12, dtype=torch.int64), _meta(8, 64, dtype=torch.bool)
    documents = _meta(8, dtype=torch.int64) if full else None
    triton_kernels.forward(query, key, key, states, index, visible, norm, documents, sigma, 0.125)


def recorded(arch: int, ops: Collection[str] = MODULES) -> Iterator[tuple[str, Launch]]:
    """Yield ops with their launches on one architecture, for shapes that together use all configurations."""
    calls: list[tuple[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for taps, packed in ((9, True), (9, False), (3, False)):
            calls.append(("short_conv", lambda a=(dtype, taps, packed): _short_conv(*a)))
        for around, packed in ((False, False), (False, True), (True, False), (True, True)):
            calls.append(("long_conv", lambda a=(dtype, around, packed): _long_conv(*a)))
        for heads, width, packed in ((4, 128, True), (4, 64, True), (4, 128, False), (4, 64, False), (1, 1024, False)):
            calls.append(("linear_attention", lambda a=(dtype, heads, width, packed): _linear_attention(*a)))
        for width in (64, 128, 256):
            for chunk_size in (None, 512):
                calls.append(("local_attention_step", lambda a=(dtype, width, chunk_size): _local_attention_step(*a)))
        for modes in (8, 32, 256):
            for low_rank in (False, True):
                calls.append(("ssm_step", lambda a=(dtype, modes, low_rank): _ssm_step(*a)))
        # the launch recorded last takes the most registers and represents the others
        for width, full in ((64, False), (256, False), (64, True), (256, True)):
            calls.append(("segment_recurrence", lambda a=(dtype, width, full): _segment_recurrence(*a)))
            calls.append(("segment_step", lambda a=(dtype, width, full): _segment_step(*a)))
        for width in (16, 64, 128, 256):
            for form in _LOCAL_FORMS:
                calls.append(("local_attention", lambda a=(dtype, width, *form): _local_attention(*a)))
    for filters in (1, 2):
        calls.append(("ssm_kernel", lambda a=filters: _ssm_kernel(a)))
    for dtype, packed in ((torch.complex64, True), (torch.bfloat16, True), (torch.complex64, False)):
        calls.append(("diagonal_scan", lambda a=(dtype, packed): _diagonal_scan(*a)))
    for op, call in calls:
        if op not in ops:
            continue
        with record_launches(arch) as launches:
            call()
        yield from ((op, launch) for launch in launches)


def distinct_launches(arch: int, ops: Collection[str] = MODULES) -> list[tuple[str, Launch]]:
    """Return the launches of `recorded` that compile to different code."""
    distinct = {}
    for op, launch in recorded(arch, ops):
        kinds = tuple((name, argument_type(launch.kernel, name, x)) for name, x in launch.arguments.items())
        distinct.setdefault((op, launch.configuration.name, kinds), (op, launch))
    return list(distinct.values())


def representative_launches(arch: int, ops: Collection[str] = MODULES) -> list[tuple[str, Launch]]:
    """Return one launch for each configuration and set of flags, in bfloat16 and float32, packed if possible.

    Heads of local attention that fit into a tile are such a flag.
    """
    last = {}
    for op, launch in distinct_launches(arch, ops):
        if launch.arguments.get("PACKED", True) and dtype_of(launch) != "fp16":
            flags = [name for name, x in launch.arguments.items() if x is True or (name == "EPS" and x)]
            fits = op == "local_attention" and launch.arguments["K"] <= launch.arguments["S"]
            flags += ["fits"] if fits else []
            last[op, launch.configuration.name, dtype_of(launch), *flags] = op, launch
    return list(last.values())


_TOKENS = ("u", "k", "b", "y", "rates", "states", "grad", "ends", "sums", "out", "d_u")


def dtype_of(launch: Launch) -> str:
    """Return the dtype of a launch's tokens as Triton writes it."""
    tokens = next(x for name, x in launch.arguments.items() if name in _TOKENS and x is not None)
    return _POINTERS[tokens.dtype].removeprefix("*")


_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def argument_type(kernel: Any, name: str, value: Any) -> tuple[str, Any, bool]:
    """Return an argument's type, its value if it is a constant, and whether it is known to be divisible by 16.

    The rules are Triton's: pointers of torch's allocations are divisible, integers are specialised unless the kernel
    forbids it, and the integer 1 and None are constants.
    """
    parameter = next(p for p in kernel.params if p.name == name)
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], None, True
    looked_at = not parameter.do_not_specialize
    if parameter.is_constexpr or value is None or (looked_at and value == 1):
        return "constexpr", value, False
    if isinstance(value, float):
        return "fp32", None, False
    return "i32", None, looked_at and value % 16 == 0
