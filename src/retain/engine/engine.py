"""The engine: requests go in by `add`, and every `step` computes some of their tokens.

A step has two halves. `launch` is the table of contents of this package: propose drafts, schedule, build the batch, run
the model, sample, commit. `collect` waits for the tokens and returns them. The caller makes text of them, and ends
requests whose text ends by `finish`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from time import perf_counter

from torch import Tensor

from retain.engine.batch_builder import count_rows, list_tokens, stack_states
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import Drafter
from retain.engine.output import StepOutput
from retain.engine.pending_step import PendingStep, insert_pending_tokens
from retain.engine.prompt_sharing import PromptSharing
from retain.engine.request import FinishReason, Request, SampledTokens
from retain.engine.runner import Runner
from retain.engine.sampler import Samples, sample, select_rows
from retain.engine.scheduler import ScheduledRequest, Scheduler
from retain.engine.spec_decode.speculator import Speculator
from retain.engine.tensor_parallel import Driver
from retain.kernels.api import Batch
from retain.kernels.transfers import to_device_like
from retain.kv.manager import KVCacheManager

log = logging.getLogger(__name__)


class Engine:
    """Compute requests with one model and one cache. Not thread-safe: `add`, `step` and `cancel` run one by one."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCacheManager,
        drafter: Drafter | None = None,
        prompt_activations: str = "int8",
    ):
        self.runner = runner
        self.cache = cache
        self.prompt_activations = prompt_activations
        self.speculator = Speculator(drafter)
        self.sharing = PromptSharing()
        self.scheduler = Scheduler(cache, self.sharing)
        self.depth = 1  # steps that `step` has pending before it waits for the oldest
        self.pending_steps: deque[PendingStep] = deque()
        self.num_computed_tokens = 0  # since the start, of all requests
        self.driver = Driver.of(cache)  # of other ranks
        self._collected_at = 0.0  # seconds, of perf_counter: when the last step was read

    def add(self, *requests: Request) -> None:
        """Enqueue requests; equal prompts among them are computed once, as far as policies allow.

        Raises ValueError when one of them could never fit; then none is enqueued.
        """
        for request in requests:
            request.max_model_len = min(request.max_model_len, self.cache.max_model_len)
        leaders = self.sharing.group(requests)
        try:
            for request in requests:
                self.scheduler.check_fits(request)
                request.plan_scoring()
                request.needs_token_values = self._needs_token_values(request)
        except ValueError:
            for leader in leaders:
                self.sharing.release(leader)
            raise
        for request in leaders:
            self.scheduler.enqueue(request)

    def step(self) -> StepOutput:
        """Launch steps until `depth` of them are pending, and collect the oldest. Returns the tokens that it gave."""
        while len(self.pending_steps) < self.depth and self.launch():
            pass
        return self.collect() if self.pending_steps else self._end_stalled()

    def launch(self) -> PendingStep | None:
        """Begin a step: propose drafts, schedule, run the model, sample and commit, without waiting for tokens.

        Returns None where nothing can be computed now.
        """
        if any(step.logits for step in self.pending_steps):
            return None  # the next step writes over them
        started = perf_counter()
        draft_s = self.speculator.propose(self.scheduler.running, self._max_drafts())
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return None
        with self.driver.whole_step() if self.driver else nullcontext():
            batch = self._build_batch(scheduled)
            logits, states = self._forward(batch, scheduled)
        try:
            samples = self._sample(logits, states, scheduled)
            needed_logits = self._commit(logits, scheduled)
        except BaseException:
            self._restart_followers(scheduled)
            raise
        for request in samples.requests:
            request.num_pending_tokens += 1
        self.pending_steps.append(PendingStep(scheduled, batch, samples, needed_logits, started, draft_s))
        return self.pending_steps[-1]

    def collect(self) -> StepOutput:
        """End the oldest pending step: wait for its tokens, and append them to their requests. Returns them.

        Drafts are verified here. Raises IndexError where no step is pending.
        """
        step = self.pending_steps.popleft()
        for request in step.samples.requests:
            request.num_pending_tokens -= 1
        sampled = dict(zip(step.samples.requests, step.samples.read(), strict=True))
        self._record_times(step, sampled)
        self._commit_drafts(step, sampled)
        going_on = ((request, tokens) for request, tokens in sampled.items() if request.finish_reason is None)
        token_ids = {request: self._append_tokens(request, tokens) for request, tokens in going_on}
        return StepOutput(token_ids, step.logits)

    def finish(self, request: Request, reason: FinishReason, num_dropped: int = 0) -> None:
        """End a request now, without its last `num_dropped` tokens; its pages are free when this returns.

        Of a request that has ended only the answer and the reason change.
        """
        request.drop_tokens(num_dropped)
        if request.finish_reason is None:
            self._finish(request, reason)
        request.finish_reason = reason

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free when this returns. A request that has ended stays as it is."""
        if request.finish_reason is None:
            self._finish(request, FinishReason.CANCELLED)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs, or a step is pending."""
        return bool(self.scheduler.waiting or self.scheduler.running or self.pending_steps)

    # ---- the parts of a step -------------------------------------------------------------------------------------

    def _end_stalled(self) -> StepOutput:
        """End a request that got no pages although it ran alone, after an empty step. Returns it, if there is one."""
        request = self.scheduler.find_stalled()
        if request is None:
            return StepOutput()
        log.error("request %d fails: it needs more KV memory than was planned", request.id)
        self._finish(request, FinishReason.OUT_OF_MEMORY)
        return StepOutput({request: []})

    def _needs_token_values(self, request: Request) -> bool:
        """Return whether each step of a request depends on the values of all tokens before it."""
        has_drafter = self.speculator.get_drafter(request) is not None
        return bool(request.grammar) or request.params.has_penalties_or_bias or has_drafter

    def _max_drafts(self) -> int:
        """Drafts of one request that fit into a step beside one token of every other."""
        fair_share = self.scheduler.max_batched_tokens // max(len(self.scheduler.running), 1)
        return min(fair_share, self.cache.page_size) - 1  # a shrunk ring has room for one block

    def _build_batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        """Build the batch of a step, with the tokens that are still pending. Other ranks do the same meanwhile."""
        size = self.runner.state_size
        tokens = list_tokens(scheduled, self.cache, self.prompt_activations, size > 0)
        if self.driver:
            self.driver.broadcast_step(tokens)
        batch = tokens.build_step(self.cache)
        if size:
            batch = replace(batch, hidden_states=stack_states(scheduled, size, self.cache.kv.device))
        return insert_pending_tokens(batch, scheduled, self.pending_steps)

    def _forward(self, batch: Batch, scheduled: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor | None]:
        """Run the model. Returns the logits [N, V] that are read, and hidden states [N, E] where a drafter needs them.

        Requests without drafts get the hidden state of their last token.
        """
        logits = self.runner.forward(batch)
        self._requeue_failed_loads(scheduled)
        carries_states = self.runner.state_size > 0
        if not carries_states and not self.speculator.needs_hidden_states:
            return logits, None
        states = self.runner.hidden_states
        assert states is not None
        read: list[int] = []
        last: dict[Request, int] = {}  # the rows of last tokens
        end = 0
        for s in scheduled:
            num_rows = count_rows(s, carries_states)
            end += num_rows
            read += range(end - s.num_logits, end)
            if num_rows and self.scheduler.is_running(s) and not (s.request.drafts or s.request.scoring):
                last |= dict.fromkeys((s.request, *self.sharing.completing(s.request, s.num_tokens)), end - 1)
        own = states.index_select(0, to_device_like(states, [*last.values()]))
        for request, state in zip(last, own, strict=True):
            request.hidden_state = state
        return select_rows(logits, read), select_rows(states, read)

    def _requeue_failed_loads(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Put requests whose offloaded prefix did not arrive back into the queue; they begin with less."""
        for s in scheduled:
            if load := s.row.finish_load():
                s.request.stats.loads.append(load)
                if load.failed:
                    self.scheduler.requeue(s.request)

    def _sample(self, logits: Tensor, states: Tensor | None, scheduled: Sequence[ScheduledRequest]) -> Samples:
        """Sample the next tokens of every request whose tokens are all computed, its followers included."""
        requests: list[Request] = []
        indices: list[int] = []  # of logits
        for s, end in zip(scheduled, accumulate(s.num_logits for s in scheduled), strict=True):
            if not self.scheduler.is_running(s):
                continue
            for request in self.sharing.completing(s.request, s.num_tokens):
                is_leader = request is s.request
                if s.request.will_sample(s.num_tokens) if is_leader else not request.input.forced_tokens:
                    requests.append(request)
                    indices += range(end - 1 - len(request.drafts), end)
        found = None if states is None else states.index_select(0, to_device_like(states, indices))
        return sample(select_rows(logits, indices), requests, found)

    def _restart_followers(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Let followers of a failed step, which may have drawn their first token, draw it again."""
        for s in scheduled:
            for follower in self.sharing.followers(s.request):
                if not follower.num_sampled_tokens:
                    follower.restart()

    def _record_times(self, step: PendingStep, sampled: dict[Request, SampledTokens]) -> None:
        """Tell the cost models of loading and of drafting how long the step took."""
        now = perf_counter()
        step_s = now - max(step.started + step.draft_s, self._collected_at)  # before, it waited for another step
        self._collected_at = now
        if all(s.request.finish_reason is not None for s in step.scheduled):
            return  # launched beside the end of its requests: nobody may have asked for it for a while
        # Where nothing was sampled, nobody has waited for a device.
        if (sampled or self.cache.kv.device.type == "cpu") and not step.batch.before_attention:
            self.cache.prefix_cache.record_compute(len(step.batch.input_ids), step_s)
        self.speculator.update(step.scheduled, sampled, step_s, step.draft_s)

    def _commit(self, logits: Tensor, scheduled: Sequence[ScheduledRequest]) -> dict[Request, Tensor]:
        """Count tokens as computed, start followers, and evict, but for requests with drafts.

        Returns the logits that requests need.
        """
        needed_logits: dict[Request, Tensor] = {}
        end = 0
        for s in scheduled:
            end += s.num_logits
            if self.scheduler.is_running(s) and not s.request.drafts:
                for request in self._complete(s):
                    needed_logits[request] = logits[end - s.num_logits : end]
                self._commit_request(s, s.num_tokens)
        self.cache.evict()
        return needed_logits

    def _commit_drafts(self, step: PendingStep, sampled: dict[Request, SampledTokens]) -> None:
        """Turn the slots of rejected drafts into holes, and commit the requests that had drafts."""
        if not step.samples.drafts:
            return
        ends = zip(step.scheduled, step.batch.query_start_loc[1:].tolist(), strict=True)
        drafted = [(s, end) for s, end in ends if s.request in step.samples.drafts and self.scheduler.is_running(s)]
        for s, _ in drafted:
            s.request.hidden_state = step.samples.find_state(s.request, len(sampled[s.request]))
        num_rejected = [s.request.accept_drafts(len(sampled[s.request])) for s, _ in drafted]
        rejected = [t for (_, end), n in zip(drafted, num_rejected, strict=True) for t in range(end - n, end)]
        if rejected:
            self.cache.reject(step.batch.token_rows.numpy()[rejected], step.batch.positions.numpy()[rejected])
        for (s, _), n in zip(drafted, num_rejected, strict=True):
            self._commit_request(s, s.num_tokens - n)
        self.cache.evict()

    def _complete(self, s: ScheduledRequest) -> list[Request]:
        """Count the prompts of followers that complete with their leader. Returns those of all that need its logits."""
        needing: list[Request] = []
        for request in self.sharing.completing(s.request, s.num_tokens):
            if (request.input.needs_logits or request.input.needs_prompt_logits) and s.num_logits:
                needing.append(request)
                request.num_logits_read += s.num_logits
            if request is not s.request:
                request.num_computed_tokens = len(request.prompt)
        return needing

    def _commit_request(self, s: ScheduledRequest, num_tokens: int) -> None:
        """Count `num_tokens` of a running request as computed; its followers begin where its prompt ends."""
        request = s.request
        self.num_computed_tokens += num_tokens
        request.advance(num_tokens)
        s.row.advance(request.num_computed_tokens, max(request.num_uncomputed_tokens, 0))
        if request.num_computed_tokens >= len(request.prompt) and not request.scoring:
            self._start_followers(request, s.row)

    def _start_followers(self, leader: Request, leader_row: RequestRow) -> None:
        """Fork the leader's row for every follower; one that gets no pages is enqueued alone."""
        for follower in self.sharing.release(leader):
            if leader.scoring_passes:  # the same passes: masses are copied with the slots
                follower.skip_scoring()
            fork = leader_row.fork(follower.policy, follower.num_computed_tokens, follower.row_task())
            if fork is None:
                self.scheduler.enqueue(follower)
                continue
            self.scheduler.start_forked(follower, fork)
            follower.stats.scheduled_time = leader.stats.scheduled_time
            follower.stats.prefix_diagnosis = leader.stats.prefix_diagnosis  # of the same prompt
            fork.advance(follower.num_computed_tokens, follower.num_uncomputed_tokens)

    def _append_tokens(self, request: Request, tokens: SampledTokens) -> list[int]:
        """Append tokens to a request up to its end by a stop token or its length. Returns those that were appended."""
        for i, (token, logprob) in enumerate(tokens):
            request.append_token(token, logprob)
            if reason := request.check_stop():
                self._finish(request, reason)
                return [token for token, _ in tokens[: i + 1]]
        return [token for token, _ in tokens]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: free its pages, and let its followers go on without it."""
        request.finish_reason = reason
        request.penalties = request.hidden_state = None  # tensors, where the request is kept for the inspector
        self.scheduler.remove(request)
        self.speculator.remove_request(request)
        request.stats.finish_time = perf_counter()
        for follower in self.sharing.release(request):
            self.scheduler.enqueue(follower)
