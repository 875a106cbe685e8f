"""Prints a completion as it is generated, with Python's standard library alone.

python examples/http_stream.py [URL]
"""

import json
import sys
import urllib.request


def main(url: str = "http://127.0.0.1:8000") -> None:
    body = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 8, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:  # server-sent events: "data: {…}", empty lines, and at last "data: [DONE]"
            data = line.decode().removeprefix("data: ").strip()
            if data.startswith("{"):
                print(json.loads(data)["choices"][0]["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
