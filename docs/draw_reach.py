"""Draw ``figures/reach_*.svg``, which token reads which in one layer of each kind: ``python docs/draw_reach.py``.

No pattern is drawn by hand. In a tiny model of one layer, with random weights in float64, all ways but one are closed
by weights that become zero or by a field of its config. A cell is coloured if the gradient of the row's output for the
column's input is not zero. The colours are those of ``draw_architectures.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from draw_architectures import STYLE, text
from torch import nn
from transformers import PreTrainedModel

import hf_hybrid

FIGURES = Path(__file__).with_name("figures")
TOKENS, TARGET = 24, 12  # of a sequence or document, and of its summary
SPAN, RADIUS = 6, 3  # of a window, chunk or segment; to each side of a token
WIDTH, GAP, MARGIN, HEAD = 640, 24, 16, 48  # of the file; between panels; around all of them; above a pattern
ROUNDING = 1e-9  # Fourier transforms leave about 1e-17 where a gradient is zero; others are far greater
SIZES = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
HEADS = {**SIZES, "num_attention_heads": 2}
_MORE_STYLE = """  .name { font-size: 15px; } .small { font-size: 13px; } .legend { font-size: 14px; }
  .itself { fill: #24292f; } .bound { stroke: #57606a; stroke-width: 0.12; stroke-dasharray: 0.3 0.3; }
  @media (prefers-color-scheme: dark) { .itself { fill: #e6edf3; } .bound { stroke: #9da7b3; } }
"""


@dataclass(frozen=True)
class Way:
    """How tokens reach each other in a layer.

    Attributes:
        kind: Its colour, a class of the style.
        closes: Ends of the names of weights that are zero when only this way is open.
        fields: Fields of a config in which only this way is open.
    """

    kind: str
    closes: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """A kind of layer.

    Attributes:
        name: Its name.
        note: A word about it.
        model: A model class.
        config: Fields of its config.
        ways: From the nearest to the farthest.
        is_cut: Whether dashed lines stand between windows or segments.
    """

    name: str
    note: str
    model: type[PreTrainedModel]
    config: Mapping[str, Any]
    ways: Sequence[Way]
    is_cut: bool = False


@dataclass(frozen=True)
class Picture:
    """A file: its title, panels in a row, and the words for each colour."""

    title: str
    columns: int
    panels: Sequence[Panel]
    legend: Mapping[str, str]
    rows: str = "Row: a token that reads. Column: a token it reads. Diagonal: itself. Dot: that way too."


# ---- the architectures ----


def spade() -> Picture:
    """A state space model beside local attention in the bottom layer, in both directions or one."""
    both = (Way("local", ("global_norm.weight",)), Way("global", ("attention.o_proj.weight",)))
    language_model = {"is_decoder": True, "is_encoder_decoder": False}
    panels = []
    for name, model, role in (
        ("encoder", hf_hybrid.SpadeEncoderModel, {}),
        ("language model", hf_hybrid.SpadeForCausalLM, language_model),
    ):
        bottom = {**HEADS, **role, "local_radius": RADIUS, "chunk_size": SPAN, "ssm_state_size": 8}
        windows = {**bottom, "global_layers": "none"}
        chunks = {**windows, "attention_type": "chunk"}
        panels += [
            Panel(name, "bottom layer", model, bottom, both),
            Panel(name, "layers above, windows", model, windows, (Way("local"),)),
            Panel(name, "layers above, chunks", model, chunks, (Way("local"),)),
        ]
    legend = {"local": "local attention", "global": "state space model"}
    return Picture("Which token reads which in a layer of SPADE", 3, panels, legend)


def chela() -> Picture:
    """Convolutions, and linear attention over what they give."""
    values = ("v_proj.weight", "v_proj.bias")
    ways = (
        Way("global", ("long_kernel", *values)),
        Way("global through", values),  # it reads what the short ones give
        Way("linear", ("short_kernel_0", "short_kernel_1")),
    )
    sizes = {**SIZES, "short_kernel_sizes": [3, 3], "long_kernel_size": SPAN + 2}
    panels = [
        Panel("causal", "language models", hf_hybrid.ChelaModel, {**sizes, "is_decoder": True}, ways),
        Panel("bidirectional", "all other models", hf_hybrid.ChelaModel, sizes, ways),
    ]
    legend = {
        "global": "short convolutions",
        "global through": f"long convolution, here of {SPAN + 2} taps",
        "linear": "linear attention",
    }
    return Picture("Which token reads which in a layer of CHELA", 2, panels, legend)


def bst() -> Picture:
    """Windows, and context states beside them."""
    both = (Way("local", ("context.o_proj.weight",)), Way("global", ("layers.0.attention.o_proj.weight",)))
    windows = {**HEADS, "window": SPAN, "bst_layers": []}
    states = {**windows, "bst_layers": [0], "state_size": 8}
    filters = {**states, "context_type": "multi_filter", "num_context_states": 4}
    model = hf_hybrid.BstModel
    panels = [
        Panel("other layers", "windows", model, windows, (Way("local"),)),
        Panel("single or multi head", "states of each token", model, states, both, is_cut=True),
        Panel("multi filter", "states of the window before", model, filters, both, is_cut=True),
    ]
    legend = {"local": "attention to a window", "global": "attention to context states"}
    return Picture("Which token reads which in a layer of BST", 3, panels, legend)


def srformer() -> Picture:
    """Tokens of a summary and of its document."""
    sizes = {"vocab_size": 8, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    sizes |= {"segment_size": SPAN, "decoder_start_token_id": 0}
    model = hf_hybrid.SRformerT5Model
    ways = (Way("local", fields={"cross_attention_mode": "segmented"}),)
    both = (*ways, Way("neuron", fields={"cross_attention_mode": "recurrent"}))
    panels = [
        Panel("T5 or BART", "full attention", model, {**sizes, "cross_attention_mode": "full"}, (Way("local"),)),
        Panel("segments alone", "as SRformer starts", model, sizes, ways, is_cut=True),
        Panel("SRformer", "segments and neurons", model, sizes, both, is_cut=True),
    ]
    legend = {"local": "attention", "neuron": "recurrent neurons"}
    rows = "Row: a token of the summary. Column: one of the document. Dot: that way too."
    return Picture("Which token of a document reaches which token of its summary in SRformer", 3, panels, legend, rows)


PICTURES = {"spade": spade, "chela": chela, "bst": bst, "srformer": srformer}


# ---- what reaches what ----


def reach(panel: Panel, way: Way) -> torch.Tensor:
    """Return whether token j reaches token i by a way, `(tokens that read, TOKENS)`."""
    return gradients(panel, way) > ROUNDING


def gradients(panel: Panel, way: Way) -> torch.Tensor:
    """Return the largest gradient of output i for input j with only this way open, `(tokens that read, TOKENS)`.

    Raises:
        ValueError: The model has no weight of a name that is to be closed.
    """
    torch.manual_seed(0)
    model = panel.model(panel.model.config_class(**{**panel.config, **way.fields})).eval().double()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            if not weight.any():  # what starts at zero would hide what it multiplies
                nn.init.normal_(weight)
        for end in way.closes:
            closed = [weight.zero_() for name, weight in weights.items() if name.endswith(end)]
            if not closed:
                raise ValueError(f"closes must be ends of names of weights of {panel.model.__name__}; got {end!r}")
    inputs = torch.randn(1, TOKENS, model.config.hidden_size, dtype=torch.double, requires_grad=True)
    rows = [
        torch.autograd.grad((output * torch.randn_like(output)).sum(), inputs, retain_graph=True)[0]
        for output in _outputs(model, inputs)[0]
    ]
    return torch.cat(rows).abs().amax(-1)


def _outputs(model: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    if isinstance(model, hf_hybrid.SRformerT5Model):
        target = torch.randn(1, TARGET, inputs.shape[2], dtype=inputs.dtype)
        return model(encoder_outputs=(inputs,), decoder_inputs_embeds=target).last_hidden_state
    return model.base_model(inputs_embeds=inputs).last_hidden_state


# ---- drawing ----


def draw(picture: Picture) -> str:
    """Return the whole file."""
    width = (WIDTH - 2 * MARGIN + GAP) / picture.columns - GAP
    drawn, y = [text(MARGIN, 26, picture.rows, "legend")], 42.0
    for start in range(0, len(picture.panels), picture.columns):
        row = [_panel(panel, width) for panel in picture.panels[start : start + picture.columns]]
        for column, (panel, _) in enumerate(row):
            drawn.append(f'<g transform="translate({MARGIN + (width + GAP) * column:g} {y:g})">{panel}</g>')
        y += max(height for _, height in row) + GAP
    height = round(y + 24)
    drawn += _legend(picture.legend, height - 18)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{picture.title}</title><style>{STYLE}{_MORE_STYLE}</style>\n'
        f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _legend(words: Mapping[str, str], y: float) -> Iterable[str]:
    x = float(MARGIN)
    for kind, what in words.items():
        yield f'<rect x="{x:g}" y="{y - 12:g}" width="14" height="14" rx="2" class="{kind}"/>'
        yield text(x + 20, y, what, "legend")
        x += 40 + 7.2 * len(what)


def _panel(panel: Panel, width: float) -> tuple[str, float]:
    """Draw a panel; return it and its height."""
    ways = [(way.kind, reach(panel, way)) for way in panel.ways]
    count, size = ways[0][1].shape[0], width / TOKENS
    squares: dict[str, list[str]] = {}
    dots: dict[str, list[str]] = {}
    for i, j in product(range(count), range(TOKENS)):
        kinds = [kind for kind, reached in ways if reached[i, j]] or ["token"]
        if i == j and count == TOKENS:
            kinds = ["itself"]
        squares.setdefault(kinds[0], []).append(f"M{j} {i}h.9v.9h-.9z")
        if len(kinds) > 1:
            dots.setdefault(kinds[-1], []).append(f"M{j}.25 {i}.25h.4v.4h-.4z")
    parts = [text(0, 18, panel.name, "name"), text(0, 37, panel.note, "small")]
    parts.append(f'<g transform="translate(0 {HEAD}) scale({size:g})">')
    parts += [f'<path class="{kind}" d="{"".join(d)}"/>' for kind, d in [*squares.items(), *dots.items()]]
    for place in range(SPAN, TOKENS, SPAN) if panel.is_cut else ():
        parts.append(f'<path class="bound" d="M{place - 0.05:g} 0V{count}"/>')
    return "\n".join([*parts, "</g>"]), HEAD + count * size


def main() -> None:
    """Write all pictures."""
    for name, picture in PICTURES.items():
        (FIGURES / f"reach_{name}.svg").write_text(draw(picture()), encoding="utf-8")


if __name__ == "__main__":
    main()
