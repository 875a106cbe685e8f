"""`baton run-batch` against a real router: responses of all requests, and again where there is no room."""

import io
import json
from pathlib import Path

import pytest

from baton.cluster.options.clients import EndpointOptions, RunBatchOptions
from baton.cluster.tools.run_batch import run, send

from .conftest import TEXT, Cluster


async def test_a_file_of_requests(cluster: Cluster, tmp_path: Path) -> None:
    body = {"model": "fake", "prompt": "Hello", "max_tokens": 200}
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(5)
    ]
    asked.append({"custom_id": "bad", "url": "/v1/completions", "body": body | {"max_tokens": -1}})
    file, output = tmp_path / "in.jsonl", io.StringIO()
    file.write_text("\n\n".join(map(json.dumps, asked)))
    assert await send(EndpointOptions(url=cluster.url), file, output, 3) == (6, 1)
    found = {line["custom_id"]: line for line in map(json.loads, output.getvalue().splitlines())}
    assert found.keys() == {"bad", *(f"r{n}" for n in range(5))}
    response = found["r3"]["response"]
    assert response["body"]["choices"][0]["text"] == TEXT
    assert found["r3"]["id"] == f"batch_req_{response['request_id']}"
    assert found["bad"]["response"]["status_code"] == 400
    file.write_text('{"custom_id": "x"}')
    with pytest.raises(ValueError, match="line 1: give custom_id"):
        await send(EndpointOptions(url=cluster.url), file, output, 1)


async def test_a_line_without_an_end_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.system.lines.LONGEST_LINE", 1 << 20)
    with pytest.raises(ValueError, match="line 1: is longer than 1048576 bytes"):
        await send(EndpointOptions(url=cluster.url), Path("/dev/zero"), io.StringIO(), 1)


def test_an_output_that_cannot_be_written_or_is_the_input_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}")
    for output, reason in (
        (tmp_path / "no" / "out.jsonl", "No such file or directory; name"),
        (file, "it is the input"),
    ):
        with pytest.raises(ValueError, match=rf"-o {output}: {reason}"):
            run(EndpointOptions(), RunBatchOptions(input_file=file, output_file=output))
    assert file.read_text() == "{}"
