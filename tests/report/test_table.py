"""A table says the same as Markdown, in a terminal and as data, whatever its cells hold."""

import pytest
from markdown_it import MarkdownIt

from nystromformer.report.table import Code, Table, markdown_text, print_tables, tables_markdown

HOSTILE = [
    "<script>alert(1)</script>", "a | b", "![x](javascript:alert(1))", "[x](javascript:alert(1))",
    "<img src=x onerror=y>", "[x]: javascript:alert(1)", "[x][y]", "`code` **bold**",
    "back\\slash\\|", "two\nlines", "&lt;b&gt; &amp;",
    "<!-- comment", "</td></table>", "\u202eturned", "<https://example.org>",
]  # fmt: skip


def cells_of(markdown: str) -> list[str]:
    """What a reader of the rendered Markdown sees in the body's cells."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    inline = [token for token in tokens if token.type == "inline"]
    for token in inline:
        assert {child.type for child in token.children} <= {
            "text",
            "text_special",
            "code_inline",
            "strong_open",
            "strong_close",
        }
    return ["".join(child.content for child in token.children) for token in inline]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_is_what_it_was_and_nothing_else(text):
    shown = cells_of(Table(["name", "n"], [[text, 1]]).markdown())
    assert shown == ["name", "n", " ".join(text.replace("\u202e", " ").split()), "1"]


@pytest.mark.parametrize("text", HOSTILE)
def test_titles_and_notes_are_words(text):
    table = Table(["n"], [[1]], title=("Of ", Code(text)), note=text.lstrip("[<`!"))
    shown = cells_of(tables_markdown([table]))
    assert " ".join(shown[0].split()) == " ".join(("Of " + text.replace("\u202e", " ")).split())


def test_code_that_holds_backticks_is_code():
    assert cells_of(markdown_text(("run ", Code("a `b`")))) == ["run a `b`"]


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="table of 2 columns"):
        Table(["a", "b"], [[1, 2], [3]])


def test_a_terminal_gets_the_cells_as_they_are(capsys):
    print_tables([Table(["name", "value"], [["[red]x[/red]", "50.0 ms [12.6×]"]], {0}, title="T", note="N")])
    said = capsys.readouterr().out
    assert "[red]x[/red]" in said
    assert "50.0 ms [12.6×]" in said
    print_tables([])
    assert capsys.readouterr().out == "No finished run.\n"


def test_no_table_is_said():
    assert tables_markdown([]) == "No finished run.\n"
