"""GRPO of a 32B model on eight hosts of eight GPUs: four train, and four generate.

The groups have names, so that more hosts are a change of one number. The weights are random: give
--config.actor.path=FOLDER for a run.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale import grpo_32b_64


def get_config() -> c.Config:
    return replace(
        grpo_32b_64.get_config(),
        name="grpo_32b_64_apart",
        mesh=c.MeshConfig(data=2, fsdp=16, generation=c.PhaseMeshConfig(tensor=2)),
        node_groups={"train": c.NodeGroup(count=4), "inference": c.NodeGroup(count=4)},
        placement={"rollout": "inference"},
    )
