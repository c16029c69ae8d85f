"""The HTML of the page: numbers, problems, and a document coloured by what a model looked at."""

from html import escape

from hf_hybrid.commands.attended import Attended
from hf_hybrid.commands.reading import Reader, Reading

_CELLS = 60  # of the strip above a document

STYLE = """
:root { --hybrid-heat: #ffa94d; --hybrid-alarm: #a61e1e; --hybrid-alarm-back: #fdecec; }
.dark { --hybrid-heat: #a6480c; --hybrid-alarm: #ffc9c9; --hybrid-alarm-back: #4a1717; }
body { background: var(--body-background-fill) !important; }
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
.gradio-container .html-container { padding: 0 !important; }
#start, #stop { min-width: 120px; }
#head h1 { font-size: 1.5rem; margin: 0; }
#head p, .hybrid-note { color: var(--body-text-color); opacity: .82; margin: .25rem 0 0; font-size: .9rem; }
.hybrid-name { font-size: 1.05rem; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
.hybrid-problem { color: var(--hybrid-alarm); background: var(--hybrid-alarm-back); border: 1px solid currentColor;
  border-radius: 6px; padding: .6rem .8rem; margin: 0; overflow-wrap: anywhere; }
.hybrid-numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: .5rem; margin: 0; }
.hybrid-numbers div { border: 1px solid var(--border-color-primary); border-radius: 6px; padding: .4rem .6rem;
  background: var(--background-fill-secondary); }
.hybrid-numbers dt { font-size: .78rem; color: var(--body-text-color); opacity: .82; margin: 0; }
.hybrid-numbers dd { font-size: 1.02rem; font-weight: 600; color: var(--body-text-color); margin: 0;
  font-variant-numeric: tabular-nums; }
.hybrid-attended h3 { font-size: 1rem; margin: 0 0 .3rem; color: var(--body-text-color); }
.hybrid-strip { display: flex; height: 18px; border: 1px solid var(--border-color-primary); border-radius: 4px;
  overflow: hidden; margin: .5rem 0; }
.hybrid-strip span { flex: 1; }
.hybrid-heat { background: color-mix(in srgb, var(--hybrid-heat) calc(var(--heat) * 100%), transparent); }
.hybrid-text { max-height: 22rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .7rem;
  border: 1px solid var(--border-color-primary); border-radius: 6px; color: var(--body-text-color); line-height: 1.65;
  font-size: .93rem; background: var(--background-fill-primary); }
.hybrid-text span { border-radius: 3px; }
.hybrid-legend { display: flex; align-items: center; gap: .5rem; font-size: .82rem; color: var(--body-text-color); }
.hybrid-legend i { flex: 0 1 140px; height: 12px; border: 1px solid var(--border-color-primary); border-radius: 3px;
  background: linear-gradient(to right, transparent, var(--hybrid-heat)); }
"""
"""Style of the page; the colours of text, borders and grounds are those of the theme, light or dark."""


def heading(readers: list[Reader]) -> str:
    """Return the page's title, and what it does."""
    do = {True: "Summarize", False: "Continue"}
    verb = " or ".join(dict.fromkeys(do[reader.summarizes] for reader in readers)).capitalize()
    return (
        f"<h1>{verb} a document</h1><p>Drop a file or paste a text. It does not leave the computer on which hf-hybrid "
        "runs, and is deleted when that ends.</p>"
    )


def name(reader: Reader) -> str:
    """Return the heading of a checkpoint's column."""
    short = reader.name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or reader.name
    kind = reader.answerer.checkpoint.config.model_type
    return (
        f'<h2 class="hybrid-name" title="{escape(reader.name)}">{escape(short)} <small>({escape(kind)})</small></h2>'
    )


def problem(line: str) -> str:
    """Return a line that says what is wrong; nothing for an empty one."""
    return f'<p class="hybrid-problem" role="alert">{escape(line)}</p>' if line else ""


def note(line: str) -> str:
    """Return a line that says what happens."""
    return f'<p class="hybrid-note" role="status">{escape(line)}</p>'


def numbers(reader: Reader, reading: Reading) -> str:
    """Return what reading and writing took so far, and a line that says how far it is."""
    read, tokens = len(reading.prompt.ids), reading.prompt.tokens
    device = str(reader.device) if reader.device.type == "cuda" else "process"
    cells = {
        "Tokens read": f"{read:,}" if read == tokens else f"{read:,} of {tokens:,}",
        "First token after": "–" if reading.first is None else f"{reading.first:.2f} s",
        "Time in all": f"{reading.seconds:.1f} s",
        "Tokens written": f"{reading.written:,}",
        "Tokens per second": "–" if reading.rate is None else f"{reading.rate:,.1f}",
        f"Peak memory ({device})": f"{reading.memory / 2**20:,.0f} MiB",
    }
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{value}</dd></div>" for label, value in cells.items())
    return f'{note(_how_far(reader, reading))}<dl class="hybrid-numbers">{items}</dl>'


def _how_far(reader: Reader, reading: Reading) -> str:
    cut = len(reading.prompt.ids) < reading.prompt.tokens
    part = f"Only the {'last' if reader.answerer.continues else 'first'} part of the document is read. " if cut else ""
    if reading.done:
        return part + ("Stopped." if reading.stopped else "Done.")
    if not reading.written:
        return f"{part}Reading …"
    if not reader.streams:
        return f"{part}Searching with beams; the text appears at its end …"
    return f"{part}Writing …"


def attended(reading: Reading) -> str:
    """Return the document, coloured by what the model looked at, or why there is none."""
    if reading.attended is None:
        return note(f"What it looked at is not shown: {reading.not_shown}.") if reading.not_shown else ""
    found = reading.attended
    most = max(found.shares)
    spans = "".join(
        f'<span class="hybrid-heat" style="--heat:{share / most:.3f}" title="{share:.2%}">{escape(piece)}</span>'
        for piece, share in zip(found.pieces, found.shares, strict=True)
    )
    unit = "word" if found.words == 1 else f"{found.words} words"
    weights = found.weights
    rest = "; the rest was on other tokens, such as end marks, and on what the model had written"
    rest = rest if found.document < 0.995 else ""
    return (
        '<section class="hybrid-attended"><h3>What it looked at</h3>'
        f"{_strip(found)}"
        f'<div class="hybrid-legend"><span>0</span><i></i><span>{most:.1%} of the attention on the document, '
        f"per {unit}</span></div>"
        f'<div class="hybrid-text" tabindex="0">{spans}</div>'
        f'<p class="hybrid-note">Attention of {weights.outputs:,} written tokens, mean of {weights.layers} layers and '
        f"{weights.heads} heads. {found.document:.0%} of it was on these words{rest}.</p></section>"
    )


def _strip(found: Attended) -> str:
    """Return the whole document as a row of cells, each of as many letters."""
    letters = sum(map(len, found.pieces))
    cells = [0.0] * min(_CELLS, letters)
    before = 0
    for piece, share in zip(found.pieces, found.shares, strict=True):
        for index in range(len(piece)):
            cells[(before + index) * len(cells) // letters] += share / len(piece)
        before += len(piece)
    most = max(cells)
    spans = "".join(f'<span class="hybrid-heat" style="--heat:{cell / most:.3f}"></span>' for cell in cells)
    return f'<div class="hybrid-strip" role="img" aria-label="Attention from begin to end">{spans}</div>'
