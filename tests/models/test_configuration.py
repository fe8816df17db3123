"""Configurations: defaults of the Hub's checkpoints, bad choices refused with what to do."""

import pytest
import transformers

from nystromformer import NystromformerConfig, NystromformerModel
from nystromformer.attention import NystromAttention
from nystromformer.models import PRESETS, preset_config


def test_defaults_are_those_of_the_published_checkpoints():
    ours, theirs = NystromformerConfig().to_dict(), transformers.NystromformerConfig().to_dict()
    theirs.pop("add_cross_attention")
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": "nystrm"}, "must be one of .* Did you mean 'nystrom'"),
        ({"attention": "standard-64"}, "takes no number"),
        ({"num_landmarks": 0}, "num_landmarks=0: must be at least 1; the paper uses 64"),
        ({"attention": "nystrom-0"}, "num_landmarks=0: must be at least 1"),
        ({"attention": "nystrom-32", "num_landmarks": 64}, "drop the number from the name, or make both equal"),
        ({"num_attention_heads": 7}, "hidden_size=768 is not divisible by num_attention_heads=7"),
        ({"conv_kernel_size": 64}, "must be odd"),
        ({"pinv_scaling": "matix"}, "Did you mean 'matrix'"),
        ({"norm": "prenorm"}, "norm='prenorm': must be one of 'post', 'pre'"),
        ({"pooling": "max"}, "must be one of 'cls', 'mean'"),
        ({"linear_init": "xavier"}, "must be one of 'normal', 'uniform'"),
        ({"hidden_act": "gelo"}, "Did you mean 'gelu'"),
        ({"classifier_activation": "tan"}, "Did you mean 'tanh'"),
        ({"hidden_dropout_prob": 1.0}, "must be at least 0 and below 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be at least 1"),
        ({"type_vocab_size": -1}, "type_vocab_size=-1: must be at least 0"),
        ({"pad_token_id": 30000}, "must be at least 0 and below vocab_size=30000, or None"),
        ({"attention": "longformer", "attention_options": {"windw": 5}}, "Did you mean 'window'"),
        ({"attention_options": {"num_landmarks": 5}}, "set num_landmarks of the configuration itself"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_choices_are_refused_with_what_is_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        NystromformerConfig(**changes)


@pytest.mark.parametrize("changes", [{"hidden_size": "768"}, {"num_landmarks": 6.5}, {"attention_options": ["window"]}])
def test_bad_types_are_refused(changes):
    with pytest.raises(TypeError, match="must be"):
        NystromformerConfig(**changes)


def test_a_choice_spoilt_after_its_check_is_found_when_the_model_is_built(small):
    config = small()
    config.num_landmarks = 0
    with pytest.raises(ValueError, match="num_landmarks=0"):
        NystromformerModel(config)


def test_the_attentions_number_may_stand_in_its_name(small):
    assert small(attention="nystrom-32").num_landmarks == 32
    assert small(attention="standard").num_landmarks == 64
    layer = NystromformerModel(small(attention="longformer-9", attention_options={"global_tokens": 1})).encoder.layer[0]
    assert (layer.attention.self.attention.window, layer.attention.self.attention.global_tokens) == (9, 1)


def test_attention_dropout_goes_where_it_is_supported(small):
    config = small(attention="standard", attention_probs_dropout_prob=0.2)
    assert config.build_attention().dropout == 0.2
    assert not hasattr(small(attention_probs_dropout_prob=0.2).build_attention(), "dropout")


def test_survives_saving_and_loading(small, tmp_path):
    config = small(attention="longformer-9", attention_options={"global_tokens": 2}, norm="pre", conv_kernel_size=None)
    config.save_pretrained(tmp_path)
    loaded = NystromformerConfig.from_pretrained(tmp_path)
    different = {name for name, value in config.to_dict().items() if loaded.to_dict()[name] != value}
    assert not different


def test_a_checkpoint_of_another_type_is_refused_with_the_command_to_convert_it(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert': must be 'nystromformer'.*nystromformer convert SRC DST"):
        NystromformerConfig.from_pretrained(tmp_path)


def test_presets_have_the_papers_sizes():
    sizes = {name: (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, c.conv_kernel_size)
             for name, c in ((name, preset_config(name)) for name in PRESETS)}  # fmt: skip
    assert sizes == {
        "bert-small": (4, 512, 8, 2048, 33),
        "bert-base": (12, 768, 12, 3072, 33),
        "lra": (2, 64, 2, 128, 35),
    }
    with pytest.raises(ValueError, match="Did you mean 'bert-base'"):
        preset_config("bert-bas")


def test_defaults_of_the_operation_live_in_one_place():
    layer = NystromAttention(dim=8)
    config = NystromformerConfig()
    for name in ("num_landmarks", "pinv_iterations"):
        assert getattr(config, name) == getattr(layer.options, name)
