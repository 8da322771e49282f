"""The result of a model's code: values, output, helpful errors, and internal failures."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain_memory.interpreter.pool import Interpreter, InterpreterFault, InterpreterLimits
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter(InterpreterLimits(timeout=10, calls=5, output_chars=500)) as found:
        yield found


@pytest.fixture
def functions():
    return tools(Vault(MemoryStorage({"user.md": "# Me\n- name: Ada\n"})))


def test_values_are_the_assignments_in_order_and_the_last_expression(interpreter, functions):
    ran = interpreter.run(
        "b = read_file('user.md')\na = file_exists('x.md')\n_hidden = 1\nfor n in (1, 2): pass", functions
    )
    assert list(ran.values.items()) == [("b", "# Me\n- name: Ada\n"), ("a", False), ("n", 2)]
    assert (ran.error, ran.calls, ran.printed) == (None, 2, "")
    ran = interpreter.run("print('hello')\nlist_files()", functions)
    assert (ran.values, ran.printed, ran.error) == ({"_": "user.md"}, "hello\n", None)


def test_values_become_json_and_functions_classes_and_modules_are_not_shown(interpreter, functions):
    code = "import json\nclass A: pass\ndef f(): return 7\nh = lambda: 1\nx = f()\nf"
    assert interpreter.run(code, functions).values == {"x": 7}
    code = "k = 3\ndef f(n): return n * k\nx = [f(n) + k for n in range(3)]"
    assert interpreter.run(code, functions).values["x"] == [3, 6, 9]
    code = "import datetime\nx = {'t': (1, 2.5), 3: {'a'}, 'n': None, 'd': datetime.date(2024, 1, 2), 'f': float('inf'), 'big': 10**100}"
    assert interpreter.run(code, functions).values["x"] == {
        "t": [1, 2.5],
        "3": ["a"],
        "n": None,
        "d": "2024-01-02",
        "f": "inf",
        "big": "a number of 333 bits",
    }


def test_no_state_remains_between_turns(interpreter, functions):
    interpreter.run("import json, math\nx = 1\njson.dumps = None\nread_file = None", functions)
    assert "NameError" in interpreter.run("x", functions).error
    ran = interpreter.run("import json\ny = json.dumps(read_file('user.md'))", functions)
    assert ran.error is None


def test_only_the_functions_of_this_turn_can_be_called(interpreter, functions):
    assert interpreter.run("x = read_file('user.md')\ng = list_files", functions).error is None
    assert interpreter.run("read_file('user.md')", {}).error == "line 1: NameError: name 'read_file' is not defined"
    assert interpreter.run("g = list_files\ng()", {}).error == "line 1: NameError: name 'list_files' is not defined"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = 1\ny = 1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("read_file('no.md')", "line 1: FileNotFoundError: there is no note 'no.md'"),
        ("read_file('a')", "line 1: ValueError: 'a' is not a note: the path of a note ends in .md"),
        ("read_file(1)", "line 1: TypeError: a path is a text"),
        ("read_file(['a'])", "line 1: TypeError: read_file takes texts only"),
        ("read_file(float('nan'))", "line 1: TypeError: read_file takes texts only"),
        ("read_file(1e400)", "line 1: TypeError: read_file takes texts only"),
        ("read_file()", "line 1: TypeError: read_file takes (path)"),
        ("x = ", "line 1: SyntaxError: Expected an expression"),
        ("x = 1\ndel x", "line 2: not supported here: the 'del' statement"),
        ("nosuch()", "line 1: NameError: name 'nosuch' is not defined"),
        ("'x' * 10**12", "MemoryError: the code took too much memory"),
        ("def f(): return f()\nf()", "line 1: RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_errors_name_the_place_and_the_problem(interpreter, functions, code, error):
    ran = interpreter.run(code, functions)
    assert ran.error == error
    # What the interpreter's grammar lacks is refused before anything runs.
    assert ran.values == ({"x": 1} if "/ 0" in code else {})


def test_errors_list_what_exists_and_code_may_catch_them(interpreter, functions):
    assert "read_file" in interpreter.run("open('user.md')", functions).error
    assert "only a few pure modules" in interpreter.run("import numpy", functions).error
    code = "try:\n    read_file('no.md')\nexcept FileNotFoundError as error:\n    x = str(error)"
    assert interpreter.run(code, functions).values["x"] == "there is no note 'no.md'"


def test_calls_and_output_and_code_are_limited(interpreter, functions):
    ran = interpreter.run("for n in range(9): read_file('user.md')", functions)
    assert ran.error == "line 1: RuntimeError: more than 5 calls of tools in one block"
    assert ran.values["n"] == 5
    ran = interpreter.run(
        "while True:\n    try:\n        read_file('user.md')\n    except Exception:\n        pass", functions
    )
    assert ran.error == "RuntimeError: too many calls of tools in one block"
    ran = interpreter.run("print('p' * 900)\nx = 'v' * 900\ny = ['w'] * 900", functions)
    assert ran.printed == "p" * 500 + "… (401 more characters)"
    assert ran.values["x"] == "v" * 497 + "… (403 more characters)"
    assert len(str(ran.values)) < 800
    assert interpreter.run("#" * 20_001, functions).error == "the code is longer than 20000 characters"


def test_output_contains_no_terminal_controls(interpreter, functions):
    ran = interpreter.run("print('a\\x1b[2J\\tb\\x9b c')\nraise ValueError('x\\x1b]0;y')", functions)
    assert ran.printed == "a�[2J\tb� c\n"
    assert ran.error == "line 2: ValueError: x�]0;y"


def test_clock_and_random_numbers_are_fixed(interpreter, functions):
    code = "import datetime, random, time\na = str(datetime.datetime.now())\nb = random.random()\nc = time.time()"
    first = interpreter.run(code, functions)
    assert first.values["a"] == "2026-01-01 09:00:00"
    assert interpreter.run(code, functions) == first


def test_an_internal_error_is_raised_and_the_next_turn_works(interpreter, functions):
    def broken(path):
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="on fire"):
        interpreter.run("try:\n    read_file('x')\nexcept Exception:\n    pass", {"read_file": broken})
    assert interpreter.run("1", functions).values == {"_": 1}


def test_a_killed_worker_is_replaced(functions):
    before = set(children())
    with Interpreter(InterpreterLimits(timeout=10)) as interpreter:

        def kill(path=""):
            (worker,) = set(children()) - before
            os.kill(worker, signal.SIGKILL)

        assert interpreter.run("1", functions).error is None
        kill()
        while interpreter._free.queue[0].alive():
            time.sleep(0.01)
        assert interpreter.run("1", functions).error is None
        ran = interpreter.run("x = 1\nread_file('user.md')\nx = 2", {"read_file": kill})
        assert ran.error == "the code was stopped: it took too much time or memory"
        assert (ran.values, ran.calls) == ({}, 1)
        assert interpreter.run("1", functions).error is None


def test_a_crash_of_the_interpreter_loses_one_turn(functions):
    with Interpreter(InterpreterLimits(timeout=10)) as interpreter:
        assert interpreter.run("1", functions).error is None
        worker = interpreter._free.queue[0]

        def crash(path):
            for thread in os.listdir(f"/proc/{worker._process.pid}/task"):
                with open(f"/proc/{worker._process.pid}/task/{thread}/children") as stream:
                    for pid in stream.read().split():
                        os.kill(int(pid), signal.SIGKILL)

        ran = interpreter.run("x = 1\nread_file('user.md')\nx = 2", {"read_file": crash})
        assert ran.error == "the code was stopped: it took too much time or memory"
        assert interpreter.run("1", functions).values == {"_": 1}
        assert interpreter._free.queue[0] is worker


def test_many_values_are_the_codes_fault(functions):
    limits = InterpreterLimits(timeout=10, memory_bytes=256 << 20)
    with Interpreter(limits) as interpreter:
        # Each of these is small in the interpreter and large in Python.
        ran = interpreter.run("x = [{i: [i]} for i in range(400_000)]", functions)
        assert ran.error or len(str(ran.values)) < 100_000
        assert interpreter.run("1", functions).values == {"_": 1}


def children():
    """The processes that this one started and that still run."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as stream:
        return [int(pid) for pid in stream.read().split()]


def test_many_threads_share_the_workers():
    with Interpreter(InterpreterLimits(timeout=10), workers=2) as interpreter:
        found = {}

        def play(number):
            vault = Vault(MemoryStorage({"user.md": str(number)}))
            for _ in range(5):
                found[number] = interpreter.run("x = int(read_file('user.md'))", tools(vault)).values["x"]

        threads = [threading.Thread(target=play, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: number for number in range(6)}


def test_an_interpreter_that_does_not_start_is_a_run_error(functions, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Interpreter() as interpreter, pytest.raises(InterpreterFault, match=r"posttrain\[memory\]"):
        interpreter.run("1", functions)


def test_closing_ends_the_workers(functions):
    before = set(children())
    interpreter = Interpreter()
    interpreter.run("1", functions)
    assert set(children()) - before
    interpreter.close()
    assert set(children()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        interpreter.run("1", functions)


def test_the_untrusted_half_imports_no_package_code_and_the_trusted_half_no_interpreter():
    code = (
        "import sys; import posttrain_memory.interpreter.worker as worker;"
        "text = open(worker.__file__).read(); assert 'import posttrain' not in text and 'from posttrain' not in text;"
        "import posttrain_memory.interpreter.pool;"
        "print([name for name in ('pydantic_monty', 'torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
