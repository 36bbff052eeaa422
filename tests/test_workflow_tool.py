"""tools/workflow.py: the editor's form of a workflow becomes the server's form by the editor's own rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

# At the end of the path: ComfyUI's own modules keep their names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from workflow import WorkflowError, api_prompt, load_workflow, set_input

INFO: dict[str, Any] = {
    "Loader": {"input": {"required": {"name": [["a.safetensors", "b.safetensors"], {}]}}, "display_name": "Load Model"},
    "Style": {
        "input": {"required": {"model": ["MODEL", {}], "strength": ["FLOAT", {"default": 1.0}]}},
        "display_name": "Style",
    },
    "Sampler": {
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"control_after_generate": True}],
                "steps": ["INT", {}],
                "mode": ["COMBO", {"options": ["x", "y"]}],
            },
            "optional": {"note": ["STRING", {}], "forced": ["STRING", {"forceInput": True}], "extra": ["LATENT"]},
        },
        "input_order": {"required": ["model", "seed", "steps", "mode"], "optional": ["note", "forced", "extra"]},
        "display_name": "Sampler",
    },
    "Picture": {"input": {"required": {"image": [["p.png"], {"image_upload": True}], "size": ["INT", {}]}}},
}


def node(
    number: int, kind: str, values: list[Any], inputs: dict[str, tuple[str, int | None]] | None = None, **more: Any
) -> dict[str, Any]:
    """A node as the editor saves it. inputs: name -> (type, link)."""
    slots = [{"name": name, "type": slot[0], "link": slot[1]} for name, slot in (inputs or {}).items()]
    return {"id": number, "type": kind, "inputs": slots, "outputs": [], "mode": 0, "widgets_values": values, **more}


def sampler(values: list[Any] | None = None, link: int = 1, **inputs: tuple[str, int]) -> dict[str, Any]:
    """The sampler as node 9, with its model at the given link."""
    return node(9, "Sampler", values or [7, "fixed", 20, "x", "hello"], {"model": ("MODEL", link), **inputs})


def workflow(*nodes: dict[str, Any], links: list[list[Any]]) -> dict[str, Any]:
    """A workflow as the editor saves it."""
    return {"nodes": list(nodes), "links": links, "version": 0.4}


def test_values_get_the_names_of_the_inputs_and_the_seed_control_is_left_out():
    prompt = api_prompt(
        workflow(node(1, "Loader", ["a.safetensors"]), sampler(), links=[[1, 1, 0, 9, 0, "MODEL"]]), INFO
    )
    assert prompt["1"] == {
        "class_type": "Loader",
        "inputs": {"name": "a.safetensors"},
        "_meta": {"title": "Load Model"},
    }
    assert prompt["9"]["inputs"] == {"model": ["1", 0], "seed": 7, "steps": 20, "mode": "x", "note": "hello"}


def test_a_seed_has_a_control_even_where_the_server_does_not_ask_for_one():
    info = {"Noise": {"input": {"required": {"noise_seed": ["INT", {}], "steps": ["INT", {}]}}}}
    prompt = api_prompt(workflow(node(1, "Noise", [5, "randomize", 20]), links=[]), info)
    assert prompt["1"]["inputs"] == {"noise_seed": 5, "steps": 20}


def test_the_button_behind_an_upload_is_left_out():
    prompt = api_prompt(workflow(node(1, "Picture", ["p.png", "image", 64]), links=[]), INFO)
    assert prompt["1"]["inputs"] == {"image": "p.png", "size": 64}


def test_a_link_wins_over_the_value_stored_for_the_same_input():
    page = workflow(
        node(1, "Loader", ["a.safetensors"]),
        sampler(note=("STRING", 2)),
        links=[[1, 1, 0, 9, 0, "MODEL"], [2, 1, 3, 9, 1, "STRING"]],
    )
    assert api_prompt(page, INFO)["9"]["inputs"]["note"] == ["1", 3]


def test_an_own_title_is_kept():
    prompt = api_prompt(workflow(node(1, "Loader", ["a.safetensors"], title="The model"), links=[]), INFO)
    assert prompt["1"]["_meta"]["title"] == "The model"


@pytest.mark.parametrize("kind", ["Note", "MarkdownNote"])
def test_notes_are_left_out(kind: str):
    assert list(
        api_prompt(workflow(node(1, "Loader", ["a.safetensors"]), node(2, kind, ["text"]), links=[]), INFO)
    ) == ["1"]


def chain(mode: int) -> dict[str, Any]:
    """Loader -> Style -> Sampler, with the Style node in the given mode."""
    style = node(2, "Style", [0.5], {"model": ("MODEL", 1)}, mode=mode)
    return workflow(
        node(1, "Loader", ["a.safetensors"]),
        style,
        sampler(link=2),
        links=[[1, 1, 0, 2, 0, "MODEL"], [2, 2, 0, 9, 0, "MODEL"]],
    )


def test_a_bypassed_node_passes_on_what_it_gets():
    prompt = api_prompt(chain(mode=4), INFO)
    assert "2" not in prompt
    assert prompt["9"]["inputs"]["model"] == ["1", 0]


def test_a_bypassed_node_without_a_fitting_input_passes_on_nothing():
    style = node(2, "Style", [0.5], {"image": ("IMAGE", 1)}, mode=4)
    page = workflow(
        node(1, "Loader", ["a.safetensors"]),
        style,
        sampler(link=2),
        links=[[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 9, 0, "MODEL"]],
    )
    assert "model" not in api_prompt(page, INFO)["9"]["inputs"]


def test_a_muted_node_takes_its_links_with_it():
    prompt = api_prompt(chain(mode=2), INFO)
    assert "2" not in prompt
    assert "model" not in prompt["9"]["inputs"]


def test_reroutes_are_followed():
    first, second = node(3, "Reroute", [], {"": ("*", 1)}), node(4, "Reroute", [], {"": ("*", 2)})
    links = [[1, 1, 0, 3, 0, "MODEL"], [2, 3, 0, 4, 0, "*"], [3, 4, 0, 9, 0, "MODEL"]]
    prompt = api_prompt(
        workflow(node(1, "Loader", ["a.safetensors"]), first, second, sampler(link=3), links=links), INFO
    )
    assert set(prompt) == {"1", "9"}
    assert prompt["9"]["inputs"]["model"] == ["1", 0]


def test_an_open_reroute_leads_to_nothing():
    page = workflow(node(3, "Reroute", [], {"": ("*", None)}), sampler(link=1), links=[[1, 3, 0, 9, 0, "MODEL"]])
    assert "model" not in api_prompt(page, INFO)["9"]["inputs"]


def test_a_primitive_node_gives_its_value():
    primitive = node(5, "PrimitiveNode", [42, "fixed"])
    links = [[1, 1, 0, 9, 0, "MODEL"], [2, 5, 0, 9, 2, "INT"]]
    page = workflow(node(1, "Loader", ["a.safetensors"]), primitive, sampler(steps=("INT", 2)), links=links)
    prompt = api_prompt(page, INFO)
    assert prompt["9"]["inputs"]["steps"] == 42
    assert "5" not in prompt


def test_a_node_type_that_the_server_lacks_is_named():
    with pytest.raises(WorkflowError, match=r"node 4 \(Unheard\) 'Mine': the server has no node of this type"):
        api_prompt(workflow(node(4, "Unheard", [], title="Mine"), links=[]), INFO)


@pytest.mark.parametrize("values", [[7, "fixed", 20, "x"], [7, "fixed", 20, "x", "hello", 1]])
def test_a_wrong_number_of_values_is_refused(values: list[Any]):
    page = workflow(node(1, "Loader", ["a.safetensors"]), sampler(values), links=[[1, 1, 0, 9, 0, "MODEL"]])
    with pytest.raises(
        WorkflowError, match=r"node 9 \(Sampler\) stores \d values; 5 expected .* seed, steps, mode, note"
    ):
        api_prompt(page, INFO)


def test_links_that_lead_nowhere_or_in_a_circle_are_refused():
    with pytest.raises(WorkflowError, match="link 1 leads nowhere"):
        api_prompt(workflow(sampler(), links=[]), INFO)
    circle = workflow(node(3, "Reroute", [], {"": ("*", 1)}), sampler(), links=[[1, 3, 0, 9, 0, "MODEL"]])
    with pytest.raises(WorkflowError, match="link 1 leads nowhere"):
        api_prompt(circle, INFO)


def test_set_input_finds_a_node_by_type_or_title():
    prompt = api_prompt(workflow(node(1, "Loader", ["a.safetensors"], title="Mine"), links=[]), INFO)
    set_input(prompt, "Mine", "name", "b.safetensors")
    assert prompt["1"]["inputs"]["name"] == "b.safetensors"
    set_input(prompt, "Loader", "name", "c.safetensors")
    assert prompt["1"]["inputs"]["name"] == "c.safetensors"


def test_set_input_refuses_what_is_not_one_existing_input():
    prompt = api_prompt(workflow(node(1, "Loader", ["a"]), node(2, "Loader", ["b"], title="Two"), links=[]), INFO)
    with pytest.raises(WorkflowError, match="2 nodes are called 'Loader'"):
        set_input(prompt, "Loader", "name", "x")
    with pytest.raises(WorkflowError, match=r"0 nodes are called 'Nobody'.*'Two'"):
        set_input(prompt, "Nobody", "name", "x")
    with pytest.raises(WorkflowError, match="no input 'size'; it has: name"):
        set_input(prompt, "Two", "size", 1)


def test_load_workflow_says_what_a_file_is(tmp_path: Path):
    file = tmp_path / "page.json"
    with pytest.raises(WorkflowError, match=r"page.json: cannot be read"):
        load_workflow(file)
    file.write_text("{")
    with pytest.raises(WorkflowError, match="not valid JSON"):
        load_workflow(file)
    file.write_text(json.dumps({"1": {"class_type": "Loader", "inputs": {}}}))
    with pytest.raises(WorkflowError, match=r"no workflow of the editor.*not 'Export \(API\)'"):
        load_workflow(file)
