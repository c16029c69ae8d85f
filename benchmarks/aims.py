"""What our models' training steps should reach on the CPU, and whether every round of a record shows it."""

import itertools
import statistics
from collections.abc import Collection, Sequence

from benchmarks.record import ROUND, Row, markdown_table

AIMS = {
    "fraction of the floor": {"fp32": 0.65, "bf16": 0.35},
    "tokens/s over the fastest peer": {"fp32": 1.5, "bf16": 2.0},
    "memory over the smallest peer": {"fp32": 0.6, "bf16": 0.6},
}
"""What a model should reach at `AIMED` tokens: at least, and of memory at most."""
AIMED = ("4096", "16384")


def aims(rows: Sequence[Row], aimed: Sequence[str], own: Collection[str]) -> list[str]:
    """Return a table of `AIMS`, of ratios within each round; nothing if none can be seen.

    Args:
        rows: One for each cell and round, with `tokens_per_s`, `peak_mib` and `fraction_of_floor`.
        aimed: Models that are to reach them.
        own: Models that are no peers.
    """
    lines = []
    for model, length, name in itertools.product(aimed, AIMED, AIMS):
        for precision, wanted in AIMS[name].items():
            cells = [row for row in rows if (row["precision"], row["length"]) == (precision, length)]
            rounds = [[row for row in cells if row[ROUND] == number] for number in {row[ROUND] for row in cells}]
            if found := [value for one in rounds if (value := _reached(model, name, one, own)) is not None]:
                at_most = name.startswith("memory")
                met = {value <= wanted if at_most else value >= wanted for value in found}
                verdict = "not in every round" if len(met) > 1 else "yes" if met == {True} else "**no**"
                aim = f"{'at most' if at_most else 'at least'} {wanted:g}"
                spread = (
                    f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f} in {len(found)} rounds)"
                )
                lines.append([model, name, precision, length, aim, spread, verdict])
    header = ["model", "aim", "precision", "tokens", "wanted", "median of the ratios within a round", "met"]
    return ["**The aims**", markdown_table(header, lines)] if lines else []


def _reached(own_model: str, name: str, rows: Sequence[Row], own: Collection[str]) -> float | None:
    """Return what one round has of an aim."""
    column = {"fraction": "fraction_of_floor", "tokens/s": "tokens_per_s", "memory": "peak_mib"}[name.split()[0]]
    values = {row["model"]: float(row[column]) for row in rows if row.get(column)}
    peers = [value for model, value in values.items() if model not in own]
    if own_model not in values or not (peers or column == "fraction_of_floor"):
        return None
    if column == "fraction_of_floor":
        return values[own_model]
    return values[own_model] / (min(peers) if column == "peak_mib" else max(peers))
