"""Runs side by side: independent jobs in processes of one thread each, under one progress bar with time left.

One thread each is what keeps a run's numbers the same whether it has the machine to itself or not.
"""

import multiprocessing
import os
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import torch
from tqdm import tqdm

from minirl.tracking import console_safe

_counter = None  # in a worker: the number shared with the process that draws the bar


def _start_worker(counter):
    global _counter
    _counter = counter
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    """A killed parent takes its workers along; they would train on unseen, into folders that others may use."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _advance(amount):
    with _counter.get_lock():
        _counter.value += amount


def _work(job):
    return job.run(_advance)


def run_jobs(jobs, workers=0, label="runs", unit="", quiet=False, finished=None):
    """Run jobs in worker processes, the first ones first.

    Args:
        jobs: picklable objects with `title`, `size` (their share of the bar, in units) and `run(advance)`, which calls
            advance(units) as it gets on and returns a result.
        workers: processes; 0 for one per core.
        label: of the bar.
        unit: what sizes count, for a speed on the bar; none where they are only shares.
        quiet: no bar.
        finished: called here as finished(job, result) whenever a job has ended well.
    Returns:
        dict: title of each job that failed -> its error in one line. The others go on.
    """
    failed, context = {}, multiprocessing.get_context("spawn")
    if not jobs:
        return failed
    workers, counter = min(workers or os.cpu_count() or 1, len(jobs)), context.Value("d", 0.0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (counter,))
    try:
        layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left" + ", {rate_fmt}" * bool(unit)
        with tqdm(total=sum(job.size for job in jobs), unit=f" {unit}", unit_scale=True, disable=quiet,
                  dynamic_ncols=True, ascii=console_safe("█") != "█", smoothing=0.05, bar_format=layout,
                  desc=f"{label}: starting") as bar:  # fmt: skip
            futures = {pool.submit(_work, job): job for job in jobs}
            running = set(futures)
            while running:
                done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                if counter.value:
                    bar.set_description_str(f"{label}: {len(jobs) - len(running)} of {len(jobs)} done", refresh=False)
                bar.update(round(counter.value) - bar.n)
                for future in done:
                    job = futures[future]
                    if error := future.exception():
                        failed[job.title] = " ".join(f"{type(error).__name__}: {error}".split())
                        tqdm.write(console_safe(f"{job.title} failed: {failed[job.title]}"))
                    elif finished:
                        finished(job, future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt nothing new may start
    return failed
