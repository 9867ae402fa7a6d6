"""A data source for an encoder-decoder: numbers in digits are translated to words, "407" -> "four zero seven".

Sources and targets share one vocabulary: the end token, which also starts a target; the ten digits; the words.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from meshtrain.data.dataset import Dataset
from meshtrain.data.sources import DataOptions, DataRequest, Source, fraction_problems, unread
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, UserError, nearest, refuse
from meshtrain.examples.pairs import pack_pairs
from meshtrain.options import option

END_ID = BEGIN_ID = 0
SIDES = ("source_tokens", "tokens")
SPECIAL, DIGITS = "<end>", tuple("0123456789")
UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
HUNDRED, THOUSAND, AND = "hundred", "thousand", "and"
WORDS = {"digits": UNITS, "english": (*UNITS, *TEENS, *TENS, HUNDRED, THOUSAND, AND)}
MOST_HELD_OUT, NUM_PROMPTS = 1000, 4
NUMBERS = {"source": ("numbers",)}


@dataclasses.dataclass(frozen=True)
class NumberOptions(DataOptions):
    """The options of the data source `numbers`."""

    numbers_below: int = option(
        1000, "the data are the numbers from 0 to this number minus 1", minimum=10, maximum=1_000_000, only_for=NUMBERS
    )
    num_held_out: int = option(
        0, "numbers reserved for validation; 0: a tenth, at most 1,000", minimum=0, only_for=NUMBERS
    )
    spelling: str = option(
        "digits", "how a number is written: digits (four zero seven) or english (four hundred and seven)",
        choices=tuple(WORDS), only_for=NUMBERS,
    )  # fmt: skip


def spell(number: int, spelling: str) -> list[str]:
    """Returns the words of a number, in order.

    >>> spell(407, "digits"), spell(407, "english")
    (['four', 'zero', 'seven'], ['four', 'hundred', 'and', 'seven'])
    >>> " ".join(spell(21_013, "english"))
    'twenty one thousand and thirteen'

    Args:
      number: 0 to 999,999.
      spelling: `digits`, a word for each digit, or `english`, in British English.
    """
    if spelling == "digits":
        return [UNITS[int(digit)] for digit in str(number)]
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest)
    words = [*_below_thousand(thousands), THOUSAND]
    if rest:
        words += [*([AND] if rest < 100 else []), *_below_thousand(rest)]
    return words


def _below_thousand(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [UNITS[hundreds], HUNDRED] if hundreds else []
    if hundreds and not rest:
        return words
    words += [AND] if hundreds else []
    if rest < 20:
        return [*words, (*UNITS, *TEENS)[rest]]
    return [*words, TENS[rest // 10 - 2], *([UNITS[rest % 10]] if rest % 10 else [])]


@dataclasses.dataclass(frozen=True)
class NumberPairs:
    """A sequence of pairs for translation: pair i is (ids of the digits, ids of the words) of `numbers[i]`.

    Pairs are computed when they are read.

    Attributes:
      numbers: the numbers, int64 [pairs], 0 to 999,999.
      spelling: `digits` or `english`, see `spell`.
    """

    numbers: np.ndarray
    spelling: str

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        ids, number = ids_of(self.spelling), int(self.numbers[index])
        return [ids[digit] for digit in str(number)], [ids[word] for word in spell(number, self.spelling)]

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each source and of each target, including end tokens, int64 [pairs, 2]."""
        both = [(len(str(number)) + 1, len(spell(number, self.spelling)) + 1) for number in self.numbers.tolist()]
        return np.asarray(both, np.int64)


def ids_of(spelling: str) -> dict[str, int]:
    """Returns the vocabulary of a spelling, `digits` or `english`, as a dict from token to id."""
    return {token: number for number, token in enumerate((SPECIAL, *DIGITS, *WORDS[spelling]))}


def tokenizer(spelling: str) -> Tokenizer:
    """Returns the tokenizer of the data source `numbers`, whose texts are numbers in digits or in words.

    Blanks separate words, and numbers in digits. Each digit and each word is one token: `407` is encoded as three
    tokens, and so is `four zero seven`. Encoding an unknown word raises UserError.

    Args:
      spelling: `digits` or `english`; selects the words of the vocabulary.
    """
    ids = ids_of(spelling)
    tokens = list(ids)

    def encoded(text: str) -> np.ndarray:
        result = []
        for word in text.split():
            parts = list(word) if re.fullmatch("[0-9]+", word) else [word]
            if word == SPECIAL or parts[0] not in ids:
                known = (*DIGITS, *WORDS[spelling])
                raise UserError(
                    Problem(
                        None,
                        got=f"'{word}'",
                        condition="with data.source=numbers",
                        allowed=f"digits 0 to 9, or words from {UNITS[0]} to {known[-1]}",
                        fix=nearest(word, known),
                        nearest=407,
                        depends_on=["data.source"],
                    )
                )
            result += [ids[part] for part in parts]
        return np.asarray(result, np.uint16)

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        return [encoded(text) for text in texts]

    def decode(given: Iterable[int]) -> str:
        words = [tokens[int(one)] for one in given if 0 <= one < len(tokens) and one != END_ID]
        return re.sub(r"(?<=\d) (?=\d)", "", " ".join(words))

    return Tokenizer(f"numbers in {spelling}", len(ids), END_ID, encode_documents, decode)


def num_held_out(options: NumberOptions) -> int:
    """Returns how many numbers are reserved for validation."""
    return options.num_held_out or min(options.numbers_below // 10, MOST_HELD_OUT)


def split_by_hash(options: NumberOptions) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers for training, numbers for validation), int64 arrays of the numbers below `numbers_below`.

    The numbers with the smallest hashes are for validation. Both arrays are sorted by hash, so that adjacent numbers
    are unrelated.
    """
    numbers = np.arange(options.numbers_below, dtype=np.int64)
    by_hash = numbers[np.argsort(_hashes(numbers), kind="stable")]
    return by_hash[num_held_out(options) :], by_hash[: num_held_out(options)]


def _hashes(numbers: np.ndarray) -> np.ndarray:
    """Returns a hash of each number n, uint64: the (n + 1)-th output of SplitMix64 with seed 0 (Steele et al. 2014)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def open_numbers(options: NumberOptions, asked: DataRequest) -> Dataset:
    """Returns the dataset of numbers below `options.numbers_below` and their spellings, packed into examples.

    Args:
      options: options of the source: the range of numbers, the number of validation numbers and the spelling.
      asked: the data request. Its batch entries `source_tokens` and `tokens` are [sequences, length], and determine the
        source length and the target length of an example.

    Raises:
      UserError: the task's batch has no sources and targets; otherwise one line for each of source length, target
        length and vocabulary size that is too small.
    """
    if missing := [name for name in SIDES if name not in asked.batch]:
        raise UserError(
            Problem(
                "data.source",
                got=f"{options.source} (pairs of a source and a target) with a task whose batch has no '{missing[0]}'",
                allowed=f"a task whose batch has {' and '.join(SIDES)}",
                nearest="task=seq2seq",
            )
        )
    source_length, target_length = (asked.batch[name].shape[1] for name in SIDES)
    text, (train, validation) = tokenizer(options.spelling), split_by_hash(options)
    splits = [NumberPairs(numbers, options.spelling) for numbers in (train, validation)]
    lengths = [pairs.lengths() for pairs in splits]
    most_source, most_target = np.concatenate(lengths).max(axis=0)
    problems = [
        Problem(
            key,
            got=got,
            condition=f"for numbers below {options.numbers_below:,} in {options.spelling}",
            allowed=f"at least {least}, {what}",
            nearest=least,
        )
        for key, got, least, what in (
            ("model.source_length", source_length, most_source, "the digits of the longest number and an end token"),
            ("sequence_length", target_length, most_target, "the words of the longest number and an end token"),
            ("model.vocab_size", asked.ids_below, text.vocab_size, "the end token, the digits and the words"),
        )
        if got < least
    ]
    refuse(problems)
    examples = [
        pack_pairs(pairs, source_length=source_length, target_length=target_length, lengths=counted)
        for pairs, counted in zip(splits, lengths, strict=True)
    ]
    pairs, rows = (" + ".join(f"{len(part):,}" for part in parts) for parts in (splits, examples))
    said = f"{options.numbers_below} {len(validation)} {options.spelling} {source_length} {target_length}"
    return Dataset(
        train=examples[0],
        validation=examples[1],
        fingerprint=hashlib.sha256(f"numbers {said}".encode()).hexdigest(),
        summary=f"numbers below {options.numbers_below:,} in {options.spelling}: {pairs} pairs in {rows} sequences",
        text=text,
        prompts=tuple(str(number) for number in validation[:NUM_PROMPTS]),
    )


def check(options: NumberOptions, reads_data: bool) -> list[Problem]:
    """Returns an error line for each invalid option of the source `numbers`.

    `reads_data` has no effect, because the source generates its data and reads no file.
    """
    problems = unread(options, ()) + fraction_problems(options)
    if options.num_held_out >= options.numbers_below:
        problems.append(
            Problem(
                "data.num_held_out",
                got=options.num_held_out,
                allowed=f"below data.numbers_below = {options.numbers_below}",
                nearest=options.numbers_below // 10,
                depends_on=["data.numbers_below"],
            )
        )
    return problems


numbers = Source(
    open=open_numbers,
    check=check,
    tokenizer=lambda options, vocab_size: tokenizer(options.spelling),
    vocab_size=lambda options: tokenizer(options.spelling).vocab_size,
    options=NumberOptions,
)
