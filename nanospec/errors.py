"""Every error nanospec raises on purpose; each says what is wrong, what was given, what to do."""


class NanospecError(Exception):
    """Base class of every error nanospec raises on purpose."""


class ConfigError(NanospecError, ValueError):
    """An option, a request or a combination of options cannot work."""


class CheckpointError(NanospecError):
    """A checkpoint does not hold what its config announces, or cannot be read."""


class PlanError(NanospecError):
    """A speculator broke the contract of `Draft`, `VerifyPlan` or `Resources`."""


class OutOfPagesError(NanospecError):
    """The KV cache is full. Users never see it: a request that is taken fits when alone."""


class BackendUnavailableError(NanospecError):
    """The requested device or attention backend cannot run here."""
