import pytest

from nystromformer.data.corpus.text import split_sentences


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("He said: “Go.” She went (at last).  Then", ["He said: “Go.”", "She went (at last).", "Then"]),
        ("Mr. J. R. Smith of the U.S. Army, e.g. here.", ["Mr. J. R. Smith of the U.S. Army, e.g. here."]),
        ("It cost 3.50 dollars. 1998 was later.", ["It cost 3.50 dollars.", "1998 was later."]),
        ("Wait... what? No... Yes.", ["Wait... what?", "No...", "Yes."]),
        ("Heading\n\nA paragraph.\nNext", ["Heading", "A paragraph.", "Next"]),
        ("a line that\nwraps here. And\nends.", ["a line that\nwraps here.", "And\nends."]),
        ("That was I. He left.", ["That was I.", "He left."]),
        ("これは文です。次の文！", ["これは文です。", "次の文！"]),
        (" \n ", []),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_no_character_but_white_space_is_lost():
    text = "A. b! C?\nd… E.F. (G.) H\n\n«I.» J"
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
