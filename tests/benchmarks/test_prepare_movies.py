"""scripts/prepare_movies.py, with an archive written here."""

import io
import json
import tarfile

import prepare_movies

from jaxrl_llm.tokenizer import load_tokenizer


def archive(path, ratings):
    """A source archive as vaderSentiment's: two tables in a tar inside a tar."""
    truth = "".join(f"{key}\t{sum(r) / len(r)}\t{key} film \u2019s\n" for key, r in ratings.items())
    raw = "".join(f"{key}\t0\t0\t{list(r)}\n" for key, r in ratings.items())
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        for name, content in (("GroundTruth", truth), ("anonDataRatings", raw)):
            _add(tar, f"{prepare_movies.FOLDER}_{name}.txt", content.encode())
    with tarfile.open(path, mode="w:gz") as tar:
        _add(tar, prepare_movies.INNER, inner.getvalue())
    return path


def _add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def test_movie_preferences_follow_the_votes_and_share_no_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_movies, "SPLITS", {"test": 4, "valid": 4})
    votes = {f"s{i}": (i % 9 - 4, i % 9 - 4, i % 5 - 2) for i in range(24)}
    output = prepare_movies.prepare(tmp_path / "out", archive=archive(tmp_path / "a.tar.gz", votes))
    seen = {}
    for split, size in (("train", 16), ("valid", 4), ("test", 4)):
        rows = [json.loads(line) for line in (output / f"{split}.jsonl").open()]
        assert len(rows) == 2 * size
        for row in rows:
            first, second = (votes[row[x].split()[0]] for x in ("chosen", "rejected"))
            wins = sum((a > b) + 0.5 * (a == b) for a in first for b in second) / 9
            assert row["p_human"] == round(wins, 3) >= 0.6
            assert row["chosen"].endswith("film 's")
        seen[split] = {row[x] for row in rows for x in ("chosen", "rejected")}
        labelled = [json.loads(line) for line in (output / f"{split}_labels.jsonl").open()]
        assert all(
            row["label"] == (sum(votes[row["completion"].split()[0]]) > 0) for row in labelled
        )
    assert not seen["train"] & seen["test"] and not seen["valid"] & seen["test"]
    tokenizer = load_tokenizer(output / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("s3 film 's")) == "s3 film 's"
