"""The layouts of configs/scale: every program is traced for its real mesh of H200s."""

from dataclasses import replace

import pytest
from target import needs_compiler

from jaxrl_llm.configs.scale import (
    dpo_70b_1024,
    grpo_1_5b_1,
    grpo_32b_64,
    ppo_7b_8,
    ppo_72b_1024,
)
from jaxrl_llm.estimate.compiled import compile_work
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import estimate
from jaxrl_llm.estimate.rates import rates_of
from jaxrl_llm.estimate.work import work_of

pytestmark = needs_compiler
CONFIGS = [
    grpo_1_5b_1,
    pytest.param(dpo_70b_1024, marks=pytest.mark.nightly),
    *(pytest.param(module, marks=pytest.mark.slow) for module in (ppo_7b_8, grpo_32b_64)),
    pytest.param(ppo_72b_1024, marks=pytest.mark.slow),
]


@pytest.mark.nightly
def test_programs_for_a_card_have_the_kernels_that_auto_takes_there():
    config = grpo_1_5b_1.get_config()
    config = replace(config, actor=replace(config.actor, attention="auto", scan_layers=True))
    work = work_of(config)
    devices = Devices(mesh=config.mesh, hosts=1, rates=rates_of("h200"))
    programs, stages = compile_work(work, devices, "h200")
    assert "update_actor" in stages
    lowered = programs.lower("update_actor").as_text()
    assert "mosaic_gpu" in lowered
    # Scores of all queries and keys of a row are never in memory.
    row = config.actor.micro_batch_tokens
    assert f"x{row}x{row}x" not in lowered


@pytest.mark.parametrize("module", CONFIGS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_layout_fits_and_its_programs_trace(module):
    config = module.get_config()
    # Like layers are traced once, so that fewer show the same.
    config = replace(config, actor=replace(config.actor, scan_layers=True))
    work, count = work_of(config), config.mesh.num_devices
    devices = Devices(mesh=config.mesh, hosts=max(1, count // 8), rates=rates_of("h200"))
    planned = estimate(work, devices)
    assert planned.fits
    programs, stages = compile_work(work, devices, "h200")
    batch = programs.program.trace(programs.states, programs._batch)
    assert batch is not None and {job.stage for job in work.jobs} == set(stages)
    for role, size in programs.resident().items():
        if role in planned.kept:
            assert planned.kept[role] == pytest.approx(size, rel=0.05), role
