"""Bridges into other frameworks, each behind an extra."""

import os

os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "3"
)  # read when TensorFlow starts, which says much; its errors are exceptions
