"""The package inside the real ComfyUI server: what it shows of our nodes and workflows, and what these paint."""

from __future__ import annotations

import asyncio
import colorsys
import copy
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

# At the end of the path: ComfyUI's own modules keep their names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import demo
from host_server import CACHE, Server, running_server
from workflow import api_prompt, load_workflow, set_input, widget_values

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
NANO_FILES = {
    "ErnieFastModelLoader": ("unet_name", "ernie-image-nano.safetensors"),
    "ErnieFastTextEncoderLoader": ("clip_name", "ministral-nano.safetensors"),
    "VAELoader": ("vae_name", "taef2"),
}
TITLE_PX = 30  # the editor draws a node's title above its position

pytestmark = pytest.mark.server
every_workflow = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests of this file."""
    with running_server(CACHE / "test-server.log") as running:
        yield running


@pytest.fixture(scope="module")
def object_info(server: Server) -> dict[str, Any]:
    """What the server says about all nodes."""
    return server.get_json("/object_info")


@pytest.fixture(scope="module")
def ours(object_info: dict[str, Any]) -> dict[str, Any]:
    """What the server says about our nodes."""
    return {name: info for name, info in object_info.items() if name.startswith("ErnieFast")}


@pytest.fixture(scope="module")
def folder(ours: dict[str, Any]) -> str:
    """The name of our folder in custom_nodes; ComfyUI serves our files under it."""
    (module,) = {info["python_module"] for info in ours.values()}
    return module.removeprefix("custom_nodes.")


def inputs_of(info: dict[str, Any]) -> dict[str, Any]:
    """All inputs of a node: name -> [type, options]."""
    return {name: spec for section in ("required", "optional") for name, spec in info["input"].get(section, {}).items()}


def run(server: Server, prompt: dict[str, Any]) -> Image.Image:
    """Run a prompt and return its one picture."""
    outputs = asyncio.run(demo.run_prompt(server, prompt))
    (image,) = [image for output in outputs.values() for image in output.get("images", [])]
    with Image.open(io.BytesIO(demo.download(server, image))) as picture:
        return picture.convert("RGB")


def colours(picture: Image.Image) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (hue in degrees, saturation) of the border and of the centre."""
    pixels = np.asarray(picture)
    border = np.concatenate([pixels[:8].reshape(-1, 3), pixels[-8:].reshape(-1, 3)])
    height, width = pixels.shape[:2]
    centre = pixels[height * 3 // 8 : height * 5 // 8, width * 3 // 8 : width * 5 // 8].reshape(-1, 3)
    hsv = [colorsys.rgb_to_hsv(*(np.median(part, axis=0) / 255)) for part in (border, centre)]
    return (hsv[0][0] * 360, hsv[0][1]), (hsv[1][0] * 360, hsv[1][1])


def assert_hue(colour: tuple[float, float], expected: float, within: float = 25) -> None:
    """Check that a colour is no grey and has the expected hue, in degrees."""
    hue, saturation = colour
    distance = abs((hue - expected + 180) % 360 - 180)
    assert saturation > 0.3, f"saturation {saturation:.2f}: a grey"
    assert distance < within, f"hue {hue:.0f}; {expected} expected"


# --- what the server says about our nodes ---


def test_the_server_has_every_node_of_the_package(ours: dict[str, Any]):
    from ernie_fast.nodes import ErnieFastExtension

    nodes = asyncio.run(ErnieFastExtension().get_node_list())
    assert set(ours) == {node.GET_SCHEMA().node_id for node in nodes}


def test_every_node_explains_itself(ours: dict[str, Any]):
    for name, info in ours.items():
        assert info["description"], name
        assert info["search_aliases"], name
        assert info["category"].startswith("model/"), name
        assert all(info["output_tooltips"]), name
        for key, spec in inputs_of(info).items():
            assert spec[1].get("tooltip"), f"{name}.{key} has no tooltip"


def test_every_node_has_a_help_page_that_names_its_inputs(server: Server, ours: dict[str, Any], folder: str):
    for name, info in ours.items():
        page = server.get(f"/extensions/{folder}/docs/{name}.md").decode()
        missing = [key for key in inputs_of(info) if f"**{key}**" not in page]
        assert not missing, f"{name}.md does not name {missing}"


def test_the_server_lists_our_workflows_as_templates(server: Server, folder: str):
    assert set(server.get_json("/workflow_templates")[folder]) == {file.stem for file in WORKFLOWS}
    for file in WORKFLOWS:
        assert server.get_json(f"/api/workflow_templates/{folder}/{file.name}") == json.loads(
            file.read_text(encoding="utf-8")
        )


# --- the workflow files ---


@every_workflow
def test_workflow_fits_the_nodes(file: Path, object_info: dict[str, Any]):
    page = load_workflow(file)
    for node in page["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        info = object_info[node["type"]]
        values = widget_values(node, info)  # raises when their number is wrong
        known = inputs_of(info)
        for name, value in values.items():
            options = known[name][0] if isinstance(known[name][0], list) else known[name][1].get("options")
            if options and not str(value).endswith(".safetensors"):
                assert value in options, f"{node['type']}.{name}"
        for entry in node["inputs"]:
            kind = known[entry["name"]][0]
            assert entry["type"] == ("COMBO" if isinstance(kind, list) else kind)
            assert ("widget" in entry) == (entry["name"] in values)
        assert [entry["type"] for entry in node["outputs"]] == list(info["output"])
        assert [entry["name"] for entry in node["outputs"]] == list(info["output_name"])
        needed = set(info["input"]["required"]) - set(values)
        assert needed <= {entry["name"] for entry in node["inputs"] if entry["link"] is not None}


@every_workflow
def test_workflow_links_agree_at_both_ends(file: Path):
    page = load_workflow(file)
    nodes = {node["id"]: node for node in page["nodes"]}
    assert page["version"] == 0.4
    assert page["last_node_id"] == max(nodes)
    assert page["last_link_id"] == max(link[0] for link in page["links"])
    for number, origin, slot, target, entry, kind in page["links"]:
        output, sink = nodes[origin]["outputs"][slot], nodes[target]["inputs"][entry]
        assert number in output["links"]
        assert sink["link"] == number
        assert output["type"] == sink["type"] == kind
        assert nodes[origin]["pos"][0] <= nodes[target]["pos"][0], "links run from left to right"
        assert nodes[origin]["order"] < nodes[target]["order"]
    ends = [number for node in page["nodes"] for output in node["outputs"] for number in output["links"]]
    assert sorted(ends) == sorted(link[0] for link in page["links"])


def overlap(one: list[float], other: list[float]) -> bool:
    """Tell whether two rectangles (x, y, width, height) overlap."""
    return all(one[axis] < other[axis] + other[axis + 2] and other[axis] < one[axis] + one[axis + 2] for axis in (0, 1))


@every_workflow
def test_workflow_layout_is_tidy(file: Path):
    page = load_workflow(file)
    boxes = {
        node["id"]: [node["pos"][0], node["pos"][1] - TITLE_PX, node["size"][0], node["size"][1] + TITLE_PX]
        for node in page["nodes"]
    }
    groups = [group["bounding"] for group in page["groups"]]
    for first, second in [*combinations(boxes.values(), 2), *combinations(groups, 2)]:
        assert not overlap(first, second)
    assert [group["title"] for group in page["groups"]] == ["Load", "Prompt", "Sample", "Save"]
    notes = [node for node in page["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 1
    for node in page["nodes"]:
        around = sum(overlap(boxes[node["id"]], group) for group in groups)
        assert around == (0 if node["type"] == "MarkdownNote" else 1)
    values = [value for node in page["nodes"] if node["type"] != "MarkdownNote" for value in node["widgets_values"]]
    for name in [value for value in values if str(value).endswith(".safetensors")]:
        assert name in notes[0]["widgets_values"][0], f"the note does not say where {name} comes from"


# --- pictures ---


def painted(server: Server, object_info: dict[str, Any], text: str, seed: int) -> Image.Image:
    """Paint with the demo's workflow."""
    return run(server, demo.demo_prompt(object_info, text, seed)[0])


def test_demo_paints_what_the_prompt_says(server: Server, object_info: dict[str, Any]):
    apple = painted(server, object_info, "a red apple on a teal background", 3)
    assert apple.size == (256, 256)
    border, centre = colours(apple)
    assert_hue(border, 180)
    assert_hue(centre, 0)
    lemon = painted(server, object_info, "a lemon on a purple background", 3)
    border, centre = colours(lemon)
    assert_hue(border, 273)
    assert_hue(centre, 50)
    # The lemon in between made the server forget the apple's steps: this is a new run, not its cache.
    again = painted(server, object_info, "a red apple on a teal background", 3)
    assert again.tobytes() == apple.tobytes()


@pytest.mark.parametrize(("name", "steps"), [("ernie-turbo", None), ("ernie-base", 8)])
def test_full_size_workflow_runs_on_the_tiny_model(
    server: Server, object_info: dict[str, Any], name: str, steps: int | None
):
    prompt = api_prompt(load_workflow(ROOT / "workflows" / f"{name}.json"), object_info)
    for kind, (key, value) in NANO_FILES.items():
        set_input(prompt, kind, key, value)
    set_input(prompt, "Size", "width", 256)
    set_input(prompt, "Size", "height", 256)
    set_input(prompt, "Positive prompt", "text", "a sunflower on a blue background")
    set_input(prompt, "KSampler", "seed", 1)
    if steps:
        set_input(prompt, "KSampler", "steps", steps)
    picture = run(server, prompt)
    assert picture.size == (256, 256)
    assert_hue(colours(picture)[0], 218)


class Terminal(io.StringIO):
    """A standard output that counts as a terminal."""

    def isatty(self) -> bool:
        return True


def test_demo_command_writes_the_picture(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def the_same_server(log: Path) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(demo, "running_server", the_same_server)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "PICTURE", tmp_path / "output" / "demo.png")
    pictures = []
    for seed, stdout in ((0, io.StringIO()), (1, Terminal())):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["demo.py", "--prompt", "a moon on a green background", "--seed", str(seed)])
        assert demo.main() == 0
        with Image.open(tmp_path / "output" / "demo.png") as picture:
            pictures.append(picture.convert("RGB"))
        assert_hue(colours(pictures[-1])[0], 127)
        assert [file.name for file in (tmp_path / "output").iterdir()] == ["demo.png"]
        text = stdout.getvalue()
        assert f"output/demo.png: 'a moon on a green background', seed {seed}" in text
        live = stdout.isatty()
        assert ("\r\x1b[K[demo] KSampler: 20 of 20" if live else "\n[demo] KSampler: 20 of 20\n") in text
        assert text.count("of 20") == (20 if live else 4)
    assert pictures[0].tobytes() != pictures[1].tobytes(), "another seed, another picture"


def with_cache(prompt: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Put ERNIE Cache before the sampler of a prompt, and its report, shown by a text preview, after it."""
    prompt = copy.deepcopy(prompt)
    sampler_id = next(key for key, entry in prompt.items() if entry["class_type"] == "KSampler")
    decoder = next(entry for entry in prompt.values() if entry["class_type"] == "VAEDecode")
    model = prompt[sampler_id]["inputs"]["model"]
    prompt["cache"] = {"class_type": "ErnieFastCache", "inputs": {"model": model, **settings}}
    prompt["report"] = {"class_type": "ErnieFastCacheReport", "inputs": {"model": ["cache", 0], "samples": [sampler_id, 0]}}
    prompt["text"] = {"class_type": "PreviewAny", "inputs": {"source": ["report", 1]}}
    prompt[sampler_id]["inputs"]["model"] = ["cache", 0]
    decoder["inputs"]["samples"] = ["report", 0]
    return prompt


def test_cache_in_a_graph_skips_steps_reports_them_and_can_be_bypassed(server: Server, object_info: dict[str, Any]):  # U64
    prompt = demo.demo_prompt(object_info, "a red apple on a teal background", 3)[0]
    plain = run(server, prompt)
    outputs = asyncio.run(demo.run_prompt(server, with_cache(prompt, preset="balanced")))
    (image,) = [image for output in outputs.values() for image in output.get("images", [])]
    with Image.open(io.BytesIO(demo.download(server, image))) as opened:
        cached = opened.convert("RGB")
    (text,) = outputs["text"]["text"]
    assert "of 20 steps" in text
    assert "\nsteps: ###" in text
    assert "." in text.split("steps: ")[1].split("\n")[0]
    error = np.mean((np.asarray(cached, float) - np.asarray(plain, float)) ** 2)
    assert 0 < error < 20, "PSNR below 35 dB"
    set_input(prompt, "KSampler", "seed", 4)
    run(server, prompt)
    set_input(prompt, "KSampler", "seed", 3)
    assert run(server, prompt).tobytes() == plain.tobytes(), "the cache stayed after its node was removed"


def test_a_quantised_model_is_saved_in_a_graph_and_paints_the_same_when_loaded(server: Server, object_info: dict[str, Any]):
    prompt = demo.demo_prompt(object_info, "a red apple on a teal background", 3)[0]
    plain = run(server, prompt)
    (loader,) = [key for key, entry in prompt.items() if entry["class_type"] == "ErnieFastModelLoader"]
    prompt[loader]["inputs"] |= {"weight_format": "fp8", "keep_16bit": "0"}
    saving = copy.deepcopy(prompt)
    saved = {"model": [loader, 0], "filename": "test/nano-fp8", "overwrite": False}
    saving["save"] = {"class_type": "ErnieFastSaveCheckpoint", "inputs": saved}
    outputs = asyncio.run(demo.run_prompt(server, saving))
    assert "diffusion_models/test/nano-fp8.safetensors" in outputs["save"]["text"][0]
    (sampler,) = [entry for entry in saving.values() if entry["class_type"] == "KSampler"]
    sampler["inputs"]["seed"] = 4
    asyncio.run(demo.run_prompt(server, saving))  # another picture, and the file that is there is no error
    quantised = run(server, prompt)
    error = np.mean((np.asarray(quantised, float) - np.asarray(plain, float)) ** 2)
    assert 0 < error < 20, "PSNR below 35 dB"
    prompt[loader]["inputs"] |= {"unet_name": "test/nano-fp8.safetensors", "weight_format": "as stored"}
    again = run(server, prompt)
    # The weights are equal; a mapped file lies elsewhere in memory, and the last bit of a product on the CPU may depend on that.
    assert np.abs(np.asarray(again, int) - np.asarray(quantised, int)).max() <= 2


# --- what can go wrong ---


@pytest.mark.parametrize(
    ("node", "key", "value", "reason"),
    [
        (
            "ErnieFastModelLoader",
            "unet_name",
            "nowhere.safetensors",
            "nowhere.safetensors: not found in ComfyUI's folder",
        ),
        ("ErnieFastModelLoader", "unet_name", "../../secret.safetensors", "secret.safetensors: not found"),
        ("ErnieFastModelLoader", "compute", "fp7", "ErnieFastModelLoader: Value not in list"),
        (
            "ErnieFastTextEncoderLoader",
            "clip_name",
            "nowhere.safetensors",
            "ErnieFastTextEncoderLoader: .*nowhere.safetensors: ",
        ),
        ("VAELoader", "vae_name", "nowhere.safetensors", "VAELoader: Value not in list"),
    ],
)
def test_a_wrong_value_is_refused_before_the_run(
    server: Server, object_info: dict[str, Any], node: str, key: str, value: str, reason: str
):
    prompt = demo.demo_prompt(object_info, "", None)[0]
    set_input(prompt, node, key, value)
    with pytest.raises(demo.RunError, match=reason):
        asyncio.run(demo.run_prompt(server, prompt))


def test_a_wrong_cache_setting_is_refused_before_the_run(server: Server, object_info: dict[str, Any]):
    prompt = demo.demo_prompt(object_info, "", None)[0]
    for settings, reason in (
        ({"preset": "custom", "steps_computation_mask": "1,2"}, "steps_computation_mask holds '2'"),
        ({"preset": "fastest"}, "preset"),
    ):
        with pytest.raises(demo.RunError, match=reason):
            asyncio.run(demo.run_prompt(server, with_cache(prompt, **settings)))


def test_an_error_during_the_run_names_the_node(server: Server, object_info: dict[str, Any]):
    prompt = demo.demo_prompt(object_info, "", None)[0]
    broken = copy.deepcopy(prompt)
    # A latent of another layout than the model's: it passes the check of the links and fails in the sampler.
    latent = next(entry for entry in broken.values() if entry["class_type"] == "EmptyFlux2LatentImage")
    latent["class_type"] = "EmptyHunyuanLatentVideo"
    latent["inputs"] = {"width": 256, "height": 256, "length": 5, "batch_size": 1}
    with pytest.raises(demo.RunError, match="KSampler failed: "):
        asyncio.run(demo.run_prompt(server, broken))
