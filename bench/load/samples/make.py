"""Writes the samples: `python -m bench.load.samples.make`. Same seed, same files.

The trace has the traits of Mooncake's conversation trace that matter to a server: a common system prompt,
sessions whose prompts grow by what was said before, Poisson arrivals, long-tailed lengths.
"""

from __future__ import annotations

import json
import random
from typing import Any

from bench.load.datasets import MOONCAKE_BLOCK, SAMPLE_CONVERSATIONS, SAMPLE_TRACE

_SEED = 20
_REQUESTS, _SECONDS = 60, 60.0
_CONVERSATIONS = 48
_LONGEST = 8  # blocks

_TOPICS = (
    "the tides", "sourdough bread", "binary search", "the moons of Jupiter", "bicycle gears",
    "compound interest", "photosynthesis", "the French Revolution", "garbage collection in Python",
    "how vaccines work", "chess openings", "the water cycle", "public-key cryptography",
    "growing tomatoes", "jazz harmony", "plate tectonics",
)  # fmt: skip
_QUESTIONS = (
    "Explain {} to me as if I were twelve.",
    "What are the most common misunderstandings about {}?",
    "Write a short summary of {} with three bullet points.",
    "I have to give a talk about {} tomorrow. Which outline would you suggest, and why?",
    "Give me one surprising fact about {}.",
)
_FOLLOW_UPS = (
    "Can you make that shorter?",
    "Why is that so?",
    "Please give an example.",
    "And what happens if that goes wrong?",
    "Thanks. Which book should I read next?",
)
_SENTENCES = (
    "The main idea of {} is simpler than it looks.",
    "Start with what you can see, and ask what would have to be true for it to happen.",
    "Most explanations of {} skip the step that matters.",
    "Think of it as a balance: when one side grows, the other has to give way.",
    "A good test is to change one thing at a time and to watch what follows.",
    "Historically, people understood {} long before they could explain it.",
    "In practice you will meet exceptions, but the rule holds well enough to be useful.",
    "If you remember only one thing about {}, remember how its parts depend on each other.",
)


def conversations(rng: random.Random) -> list[dict[str, Any]]:
    """ShareGPT's shape: turns of `human` and `gpt`."""
    found = []
    for number in range(_CONVERSATIONS):
        topic = rng.choice(_TOPICS)
        turns = []
        for turn in range(rng.randint(1, 4)):
            question = rng.choice(_FOLLOW_UPS) if turn else rng.choice(_QUESTIONS).format(topic)
            count = max(1, min(14, round(rng.lognormvariate(1.3, 0.6))))
            reply = " ".join(rng.choice(_SENTENCES).format(topic) for _ in range(count))
            turns += [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]
        found.append({"id": f"sample-{number}", "conversations": turns})
    return found


def trace(rng: random.Random) -> list[dict[str, Any]]:
    """Mooncake's shape. Block 0 is the system prompt of all."""
    next_id = 1
    sessions: list[list[int]] = []
    lines: list[dict[str, Any]] = []
    now = 0.0
    for _ in range(_REQUESTS):
        if sessions and rng.random() < 0.5:
            blocks = rng.choice(sessions)
        else:
            blocks = [0]
            sessions.append(blocks)
        grown = max(1, min(3, round(rng.lognormvariate(0.2, 0.6))))
        blocks += range(next_id, next_id + grown)
        next_id += grown
        if len(blocks) >= _LONGEST:
            sessions.remove(blocks)
        lines.append(
            {
                "timestamp": round(now * 1e3),
                "input_length": MOONCAKE_BLOCK * (len(blocks) - 1) + rng.randint(1, MOONCAKE_BLOCK),
                "output_length": max(4, min(400, round(rng.lognormvariate(3.6, 0.8)))),
                "hash_ids": list(blocks),
            }
        )
        now += rng.expovariate(_REQUESTS / _SECONDS)
    return lines


def main() -> None:
    rng = random.Random(_SEED)
    SAMPLE_CONVERSATIONS.write_text(json.dumps(conversations(rng), indent=1) + "\n")
    SAMPLE_TRACE.write_text("".join(json.dumps(line) + "\n" for line in trace(rng)))


if __name__ == "__main__":
    main()
