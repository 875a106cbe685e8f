"""Prompts with images, on two sides in turns: first tokens, the highest rate, and gaps of text beside them.

Each turn starts one side, measures all, and ends the side, as in `bench.disagg`, whose `--side` it has. Both
sides get the same images, and no side sees an image twice but where it is said.

    one             one image and 200 tokens of text, alone: the time to the first token
    repeat          the same image again, with other text
    repeat.encoded  images that Baton's workers encoded meanwhile: 0 (not known of other engines)
    at_once.N       N images at the same time, at most four in a request: until the last first token
    prefill         of a request of four images, when many come at once: the time of its prompt, from
                    prompts of text with as many tokens
    encode          the time of its images: what a request with images takes longer
    encode.busiest  share of these images that one of Baton's workers encoded: half, if two share the work
    limit           requests/s that both stages allow: 1 / (prefill + encode)
    rate            requests of four images: the highest rate with p99 of first tokens within --ttft
    of_limit        rate / limit
    gaps            p99 of the gaps of text streams beside image requests, divided by those without

The rate begins at 0.8 of the limit, unless `--first-rate` gives it. It goes up or down, by a quarter first,
until one rate holds and another misses, and is halved in between `--halvings` times. It is at most 1.25 of
the limit. A run ends as soon as too many of its requests are late. Image requests beside text come at half of
the rate that holds.

Without --side, Baton with an encoder of its own is compared with one whose workers encode. On a CPU the model
is tiny and the images are small. Images are made while a side starts, and results are written to --json one
by one. The same line with --resume measures only what is not there yet. A side that fails is told, and the
bench goes on with the other one and exits with 1.

On two H200 beside two vLLM engines, with dummy weights of Qwen3-VL-8B (some 150 s a side and seed, once it
has started; --halvings 2 --rated 100 --seconds 10 take some 110):

    python -m baton.bench.images --device cuda --seeds 1 --json images.json
        --side 'baton 1 baton serve {model} --load-format dummy --max-model-len 33000 --port {port}'
        --side 'vllm 2 vllm serve {model} --load-format dummy --max-model-len 33000 --port {port}
                --max-num-seqs 256 --limit-mm-per-prompt.image 8'

With three GPUs, leave out --side: encoders of their own are compared with workers that encode.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import math
import random
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from baton.bench.lab.driver import Bench, Option, Run, parameters_of
from baton.bench.lab.harness.sides import SERVE, SIDE, Side, in_order, started, two_sides
from baton.bench.lab.harness.streams import Case, Stream, new_session, post
from baton.bench.lab.shapes import SEEING_ON, SHAPES, write_shape
from baton.bench.load.target.tokenization import WORDS
from baton.bench.report import Row, paired_ratio
from baton.steps.quantiles import percentile
from baton.system.metrics_page import samples

TEXT_TOKENS = 200
IMAGES = 4
"""Of a request of the highest rate."""
MOST_IMAGES = 4
"""Of a request, where many come at once."""
ANSWER = 8
"""Tokens of an answer about images."""
AT_ONCE = 8
"""Requests of `IMAGES` images that show how long both stages take."""
MOST_SHARE, LEAST_SHARE = 1.25, 1 / 32
"""Of the limit, and of the first rate: beyond these no rate is tried. A run of few requests ends before the
first tokens of a rate above the limit are late."""
FIRST, STEP = 0.8, 1.25
"""Of the limit: where the search for the highest rate begins; and its first factor until it can halve."""
METRICS_S = 1.5
"""Metrics of workers are at most a second old."""
ENCODED = "baton:images_encoded_total"
NO_CASE = Case("", ANSWER, 0.0, seed=0)
"""No answer is compared with a right one."""
BUSY = 429, 503
"""A server that refuses a request with one of these misses the rate."""
GOALS = {"one": 0.9, "rate": 1.0}
"""Of the first side ÷ the second, if they are given."""
UNITS = {
    "rate": "requests/s", "limit": "requests/s", "of_limit": "ratio", "gaps": "ratio",
    "encode.busiest": "ratio",
    "repeat.encoded": "images",
}  # fmt: skip
"""Of a figure; else ms."""
FLAGS = {
    "cpu": "--model {model} --load-format dummy --device cpu --dtype float32 --advanced.num-threads 1",
    "cuda": "--model {model} --load-format dummy --max-model-len 33000",
}


class Pictures:
    """Images that differ, of one size, as JPEG in a data URL. Equal for equal seeds."""

    def __init__(self, width: int, height: int, seed: int) -> None:
        import PIL.Image

        self._new = PIL.Image.fromarray
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        self._pixels = np.array(self._new(coarse).resize((width, height)))
        self._numbers = itertools.count(seed << 20)
        self._urls_made: deque[str] = deque()

    def next(self) -> str:
        """One that did not come before."""
        return self._urls_made.popleft() if self._urls_made else self._make()

    @contextmanager
    def being_made(self, count: int) -> Iterator[None]:
        """Makes images in a thread. Waits for it at the end. Made later they would take the client's time."""

        def make() -> None:
            while len(self._urls_made) < count and not ended.is_set():
                self._urls_made.append(self._make())

        ended = threading.Event()
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            ended.set()
            raise
        finally:
            thread.join()

    def _make(self) -> str:
        """A corner shows its number."""
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
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    async def encoded(self, url: str) -> list[float] | None:
        """Images that each worker of a router has encoded. None: it is no router of Baton."""
        async with self._http.get(f"{url}/metrics/targets") as answer:
            if answer.status != 200 or answer.content_type != "application/json":
                return None  # vLLM answers below /metrics with all its metrics
            targets = await answer.json()
        await asyncio.sleep(METRICS_S)
        pages = []
        for target in targets:
            async with self._http.get(f"http://{target['targets'][0]}/metrics") as answer:
                pages.append(await answer.text())
        return [sum(sample.value for sample in samples(page, ENCODED)) for page in pages]

    async def ask(self, body: dict[str, Any], url: str = "", within: float | None = None) -> Stream:
        """`url`: of one process, which keeps images that came before. `within`: seconds; without a first
        token until then the answer is late, and is not read on."""
        url, stream = url or next(self._urls), Stream(NO_CASE)
        data = json.dumps(body | {"model": self._models[url]}).encode()
        reading = asyncio.create_task(post(self._http, f"{url}/v1/chat/completions", data, stream))
        try:
            await asyncio.wait([reading], timeout=within)
            stream.late = not (reading.done() or stream.arrivals)
            if not stream.late:
                await reading
        finally:
            reading.cancel()
        return stream


def first_tokens(answers: Sequence[Stream]) -> list[float]:
    """Raises RuntimeError if a request failed: its time would be missing among the worst."""
    for answer in answers:
        if answer.error or not answer.arrivals:
            raise RuntimeError(f"a request failed: {answer.status} {answer.error[:300] or 'no token came'}")
    return [answer.ttft for answer in answers]


Figures = dict[str, float]
"""Of a turn: by the name of a row, in ms, or in requests/s."""


class Turn:
    """The measurements of one side with one seed."""

    def __init__(self, client: Client, urls: Sequence[str], pictures: Pictures, args: Any) -> None:
        self._client, self._urls, self._pictures, self._args = client, urls, pictures, args

    async def figures(self, figures: Figures, log: Callable[[str], None]) -> None:
        """Adds what `figures` lacks. `log` hears of each step that has ended."""
        steps: list[tuple[str, Callable[[], Awaitable[Figures]]]] = [
            ("one", self._one),
            ("repeat", self._repeated),
            *((f"at_once.{count}", partial(self._median_at_once, count)) for count in self._args.at_once),
            ("limit", self._limit),
            ("rate", partial(self._rate, figures)),
            ("gaps", partial(self._gaps, figures)),
        ]
        missing = [(name, step) for name, step in steps if name not in figures]
        if missing:
            await self._warm_up()
        for name, step in missing:
            began = time.monotonic()
            figures |= await step()
            log(f"{name} {figures.get(name, math.nan):.4g} ({time.monotonic() - began:.0f} s)")

    async def _one(self) -> Figures:
        return {"one": 1e3 * statistics.median(await self._alone(self._args.requests))}

    async def _repeated(self) -> Figures:
        """Of one process, which keeps images that came before."""
        picture, url = self._pictures.next(), self._urls[0]
        first_tokens([await self._client.ask(self._client.body([picture]), url)])
        before = await self._client.encoded(url)
        answers = [await self._client.ask(self._client.body([picture]), url) for _ in range(5)]
        figures = {"repeat": 1e3 * statistics.median(first_tokens(answers))}
        after = await self._client.encoded(url)
        return figures if not before or not after else figures | {"repeat.encoded": sum(after) - sum(before)}

    async def _median_at_once(self, count: int) -> Figures:
        return {f"at_once.{count}": 1e3 * statistics.median([await self._at_once(count) for _ in range(3)])}

    async def _limit(self) -> Figures:
        """Of all processes together, each time after one that warms up."""

        async def seconds(bodies: Callable[[], list[dict[str, Any]]]) -> float:
            return min([await self._last_of(bodies()) for _ in range(2)]) / AT_ONCE

        tokens = (await self._client.ask(self._body())).prompt_tokens
        if not tokens:
            raise RuntimeError("the server does not tell the tokens of a prompt")
        text = await seconds(lambda: [self._client.body([], tokens) for _ in range(AT_ONCE)])
        before = await self._client.encoded(self._urls[0])
        cost = await seconds(lambda: [self._body() for _ in range(AT_ONCE)])
        after = await self._client.encoded(self._urls[0])
        times = {"prefill": 1e3 * text, "encode": 1e3 * max(0.0, cost - text), "limit": 1 / max(cost, text)}
        if before and after:
            by_worker = [late - early for early, late in zip(before, after, strict=True)]
            times["encode.busiest"] = max(by_worker) / max(1.0, sum(by_worker))
        return times

    async def _rate(self, figures: Figures) -> Figures:
        """The highest one, in requests/s. 0: even the lowest one that was tried misses."""

        async def holds(rate: float) -> bool:
            return await self.holds(rate, [self._body() for _ in range(self._args.rated)])

        first, most = self._args.first_rate or FIRST * figures["limit"], MOST_SHARE * figures["limit"]
        rate = await highest(holds, first, most, self._args.halvings)
        return {"rate": rate, "of_limit": rate / figures["limit"]}

    async def _gaps(self, figures: Figures) -> Figures:
        """Nothing if no rate holds: no image would come beside text."""
        if not figures["rate"]:
            return {}
        without = await self._text_gaps()
        async with self._beside(figures["rate"] / 2):
            return {"gaps": await self._text_gaps() / without}

    async def _warm_up(self) -> None:
        for url in self._urls:
            first_tokens([await self._client.ask(self._client.body([self._pictures.next()]), url)])

    async def _alone(self, count: int) -> list[float]:
        bodies = [self._client.body([self._pictures.next()]) for _ in range(count)]
        return first_tokens([await self._client.ask(body) for body in bodies])

    async def _at_once(self, count: int) -> float:
        pictures = [self._pictures.next() for _ in range(count)]
        return await self._last_of(
            [self._client.body(pictures[i : i + MOST_IMAGES]) for i in range(0, count, MOST_IMAGES)]
        )

    async def _last_of(self, bodies: Sequence[dict[str, Any]]) -> float:
        return max(first_tokens(await asyncio.gather(*map(self._client.ask, bodies))))

    def _body(self) -> dict[str, Any]:
        return self._client.body([self._pictures.next() for _ in range(IMAGES)])

    async def holds(self, rate: float, bodies: Sequence[dict[str, Any]]) -> bool:
        """Whether p99 of the first tokens is within --ttft. Ends as soon as too many are late.

        Arrivals are random (Poisson), and the same for both sides.
        """
        misses, most = 0, len(bodies) - math.ceil(0.99 * len(bodies))
        missed = asyncio.Event()

        async def ask(body: dict[str, Any]) -> None:
            nonlocal misses
            answer = await self._client.ask(body, within=self._args.ttft / 1000)
            if answer.status not in BUSY and not answer.late:
                first_tokens([answer])
            elif (misses := misses + 1) > most:
                missed.set()

        async def send() -> None:
            rng = random.Random(len(bodies))
            async with asyncio.TaskGroup() as tasks:
                for body in bodies:
                    tasks.create_task(ask(body))
                    await asyncio.sleep(rng.expovariate(rate))

        sending, missing = asyncio.create_task(send()), asyncio.create_task(missed.wait())
        try:
            await asyncio.wait([sending, missing], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for task in (sending, missing):
                task.cancel()
            await asyncio.gather(sending, missing, return_exceptions=True)
        if missed.is_set():  # no later run waits for the requests of this one
            for url in self._urls:
                first_tokens([await self._client.ask(self._client.body([]), url)])
        return not missed.is_set()

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
            requests = []
            async with asyncio.TaskGroup() as tasks:
                while not stop.is_set():
                    body = await asyncio.to_thread(self._body)
                    requests.append(tasks.create_task(self._client.ask(body)))
                    await asyncio.sleep(1 / rate)
            first_tokens([task.result() for task in requests])

        stop = asyncio.Event()
        sending = asyncio.create_task(send()) if rate else None
        try:
            yield
        finally:
            stop.set()
            if sending is not None:
                await sending


async def highest(
    holds: Callable[[float], Awaitable[bool]], first: float, most: float, halvings: int
) -> float:
    """The highest rate up to `most` that was seen to hold. 0: none was."""
    low, high, rate, step = 0.0, math.inf, min(first, most), STEP
    while not low or math.isinf(high):
        if low == most or rate < LEAST_SHARE * first:
            return low
        low, high = (rate, high) if await holds(rate) else (low, rate)
        rate, step = min(most, rate * step if low else rate / step), step * step
    for _ in range(halvings):
        rate = (low + high) / 2
        low, high = (rate, high) if await holds(rate) else (low, rate)
    return low


async def measure_side(
    urls: Sequence[str], seed: int, args: Any, pictures: Pictures, result: Figures, log: Callable[[str], None]
) -> None:
    """Adds to `result`, as `Turn.figures` does. Raises RuntimeError or aiohttp.ClientError."""
    async with new_session() as http:
        models = []
        for url in urls:
            async with http.get(f"{url}/v1/models") as answer:
                models.append((await answer.json())["data"][0]["id"])
        await Turn(Client(http, urls, models, seed), urls, pictures, args).figures(result, log)


def images_of_turn(args: Any) -> int:
    """About as many as a turn needs."""
    runs = 3 + args.halvings
    return args.requests + 4 * sum(args.at_once) + IMAGES * (2 * AT_ONCE + args.rated * runs)


def rows(figures: dict[str, list[Figures]], args: Any) -> list[Row]:
    """Medians over the seeds, and ratios of the first side to the second, seed by seed."""
    (first, of_ours), (second, of_theirs) = figures.items()
    table: list[Row] = []
    for name in dict.fromkeys(name for turns in figures.values() for turn in turns for name in turn):
        unit, goal = UNITS.get(name, "ms"), {"gaps": 1.1, "repeat.encoded": 0.0}.get(name)
        for side, turns in figures.items():
            if values := [turn[name] for turn in turns if name in turn]:
                bound = goal if side == first else None
                table.append(Row(f"images.{side}.{name}", statistics.median(values), unit, goal=bound))
        pairs = [
            (a[name], b[name])
            for a, b in zip(of_ours, of_theirs, strict=True)
            if a.keys() & b.keys() >= {name}
        ]
        if (
            pairs
            and all(b for _, b in pairs)
            and name not in ("gaps", "repeat.encoded", "of_limit", "encode.busiest")
        ):
            ratio, spread = paired_ratio(*zip(*pairs, strict=True))
            value = statistics.median(a for a, _ in pairs)
            goal, better = GOALS.get(name) if args.side else None, "higher" if name == "rate" else "lower"
            compared: dict[str, Any] = {"ratio_to": second, "spread": spread, "goal": goal, "better": better}
            table.append(Row(f"images.{name}", value, unit, ratio=ratio, **compared))
    return table


def sides_of(args: Namespace) -> list[Side]:
    serve = f"{SERVE}{FLAGS[args.device]}"
    pool = f"{serve} --prefill 1 --decode 1 --encode 1"
    return two_sides(args, Side("pool", 1, pool), Side("inside", 1, serve))


def earlier(args: Namespace) -> dict[str, Figures]:
    """The results of each turn: none yet, or with --resume those of an earlier run, from its file.

    Raises:
        ValueError: the arguments of the earlier run were others.
    """
    turns = [f"{side.name}.{seed}" for side in sides_of(args) for seed in range(args.seeds)]
    if not args.resume or not args.json.exists():
        return {turn: {} for turn in turns}
    before = json.loads(args.json.read_text())
    now = json.loads(json.dumps(parameters_of(args), default=str))
    differ = [name for name, value in now.items() if before["parameters"].get(name) != value]
    if differ := [name for name in differ if name != "resume"]:
        raise ValueError(f"--resume: {args.json} was measured with another {', '.join(differ)}")
    return {turn: before.get("detail", {}).get(turn, {}) for turn in turns}


def measure(run: Run) -> None:
    args, sides, turns = run.args, sides_of(run.args), earlier(run.args)
    width, height = args.pixels
    figures = {side.name: [turns[f"{side.name}.{seed}"] for seed in range(args.seeds)] for side in sides}
    run.detail, run.rows = dict(turns), rows(figures, args)
    model = write_shape(args.model_shape, run.directory, tokenizer=True)
    for seed in range(args.seeds):
        for side in in_order(sides, seed):
            turn = f"{side.name}.{seed}"
            if "gaps" in turns[turn] or turns[turn].get("rate") == 0.0:
                continue

            def told(step: str, turn: str = turn) -> None:
                print(f"bench.images: {turn}: {step}", file=sys.stderr, flush=True)
                run.rows = rows(figures, args)
                run.write()

            try:
                pictures, began = Pictures(width, height, seed), time.monotonic()
                with contextlib.ExitStack() as stack:
                    with pictures.being_made(images_of_turn(args)):
                        urls = [*stack.enter_context(started(side, model))]
                    told(f"started ({time.monotonic() - began:.0f} s)")
                    asyncio.run(measure_side(urls, seed, args, pictures, turns[turn], told))
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                run.failed = True
                told(f"failed: {error}")


def check(args: Namespace) -> None:
    args.pixels = [*map(int, args.pixels.split("x"))]
    args.at_once = [int(count) for count in args.at_once.split(",")]
    if args.resume and args.json is None:
        raise ValueError("--resume: name the file of the earlier run with --json PATH")
    sides_of(args), earlier(args)


BENCH = Bench(
    "images",
    measure,
    __doc__,
    options=(
        SIDE,
        Option("--model-shape", "{model}", SEEING_ON, choices=SHAPES, metavar="NAME"),
        Option("--pixels", "of an image", {"cpu": "320x240", "cuda": "1920x1080"}, metavar="WIDTHxHEIGHT"),
        Option("--at-once", "images", "32", metavar="N,…"),
        Option("--ttft", "of p99", 2000.0, metavar="MS"),
        Option("--first-rate", "requests/s (default: 0.8 of the limit)", type=float, metavar="R"),
        Option("--resume", "measure only what --json does not have yet", False),
        Option("--streams", "of text", 8),
        Option("--seeds", "turns of each side", 3, short=1),
        Option("--requests", "of one image", 20, short=3),
        Option("--rated", "requests of a rate", 100, short=3),
        Option("--halvings", "of the range of rates", 3, short=1),
        Option("--seconds", "of text streams", 12, short=1),
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
