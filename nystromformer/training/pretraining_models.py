"""The models that are pretrained: new ones in five sizes, or the weights of another one with both heads."""

from typing import Any

from transformers import PreTrainedTokenizerFast, set_seed

from nystromformer.data.corpus.examples import SpecialTokens
from nystromformer.models import NystromformerForPreTraining, NystromformerPreTrainedModel, preset_config
from nystromformer.models.conversion import convert_model, convert_own, load_source, transfer
from nystromformer.training import SIZES
from nystromformer.training.recipes import PretrainingRecipe


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    return SpecialTokens(
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        pad=tokenizer.pad_token_id,
        mask=tokenizer.mask_token_id,
        all=tuple(sorted(tokenizer.all_special_ids)),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
    )


def build_model(
    recipe: PretrainingRecipe, attention: str, source: str | None, special: SpecialTokens, seed: int
) -> NystromformerForPreTraining:
    """Raises `ValueError` for an attention, a length or a vocabulary that the model can't have."""
    if recipe.max_length < 8:
        raise ValueError(f"--max-length {recipe.max_length}: must be at least 8; the paper uses 512.")
    set_seed(seed)
    model = _from_scratch(recipe, attention, special) if source is None else _from_source(recipe, attention, source)
    config = model.config
    if recipe.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max-length {recipe.max_length}: {source} has positions for {config.max_position_embeddings} tokens; "
            f"lengthen it with `nystromformer convert {source} DST --max-length {recipe.max_length}`, start from DST."
        )
    if special.vocab_size > config.vocab_size:
        raise ValueError(
            f"--tokenizer: has {special.vocab_size:,} tokens, but {source} has embeddings for {config.vocab_size:,}; "
            f"leave --tokenizer out to use the model's own."
        )
    config.pad_token_id = special.pad
    return model


def with_pretraining_heads(model: NystromformerPreTrainedModel) -> NystromformerForPreTraining:
    """The same encoder with both heads; those that `model` has are kept, others start at random."""
    if isinstance(model, NystromformerForPreTraining):
        return model
    made = NystromformerForPreTraining(model.config)
    own, prefix = made.state_dict(), model.base_model_prefix + "."
    state = model.state_dict()
    transfer(
        state,
        made,
        {key: next((name for name in (key, prefix + key) if name in own), None) for key in state},
        notes={},
        why_left=lambda key, tensor: "no part of pretraining",
        start_at_zero="$^",
    )
    return made


def _from_scratch(recipe: PretrainingRecipe, attention: str, special: SpecialTokens) -> NystromformerForPreTraining:
    config = preset_config(
        "bert-base",
        **SIZES[recipe.size],
        attention=attention,
        vocab_size=special.vocab_size,
        max_position_embeddings=recipe.max_length,
        pad_token_id=special.pad,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.attention_dropout,
    )
    return NystromformerForPreTraining(config)


def _from_source(recipe: PretrainingRecipe, attention: str, source: str) -> NystromformerForPreTraining:
    theirs, _ = load_source(source)
    changes: dict[str, Any] = {
        "attention": attention,
        "hidden_dropout_prob": recipe.dropout,
        "attention_probs_dropout_prob": recipe.attention_dropout,
    }
    is_own = isinstance(theirs, NystromformerPreTrainedModel)
    return with_pretraining_heads((convert_own if is_own else convert_model)(theirs, **changes).model.float())
