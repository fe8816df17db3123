"""Options are listed once: functions that take them as keywords show them, and refuse others."""

import inspect
from dataclasses import dataclass, fields

import pytest
import torch

from nystromformer.attention import nystrom_attention_weights
from nystromformer.attention.base import with_options
from nystromformer.attention.nystrom.core import NystromKeywords, NystromOptions
from nystromformer.attention.nystrom.operation import NystromSelfAttention
from nystromformer.attention.nystrom_local.core import NystromLocalKeywords, NystromLocalOptions
from nystromformer.attention.nystrom_local.operation import nystrom_local_attention_weights


@pytest.mark.parametrize(
    "options, keywords", [(NystromOptions, NystromKeywords), (NystromLocalOptions, NystromLocalKeywords)]
)
def test_keywords_are_the_fields_of_the_options(options, keywords):
    assert {each.name: each.type for each in fields(options)} == inspect.get_annotations(keywords)


def test_a_function_shows_the_options_it_takes():
    @dataclass
    class Sizes:
        width: int = 3
        name: str = "a"

    @with_options(Sizes)
    def build(first, *, last=None, **options):
        return Sizes(**options)

    assert str(inspect.signature(build)) == "(first, *, width: int = 3, name: str = 'a', last=None)"
    assert build(0, width=4) == Sizes(width=4)


@pytest.mark.parametrize("weights", [nystrom_attention_weights, nystrom_local_attention_weights])
def test_an_unknown_option_is_refused_by_name(weights):
    x = torch.randn(1, 2, 9, 4)
    with pytest.raises(TypeError, match="num_landmark'"):
        weights(x, x, [0], num_landmark=4)


def test_a_module_lists_its_options_first_and_its_convolution_last():
    assert [*NystromSelfAttention.option_defaults()] == [each.name for each in fields(NystromOptions)] + [
        "conv_kernel_size"
    ]
