"""The sizes of a model on which memory and time depend, and what one parameter of each costs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tower:
    """A vision tower, as Qwen-VL has it: blocks over patches, then patches merged into tokens."""

    parameters: int
    depth: int
    hidden: int
    intermediate: int
    head_width: int
    pixels: int
    """Numbers that describe one patch."""
    merge: int
    """Patches that become one token."""
    patch_side: int
    patch_weights: int
    """Factors that each patch is multiplied by."""
    token_weights: int
    """Factors that each merged token is multiplied by."""

    @property
    def token_pixels(self) -> int:
        """Pixels of the picture behind one token."""
        return self.patch_side**2 * self.merge


@dataclass(frozen=True)
class Shape:
    """A model, by numbers alone."""

    kind: str
    """The name of its class."""
    parameters: int
    trunk_parameters: int
    """Without the language-model head, if that has weights of its own: what a critic copies."""
    layer_parameters: int
    """Of all text layers."""
    layer_weights: int
    """Factors that each token is multiplied by in all of them."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    """Whether the head is the embedding."""
    head_norms: bool
    """Whether queries and keys are normed (Qwen3)."""
    full_attention: bool
    """Whether every layer attends to everything before."""
    tower: Tower | None
    sizes: tuple[tuple[int, bool], ...]
    """Of each parameter: how many numbers, and whether it belongs to the vision tower."""
    linears: tuple[tuple[str, int, int], ...] = ()
    """Of each linear layer but the head: its name, and how many numbers go in and come out."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_width

    @property
    def embedding(self) -> int:
        """Numbers of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def critic_parameters(self) -> int:
        """The trunk, and one value from its last state."""
        return self.trunk_parameters + self.hidden + 1
