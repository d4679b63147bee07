"""The collectives of compiled programs: bytes computed by hand, loops, axes and stages."""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documented_metrics import documented
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from tiny_iteration import first_states, open_iteration, packed, run_step, tiny_config
from tiny_run import TinyRun

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig, PhaseMeshConfig
from jaxrl_llm.distributed import communication
from jaxrl_llm.distributed.communication import NO_STAGE, collectives, table
from jaxrl_llm.distributed.device_groups import OTHER, MeshAxes, parse_groups
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.reshard import switch_bytes, to_layout
from jaxrl_llm.observability.profile import DeviceEvent
from jaxrl_llm.program.counting import count_compilations
from jaxrl_llm.supervision.communication_report import CommunicationReport
from jaxrl_llm.supervision.profiling import UNTIMED, StepProfiler, time_collectives
from jaxrl_llm.trainer.loop import train

SIZES = {"fsdp": 4, "tensor": 2}
MESH_AXES = MeshAxes(names=tuple(SIZES), sizes=tuple(SIZES.values()))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(**SIZES)


@pytest.fixture
def compiled_now():
    """Without the cache on disk, which keeps the stage names of the program it was made from."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def rows_of(fn, *arguments, stages=("stage",), counts=None, axes=MESH_AXES):
    """(stage, axis, kind) -> (count, bytes, whether all of it is known)."""
    text = jax.jit(fn).lower(*arguments).compile().as_text()
    found = table(collectives(text, axes, stages))
    totals = {(row.stage, row.axis, row.kind): row.totals(counts or {}) for row in found}
    return {key: (each.count, each.bytes, not each.notes) for key, each in totals.items()}


def on(mesh, shape, *spec, dtype=jnp.float32):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def sharded(fn, mesh, stage="stage"):
    """`fn` of each device's part of fsdp, in the scope of a stage; a second argument is whole."""
    spec = PartitionSpec("fsdp")

    def run(x, *others):
        specs = (spec, *(PartitionSpec() for _ in others))
        with jax.named_scope(stage):
            mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
            return mapped(x, *others)

    return run


GROUPS = [
    ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("mesh['a'=4,'b'=2], device_ids=([0,2,4,6,1,3,5,7]) {'b'}", [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
]


@pytest.mark.parametrize(("text", "groups"), GROUPS)
def test_groups_of_devices(text, groups):
    assert parse_groups(text, 8) == groups


def test_axes_of_groups():
    axes = MeshAxes(names=("data", "fsdp", "fsdp.1", "tensor"), sizes=(2, 2, 2, 2))

    def spanned(*devices):
        return axes.of_groups([list(devices)])

    assert spanned(0, 8) == "data"
    assert spanned(0, 2) == spanned(0, 4) == spanned(0, 2, 4, 6) == "fsdp"
    assert spanned(*range(8)) == "fsdp+tensor"
    assert spanned(*range(16)) == "data+fsdp+tensor"
    assert spanned(5) == ""
    assert spanned(0, 9) == OTHER  # neither all of data nor of tensor
    assert axes.of_groups([[0, 8], [1, 0]]) == OTHER
    assert axes.of_pairs([[0, 1], [1, 0], [2, 2]]) == "tensor"
    assert axes.of_pairs([[0, 8], [8, 2]]) == "data+fsdp"


def test_bytes_of_each_kind(mesh):
    """A part is [2, 16] float32, 128 bytes. Four devices of fsdp have one each."""
    operations = {
        "gathers": lambda x: jnp.sin(lax.all_gather(x, "fsdp", tiled=True))[:2],
        "reduces": lambda x: lax.psum(x, "tensor"),
        "scatters": lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "fsdp", tiled=True),
        "exchanges": lambda x: lax.all_to_all(x, "fsdp", 1, 0, tiled=True).reshape(2, 16),
        "passes": lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
    }

    def work(x):
        for stage, operation in operations.items():
            x = jnp.sin(sharded(operation, mesh, stage)(x))
        return x

    assert rows_of(work, on(mesh, (8, 16), "fsdp"), stages=operations) == {
        ("gathers", "fsdp", "all-gather"): (1, 512 * 3 / 4, True),
        ("reduces", "tensor", "all-reduce"): (1, 128 * 2 * 1 / 2, True),
        ("scatters", "fsdp", "reduce-scatter"): (1, 512 * 3 / 4, True),
        ("exchanges", "fsdp", "all-to-all"): (1, 128 * 3 / 4, True),
        ("passes", "fsdp", "collective-permute"): (1, 128, True),
    }


def test_fsdp_and_tensor_as_the_partitioner_makes_them(mesh):
    """Two matmuls and their gradients: weights over fsdp and tensor, samples over fsdp."""

    def placed(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(up, down, x):
        hidden = jnp.tanh(x @ placed(up, None, "tensor"))
        return jnp.square(placed(hidden @ placed(down, "tensor", None), "fsdp")).sum()

    def update(up, down, x):
        with jax.named_scope("update"):
            of_up, of_down = jax.grad(loss, argnums=(0, 1))(up, down, x)
            return placed(of_up, "fsdp", "tensor"), placed(of_down, "tensor", "fsdp")

    weights = on(mesh, (16, 32), "fsdp", "tensor"), on(mesh, (32, 16), "tensor", "fsdp")
    found = rows_of(update, *weights, on(mesh, (8, 16), "fsdp"), stages=("update",))
    of_weights = 2 * 16 * 32 * 4 / 2  # bytes on a device of tensor
    assert {key: size for key, (_, size, _) in found.items()} == {
        ("update", "fsdp", "all-gather"): of_weights * 3 / 4,
        # A CPU reduces whole gradients, and each device keeps its part.
        ("update", "fsdp", "all-reduce"): of_weights * 2 * 3 / 4,
        # The output of the second matmul, of two samples a device. x has no gradient.
        ("update", "tensor", "all-reduce"): 2 * 16 * 4 * 2 * 1 / 2,
    }


@pytest.mark.parametrize("tensor", [0, 4])
def test_layout_switch_moves_what_is_counted(tensor):
    """Generation in training's tensor size, then in one of its own: bytes of the role's switch."""
    sizes = MeshConfig(**SIZES, generation=PhaseMeshConfig(tensor=tensor))
    mesh = mesh_of(sizes, [2])
    role = open_iteration(replace(tiny_config(), mesh=sizes), mesh).roles["actor"]
    before, after = role.param_shardings, role.generation_shardings
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), role.spec.params, before
    )

    def switch(params):
        with jax.named_scope("gen"):
            return jax.tree.map(jnp.negative, to_layout(params, before, after))

    axes = MeshAxes(names=mesh.axis_names, sizes=mesh.axis_sizes)
    found = rows_of(switch, params, stages=("gen",), axes=axes)
    assert {stage for stage, _, _ in found} == {"gen"}
    if not tensor:
        assert set(found) == {("gen", "fsdp", "all-gather")}
    moved = sum(size for _, size, _ in found.values())
    counted = switch_bytes(params, before, after)
    assert counted <= moved <= (1.1 if tensor else 1.0) * counted


def test_loops_multiply(mesh):
    def total(x):
        return jnp.sin(lax.psum(x, "fsdp"))

    def work(x, number):
        x, _ = lax.scan(lambda x, _: (total(x), None), x, length=5)
        with jax.named_scope(communication.MICRO_BATCHES):
            x = lax.fori_loop(0, number, lambda _, x: total(x), x)

        def fill(state):
            with jax.named_scope(communication.DECODE_STEPS):
                return lax.fori_loop(0, number, lambda _, x: total(x), state[0] + 1), 9

        with jax.named_scope(communication.PREFILLS):
            x, _ = lax.while_loop(lambda state: state[1] < number, fill, (x, 0))
        return lax.fori_loop(0, number, lambda _, x: total(x) + 1, x)

    arguments = on(mesh, (8, 16), "fsdp"), on(mesh, (), dtype=jnp.int32)
    counts = {communication.MICRO_BATCHES: 7.0, communication.DECODE_STEPS: 11.0}
    key, of_one = ("stage", "fsdp", "all-reduce"), 128 * 2 * 3 / 4
    # 5 + 7 + 11, and one of the loop of which nothing is known.
    assert rows_of(sharded(work, mesh), *arguments, counts=counts) == {
        key: (24, 24 * of_one, False)
    }
    assert rows_of(sharded(work, mesh), *arguments)[key][0] == 5 + 3


def test_the_largest_branch_of_a_conditional(mesh):
    def one(x):
        return lax.psum(x, "fsdp")

    def two(x):
        return jnp.sin(lax.psum(jnp.sin(lax.psum(x, "fsdp")), "tensor"))

    def work(x, flag):
        return lax.cond(flag[0], one, two, x)

    arguments = on(mesh, (8, 16), "fsdp"), on(mesh, (1,), dtype=jnp.bool_)
    assert rows_of(sharded(work, mesh), *arguments) == {
        ("stage", "fsdp", "all-reduce"): (1, 128 * 2 * 3 / 4, False),
        ("stage", "tensor", "all-reduce"): (1, 128, False),
    }


def test_groups_that_are_no_axis_are_kept(mesh):
    groups = [[0, 3], [1, 2], [4, 7], [5, 6]]

    def work(x):
        return jnp.sin(lax.all_gather(x, ("fsdp", "tensor"), axis_index_groups=groups))[0]

    assert rows_of(sharded(work, mesh), on(mesh, (8, 16), "fsdp"), stages=()) == {
        (NO_STAGE, OTHER, "all-gather"): (1, 128, True)
    }


# A program for GPUs, with the forms that the CPU has not. Its sizes are the first test's.
GPU = """HloModule jit_iteration, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%asynchronous (p: bf16[8,16]) -> bf16[8,16] {
  ROOT %all-to-all.7 = bf16[8,16]{1,0} all-to-all(%p), channel_id=7, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}

ENTRY %main (x: f32[2,16], y: f32[8,16]) -> f32[8,16] {
  %x = f32[2,16]{1,0} parameter(0)
  %all-gather-start = ((f32[2,16]{1,0}), f32[8,16]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true, metadata={op_name="params[\\'w\\']"}
  %all-gather-done = f32[8,16]{1,0} all-gather-done(%all-gather-start)
  %copy = f32[8,16]{1,0} copy(%all-gather-done)
  %use = f32[8,16]{1,0} negate(%copy), metadata={op_name="(jit(iteration)/gen/while/body/neg:jit(iteration)/gen/x)"}
  %all-reduce-start = f32[8,16]{1,0} all-reduce-start(%use), channel_id=2, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(iteration)/gen_max/psum"}
  %all-reduce-done = f32[8,16]{1,0} all-reduce-done(%all-reduce-start)
  %reduce-scatter-start = ((f32[8,16]{1,0}, f32[8]{0}), (f32[2,16]{1,0}, /*index=1*/f32[2]{0})) reduce-scatter-start(%all-reduce-done, %z), channel_id=3, replica_groups=mesh['data'=1,'fsdp'=4,'tensor'=2] {'fsdp'}, use_global_device_ids=true, dimensions={0}, to_apply=%add, metadata={op_name="jit(iteration)/update/transpose(jvp(f))/dot"}
  %reduce-scatter-done = (f32[2,16]{1,0}, f32[2]{0}) reduce-scatter-done(%reduce-scatter-start)
  %collective-permute-start = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%use), channel_id=4, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}, metadata={op_name="jit(iteration)/update/p"}
  %collective-permute-done = f32[8,16]{1,0} collective-permute-done(%collective-permute-start)
  %async-start = ((bf16[8,16]), bf16[8,16], s32[]) async-start(%w), calls=%asynchronous, metadata={op_name="jit(iteration)/update/a2a"}
  %async-done = bf16[8,16] async-done(%async-start), calls=%asynchronous
  ROOT %all-reduce = f32[8,16]{1,0} all-reduce(%use), channel_id=5, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
}
"""  # noqa: E501


def test_text_of_a_program_for_gpus():
    found = collectives(GPU, MESH_AXES, ("gen", "gen_max", "update"))
    assert [(each.stage, each.axis, each.kind, each.bytes) for each in found] == [
        ("gen", "fsdp", "all-gather", 512 * 3 / 4),
        ("gen_max", "tensor", "all-reduce", 512),
        ("update", "fsdp", "reduce-scatter", (128 + 8) * 3),
        ("update", "fsdp", "collective-permute", 512),
        ("update", "fsdp", "all-to-all", 256 * 3 / 4),
        ("gen", "fsdp+tensor", "all-reduce", 2 * 512 * 7 / 8),
    ]
    assert found[0].shape == "f32[8,16]"


# ------------------------------------------------------------------------- whole programs


@pytest.mark.nightly
def test_stages_and_loops_of_an_iteration(compiled_now, tmp_path):
    """GRPO with two mini-batches of packed rows; the reward is a model's."""
    config = packed(tiny_config(num_layers=2), 40)
    config = replace(
        config,
        mesh=MeshConfig(fsdp=2, tensor=2),
        actor=replace(config.actor, ppo_epochs=1),
        algorithm=c.GRPO(use_kl_loss=True),
    )
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    iteration = open_iteration(config, mesh)
    messages: list[str] = []
    report = CommunicationReport(
        program_of=lambda _: iteration.program,
        profiler=StepProfiler(run_dir=tmp_path, steps=(), message=messages.append),
        folder=tmp_path,
        every=2,
        total_steps=9,
        message=messages.append,
    )
    states = first_states(iteration)
    for step in (1, 2):
        states, _, metrics = run_step(iteration, states, step)
        with count_compilations() as counter:
            found = report.measured(step, None, metrics)
        assert counter.count == 0, counter.names  # the text belongs to the program that ran
    rows = {(r.row.stage, r.row.axis, r.row.kind): r.totals for r in report.rows}
    assert {stage for stage, _, _ in rows} <= {stage.name for stage in iteration.stages}
    assert {axis for _, axis, _ in rows} <= {"fsdp", "tensor", "fsdp+tensor"}
    assert not any(totals.notes for totals in rows.values())
    role = iteration.roles["actor"]
    switched = switch_bytes(role.spec.params, role.param_shardings, role.generation_shardings)
    # Each device of tensor gathers its own shards only. In an update each micro-batch may gather in
    # the forward and in the backward pass.
    for stage in ("gen", "old_log_prob", "ref"):
        assert rows[stage, "fsdp", "all-gather"].bytes == switched
    gathered = rows["update_actor", "fsdp", "all-gather"].bytes / switched
    assert 2 <= gathered <= 2 * 2 * metrics["actor/micro_batches"]
    # Gradients become whole ones: twice the bytes, for each micro-batch of two optimizer steps.
    reduced = rows["update_actor", "fsdp", "all-reduce"].bytes / switched
    assert 2 <= reduced / (2 * metrics["actor/micro_batches"]) <= 3
    # A layer has two, embedding one, sampling two. A prefill ends with the last layer's keys.
    of_loops = 3 * metrics["rollout/prefills"] + 7 * metrics["rollout/decode_steps"]
    assert rows["gen", "tensor", "all-reduce"].count == of_loops
    assert found["communication/gen/fsdp/all-gather_gb"] == switched / 1e9
    assert all(documented().fullmatch(name) for name in (*found, *metrics) if "nonfin" not in name)
    assert [text.partition(":")[0] for text in messages] == [
        "step 1 on fsdp=2 tensor=2",
        "step 2 on fsdp=2 tensor=2",
    ]
    assert "update_actor  tensor  all-reduce" in messages[0]


# ------------------------------------------------------------------------- traces

# Two H100s ran three rounds of four matmuls with gathered weights, a gradient, and a gather in a
# program of its own. The text is shortened to the collectives and what uses them.
TRACE = Path(__file__).parents[1] / "golden" / "h100_x2_trace.json"
OTHER_PROGRAM = """
ENTRY %main {
  %all-gather.3 = bf16[8192,4096]{1,0} all-gather(%x), channel_id=1, replica_groups=[1,2]<=[2]
  %add = bf16[8192,4096]{1,0} add(%all-gather.3, %one), metadata={op_name="jit(other)/gen/add"}
}
"""


def test_times_of_a_trace_of_gpus():
    stored = json.loads(TRACE.read_text())
    names = [each.name for each in fields(DeviceEvent)]
    events = [DeviceEvent(**dict(zip(names, row, strict=True))) for row in stored["events"]]
    axes = MeshAxes(names=("fsdp",), sizes=(2,))
    first = collectives("\n".join(stored["program"]), axes, ("old_log_prob", "update_actor"))
    programs = {"train": first, "gen": collectives(OTHER_PROGRAM, axes, ("gen",))}
    found, missing = time_collectives(events, programs)
    assert missing == 0
    busy = np.zeros(max(int(e.end) for e in events), bool)
    for e in events:
        if not e.name.startswith("nccl"):
            busy[int(e.start) : int(e.end)] = True
    for key, operations in {
        ("train", "old_log_prob", "fsdp", "all-gather"): ("all-gather.7", *GATHERS),
        ("train", "update_actor", "fsdp", "all-gather"): ("all-gather.4.2", "all-gather.5.1"),
        ("train", "update_actor", "fsdp", "reduce-scatter"): SCATTERS,
        ("gen", "gen", "fsdp", "all-gather"): ("all-gather.3",),
    }.items():
        own = [e for e in events if e.operation in operations]
        measured = found.pop(key)
        assert measured.calls == len(own)
        assert measured.seconds == pytest.approx(sum(e.end - e.start for e in own) / 1e9)
        hidden = sum(busy[int(e.start) : int(e.end)].sum() for e in own)
        assert measured.hidden == pytest.approx(hidden / 1e9)
    assert not found


GATHERS = ("all-gather.1.1", "all-gather.2.1", "all-gather.3.1")
SCATTERS = ("reduce-scatter.3", "reduce-scatter.1.1")


@pytest.mark.nightly
def test_a_run_writes_the_table_and_traces(tmp_path):
    """SFT of records on two devices, with the second of two steps traced."""
    run = TinyRun(tmp_path)
    flags = {"algorithm": "sft", "warmup": "null", "data.truncation": "right", "save_every": "0"}
    flags |= {"total_steps": "2", "mesh.fsdp": "2", "profile.steps": "[2]", "log.trace": "false"}
    flags |= {"validation.before_train": "false", "checkpoint.best_metric": ""}
    flags["run_dir"] = str(run.run_dir)
    run_dir = train(c.load_config(str(tmp_path / "tiny.py"), list(flags.items()))).run_dir
    written = json.loads((run_dir / "communication.json").read_text())
    (about,) = written["profiles"]
    assert about == {"step": 2, "trace": "profile/step_2", "note": UNTIMED}
    assert len(list((run_dir / "profile" / "step_2").glob("**/*.xplane.pb"))) == 1
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    totals: dict[str, float] = {}
    for row in written["rows"]:
        name = f"communication/{row['stage']}/{row['axis']}/{row['collective']}_gb"
        totals[name] = totals.get(name, 0.0) + row["bytes"] / 1e9
    assert totals == {k: v for k, v in last.items() if k.startswith("communication/")}
    assert totals["communication/update_actor/fsdp/all-gather_gb"] > 0
    assert last["timing_s/data"] > 0
