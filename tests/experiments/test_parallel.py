"""Jobs side by side: results, failures, and no worker that outlives its parent."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOBS = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path
from minirl.experiments.parallel import run_jobs

@dataclass(frozen=True)
class Job:
    title: str
    size: float = 1.0

    def run(self, advance):
        advance(self.size)
        if self.title == "broken":
            raise ValueError("two\\nlines")
        if self.title == "endless":
            Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)
        return self.title.upper()

if __name__ == "__main__":
    done = {}
    jobs = [Job(title) for title in sys.argv[2:]]
    failed = run_jobs(jobs, 1, quiet=True, finished=lambda job, result: done.update({job.title: result}))
    print(done, failed)
"""


@pytest.fixture
def program(tmp_path):
    """A command line that runs jobs by their titles in one worker, which writes its pid to a file."""
    (tmp_path / "jobs.py").write_text(JOBS, encoding="utf-8")
    return [sys.executable, str(tmp_path / "jobs.py"), str(tmp_path / "pid")]


def test_results_come_back_and_a_failure_is_one_line(program):
    done = subprocess.run([*program, "a", "broken", "b"], capture_output=True, text=True, timeout=120)
    assert "{'a': 'A', 'b': 'B'} {'broken': 'ValueError: two lines'}" in done.stdout


def test_the_bar_says_how_many_are_done_and_how_long_it_takes(program):
    loud = Path(program[1])
    loud.write_text(loud.read_text(encoding="utf-8").replace("quiet=True, ", ""), encoding="utf-8")
    err = subprocess.run([*program, "a", "b"], capture_output=True, text=True, timeout=120).stderr
    assert "runs: starting   0%" in err
    assert re.search(r"runs: 2 of 2 done 100%\|.*\| \d\d:\d\d gone, 00:00 left\s*$", err), err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_parent_takes_its_workers_along(program):
    parent, pid_file = subprocess.Popen([*program, "endless"], stdout=subprocess.DEVNULL), Path(program[2])
    while not (pid_file.exists() and pid_file.read_text()):
        assert parent.poll() is None
        time.sleep(0.1)
    worker = int(pid_file.read_text())
    os.kill(worker, 0)  # it lives
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker lives on")
