"""The operations under test: what they take, how one process computes them, and what a divided one may send."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_hybrid import context_parallel as divided
from hf_hybrid import kernels
from hf_hybrid.context_parallel import Shards
from hf_hybrid.kernels.long_conv import filter_bank_conv, long_conv
from hf_hybrid.kernels.packed import bounds
from hf_hybrid.kernels.ssm_kernel import (
    s4_kernel,
    s4_step_constants,
    s4_window_states,
    s4d_kernel,
    s4d_step_constants,
)

from .layouts import LENGTH

HEADS, KEYS, VALUES, WIDTH = 2, 3, 4, 5


@dataclass(frozen=True)
class Operation:
    """One operation with its options.

    Attributes:
        name: Of the variant.
        inputs: Name → shape per token of a tensor that is divided.
        parameters: Name → shape of a tensor that every process has.
        options: Further arguments of both functions.
        one: Runs all tokens in one process: `(inputs, parameters, options, mask, cu_seqlens)` to an output.
        many: Runs own tokens: `(inputs, parameters, options, mask, shards)` to own output.
        sends: Numbers of bytes that a process sends in a forward, see `expected_bytes`.
        masked: Whether it takes a mask; then rows have padding.
        packed: Whether it takes packed sequences.
        dim: The dimension of tokens.
        out_dim: That of the output, if it is another one.
        dtype: Of the inputs.
    """

    name: str
    inputs: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]]
    one: Callable[..., Tensor]
    many: Callable[..., Tensor]
    sends: Callable[..., int]
    options: dict[str, Any] = field(default_factory=dict)
    masked: bool = False
    packed: bool = True
    dim: int = 1
    out_dim: int | None = None
    dtype: torch.dtype = torch.float64

    def draw(self, length: int, batch: int, generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def normal(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, dtype=dtype, generator=generator)

        inputs = {}
        for name, shape in self.inputs.items():
            before, after = shape[: self.dim - 1], shape[self.dim - 1 :]
            inputs[name] = normal(batch, *before, length, *after, dtype=self.dtype)
        return inputs, {name: normal(*shape, dtype=torch.float64) for name, shape in self.parameters.items()}


ATTENDED = {"query": (HEADS, KEYS), "key": (HEADS, KEYS), "value": (HEADS, VALUES)}


def _unstate(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0)


def _attention(name: str, single: Callable[..., Any], several: Callable[..., Tensor], **rest: Any) -> Operation:
    def one(inputs, parameters, options, mask, cu_seqlens):
        given = {} if mask is None else {"attention_mask": mask}
        return _unstate(single(**inputs, **parameters, **options, **given, cu_seqlens=cu_seqlens))

    def many(inputs, parameters, options, mask, shards):
        given = {} if mask is None else {"attention_mask": mask}
        return several(**inputs, **parameters, **options, **given, shards=shards)

    return Operation(name, {**ATTENDED, **rest.pop("more", {})}, rest.pop("parameters", {}), one, many, **rest)


def _rowwise_laplace(*, cu_seqlens: Tensor | None, **given: Any) -> Tensor:
    """Packed sequences one after another: the kernel has no packed form."""
    if cu_seqlens is None:
        return kernels.laplace_attention(**given)
    length = given["query"].shape[1]
    parts = [
        kernels.laplace_attention(**{k: v[:, at] if isinstance(v, Tensor) else v for k, v in given.items()})
        for at in bounds(cu_seqlens, length)
        if at.start < at.stop
    ]
    return torch.cat(parts, dim=1)


def _sees(shards: Shards, options: dict[str, Any], masks: Tensor | None) -> Tensor:
    """Which token needs which other one, `(T, T)`, from the definitions."""
    ends = shards.ends or (0, shards.length)
    position = torch.arange(shards.length)
    sequence = torch.bucketize(position, torch.tensor(ends)[1:], right=True)
    offset = position[None] - position[:, None]
    seen = sequence[:, None] == sequence[None]
    if options.get("chunk_size") is not None:
        first = torch.tensor(ends)[sequence]
        grids = [first]
        if masks is not None:
            grids = [row.int().argmax().expand_as(first) for row in masks if row.any()] or grids
        chunks = [(position - grid).div(options["chunk_size"], rounding_mode="floor") for grid in grids]
        seen = seen & torch.stack([chunk[:, None] == chunk[None] for chunk in chunks]).any(0)
    reach = options.get("radius")
    if reach is not None:
        seen = seen & (offset.abs() <= reach)
    if "taps" in options:
        taps = options["taps"] - 1
        seen = seen & ((-offset <= taps) & (offset <= 0) if options["causal"] else offset.abs() <= taps // 2)
    return seen & (offset <= 0) if options["causal"] else seen


def _halo(per_token: int, **about: Any) -> Callable[..., int]:
    """Bytes of a halo exchange: every foreign token that one of a process's tokens needs comes once."""

    def count(shards: Shards, options: dict[str, Any], batch: int, masks: Tensor | None) -> int:
        seen = _sees(shards, options | about, masks)
        total = 0
        for rank, span in enumerate(shards.spans):
            if rank != shards.rank:
                needed = seen[span.start : span.stop].any(0)
                total += int(needed[shards.own.start : shards.own.stop].sum())
        grid = 8 * batch * (shards.size - 1) if masks is not None and options.get("chunk_size") else 0
        return batch * total * (8 * per_token + (masks is not None)) + grid

    return count


def _states(per_row: int, *, forward: bool = True, backward: bool = False) -> Callable[..., int]:
    """Bytes of states: one for each other process that holds a token of a sequence of which this one holds some."""

    def count(shards: Shards, options: dict[str, Any], batch: int, masks: Tensor | None) -> int:
        ends = torch.tensor(shards.ends or (0, shards.length))
        held = [
            set(torch.bucketize(torch.arange(*span), ends[1:], right=True).tolist()) if span.length else set()
            for span in shards.spans
        ]
        own, rank = held[shards.rank], shards.rank
        later = sum(bool(own & other) for other in held[rank + 1 :])
        earlier = sum(bool(own & other) for other in held[:rank])
        return batch * per_row * (later * forward + earlier * backward)

    return count


def _channels(into: int, out: int, width: int) -> Callable[..., int]:
    """Bytes of turning tokens into channels, with so many numbers for each of both, and back."""

    def count(shards: Shards, options: dict[str, Any], batch: int, masks: Tensor | None) -> int:
        own = shards.share(width)
        mine, others = own.stop - own.start, width - (own.stop - own.start)
        return 8 * batch * (into * shards.own.length * others + out * (shards.length - shards.own.length) * mine)

    return count


def _attentions() -> Iterator[Operation]:
    pair = HEADS * (KEYS + VALUES)
    for causal in (True, False):
        side = "causal" if causal else "both"
        for radius in (0, 4, 30):
            bias = {"bias": (HEADS, radius + 1 if causal else 2 * radius + 1)}
            options = {"radius": radius, "causal": causal}
            local = kernels.local_attention, divided.local_attention
            rest = {"options": options, "sends": _halo(pair), "parameters": bias}
            yield _attention(f"window {radius} {side}", *local, **rest)
            if radius:
                yield _attention(f"window {radius} {side} mask", *local, **rest, masked=True)
        bias = {"bias": (HEADS, 5 if causal else 9)}
        rest = {"options": {"chunk_size": 5, "causal": causal}, "sends": _halo(pair)}
        yield _attention(f"chunks {side}", *local, **rest, parameters=bias)
        yield _attention(f"chunks {side} mask", *local, **rest, parameters=bias, masked=True, packed=False)
        laplace = _rowwise_laplace, divided.laplace_attention
        yield _attention(f"laplace chunks {side}", *laplace, **rest)
        yield _attention(f"laplace chunks {side} mask", *laplace, **rest, masked=True, packed=False)
        rest = {"options": {"causal": causal}, "sends": _halo(pair)}
        yield _attention(f"laplace {side}", *laplace, **rest)
        yield _attention(f"laplace {side} mask", *laplace, **rest, masked=True, packed=False)
        sends = _states(8 * HEADS * KEYS * VALUES, backward=not causal)
        linear = kernels.linear_attention, divided.linear_attention
        yield _attention(f"linear {side}", *linear, options={"causal": causal}, sends=sends)
        options = {"causal": causal, "norm_eps": 1e-5}
        more = {"gate": (HEADS, VALUES)}
        yield _attention(f"linear normed {side}", *linear, options=options, sends=sends)
        yield _attention(f"linear gated {side}", *linear, options=options, sends=sends, more=more)


def _convolutions() -> Iterator[Operation]:
    def short(inputs, parameters, options, mask, cu_seqlens):
        return kernels.short_conv(*inputs.values(), **parameters, **options, cu_seqlens=cu_seqlens)[0]

    def divided_short(inputs, parameters, options, mask, shards):
        return divided.short_conv(*inputs.values(), **parameters, **options, shards=shards)

    for taps, causal, activation in ((1, True, None), (4, True, "silu"), (5, False, None), (11, False, "silu")):
        name = f"short {taps} {'causal' if causal else 'both'} {activation or ''}".strip()
        sends = _halo(WIDTH, taps=taps)
        parameters = {"kernel": (WIDTH, taps), "bias": (WIDTH,)}
        options = {"causal": causal, "activation": activation}
        yield Operation(name, {"u": (WIDTH,)}, parameters, short, divided_short, sends, options)

    def one(inputs, parameters, options, mask, cu_seqlens):
        return long_conv(**inputs, **parameters, **options, cu_seqlens=cu_seqlens)

    def many(inputs, parameters, options, mask, shards):
        return divided.long_conv(**inputs, **parameters, **options, shards=shards)

    gates = {"input_gate": (WIDTH,), "gate": (WIDTH,)}
    sends = _channels(1, 1, WIDTH)
    taps, skip = {"kernel": (WIDTH, 30)}, {"skip": (WIDTH,)}
    yield Operation("long causal", {"u": (WIDTH,)}, taps, one, many, sends)
    both = {**taps, "reverse_kernel": (WIDTH, 7), **skip}
    yield Operation("long both", {"u": (WIDTH,)}, both, one, many, sends, {"activation": "silu"})
    yield Operation("long gated", {"u": (WIDTH,), **gates}, {**taps, **skip}, one, many, sends)

    def bank(inputs, parameters, options, mask, cu_seqlens):
        return filter_bank_conv(inputs["u"], **parameters).transpose(0, 1)

    def divided_bank(inputs, parameters, options, mask, shards):
        return divided.filter_bank_conv(inputs["u"], **parameters, shards=shards).transpose(0, 1)

    filters = {"kernel": (3, WIDTH, 30), "skip": (3, WIDTH)}
    sends = _channels(1, 3, WIDTH)
    yield Operation("filter bank", {"u": (WIDTH,)}, filters, bank, divided_bank, sends, packed=False, out_dim=2)
    grouped = {"kernel": (2, 9), "reverse_kernel": (2, 9)}
    yield Operation("long groups", {"u": (6,)}, grouped, one, many, _channels(1, 1, 6))


def _decay(a: Tensor) -> Tensor:
    """Magnitudes below 1, from any numbers."""
    return a / (1 + a.abs())


def _transition(inputs: dict[str, Tensor], parameters: dict[str, Tensor]) -> Tensor:
    """a of a diagonal scan, in the precision of b."""
    a = _decay(parameters["a"])
    if "angle" in parameters:
        a = a * torch.polar(torch.ones_like(a), parameters["angle"])
    return a.to(inputs["b"].dtype)


def _scans() -> Iterator[Operation]:
    for dtype in (torch.float64, torch.complex128):
        for reverse in (False, True):

            def one(inputs, parameters, options, mask, cu_seqlens):
                a = _transition(inputs, parameters)
                return kernels.diagonal_scan(a, inputs["b"], cu_seqlens=cu_seqlens, **options)[0]

            def many(inputs, parameters, options, mask, shards):
                a = _transition(inputs, parameters)
                return divided.diagonal_scan(a, inputs["b"], shards, **options)

            name = f"scan {'complex' if dtype.is_complex else 'real'}{' reverse' if reverse else ''}"
            parameters = {"a": (KEYS,), **({"angle": (KEYS,)} if dtype.is_complex else {})}
            sends = _states(dtype.itemsize * KEYS, forward=not reverse, backward=reverse)
            yield Operation(name, {"b": (KEYS,)}, parameters, one, many, sends, {"reverse": reverse}, dtype=dtype)


def _state_spaces() -> Iterator[Operation]:
    modes, copies = 3, 1

    def system(parameters: dict[str, Tensor], low_rank: bool, length: int) -> tuple[Tensor, Tensor, Any]:
        C, B, P, imag = (torch.view_as_complex(parameters[name]) for name in ("C", "B", "P", "w"))
        w = torch.complex(-imag.real.exp(), imag.imag)
        dt = parameters["log_dt"].exp() * 0.1
        if low_rank:
            return s4_kernel(C, B, P, w, dt, length), C, s4_step_constants(B, P, w, dt)
        return s4d_kernel(C, B, w, dt, length), C, s4d_step_constants(B, w, dt, "zoh")

    def one(inputs, parameters, options, mask, cu_seqlens):
        kernel, _, _ = system(parameters, options["low_rank"], inputs["u"].shape[1])
        reverse_kernel = kernel[1] if len(kernel) == 2 else None
        skip = parameters["skip"]
        return long_conv(inputs["u"], kernel[0], reverse_kernel=reverse_kernel, skip=skip, cu_seqlens=cu_seqlens)

    def many(inputs, parameters, options, mask, shards):
        kernel, C, step = system(parameters, options["low_rank"], max(1, shards.own.length))
        return divided.ssm_conv(inputs["u"], kernel, C, step, shards, skip=parameters["skip"])

    def windows(inputs, parameters, window, function, *shards):
        B, P, w = (torch.view_as_complex(parameters[name]) for name in ("B", "P", "w"))
        w = torch.complex(-w.real.exp(), w.imag)
        dt = parameters["log_dt"].exp() * 0.1
        return function(inputs["u"], B, P, w, dt, window, torch.float64, *shards)

    def sampled(inputs, parameters, options, mask, cu_seqlens):
        return _spread(windows(inputs, parameters, options["window"], s4_window_states), options["window"])

    def divided_sampled(inputs, parameters, options, mask, shards):
        states = windows(inputs, parameters, options["window"], divided.s4_window_states, shards)
        assert states.shape[1] == shards.own.stop // options["window"] - shards.own.start // options["window"]
        return _spread(states, options["window"], *shards.own)

    small = {"B": (copies, modes, 2), "P": (copies, modes, 2), "w": (copies, modes, 2), "log_dt": (WIDTH,)}
    for window in (1, 4, 9):
        sends = _states(16 * WIDTH * modes)
        given = (small, sampled, divided_sampled, sends, {"window": window})
        yield Operation(f"s4 windows of {window}", {"u": (WIDTH,)}, *given, packed=False)
    for low_rank in (True, False):
        for directions in (1, 2):
            name = f"{'s4' if low_rank else 's4d'} {'causal' if directions == 1 else 'both'}"
            system_shapes = {"B": (copies, modes, 2), "P": (copies, modes, 2), "w": (copies, modes, 2)}
            parameters = {"C": (directions, WIDTH, modes, 2), **system_shapes, "log_dt": (WIDTH,), "skip": (WIDTH,)}
            parameters = parameters if low_rank else {**parameters, "P": (copies, modes, 2)}
            sends = _states(16 * WIDTH * modes, backward=directions == 2)
            yield Operation(name, {"u": (WIDTH,)}, parameters, one, many, sends, {"low_rank": low_rank})


def _spread(states: Tensor, window: int, start: int = 0, stop: int = LENGTH) -> Tensor:
    """Put the state of each window where its last token is, and zeros elsewhere."""
    ends = [token - start for token in range(start, stop) if (token + 1) % window == 0]
    result = states.new_zeros(states.shape[0], stop - start, *states.shape[2:])
    index = torch.tensor(ends, dtype=torch.int64)
    return result.index_copy(1, index, states)


def _segments() -> Iterator[Operation]:
    def one(inputs, parameters, options, mask, cu_seqlens):
        return kernels.segment_recurrence(**inputs, **_neurons(parameters), **options)

    def many(inputs, parameters, options, mask, shards):
        return divided.segment_recurrence(**inputs, **_neurons(parameters), **options, shards=shards)

    def _neurons(parameters):
        if not parameters:
            return {}
        return {**parameters, "threshold": parameters["threshold"].exp(), "leak": parameters["leak"].sigmoid()}

    size = 3
    neurons = {"weight": (VALUES, VALUES), "leak": (1,), "threshold": (1,)}
    sends = _channels(size * (KEYS + VALUES), KEYS * VALUES, HEADS)
    cases = (({}, {}), (neurons, {}), (neurons, {"source": "segment", "clamp": 1.0, "surrogate": True}))
    for parameters, options in cases:
        name = " ".join(["segments", *(["neurons"] if parameters else []), *map(str, options)])
        inputs = {"key": (HEADS, size, KEYS), "value": (HEADS, size, VALUES)}
        yield Operation(name, inputs, parameters, one, many, sends, options, packed=False, dim=2)


def _cross_attentions() -> Iterator[Operation]:
    """Queries and keys of the same layout; models have two."""

    def one(inputs, parameters, options, mask, cu_seqlens):
        scores = torch.einsum("bthk,bshk->bhts", inputs["query"], inputs["key"]) * options["scale"]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        return torch.einsum("bhts,bshv->bthv", scores.softmax(-1), inputs["value"])

    def many(inputs, parameters, options, mask, shards):
        return divided.cross_attention(**inputs, **options, attention_mask=mask, shards=shards, source=shards)

    def sends(shards: Shards, options: dict[str, Any], batch: int, masks: Tensor | None) -> int:
        lengths = torch.tensor(shards.lengths)
        queries = lengths * (shards.size - 1) * KEYS
        return 8 * batch * HEADS * int((queries + (LENGTH - lengths) * (VALUES + 2))[shards.rank])

    for masked in (False, True):
        name = f"cross{' mask' if masked else ''}"
        yield Operation(name, ATTENDED, {}, one, many, sends, {"scale": 0.7}, masked=masked, packed=False)


OPERATIONS = {
    operation.name: operation
    for maker in (_attentions, _cross_attentions, _convolutions, _scans, _state_spaces, _segments)
    for operation in maker()
}
