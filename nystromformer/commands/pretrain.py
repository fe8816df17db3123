"""`nystromformer pretrain`: masked words and sentence order, from raw text to curves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nystromformer.commands import LONGEST, choice, corpus_command, new_folder, number, seed_of, whole_number
from nystromformer.errors import user_input
from nystromformer.training import SIZES


@corpus_command
def pretrain(
    tokenizer: Annotated[
        str,
        typer.Option(help="vocab.txt, SentencePiece .model, tokenizer.json, a model's folder or Hub id, or `train`."),
    ] = "",
    size: Annotated[str | None, choice("Of the model. [default: the preset's]", *SIZES)] = None,
    attention: Annotated[str, typer.Option(help="Any attention by name.")] = "nystrom-64",
    source: Annotated[
        str, typer.Option("--from", metavar="MODEL", help="Start from the weights of a BERT-like model or one of ours.")
    ] = "",
    out: Annotated[Path, new_folder("Folder for records, curves, checkpoints and the model.")] = Path("runs/pretrain"),
    cache: Annotated[Path, new_folder("Folder for tokenized corpora and trained tokenizers.")] = Path("runs/corpus"),
    micro_batch: Annotated[
        int | None, whole_number("Examples at a time; a step accumulates several.", most=LONGEST)
    ] = None,
    max_length: Annotated[int | None, whole_number("Tokens of an example.", least=8, most=LONGEST)] = None,
    vocab_size: Annotated[int | None, whole_number("Of a tokenizer that is trained.", most=10_000_000)] = None,
    eval_every: Annotated[int | None, whole_number("Steps between evaluations.")] = None,
    validation_share: Annotated[float, number("Share of the documents that is held out.", 0.000_001, 0.999)] = 0.2,
    workers: Annotated[int | None, whole_number("Processes that tokenize; all cores by default.", most=1_024)] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Folder of another run to draw into the curves; may be repeated.")
    ] = None,
    seed: Annotated[int, seed_of("weights, dropout, masks and the order of examples")] = 0,
    **common: Any,
) -> None:
    """Pretrain a model on raw text with masked words and sentence order (MLM + SOP), as the paper does.

    Example: `nystromformer pretrain --corpus wiki.parquet --corpus books/ --tokenizer train --preset mini`

    From BERT's weights: `nystromformer pretrain --corpus wiki.parquet --from google-bert/bert-base-uncased`
    """
    given = dict(locals())
    from nystromformer.training import pretraining

    with user_input():
        options = pretraining.PretrainOptions.given(**given | given.pop("common"))
    pretraining.pretrain(options, say=typer.echo)
