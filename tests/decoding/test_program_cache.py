"""Where compiled programs are kept between processes."""

import pathlib

import cache_settings
import jax
import pytest

from specdec_jax.decoding.program_cache import keep_programs


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Returns a new user's cache folder, and restores JAX's settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache_settings.restored():
        jax.config.update("jax_compilation_cache_dir", None)
        yield tmp_path / "specdec_jax"


def test_only_the_user_may_read_or_write_it(base):
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(base / "programs")
    assert (base / "programs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("part", ["", "programs"])
def test_nothing_is_kept_where_others_may_write(base, part, caplog):
    (base / part).mkdir(parents=True)
    (base / part).chmod(0o777)
    with caplog.at_level("INFO"):
        keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert caplog.messages[0].startswith(f"{base / part}: got ")


def test_without_a_home_folder(base, monkeypatch, caplog):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", fail)
    with caplog.at_level("INFO"):
        keep_programs()
    assert jax.config.jax_compilation_cache_dir is None and "got no home folder" in caplog.text
