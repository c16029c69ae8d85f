"""The Long Range Arena (Tay et al. 2021): generators of ListOps and Pathfinder, and readers of all its tasks."""

from hf_hybrid.data.lra.kept import DrawingStopped, load_lra_once
from hf_hybrid.data.lra.listops import LISTOPS_TOKENS, draw_listops, evaluate_listops, parse_listops
from hf_hybrid.data.lra.pathfinder import PATHFINDER, Pathfinder, draw_pathfinder
from hf_hybrid.data.lra.tasks import LRA, LraRows, LraTask, find_lra, load_lra
from hf_hybrid.data.lra.tokenizers import check_tokenizer, lra_tokenizer

__all__ = [
    "LISTOPS_TOKENS",
    "LRA",
    "PATHFINDER",
    "DrawingStopped",
    "LraRows",
    "LraTask",
    "Pathfinder",
    "check_tokenizer",
    "draw_listops",
    "draw_pathfinder",
    "evaluate_listops",
    "find_lra",
    "load_lra",
    "load_lra_once",
    "lra_tokenizer",
    "parse_listops",
]
