"""Nyströmformer → Nyströmformer with longer positions or another attention."""

from nystromformer.attention.checks import check_at_least
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.conversion.from_standard import POSITIONS, length_note
from nystromformer.models.conversion.transfer import Conversion, transfer
from nystromformer.models.positions import tile_positions


def convert_own(
    source: NystromformerPreTrainedModel, *, max_length: int | None = None, **changes: object
) -> Conversion:
    """The same model with `changes` to its configuration, such as `attention="standard"`, and positions tiled.

    >>> from nystromformer import NystromformerModel
    >>> config = NystromformerConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    >>> convert_own(NystromformerModel(config), max_length=1024, conv_kernel_size=33).model.config.conv_kernel_size
    33
    """
    state, before = source.state_dict(), source.config.max_position_embeddings
    positions = next(key for key in state if key.endswith(POSITIONS))
    length = before if max_length is None else max_length
    check_at_least("max_length", length, 1)
    state[positions] = tile_positions(state[positions], source.config.position_offset, length)
    fields = source.config.to_dict() | {"max_position_embeddings": length}
    if "attention" in changes:
        fields["num_landmarks"] = None  # the new name's number decides, where it has one
    model = type(source)(NystromformerConfig(**fields | changes)).to(source.dtype).eval()
    own = model.state_dict()
    # only parts of the attention can have changed their shape
    names = {key: key if key in own and own[key].shape == tensor.shape else None for key, tensor in state.items()}
    rows = transfer(
        state,
        model,
        names,
        notes=length_note(positions, before, length),
        why_left=lambda key, tensor: "of the attention before",
        start_at_zero=r"\.conv\.weight$",
    )
    return Conversion(model, rows)
