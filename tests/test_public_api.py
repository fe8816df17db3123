"""The public names: a change here is a change for users, and belongs into CHANGELOG.md."""

import ast
import inspect
from pathlib import Path

import pytest

import nystromformer

PUBLIC = """
NystromAttention build_attention nystrom_attention nystrom_attention_varlen nystrom_attention_weights
nystrom_local_attention_varlen
NystromformerConfig NystromformerModel NystromformerForMaskedLM NystromformerForMultipleChoice
NystromformerForPreTraining NystromformerForQuestionAnswering NystromformerForSequenceClassification
NystromformerForTokenClassification
add_skip_convolution distill register replace_attention restore_attention use_attention
__version__
"""
NAMES = set(PUBLIC.split())
SIGNATURES = {
    "replace_attention": "module, attention, layers, **",
    "restore_attention": "module",
    "distill": "teacher, student, batches, *, stages, pooling, learning_rate, layers_rate, warmup",
    "use_attention": "name, *, self_attention, **",
    "build_attention": "name, *, num_heads, head_dim, max_length, **",
    "nystrom_attention": "query, key, value, mask, *, num_landmarks, query_mask, key_mask, conv_weight, "
    "pinv_iterations, pinv_scaling, exact_below, scale",
    "nystrom_attention_varlen": "query, key, value, cu_seqlens, *, num_landmarks, cu_seqlens_q, cu_seqlens_k, "
    "max_seqlen, conv_weight, pinv_iterations, pinv_scaling, landmarks, pinv, exact_below, scale, is_causal",
    "nystrom_local_attention_varlen": "query, key, value, cu_seqlens, *, num_landmarks, max_seqlen",
}
"""The names of parameters in order; * before those by keyword. Further keywords may follow."""


def test_the_public_names_are_these():
    assert set(nystromformer.__all__) == NAMES
    assert set(dir(nystromformer)) >= NAMES


def test_every_public_name_can_be_had():
    for name in NAMES:
        assert getattr(nystromformer, name) is not None


def test_editors_and_type_checkers_see_the_same_names():
    """Names are imported when first used; what a type checker reads stands under `TYPE_CHECKING`."""
    tree = ast.parse(Path(nystromformer.__file__).read_text(encoding="utf-8"))
    shown = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for alias in statement.names
    }
    assert shown == NAMES - {"__version__"}


@pytest.mark.parametrize("name", ["nystrom_attention", "nystrom_attention_varlen", "nystrom_local_attention_varlen"])
def test_the_operations_keep_their_parameters(name):
    parameters = inspect.signature(getattr(nystromformer, name)).parameters
    wanted = SIGNATURES[name].replace("*, ", "").split(", ")
    assert list(parameters)[:4] == wanted[:4]
    assert set(wanted) <= parameters.keys()
    positional = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == wanted[:4]
