"""Registration with vLLM, and the places of vLLM that the plugin knows."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

import vllm.plugins
from vllm import ModelRegistry
from vllm.model_executor.layers import quantization
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from dsv4.integrations.vllm import places, plugin, register
from dsv4.integrations.vllm.switches import Switches

ARCHITECTURE = plugin.ARCHITECTURE
PARTS = places.NAMES


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Each test finds vLLM's own models and no plugin loaded."""
    monkeypatch.setattr(registry.ModelRegistry, "models", dict(registry.ModelRegistry.models))
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(vllm.plugins.envs, "VLLM_PLUGINS", ["dsv4"], raising=False)
    for name in ("DSV4_VLLM", "DSV4_VLLM_STRICT", "DSV4_VLLM_CHECK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU, as far as the plugin asks."""
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    capable = classmethod(lambda cls, capability, device_id=0: capability <= 90)
    monkeypatch.setattr(type(current_platform), "has_device_capability", capable)


def registered():
    model = ModelRegistry.models[ARCHITECTURE]
    return f"{model.module_name}:{model.class_name}"


def everything():
    return (
        dict(ModelRegistry.models),
        list(quantization.QUANTIZATION_METHODS),
        dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG),
    )


VLLM_S_OWN = "vllm.models.deepseek_v4:DeepseekV4ForCausalLM"


@pytest.mark.parametrize("part", PARTS)
def test_this_vllm_is_as_every_place_says(part):
    """A new vLLM that changes one of them fails here."""
    assert places.mismatches(places.of_part(part)) == []


def test_what_is_constructed_or_called_by_the_plugin_is_a_place():
    """Also where only an attribute of an instance names it."""
    names = {known.name for part in PARTS for known in places.of_part(part)}
    constructed = {"DeepseekSparseSWAMetadata", "ForwardContext", "CompressorMetadata"}
    called = {"MoERunner._select_forward", "_moe_forward_shared", "FusedMoERouter.select_experts"}
    assert constructed | called <= names


def test_signatures_are_compared_by_the_names_of_parameters():
    module = "vllm.model_executor.layers.linear"
    missing = places.Place(module, "LinearBase.backward", "self, x")
    assert places.mismatches([missing]) == [
        f"{module}.LinearBase.backward is missing (type object 'LinearBase' has no attribute "
        "'backward')"
    ]
    other = places.Place(module, "LinearMethodBase.apply", "self, layer, x")
    (sentence,) = places.mismatches([other])
    assert sentence == (
        f"{module}.LinearMethodBase.apply has the parameters (self, layer, x, bias), expected "
        "(self, layer, x)"
    )
    with pytest.raises(RuntimeError, match=r"DSV4_VLLM=off leaves it untouched: .*LinearMethod"):
        places.require([other])
    places.require([])


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.33.0", True), ("0.33.2+cu130", True), ("0.33", True), ("0.34.0", False), ("0.3", False)],
)
def test_minor_releases_are_supported(version, supported):
    assert places.is_supported(version) == supported


def test_off_means_untouched(monkeypatch, gpu):
    monkeypatch.setenv("DSV4_VLLM", "off")
    before = everything()
    register()
    assert everything() == before


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("all", plugin.PARTS_CLASS),
        ("experts,linear", plugin.PARTS_CLASS),
        ("model", plugin.MODEL_CLASS),
    ],
)
def test_a_class_is_registered_by_name_as_often_as_one_likes(monkeypatch, gpu, value, name):
    monkeypatch.setenv("DSV4_VLLM", value)
    before = everything()
    register()
    register()
    assert registered() == name
    models, methods, configs = everything()
    assert models.keys() == before[0].keys()
    drafts = {} if value == "model" else plugin.DRAFT_CLASSES
    changed = {k: models[k] for k in models if models[k] is not before[0][k]}
    assert changed.keys() == {ARCHITECTURE, *drafts}
    classes = {k: f"{model.module_name}:{model.class_name}" for k, model in changed.items()}
    assert classes == {ARCHITECTURE: name, **drafts}
    assert (methods, configs) == before[1:]


def test_vllm_loads_the_plugin_by_its_entry_point(gpu):
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="dsv4")
    assert point.load() is register
    vllm.plugins.load_general_plugins()
    assert registered() == plugin.PARTS_CLASS


def reason_without_gpu():
    return "its kernels need an NVIDIA GPU, and vLLM runs on cpu"


@pytest.fixture
def warnings(monkeypatch):
    sentences = []
    log = mock.Mock(warning_once=lambda sentence, scope: sentences.append(sentence))
    monkeypatch.setattr(plugin, "logger", lambda: log)
    return sentences


def test_on_a_cpu_parts_leave_vllm_untouched_in_one_sentence(monkeypatch, warnings):
    register()
    assert registered() == VLLM_S_OWN
    assert warnings == [f"dsv4 leaves vLLM's DeepSeek-V4 untouched: {reason_without_gpu()}."]
    monkeypatch.setenv("DSV4_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match=reason_without_gpu()):
        register()
    monkeypatch.setenv("DSV4_VLLM", "model")
    register()
    assert registered() == plugin.MODEL_CLASS


def test_an_older_gpu_is_refused(monkeypatch, gpu, warnings):
    capable = classmethod(lambda cls, capability, device_id=0: capability <= 80)
    monkeypatch.setattr(type(current_platform), "has_device_capability", capable)
    capability = mock.Mock(as_version_str=lambda: "8.0")
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", classmethod(lambda *_, **__: capability)
    )
    register()
    assert registered() == VLLM_S_OWN
    assert "compute capability 9.0 or newer, and this GPU's is 8.0" in warnings[0]


@pytest.mark.parametrize("value", ["all", "model"])
def test_an_unknown_vllm_is_left_untouched(monkeypatch, gpu, warnings, value):
    monkeypatch.setenv("DSV4_VLLM", value)
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: "0.34.1")
    register()
    assert registered() == VLLM_S_OWN
    assert "vLLM 0.34.1 is not among the releases it knows (0.33)" in warnings[0]
    monkeypatch.setenv("DSV4_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match="DSV4_VLLM_STRICT=1 makes this an error"):
        register()


def test_unknown_values_stop_vllm(monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "expert")
    with pytest.raises(ValueError, match="DSV4_VLLM is 'expert', expected all, off, model or"):
        register()


def test_registration_imports_no_model_and_no_kernels():
    program = (
        "import sys\n"
        "from unittest import mock\n"
        "from vllm.platforms import current_platform\n"
        "from dsv4.integrations.vllm import plugin\n"
        "before = set(sys.modules)\n"
        "with mock.patch.object(plugin, '_unsupported_platform', lambda: ''):\n"
        "    plugin.register_models()\n"
        "new = set(sys.modules) - before\n"
        "heavy = ('vllm.models.deepseek_v4', 'dsv4', 'triton', 'cutlass')\n"
        "print(sorted(name for name in new if name.startswith(heavy)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSV4")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_switches_can_be_given():
    plugin.register_models(Switches(parts=frozenset(), model=True))
    assert registered() == plugin.MODEL_CLASS
