"""The recipes of the Long Range Arena are those that were published."""

import pytest

from hf_hybrid import ChelaConfig, SpadeConfig
from hf_hybrid.data.lra import LRA
from hf_hybrid.training.flags.recipes import RECIPES, find_recipe, fit_fields

CONFIGS = {"chela": ChelaConfig, "spade": SpadeConfig}
TASKS = ["lra_listops", "lra_text", "lra_retrieval", "lra_image", "lra_pathfinder", "lra_pathx"]
ALL = [*TASKS, "lra_speech"]


def config_of(name, task):
    recipe = find_recipe(name, task)
    return CONFIGS[recipe.model_type](**fit_fields(recipe.fields, task, LRA[task].length))


def sizes(name, task):
    recipe, config = find_recipe(name, task), config_of(name, task)
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    return *shape, recipe.batch_size, recipe.learning_rate, config.dropout, recipe.weight_decay, recipe.epochs


def test_chelas_are_those_of_its_table_7():
    assert [sizes("chela", task) for task in ALL] == [
        (6, 80, 160, 64, 0.001, 0.1, 0.01, 60),
        (4, 128, 256, 50, 0.004, 0.1, 0.01, 50),
        (6, 128, 256, 64, 0.003, 0.1, 0.04, 40),
        (8, 160, 320, 50, 0.01, 0.0, 0.02, 200),
        (6, 128, 256, 128, 0.01, 0.0, 0.01, 200),
        (4, 64, 128, 128, 0.01, 0.0, 0.01, 100),
        (6, 60, 120, 20, 0.01, 0.0, 0.01, 200),
    ]
    assert [config_of("chela", task).norm_type for task in TASKS[:3]] == ["batch_norm", "scale_norm", "scale_norm"]


def test_megas_are_those_of_its_commands():
    """Its updates are CHELA's epochs, and its warm-ups shares of them, which CHELA's recipe takes."""
    updates = {"lra_listops": 90_000, "lra_text": 25_000, "lra_retrieval": 91_960, "lra_image": 180_000}
    updates |= {"lra_pathfinder": 250_000, "lra_pathx": 125_000, "lra_speech": 250_000}
    warmups = dict(zip(ALL, (3_000, 10_000, 10_000, 9_000, 50_000, 25_000, 10_000), strict=True))
    # of the texts a part validates here; Mega's speech has more rows than that at hand
    others = {"lra_text": 25_000, "lra_speech": 25_000}
    for task in ALL:
        recipe = find_recipe("mega", task)
        rows = others.get(task, LRA[task].counts[0])
        assert round(updates[task] * recipe.batch_size / rows) == recipe.epochs
        assert recipe.warmup == find_recipe("chela", task).warmup == warmups[task] / updates[task]
        assert sizes("mega", task) == sizes("chela", task)
        config = config_of("mega", task)
        assert (config.mixer, config.attention_fn, config.mixer_state_size) == ("ema", "laplace", 16)
    assert config_of("mega", "lra_listops").norm_type == "layer_norm"
    assert config_of("mega", "lra_speech").chunk_size == 1000
    assert find_recipe("mega", "lra_speech").warmup == 0.04
    assert "README.sc.md" in find_recipe("mega", "lra_speech").source


@pytest.mark.parametrize("name", ["spade_window", "spade_chunk"])
def test_spades_are_those_of_its_table_10(name):
    assert [sizes(name, task)[3:7] for task in TASKS] == [
        (64, 0.0015, 0.2, 0.0), (100, 0.01, 0.2, 0.01), (128, 0.004, 0.1, 0.03), (100, 0.01, 0.0, 0.02),
        (128, 0.01, 0.0, 0.01), (16, 0.01, 0.0, 0.01),
    ]  # fmt: skip
    for task in ALL:
        assert sizes(name, task)[:3] == sizes("chela", task)[:3]
    norms = [(config.norm_type, config.norm_position) for config in (config_of(name, task) for task in ALL)]
    assert norms == [("layer_norm", "post"), *[("scale_norm", "post")] * 2, *[("batch_norm", "pre")] * 4]
    config = config_of(name, "lra_text")
    assert (config.global_layers, config.combine_mode) == ([0], "concat")
    assert config.chunk_size == 128 if name == "spade_chunk" else config.local_radius == 64
    config = config_of(name, "lra_pathx")
    assert config.chunk_size == 1024 if name == "spade_chunk" else config.local_radius == 512


def test_s4s_are_those_of_its_files():
    found = []
    for task in TASKS:
        config = config_of("s4", task)
        assert (config.attention_type, config.global_layers, config.ssm_freeze) == ("none", [*range(6)], "none")
        assert config.norm_type == "batch_norm"
        found.append((config.ssm_state_size, config.ssm_num_copies, config.norm_position, *sizes("s4", task)[3:]))
        assert config.ssm_dt_min == (0.0001 if task == "lra_pathx" else 0.001)
    assert [sizes("s4", task)[:2] for task in TASKS] == [(6, 256), (6, 256), (6, 256), (6, 512), (6, 256), (6, 256)]
    assert found == [
        (4, 1, "post", 32, 0.01, 0.0, 0.05, 40),
        (4, 1, "pre", 16, 0.01, 0.0, 0.05, 32),
        (4, 1, "pre", 64, 0.01, 0.0, 0.05, 20),
        (64, 1, "post", 50, 0.01, 0.1, 0.05, 200),
        (64, 256, "pre", 64, 0.004, 0.0, 0.05, 200),
        (64, 256, "pre", 16, 0.002, 0.0, 0.05, 50),
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_flags_and_names_its_source(name):
    for task in RECIPES[name]:
        recipe = find_recipe(name, task)
        assert recipe.source
        assert recipe.flags()["per_device_train_batch_size"] == recipe.batch_size
        assert (config_of(name, task).input_size is None) == (LRA[task].vocab_size is not None)
    assert find_recipe(name, "lra_listops_200") is find_recipe(name, "lra_listops")
    assert find_recipe("chela", "lra_text").flags(2)["per_device_train_batch_size"] == 25
    with pytest.raises(ValueError, match="the recipe's batches of 50 cannot be divided among 3 processes"):
        find_recipe("chela", "lra_text").flags(3)


def test_lengths_are_cut_with_the_sequences():
    fields = fit_fields(find_recipe("chela", "lra_text").fields, "lra_text", 1024)
    assert (fields["training_length"], fields["long_kernel_size"], fields["vocab_size"]) == (1024, 1024, 259)


def test_recipes_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"--recipe must be one of chela, .*; got 'chele'. Did you mean 'chela'\?"):
        find_recipe("chele", "lra_text")
    with pytest.raises(ValueError, match="--recipe s4 has no settings for --task_name lra_speech"):
        find_recipe("s4", "lra_speech")
