"""The paper's published numbers as data, and the names under which its comparisons stand in tables."""

import re

EFFICIENCY: dict[str, dict[int, tuple[float, float]]] = {
    "standard": {512: (54, 0.8), 1024: (186, 2.4), 2048: (685, 10.0), 4096: (2620, 32.9), 8192: (10233, 155.4)},
    "linformer-256": {512: (41, 0.7), 1024: (81, 1.3), 2048: (165, 2.7), 4096: (366, 5.3), 8192: (635, 11.3)},
    "longformer-257": {512: (32.2, 2.4), 1024: (65, 4.6), 2048: (130, 9.2), 4096: (263, 18.5), 8192: (455, 36.2)},
    "nystrom-64": {512: (35, 0.7), 1024: (63, 1.3), 2048: (118, 2.7), 4096: (229, 5.9), 8192: (450, 12.3)},
    "nystrom-32": {512: (26, 0.6), 1024: (49, 1.2), 2048: (96, 2.6), 4096: (193, 5.6), 8192: (383, 11.5)},
}
"""Table 1: memory in MB and time in ms of one input through self-attention, by attention and length."""

LRA: dict[str, dict[str, float]] = {
    "standard": {"listops": 37.10, "text": 65.02, "retrieval": 79.35, "image": 38.20, "pathfinder": 74.16},
    "reformer": {"listops": 19.05, "text": 64.88, "retrieval": 78.64, "image": 43.29, "pathfinder": 69.36},
    "linformer": {"listops": 37.25, "text": 55.91, "retrieval": 79.37, "image": 37.84, "pathfinder": 67.60},
    "performer": {"listops": 18.80, "text": 63.81, "retrieval": 78.62, "image": 37.07, "pathfinder": 69.87},
    "nystrom": {"listops": 37.15, "text": 65.52, "retrieval": 79.56, "image": 41.58, "pathfinder": 70.94},
}
"""Long Range Arena: accuracy in percent by attention and task. The published averages are the means of the rows."""

GLUE: dict[str, dict[str, float]] = {
    "standard": {"sst2": 90.0, "mrpc": 88.4, "qnli": 90.3, "qqp": 87.3, "mnli": 82.4, "mnli-mm": 82.4, "imdb": 93.3},
    "nystrom": {
        "sst2": 91.4,
        "mrpc": 88.1,
        "qnli": 88.7,
        "qqp": 86.3,
        "mnli": 80.9,
        "mnli-mm": 82.2,
        "imdb": 93.2,
        "imdb-1024": 93.0,
    },
}
"""Fine-tuned BERT-base models: F1 of MRPC and QQP, accuracy of the others, in percent, by attention and task. IMDB at
512 tokens, and at 1,024."""

FINETUNING_EPOCHS = 4
"""How often those models saw all training examples."""

DENSE = "dense"
"""The name of softmax attention with its n×n matrix in memory, which is what `EFFICIENCY` compares with."""

PEERS = {"nystrom-attention": "nystrom_attention", "transformers": "transformers"}
"""Other packages' Nyström attention by the name it has in tables, and the module that must be installed for each."""


def attention_family(attention: str) -> str:
    """The name of an attention less its size.

    >>> attention_family("nystrom-local-64"), attention_family("linear")
    ('nystrom-local', 'linear')
    """
    return re.sub(r"-\d+$", "", attention)


def paper_row(table: dict[str, dict[str, float]], attention: str) -> dict[str, float]:
    """What `LRA` or `GLUE` has of an attention, whatever its size: empty for one that the paper does not have.

    >>> paper_row(LRA, "nystrom-64")["listops"], paper_row(LRA, "nystrom-local")
    (37.15, {})
    """
    return table.get(attention_family(attention), {})
