"""`nystromformer distill`: a pretrained encoder becomes one with linear attention that behaves the same."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nystromformer.commands import LONGEST, corpus_command, new_folder, number, seed_of, whole_number
from nystromformer.errors import user_input


@corpus_command
def distill(
    model: Annotated[str, typer.Option(help="Folder or Hub id of an encoder with exact attention: the teacher.")],
    judge: Annotated[
        list[str] | None, typer.Option(help="Another corpus to judge the result by; may be repeated.")
    ] = None,
    attention: Annotated[str, typer.Option(help="nystrom or nystrom-local, with landmarks.")] = "nystrom-local-64",
    stages: Annotated[
        str, typer.Option(help="layers (each attention by itself), model (end to end), or both.")
    ] = "layers,model",
    layers: Annotated[str, typer.Option(help="Those that get the attention, as 0,2,3. [default: all]")] = "",
    budget: Annotated[
        str,
        typer.Option(help="Choose each layer's attention: error=0.1 (at most, in a layer) or speed=2 (times exact)."),
    ] = "",
    conv_kernel_size: Annotated[
        int, whole_number("Taps of the skip convolutions, odd; 0 for none.", least=0, most=LONGEST)
    ] = 33,
    chosen_blocks: Annotated[
        int | None,
        whole_number("Far blocks that each block of nystrom-local reads exactly; 0 for none.", least=0, most=LONGEST),
    ] = None,
    out: Annotated[Path, new_folder("Folder for records, curves, checkpoints and the model.")] = Path("runs/distill"),
    max_length: Annotated[
        int | None,
        whole_number("Tokens of an input; positions are tiled for lengths beyond the model's.", least=8, most=LONGEST),
    ] = None,
    learning_rate: Annotated[float | None, number("The highest of the stage model.", 1e-12, 100)] = None,
    layers_rate: Annotated[float | None, number("The highest of the stage layers.", 1e-12, 100)] = None,
    layers_share: Annotated[float | None, number("Share of the steps for the stage layers.", 0.001, 0.999)] = None,
    eval_every: Annotated[int | None, whole_number("Steps between looks at held-out text.")] = None,
    test_examples: Annotated[int | None, whole_number("Held-out inputs that the result is judged by.", least=2)] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder or Hub id of a tokenizer. [default: the model's]")] = "",
    held_out_share: Annotated[float, number("Share of the documents that is held out.", 0.000_001, 0.999)] = 0.1,
    seed: Annotated[int, seed_of("the order of examples")] = 0,
    **common: Any,
) -> None:
    """Turn a pretrained encoder into one with linear attention that follows it, by distillation on plain text.

    Example: `nystromformer distill --model sentence-transformers/all-MiniLM-L6-v2 --corpus wiki.parquet --preset mini`

    A long one: `nystromformer distill --model DIR --corpus books/ --max-length 4096 --preset mini`
    """
    given = dict(locals())
    with user_input():
        from nystromformer.training.distillation import run as distillation

        options = distillation.DistillOptions.given(**given | given.pop("common"))
    distillation.distill(options, say=typer.echo)
