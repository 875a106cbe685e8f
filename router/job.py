"""What one generation computes: token ids and sampling parameters, without text."""

from dataclasses import dataclass

from baton.rpc import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: list[int]
    sampling: pb.SamplingParams
    session_key: int
    """64-bit hash of the session."""
    chunks: list[int]
    """Hashes of the prompt's full 64-token chunks."""
    priority: int = 0
    cache_salt: bytes = b""
    tenant: bytes = b""

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are asked for."""
        return self.sampling.HasField("prompt_logprobs")
