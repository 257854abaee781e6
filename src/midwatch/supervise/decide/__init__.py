"""The decision core: events in, instructions out. No clock, no I/O, no network.

    supervisor.handle(event) -> list[Instruction]

The shells (agent, coordinator) carry the instructions out and report the outcome as new events; the simulator and the
tests feed the same core by hand.
"""

from midwatch.supervise.decide.facts import RunFacts
from midwatch.supervise.decide.model import Outcome, State
from midwatch.supervise.decide.rules import Rules
from midwatch.supervise.decide.story import Chapter, InvalidTransition
from midwatch.supervise.decide.supervisor import Supervisor, replay

__all__ = ["Chapter", "InvalidTransition", "Outcome", "Rules", "RunFacts", "State", "Supervisor", "replay"]
