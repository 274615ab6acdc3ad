"""The engine's errors, split by whose fault they are. Torch-free.

EngineError
|-- LoadError            the model cannot be loaded as asked: names the file, tensor or number
|   `-- OutOfMemoryAtLoad    what was needed and what fits
|-- StepError            this step failed, its rows are lost, the engine lives on
`-- EngineDead           nothing will ever come out of this engine again
"""

NO_TOKEN_LEFT = "no token is left to choose from: the request's masks exclude all of them"
"""`RowOutput.error` of a request whose own bans, masks and grammar contradict each other."""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class LoadError(EngineError):
    """The model cannot be loaded as asked; the message names the file, tensor or number at fault."""


class OutOfMemoryAtLoad(LoadError):
    """Weights and the smallest useful KV pool do not fit; the message says what was needed and what fits."""


class StepError(EngineError):
    """One step failed and its rows are lost; the engine can go on with other rows."""


class EngineDead(EngineError):
    """The engine cannot run any further step."""
