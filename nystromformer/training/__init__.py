"""Training: Long Range Arena, pretraining and fine-tuning. What commands offer is here, known without torch."""

from typing import Any

PRESETS = ("paper", "mini", "smoke")
"""The paper's recipe, minutes on two cores, or seconds."""

LRA_PRESETS = ("paper", "hour", "mini", "smoke")
"""Long Range Arena has one more: the paper's lengths, with as many steps as an hour of two cores takes."""

DEVICES = ("auto", "cpu", "cuda")

DTYPES = ("float32", "bfloat16", "float16")

SAVE_SECONDS = 600.0
"""A checkpoint at least so often: what a kill without any warning costs at most."""

SIZES: dict[str, dict[str, Any]] = {
    # tiny and mini are the smallest that BERT's authors released.
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "small": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "minilm": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""Of models that are pretrained. The paper's are small and base; MiniLM-L6 is there to start from, and to compare."""
