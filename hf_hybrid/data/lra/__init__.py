"""The Long Range Arena (Tay et al. 2021): generators of ListOps and Pathfinder, and readers of all its tasks."""

from hf_hybrid.data.lra.listops import LISTOPS_TOKENS, draw_listops, evaluate_listops, parse_listops
from hf_hybrid.data.lra.pathfinder import PATHFINDER, Pathfinder, draw_pathfinder
from hf_hybrid.data.lra.tasks import LRA, LraRows, LraTask, load_lra

__all__ = [
    "LISTOPS_TOKENS",
    "LRA",
    "PATHFINDER",
    "LraRows",
    "LraTask",
    "Pathfinder",
    "draw_listops",
    "draw_pathfinder",
    "evaluate_listops",
    "load_lra",
    "parse_listops",
]
