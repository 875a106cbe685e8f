"""Prints a chat answer as it is generated, with OpenAI's client.

python examples/chat_stream.py [URL]
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")  # the API key, where the router asks for one
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        temperature=0,
        max_tokens=32,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
