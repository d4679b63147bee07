"""Fetch packaged data and write them as JSON lines.

python scripts/prepare_data.py movie_preferences --output=movie_preferences

movie_preferences: people's preferences between sentences of movie reviews, as pairs, labels and
ratings, with a small tokenizer beside them (2.5 MB; README.md in the output says whose they are).
"""

import argparse
import sys

from jaxrl_llm.data.packaged_data import prepare_movie_preferences


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=["movie_preferences"])
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to write")
    parser.add_argument("--archive", metavar="FILE", help="a source archive on disk")
    arguments = parser.parse_args()
    try:
        directory = prepare_movie_preferences(arguments.output, archive=arguments.archive)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
