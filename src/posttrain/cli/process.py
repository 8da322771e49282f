"""One process of a run that `launch` started: it runs the stage and records how it ended."""

import json
import os
import sys
import traceback
from pathlib import Path

from posttrain.distributed import hangs
from posttrain.distributed.launch import write_end
from posttrain.distributed.stopping import second_signal_ends
from posttrain.distributed.world import AlreadyReported, communication_error
from posttrain.errors import PosttrainError, plain_warnings


def main(folder: Path) -> int:
    """Run the job in `folder` and return the exit code. A job that stopped on request counts as done."""
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    job = json.loads((folder / "job.json").read_text())
    sys.path[:] = job["path"]
    hangs.on_hang.append(lambda message: write_end(folder, rank, None, message, 1))
    try:
        if (folder / "stop").exists():
            raise KeyboardInterrupt
        from pydantic import TypeAdapter

        from posttrain.recipe.stages import Recipe
        from posttrain.stages import run_stage

        recipe = TypeAdapter(Recipe).validate_python(job["recipe"])
        run_stage(recipe, resume=job["resume"], overwrite=job["overwrite"])
    except KeyboardInterrupt as stop:
        write_end(folder, rank, stop, "", 130)
        return 0 if type(stop) is not KeyboardInterrupt else 130
    except BaseException as error:
        from posttrain.cli.main import describe

        explained = error if isinstance(error, PosttrainError) else communication_error(error)
        if explained is None and job["debug"]:
            traceback.print_exc()
        message, code = describe(explained or error)
        write_end(folder, rank, explained or error, "" if isinstance(error, AlreadyReported) else message, code)
        return 1
    return 0


if __name__ == "__main__":
    with second_signal_ends(), plain_warnings():
        code = main(Path(sys.argv[1]))
    sys.exit(code)
