"""Plain against speculative decoding on one machine: wall time, α, c, v, predicted and measured improvement.

The arms are interleaved batch by batch, since the speed of a shared machine drifts; compile time is kept apart; both encoders and the
tokenisation are inside the wall time; one counter counts the tokens of both arms. What a step costs is timed singly,
many steps inside one program, so that dispatch does not count.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import analysis, sampling
from specdec_jax.generate import GenerationResult, bucket, generate
from specdec_jax.models.base import LanguageModel, Network
