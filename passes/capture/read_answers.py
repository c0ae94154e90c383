"""A forward that asks about values of tensors is read under more than one answer.

It must compute the same under all, see `passes.capture.forward.guards`; else the
answers to a few questions are values of the graph, which choose between readings of
each, see `passes.capture.rows.join_answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from ..capture.forward.guards import FEW, Guards, Question, Reading
from ..capture.forward.user_frames import Place
from ..capture.rows.chosen_rows import keep_all_rows
from ..capture.rows.compare_readings import agree, are_equal, are_same
from ..capture.rows.expert_loops import batch_loops
from ..capture.rows.join_answers import join_answers
from ..errors import CaptureError
from ..traced import Traced

# Captures with the most rows that there can be, see `ChosenRows`.
Capture = Callable[[Mapping[str, int]], Traced]


@dataclass(frozen=True)
class Answers:
    """guards: which answer. capture: reads a forward. beside: names of the outputs that
    come between its loss and its answers."""

    guards: Guards
    capture: Capture
    beside: Callable[[], tuple[str, ...]]

    def prove(self, traced: Traced) -> Traced:
        """A forward that was read as if all answers were yes, as it is under all.
        Raises: CaptureError, where it computes something else."""
        asked = self.guards.asked.copy()
        try:
            return self._same(traced)
        except CaptureError as error:
            if (joined := self._joined(asked | self.guards.asked)) is None:
                raise error from None
            return joined

    def _same(self, traced: Traced) -> Traced:
        """The forward, if it computes the same without any rows, and with one."""
        guards = self.guards
        if guards.compared is not None:
            self._prove_limits()
        while guards.read is not None or guards.numbered:
            checks, error = len(guards.checks), guards.refusal()
            readings, marked = {Reading.SOME: traced}, [*guards.marked]
            mixtures = [*guards.mixtures()]
            try:
                for reading in [*guards.others()]:
                    guards.reading = reading
                    readings[reading] = self.capture({})
                same = agree(readings)
                if not same and readings.keys() == {Reading.SOME, Reading.NONE}:
                    none = readings[Reading.NONE]
                    same = guards.means = are_same(traced, none, means=True)
                guards.reading = Reading.SOME
                same = same and all(self._mixed(traced, marked, q) for q in mixtures)
            except CaptureError:
                same = False
            guards.reading, guards.doubted = Reading.SOME, frozenset()
            if len(guards.checks) == checks:
                if not same:
                    raise error
                if (unproved := guards.unproved()) is not None:
                    raise unproved
                break
            guards.begin()  # what asked was a check: without it there is less to prove
            traced = self.capture({})
        return traced

    def _mixed(
        self, some: Traced, marked: Sequence[Question | None], no: Set[Question]
    ) -> bool:
        """Whether a forward that was read as if all answers were yes is the same where
        some are no. marked: all that it asked."""
        self.guards.doubted = no
        none = self.capture({})
        readings = []
        for traced, asked in ((some, marked), (none, self.guards.marked)):
            pairs = zip(traced.asked, asked, strict=True)
            doubted = tuple(v for v, question in pairs if question in no)
            readings.append(replace(traced, asked=doubted))
        some, none = readings
        return are_same(some, none, self.guards.means, every=False)

    def _prove_limits(self) -> None:
        """Reads `x[:most] if len(x) > most else x` as if there were more than most.
        Refuses it, if with no more, where `x[:most]` is x, it computes anything
        else."""
        guards = self.guards
        assert guards.compared is not None
        error = guards.compared.error()
        readings = []
        for guards.within in (False, True):
            guards.limits.clear()
            try:
                readings.append(self.capture(guards.limits))
            except CaptureError:
                raise error from None
        guards.within = False
        if not are_equal(*readings):
            raise error

    def _joined(self, asked: Mapping[Place, int]) -> Traced | None:
        """The forward under each answer to a few questions, which those are that it
        asks least often; None if they are not few, or cannot be joined. asked: how
        often it asks at each place."""
        guards = self.guards
        asked = {place: n for place, n in asked.items() if place not in guards.checks}
        try:
            for most in sorted({*asked.values()}):
                guards.decided = {place for place, n in asked.items() if n <= most}
                if sum(asked[place] for place in guards.decided) > FEW:
                    break
                with suppress(CaptureError):
                    return self._under_each(())
        finally:
            guards.decided = set()
        return None

    def _under_each(self, answers: tuple[bool, ...]) -> Traced:
        """The forward under these answers to its first questions, and each to all
        others. Raises: CaptureError."""
        guards = self.guards
        guards.begin()
        guards.answers = [*answers]
        traced, _ = batch_loops(self._same(self.capture({})))
        graph = keep_all_rows(traced.graph, traced.autocast.keys(), guards.means)
        traced = replace(traced, graph=graph)
        each, names = tuple(guards.answers), self.beside()
        if len(each) > FEW:
            raise guards.refusal()
        for n in reversed(range(len(answers), len(each))):
            no = self._under_each((*each[:n], False))
            if self.beside() != names:
                raise guards.refusal()
            traced = join_answers(traced, no, 1 + len(names) + n)
        return traced
