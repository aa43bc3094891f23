"""An engine's side of a trace: the recorder, and the device memory of earlier layer inputs.

Exists while a trace is recorded. The engine tells it what it tells its cache manager; routes come from the manager
or, where every page is resident, from the program's outputs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.errors import UsageError
from oled_jax.offload.observed import History, empty_history
from oled_jax.policies.base import PassInfo
from oled_jax.program import PassInputs, PassOutputs
from oled_jax.traces.files import TraceWriter
from oled_jax.traces.record import TraceRecorder, recorded_header, traced_block_length


class Recording:
    """One trace that is being recorded.

    Args:
      config: the model.
      writer: of the trace; made for the model and one block length.
      hidden: compare layer inputs, too.

    Attributes:
      history: layer inputs of earlier passes. Every pass over a block donates them.
    """

    def __init__(self, config: ModelConfig, writer: TraceWriter, *, hidden: bool) -> None:
        self.hidden = hidden
        self.writer = writer
        self.recorder = TraceRecorder(writer.header, writer, hidden=hidden)
        self.history: History = ()
        self._config = config

    def begin_run(self, batch: int, decoding: DecodingConfig) -> None:
        """So many requests are about to begin. Raises UsageError if the trace is of another block length."""
        recorded, block_length = self.writer.header.block_length, traced_block_length(decoding)
        if block_length != recorded:
            raise UsageError(
                f"trace {self.writer.path} is of block length {recorded}, this run of {block_length}: record another"
            )
        if self.hidden:
            history = empty_history(self._config, batch, decoding.block_length)
            # Committed, as what a pass returns is: else the second pass would compile anew.
            self.history = jax.device_put(history, jax.local_devices()[0])

    def begin_pass(self, info: PassInfo, inputs: PassInputs) -> None:
        """A forward pass starts."""
        self.recorder.begin_pass(info, np.asarray(inputs.starts))

    def end_pass(self, outputs: PassOutputs) -> None:
        """Takes what the program observed."""
        if outputs.routes is not None and outputs.gates is not None:
            routes = zip(np.asarray(outputs.routes), np.asarray(outputs.gates), strict=True)
            for layer, (ids, gates) in enumerate(routes):
                self.recorder.on_route(layer, ids, gates)
        if outputs.cosine is not None:
            self.history = outputs.history
            self.recorder.add_cosine(np.asarray(outputs.cosine))


@contextmanager
def open_recording(
    config: ModelConfig,
    decoding: DecodingConfig,
    path: Path,
    *,
    hidden: bool,
    model: str,
    settings: Mapping[str, Any],
) -> Iterator[Recording]:
    """A recording to a new file, which is finished at the end. See `Engine.record`."""
    header = recorded_header(config, decoding, model=model, settings=settings)
    with TraceWriter(path, header) as writer:
        yield Recording(config, writer, hidden=hidden)
