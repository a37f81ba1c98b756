"""What the tests of main and of bad_input share."""

import pytest
from command_line import MODELS


@pytest.fixture
def generate(specdec):
    """Runs `specdec generate` with the tiny pair, short outputs and two rows a batch."""
    return lambda *argv: specdec("generate", *MODELS, "--batch_size=2", *argv)
