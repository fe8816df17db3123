"""Recipes of Long Range Arena: the preset `paper` is the paper's."""

from nystromformer.data.lra import TASKS
from nystromformer.training import LRA_PRESETS
from nystromformer.training.shared.lra_recipes import LRA_RECIPES


def test_long_range_arena_by_the_paper():
    rows = {
        name: (recipe.batch_size, recipe.warmup, recipe.steps, recipe.eval_every, recipe.max_length, recipe.room)
        for name, recipe in LRA_RECIPES["paper"].items()
    }
    assert rows == {
        "listops": (32, 1000, 5000, 50, 2000, 2048),
        "text": (32, 8000, 20000, 500, 4000, 4096),
        "retrieval": (32, 800, 30000, 300, 4000, 4096),
        "image": (256, 175, 35000, 175, 1024, 1024),
        "pathfinder": (256, 312, 62400, 312, 1024, 1024),
    }
    for recipe in LRA_RECIPES["paper"].values():
        arguments = recipe.arguments()
        assert (arguments["learning_rate"], arguments["adam_epsilon"]) == (1e-4, 1e-6)
        assert (arguments["weight_decay"], arguments["max_grad_norm"]) == (0, 0)
        assert recipe.train_examples is recipe.dev_examples is recipe.test_examples is None
    assert all(set(recipes) == set(TASKS) for recipes in LRA_RECIPES.values())
    assert [*LRA_RECIPES] == [*LRA_PRESETS]


def test_an_hour_has_the_papers_lengths_and_fewer_steps_of_at_most_32():
    for task, recipe in LRA_RECIPES["hour"].items():
        paper = LRA_RECIPES["paper"][task]
        assert recipe.max_length == paper.max_length
        assert recipe.steps * recipe.batch_size <= paper.steps * paper.batch_size
        assert recipe.batch_size == 32
