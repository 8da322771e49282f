"""Run Python as on a system without what only Linux or POSIX has: `fcntl`, `resource`, `os.fork`, processor affinity and `/proc`.

Argument: a JSON list of commands of `posttrain`, each a list of words. Imports every module of the packages first, then
runs the commands. `msvcrt`, which locks files on Windows, is played by the locks of this system.
"""

import importlib
import json
import os
import pkgutil
import sys
import types


def _played_locks():
    import fcntl

    how = {"LK_NBLCK": fcntl.LOCK_EX | fcntl.LOCK_NB, "LK_UNLCK": fcntl.LOCK_UN}

    def locking(descriptor, what, count):
        try:
            fcntl.flock(descriptor, what)
        except BlockingIOError as error:
            raise PermissionError(13, "locked") from error

    return types.SimpleNamespace(locking=locking, **how)


def _closed(event, arguments):
    path = arguments[0] if arguments and event in ("open", "os.listdir", "os.scandir") else ""
    if str(path).startswith("/proc/") or path == "/proc":
        raise FileNotFoundError(2, "no such file", path)


def all_modules():
    for package in ("posttrain", "posttrain_memory", "posttrain_images", "posttrain_import", "posttrain_environments"):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                # vLLM lives in an environment of its own, builds of torch for CUDA bring Triton, and Python programs of examples
                # are not modules.
                if error.name not in ("vllm", "verifiers", "triton"):
                    raise
            yield found.name


if __name__ == "__main__":
    # Other packages ask which platform this is, and some only when they compute.
    for other in ("subprocess", "transformers.models.llama.modeling_llama", "peft"):
        importlib.import_module(other)
    sys.modules["msvcrt"] = _played_locks()
    sys.modules |= dict.fromkeys(("fcntl", "resource"))
    del os.fork, os.sched_getaffinity
    sys.addaudithook(_closed)
    imported = list(all_modules())
    from posttrain.cli.main import main

    codes = []
    for words in json.loads(sys.argv[1]):
        try:
            codes.append(main(words))
        except SystemExit as error:
            codes.append(error.code)
    print(json.dumps({"modules": len(imported), "codes": codes}))
