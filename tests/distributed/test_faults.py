"""Unlike input is refused on all ranks before data is sent; a rank that dies or stalls ends the others in time."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks, start_on_ranks
from sharded_faults import UNLIKE, attend_until, refusals

from nystromformer.distributed import sequence_parallel_nystrom_attention

TIMEOUT = 8.0

EXPECTED = {
    "batch": "batch is 2 on rank 0 and 3 on rank 1",
    "heads": "heads is 2 on rank 0 and 1 on rank 1",
    "head-size": "head size is 4 on rank 0 and 5 on rank 1",
    "dtype": "dtype is torch.float32 on rank 0 and torch.float64 on rank 1",
    "num_landmarks": "num_landmarks is 4 on rank 0 and 5 on rank 1",
    "pinv_iterations": "pinv_iterations is 6 on rank 0 and 5 on rank 1",
    "scale": "scale is 0.5 on rank 0 and 0.25 on rank 1",
    "kernel": "kernel size is 3 on rank 0 and 5 on rank 1",
    "no-kernel": "kernel size is 3 on rank 0 and None on rank 1",
    "gradient": "with gradient is [] on rank 0 and ['query', 'key', 'value'] on rank 1",
    "other-weights": "are not the same on all ranks",
    "other-parameters": "parameters is ",
    "model-batch": "input_ids's batch and width is [3] on rank 0 and [2] on rank 1",
    "model-training": "training is False on rank 0 and True on rank 1",
    "gather": "shape is [2, 4] on rank 0 and [2, 5] on rank 1",
}
ON_ONE_RANK = {
    "bad-mask": "key_mask has shape (2, 8): must be (2, 9)",
    "bad-option": "num_landmarks=0: must be at least 1",
    "no-tensors": "query_mask is a str",
    "model-inputs": "0 of input_ids and inputs_embeds were given",
    "model-mask": "attention_mask has dtype torch.float32",
}
ON_EACH_RANK = {
    "model-maps": "output_attentions=True: must be False",
    "model-length": "length 150: the position table has room for 100 tokens",
    "model-empty": "the shards of all ranks are empty",
    "linformer": "linformer can't attend over a sequence that is split",
    "answers": "NystromformerForQuestionAnswering compares all tokens",
    "no-attention": "Linear has no Nyström attention",
    "twice": "NystromformerModel runs on shards already",
    "lengths": "lengths=(1, 2, 3): must be 3 numbers",
    "kmeans": "landmarks='kmeans': must be 'segment_means'",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return run_on_ranks(refusals, 3, tmp_path_factory.mktemp("refusals"))


def test_every_kind_of_unlike_input_is_expected_to_be_refused():
    assert UNLIKE.keys() <= EXPECTED.keys() | ON_ONE_RANK.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_unlike_input_is_refused_on_every_rank_before_data_is_sent(refused, name):
    for rank in range(3):
        assert EXPECTED[name] in refused[rank][name]["error"]
        assert set(refused[rank][name]["purposes"]) <= {"agreement"}


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_what_one_rank_refuses_ends_the_others_too(refused, name):
    assert refused[1][name]["error"].startswith(ON_ONE_RANK[name])
    for rank in (0, 2):
        assert refused[rank][name]["error"].startswith(f"rank 1 of 3 refused its input: {ON_ONE_RANK[name]}")


@pytest.mark.parametrize("name", ON_EACH_RANK)
def test_what_no_rank_can_do_is_refused_by_each(refused, name):
    assert all(refused[rank][name]["error"].startswith(ON_EACH_RANK[name]) for rank in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("ended", ["killed", "stalled"])
def test_a_rank_that_ends_or_stalls_ends_the_others_within_the_timeout(tmp_path, ended, backward):
    processes = start_on_ranks(attend_until, 3, tmp_path, ended, backward, tmp_path, timeout=TIMEOUT)
    try:
        for rank in (0, 2):
            processes[rank].join(timeout=100)
            assert processes[rank].exitcode == 1
            reason = (tmp_path / f"failure-{rank}").read_text()
            assert f"rank {rank} of 3 got no answer from the others" in reason
            assert ("Timed out waiting" if ended == "stalled" else "by peer") in reason
            assert "\n" not in reason
            took = float((tmp_path / f"noticed-{rank}").read_text()) - float((tmp_path / "ended").read_text())
            assert took < TIMEOUT + 10  # on a machine that is busy with other work
    finally:
        for process in processes:
            process.kill()


def test_without_a_process_group_it_says_what_to_do():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="has no process group here: start with torchrun"):
        sequence_parallel_nystrom_attention(*torch.randn(3, 1, 1, 5, 4))
