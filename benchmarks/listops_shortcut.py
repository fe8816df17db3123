"""How far the top of an expression alone tells ListOps' answer: what a model scores that never looks inside.

    python benchmarks/listops_shortcut.py --out results/lra/listops-shortcut

A table of the most frequent answer for each case is made from training expressions and scored on others, for cases that
know more and more of the expression. They are grown by Long Range Arena's rules, with its lengths.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np

from nystromformer.data.lra.listops import TreeOptions, apply_operators, evaluate, grow
from nystromformer.files import write_text
from nystromformer.progress import count_bar
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table

Answer = int
Cases = tuple[Hashable, ...]
"""Of one expression, what each of `KNOWN` tells."""

KNOWN = (
    "nothing: the most frequent answer",
    "the outermost operator",
    "and what it makes of the digits right below it",
    "and how many expressions stand beside these digits",
    "and which operators those have",
)


def expressions(seed: int) -> Iterator[tuple[Cases, Answer]]:
    """Endless, a chunk of the generator after the other."""
    chunk = 0
    while True:
        levels = grow(np.random.default_rng([seed, chunk]), TreeOptions())
        values, _ = evaluate(levels)
        root, below = levels[0], levels[1]
        count = root.arguments
        for kind, answer, end, arguments in zip(root.kind, values[0], np.cumsum(count), count, strict=True):
            part = below.keep(slice(end - arguments, end))
            digits = part.kind[~part.is_operator]
            made = None
            if len(digits):
                made = int(apply_operators(np.array([kind]), digits, np.array([0]), np.array([len(digits)]))[0])
            inner = tuple(sorted(part.kind[part.is_operator].tolist()))
            yield (None, kind, (kind, made), (kind, made, len(inner)), (kind, made, inner)), int(answer)
        chunk += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/listops-shortcut"))
    parser.add_argument("--train", type=int, default=96_000, help="expressions that the tables are made of")
    parser.add_argument("--test", type=int, default=20_000, help="expressions that they are scored on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    new_job_folder(options.out)
    config = {"train": options.train, "test": options.test}
    recorder = Recorder(options.out, job="listops-shortcut", config=config, seed=options.seed)

    answers: list[defaultdict[Hashable, Counter[Answer]]] = [defaultdict(Counter) for _ in KNOWN]
    right = np.zeros(len(KNOWN), dtype=int)
    wanted = options.train + options.test
    with count_bar("expressions") as progress:
        for number, (cases, answer) in zip(range(wanted), expressions(options.seed), strict=False):
            for level, case in enumerate(cases):
                if number < options.train:
                    answers[level][case][answer] += 1
                else:  # a case that was never met is answered by what is known of less
                    less = zip(answers[level::-1], cases[level::-1], strict=True)
                    met = next(table[known] for table, known in less if known in table)
                    right[level] += met.most_common(1)[0][0] == answer
            progress(number + 1, wanted)

    rows = []
    for known, share in zip(KNOWN, right / options.test, strict=True):
        recorder.record("accuracy of the most frequent answer", float(share), known=known)
        rows.append([known, f"{100 * share:.1f}"])
    operators = {name: answers[1][kind].most_common(1)[0][0] for kind, name in enumerate(("MIN", "MAX", "MED", "SM"))}
    recorder.record("answers by the outermost operator", operators)
    text = Table(["known", "accuracy in percent"], rows).markdown() + "\n"
    write_text(options.out / "table.md", text)
    print(text, operators)


if __name__ == "__main__":
    main()
