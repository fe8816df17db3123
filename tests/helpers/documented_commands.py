"""The commands that the README, the guides and `--help` show, and the files that they name, made small and real."""

import ast
import re
import shlex
from pathlib import Path

import transformers
import typer
from corpora import texts, write_vocabulary
from glue_files import write_official, write_parquet
from report_runs import write_lra
from small_bert import WORDS, write_bert

from nystromformer.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("nystromformer", "torchrun", "python", "make", "git", "cd")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"`nystromformer ([a-z][^`]*)`")
MODELS = ("DIR", "path/to/encoder", "path/to/bert", "path/to/MiniLM", "google-bert/bert-base-uncased",
          "sentence-transformers/all-MiniLM-L6-v2")  # fmt: skip


def shell_commands(page: Path) -> list[str]:
    """The lines of all blocks in bash, and of those without a language that begin with a program."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("bash", "sh") or (not language and block.split(maxsplit=1)[0] in PROGRAMS):
            joined = block.replace("\\\n", " ").replace("$(which nystromformer)", "nystromformer")
            found += [line.strip() for line in joined.splitlines() if line.strip()]
    return found


def mentions(text: str) -> list[str]:
    """What follows `nystromformer` in inline code, outside of blocks."""
    return [" ".join(mention.split()) for mention in MENTION.findall(FENCE.sub("", text))]


def help_examples() -> list[str]:
    """The examples in the help of all commands."""
    return [f"nystromformer {said}" for name in commands() for said in mentions(commands()[name].help or "")]


def commands() -> dict[str, object]:
    """All subcommands by name."""
    return typer.main.get_command(app).commands


def parse(arguments: list[str]) -> None:
    """Raises what the command line would refuse: unknown commands and options, missing arguments, wrong types."""
    group = typer.main.get_command(app)
    with group.make_context("nystromformer", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))
        command.make_context(name, rest, parent=context)


def options_of(command: object) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def script_options(script: Path) -> set[str]:
    """The options that a script adds to its parser."""
    calls = (node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call))
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {argument.value for call in added for argument in call.args if isinstance(argument, ast.Constant)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def write_stand_ins(folder: Path) -> None:
    """Small models, texts, tables and runs under the names that the documentation gives them."""
    for name in MODELS:
        write_bert(folder / name, max_position_embeddings=1024)
        tokenizer = transformers.BertTokenizer(str(folder / name / "vocab.txt"), model_max_length=1024)
        tokenizer.save_pretrained(folder / name)
    (folder / "article.txt").write_text(" ".join(WORDS[5:] * 20))
    write_official(folder / "glue")
    rows = [f"the {'good' if index % 2 else 'bad'} film,{index % 2}" for index in range(40)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    write_parquet(folder / "wiki.parquet", text=texts(60, sentences=40))
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("\n\n".join(texts(20, seed=1)))
    (folder / "bert-base-uncased").mkdir()
    write_vocabulary(folder / "bert-base-uncased")
    write_lra(folder / "runs" / "lra")


def split(command: str) -> list[str]:
    return shlex.split(command, comments=True)
