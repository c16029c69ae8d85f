"""An S4 or S4D system as a layer stores it, the constants derived from it, and a cache of them for frozen systems.

With a frozen system a training step costs one convolution: kernel, spectra and step constants are cached outside the
graph and the state dict. Custom ops that torch.compile does not trace use the cache; their results do not depend on
it.

B batch · T length · H channels · S copies of (A, B) · M = N/2 modes · C output filters
"""

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..context_parallel import Shards, ssm_conv
from ..context_parallel import s4_window_states as divided_window_states
from ..kernels.dispatch import NAMESPACE
from ..kernels.long_conv import fft_length, filter_bank_conv, kernel_spectrum, long_conv, spectral_conv
from ..kernels.packed import longest
from ..kernels.precision import complex_dtype, compute_dtype
from ..kernels.ssm_kernel import (
    S4DStep,
    S4Step,
    frozen_s4_kernel,
    s4_block_constants,
    s4_final_state,
    s4_kernel,
    s4_output,
    s4_state_response,
    s4_step_constants,
    s4_step_states,
    s4_window_states,
    s4d_block_powers,
    s4d_final_state,
    s4d_kernel,
    s4d_state_response,
    s4d_step_constants,
    ssm_step,
)
from .state_space import fingerprint, unseen

_MAX_SPECTRA = 4
_FEW_STEPS = 256
"""Tokens of all rows up to which a loop over them takes the least time."""


class S4Tensors(NamedTuple):
    """A layer's tensors of a system; complex numbers have a trailing dimension of 2.

    Attributes:
        C: `(C, H, M, 2)`.
        B: `(1, S, M, 2)`.
        P: `(1, S, M, 2)`; None without a low-rank term, in S4D.
        log_A_real: ``log(-Re w)``, `(S, M)`.
        A_imag: ``Im w``, `(S, M)`.
        log_dt: `(H,)`.
    """

    C: torch.Tensor
    B: torch.Tensor
    P: torch.Tensor | None
    log_A_real: torch.Tensor
    A_imag: torch.Tensor
    log_dt: torch.Tensor


def of_channels(tensors: S4Tensors, channels: slice) -> S4Tensors:
    """Return the system of some channels, of which channel c reads copy ``c % S``."""
    C, B, P, log_A_real, A_imag, log_dt = tensors
    copies = len(log_A_real)
    rows: Any = slice(None)
    if copies == len(log_dt):
        rows = channels
    elif copies > 1:
        rows = torch.arange(channels.start, channels.stop, device=B.device) % copies
    low_rank = None if P is None else P[:, rows]
    return S4Tensors(C[:, channels], B[:, rows], low_rank, log_A_real[rows], A_imag[rows], log_dt[channels])


def _as_complex(pair: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.view_as_complex(pair.to(dtype).contiguous())


@contextmanager
def _keeping() -> Iterator[None]:
    # a training step may later use what a call in inference mode makes
    with torch.inference_mode(False), unseen():
        yield


class S4System:
    """A system's kernel, spectra, step and block constants, each made on first use and cached in the object.

    S4 with a low-rank term, S4D without. Differentiable in the tensors and in every input.

    Args:
        tensors: The stored system.
        discretization: See `discretize`; ``"bilinear"`` with a low-rank term.
        reuse: Whether other calls will use the constants. If so, they are made outside inference mode, with as many
            taps as fit the spectrum.
    """

    def __init__(self, tensors: S4Tensors, discretization: str, *, reuse: bool = False):
        assert tensors.P is None or discretization == "bilinear"
        self.tensors, self.discretization, self.reuse = tensors, discretization, reuse
        self.C, self.B = _as_complex(tensors.C), _as_complex(tensors.B[0])
        self.P = None if tensors.P is None else _as_complex(tensors.P[0])
        self.w = torch.complex(-tensors.log_A_real.double().exp(), tensors.A_imag.double())
        self.dt = tensors.log_dt.double().exp()
        self._kernels: dict[torch.dtype, torch.Tensor] = {}
        self._spectra: OrderedDict[tuple[int, int | None, torch.dtype], torch.Tensor] = OrderedDict()
        self._steps: dict[torch.dtype, tuple[torch.Tensor, Any]] = {}
        self._blocks: dict[torch.dtype, Any] = {}

    def _make_kernel(self, C: torch.Tensor, taps: int) -> torch.Tensor:
        if self.P is None:
            return s4d_kernel(C, self.B, self.w, self.dt, taps, discretization=self.discretization)
        system = C, self.B, self.P, self.w, self.dt, taps
        trained = any(x is not None and x.requires_grad for x in self.tensors)
        return s4_kernel(*system) if trained else frozen_s4_kernel(*system)

    def _make_step(self) -> S4Step | S4DStep:
        """Return the step in complex128."""
        if self.P is None:
            return s4d_step_constants(self.B, self.w, self.dt, self.discretization)
        return s4_step_constants(self.B, self.P, self.w, self.dt)

    def _make_blocks(self, dtype: torch.dtype, C: torch.Tensor) -> Any:
        """Return the constants that advance a state by blocks, with the outputs of filters C."""
        step = self._make_step()
        return s4_block_constants(C, step, dtype) if isinstance(step, S4Step) else s4d_block_powers(step, dtype)

    def _response(self, state: torch.Tensor, length: int, C: torch.Tensor, blocks: Any) -> torch.Tensor:
        if self.P is None:
            return s4d_state_response(state, length, C, blocks)
        return s4_state_response(state, length, blocks)

    def _final_state(self, u: torch.Tensor, step: Any, blocks: Any, state: torch.Tensor | None) -> torch.Tensor:
        final_state = s4d_final_state if self.P is None else s4_final_state
        return torch.view_as_real(final_state(u, step, blocks, state))

    def _state_after(self, u: torch.Tensor, dtype: torch.dtype, blocks: Callable[[], Any]) -> torch.Tensor:
        """Return the state after a sequence `(B, T, H)`, `(B, H, M, 2)`, at the least cost."""
        step = self.step(dtype)[1]
        recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if self.P is None or self.reuse or u.device.type != "cpu" or recorded:
            return self._final_state(u, step, blocks(), None)
        # blocks for this call alone take longer than either of these
        if u.shape[0] * u.shape[1] <= _FEW_STEPS:
            return torch.view_as_real(s4_step_states(u, step))
        states = s4_window_states(u, self.B, self.P, self.w, self.dt, u.shape[1], dtype)
        return torch.view_as_real(states[:, 0])

    def _making(self) -> AbstractContextManager[object]:
        return _keeping() if self.reuse else nullcontext()

    def dtype(self, u: torch.Tensor) -> torch.dtype:
        """Return the real dtype of computations with `u`: the wider of u's and the stored one, at least float32."""
        return torch.promote_types(compute_dtype(u), self.tensors.C.dtype)

    def kernel(self, taps: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first taps, `(C, H, taps)`, of the longest kernel so far."""
        kernel = self._kernels.get(dtype)
        if kernel is None or kernel.shape[-1] < taps:
            with self._making():
                kernel = self._kernels[dtype] = self._make_kernel(self.C.to(complex_dtype(dtype)), taps)
        return kernel[..., :taps]

    def spectrum(self, length: int, max_length: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return spectrum and transform length for inputs of `length`; a second filter is the reverse kernel."""
        n_fft = fft_length(length)
        key = (n_fft, max_length, dtype)
        if key in self._spectra:
            self._spectra.move_to_end(key)
            return self._spectra[key], n_fft
        taps = n_fft // 2 if self.reuse else length
        with self._making():
            kernel = self.kernel(taps if max_length is None else min(taps, max_length), dtype)
            self._spectra[key] = kernel_spectrum(kernel[0], n_fft, kernel[1] if kernel.shape[0] == 2 else None)
        while len(self._spectra) > _MAX_SPECTRA:
            self._spectra.popitem(last=False)
        return self._spectra[key], n_fft

    def step(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Return C and the decode step's constants in the complex form of `dtype`."""
        if dtype not in self._steps:
            narrow = complex_dtype(dtype)
            with self._making():
                wide = self._make_step()
                self._steps[dtype] = self.C.to(narrow), type(wide)(*(x.to(narrow) for x in wide))
        return self._steps[dtype]

    def blocks(self, dtype: torch.dtype) -> Any:
        """Return the constants that advance a state by blocks."""
        if dtype not in self._blocks:
            with self._making():
                self._blocks[dtype] = self._make_blocks(dtype, self.C)
        return self._blocks[dtype]

    def convolve(
        self,
        u: torch.Tensor,
        skip: torch.Tensor | None,
        max_length: int | None,
        adjoint: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convolve `(B, T, H)`, or apply the transpose; returns `(B, T, H)` in u's dtype."""
        # without reuse there is no spectrum to cache, and packed sequences of different lengths share none
        if (not self.reuse or cu_seqlens is not None) and not adjoint:
            taps = longest(u, cu_seqlens)
            kernel = self.kernel(taps if max_length is None else min(taps, max_length), self.dtype(u))
            reverse_kernel = kernel[1] if kernel.shape[0] == 2 else None
            return long_conv(u, kernel[0], reverse_kernel=reverse_kernel, skip=skip, cu_seqlens=cu_seqlens)
        spectrum, n_fft = self.spectrum(u.shape[1], max_length, self.dtype(u))
        return spectral_conv(u, spectrum, n_fft, skip, adjoint=adjoint)

    def divide(self, u: torch.Tensor, skip: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        """Convolve own tokens `(B, T_r, H)` of a divided sequence, from the states of the other processes."""
        dtype = self.dtype(u)
        kernel = self.kernel(max(shards.lengths), dtype)
        with self._making():
            step = self._make_step()
        return ssm_conv(u, kernel, self.C.to(complex_dtype(dtype)), step, shards, skip=skip)

    def advance(
        self, u: torch.Tensor, state: torch.Tensor | None, skip: torch.Tensor | None, max_length: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue from a state, with the first output filter.

        Args:
            u: `(B, T, H)`.
            state: `(B, H, M, 2)`; zeros when None.
            skip: `(H,)` or None.
            max_length: Taps of the convolution within `u`.

        Returns:
            y `(B, T, H)` in u's dtype and the next state `(B, H, M, 2)`.
        """
        dtype = self.dtype(u)
        C, step = self.step(dtype)
        if u.shape[1] == 1:
            return ssm_step(state, u[:, 0], C[:1], step, None if skip is None else skip[None])
        y = self.convolve(u.to(dtype), skip, max_length)
        if state is None:
            return y.to(u.dtype), self._state_after(u, dtype, lambda: self.blocks(dtype))
        before, blocks = _as_complex(state, dtype), self.blocks(dtype)
        y = y + self._response(before, u.shape[1], C, blocks)[:, 0]
        return y.to(u.dtype), self._final_state(u, step, blocks, before)

    def advance_all(
        self, u: torch.Tensor, state: torch.Tensor | None, skip: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Continue from a state with all output filters, which share it.

        Args:
            u: `(B, T, H)`.
            state: `(B, H, M, 2)`; zeros when None.
            skip: `(C, H)` or None.
            return_state: Whether to return the next state.

        Returns:
            y `(C, B, T, H)` in u's dtype, and the next state `(B, H, M, 2)` or None.
        """
        dtype = self.dtype(u)
        C, step = self.step(dtype)
        if u.shape[1] == 1:
            y, after = ssm_step(state, u[:, 0], C, step, skip)
            return y.transpose(0, 1)[:, :, None], after
        skip = None if skip is None else skip.to(dtype)
        y = filter_bank_conv(u.to(dtype), self.kernel(u.shape[1], dtype), skip=skip)
        if state is None:
            return y.to(u.dtype), self._state_after(u, dtype, lambda: self.blocks(dtype)) if return_state else None
        before, blocks = _as_complex(state, dtype), self.blocks(dtype)
        y = y + self._response(before, u.shape[1], C, blocks).transpose(0, 1)
        return y.to(u.dtype), self._final_state(u, step, blocks, before) if return_state else None

    def follow(self, u: torch.Tensor, state: torch.Tensor | None, stops: Sequence[int]) -> list[torch.Tensor]:
        """Return the states `(B, H, M, 2)` before tokens `stops` of `u`, in ascending order, without outputs."""
        dtype, start, states = self.dtype(u), 0, []
        C, step = self.step(dtype)
        blocks = functools.cache(lambda: self._make_blocks(dtype, self.C[:1]))
        for stop in stops:
            if stop - start == 1:
                state = ssm_step(state, u[:, start], C[:1], step)[1]
            elif state is None:
                state = self._state_after(u[:, start:stop], dtype, blocks)
            else:
                state = self._final_state(u[:, start:stop], step, blocks(), _as_complex(state, dtype))
            states.append(state)
            start = stop
        return states

    def read(self, state: torch.Tensor, last: torch.Tensor, skip: torch.Tensor | None) -> torch.Tensor:
        """Return all filters' outputs at a token.

        Args:
            state: After the token, `(..., H, M, 2)`.
            last: The token, `(..., H)`.
            skip: `(C, H)` or None.

        Returns:
            `(..., C, H)` in the token's dtype.
        """
        dtype = self.dtype(last)
        y = s4_output(_as_complex(state, dtype), self.C.to(complex_dtype(dtype)))
        y = y if skip is None else y + skip.to(dtype) * last.to(dtype)[..., None, :]
        return y.to(last.dtype)

    def sample(
        self, u: torch.Tensor, skip: torch.Tensor | None, window: int, shards: Shards | None = None
    ) -> torch.Tensor:
        """Return all filters' outputs at the last token of each full, or own, window, `(B, T // window, C, H)`."""
        assert self.P is not None
        system, first = (self.B, self.P, self.w, self.dt, window, self.dtype(u)), window - 1
        if shards is None:
            states = s4_window_states(u, *system)
        else:
            states, first = divided_window_states(u, *system, shards), (first - shards.own.start) % window
        return self.read(torch.view_as_real(states), u[:, first::window], skip)


_handles = itertools.count(1)
_caches: "weakref.WeakValueDictionary[int, S4Cache]" = weakref.WeakValueDictionary()


class S4Cache:
    """Caches the constants of one frozen system until `fingerprint` sees a change of its tensors.

    Call `clear` after changes that it does not see. Copies and unpickled copies start empty.
    """

    def __init__(self) -> None:
        self.handle = next(_handles)
        self._entry: tuple[tuple[Any, ...], S4System] | None = None
        _caches[self.handle] = self

    def __reduce__(self) -> tuple[type["S4Cache"], tuple[()]]:
        return S4Cache, ()

    def clear(self) -> None:
        """Drop the cached system."""
        self._entry = None

    def system(self, tensors: S4Tensors, discretization: str) -> S4System:
        """Return the cached system if these are its tensors, or a new one.

        The system holds its tensors, so that no other tensor can reuse their addresses.
        """
        key = discretization, tensors.P is None, *fingerprint(tensors)
        if self._entry is None or self._entry[0] != key:
            with torch.inference_mode(False):
                frozen = S4Tensors._make(None if x is None else x.detach() for x in tensors)
                self._entry = key, S4System(frozen, discretization, reuse=True)
        return self._entry[1]


def _system(handle: int, tensors: S4Tensors, discretization: str) -> S4System:
    cache = _caches.get(handle)
    if cache is None:
        return S4System(S4Tensors._make(None if x is None else x.detach() for x in tensors), discretization)
    return cache.system(tensors, discretization)


@torch.library.custom_op(f"{NAMESPACE}::frozen_s4_conv", mutates_args=())
def frozen_s4_conv(
    u: torch.Tensor,
    C: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor | None,
    log_A_real: torch.Tensor,
    A_imag: torch.Tensor,
    log_dt: torch.Tensor,
    skip: torch.Tensor | None,
    discretization: str,
    max_length: int | None,
    adjoint: bool,
    handle: int,
) -> torch.Tensor:
    """Call a system's `convolve`, with cached constants if cache `handle` exists; differentiable in u only."""
    tensors = S4Tensors(C, B, P, log_A_real, A_imag, log_dt)
    with torch.no_grad():
        return _system(handle, tensors, discretization).convolve(u, skip, max_length, adjoint)


@frozen_s4_conv.register_fake
def _(u: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *tensors, discretization, max_length, adjoint, handle = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = discretization, max_length, adjoint, handle


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    discretization, max_length, adjoint, handle = ctx.rest
    if not ctx.needs_input_grad[0]:
        return (None,) * 12
    transposed = frozen_s4_conv(grad, *ctx.saved_tensors, discretization, max_length, not adjoint, handle)
    return transposed, *(None,) * 11


frozen_s4_conv.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(f"{NAMESPACE}::frozen_s4_advance", mutates_args=())
def frozen_s4_advance(
    u: torch.Tensor,
    state: torch.Tensor | None,
    C: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor | None,
    log_A_real: torch.Tensor,
    A_imag: torch.Tensor,
    log_dt: torch.Tensor,
    skip: torch.Tensor | None,
    discretization: str,
    max_length: int | None,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a system's `advance`, with cached constants if cache `handle` exists; not differentiable."""
    tensors = S4Tensors(C, B, P, log_A_real, A_imag, log_dt)
    with torch.no_grad():
        return _system(handle, tensors, discretization).advance(u, state, skip, max_length)


@frozen_s4_advance.register_fake
def _(u: torch.Tensor, state: torch.Tensor | None, C: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(compute_dtype(u), C.dtype)
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    return y, C.new_empty((u.shape[0], *C.shape[1:]), dtype=dtype)
