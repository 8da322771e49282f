"""Code that tries to leave the interpreter or the vault, run through both, on memory and on disk. All must fail closed.

After every attack: nothing outside was read or changed, the model saw no path of the host and no traceback, the note
that matters is as it was, and the next turn works.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from posttrain_memory.interpreter.pool import Interpreter, InterpreterLimits, RunResult
from posttrain_memory.vault.limits import VaultLimits
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault

SECRET = "hunter2-outside"
KEY = "sk-of-the-host"
FILES = {"user.md": "# Me\n- name: Ada\n- friend: [[entities/bob.md]]\n", "entities/bob.md": "# Bob\n"}
LIMITS = VaultLimits(file_bytes=4_000, files=20, total_bytes=20_000, journal_entries=200)


@pytest.fixture(scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENROUTER_API_KEY", KEY)
        with Interpreter(InterpreterLimits(timeout=10, memory_bytes=16 << 20)) as found:
            yield found


@pytest.fixture(scope="module")
def fragile():
    """An interpreter whose workers are soon ended, for code that ends them."""
    with Interpreter(InterpreterLimits(timeout=0.3, memory_bytes=16 << 20)) as found:
        yield found


class Place:
    """A vault, on disk with all sorts of traps in it, and the files around it."""

    def __init__(self, kind: str, base: Path) -> None:
        self.base, self.root = base, base / "vault"
        for folder in (self.root, base / "vault_evil", base / "outside"):
            folder.mkdir()
        # The file with a second name is one of its own: many names alone would protect the others.
        named = ("vault_evil/note.md", "outside/secret.md", "outside/named.md", "secret.md")
        for file in (base / name for name in named):
            file.write_text(SECRET)
        if kind == "disk":
            for path, text in FILES.items():
                (self.root / path).parent.mkdir(exist_ok=True)
                (self.root / path).write_text(text)
            (self.root / "link.md").symlink_to(base / "outside" / "secret.md")
            (self.root / "relative.md").symlink_to("../outside/secret.md")
            (self.root / "folder").symlink_to(base / "outside")
            (self.root / "dangling.md").symlink_to(base / "outside" / "made.md")
            os.link(base / "outside" / "named.md", self.root / "hard.md")
            os.mkfifo(self.root / "pipe.md")
            (self.root / ".hidden.md").write_text(SECRET)
            (self.root / "secret.txt").write_text(SECRET)
        self.vault = Vault(DiskStorage(self.root, sync=False) if kind == "disk" else MemoryStorage(FILES), LIMITS)
        self.around = self.outside()

    def outside(self) -> dict[str, tuple]:
        """Everything but the vault's own visible files: path -> content or kind."""
        found = {}
        for path in sorted(self.base.rglob("*")):
            inside = path.is_relative_to(self.root)
            if path.is_symlink():
                found[str(path)] = ("link", os.readlink(path))
            elif path.is_file() and not inside:
                found[str(path)] = ("file", path.read_text())
            elif not inside or path.name in ("pipe.md",):
                found[str(path)] = ("other",)
        return found


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    found = Place(request.param, tmp_path)
    yield found
    found.vault.close()


def attack(interpreter: Interpreter, place: Place, code: str) -> RunResult:
    """Run the code and hold what must hold after any code."""
    ran = interpreter.run(code, tools(place.vault))
    seen = repr(ran)
    paths = str(place.base), "Traceback", "site-packages", "/home", "/root", "/usr", "interpreter_worker.py"
    for leak in (SECRET, KEY, *paths):
        assert leak not in seen, leak
    assert place.outside() == place.around
    assert len(seen) < 60_000
    # A machine that is held up may cut a turn off, which is no escape.
    for _ in range(5):
        after = interpreter.run("x = read_file('entities/bob.md')", tools(place.vault))
        if after.error is None:
            break
    assert after.values == {"x": FILES["entities/bob.md"]}, after
    assert place.vault.size() <= LIMITS.total_bytes
    assert len(place.vault.paths()) <= LIMITS.files
    return ran


def tries(*calls: str) -> str:
    """Code that tries each call: `won` has what they return, `raised` their errors."""
    each = (
        f"try:\n    won.append({call})\nexcept Exception as error:\n    raised.append(str(error))\n" for call in calls
    )
    return "won = []\nraised = []\n" + "".join(each)


# Calls with a path `p` that changes something.
WITH_PATH = [
    "create_file(p, 'x')", "append_file(p, 'x')", "delete_file(p)", "move_file(p, 'entities/stolen.md')",
    "move_file('entities/bob.md', p)",
]  # fmt: skip
OUTSIDE_PATHS = [
    "/etc/passwd", "/etc/passwd.md", "//etc/passwd.md", "../secret.md", "../outside/secret.md",
    "../vault_evil/note.md", "entities/../../secret.md", "entities/../user.md", "./user.md", "entities//bob.md", "..",
    "../", "~/secret.md", "~root/secret.md", "C:\\secret.md", "C:/secret.md", "..\\secret.md",
    "entities\\..\\..\\secret.md", "\\\\server\\share\\secret.md", "file:///etc/passwd.md", ".hidden.md",
    ".posttrain/journal.jsonl", ".posttrain/x.md", "entities/.hidden.md", ".md", "secret.txt", "user.md\0.txt",
    "user.md\n", "a\nb.md", "\u202edm.terces.md", "zero\u200bwidth.md", "\uff0e\uff0e/secret.md",
    "\u2024\u2024/secret.md", "..\uff0fsecret.md", "..\u2215x\u2028.md", "con.md", "NUL.md", "entities/lpt1.md",
    "com\u00b9.md", "stream.md:hidden.md", "what?.md", "a*.md", "trailing./x.md", " leading.md", "trailing /x.md",
    "a|b.md", "[[x]].md", "x#y.md", "a/b/c/d/e/f/g/h.md", "x" * 300 + ".md", "é" * 150 + ".md", "\ufffe.md",
    "%2e%2e/%00.md\x7f", "", "link.md/../../secret.md",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE_PATHS, ids=[ascii(path)[1:30] for path in OUTSIDE_PATHS])
def test_no_tool_accepts_a_path_outside_of_notes(interpreter, place, path):
    """Every tool that takes a path, in one turn: each call must raise."""
    calls = ["read_file(p)", "update_file(p, 'Ada', 'x')", "backlinks(p)", *WITH_PATH]
    code = f"p = {path!a}\n" + tries(*calls, "follow_link('[[' + p + ']]')")
    before = place.vault.files()
    ran = attack(interpreter, place, code)
    assert ran.error is None
    won, raised = ran.values["won"], ran.values["raised"]
    assert len(raised) == len(calls) + (not won)
    assert all(len(error) < 200 for error in raised)
    # A link may be written in ways a path may not; then it leads to a note of the vault or nowhere.
    assert all(found in before.values() for found in won)
    assert place.vault.files() == before


@pytest.mark.parametrize("path", ["link.md", "relative.md", "folder/secret.md", "dangling.md", "hard.md", "pipe.md"])
def test_links_and_odd_files_on_disk_lead_nowhere(interpreter, tmp_path, path):
    place = Place("disk", tmp_path)
    calls = ["read_file(p)", "follow_link(f'[[{p}]]')", f"update_file(p, '{SECRET[:3]}', 'x')", *WITH_PATH]
    code = f"p = '{path}'\n{tries(*calls)}"
    code += "listed = list_files()\nfound = search_files('hunter')\nsize = get_size()"
    ran = attack(interpreter, place, code)
    assert ran.values["won"] == []
    assert ran.values["listed"] == "user.md\nentities/\n  bob.md"
    assert ran.values["found"] == []
    assert ran.values["size"] == sum(map(len, FILES.values()))
    place.vault.close()


ESCAPES = {
    "open": "open('/etc/passwd').read()",
    "open to write": "open('/tmp/pwned', 'w').write('x')",
    "io.open": "import io\nio.open('/etc/passwd').read()",
    "pathlib": "from pathlib import Path\nPath('/etc/passwd').read_text()",
    "pathlib write": "from pathlib import Path\nPath('pwned').write_text('x')",
    "pathlib iterdir": "from pathlib import Path\nlist(Path('/').iterdir())",
    "os.open": "import os\nos.open('/etc/passwd', 0)",
    "os.listdir": "import os\nos.listdir('/')",
    "os.unlink": "import os\nos.unlink('user.md')",
    "os.remove": "import os\nos.remove('user.md')",
    "os.replace": "import os\nos.replace('user.md', '/tmp/x')",
    "os.rename": "import os\nos.rename('user.md', '/tmp/x')",
    "os.symlink": "import os\nos.symlink('/etc', 'x')",
    "os.system": "import os\nos.system('touch /tmp/pwned')",
    "os.fork": "import os\nwhile True: os.fork()",
    "os._exit": "import os\nos._exit(0)",
    "os.kill": "import os\nos.kill(os.getppid(), 9)",
    "os.environ": "import os\nos.environ['OPENROUTER_API_KEY']",
    "os.getenv": "import os\nassert os.getenv('OPENROUTER_API_KEY')",
    "os.execv": "import os\nos.execv('/bin/sh', ['sh'])",
    "shutil": "import shutil\nshutil.rmtree('/tmp/x')",
    "subprocess": "import subprocess\nsubprocess.run(['id'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "urllib": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')",
    "ctypes": "import ctypes\nctypes.CDLL(None)",
    "pickle": "import pickle\npickle.loads(b'cos\\nsystem\\n(S\"id\"\\ntR.')",
    "marshal": "import marshal\nmarshal.loads(b'')",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Process().start()",
    "threading": "import threading\nthreading.Thread().start()",
    "signal": "import signal\nsignal.alarm(0)",
    "importlib": "import importlib\nimportlib.import_module('os')",
    "the worker": "import interpreter_worker",
    "the package": "import posttrain",
    "zipfile": "import zipfile\nzipfile.ZipFile('x.zip').extractall('..')",
    "tempfile": "import tempfile\ntempfile.mkstemp()",
    "gc": "import gc\ngc.get_objects()",
    "inspect": "import inspect\ninspect.stack()",
    "sys.modules": "import sys\nsys.modules['os']",
    "sys._getframe": "import sys\nsys._getframe()",
    "sys.exit": "import sys\nsys.exit(0)",
    "__import__": "__import__('os').system('id')",
    "builtins": "import builtins\nbuiltins.open('/etc/passwd')",
    "__builtins__": "__builtins__['open']('/etc/passwd')",
    "closure": "read_file.__closure__[0].cell_contents",
    "function globals": "read_file.__globals__['__builtins__']",
    "function code": "def f(): pass\nf.__code__",
    "own globals": "def f(): pass\nf.__globals__",
    "subclasses": "().__class__.__mro__[-1].__subclasses__()",
    "bases": "type(1).__bases__[0].__subclasses__()",
    "getattr": "getattr((), '__cla' + 'ss__')",
    "format string": "'{0.__class__.__mro__}'.format(())",
    "traceback": "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame.f_globals",
    "eval": "eval(\"open('/etc/passwd').read()\")",
    "exec": 'exec("import subprocess")',
    "compile": "compile('1', 'x', 'eval')",
    "input": "input()",
    "all descriptors": "held = []\nwhile True: held.append(open('user.md'))",
    "devices": "open('/dev/mem', 'rb').read()",
    "the process": "open('/proc/self/environ').read()",
    "breakpoint": "breakpoint()",
    "help": "help(read_file)",
    "code object": "import types\ntypes.CodeType",
    "exit": "raise SystemExit('0')",
    "interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "a tool that is none": "undo()",
    "a tool with a secret name": "vault.journal.undo()",
    "a tool with odd arguments": "read_file(path='user.md', root='/')",
    "a class instead of text": "class P:\n    def __str__(self): return '/etc/passwd'\nread_file(P())",
    "a text of another class": "class P(str): pass\nread_file(P('../secret.md'))",
    "bytes": "read_file(b'user.md')",
    "content that is no text": "create_file('x.md', {'a': 1})",
    "content with a nul": "create_file('x.md', 'a\\0b')",
    "a link out": "follow_link('[[../secret]]')",
    "an absolute link": "follow_link('[[/etc/passwd]]')",
    "a link with an alias out": "follow_link('[[../../outside/secret.md|user]]')",
    "a folder out": "get_size('..')",
    "an absolute folder": "get_size('/')",
    "existence out": "file_exists('/etc')",
    "existence of a sibling": "file_exists('../vault_evil')",
}
"""Each of these must end in an error."""


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_escapes_the_interpreter(interpreter, place, name):
    before = place.vault.files()
    ran = attack(interpreter, place, f"{ESCAPES[name]}\nwon = True")
    assert ran.error
    assert "\n" not in ran.error
    assert len(ran.error) < 400
    assert "won" not in ran.values
    assert place.vault.files() == before
    assert not Path("/tmp/pwned").exists()


RUNAWAYS = {
    "endless loop": "while True: pass",
    "endless loop that catches": "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
    "endless loop in finally": "try:\n    while True: pass\nfinally:\n    while True: pass",
    "a very long sum": "sum(range(10**12))",
    "recursion": "def f(n): return f(n + 1)\nf(0)",
    "mutual recursion through a key": "def k(x): return sorted([1, 2], key=k)\nk(1)",
    "a gigabyte of text": "x = 'a' * 10**9",
    "doubling text": "x = 'a'\nwhile True: x = x + x",
    "doubling lists": "x = [0]\nwhile True: x = x + x",
    "a huge range": "x = list(range(10**10))",
    "a huge number": "x = 10 ** 10 ** 9",
    "a huge shift": "x = 1 << 10**11",
    "a huge field": "x = f'{1:>1000000000}'",
    "a huge percent field": "x = '%1000000000d' % 1",
    "a huge join": "x = ','.join(['a' * 10**6] * 10**5)",
    "a huge replace": "x = ('a' * 10**6).replace('a', 'b' * 10**6)",
    "deep source": "x = " + "(" * 9_000 + ")" * 9_000,
    "deep lists": "x = " + "[" * 500 + "]" * 500,
    "many operators": "x = " + "-" * 9_000 + "1",
    "a backtracking pattern": "import re\nx = re.match('(a*)*(a*)*b', 'a' * 5_000_000)",
    "endless printing": "while True: print('x' * 10_000)",
    "too many calls": "while True:\n    try:\n        read_file('user.md')\n    except Exception:\n        pass",
    "long arguments": "read_file('x' * 6_000_000)",
    "long content": "create_file('x.md', 'x' * 6_000_000)",
}
"""Each of these must be stopped, and the worker, or another one, must go on."""


@pytest.mark.parametrize("name", RUNAWAYS)
def test_code_cannot_run_without_limit(fragile, place, name):
    before = place.vault.files()
    ran = attack(fragile, place, f"{RUNAWAYS[name]}\nwon = True")
    assert ran.error or name in ("deep lists", "many operators", "a backtracking pattern")
    assert place.vault.files() == before


CRASHES = {
    "a hash that takes for ever": "t = ()\nfor i in range(60): t = (t, t)\nd = {t: 1}",
    "shared lists without end": "a = [1] * 1000\nfor i in range(9): a = [a] * 1000\nprint(len(a))",
    "a value that holds itself": "a = []\na.append(a)\nd = {}\nd['d'] = d",
    "deep values": "a = []\nfor i in range(100_000): a = [a]",
    "shared sets": "s = frozenset([1])\nfor i in range(60): s = frozenset([s, (s, s)])\nx = {s}",
    "many names": "\n".join(f"n{i} = 'x' * 1000" for i in range(900)),
    "values of all sorts": "class A: pass\nx = [A(), A, len, lambda: 1, read_file, type, ..., NotImplemented, 1j if False else 0, b'\\xff', range(9)]",
}
"""Values that take too long to transfer: they may end the worker, but never the training process."""


@pytest.mark.parametrize("name", CRASHES)
def test_values_cannot_harm_the_trusted_side(fragile, tmp_path, name):
    """Handed to a tool, and handed over at the end."""
    place = Place("memory", tmp_path)
    attack(
        fragile,
        place,
        f"{CRASHES[name]}\ntry:\n    read_file([v for v in locals().values()])\nexcept Exception:\n    pass",
    )


FLOODS = {
    "one large note": "create_file('x.md', 'x' * 4001)",
    "growing one note": "create_file('x.md')\nwhile True: append_file('x.md', 'y' * 1000)",
    "many notes": "for i in range(40): create_file(f'n{i}.md')",
    "many full notes": "for i in range(40): create_file(f'n{i}.md', 'x' * 3000)",
    "wide characters": "create_file('x.md', '\U0001f600' * 1500)",
    "growing by update": "create_file('x.md', 'ab')\nwhile True: update_file('x.md', 'ab', 'ab' + 'x' * 500)",
    "growing by moving": "create_file('z.md', '[[bob]]' * 550)\nmove_file('entities/bob.md', 'entities/' + 'b' * 100 + '.md')",
    "case": "create_file('USER.md')",
    "case of a folder": "create_file('ENTITIES/x.md')",
    "another spelling": "create_file('caf\\u00e9.md')\ncreate_file('cafe\\u0301.md')",
    "width": "create_file('\\uff55ser.md')",
    "a note as a folder": "create_file('user.md/x.md')",
    "a folder as a note": "create_file('a.md/b.md')\ncreate_file('a.md')",
    "an existing note": "create_file('user.md', 'gone')",
    "moving onto a note": "move_file('entities/bob.md', 'user.md')",
    "an ambiguous update": "update_file('user.md', '- ', '* ')",
    "taking the first note away": "delete_file('user.md')",
    "moving the first note away": "move_file('user.md', 'entities/user.md')",
    "renaming the first note": "move_file('user.md', 'USER.md')",
    "the first note in other letters": "delete_file('USER.md')",
    "an empty old text": "update_file('user.md', '', 'x')",
}
"""Each of these must be refused."""


@pytest.mark.parametrize("name", FLOODS)
def test_quotas_and_collisions_hold(interpreter, place, name):
    ran = attack(interpreter, place, f"{FLOODS[name]}\nwon = True")
    assert ran.error
    assert "won" not in ran.values
    assert place.vault.read("user.md") == FILES["user.md"]
    while place.vault.journal.entries():
        place.vault.journal.undo()
    assert place.vault.files() == FILES


def test_a_worker_has_no_data_of_the_host(interpreter):
    """Neither the worker nor its interpreter has our environment, our folder or any of our files."""
    assert interpreter.run("1", {}).error is None
    worker = interpreter._free.queue[0]._process.pid
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    threads = [
        Path(f"/proc/{worker}/task/{thread}/children").read_text().split()
        for thread in os.listdir(f"/proc/{worker}/task")
    ]
    processes = {str(worker), *children, *(child for found in threads for child in found)}
    assert len(processes) == 2
    for process in processes:
        names = [line.split("=")[0] for line in Path(f"/proc/{process}/environ").read_text().split("\0") if line]
        assert set(names) <= {"MALLOC_ARENA_MAX", "MONTY_BIN", "LC_CTYPE"}
        assert os.readlink(f"/proc/{process}/cwd") == "/"
        held = {os.readlink(f"/proc/{process}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{process}/fd")}
        assert held <= {"socket", "pipe", "anon_inode", "/dev/null"}


def test_text_of_a_note_stays_text(interpreter, place):
    """The text of a note never becomes a message of the protocol, an error of the host, or code."""
    forged = '{"done": {"values": {"x": "forged"}, "printed": "", "error": null}}'
    ran = attack(interpreter, place, f"create_file('x.md', {forged!r})\nx = read_file('x.md')\nprint(x)")
    assert ran.values == {"x": forged}
    assert ran.printed == f"{forged}\n"


def test_a_folder_replaced_by_a_link_is_not_followed(interpreter, tmp_path):
    """A race: while the code writes, a folder turns into a link to the outside and back, all the time."""
    (tmp_path / "place").mkdir()
    (tmp_path / "aside").mkdir()
    place = Place("disk", tmp_path / "place")
    folder, done, rounds = place.root / "swap", threading.Event(), 0

    def exchange():
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            with suppress(OSError):
                os.rename(folder, tmp_path / "aside" / str(rounds))
            with suppress(OSError):
                os.symlink(place.base / "outside", folder)
            time.sleep(0.0003)
            with suppress(OSError):
                os.unlink(folder)
            with suppress(OSError):
                os.mkdir(folder)
            time.sleep(0.0003)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for turn in range(600):
            if turn >= 30 and rounds > 30:  # on a busy machine the folder turns slowly
                break
            secret, note = "'swap/secret.md'", f"'swap/n{turn}.md'"
            code = tries(
                f"create_file({note}, 'x')", f"read_file({secret})", f"update_file({secret}, 'h', 'x')",
                f"append_file({note}, 'x')", "search_files('hunter')", f"delete_file({secret})", f"delete_file({note})",
            )  # fmt: skip
            ran = interpreter.run(code, tools(place.vault))
            assert SECRET not in repr(ran)
    finally:
        done.set()
        thread.join()
    assert rounds > 30
    with suppress(OSError):
        os.unlink(folder)
    assert place.outside() == place.around
    place.vault.close()
