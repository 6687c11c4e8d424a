"""Which runs are left to do, in what order, on what launcher; what became of each."""

from suite.execute.events import Event, Finished, Message, Started
from suite.execute.folder import OutFolder
from suite.execute.outcome import Outcome
from suite.execute.scheduler import execute

__all__ = ["Event", "Finished", "Message", "OutFolder", "Outcome", "Started", "execute"]
