"""Freed memory is kept: counted by the pages that the system has to hand out, not by the clock."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from moco.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(12):  # aligned blocks do not fit into their own holes at first
    torch.ones(24 * 2**20)
before = faults()
for _ in range(5):
    torch.ones(24 * 2**20)  # 96 MB: 24,576 pages
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a matter of the GNU C library")
def test_a_freed_block_is_used_again_without_new_pages():
    found = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert found["leave"] > 1000  # else there would be nothing to gain (large pages: 512 times fewer, 240 in all)
    assert found["keep"] < found["leave"] / 10


def test_other_systems_are_left_alone(monkeypatch):
    from moco.train import memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep_freed_memory()
