"""Stop where more training no longer helps, decided from the log alone, so that a resumed run decides the same."""

from collections.abc import Iterable

from transformers import TrainerCallback


def has_stalled(log: Iterable[dict[str, float]], metric: str, patience: int) -> bool:
    """Whether the last `patience` evaluations were all no better than one before.

    >>> log = [{"eval_f1": value} for value in (0.5, 0.7, 0.6, 0.7)]
    >>> has_stalled(log, "f1", 2), has_stalled(log, "f1", 3)
    (True, False)
    """
    values = [entry[f"eval_{metric}"] for entry in log if f"eval_{metric}" in entry]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= patience


class StopEarly(TrainerCallback):
    def __init__(self, metric: str, patience: int) -> None:
        self.metric, self.patience = metric, patience

    def on_evaluate(self, args, state, control, **_: object) -> None:
        if has_stalled(state.log_history, self.metric, self.patience):
            control.should_training_stop = True
