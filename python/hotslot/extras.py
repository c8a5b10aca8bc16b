"""What an adapter may hold beside its pairs of A and B: gains, biases, saved modules, token rows, base copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from .tensors import TensorRef

# Names of the features that `resolve` refuses unless told that the caller serves them, and what each is.
FEATURES: Final[dict[str, str]] = {
    "dora": "DoRA (a lora_magnitude_vector per module)",
    "lora_bias": "lora_bias (a bias on lora_B)",
    "bias": "trained biases of the base model (bias other than 'none')",
    "alora": "aLoRA (alora_invocation_tokens)",
    "modules_to_save": "modules saved whole (modules_to_save, or a resized vocabulary)",
    "embedding": "LoRA on an embedding (lora_embedding_A and lora_embedding_B)",
    "trainable_tokens": "trained token rows (trainable_token_indices)",
    "router": "LoRA on a router",
    "experts": "LoRA on routed experts (target_parameters, or one pair per expert)",
}


@dataclass(frozen=True)
class ResolvedPair:
    """A and B of one site: y += scale * (x A^T) B^T.

    Attributes:
        site_index: Which of the sites.
        rank: Rows of A and columns of B.
        scale: The factor, from this module's own alpha and rank.
        a: A, [rank, in].
        b: B, [out, rank].
        module: The module's path in the adapter.
    """

    site_index: int
    rank: int
    scale: float
    a: TensorRef
    b: TensorRef
    module: str


@dataclass(frozen=True)
class ResolvedVector:
    """A vector [out] of one site.

    Attributes:
        site_index: Which of the sites.
        tensor: The vector.
    """

    site_index: int
    tensor: TensorRef


@dataclass(frozen=True)
class ResolvedSaved:
    """A parameter that replaces the base's.

    Attributes:
        site_index: Which of the sites.
        leaf: "weight" ([out, in], [in, out] for conv1d, [tokens, width] for an embedding) or "bias" ([out]).
        tensor: The values, in place of the base's.
    """

    site_index: int
    leaf: str
    tensor: TensorRef


@dataclass(frozen=True)
class ResolvedTokens:
    """Rows that replace those of an embedding, or of a head.

    Attributes:
        site_index: Which of the sites.
        ids: The tokens, in the order of the rows.
        rows: The rows, [tokens, width].
    """

    site_index: int
    ids: tuple[int, ...]
    rows: TensorRef


@dataclass(frozen=True)
class BaseCopy:
    """A copy of a base parameter that PEFT put into the file; it changes nothing if the base is the same.

    Attributes:
        module: The host's path of the module.
        leaf: "weight" or "bias".
        tensor: The copy; compare it with the base's to be sure.
    """

    module: str
    leaf: str
    tensor: TensorRef


@dataclass(frozen=True)
class ResolvedExpert:
    """A and B of routed experts, as the file stores them.

    Attributes:
        module: The host's path of the experts (`model.layers.0.mlp.experts`).
        projection: "gate_proj", "up_proj", "down_proj", or "gate_up_proj" for both at once.
        expert: Which expert, or None where one pair holds all of them: A [experts * rank, in] with row e * rank + j,
            B [out, rank * experts] with column j * experts + e.
        rank: The rank of one expert.
        scale: The factor.
        a: A.
        b: B.
        transposed: The delta B A is for the transpose of the parameter; None where the caller decides by shape.
    """

    module: str
    projection: str
    expert: int | None
    rank: int
    scale: float
    a: TensorRef
    b: TensorRef
    transposed: bool | None = None


@dataclass
class Extras:
    """Everything beside the pairs; all lists empty for plain LoRA.

    Attributes:
        gains: DoRA's magnitudes m, one per site that has a pair; the gain is m / |W + scale B A| by row.
        lora_biases: Biases of B; they take the pair's scale.
        biases: Biases in place of the base's, also at sites without a pair.
        saved: Weights (and their biases) in place of the base's.
        embeddings: Pairs of embeddings: A [rank, tokens], B [width, rank].
        routers: Pairs of routers.
        tokens: Rows in place of the base's.
        experts: Pairs of routed experts.
        base_copies: Copies of base parameters.
        invocation_tokens: aLoRA: active from the first token of the last occurrence of these; empty: always.
    """

    gains: list[ResolvedVector] = field(default_factory=list)
    lora_biases: list[ResolvedVector] = field(default_factory=list)
    biases: list[ResolvedSaved] = field(default_factory=list)
    saved: list[ResolvedSaved] = field(default_factory=list)
    embeddings: list[ResolvedPair] = field(default_factory=list)
    routers: list[ResolvedPair] = field(default_factory=list)
    tokens: list[ResolvedTokens] = field(default_factory=list)
    experts: list[ResolvedExpert] = field(default_factory=list)
    base_copies: list[BaseCopy] = field(default_factory=list)
    invocation_tokens: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is applied."""
        found = sum(item.tensor.nbytes for items in (self.gains, self.lora_biases, self.biases, self.saved) for item in items)
        found += sum(pair.a.nbytes + pair.b.nbytes for pairs in (self.embeddings, self.routers, self.experts) for pair in pairs)
        return found + sum(item.rows.nbytes for item in self.tokens)
