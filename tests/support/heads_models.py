"""Shared by the tests of heads and heads_training."""

import functools

import numpy as np
from random_heads_of import random_heads
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.models import heads as heads_module


@functools.cache
def t5():
    return tiny_t5(1)


@functools.cache
def drafter(share: bool):
    """Returns untrained heads that repeat the target's last token, or nearly.

    So they are right now and then.
    """
    if share:
        return random_heads(t5(), 0.1, share_head=True)
    weight = np.asarray(heads_module.head_weight(t5().config, t5().params))
    own = random_heads(t5(), 0.1)
    params = {
        name: {**head, "logits_dense": {"kernel": weight}} for name, head in own.params.items()
    }
    return sd.HeadsDrafter.for_target(t5(), own.config, params)
