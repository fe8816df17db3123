"""Tokenizers for pretraining: given as a file, a folder or a Hub id, or trained on the corpus."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TRAIN = "train"
"""In place of a path: train one."""
NAMES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""How vocabularies call the tokens that pretraining needs."""
ALPHABET = 1000
"""Characters that a trained tokenizer knows at most, as BERT's."""
CAPITAL = re.compile("[A-Z]")  # an uncased vocabulary still has signs that Unicode calls capital
NEEDED = ("mask_token", "cls_token", "sep_token", "pad_token")


def load_tokenizer(given: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a `vocab.txt` (BERT), `.model` (SentencePiece), `tokenizer.json`, or a model's folder or Hub id.

    One without the tokens that pretraining needs is refused with `ValueError`.
    """
    path = Path(given).expanduser()
    readers = {".txt": _from_vocabulary, ".model": _from_sentencepiece, ".json": _from_json}
    if path.is_file() and path.suffix.lower() not in readers:
        raise ValueError(f"--tokenizer {given}: a file must end with {', '.join(readers)}.")
    try:
        tokenizer = readers[path.suffix.lower()](path) if path.is_file() else AutoTokenizer.from_pretrained(given)
    except Exception as error:  # `tokenizers` raises plain Exception, the Hub and protobuf their own
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"--tokenizer {given}: can't be read ({reason}); give vocab.txt, tokenizer.json or a SentencePiece .model, "
            f"the folder or Hub id of a model, or {TRAIN!r}."
        ) from error
    check_tokenizer(tokenizer, given)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, given: str) -> None:
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise ValueError(f"--tokenizer {given}: has no tokenizer.json; give one that Transformers calls fast.")
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # Transformers makes an empty one where there are no files
        raise ValueError(f"--tokenizer {given}: has no vocabulary; give a folder with tokenizer.json, or {TRAIN!r}.")
    missing = [name for name in NEEDED if getattr(tokenizer, name) is None]
    if missing:
        named = " and no ".join(name.replace("_", " ") for name in missing)
        raise ValueError(
            f"--tokenizer {given}: has no {named}; masked language modeling on sentence pairs needs mask, cls, sep "
            f"and pad tokens: give the tokenizer of a BERT-like model, or {TRAIN!r}."
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """An uncased WordPiece tokenizer like BERT's, trained on some texts, which are gone through twice.

    >>> tokenizer = train_tokenizer(["The quick fox, the lazy dog."] * 3, vocab_size=60)
    >>> tokenizer.tokenize("the lazy fox")
    ['the', 'lazy', 'fox']
    """
    special = [names[0] for names in NAMES.values()]
    if vocab_size < len(special) + 1:
        raise ValueError(f"--vocab-size {vocab_size}: must be at least {len(special) + 1}; the paper uses 30000.")
    tokenizer = _wordpiece(_word_model([]), uncased=True)
    alphabet, within = _alphabet(texts, tokenizer.normalizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # The trainer numbers letters within words in the order of a hash table, another one each time, and its choice
        # among equally frequent pieces depends on their numbers. Named here they have the same number each time.
        special_tokens=special + within,
        initial_alphabet=alphabet,
        limit_alphabet=ALPHABET,
        show_progress=False,
    )
    with _threads():
        tokenizer.train_from_iterator(texts, trainer)
    pieces = special + sorted(tokenizer.get_vocab().keys() - set(special))
    return _wrapped(_wordpiece(_word_model(pieces), uncased=True))


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer) -> tuple[list[str], list[str]]:
    """The most frequent characters, and those of them that continue words, marked so."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    counts: Counter[str] = Counter()
    within = set()
    for character, count in raw.items():
        normal = normalizer.normalize_str(character)  # Chinese ones come between spaces: each is a word
        for each in normal.strip():
            counts[each] += count
            if each.isalnum() and normal == normal.strip():
                within.add(each)
    kept = sorted(counts, key=lambda each: (-counts[each], each))[:ALPHABET]
    return sorted(kept), sorted("##" + each for each in within.intersection(kept))


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer from the `tokenizer.json` of one that was loaded or trained here."""
    return _wrapped(Tokenizer.from_file(str(path)))


def _from_vocabulary(path: Path) -> PreTrainedTokenizerFast:
    """WordPiece with the vocabulary of a `vocab.txt`. It is uncased where no entry has a capital letter."""
    tokens = path.read_text(encoding="utf-8").splitlines()
    uncased = not any(CAPITAL.search(token) for token in tokens if not re.fullmatch(r"\[.+\]", token))
    return _wrapped(_wordpiece(_word_model(tokens), uncased))


def _word_model(pieces: list[str]) -> models.WordPiece:
    return models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")


def _wordpiece(model: models.WordPiece, uncased: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=uncased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _from_json(path: Path) -> PreTrainedTokenizerFast:
    if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
        return AutoTokenizer.from_pretrained(path.parent)
    return read_tokenizer(path)


def _from_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """A unigram model of SentencePiece. Text is made lower case, as ALBERT's, where no piece has a capital letter."""
    from sentencepiece import sentencepiece_model_pb2

    proto = vars(sentencepiece_model_pb2)["ModelProto"]()  # made at run time
    proto.ParseFromString(path.read_bytes())
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
        raise ValueError("not a unigram model; convert it to tokenizer.json with Transformers")
    ordinary = [piece.piece for piece in proto.pieces if piece.type == piece.NORMAL]
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not any(CAPITAL.search(piece) for piece in ordinary):
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    tokenizer = Tokenizer(
        models.Unigram([(piece.piece, piece.score) for piece in proto.pieces], proto.trainer_spec.unk_id)
    )
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """For Transformers, with those special tokens that the vocabulary has, and BERT's frame where there is none yet."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = {role: next((name for name in names if name in vocabulary), None) for role, names in NAMES.items()}
    tokens = {role: name for role, name in found.items() if name is not None}
    if tokenizer.post_processor is None and "cls_token" in tokens and "sep_token" in tokens:
        cls, sep = tokens["cls_token"], tokens["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
        )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **tokens)


@contextmanager
def _threads() -> Iterator[None]:
    """Let `tokenizers` use all cores, which the command line forbids so that loaders may fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
