"""Self-speculation: the target's own weights in int8 as drafter, without a second checkpoint."""

from typing import Any, ClassVar

import jax

from specdec_jax.drafters.early_exit import check_own
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only


@jax.tree_util.register_pytree_node_class
class SelfDrafter(ModelDrafter):
    """A drafter with the target's own weights, those of decoder steps in int8.

    It has a cache of its own. The target's encoder output, and the embeddings, norms and weights
    for the encoder's output, are the target's. The 8 bits are kept beside the target's weights and
    multiplied as by `ModelDrafter` with `int8`.

    Attributes:
      model: the target; no other can be drafted for.
    """

    reads_encoder: ClassVar[Any] = property(lambda self: not is_decoder_only(self.network))

    def __init__(self, model: LanguageModel):
        """Rounds the target's weights.

        Raises:
          ValueError: the target's weights are in int8 already.
        """
        arguments.check_model("model", model)
        if model.quantized:
            raise ValueError(
                f"drafter: got the 8 bits of a target that is in int8 itself ({model.name}), "
                "expected a target that "
                "is not (quantize='none' widens weights that are stored so)"
            )
        super().__init__(model, int8=True)

    @property
    def name(self) -> str:
        return f"{self.model.name} in int8"

    @property
    def second_model(self) -> None:
        return None

    @property
    def encoders(self) -> tuple[Network, ...]:
        return ()

    def check(self, target: LanguageModel) -> None:
        check_own(self.model, target, "the 8 bits")
