r"""Turn a pre-training run into a starter: ``python -m benchmarks.ship_starter RUN CORPUS FOLDER``.

RUN is the folder of the run, CORPUS that of its texts (`benchmarks.starter`). FOLDER gets the weights in bfloat16, the
tokenizer, ``sources.json`` and a model card: that of the run, with its data, licences, hours, curve and limits. The
parameters of the state space model keep float32, since rounding moves its frequencies.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.modelcard import make_markdown_table

import hf_hybrid
from benchmarks.starter import EVALUATED
from hf_hybrid.training.report.model_card import MARK, architecture

LICENCE = "apache-2.0"
_EXACT = re.compile(r"\.mixer\.ssm\.")
"""Parameters that are stored in float32."""
_DROPOUT = 0.1
"""For fine-tuning; as for T5, pre-training needs none."""
_POINTS = 12
STORED = f"""\
The weights are stored in bfloat16, those of the state space model in float32. Pre-training had no dropout; the
configuration has {_DROPOUT}, for fine-tuning."""
LIMITS = """\
- It restores hidden spans of text and does nothing else: fine-tune it before you use it.
- English only, from novels up to the 1920s, Wikipedia of 2016 and documentation of Python packages: it knows little of
  today's world, and old novels hold the prejudices of their time. The novels have lost some apostrophes ("It s"),
  Wikipedia whole sentences.
- Its pieces had at most {length} tokens. It reads longer documents, but has learnt nothing from beyond that length.
- It is small: expect grammatical, often wrong sentences. Do not rely on facts in them.
- Where labels are learnt it gains little or nothing over the same model from scratch: a point of accuracy on SST-2's
  validation split and less on more sentences, while neither learns CoLA or MRPC. Where text is written it gains much.
  `docs/results.md` has the numbers.
- Near copies of what the demo validates and tests with were looked for on each page by itself, without runs of words
  across paragraphs. So of those {held_out:,} documents and summaries it has read at least half of the runs of four
  words of {contained_together[documents]:,} documents and {contained_together[summaries]:,} summaries on all pages
  together, and of {contained_in_one_page[documents]:,} documents and {contained_in_one_page[summaries]:,} summaries on
  one page: packages repeat descriptions and whole parameters. `docs/results.md` has the demo's scores without them."""


def ship(run: Path, corpus: Path, folder: Path) -> dict[str, Any]:
    """Write the starter; return its number of parameters and the bytes of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(run, dtype=torch.float32)
    model.config.use_cache = True
    for name in ("dropout", "attention_dropout", "classifier_dropout"):
        setattr(model.config, name, _DROPOUT)
    kept = {name: weight.clone() for name, weight in model.named_parameters() if _EXACT.search(name)}
    model.to(torch.bfloat16)  # tied weights stay one
    model.save_pretrained(folder, state_dict=model.state_dict() | kept)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"  # what from_pretrained makes of it
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(run).save_pretrained(folder)
    shutil.copyfile(corpus / "sources.json", folder / "sources.json")
    sources = json.loads((corpus / "sources.json").read_text(encoding="utf-8"))
    _card(run, corpus, model, folder.name, sources).save(folder / "README.md")
    return {
        "parameters": model.num_parameters(),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def _card(run: Path, corpus: Path, model: PreTrainedModel, name: str, sources: Mapping[str, Any]) -> ModelCard:
    card = ModelCard.load(run / "README.md")
    results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    card.data.model_name, card.data.license, card.data.language = name, LICENCE, "en"
    sections = _sections(card.text) | _sections(architecture(model))
    last_part = re.compile(r"^\| training +\| (runtime|\w+_per_second) .*\n", re.MULTILINE)  # the whole's is below
    sections["Results"] = last_part.sub("", sections["Results"])
    for place, called in ((corpus, "corpus"), (run, "starter")):  # where it was made is nobody's business
        for written in {str(place), str(place.resolve())}:
            sections["Command"] = re.sub(rf"{re.escape(written)}(?=[\s/\"']|$)", called, sections["Command"])
    length = re.search(r"--max_seq_length (\d+)", sections["Command"])
    if length is None:
        raise ValueError(f"{run / 'README.md'}: its command must have --max_seq_length")
    load = (
        "```python\nimport hf_hybrid\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        f'folder = hf_hybrid.starter("{name}")\n'
        "model = AutoModelForSeq2SeqLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n\n"
        f"The scripts and `hf-hybrid` take the name: `--model_name_or_path {name}`."
    )
    written = {
        "Load it": load,
        "Architecture": f"{sections['Architecture']}\n\n{STORED}",
        "Data and licences": data_and_licences(sources),
        "Results": f"Of the float32 weights, before they were rounded.\n\n{sections['Results']}",
        "Training": f"{_training(results, state, _resumed_at(run))}\n\n{sections['Training']}",
        "Command": sections["Command"],
        "Limits": LIMITS.format(length=length[1], **sources["documentation"]),
        "Versions": sections["Versions"],
    }
    intro = (
        f"A SPADE encoder-decoder, pre-trained on English text for hf_hybrid {hf_hybrid.__version__}, to fine-tune."
    )
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in written.items())
    card.text = f"# {name}\n\n{intro}\n\n{body}\n"
    return card


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", text.replace(MARK, ""), flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def data_and_licences(sources: Mapping[str, Any]) -> str:
    """Return the card's section of texts, given what ``sources.json`` holds."""
    rows = [
        {
            "source": name,
            "what": source["what"],
            "documents": f"{source['train']['documents']:,}",
            "characters": f"{source['train']['characters']:,}",
            "licence": source["licence"],
        }
        for name, source in sources.items()
    ]
    packages = ", ".join(f"{name} {version}" for name, version in sources["documentation"]["packages"].items())
    titles = ", ".join(name.replace("_", " ") for name in sources["novels"]["train"]["names"])
    return (
        f"{make_markdown_table(rows).strip()}\n\nThe novels: {titles}. They are in the public domain where that "
        "begins 95 years after a book's publication or 70 years after its author's death.\n\n"
        f"The packages: {packages}. Parts of their documentation that contain a document or a summary that "
        "`embedded:docstrings` or `embedded:modules` validate or test with were left out: "
        f"{sources['documentation']['left_out']:,}. So were lines with a longer validation text of "
        f"{', '.join(EVALUATED)}; nothing was compared with their test splits.\n\n"
        "The weights are under the package's licence, taking a model of so many texts for no adaptation of one. The "
        "texts are not part of it, and those of Wikipedia may only be shared under their own licence."
    )


def _resumed_at(run: Path) -> int:
    """Return the step at which the run's last part began."""
    found = re.search(r"resumed at step\D*([\d,]+)", (run / "report.html").read_text(encoding="utf-8"))
    return int(found[1].replace(",", "")) if found else 0


def _training(results: Mapping[str, Any], state: Mapping[str, Any], resumed_at: int) -> str:
    losses = [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]
    step = max(1, len(losses) // _POINTS)
    curve = make_markdown_table([{"step": number, "training loss": loss} for number, loss in losses[::-step][::-1]])
    steps = state["global_step"]
    # a resumed run knows the time of its last part only
    hours = results["train_runtime"] / 3600 * steps / (steps - resumed_at)
    return (
        f"{f'About {hours:.1f}' if resumed_at else f'{hours:.2f}'} hours on two CPU cores, {steps:,} steps, "
        f"{results['epoch']:.2f} epochs.\n\n{curve.strip()}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write a starter and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "corpus", "folder"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    for name, file in (("run", "all_results.json"), ("corpus", "sources.json")):
        if not (folder := getattr(arguments, name)).joinpath(file).is_file():
            parser.error(f"{name} must be a folder with {file}; got {folder}")
    print(json.dumps(ship(arguments.run, arguments.corpus, arguments.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
