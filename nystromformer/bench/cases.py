"""What is measured: one attention on one input, as a function to call again and again."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nystromformer.attention import build_attention
from nystromformer.checks import check_at_least, check_choice, parse_whole_numbers
from nystromformer.errors import install_hint
from nystromformer.paper import DENSE, PEERS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
PEER_LANDMARKS = 64
LONGEST = 2**20
"""Tokens of the longest input that is measured."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all cells of a table share."""

    batch: int = 1
    heads: int = 12
    head_dim: int = 64
    backward: bool = False
    masked: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Case(Setting):
    """One cell of the table."""

    attention: str
    length: int

    def __post_init__(self) -> None:
        for name in ("length", "batch", "heads", "head_dim"):
            check_at_least(name, getattr(self, name), 1)
        check_choice("dtype", self.dtype, DTYPES)
        check_device(self.device)
        check_attention_names([self.attention])
        if self.masked and (self.attention in PEERS or self.attention == DENSE):
            raise ValueError(f"attention {self.attention!r}: masks are measured for our own attentions only.")

    @property
    def details(self) -> dict[str, Any]:
        """What a record says of this case."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    @property
    def input_bytes(self) -> int:
        """Of queries, keys, values, and what flows back where it does."""
        numbers = (4 if self.backward else 3) * self.batch * self.length * self.heads * self.head_dim
        return numbers * DTYPES[self.dtype].itemsize


def check_device(device: str) -> None:
    """A processor or a GPU that is here: what computes nothing, such as `meta`, can't be measured."""
    reason = "nothing is computed there"
    try:
        if torch.empty(0, device=device).device.type in ("cpu", "cuda"):
            return
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    available = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    raise ValueError(f"device {device!r}: must be one of {', '.join(available)} here ({reason}).")


def check_attention_names(names: Iterable[str]) -> None:
    """Each must be an attention of `build_attention`, "dense", or a peer."""
    for name in names:
        if name not in PEERS and name != DENSE:
            with torch.device("meta"):
                build_attention(name, num_heads=1, head_dim=8, max_length=64)


def available_peers() -> dict[str, str]:
    """Each peer, with the reason why it can't be measured, or an empty text."""
    reasons = {}
    for peer, module in PEERS.items():
        missing = importlib.util.find_spec(module) is None
        reasons[peer] = f"not installed; {install_hint('models', 'peers')}" if missing else ""
    return reasons


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values in the (b, n, h·d) layout that projections produce, and what flows back."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor | None
    mask: Tensor | None


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.length, case.heads * case.head_dim)

    def draw() -> Tensor:
        x = torch.empty(shape, dtype=DTYPES[case.dtype]).normal_(generator=generator)
        return x.to(case.device)

    query, key, value = (draw().requires_grad_(case.backward) for _ in range(3))
    mask = None
    if case.masked:  # an eighth of each example is padding
        valid = case.length - case.length // 8
        mask = (torch.arange(case.length) < valid).expand(case.batch, -1).contiguous().to(case.device)
    return Inputs(query, key, value, draw() if case.backward else None, mask)


def prepare(case: Case, inputs: Inputs | None = None) -> Callable[[], None]:
    """A function that runs the case once: forward, and backward to the inputs and parameters where asked."""
    inputs = make_inputs(case) if inputs is None else inputs
    torch.manual_seed(case.seed)
    forward, parameters = _forward(case, inputs)
    leaves = [inputs.query, inputs.key, inputs.value, *parameters]

    def run() -> None:
        if case.backward:
            out = forward()
            torch.autograd.grad(out, leaves, inputs.upstream, allow_unused=True)
        else:
            with torch.no_grad():
                forward()
        if case.device.startswith("cuda"):
            torch.cuda.synchronize(case.device)

    return run


def _forward(case: Case, inputs: Inputs) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    if case.attention == "transformers":
        module = _transformers_operation(case, inputs)
        call = lambda: module(inputs.query)[0]
    elif case.attention == "nystrom-attention":
        module = _nystrom_attention_operation(case, inputs)
        call = lambda: module(inputs.query)
    else:
        module = (
            _Dense()
            if case.attention == DENSE
            else build_attention(case.attention, num_heads=case.heads, head_dim=case.head_dim, max_length=case.length)
        )
        split = lambda x: x.view(*x.shape[:2], case.heads, case.head_dim).transpose(1, 2)

        def call() -> Tensor:
            out = module(split(inputs.query), split(inputs.key), split(inputs.value), inputs.mask)
            return out.transpose(1, 2).flatten(2)  # a view where the result has the projections' layout already

    module.to(device=case.device, dtype=DTYPES[case.dtype])
    return call, [p for p in module.parameters() if p.requires_grad]


class _Dense(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None = None) -> Tensor:
        return torch.softmax(query * query.shape[3] ** -0.5 @ key.mT, dim=-1) @ value


class _Given(nn.Module):
    """Stands in for a projection, so that a peer's own code runs on given queries, keys and values."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self, _: Tensor) -> Tensor:
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors, dim=-1)


def _transformers_operation(case: Case, inputs: Inputs) -> nn.Module:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    _check_divisible(case)
    config = NystromformerConfig(
        hidden_size=case.heads * case.head_dim,
        num_attention_heads=case.heads,
        num_landmarks=PEER_LANDMARKS,
        segment_means_seq_len=case.length,
        conv_kernel_size=33,
        attention_probs_dropout_prob=0.0,
    )
    module = NystromformerSelfAttention(config).eval()
    module.query, module.key, module.value = _Given(inputs.query), _Given(inputs.key), _Given(inputs.value)
    return module


def _nystrom_attention_operation(case: Case, inputs: Inputs) -> nn.Module:
    from nystrom_attention import NystromAttention

    _check_divisible(case)
    width = case.heads * case.head_dim
    module = NystromAttention(
        width, dim_head=case.head_dim, heads=case.heads, num_landmarks=PEER_LANDMARKS, residual_conv_kernel=33
    ).eval()
    # Its projection makes queries, keys and values as one tensor, which it then reads in three parts.
    joined = torch.cat([inputs.query, inputs.key, inputs.value], dim=-1) if not case.backward else None
    module.to_qkv = _Given(inputs.query, inputs.key, inputs.value) if joined is None else _Given(joined)
    module.to_out = nn.Identity()
    return module


def _check_divisible(case: Case) -> None:
    if case.length % PEER_LANDMARKS:
        raise ValueError(f"length {case.length}: {case.attention} needs a multiple of {PEER_LANDMARKS}.")


def default_attentions() -> list[str]:
    """The rows of the paper's table, and the other attentions of its comparison."""
    rows = [DENSE, "standard", "linformer-256", "longformer-257", "nystrom-64", "nystrom-32"]
    return [*rows, "performer-256", "reformer-2", "linear", "nystrom-local"]


def parse_lengths(text: str) -> list[int]:
    """Lengths such as "512,1024", from short to long and once each.

    >>> parse_lengths("1024,512,512")
    [512, 1024]
    """
    return sorted(parse_whole_numbers("--lengths", text, 1, LONGEST))
