"""The speculators by name, and a user's own by module and class."""

import importlib

from nanospec.errors import ConfigError
from nanospec.models.loader import resolve_model
from nanospec.spec.draft_model import DraftModelSpeculator
from nanospec.spec.dspark import DSparkSpeculator
from nanospec.spec.dspark_tree import DSparkTreeSpeculator
from nanospec.spec.ngram import NgramSpeculator
from nanospec.spec.speculator import NoSpeculator, Speculator, SpeculatorSetup
from nanospec.spec.trie import TrieSpeculator
from nanospec.text import read_json

SPECULATORS: dict[str, type[Speculator]] = {
    "none": NoSpeculator,
    "ngram": NgramSpeculator,
    "trie": TrieSpeculator,
    "draft": DraftModelSpeculator,
    "dspark": DSparkSpeculator,
    "dspark-tree": DSparkTreeSpeculator,
}


def create_speculator(setup: SpeculatorSetup) -> Speculator:
    """Build the speculator that a config names; auto goes by what the drafter is, if there is one.

    Raises:
        ConfigError: there is none of that name, or it cannot work here.
        CheckpointError: the drafter cannot be loaded.
    """
    config = setup.config
    name = config.speculator
    if name == "auto":
        name = "none" if config.draft is None else _kind_of_drafter(config.draft)
    kind = SPECULATORS.get(name) or _load(name)
    if config.draft is not None and name in ("none", "ngram", "trie"):
        raise ConfigError(
            f"speculator {name!r} takes no drafter; leave --draft or --speculator out"
        )
    return kind(setup)


def _kind_of_drafter(draft: str) -> str:
    architectures = read_json(resolve_model(draft) / "config.json").get("architectures") or [""]
    return "dspark" if "DSpark" in str(architectures[0]) else "draft"


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
