"""The guards in a training loop: every rank sees the same numbers, and so all judge alike.

No rank waits for a verdict, and none pauses alone: the numbers of a step are brought together, and everything else
follows from them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec
import torch
from torch import nn

from midwatch.checkpoint import SaveEvent
from midwatch.config import GuardsConfig
from midwatch.guards import Guards, Judgement, judged
from midwatch.pulse import Flag
from midwatch.train.acting import Acting
from midwatch.train.agreement import Agreed, Exchange
from midwatch.train.around import Around
from midwatch.train.batches import Batches
from midwatch.train.inspecting import Inspector
from midwatch.train.peers import data_peers
from midwatch.train.rates import without_effect
from midwatch.train.readings import OnTheWay, Readings, Watch

_log = logging.getLogger(__name__)

_NOTHING = Flag(0)
_Due = tuple[int, OnTheWay, dict[str, float]]
"""A step, its numbers, and what its batches come to."""


class Guarding:
    """One rank's guards. ``begin``, ``send``, ``boundary``, ``check`` and ``saving`` are collective."""

    def __init__(
        self, config: GuardsConfig, around: Around, watch: Watch, inspector: Inspector, *, is_scaling_dynamic: bool
    ) -> None:
        self._around = around
        self._watch = watch
        self._inspector = inspector
        self._guards = Guards(config, is_scaling_dynamic=is_scaling_dynamic)
        self._acting = Acting(config, around)
        self._readings = Readings(watch)
        self._exchange = Exchange(around.group, watch)
        self.batches = Batches(config.data)
        """What the script reads; state of its own in each checkpoint."""
        self._place: dict[str, int | None] = {}
        """In the data, of the step that was judged last."""
        self._is_lagging = False
        self._is_prepared = False
        self._later: _Due | None = None
        self._told_unskipped = False
        self._has_asked_to_skip = False
        self.decided = self._acting.decided
        self.rates = self.decided.rates

    # --- what the script says -------------------------------------------------------------------------------------

    def add(self, values: Mapping[str, Any]) -> None:
        """Numbers given to ``run.log``, as the recording keeps them."""
        self._readings.add(values)

    def read(self, where: object, source: str | Sequence[str], tokens: Any, epoch: SupportsIndex | None) -> None:
        """The batch that is trained on now; raises as ``Run.batch``."""
        self.batches.add(where, source, tokens, epoch)

    def skips(self, position: int) -> bool:
        """Whether this batch was taken out of the training."""
        self._has_asked_to_skip = True
        return self.decided.skips(position)

    # --- the course of training -----------------------------------------------------------------------------------

    def prepare(self, *, is_bound: bool) -> int | None:
        """Share what rank 0 keeps, before a checkpoint is looked for; waits here while the run is paused.

        Args:
            is_bound: To what the breaker decided; False where the caller names another checkpoint, or none.

        Returns:
            The step that the breaker goes back before; None for the newest checkpoint.
        """
        # Then numbers may come from there, whatever the script tracks.
        is_on_gpu = torch.cuda.is_initialized()
        self._is_lagging = any(answer["is_on_gpu"] for answer in self._around.group.gather({"is_on_gpu": is_on_gpu}))
        self._acting.prepare()
        self._is_prepared = True
        before_step = self.decided.before_step
        if before_step is None or is_bound:
            return before_step
        self._around.say("warning", f"not gone back before step {before_step}: the script names another beginning")
        return None

    def begin(self, start: int, *, is_resumed: bool, tracked: Iterable[Any]) -> None:
        """Training goes on at ``start``.

        Args:
            is_resumed: From a checkpoint, whether it has the state of the guards or not.
            tracked: Optimizers among these have their learning rates lowered where that was decided.
        """
        if is_resumed:
            self._guards.resumed(start)
        if is_resumed or self._acting.has_history:
            self._acting.resumed(start)
        self.decided.lower(tracked)
        self._acting.is_running = True

    def ensure_begun(self, start: int, tracked: Mapping[str, Any]) -> None:
        """For scripts that do not resume, and for what was tracked since: what was decided holds there as well."""
        if not self._is_prepared:
            self.prepare(is_bound=False)
            self.begin(start, is_resumed=False, tracked=tracked.values())
        self._readings.take()  # of before the loop, and so of no step
        self.batches.forget_step()
        self.decided.lower(tracked.values())
        self._inspector.attach(tracked)
        if not self._exchange.is_wide and self._around.group.world_size > 1:
            self.batches.meet(
                data_peers((one for one in tracked.values() if isinstance(one, nn.Module)), self._around.group.rank)
            )

    def stepping(self, step: int) -> None:
        """This step begins."""
        self._inspector.begin(step)

    def look(self, step: int, *, is_saved: bool) -> None:
        """Behind a step that was judged, and before its save: begin to compare the ranks' weights, if it is time."""
        if self._inspector.look(step, is_saved=is_saved):
            self._acting.unjudged(step)

    def send(self, step: int) -> None:
        """A step is done, and its numbers leave for the other ranks.

        With a GPU those of the step before do: to wait for this one's would keep the host from launching the next.
        """
        self._compare()
        self._readings.put(self._inspector.measured(step))
        due: _Due | None = (step, self._readings.take(step), self.batches.take())
        if self._is_lagging or self._exchange.is_wide:
            self._acting.unjudged(step)
        if self._is_lagging:
            due, self._later = self._later, due
        if due is not None:
            self._begin(*due)

    def _begin(self, step: int, mine: OnTheWay, read: dict[str, float]) -> None:
        self._judge_sent()  # with very many ranks: the step before
        numbers = {**mine.numbers(), **read}
        if not self._exchange.is_wide:
            # One exchange for both: what it costs is its waiting, however much it brings.
            numbers["asked"] = float(self._around.signals.take())
        self._exchange.begin(step, numbers, self._now_us())

    def boundary(self, step: int) -> None:
        """Judge what was sent; with very many ranks that is not waited for before the next step is done.

        Pauses, and leaves the process, where the breaker says so.
        """
        if not self._exchange.is_wide:
            self._judge_sent()
        self._mind_rates(step)

    def _judge_sent(self) -> None:
        agreed = self._exchange.finish()
        if agreed is None:
            return
        if not self._exchange.is_wide:
            self._around.signals.heard(Flag(agreed.asked) if agreed.asked else _NOTHING)
        self._judge(agreed)

    def check(self, step: int, values: Mapping[str, Any]) -> Judgement:
        """Judge numbers of a step, as for ``add``, before its optimizer step is made; pauses as ``boundary`` does."""
        self.finish()  # in their order: what was to be judged later comes first
        self._readings.add(values)
        numbers = self._readings.take().numbers()
        numbers |= self._inspector.early(numbers)
        self._exchange.begin(step, {**numbers, **self.batches.positions}, self._now_us(), is_early=True)
        agreed = self._exchange.finish()
        assert agreed is not None, "begun just now, so it comes out here"
        return self._judge(agreed)

    def _now_us(self) -> int:
        return self._around.clock.now_ns() // 1000

    def saved(self, events: Iterable[SaveEvent]) -> None:
        """What became of saves: one that was under way when doubt arose is in doubt as well."""
        self._acting.saved(events)

    def finish(self) -> None:
        """Judge what is on its way, so that nothing is."""
        self._compare()
        if self._later is not None:
            due, self._later = self._later, None
            self._begin(*due)
        self._judge_sent()

    def close(self) -> None:
        """Training is over: the model is let alone."""
        self._inspector.detach()

    def saving(self, step: int) -> None:
        """A save of this step has begun: write the breaker's memory down, and hear what people have lifted."""
        self._acting.keep()
        self.decided.saving(step)

    # --- saved with each checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"guards": self._guards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._guards.load_state_dict(state["guards"])

    # --- judging --------------------------------------------------------------------------------------------------

    def _judge(self, agreed: Agreed) -> Judgement:
        sample = self._inspector.completed(agreed.step, agreed.sample(), agreed.found, agreed.by_rank)
        if sample.source_z is not None:
            sample = msgspec.structs.replace(sample, source=self.batches.source)
        judgement = self._guards.observe(sample)
        self._tell(judgement, agreed)
        self._mind_skipping(agreed)
        self._place = {"position": agreed.position, "first_position": agreed.first_position}
        self._feed(judgement, agreed.now_ns)
        return judgement

    def _compare(self) -> None:
        """Judge what came of the last look at the replicas; before any number of a later step is judged."""
        if not self._inspector.is_waiting:
            return
        compared = self._inspector.compared(self._around.clock.now_ns())
        if compared is not None:
            judgement = self._guards.observe(compared.sample)
            self._tell(judgement, None)
            if judgement.findings:
                # Otherwise it says nothing of the step, whose numbers may be still to come.
                self._feed(judgement, compared.now_ns)
        self._acting.unjudged(None)

    def _feed(self, judgement: Judgement, now_ns: int) -> None:
        cause = f"guard-{judgement.step}"
        self._acting.feed(judged(judgement, now_ns, cause=cause, **self._place))

    def _tell(self, judgement: Judgement, agreed: Agreed | None) -> None:
        for finding in judgement.findings:
            if self._around.group.rank == 0:
                level = logging.INFO if finding.tier == "note" else logging.WARNING
                _log.log(level, "%s", finding)
                facts = {k: v for k, v in msgspec.to_builtins(finding).items() if v is not None and k != "step"}
                where = agreed.whereabouts(finding) if agreed is not None else {}
                self._around.recorder.record("guard.found", step=finding.step, **facts, **where)
        self._watch.found(judgement.findings)

    def _mind_skipping(self, agreed: Agreed) -> None:
        if self._told_unskipped or self._has_asked_to_skip:
            return
        last = agreed.step if agreed.position is None else agreed.position
        first = last if agreed.first_position is None else agreed.first_position
        position = self.decided.first_skipped(first, last)
        if position is None:
            return
        self._told_unskipped = True
        text = f"batch {position} was to be left out, and the script trained on it: ask run.skips(position) in its loop"
        _log.error(text)
        self._around.record("guard.not_skipped", agreed.step, position=position)

    def _mind_rates(self, step: int) -> None:
        if self.rates.is_without_effect():
            error = without_effect(self.rates)
            self._around.say("error", f"[{error.code}] {error.message}. {error.hint}")
            self._around.record("guard.rates_not_lowered", step, factor=self.rates.factor)
