"""The pictures of what reaches what show what the models give, and that is what the pages say."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("spade", "chela", "bst", "srformer")
COLUMN = torch.arange(24)
ROW = COLUMN[:, None]
BACK = ROW - COLUMN


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("draw_reach")


def patterns(script, name: str) -> list[list[torch.Tensor]]:
    """What each way of each panel reaches."""
    return [[script.reach(panel, way) for way in panel.ways] for panel in script.PICTURES[name]().panels]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_pictures_are_what_the_models_give(script, name):
    path = ROOT / "docs" / "figures" / f"reach_{name}.svg"
    assert path.read_text(encoding="utf-8") == script.draw(script.PICTURES[name]())
    assert f"(../figures/{path.name})" in (ROOT / "docs" / "models" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_ways_together_are_the_whole_layer(script, name):
    for panel in script.PICTURES[name]().panels:
        for way in panel.ways:
            seen = script.gradients(panel, way)
            assert not ((seen > 1e-12) & (seen < 1e-6)).any(), "what is zero and what is not must not meet"
        together = torch.stack([script.reach(panel, way) for way in panel.ways]).any(0)
        open_config = panel.config if len(panel.ways) > 1 else panel.config | panel.ways[0].fields
        whole = script.reach(replace(panel, config=open_config), script.Way("all"))
        assert torch.equal(together, whole), panel


def test_spade_reads_windows_and_chunks_and_through_a_state_everything(script):
    bottom, windows, chunks, *language_model = patterns(script, "spade")
    near, same_chunk = BACK.abs() <= 3, ROW // 6 == COLUMN // 6
    for before, (local, everything), above, (within,) in (
        (torch.ones_like(near), bottom, windows, chunks),
        (BACK >= 0, *language_model),
    ):
        assert torch.equal(local, near & before)
        assert torch.equal(above[0], near & before)
        assert torch.equal(everything, before)
        assert torch.equal(within, same_chunk & before)


def test_chela_reads_by_convolutions_and_everything_by_attention(script):
    causal, bidirectional = patterns(script, "chela")
    for seen, reach in zip(causal, (2, 9, 23), strict=True):  # of two kernels of 3 taps, and of 8 taps over these
        assert torch.equal(seen, (BACK >= 0) & (BACK - reach <= 0))
    for seen, (back, ahead) in zip(bidirectional, ((1, 1), (8, 9), (23, 23)), strict=True):
        assert torch.equal(seen, (BACK - back <= 0) & (BACK + ahead >= 0))


def test_bst_reads_a_window_and_states_of_what_came_before(script):
    slide, heads, filters = patterns(script, "bst")
    before, window, of_window = BACK >= 0, (BACK >= 0) & (BACK < 6), ROW % 6
    for local in (slide[0], heads[0], filters[0]):
        assert torch.equal(local, window)
    panel = script.PICTURES["bst"]().panels[1]
    multi_head = replace(panel, config={**panel.config, "context_type": "multi_head"})
    for states in (heads[1], script.reach(multi_head, panel.ways[1])):
        assert torch.equal(states, before)
    assert torch.equal(filters[1], (BACK == 0) | (BACK - of_window > 0))  # up to the end of the window before


def test_srformer_reads_a_segment_and_by_neurons_all_others(script):
    (full,), (alone,), (segment, neurons) = patterns(script, "srformer")
    read = torch.arange(12)[:, None] // 3 == COLUMN // 6
    assert torch.equal(alone, read)
    assert torch.equal(segment, read)
    assert neurons.all()
    assert full.all()


def test_a_name_that_no_weight_has_is_refused(script):
    panel = script.PICTURES["bst"]().panels[0]
    with pytest.raises(ValueError, match="must be ends of names of weights of BstModel; got 'none'"):
        script.reach(panel, script.Way("local", ("none",)))
