"""Recipes: the preset `paper` is the paper's; a changed recipe keeps its proportions; unknown names are refused."""

import pytest

from nystromformer.training import PRESETS
from nystromformer.training.shared.recipes import (
    FINETUNING_RECIPES,
    PRETRAINING_RECIPES,
    FinetuningRecipe,
    pretraining_recipe,
)


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
