"""Attentions of linear cost and their parts. Needs torch only."""

from nystromformer.attention.agent import agent_attention
from nystromformer.attention.base import Attention
from nystromformer.attention.linear import linear_attention
from nystromformer.attention.linformer import linformer_attention
from nystromformer.attention.longformer import longformer_attention
from nystromformer.attention.nystrom.landmarks import kmeans_landmarks, sampled_softmax_approximation, segment_means
from nystromformer.attention.nystrom.operation import NystromAttention, nystrom_attention, nystrom_attention_weights
from nystromformer.attention.nystrom.pseudoinverse import exact_pinv, iterative_pinv, pinv_residual
from nystromformer.attention.nystrom.varlen import nystrom_attention_varlen
from nystromformer.attention.nystrom_local.operation import (
    nystrom_local_attention,
    nystrom_local_attention_varlen,
    nystrom_local_attention_weights,
)
from nystromformer.attention.performer import performer_attention
from nystromformer.attention.reformer import reformer_attention
from nystromformer.attention.registry import ATTENTIONS, build_attention
from nystromformer.attention.shared.skip_convolution import SkipConvolution, skip_convolution
from nystromformer.attention.standard import standard_attention

__all__ = [
    "ATTENTIONS",
    "Attention",
    "NystromAttention",
    "SkipConvolution",
    "agent_attention",
    "build_attention",
    "exact_pinv",
    "iterative_pinv",
    "kmeans_landmarks",
    "linear_attention",
    "linformer_attention",
    "longformer_attention",
    "nystrom_attention",
    "nystrom_attention_varlen",
    "nystrom_attention_weights",
    "nystrom_local_attention",
    "nystrom_local_attention_varlen",
    "nystrom_local_attention_weights",
    "performer_attention",
    "pinv_residual",
    "reformer_attention",
    "sampled_softmax_approximation",
    "segment_means",
    "skip_convolution",
    "standard_attention",
]
