"""`nystromformer finetune`: GLUE, IMDB or your own texts, with any encoder and any attention."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import UserError, user_input


def finetune(
    task: Annotated[
        str,
        typer.Argument(
            help="sst2, mrpc, qnli, qqp, mnli, imdb, cola, rte, stsb, wnli, several of them, all (the paper's six), "
            "or custom for your own files."
        ),
    ],
    model: Annotated[str, typer.Option(help="Folder or Hub id of an encoder with safetensors weights.")],
    data: Annotated[
        str,
        typer.Option(help="Folder with the official TSV or the Hub's parquet files, or a Hub id; a file if custom."),
    ] = "",
    attention: Annotated[
        str, typer.Option(help="Attentions by name, as standard,nystrom-64. [default: the model's own]")
    ] = "",
    conv_kernel_size: Annotated[
        int | None,
        typer.Option(
            help="Taps of a trained skip convolution, odd, as the paper's 33; 0 for none. [default: as MODEL]"
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="paper, mini (minutes on two cores) or smoke (seconds).")] = "paper",
    out: Annotated[Path, typer.Option(help="Folder for records and models.")] = Path("runs/finetune"),
    seed: Annotated[int, typer.Option(help="Seed of new weights, dropout and the order of examples.")] = 0,
    seeds: Annotated[str, typer.Option(help="Several seeds, as 1,2,3: mean and deviation.")] = "",
    search: Annotated[
        bool, typer.Option("--search", help="The paper's for MRPC: batch 8, 16, 32 × rate 2e-5 to 5e-5, the best kept.")
    ] = False,
    epochs: Annotated[float | None, typer.Option(help="Times through the training part.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, in place of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a step, over all processes.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest, behind the warm-up.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut longer inputs here; positions are tiled for lengths beyond the model's.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations without a better one. [default: never]")
    ] = None,
    train_examples: Annotated[int | None, typer.Option(help="At most so many, drawn at random.")] = None,
    dev_examples: Annotated[int | None, typer.Option(help="At most so many of each development part.")] = None,
    test_examples: Annotated[int | None, typer.Option(help="At most so many of a test part with labels.")] = None,
    text_column: Annotated[str, typer.Option(help="For custom: the column of the text.")] = "",
    pair_column: Annotated[str, typer.Option(help="For custom: the column of a second text.")] = "",
    label_column: Annotated[str, typer.Option(help="For custom: the column of the label. [default: label]")] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder or Hub id of a tokenizer. [default: the model's]")] = "",
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Replace a head that is for another number of labels.")
    ] = False,
    predict: Annotated[
        bool | None,
        typer.Option("--predict/--no-predict", help="Predict test parts without labels. [default: in preset paper]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run in this folder stopped.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for any field of TrainingArguments; may be repeated.")
    ] = None,
) -> None:
    """Fine-tune on GLUE, IMDB or your own texts, and put the scores beside the paper's.

    Example: `nystromformer finetune mrpc --model google-bert/bert-base-uncased --attention standard,nystrom-64`

    Your own: `nystromformer finetune custom --model DIR --data reviews.csv --text-column review --label-column stars`
    """
    if (label_column and not text_column) or (pair_column and not text_column):
        raise UserError("--pair-column and --label-column need --text-column, the column of the (first) text.")
    with user_input():
        from nystromformer.data.glue import Columns
        from nystromformer.training.finetuning_sweep import FinetuneOptions, run_sweep

        columns = Columns(first=text_column, second=pair_column or None, label=label_column or "label")
        options = FinetuneOptions(
            tasks=task,
            model=model,
            tokenizer=tokenizer,
            data=data,
            attentions=attention,
            conv_kernel_size=conv_kernel_size,
            columns=columns if text_column else None,
            preset=preset,
            out=out,
            seeds=seeds or str(seed),
            search=search,
            epochs=epochs,
            learning_rate=learning_rate,
            steps=steps,
            batch_size=batch_size,
            max_length=max_length,
            patience=patience,
            train_examples=train_examples,
            dev_examples=dev_examples,
            test_examples=test_examples,
            predict=predict,
            new_head=new_head,
            resume=resume,
            device=device,
            dtype=dtype,
            settings=tuple(settings or ()),
        )
    run_sweep(options, say=typer.echo)
