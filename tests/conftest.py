"""Tests run on the CPU, in float32 unless a test asks for more, and with the same examples every time."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("project")
