"""`nystromformer pretrain`: masked words and sentence order, from raw text to curves."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import user_input


def pretrain(
    corpus: Annotated[
        list[str], typer.Option(help="Files (parquet, JSON lines, text), folders or Hub ids; may be repeated.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(help="vocab.txt, SentencePiece .model, tokenizer.json, a model's folder or Hub id, or `train`."),
    ] = "",
    size: Annotated[str, typer.Option(help="tiny, mini, small, minilm or base; by default the preset's.")] = "",
    attention: Annotated[str, typer.Option(help="Any attention by name.")] = "nystrom-64",
    source: Annotated[
        str, typer.Option("--from", metavar="MODEL", help="Start from the weights of a BERT-like model or one of ours.")
    ] = "",
    preset: Annotated[str, typer.Option(help="paper, mini (minutes on two cores) or smoke (seconds).")] = "paper",
    out: Annotated[Path, typer.Option(help="Folder for records, curves, checkpoints and the model.")] = Path(
        "runs/pretrain"
    ),
    cache: Annotated[Path, typer.Option(help="Folder for tokenised corpora and trained tokenizers.")] = Path(
        "runs/corpus"
    ),
    steps: Annotated[int | None, typer.Option(help="Training steps; warm-up shrinks in proportion.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a step, over all processes.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Examples at a time; a step accumulates several.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of an example.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of a tokenizer that is trained.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    text_column: Annotated[
        str, typer.Option(help="The column of parquet files and JSON lines with the text.")
    ] = "text",
    documents: Annotated[
        str, typer.Option(help="What divides text files into documents: blank-line, line or file.")
    ] = "blank-line",
    validation_share: Annotated[float, typer.Option(help="Share of the documents that is held out.")] = 0.2,
    workers: Annotated[int | None, typer.Option(help="Processes that tokenise; all cores by default.")] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Folder of another run to draw into the curves; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, dropout, masks and the order of examples.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in this folder stopped.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for any field of TrainingArguments; may be repeated.")
    ] = None,
) -> None:
    """Pretrain a model on raw text with masked words and sentence order (MLM + SOP), as the paper does.

    Example: `nystromformer pretrain --corpus wiki.parquet --corpus books/ --tokenizer train --preset mini`

    From BERT's weights: `nystromformer pretrain --corpus wiki.parquet --from google-bert/bert-base-uncased`
    """
    from nystromformer.training.pretraining_run import PretrainOptions, run

    with user_input():
        options = PretrainOptions(
            corpora=tuple(corpus),
            tokenizer=tokenizer,
            size=size,
            attention=attention,
            source=source,
            preset=preset,
            out=out,
            cache=cache,
            steps=steps,
            batch_size=batch_size,
            micro_batch=micro_batch,
            max_length=max_length,
            vocab_size=vocab_size,
            eval_every=eval_every,
            text_column=text_column,
            documents=documents,
            validation_share=validation_share,
            workers=workers,
            beside=tuple(beside or ()),
            seed=seed,
            resume=resume,
            device=device,
            dtype=dtype,
            settings=tuple(settings or ()),
        )
    run(options, say=typer.echo)
