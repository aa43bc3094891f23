"""The engine: a trunk and a pool on the device, a store in host memory, a manager, and the loop that ties them.

Nothing else knows all parts. One engine runs one generation at a time; what belongs to a run is in `session.py`.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.decode.block_diffusion import BlockDiffusion
from oled_jax.decode.events import Event, FinishEvent, Result
from oled_jax.decode.whole_text import one_block
from oled_jax.errors import UsageError
from oled_jax.interrupts import interrupts_held
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.registry import assemble
from oled_jax.offload.carriers.base import Mover
from oled_jax.offload.carriers.registry import AUTO, make_mover
from oled_jax.offload.cpu_experts.registry import make_cpu_experts
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.pool import Pool, empty_pool
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.offload.schedule import Move
from oled_jax.offload.shares import CacheShares
from oled_jax.offload.statistics import CacheStatistics, routed_loads
from oled_jax.offload.store import PageStore, aligned_empty, allocate_store
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo, Policy
from oled_jax.prefix import KeptPrefix
from oled_jax.program import (
    Packed,
    PassInputs,
    PassSpec,
    TrunkArrays,
    fill_pool,
    forward_pass,
    resident_pass,
    trunk_arrays,
    trunk_head,
)
from oled_jax.recording import Recording, open_recording
from oled_jax.session import Session
from oled_jax.traces.files import TraceWriter
from oled_jax.whole_text_session import WholeTextSession

Cache = TypeVar("Cache", bound=KVCache | None)
Followed = TypeVar("Followed")

MOST_SHAPES = 4  # of passes whose hidden states keep their place; a run has three


@runtime_checkable
class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a generator of random ones."""

    def read_trunk(self, dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
        """Every trunk tensor by state path."""
        ...

    def read_pages(self, moe_layer: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        """Fills the pages of one MoE layer in place, [E, 2F, D] and [E, D, F]."""
        ...

    def check_finite(self) -> None:
        """Raises UsageError if something that was read is not a finite number."""
        ...


class Engine:
    """A model ready to generate.

    Args:
      config: the model; its dtype is that of all weights but the router's bias.
      trunk: the trunk's arrays, on the device (`load_trunk`).
      store: pages in host memory; None if the pool holds every page.
      pool: device pages, owned by the engine from now on.
      manager: plans; None if the pool holds every page.
      carrier: "auto", or the name of what brings plans and pages to the device.

    Raises:
      UsageError: the carrier cannot run here.
    """

    def __init__(
        self,
        config: ModelConfig,
        trunk: TrunkArrays,
        *,
        pool: Pool,
        store: PageStore | None = None,
        manager: CacheManager | None = None,
        carrier: str = AUTO,
    ) -> None:
        self.config = config
        self.trunk = trunk
        self.head = trunk_head(config, trunk)
        self.store = store
        self.manager = manager
        # Before the pool: an engine's parts end in this order, and pages on their way must land in memory that is ours.
        self.mover: Mover | None = None
        if manager is not None and store is not None:
            self.mover = make_mover(carrier, store, manager)
            self.mover.attach(pool)
            manager.overlapping = self.mover.overlaps
        self.statistics = manager.statistics if manager else _resident_statistics(config)
        self._pool = pool
        self._hidden: dict[tuple[int, ...], jax.Array] = {}  # of the last pass, by the shape of its tokens
        self.cpu_experts = manager.cpu_experts if manager else None
        self._running = threading.Lock()
        self._warm: set[Hashable] = set()
        self._recording: Recording | None = None
        self._shares: CacheShares | None = None

    @property
    def pool(self) -> Pool:
        """The device pages. Every pass donates them: do not keep a reference over one."""
        return self._pool

    def generate(
        self, prompts: Sequence[Sequence[int]], decoding: DecodingConfig, *, batch: int | None = None
    ) -> list[Result]:
        """Decodes prompts (token ids), all at once or `batch` of them. Raises as `stream` does."""
        results: dict[int, Result] = {}
        for event in self.stream(prompts, decoding, batch=batch):
            if isinstance(event, FinishEvent):
                results[event.row] = event.result
        return [results[row] for row in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: DecodingConfig,
        *,
        batch: int | None = None,
        kept: KeptPrefix | None = None,
    ) -> Iterator[Event]:
        """Decodes prompts and yields what happens as it happens.

        Args:
          batch: rows that are decoded together. A row that ends leaves its place to the next prompt, and when none
            waits it is idle: the shape stays, so nothing is compiled anew. None: all prompts at once.
          kept: keys and values of an earlier run, and where this one's are left; for a single prompt.

        Raises:
          UsageError: a token id lies outside the vocabulary, the model cannot be decoded like this, or a trace of
            another block length is being recorded.
          RuntimeError: another run of this engine has not ended, or a pass failed (the engine can be used again).
          Exception: whatever a policy raised, as itself.
        """
        self._check_ids(prompts, decoding)
        self._check_way(decoding)
        if not prompts:
            return
        if kept is not None and decoding.whole_text:
            raise ValueError("a whole text leaves no keys and values that the next could keep")
        if kept is not None and (len(prompts) > 1 or kept.block_length != decoding.block_length):
            raise ValueError("a kept prefix is for one prompt, and of one block length")
        session_type: type[Session] = Session
        if decoding.whole_text:
            session_type, decoding = WholeTextSession, one_block(prompts, decoding)
        with self._alone():
            places = min(batch or len(prompts), len(prompts))
            if self._recording is not None:
                self._recording.begin_run(places, decoding)
            session = session_type(self, prompts, decoding, places, kept)
            self._set_shares(session.shares)
            try:
                for event in BlockDiffusion(session, decoding).run(prompts, places):
                    yield session.with_share(event) if isinstance(event, FinishEvent) else event
            finally:
                self._set_shares(None)
                session.close()

    def prepare(self, prompt_length: int, decoding: DecodingConfig, *, kept: KeptPrefix) -> None:
        """Compiles the programs of runs of one such prompt with a kept prefix, ahead of them; runs nothing."""
        with self._alone():
            Session(self, [[decoding.mask_id] * prompt_length], decoding, 1, kept).close()

    def _set_shares(self, shares: CacheShares | None) -> None:
        self._shares = shares
        if self.manager is not None:
            self.manager.shares = shares

    @contextmanager
    def record(
        self,
        path: str | os.PathLike[str],
        decoding: DecodingConfig,
        *,
        hidden: bool = False,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[TraceWriter]:
        """Records every run inside to one trace file (docs/traces.md).

        A pass that fails is not in it, nor what was resident when it began.

        Args:
          path: the file to make or to replace.
          decoding: of the runs; they may differ from it in all but the block length.
          hidden: compare layer inputs with those of earlier passes, too.
          model: what the model is called.
          settings: what else the file should say about the runs, JSON values.

        Yields:
          the writer, which knows how much it has written.

        Raises:
          UsageError: the file cannot be written.
          RuntimeError: a run or another recording of this engine has not ended.
        """
        if self._recording is not None or self._running.locked():
            raise RuntimeError("a trace begins between runs, one at a time: finish what this engine is doing first")
        described = {**self._cache_settings(), **(settings or {})}
        with open_recording(
            self.config, decoding, Path(path), hidden=hidden, model=model, settings=described
        ) as recording:
            self._attach(recording)
            try:
                yield recording.writer
            finally:
                self._attach(None)

    @property
    def records_hidden(self) -> bool:
        """Layer inputs are being compared."""
        return self._recording is not None and self._recording.hidden

    def _attach(self, recording: Recording | None) -> None:
        self._recording = recording
        if self.manager is not None:
            self.manager.recorder = recording.recorder if recording is not None else None

    def _cache_settings(self) -> dict[str, Any]:
        """What a replay needs to be the same run again."""
        if self.manager is None:
            return {"policy": "all"}
        return {
            "policy": self.manager.policy.name,
            "total_slots": self.manager.policy.context.total_slots,
            "spare": self.manager.spare,
            "carrier": self.mover.name if self.mover is not None else None,
        }

    def close(self) -> None:
        """Ends transfers and the threads of the CPU backend; the policy may keep what it learned.

        The engine cannot be used afterwards.
        """
        self._hidden.clear()
        if self.mover is not None:
            self.mover.reset()
        if self.cpu_experts is not None:
            self.cpu_experts.close()
        if self.manager is not None:
            self.manager.policy.close()

    def run_pass(
        self,
        info: PassInfo,
        inputs: PassInputs,
        cache: Cache,
        block_length: int,
        then: Callable[[jax.Array], Followed],
    ) -> tuple[Cache, Followed]:
        """One forward pass, complete when this returns.

        Args:
          cache: None: over whole texts, for models that are `bidirectional`.
          then: starts what follows on the device from the hidden states [B, T, D], before the pass is waited for; it
            must not keep them, since the next pass of this size writes over them.

        Returns:
          the cache, and what `then` returned.
        """
        spare = self.manager.spare if self.manager else None
        uses_cpu = self.cpu_experts is not None and info.kind is not PassKind.PREFILL
        if self.manager is not None:
            self.manager.begin_pass(info)
        recording = self._recording
        if recording is not None:
            recording.begin_pass(info, inputs)
        history = recording.history if recording is not None and inputs.iterations is not None else ()
        gates = recording is not None and self.manager is None
        spec = PassSpec(
            config=self.config,
            block_length=block_length,
            spare=spare,
            uses_cpu=uses_cpu,
            carrier=self.mover.name if self.mover else "",
            gates=gates,
        )
        layers = self.mover.operands if self.mover else ()
        program = resident_pass if self.manager is None else forward_pass
        # A pass that has begun is waited for, and what it left is ours: whatever comes meanwhile waits, too.
        with interrupts_held():
            error: BaseException | None = None
            try:
                scratch = self._scratch(inputs.tokens.shape)
                pool, cache, outputs = program(
                    spec, self.trunk, layers, self._pool, cache, Packed.of(inputs), scratch, history
                )
                try:
                    followed = then(outputs.hidden)
                except BaseException as failure:  # raised when the pass is over
                    error = failure
                # All of it is ready, or broken, when one array is: to ask each of some fifty takes 0.1 ms.
                outputs.hidden.block_until_ready()
                self._pool, self._hidden[inputs.tokens.shape] = pool, outputs.hidden
            except BaseException:
                self._rebuild_pool()
                raise
            if self.manager is not None:
                try:
                    self.manager.end_pass()
                except BaseException:
                    if self.mover is not None:
                        self.mover.reset()
                    raise
            if error is not None:
                raise error
            if outputs.routes is not None:
                self._count_routes(info, np.asarray(outputs.routes))
            if recording is not None:
                recording.end_pass(outputs)
        return cache, followed

    def _scratch(self, tokens: tuple[int, ...]) -> jax.Array:
        """Device memory for the hidden states of a pass over tokens of this shape: its last ones."""
        found = self._hidden.pop(tokens, None)
        if found is not None:
            return found
        if len(self._hidden) == MOST_SHAPES:
            del self._hidden[next(iter(self._hidden))]
        # Committed, as what a pass returns is: else the second pass would compile anew.
        empty = jnp.zeros((*tokens, self.config.hidden_size), jnp.dtype(self.config.dtype))
        return jax.device_put(empty, jax.local_devices()[0])

    @contextmanager
    def warm_up(self, kind: PassKind, shape: Hashable) -> Iterator[bool]:
        """Passes inside compile programs of this shape and are planned and counted by nobody.

        Yields:
          whether this is the first time for this kind of pass and shape.
        """
        program = kind, shape, self._recording is not None, self.records_hidden
        statistics = self.statistics
        self.statistics = _resident_statistics(self.config)
        self._set_idle(True)
        try:
            yield program not in self._warm
        finally:
            self.statistics = statistics
            self._set_idle(False)
        self._warm.add(program)

    def _set_idle(self, idle: bool) -> None:
        if self.manager is not None:
            self.manager.idle = idle
        if self._recording is not None:
            self._recording.recorder.idle = idle

    def begin_request(self, prompt: Int32[np.ndarray, " P"], place: int = 0) -> None:
        """A request starts, in this place of the batch; others may be running."""
        if self._recording is not None:
            self._recording.recorder.begin_request(prompt, place)
        if self.manager is not None:
            self._stage(self.manager.begin_request(prompt))

    def begin_block(self) -> None:
        """Some row enters a new block."""
        if self._recording is not None:
            self._recording.recorder.begin_block()
        if self.manager is not None:
            self._stage(self.manager.begin_block())

    def end_iteration(self, outcome: IterationOutcome) -> None:
        """A pass is over and the decoder has acted."""
        if self._recording is not None:
            self._recording.recorder.end_iteration(outcome)
        if self.manager is not None:
            self._stage(self.manager.end_iteration(outcome))

    def _stage(self, moves: Sequence[Move]) -> None:
        """Carries out the manager's staging."""
        if moves and self.mover is not None:
            self._pool = self.mover.stage(self._pool, moves)

    def _count_routes(self, info: PassInfo, routes: Int[np.ndarray, "L N K"]) -> None:
        """Every page is resident: each activated expert is a hit."""
        E = self.config.num_experts
        activated = routed_loads(routes, info.token_mask, E) > 0
        for layer, count in enumerate(np.count_nonzero(activated, axis=1).tolist()):
            self.statistics.add(info.kind, layer, activated=count, hits=count, capacity=E)
            if self._shares is not None:
                hits = activated[layer].nonzero()[0]
                self._shares.add(routes[layer], info.token_mask, hits, hits[:0], count)

    @property
    def handle(self) -> np.int32:
        """By which programs find this engine."""
        return np.int32(0) if self.mover is None else self.mover.handle

    def _rebuild_pool(self) -> None:
        """A pass that raised has consumed the donated pool; without a store its pages cannot be had again."""
        if self.manager is None or not any(array.is_deleted() for array in self._pool):
            return
        self.manager.forget()
        slots, hidden = self._pool.gate_up.shape[0], self.config.hidden_size
        if self.mover is not None:
            self.mover.reset()
        self._pool = empty_pool(slots, hidden, self.config.moe_intermediate_size, jnp.dtype(self.config.dtype))
        if self.mover is not None:
            self.mover.attach(self._pool)

    def _check_ids(self, prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> None:
        V = self.config.vocab_size
        for row, prompt in enumerate(prompts):
            outside = [token for token in prompt if not 0 <= token < V]
            if outside:
                raise UsageError(f"prompt {row}: token id {outside[0]} is outside the vocabulary of {V}")
        for name in ("mask_id", "pad_id"):
            token = getattr(decoding, name)
            if token is not None and token >= V:
                raise UsageError(f"{name} {token} is outside the vocabulary of {V}")

    def _check_way(self, decoding: DecodingConfig) -> None:
        if decoding.whole_text != self.config.bidirectional:
            way = "whole texts" if self.config.bidirectional else "block by block"
            family = self.config.family
            raise UsageError(f"models of family {family} decode {way}, whole_text is {decoding.whole_text}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this engine is already generating: finish or close that run first, or load another")
        try:
            yield
        finally:
            self._running.release()


def _resident_statistics(config: ModelConfig) -> CacheStatistics:
    return CacheStatistics(num_layers=config.num_moe_layers, num_experts=config.num_experts, page_bytes=0)


def load_resident(config: ModelConfig, source: WeightSource) -> Engine:
    """An engine whose pool holds every page (policy `all`): no store, no manager, no callbacks.

    Args:
      config: the model; its dtype is what the weights are cast to.
      source: the weights.
    """
    trunk = load_trunk(config, source)
    L, E, D, F = config.num_moe_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size
    dtype = jnp.dtype(config.dtype)
    pool = empty_pool(L * E, D, F, dtype)
    staging = aligned_empty((E, 2 * F, D), dtype), aligned_empty((E, D, F), dtype)
    for layer in range(L):
        source.read_pages(layer, *staging)
        # The staging arrays are filled anew for the next layer, so this copy must be complete before.
        pool = jax.block_until_ready(fill_pool(pool, *staging, np.int32(layer * E)))
    source.check_finite()
    return Engine(config, trunk, pool=pool)


def load_offloaded(
    config: ModelConfig,
    source: WeightSource,
    policy: Policy,
    *,
    spare: int = DEFAULT_SPARE,
    cpu_backend: str | None = None,
    cpu_threads: int | None = None,
    carrier: str = AUTO,
) -> Engine:
    """An engine that pages experts between host and device under a policy.

    Args:
      config: the model; its dtype is what the weights are cast to.
      source: the weights.
      policy: built for this model and capacity.
      spare: slots beyond the capacity that transfers land in.
      cpu_backend: what computes the misses that the policy leaves to the CPU, see `make_cpu_experts`.
      cpu_threads: its worker threads; None: the backend's default.
      carrier: what brings plans and pages to the device, see `carriers.registry`.
    """
    trunk = load_trunk(config, source)
    L, E, D, F = config.num_moe_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size
    dtype = jnp.dtype(config.dtype)
    store = allocate_store(L, E, D, F, dtype)
    for layer in range(L):
        source.read_pages(layer, *store.views(layer))
    source.check_finite()
    cpu_experts = None
    if cpu_backend is not None:
        cpu_experts = make_cpu_experts(cpu_backend, [store.views(layer) for layer in range(L)], threads=cpu_threads)
    page_bytes = config.page_parameters * dtype.itemsize
    manager = CacheManager(policy, spare=spare, page_bytes=page_bytes, cpu_experts=cpu_experts)
    pool = empty_pool(manager.residency.num_slots, D, F, dtype)
    return Engine(config, trunk, pool=pool, store=store, manager=manager, carrier=carrier)


def load_trunk(config: ModelConfig, source: WeightSource) -> TrunkArrays:
    """The trunk's arrays, on the device."""
    _, state = assemble(config, source.read_trunk(jnp.dtype(config.dtype)))
    return trunk_arrays(jax.device_put(state, jax.local_devices()[0]))
