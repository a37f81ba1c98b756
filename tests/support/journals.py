"""Opens a journal in this process or in another one, which has to import what it runs."""

from specdec_jax.commands.resumable_output import Journal

SETTINGS = {"gamma": 4, "stop": ("a", "ü"), "sentences": "0123"}


def journal(tmp_path, settings=SETTINGS, total=3):
    return Journal(tmp_path / "out.txt", settings, total)


def try_to_open(tmp_path, queue):
    """Opens a journal and puts the outcome into the queue."""
    try:
        journal(tmp_path)
        queue.put("opened")
    except ValueError as error:
        queue.put(str(error))
