"""What goes wrong on ranks: unlike input, a rank that dies, a rank that stalls."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_models import batch, config
from torch import Tensor

from nystromformer import NystromAttention, NystromformerForQuestionAnswering, NystromformerModel
from nystromformer.distributed import (
    CommunicationError,
    count_traffic,
    gather_sequence,
    sequence_parallel,
    sequence_parallel_nystrom_attention,
    split_sequence,
)


def attend(odd: bool, batch=2, heads=2, length=9, d=4, dtype=torch.float32, grad=False, **options: object) -> Tensor:
    """Attention, with something changed on the odd rank only."""
    changes = {name: value[odd] if isinstance(value, tuple) else value for name, value in options.items()}
    pick = lambda value: value[odd] if isinstance(value, tuple) else value
    x = torch.ones(pick(batch), pick(heads), pick(length), pick(d), dtype=pick(dtype), requires_grad=pick(grad))
    return sequence_parallel_nystrom_attention(x, x, x, **{"num_landmarks": 4} | changes)


UNLIKE: dict[str, dict[str, object]] = {
    "batch": {"batch": (2, 3)},
    "heads": {"heads": (2, 1)},
    "head-size": {"d": (4, 5)},
    "dtype": {"dtype": (torch.float32, torch.float64)},
    "num_landmarks": {"num_landmarks": (4, 5)},
    "pinv_iterations": {"pinv_iterations": (6, 5)},
    "scale": {"scale": (0.5, 0.25)},
    "kernel": {"conv_weight": (torch.ones(2, 3), torch.ones(2, 5))},
    "no-kernel": {"conv_weight": (torch.ones(2, 3), None)},
    "gradient": {"grad": (False, True)},
    "bad-mask": {"key_mask": (None, torch.ones(2, 8, dtype=torch.bool))},
    "bad-option": {"num_landmarks": (4, 0)},
    "no-tensors": {"length": (9, 9), "query_mask": (None, "all")},
}


def refusals() -> dict[str, dict[str, object]]:
    """The error of this rank for each kind of unlike input, what was sent besides the facts, and that all resumes."""
    odd = dist.get_rank() == 1
    found = {name: _refused(lambda changes=changes: attend(odd, **changes)) for name, changes in UNLIKE.items()}
    inputs = split_sequence(batch())
    torch.manual_seed(dist.get_rank())
    found["other-weights"] = _refused(lambda: sequence_parallel(NystromAttention(8, 2)))
    torch.manual_seed(0)
    found["other-parameters"] = _refused(lambda: sequence_parallel(NystromAttention(8, 2, bias=odd)))
    torch.manual_seed(0)
    model = NystromformerModel(config())
    with sequence_parallel(model):
        found["twice"] = _refused(lambda: sequence_parallel(model))
        one_less = {name: x[odd:] for name, x in inputs.items()}
        found["model-batch"] = _refused(lambda: model(**one_less))
        found["model-training"] = _refused(lambda: model.train(odd)(**inputs))
        model.eval()
        found["model-inputs"] = _refused(lambda: model(None if odd else inputs["input_ids"]))
        float_mask = inputs | ({"attention_mask": torch.rand(3, 25)} if odd else {})
        found["model-mask"] = _refused(lambda: model(**float_mask))
        found["model-maps"] = _refused(lambda: model(**inputs, output_attentions=True))
        found["model-length"] = _refused(lambda: model(inputs["input_ids"].repeat(1, 2)))
        found["model-empty"] = _refused(lambda: model(inputs["input_ids"][:, :0]))
    found["linformer"] = _refused(lambda: sequence_parallel(NystromformerModel(config(attention="linformer-8"))))
    found["answers"] = _refused(lambda: sequence_parallel(NystromformerForQuestionAnswering(config())))
    found["no-attention"] = _refused(lambda: sequence_parallel(torch.nn.Linear(2, 2)))
    found["lengths"] = _refused(lambda: split_sequence(batch(), lengths=(1, 2, 3)))
    found["gather"] = _refused(lambda: gather_sequence(torch.zeros(2, 3, 4 + odd)))
    found["kmeans"] = _refused(lambda: attend(odd, landmarks="kmeans"))
    assert attend(odd).shape == (2, 2, 9, 4)  # nothing is out of step
    return found


def _refused(run: Callable[[], object]) -> dict[str, object]:
    with count_traffic() as traffic:
        try:
            run()
        except (ValueError, TypeError) as error:
            return {"error": str(error), "purposes": list(traffic.sent)}
    return {"error": "", "purposes": list(traffic.sent)}


def attend_until(ended: str, backward: bool, folder: Path) -> None:
    """Attend again and again; rank 1 is killed or stalls. The others end with one line, as a program would."""
    x = torch.ones(1, 2, 50, 4, requires_grad=backward)
    try:
        for step in range(1000):
            out = sequence_parallel_nystrom_attention(x, x, x, num_landmarks=4, conv_weight=torch.ones(2, 5))
            if step == 3 and dist.get_rank() == 1:
                (folder / "ended").write_text(str(time.time()))
                if ended == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
            if backward:
                out.sum().backward()
    except CommunicationError as error:
        (folder / f"noticed-{dist.get_rank()}").write_text(str(time.time()))
        sys.exit(str(error))
