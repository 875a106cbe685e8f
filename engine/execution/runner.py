"""One rank: computes steps of plain arrays (`engine.step`). On a GPU it enqueues the work and does not wait.

    run(step) ──▶ forward pass (writes KV) ──▶ sample(launched, adjustments) ──▶ logits ──▶ tokens
                                               └─ at once, or when a grammar knows the token before

CUDA graphs replay a step once they are captured; a step with more rows than the largest graph is launched
kernel by kernel.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.execution.commands import Commands, Sample, Stop
from baton.engine.execution.draft_runner import DraftRunner, SampledStep
from baton.engine.execution.events import Event, record
from baton.engine.execution.expert_load import ExpertLoad
from baton.engine.execution.graphs import NO_TILES, LayerDone, Size, StepGraphs, Widths, largest_graph
from baton.engine.execution.inputs import attention_metadata, draws_of, read_by_device
from baton.engine.execution.layer_attention import LayerAttention, attention_shapes, tile_shape
from baton.engine.execution.layer_caches import LayerCaches
from baton.engine.execution.sampler import TopLogprobs, adjust, choose, prompt_logprobs, to_host, top_logprobs
from baton.engine.kernels import Fp8KV, Kernels
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.sampling.drafts import Sources, StepInputs
from baton.engine.kernels.sampling.reference import with_sampled
from baton.engine.kernels.upload import upload
from baton.engine.layers.current_step import CurrentStep, ImageRows, computing
from baton.engine.layers.ranks import Ranks
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import CacheSpec
from baton.engine.models.draft_heads import DraftHead, HeadConfig
from baton.engine.step import Pieces, Step, Variant
from baton.engine.step_adjustments import Adjustments, ScoredLogprobs


@dataclass(slots=True, eq=False)
class Launched:
    """A step with its forward pass enqueued. Owned by the runner; callers only read it."""

    rows: int
    """Rows that get a token."""
    variant: Variant
    size: Size | None
    """Size of the graphs that replay the step and keep its logits and draws. None: no graph replays it."""
    logits: Tensor | None  # [rows, vocabulary] float32
    inputs: Mapping[str, Tensor] | None
    """The arrays of the step on the device. Like the logits, graphs keep their own."""
    began: Event
    drafting: SampledStep | None = None
    """What the draft head needs of the step, until it is sampled."""
    ended: Event | None = None
    """None: not sampled yet."""
    sampled: Tensor | None = None
    """As `ModelRunner.sampled`; this and the rest is on the host once the step is over."""
    logprobs: TopLogprobs | None = None
    scored: ScoredLogprobs | None = None
    guessed: Tensor | None = None
    """[rows, guesses]: what the draft head made for the first row of each request."""
    embeddings: np.ndarray | Pieces | None = None
    """Of images, on the host: the device may still copy them."""

    @property
    def over(self) -> bool:
        return self.ended is not None and self.ended.query()

    @property
    def seconds(self) -> float:
        """Device time of the step, which must be over."""
        assert self.ended is not None
        return self.began.elapsed_time(self.ended) / 1e3

    @property
    def is_sampled(self) -> bool:
        return self.ended is not None

    def wait(self) -> list[int]:
        """Waits until the step is over. Returns its tokens; a negative one says why there is none."""
        assert self.ended is not None, "a step is sampled before it is waited for"
        self.ended.synchronize()
        return [] if self.sampled is None else self.sampled[:, 0].tolist()

    @property
    def accepted(self) -> list[int]:
        """For each row, how many of the drafts after it are right. The step must be over. Empty: the device
        does not count them."""
        if self.sampled is None or self.sampled.shape[1] == 1:
            return []
        return self.sampled[:, 1].tolist()

    @property
    def guesses(self) -> list[list[int]]:
        """For the first row of each request, the guesses of what follows the tokens that the step gives.
        Empty: no draft head made any."""
        return [] if self.guessed is None else self.guessed.tolist()


class ModelRunner:
    """Owns the model, its cache and its graphs on one device."""

    def __init__(
        self,
        model: Any,
        kernels: Kernels,
        config: ModelConfig,
        cache: Sequence[CacheSpec],
        *,
        dtype: torch.dtype,
        block_size: int,
        max_sampled_rows: int,
        device: torch.device,
        ranks: Ranks,
        ahead: int = 1,
        head: tuple[DraftHead, HeadConfig] | None = None,
    ) -> None:
        """`config`, `cache`, `device` and `head` are those of this rank. `ahead`: the size of this dimension
        of a step; 1: the engine has no drafts. `head`: the last layer of the cache is its own. None: the
        engine has no draft head."""
        self.model = model
        self.block_size = block_size
        self.device = device
        self.followers: Commands | None = None
        """Set on rank 0 when all ranks have started: the other ranks then follow its calls."""
        self.cache = LayerCaches(
            cache, block_size=block_size, max_model_len=config.max_model_len, device=device
        )
        self._kernels = kernels
        self._config = config
        num_layers = len(cache) if head is None else len(cache) - 1
        shapes = attention_shapes(cache, config, range(num_layers))
        self.attention = LayerAttention(kernels, self.cache, config, shapes, dtype)
        """Of the model, without its draft head."""
        self._shapes = [*shapes.values()]
        """With that of the draft head."""
        self._dtype = dtype
        vision = config.vision
        self.image_bytes = (
            0 if vision is None else (1 + vision.deepstack) * config.hidden_size * dtype.itemsize
        )
        """Of the embeddings of a token of an image. 0: the model takes none."""
        self.chunk_tokens = kernels.chunk_tokens(dtype) if self.cache.has_states else 0
        """As `Kernels.chunk_tokens`; 0: no layer has states. Modules of transformers can stop anywhere."""
        if self.cache.has_states and config.modules is not None:
            self.chunk_tokens = 1
        self.expert_load = ExpertLoad(config.experts, device) if config.experts else None
        """None: a dense model."""
        self._graphs: StepGraphs | None = None
        self.mixed_rows: Sequence[int] = ()
        """Rows of the graphs for steps with decodes and chunks, in ascending order. A step with other rows is
        padded to the next of them."""
        self.graph_rows: float = math.inf
        """Most tokens of a step of prompts alone that a graph computes. Infinite: there are no graphs."""
        self._record: Callable[[], Event] = partial(record, device)
        self.ranks = ranks
        self.ahead = ahead
        columns = 1 if ahead == 1 else 2
        self.sampled = torch.zeros((max_sampled_rows, columns), dtype=torch.int64, device=device)
        """What the newest step samples, by row: its token, and how many of the drafts after the row are right
        if the engine has drafts. The step after it reads here what the host does not know yet."""
        self._resolved = torch.zeros((2, max_sampled_rows + 1), dtype=torch.int64, device=device)
        """The first tokens of the newest step, among them all that decode, if the engine has drafts; and for
        each of them, how many drafts of its request the step before accepted. The last column is 0."""
        self._guesses = torch.zeros((max_sampled_rows + 1, ahead - 1), dtype=torch.int64, device=device)
        """What a draft head guesses in the newest step: the guesses of a request are in the row of its first
        sampled row. The last row is for padding. The step after it reads here what the host does not know."""
        self.drafter: DraftRunner | None = None
        """None: the engine has no draft head."""
        if head is not None:
            for layer in head[1].taps:
                model.layers[layer].tapped = True
            shapes = attention_shapes(cache, head[1].model, [num_layers])
            self._shapes += shapes.values()
            attention = LayerAttention(kernels, self.cache, head[1].model, shapes, dtype)
            self.drafter = DraftRunner(
                *head, num_layers, self.sampled, self._resolved, self._guesses, attention, ranks, block_size
            )

    def move(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """Makes these moves of memory (`engine.core.elastic.Move`), on all ranks. No step and no copy uses
        what loses its memory."""
        if self.followers is None:
            self.cache.move(moves)
            return
        done = self.followers.move(moves)
        self.cache.move(moves)
        done()

    def follow(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """As `move`, on another rank. Rank 0 knows what its own steps use, which may be over here later."""
        self._record().synchronize()
        self.cache.move(moves)

    def stop(self) -> None:
        """Runs nothing more: drops the graphs, and leaves the group of ranks."""
        if self.followers is not None:
            self.followers.send(Stop())
        self._graphs = self.drafter = None
        self.ranks.close()

    @torch.inference_mode()
    def capture(self, max_num_batched_tokens: int, progress: Callable[[float], None]) -> None:
        """Captures graphs, which replay steps from now on; the cache must stay where it is."""
        assert self.cache.table_width is not None, "a CPU has no graphs"
        config = self._config
        fp8 = any(isinstance(cache, Fp8KV) for cache in self.cache.of_layers)
        shape_of = partial(tile_shape, self._kernels, self._shapes, self._dtype, self.block_size, fp8=fp8)
        tiles, window_tiles = (shape_of(windowed=windowed) for windowed in (False, True))
        if tiles is None:
            tiles, window_tiles = window_tiles, None
        widths = Widths(
            self.cache.table_width,
            config.hidden_size * (1 + (self.drafter.taps if self.drafter else 0)),
            config.vocab_size,
            tiles or NO_TILES,
            self.chunk_tokens,
            self.ahead,
            self.drafter is not None,
            self.cache.window_blocks is not None,
            window_tiles if window_tiles and window_tiles != tiles else NO_TILES,
            config.vision is not None and config.vision.sections is not None,
            not (config.modules and self.cache.has_states),  # each prompt is a call of its own
            self.image_bytes,
        )
        self._graphs = StepGraphs(
            (self.forward, self.logits, self.choose, partial(self.attention.apart, device=self.device)),
            self.sampled,
            widths,
            dtype=self._dtype,
            block_size=self.block_size,
            largest=largest_graph(config.full_step, max_num_batched_tokens),
            ranks=self.ranks,
            progress=progress,
        )
        if self.drafter is not None:
            self.drafter.capture(self._graphs)
        self.mixed_rows = self._graphs.rows_with_chunks(decodes=True)
        self.graph_rows = max(self._graphs.rows_with_chunks(decodes=False), default=math.inf)

    @torch.inference_mode()
    def run(self, step: Step, layer_done: LayerDone) -> Launched:
        """Enqueues the forward pass. `layer_done(i)` is called when the KV of layer i is written (on CUDA:
        when its writing is enqueued). A graph of a step that only decodes does not call it. `sample` must be
        called before the next `run`."""
        if self.followers is not None:
            self.followers.run(step)
            if step.awaits_kv:
                layer_done = self.followers.waited(0, layer_done)
        began = self._record()
        if len(step.restores):
            self.cache.copy_states(step.restores)
        launched = self._launch(step, layer_done, began)
        if len(step.saves):
            self.cache.copy_states(step.saves)
        return launched

    def synchronize(self) -> None:
        """Waits for all that was launched."""
        self._record().synchronize()

    def _launch(self, step: Step, layer_done: LayerDone, began: Event) -> Launched:
        rows, graphs, embeddings = len(step.sampled_rows), self._graphs, step.images.embeddings
        size = None if graphs is None else graphs.size(step)
        tensors: Mapping[str, Tensor]
        if graphs is not None and size is not None:
            graphs.forward(size, step, layer_done)
            hidden, drafting = graphs.hidden, None
            if self.drafter is not None:
                tensors = graphs.unpadded() if size.chunks else {}
                drafting = SampledStep(step, size, tensors, hidden, layer_done)
            scored = self._score(hidden, step)
            return Launched(
                rows, step.variant, size, None, None, began, drafting, scored=scored, embeddings=embeddings
            )
        arrays = read_by_device(step)
        tensors = dict(zip(arrays, upload(list(arrays.values()), self.device), strict=True))
        attention = attention_metadata(
            tensors,
            block_size=self.block_size,
            num_decodes=step.decode_rows,
            prefills=step.prefills,
            images=step.whole_images,
        )
        hidden = self.forward(tensors, attention, layer_done)
        logits = self.logits(hidden[tensors["sampled_rows"]]).float() if rows else None
        scored = self._score(hidden, step)
        drafting = None if self.drafter is None else SampledStep(step, None, tensors, hidden, layer_done)
        return Launched(
            rows, step.variant, None, logits, tensors, began, drafting, scored=scored, embeddings=embeddings
        )

    def _score(self, hidden: Tensor, step: Step) -> ScoredLogprobs | None:
        """Enqueues the log probabilities of prompts."""
        if not len(step.scored.rows):
            return None
        return prompt_logprobs(hidden, step.scored, self.logits, self.ranks.rank)

    @torch.inference_mode()
    def sample(self, launched: Launched, adjustments: Adjustments | None) -> Event:
        """Enqueues the sampling of a step: rank 0 chooses the tokens, and the others get them.
        `adjustments` None: its rows ask for nothing beyond `Draws`. Returns the event that the step is
        over."""
        if self.followers is not None:
            self.followers.send(Sample())
        rows, graphs = launched.rows, self._graphs
        if rows:
            replayed = graphs if launched.size is not None else None
            logits = launched.logits if replayed is None else replayed.logits(rows)
            if self.ranks.rank == 0:
                assert logits is not None
                self._choose(launched, logits, adjustments, replayed)
        ended = self._record()
        if rows and graphs is not None:
            graphs.share_sampled()
        elif rows:
            self.ranks.broadcast(self.sampled)
        if self.drafter is not None and launched.drafting is not None:
            launched.guessed = self.drafter.draft(launched.drafting)
            launched.drafting, ended = None, self._record()
        launched.ended = ended
        return ended

    def _choose(
        self, launched: Launched, logits: Tensor, adjustments: Adjustments | None, graphs: StepGraphs | None
    ) -> None:
        """`graphs`: those that have replayed the step. None: no graph has."""
        rows = launched.rows
        if graphs is not None and adjustments is None:
            graphs.choose(rows, launched.variant)
        else:
            inputs = launched.inputs if graphs is None else graphs.inputs(rows)
            assert inputs is not None
            adjusted = logits if adjustments is None else adjust(logits, adjustments, self.sampled[:, 0])
            self.choose(logits, launched.variant, inputs, adjusted)
        launched.sampled = to_host(self.sampled[:rows])
        if adjustments is not None:
            launched.logprobs = top_logprobs(logits, self.sampled[:rows, 0], adjustments)

    def forward(
        self, inputs: Mapping[str, Tensor], attention: AttentionMetadata, layer_done: LayerDone
    ) -> Tensor:
        """Writes the KV of all tokens of a step with these arrays. Returns the hidden state of each, [tokens,
        hidden_size]."""
        token_ids, positions, attention = self._resolve(inputs, attention)
        attend = self.attention.of_step(attention, layer_done)
        if (load := self.expert_load) is not None:
            load.begin_step()
        counts = None if load is None else load.counts
        shift = inputs["rotary_shift"]
        step = CurrentStep(
            attention.num_decodes,
            attention.slots,
            counts,
            images=self._images(inputs) if len(inputs["images.index"]) else None,
            rotary_shift=shift if len(shift) else None,
        )
        callers = [attend]
        if self.cache.has_states or self._config.modules is not None:
            callers.append(self.attention.mix_of_step(attention, layer_done))
        with computing(step):
            hidden = self.model(token_ids, positions, *callers)
        return torch.cat((hidden, *step.taps), dim=1) if step.taps else hidden

    def _images(self, inputs: Mapping[str, Tensor]) -> ImageRows:
        """The images of a step with these arrays."""
        embeddings = inputs["images.embeddings"]
        features = embeddings.view(self._dtype).view(len(embeddings), -1, self._config.hidden_size)
        return ImageRows(inputs["images.index"], features, inputs["images.positions"])

    def _resolve(
        self, inputs: Mapping[str, Tensor], attention: AttentionMetadata
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """The token ids and positions of the step, and its attention, after what the step before sampled."""
        token_ids, positions = inputs["token_ids"], inputs["positions"]
        if self.ahead == 1:
            return with_sampled(token_ids, inputs["source_rows"], self.sampled), positions, attention
        planned = StepInputs(token_ids, positions, attention.slots, attention.contexts)
        sources = Sources(inputs["source_rows"], *(inputs[f"ahead.{name}"] for name in Sources._fields[1:]))
        actual = self._kernels.follow(planned, sources, self.sampled, self._guesses, self._resolved)
        window_slots = self._window_slots(attention, sources.shift_rows, actual.positions)
        attention = replace(
            attention, slots=actual.slots, contexts=actual.contexts, window_slots=window_slots
        )
        return actual.token_ids, actual.positions, attention

    def _window_slots(
        self, attention: AttentionMetadata, shift_rows: Tensor, positions: Tensor
    ) -> Tensor | None:
        """As in `AttentionMetadata`, at these positions: the step before may shift requests that decode. Each
        token of these has a row of its own in the block tables."""
        planned, size = attention.window_slots, self.block_size
        if planned is None:
            return None
        rows = min(len(shift_rows), len(positions))
        tables, at = attention.of_layers(windowed=True).block_tables[:rows], positions[:rows]
        index = (at // size).clamp_max(tables.shape[1] - 1)
        moved = tables.gather(1, index[:, None])[:, 0].long() * size + at % size
        moved = torch.where(shift_rows[:rows] < 0, planned[:rows], moved)
        return torch.cat((moved, planned[rows:]))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocabulary], in the model's dtype. Columns behind are those of
        taps."""
        return self.model.logits(hidden[:, : self._config.hidden_size].contiguous())

    def choose(
        self, logits: Tensor, variant: Variant, inputs: Mapping[str, Tensor], adjusted: Tensor | None = None
    ) -> None:
        """Samples rows of a step with these arrays into `sampled`. `adjusted`: the logits as the rows want
        them. None: they ask for nothing beyond `Draws`."""
        draws, rows = draws_of(inputs), inputs["sampled_rows"]
        if self.ahead > 1 and variant is not Variant.GREEDY:
            draws = draws._replace(keys=self._keys(inputs["ahead.keys"], rows))
        adjusted = logits if adjusted is None else adjusted
        tokens = choose(adjusted, logits, variant, draws, self._kernels)
        self.sampled[: len(rows), 0] = tokens
        if self.ahead > 1:
            self.sampled[: len(rows), 1] = self._kernels.accepted(
                tokens, rows, inputs["ahead.drafts"], self._resolved
            )

    def _keys(self, keys: Tensor, rows: Tensor) -> Tensor:
        """The keys of these sampled rows, of `Ahead.keys`."""
        shift = self._resolved[1, rows.clamp_max(self._resolved.shape[1] - 1)]
        return keys.gather(1, shift[:, None])[:, 0]
