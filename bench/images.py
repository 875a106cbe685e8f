"""Prompts with images, on two sides in turns: first tokens, the highest rate, and gaps of text beside them.

Each turn starts one side, measures all, and ends the side, as in `bench.disagg`, whose `--side` it has. Both
sides get the same images, and no side sees an image twice but where it is said.

    one      one image and 200 tokens of text, alone: the time to the first token
    repeat   the same image again, which needs neither be decoded nor encoded
    at_once  some images at the same time, at most four in a request: until the last first token
    rate     requests of four images: the highest rate with p99 of first tokens within --ttft
    gaps     p99 of the gaps of text streams beside image requests, divided by those without

The rate doubles until a run misses, and is halved in between `--halvings` times. Image requests beside text
come at half of that rate. Without --side, Baton with an encoder of its own is compared with one whose workers
encode. On a CPU the model is tiny and the images are small.

On two H200 beside two vLLM engines, with dummy weights of Qwen3-VL-8B:

    python -m baton.bench.images --device cuda --json images.json
        --side 'baton 1 baton serve {model} --load-format dummy --max-model-len 33000 --port {port}'
        --side 'vllm 2 vllm serve {model} --load-format dummy --max-model-len 33000 --port {port}
                --max-num-seqs 256 --limit-mm-per-prompt.image 8'

With three GPUs, leave out --side: encoders of their own are compared with workers that encode.
"""

import asyncio
import base64
import io
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from baton.bench import contract
from baton.bench.contract import Report, Row
from baton.bench.disagg.sides import SERVE, Side, started
from baton.bench.harness.streams import new_session
from baton.bench.load.target.tokenization import WORDS
from baton.bench.shapes import SHAPES, write_shape
from baton.machine.quantiles import percentile

SHAPE = {"cpu": "small-qwen3-vl", "cuda": "qwen3-vl-8b"}
PIXELS = {"cpu": (320, 240), "cuda": (1920, 1080)}
TEXT_TOKENS = 200
IMAGES = 4
"""Of a request of the highest rate."""
MOST_IMAGES = 4
"""Of a request, where many come at once."""
ANSWER = 8
"""Tokens of an answer about images."""
MOST_RATE = 1000.0
"""Requests/s. No client sends more."""
GOALS = {"one": 0.9, "rate": 1.0}
"""Of the first side ÷ the second, if they are given."""
FLAGS = {
    "cpu": "--model {model} --load-format dummy --device cpu --dtype float32 --num-threads 1",
    "cuda": "--model {model} --load-format dummy --max-model-len 33000",
}


@dataclass
class Answer:
    """Seconds. An answer without a first token has failed."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error: str = ""


class Pictures:
    """Images that differ, of one size, as JPEG in a data URL. Equal for equal seeds."""

    def __init__(self, width: int, height: int, seed: int) -> None:
        import PIL.Image

        self._new = PIL.Image.fromarray
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        self._pixels = np.array(self._new(coarse).resize((width, height)))
        self._numbers = itertools.count(seed << 20)

    def next(self) -> str:
        """One that did not come before: a corner shows its number."""
        bits = np.unpackbits(np.frombuffer(next(self._numbers).to_bytes(8), np.uint8)).reshape(8, 8)
        self._pixels[:64, :64] = np.kron(bits, np.ones((8, 8), np.uint8))[:, :, None] * 255
        file = io.BytesIO()
        self._new(self._pixels).save(file, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


class Client:
    """Sends requests to the processes of a side in turn."""

    def __init__(
        self, http: aiohttp.ClientSession, urls: Sequence[str], models: Sequence[str], seed: int
    ) -> None:
        self._http, self._models = http, dict(zip(urls, models, strict=True))
        self._urls = itertools.cycle(urls)
        self._rng = random.Random(seed)

    def text(self, tokens: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=tokens))

    def body(self, images: Sequence[str], tokens: int = TEXT_TOKENS, answer: int = ANSWER) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        content = [*parts, {"type": "text", "text": self.text(tokens)}]
        return {
            "messages": [{"role": "user", "content": content}], "max_tokens": answer, "temperature": 0.0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip

    async def ask(self, body: dict[str, Any], url: str = "") -> Answer:
        """`url`: of one process, which keeps images that came before."""
        url = url or next(self._urls)
        data = json.dumps(body | {"model": self._models[url]}).encode()
        answer, began = Answer(), time.monotonic()
        before = began
        try:
            async with self._http.post(
                f"{url}/v1/chat/completions", data=data, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    answer.error = (await response.text())[:300]
                    return answer
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event or not any(c["delta"].get("content") for c in event["choices"]):
                        answer.error = json.dumps(event.get("error") or "")[:300].strip('"')
                        continue
                    now = time.monotonic()
                    if answer.first:
                        answer.gaps.append(now - before)
                    answer.first, before = answer.first or now - began, now
        except aiohttp.ClientError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer


def first_tokens(answers: Sequence[Answer]) -> list[float]:
    """Raises RuntimeError if a request failed: its time would be missing among the worst."""
    for answer in answers:
        if answer.error or not answer.first:
            raise RuntimeError(f"a request failed: {answer.error or 'no token came'}")
    return [answer.first for answer in answers]


Figures = dict[str, float]
"""Of a turn: by the name of a row, in ms, or in requests/s."""


class Turn:
    """The measurements of one side with one seed."""

    def __init__(self, client: Client, urls: Sequence[str], pictures: Pictures, args: Any) -> None:
        self._client, self._urls, self._pictures, self._args = client, urls, pictures, args

    async def figures(self) -> Figures:
        found: Figures = {}
        await self._warm_up()
        found["one"] = 1e3 * statistics.median(await self._alone(self._args.requests))
        picture = self._pictures.next()
        again = [await self._client.ask(self._client.body([picture]), self._urls[0]) for _ in range(6)]
        found["repeat"] = 1e3 * statistics.median(first_tokens(again)[1:])
        for count in self._args.at_once:
            found[f"at_once.{count}"] = 1e3 * statistics.median(
                [await self._at_once(count) for _ in range(3)]
            )
        found["rate"] = await self._highest_rate()
        without = await self._text_gaps()
        async with self._beside(found["rate"] / 2):
            found["gaps"] = await self._text_gaps() / without
        return found

    async def _warm_up(self) -> None:
        for url in self._urls:
            first_tokens([await self._client.ask(self._client.body([self._pictures.next()]), url)])

    async def _alone(self, count: int) -> list[float]:
        bodies = [self._client.body([self._pictures.next()]) for _ in range(count)]
        return first_tokens([await self._client.ask(body) for body in bodies])

    async def _at_once(self, count: int) -> float:
        pictures = [self._pictures.next() for _ in range(count)]
        bodies = [self._client.body(pictures[i : i + MOST_IMAGES]) for i in range(0, count, MOST_IMAGES)]
        return max(first_tokens(await asyncio.gather(*map(self._client.ask, bodies))))

    async def _highest_rate(self) -> float:
        """In requests/s. 0: even the lowest one that was tried misses."""

        async def holds(rate: float) -> bool:
            bodies = [self._body() for _ in range(self._args.rated)]
            answers = await self._at_rate(rate, bodies)
            return percentile(first_tokens(answers), 0.99) <= self._args.ttft / 1000

        return await highest(holds, self._args.first_rate, self._args.halvings)

    def _body(self) -> dict[str, Any]:
        return self._client.body([self._pictures.next() for _ in range(IMAGES)])

    async def _at_rate(self, rate: float, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """Arrivals are random (Poisson), and the same for both sides."""
        rng = random.Random(len(bodies))
        asked = []
        for body in bodies:
            asked.append(asyncio.create_task(self._client.ask(body)))
            await asyncio.sleep(rng.expovariate(rate))
        return await asyncio.gather(*asked)

    async def _text_gaps(self) -> float:
        """p99 in seconds, of streams that follow each other."""
        end, gaps = time.monotonic() + self._args.seconds, list[float]()

        async def stream() -> None:
            while not gaps or time.monotonic() < end:
                answer = await self._client.ask(self._client.body([], answer=100))
                first_tokens([answer])
                gaps.extend(answer.gaps)

        await asyncio.gather(*(stream() for _ in range(self._args.streams)))
        return max(percentile(gaps, 0.99), 1e-6)

    @asynccontextmanager
    async def _beside(self, rate: float) -> AsyncIterator[None]:
        """Image requests at this rate. Raises RuntimeError if one failed: it held up no text."""

        async def send() -> None:
            asked = []
            async with asyncio.TaskGroup() as tasks:
                while not stop.is_set():
                    body = await asyncio.to_thread(self._body)
                    asked.append(tasks.create_task(self._client.ask(body)))
                    await asyncio.sleep(1 / rate)
            first_tokens([task.result() for task in asked])

        stop = asyncio.Event()
        sending = asyncio.create_task(send()) if rate else None
        try:
            yield
        finally:
            stop.set()
            if sending is not None:
                await sending


async def highest(holds: Callable[[float], Awaitable[bool]], first: float, halvings: int) -> float:
    """The highest rate that was seen to hold. 0: none was."""
    low, high = 0.0, first
    while high < MOST_RATE and await holds(high):
        low, high = high, 2 * high
    for _ in range(halvings):
        rate = (low + high) / 2
        low, high = (rate, high) if await holds(rate) else (low, rate)
    return low


async def measured(urls: Sequence[str], seed: int, args: Any) -> Figures:
    async with new_session() as http:
        models = []
        for url in urls:
            async with http.get(f"{url}/v1/models") as answer:
                models.append((await answer.json())["data"][0]["id"])
        width, height = args.pixels
        pictures = Pictures(width, height, seed)
        return await Turn(Client(http, urls, models, seed), urls, pictures, args).figures()


def rows(found: dict[str, list[Figures]], args: Any) -> list[Row]:
    """Medians over the seeds, and ratios of the first side to the second, seed by seed."""
    (_, of_ours), (theirs, of_theirs) = found.items()
    made: list[Row] = []
    for name in of_ours[0]:
        unit = {"rate": "requests/s", "gaps": "ratio"}.get(name, "ms")
        goal = 1.1 if name == "gaps" else None
        for side, turns in found.items():
            made.append(
                Row(f"images.{side}.{name}", statistics.median(t[name] for t in turns), unit, goal=goal)
            )
        pairs = [(a[name], b[name]) for a, b in zip(of_ours, of_theirs, strict=True) if b[name]]
        if name != "gaps" and pairs:
            ratio, spread = contract.paired_ratio(*zip(*pairs, strict=True))
            goal, better = GOALS.get(name) if args.side else None, "higher" if name == "rate" else "lower"
            compared: dict[str, Any] = {"ratio_to": theirs, "spread": spread, "goal": goal, "better": better}
            made.append(Row(f"images.{name}", made[-2].value, unit, ratio=ratio, **compared))
    return made


def main() -> int:
    p = contract.parser(__doc__ or "")
    add = p.add_argument
    add("--side", type=Side.parse, action="append", metavar="'NAME COUNT COMMAND'", help="twice, or never")
    add("--model-shape", choices=SHAPES, metavar="NAME", help="{model} (default: qwen3-vl-8b; small on CPUs)")
    add("--pixels", metavar="WIDTHxHEIGHT", help="of an image (default: 1920x1080; 320x240 on CPUs)")
    add("--at-once", default="1,8,32", metavar="N,…", help="images (default: %(default)s)")
    add("--ttft", type=float, default=2000.0, metavar="MS", help="of p99 (default: %(default)s)")
    add("--first-rate", type=float, default=0.5, metavar="R", help="requests/s (default: %(default)s)")
    add("--streams", type=int, default=8, metavar="N", help="of text (default: %(default)s)")
    args = contract.with_counts(
        p, seeds=(3, 1), requests=(20, 3), rated=(100, 3), halvings=(3, 1), seconds=(20, 1)
    )
    args.pixels = tuple(map(int, args.pixels.split("x"))) if args.pixels else PIXELS[args.device]
    args.at_once = [int(count) for count in args.at_once.split(",")]
    serve = f"{SERVE}{FLAGS[args.device]}"
    sides = args.side or [
        Side("pool", 1, f"{serve} --prefill 1 --decode 1 --encode 1"),
        Side("inside", 1, serve),
    ]
    if len({side.name for side in sides}) != 2 or len(sides) != 2:
        p.error("--side: give it twice, with two names")
    report = Report.of("images", args)
    with tempfile.TemporaryDirectory(prefix="baton-images-") as temporary:
        model = write_shape(args.model_shape or SHAPE[args.device], Path(temporary), tokenizer=True)
        found: dict[str, list[Figures]] = {side.name: [] for side in sides}
        for seed in range(args.seeds):
            for side in sides if seed % 2 == 0 else sides[::-1]:
                with started(side, model) as urls:
                    found[side.name].append(asyncio.run(measured(urls.split(","), seed, args)))
            report.rows = rows(found, args)
            report.write()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
