"""Plays chunks: one command per control tick, the controlled stop, and nothing of an older epoch.

The last writer. It owns the Handoff and the Safety value, knows the last command, and calls one output. It reads no
clock and imports no ROS: policy_node and player_node drive it from their executor thread, the only thread that may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.control.commands import Command, Output, Spliced
from phyai_engine.control.seam import Seam
from phyai_engine.envelope import Envelope
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import Handoff, HandoffSettings
from phyai_engine.reach import Reach
from phyai_engine.safety import Safety
from phyai_engine.stop import StopPlan, StopPlanner, row_rates
from phyai_engine.types import F64, AbortCause, Chunk, CommandKind, Refusal, SafetyState


class Player:
    """One robot's player.

    :param measured: returns [A] measured values of what each action moves (NaN where nothing is measured), or None.
    :param stop_hold_steps: hold commands published after the deceleration; then the player goes quiet.
    :param clamp: clip rows to lower..upper instead of refusing the chunk; every clip is reported.
    :param kept: [A] last command of an earlier player of this robot.
    """

    def __init__(
        self,
        robot: RobotConfig,
        settings: HandoffSettings,
        safety: Safety,
        output: Output,
        measured: Callable[[], F64 | None],
        *,
        stop_hold_steps: int = 5,
        clamp: bool = False,
        kept: F64 | None = None,
    ) -> None:
        self.handoff = Handoff(settings)
        self.safety = safety
        self.envelope = Envelope.of(robot)
        self.tick_count = 0
        self.stop_sent = ""  # what the last stop was, in words
        self._planner = StopPlanner.of(robot)
        self.reach = Reach.of(robot, self._planner)
        self._output = output
        self._measured = measured
        self._stop_hold_steps = stop_hold_steps
        self._clamp = clamp
        self._ramps = robot.first_step == "ramp"
        self._begun = False  # a chunk was accepted since activation or re-arm
        self._value: F64 | None = None  # last commanded, None until something was commanded in this activation
        self._before: F64 | None = None  # commanded by the tick before that
        self._still: F64 = np.zeros(len(robot.actions))
        self._rate: F64 = self._still  # of the last command
        self._acceleration: F64 = self._still
        self._rates: F64 | None = None  # of every row of the playing chunk
        self._kept = kept  # last command of all, for values that a stop must keep
        self._plan: StopPlan | None = None
        self._plan_row = 0
        self._spoken = False  # a stop was already published in this tick

    @property
    def last_command(self) -> F64 | None:
        """[A] last commanded value; None when nothing was commanded since activation or re-arm."""
        return self._value

    @property
    def kept(self) -> F64 | None:
        """[A] last command of all: a gripper that is stopped keeps its value. None before the first."""
        return self._kept

    @property
    def stopping(self) -> bool:
        """True while stop commands remain to be published, or the coming tick's was published already."""
        return self.safety.state is SafetyState.STOPPING or self._spoken

    @property
    def heard_mono_ns(self) -> int:
        """Steady time of the newest word of a player elsewhere; 0 where there was none."""
        return self._output.heard_mono_ns()

    def check_output(self) -> None:
        """Nothing may be handed to a player elsewhere that is silent.

        :raises RefusalError: MISSING.
        """
        if (error := self._output.ready()) is not None:
            raise error

    def activate(self) -> None:
        """Start a new epoch with nothing to play.

        :raises LatchedError: the abort latch is set.
        """
        self.safety = self.safety.activate()
        self._forget()

    def tick(self) -> Command | None:
        """One control tick. Returns what was commanded, None when there is nothing to command."""
        self.tick_count += 1
        if self._spoken:  # the stop of the abort path was this tick's command
            self._spoken = False
            return None
        if self.stopping:
            return self._stop_step(self.tick_count)
        if not self.safety.may_play:
            return None
        if not self._output.ticks:
            self._follow()
            return None
        row = self.handoff.peek()
        if row is None:
            return self._hold_step()
        playing = self.handoff.playing
        assert playing is not None  # peek returned one of its rows
        assert self._rates is not None  # accept sets both
        command = Command(
            CommandKind.ACTION,
            row,
            self._rates[playing.next_row],
            self.tick_count,
            playing.epoch,
            playing.chunk_id,
            playing.next_row,
        )
        self.handoff = self.handoff.advance()
        self.safety = self.safety.playing(True)
        self._plan = None
        return self._say(command, seam=playing.next_row == playing.first_row)

    def accept(self, chunk: Chunk, now_mono_ns: int) -> Spliced:
        """Check a chunk and splice it in; a refused chunk leaves what is playing untouched.

        :raises RefusalError: wrong epoch, exhausted, malformed, not finite, stale or out of the envelope, which
            includes a motion from which a stop could not end within the limits.
        """
        try:
            if chunk.epoch != self.safety.epoch or not self.safety.may_play:
                raise RefusalError(
                    Refusal.WRONG_EPOCH,
                    "the chunk belongs to another epoch",
                    got=chunk.epoch,
                    wanted=f"{self.safety.epoch} ({self.safety.state.name.lower()})",
                )
            self.check_output()
            row = self.handoff.row_for(chunk)
            flight = self.handoff.in_flight
            assert flight is not None  # row_for refuses otherwise
            clamped = 0
            if self._clamp:
                actions, clamped = self.envelope.clamp(chunk.actions)
                chunk = replace(chunk, actions=actions)
            self._check(chunk.actions, row)
            if not clamped:  # whoever asks for a clamp wants the joint to run into its limit
                played = chunk.actions[: flight.end_row]
                self.reach.check(played, first_row=row, last_command=self._value)
        except RefusalError:
            self.handoff = self.handoff.drop(chunk.chunk_id)
            raise
        self.handoff, facts = self.handoff.accept(chunk, now_mono_ns, self._output.since_step_s())
        self._rates = row_rates(chunk.actions, row, self._value, self._planner.dt_s)
        self._begun = True
        # Where the robot waits at s a player elsewhere must not be given rows beyond it.
        handed = replace(chunk, actions=chunk.actions[: flight.end_row])
        self._output.chunk(handed, flight.consumed_at, facts)
        planner = self._planner
        seam = Seam.of(chunk.actions, row, self._value, self._before, planner.kind, planner.dt_s)
        return Spliced(facts, chunk.chunk_id, seam, clamped)

    def _check(self, actions: F64, row: int) -> None:
        """The envelope; a chunk that only starts too far away may begin a ramp to its first row, refused as it is.

        Nothing of the chunk is played then and no row is counted: the ramp is held ticks, and a chunk that was made
        while it runs, or after it, is played as soon as it fits.
        """
        # Until a chunk was accepted the first step counts, also while a ramp runs.
        measured = self._measured() if not self._begun or self._value is None or self.envelope.box is not None else None
        if self._ramps and not self._output.ticks:
            measured = None  # the player node measures, and ramps
        try:
            self.envelope.check(
                actions, first_row=row, last_command=self._value, measured=measured, before=self._before
            )
        except RefusalError as error:
            at_rest = self._value is None or (self._plan is not None and self._plan_row >= len(self._plan))
            if not (self._ramps and at_rest and not self._begun and error.code is Refusal.OUT_OF_ENVELOPE):
                raise
            self.envelope.check(actions, first_row=row, last_command=None, measured=None)  # the chunk by itself is fine
            start = measured if self._value is None else self._value
            assert start is not None  # else there was nothing to compare with
            if (plan := self._planner.ramp(start, actions[row])) is None:
                raise
            self._value, self._plan, self._plan_row = start, plan, 0
            text = f"a ramp of {len(plan)} steps (first_step) takes the robot to where the chunk starts"
            raise RefusalError(error.code, text, got=error) from None

    def take_rejection(self) -> tuple[int, RefusalError] | None:
        """chunk_id and reason when the player elsewhere does not play it.

        What it plays instead is then unknown here: its motion is brought to rest where we can, and the next chunk
        starts from the measured pose.
        """
        error = self._output.take_rejection()
        playing = self.handoff.playing
        if error is None or playing is None:
            return None
        self._halt_elsewhere()
        self.handoff = replace(self.handoff, playing=None, in_flight=None)
        self._rest_at(None)
        return playing.chunk_id, error

    def abort(self, cause: AbortCause, text: str) -> bool:
        """Latch, start a new epoch and publish the first stop command at once. True if the latch was newly set."""
        if self.safety.latched:
            return False
        already_stopping = self.stopping
        playing = self.safety.may_play
        self.safety = self.safety.abort(cause, text)
        self.handoff = self.handoff.cleared()
        if playing:
            self._begin_stop()
        elif not already_stopping:
            self.safety = self.safety.stopped()
        return True

    def stop(self) -> None:
        """A controlled stop without latch, for deactivation. Publishes its first command at once."""
        if self.safety.may_play:
            self.safety = self.safety.stop()
            self.handoff = self.handoff.cleared()
            self._begin_stop()

    def finish_stop(self) -> None:
        """Publish what remains of a stop, paced by the control period. Bounded by the stop plan."""
        if self._spoken:  # no tick runs beside this loop: the stop's first row was the coming one
            self._spoken = False
            self.tick_count += 1
        while self.stopping:
            time.sleep(self._planner.dt_s)
            self.tick()

    def rearm(self, *, active: bool) -> None:
        """Clear the latch in a new epoch; motion starts from the measured pose."""
        self.safety = self.safety.rearm(active=active)
        self._forget()

    def deactivate(self) -> None:
        """-> IDLE. Call :meth:`stop` first and tick until it is over."""
        self.safety = self.safety.deactivate()
        self._forget()

    def flush(self) -> None:
        """Drop what plays and what is in flight in a new epoch; the robot holds until the next chunk."""
        self._halt_elsewhere()
        if self.safety.may_play:
            self._plan = None  # a ramp leads to a row of the old epoch: the next hold plans anew, from the motion
        self.safety = self.safety.flush()
        self.handoff = self.handoff.cleared()

    def follow(self, epoch: int, playing: bool, *, rearmed: bool) -> None:
        """Obey the policy node this player belongs to: its epoch, and whether its robot may move in it.

        :param rearmed: the policy node has heard of this player's latch. It latches with it, so that its moving means
            that a person re-armed it since. Without that a latched player stays latched.
        """
        if epoch < self.safety.epoch or (playing and epoch == self.safety.epoch):
            return  # an old report that was kept for late joiners, or nothing new
        if playing and (self.stopping or (self.safety.latched and not rearmed)):
            return  # the stop is finished first: the status comes again
        if not playing:
            self.stop()
        elif self.safety.may_play:
            self.flush()
        else:
            self.rearm(active=True)
        self.safety = replace(self.safety, epoch=max(epoch, self.safety.epoch))

    def catch_up(self) -> None:
        """Take over what a player elsewhere has reported since; nothing to do where this process plays."""
        consumed = self._output.consumed()
        if consumed is None:
            return
        before = self.handoff.consumed
        self.handoff = self.handoff.advance_to(consumed)
        if (begun := self._output.begun()) is not None:
            self.handoff = self.handoff.begun(*begun)
        playing = self.handoff.playing
        if playing is not None and playing.next_row > playing.first_row and self.handoff.consumed > before:
            value = playing.actions[playing.next_row - 1]
            if self._value is not None:
                steps = self.handoff.consumed - before
                self._rate = (value - self._value) / (steps * self._planner.dt_s)
                earlier = playing.next_row - 2
                self._before = playing.actions[earlier] if earlier >= playing.first_row else None
            self._value = value

    def _forget(self) -> None:
        self.handoff = self.handoff.cleared()
        self._output.reset(self.handoff.consumed)
        self._rest_at(None)
        self._plan = None
        self._begun = self._spoken = False
        self.stop_sent = ""

    def _rest_at(self, value: F64 | None) -> None:
        self._value = self._before = value
        self._rate = self._acceleration = self._still

    def _follow(self) -> None:
        """One tick of a player elsewhere."""
        self.catch_up()
        if self.handoff.peek() is None:
            self.handoff = self.handoff.advance()  # counts a held tick
            if self._value is not None and self._rate.any():  # decelerates there, to rest
                self._rest_at(self._planner.plan(self._value, self._rate).values[-1])
            self._before = self._value
        self.safety = self.safety.playing(self.handoff.remaining_steps > 0)

    def _hold_step(self) -> Command | None:
        """The chunk ran out: come to rest, then hold. Before the first chunk the robot's own controller holds."""
        self.handoff = self.handoff.advance()
        self.safety = self.safety.playing(False)
        if self._value is None:
            return None
        if self._plan is None:
            self._plan, self._plan_row = self._planner.plan(self._value, self._rate, self._acceleration), 0
        return self._say(self._plan_step(CommandKind.HOLD, self._value, self.tick_count))

    def _motion(self) -> tuple[F64, F64] | None:
        """Value and rate a stop starts from; None when nothing was commanded and nothing is measured."""
        elsewhere = self._output.motion()
        if elsewhere is not None and not np.isnan(elsewhere[0]).any():
            return elsewhere
        if self._value is not None:
            return self._value, self._rate
        still = self._still
        if self._planner.needs_value:  # hold where the robot is, latched once
            measured = self._measured()
            return None if measured is None or np.isnan(measured).any() else (measured, still)
        if self._kept is None:  # zero is right for rates and deltas, unknown for a gripper that nobody commanded
            return None if self._planner.absolute.any() else (still, still)
        return self._kept, still

    def _halt_elsewhere(self) -> None:
        """Bring a player elsewhere to rest without a latch."""
        if self._output.motion() is not None and (motion := self._motion()) is not None:
            plan = self._planner.plan(*motion)
            self._output.stop(plan)
            self._rest_at(plan.values[-1])

    def _begin_stop(self) -> None:
        motion = self._motion()
        if motion is None:
            self._plan, self.stop_sent = None, "nothing is published: nothing was commanded and nothing is measured"
        else:
            measured = self._measured() if self._planner.option == "hold_measured" else None
            self._plan, self.stop_sent = self._planner.stop(*motion, self._acceleration, measured)
        self._plan_row = 0
        if self._plan is None or motion is None:
            self.safety = self.safety.stopped()
            return
        self._value = motion[0]
        if self._output.ticks:
            # Published between two ticks, it is the command of the coming one, which then says nothing.
            self._stop_step(self.tick_count + 1)
            self._spoken = True
        else:
            self._output.stop(self._plan)
            self.safety = self.safety.stopped()

    def _stop_step(self, tick: int) -> Command:
        assert self._plan is not None
        assert self._value is not None
        command = self._say(self._plan_step(CommandKind.STOP, self._value, tick))
        if self._plan_row >= len(self._plan) + self._stop_hold_steps:
            self.safety = self.safety.stopped()
        return command

    def _plan_step(self, kind: CommandKind, value: F64, tick: int) -> Command:
        """The next command of the plan: its rows, then rest."""
        plan = self._plan
        assert plan is not None
        if self._plan_row < len(plan):
            values: F64 = plan.values[self._plan_row]
            rates: F64 = plan.rates[self._plan_row]
        else:
            values = self._planner.held(value)
            rates = np.zeros_like(value)
        self._plan_row += 1
        return Command(kind, values, rates, tick, self.safety.epoch)

    def _say(self, command: Command, *, seam: bool = False) -> Command:
        """:param seam: the change of rate to this command is the policy's mind, not an acceleration."""
        self._acceleration = self._still if seam else (command.rates - self._rate) / self._planner.dt_s
        self._before, self._value = self._value, command.values
        self._kept = command.values
        self._rate = command.rates
        self._output.command(command)
        return command
