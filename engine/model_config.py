"""The shape of a model, in whichever format its checkpoint tells it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context.

    linear: all divided by `factor`. llama3: low frequencies divided by `factor`, high ones kept, those in
    between interpolated. tensor: divided by a tensor of the checkpoint (GGUF's way to say llama3).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    """Name of the model class in Hugging Face transformers; the key of `engine.models.MODELS`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    """The output projection is the input embedding."""
    attention_bias: bool
    """Biases on all four attention projections; Qwen2, which always has three, does not ask."""
    eos_ids: tuple[int, ...]
    dtype: str | None
    """What the checkpoint was saved for; None: it does not say."""
    sliding_window: int | None = field(default=None, repr=False)
    """The model was made for a longer context, but `max_model_len` ends at this window, because attention
    within the window is plain attention. None: no window ends it. Not in the repr, which makes fingerprints:
    workers of the version before must have equal ones."""

    def check(self, source: str) -> None:
        """Raises `ValueError` naming `source`, the checkpoint, where parts do not fit each other."""
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{source}: {self.num_heads} heads of {self.head_dim} on {self.num_kv_heads} KV heads is not "
                "supported"
            )

    @property
    def num_parameters(self) -> int:
        """Of the matrices, which is nearly all."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings
