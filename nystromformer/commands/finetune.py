"""`nystromformer finetune`: GLUE, IMDB or your own texts, with any encoder and any attention."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nystromformer.commands import LONGEST, Packed, Seeds, new_folder, number, training_command, whole_number
from nystromformer.errors import user_input


@training_command
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
        whole_number(
            "Taps of a trained skip convolution, odd, as the paper's 33; 0 for none. [default: as MODEL]",
            least=0,
            most=LONGEST,
        ),
    ] = None,
    out: Annotated[Path, new_folder("Folder for records and models.")] = Path("runs/finetune"),
    seeds: Seeds = "",
    search: Annotated[
        bool, typer.Option("--search", help="The paper's for MRPC: batch 8, 16, 32 × rate 2e-5 to 5e-5, the best kept.")
    ] = False,
    epochs: Annotated[float | None, number("Times through the training part.", 0.001, 100_000)] = None,
    steps: Annotated[int | None, whole_number("Training steps, in place of epochs.")] = None,
    packed: Packed = None,
    learning_rate: Annotated[float | None, number("The highest, after the warm-up.", 1e-12, 100)] = None,
    max_length: Annotated[
        int | None,
        whole_number("Cut longer inputs here; positions are tiled for lengths beyond the model's.", most=LONGEST),
    ] = None,
    patience: Annotated[
        int | None, whole_number("Stop after so many evaluations without a better one. [default: never]")
    ] = None,
    train_examples: Annotated[int | None, whole_number("At most so many, drawn at random.")] = None,
    dev_examples: Annotated[int | None, whole_number("At most so many of each development part.")] = None,
    test_examples: Annotated[int | None, whole_number("At most so many of a test part with labels.")] = None,
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
    **common: Any,
) -> None:
    """Fine-tune on GLUE, IMDB or your own texts, and put the scores beside the paper's.

    Example: `nystromformer finetune mrpc --model google-bert/bert-base-uncased --attention standard,nystrom-64`

    Your own: `nystromformer finetune custom --model DIR --data reviews.csv --text-column review --label-column stars`
    """
    given = dict(locals())
    with user_input():
        from nystromformer.training.finetuning.sweep import FinetuningSweep
        from nystromformer.training.sweep import run_sweep

        sweep = FinetuningSweep.given(**given | given.pop("common"))
    run_sweep(sweep, say=typer.echo)
