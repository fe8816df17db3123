"""GLUE, IMDB and the user's own texts, all read into the same `TextSplits`."""

from nystromformer.data.glue.readers import read_custom, read_task
from nystromformer.data.glue.tasks import CUSTOM, TASKS, Columns, Task, Texts, TextSplits, task_name

__all__ = ["CUSTOM", "TASKS", "Columns", "Task", "TextSplits", "Texts", "read_custom", "read_task", "task_name"]
