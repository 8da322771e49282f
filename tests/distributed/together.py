"""Whole runs in several real processes, started from a server that has imported everything: many runs in one start."""

import contextlib
import gc
import os
import secrets
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.training import small

Job = dict[str, Any]
"""`values` of a recipe; `resume`; `die`: (rank, what, count) for `small._arm`; `full`: the same, at which the disk is full; `apart`: the first process plays for all, as
with an engine outside, through the modules of the model. Or `call`, a function, its `arguments`, and `hardware`."""


def run(processes: int, jobs: list[Job], folder: Path) -> list[list[int]]:
    """Run the jobs one after the other in as many processes; returns for each job the exit codes by rank.

    A job after which a process is gone ends the list. What is printed is in `folder`/log-RANK.txt.
    """
    ports = [_free_port() for _ in jobs]
    context = small.fork_server()
    codes: Any = context.Queue()
    group = [
        context.Process(target=_work, args=(rank, processes, ports, jobs, folder, codes)) for rank in range(processes)
    ]
    for process in group:
        process.start()
    for process in group:
        process.join()
    found = [[-1] * processes for _ in jobs]
    while not codes.empty():
        job, rank, code = codes.get()
        found[job][rank] = code
    return found


def succeed(processes: int, jobs: list[Job], folder: Path) -> None:
    """Run the jobs, all of which must succeed in every process."""
    codes = run(processes, jobs, folder)
    logs = "".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(processes))
    assert codes == [[0] * processes] * len(jobs), logs


def _work(rank: int, size: int, ports: list[int], jobs: list[Job], folder: Path, codes: Any) -> None:
    from pydantic import TypeAdapter

    from posttrain.distributed.world import AlreadyReported
    from posttrain.recipe.stages import Recipe
    from posttrain.stages import run_stage

    log = open(folder / f"log-{rank}.txt", "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    gc.freeze()  # what the server has imported is no garbage
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "POSTTRAIN_PLOTS": "0",
    }
    from posttrain.engines.local import decoder
    from posttrain.training import rollouts

    of_engine, streamlined = rollouts.sharding_of, decoder.STREAMLINED

    for number, (job, port) in enumerate(zip(jobs, ports, strict=True)):
        if size > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = 0
        rollouts.sharding_of = (lambda _: "rank0") if job.get("apart") and size > 1 else of_engine
        decoder.STREAMLINED = () if job.get("apart") else streamlined  # type: ignore[assignment]
        try:
            if job.get("die") and job["die"][0] == rank:
                small._arm(*job["die"][1:])
            if job.get("full") and job["full"][0] == rank:
                small.fill_disk(*job["full"][1:])
            if "call" in job:
                from posttrain.distributed.world import join_world
                from posttrain.recipe.hardware import HardwareRecipe

                with join_world(HardwareRecipe.model_validate(job.get("hardware", {})), "cpu"):
                    job["call"](*job["arguments"])
            else:
                run_stage(TypeAdapter(Recipe).validate_python(job["values"]), resume=job.get("resume", False))
        except AlreadyReported as error:
            code = 100 + error.exit_code
        except Exception as error:
            traceback.print_exc()
            code = getattr(error, "exit_code", 99)
        sys.stdout.flush()
        codes.put((number, rank, code))
        if code:
            break
    codes.close()
    codes.join_thread()


def _free_port() -> int:
    """A port without a listener, below the system's ephemeral ports, because it is used much later."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = secrets.choice(range(10_000, 32_000))
            probe.bind(("127.0.0.1", port))
            return port
