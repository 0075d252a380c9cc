"""The engine: one thread that computes, and the requests it answers, as many at once as fit.

A request joins the batch as soon as there is a place and memory for it, with its own adapter, chances and
end, and leaves it when it is done, stopped or given up. The batches and caches are mlx-lm's.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import LRUPromptCache

from mlxft.available_memory import memory_limit_bytes
from mlxft.models.load import chat_template, load_model, load_tokenizer, num_positions
from mlxft.models.manifest import check_base, check_template
from mlxft.serving.memory import plan_cache
from mlxft.serving.requests import End, Failure, Piece, Refused, Request, Token
from mlxft.serving.residents import Resident, Residents
from mlxft.serving.rows import BASE, CurrentRows, RowModel, RowSlots
from mlxft.serving.sampling import Grammars
from mlxft.serving.text import StopStrings

log = logging.getLogger("mlxft")

_CACHED_PROMPTS = 64
_UNLIMITED = 1 << 20  # positions, of a model that does not say how many it was made for


@dataclass(frozen=True)
class Limits:
    """How much the engine takes on. memory_limit: GB of arrays, the model included, or "auto"."""

    max_concurrent: int = 32
    max_queue: int = 64
    memory_limit: Any = "auto"
    prompt_cache_bytes: int = 500_000_000


@dataclass
class _Active:
    """A request in the batch, and what of its answer was decoded."""

    request: Request
    detokenizer: Any
    stops: StopStrings
    cached_tokens: int
    num_tokens: int = 0
    waiting: list[Token] = field(default_factory=list)


@dataclass
class Counts:
    """What the engine has done since it started; read by other threads."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Engine:
    """Answers requests on one model with adapters by name, from `start` until `stop`."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        context: int,
        limits: Limits = Limits(),
        check_adapter: Callable[[Path], None] = lambda folder: None,
    ):
        self.tokenizer, self.context, self.limits = tokenizer, context, limits
        self.counts, self.grammars = Counts(), Grammars(tokenizer)
        current = CurrentRows()
        self._rows = RowModel(model, current)
        self.residents = Residents(model, current, check_adapter)
        self._plan = plan_cache(model)
        held = mx.get_active_memory()
        self._room = memory_limit_bytes(limits.memory_limit) - held - limits.prompt_cache_bytes
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._active: dict[int, _Active] = {}
        self._lock, self._open = threading.Lock(), 0
        self._draining = self._ended = False
        self._thread = threading.Thread(target=self._run, name="mlxft-engine", daemon=True)

    def start(self) -> "Engine":
        self._thread.start()
        return self

    # What other threads call.

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        return max(self._open - len(self._active), 0)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def check(self, request: Request) -> None:
        """Raises Refused for a request that can never be answered: unknown adapter, too long, too large."""
        if request.adapter is not None and self.residents.get(request.adapter) is None:
            names = ", ".join(r.name for r in self.residents.listed()) or "none"
            raise Refused(
                f"there is no adapter {request.adapter!r}; mounted: {names}",
                "adapter_not_found",
                404,
                "adapter",
            )
        if not request.prompt:
            raise Refused("the prompt holds no token", "empty_prompt", 400)
        if request.most_tokens > self.context:
            raise Refused(
                f"{len(request.prompt)} tokens of prompt and {request.max_tokens} of answer are more than "
                f"the {self.context} positions that the model has",
                "context_length_exceeded",
                400,
            )
        if self._plan.row_bytes(request.most_tokens) > self._room:
            raise Refused(
                f"{request.most_tokens} tokens need {self._plan.row_bytes(request.most_tokens) / 1e9:.2f} GB "
                f"of memory and there are {max(self._room, 0) / 1e9:.2f} GB; ask for fewer",
                "context_over_budget",
                400,
            )

    def submit(self, *requests: Request) -> None:
        """Hands requests over, all of them or none. Raises: Refused, also when all places are taken."""
        for request in requests:
            self.check(request)
        with self._lock:
            if self._draining or not self._thread.is_alive():
                raise Refused("the server is shutting down", "shutting_down", 503)
            if self._open + len(requests) > self.limits.max_concurrent + self.limits.max_queue:
                raise Refused("too many requests at once; try again in a moment", "too_many_requests", 429)
            self._open += len(requests)
        self._inbox.put(lambda: self._accept(requests))

    def cancel(self, request: Request) -> None:
        """Ends a request that nobody waits for any more; its place is free at the next step."""
        self._inbox.put(lambda: self._give_up(request))

    def mount(self, name: str, folders: list[str], weights: Optional[list[float]] = None) -> Resident:
        """Mounts an adapter between two steps and returns it. Raises: InputError."""
        return self._call(lambda: self.residents.mount(name, folders, weights))

    def unmount(self, name: str) -> bool:
        """Unmounts an adapter; requests that have it keep it. Returns False if there is none of the name."""
        return self._call(lambda: self.residents.unmount(name))

    def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more requests, gives those that there are `grace_s` to end, then ends the thread."""
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + grace_s
        while self._open and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        if self._thread.is_alive():
            self._inbox.put(self._end)
            self._thread.join()

    def _call(self, work: Callable[[], Any]) -> Any:
        done: Future = Future()

        def run():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        if not self._thread.is_alive():
            raise Refused("the server is shutting down", "shutting_down", 503)
        self._inbox.put(run)
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done() or not self._thread.is_alive():
                    raise Refused("the server is shutting down", "shutting_down", 503) from None

    # What only the engine's own thread does.

    def _run(self) -> None:
        self._prompts = LRUPromptCache(_CACHED_PROMPTS, self.limits.prompt_cache_bytes)
        self._new_batch()
        while not self._ended:
            self._read_inbox(wait=not self._active and not self._waiting)
            if self._ended:
                break
            try:
                self._admit()
                _, responses = self._batch.next()
                for response in responses:
                    self._deliver(response)
            except Exception:  # one step for all of them: nobody's answer can be trusted to go on
                log.exception("a step failed; its requests end with an error")
                self._fail_all("the server could not go on with this answer", 500)
                self._new_batch()
        self._fail_all("the server is shutting down", 503)
        self._batch.close()
        del self._batch, self._prompts
        mx.clear_streams()  # this thread's: the interpreter's end would find their threads at work

    def _new_batch(self) -> None:
        ends = StopSequences([(token,) for token in self.tokenizer.eos_token_ids])
        self._ends = ends
        self._batch = BatchGenerator(
            self._rows,
            completion_batch_size=self.limits.max_concurrent,
            prefill_batch_size=min(8, self.limits.max_concurrent),
            prefill_step_size=512,
            stream=mx.default_stream(mx.default_device()),
        )

    def _read_inbox(self, wait: bool) -> None:
        while True:
            try:
                self._inbox.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _accept(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            if request.adapter is not None:
                request.resident = self.residents.get(request.adapter)
                if request.resident is None:
                    request.deliver(Failure(f"the adapter {request.adapter} was just unmounted", 404))
                    self._close(request, "failed")
                    continue
                request.resident.users += 1
            self._waiting.append(request)

    def _admit(self) -> None:
        """Moves waiting requests into the batch, in order, as long as there are places and memory."""
        while self._waiting and len(self._active) < self.limits.max_concurrent:
            lengths = [each.request.most_tokens for each in self._active.values()]
            lengths.append(self._waiting[0].most_tokens)
            # A batch's caches are all as long as its longest row.
            if self._active and len(lengths) * self._plan.row_bytes(max(lengths)) > self._room:
                return
            self._insert(self._waiting.popleft())

    def _insert(self, request: Request) -> None:
        slot = BASE if request.resident is None else request.resident.slot
        cache, rest = self._prompts.fetch_nearest_cache(_key(request), request.prompt)
        if not rest:  # all of it is known, and at least one token has to go through the model
            cache, rest = self._prompts.fetch_nearest_cache(_key(request), request.prompt[:-1])
            rest = [*rest, request.prompt[-1]]
        known = len(request.prompt) - len(rest)
        processors = request.sampling.processors()
        if request.schema is not None:
            processors.append(self.grammars.processor(request.schema))
        (uid,) = self._batch.insert(
            [rest],
            max_tokens=[request.max_tokens],
            caches=[[*(cache or self._rows.new_cache()), RowSlots([slot])]],
            all_tokens=[request.prompt[:known]],
            samplers=[request.sampling.sampler()],
            logits_processors=[processors],
            stop_sequences=[self._ends],
        )
        self._active[uid] = _Active(request, self.tokenizer.detokenizer, StopStrings(request.stop), known)
        self.counts.prompt_tokens += len(request.prompt)
        self.counts.cached_tokens += known

    def _deliver(self, response: Any) -> None:
        active = self._active.get(response.uid)
        if active is None:  # stopped by this very step's command
            return
        active.num_tokens += 1
        self.counts.completion_tokens += 1
        if response.finish_reason != "stop":  # an end token has no text
            active.detokenizer.add_token(response.token)
            if active.request.num_top is not None:
                active.waiting.append(_token(response, active.request.num_top))
        if response.finish_reason is not None:
            active.detokenizer.finalize()
        text = active.stops.feed(active.detokenizer.last_segment)
        ended = response.finish_reason is not None or active.stops.hit is not None
        if ended:
            text += active.stops.rest()
        if text or (ended and active.waiting and active.stops.hit is None):
            active.request.deliver(Piece(text, active.waiting))
            active.waiting = []
        if ended:
            self._finish(response, active)

    def _finish(self, response: Any, active: _Active) -> None:
        request, reason = active.request, response.finish_reason
        if response.prompt_cache is not None:
            self._prompts.insert_cache(_key(request), response.all_tokens[:], response.prompt_cache[:-1])
        else:
            self._batch.remove([response.uid])
        if active.stops.hit is not None:
            reason = "stop"
        del self._active[response.uid]
        request.deliver(
            End(reason, len(request.prompt), active.num_tokens, active.cached_tokens, active.stops.hit)
        )
        self._close(request, reason)

    def _close(self, request: Request, reason: str) -> None:
        """Frees what a request had, once it is over."""
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        with self._lock:
            self._open -= 1
        resident, request.resident = request.resident, None
        if resident is not None:
            resident.users -= 1
            if resident.retired:
                self.residents.collect()

    def _give_up(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._close(request, "cancelled")
            return
        for uid, active in list(self._active.items()):
            if active.request is request:
                self._batch.remove([uid])
                del self._active[uid]
                self._close(request, "cancelled")

    def _fail_all(self, message: str, status: int) -> None:
        requests = [active.request for active in self._active.values()] + list(self._waiting)
        self._active.clear()
        self._waiting.clear()
        for request in requests:
            request.deliver(Failure(message, status))
            self._close(request, "failed")

    def _end(self) -> None:
        self._ended = True


def load_engine(
    folder: Path,
    dtype: str = "auto",
    limits: Limits = Limits(),
    any_template: bool = False,
    any_base: bool = False,
) -> Engine:
    """Returns an engine for the model in `folder`, not yet started. Raises: InputError.

    any_template, any_base: whether adapters may have been trained with another chat template, on other
    weights.
    """
    tokenizer = load_tokenizer(folder)
    template = chat_template(tokenizer)

    def check_adapter(adapter: Path) -> None:
        if not any_base:
            check_base([str(adapter)], folder)
        if not any_template:
            check_template(adapter, template)

    model = load_model(folder, dtype)
    return Engine(model, tokenizer, num_positions(folder) or _UNLIMITED, limits, check_adapter)


def _key(request: Request) -> Any:
    """Returns what a prompt's cache depends on beside its tokens: the adapter, as it was mounted."""
    return request.resident.serial if request.resident is not None else BASE


def _token(response: Any, num_top: int) -> Token:
    logprobs = response.logprobs
    top: list[tuple[int, float]] = []
    if num_top:
        ids = mx.argpartition(-logprobs, num_top - 1)[:num_top].tolist()
        values = logprobs[mx.array(ids)].tolist()
        top = sorted(zip(ids, values, strict=True), key=lambda each: -each[1])
    return Token(response.token, logprobs[response.token].item(), top)
