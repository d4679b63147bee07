"""Memory and waiting of prompts that are streamed from a file larger than memory.

    python scripts/benchmarks/streaming.py --format=arrow --gb=10 --folder=FOLDER

Writes a file of rows of 1 KB, unless it is there. It draws shuffled batches of it while the main
thread does nothing for `--step_s` seconds a step. It prints a JSON line. Delete the folder then.
Memory is that of the process: `anonymous_gb` is its own, `mapped_gb` are pages of the file that the
system may drop at any time.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.data.dataset import RowRules, Sources, load_prompts
from jaxrl_llm.data.loader import PromptLoader
from jaxrl_llm.tokenizer import CharTokenizer

ROW_BYTES = 1000
TEXTS = 997  # texts that rows share, so that the file is written fast


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--format", choices=("arrow", "jsonl", "parquet"), default="arrow")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--step_s", type=float, default=0.5)
    parser.add_argument("--group_rows", type=int, default=1000, help="rows of a parquet group")
    parser.add_argument("--whole", action="store_true", help="read all rows first, as by default")
    flags = parser.parse_args()
    file = flags.folder / f"rows_{flags.gb:g}_{flags.group_rows}.{flags.format}"
    if not file.exists():
        flags.folder.mkdir(parents=True, exist_ok=True)
        write(file, round(flags.gb * 1e9 / ROW_BYTES), flags.group_rows)
    print(json.dumps(measure(file, flags)))


def write(file: Path, rows: int, group_rows: int) -> None:
    """A file of prompts."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema({"prompt": pa.string(), "ground_truth": pa.string()})
    if file.suffix == ".jsonl":
        with open(file, "w") as out:
            for batch in _batches(rows, group_rows):
                out.writelines(json.dumps(row) + "\n" for row in batch)
        return
    if file.suffix == ".parquet":
        with parquet.ParquetWriter(file, schema) as out:
            for batch in _batches(rows, group_rows):
                out.write_table(pa.Table.from_pylist(batch, schema))
        return
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as out:
        for batch in _batches(rows, group_rows):
            out.write_batch(pa.RecordBatch.from_pylist(batch, schema))


def _batches(rows: int, group_rows: int) -> Iterator[list[dict[str, str]]]:
    draw = random.Random(0)
    texts = ["".join(draw.choices("0123456789+-* ", k=ROW_BYTES - 60)) for _ in range(TEXTS)]
    for first in range(0, rows, group_rows):
        yield [
            {"prompt": f"{i:012d} {texts[i % TEXTS]}=", "ground_truth": str(i)}
            for i in range(first, min(first + group_rows, rows))
        ]


def measure(file: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the first batch, waiting of each further step, and memory."""
    begin = time.monotonic()
    rules = RowRules(max_length=2 * ROW_BYTES, streaming=not flags.whole)
    prompts = load_prompts(Sources(files=(str(file),)), CharTokenizer(), rules).items
    loader = PromptLoader(prompts, batch_size=flags.batch_size, seed=0)
    next(loader)
    started, waits = time.monotonic() - begin, []
    before = memory()
    for _ in range(flags.steps):
        time.sleep(flags.step_s)
        asked = time.monotonic()
        next(loader)
        waits.append(time.monotonic() - asked)
    loader.close()
    after = memory()
    return {
        "file": file.name,
        "file_gb": round(file.stat().st_size / 1e9, 2),
        "rows": len(prompts),
        "streaming": not flags.whole,
        "first_batch_s": round(started, 2),
        "mean_wait_ms": round(1e3 * sum(waits) / len(waits), 2),
        "longest_wait_ms": round(1e3 * max(waits), 2),
        "anonymous_gb": [before["RssAnon"], after["RssAnon"]],
        "mapped_gb": [before["RssFile"], after["RssFile"]],
    }


def memory() -> dict[str, float]:
    """GB of this process, by kind; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: round(int(fields[name].split()[0]) / 1e6, 3) for name in ("RssAnon", "RssFile")}


if __name__ == "__main__":
    main()
