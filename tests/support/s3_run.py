"""Reads and writes `s3://` of moto's server in a process of its own, and prints JSON.

s3fs looks for the server in the environment when it is imported.

    python s3_run.py FOLDER
"""

import json
import os
import pathlib
import sys

import make_checkpoints as make
import numpy as np
from moto.server import ThreadedMotoServer
from object_store_run import attempt

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",  # nobody looks for credentials on the network
}


def check(folder: pathlib.Path, url: str) -> dict:
    """Loads every format, and writes files and folders, one of which is a mirror's."""
    os.environ.update(ENVIRONMENT | {"FSSPEC_S3_ENDPOINT_URL": url})
    import fsspec

    import specdec_jax as sd
    from specdec_jax.checkpoints import loader
    from specdec_jax.files import mirrors, writing
    from specdec_jax.files.places import make_path

    system = fsspec.filesystem("s3")
    system.mkdir("bucket")

    def read(place):
        opened = loader.open_checkpoint(loader.resolve(place), None)
        got = {name: tensor.load(np.float32) for name, tensor in opened.parameters.items()}
        return got.keys() == make.PARAMS.keys() and all(
            (got[name] == make.PARAMS[name]).all() for name in got
        )

    results = {}
    for form in make.FORMATS:
        make.FORMATS[form](folder / form)
        for path in (folder / form).rglob("*"):
            if path.is_file():
                system.put_file(str(path), f"bucket/{path.relative_to(folder).as_posix()}")
        results[form] = attempt(lambda: read(f"s3://bucket/{form}"))
    results["written"] = attempt(
        lambda: str(sd.convert("s3://bucket/own", "s3://bucket/new", "t5x").folder)
    )
    results["read again"] = attempt(lambda: read("s3://bucket/new"))
    content = bytes(range(256)) * (6 << 12)
    (folder / "large").write_bytes(content)
    place = make_path("s3://bucket/large")
    place.upload(folder / "large")
    results["large"] = place.read_bytes() == content
    writing.write_file("s3://bucket/small", "text")
    results["small"] = make_path("s3://bucket/small").read_bytes().decode()
    make_path("s3://bucket/parts/x").create(b"1")
    results["twice"] = attempt(lambda: make_path("s3://bucket/parts/x").create(b"2"))
    make_path("s3://bucket/parts/x").unlink()
    results["removed"] = make_path("s3://bucket/parts/x").exists()
    results["no bucket"] = attempt(lambda: read("s3://nothing/there"))
    for more in ("a", "b"):
        with mirrors.open_folder("s3://bucket/run") as here:
            (here / "checkpoints" / more).mkdir(parents=True)
            (here / "checkpoints" / more / "weights").write_text(more)
    with mirrors.read_folder("s3://bucket/run") as here:
        files = [path for path in here.rglob("*") if path.is_file()]
        results["run"] = sorted(path.relative_to(here).as_posix() for path in files)
    return results


if __name__ == "__main__":
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        print(json.dumps(check(pathlib.Path(sys.argv[1]), f"http://{host}:{port}")))
    finally:
        server.stop()
