"""Hands the tensors of a checkpoint to a model under construction, checked, in the right dtype and place.

One tensor at a time goes from the mapped file to its rows of a (fused) weight on the device. A CPU packs most
weights (`engine.layers.linear`). One scratch buffer serves all of these, since fresh memory costs the system
more time than the copy.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels import FLOATS, FourBits, Fp8Experts, LinearMethod, kernels_for
from baton.engine.layers.linear import PlainLinear, packs_plain
from baton.engine.layers.pieces import copy_values, rows_in_pieces
from baton.engine.layers.ranks import Ranks, Shard, unsharded
from baton.engine.model_config import ModelConfig

FINGERPRINT_SAMPLE = 256
"""Elements of each tensor that its fingerprint covers. Training changes all tensors, so a sample of each is
enough; hashing gigabytes would cost more than loading them."""

SAMPLED_ROWS = 64
"""Of two tensors that must be equal."""

IGNORED = "rotary_emb.inv_freq", ".q_scale", ".k_scale", ".v_scale", ".kv_cache_scale"
"""Old checkpoints carry the first; it follows from the configuration. The others are for a cache in 8 bits,
which has scales of its own here."""

OUTPUT = "lm_head"
"""The output projection, where it is not tied to the embedding."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Groups(NamedTuple):
    """A matrix [rows, columns] of (code − middle) · scale + zero, where middle is 8 or 128, or of floats.

    GPTQ, AWQ, compressed-tensors, GGUF and MXFP4 store 4 or 8 bits in different layouts; here all are
    these."""

    codes: Tensor  # [rows, columns] uint8: unsigned integers of `bits` bits
    scales: Tensor  # [rows, groups] float32
    zeros: Tensor  # [rows, groups] float32
    bits: int
    floats: bool = False
    """Whether a code stands for a float of 4 bits: FLOATS[code] · scale. The zeros are 0."""
    order: Tensor | None = None  # [columns] int64: column i of `codes` is column order[i]. None: in order

    @property
    def size(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def on(self, device: torch.device) -> "Groups":
        codes, scales, zeros = (part.to(device) for part in self[:3])
        order = None if self.order is None else self.order.to(device)
        return self._replace(codes=codes, scales=scales, zeros=zeros, order=order)

    def values(self) -> Tensor:
        """[rows, columns] float32."""
        if self.floats:
            numbers = FLOATS.to(self.codes.device)[self.codes.int()]
        else:
            numbers = self.codes.float().sub_(1 << (self.bits - 1))
        values = numbers.unflatten(1, (-1, self.size)).mul_(self.scales[:, :, None])
        if not self.floats:  # whose -0.0 stays
            values = values.add_(self.zeros[:, :, None])
        values = values.flatten(1)
        return values if self.order is None else values[:, self.order.argsort()]


def stacked(parts: Sequence[Groups]) -> Groups | None:
    """The rows of all parts. None: their groups or orders differ."""
    orders = {None if part.order is None else tuple(part.order.tolist()) for part in parts}
    if len(orders) > 1 or len({(part.size, part.bits) for part in parts}) > 1:
        return None
    codes, scales, zeros = map(torch.cat, zip(*(part[:3] for part in parts), strict=True))
    return parts[0]._replace(codes=codes, scales=scales, zeros=zeros)


class Stack(NamedTuple):
    """Projections of the same input that are computed as one: of matrix i, rows[i] × columns. All rows are
    stacked. With a part of the columns, the result is a term of a sum over ranks; the first rank's term has
    the bias."""

    names: Sequence[str]
    rows: Sequence[Shard]
    columns: Shard
    bias: bool = False

    @property
    def weights(self) -> tuple[list[str], list[tuple[Shard, Shard]]]:
        """The names of the matrices, and the parts of each."""
        return [f"{name}.weight" for name in self.names], [(part, self.columns) for part in self.rows]


class Checkpoint:
    """The base of what weights come from. All raise `ValueError` naming the file if it is incomplete or
    corrupt."""

    config: ModelConfig
    source: str
    """File or directory, for error messages."""
    copies: bool = False
    """Whether `read` copies rows to memory of the device. So a few are read at once."""

    def names(self) -> Collection[str]:
        """All tensors, by the names that Hugging Face gives them. Empty: any tensor can be read."""
        raise NotImplementedError

    def file_of(self, name: str) -> str:
        """The file that has, or would have, this tensor: for error messages."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in the header of the file. None: dummy weights, which have any shape."""
        raise NotImplementedError

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        """These parts of the dimensions of the tensor, in the checkpoint's own dtype. The result may lie in a
        mapped file."""
        raise NotImplementedError

    def next_token_layer(self) -> "Checkpoint | None":
        """The tensors of the layer behind the others that predicts a further token, without copies of the
        model's own. Its number is that of the model's layers. None: there is no such layer."""
        return None

    def groups(self, name: str, parts: Sequence[Shard]) -> Groups | None:
        """These parts of a matrix whose columns have groups. None: it has no groups, or the parts cut one."""
        return None


@dataclass(frozen=True)
class PlainFormat:
    """How the matrices of a model are read, kept and multiplied: here in the model's dtype. Other formats
    derive from it, and leave to it what they do not quantize. One object serves all matrices of a model.

    `engine.loader.formats` chooses it. Embeddings and norms are not its concern."""

    name: str = "plain"
    """For logs and errors, such as "int4 in groups of 128"."""
    identity: str = ""
    """All that the format changes about results: a part of the model's fingerprint. Empty: nothing."""

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        """Memory for one parameter of a matrix, scales included. `dtype` is the model's. `output`: of an
        output projection that is not tied to the embedding. `experts`: of routed experts."""
        return dtype.itemsize

    def matrix_bytes(self, model: ModelConfig, dtype: torch.dtype) -> float:
        """The mean of all matrices of this model but the output projection."""
        experts, plain = model.expert_parameters, model.plain_parameters
        of_experts = experts * self.bytes_per_parameter(dtype, experts=True)
        others = (model.matrix_parameters - experts - plain) * self.bytes_per_parameter(dtype)
        return (of_experts + others + plain * dtype.itemsize) / model.matrix_parameters

    def with_int8_dequantized(self) -> "PlainFormat":
        """The same format, whose integers of 8 bits are dequantized at load on a GPU. This one if it has none
        that stay packed. Results have the same numbers."""
        return self

    def linear(self, weights: "Weights", stack: Stack) -> LinearMethod:
        """Loads a product. Tensors come from `weights.stack` and `weights.stored`, and may be on the device
        "meta". Raises `ValueError` naming file and tensor, also if the parts cut a group or block."""
        weight = weights.stack(*stack.weights, scratch=packs_plain(weights.dtype, weights.device))
        return PlainLinear(weight, weights.bias(stack), exact=weights.kernels.exact)

    def alike(self, weights: "Weights", names: Sequence[str]) -> bool:
        """Whether `linear` can take these matrices together: all are quantized, or none is."""
        return True

    def experts(self, weights: "Weights", experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        """Loads a product of each expert. Experts without rows are not on this rank. Returns [experts, out,
        in]. Raises `ValueError` as `linear` does, also if the format has no kernel for experts."""
        names, parts = zip(*(stack.weights for stack in experts), strict=True)
        stacked = weights.stack([*chain(*names)], [*chain(*parts)])
        return stacked.unflatten(0, (sum(stack.rows[0].length > 0 for stack in experts), -1))

    def dense(self, weights: "Weights", stack: Stack) -> Tensor:
        """Loads a matrix that is not only multiplied by rows, in the model's dtype."""
        return weights.stack(*stack.weights)

    def reads(self, weights: "Weights", name: str) -> bool:
        """Whether the checkpoint has this matrix in the format."""
        return True

    def values(self, weights: "Weights", name: str, rows: Shard, columns: Shard) -> Tensor:
        """These parts of a matrix, dequantized."""
        return weights.stack([f"{name}.weight"], [(rows, columns)])

    def tied(self, weights: "Weights", stack: Stack, embedding: Tensor) -> LinearMethod:
        """The output projection of a model that has no other one than its input embedding. `embedding` is the
        stack, in the model's dtype."""
        return PlainLinear(embedding, exact=weights.kernels.exact)


def as_built(name: str, part: Any) -> Any:
    """A `part_built` that leaves all parts as they are."""
    return part


class Weights:
    """Reads, checks and places the tensors of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str, float], None],
        weight_format: PlainFormat,
        ranks: Ranks,
        *,
        exact: bool = False,
        part_built: Callable[[str, Any], Any] = as_built,
    ) -> None:
        """`part_built`: gets each large part of the model when it is complete and no other part reads its
        values any more, and returns what takes its place: `embedding`, `layers.3`, `head`."""
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.kernels = kernels_for(device, checkpoint.config.kernel_head_dim, exact=exact)
        self.format = weight_format
        self.part_built = part_built
        self.kept = Counter[tuple[int, bool]]()
        """Parameters of the products that were read in one of several formats: by its place among them, and
        whether they are experts."""
        self._checkpoint = checkpoint
        self._names = set(checkpoint.names())
        self._progress = progress
        self._taken: dict[str, str] = {}  # name → digest
        self._extremes: dict[str, Tensor] = {}  # name → [2]: least and greatest value, on the device
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def linear(
        self, names: Sequence[str], rows: Sequence[Shard], columns: Shard, *, bias: bool = False
    ) -> LinearMethod:
        """A product with the weights `names`; see `Stack`."""
        return self.format.linear(self, Stack(names, rows, columns, bias))

    def groups(self, name: str, parts: Sequence[Shard]) -> Groups | None:
        """See `Checkpoint.groups`; the result is on the device."""
        self._check(name, tuple(part.size for part in parts))
        groups = self._checkpoint.groups(name, parts)
        if groups is None:
            return None
        groups = groups.on(self.device)
        if groups.scales.numel():  # else another rank has this expert
            self._extremes[name] = torch.stack((groups.scales + groups.zeros).aminmax())
        self._note(name, parts, None)  # as where the matrix is plain: on another device, or cut in ranks
        return groups

    def bias(self, stack: Stack) -> Tensor | None:
        """The stacked biases. None: there are none, or another rank adds them."""
        if not stack.bias:
            return None
        added = self.stack([f"{name}.bias" for name in stack.names], [(part,) for part in stack.rows])
        return None if stack.columns.start else added

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor `name`, which must have this shape. Raises `ValueError` naming file and tensor."""
        return self.stack([name], [[unsharded(size) for size in shape]])

    def below(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin with `prefix`, by the rest of their names, in the model's dtype. Only
        rank 0 keeps them. Empty: dummy weights, which have no names."""
        tensors: dict[str, Tensor] = {}
        for name in sorted(self._names):
            if name.startswith(prefix):
                tensor = self.take(name, self._checkpoint.shape(name) or ())
                if self.ranks.rank == 0:
                    tensors[name.removeprefix(prefix)] = tensor
        return tensors

    def stack(
        self, names: Sequence[str], parts: Sequence[Sequence[Shard]], *, scratch: bool = False
    ) -> Tensor:
        """Parts of tensors, by dimension, stacked along their first dimension; the other dimensions are
        equal. An empty part counts for the fingerprint only. With `scratch`, the result is valid until the
        next call with `scratch`. One tensor may have no dimension."""
        for name, dimensions in zip(names, parts, strict=True):
            self._check(name, tuple(part.size for part in dimensions))
        if not parts[0]:
            single = torch.empty((), dtype=self.dtype, device=self.device)
            self._read(names[0], (), single)
            return single
        rows = [dimensions[0].length for dimensions in parts]
        shape = (sum(rows), *(part.length for part in parts[0][1:]))
        if scratch:
            if self._scratch.numel() < math.prod(shape):
                self._scratch = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
            stacked = self._scratch[: math.prod(shape)].view(shape)
        else:
            stacked = torch.empty(shape, dtype=self.dtype, device=self.device)
        for name, dimensions, to in zip(names, parts, stacked.split(rows), strict=True):
            self._read(name, dimensions, to)
        return stacked

    @property
    def source(self) -> str:
        """File or directory of the checkpoint, for error messages."""
        return self._checkpoint.source

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the file. None: dummy weights, which have any shape."""
        return self._checkpoint.shape(name)

    def stored(self, name: str, parts: Sequence[Shard] | None, *dtypes: torch.dtype) -> Tensor:
        """These parts of a tensor as the checkpoint stores it, on the device. None: the whole, of any shape.
        Raises `ValueError` naming file and tensor if its shape is not that of the parts, or its dtype none of
        `dtypes`."""
        parts = self._parts(name, parts)
        tensor = self._checkpoint.read(name, parts)
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{self._checkpoint.file_of(name)}: tensor {name} is of {tensor.dtype}, not of "
                f"{' or '.join(map(str, dtypes))}"
            )
        placed = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        copy_values(placed, tensor)
        if tensor.is_floating_point() and placed.numel():
            self._extremes[name] = torch.stack(placed.float().aminmax())
        self._note(name, parts, tensor)
        return placed

    def _parts(self, name: str, parts: Sequence[Shard] | None) -> Sequence[Shard]:
        if parts is None:
            return [unsharded(size) for size in self._checkpoint.shape(name) or ()]
        self._check(name, tuple(part.size for part in parts))
        return parts

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises `ValueError`, before memory is allocated, if the tensor is missing or has another shape."""
        if self._names and name not in self._names:
            raise ValueError(
                f"{self._checkpoint.file_of(name)}: tensor {name} is missing, the checkpoint is incomplete"
            )
        stored = self._checkpoint.shape(name)
        if stored is not None and stored != shape:
            raise ValueError(
                f"{self._checkpoint.file_of(name)}: tensor {name} is {list(stored)}, "
                f"by the model's configuration it should be {list(shape)}"
            )

    def _read(self, name: str, parts: Sequence[Shard], to: Tensor) -> None:
        tensor: Tensor | None = None
        for some, rows in self._in_turns(parts, to):
            tensor = self._checkpoint.read(name, some)
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{self._checkpoint.file_of(name)}: tensor {name} is of {tensor.dtype}, which is not "
                    f"supported ({', '.join(map(str, DTYPES))} are)"
                )
            if rows.numel():
                copy_values(rows, self._placed(tensor))
        if to.numel() and parts:  # without dimensions it may be a bound, and that may be infinite
            self._extremes[name] = torch.stack(to.aminmax())
        self._note(name, parts, tensor)

    def _in_turns(self, parts: Sequence[Shard], to: Tensor) -> Iterator[tuple[Sequence[Shard], Tensor]]:
        """What is read at once, and its place."""
        if not self._checkpoint.copies or not parts:
            yield parts, to
            return
        start, _, size = parts[0]
        for rows in rows_in_pieces(to):
            yield [Shard(start, start + len(rows), size), *parts[1:]], rows
            start += len(rows)

    def _placed(self, tensor: Tensor) -> Tensor:
        """The tensor on the device if its rows are stored as columns. A CPU would copy these one by one, and
        a GPU transposes faster."""
        if tensor.dim() < 2 or tensor.stride(-1) == 1:
            return tensor
        return tensor.mT.contiguous().to(self.device).mT

    def _note(self, name: str, parts: Sequence[Shard], tensor: Tensor | None) -> None:
        """Keeps the digest of a tensor, of which `tensor` is these parts. None: it is read."""
        shape = tuple(part.size for part in parts)
        sampled = [unsharded(size) for size in shape]
        if shape:
            rows = min(-(-FINGERPRINT_SAMPLE // max(1, math.prod(shape[1:]))), shape[0])
            sampled[0] = Shard(0, rows, shape[0])
        if tensor is None or tensor.shape != shape:  # the fingerprint of a part is that of the whole
            tensor = self._checkpoint.read(name, sampled)
        sample = tensor[tuple(part.indices for part in sampled)].flatten()[:FINGERPRINT_SAMPLE].cpu()
        if sample.is_floating_point():  # equal in all dtypes
            sample = sample.float()
        content = f"{name} {shape}".encode() + sample.numpy().tobytes()
        self._taken[name] = hashlib.sha256(content).hexdigest()
        if self._names:
            self._progress("loading weights", len(self._taken) / len(self._names))

    def finish(self) -> None:
        """Checks the weights once the model is complete. Raises `ValueError` if values are not finite, or if
        the checkpoint has tensors that the model does not use."""
        finite = torch.stack(list(self._extremes.values())).isfinite().all(dim=1).tolist()
        for name, is_finite in zip(self._extremes, finite, strict=True):
            if not is_finite:
                raise ValueError(
                    f"{self._checkpoint.file_of(name)}: tensor {name} has values that are not finite numbers "
                    f"in {self.dtype}: it is corrupt, or needs another --dtype"
                )
        self.check_all_taken()
        self._progress("loading weights", 1.0)

    def fingerprint(self) -> str:
        """Returns the fingerprint of all tensors that were read."""
        digests = sorted(self._taken.items())
        return hashlib.sha256(repr(digests).encode()).hexdigest()

    def check_all_taken(self) -> None:
        """Raises `ValueError` if the checkpoint has tensors that the model has no use for, or an output
        projection of its own though its configuration says that it is the embedding."""
        left = {name for name in self._names - self._taken.keys() if not name.endswith(IGNORED)}
        if self._checkpoint.config.tie_embeddings and (copy := f"{OUTPUT}.weight") in left:
            left.remove(copy)
            self._check_equal(copy, "model.embed_tokens.weight")
        if left:
            some = sorted(left)[:3]
            raise ValueError(
                f"{self._checkpoint.file_of(some[0])}: {len(left)} tensors are unknown to "
                f"{self._checkpoint.config.architecture}, such as {', '.join(some)}"
            )

    def _check_equal(self, copy: str, name: str) -> None:
        """Compares some rows in the middle: the first ones may be tokens that no text has."""
        same = (size := self._checkpoint.shape(name)) == self._checkpoint.shape(copy)
        if same and size is not None:
            rows = Shard(size[0] // 2, min(size[0], size[0] // 2 + SAMPLED_ROWS), size[0])
            parts = [rows, *map(unsharded, size[1:])]
            one, other = (self._checkpoint.read(each, parts).float() for each in (name, copy))
            same = torch.equal(one, other)
        if not same:
            raise ValueError(
                f"{self._checkpoint.file_of(copy)}: tensor {copy} is another one than {name}, though "
                "tie_word_embeddings says that both are one: set it to false in the configuration"
            )


class DeclaredWeights(Weights):
    """Checks what the headers of the files say about the tensors; allocates no memory. With `sampled` it
    reads what the fingerprint covers, else no weight."""

    def __init__(self, checkpoint: Checkpoint, weight_format: PlainFormat, *, sampled: bool = False) -> None:
        cpu = torch.device("cpu")
        super().__init__(checkpoint, torch.float32, cpu, lambda *_: None, weight_format, Ranks())
        self.device = torch.device("meta")
        self._sampled = sampled

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        super().take(name, shape)
        return torch.ones(()).expand(shape)  # layers compute with the values of small tensors

    def stored(self, name: str, parts: Sequence[Shard] | None, *dtypes: torch.dtype) -> Tensor:
        parts = self._parts(name, parts)
        self._declare(name, parts)
        return torch.empty([part.length for part in parts], dtype=dtypes[0], device=self.device)

    def groups(self, name: str, parts: Sequence[Shard]) -> None:
        """None: the matrix is checked as a plain one."""

    def _read(self, name: str, parts: Sequence[Shard], to: Tensor) -> None:
        self._declare(name, parts)

    def _declare(self, name: str, parts: Sequence[Shard]) -> None:
        if self._sampled:
            self._note(name, parts, None)
        else:
            self._taken[name] = ""
