"""Small BERT-like encoders with a tokenizer that knows the words of `glue_files.sentence`."""

from pathlib import Path

import torch
import transformers
from glue_files import BAD, GOOD

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "number", "said", *GOOD, *BAD]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


def write_bert(folder: Path, labels: int | None = None, **changes: object) -> Path:
    """A folder with an encoder, with a head for so many labels if given, and its tokenizer."""
    torch.manual_seed(0)
    if labels is None:
        model = transformers.BertModel(transformers.BertConfig(**SIZES | changes))
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=labels))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(vocabulary), model_max_length=64).save_pretrained(folder)
