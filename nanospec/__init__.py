"""nanospec: a compact inference engine whose subject is the speculative round."""

from nanospec.config import EngineConfig
from nanospec.llm import LLM
from nanospec.types import RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]
