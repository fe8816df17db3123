"""Text for pretraining: read, split into sentences, tokenized once to Arrow shards, dealt out as masked sentence pairs.

`build_corpus` makes the shards, `PretrainingExamples` the batches. Nothing is imported here: the processes that
tokenize start with this package, and they need no PyTorch.
"""
