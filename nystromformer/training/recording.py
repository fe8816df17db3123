"""Records and TensorBoard curves of a training run, from the first process only."""

import json
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from nystromformer.records import RECORDS, Recorder, read_records, write_text

DETAILS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Record(TrainerCallback):
    """One record for each training loss and each metric of an evaluation, with its step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args, state, control, **_: object) -> None:
        if state.is_world_process_zero:
            forget_after(self.recorder.folder, state.global_step)

    def on_log(self, args, state, control, logs=None, **_: object) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            self.recorder.record("train_loss", logs["loss"], step=state.global_step)

    def on_evaluate(self, args, state, control, metrics=None, **_: object) -> None:
        if not state.is_world_process_zero:
            return
        for name, value in (metrics or {}).items():
            name = name.removeprefix("eval_")
            if name not in (*DETAILS, "epoch"):
                self.recorder.record(f"dev_{name}", value, step=state.global_step)


def forget_after(folder: Path, step: int) -> None:
    """Drop records of steps that a resumed run will take again: the killed one was further than its checkpoint."""
    path = Path(folder) / RECORDS
    if not path.exists():
        return
    kept = [record for record in read_records(folder) if record.get("step", 0) <= step]
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


class Curves(TensorBoardCallback):
    """TensorBoard's files in `out/tensorboard`. A resumed run hides what the killed one had after its checkpoint."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.folder = out / "tensorboard"

    def on_train_begin(self, args, state, control, **kwargs: object) -> None:
        if state.is_world_process_zero:
            self.tb_writer = self._SummaryWriter(log_dir=str(self.folder), purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)
