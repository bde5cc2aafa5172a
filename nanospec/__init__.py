"""nanospec: a compact inference engine whose subject is the speculative round."""

from nanospec.config import EngineConfig
from nanospec.llm import LLM, RequestOutput
from nanospec.params import SamplingParams
from nanospec.spec.speculator import Speculator
from nanospec.types import Draft, VerifyPlan

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Draft",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "Speculator",
    "VerifyPlan",
    "__version__",
]
