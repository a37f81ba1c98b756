"""Shared by the tests of native_kernels and native_attention."""

import numpy as np
import pytest
from kernel_widths import NARROW, WIDTHS, compiled_for

PARAMS = [
    pytest.param(width, marks=pytest.mark.slow if width in NARROW else ()) for width in WIDTHS
]
UNIT = 2.0**-24  # rounding error of a float32


@pytest.fixture(scope="module", autouse=True, params=PARAMS)
def width(request, tmp_path_factory):
    with compiled_for(request.param, tmp_path_factory.mktemp("width")):
        yield request.param


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def same(got, expected):
    """Returns whether arrays are equal bit for bit, whatever the sign and payload of a NaN."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    bits = [np.where(np.isnan(y), 0, y).astype(np.float32).view(np.int32) for y in (got, expected)]
    np.testing.assert_array_equal(*bits)
