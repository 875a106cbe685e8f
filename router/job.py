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

    def request(
        self,
        request_id: bytes,
        name: str,
        output_ids: list[int],
        *,
        seconds: float,
        within: float,
        waited: float,
        retried: bool,
        alone: bool,
        last: bool,
    ) -> pb.Request:
        """Builds the message to a worker. `output_ids` were emitted before, `seconds` are left for the rest.

        `within`: seconds in which the prompt should be computed. 0: it is in no hurry.
        `waited`: seconds that its client has waited for the first token.
        `alone`: the worker computes the request in steps of its own.
        `last`: the worker generates no more than one token.
        """
        request = pb.Request(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            output_ids=output_ids,
            sampling=self.sampling,
            timeout_ms=max(1, int(1000 * seconds)),
            priority=self.priority,
            alone=alone,
            retried=retried,
            first_token_within=within,
            waited=waited,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            name=name,
        )
        sampling = request.sampling
        if output_ids:  # they came after all log probabilities of the prompt
            sampling.ClearField("prompt_logprobs")
        if last:
            sampling.max_tokens = len(output_ids) + 1
            sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        return request
