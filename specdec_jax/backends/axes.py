"""Annotations of arrays that many functions pass on, and the letters of axes.

Axis letters: B batch, I inputs, T queries, S cache slots or keys, L encoder length, H heads, K
features of one head, D width, E width of the encoder's output, F outputs of a weight, V vocabulary,
G γ. `*N` are any axes; `#B` is B or 1.
"""

from jaxtyping import Array, Bool, Float, Float32, Int, Int32

PerRow = Int[Array, " B"]
Tokens = Int[Array, "B T"]
Valid = Bool[Array, "*N"] | None  # False at positions that need not be computed
States = Float[Array, "B T D"]
AnyStates = Float[Array, "*N D"]
Logits = Float32[Array, "B T V"]
TokenAndLogprob = tuple[Int32[Array, "B T"], Float32[Array, "B T"]]  # and log-probabilities
Inputs = Int[Array, "B L"]
Layers = int | tuple[int, ...] | None  # the first so many, those with these numbers, or all
Mask = Bool[Array, "B L"]  # True at tokens
Encoded = Float[Array, "B L E"]
Query = Float[Array, "*N HK"]
ByHeads = Float[Array, "B H T K"]
# Cosines and sines of the angles by which queries and keys are rotated.
Rotation = tuple[Float[Array, "*M halfK"], Float[Array, "*M halfK"]]
Seen = Bool[Array, "#B 1 T S"] | None  # True where a query may attend to a key
# Position biases, added to scores: per query of a call; for the last of P query positions, from
# which the CPU's kernels take those of any query by distance.
Bias = Float[Array, "#B H T S"] | Float[Array, "H P"] | None
