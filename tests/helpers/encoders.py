"""Small encoders of Transformers, with weights large enough for attention to matter."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)

import nystromformer

nystromformer.register()

VOCABULARY = 50
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "initializer_range": 0.3}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
SMALL_NYSTROMFORMER = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "conv_kernel_size": 5,
    "num_landmarks": 8,
}
"""Fields of our configuration and of Transformers' own alike."""

ENCODERS = {
    "bert": lambda: BertModel(BertConfig(**TEXT)),
    "roberta": lambda: RobertaModel(RobertaConfig(**TEXT)),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(
            dim=32,
            n_heads=4,
            n_layers=2,
            hidden_dim=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
    ),
    "electra": lambda: ElectraModel(ElectraConfig(**TEXT, embedding_size=16)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**TEXT, **SPECIAL, local_attention=16, global_attn_every_n_layers=2)
    ),
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return ENCODERS[name]().eval()


def vit() -> PreTrainedModel:
    torch.manual_seed(0)
    return ViTModel(ViTConfig(**SIZES, image_size=48, patch_size=4, initializer_range=0.3)).eval()


def switch(model: PreTrainedModel, num_landmarks: int, implementation: str = "nystrom") -> PreTrainedModel:
    model.set_attn_implementation(implementation)
    model.config.num_landmarks = num_landmarks
    return model


def tokens(batch: int = 2, length: int = 100) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
