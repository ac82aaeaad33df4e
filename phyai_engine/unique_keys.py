"""YAML in which a key stands once in its mapping: PyYAML keeps the last of two without a word."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from phyai_engine.errors import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key instead of keeping the last one."""


def _construct_mapping(loader: UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Merge keys are expanded here: PyYAML 6.0.4 merges what was merged before with the wrong precedence."""
    own: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        at = f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}"
        value = loader.construct_object(value_node, deep=True)  # deep: an alias inside its own anchor is refused
        if key_node.tag == "tag:yaml.org,2002:merge":
            for source in value if isinstance(value, list) else [value]:
                if not isinstance(source, dict):
                    raise ConfigError("`<<` merges mappings only", got=source, where=at)
                merged = {**source, **merged}  # the first that has a key gives it
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise ConfigError("a key is a list or a mapping", got=key, wanted="one value", where=at)
        if key in own:
            raise ConfigError(f"key {key!r} stands twice", where=at, do="Keep one of them.")
        own[key] = value
    return {**merged, **own}


UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
