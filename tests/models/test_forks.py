"""A forked child gets an error at once, and its parent continues."""

import os
import warnings

import pytest
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.models import forks

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork"),
]


def in_child(function) -> str:
    """Returns what `function` raises in a forked child, or "nothing".

    The child ends after a while whatever it does.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of every fork
        child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)  # a call that hangs
        try:
            function()
            message = "nothing"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        message = file.read()
    os.waitpid(child, 0)
    return message


CALLS = {
    "generate": lambda model: sd.generate(model, [[3, 1]], max_new_tokens=2),
    "stream of many": lambda model: sd.decode_stream(model, [[3, 1]], max_new_tokens=2),
    "prepare": lambda model: sd.prepare(model, [[3, 1]], max_new_tokens=2),
    "logits": lambda model: model.logits([[3, 1]], [[0]]),
    "load": lambda model: sd.load("ende/target"),
    "a model": lambda model: tiny_t5(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_child_gets_an_error(name):
    model = tiny_t5(0)
    message = in_child(lambda: CALLS[name](model))
    assert (
        message.startswith("RuntimeError: process ")
        and 'multiprocessing.get_context("spawn")' in message
    )
    assert f"a fork of process {os.getpid()}" in message
    forks.check_process()  # the parent is as it was


def test_a_process_that_has_not_computed_may_fork(monkeypatch):
    monkeypatch.setattr(forks, "_owner", None)
    assert in_child(forks.check_process) == "nothing"
