"""Asks for JSON that a schema describes, and parses it. Workers enforce the schema token by token.

python examples/structured_output.py [URL]
"""

import json
import sys

from openai import OpenAI

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "country", "inhabitants"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe Paris in JSON."}],
        temperature=0,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main(*sys.argv[1:])
