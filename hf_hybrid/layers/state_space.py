"""Base of all state space layers: trained tensors, precision, masking and the forward call.

B batch · T length · H hidden size
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from ..context_parallel import Shards
from ..kernels.checks import check_choice, check_positive
from ..kernels.dispatch import exports_to_onnx
from ..kernels.packed import check_cu_seqlens, to_rows

POSTACTS = (None, "gelu_glu")


def ssm_parameters(module: nn.Module, *, dynamics: bool | None = None) -> Iterator[nn.Parameter]:
    """Yield the trained tensors of every state space layer inside a module, to exclude from weight decay.

    Projections around the state space model are not included.

    Args:
        module: The module.
        dynamics: True for the tensors that shape the memory and train best at their own rate (A, B and Δ of a state
            space model, Hyena's filters, a long convolution's taps); False for the others; None for all.
    """
    for child in module.modules():
        if isinstance(child, StateSpaceLayer):
            for name, tensor in child.own_tensors():
                if tensor.requires_grad and dynamics in (None, child.shapes_memory(name)):
                    yield tensor  # type: ignore[misc]


def keep_precision(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wrap a function that moves or casts a tensor so that it never casts float32 or float64 to 16 bits."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        if moved.is_floating_point() and moved.dtype.itemsize < 4 <= tensor.dtype.itemsize:
            return tensor.to(moved.device)
        return moved

    return move


class StateSpaceLayer(nn.Module):
    """Base of layers that mix a sequence by a state space model or a long convolution.

    A subclass declares its tensors with `_declare`, initialises each in `_initialize` and computes in `_run`.

    Frozen tensors are persistent buffers, since loading a checkpoint makes every parameter trainable. Freezing does
    not change the names and shapes of the state dict. Casting the model to 16 bits leaves all declared tensors in
    float32 (or float64).

    Args:
        hidden_size: Channels H.
        bidirectional: Whether the layer also reads the future.
        postact: None, or ``"gelu_glu"``: GELU and a gated projection after the layer, as in S4's own.
        freeze: A key of `TRAINED`.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.
    """

    TRAINED: ClassVar[Mapping[str, tuple[str, ...]]]
    """The names of the trained tensors, by value of ``freeze``."""

    def __init__(self, hidden_size: int, *, bidirectional: bool, postact: str | None, freeze: str):
        super().__init__()
        check_choice("freeze", freeze, tuple(self.TRAINED))
        check_choice("postact", postact, POSTACTS)
        check_positive(hidden_size=hidden_size)
        self.hidden_size, self.bidirectional, self.freeze = hidden_size, bidirectional, freeze
        self.output_linear = None if postact is None else nn.Linear(hidden_size, 2 * hidden_size)
        self._names: tuple[str, ...] = ()
        self._kept: Kept | None = None
        self._kept_for_tokens: dict[str, Kept] = {}

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape of the state of `batch` sequences."""
        raise NotImplementedError

    def shapes_memory(self, name: str) -> bool:
        """Return whether a declared tensor shapes the memory, see `ssm_parameters`."""
        return name in self.TRAINED["none"] and name not in self.TRAINED.get("ab_dt", ())

    def _check_state(self, state: Any, batch: int) -> None:
        """Raise ValueError unless a state fits this layer and `batch` sequences."""
        if state.shape != self.state_shape(batch):
            raise ValueError(f"state must be {self.state_shape(batch)}; got {tuple(state.shape)}")

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Initialise one declared tensor in place."""
        raise NotImplementedError

    def _run(self, u: torch.Tensor, state: Any, return_state: bool) -> tuple[torch.Tensor, Any]:
        """Map masked inputs `(B, T, H)` to outputs in their dtype and, if requested, the next state."""
        raise NotImplementedError

    def _run_packed(self, u: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Map sequences packed into one row, `(1, T, H)`; overridden by layers whose kernels read the bounds."""
        rows, kept = to_rows(u, cu_seqlens)
        return self._run_masked(rows, kept, None, False)[0][..., kept, :][..., None, :, :]

    def _run_divided(self, u: torch.Tensor, kept: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        """Map own tokens `(B, T_r, H)` of a sequence that is divided among processes; see `_run_masked` for `kept`."""
        raise NotImplementedError

    def _run_masked(
        self, u: torch.Tensor, kept: torch.Tensor | None, state: Any, return_state: bool
    ) -> tuple[torch.Tensor, Any]:
        """Call `_run`; overridden by layers that need the mask: `kept`, `(B, T)`, is True for tokens to keep."""
        return self._run(u, state, return_state)

    def _declare(self, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        """Make the layer's tensors, parameters or buffers according to `freeze`; a shape of None makes none."""
        # float32 even under a 16-bit default dtype
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self._names = tuple(shapes)
        for name, shape in shapes.items():
            if shape is None:
                self.register_parameter(name, None)
            elif name in self.TRAINED[self.freeze]:
                self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
            else:
                self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the declared tensors with their names."""
        for name in self._names:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every declared tensor in place.

        Tensors marked ``_is_hf_initialized`` (loaded from a checkpoint) keep their values. Projections are not
        touched.
        """
        for name, tensor in self.own_tensors():
            if not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta:
                self._initialize(name, tensor)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "StateSpaceLayer":
        if recurse:
            for child in self.children():
                child._apply(fn)
        self.clear_cache()
        return super()._apply(keep_precision(fn), recurse=False)

    def clear_cache(self) -> None:
        """Drop cached tensors; needed only after edits through ``.data``, which leave no trace."""
        self._kept, self._kept_for_tokens = None, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_kept_for_tokens": {}}

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and forget what tokens read: compiled calls, which may train, cannot."""
        self._kept_for_tokens = {}
        return super().train(mode)

    def _requires_grad(self) -> bool:
        return any(tensor.requires_grad for _, tensor in self.own_tensors())

    def _is_trained(self) -> bool:
        """Return whether an optimizer may change the tensors, and if so drop the cache: fused ones leave no trace."""
        trained = self._requires_grad()
        if trained:
            self.clear_cache()
        return trained

    def _for_tokens(self, name: str, make: Callable[[], Any], *others: torch.Tensor) -> Any:
        """Return what a function makes of the layer's tensors, and of others, in a call that a sequence goes through.

        It is made once from a prompt to the tokens after it, if no gradient is recorded. A call that starts a sequence
        or records a gradient forgets it, and so does `train`, since a fused optimizer may have changed the tensors
        without a trace.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # tracers see no addresses
            return make()
        tensors = [*(tensor for _, tensor in self.own_tensors()), *others]
        kept = self._kept_for_tokens  # another thread may forget it meanwhile
        found = kept[name] = keep(kept.get(name), tensors, make)
        return found[2]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> Any:
        """Run the layer over a sequence.

        Args:
            hidden_states: `(B, T, H)`, any floating dtype.
            attention_mask: `(B, T)`, 1 = keep; other inputs count as zero. Padding is exact on the left and, unless
                a state is taken after it, on the right.
            state: State before the first token, as returned: a tensor of `state_shape`, or several for a long
                convolution. None starts afresh. Causal only.
            return_state: Whether to also return the state after the last token. Causal only.
            cu_seqlens: Bounds of packed sequences in the rows joined to one, see `kernels.packed`; with neither mask
                nor state.
            shards: The layout of a sequence that is divided among processes, see `context_parallel`, with the bounds
                of packed sequences; with neither `cu_seqlens` nor a state.

        Returns:
            `(B, T, H)` in the input's dtype, and with `return_state` the state after the last token, float32 or
            float64.

        Raises:
            ValueError: A shape does not fit, or a bidirectional layer gets or returns a state.
        """
        u = self._check_input(hidden_states, attention_mask, state, return_state, shards)
        if (state is None or torch.is_grad_enabled()) and not torch.compiler.is_compiling():
            self._kept_for_tokens = {}
        if shards is not None:
            if cu_seqlens is not None or state is not None or return_state:
                raise ValueError("shards must be None with cu_seqlens, state or return_state")
            kept = None if attention_mask is None else attention_mask.to(torch.bool)
            y, new_state = self._run_divided(u, kept, shards), None
        elif cu_seqlens is not None:
            if attention_mask is not None or state is not None or return_state:
                raise ValueError("cu_seqlens must be None with attention_mask, state or return_state")
            row = u.flatten(0, 1)[None]
            check_cu_seqlens(cu_seqlens, row, "hidden_states")
            y, new_state = self._run_packed(row, cu_seqlens), None
            y = y.reshape(*y.shape[:-3], *u.shape)
        else:
            kept = None if attention_mask is None else attention_mask.to(torch.bool)
            y, new_state = self._run_masked(u, kept, state, return_state)
        if self.output_linear is not None:
            weight = self.output_linear.weight
            y = F.glu(self.output_linear(F.gelu(y).to(weight.dtype)), dim=-1).to(u.dtype)
        if return_state:
            assert new_state is not None
            return y, new_state
        return y

    def _check_input(
        self, u: torch.Tensor, mask: torch.Tensor | None, state: Any, return_state: bool, shards: Shards | None
    ) -> torch.Tensor:
        if u.dim() != 3 or u.shape[2] != self.hidden_size or (u.shape[1] == 0 and shards is None):
            raise ValueError(f"hidden_states must be (B, T, {self.hidden_size}) with T > 0; got {tuple(u.shape)}")
        if self.bidirectional and (state is not None or return_state):
            kind = type(self).__name__
            raise ValueError(f"a bidirectional {kind} has no state: state must be None and return_state False")
        if exports_to_onnx() and (state is not None or return_state):
            raise ValueError("use_cache must be False in an export to ONNX: a state space layer exports no state")
        if state is not None:
            self._check_state(state, u.shape[0])
        if mask is None:
            return u
        if mask.shape != u.shape[:2]:
            raise ValueError(
                f"attention_mask must be {tuple(u.shape[:2])} like hidden_states; got {tuple(mask.shape)}"
            )
        # not a product, which would keep NaN in padding
        return u.masked_fill(~mask.to(torch.bool)[..., None], 0)


def each_row(
    function: Callable[[torch.Tensor], torch.Tensor], u: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Map `(B, T, H)` to `(..., B, T, H)` by a function of rows: one for each packed sequence, if there are any."""
    if cu_seqlens is None:
        return function(u)
    rows, kept = to_rows(u, cu_seqlens)
    return function(rows)[..., kept, :][..., None, :, :]


def fingerprint(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return a key that changes when one of the tensors does, while the caller holds references to them.

    It sees storage, version counter, dtype, device and shape, but neither edits through ``.data`` nor steps of a fused
    optimizer. Cache nothing of tensors that require a gradient.
    """
    return tuple(
        (x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype, x.device, x.shape)
        for x in tensors
        if x is not None
    )


Kept = tuple[tuple[Any, ...], list[torch.Tensor], Any]
"""A fingerprint, its tensors, which no other tensor can replace at their addresses, and what was made of them."""


def unseen() -> AbstractContextManager[object]:
    """Return a context for what is computed once and kept, so that a selective checkpoint does not see it.

    Such a checkpoint tells operations apart by their number, and computes a layer again without these.
    """
    seen = type(_get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint"
    return _disable_current_modes() if seen else nullcontext()


def keep(cache: Kept | None, tensors: Sequence[torch.Tensor], function: Callable[[], Any]) -> Kept:
    """Return the cache if it was made of these tensors as they are now, or else one with the function's result."""
    key = fingerprint(tensors)
    if cache is not None and cache[0] == key:
        return cache
    with unseen():
        return key, [x.detach() for x in tensors], function()
