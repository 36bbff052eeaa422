"""Turn a workflow file of ComfyUI's editor into the prompt that its server runs.

The editor saves a workflow with positions, groups and notes; the server wants only nodes and their inputs. The files in
`workflows/` are kept once, in the editor's form, and the server's form is derived here by the editor's own rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDGET_TYPES = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})
_NOTES = frozenset({"Note", "MarkdownNote"})
_SEED_NAMES = frozenset({"seed", "noise_seed"})
_MUTED, _BYPASSED = 2, 4


class WorkflowError(ValueError):
    """A workflow file cannot be run. The message names the node, what was found, and what to do."""


@dataclass(frozen=True)
class Literal:
    """A value that reaches an input over a link, from a primitive node."""

    value: Any


def load_workflow(file: Path) -> dict[str, Any]:
    """Read a workflow file. Raises WorkflowError when it is missing or not a workflow of the editor."""
    try:
        workflow = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkflowError(f"{file.name}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise WorkflowError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(workflow, dict) or "nodes" not in workflow or "links" not in workflow:
        raise WorkflowError(f"{file.name} is no workflow of the editor; save it with 'Export', not 'Export (API)'.")
    return workflow


def label(node: Mapping[str, Any]) -> str:
    """Return how messages name a node: its number, its type and its own title, if it has one."""
    title = f" '{node['title']}'" if node.get("title") else ""
    return f"node {node['id']} ({node['type']}){title}"


def api_prompt(workflow: Mapping[str, Any], object_info: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the server's prompt from a workflow of the editor.

    Args:
        workflow: the parsed file, version 0.4 (links as lists).
        object_info: the server's answer to /object_info; it gives the names and the order of the inputs.

    Returns: node id -> {"class_type", "inputs", "_meta"}. A link is [node id, output index].
    Raises: WorkflowError when the server lacks a node type, or the stored values do not fit the node's inputs.
    """
    graph = _Graph(workflow)
    prompt: dict[str, Any] = {}
    for node in workflow["nodes"]:
        if node["type"] in _NOTES or _is_virtual(node) or node.get("mode", 0) in (_MUTED, _BYPASSED):
            continue
        info = object_info.get(node["type"])
        if info is None:
            raise WorkflowError(
                f"{label(node)}: the server has no node of this type. Is the package that brings it installed? "
                "The server's log says why a package could not be loaded."
            )
        inputs = widget_values(node, info)
        for name, source in graph.sources(node):
            inputs[name] = source.value if isinstance(source, Literal) else source
        title = node.get("title") or info.get("display_name") or node["type"]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": title}}
    return prompt


def widget_values(node: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Give the stored values of a node, which are saved by position, the names of its inputs.

    Args: node: a node of the workflow. info: its entry of /object_info.
    Raises: WorkflowError when there are more or fewer values than the node has.
    """
    stored = list(node.get("widgets_values") or [])
    values: dict[str, Any] = {}
    position = 0
    for name, options in _widgets(info):
        if position < len(stored):
            values[name] = stored[position]
        position += 1 + _extra_values(name, options)
    if len(stored) != position:
        names = ", ".join(name for name, _ in _widgets(info)) or "none"
        raise WorkflowError(
            f"{label(node)} stores {len(stored)} values; {position} expected for its inputs: {names}. "
            "The node has changed since the file was saved: open it in ComfyUI, check the node and save it again."
        )
    return values


def set_input(prompt: dict[str, Any], node: str, name: str, value: Any) -> None:
    """Change one value of a prompt.

    Args:
        prompt: what `api_prompt` returned; changed in place.
        node: the type or the title of the node to change.
        name: the input's name.
        value: the new value.

    Raises: WorkflowError unless exactly one node is meant and has this input.
    """
    found = [entry for entry in prompt.values() if node in (entry["class_type"], entry["_meta"]["title"])]
    if len(found) != 1:
        titles = ", ".join(f"'{entry['_meta']['title']}'" for entry in prompt.values())
        raise WorkflowError(f"{len(found)} nodes are called '{node}'; exactly one is needed. There are: {titles}")
    inputs = found[0]["inputs"]
    if name not in inputs:
        raise WorkflowError(f"'{node}' has no input '{name}'; it has: {', '.join(inputs)}")
    inputs[name] = value


def _widgets(info: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and options of each input that has a widget, in the order in which their values are saved."""
    for section in ("required", "optional"):
        specs = info["input"].get(section) or {}
        for name in (info.get("input_order") or {}).get(section) or specs:
            kind, options = specs[name][0], specs[name][1] if len(specs[name]) > 1 else {}
            # Old combos give the list of choices as the type.
            is_widget = isinstance(kind, list) or kind in _WIDGET_TYPES
            if is_widget and not options.get("forceInput"):
                yield name, options


def _extra_values(name: str, options: Mapping[str, Any]) -> int:
    """Count the values that the editor saves behind an input's own, and that the server does not know."""
    control = options.get("control_after_generate")
    if control is None:
        control = name in _SEED_NAMES
    upload = any(options.get(f"{kind}_upload") for kind in ("image", "video", "audio"))
    return int(bool(control)) + int(upload)


def _is_virtual(node: Mapping[str, Any]) -> bool:
    """Tell whether the node exists only in the editor."""
    return node["type"] in ("Reroute", "PrimitiveNode")


class _Graph:
    """Follows the links of a workflow back to the nodes that run on the server."""

    def __init__(self, workflow: Mapping[str, Any]) -> None:
        self._nodes = {node["id"]: node for node in workflow["nodes"]}
        self._links = {link[0]: link for link in workflow["links"]}

    def sources(self, node: Mapping[str, Any]) -> Iterator[tuple[str, list[Any] | Literal]]:
        """Yield (input name, source) for each input whose link leads to something; a muted node counts as nothing."""
        for entry in node.get("inputs") or []:
            if entry.get("link") is not None:
                source = self._follow(entry["link"], entry["type"], node)
                if source is not None:
                    yield entry["name"], source

    def _follow(self, link_id: int, kind: str, target: Mapping[str, Any]) -> list[Any] | Literal | None:
        seen: set[int] = set()
        while True:
            link = self._links.get(link_id)
            if link is None or link[1] not in self._nodes or link_id in seen:
                raise WorkflowError(
                    f"{label(target)}: link {link_id} leads nowhere. Open the file in ComfyUI and save it again."
                )
            seen.add(link_id)
            origin, slot = self._nodes[link[1]], link[2]
            if origin.get("mode", 0) == _MUTED:
                return None
            if origin["type"] == "PrimitiveNode":
                return Literal(origin["widgets_values"][0])
            if origin["type"] == "Reroute":
                follow = origin["inputs"][0].get("link")
            elif origin.get("mode", 0) == _BYPASSED:
                follow = _bypass(origin, slot, kind)
            else:
                return [str(origin["id"]), slot]
            if follow is None:
                return None
            link_id = follow


def _bypass(node: Mapping[str, Any], slot: int, kind: str) -> int | None:
    """Return the link that a bypassed node passes on: the input at the same place if it fits, else the first that does."""
    inputs = node.get("inputs") or []
    same_type = [entry for entry in inputs if entry["type"] == kind]
    ordered = inputs[slot : slot + 1] + same_type + inputs
    return next((entry.get("link") for entry in ordered if _fits(entry["type"], kind)), None)


def _fits(one: str, other: str) -> bool:
    """Tell whether two slot types may be connected; '*' is any type, a comma separates alternatives."""
    return "*" in (one, other) or not set(one.split(",")).isdisjoint(other.split(","))
