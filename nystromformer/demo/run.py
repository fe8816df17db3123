"""The demo from one end to the other: four parts, one page, one short table."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nystromformer.bench.attention_study import AttentionStudy
from nystromformer.bench.cases import available_peers, parse_lengths
from nystromformer.bench.run import BenchOptions, run_bench
from nystromformer.checks import check_at_least
from nystromformer.demo import slides
from nystromformer.demo.search import (
    ATTENTION,
    CHOSEN_BLOCKS,
    STEADY,
    Encoder,
    Passage,
    guides_folder,
    load_encoder,
    read_long_document,
    read_passages,
    search,
    weights_folder,
)
from nystromformer.errors import user_input
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder, read_records, write_config
from nystromformer.report.demo import gains_table
from nystromformer.report.page import PAGE, write_report
from nystromformer.report.table import print_tables

MEASURED = ("standard", "nystrom-64", "nystrom-local-64")
SECONDS_PER_LENGTH = 4.0
SECONDS_OF_DOCUMENT = 20.0
POOL, HELD_OUT = 160, 16
"""Slides to train on, and to measure on."""
MAP_TOKENS = 256
MAP_GUIDE = "how-it-works"
MAP_KINDS = [("nystrom", 64), ("nystrom-local", 64)]
TITLE = "Nyströmformer: what linear attention is for"
INTRO = "Measured on this machine by the demo. Every figure comes from the records beside this page."


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's options, checked when made."""

    out: Path
    model: Path | None
    tokens: int
    lengths: str
    tiles: int
    steps: int
    seed: int

    def __post_init__(self) -> None:
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"--out {self.out}: must be a new or empty folder; give another one or remove it.")
        check_at_least("--tiles", self.tiles, 500, "smaller slides have no room for clusters")
        _ = self.bench, self.weights, guides_folder()  # checked when made

    @property
    def weights(self) -> Path:
        return weights_folder() if self.model is None else self.model

    @property
    def bench(self) -> BenchOptions:
        peers = [peer for peer, reason in available_peers().items() if not reason]
        return BenchOptions(
            lengths=parse_lengths(self.lengths),
            attentions=[*MEASURED, *peers],
            budget=SECONDS_PER_LENGTH,
            steady=STEADY,
            machine_limit=False,
            seed=self.seed,
        )


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> None:
    """All parts, in turn; the seconds of each are recorded."""
    out, config = options.out, {**asdict(options), "out": str(options.out), "model": str(options.model or "MiniLM-L6")}
    with user_input():
        encoder = load_encoder(options.weights)
        passages = read_passages(guides_folder(), encoder.count_tokens)
        write_config(out, config)
    recorder = Recorder(out, job="demo", config=config, seed=options.seed)
    with part("search", recorder, say, "1 of 4  A real model, one line changed: MiniLM searches this project's guides"):
        say(f'        replace_attention(model, "{ATTENTION}", chosen_blocks={CHOSEN_BLOCKS})')
        search_guides(options, encoder, passages, recorder)
    with part("efficiency", recorder, say, "2 of 4  Where it wins: time and memory of one call, from short to long"):
        for peer, reason in available_peers().items():
            if reason:
                say(f"        without {peer}: {reason}")
        measure_calls(options)
    with part("slides", recorder, say, f"3 of 4  Training where it matters: slides of {options.tiles:,} tiles"):
        train_on_slides(options, recorder)
    with part("maps", recorder, say, "4 of 4  The paper's figure on real text: attention of MiniLM's heads"):
        draw_maps(options, encoder, passages)
    write_report([out], out, title=TITLE, intro=INTRO, gaps=False)
    records = list(read_records(out, out / "efficiency"))
    print_tables([gains_table(records)])
    minutes = sum(record["value"] for record in records if record["metric"] == "seconds") / 60
    say(f"All of it took {minutes:.1f} minutes. Look at it: {out / PAGE}")


@contextmanager
def part(name: str, recorder: Recorder, say: Callable[[str], None], title: str) -> Iterator[None]:
    say(title)
    started = time.monotonic()
    yield
    recorder.record("seconds", time.monotonic() - started, part=name)


def search_guides(options: DemoOptions, encoder: Encoder, passages: list[Passage], recorder: Recorder) -> None:
    with steps_bar(3) as step:
        search(encoder, passages, recorder, step)
        read_long_document(encoder, passages, options.tokens, SECONDS_OF_DOCUMENT, recorder, step)


def measure_calls(options: DemoOptions) -> None:
    folder, bench = options.out / "efficiency", options.bench
    config = asdict(bench)
    write_config(folder, config)
    recorder = Recorder(folder, job="bench", config=config, seed=options.seed)
    with steps_bar(len(bench.lengths) * (len(bench.attentions) + 1)) as step:
        run_bench(bench, recorder, step)


def train_on_slides(options: DemoOptions, recorder: Recorder) -> None:
    pool = min(POOL, options.steps * slides.BATCH)
    with steps_bar(pool + HELD_OUT + 2 + options.steps + 2) as step:
        slides.train_on_slides(
            options.out,
            tiles=options.tiles,
            steps=options.steps,
            slides=pool,
            held_out=HELD_OUT,
            seed=options.seed,
            recorder=recorder,
            advance=step,
        )


def draw_maps(options: DemoOptions, encoder: Encoder, passages: list[Passage]) -> None:
    """Attention matrices of MiniLM's heads, exact and approximated."""
    shown = next((passage for passage in passages if passage.title.startswith(MAP_GUIDE)), passages[0])
    length = min(MAP_TOKENS, options.tokens)
    batch = encoder.tokenizer([shown.text], truncation=True, max_length=length, return_tensors="pt")
    study = AttentionStudy(MAP_KINDS)
    study.look_at(encoder.model, encoder.tokenizer, [batch])
    config = {"model": "MiniLM-L6", "text": shown.title, "kinds": [f"{name}-{m}" for name, m in MAP_KINDS]}
    layers = sorted({0, study.layers // 2, study.layers - 1})
    study.write(options.out / "attention-map", config, options.seed, layers=layers)
