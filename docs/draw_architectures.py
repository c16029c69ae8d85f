"""Draw ``architectures.svg``, what one token reads in each architecture: ``python docs/draw_architectures.py``.

The colours follow the reader's preference for light or dark; the panels have a ground of their own, for pages that do
not.
"""

from itertools import pairwise
from pathlib import Path

PICTURE = Path(__file__).with_name("architectures.svg")
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
  .name { font-size: 17px; font-weight: 600; }
  .small { font-size: 11.5px; fill: #57606a; }
  .box text { fill: #ffffff; font-weight: 500; }
  .middle { text-anchor: middle; } .end { text-anchor: end; }
  .panel { fill: #f6f8fa; stroke: #d0d7de; }
  .token { fill: #d8dee4; }
  .own { stroke: #24292f; stroke-width: 2; }
  .line { fill: none; stroke: #57606a; stroke-width: 1.5; } .dashed { stroke-dasharray: 3 3; }
  .head { fill: #57606a; }
  .local { fill: #0969da; } .global { fill: #bc4c00; } .linear { fill: #1a7f37; } .neuron { fill: #8250df; }
  .through { opacity: 0.35; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .panel { fill: #161b22; stroke: #30363d; }
    .token { fill: #30363d; }
    .own { stroke: #e6edf3; }
    .line { stroke: #9da7b3; }
    .head { fill: #9da7b3; }
    .local { fill: #1f6feb; } .global { fill: #c2560c; } .linear { fill: #238636; } .neuron { fill: #8957e5; }
    .through { opacity: 0.5; }
  }
"""
WIDTH, HEIGHT, GAP = 415, 236, 10
TOKENS, STEP, SIDE = 24, 16, 12  # tokens of a sequence, and the squares they are


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words that begin at x, or stand around it or end there if they are of such a kind."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, words: str, kind: str) -> str:
    """A part of a model, 28 high."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="28" rx="6" class="{kind}"/>'
    return f'<g class="box">{shape}{text(x + width / 2, y + 18.5, words, "middle")}</g>'


def arrow(*points: tuple[float, float]) -> str:
    """A line whose last piece ends in a head that points up or to the right."""
    (x0, y0), (x, y) = points[-2:]
    head = f"{x:g},{y:g} {x - 4:g},{y + 6:g} {x + 4:g},{y + 6:g}"
    if y0 == y:
        sign = 1 if x > x0 else -1
        head = f"{x:g},{y:g} {x - sign * 6:g},{y - 4:g} {x - sign * 6:g},{y + 4:g}"
    line = " ".join(f"{px:g},{py:g}" for px, py in points)
    return f'<polyline class="line" points="{line}"/><polygon class="head" points="{head}"/>'


def heading(name: str, idea: str) -> list[str]:
    """An architecture's name and what it is."""
    return [text(16, 28, name, "name"), text(16, 46, idea, "small")]


def tokens(kinds: dict[int, str], own: int | None = None) -> str:
    """A sequence, each of its tokens in the colour of what it is read by."""
    squares = []
    for index in range(TOKENS):
        kind = kinds.get(index, "token") + (" own" if index == own else "")
        x = 16 + STEP * index
        squares.append(f'<rect x="{x}" y="186" width="{SIDE}" height="{SIDE}" rx="2.5" class="{kind}"/>')
    return "".join(squares)


def centre(index: float) -> float:
    """Where a token's middle is."""
    return 16 + STEP * index + SIDE / 2


def spade() -> list[str]:
    """A state space model beside attention in the bottom layer."""
    reach = dict.fromkeys(range(TOKENS), "global through") | dict.fromkeys(range(9, 16), "local")
    return [
        *heading("SPADE", "a global layer at the bottom, local attention in all"),
        box(106, 62, 170, "local attention", "local"),
        text(284, 81, "in all layers above", "small"),
        arrow((207, 106), (207, 90)),
        f'<circle cx="207" cy="115" r="9" class="panel"/>{text(207, 119.5, "+", "middle")}',
        box(16, 128, 180, "state space model", "global"),
        box(218, 128, 180, "local attention", "local"),
        arrow((106, 128), (106, 115), (197, 115)),
        arrow((308, 128), (308, 115), (217, 115)),
        arrow((centre(12), 185), (centre(12), 171), (106, 171), (106, 156)),
        arrow((centre(12), 185), (centre(12), 171), (308, 171), (308, 156)),
        tokens(reach, own=12),
        text(16, 220, "its window by attention, all others through a state", "small"),
    ]


def chela() -> list[str]:
    """Convolutions feed linear attention."""
    reach = dict.fromkeys(range(17), "linear through") | dict.fromkeys(range(14, 17), "global")
    return [
        *heading("CHELA", "convolutions feed linear attention, in all layers"),
        box(16, 62, 382, "linear attention:  S ← S + kᵀ v,  gated", "linear"),
        text(235, 112, "queries, keys, gates", "small end"),
        arrow((243, 128), (243, 90)),
        box(16, 128, 140, "short convolutions", "global"),
        arrow((156, 142), (172, 142)),
        box(173, 128, 140, "long convolution", "global"),
        text(366, 145, "values", "small"),
        arrow((centre(16), 185), (centre(16), 171), (86, 171), (86, 156)),
        arrow((centre(16), 185), (centre(16), 171), (358, 171), (358, 90)),
        tokens(reach, own=16),
        text(16, 220, "what is near by convolution, all earlier tokens as one matrix", "small"),
    ]


def bst() -> list[str]:
    """Attention to a window, and to states of what came before it."""
    reach = dict.fromkeys(range(12), "global through") | dict.fromkeys(range(12, 19), "local")
    return [
        *heading("BST", "sliding windows, and in some layers context states beside them"),
        box(16, 62, 190, "attention to states", "local"),
        box(218, 62, 180, "attention to a window", "local"),
        arrow((106, 128), (106, 90)),
        text(114, 112, "context states", "small"),
        box(16, 128, 190, "state space model", "global"),
        arrow((centre(18), 185), (centre(18), 171), (106, 171), (106, 156)),
        arrow((centre(18), 185), (centre(18), 90)),
        tokens(reach, own=18),
        text(16, 220, "its window by attention, earlier tokens by attention to their states", "small"),
    ]


def srformer() -> list[str]:
    """A summary's token reads one segment; neurons carry the others."""
    size, middles = 6, [centre(2.5 + 6 * segment) for segment in range(4)]
    reach = dict.fromkeys(range(TOKENS), "neuron through") | dict.fromkeys(range(2 * size, 3 * size), "local")
    bounds = [14 + STEP * size * segment for segment in (1, 2, 3)]
    return [
        *heading("SRformer", "T5 or BART whose decoder reads a document by segments"),
        f'<rect x="{middles[2] - 85:g}" y="62" width="170" height="28" rx="6" class="token own"/>',
        text(middles[2], 80.5, "token of the summary", "middle"),
        *(arrow((x, 185), (x, 153)) for x in middles),
        *(arrow((x + 13, 140), (after - 13, 140)) for x, after in pairwise(middles)),
        *(f'<circle cx="{x:g}" cy="140" r="13" class="neuron"/>' for x in middles),
        *(f'<line class="line dashed" x1="{x}" x2="{x}" y1="178" y2="206"/>' for x in bounds),
        arrow((middles[2], 127), (middles[2], 90)),
        text(middles[2] - 8, 113, "what fires of recurrent neurons", "small end"),
        arrow((centre(17), 185), (centre(17), 90)),
        text(centre(17) + 8, 113, "one segment", "small"),
        tokens(reach),
        text(16, 220, "one segment by attention, the others through the neurons", "small"),
    ]


PANELS = (spade, chela, bst, srformer)


def picture() -> str:
    """The whole file."""
    panels = []
    for number, panel in enumerate(PANELS):
        x, y = (number % 2) * (WIDTH + GAP), (number // 2) * (HEIGHT + GAP)
        ground = f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>'
        panels.append(f'<g transform="translate({x} {y})">{ground}\n  ' + "\n  ".join(panel()) + "\n</g>")
    rows = -(-len(PANELS) // 2)
    width, height = 2 * WIDTH + GAP, rows * (HEIGHT + GAP) - GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>What one token reads in SPADE, CHELA, BST and SRformer</title><style>{STYLE}</style>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
