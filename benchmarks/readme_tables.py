"""Write the tables of ``README.md`` and ``docs/training/new_models.md`` from the code and ``benchmarks/results``.

Run it from the repository root after changing an architecture, a learning rate or a measurement::

    python -m benchmarks.readme_tables

It replaces the text between ``<!-- NAME -->`` and ``<!-- end -->``, where NAME is one of `TABLES`.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.bench_recall import remembered
from benchmarks.comparison import mean_and_error, runs_at_best_rate
from benchmarks.costs import NAMES, OURS, PEERS
from benchmarks.gpu_tables import line_of
from benchmarks.record import Row, conditions, in_fp32, read_csv
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.bst.configuration_bst import PRESETS as BST
from hf_hybrid.models.chela.configuration_chela import PRESETS as CHELA
from hf_hybrid.models.spade.configuration_spade import PRESETS as SPADE
from hf_hybrid.training.demo import scores_and_checks
from hf_hybrid.training.model.learning_rates import RATES

PRESETS = {"bst": BST, "chela": CHELA, "spade": SPADE}
PAGES = (Path("README.md"), Path("docs/training/new_models.md"))
RESULTS = Path("benchmarks/results")
LENGTH = "16384"
# column of the table -> its model types
FAMILIES = {
    "[SPADE](docs/models/spade.md)": ("spade",),
    "[CHELA](docs/models/chela.md)": ("chela",),
    "[BST](docs/models/bst.md)": ("bst",),
    "[SRformer](docs/models/srformer.md)": ("srformer_t5", "srformer_bart"),
}
TASKS = {
    "AutoModelForSeq2SeqLM": "text from a document",
    "AutoModelForCausalLM": "the rest of a text",
    "AutoModelForMaskedLM": "masked tokens",
    "AutoModelForSequenceClassification": "a class for a text",
    "AutoModelForTokenClassification": "a class for each token",
    "AutoModelForQuestionAnswering": "the span of an answer",
    "AutoModelForTextEncoding": "an encoder alone",
    "AutoModel": "hidden states",
}
# feature -> its support by each family, in the order of `FAMILIES`; verified by tests
FEATURES = {
    "reads in both directions": ("its encoder", "yes", "", "its encoder"),
    "`generate` from a cache of bounded size": ("language model", "yes", "yes", ""),
    "gradient checkpointing": ("yes", "yes", "yes", "yes"),
    "several GPUs": ("DDP, FSDP", "DDP, FSDP", "DDP, FSDP", "DDP; FSDP by transformers"),
    "LoRA, DoRA, IA3 without naming modules": ("yes", "yes", "yes", "as in T5, BART"),
    "loads without this package (`export_remote_code`)": ("yes", "yes", "yes", "yes"),
    "padding": ("both sides", "both sides", "both sides", "both; BART's: right"),
    "starts from a checkpoint of": ("the T5 family", "", "", "T5, BART"),
    "Triton kernels of": (
        "local attention, S4's taps, S5's scan, around Hyena's FFT",
        "linear attention, short convolutions, around the FFT",
        "local attention, S4's taps, around the FFT",
        "segment recurrence",
    ),
}


def main() -> int:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def renewed(page: str) -> str:
    """Return the page with updated tables."""
    pattern = re.compile(rf"(?P<begin><!-- (?P<name>{'|'.join(TABLES)}) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match['begin']}{TABLES[match['name']]()}\n{match['end']}", page)


def architectures() -> str:
    """Return the models by task and feature."""
    rows = [["", *FAMILIES]]
    for auto_class, task in TASKS.items():
        has = (any(auto_class in ARCHITECTURES[name][1] for name in names) for names in FAMILIES.values())
        rows.append([f"{task}: `{auto_class}`", *("yes" if it else "" for it in has)])
    for feature, cells in FEATURES.items():
        if len(cells) != len(FAMILIES):
            raise ValueError(
                f"FEATURES[{feature!r}] must have {len(FAMILIES)} cells, one for each family; got {cells}"
            )
        rows.append([feature, *cells])
    return _table(rows)


def jobs() -> str:
    """Return which architecture suits which job: class, size, cost beside a peer, and learning rate of a new model."""
    pairs = {row["model"]: row for row in _rows("models_cpu.csv")}
    language = {row["model"]: row for row in _rows("language_models_cpu.csv")}
    cross = {row["mode"]: row for row in _rows("cross_attention_cpu.csv")}
    llama, peer = language["llama-sdpa"], _fastest_peer(list(pairs.values()))

    def times(row: Row, other: Row, column: str) -> str:
        return f"{float(row[column]) / float(other[column]):.1f}"

    def decoder(name: str) -> str:
        row = language[name]
        return (
            f"trains at {times(llama, row, 'step_s')} times Llama's speed; decodes with {float(row['cache_mib']):.0f} "
            f"MiB of cache, Llama with {float(llama['cache_mib']):.0f}"
        )

    pair = (
        f"trains at {times(pairs['spade'], peer, 'tokens_per_s')} times {peer['model'].upper()}'s speed in "
        f"{times(pairs['spade'], peer, 'peak_mib')} times its memory"
    )
    milliseconds = {mode: f"{float(cross[mode]['token_s']) * 1000:.2f} ms" for mode in ("sr", "full")}
    swapped = (
        f"a decoded token's cross-attention, for 8 documents at once, takes {milliseconds['sr']} instead of "
        f"{milliseconds['full']}"
    )
    rows = [
        ["you want", "take", "sizes", "cost at 16,384 tokens", "learning rate"],
        ["summaries and answers from documents", *_job("spade", "AutoModelForSeq2SeqLM", pair)],
        ["your T5 or BART, decoding faster", "SRformer: `patch_cross_attention`", "your model's", swapped, "yours"],
        ["a language model that trains fast", *_job("chela", "AutoModelForCausalLM", decoder("chela"))],
        ["a language model with a small cache", *_job("spade", "AutoModelForCausalLM", decoder("spade"))],
        [
            "local attention with a memory of all the text before",
            *_job("bst", "AutoModelForCausalLM", decoder("bst-sh-s4")),
        ],
        [
            "labels of long texts",
            *_job("chela", "AutoModelForSequenceClassification", "cost not measured beside a peer"),
        ],
    ]
    return _table(rows)


def _job(model_type: str, auto_class: str, cost: str) -> list[str]:
    """Return the cells of a job: what to take, the sizes of two presets, the cost, and tiny's learning rate."""
    config_class, _ = ARCHITECTURES[model_type]
    sizes = []
    for preset in ("tiny", "base"):
        if preset not in PRESETS[model_type]:
            continue
        role = {"is_encoder_decoder": auto_class == "AutoModelForSeq2SeqLM"} if model_type == "spade" else {}
        if role and not role["is_encoder_decoder"]:
            role["is_decoder"] = True
        with torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(config_class.from_preset(preset, **role))
        sizes.append(f"{preset} {model.num_parameters() / 1e6:.0f}M")
    (rate,) = (rate.value for rate in RATES[model_type] if rate.size == "preset tiny")
    return [f"{model_type.upper()}: `{auto_class}`", ", ".join(sizes), cost, f"{rate:g} (tiny)"]


def learning_rates() -> str:
    """Return the recorded learning rate for new models of each size."""
    rows = [["model type", "size", "`hidden_size`", "learning rate", "source"]]
    for model_type, rates in RATES.items():
        for rate in rates:
            rows.append([f"`{model_type}`", rate.size, f"{rate.hidden_size}", f"{rate.value:g}", rate.source])
    return _table(rows)


def demo() -> str:
    """Return what ``make demo`` prints."""
    results = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    lines = [scores_and_checks(results), "", "Its samples, drawn at random:", ""]
    for sample in results["samples"]:
        document, reference, summary = (" ".join(sample[key].split()) for key in ("document", "reference", "summary"))
        lines += [f"- `{document} ...`", f"  - reference: {reference}", f"  - summary: {summary}"]
    return "\n".join(lines)


def from_t5() -> str:
    """Return the loss of a fine-tuned T5 and of models that start from it, and what it takes, at 4,096 tokens."""
    rows, parts = read_csv(RESULTS / "from_t5.csv"), []

    def loss(runs: list[Row]) -> str:
        return mean_and_error([float(row["eval_loss"]) for row in runs], "eval_loss")

    for label, start in {"T5": "T5", "SPADE": "SPADE from it", "LongT5 (local)": "LongT5, local, from it"}.items():
        runs = runs_at_best_rate(rows, f"{start}, 4,096")
        minutes, memory = (statistics.fmean(float(row[name]) for row in runs) for name in ("cpu_minutes", "peak_mib"))
        parts.append(f"{label} has {loss(runs)}, in {minutes:.1f} CPU minutes and {memory / 1024:.1f} GiB")
    kept, alone = (loss(runs_at_best_rate(rows, f"SPADE {start}, 1,024")) for start in ("from it", "from scratch"))
    return (
        f"{'; '.join(parts)} ({len(runs)} seeds, {runs[0]['steps']} steps). At 1,024 tokens SPADE has {kept} with the "
        f"T5's weights and {alone} from scratch."
    )


def recall() -> str:
    """Return which tests of recall each architecture does, with and without its global part."""
    return remembered(read_csv(RESULTS / "recall.csv"))


def gpu() -> str:
    """Return how fast models train on a GPU, and in how much memory, over their peers."""
    rows = read_csv(RESULTS / "gpu" / "models.csv")
    lines = [["training", "tokens per second, over the peer's", "peak memory, over the peer's"]]
    for length in (65536, 4096):
        found = {line_of(row): row for row in rows if row["length"] == str(length)}
        for label, model, peer, name in (
            ("SPADE", "spade", "llama-flash", "language model, Llama"),
            ("CHELA", "chela", "llama-flash", "language model, Llama"),
            ("BST", "bst", "llama-flash", "language model, Llama"),
            ("SPADE", "spade-seq2seq", "pegasus-x", "encoder-decoder, Pegasus-X"),
        ):
            speed, memory = (float(found[model][x]) / float(found[peer][x]) for x in ("tokens_s", "peak_mib"))
            few = model == "spade-seq2seq"  # tokens of a target, so that its logits weigh nothing
            alike = few or found[model]["loss"] == found[peer]["loss"]
            shown = f"{memory:.2f}" if alike else "not alike"
            lines.append([f"{label} ({name}), {length:,} tokens", f"{speed:.1f}", shown])
    first = rows[0]
    versions = f"{first['device']}, torch {first['torch']}, Triton {first['triton']}"
    return f"{versions}, bfloat16.\n\n{_table(lines)}"


def measured() -> str:
    """Return the measurements at 16,384 tokens, with their peers."""
    pairs = _rows("models_cpu.csv")
    language, cross = _rows("language_models_cpu.csv"), _rows("cross_attention_cpu.csv")
    seconds, peak, token, cache = "step_s", "peak_mib", "token_s", "cache_mib"

    def speed(row: Row) -> str:
        return f"{int(LENGTH) / float(row[seconds]) / 1000:.2f}" if row[seconds] else row["outcome"]

    def number(column: str, form: str, factor: float = 1) -> Callable[[Row], str]:
        return lambda row: format(float(row[column]) * factor, form) if row[column] else row["outcome"]

    best = _fastest_peer(pairs)
    (spade,) = (row for row in pairs if row["model"] == "spade")
    (segmented,), (full,) = ([row for row in cross if row["mode"] == mode] for mode in ("sr", "full"))
    rows = [["at 16,384 tokens", "here", "peers"]]
    for label, cell in (
        ("training an encoder-decoder, thousand tokens per second", number("tokens_per_s", ".2f", 1e-3)),
        ("its peak memory, MiB", number("peak_mib", ".0f")),
    ):
        rows.append([label, f"SPADE {cell(spade)}", f"{best['model'].upper()} {cell(best)}, the fastest peer"])
    for label, cell in (
        ("training a language model, with all logits, thousand tokens per second", speed),
        ("its peak memory, MiB", number(peak, ".0f")),
        ("decoding after that prompt, milliseconds per token", number(token, ".1f", 1e3)),
        ("its cache, MiB", number(cache, ".1f")),
    ):
        rows.append([label, *(_cells(group, language, cell) for group in (OURS, PEERS))])
    cell = number("token_s", ".2f", 1e3)
    label = "cross-attention of a decoded token, 8 documents, milliseconds"
    rows.append([label, f"SRformer {cell(segmented)}", f"full {cell(full)}"])
    captions = [
        f"{name}, fp32: {conditions(row)}."
        for name, (row, *_) in (("Encoder-decoders", pairs), ("Language models", language), ("Cross-attention", cross))
    ]
    return "\n\n".join([_table(rows), *captions])


def _fastest_peer(pairs: Sequence[Row]) -> Row:
    peers = (row for row in pairs if row["tokens_per_s"] and not row["model"].startswith("spade"))
    return max(peers, key=lambda row: float(row["tokens_per_s"]))


def _cells(models: Iterable[str], rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    return ", ".join(f"{NAMES[model]} {cell(row)}" for model in models for row in rows if row["model"] == model)


def _rows(name: str) -> list[Row]:
    return [row for row in in_fp32(RESULTS / name) if row["length"] == LENGTH]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


TABLES: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "demo": demo,
    "from_t5": from_t5,
    "gpu": gpu,
    "jobs": jobs,
    "learning_rates": learning_rates,
    "measured": measured,
    "recall": recall,
}

if __name__ == "__main__":
    sys.exit(main())
