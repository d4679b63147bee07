"""Run a command in a terminal, and draw what it showed as an animated SVG. Needs pip install pyte.

python scripts/terminal_picture.py --output=docs/figures/terminal.svg -- jaxrl train --config=ppo

The picture has some frames of the whole run, evenly spread, and the last one for longer. With
--drop_last it ends while the command runs.
"""

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyte  # pyright: ignore[reportMissingImports]

COLUMNS, ROWS = 96, 30
FRAMES, FRAME_S, LAST_S = 14, 0.8, 4.0
WIDE, HIGH, EDGE = 8.0, 17.0, 14.0  # pixels of a character, and around the text
BACK, FRONT = "#14171b", "#e4e8ec"
COLOURS = {
    "black": "#343b43",
    "red": "#ff8a7a",
    "green": "#7fd49b",
    "brown": "#e6c07b",
    "blue": "#6cb2ff",
    "magenta": "#d9a0e8",
    "cyan": "#7fd6d6",
    "white": "#ffffff",
}

Line = list[tuple[int, str, str, bool]]  # (column, text, colour, bold) of each run of characters
Frame = list[Line]


def recorded(command: Sequence[str]) -> Iterator[tuple[float, bytes]]:
    """(seconds, output) as the command writes it to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    while True:
        if not select.select([ours], [], [], 0.5)[0]:
            if process.poll() is not None:
                return
            continue
        try:
            output = os.read(ours, 65536)
        except OSError:  # the command has ended
            return
        if not output:
            return
        yield time.monotonic() - started, output


def frames(recording: Sequence[tuple[float, bytes]]) -> list[Frame]:
    """The screen at evenly spread times, without repeats; the end is the last one."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    end = recording[-1][0]
    times = [end * (i + 1) / FRAMES for i in range(FRAMES - 1)]
    found: list[Frame] = []
    for seconds, output in recording:
        while times and seconds > times[0]:
            times.pop(0)
            found.append(shown(screen))
        stream.feed(output)
    found.append(shown(screen))
    return [frame for frame, _ in groupby(frame for frame in found if any(frame))]


def shown(screen: Any) -> Frame:
    """The runs of equal style in each line of the screen."""
    lines: Frame = []
    for row in range(ROWS):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        runs, column = [], 0
        for (colour, bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            text = "".join(cell.data for cell in group)
            if text.strip():
                runs.append((column, text, colour, bold))
            column += len(text)
        lines.append(runs)
    return lines


def picture(command: str, made: Sequence[Frame]) -> str:
    """The SVG: each frame is a group that is visible in its turn."""
    rows = max(i + 1 for frame in made for i, line in enumerate(frame) if line) + 2
    width, height = COLUMNS * WIDE + 2 * EDGE, rows * HIGH + 2 * EDGE
    total = FRAME_S * (len(made) - 1) + LAST_S
    styles, groups = ["text {white-space: pre}"], []
    for i, frame in enumerate(made):
        begin = 100 * FRAME_S * i / total
        until = 100.0 if i == len(made) - 1 else 100 * FRAME_S * (i + 1) / total
        first = "" if i == 0 else f"0% {{visibility: hidden}} {begin:.2f}% {{visibility: visible}} "
        last = "" if until == 100 else f"{until:.2f}%, 100% {{visibility: hidden}}"
        begins = "0% {visibility: visible} " if i == 0 else first
        styles.append(f"@keyframes f{i} {{{begins}{last}}}")
        styles.append(
            f"#f{i} {{visibility: hidden; animation: f{i} {total:.1f}s step-end infinite}}"
        )
        groups.append(f'<g id="f{i}">\n' + "\n".join(texts(frame)) + "\n</g>")
    styles.append(
        f"@media (prefers-reduced-motion) {{g {{animation: none !important}} "
        f"#f{len(made) - 1} {{visibility: visible}}}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" font-family="ui-monospace, Menlo, Consolas, monospace" '
            f'font-size="13" fill="{FRONT}">',
            f"<title>{escape(command)}</title>",
            "<style>" + "\n".join(styles) + "</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>',
            run(0, 0, f"$ {command}", COLOURS["green"], True),
            *groups,
            "</svg>",
            "",
        ]
    )


def texts(frame: Frame) -> Iterator[str]:
    """The text elements of a frame, below the command."""
    for row, line in enumerate(frame):
        for column, text, colour, bold in line:
            yield run(row + 2, column, text, COLOURS.get(colour, hexadecimal(colour)), bold)


def hexadecimal(colour: str) -> str:
    """A colour that pyte gives by its six digits; the usual one for its default."""
    return f"#{colour}" if len(colour) == 6 and colour != "default" else FRONT


def run(row: int, column: int, text: str, colour: str, bold: bool) -> str:
    """A text element whose characters stand in their columns with any font."""
    stripped = text.strip()
    column += len(text) - len(text.lstrip())
    place = f'x="{EDGE + column * WIDE:g}" y="{EDGE + (row + 0.75) * HIGH:.2f}"'
    style = ' font-weight="bold"' if bold else ""
    length = f'textLength="{len(stripped) * WIDE:g}" lengthAdjust="spacingAndGlyphs"'
    return f'<text {place} {length} fill="{colour}"{style}>{escape(stripped)}</text>'


def main(argv: Sequence[str]) -> int:
    """Run the command and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--drop_last", action="store_true", help="leave out the last frame")
    parser.add_argument("command", nargs="+")
    flags = parser.parse_args(argv)
    recording = list(recorded(flags.command))
    name = Path(flags.command[0]).name
    made = frames(recording)
    kept = made[:-1] if flags.drop_last else made
    flags.output.write_text(picture(" ".join([name, *flags.command[1:]]), kept))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
