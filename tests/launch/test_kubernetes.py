"""The JobSet for Kubernetes says the same as the program: names, numbers and the coordinator."""

from typing import Any

import pytest
import yaml
from tiny_run import REPOSITORY

from jaxrl_llm.launch.exits import USER_ERROR
from jaxrl_llm.launch.runtime import COORDINATOR, NUM_PROCESSES, PROCESS_ID


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "scripts" / "kubernetes" / "train.yaml").read_text())


def test_processes_find_each_other(jobset: dict[str, Any]) -> None:
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    # Kubernetes names pod I of job J of a JobSet NAME-WORKERS-J-I, in the domain NAME.
    name = jobset["metadata"]["name"]
    host, _, port = environment[COORDINATOR]["value"].partition(":")
    assert host == f"{name}-{workers['name']}-0-0.{name}"
    assert 1024 < int(port) < 65536
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(environment[NUM_PROCESSES]["value"])
    index = environment[PROCESS_ID]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_a_restarted_pod_finds_the_run_again(jobset: dict[str, Any]) -> None:
    (workers,) = jobset["spec"]["replicatedJobs"]
    pod = workers["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (run_dir,) = [
        flag.partition("=")[2]
        for flag in container["command"]
        if flag.startswith("--config.run_dir=")
    ]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert run_dir.startswith(mounted["runs"] + "/")
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
    assert (REPOSITORY / container["command"][2]).is_file()


def test_a_mistake_in_the_flags_is_not_started_again(jobset: dict[str, Any]) -> None:
    """And every other failure is: a rule that matches nothing leaves it to maxRestarts."""
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (of_pods,) = job["podFailurePolicy"]["rules"]
    assert of_pods["action"] == "FailJob"
    codes, (container,) = of_pods["onExitCodes"], pod["containers"]
    assert codes == {"containerName": container["name"], "operator": "In", "values": [USER_ERROR]}
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses another one with a policy of pods
    # The reason that a Job gives when a rule of its pods ended it.
    policy = jobset["spec"]["failurePolicy"]
    (of_jobs,) = policy["rules"]
    assert (of_jobs["action"], of_jobs["onJobFailureReasons"]) == (
        "FailJobSet",
        ["PodFailurePolicy"],
    )
    assert policy["maxRestarts"] > 0
