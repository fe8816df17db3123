"""How many files a reader opens to follow one call, and that no call comes back into a folder that it has left.

`python tests/test_walks.py` prints the files. What counts as being on the way is said in `tests/helpers/walks.py`.
"""

import tempfile
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
from transformers import BertConfig, BertModel
from walks import Walk, walked

import nystromformer
import nystromformer.models.heads
import nystromformer.training.trainer
from nystromformer.cli import main

FOLDERS = ("attention/", "models/")
"""Walks of their own inside other walks."""


def attention_call() -> Walk:
    query = key = value = torch.randn(2, 4, 300, 16)
    return walked(lambda: nystromformer.nystrom_attention(query, key, value, num_landmarks=16))


def bert_with_nystrom_local() -> Walk:
    """A BERT that is built and called with `attn_implementation="nystrom-local"`."""
    nystromformer.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = BertConfig(**sizes, vocab_size=50, num_landmarks=16, attn_implementation="nystrom-local")
    ids = torch.randint(3, 50, (2, 300))
    mask = torch.arange(300)[None] < torch.tensor([[300], [250]])
    return walked(lambda: BertModel(config).eval()(ids, attention_mask=mask.long()), stop_at=FOLDERS)


def listops(folder: Path) -> Walk:
    """`lra listops` from the command line to its table."""
    with chdir(folder):
        assert main(["lra-data", "listops", "--preset", "smoke", "--out", "data/lra/listops-smoke"]) == 0
        command = ["lra", "listops", "--preset", "smoke", "--attention", "nystrom-8", "--out", "runs/listops"]
        # The command does not call `register()`, which extends Transformers' methods for all of a process; tests do.
        return walked(lambda: main(command), stop_at=FOLDERS, without=("integrations/hf/guarded_models.py",))


def report(folder: Path) -> Walk:
    """`report` from records to the page."""
    with chdir(folder):
        return walked(lambda: main(["report", "runs", "--out", "report"]))


def check(walk: Walk, most: int) -> None:
    assert len(walk.on_the_way) <= most, "\n".join(walk.on_the_way)
    assert not walk.returns


def test_one_attention_call():
    check(attention_call(), 6)


def test_nystrom_local_in_bert():
    check(bert_with_nystrom_local(), 10)


@pytest.mark.slow
def test_listops_and_its_report(tmp_path):
    check(listops(tmp_path), 14)
    check(report(tmp_path), 9)


def call(function: Callable[[], object]) -> object:
    return function()


def test_a_call_that_comes_back_is_seen():
    """The check can fail: `training` → `models` → `training`."""
    files = (nystromformer.training.trainer.__file__, nystromformer.models.heads.__file__)
    training, models = (FunctionType(call.__code__.replace(co_filename=file), {}) for file in files)
    walk = walked(partial(training, partial(models, partial(training, int))))
    assert walk.on_the_way.keys() == {"training/trainer.py", "models/heads.py"}
    assert walk.returns == {("training", "models", "training")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        walks = {
            "one attention call": attention_call(),
            "nystrom-local in BERT": bert_with_nystrom_local(),
            "lra listops": listops(Path(name)),
            "report": report(Path(name)),
        }
    for title, walk in walks.items():
        print(f"{title}: {len(walk.on_the_way)} files on the way, {len(walk.strict)} in all")
        print(*(f"  {file}" for file in walk.on_the_way), sep="\n")
