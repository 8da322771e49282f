"""Code that tries to leave the interpreter or the vault, run through both, on memory and on disk. All must fail closed.

After every attack: nothing outside was read or changed, the model saw no path of the host and no traceback, the note
that matters is as it was, and the next turn works.
"""

import os
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from posttrain.environments.memory.interpreter import Interpreter, InterpreterLimits, Ran
from posttrain.environments.memory.limits import VaultError, VaultLimits
from posttrain.environments.memory.storage import DiskStorage, MemoryStorage
from posttrain.environments.memory.tools import tools
from posttrain.environments.memory.vault import Vault

SECRET = "hunter2-outside"
KEY = "sk-of-the-host"
FILES = {"user.md": "# Me\n- name: Ada\n- friend: [[entities/bob.md]]\n", "entities/bob.md": "# Bob\n"}
LIMITS = VaultLimits(file_bytes=4_000, files=20, total_bytes=20_000, journal_entries=200)


@pytest.fixture(scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENROUTER_API_KEY", KEY)
        with Interpreter(InterpreterLimits(seconds=10, memory_bytes=16 << 20)) as found:
            yield found


@pytest.fixture(scope="module")
def fragile():
    """An interpreter whose workers are soon ended, for code that ends them."""
    with Interpreter(InterpreterLimits(seconds=0.3, memory_bytes=16 << 20)) as found:
        yield found


class Place:
    """A vault, on disk with all sorts of traps in it, and what lies around it."""

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


def attack(interpreter: Interpreter, place: Place, code: str) -> Ran:
    """Run the code and hold what must hold after any code."""
    ran = interpreter.run(code, tools(place.vault))
    seen = repr(ran)
    for leak in (
        SECRET,
        KEY,
        str(place.base),
        "Traceback",
        "site-packages",
        "/home",
        "/root",
        "/usr",
        "interpreter_worker.py",
    ):
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


OUTSIDE_PATHS = [
    "/etc/passwd",
    "/etc/passwd.md",
    "//etc/passwd.md",
    "../secret.md",
    "../outside/secret.md",
    "../vault_evil/note.md",
    "entities/../../secret.md",
    "entities/../user.md",
    "./user.md",
    "entities//bob.md",
    "..",
    "../",
    "~/secret.md",
    "~root/secret.md",
    "C:\\secret.md",
    "C:/secret.md",
    "..\\secret.md",
    "entities\\..\\..\\secret.md",
    "\\\\server\\share\\secret.md",
    "file:///etc/passwd.md",
    ".hidden.md",
    ".posttrain/journal.jsonl",
    ".posttrain/x.md",
    "entities/.hidden.md",
    ".md",
    "secret.txt",
    "user.md\0.txt",
    "user.md\n",
    "a\nb.md",
    "\u202edm.terces.md",
    "zero\u200bwidth.md",
    "\uff0e\uff0e/secret.md",
    "\u2024\u2024/secret.md",
    "..\uff0fsecret.md",
    "..\u2215x\u2028.md",
    "con.md",
    "NUL.md",
    "entities/lpt1.md",
    "com\u00b9.md",
    "stream.md:hidden.md",
    "what?.md",
    "a*.md",
    "trailing./x.md",
    " leading.md",
    "trailing /x.md",
    "a|b.md",
    "[[x]].md",
    "x#y.md",
    "a/b/c/d/e/f/g/h.md",
    "x" * 300 + ".md",
    "é" * 150 + ".md",
    "\ufffe.md",
    "%2e%2e/%00.md\x7f",
    "",
    "link.md/../../secret.md",
]


@pytest.mark.parametrize("path", OUTSIDE_PATHS, ids=[ascii(path)[1:30] for path in OUTSIDE_PATHS])
def test_no_tool_takes_a_path_that_is_no_note(interpreter, place, path):
    """Every tool that takes a path, in one turn: each call must raise."""
    calls = [
        "read_file(p)",
        "create_file(p, 'x')",
        "update_file(p, 'Ada', 'x')",
        "append_file(p, 'x')",
        "delete_file(p)",
        "move_file(p, 'entities/stolen.md')",
        "move_file('entities/bob.md', p)",
        "backlinks(p)",
    ]
    code = f"p = {path!a}\nwon = []\nraised = 0\n"
    for call in calls:
        code += f"try:\n    won.append({call})\nexcept Exception as error:\n    raised += 1\n    assert len(str(error)) < 200\n"
    code += "try:\n    won.append(follow_link('[[' + p + ']]'))\nexcept Exception:\n    pass\n"
    before = place.vault.files()
    ran = attack(interpreter, place, code)
    assert ran.error is None
    assert ran.values["raised"] == len(calls)
    # A link may be written in ways a path may not; then it leads to a note of the vault or nowhere.
    assert all(found in before.values() for found in ran.values["won"])
    assert place.vault.files() == before


@pytest.mark.parametrize("path", ["link.md", "relative.md", "folder/secret.md", "dangling.md", "hard.md", "pipe.md"])
def test_links_and_odd_files_on_disk_lead_nowhere(interpreter, tmp_path, path):
    place = Place("disk", tmp_path)
    code = "won = []\n"
    for call in (
        f"read_file('{path}')",
        f"follow_link('[[{path}]]')",
        f"create_file('{path}', 'x')",
        f"append_file('{path}', 'x')",
        f"update_file('{path}', '{SECRET[:3]}', 'x')",
        f"delete_file('{path}')",
        f"move_file('{path}', 'entities/stolen.md')",
        f"move_file('entities/bob.md', '{path}')",
    ):
        code += f"try:\n    won.append({call})\nexcept Exception:\n    pass\n"
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
def test_nothing_leads_out_of_the_interpreter(interpreter, place, name):
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
def test_nothing_runs_away(fragile, place, name):
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
"""Values that take for ever to hand over: the worker may die of them, never the process that trains."""


@pytest.mark.parametrize("name", CRASHES)
def test_values_cannot_hurt_the_trusted_side(fragile, tmp_path, name):
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


def test_a_worker_holds_nothing_of_the_host(interpreter):
    """Neither the worker nor its interpreter has our environment, our folder or any file of ours."""
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
    """What a note says never becomes a message of the protocol, an error of the host, or code."""
    forged = '{"done": {"values": {"x": "forged"}, "printed": "", "error": null}}'
    ran = attack(interpreter, place, f"create_file('x.md', {forged!r})\nx = read_file('x.md')\nprint(x)")
    assert ran.values == {"x": forged}
    assert ran.printed == f"{forged}\n"


def test_a_folder_that_is_exchanged_for_a_link_meanwhile_leads_nowhere(interpreter, tmp_path):
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
            code = "found = []\n"
            for call in (
                f"create_file('swap/n{turn}.md', 'x')",
                "read_file('swap/secret.md')",
                "update_file('swap/secret.md', 'h', 'x')",
                f"append_file('swap/n{turn}.md', 'x')",
                "search_files('hunter')",
                "delete_file('swap/secret.md')",
                f"delete_file('swap/n{turn}.md')",
            ):
                code += f"try:\n    found.append({call})\nexcept Exception:\n    pass\n"
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


FORGED = {
    "something beside the vault": '[1,"move",[["../evil.sh","echo pwned\\n",null],["user.md","# Me\\n","# X\\n"]]]',
    "the removal of a file outside": '[1,"move",[["../secret.md",null,"hunter2-outside"],["user.md","# Me\\n","# X\\n"]]]',
    "a path out of a folder": '[1,"move",[["entities/../../secret.md",null,"hunter2-outside"],["user.md","# Me\\n","# X\\n"]]]',
    "an absolute path": '[1,"move",[["/tmp/pwned.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a hidden note": '[1,"move",[[".hidden.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "the reserved folder": '[1,"move",[[".posttrain/lock","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a file that is no note": '[1,"move",[["evil.sh","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "an empty part": '[1,"move",[["a//b.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a path that is not in its normal form": '[1,"move",[["cafe\\u0301.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a path with a nul": '[1,"move",[["a\\u0000.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "one note twice": '[1,"move",[["a.md","x",null],["a.md","y",null],["user.md","# Me\\n","# X\\n"]]]',
    "half a character": '[1,"move",[["a.md","\\ud800",null],["user.md","# Me\\n","# X\\n"]]]',
    "what cannot be taken back": '[1,"move",[["b.md","y",null],["user.md/a.md","x",null],["b.md/c.md","x",null]]]',
    "a note in a note": '[1,"move",[["b.md","y",null],["b.md/c.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a note on the way to a note": '[1,"move",[["b.md/c.md","x",null],["b.md","y",null],["user.md","# Me\\n","# X\\n"]]]',
    "a number that is a text": '["x","y",[]]',
    "a number that is a truth value": '[true,"x",[["user.md","# Me\\n","# X\\n"]]]',
    "a number that goes back": '[2,"x",[["a.md",null,"a"]]]\n[1,"x",[["b.md",null,"b"]]]',
    "a path that is a number": '[1,"x",[[5,null,"a"]]]',
    "a text that is a number": '[1,"x",[["a.md",null,5]]]',
    "no changes": '[1,"x",[]]',
    "an object": '{"number": 1}',
    "deep nesting": "[" * 100_000,
    "a long number": "9" * 10_000,
    "nonsense": "\0\0\0",
    "no text": "\udcff\udcfe",
}
"""Journals that come with a folder of notes from somebody else."""


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_forged_journal_changes_nothing_and_stops_nobody(tmp_path, name, read_only):
    root = tmp_path / "notes"
    (root / ".posttrain").mkdir(parents=True)
    (tmp_path / "secret.md").write_text(SECRET)
    (root / "user.md").write_text("# Me\n")
    journal = FORGED[name].encode(errors="surrogateescape") + b"\n"
    (root / ".posttrain" / "journal.jsonl").write_bytes(journal)
    for times in range(2):
        vault = Vault(DiskStorage(root, read_only=read_only, sync=False))
        # One whose notes cannot be looked at stays; one that cannot be taken back is noticed where it would be.
        stays = read_only or name == "what cannot be taken back"
        seen = not stays or not (name == "what cannot be taken back" or name.startswith("a note "))
        if seen and (read_only or not times):
            assert "damaged" in vault.journal.remark
            assert vault.journal.entries() == []
        assert vault.files() == {"user.md": "# Me\n"}
        assert not Path("/tmp/pwned.md").exists()
        outside = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
        assert outside == {"secret.md": SECRET}
        vault.close()
    kept = root / ".posttrain" / ("journal.jsonl" if stays else "journal-damaged-1.jsonl")
    assert kept.read_bytes() == journal
    if not stays:
        with closing(Vault(DiskStorage(root, sync=False))) as vault:
            vault.append("user.md", "- name: Ada")
            vault.journal.undo()
            assert vault.files() == {"user.md": "# Me\n"}


@pytest.mark.parametrize(
    "path",
    ["../x.md", "a/../../x.md", "/tmp/x.md", "", ".", "..", ".x/a.md", ".posttrain/lock", "a//b.md", "a/", "x\0.md"],
)
def test_the_storage_itself_refuses_what_leads_out(tmp_path, path):
    root = tmp_path / "notes"
    (root / "a").mkdir(parents=True)
    (tmp_path / "x.md").write_text(SECRET)
    before = sorted(str(found) for found in tmp_path.rglob("*"))
    storage = DiskStorage(root, sync=False)
    for attempt in (lambda: storage.read(path, 99), lambda: storage.write(path, "x"), lambda: storage.remove(path)):
        with pytest.raises(VaultError, match="no path of a note"):
            attempt()
    storage.close()
    after = {str(found) for found in tmp_path.rglob("*")} - {
        str(root / ".posttrain"),
        str(root / ".posttrain" / "lock"),
    }
    assert sorted(after) == before
    assert (tmp_path / "x.md").read_text() == SECRET


# -- time of the trusted side -------------------------------------------------------------------------------------------


def test_tools_that_take_too_long_end_the_block(tmp_path):
    """Whatever the code catches; what was done stays, and the next block works."""
    place, done = Place("memory", tmp_path), 0

    def slow(path: str) -> bool:
        nonlocal done
        done += 1
        time.sleep(0.1)
        return True

    with Interpreter(InterpreterLimits(tool_seconds=0.25)) as one:
        code = "while True:\n    try:\n        slow('x')\n    except BaseException:\n        pass"
        ran = one.run(code, {"slow": slow})
        assert ran.error == (
            "TimeoutError: the code was stopped: its calls of tools took too much time; make fewer of them in one block"
        )
        assert done == ran.calls <= 3
        assert one.run("x = read_file('user.md')", tools(place.vault)).values == {"x": FILES["user.md"]}


def _words(count: int) -> list[str]:
    return [f"{number:04x}" for number in range(count)]


SLOW = {
    "links to one note": ({f"n{i}.md": "[[user]]" * 8_000 for i in range(60)}, "backlinks('user.md')", 40),
    "links to nowhere": (
        {f"n{i}.md": "".join(f"[[{i}{w}]]" for w in _words(6_000)) for i in range(60)},
        "backlinks('user.md')",
        40,
    ),
    "a move with many links": (
        {f"n{i}.md": "[[user]]" * 7_000 for i in range(60)},
        "move_file(f'n{i}.md', f'm{i}.md')",
        10,
    ),
    "many places of half a note": ({"a.md": "a" * 65_000}, "update_file('a.md', 'a' * 30_000, 'b')", 40),
    "a heading of signs": ({"a.md": "# " + "#" * 65_000 + "x"}, "follow_link('[[a#b]]')", 40),
    "a heading of blanks": ({"a.md": "# " + " #" * 32_000 + "x"}, "follow_link('[[a#b]]')", 40),
    "lines without end": ({f"n{i}.md": "a\n" * 32_000 for i in range(60)}, "search_files('a')", 20),
    "a near miss everywhere": ({f"n{i}.md": "a" * 64_000 for i in range(60)}, "search_files('a' * 199 + 'b')", 20),
    "a note far too large": ({}, "create_file('x.md', 'a' * 500_000)", 40),
}
"""Notes, a call, and how often: legal vaults that once kept the trusted side busy for minutes."""


@pytest.mark.parametrize("name", SLOW)
def test_no_legal_vault_makes_the_tools_slow(name):
    files, call, times = SLOW[name]
    vault = Vault(MemoryStorage({"user.md": "# Me\n", **files}))
    with Interpreter(InterpreterLimits()) as one:
        one.run("1", {})
        begun = time.process_time()
        code = f"raised = 0\nfor i in range({times}):\n    try:\n        {call}\n    except Exception as error:\n        raised += 1\ndone = True"
        ran = one.run(code, tools(vault))
        # A second or two at most; processor time, for others may hold up the machine.
        assert time.process_time() - begun < 15
    assert ran.error is None
    assert ran.values["done"]
    assert ran.calls == times
