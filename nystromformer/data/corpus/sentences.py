"""Sentences of a text, by rules that are fast and good enough to know where a pair of segments may be divided."""

import re

CANDIDATE = re.compile(
    r"""[.!?…]+["'”’»)\]]*\s+   # the end of a sentence, perhaps
      | [。！？]+[」』”’）]*\s*    # the end of a sentence
      | \s*\n\s*               # the end of a line
    """,
    re.VERBOSE,
)
LAST_WORD = re.compile(r"([^\W\d_][\w.]*)$")
ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """
        mr mrs ms dr prof st mt rev hon gov sen rep gen col maj capt cmdr lt sgt jr sr messrs mme
        mlle vs cf ca approx fig figs no nos vol vols pp ed eds e.g i.e al inc ltd co corp dept univ
        assn bros jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k
        """,
    )
)
"""Words whose point ends no sentence, or only by chance."""


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the white space between them.

    A line's end is the end of a sentence, unless the text merely wraps there.

    >>> split_sentences('Dr. Smith came at 3.30 p.m. today. "Really?" She left.\\nHistory\\nIt was a long, long\\nday.')
    ['Dr. Smith came at 3.30 p.m. today.', '"Really?"', 'She left.', 'History', 'It was a long, long\\nday.']
    """
    sentences, start = [], 0
    for match in CANDIDATE.finditer(text):
        if _ends_sentence(text, start, match):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    mark, following = match[0][0], text[match.end() : match.end() + 1]
    continues = following.islower()
    if mark in "。！？":
        return True
    if mark.isspace():
        return not continues  # a wrapped line goes on in lower case
    if "\n" in match[0]:
        return True
    if continues:
        return False
    if mark != "." or match[0].startswith(".."):
        return True
    word = LAST_WORD.search(text, max(start, match.start() - 20), match.start())
    if word is None:
        return True
    is_initial = len(word[1]) == 1 and word[1].isupper() and word[1] != "I"
    return not is_initial and word[1].lower() not in ABBREVIATIONS
