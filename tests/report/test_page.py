"""The page's own Markdown and escaping."""

from nystromformer.report.page import Part, Section, html_page, markdown_html


def test_text_is_escaped():
    page = html_page("<b>", "a < b", [Section("x", (Part("| <i> |\n|---|\n| & |"),))])
    assert "<title>&lt;b&gt;</title>" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def test_markdown_tables_become_tables():
    assert markdown_html("### Head\n\nA `b` c\n\n| a | n |\n|---|---|\n| nystrom-64 | 1 |") == (
        "<h3>Head</h3>\n<p>A <code>b</code> c</p>\n"
        '<div class="scroll"><table><thead><tr><th class="words">a</th><th>n</th></tr></thead>'
        '<tbody><tr class="ours"><td class="words">nystrom-64</td><td>1</td></tr></tbody></table></div>'
    )


def test_another_packages_row_is_not_marked_as_ours():
    assert 'class="ours"' not in markdown_html("| a |\n|---|\n| nystrom-attention |")
