"""Tables of what `benchmarks.gpu` has measured, for the pages of ``docs``, and its picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import gpu_further, gpu_sanitizer, gpu_tuning
from benchmarks.gpu_models import CHECKED, LOGITS, LONG, OURS
from benchmarks.record import Row, markdown_table, read_csv


def report(part: str, rows: list[Row]) -> str:
    """Return the tables of a part's rows."""
    names = {"date": "", "device": "", "torch": "torch ", "triton": "triton ", "transformers": "transformers "}
    said = [word + " and ".join(dict.fromkeys(row[name] for row in rows)) for name, word in names.items()]
    return "\n\n".join([f"{', '.join(said)}.", *_TABLES[part](rows)])


def _checks(rows: list[Row]) -> list[str]:
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        # a reference that failed has a row too
        own = [row for row in rows if row["op"] == op and row["backend"] != "torch"]
        ratios = [float(row["error"]) / float(row["allowed"]) for row in own if row["error"]]
        right = sum(row["outcome"] == "ok" for row in own)
        largest = f"{max(ratios):.2f}" if ratios else "-"
        lines.append([op, str(len({row["shape"] for row in own})), f"{right} of {len(own)}", largest])
    return [markdown_table(["kernels", "shapes", "right", "largest error over what is allowed"], lines)]


def _kernels(rows: list[Row]) -> list[str]:
    first = rows[0]
    ceilings = ", ".join(f"{first[f'{name}_tflops']} TFLOP/s in {name}" for name in ("bf16", "fp16", "fp32"))
    lines = [
        [row["op"], row["shape"], row["direction"], row["contender"]]
        + (
            [row["ms"], row["over_floor"], row["peak_mib"]]
            if row["outcome"] == "ok"
            else [_short(row["outcome"]), "", ""]
        )
        for row in rows
    ]
    names = ["kernel", "shape", "direction", "contender", "ms", "times the floor", "peak MiB"]
    return [
        f"A copy moves {first['copy_gbs']} GB/s here, and products run at {ceilings}.",
        markdown_table(names, lines),
    ]


def _tune(rows: list[Row]) -> list[str]:
    entries = gpu_tuning.shipped(rows)
    lines = []
    for op, name, capability in dict.fromkeys(
        (r["op"], r["configuration"], r["capability"]) for r in rows if r["shapes"]
    ):
        own = [row for row in rows if (row["op"], row["configuration"], row["capability"]) == (op, name, capability)]
        tried = len({(row["tiles"], row["num_warps"], row["num_stages"]) for row in own})
        wrong = sum(row["outcome"].startswith("wrong") for row in own)
        key = (op, name, int(capability))
        shipped, spread = "the default", ""
        for candidate, ratios, _ in gpu_tuning.timed_candidates(own, key):
            if candidate == entries.get(key):
                tiles = "".join(f"{tile} {size}, " for tile, size in candidate.tiles.items())
                shipped = f"{tiles}{candidate.num_warps} warps, {candidate.num_stages} stages"
                spread = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
        lines.append([op, name, str(tried), str(wrong), shipped, spread])
    names = ["kernel", "configuration", "candidates", "wrong", "in the table", "its time over the default's"]
    ragged = "; ".join(f"{row['op']} {row['outcome']}" for row in rows if row["configuration"] == gpu_tuning.RAGGED)
    failed = "; ".join(f"{row['op']} {row['outcome']}" for row in rows if row["configuration"] == gpu_tuning.NONE)
    parts = [f"The best ones together at ragged shapes: {ragged}."] if ragged else []
    parts += [f"Not tuned: {failed}."] if failed else []
    return [markdown_table(names, lines), *parts]


def _plain(columns: Sequence[str]) -> Callable[[list[Row]], Sequence[str]]:
    """Return a function that shows columns as they are."""
    return lambda rows: [markdown_table(list(columns), [[row[name] for name in columns] for row in rows])]


def _models(rows: list[Row]) -> list[str]:
    timed = [row for row in rows if row["length"]]
    lengths = sorted({int(row["length"]) for row in timed})
    # as it is trained by the scripts; the rows with all logits have lines of their own
    cells = {(line_of(row), int(row["length"])): row for row in timed}
    checked = "; ".join(f"{row['model']} {row['outcome']}" for row in rows if row["loss"] == CHECKED)
    parts = [f"Small models of the same kinds, beside a CPU: {checked}."] if checked else []
    parts += [f"From {LONG:,} tokens on, our models' loss does not hold all logits at once, unless the line says so."]
    for column, title in (
        ("tokens_s", "training: thousand tokens per second"),
        ("peak_mib", "training: peak memory, GiB"),
        ("prompt_ms", "generation: milliseconds of a prompt"),
        ("token_ms", "generation: milliseconds per token"),
    ):
        lines = []
        for line in dict.fromkeys(map(line_of, timed)):
            found = [cells.get((line, length)) for length in lengths]
            if any(row and row[column] for row in found):
                lines.append([line, *(_cell(row, column) for row in found)])
        parts += [f"**{title}**", markdown_table(["model", *map(str, lengths)], lines)]
    ran = {row["model"]: row["code"] for row in timed if row["code"]}
    parts.append("What ran: " + "; ".join(f"{model}: {code.replace('; ', ', ')}" for model, code in ran.items()) + ".")
    return parts


def line_of(row: Row) -> str:
    """Return the name of a model's line: its own, but with all logits where its loss usually does not hold them."""
    both = row["loss"] == LOGITS and row["model"] in OURS and int(row["length"]) >= LONG
    return f"{row['model']}, {LOGITS}" if both else row["model"]


def _cell(row: Row | None, column: str) -> str:
    if row is None:
        return ""
    if not row[column] and column in ("prompt_ms", "token_ms"):
        return _short(row["decoding"]) or "not tried"
    if not row[column]:
        return _short(row["outcome"]) if row["outcome"] != "ok" else ""
    scale = {"tokens_s": 1e3, "peak_mib": 1024}.get(column, 1)
    return f"{float(row[column]) / scale:.{1 if scale == 1 or float(row[column]) >= 10 * scale else 2}f}"


def _short(said: str) -> str:
    if said.startswith(("OutOfMemoryError", "raised: OutOfMemoryError")):
        return "out of memory"
    return "not installed" if said.startswith("not installed") else said.split(":")[0]


_TABLES: dict[str, Callable[[list[Row]], Sequence[str]]] = {
    "checks": _checks,
    "kernels": _kernels,
    "tune": _tune,
    "models": _models,
    "losses": _plain(gpu_further.LOSS_COLUMNS),
    "sanitizer": _plain([name for name in gpu_sanitizer.COLUMNS if name != "fingerprint"]),
    "lra": _plain(gpu_further.LRA_COLUMNS),
}


def draw(folder: Path) -> None:
    """Draw each model's tokens per second and peak memory over the length, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: nothing is drawn")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_csv(folder / "models.csv") if (folder / "models.csv").exists() else []
    for column, label in (("tokens_s", "training, tokens per second"), ("peak_mib", "training, peak memory in MiB")):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for model, loss in dict.fromkeys((row["model"], row["loss"]) for row in rows):
            own = [row for row in rows if (row["model"], row["loss"]) == (model, loss) and row[column]]
            points = sorted((int(row["length"]), float(row[column])) for row in own)
            name = model if loss == LOGITS else f"{model}, {loss}"
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        if axes.lines:
            axes.legend(fontsize="small")
        figure.savefig(folder / f"models_{column}.png", dpi=150)
        plt.close(figure)
