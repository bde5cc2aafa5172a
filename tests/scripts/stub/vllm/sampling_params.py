"""See the package."""

import enum


class RequestOutputKind(enum.Enum):
    """What an output holds."""

    DELTA = 1
