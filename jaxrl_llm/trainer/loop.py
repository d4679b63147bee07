"""The loop of a run."""

from collections.abc import Sequence

from jaxrl_llm.config import Config
from jaxrl_llm.supervision.callbacks import Callback
from jaxrl_llm.supervision.run_folder import open_run_folder
from jaxrl_llm.supervision.watchdog import START, EndProcess, open_watch
from jaxrl_llm.trainer.output import Summary
from jaxrl_llm.trainer.run import finished_summary, open_run


def train(
    config: Config,
    *,
    callbacks: Sequence[Callback] = (),
    end_process: EndProcess | None = None,
) -> Summary:
    """Run `config` to its end. If its run_dir has a checkpoint, resume from it.

    `callbacks` are called after each step, and may end the run.
    `end_process` (os._exit) lets the watchdog end this process when a step hangs.
    """
    with open_run_folder(config, end_process) as folder:
        if folder.is_finished(config):
            return finished_summary(folder, config)
        with (
            open_watch(config.watchdog, folder.path, end_process) as watch,
            open_run(config, folder, watch, callbacks, end_process) as run,
        ):
            for training in run.trainings():
                training.watch = watch
                watch.forget()  # another training compiles programs of its own
                if training.is_new:
                    metrics = training.validate()
                    training.report(metrics)
                    if training.save_first:
                        training.save(metrics)
                while training.step < training.total_steps and not training.stopped:
                    timer = training.begin_step()
                    step, iteration = training.step, training.plan.at(training.step)
                    batch, context = training.batches.next(step, training.states, timer)
                    training.states, batch, metrics = iteration.program.run(
                        training.states, batch, step, context, timer, iteration.learning
                    )
                    metrics = training.measure(batch, context, metrics)
                    if training.validation_is_due():
                        metrics |= training.validate()
                    training.report(metrics)
                    if training.save_is_due():
                        training.save(metrics)
                watch.enter(START, learn=False)  # the next training begins
            return run.summary()
