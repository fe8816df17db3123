"""Sentences read aloud by a synthesizer, speech with a known text, the same for everybody; and what Whisper hears.

Half of them are for choosing, half for reporting; voices take turns in both.
"""

import io
import itertools
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly
from torch import Tensor
from transformers import WhisperFeatureExtractor
from transformers.utils import ModelOutput
from whisper_wheel import Whisper

VOICES = ("en-us", "en-us+f2", "en-gb-x-rp", "en-us+f3", "en-us+m3", "en-us+m7")
"""Those that the model understands best: where it guesses, every change of its input changes words."""
SPEED = 130
"""Words per minute."""
RATE = 16_000
"""Samples per second that Whisper hears."""
FRAMES_PER_SECOND = 50
TOKENS_PER_SENTENCE = 40

CHOOSING = (
    "The harbor was quiet until the first fishing boats came back with the morning tide.",
    "Please leave the keys with my neighbor if nobody answers the door.",
    "She planted three rows of beans beside the old stone wall last spring.",
    "Most of the passengers had fallen asleep before the train reached the mountains.",
    "A small leak under the kitchen sink can ruin the whole floor in a week.",
    "The committee will meet again on Thursday to discuss the budget for the new library.",
    "He wrote his grandmother a long letter and forgot to put a stamp on it.",
    "Our teacher showed us how to measure the height of a tree by its shadow.",
    "Heavy rain is expected in the north, while the south will stay dry and warm.",
    "The museum closes early today because the heating has to be repaired.",
    "If you turn left after the bridge, you will see a yellow house with a green roof.",
    "They sold the piano, the carpets and both mirrors before moving to the city.",
    "Nobody could explain why the clock in the tower had stopped at noon.",
    "The doctor asked him to breathe slowly and count backward from twenty.",
    "Fresh bread, salted butter and a cup of tea were waiting on the table.",
    "It took the engineers four months to find the fault in the second engine.",
    "The children built a castle of sand and watched the waves carry it away.",
    "I would rather walk for an hour than wait for another crowded bus.",
    "Her first novel sold badly, but the second one made her famous overnight.",
    "The river froze in January, and people crossed it on skates to visit the market.",
    "Remember to switch off the lights and lock the windows before you leave the office.",
    "The orchestra played the same piece twice because the audience would not stop clapping.",
    "Two foxes crossed the empty road and vanished between the garden sheds.",
    "The recipe needs a pound of flour, two eggs and a little patience.",
)
REPORTING = (
    "The lighthouse keeper painted the stairs white so that he could find them in the dark.",
    "We missed the last ferry and spent the night in a shed full of fishing nets.",
    "The new teacher speaks so softly that the back row can hardly hear her.",
    "A flock of geese landed on the frozen lake and slid across the ice.",
    "The bank on the corner has been turned into a shop for used bicycles.",
    "My brother repairs violins in a workshop above the bakery.",
    "The report says that the bridge is safe, but nobody wants to be the first to cross it.",
    "Please bring warm clothes, a flashlight and enough water for two days.",
    "The old farmer counted his sheep every evening and never found the same number.",
    "She opened the window to let the smoke out and the neighbor's cat came in.",
    "The first snow of the winter fell on the day of the election.",
    "He learned to cook in the army and has made too much food ever since.",
    "The judge asked the witness to repeat the answer a little louder.",
    "Between the two hills there is a valley where the wind never seems to rest.",
    "The company will open a second factory near the airport next year.",
    "Someone had left a red umbrella on the bench in front of the station.",
    "The mechanic shook his head, closed the hood and named a price.",
    "Every summer the village holds a race from the church to the river and back.",
    "The scientist kept the samples in a freezer that was older than her students.",
    "Tickets for the concert were sold out before we had even found the page.",
    "They followed the path through the forest until it ended at a broken gate.",
    "A good map is worth more than a fast horse in these mountains.",
    "The nurse wrote the temperature on a chart at the end of the bed.",
    "When the power failed, the whole street came out to look at the stars.",
)
PARTS = {"choosing": CHOOSING, "reporting": REPORTING}


@dataclass(frozen=True)
class Spoken:
    text: str
    voice: str
    features: numpy.ndarray
    """Log-mel spectrogram of half a minute, (80, 3000)."""
    seconds: float
    """How long the voice speaks."""


def speak(text: str, voice: str) -> numpy.ndarray:
    """What `espeak-ng` says, in samples of 16 kHz between -1 and 1."""
    if shutil.which("espeak-ng") is None:
        raise ValueError("espeak-ng is not installed: it is a program of most systems' package managers.")
    command = ["espeak-ng", "-v", voice, "-s", str(SPEED), "--stdout", text]
    wave = subprocess.run(command, check=True, capture_output=True).stdout
    with warnings.catch_warnings():  # a stream's header can't say how long it will be
        warnings.simplefilter("ignore", wavfile.WavFileWarning)
        rate, samples = wavfile.read(io.BytesIO(wave))
    return resample_poly(samples / 32768, RATE, rate).astype(numpy.float32)


def spoken_sentences(part: str, number: int | None = None) -> list[Spoken]:
    """The sentences of "choosing" or "reporting", each with the next voice."""
    in_turn = zip(PARTS[part][:number], itertools.cycle(VOICES), strict=False)
    return [spoken_as(text, voice, speak(text, voice)) for text, voice in in_turn]


def recorded_sentences(folder: Path) -> list[Spoken]:
    """Wave files of 16 kHz beside a file `transcription` with lines such as `<s> words </s> (name)`: the recordings of
    a reader that the source package of pocketsphinx has in test/data/librivox."""
    found = []
    for line in (folder / "transcription").read_text().splitlines():
        if match := re.fullmatch(r"(?:<s>)?(.*?)(?:</s>)?\s*\((.*)\)", line.strip()):
            rate, samples = wavfile.read(folder / f"{match[2]}.wav")
            if rate != RATE:
                raise ValueError(f"{folder / match[2]}.wav has {rate} samples per second: must have {RATE}.")
            found.append(spoken_as(match[1].strip(), "recorded", (samples / 32768).astype(numpy.float32)))
    return found


def spoken_as(text: str, voice: str, samples: numpy.ndarray) -> Spoken:
    features = WhisperFeatureExtractor()(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    return Spoken(text, voice, features, len(samples) / RATE)


@dataclass(frozen=True)
class Heard:
    encoded: Tensor  # (b, frames, d)
    transcripts: list[str]


@torch.no_grad()
def hear(whisper: Whisper, encoder: Callable[[Tensor], ModelOutput], spoken: list[Spoken]) -> Heard:
    encoded = torch.cat([encoder(features_of(each)).last_hidden_state for each in spoken])
    most = int(TOKENS_PER_SENTENCE * max(1.0, max(each.seconds for each in spoken) / 8))
    return Heard(encoded, [text for part in encoded.split(8) for text in whisper.transcribe(part, most)])


def features_of(spoken: Spoken) -> Tensor:
    return torch.from_numpy(spoken.features)[None]  # (1 80 3000)


def closeness(exact: Heard, ours: Heard, spoken: list[Spoken]) -> dict[str, Any]:
    cosines = torch.cosine_similarity(ours.encoded, exact.encoded, dim=2)  # (b, frames)
    speech = [row[: round(FRAMES_PER_SECOND * each.seconds)].mean() for row, each in zip(cosines, spoken, strict=True)]
    same = sum(one == other for one, other in zip(exact.transcripts, ours.transcripts, strict=True))
    return {
        "cosine": cosines.mean().item(),
        "worst": cosines.mean(dim=1).min().item(),
        "speech": torch.stack(speech).mean().item(),
        "same": same,
        "sentences": len(spoken),
        "words_changed": word_error_rate(exact.transcripts, ours.transcripts),
        "word_error_rate": word_error_rate([each.text for each in spoken], ours.transcripts),
        "transcripts": ours.transcripts,
    }


def words_of(text: str) -> list[str]:
    """
    >>> words_of("The neighbor's cat, at noon.")
    ['the', "neighbor's", 'cat', 'at', 'noon']
    """
    return re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()


def word_errors(said: list[str], heard: list[str]) -> int:
    """The fewest words to insert, leave out or replace that make one of the other.

    >>> word_errors(["a", "red", "cat"], ["red", "cap"])
    2
    """
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def word_error_rate(texts: list[str], transcripts: list[str]) -> float:
    pairs = [(words_of(text), words_of(heard)) for text, heard in zip(texts, transcripts, strict=True)]
    return sum(word_errors(*pair) for pair in pairs) / sum(len(said) for said, _ in pairs)
