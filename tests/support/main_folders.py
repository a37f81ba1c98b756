"""Shared by the tests of main and bad_input."""

import pytest
from command_line import MODELS


@pytest.fixture
def generate(specdec):
    """Returns a function that runs `specdec generate` with the tiny pair and two rows a batch."""
    return lambda *argv: specdec("generate", *MODELS, "--batch_size=2", *argv)
