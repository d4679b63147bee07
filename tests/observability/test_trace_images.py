"""Images in the trace: by digest, each once, and on the report's page."""

import base64
import io
import json

import numpy as np
from PIL import Image

from jaxrl_llm.observability.trace import TraceWriter
from jaxrl_llm.report import samples
from jaxrl_llm.report.samples import Trace
from jaxrl_llm.types import Completion, Prompt


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def written(trace: TraceWriter, step: int, images: list[tuple]) -> None:
    prompts = [Prompt(token_ids=(1,), text="a", images=own) for own in images]
    done = Completion(tokens=(2,), text="b", logprobs=(-0.5,), finished=True)
    trace.write(
        "train",
        step,
        policy_version=0,
        prompts=prompts,
        completions=[done] * len(prompts),
        scores=np.zeros(len(prompts)),
    )
    trace.wait()


def test_an_image_is_stored_once_and_shown(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(1))
    same = [{"bytes": png(1)}, str(tmp_path / "a.png"), Image.open(io.BytesIO(png(1)))]
    folder = tmp_path / "trace"
    trace = TraceWriter(folder)
    written(trace, 1, [(same[0], png(2)), (same[1],), (same[2],), ()])
    rows = [json.loads(line) for line in (folder / "train-00000000.jsonl").open()]
    first, second = rows[0]["images"]
    assert [row.get("images") for row in rows[1:]] == [[first], [first], None]
    assert {path.name for path in (folder / "images").iterdir()} == {first, second}
    assert (folder / "images" / first).read_bytes() == png(1)

    page = Trace(folder)
    shown, _ = page.samples()
    assert [sample["images"] for sample in shown][:2] == [[first, second], [first]]
    urls = page.images(shown)
    assert urls[second] == f"data:image/png;base64,{base64.b64encode(png(2)).decode()}"
    (tmp_path / "secret.png").write_bytes(png(3))
    assert page.images([{"images": ["../../secret.png", f"{'0' * 32}.png"]}]) == {}
    monkeypatch.setattr(samples, "MOST_IMAGE_BYTES", len(png(1)))
    assert list(page.images(shown)) == [first]
    trace.close()


def test_images_beyond_the_limit_of_the_trace_are_not_stored(tmp_path):
    trace = TraceWriter(tmp_path, most_bytes=len(png(1)))
    written(trace, 1, [(png(1),), (png(2),)])
    trace.close()
    again = TraceWriter(tmp_path, most_bytes=len(png(1)))  # a resume
    written(again, 2, [(png(3),)])
    again.close()
    assert [path.read_bytes() for path in (tmp_path / "images").iterdir()] == [png(1)]
