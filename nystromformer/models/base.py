"""What all models share: how weights start, load and grow."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from nystromformer.attention import Attention, SkipConvolution
from nystromformer.attention.checks import check_at_least
from nystromformer.attention.performer import PerformerAttention, draw_projection
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.loading import check_keys, check_source
from nystromformer.models.positions import tile_positions


class NystromformerPreTrainedModel(PreTrainedModel):
    config: NystromformerConfig
    config_class = NystromformerConfig
    base_model_prefix = "nystromformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NystromformerEmbeddings", "NystromformerLayer")

    def __init__(self, config: NystromformerConfig) -> None:
        config.check()  # fields may have been set after it was made, as from_pretrained(folder, num_landmarks=128) does
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: object, *args: object, strict: bool = True, **kwargs: object
    ) -> "NystromformerPreTrainedModel":
        """As in Transformers, from safetensors only.

        `strict` (the default) refuses checkpoints that lack weights of the encoder or have some that find no place.
        """
        if pretrained_model_name_or_path is None:  # weights come as state_dict=
            return super().from_pretrained(None, *args, **kwargs)
        check_source(pretrained_model_name_or_path, kwargs.get("use_safetensors"))
        wants_info = kwargs.pop("output_loading_info", False)
        ignores_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        # we ask for everything that is wrong instead of the first, to name it
        kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if strict:
            check_keys(str(pretrained_model_name_or_path), cls.base_model_prefix, info, ignores_sizes)
        return (model, info) if wants_info else model

    def _init_weights(self, module: nn.Module) -> None:
        # `init` and, while this runs, torch.nn.init leave alone what was loaded
        keeps_own_start = isinstance(module, (Attention, SkipConvolution)) or (
            isinstance(module, nn.Linear) and self.config.linear_init == "uniform"
        )
        if isinstance(module, PerformerAttention):
            init.copy_(module.projection, draw_projection(module.num_features, module.head_dim))
        elif keeps_own_start and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def get_position_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Make room for longer input by repeating the learned positions, or cut them.

        >>> from nystromformer import NystromformerModel
        >>> model = NystromformerModel(NystromformerConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> model.resize_position_embeddings(4096)
        >>> model.config.max_position_embeddings, model.get_position_embeddings().num_embeddings
        (4096, 4098)
        """
        check_at_least("new_num_position_embeddings", new_num_position_embeddings, 1)
        for module in self.modules():
            if isinstance(module, Attention) and module.needs_fixed_length:
                raise ValueError(
                    f"{type(module).__name__} has parameters for each position, which can't be repeated: "
                    f"build the model with a larger max_position_embeddings and train it."
                )
        embeddings = self.base_model.embeddings
        old = embeddings.position_embeddings
        table = tile_positions(old.weight.data, embeddings.offset, new_num_position_embeddings)
        embeddings.position_embeddings = nn.Embedding.from_pretrained(table, freeze=not old.weight.requires_grad)
        embeddings.max_length = new_num_position_embeddings
        self.config.max_position_embeddings = new_num_position_embeddings
