"""Workers with a model that has state layers: they compute prompts, but do not hand requests over."""

import json
from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from cluster import check_model, serve
from cluster.cli import app
from rpc import worker_pb2 as pb
from tests.cluster.test_before_start import in_this_process
from tests.cluster_helpers import assert_whole, attached, request, sampling, side_by_side, tiny_model


def hybrid_model(directory: Path) -> Path:
    config = json.loads((tiny_model(directory) / "config.json").read_text())
    config |= {"architectures": ["BambaForCausalLM"], "mamba_n_heads": 8, "mamba_d_state": 16}
    config |= {"num_hidden_layers": 3, "attn_layer_indices": [1]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def test_a_decode_worker_computes_prompts_and_no_worker_hands_them_over(tmp_path: Path) -> None:
    engine = {"load_format": "dummy", "num_blocks": 64, "enable_prefix_caching": True}
    settings = {"model": hybrid_model(tmp_path / "hybrid"), "engine": engine}
    with side_by_side(
        tmp_path, {role: {"role": role, **settings} for role in ("decode", "prefill")}
    ) as workers:
        decode = workers["decode"].wait_ready()
        async with attached(decode) as stream:
            asked = request(range(40), sampling(max_tokens=5, ignore_eos=True))
            await stream.send(decode=pb.SubmitDecode(decode_id=asked.request_id, request=asked))
            await stream.reserved(asked.request_id)
            assert len(await stream.tokens(asked.request_id)) == 5
            with pytest.raises(grpc.aio.AioRpcError, match="has layers with states") as refused:
                await stream.stub.SetPool(pb.SetPoolRequest(pool=pb.POOL_PREFILL))
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await assert_whole(decode)
        workers["prefill"].wait_told()
        assert "hand over KV alone; use --prefill 0" in workers["prefill"].told[-1]["error"]


def test_prefill_workers_are_refused_before_the_start_and_in_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    monkeypatch.setattr(check_model.subprocess, "run", in_this_process)
    model = str(hybrid_model(tmp_path / "hybrid"))
    flags = ["--port", "0", "--device", "cpu", "--load-format", "dummy"]
    for command in (["serve", *flags], ["plan"]):
        result = CliRunner().invoke(app, [*command, "--model", model])
        assert result.exit_code != 0
        said = " ".join(result.output.replace("│", " ").split())
        assert "BambaForCausalLM has layers with states" in said
        assert "serve it with --prefill 0" in said
