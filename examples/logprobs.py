"""Prints the probability of each token of an answer, and of the best two alternatives.

python examples/logprobs.py [URL]
"""

import math
import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        temperature=0,
        max_tokens=32,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    for token in logprobs.content or []:
        top = "  ".join(f"{each.token!r} {math.exp(each.logprob):.3f}" for each in token.top_logprobs)
        print(f"{token.token!r:12} {math.exp(token.logprob):.3f}   of  {top}")


if __name__ == "__main__":
    main(*sys.argv[1:])
