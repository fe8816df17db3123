"""Passages of guides: prose alone, in paragraphs, none too short to show what an approximation does."""

from nystromformer.demo.guides import FEWEST, guides_folder, passages_of, read_passages

GUIDE = """# Title

First words with a [link](other.md).

| a | table |
|---|---|

```python
code = 1
```

![a picture](x.png)

## Second

`Second` words.
"""


def count(text: str) -> int:
    return len(text.split())


def test_prose_alone_is_kept(tmp_path):
    (tmp_path / "guide.md").write_text(GUIDE)
    (passage,) = read_passages(tmp_path, lambda text: 25 * count(text))
    assert passage.title == "guide › Title"
    assert passage.text == "Title. First words with a link.\nSecond. Second words."
    assert read_passages(tmp_path, count) == [], "too short for an approximation"


def test_paragraphs_are_packed_until_they_are_long_enough():
    paragraph = " ".join(["word"] * 90)
    prose = "# One\n\n" + "\n\n".join([paragraph] * 4) + "\n\n# Two\n\n" + "\n\n".join([paragraph] * 4)
    found = list(passages_of("guide", prose, count))
    assert [passage.title for passage in found] == ["guide › One", "guide › Two"]
    assert all(count(passage.text) >= FEWEST for passage in found)


def test_a_short_end_joins_the_passage_before():
    paragraph = " ".join(["word"] * 150)
    prose = "\n\n".join(["# One", paragraph, paragraph, "# Two", "few words"])
    (passage,) = passages_of("guide", prose, count)
    assert passage.text.endswith("Two. few words")


def test_the_guides_of_this_project_are_found():
    passages = read_passages(guides_folder(), count)
    assert len(passages) > 20
    assert {"reliability", "drop-in", "scaling"} <= {passage.title.split(" › ")[0] for passage in passages}
