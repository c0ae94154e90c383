"""Which machine this is: measurements are of one kind of it, and of one torch."""

from __future__ import annotations

import os
import pathlib
import platform

import torch

from autopar.runtime.launch.launch import rank_threads


def machine_text() -> str:
    """`AMD EPYC (x86_64), 2 cores, 8 GiB, 1 thread a rank, torch 2.13.0`.

    Where there are GPUs: their name and memory instead of the processor's.
    """
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties().total_memory
        text = f"{torch.cuda.get_device_name()}, {memory / 2**30:.0f} GiB"
    else:
        memory = host_memory()
        threads = rank_threads()
        text = f"{_processor()} ({platform.machine()}), {cores()} cores"
        text += f", {memory / 2**30:.0f} GiB, {threads} thread"
        text += f"{'s' if threads > 1 else ''} a rank"
    return f"{text}, torch {torch.__version__}"


def host_memory() -> int:
    """Bytes that this machine's processors have."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy(ranks: int) -> int:
    """How many of so many ranks compute at once: each GPU, or each core, has one."""
    if torch.cuda.is_available():
        return ranks
    return max(1, min(ranks, cores() // rank_threads()))


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "CPU"
