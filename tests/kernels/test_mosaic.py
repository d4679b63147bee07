"""What a process does once for the lowering of kernels."""

from types import SimpleNamespace

from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir

from jaxrl_llm.kernels.mosaic import cache_ptxas_version, number_no_kernels, plgpu


def test_the_version_of_ptxas_is_asked_for_once(monkeypatch):
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(1) or 88)
    bindings = SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", bindings, raising=False)
    cache_ptxas_version()
    cached = extension._get_ptxas_isa_version
    cache_ptxas_version()  # of no effect
    assert extension._get_ptxas_isa_version is cached
    assert [cached(), cached()] == [88, 88] and len(asked) == 1


def test_without_the_cuda_plugin_there_is_nothing_to_cache(monkeypatch):
    monkeypatch.delattr(fragmented_array, "mgpu_lib", raising=False)
    before = dict(vars(fragmented_array))
    cache_ptxas_version()
    assert vars(fragmented_array) == before


def test_the_first_kernel_caches_it(monkeypatch):
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: 88)
    bindings = SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", bindings, raising=False)
    assert type(plgpu)().Layout is mosaic_gpu.Layout
    assert hasattr(extension._get_ptxas_isa_version, "cache_info")


def test_a_kernel_has_the_same_name_whatever_was_lowered_before(monkeypatch):
    """jax reads the name where there is one, and counts where there is none."""
    context = ir.Context()
    context.allow_unregistered_dialects = True

    def options_of(module):
        attributes = module.operation.attributes
        seen.append(attributes["mosaic_gpu.dump_basename"].value)
        return len(seen)

    seen = []
    monkeypatch.setattr(gpu.dialect, "get_or_set_dump_options", options_of, raising=False)
    number_no_kernels()
    named = gpu.dialect.get_or_set_dump_options
    number_no_kernels()  # of no effect
    assert gpu.dialect.get_or_set_dump_options is named is not options_of
    with context, ir.Location.unknown():
        for number in (1, 2):
            module = ir.Module.create()
            module.operation.attributes["sym_name"] = ir.StringAttr.get("attention")
            assert named(module) == number
    assert seen == ["attention", "attention"]
