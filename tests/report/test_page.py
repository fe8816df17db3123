"""The page's own rendering: data in, escaped HTML and Markdown out."""

from nystromformer.report.page import html_page, markdown_page
from nystromformer.report.sections import Part, Section
from nystromformer.report.table import Code, Table


def page_of(table: Table) -> str:
    return html_page("<b>", ("a < b, ", Code("<c>")), [Section("x", (Part((table,), title="<h>"),))])


def test_text_is_escaped():
    page = page_of(Table(["<i>"], [["&"]], title="<t>", note=("<n>", Code("<k>"))))
    for text in ("<title>&lt;b&gt;</title>", "&lt;i&gt;", "&amp;", "&lt;t&gt;", "&lt;n&gt;", "<code>&lt;k&gt;</code>"):
        assert text in page
    assert not any(f"<{tag}>" in page for tag in ("i", "t", "n", "k", "h", "c"))


def test_tables_know_their_rows_and_columns():
    page = page_of(Table(["a", "n", "w"], [["x", 1, "y"], ["nystrom-64", 2, "z"]], highlight={1}, words=("w",)))
    assert page.count('<tr class="ours">') == 1
    ours = page[page.index('<tr class="ours">') :]
    assert ours.startswith('<tr class="ours"><th scope="row">nystrom-64</th><td>2</td><td class="words">z</td></tr>')


def test_a_row_is_marked_by_the_table_and_not_by_its_text():
    assert 'class="ours"' not in page_of(Table(["a"], [["nystrom-64"]]))


def test_a_gap_says_the_command_that_fills_it():
    gap = Section("x", remedy="nystromformer bench")
    assert '<div class="gap">Not among the given runs. <code>nystromformer bench</code> makes it.</div>' in html_page(
        "t", "i", [gap]
    )
    assert "Not among the given runs. `nystromformer bench` makes it." in markdown_page("t", "i", [gap])
