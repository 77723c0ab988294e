"""Read untrusted run directories safely: limits on YAML, and no code without permission.

Run directories are shared between users, so ``config.yaml`` is untrusted data. It is read within
fixed limits, and code that it names runs only if the user allows it (SECURITY.md).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from segcredit.printable import printable
from segcredit.registry import code_settings

BYTES = 1_000_000
"""Maximum size of a YAML file in bytes; a complete config.yaml has about 3,000."""
NODES = 10_000
"""Maximum number of values in a document; an alias counts as all the values it repeats."""
DEPTH = 50
"""Maximum nesting depth."""
DIGITS = 100
"""Maximum number of characters in a number."""
FLAG = "--trust-run"
"""Command-line option that allows what a run directory requests."""


class PlainLoader(yaml.SafeLoader):
    """YAML loader for plain data that checks the size in memory before building any value.

    Aliases (``*x``) and merge keys (``<<``) repeat a value: ten lines of them can expand to
    billions of values. Each alias counts as all the values it repeats.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count = self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        before = self._count
        self._count += 1
        self._depth += 1
        if self._depth > DEPTH:
            raise ValueError(
                f"expected at most {DEPTH} levels of nesting; got a value nested deeper"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias:
            if id(node) not in self._sizes:  # its anchor is still open
                raise ValueError("expected plain values; got an alias to a value that contains it")
            self._count += self._sizes[id(node)] - 1
        else:
            self._sizes[id(node)] = self._count - before
        if self._count > NODES:
            raise ValueError(f"expected at most {NODES:,} values, with aliases expanded; got more")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and len(str(node.value)) > DIGITS:
            raise ValueError(f"expected numbers of at most {DIGITS} characters; got a longer one")
        return super().construct_object(node, deep)

    def refuse_tag(self, node: yaml.Node) -> Any:
        """Refuse values that JSON does not have.

        A recipe would take the bytes of ``!!binary`` for text, so a name of code or a key could
        pass every search for it.
        """
        raise ValueError(f"expected plain values; got one with the tag {node.tag.split(':')[-1]}")


for _tag in ("binary", "set", "omap", "pairs"):
    PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", PlainLoader.refuse_tag)


def parse_yaml(text: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Parse untrusted YAML into plain data; the only exception raised is ValueError."""
    if len(text) > BYTES:
        raise ValueError(f"expected at most {BYTES:,} bytes; got {len(text):,}")
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        # PyYAML on a value that is not what its tag says, such as !!bool maybe
        raise ValueError(f"a value does not fit its tag ({error!r})") from None


def read_yaml(path: Path, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Parse an untrusted YAML file, reading at most the allowed size."""
    with path.open("rb") as file:
        return parse_yaml(file.read(BYTES + 1).decode(), loader)


def requests_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Find the settings of a config.yaml that request code, files of this machine or a server.

    Reading a recipe imports the code it names (``algorithm: mine.py:Method``), so this must be
    checked on the settings as they are in the file, before they become a recipe.
    """
    found: dict[str, str] = {}
    for key, value in code_settings(config):  # the items of a list have one key
        found[key] = f"{found[key]}, {value}" if key in found else value
    model, data = config.get("model"), config.get("data")
    if isinstance(model, dict) and model.get("trust_remote_code"):
        found["model.trust_remote_code"] = "true"
    if isinstance(data, dict) and data.get("allow_outside"):
        found["data.allow_outside"] = "true"
    if urls := [*_urls(config.get("reward"))]:
        found[REWARD_URL] = ", ".join(urls)
    return found


REWARD_URL = "reward.url"
"""Key of a server that gets prompts and responses."""


def _urls(reward: Any) -> Iterable[str]:
    """Yield the URLs in a reward or a list of rewards."""
    for spec in reward if isinstance(reward, list) else [reward]:
        if isinstance(spec, Mapping) and spec.get("url"):
            yield str(spec["url"])


def _effect(asked: Iterable[str]) -> str:
    effects = {
        "data.allow_outside": "read images outside the folders of its data",
        REWARD_URL: "send prompts and responses to that server",
    }
    return " and ".join(dict.fromkeys(effects.get(x, "run code on this machine") for x in asked))


def require_trust(
    config: Mapping[str, Any], folder: Path, command: str, typed: Iterable[str] = ()
) -> None:
    """Raise ValueError if a run's settings request code or files that the user did not name.

    Args:
        config: The settings that are about to be used.
        folder: The run directory that they come from.
        command: Command that allows it, for the message.
        typed: Keys of settings that the user gave; these need no permission.
    """
    given = tuple(typed)
    asked = {
        key: value
        for key, value in requests_of(config).items()
        if not any(key == x or key.startswith(f"{x}.") for x in given)
    }
    if not asked:
        return
    settings = ", ".join(f"{key}: {printable(value, 300)}" for key, value in asked.items())
    raise ValueError(
        f"{folder}: expected a run that names no code and no files of this machine; got "
        f"{settings} in its config.yaml, which would {_effect(asked)}. If you trust this run, "
        f"type: {command}"
    )
