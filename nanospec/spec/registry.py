"""The speculators by name, and a user's own by module and class."""

import importlib

from nanospec.errors import ConfigError
from nanospec.spec.draft_model import DraftModelSpeculator
from nanospec.spec.ngram import NgramSpeculator
from nanospec.spec.speculator import NoSpeculator, Speculator, SpeculatorSetup
from nanospec.spec.trie import TrieSpeculator

SPECULATORS: dict[str, type[Speculator]] = {
    "none": NoSpeculator,
    "ngram": NgramSpeculator,
    "trie": TrieSpeculator,
    "draft": DraftModelSpeculator,
}


def create_speculator(setup: SpeculatorSetup) -> Speculator:
    """Build the speculator that a config names; auto is `draft` where a drafter is given.

    Raises:
        ConfigError: there is none of that name, or it cannot work here.
    """
    config = setup.config
    name = config.speculator
    if name == "auto":
        name = "none" if config.draft is None else "draft"
    kind = SPECULATORS.get(name) or _load(name)
    if config.draft is not None and name in ("none", "ngram", "trie"):
        raise ConfigError(
            f"speculator {name!r} takes no drafter; leave --draft or --speculator out"
        )
    return kind(setup)


def _load(name: str) -> type[Speculator]:
    module_name, _, class_name = name.partition(":")
    if not class_name:
        known = ", ".join(("auto", *SPECULATORS))
        raise ConfigError(f"speculator {name!r} is unknown; pass one of {known}, or module:Class")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"speculator {name!r} cannot be loaded: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Speculator)):
        raise ConfigError(f"speculator {name!r} is no subclass of nanospec.Speculator")
    return kind
