"""Fixtures that every test folder uses: the golden reference data, a tiny model, a cache directory; once a session.

Imports nothing heavy: the process that only hands out the tests to others reads this file, too.
"""

import importlib.machinery
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parent / "golden" / "golden.tar.xz"

# XLA's own passes, which decide what is fused, donated and copied, run as they always do.
FLAGS = {
    # Compiling is most of what the tests cost. Without LLVM's optimisation it costs a third less. Programs then round
    # otherwise than users' do (8e-6 in logits of the golden model), but all of them alike, so what must be equal to the
    # bit is.
    "--xla_backend_optimization_level": "0",
    # On a GPU each process tunes its matrix products for itself: between programs that two processes compiled, float32
    # differed by 2e-5 where a test wants the same bits.
    "--xla_gpu_autotune_level": "0",
}
os.environ["XLA_FLAGS"] = " ".join(
    [
        *os.environ.get("XLA_FLAGS", "").split(),
        *(f"{flag}={value}" for flag, value in FLAGS.items() if flag not in os.environ.get("XLA_FLAGS", "")),
    ]
)

# A shell that starts this in the background ignores Ctrl-C for all of it; tests send it to commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many tests compile the same programs in different processes: the first one to finish leaves its own to the others.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": None,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "NUMBA_CACHE_DIR": None,
}


def pytest_configure(config: pytest.Config) -> None:
    """Makes the programs' cache, which ends with the session. Processes that run tests inherit it."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="oled_jax_programs_")
    os.environ |= {name: value or folder.name for name, value in CACHE.items()}
    config.add_cleanup(folder.cleanup)


def _prefer_the_installed_package() -> None:
    """`python -m pytest` finds the sources first, but only what was installed has the compiled extension."""
    root = Path(__file__).resolve().parents[1]
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != root]
    built_here = any((root / "oled_jax").glob("_native*.so"))
    if not built_here and importlib.machinery.PathFinder.find_spec("oled_jax", elsewhere):
        sys.path[:] = elsewhere


_prefer_the_installed_package()


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the golden reference data (its README.md says what each file holds)."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random checkpoint with a byte tokenizer (`tiny_model.RAW_CONFIG`)."""
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def talking_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    from tiny_model import write_talking_model

    return write_talking_model(tiny_model, tmp_path_factory.mktemp("talking") / "model")


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles and compiled programs that commands keep stay out of the user's own cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def roomy_kv_cache() -> Iterator[None]:
    """KV caches of at least 192 positions, so that prompts of different lengths share programs (test_session.py)."""
    from oled_jax import session

    with pytest.MonkeyPatch.context() as patch:
        capacity = session.kv_capacity
        patch.setattr(session, "kv_capacity", lambda *run: max(192, capacity(*run)))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import jax

    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
