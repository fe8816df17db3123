"""Recipes: the preset `paper` is the paper's; a changed recipe keeps its proportions; unknown names are refused."""

import pytest

from nystromformer.data.lra import TASKS
from nystromformer.training import LRA_PRESETS, PRESETS
from nystromformer.training.shared.recipes import (
    FINETUNING_RECIPES,
    LRA_RECIPES,
    PRETRAINING_RECIPES,
    FinetuningRecipe,
    pretraining_recipe,
)


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


def test_fine_tuning_by_the_paper():
    recipe = FINETUNING_RECIPES["paper"]
    assert (recipe.batch_size, recipe.learning_rate, recipe.epochs, recipe.patience) == (32, 3e-5, 4, None)
    assert recipe.arguments(3_668, "f1")["max_steps"] == 4 * 115
    assert FinetuningRecipe(epochs=0.5).steps_of(64) == 1


def test_pretraining_by_the_paper():
    for size, steps in (("small", 100_000), ("base", 500_000)):
        recipe = pretraining_recipe("paper", size)
        assert (recipe.steps, recipe.batch_size, recipe.warmup, recipe.learning_rate) == (steps, 256, 10_000, 1e-4)
        assert recipe.max_length == 512
        arguments = recipe.arguments()
        assert (arguments["weight_decay"], arguments["lr_scheduler_type"]) == (0.01, "linear")
        for processes in (1, 8):
            assert recipe.accumulation(processes) * recipe.micro_batch * processes == 256


def test_every_preset_has_a_recipe_for_every_job():
    assert [*FINETUNING_RECIPES] == [*PRETRAINING_RECIPES] == [*PRESETS]
    assert [*LRA_RECIPES] == [*LRA_PRESETS]


def test_an_hour_has_the_papers_lengths_and_fewer_steps_of_at_most_32():
    for task, recipe in LRA_RECIPES["hour"].items():
        paper = LRA_RECIPES["paper"][task]
        assert recipe.max_length == paper.max_length
        assert recipe.steps * recipe.batch_size <= paper.steps * paper.batch_size
        assert recipe.batch_size == 32


def test_micro_batches_divide_a_batch_without_a_rest():
    smoke = pretraining_recipe("smoke")
    assert smoke.changed(batch_size=6, micro_batch=4).accumulation(1) == 2
    assert smoke.changed(batch_size=7, micro_batch=4).accumulation(1) == 7


@pytest.mark.parametrize(
    "given, message",
    [
        (("paper", "large"), "--size='large': must be one of 'tiny', 'mini', 'small', 'minilm', 'base'"),
        (("fast", None), "--preset='fast': must be one of 'paper', 'mini', 'smoke'"),
    ],
)
def test_unknown_names_are_refused_with_the_choices(given, message):
    with pytest.raises(ValueError, match=message):
        pretraining_recipe(*given)
